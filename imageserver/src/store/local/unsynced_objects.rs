//! Records, for the start after a crash, that objects may not be on the medium.
//!
//! After a power failure a file-system may have kept the name and length of a file and lost its
//! content. A server that ends after a failed write-back forgets the failure. Therefore an empty
//! file, [`layout::UNSYNCED`], is created before the first object is put in place and removed after
//! all were synced. It need not be synced itself: a file-system with a journal keeps the order of
//! names, so the file is there whenever such an object is. A server that finds it at start verifies
//! each object before it uses it.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use fs_err::os::unix::fs::OpenOptionsExt as _;
use model::lock::locked;

use crate::store::{
    error::{StoreError, failed},
    layout,
};

/// Whether objects may not be on the medium.
pub(super) struct UnsyncedObjects {
    mark: PathBuf,
    /// True if a former server has left such objects, and not all have been read since.
    doubtful: AtomicBool,
    state: Mutex<State>,
}

struct State {
    marked: bool,
    /// How many objects were put in place since the start.
    placed: u64,
}

impl UnsyncedObjects {
    pub fn open(data: &Path) -> Result<Self, StoreError> {
        let mark = data.join(layout::UNSYNCED);
        let marked = match fs_err::symlink_metadata(&mark) {
            Ok(_) => true,
            Err(error) if error.kind() == io::ErrorKind::NotFound => false,
            Err(error) => return Err(failed("ask how the former server ended")(error)),
        };
        if marked {
            tracing::warn!(
                "the former server did not stop cleanly: each object is verified before it is used"
            );
        }
        let state = Mutex::new(State { marked, placed: 0 });
        Ok(Self { mark, doubtful: AtomicBool::new(marked), state })
    }

    /// Puts an object in place by `put`, not before the mark is there.
    pub fn place(&self, put: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        let mut state = locked(&self.state);
        if !state.marked {
            let mut options = fs_err::OpenOptions::new();
            options.create(true).truncate(false).write(true).mode(0o600).open(&self.mark)?;
            state.marked = true;
        }
        put()?;
        state.placed += 1;
        Ok(())
    }

    /// How many objects were put in place until now.
    pub fn placed(&self) -> u64 {
        locked(&self.state).placed
    }

    /// Takes the mark away if no object was put in place since there were `before`, when all were
    /// synced.
    pub fn synced(&self, before: u64) {
        let mut state = locked(&self.state);
        if !state.marked || state.placed != before || self.is_doubtful() {
            return;
        }
        match fs_err::remove_file(&self.mark) {
            Ok(()) => state.marked = false,
            Err(error) => {
                tracing::warn!(%error, "the next start will verify each object before it is used");
            }
        }
    }

    /// True if an object may be damaged that no server has read.
    pub fn is_doubtful(&self) -> bool {
        self.doubtful.load(Ordering::Acquire)
    }

    /// Takes note that every object was read since the start.
    pub fn all_read(&self) {
        self.doubtful.store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mark_is_there_while_an_object_may_not_be_on_the_medium() {
        let data = tempfile::tempdir().unwrap();
        let mark = data.path().join(layout::UNSYNCED);
        let unsynced = UnsyncedObjects::open(data.path()).unwrap();
        assert!(!mark.exists() && !unsynced.is_doubtful());
        let put = || {
            assert!(mark.exists(), "it is there before the object is");
            Ok(())
        };
        unsynced.place(put).unwrap();
        let before = unsynced.placed();
        unsynced.place(put).unwrap();
        unsynced.synced(before);
        assert!(mark.exists(), "one came while the others were synced");
        unsynced.synced(unsynced.placed());
        assert!(!mark.exists());
        unsynced.synced(unsynced.placed());
        unsynced.place(put).unwrap();
        unsynced.place(|| Err(io::ErrorKind::StorageFull.into())).unwrap_err();

        // It was killed.
        let unsynced = UnsyncedObjects::open(data.path()).unwrap();
        assert!(unsynced.is_doubtful());
        unsynced.synced(unsynced.placed());
        assert!(mark.exists(), "what the former server left has not been read");
        unsynced.all_read();
        unsynced.synced(unsynced.placed());
        assert!(!mark.exists() && !unsynced.is_doubtful());
    }
}
