//! The command line of `dominator`.

use std::process::ExitCode;

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

use crate::daemon::{Arguments, NAME, StartError, run};
use daemon::{exit_on_error, raise_file_limit, start_logging, stop_on_signals};

/// Runs the dominator, with the arguments of this process.
#[must_use]
pub fn main() -> ExitCode {
    let arguments: Arguments = daemon::config::parse(NAME);
    exit_on_error(start(arguments))
}

fn start(arguments: Arguments) -> Result<(), Box<dyn std::error::Error>> {
    start_logging(&arguments.log)?;
    // One connection for each machine: take as many descriptors as the system gives.
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
    // Plans that are still being made are of no use to anyone.
    runtime.shutdown_background();
    result
}

/// The arguments as they are whenever SIGHUP has come, if they are in order.
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
                    let error = model::report::report(&error);
                    tracing::error!("the configuration stays as it was: {error}");
                }
            }
        }
    });
    Ok(changed)
}
