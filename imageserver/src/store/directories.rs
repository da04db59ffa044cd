//! Stores which directories were made, and who owns them.
//!
//! All directories are in one file, which is replaced as a whole and has a checksum like the record
//! of an image. While it is damaged, nobody owns anything and no directory is changed, until the
//! file is restored or moved away; images are served all the same.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use api::codec::{self, CodecError, Encoding};
use api::image_server::replication::directories::DirectoriesVersion;
use model::display::error_chain;
use model::image::ImageName;
use model::lock::locked;
use model::object::Algorithm;
use system::random::random;
use tokio::sync::watch;

use super::contract::{DirectoriesStorage, RecordVersion};
use super::record::{RecordError, guard, unguard};
use crate::core::directories::{Directories, DirectoryError};
use crate::store::error::StoreError;

const MAGIC: &str = "dominator-directories 2 ";

/// The beginning of a file without a version, which is only a map.
const FIRST_MAGIC: &str = "dominator-directories 1 ";

/// The longest such file, in bytes.
pub const BYTES_MAX: usize = 256 << 20;

/// Why directories are not changed.
#[derive(Debug, thiserror::Error)]
pub enum DirectoriesChangeError {
    #[error(transparent)]
    Directory(#[from] DirectoryError),
    #[error(transparent)]
    Denied(#[from] api::access::DeniedError),
    #[error(
        "no directory is changed, because the file `{path}` cannot be used ({why}): put it back \
         from a backup, or move it away to begin without any, and restart the server"
    )]
    Damaged { path: PathBuf, why: String },
    #[error("cannot write the directories")]
    Encode {
        #[source]
        source: CodecError,
    },
    #[error("there are too many directories and owners for one file of {BYTES_MAX} bytes")]
    TooLong,
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// The directories of a store.
pub struct StoredDirectories {
    storage: Box<dyn DirectoriesStorage>,
    known: RwLock<Arc<Directories>>,
    version_sender: watch::Sender<Option<DirectoriesVersion>>,
    damage: Option<String>,
    is_made_required: AtomicBool,
    /// The known version. Locked while directories change.
    change: Mutex<RecordVersion>,
}

/// While this exists, no directory is changed.
#[must_use = "directories are changed when it is dropped"]
pub struct DirectoriesLock<'directories> {
    directories: &'directories StoredDirectories,
    _change: MutexGuard<'directories, RecordVersion>,
}

impl DirectoriesLock<'_> {
    /// Refuses a new image in a directory that was never made, if directories must be made.
    pub fn expect_made(&self, image: &ImageName) -> Result<(), DirectoryError> {
        if self.directories.is_made_required.load(Ordering::Relaxed) {
            self.directories.now().expect_made(image)
        } else {
            Ok(())
        }
    }
}

impl StoredDirectories {
    pub(super) fn open(storage: Box<dyn DirectoriesStorage>) -> Self {
        let (known, version, damage) = match load(&*storage) {
            Ok((known, version)) => (known, version, None),
            Err(why) => {
                tracing::error!("who owns which directories is not known: {why}");
                (Directories::default(), RecordVersion::default(), Some(why))
            }
        };
        Self {
            storage,
            version_sender: watch::Sender::new(known.version()),
            known: RwLock::new(Arc::new(known)),
            damage,
            is_made_required: AtomicBool::new(false),
            change: Mutex::new(version),
        }
    }

    /// Allows new images only in directories that were made.
    pub fn require_made(&self) {
        self.is_made_required.store(true, Ordering::Relaxed);
    }

    /// The directories as they are now.
    #[must_use]
    pub fn now(&self) -> Arc<Directories> {
        Arc::clone(&self.known.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Returns why the file cannot be used; `None` if it can.
    #[must_use]
    pub fn damage(&self) -> Option<&str> {
        self.damage.as_deref()
    }

    /// Records what other servers have changed, if several share the store.
    pub fn refresh(&self) -> Result<(), StoreError> {
        let mut version = locked(&self.change);
        if self.damage.is_none() && self.storage.has_changed(&version)? {
            self.reload(&mut version);
        }
        Ok(())
    }

    fn reload(&self, version: &mut RecordVersion) {
        match load(&*self.storage) {
            Ok((directories, found)) => {
                self.set(directories);
                *version = found;
            }
            Err(why) => {
                tracing::error!("cannot read the owners of directories again: {why}");
            }
        }
    }

    fn set(&self, directories: Directories) {
        let version = directories.version();
        *self.known.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(directories);
        self.version_sender.send_replace(version);
    }

    /// Returns a receiver of the version of the directories; `None` if none was ever made, or they
    /// are damaged.
    #[must_use]
    pub fn subscribe(&self) -> watch::Receiver<Option<DirectoriesVersion>> {
        self.version_sender.subscribe()
    }

    /// Keeps directories from being changed while an image is made visible.
    pub fn lock(&self) -> DirectoriesLock<'_> {
        let change = locked(&self.change);
        DirectoriesLock { directories: self, _change: change }
    }

    /// Changes the directories durably. On failure they stay as they were. No image becomes visible
    /// meanwhile.
    pub fn change<T>(
        &self,
        change: impl FnOnce(&mut Directories) -> Result<T, DirectoriesChangeError>,
    ) -> Result<T, DirectoriesChangeError> {
        let mut version = self.lock_usable()?;
        let former = self.now();
        let mut directories = Directories::clone(&former);
        let done = change(&mut directories)?;
        if directories != *former {
            directories.note_change(random(), random());
            self.replace(&mut version, directories)?;
        }
        Ok(done)
    }

    /// Replaces all directories by those of a master if `may` returns true for the local ones.
    /// Durable as [`Self::change`]. False if they may not.
    pub fn replace_all(
        &self,
        theirs: Directories,
        may: impl FnOnce(&Directories) -> bool,
    ) -> Result<bool, DirectoriesChangeError> {
        let mut version = self.lock_usable()?;
        let is_taken = may(&self.now());
        if is_taken {
            self.replace(&mut version, theirs)?;
        }
        Ok(is_taken)
    }

    /// Locks the directories against changes, and reads those of other servers.
    fn lock_usable(&self) -> Result<MutexGuard<'_, RecordVersion>, DirectoriesChangeError> {
        let mut version = locked(&self.change);
        if let Some(why) = &self.damage {
            let path = self.storage.location();
            return Err(DirectoriesChangeError::Damaged { path, why: why.clone() });
        }
        // Callers are judged by the owners as they are now.
        if self.storage.has_changed(&version)? {
            self.reload(&mut version);
        }
        Ok(version)
    }

    fn replace(
        &self,
        version: &mut RecordVersion,
        directories: Directories,
    ) -> Result<(), DirectoriesChangeError> {
        let body = codec::encode(Encoding::Json, "directories", &directories);
        let mut body = body.map_err(|source| DirectoriesChangeError::Encode { source })?;
        body.push(b'\n');
        let bytes = guard(MAGIC, body);
        if bytes.len() > BYTES_MAX {
            return Err(DirectoriesChangeError::TooLong);
        }
        *version = self.storage.replace(version, &bytes)?;
        self.set(directories);
        Ok(())
    }
}

/// Reads the directories from `storage`. A storage that was never written has no directories.
pub(crate) fn load(
    storage: &dyn DirectoriesStorage,
) -> Result<(Directories, RecordVersion), String> {
    let Some((bytes, version)) = storage.read(BYTES_MAX).map_err(|error| error_chain(&error))?
    else {
        return Ok(Default::default());
    };
    let unknown = |source| error_chain(&RecordError::Unknown { source });
    if bytes.starts_with(FIRST_MAGIC.as_bytes()) {
        let body = unguard(FIRST_MAGIC, &bytes).map_err(|error| error_chain(&error))?;
        let made = codec::decode(Encoding::Json, "directories", body, BYTES_MAX);
        // All servers that have this file must derive the same version.
        let line = Algorithm::Blake3.digest(body).digest()[..8].try_into().map(u64::from_le_bytes);
        let line = line.expect("a digest has more than eight bytes");
        let first = DirectoriesVersion { line, changes: 1, id: line };
        return Ok((Directories::with_version(first, made.map_err(unknown)?), version));
    }
    let body = unguard(MAGIC, &bytes).map_err(|error| error_chain(&error))?;
    let directories = codec::decode(Encoding::Json, "directories", body, BYTES_MAX);
    Ok((directories.map_err(unknown)?, version))
}
