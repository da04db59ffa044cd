//! The command line of `subd`.

use std::process::ExitCode;

use crate::daemon::{Daemon, Options, StartError, describe, hints, recover};
use daemon::{EXIT_FAILED, EXIT_MISUSE, config, exit, start_logging, stop_on_signals};

/// How many threads answer calls; scans and updates have their own.
const THREADS: usize = 2;

/// What to do when an update can be neither finished nor undone.
const RECOVER_HINT: &str = "mend what is named, then run this again or start subd";

/// Runs the program, with the arguments of this process.
#[must_use]
pub fn main() -> ExitCode {
    let options: Options = config::parse("subd");
    if let Err(error) = start_logging(&options.log) {
        return exit(EXIT_MISUSE, &error, &[]);
    }
    if options.recover {
        return match recover(&options) {
            Ok(Ok(done)) => {
                println!("{done}");
                ExitCode::SUCCESS
            }
            Ok(Err(stuck)) => exit(EXIT_FAILED, &stuck, &[RECOVER_HINT]),
            Err(error) => exit(EXIT_FAILED, &describe(&error), &hints(&error)),
        };
    }
    let security = match options.security.of_daemon("subd") {
        Ok(security) => security,
        Err(error) => return error.exit(),
    };
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
        // It also ends when it has to open everything again.
        while !stop.is_cancelled() {
            match Daemon::start(options.clone(), &security, stop.clone()).await {
                Ok(daemon) => daemon.run().await,
                Err(error @ StartError::Exclude { .. }) => {
                    return exit(EXIT_MISUSE, &describe(&error), &[]);
                }
                Err(error) => return exit(EXIT_FAILED, &describe(&error), &hints(&error)),
            }
        }
        ExitCode::SUCCESS
    })
}
