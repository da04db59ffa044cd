//! Finds the files that any process can still write to, although their names were removed.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Returns the inodes that a process has open for writing, or mapped shared and writable.
/// File-systems are not distinguished: a file too many is copied instead of moved, a file too few
/// would be unsafe.
///
/// # Errors
///
/// What the kernel said of `/proc` itself. Processes that end in the meantime are no error.
pub fn inodes() -> io::Result<BTreeSet<u64>> {
    let mut found = BTreeSet::new();
    for entry in fs::read_dir("/proc")? {
        let entry = entry?;
        let is_process = entry.file_name().to_string_lossy().bytes().all(|b| b.is_ascii_digit());
        // A process that has ended writes no more.
        if is_process {
            let _ended = descriptors(&entry.path(), &mut found);
            let _ended = mappings(&entry.path(), &mut found);
        }
    }
    Ok(found)
}

fn descriptors(process: &Path, found: &mut BTreeSet<u64>) -> io::Result<()> {
    for entry in fs::read_dir(process.join("fdinfo"))? {
        let entry = entry?;
        let Ok(info) = fs::read_to_string(entry.path()) else { continue };
        if !writes(&info) {
            continue;
        }
        if let Ok(metadata) = fs::metadata(process.join("fd").join(entry.file_name())) {
            found.insert(metadata.ino());
        }
    }
    Ok(())
}

/// True if a descriptor with this `fdinfo` can be written to.
fn writes(info: &str) -> bool {
    let flags = info.lines().find_map(|line| line.strip_prefix("flags:"));
    let flags = flags.and_then(|flags| u64::from_str_radix(flags.trim(), 8).ok());
    // O_RDONLY is 0 in the two lowest bits; what cannot be read counts as a writer.
    flags.is_none_or(|flags| flags & 0o3 != 0)
}

fn mappings(process: &Path, found: &mut BTreeSet<u64>) -> io::Result<()> {
    let maps = fs::read(process.join("maps"))?;
    for line in maps.split(|byte| *byte == b'\n') {
        found.extend(shared(&String::from_utf8_lossy(line)));
    }
    Ok(())
}

/// Returns the inode of a line of `maps`, if it is mapped shared and writable.
fn shared(line: &str) -> Option<u64> {
    let mut columns = line.split_whitespace().skip(1);
    let permissions = columns.next()?;
    let inode: u64 = columns.nth(2)?.parse().ok()?;
    (permissions.contains('w') && permissions.ends_with('s') && inode > 0).then_some(inode)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tells_readers_from_writers() {
        assert!(!writes("pos:\t0\nflags:\t0100000\nmnt_id:\t9\n"));
        assert!(writes("pos:\t0\nflags:\t0100001\nmnt_id:\t9\n"));
        assert!(writes("pos:\t0\nflags:\t0100002\n"));
        assert!(writes("pos:\t0\n"));
        let line = |permissions| format!("7f-80 {permissions} 00000000 08:01 4711   /var/lib/db");
        assert_eq!(shared(&line("rw-s")), Some(4_711));
        assert_eq!(shared(&line("rw-p")), None);
        assert_eq!(shared(&line("r--s")), None);
        assert_eq!(shared("7f-80 rw-s 00000000 00:00 0"), None);
        assert_eq!(shared(""), None);
    }

    #[test]
    fn sees_what_this_process_writes() {
        let place = tempfile::tempdir().unwrap();
        // A process that another test is starting holds what is open here until it runs, and files
        // of other file-systems may have the same inode: one of many is enough.
        let is_told_when_closed = (0..100).any(|number| {
            let path = place.path().join(number.to_string());
            let writer = fs::File::create(&path).unwrap();
            let inode = writer.metadata().unwrap().ino();
            assert!(inodes().unwrap().contains(&inode));
            drop(writer);
            let _reader = fs::File::open(&path).unwrap();
            !inodes().unwrap().contains(&inode)
        });
        assert!(is_told_when_closed);
    }
}
