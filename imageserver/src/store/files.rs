//! Files of the data directory: the lock, directories, and small files.
//!
//! A small file is replaced completely or not at all.

use std::io::{self, Write as _};
use std::path::Path;

use api::codec::{self, CodecError, Encoding};
use fs_err::os::unix::fs::OpenOptionsExt as _;
use nix::fcntl::{Flock, FlockArg};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::layout;
use crate::store::error::{StoreError, failed};

/// The longest such file, in bytes.
const BYTES_MAX: usize = 64 << 20;

/// A small file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SmallFileError {
    #[error("cannot read `{name}`")]
    Read {
        name: &'static str,
        #[source]
        source: io::Error,
    },
    #[error("`{name}` is damaged")]
    Damaged {
        name: &'static str,
        #[source]
        source: CodecError,
    },
}

/// Writes `value` as JSON to `name` in the data directory, durably.
///
/// # Errors
///
/// On failure the former file stays.
pub fn write(data: &Path, name: &'static str, value: &impl Serialize) -> Result<(), StoreError> {
    let what = || failed(format!("write `{name}`"));
    let mut bytes = codec::encode(Encoding::Json, name, value)
        .map_err(|error| what()(io::Error::other(error)))?;
    bytes.push(b'\n');
    let temporary = data.join(layout::INCOMING).join(name);
    fs_err::OpenOptions::new()
        .create(true)
        .truncate(true)
        .write(true)
        .mode(0o600)
        .open(&temporary)
        .and_then(|mut file| file.write_all(&bytes).and_then(|()| file.sync_all()))
        .and_then(|()| fs_err::rename(&temporary, data.join(name)))
        .map_err(what())?;
    sync_directory(data)
}

/// Reads the value that [`write()`] wrote; `None` if there is no file.
pub fn read<T: DeserializeOwned>(
    data: &Path,
    name: &'static str,
) -> Result<Option<T>, SmallFileError> {
    let bytes = if_found(fs_err::read(data.join(name)))
        .map_err(|source| SmallFileError::Read { name, source })?;
    bytes
        .map(|bytes| codec::decode(Encoding::Json, name, &bytes, BYTES_MAX))
        .transpose()
        .map_err(|source| SmallFileError::Damaged { name, source })
}

/// Converts the error that a file is missing to `None`.
pub(crate) fn if_found<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        other => other.map(Some),
    }
}

/// Locks the data directory for this process, also if its file-system is read-only.
pub(crate) fn lock(data: &Path) -> Result<Flock<std::fs::File>, StoreError> {
    let path = data.join(layout::LOCK);
    let file = fs_err::OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .mode(0o600)
        .open(&path)
        .or_else(|error| match error.kind() {
            io::ErrorKind::ReadOnlyFilesystem => fs_err::File::open(&path).map_err(|_| error),
            _ => Err(error),
        })
        .map_err(failed("lock the data directory"))?;
    Flock::lock(file.into_file(), FlockArg::LockExclusiveNonblock).map_err(|(_, errno)| match errno
    {
        nix::errno::Errno::EWOULDBLOCK => StoreError::Locked { path: data.to_owned() },
        errno => failed("lock the data directory")(errno.into()),
    })
}

/// Creates a directory with mode 700, and its parents. An existing directory stays as it is.
pub(crate) fn make_directory(path: &Path) -> Result<(), StoreError> {
    use std::os::unix::fs::DirBuilderExt as _;
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
        .map_err(failed(format!("make the directory `{}`", path.display())))
}

/// Removes the files in a directory. A file that cannot be removed stays.
pub(crate) fn empty(directory: &Path) -> Result<(), StoreError> {
    let why = || failed("remove what a former server had not finished");
    for entry in fs_err::read_dir(directory).map_err(why())? {
        if let Err(error) = fs_err::remove_file(entry.map_err(why())?.path()) {
            tracing::warn!(%error, "a file that a former server had not finished stays");
        }
    }
    Ok(())
}

/// Makes the entries of a directory durable.
pub(crate) fn sync_directory(path: &Path) -> Result<(), StoreError> {
    let why = || failed("make a directory durable");
    fs_err::File::open(path).map_err(why())?.sync_all().map_err(why())
}
