//! Reads and replaces whole files.

use std::io::{self, Read as _, Write as _};
use std::path::Path;

/// The largest file, document or output, in bytes.
pub const DATA_BYTES_MAX: usize = 256 << 20;

/// Reads a file of at most [`DATA_BYTES_MAX`] bytes; `None` if there is none.
///
/// # Errors
///
/// What the kernel says, with the path.
pub fn read(path: &Path) -> io::Result<Option<Vec<u8>>> {
    let file = match fs_err::File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    // Reading a pipe would wait for ever.
    if !file.metadata()?.is_file() {
        let text = format!("{} is no regular file", path.display());
        return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    }
    let mut bytes = Vec::new();
    let limit = u64::try_from(DATA_BYTES_MAX).unwrap_or(u64::MAX);
    file.take(limit + 1).read_to_end(&mut bytes)?;
    if bytes.len() > DATA_BYTES_MAX {
        let text = format!("{} has more than {DATA_BYTES_MAX} bytes", path.display());
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, text));
    }
    Ok(Some(bytes))
}

/// Puts a file that holds `bytes` into the place of whatever is there: a reader sees the old file
/// or the new one, after a power cut too. The new one has the mode of the old one, or `mode`.
///
/// # Errors
///
/// What the kernel says, with the path; the old file is as it was then, unless it was the
/// directory that could not be synced.
pub fn replace(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    let name = path.file_name().ok_or_else(|| {
        let text = format!("{} is no name of a file", path.display());
        io::Error::new(io::ErrorKind::InvalidInput, text)
    })?;
    let directory = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let new = directory.join(format!(".{}.new", name.display()));
    remove(&new)?;
    let placed = write(&new, path, bytes, mode).and_then(|()| fs_err::rename(&new, path));
    if let Err(error) = placed {
        // It may be the last space there is.
        if let Err(error) = remove(&new) {
            tracing::warn!("{error}");
        }
        return Err(error);
    }
    fs_err::File::open(directory)?.sync_all()
}

fn write(new: &Path, old: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    use fs_err::os::unix::fs::OpenOptionsExt as _;
    use std::os::unix::fs::PermissionsExt as _;
    // Never through a link that somebody left there.
    let mut file = fs_err::OpenOptions::new().write(true).create_new(true).mode(mode).open(new)?;
    match fs_err::metadata(old) {
        Ok(metadata) => {
            let mode = metadata.permissions().mode() & 0o777;
            file.set_permissions(std::fs::Permissions::from_mode(mode))?;
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    file.write_all(bytes)?;
    file.sync_all()
}

fn remove(path: &Path) -> io::Result<()> {
    match fs_err::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};

    use super::*;

    #[test]
    fn a_file_is_replaced_as_a_whole_and_keeps_its_mode() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("mdb");
        assert_eq!(read(&path).unwrap(), None);
        replace(&path, b"one", 0o640).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o640);
        let inode = std::fs::metadata(&path).unwrap().ino();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o604)).unwrap();
        // What a run that was killed has left, and a trap.
        std::os::unix::fs::symlink("/etc/passwd", directory.path().join(".mdb.new")).unwrap();
        replace(&path, b"two", 0o640).unwrap();
        assert_eq!(read(&path).unwrap().unwrap(), b"two");
        let metadata = std::fs::metadata(&path).unwrap();
        assert_eq!(metadata.permissions().mode() & 0o777, 0o604);
        assert_ne!(metadata.ino(), inode);
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    #[test]
    fn what_fails_leaves_nothing_behind() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("mdb");
        std::fs::create_dir(&path).unwrap();
        assert!(replace(&path, b"one", 0o644).is_err());
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
        let error = read(&path).unwrap_err().to_string();
        assert!(error.contains("mdb is no regular file"), "{error}");
        assert!(replace(Path::new("/"), b"one", 0o644).is_err());
    }
}
