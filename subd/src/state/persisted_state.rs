//! The state that survives a restart of subd: `state.json` in its state directory.
//!
//! It is a [`Durable`] value: written to a temporary file, synced and renamed, so that there is
//! always a complete file. The file `lock` beside it keeps a second subd from managing the same
//! root.

use std::fs::File;
use std::io::{self, Read, Write};
use std::sync::Arc;

use ::tasks::image::ImageTasks;
use api::subd::{Configuration, LastUpdate, TriggerFailure};
use model::display::{error_chain, safe_text};
use model::image::{HealthCheck, ImageName};
use model::scope::ScanSettings;
use model::trigger::Triggers;
use model::trigger::services::ServiceCall;
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use system::durable::{Durable, DurableError, Medium, PrettyJson};

use crate::root::{Directory, RootError, errno_of};
use crate::state::directories::remove_all;
use crate::state::holder::Holder;
use crate::state::pause::SavedPause;
use crate::state::reserve::Reserve;

const STATE: &str = "state.json";
const BAD: &str = "state.json.bad";
const LOCK: &[u8] = b"lock";

/// The longest text that says why settings cannot be used, in bytes.
const UNUSABLE_BYTES_MAX: usize = 1_000;

/// The largest state that is read, in bytes.
const STATE_BYTES_MAX: u64 = 64 << 20;

/// The content of `state.json`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PersistedState {
    pub configuration: Configuration,
    /// Why the scan settings that a former release saved cannot be used: nothing is scanned until
    /// others are set.
    pub unusable_settings: Option<String>,
    /// The image of the last update that was done.
    pub last_image: Option<ImageName>,
    /// The triggers of that image.
    pub triggers: Triggers,
    /// The daemon tasks of that image.
    #[serde(skip_serializing_if = "no_tasks")]
    pub tasks: ImageTasks,
    /// Triggers that failed since the last good update.
    pub trigger_failures: Vec<TriggerFailure>,
    /// The result of the last update.
    pub last_update: Option<LastUpdate>,
    /// The speed of the device of the root, if it was measured.
    pub device: Option<DeviceSpeed>,
    /// The pause of updates that an operator asked for.
    pub paused: Option<SavedPause>,
    /// The boot in which an update made a reboot due.
    pub reboot_due_in: Option<String>,
    /// What is started if that reboot does not come.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub instead_of_reboot: Option<InsteadOfReboot>,
    /// The dominator that gives orders.
    pub holder: Option<Holder>,
    /// The health check of the last image.
    pub health_check: Option<HealthCheck>,
    /// True if that check is due when the machine runs, because the root was not `/`.
    pub health_unchecked: bool,
    /// The speed of the network in bytes per second, if a fetch has measured it.
    pub network_speed: Option<u64>,
}

/// What starts the services and tasks that were stopped for a reboot.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct InsteadOfReboot {
    pub calls: Vec<ServiceCall>,
    pub tasks: ImageTasks,
}

fn no_tasks(tasks: &ImageTasks) -> bool {
    tasks.0.is_empty()
}

/// The speed of the device of the root.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceSpeed {
    /// The device. Another one is measured again.
    pub device: String,
    /// The read speed.
    pub bytes_per_second: u64,
}

/// The state directory or a file in it cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PersistError {
    #[error("cannot use the state directory")]
    Directory {
        #[from]
        source: RootError,
    },
    #[error(transparent)]
    File {
        #[from]
        source: DurableError,
    },
    #[error("cannot lock the state directory")]
    Lock { source: io::Error },
    #[error("another subd manages this root already (it has the lock in the state directory)")]
    Locked,
}

/// A file of subd's own that is replaced as a whole. The temporary file beside it is `NAME.new`.
#[derive(Debug)]
pub struct StateFile {
    pub directory: Arc<Directory>,
    /// What it is written to on a full disk.
    pub reserve: Arc<Reserve>,
    pub name: &'static str,
    /// The most that is read, in bytes.
    pub bytes_max: u64,
}

impl Medium for StateFile {
    fn place(&self) -> String {
        self.name.to_owned()
    }

    fn read(&self) -> io::Result<Option<Vec<u8>>> {
        let file = match self.directory.open_file(self.name.as_bytes()) {
            Err(error) if error.is_absent() => return Ok(None),
            file => file.map_err(io::Error::other)?,
        };
        let mut bytes = Vec::new();
        file.take(self.bytes_max).read_to_end(&mut bytes)?;
        Ok(Some(bytes))
    }

    fn replace(&self, bytes: &[u8]) -> io::Result<()> {
        let (directory, name) = (&*self.directory, self.name.as_bytes());
        let temporary = [name, b".new"].concat();
        let write = |mut file: File| {
            let written = file.write_all(bytes).and_then(|()| file.sync_all());
            written.map_err(|error| directory.error("write", &temporary, errno_of(error)))
        };
        remove_all(directory, &temporary)
            .and_then(|()| {
                self.reserve.write_file(directory, &temporary, RootError::is_full, write)
            })
            .and_then(|()| directory.rename_over(&temporary, directory, name))
            .and_then(|()| directory.sync())
            .map_err(io::Error::other)
    }
}

/// The content of `state.json` in memory and on the medium.
pub type SavedState = Durable<PersistedState, StateFile, PrettyJson>;

/// The state directory, locked.
#[derive(Debug)]
pub struct StateDirectory {
    directory: Arc<Directory>,
    /// The one in `/.subd`, if the state is elsewhere.
    lock_directory: Option<Arc<Directory>>,
    reserve: Arc<Reserve>,
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
                PersistError::Lock { source: errno.into() }
            }
        })?;
        let (directory, reserve) = (Arc::new(directory), Arc::new(Reserve::none()));
        Ok(Self { directory, lock_directory: None, reserve, _lock: lock })
    }

    /// The same lock, with the state itself in `elsewhere`.
    pub fn with_state_in(self, elsewhere: Directory) -> Self {
        let lock_directory = Some(self.directory);
        Self { directory: Arc::new(elsewhere), lock_directory, ..self }
    }

    /// The same, written to `reserve` on a full disk.
    pub fn with_reserve(self, reserve: &Arc<Reserve>) -> Self {
        Self { reserve: Arc::clone(reserve), ..self }
    }

    /// Returns the file `name` in `directory`, one of [`StateDirectory::directories`].
    pub fn file(
        &self,
        directory: &Arc<Directory>,
        name: &'static str,
        bytes_max: u64,
    ) -> StateFile {
        let (directory, reserve) = (Arc::clone(directory), Arc::clone(&self.reserve));
        StateFile { directory, reserve, name, bytes_max }
    }

    /// The directory with the state.
    pub fn directory(&self) -> &Arc<Directory> {
        &self.directory
    }

    /// The directory with the state and, if it is another one, the directory in `/.subd`.
    pub fn directories(&self) -> impl Iterator<Item = &Arc<Directory>> {
        std::iter::once(&self.directory).chain(&self.lock_directory)
    }

    /// Reads the state. Patterns of a former release that this one refuses are left out; the file
    /// is not changed before the next change of the state. A file that cannot be parsed is renamed
    /// to `state.json.bad` if possible, and the state starts empty: a machine without its state is
    /// better than one without subd.
    pub fn load(&self) -> Result<SavedState, PersistError> {
        let directory = &self.directory;
        let file = || self.file(directory, STATE, STATE_BYTES_MAX);
        match Durable::load_or_default_as(file(), PrettyJson) {
            Ok(saved) => return Ok(saved),
            Err(DurableError::Damaged { place, source }) => {
                let read = file().read().map_err(|source| DurableError::Read { place, source })?;
                if let Some(usable) = read.as_deref().and_then(without_refused_patterns) {
                    return Ok(Durable::new(file(), PrettyJson, usable));
                }
                let error = &source;
                tracing::error!(%error, kept = BAD, "the state is not valid: starting without it");
                if let Err(error) =
                    directory.rename_over(STATE.as_bytes(), directory, BAD.as_bytes())
                {
                    tracing::error!("the damaged state cannot be kept: {}", error_chain(&error));
                }
            }
            Err(error) => return Err(error.into()),
        }
        Ok(Durable::new(file(), PrettyJson, PersistedState::default()))
    }
}

/// Parses a state without the filter, or without the triggers, that this release refuses. Returns
/// `None` if something else is wrong with it.
fn without_refused_patterns(bytes: &[u8]) -> Option<PersistedState> {
    let mut state: Value = serde_json::from_slice(bytes).ok()?;
    let refused = |part: &Value, what: fn(&Value) -> serde_json::Result<()>| what(part).err();
    let mut unusable = None;
    if let Some(scan) = state.pointer_mut("/configuration/scan")
        && let Some(error) = refused(scan, |scan| ScanSettings::deserialize(scan).map(drop))
    {
        tracing::error!("the filter that was set last cannot be used: {error}");
        unusable = Some(safe_text(&error.to_string(), UNUSABLE_BYTES_MAX));
        *scan = serde_json::to_value(ScanSettings::default()).ok()?;
    }
    if let Some(triggers) = state.get_mut("triggers")
        && let Some(error) = refused(triggers, |triggers| Triggers::deserialize(triggers).map(drop))
    {
        tracing::error!("the triggers of the last image cannot be used: {error}");
        *triggers = Value::Array(Vec::new());
        // A machine without a last image is given the triggers of its image again.
        state["last_image"] = Value::Null;
    }
    let mut state: PersistedState = serde_json::from_value(state).ok()?;
    state.unusable_settings = unusable.or(state.unusable_settings);
    Some(state)
}

#[cfg(test)]
mod tests {
    use model::path::TreePath;
    use serde_json::json;

    use super::*;
    use crate::root::Root;

    #[test]
    fn remembers_and_sets_aside_what_it_cannot_read() {
        let place = tempfile::tempdir().unwrap();
        let root = Root::open(place.path()).unwrap();
        let open = || root.directory(&TreePath::root()).unwrap();
        let state = StateDirectory::lock(open()).unwrap();
        assert!(matches!(StateDirectory::lock(open()), Err(PersistError::Locked)));
        assert_eq!(*state.load().unwrap().get(), PersistedState::default());
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
        let saved = state.load().unwrap();
        saved.set(persisted.clone()).unwrap();
        drop(state);
        let state = StateDirectory::lock(open()).unwrap();
        assert_eq!(*state.load().unwrap().get(), persisted);
        std::fs::write(place.path().join("state.json"), "{").unwrap();
        assert_eq!(*state.load().unwrap().get(), PersistedState::default());
        let kept = place.path().join("state.json.bad");
        assert_eq!(std::fs::read(&kept).unwrap(), b"{");
        // subd starts also if it cannot be kept.
        std::fs::remove_file(&kept).unwrap();
        std::fs::create_dir(&kept).unwrap();
        std::fs::write(place.path().join("state.json"), "{").unwrap();
        assert_eq!(*state.load().unwrap().get(), PersistedState::default());
    }

    /// Patterns that a former release took, in a state that has much else.
    #[test]
    fn a_state_with_patterns_that_are_refused_now_keeps_the_rest() {
        let place = tempfile::tempdir().unwrap();
        let root = Root::open(place.path()).unwrap();
        let directory = root.directory(&TreePath::root()).unwrap();
        let state = StateDirectory::lock(directory).unwrap();
        let whole = PersistedState {
            last_image: Some(ImageName::new("web/1").unwrap()),
            network_speed: Some(7),
            ..PersistedState::default()
        };
        let mut refused = serde_json::to_value(&whole).unwrap();
        refused["configuration"]["scan"]["coverage"] = json!({"full": ["/a", "/b("]});
        refused["configuration"]["limits"]["cpu_percent"] = json!(3);
        let refused_text = serde_json::to_vec(&refused).unwrap();
        std::fs::write(place.path().join(STATE), &refused_text).unwrap();
        let saved = state.load().unwrap();
        let PersistedState { mut configuration, unusable_settings, .. } =
            PersistedState::clone(&saved.get());
        assert_eq!(configuration.limits.cpu_percent, Some(3));
        configuration.limits.cpu_percent = None;
        let why = unusable_settings.clone().unwrap();
        assert!(why.starts_with("line 2: `/b(` is no regular expression:"), "{why}");
        assert!(!why.contains('\n'), "{why}");
        let expected = PersistedState { unusable_settings, ..whole.clone() };
        assert_eq!(
            PersistedState { configuration, ..PersistedState::clone(&saved.get()) },
            expected
        );
        assert_eq!(std::fs::read(place.path().join(STATE)).unwrap(), refused_text);
        // What is written next still says that the settings cannot be used.
        saved.modify(|state| state.network_speed = Some(8)).unwrap();
        assert_eq!(state.load().unwrap().get().unusable_settings, Some(why));

        let mut refused = serde_json::to_value(&whole).unwrap();
        refused["triggers"] = json!([{"MatchLines": ["/x("], "Service": "x"}]);
        std::fs::write(place.path().join(STATE), serde_json::to_vec(&refused).unwrap()).unwrap();
        let expected = PersistedState { last_image: None, ..whole };
        assert_eq!(*state.load().unwrap().get(), expected);
    }
}
