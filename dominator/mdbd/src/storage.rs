//! Files that mdbd reads and replaces, and its state directory.
//!
//! The state directory has the last valid data of each source, so that a source that fails when
//! mdbd starts does not remove its machines from the fleet. `sources/NAME` is one line of JSON with
//! the origin and time of the data, followed by the data as delivered. Data from another origin
//! than the source has now are not used.

use std::collections::BTreeSet;
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};

use model::object::ObjectId;
use model::tree::Time;
use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};

use super::core::settings::Origin;

/// Largest file, document or output of a program, in bytes.
pub const DATA_BYTES_MAX: usize = 256 << 20;

/// Reads a file of at most [`DATA_BYTES_MAX`] bytes; `None` if it does not exist.
///
/// # Errors
///
/// An I/O error with the path.
pub fn read(path: &Path) -> io::Result<Option<Vec<u8>>> {
    let file = match fs_err::File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    // Reading a pipe could block forever.
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

/// Replaces a file atomically, also across a power cut. The new file gets the mode of the old one,
/// or `mode`.
///
/// # Errors
///
/// An I/O error with the path. The old file is then unchanged, unless syncing the directory failed.
pub fn replace(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    let name = path.file_name().ok_or_else(|| {
        let text = format!("{} is not a file name", path.display());
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
        // The disk may be full.
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
    // `create_new` does not follow a link.
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

const SOURCES: &str = "sources";

const LOCK: &str = "lock";

/// Mode of new files: inventories may be confidential.
const MODE: u32 = 0o600;

/// An unusable state directory.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StateError {
    #[error("cannot use {}", path.display())]
    Directory { path: PathBuf, source: io::Error },
    #[error(
        "{} is in use: another mdbd runs with this state directory; stop it first, or give \
         another --state",
        path.display()
    )]
    InUse { path: PathBuf },
}

/// The last valid data of each source, in the state directory.
#[derive(Debug)]
pub struct LastGood {
    directory: PathBuf,
    _lock: Flock<std::fs::File>,
}

/// The first line of a data file.
#[derive(Serialize, Deserialize)]
struct Head {
    origin: ObjectId,
    changed: Time,
}

impl LastGood {
    /// Opens the state directory, creates it if necessary, and locks it.
    ///
    /// # Errors
    ///
    /// [`StateError`] names the directory.
    pub fn open(state: &Path) -> Result<Self, StateError> {
        let failed = |source| StateError::Directory { path: state.to_owned(), source };
        let directory = state.join(SOURCES);
        fs_err::create_dir_all(&directory).map_err(failed)?;
        let file = fs_err::File::create(state.join(LOCK)).map_err(failed)?;
        let lock = Flock::lock(file.into_parts().0, FlockArg::LockExclusiveNonblock)
            .map_err(|_| StateError::InUse { path: state.to_owned() })?;
        Ok(Self { directory, _lock: lock })
    }

    /// Removes the data of sources with other names: if such a source was added again, its old data
    /// would be in force until it delivers new data.
    ///
    /// # Errors
    ///
    /// An I/O error.
    pub fn retain(&self, names: &BTreeSet<&str>) -> io::Result<()> {
        for entry in fs_err::read_dir(&self.directory)? {
            let entry = entry?;
            if !entry.file_name().to_str().is_some_and(|name| names.contains(name)) {
                fs_err::remove_file(entry.path())?;
            }
        }
        Ok(())
    }

    /// Reads the data of the source `name` and the time when they were delivered first; `None` if
    /// nothing from `origin` is stored.
    ///
    /// # Errors
    ///
    /// An I/O error.
    pub fn load(&self, name: &str, origin: &Origin) -> io::Result<Option<(Vec<u8>, Time)>> {
        let Some(mut bytes) = read(&self.directory.join(name))? else { return Ok(None) };
        let Some(end) = bytes.iter().position(|&byte| byte == b'\n') else { return Ok(None) };
        let head = serde_json::from_slice::<Head>(&bytes[..end]).ok();
        let Some(head) = head.filter(|head| head.origin == origin.identity()) else {
            return Ok(None);
        };
        bytes.drain(..=end);
        Ok(Some((bytes, head.changed)))
    }

    /// Saves the data that the source `name` delivers since `changed`, and syncs them.
    ///
    /// # Errors
    ///
    /// An I/O error.
    pub fn store(
        &self,
        name: &str,
        origin: &Origin,
        changed: Time,
        bytes: &[u8],
    ) -> io::Result<()> {
        let head = Head { origin: origin.identity(), changed };
        let mut all = serde_json::to_vec(&head).map_err(io::Error::other)?;
        all.push(b'\n');
        all.extend_from_slice(bytes);
        replace(&self.directory.join(name), &all, MODE)
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

    #[test]
    fn what_is_kept_belongs_to_a_name_and_an_origin() {
        let directory = tempfile::tempdir().unwrap();
        let state = directory.path().join("state");
        let last_good = LastGood::open(&state).unwrap();
        let (here, there) = (Origin::File("/here".into()), Origin::File("/there".into()));
        let changed = Time { seconds: 7, nanoseconds: 8 };
        assert_eq!(last_good.load("a", &here).unwrap(), None);
        last_good.store("a", &here, changed, b"one\ntwo").unwrap();
        last_good.store("b", &here, changed, b"").unwrap();
        assert_eq!(last_good.load("a", &here).unwrap(), Some((b"one\ntwo".to_vec(), changed)));
        assert_eq!(last_good.load("b", &here).unwrap(), Some((Vec::new(), changed)));
        assert_eq!(last_good.load("a", &there).unwrap(), None);
        assert!(matches!(LastGood::open(&state).unwrap_err(), StateError::InUse { .. }));

        last_good.retain(&BTreeSet::from(["b", "c"])).unwrap();
        assert_eq!(last_good.load("a", &here).unwrap(), None);
        assert!(last_good.load("b", &here).unwrap().is_some());
        std::fs::write(state.join("sources/b"), "damaged\n[]").unwrap();
        assert_eq!(last_good.load("b", &here).unwrap(), None);
        drop(last_good);
        LastGood::open(&state).unwrap();
    }
}
