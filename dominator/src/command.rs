//! The command lines of `dominator`, `domtool` and `mdbd`.

use std::process::ExitCode;

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

use crate::daemon::{Arguments, NAME, StartError, run};
use crate::{domtool, mdbd};
use common::daemon::config::Beside;
use common::daemon::{
    EXIT_FAILED, exit, exit_on_error, raise_file_limit, start_logging, stop_on_signals,
};

/// Runs the dominator, with the arguments of this process.
#[must_use]
pub fn dominator() -> ExitCode {
    let arguments: Arguments = common::daemon::config::parse(NAME);
    exit_on_error(start(arguments))
}

/// Runs mdbd, with the arguments of this process.
#[must_use]
pub fn mdbd() -> ExitCode {
    let (arguments, beside) = common::daemon::config::parse_beside(mdbd::NAME, &mdbd::TABLES);
    exit_on_error(start_mdbd(arguments, beside))
}

/// Runs domtool, with the arguments of this process.
#[must_use]
pub fn domtool() -> ExitCode {
    let arguments: domtool::Arguments = common::daemon::config::parse_tool();
    match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime.block_on(domtool::run(arguments)),
        Err(error) => exit(EXIT_FAILED, &format!("cannot start: {error}"), &[]),
    }
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
            match common::daemon::config::parse_again(NAME) {
                Ok(arguments) => {
                    if sender.send(arguments).await.is_err() {
                        return;
                    }
                }
                Err(error) => {
                    let error = common::report::report(&error);
                    tracing::error!("the configuration stays as it was: {error}");
                }
            }
        }
    });
    Ok(changed)
}

fn start_mdbd(
    arguments: mdbd::Arguments,
    beside: Beside,
) -> Result<(), Box<dyn std::error::Error>> {
    start_logging(&arguments.log)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let result = runtime.block_on(async {
        let stop = stop_on_signals()?;
        match mdbd::run(arguments, beside, stop).await {
            Ok(()) => Ok(()),
            Err(mdbd::StartError::Security(error)) => Err(error.into()),
            Err(error) => Err(Box::<dyn std::error::Error>::from(error)),
        }
    });
    // A file-system that hangs must not keep it from ending.
    runtime.shutdown_background();
    result
}
