//! `domtool resource`: the resources of machines.

use std::fmt::Write as _;

use api::dominator::resources::{GetResources, MachineResources};
use api::dominator::{ListSubsRequest, TagFilter};
use api::subd::ProvisioningStage;
use clap::{Args, Subcommand};
use model::display::safe_text;
use rpc::client::Client;
use tool::{Format, Output};

use super::{ToolError, call, columns, text_of};

/// The longest text of a resource in a table, in bytes.
const CELL_BYTES_MAX: usize = 200;

/// Questions about resources.
#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// List the resources of machines, also those that no image has any more: orphans
    #[command(after_help = "Examples:\n  \
        domtool resource list --host web1\n  \
        domtool resource list --tag tier=front --format json")]
    List {
        #[command(flatten)]
        machines: MachineArguments,
        /// Only orphans
        #[arg(long)]
        orphans: bool,
    },
    /// Print which resources need which, in the language of Graphviz
    #[command(after_help = "Example: domtool resource graph --host web1 | dot -Tsvg >web1.svg")]
    Graph {
        #[command(flatten)]
        machines: MachineArguments,
    },
}

#[derive(Debug, Args)]
pub(super) struct MachineArguments {
    /// Only machines with a matching name: `*` matches any text, `?` one character; may be repeated
    #[arg(long, value_name = "HOST")]
    host: Vec<String>,
    /// Only machines with this tag; if repeated, machines with all of the tags
    #[arg(long, value_name = "NAME[=VALUE]")]
    tag: Vec<String>,
    /// Only machines whose required image is this one or below it; may be repeated
    #[arg(long, value_name = "IMAGE")]
    image: Vec<String>,
}

/// Runs a command.
pub(super) async fn run(
    client: &Client,
    format: Format,
    command: &Command,
) -> Result<Output, ToolError> {
    let (Command::List { machines, .. } | Command::Graph { machines }) = command;
    let request = ListSubsRequest {
        hosts: machines.host.clone(),
        images: machines.image.clone(),
        tags: machines.tag.iter().map(|tag| TagFilter::parse(tag)).collect(),
        ..ListSubsRequest::default()
    };
    let mut machines = call::<GetResources>(client, &request).await?.machines;
    for (machine, why) in machines.iter().filter_map(|of| Some((of, of.unknown.as_ref()?))) {
        eprintln!("{}: its resources are not known: {why}", machine.hostname);
    }
    Ok(match command {
        Command::List { orphans, .. } => {
            if *orphans {
                for report in machines.iter_mut().filter_map(|machine| machine.report.as_mut()) {
                    report.resources.retain(|resource| resource.is_orphan);
                }
            }
            format.render(&machines, |machines| list(machines))
        }
        Command::Graph { .. } => format.render(&machines, |machines| graph(machines)),
    }
    .into())
}

fn list(machines: &[MachineResources]) -> String {
    let mut table = columns(&["HOST", "RESOURCE", "KIND", "STATE", "PROVISIONER", "TEXT"]);
    for MachineResources { hostname, report, .. } in machines {
        let Some(report) = report else { continue };
        if let Some(ProvisioningStage::Failed { error }) =
            report.provisioning.as_ref().map(|provisioning| &provisioning.stage)
        {
            eprintln!("{hostname}: {}", safe_text(error, CELL_BYTES_MAX));
        }
        for resource in &report.resources {
            table.add_row([
                hostname.clone(),
                resource.id.clone(),
                resource.kind.clone(),
                resource.shown_state().to_owned(),
                resource.provisioner.clone(),
                safe_text(&resource.text, CELL_BYTES_MAX),
            ]);
        }
    }
    text_of(&table)
}

/// Returns a graph with an edge from each resource to what it needs.
fn graph(machines: &[MachineResources]) -> String {
    let mut text = "digraph resources {\n".to_owned();
    for MachineResources { hostname, report, .. } in machines {
        let resources = report.iter().flat_map(|report| &report.resources);
        for resource in resources {
            let node = quoted(&format!("{hostname}/{}", resource.id));
            let label =
                quoted(&format!("{} ({}, {})", resource.id, resource.kind, resource.shown_state()));
            writeln!(text, "  {node} [label={label}];").expect("writing to a String cannot fail");
            for needed in &resource.needs {
                let needed = quoted(&format!("{hostname}/{needed}"));
                writeln!(text, "  {node} -> {needed};").expect("writing to a String cannot fail");
            }
        }
    }
    text.push_str("}\n");
    text
}

fn quoted(text: &str) -> String {
    let text = safe_text(text, CELL_BYTES_MAX).replace('\\', "\\\\").replace('"', "\\\"");
    format!("\"{text}\"")
}
