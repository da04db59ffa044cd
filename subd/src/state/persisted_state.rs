//! What subd remembers over restarts, in one file: `state.json` in its state directory.
//!
//! Written to a temporary, synced and renamed, so that there is always one that is whole. Beside it
//! is `lock`, which keeps a second subd from managing the same root.

use std::fs::File;
use std::io::{self, Read, Write};
use std::sync::{Mutex, PoisonError};

use api::subd::{Configuration, LastUpdate, Paused, TriggerFailure};
use model::image::{HealthCheck, ImageName};
use model::trigger::Triggers;
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};

use crate::root::{Directory, RootError};
use crate::state::accepted_image::AcceptedImage;

const STATE: &[u8] = b"state.json";
const TEMPORARY: &[u8] = b"state.json.new";
const BAD: &[u8] = b"state.json.bad";
const ACCEPTED: &[u8] = b"accepted.json";
const ACCEPTED_TEMPORARY: &[u8] = b"accepted.json.new";
const LOCK: &[u8] = b"lock";

/// The largest state that is read, in bytes.
const STATE_BYTES_MAX: u64 = 64 << 20;

/// The largest record of what was accepted, in bytes.
const ACCEPTED_BYTES_MAX: u64 = 1 << 20;

/// What is remembered.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PersistedState {
    /// What the dominator told.
    pub configuration: Configuration,
    /// The image of the last update that was done.
    pub last_image: Option<ImageName>,
    /// The triggers of that image.
    pub triggers: Triggers,
    /// Triggers that failed since the last good update.
    pub trigger_failures: Vec<TriggerFailure>,
    /// How the last update ended.
    pub last_update: Option<LastUpdate>,
    /// How fast the device of the root is, if it was measured.
    pub device: Option<DeviceSpeed>,
    /// That no update may be made for a while.
    pub paused: Option<Paused>,
    /// The boot in which an update has made a reboot due.
    pub reboot_due_in: Option<String>,
    /// The health check of the last image.
    pub health_check: Option<HealthCheck>,
    /// How fast the network is, in bytes per second, if fetching has shown it.
    pub network_speed: Option<u64>,
}

/// A device that was measured.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceSpeed {
    /// Which device: another one is measured anew.
    pub device: String,
    /// How fast it can be read.
    pub bytes_per_second: u64,
}

/// State that cannot be kept.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PersistError {
    /// The directory cannot be used.
    #[error("cannot use the state directory")]
    Directory {
        /// What and why.
        #[from]
        source: RootError,
    },
    /// The file cannot be read or written.
    #[error("cannot {operation} the state")]
    Content {
        /// What was tried.
        operation: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
    /// Which image was accepted last cannot be read.
    #[error(
        "accepted.json in the state directory, which says which image was accepted last, cannot be \
         read: remove it to have that forgotten"
    )]
    AcceptedImage {
        /// What is wrong with it.
        source: io::Error,
    },
    /// Another subd has the lock.
    #[error("another subd manages this root already (it has the lock in the state directory)")]
    Locked,
}

/// The state directory, locked.
#[derive(Debug)]
pub struct StateDirectory {
    directory: Directory,
    /// The one in `/.subd`, if the state is elsewhere.
    directories: Option<Directory>,
    /// Held while a file is written; true if the last write of the state failed.
    writing: Mutex<bool>,
    _lock: Flock<File>,
}

impl StateDirectory {
    /// Takes the lock of `directory`, until this value is dropped.
    ///
    /// # Errors
    ///
    /// [`PersistError::Locked`] if another process has it.
    pub fn lock(directory: Directory) -> Result<Self, PersistError> {
        match directory.create_file(LOCK, 0o600) {
            Err(error) if error.errno() != Some(Errno::EEXIST) => return Err(error.into()),
            Ok(_) | Err(_) => {}
        }
        // Not held open for writing: nobody could remount the root read-only then.
        let file = directory.open_file(LOCK)?;
        let lock = Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(_, errno)| {
            if errno == Errno::EWOULDBLOCK {
                PersistError::Locked
            } else {
                PersistError::Content { operation: "lock", source: errno.into() }
            }
        })?;
        Ok(Self { directory, directories: None, writing: Mutex::new(false), _lock: lock })
    }

    /// The same lock, with the state itself in `elsewhere`.
    #[must_use]
    pub fn with_state_in(self, elsewhere: Directory) -> Self {
        Self { directory: elsewhere, directories: Some(self.directory), ..self }
    }

    /// Reads the state. A file that cannot be understood is set aside and said to be lost, because
    /// a machine without memory is better than one without subd.
    ///
    /// # Errors
    ///
    /// [`PersistError`] if it is there and cannot be read.
    pub fn load(&self) -> Result<PersistedState, PersistError> {
        let fail = |source| PersistError::Content { operation: "read", source };
        let file = match self.directory.open_file(STATE) {
            Err(error) if error.is_absent() => return Ok(PersistedState::default()),
            other => other?,
        };
        let mut text = Vec::new();
        file.take(STATE_BYTES_MAX).read_to_end(&mut text).map_err(fail)?;
        match serde_json::from_slice(&text) {
            Ok(persisted) => Ok(persisted),
            Err(error) => {
                let kept = String::from_utf8_lossy(BAD);
                tracing::error!(%error, %kept, "the state is not valid: starting without it");
                self.directory.rename_over(STATE, &self.directory, BAD)?;
                Ok(PersistedState::default())
            }
        }
    }

    /// Writes the state that `latest` returns, durably. One caller at a time, and `latest` is
    /// called when it is this caller's turn, so that no older state is written over a newer one.
    ///
    /// # Errors
    ///
    /// [`PersistError`]; the former state is still on the medium.
    pub fn store(&self, latest: impl FnOnce() -> PersistedState) -> Result<(), PersistError> {
        self.store_before(|_| Some(latest()), || ())
    }

    /// Writes the state that `latest` returns, durably, and then calls `after`, in the same turn.
    /// Does neither if `latest` returns `None`. The argument of `latest` is true if the last write
    /// failed, so that it is not known what is on the medium.
    ///
    /// # Errors
    ///
    /// [`PersistError`]; the former state is still on the medium, and `after` was not called.
    pub fn store_before(
        &self,
        latest: impl FnOnce(bool) -> Option<PersistedState>,
        after: impl FnOnce(),
    ) -> Result<(), PersistError> {
        let mut failed = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(persisted) = latest(*failed) {
            *failed = true;
            replace(&self.directory, STATE, TEMPORARY, &persisted)?;
            *failed = false;
            after();
        }
        Ok(())
    }

    /// Reads which image was accepted last; `None` if none was yet.
    ///
    /// # Errors
    ///
    /// [`PersistError`] if that is not known: it must not be taken for none.
    pub fn load_accepted(&self) -> Result<Option<AcceptedImage>, PersistError> {
        let fail = |source| PersistError::AcceptedImage { source };
        let file = match self.directory.open_file(ACCEPTED) {
            Err(error) if error.is_absent() => return Ok(None),
            other => other?,
        };
        let mut text = Vec::new();
        file.take(ACCEPTED_BYTES_MAX).read_to_end(&mut text).map_err(fail)?;
        serde_json::from_slice(&text).map_err(|error| fail(error.into()))
    }

    /// The directories that say whether only signed images are taken. Not that of the state alone:
    /// where that is may have been in the configuration file that is gone.
    fn marked(&self) -> impl Iterator<Item = &Directory> {
        std::iter::once(&self.directory).chain(&self.directories)
    }

    /// True unless it is certain that this machine was never told to take only signed images, or
    /// that somebody has ended that.
    #[must_use]
    pub fn takes_only_signed(&self) -> bool {
        self.marked().any(|directory| match directory.open_file(ACCEPTED) {
            Ok(_) => true,
            Err(error) => !error.is_absent(),
        })
    }

    /// Notes that this machine takes only signed images, durably. What was accepted last stays.
    ///
    /// # Errors
    ///
    /// [`PersistError`] if that may be forgotten.
    pub fn store_only_signed(&self) -> Result<(), PersistError> {
        let _turn = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        for directory in self.marked() {
            match directory.open_file(ACCEPTED) {
                Err(error) if error.is_absent() => {
                    replace(directory, ACCEPTED, ACCEPTED_TEMPORARY, &None::<AcceptedImage>)?;
                }
                other => drop(other?),
            }
        }
        Ok(())
    }

    /// Writes which image was accepted last, durably.
    ///
    /// # Errors
    ///
    /// [`PersistError`]; what was there before is still there.
    pub fn store_accepted(&self, accepted: &AcceptedImage) -> Result<(), PersistError> {
        let _turn = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        replace(&self.directory, ACCEPTED, ACCEPTED_TEMPORARY, accepted)
    }
}

/// Writes a file anew, durably.
fn replace(
    directory: &Directory,
    name: &[u8],
    temporary: &[u8],
    value: &impl Serialize,
) -> Result<(), PersistError> {
    let fail = |source| PersistError::Content { operation: "write", source };
    let text = serde_json::to_vec_pretty(value).map_err(|error| fail(error.into()))?;
    crate::state::directories::remove_all(directory, temporary)?;
    let mut file = directory.create_file(temporary, 0o600)?;
    file.write_all(&text).and_then(|()| file.sync_all()).map_err(fail)?;
    directory.rename_over(temporary, directory, name)?;
    directory.sync()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use model::path::TreePath;

    use super::*;
    use crate::root::Root;

    #[test]
    fn remembers_and_sets_aside_what_it_cannot_read() {
        let place = tempfile::tempdir().unwrap();
        let root = Root::open(place.path()).unwrap();
        let open = || root.directory(&TreePath::root()).unwrap();
        let state = StateDirectory::lock(open()).unwrap();
        assert!(matches!(StateDirectory::lock(open()), Err(PersistError::Locked)));
        assert_eq!(state.load().unwrap(), PersistedState::default());
        let failure = TriggerFailure {
            service: "ssh".to_owned(),
            verb: "start".to_owned(),
            output: "no".to_owned(),
        };
        let persisted = PersistedState {
            last_image: Some(ImageName::new("web/1").unwrap()),
            triggers: Triggers::from_json(r#"[{"MatchLines": ["/x"], "Service": "x"}]"#).unwrap(),
            trigger_failures: vec![failure],
            ..PersistedState::default()
        };
        state.store(|| persisted.clone()).unwrap();
        state.store(|| persisted.clone()).unwrap();
        drop(state);
        let state = StateDirectory::lock(open()).unwrap();
        assert_eq!(state.load().unwrap(), persisted);
        std::fs::write(place.path().join("state.json"), "{").unwrap();
        assert_eq!(state.load().unwrap(), PersistedState::default());
        assert_eq!(std::fs::read(place.path().join("state.json.bad")).unwrap(), b"{");
    }
}
