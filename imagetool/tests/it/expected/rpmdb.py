# Makes the SQLite database of an rpm with so many packages: rpmdb.py FILE COUNT PAGE_BYTES
import sqlite3, struct, sys

def header(name, version, release, size, epoch=None, arch="x86_64", filler=0):
    values, tags = b"", []
    def tag(number, kind, value, count=1):
        nonlocal values
        if kind == 4:
            values += b"\0" * (-len(values) % 4)
        tags.append(struct.pack(">IIiI", number, kind, len(values), count))
        values += value
    tag(63, 7, b"\0" * 16, 16)
    tag(1000, 6, name.encode() + b"\0")
    tag(1001, 6, version.encode() + b"\0")
    tag(1002, 6, release.encode() + b"\0")
    if epoch is not None:
        tag(1003, 4, struct.pack(">I", epoch))
    tag(1005, 9, b"x" * filler + b"\0")
    tag(1009, 4, struct.pack(">I", size))
    tag(1022, 6, arch.encode() + b"\0")
    return struct.pack(">II", len(tags), len(values)) + b"".join(tags) + values

path, count, page_bytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
base = sqlite3.connect(path, isolation_level=None)
base.execute("PRAGMA page_size = %d" % page_bytes)
base.execute("PRAGMA journal_mode = WAL")
base.execute("CREATE TABLE 'Name' (key TEXT NOT NULL, hnum INTEGER NOT NULL)")
base.execute("CREATE TABLE IF NOT EXISTS 'Packages' (hnum INTEGER PRIMARY KEY AUTOINCREMENT, blob BLOB NOT NULL)")
base.execute("CREATE INDEX Name_key_idx ON Name(key)")
base.execute("BEGIN")
add = "INSERT INTO Packages (blob) VALUES (?)"
for number in range(count):
    # Some are in one cell, some in pages of their own, one is large.
    filler = 2_000_000 if number == 3 else (number % 7) * 1500
    epoch = 2 if number % 10 == 0 else None
    name = "package-%d" % number
    base.execute(add, (header(name, "1.%d" % number, "3.fc40", 1000 + number, epoch, filler=filler),))
    base.execute("INSERT INTO Name VALUES (?, ?)", (name, number))
base.execute(add, (header("gpg-pubkey", "a15b79cc", "63d04c2c", 0),))
base.execute(add, (header("noarch", "1", "1", 5, arch="noarch"),))
base.execute(add, (header("glibc", "2.39", "6.fc40", 7, arch="i686"),))
base.execute("DELETE FROM Packages WHERE hnum = 3")
base.execute("COMMIT")
base.execute("PRAGMA wal_checkpoint(TRUNCATE)")
base.close()
