//! Reads the machine database whenever its file changes, whether it is replaced or edited in
//! place.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use common::mdb::{Machines, MdbError, parse};
use common::report::report;

use crate::fleet::Fleet;
use crate::stamp::Stamp;

/// How often the file is looked at: often enough that nobody waits for it, and a stat costs a few
/// microseconds.
const INTERVAL: Duration = Duration::from_millis(50);

/// A file that changed so shortly before it was read is read once more.
const SETTLING: Duration = Duration::from_millis(50);

/// The largest file that is read, in bytes.
const FILE_BYTES_MAX: u64 = 256 << 20;

/// A file that has no machine database.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FileError {
    /// It cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        source: std::io::Error,
    },
    /// It is too large.
    #[error("{} has more than {FILE_BYTES_MAX} bytes", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
    },
    /// It is something else than a file.
    #[error("{} is no regular file", path.display())]
    Kind {
        /// What it is called.
        path: PathBuf,
    },
    /// It is no text.
    #[error("{}: line {line} is not UTF-8", path.display())]
    Text {
        /// The file.
        path: PathBuf,
        /// The first line that is no text, from 1.
        line: usize,
    },
    /// It says something else.
    #[error("{}", path.display())]
    Parse {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        #[source]
        source: MdbError,
    },
}

/// What was found at the path.
enum Found {
    /// The file is as it was.
    Same,
    /// It was written while it was read: look again.
    Unsteady,
    /// It is new; without a stamp it is read again even if nothing of it seems to change.
    New(Option<Stamp>, Result<Machines, FileError>),
}

/// Looks at the file for ever and gives what is new to `fleet`.
pub async fn watch(path: PathBuf, fleet: Arc<Fleet>) {
    let mut last: Option<Stamp> = None;
    let mut interval = tokio::time::interval(INTERVAL);
    interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        interval.tick().await;
        let (at, known) = (path.clone(), last);
        let fleet = Arc::clone(&fleet);
        let looked = tokio::task::spawn_blocking(move || match look(&at, known) {
            Found::Same | Found::Unsteady => known,
            Found::New(stamp, Ok(machines)) => {
                fleet.take(machines);
                stamp
            }
            Found::New(stamp, Err(error)) => {
                fleet.refuse(report(&error));
                stamp
            }
        });
        let Ok(stamp) = looked.await else { return };
        last = stamp;
    }
}

/// Reads a machine database once.
///
/// # Errors
///
/// [`FileError`].
pub fn read(path: &Path) -> Result<Machines, FileError> {
    let failed = |source| FileError::Read { path: path.to_owned(), source };
    readable(path, &std::fs::metadata(path).map_err(failed)?)?;
    machines(path, &std::fs::read(path).map_err(failed)?)
}

/// Whether a file can be read, and is not too long to be.
fn readable(path: &Path, metadata: &std::fs::Metadata) -> Result<(), FileError> {
    // Reading a pipe would wait for ever.
    if !metadata.is_file() {
        return Err(FileError::Kind { path: path.to_owned() });
    }
    if metadata.len() > FILE_BYTES_MAX {
        return Err(FileError::TooLarge { path: path.to_owned() });
    }
    Ok(())
}

fn look(path: &Path, last: Option<Stamp>) -> Found {
    let failed = |source| FileError::Read { path: path.to_owned(), source };
    let metadata = match std::fs::metadata(path) {
        Ok(metadata) => metadata,
        Err(source) => return Found::New(None, Err(failed(source))),
    };
    let before = Stamp::of(&metadata);
    if last == Some(before) {
        return Found::Same;
    }
    if let Err(error) = readable(path, &metadata) {
        return Found::New(Some(before), Err(error));
    }
    let settled = before.is_settled(SETTLING, SystemTime::now());
    let bytes = match std::fs::read(path) {
        Ok(bytes) => bytes,
        Err(source) => return Found::New(None, Err(failed(source))),
    };
    match std::fs::metadata(path) {
        Ok(metadata) if Stamp::of(&metadata) == before => {}
        _ => return Found::Unsteady,
    }
    Found::New(settled.then_some(before), machines(path, &bytes))
}

fn machines(path: &Path, bytes: &[u8]) -> Result<Machines, FileError> {
    let text = std::str::from_utf8(bytes).map_err(|error| {
        let line = 1 + bytes[..error.valid_up_to()].iter().filter(|&&byte| byte == b'\n').count();
        FileError::Text { path: path.to_owned(), line }
    })?;
    // Some editors begin a file with a byte order mark.
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    parse(text).map_err(|source| FileError::Parse { path: path.to_owned(), source })
}
