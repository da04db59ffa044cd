//! `domtool rollout`: what is decided about rollouts, asked without a dominator.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Subcommand;
use rollouts::batch::Batch;
use rollouts::document::name_of;
use rollouts::machine_tasks::Actions;
use rollouts::{Answer, Document, decide};
use tool::{Format, PlacedError};

use crate::input_file::read;
use crate::{columns, rollout_orders, text_of};

/// The longest document, in bytes.
const DOCUMENT_BYTES_MAX: usize = 64 << 20;

/// Commands about rollouts.
#[derive(Debug, Subcommand)]
pub(super) enum Command {
    #[command(flatten)]
    Order(rollout_orders::Command),
    #[command(flatten)]
    File(FileCommand),
}

/// Questions about files.
#[derive(Debug, Subcommand)]
pub(super) enum FileCommand {
    /// Say what happens next to a rollout, and why
    ///
    /// FILE says in JSON what is known: groups, environments, the rollout with its steps and votes,
    /// machines with their tasks, and what has just happened, if anything. The answer has the
    /// rollout as it is then, in the same form, so that it can be put back and asked about again.
    ///
    /// Needs neither a dominator nor a certificate, and changes nothing.
    #[command(after_help = "Examples:\n  \
        domtool rollout decide rollout.json\n  \
        domtool rollout decide --format json <rollout.json\n\n\
        docs/ROLLOUTS.md explains the document and the answer.")]
    Decide {
        /// The document; - for stdin
        #[arg(default_value = "-")]
        file: PathBuf,
    },
}

pub(super) fn run(format: Format, command: &FileCommand) -> ExitCode {
    let FileCommand::Decide { file } = command;
    let answer = || -> Result<String, PlacedError> {
        let text = read(file, DOCUMENT_BYTES_MAX)?;
        let document =
            Document::parse(&text).map_err(|error| PlacedError::new(error.at, error.problem))?;
        Ok(format.render(&decide(&document), text_for_people))
    };
    crate::wall_clock::print(format, answer())
}

fn text_for_people(answer: &Answer) -> String {
    let mut text = String::new();
    if let Some(said) = &answer.event {
        text += &format!("event: {} {}\n", said.code, said.message);
    }
    match &answer.rollout {
        Some(rollout) => {
            let id = &rollout.id;
            text += &line(&format!("rollout {id}: {}", name_of(&rollout.state)), &rollout.cause);
            let mut table = columns(&["STEP", "REVISION", "STATE", "AFTER", "VOTES", "WHY"]);
            for step in &rollout.steps {
                let details = answer.steps.iter().find(|details| details.id == step.id);
                let after = details.map(|details| joined(&details.depends_on)).unwrap_or_default();
                let votes = details.map_or(0, |details| details.approvers.len());
                let against = details.map_or(0, |details| details.rejecters.len());
                let revision = step.revision.map_or_else(String::new, |number| number.to_string());
                let votes = format!("{votes} for, {against} against");
                table.add_row([
                    &step.id,
                    &revision,
                    &name_of(&step.state),
                    &after,
                    &votes,
                    &step.cause,
                ]);
            }
            text += &text_of(&table);
        }
        None => text += "no rollout\n",
    }
    if let Some(pending) = &answer.pending {
        text +=
            &line(&format!("rollout {}: {}", pending.id, name_of(&pending.state)), &pending.cause);
    }
    for Batch { step, hosts, state, reason, healthy, machines, .. } in &answer.batches {
        text += &format!("{step}: {}: {reason}; {healthy} of {machines} healthy", name_of(state));
        text +=
            &if hosts.is_empty() { "\n".to_owned() } else { format!(": {}\n", hosts.join(", ")) };
    }
    for Actions { host, stop, start } in &answer.tasks {
        for (what, actions) in [("stop", stop), ("start", start)] {
            for action in actions {
                let (environment, revision) = (&action.environment, action.revision);
                text += &format!("{host}: {what} {environment}@{revision}: {}\n", action.reason);
            }
        }
    }
    for edge in answer.graph.iter().filter(|edge| !edge.holds || edge.by_kept) {
        let by = if edge.by_kept { "met by an old revision" } else { "not met" };
        text += &format!("{} requires {} {}: {by}\n", edge.from, edge.name, edge.requires);
    }
    for cleanup in &answer.cleanup {
        text += &format!("clean up {}@{}\n", cleanup.environment, cleanup.revision);
    }
    if !answer.lock.scope.is_empty() {
        let holder = answer.lock.holder.as_ref();
        let holder =
            holder.map_or_else(String::new, |holder| format!(", which {holder} has locked"));
        text += &format!("locks: {}{holder}\n", joined(&answer.lock.scope));
    }
    text
}

fn line(what: &str, why: &str) -> String {
    if why.is_empty() { format!("{what}\n") } else { format!("{what}: {why}\n") }
}

fn joined(names: &std::collections::BTreeSet<String>) -> String {
    names.iter().map(String::as_str).collect::<Vec<_>>().join(" ")
}
