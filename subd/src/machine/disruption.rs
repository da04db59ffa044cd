//! Runs the machine's disruption command before work of high impact. [`permission`] decides when it
//! is called, and with which argument.
//!
//! # Invariants
//!
//! * The request of an update ends when the update ends, however it ends.
//! * An update that is not permitted stays staged.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use api::fault::{Fault, FaultCode};
use api::subd::UpdatePhase;
use model::lock::locked;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::sync::CancellationToken;

use crate::machine::command::{CommandEnd, CommandResult};
use crate::machine::command_runner::CommandRunner;
use crate::machine::disruption::permission::{Disruption, Event, Permission, Question};
use crate::state::{ReportState, State};

pub mod permission;

/// How long the command may take.
const TIME_MAX: Duration = Duration::from_secs(30);

/// How long a Commit waits for the first answer: long enough for a command that asks another
/// machine, and short enough for the caller.
const ANSWER_MAX: Duration = Duration::from_secs(10);

/// The last answer of the command since permission was requested.
#[derive(Clone, Debug, Default)]
struct LatestAnswer {
    permission: Option<Permission>,
    error: Option<String>,
}

/// The disruption command of a machine.
pub struct DisruptionGate {
    line: Vec<String>,
    command_runner: CommandRunner,
    /// The update whose work of high impact is wanted.
    wanted: watch::Sender<Option<u64>>,
    latest: watch::Sender<LatestAnswer>,
    /// Held while the wanted update changes.
    turn: Mutex<()>,
}

impl DisruptionGate {
    /// Returns the gate for `command`, split at white space; `None` if `command` is empty.
    pub fn new(command: &str, command_runner: CommandRunner) -> Option<Arc<Self>> {
        let line: Vec<String> = command.split_whitespace().map(str::to_owned).collect();
        (!line.is_empty()).then(|| {
            let (wanted, latest) =
                (watch::Sender::new(None), watch::Sender::new(LatestAnswer::default()));
            Arc::new(Self { line, command_runner, wanted, latest, turn: Mutex::new(()) })
        })
    }

    /// Asks for permission for the work of `update_id`.
    ///
    /// # Errors
    ///
    /// `Held` unless the command permits it. The request stays.
    pub async fn permit(&self, update_id: u64) -> Result<(), Fault> {
        let mut latest = self.latest.subscribe();
        {
            let _turn = locked(&self.turn);
            if *self.wanted.borrow() != Some(update_id) {
                // An answer for another update does not count.
                self.latest.send_replace(LatestAnswer::default());
                self.wanted.send_replace(Some(update_id));
            }
        }
        let answered =
            |latest: &LatestAnswer| latest.permission.is_some() || latest.error.is_some();
        let waiting = timeout(ANSWER_MAX, latest.wait_for(answered));
        let latest = match waiting.await {
            Ok(Ok(latest)) => latest.clone(),
            Ok(Err(_)) | Err(_) => LatestAnswer::default(),
        };
        let why = match latest {
            LatestAnswer { permission: Some(Permission::Permitted), .. } => return Ok(()),
            LatestAnswer { permission: Some(Permission::Requested), .. } => {
                "it is requested".to_owned()
            }
            LatestAnswer { permission: Some(Permission::Denied), .. } => "it is denied".to_owned(),
            LatestAnswer { error: Some(error), .. } => format!("the command failed: {error}"),
            LatestAnswer { .. } => "the command has not answered yet".to_owned(),
        };
        let text = format!("the machine may not be disturbed now: {why}");
        Err(Fault::new(FaultCode::Held, text))
    }

    /// Calls the command when it is due, until `stop` is cancelled.
    pub async fn run(self: Arc<Self>, report_state: Arc<ReportState>, stop: CancellationToken) {
        let (mut core, started) = (Disruption::new(), Instant::now());
        let (mut wanted, mut versions) = (self.wanted.subscribe(), report_state.watch());
        let mut asking = None;
        loop {
            let event = tokio::select! {
                () = stop.cancelled() => return,
                _ = wanted.changed() => wanted_event(&wanted),
                _ = versions.changed() => {
                    self.release_if(|update_id| {
                        !report_state.read(|state| is_in_progress(state, update_id))
                    });
                    continue;
                }
                answer = answer(&mut asking) => {
                    asking = None;
                    self.read_answer(answer)
                }
                () = sleep_until(started + core.wake_at()), if asking.is_none() => Event::Wake,
            };
            if let Some(question) = core.step(started.elapsed(), event) {
                asking = Some(self.ask(question));
            }
            self.latest.send_if_modified(|latest| {
                let changed = latest.permission != core.permission();
                latest.permission = core.permission();
                changed
            });
        }
    }

    /// Ends the request if its update `is_over`.
    fn release_if(&self, is_over: impl Fn(u64) -> bool) {
        let _turn = locked(&self.turn);
        let update_id = *self.wanted.borrow();
        if update_id.is_some_and(is_over) {
            self.latest.send_replace(LatestAnswer::default());
            self.wanted.send_replace(None);
        }
    }

    fn ask(&self, question: Question) -> tokio::task::JoinHandle<CommandResult> {
        let mut line = self.line.clone();
        line.push(question.name().to_owned());
        if question == Question::Check {
            tracing::debug!(command = line.join(" "), "asking the disruption command");
        } else {
            tracing::info!(command = line.join(" "), "asking the disruption command");
        }
        let command_runner = self.command_runner;
        tokio::task::spawn_blocking(move || command_runner.run(&line, TIME_MAX, &|| false))
    }

    fn read_answer(&self, answer: Result<CommandResult, tokio::task::JoinError>) -> Event {
        let (permission, error) = match answer {
            Ok(ended) => match ended.end {
                CommandEnd::Exited(code) if Permission::of_exit_code(code).is_some() => {
                    (Permission::of_exit_code(code), None)
                }
                _ => (None, Some(ended.text())),
            },
            Err(error) => (None, Some(error.to_string())),
        };
        if let Some(error) = &error {
            tracing::error!(error, "the disruption command failed");
        }
        let wanted = self.wanted.borrow().is_some();
        self.latest.send_modify(|latest| latest.error = error.filter(|_| wanted));
        Event::Answer(permission)
    }
}

fn wanted_event(wanted: &watch::Receiver<Option<u64>>) -> Event {
    if wanted.borrow().is_some() { Event::Want } else { Event::Release }
}

/// Waits for the answer; for ever if no call runs.
async fn answer(
    asking: &mut Option<tokio::task::JoinHandle<CommandResult>>,
) -> Result<CommandResult, tokio::task::JoinError> {
    match asking {
        Some(asking) => asking.await,
        None => std::future::pending().await,
    }
}

/// True if the update is staged, under way, or waits for its reboot.
fn is_in_progress(state: &State, update_id: u64) -> bool {
    let last = state.persisted.last_update.as_ref();
    let boots = last.is_some_and(|last| last.update_id == update_id && last.awaits_boot);
    match state.update {
        UpdatePhase::Preparing(current)
        | UpdatePhase::Prepared(current)
        | UpdatePhase::Updating(current) => current == update_id || boots,
        UpdatePhase::Idle => boots,
    }
}
