//! `domtool fence`, `unfence` and `list-permits`: which machine may run an exclusive task.

use api::dominator::permits::{
    Fence, FenceMachine, FenceMachineRequest, ListPermits, ListPermitsReply, PermitHolder,
    TaskPermits,
};
use clap::Subcommand;
use model::display::utc;
use rpc::client::Client;
use tool::{Format, Output};

use super::orders::RequiredWhy;
use super::{ToolError, call, columns, silent, text_of, who};

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Say that a machine is off, so that other machines run its exclusive tasks at once
    ///
    /// Without this they wait until its permits must have ended. Turn the machine off first, or
    /// cut it off from all that its tasks use: nothing else keeps two from running. It gets no
    /// permit until domtool unfence HOST. Its updates go on.
    #[command(after_help = "Example: domtool fence web1 --why 'its power supply is out'")]
    Fence {
        /// Name of the machine
        #[arg(value_name = "HOST")]
        hostname: String,
        #[command(flatten)]
        why: RequiredWhy,
    },
    /// Let a machine that was fenced run exclusive tasks again
    ///
    /// It must have been off or rebooted since it was fenced, or no process of them may be left.
    #[command(after_help = "Example: domtool unfence web1 --why 'it is repaired'")]
    Unfence {
        /// Name of the machine
        #[arg(value_name = "HOST")]
        hostname: String,
        #[command(flatten)]
        why: RequiredWhy,
    },
    /// List which machines may run exclusive tasks, and which machines are fenced
    ListPermits,
}

pub(super) async fn run(
    client: &Client,
    format: Format,
    command: &Command,
) -> Result<Output, ToolError> {
    match command {
        Command::Fence { hostname, why } => fence(client, format, hostname, why, true).await,
        Command::Unfence { hostname, why } => fence(client, format, hostname, why, false).await,
        Command::ListPermits => {
            let reply = call::<ListPermits>(client, &()).await?;
            Ok(format.render(&reply, listed).into())
        }
    }
}

async fn fence(
    client: &Client,
    format: Format,
    hostname: &str,
    why: &RequiredWhy,
    is_off: bool,
) -> Result<Output, ToolError> {
    let (hostname, why) = (hostname.to_owned(), why.why.clone());
    let request = FenceMachineRequest { hostname, is_off, why, who: who() };
    let done = call::<FenceMachine>(client, &request).await?;
    let hostname = request.hostname;
    match is_off {
        true => eprintln!("{hostname} is fenced: others run its exclusive tasks."),
        false => eprintln!("{hostname} may run exclusive tasks again."),
    }
    Ok(silent(format, &done))
}

fn listed(reply: &ListPermitsReply) -> String {
    let ListPermitsReply { opens_in_s, tasks, fenced } = reply;
    let mut text = match opens_in_s {
        0 => String::new(),
        left => format!("Permits of an earlier start of the dominator end in {left} s at last.\n"),
    };
    let mut table = columns(&["TASK", "HOST", "PERMIT", "ENDS IN", "LIVE"]);
    for TaskPermits { task, holders } in tasks {
        if holders.is_empty() {
            table.add_row([task, "nobody"]);
        }
        for PermitHolder { hostname, number, ends_in_s, is_live } in holders {
            let live = if *is_live { "yes" } else { "no" };
            let row = [&number.to_string(), &format!("{ends_in_s} s"), live].map(str::to_owned);
            table.add_row([task.clone(), hostname.clone()].into_iter().chain(row));
        }
    }
    text.push_str(&text_of(&table));
    if !fenced.is_empty() {
        let mut table = columns(&["FENCED", "SINCE", "BY", "WHY"]);
        for Fence { hostname, who, why, since } in fenced {
            table.add_row([hostname, &utc(*since), who, why]);
        }
        text.push_str(&text_of(&table));
    }
    text
}
