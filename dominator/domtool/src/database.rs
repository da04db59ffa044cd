//! `domtool database`: checks, restores and salvages the database of a stopped dominator.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Subcommand};
use daemon::{EXIT_FAILED, exit};
use dominator::storage::StorageError;
use dominator::storage::offline::{self, DatabaseSummary, REPLACED};
use model::display::{counted, error_chain, utc};
use tool::{Format, Output};

#[derive(Debug, Args)]
pub(super) struct StateDirectory {
    /// State directory of the dominator, which must be stopped
    #[arg(long, value_name = "DIR", default_value = "/var/lib/dominator")]
    state: PathBuf,
}

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Read the whole database and tell whether it is damaged
    Check(StateDirectory),
    /// Check a backup and put a copy of it into the place of the database
    ///
    /// If anything fails, the former database stays. The former one is kept as
    /// dominator.redb.replaced. The dominator then starts with updates disabled and with the state
    /// of the time of the backup.
    #[command(after_help = "Example:\n  \
        systemctl stop dominator\n  \
        domtool database restore /var/backups/dominator-2030-01-31\n  \
        systemctl start dominator")]
    Restore {
        /// File that `domtool backup` wrote
        backup: PathBuf,
        #[command(flatten)]
        state: StateDirectory,
    },
    /// Save what can be read of a damaged database into a new one
    ///
    /// Saves what operators ordered, the machine database in force, and the identities of machines.
    /// The history of updates and statuses is lost. The damaged database is kept as
    /// dominator.redb.replaced. The dominator then starts with updates disabled. Restore a backup
    /// instead if there is one.
    Salvage(StateDirectory),
}

/// Runs the command. It needs neither a dominator nor a certificate.
pub(super) fn run(command: &Command, format: Format) -> ExitCode {
    match output(command, format) {
        Ok(output) => output.print(),
        Err(error) => exit(EXIT_FAILED, &error_chain(&error), &[]),
    }
}

fn output(command: &Command, format: Format) -> Result<Output, StorageError> {
    Ok(match command {
        Command::Check(StateDirectory { state }) => {
            let summary = offline::check(state)?;
            eprintln!("The database is not damaged.");
            format.render(&summary, text).into()
        }
        Command::Restore { backup, state: StateDirectory { state } } => {
            let summary = offline::restore(backup, state)?;
            eprintln!("Restored. A former database is kept as {}.", state.join(REPLACED).display());
            format.render(&summary, text).into()
        }
        Command::Salvage(StateDirectory { state }) => {
            let salvaged = offline::salvage(state)?;
            let replaced = state.join(REPLACED);
            eprintln!("The damaged database is kept as {}.", replaced.display());
            let shown = format.render(&salvaged, |salvaged| {
                let (orders, lost) = (salvaged.orders as u64, salvaged.lost.join(", "));
                let orders = counted(orders, "order");
                format!("{}orders: {orders}\nlost: {lost}\n", text(&salvaged.database))
            });
            shown.into()
        }
    })
}

fn text(summary: &DatabaseSummary) -> String {
    let DatabaseSummary { machines, identities, brake, copied } = summary;
    let mut text = format!("machine database: {}\n", counted(*machines as u64, "machine"));
    text.push_str(&format!("identities: {}\n", counted(*identities as u64, "machine")));
    match brake {
        Some(reason) => text.push_str(&format!("updates: DISABLED: {reason}\n")),
        None => text.push_str("updates: enabled\n"),
    }
    if let Some(copied) = copied {
        text.push_str(&format!("backup of: {}; updates are disabled at the start\n", utc(*copied)));
    }
    text
}
