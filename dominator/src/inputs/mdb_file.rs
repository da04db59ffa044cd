//! Reads the machine database whenever its file changes, whether it is replaced or edited in
//! place.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use daemon::mdb_file::{FileError, machines, readable};
use model::mdb::Machines;
use model::report::report;

use crate::runtime::fleet::Fleet;
use system::file_stamp::Stamp;

/// How often the file is looked at: often enough that nobody waits for it, and a stat costs a few
/// microseconds.
const INTERVAL: Duration = Duration::from_millis(50);

/// A file that changed so shortly before it was read is read once more.
const SETTLING: Duration = Duration::from_millis(50);

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
