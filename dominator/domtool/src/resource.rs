//! `domtool resource`: the resources of machines, and orders about orphans.

use std::fmt::Write as _;

use api::dominator::resources::{
    GetResources, MachineResources, OrderResource, OrderResourceRequest,
};
use api::dominator::{ListSubsRequest, TagFilter};
use api::subd::{ProvisioningStage, ResourceOrder};
use clap::{Args, Subcommand};
use model::display::safe_text;
use rpc::client::Client;
use tool::{Format, Output};

use super::orders::RequiredWhy;
use super::{ToolError, call, columns, silent, text_of, who};

/// The longest text of a resource in a table, in bytes.
const CELL_BYTES_MAX: usize = 200;

/// Questions about resources, and orders about orphans.
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
    /// Have a machine forget an orphan, which stays as it is
    ///
    /// An orphan is a resource that stays although no image of the machine has it any more. What
    /// is to be destroyed and cannot be may be forgotten too.
    #[command(after_help = "Example: domtool resource forget web1 db --why 'moved to sql2'")]
    Forget(OrphanArguments),
    /// Have a machine destroy an orphan, with the plugin that made it
    ///
    /// It is tried every ten minutes until it is gone. If an image is to come whose resources are
    /// provisioned, the machine has that image first.
    #[command(after_help = "Example: domtool resource destroy web1 db --why 'not needed any more'")]
    Destroy(OrphanArguments),
}

#[derive(Debug, Args)]
pub(super) struct OrphanArguments {
    /// Name of the machine in the machine database
    #[arg(value_name = "HOST")]
    hostname: String,
    /// The resource
    #[arg(value_name = "ID")]
    id: String,
    #[command(flatten)]
    why: RequiredWhy,
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
    let machines = match command {
        Command::Forget(orphan) => {
            return give(client, format, orphan, ResourceOrder::Forget).await;
        }
        Command::Destroy(orphan) => {
            return give(client, format, orphan, ResourceOrder::Destroy).await;
        }
        Command::List { machines, .. } | Command::Graph { machines } => machines,
    };
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
        _ => format.render(&machines, |machines| graph(machines)),
    }
    .into())
}

async fn give(
    client: &Client,
    format: Format,
    orphan: &OrphanArguments,
    order: ResourceOrder,
) -> Result<Output, ToolError> {
    let OrphanArguments { hostname, id, why } = orphan;
    let (hostname, id, why) = (hostname.clone(), id.clone(), why.why.clone());
    let request = OrderResourceRequest { hostname, id, order, why, who: who() };
    let done = call::<OrderResource>(client, &request).await?;
    let OrderResourceRequest { hostname, id, .. } = request;
    match order {
        ResourceOrder::Forget => eprintln!("{hostname} knows nothing of {id} any more."),
        ResourceOrder::Destroy => {
            eprintln!("{hostname} destroys {id}: domtool resource list --host {hostname}");
        }
    }
    Ok(silent(format, &done))
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
