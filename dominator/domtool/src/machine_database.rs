//! `domtool mdb`: looks at the machine database, and accepts one that is held.

use std::path::PathBuf;

use api::dominator::machine_database::{
    AcceptMdb, AcceptMdbRequest, ShowMdb, ShowMdbReply, ShowMdbRequest,
};
use clap::Subcommand;
use daemon::EXIT_DONE;
use model::mdb::{Edit, Machine, Machines};
use model::object::ObjectId;
use model::words::counted;
use rpc::client::{CallError, Client};
use tool::{EXIT_DIFFERENT, Format, Output, json};

use super::why::Why;
use super::{ToolError, call, columns, done_as, who};
use daemon::mdb_file::read;

/// How many machines of an edit are named before it is accepted.
const NAMED: usize = 10;

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Show the machine database in force
    #[command(after_help = "Example: domtool mdb show --format json > fleet.json")]
    Show {
        /// The one that is held, instead of the one in force
        #[arg(long)]
        held: bool,
    },
    /// Show what the held machine database, or one in a file, changes of the one in force
    ///
    /// Exits with 0 if nothing differs and with 3 if something does.
    #[command(after_help = "Example: domtool mdb diff fleet.json")]
    Diff {
        /// Compare this file instead of the database that is held
        file: Option<PathBuf>,
    },
    /// Put the machine database that is held in force
    ///
    /// Look at it first: domtool mdb diff. A database that comes later is looked at anew.
    Accept {
        /// The digest of the one that is meant, as `domtool mdb diff` tells it; the one that is
        /// held, if not given
        digest: Option<ObjectId>,
        #[command(flatten)]
        why: Why,
    },
}

pub(super) async fn run(
    client: &Client,
    format: Format,
    command: &Command,
) -> Result<Output, ToolError> {
    match command {
        Command::Show { held } => {
            let reply = get(client, *held).await?;
            Ok(match format {
                Format::Table => table(&reply.machines).into(),
                Format::Json => json(&reply.machines).into(),
            })
        }
        Command::Diff { file } => {
            let in_force = machines(get(client, false).await?);
            let new = match file {
                Some(file) => read(file)?,
                None => {
                    let reply = get(client, true).await?;
                    if let Some(held) = &reply.held {
                        eprintln!("{} is held: {}", held.digest, held.why);
                    }
                    machines(reply)
                }
            };
            let edit = Edit::between(&in_force, &new);
            let code = if edit.is_empty() { EXIT_DONE } else { EXIT_DIFFERENT };
            let text = match format {
                Format::Table => edit.lines().map(|line| line + "\n").collect(),
                Format::Json => json(&edit),
            };
            Ok(Output { text, code })
        }
        Command::Accept { digest, why } => {
            let digest = match digest {
                Some(digest) => *digest,
                None => look(client).await?,
            };
            let request = AcceptMdbRequest { digest, who: who(), why: why.why.clone() };
            let done = call::<AcceptMdb>(client, &request).await?;
            eprintln!("The machine database is in force.");
            Ok(done_as(format, &done).into())
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

/// Tells what would be accepted, and gives its digest.
async fn look(client: &Client) -> Result<ObjectId, ToolError> {
    let held = get(client, true).await?;
    let notice = held.held.clone().ok_or(ToolError::NoNotice)?;
    let edit = Edit::between(&machines(get(client, false).await?), &machines(held));
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
    format!("{}\n", table.trim_fmt())
}
