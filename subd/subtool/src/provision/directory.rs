//! The directory of resources, and the state that is kept of it.

use std::collections::BTreeMap;
use std::fs::Permissions;
use std::io::Read as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use model::display::error_chain;
use nix::fcntl::{Flock, FlockArg};
use nix::unistd::geteuid;
use provisioning::binding::BINDINGS_BYTES_MAX;
use provisioning::resource::FILE_BYTES_MAX;
use provisioning::{Bindings, Plan, Resources, State, plan};
use system::durable::{Durable, DurableError, FileMedium, Json, Medium as _};
use tool::PlacedError;

/// The file of the bindings, in the directory.
const BINDINGS: &str = "provisioners.toml";

/// Where an image has resources, below the directory with the bindings.
const RESOURCES: &str = "resources.d";

/// The files of the state directory.
const STATE: &str = "state.json";
const LOCK: &str = "lock";

/// The largest state, in bytes.
const STATE_BYTES_MAX: u64 = 256 << 20;

fn unusable(path: &Path, error: impl std::error::Error) -> PlacedError {
    PlacedError::new(path.display().to_string(), error_chain(&error))
}

/// What the directory of resources has.
pub(super) struct Directory {
    pub resources: Resources,
    pub bindings: Bindings,
    /// All that was read.
    paths: Vec<PathBuf>,
}

impl Directory {
    /// Reads the directory, which is as `/etc/dominator` is, or has the resources beside the
    /// bindings.
    pub fn read(directory: &Path) -> Result<Self, PlacedError> {
        let inner = directory.join(RESOURCES);
        let of_resources = if inner.is_dir() { inner } else { directory.to_owned() };
        let entries = of_resources.read_dir().map_err(|error| unusable(&of_resources, error))?;
        let mut files: BTreeMap<String, String> = BTreeMap::new();
        let mut paths = vec![directory.to_owned(), of_resources.clone()];
        for entry in entries {
            let path = entry.map_err(|error| unusable(&of_resources, error))?.path();
            if path.extension().is_some_and(|extension| extension == "json") {
                let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
                files.insert(name, read_text(&path, FILE_BYTES_MAX)?);
                paths.push(path);
            }
        }
        let files = files.iter().map(|(name, text)| (name.as_str(), text.as_str()));
        let resources = Resources::parse(files).map_err(|error| {
            let at = format!("{}: {}", error.file, error.source.at);
            PlacedError::new(at, error.source.problem)
        })?;
        let path = directory.join(BINDINGS);
        let bindings = if path.exists() {
            let text = read_text(&path, BINDINGS_BYTES_MAX)?;
            let bindings = Bindings::parse(&text).map_err(|error| {
                PlacedError::new(format!("{BINDINGS}: {}", error.at), error.problem)
            })?;
            paths.push(path);
            bindings
        } else {
            Bindings::default()
        };
        Ok(Self { resources, bindings, paths })
    }

    /// Checks that nobody else could have written what decides which programs run.
    pub fn check_owners(&self) -> Result<(), PlacedError> {
        self.paths.iter().try_for_each(|path| {
            check_owner(path).map_err(|error| PlacedError::new(path.display().to_string(), error))
        })
    }

    /// Compares the resources with the state.
    pub fn plan(&self, state: &State) -> Plan {
        plan(&self.resources, &self.bindings, state)
    }
}

/// Checks that only root, and who runs this, can write a file or directory.
pub(super) fn check_owner(path: &Path) -> Result<(), String> {
    let metadata = path.metadata().map_err(|error| error.to_string())?;
    let owner = metadata.uid();
    if owner != 0 && owner != geteuid().as_raw() {
        return Err(format!("belongs to user {owner}: only root and who runs this may own it"));
    }
    match metadata.mode() & 0o022 {
        0 => Ok(()),
        _ => Err("can be written by others: chmod go-w it".to_owned()),
    }
}

fn read_text(path: &Path, bytes_max: usize) -> Result<String, PlacedError> {
    let mut text = String::new();
    let limit = bytes_max as u64 + 1;
    std::fs::File::open(path)
        .and_then(|file| file.take(limit).read_to_string(&mut text))
        .map_err(|error| unusable(path, error))?;
    Ok(text)
}

/// The state, with its copy on the medium.
pub(super) struct SavedState {
    state: Durable<State, FileMedium, Json>,
    _lock: Flock<std::fs::File>,
}

impl SavedState {
    /// Opens the state directory, makes it if necessary, and locks it.
    pub fn open(directory: &Path) -> Result<Self, PlacedError> {
        let failed = |error: std::io::Error| unusable(directory, error);
        if !directory.exists() {
            std::fs::create_dir_all(directory).map_err(failed)?;
            std::fs::set_permissions(directory, Permissions::from_mode(0o700)).map_err(failed)?;
            // The state must be found again after a power cut.
            let parent = directory.parent().filter(|parent| !parent.as_os_str().is_empty());
            let parent = std::fs::File::open(parent.unwrap_or(Path::new(".")));
            parent.and_then(|parent| parent.sync_all()).map_err(failed)?;
        }
        let named = |error| PlacedError::new(directory.display().to_string(), error);
        check_owner(directory).map_err(named)?;
        let file = std::fs::File::create(directory.join(LOCK)).map_err(failed)?;
        let lock = Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|_| {
            named("is in use: another subtool provision runs with this state".to_owned())
        })?;
        let state = Self::peek(directory)?;
        Ok(Self { state: Durable::new(medium(directory), Json, state), _lock: lock })
    }

    /// Reads the state, and changes nothing.
    pub fn peek(directory: &Path) -> Result<State, PlacedError> {
        let path = directory.join(STATE);
        let bytes = medium(directory).read().map_err(|error| unusable(&path, error))?;
        let Some(bytes) = bytes else {
            let name = nix::unistd::gethostname().unwrap_or_default();
            return Ok(State::new(&name.to_string_lossy()));
        };
        State::parse(&String::from_utf8_lossy(&bytes)).map_err(|error| {
            let at = format!("{}: {}", path.display(), error.at);
            let remedy = "without the file, all resources are asked for again";
            PlacedError::new(at, format!("{}; {remedy}", error.problem))
        })
    }

    pub fn get(&self) -> Arc<State> {
        self.state.get()
    }

    pub fn modify(&self, change: impl FnOnce(&mut State)) -> Result<(), DurableError> {
        self.state.modify(change)
    }
}

fn medium(directory: &Path) -> FileMedium {
    FileMedium::new(directory.join(STATE), STATE_BYTES_MAX)
}
