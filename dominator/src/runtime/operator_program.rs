//! Calls programs of operators when alarms begin or end, and when rollouts go on. Others call their
//! programs with `call` too.

use std::sync::Arc;
use std::time::Duration;

use model::display::error_chain;
use rollouts::state::State;
use serde::Serialize;
use tokio::sync::watch;

use crate::core::alarms::{AlarmSet, changes};
use crate::core::rollout_notices::{ended, notices};
use crate::runtime::fleet::Fleet;
use daemon::program::output;
use model::backoff::doubled;

/// How often what is known is compared with what was reported; also whenever the brake changes.
const LOOK_INTERVAL: Duration = Duration::from_secs(5);

/// How long the program may take, before it is killed.
const PROGRAM_LIMIT: Duration = Duration::from_secs(60);

/// The first pause after a call that failed, and the longest.
const RETRY_FIRST: Duration = Duration::from_secs(5);
const RETRY_LONGEST: Duration = Duration::from_secs(300);

/// The most that the program may print, in bytes.
const PRINTED_BYTES_MAX: usize = 1 << 20;

/// What a program is told of.
struct Subject<T> {
    /// What has been reported already, at a start and for a new program.
    first: fn(&Fleet) -> T,
    now: fn(&Fleet) -> T,
    /// Returns the news as JSON, if there is any.
    news: fn(&Fleet, &T, &T) -> Option<Vec<u8>>,
    /// Takes why a call failed, or `None`.
    note_error: fn(&Fleet, Option<String>),
}

/// Calls the program whenever alarms begin or end. `programs` gives the words of its command line;
/// no words mean no program. After a restart, and for a new program, all present alarms are
/// reported again, because what was reported is not saved.
pub async fn tell_of_alarms(fleet: Arc<Fleet>, programs: watch::Receiver<Vec<String>>) {
    let subject = Subject {
        first: |_| AlarmSet::default(),
        now: Fleet::raised,
        news: |_, reported, now| changes(reported, now).map(|news| line(&news)),
        note_error: |fleet, error| {
            if let Some(error) = &error {
                tracing::error!("the alarm command failed: {error}");
            }
            fleet.note_alarm_error(error);
        },
    };
    run(fleet, programs, subject).await;
}

/// Calls the program whenever a rollout or a step enters another state. After a restart, and for a
/// new program, all rollouts that have not ended are reported.
pub async fn tell_of_rollouts(fleet: Arc<Fleet>, programs: watch::Receiver<Vec<String>>) {
    let subject: Subject<Arc<State>> = Subject {
        first: |fleet| Arc::new(ended(&fleet.rollout_state())),
        now: Fleet::rollout_state,
        news: |fleet, reported, now| {
            let news = notices(&fleet.shared().vote_links, reported, now);
            news.map(|news| line(&news))
        },
        note_error: |fleet, error| {
            if let Some(error) = &error {
                tracing::error!("the rollout command failed: {error}");
            }
            fleet.note_rollout_command(error);
        },
    };
    run(fleet, programs, subject).await;
}

async fn run<T>(
    fleet: Arc<Fleet>,
    mut programs: watch::Receiver<Vec<String>>,
    subject: Subject<T>,
) {
    let mut reported = (subject.first)(&fleet);
    let mut brakes = fleet.shared().gate.watch_brake();
    let mut failures = 0;
    loop {
        if programs.has_changed().unwrap_or(false) {
            (reported, failures) = ((subject.first)(&fleet), 0);
            (subject.note_error)(&fleet, None);
        }
        let program = programs.borrow_and_update().clone();
        if program.is_empty() {
            // Without a sender no program will come.
            if programs.changed().await.is_err() {
                return;
            }
            programs.mark_changed();
            continue;
        }
        let mut pause = LOOK_INTERVAL;
        let now = (subject.now)(&fleet);
        if let Some(news) = (subject.news)(&fleet, &reported, &now) {
            match call(&program, &news).await {
                Ok(_) => {
                    (reported, failures) = (now, 0);
                    (subject.note_error)(&fleet, None);
                    continue;
                }
                Err(error) => {
                    (subject.note_error)(&fleet, Some(error));
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

/// Returns a line of JSON.
pub(super) fn line(news: &impl Serialize) -> Vec<u8> {
    let mut line = serde_json::to_vec(news).expect("it is a plain structure");
    line.push(b'\n');
    line
}

/// Calls the program once, and returns what it prints. The error says why it failed.
pub(super) async fn call(program: &[String], news: &[u8]) -> Result<Vec<u8>, String> {
    let late = |_| format!("{} takes longer than {PROGRAM_LIMIT:?}", program.join(" "));
    let run = output(program, news, PRINTED_BYTES_MAX);
    let printed = tokio::time::timeout(PROGRAM_LIMIT, run).await.map_err(late)?;
    printed.map_err(|error| error_chain(&error))
}
