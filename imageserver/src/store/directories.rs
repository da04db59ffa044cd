//! Keeps over a restart which directories were made, and who owns them.
//!
//! All of them are in one file, which is replaced as a whole and guarded like the record of an
//! image. If it is damaged, nobody owns anything and no directory is changed, until it is put back
//! or taken away: images are served all the same.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use api::codec::{self, CodecError, Encoding};
use api::image_server::replication::directories::DirectoriesVersion;
use model::image::ImageName;
use model::lock::locked;
use model::object::Algorithm;
use model::report::report;
use tokio::sync::watch;

use super::contract::{Register, Version};
use super::record::{RecordError, guard, unguard};
use crate::clock::random;
use crate::core::directories::{Directories, DirectoryError};
use crate::store::error::StoreError;

const MAGIC: &str = "dominator-directories 2 ";

/// What a file without a version begins with: nothing but a map.
const FIRST_MAGIC: &str = "dominator-directories 1 ";

/// The longest such file, in bytes.
pub const BYTES_MAX: usize = 256 << 20;

/// Why directories are not changed.
#[derive(Debug, thiserror::Error)]
pub enum KeepError {
    /// It makes no sense.
    #[error(transparent)]
    Directory(#[from] DirectoryError),
    /// The caller may not.
    #[error(transparent)]
    Denied(#[from] api::access::DeniedError),
    /// What there is is not known.
    #[error(
        "no directory is changed, because the file `{path}` cannot be used ({why}): put it back \
         from a backup, or move it away to begin without any, and restart the server"
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// It cannot be written as JSON.
    #[error("cannot write the directories")]
    Encode {
        /// What the encoder said.
        #[source]
        source: CodecError,
    },
    /// The file would be too long.
    #[error("there are too many directories and owners for one file of {BYTES_MAX} bytes")]
    TooLong,
    /// The file-system failed.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// The directories of a store.
pub struct KeptDirectories {
    register: Box<dyn Register>,
    known: RwLock<Arc<Directories>>,
    told: watch::Sender<Option<DirectoriesVersion>>,
    damage: Option<String>,
    demanded: AtomicBool,
    /// With the version that is known.
    change: Mutex<Version>,
}

/// While it is there, no directory is changed.
#[must_use = "directories are changed when it is dropped"]
pub struct Steady<'kept> {
    kept: &'kept KeptDirectories,
    _change: MutexGuard<'kept, Version>,
}

impl Steady<'_> {
    /// Refuses a new image in a directory that was never made, if that is demanded.
    ///
    /// # Errors
    ///
    /// [`DirectoryError::Demanded`].
    pub fn admit(&self, image: &ImageName) -> Result<(), DirectoryError> {
        if self.kept.demanded.load(Ordering::Relaxed) {
            self.kept.now().demand(image)
        } else {
            Ok(())
        }
    }
}

impl KeptDirectories {
    pub(super) fn open(register: Box<dyn Register>) -> Self {
        let (known, version, damage) = match load(&*register) {
            Ok((known, version)) => (known, version, None),
            Err(why) => {
                tracing::error!("who owns which directories is not known: {why}");
                (Directories::default(), Version::default(), Some(why))
            }
        };
        Self {
            register,
            told: watch::Sender::new(known.version()),
            known: RwLock::new(Arc::new(known)),
            damage,
            demanded: AtomicBool::new(false),
            change: Mutex::new(version),
        }
    }

    /// Lets images be added from now on only into directories that were made.
    pub fn demand(&self) {
        self.demanded.store(true, Ordering::Relaxed);
    }

    /// The directories as they are now.
    #[must_use]
    pub fn now(&self) -> Arc<Directories> {
        Arc::clone(&self.known.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// What is wrong with the file; `None` if it can be used.
    #[must_use]
    pub fn damage(&self) -> Option<&str> {
        self.damage.as_deref()
    }

    /// Takes note of what other servers have changed, if several share the store.
    ///
    /// # Errors
    ///
    /// What the store says.
    pub fn refresh(&self) -> Result<(), StoreError> {
        let mut version = locked(&self.change);
        if self.damage.is_none() && self.register.has_changed(&version)? {
            self.reload(&mut version);
        }
        Ok(())
    }

    fn reload(&self, version: &mut Version) {
        match load(&*self.register) {
            Ok((directories, found)) => {
                self.set(directories);
                *version = found;
            }
            Err(why) => {
                tracing::error!("who owns which directories now is not known: {why}");
            }
        }
    }

    fn set(&self, directories: Directories) {
        let version = directories.version();
        *self.known.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(directories);
        self.told.send_replace(version);
    }

    /// The version of the directories; `None` if none was ever made, or what was cannot be used. Is
    /// changed whenever they are.
    #[must_use]
    pub fn told(&self) -> watch::Receiver<Option<DirectoriesVersion>> {
        self.told.subscribe()
    }

    /// Keeps directories from being changed while an image is made visible.
    pub fn steady(&self) -> Steady<'_> {
        let change = locked(&self.change);
        Steady { kept: self, _change: change }
    }

    /// Changes the directories durably. If that fails they are as they were. No image becomes
    /// visible meanwhile.
    ///
    /// # Errors
    ///
    /// [`KeepError`], or what `change` says.
    pub fn change<T>(
        &self,
        change: impl FnOnce(&mut Directories) -> Result<T, KeepError>,
    ) -> Result<T, KeepError> {
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

    /// Takes all directories of a master, if `may` they take the place of those that are here then.
    /// Durable as [`Self::change`]. False if they may not.
    ///
    /// # Errors
    ///
    /// [`KeepError`].
    pub fn take(
        &self,
        theirs: Directories,
        may: impl FnOnce(&Directories) -> bool,
    ) -> Result<bool, KeepError> {
        let mut version = self.lock_usable()?;
        let is_taken = may(&self.now());
        if is_taken {
            self.replace(&mut version, theirs)?;
        }
        Ok(is_taken)
    }

    /// Keeps others from changing directories; what is known is true then.
    fn lock_usable(&self) -> Result<MutexGuard<'_, Version>, KeepError> {
        let mut version = locked(&self.change);
        if let Some(why) = &self.damage {
            let path = self.register.place();
            return Err(KeepError::Damaged { path, why: why.clone() });
        }
        // Who may do what is decided by what is true now.
        if self.register.has_changed(&version)? {
            self.reload(&mut version);
        }
        Ok(version)
    }

    fn replace(&self, version: &mut Version, directories: Directories) -> Result<(), KeepError> {
        let body = codec::encode(Encoding::Json, "directories", &directories);
        let mut body = body.map_err(|source| KeepError::Encode { source })?;
        body.push(b'\n');
        let bytes = guard(MAGIC, body);
        if bytes.len() > BYTES_MAX {
            return Err(KeepError::TooLong);
        }
        *version = self.register.replace(version, &bytes)?;
        self.set(directories);
        Ok(())
    }
}

/// Reads the directories from `register`; there are none if it was never written.
///
/// # Errors
///
/// Why it cannot be used.
pub(crate) fn load(register: &dyn Register) -> Result<(Directories, Version), String> {
    let Some((bytes, version)) = register.read(BYTES_MAX).map_err(|error| report(&error))? else {
        return Ok(Default::default());
    };
    let unknown = |source| report(&RecordError::Unknown { source });
    if bytes.starts_with(FIRST_MAGIC.as_bytes()) {
        let body = unguard(FIRST_MAGIC, &bytes).map_err(|error| report(&error))?;
        let made = codec::decode(Encoding::Json, "directories", body, BYTES_MAX);
        // What has the file is this server alone, or servers that must agree.
        let line = Algorithm::Blake3.digest(body).digest()[..8].try_into().map(u64::from_le_bytes);
        let line = line.expect("a digest has more than eight bytes");
        let first = DirectoriesVersion { line, changes: 1, id: line };
        return Ok((Directories::of_version(first, made.map_err(unknown)?), version));
    }
    let body = unguard(MAGIC, &bytes).map_err(|error| report(&error))?;
    let directories = codec::decode(Encoding::Json, "directories", body, BYTES_MAX);
    Ok((directories.map_err(unknown)?, version))
}
