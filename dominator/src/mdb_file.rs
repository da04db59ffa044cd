//! Reads the machine database whenever its file changes, whether it is replaced or edited in
//! place.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use common::mdb::{Machines, MdbError, parse};
use common::report::report;

use crate::core::herd::HerdError;
use crate::fleet::Fleet;

/// How often the file is looked at.
const INTERVAL: Duration = Duration::from_millis(250);

/// The largest file that is read, in bytes.
const FILE_BYTES_MAX: u64 = 256 << 20;

/// A machine database that is not taken.
#[derive(Debug, thiserror::Error)]
enum FileError {
    #[error("cannot read {}", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("{} has more than {FILE_BYTES_MAX} bytes", path.display())]
    TooLarge { path: PathBuf },
    #[error("{}", path.display())]
    Parse {
        path: PathBuf,
        #[source]
        source: MdbError,
    },
    #[error("{}", path.display())]
    Herd {
        path: PathBuf,
        #[source]
        source: HerdError,
    },
}

/// What changes when the file does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stamp {
    device: u64,
    inode: u64,
    size_bytes: u64,
    mtime: (i64, i64),
    ctime: (i64, i64),
}

/// What was found at the path.
enum Found {
    /// The file is as it was.
    Same,
    /// It was written while it was read: look again.
    Unsteady,
    /// It is new.
    New(Option<Stamp>, Result<Machines, FileError>),
}

/// Looks at the file for ever and gives what is new to `fleet`.
pub async fn watch(path: PathBuf, fleet: Arc<Fleet>) {
    let mut last: Option<Option<Stamp>> = None;
    let mut interval = tokio::time::interval(INTERVAL);
    interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        interval.tick().await;
        let (at, known) = (path.clone(), last);
        let Ok(found) = tokio::task::spawn_blocking(move || look(&at, known)).await else {
            return;
        };
        let Found::New(stamp, result) = found else { continue };
        last = Some(stamp);
        let taken = result.and_then(|machines| {
            fleet.take(machines).map_err(|source| FileError::Herd { path: path.clone(), source })
        });
        if let Err(error) = taken {
            fleet.refuse(report(&error));
        }
    }
}

fn look(path: &Path, last: Option<Option<Stamp>>) -> Found {
    let failed = |source| FileError::Read { path: path.to_owned(), source };
    let before = match std::fs::metadata(path) {
        Ok(metadata) => stamp(&metadata),
        Err(_) if last == Some(None) => return Found::Same,
        Err(source) => return Found::New(None, Err(failed(source))),
    };
    if last == Some(Some(before)) {
        return Found::Same;
    }
    if before.size_bytes > FILE_BYTES_MAX {
        return Found::New(Some(before), Err(FileError::TooLarge { path: path.to_owned() }));
    }
    let bytes = match std::fs::read(path) {
        Ok(bytes) => bytes,
        Err(source) => return Found::New(Some(before), Err(failed(source))),
    };
    match std::fs::metadata(path) {
        Ok(metadata) if stamp(&metadata) == before => {}
        _ => return Found::Unsteady,
    }
    let text = String::from_utf8_lossy(&bytes);
    let machines =
        parse(&text).map_err(|source| FileError::Parse { path: path.to_owned(), source });
    Found::New(Some(before), machines)
}

fn stamp(metadata: &std::fs::Metadata) -> Stamp {
    Stamp {
        device: metadata.dev(),
        inode: metadata.ino(),
        size_bytes: metadata.size(),
        mtime: (metadata.mtime(), metadata.mtime_nsec()),
        ctime: (metadata.ctime(), metadata.ctime_nsec()),
    }
}
