//! `domtool computed`: changes of the content of computed files.

use api::dominator::content::{
    ContentChange, ContentChangeId, ContentOrder, ContentStage, ListContentChanges,
    ListContentChangesRequest, OrderContentChange, OrderContentChangeRequest,
};
use clap::Subcommand;
use model::display::{counted, utc};
use rpc::client::Client;
use tool::{Format, Output};

use super::orders::RequiredWhy;
use super::{ToolError, call, columns, silent, text_of, who};

/// The changes of content, and orders about them.
#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// List the changes of content, with how far each has come
    #[command(after_help = "Example: domtool computed list files:6972")]
    List {
        /// Address of the filegen-server, as images name it; all if it is left out
        server: Option<String>,
    },
    /// Show one change: its paths, its first machines, and why it is stopped
    #[command(after_help = "Example: domtool computed show files:6972/7")]
    Show {
        /// The change, HOST:PORT/NUMBER or HOST:PORT/PATH
        change: ContentChangeId,
    },
    /// Give a change to no more machines; those that have it keep it
    ///
    /// The filegen-server is told, and the stop of a revision holds for all dominators.
    #[command(after_help = "Example: domtool computed stop files:6972/7 --why 'wrong servers'")]
    Stop {
        /// The change, HOST:PORT/NUMBER or HOST:PORT/PATH
        change: ContentChangeId,
        #[command(flatten)]
        why: RequiredWhy,
    },
    /// Stop a change, and take the machines that have it back to their former content
    #[command(after_help = "Example: domtool computed rollback files:6972/7 --why 'no answers'")]
    Rollback {
        /// The change, HOST:PORT/NUMBER or HOST:PORT/PATH
        change: ContentChangeId,
        #[command(flatten)]
        why: RequiredWhy,
    },
    /// Try a stopped change anew, on a few first machines
    ///
    /// With --urgent all machines get it at once, within the budgets, as if it had been verified.
    /// That is also for a change that is still on its first machines.
    #[command(after_help = "Examples:\n  \
        domtool computed resume files:6972/7 --why 'the switch was bad'\n  \
        domtool computed resume files:6972/8 --urgent --why 'the old servers go off at noon'")]
    Resume {
        /// The change, HOST:PORT/NUMBER or HOST:PORT/PATH
        change: ContentChangeId,
        /// Skip the first machines
        #[arg(long)]
        urgent: bool,
        #[command(flatten)]
        why: RequiredWhy,
    },
}

/// Runs a command.
pub(super) async fn run(
    client: &Client,
    format: Format,
    command: &Command,
) -> Result<Output, ToolError> {
    match command {
        Command::List { server } => {
            let changes = changes(client, server.clone().unwrap_or_default()).await?;
            Ok(format.render(&changes, |changes| list(changes)).into())
        }
        Command::Show { change } => {
            let changes = changes(client, change.source.clone()).await?;
            let found = changes.into_iter().find(|known| known.id == *change);
            let found = found.ok_or_else(|| ToolError::NoChange { id: change.clone() })?;
            Ok(format.render(&found, show).into())
        }
        Command::Stop { change, why } => {
            let done = order(client, change, ContentOrder::Stop, why).await?;
            eprintln!("{change} goes to no more machines.");
            Ok(silent(format, &done))
        }
        Command::Rollback { change, why } => {
            let done = order(client, change, ContentOrder::RollBack, why).await?;
            eprintln!(
                "{change} is stopped; machines that have it go back to their former content."
            );
            Ok(silent(format, &done))
        }
        Command::Resume { change, urgent, why } => {
            let kind = if *urgent { ContentOrder::Open } else { ContentOrder::Resume };
            let done = order(client, change, kind, why).await?;
            match urgent {
                true => eprintln!("{change} goes to all machines now."),
                false => eprintln!("{change} is tried anew on the first machines."),
            }
            Ok(silent(format, &done))
        }
    }
}

async fn changes(client: &Client, source: String) -> Result<Vec<ContentChange>, ToolError> {
    let request = ListContentChangesRequest { source };
    Ok(call::<ListContentChanges>(client, &request).await?.changes)
}

async fn order(
    client: &Client,
    id: &ContentChangeId,
    order: ContentOrder,
    why: &RequiredWhy,
) -> Result<api::Done, ToolError> {
    let (id, why) = (id.clone(), why.why.clone());
    let request = OrderContentChangeRequest { id, order, why, who: who() };
    Ok(call::<OrderContentChange>(client, &request).await?)
}

fn list(changes: &[ContentChange]) -> String {
    let mut table =
        columns(&["CHANGE", "STAGE", "SINCE", "VERIFIED", "FAILED", "TRYING", "WAITING"]);
    for change in changes {
        table.add_row([
            change.id.to_string(),
            stage(change).to_owned(),
            utc(change.since),
            change.verified.to_string(),
            change.failed.to_string(),
            change.trying.len().to_string(),
            change.waiting.to_string(),
        ]);
    }
    text_of(&table)
}

/// Names the stage; a change that no machine waits for is done.
fn stage(change: &ContentChange) -> &'static str {
    match change.stage {
        ContentStage::Stopped(_) => change.stage.name(),
        _ if change.waiting == 0 && change.trying.is_empty() => "done",
        _ => change.stage.name(),
    }
}

fn show(change: &ContentChange) -> String {
    let paths: Vec<String> = change.paths.iter().map(ToString::to_string).collect();
    let mut text = format!("{}: {} since {}\n", change.id, stage(change), utc(change.since));
    if let ContentStage::Stopped(why) = &change.stage {
        text.push_str(&format!("  why: {why}\n"));
    }
    let machines = |count: u32| counted(count.into(), "machine");
    text.push_str(&format!("  paths: {}\n", paths.join(", ")));
    text.push_str(&format!("  verified on {}\n", machines(change.verified)));
    text.push_str(&format!("  failed on {}\n", machines(change.failed)));
    if !change.trying.is_empty() {
        text.push_str(&format!("  being tried on {}\n", change.trying.join(", ")));
    }
    text.push_str(&format!("  {} for it\n", waits(change.waiting)));
    let kept = machines(change.reversible);
    text.push_str(&format!("  {kept} can go back to former content\n"));
    text
}

fn waits(count: u32) -> String {
    match count {
        1 => "1 machine waits".to_owned(),
        count => format!("{} wait", counted(count.into(), "machine")),
    }
}
