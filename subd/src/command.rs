//! The command line of `subd`.

use std::process::ExitCode;

use crate::daemon::{Daemon, Options, StartError, describe, hints};
use common::daemon::{EXIT_FAILED, EXIT_MISUSE, config, exit, start_logging, stop_on_signals};

/// How many threads answer calls; scans and updates have their own.
const THREADS: usize = 2;

/// Runs the program, with the arguments of this process.
#[must_use]
pub fn main() -> ExitCode {
    let options: Options = config::parse("subd");
    if let Err(error) = start_logging(&options.log) {
        return exit(EXIT_MISUSE, &error, &[]);
    }
    if let Err(error) = options.security.check_daemon("subd") {
        return exit(EXIT_MISUSE, &error.to_string(), &[error.hint()]);
    }
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(THREADS).enable_all().build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => return exit(EXIT_FAILED, &format!("cannot start: {error}"), &[]),
    };
    runtime.block_on(async {
        let stop = match stop_on_signals() {
            Ok(stop) => stop,
            Err(error) => return exit(EXIT_FAILED, &format!("cannot catch signals: {error}"), &[]),
        };
        match Daemon::start(options, stop).await {
            Ok(daemon) => {
                daemon.run().await;
                ExitCode::SUCCESS
            }
            Err(error @ StartError::Exclude { .. }) => exit(EXIT_MISUSE, &describe(&error), &[]),
            Err(error) => exit(EXIT_FAILED, &describe(&error), &hints(&error)),
        }
    })
}
