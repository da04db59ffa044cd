//! Reads the machine database: from a file whenever it changes, or from an mdbd.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use api::mdb::{GetMdb, GetMdbRequest};
use daemon::mdb_file::{MdbFile, MdbFileError, check_readable, parse_mdb};
use model::backoff::{doubled, jittered};
use model::display::error_chain;
use model::mdb::{Machine, MdbError, parse};
use model::unknown_keys;
use rpc::client::Client;
use system::file_stamp::FileStamp;
use system::random::random;
use tokio_util::sync::CancellationToken;

use crate::core::timing::{POLL_WAIT, RETRY_FIRST, RETRY_LONGEST};
use crate::runtime::fleet::Fleet;

/// The interval in which the file is checked. One check and its wake take 60 µs.
const FILE_INTERVAL: Duration = Duration::from_millis(200);

/// A file that changed less than this before it was read is read again.
const SETTLING: Duration = Duration::from_millis(50);

/// How much longer than the requested wait an answer of the mdbd may take.
const ANSWER_SLACK: Duration = Duration::from_secs(30);

/// The pause after an answer of the mdbd, which limits the rate of requests.
const ANSWER_PAUSE: Duration = Duration::from_millis(100);

/// The result of checking the file.
enum FileState {
    Unchanged,
    /// The file was written while it was read: check it again.
    Unsteady,
    /// The file has changed. Without a stamp it is read again in any case.
    Changed(Option<FileStamp>, Result<MdbFile, MdbFileError>),
}

/// Why the machine database of an mdbd is invalid.
#[derive(Debug, thiserror::Error)]
#[error("from {server}")]
struct FollowError {
    server: String,
    #[source]
    source: MdbError,
}

/// Gives the content of the file to `fleet` whenever it changes, whether the file is replaced or
/// edited in place. `is_strict` refuses one with keys that nothing reads. Never returns.
///
/// One thread does nothing else: to wake the runtime for each check took longer than the check.
pub async fn watch_mdb_file(path: PathBuf, is_strict: bool, fleet: Arc<Fleet>) {
    let stop = CancellationToken::new();
    let _stop_when_dropped = stop.clone().drop_guard();
    let watch = tokio::task::spawn_blocking(move || {
        let mut last = None;
        while !stop.is_cancelled() {
            last = take_file(&path, last, is_strict, &fleet);
            std::thread::sleep(FILE_INTERVAL);
        }
    });
    // It ends early only by a panic.
    let _panicked = watch.await;
}

/// Gives the content of the file to `fleet` if it has another stamp than `known`. Returns its
/// stamp.
fn take_file(
    path: &Path,
    known: Option<FileStamp>,
    is_strict: bool,
    fleet: &Fleet,
) -> Option<FileStamp> {
    let (stamp, file) = match check_file(path, known) {
        FileState::Unchanged | FileState::Unsteady => return known,
        FileState::Changed(stamp, Ok(file)) => (stamp, file),
        FileState::Changed(stamp, Err(error)) => {
            fleet.refuse(error_chain(&error));
            return stamp;
        }
    };
    match unknown_keys::describe(&file.unknown_keys) {
        Some(unknown) if is_strict => fleet.refuse(format!("{}: {unknown}", path.display())),
        unknown => {
            fleet.note_unknown_keys(unknown);
            fleet.take(file.machines);
        }
    }
    stamp
}

fn check_file(path: &Path, last: Option<FileStamp>) -> FileState {
    let failed = |source| MdbFileError::Read { path: path.to_owned(), source };
    let metadata = match std::fs::metadata(path) {
        Ok(metadata) => metadata,
        Err(source) => return FileState::Changed(None, Err(failed(source))),
    };
    let before = FileStamp::of(&metadata);
    if last == Some(before) {
        return FileState::Unchanged;
    }
    if let Err(error) = check_readable(path, &metadata) {
        return FileState::Changed(Some(before), Err(error));
    }
    let is_settled = before.is_settled(SETTLING, SystemTime::now());
    let bytes = match std::fs::read(path) {
        Ok(bytes) => bytes,
        Err(source) => return FileState::Changed(None, Err(failed(source))),
    };
    match std::fs::metadata(path) {
        Ok(metadata) if FileStamp::of(&metadata) == before => {}
        _ => return FileState::Unsteady,
    }
    FileState::Changed(is_settled.then_some(before), parse_mdb(path, &bytes))
}

/// Gives the machine database of an mdbd to `fleet` whenever it changes. While the mdbd cannot be
/// reached the last valid database stays in force. Never returns.
pub async fn follow_mdb_server(client: Client, fleet: Arc<Fleet>) {
    let (mut have, mut failures) = (None, 0);
    loop {
        let jitter = u16::try_from(random() % 1_000).unwrap_or_default();
        let wait = jittered(POLL_WAIT, jitter);
        let wait_ms = u32::try_from(wait.as_millis()).unwrap_or(u32::MAX);
        let request = GetMdbRequest { have, wait_ms };
        let pause = match client.call_within::<GetMdb>(&request, wait + ANSWER_SLACK).await {
            Ok(reply) => {
                failures = 0;
                have = Some(reply.version);
                if let Some(machines) = reply.machines {
                    let (server, fleet) = (client.peer().to_string(), Arc::clone(&fleet));
                    let taking = tokio::task::spawn_blocking(move || {
                        if let Err(error) = take_machines(&machines, server, &fleet) {
                            fleet.refuse(error_chain(&error));
                        }
                    });
                    if taking.await.is_err() {
                        return;
                    }
                }
                ANSWER_PAUSE
            }
            Err(error) => {
                failures += 1;
                // The next answer must contain the machines, so that it clears the error.
                have = None;
                fleet.refuse(error_chain(&error));
                jittered(doubled(RETRY_FIRST, RETRY_LONGEST, failures), jitter)
            }
        };
        tokio::time::sleep(pause).await;
    }
}

/// Checks the machines like those of a file, and gives them to `fleet`.
fn take_machines(machines: &[Machine], server: String, fleet: &Fleet) -> Result<(), FollowError> {
    let text = serde_json::to_string(machines).expect("machines can be written as JSON");
    fleet.take(parse(&text).map_err(|source| FollowError { server, source })?);
    Ok(())
}
