"""Does to files what Rust without unsafe code cannot: changes them through mmap, and asks where
they are on their medium. Takes a command a line, with a path that ends the line, and answers each
with a line."""
import fcntl, mmap, os, struct, sys

FIEMAP, SYNC = 0xC020660B, 1
held = {}

def open_map(path):
    with open(path, "r+b") as file:
        held[path] = mmap.mmap(file.fileno(), 0)

def poke(path):
    held[path][0] ^= 0x55

def release(path):
    held.pop(path).close()

def physical(path):
    with open(path, "rb") as file:
        request = struct.pack("=QQIIII", 0, 2**64 - 1, SYNC, 0, 1, 0) + bytes(56)
        answer = fcntl.ioctl(file.fileno(), FIEMAP, request)
    count = struct.unpack_from("=I", answer, 20)[0]
    logical, start, length, _, _, flags = struct.unpack_from("=QQQQQI", answer, 32)
    # Nothing but plain data at the start of the file: no hole, nothing that is not written yet.
    return start if count == 1 and logical == 0 and flags & 0xF0E == 0 else 0

def cached(path):
    # Reads it, so that it is in the page cache.
    with open(path, "rb") as file:
        while file.read(1 << 20):
            pass

def uncached(path):
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

for line in sys.stdin:
    verb, path = line.rstrip("\n").split(" ", 1)
    print(globals()[verb](path) or 0, flush=True)
