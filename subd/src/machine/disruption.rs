//! Asks the machine's disruption command before work of high impact: what is asked when is decided
//! in [`permission`], who wants what is followed here.
//!
//! # Invariants
//!
//! * The wish of an update ends with it, however it ends.
//! * An update that is not permitted stays staged.

pub mod permission;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use api::fault::{Fault, FaultCode};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::sync::CancellationToken;

use self::permission::{Disruption, Event, Permission, Question};
use crate::machine::command::{CommandEnd, CommandResult};
use crate::machine::command_runner::CommandRunner;
use crate::state::report_state::{ReportState, State, UpdatePhase};

/// How long the command may take.
const TIME_MAX: Duration = Duration::from_secs(30);

/// How long a Commit waits for the first answer: long enough for a command that asks another
/// machine, and short enough for the caller.
const ANSWER_MAX: Duration = Duration::from_secs(10);

/// What the command has told since something is wanted.
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
    told: watch::Sender<LatestAnswer>,
    /// Keeps two callers from asking for different updates at once.
    turn: Mutex<()>,
}

impl DisruptionGate {
    /// The gate that asks `command`, split at white space; `None` if there is no word in it.
    #[must_use]
    pub fn new(command: &str, command_runner: CommandRunner) -> Option<Arc<Self>> {
        let line: Vec<String> = command.split_whitespace().map(str::to_owned).collect();
        (!line.is_empty()).then(|| {
            let (wanted, told) =
                (watch::Sender::new(None), watch::Sender::new(LatestAnswer::default()));
            Arc::new(Self { line, command_runner, wanted, told, turn: Mutex::new(()) })
        })
    }

    /// Asks for permission for the work of `update_id`.
    ///
    /// # Errors
    ///
    /// `Held` with what the command says, unless that is a permission. The wish stays.
    pub async fn permit(&self, update_id: u64) -> Result<(), Fault> {
        let mut told = self.told.subscribe();
        {
            let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
            if *self.wanted.borrow() != Some(update_id) {
                // What was told for another one says nothing of this one.
                self.told.send_replace(LatestAnswer::default());
                self.wanted.send_replace(Some(update_id));
            }
        }
        let answered = |told: &LatestAnswer| told.permission.is_some() || told.error.is_some();
        let waiting = timeout(ANSWER_MAX, told.wait_for(answered));
        let told = match waiting.await {
            Ok(Ok(told)) => told.clone(),
            Ok(Err(_)) | Err(_) => LatestAnswer::default(),
        };
        let why = match told {
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

    /// Asks the command whenever it is time to, until `stop` is cancelled.
    pub async fn run(self: Arc<Self>, report_state: Arc<ReportState>, stop: CancellationToken) {
        let (mut core, started) = (Disruption::new(), Instant::now());
        let (mut wanted, mut versions) = (self.wanted.subscribe(), report_state.watch());
        let mut asking = None;
        loop {
            let event = tokio::select! {
                () = stop.cancelled() => return,
                _ = wanted.changed() => wish(&wanted),
                _ = versions.changed() => {
                    self.release_if(|update_id| !report_state.read(|state| concerns(state, update_id)));
                    continue;
                }
                answer = answer(&mut asking) => {
                    asking = None;
                    self.understand(answer)
                }
                () = sleep_until(started + core.wake_at()), if asking.is_none() => Event::Wake,
            };
            if let Some(question) = core.step(started.elapsed(), event) {
                asking = Some(self.ask(question));
            }
            self.told.send_if_modified(|told| {
                let changed = told.permission != core.permission();
                told.permission = core.permission();
                changed
            });
        }
    }

    /// Ends the wish if it is that of an update that `is_over`.
    fn release_if(&self, is_over: impl Fn(u64) -> bool) {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let update_id = *self.wanted.borrow();
        if update_id.is_some_and(is_over) {
            self.told.send_replace(LatestAnswer::default());
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

    fn understand(&self, answer: Result<CommandResult, tokio::task::JoinError>) -> Event {
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
        self.told.send_modify(|told| told.error = error.filter(|_| wanted));
        Event::Answer(permission)
    }
}

fn wish(wanted: &watch::Receiver<Option<u64>>) -> Event {
    if wanted.borrow().is_some() { Event::Want } else { Event::Release }
}

/// Waits for the answer; for ever if nothing is asked.
async fn answer(
    asking: &mut Option<tokio::task::JoinHandle<CommandResult>>,
) -> Result<CommandResult, tokio::task::JoinError> {
    match asking {
        Some(asking) => asking.await,
        None => std::future::pending().await,
    }
}

/// True if the update may still do its work, or has not come to the end of it.
fn concerns(state: &State, update_id: u64) -> bool {
    let last = state.persisted.last_update.as_ref();
    let boots = last.is_some_and(|last| last.update_id == update_id && last.awaits_boot);
    match state.update {
        UpdatePhase::Preparing(current)
        | UpdatePhase::Prepared(current)
        | UpdatePhase::Updating(current) => current == update_id || boots,
        UpdatePhase::Idle => boots,
    }
}
