//! The process: starts the daemon from the command line, and reads its configuration again upon
//! SIGHUP.

use std::process::ExitCode;
use std::sync::Arc;

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, watch};

use crate::daemon::{Arguments, NAME, StartError, run};
use crate::runtime::fleet::Fleet;
use daemon::{exit_on_error, raise_file_limit, set_log_filter, start_logging, stop_on_signals};

/// Runs the dominator, with the arguments of this process.
pub fn main() -> ExitCode {
    let arguments: Arguments = daemon::config::parse(NAME);
    exit_on_error(start(arguments))
}

fn start(arguments: Arguments) -> Result<(), Box<dyn std::error::Error>> {
    start_logging(&arguments.log)?;
    // Each machine takes a connection.
    if let Err(error) = raise_file_limit() {
        tracing::warn!("cannot raise the limit of open files: {error}");
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let result = runtime.block_on(async {
        let stop = stop_on_signals()?;
        let changed = read_again_on_hangup()?;
        match run(arguments, changed, stop).await {
            Ok(()) => Ok(()),
            Err(StartError::Security(error)) => Err(error.into()),
            Err(error) => Err(Box::<dyn std::error::Error>::from(error)),
        }
    });
    // Plans that are still being made are not needed.
    runtime.shutdown_background();
    result
}

/// Returns a channel that gives the new arguments after each SIGHUP, unless they are invalid.
fn read_again_on_hangup() -> std::io::Result<mpsc::Receiver<Arguments>> {
    let mut hangup = signal(SignalKind::hangup())?;
    let (sender, changed) = mpsc::channel(1);
    tokio::spawn(async move {
        while hangup.recv().await.is_some() {
            match daemon::config::parse_again(NAME) {
                Ok(arguments) => {
                    if sender.send(arguments).await.is_err() {
                        return;
                    }
                }
                Err(error) => {
                    let error = model::display::error_chain(&error);
                    tracing::error!("the configuration stays as it was: {error}");
                }
            }
        }
    });
    Ok(changed)
}

/// Applies each configuration from `changed`, as far as that is possible without a restart.
/// `programs` get the words of the alarm and the rollout command.
pub(super) async fn apply_changes(
    fleet: Arc<Fleet>,
    mut arguments: Arguments,
    mut changed: mpsc::Receiver<Arguments>,
    programs: [watch::Sender<Vec<String>>; 2],
) {
    while let Some(new) = changed.recv().await {
        for flag in arguments.fixed_that_differ(&new) {
            tracing::error!("--{flag} takes effect at the next start only");
        }
        if new.log.filter != arguments.log.filter
            && let Err(error) = set_log_filter(&new.log.filter)
        {
            tracing::error!("the log filter stays as it was: {error}");
        }
        let (limits, limited) = (new.mdb_limits(), Arc::clone(&fleet));
        // This fails only if the thread panicked, which has been logged.
        let _set = tokio::task::spawn_blocking(move || limited.set_mdb_limits(limits)).await;
        let settings = new.budgets.settings();
        fleet.shared().computed.set_limits(settings.failures);
        fleet.shared().claim_service.set(settings);
        let [alarm, rollout, analysis] = new.programs();
        fleet.set_analysis_command(analysis);
        for (program, new) in programs.iter().zip([alarm, rollout]) {
            program.send_if_modified(|program| {
                let is_other = *program != new;
                *program = new;
                is_other
            });
        }
        tracing::warn!("the configuration was read again");
        arguments = arguments.with_changeable(new);
    }
}
