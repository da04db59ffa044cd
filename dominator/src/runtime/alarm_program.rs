//! Calls the operator's program when alarms begin or end.

use std::sync::Arc;
use std::time::Duration;

use model::display::error_chain;
use tokio::sync::watch;

use crate::core::alarms::{AlarmChanges, AlarmSet, changes};
use crate::runtime::fleet::Fleet;
use daemon::program::output;
use model::backoff::doubled;

/// How often alarms are compared with those reported; also whenever the brake changes.
const LOOK_INTERVAL: Duration = Duration::from_secs(5);

/// How long the program may take, before it is killed.
const PROGRAM_LIMIT: Duration = Duration::from_secs(60);

/// The first pause after a call that failed, and the longest.
const RETRY_FIRST: Duration = Duration::from_secs(5);
const RETRY_LONGEST: Duration = Duration::from_secs(300);

/// The most that the program may print, in bytes.
const PRINTED_BYTES_MAX: usize = 1 << 20;

/// Calls the program whenever alarms begin or end. `programs` gives the words of its command line;
/// no words mean no program. After a restart, and for a new program, all present alarms are
/// reported again, because what was reported is not saved.
pub async fn run(fleet: Arc<Fleet>, mut programs: watch::Receiver<Vec<String>>) {
    let mut reported = AlarmSet::default();
    let mut brakes = fleet.shared().gate.watch_brake();
    let mut failures = 0;
    loop {
        if programs.has_changed().unwrap_or(false) {
            (reported, failures) = (AlarmSet::default(), 0);
            fleet.note_alarm_error(None);
        }
        let program = programs.borrow_and_update().clone();
        let now = if program.is_empty() { AlarmSet::default() } else { fleet.raised() };
        let mut pause = LOOK_INTERVAL;
        if let Some(changes) = changes(&reported, &now) {
            match call(&program, &changes).await {
                Ok(()) => {
                    (reported, failures) = (now, 0);
                    fleet.note_alarm_error(None);
                    continue;
                }
                Err(error) => {
                    tracing::error!("the alarm command failed: {error}");
                    fleet.note_alarm_error(Some(error));
                    failures += 1;
                    pause = doubled(RETRY_FIRST, RETRY_LONGEST, failures);
                }
            }
        }
        tokio::select! {
            Ok(()) = brakes.changed() => {}
            Ok(()) = programs.changed() => programs.mark_changed(),
            () = tokio::time::sleep(pause) => {}
        }
    }
}

/// Calls the program once. The error says why it failed.
async fn call(program: &[String], news: &AlarmChanges) -> Result<(), String> {
    let mut input = serde_json::to_vec(news).map_err(|error| error.to_string())?;
    input.push(b'\n');
    let late = |_| format!("{} takes longer than {PROGRAM_LIMIT:?}", program.join(" "));
    let run = output(program, &input, PRINTED_BYTES_MAX);
    let printed = tokio::time::timeout(PROGRAM_LIMIT, run).await.map_err(late)?;
    printed.map(drop).map_err(|error| error_chain(&error))
}
