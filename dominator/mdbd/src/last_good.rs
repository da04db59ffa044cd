//! The state directory: what each source gave last and was in order, so that a source that fails
//! when mdbd starts does not take its machines out of the fleet.
//!
//! `sources/NAME` is one line of JSON, which says where the data came from and when, and then the
//! data as they came. Data from another origin than the source has today are not used.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};

use model::object::ObjectId;
use model::tree::Time;
use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};

use super::core::settings::Origin;
use super::disk;

/// The directory of the sources in the state directory.
const SOURCES: &str = "sources";

/// The file that one mdbd locks.
const LOCK: &str = "lock";

/// The mode of new files: inventories may hold what is not for everybody.
const MODE: u32 = 0o600;

/// A state directory that cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StateError {
    #[error("cannot use {}", path.display())]
    Directory { path: PathBuf, source: io::Error },
    #[error(
        "{} is in use: another mdbd runs with this state directory; stop it first, or give this \
         one another --state",
        path.display()
    )]
    InUse { path: PathBuf },
}

#[derive(Debug)]
pub struct LastGood {
    directory: PathBuf,
    _lock: Flock<std::fs::File>,
}

/// The first line of a file.
#[derive(Serialize, Deserialize)]
struct Head {
    origin: ObjectId,
    changed: Time,
}

impl LastGood {
    /// Opens the state directory, or makes it, and locks it.
    ///
    /// # Errors
    ///
    /// [`StateError`].
    pub fn open(state: &Path) -> Result<Self, StateError> {
        let failed = |source| StateError::Directory { path: state.to_owned(), source };
        let directory = state.join(SOURCES);
        fs_err::create_dir_all(&directory).map_err(failed)?;
        let file = fs_err::File::create(state.join(LOCK)).map_err(failed)?;
        let lock = Flock::lock(file.into_parts().0, FlockArg::LockExclusiveNonblock)
            .map_err(|_| StateError::InUse { path: state.to_owned() })?;
        Ok(Self { directory, _lock: lock })
    }

    /// Removes what sources of other names have left: were such a source added again, its data of
    /// old times would be in force until it gives new ones.
    ///
    /// # Errors
    ///
    /// What the kernel says.
    pub fn forget_all_but(&self, names: &BTreeSet<&str>) -> io::Result<()> {
        for entry in fs_err::read_dir(&self.directory)? {
            let entry = entry?;
            if !entry.file_name().to_str().is_some_and(|name| names.contains(name)) {
                fs_err::remove_file(entry.path())?;
            }
        }
        Ok(())
    }

    /// What the source called `name` gave last, and when it began to give that; `None` if nothing
    /// is kept, or it came from elsewhere.
    ///
    /// # Errors
    ///
    /// What the kernel says.
    pub fn load(&self, name: &str, origin: &Origin) -> io::Result<Option<(Vec<u8>, Time)>> {
        let Some(mut bytes) = disk::read(&self.directory.join(name))? else { return Ok(None) };
        let Some(end) = bytes.iter().position(|&byte| byte == b'\n') else { return Ok(None) };
        let head = serde_json::from_slice::<Head>(&bytes[..end]).ok();
        let Some(head) = head.filter(|head| head.origin == origin.identity()) else {
            return Ok(None);
        };
        bytes.drain(..=end);
        Ok(Some((bytes, head.changed)))
    }

    /// Keeps what the source called `name` gives since `changed`; it is on the disk when this
    /// returns.
    ///
    /// # Errors
    ///
    /// What the kernel says.
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
        disk::replace(&self.directory.join(name), &all, MODE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_belongs_to_a_name_and_an_origin() {
        let directory = tempfile::tempdir().unwrap();
        let state = directory.path().join("state");
        let kept = LastGood::open(&state).unwrap();
        let (here, there) = (Origin::File("/here".into()), Origin::File("/there".into()));
        let changed = Time { seconds: 7, nanoseconds: 8 };
        assert_eq!(kept.load("a", &here).unwrap(), None);
        kept.store("a", &here, changed, b"one\ntwo").unwrap();
        kept.store("b", &here, changed, b"").unwrap();
        assert_eq!(kept.load("a", &here).unwrap(), Some((b"one\ntwo".to_vec(), changed)));
        assert_eq!(kept.load("b", &here).unwrap(), Some((Vec::new(), changed)));
        assert_eq!(kept.load("a", &there).unwrap(), None);
        assert!(matches!(LastGood::open(&state).unwrap_err(), StateError::InUse { .. }));

        kept.forget_all_but(&BTreeSet::from(["b", "c"])).unwrap();
        assert_eq!(kept.load("a", &here).unwrap(), None);
        assert!(kept.load("b", &here).unwrap().is_some());
        std::fs::write(state.join("sources/b"), "damaged\n[]").unwrap();
        assert_eq!(kept.load("b", &here).unwrap(), None);
        drop(kept);
        LastGood::open(&state).unwrap();
    }
}
