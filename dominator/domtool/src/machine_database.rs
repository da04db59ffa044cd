//! `domtool mdb`: shows and compares machine databases, and accepts one that is held.

use std::path::{Path, PathBuf};

use api::dominator::mdb::{AcceptMdb, AcceptMdbRequest, ShowMdb, ShowMdbReply, ShowMdbRequest};
use api::fault::FaultCode;
use clap::Subcommand;
use daemon::EXIT_DONE;
use daemon::mdb_file::{MdbFile, read};
use model::display::counted;
use model::mdb::{Machine, Machines, MdbDiff};
use model::object::ObjectId;
use model::unknown_keys::UnknownKey;
use rpc::client::{CallError, Client};
use serde::Serialize;
use tool::{EXIT_DIFFERENT, Format, Output};

use super::orders::OptionalWhy;
use super::{ToolError, call, columns, silent, text_of, who};

/// Lists at most this many machines of an edit before it is accepted.
const NAMED: usize = 10;

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Show the machine database in force
    #[command(after_help = "Example: domtool mdb show --format json > fleet.json")]
    Show {
        /// Show the held database instead of the one in force
        #[arg(long)]
        held: bool,
    },
    /// Compare the held machine database, or one in a file, with the one in force
    ///
    /// Exit code 0: they are equal. Exit code 3: they differ.
    #[command(after_help = "Example: domtool mdb diff fleet.json")]
    Diff {
        /// Compare this file instead of the held database
        file: Option<PathBuf>,
    },
    /// Check a machine database in a file, without a dominator
    ///
    /// Exit code 0: it is good. Exit code 1: it is not valid. Exit code 3: it has keys that nothing
    /// reads, which may be misspelt.
    #[command(after_help = "Example: domtool mdb check fleet.json")]
    Check {
        /// The file
        file: PathBuf,
    },
    /// Put the held machine database in force
    ///
    /// Look at it first: domtool mdb diff. The order does not apply to a database that comes later.
    Accept {
        /// Digest of the database to accept, as `domtool mdb diff` prints it; without it, the
        /// database that is held now
        digest: Option<ObjectId>,
        #[command(flatten)]
        why: OptionalWhy,
    },
}

/// What is printed of a machine database that was checked.
#[derive(Serialize)]
struct CheckedMdb {
    machines: usize,
    unknown_keys: Vec<UnknownKey>,
}

/// Checks the machine database in a file.
pub(super) fn check(format: Format, file: &Path) -> Result<Output, ToolError> {
    let MdbFile { machines, unknown_keys } = read(file)?;
    let code = if unknown_keys.is_empty() { EXIT_DONE } else { EXIT_DIFFERENT };
    let checked = CheckedMdb { machines: machines.len(), unknown_keys };
    let text = format.render(&checked, |checked| {
        let lines = checked.unknown_keys.iter().map(|unknown| format!("{unknown}\n"));
        let count = counted(checked.machines as u64, "machine");
        lines.chain([format!("{count}\n")]).collect()
    });
    Ok(Output { text, code })
}

pub(super) async fn run(
    client: &Client,
    format: Format,
    command: &Command,
) -> Result<Output, ToolError> {
    match command {
        Command::Show { held } => {
            let reply = get(client, *held).await?;
            Ok(format.render(&reply.machines, |machines| table(machines)).into())
        }
        Command::Diff { file } => {
            let in_force = machines(get(client, false).await?);
            let new = match file {
                Some(file) => read(file)?.machines,
                None => match get(client, true).await {
                    Ok(reply) => {
                        if let Some(held) = &reply.held {
                            eprintln!("{} is held: {}", held.digest, held.why);
                        }
                        machines(reply)
                    }
                    Err(error) if error.code() == Some(FaultCode::NotFound) => {
                        eprintln!("No machine database is held.");
                        in_force.clone()
                    }
                    Err(error) => return Err(error.into()),
                },
            };
            let edit = MdbDiff::between(&in_force, &new);
            let code = if edit.is_empty() { EXIT_DONE } else { EXIT_DIFFERENT };
            let text = format.render(&edit, |edit| edit.lines().map(|line| line + "\n").collect());
            Ok(Output { text, code })
        }
        Command::Check { .. } => unreachable!("it is carried out without a dominator"),
        Command::Accept { digest, why } => {
            let digest = match digest {
                Some(digest) => *digest,
                None => show_held(client).await?,
            };
            let request = AcceptMdbRequest { digest, who: who(), why: why.why.clone() };
            let done = call::<AcceptMdb>(client, &request).await?;
            eprintln!("The machine database is in force.");
            Ok(silent(format, &done))
        }
    }
}

async fn get(client: &Client, held: bool) -> Result<ShowMdbReply, CallError> {
    call::<ShowMdb>(client, &ShowMdbRequest { held }).await
}

fn machines(reply: ShowMdbReply) -> Machines {
    let machines = reply.machines.into_iter();
    machines.map(|machine| (machine.hostname.clone(), machine)).collect()
}

/// Prints what would be accepted and returns its digest.
async fn show_held(client: &Client) -> Result<ObjectId, ToolError> {
    let held = get(client, true).await?;
    let notice = held.held.clone().ok_or(ToolError::NoNotice)?;
    let edit = MdbDiff::between(&machines(get(client, false).await?), &machines(held));
    eprintln!("{} is held: {}", notice.digest, notice.why);
    let lines: Vec<String> = edit.lines().collect();
    for line in lines.iter().take(NAMED) {
        eprintln!("{line}");
    }
    if let Some(more) = lines.len().checked_sub(NAMED).filter(|&more| more > 0) {
        eprintln!("and {} more", counted(more as u64, "machine"));
    }
    Ok(notice.digest)
}

fn table(machines: &[Machine]) -> String {
    let mut table = columns(&["HOST", "REQUIRED", "PLANNED", "UPDATES", "LOCATION", "TAGS"]);
    for machine in machines {
        let tags: Vec<String> =
            machine.tags.iter().map(|(name, value)| format!("{name}={value}")).collect();
        table.add_row([
            machine.hostname.clone(),
            machine.required_image.clone(),
            machine.planned_image.clone(),
            if machine.disable_updates { "disabled".to_owned() } else { String::new() },
            machine.location.clone(),
            tags.join(" "),
        ]);
    }
    text_of(&table)
}
