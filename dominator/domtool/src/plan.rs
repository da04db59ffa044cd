//! `domtool plan`: says what would be done to a machine, or under a whole machine database, and
//! does nothing.

mod sums;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use api::dominator::plan::{
    CheckMdb, CheckMdbRequest, PlanMachine, PlanMachineReply, PlanMachineRequest, PlanMachines,
    PlanMachinesRequest,
};
use clap::Args;
use daemon::EXIT_DONE;
use model::image::ImageName;
use model::mdb::Machine;
use rpc::client::Client;
use tool::{EXIT_DIFFERENT, Format, Output, json};

use super::ToolError;
use daemon::mdb_file::read;
use sums::FleetPlan;

/// How long one answer may take: the dominator may have to get an image first.
const LIMIT: Duration = Duration::from_secs(600);

/// How many machines are asked about at once.
const BATCH: usize = 500;

/// How often it is said how far it is.
const PROGRESS: Duration = Duration::from_secs(1);

#[derive(Debug, Args)]
pub(super) struct Command {
    /// The machine; without --image, what differs from the image that it must have
    #[arg(value_name = "HOST", required_unless_present = "mdb", conflicts_with = "mdb")]
    hostname: Option<String>,
    /// What an update of the machine to this image would do
    #[arg(long, value_name = "NAME", requires = "hostname")]
    image: Option<ImageName>,
    /// What would be done if this file was the machine database
    #[arg(long, value_name = "FILE")]
    mdb: Option<PathBuf>,
    /// Plan for all machines of the file, and not only for those whose records differ
    #[arg(long, requires = "mdb")]
    all: bool,
    /// Tell of every machine, and not only sums
    #[arg(long, short, requires = "mdb")]
    verbose: bool,
}

impl Command {
    /// True if it is for one machine.
    pub(super) fn is_about_one(&self) -> bool {
        self.hostname.is_some()
    }
}

pub(super) async fn run(
    client: &Client,
    format: Format,
    command: &Command,
) -> Result<Output, ToolError> {
    match (&command.mdb, &command.hostname) {
        (Some(file), _) => {
            let plan = fleet(client, file.clone(), command.all).await?;
            let code = if plan.is_change() { EXIT_DIFFERENT } else { EXIT_DONE };
            let text = match format {
                Format::Table => plan.text(command.verbose),
                Format::Json => json(&plan),
            };
            Ok(Output { text, code })
        }
        (None, hostname) => {
            let hostname = hostname.clone().unwrap_or_default();
            let request = PlanMachineRequest { hostname, image: command.image.clone() };
            let reply = client.call_within::<PlanMachine>(&request, LIMIT).await?;
            let code = if reply.preview.same { EXIT_DONE } else { EXIT_DIFFERENT };
            let text = match format {
                Format::Table => text_of(&reply),
                Format::Json => json(&reply),
            };
            Ok(Output { text, code })
        }
    }
}

fn text_of(reply: &PlanMachineReply) -> String {
    let mut text = reply.preview.text();
    if !reply.preview.same {
        let waits = reply.waits.iter().map(|(status, why)| format!("WAITS {status}: {why}\n"));
        text.extend(waits);
    }
    text
}

/// Asks piece by piece, and says on stderr how far it is if that takes long.
async fn fleet(client: &Client, file: PathBuf, all: bool) -> Result<FleetPlan, ToolError> {
    let machines = read(&file)?;
    let request = CheckMdbRequest { machines: machines.values().cloned().collect() };
    let database = client.call_within::<CheckMdb>(&request, LIMIT).await?;
    let is_concerned = |machine: &&Machine| {
        let differs = |names: &Vec<String>| names.binary_search(&machine.hostname).is_ok();
        all || differs(&database.added) || differs(&database.changed)
    };
    let wanted: Vec<Machine> = request.machines.iter().filter(is_concerned).cloned().collect();
    drop(request);
    let mut plan = FleetPlan::new(database);
    let (mut done, mut told) = (0, Instant::now());
    while done < wanted.len() {
        if told.elapsed() >= PROGRESS {
            eprintln!("planned for {done} of {} machines", wanted.len());
            told = Instant::now();
        }
        let batch = &wanted[done..wanted.len().min(done + BATCH)];
        let request = PlanMachinesRequest { machines: batch.to_vec() };
        let reply = client.call_within::<PlanMachines>(&request, LIMIT).await?;
        if reply.machines.is_empty() {
            return Err(ToolError::NoProgress);
        }
        done += reply.machines.len();
        plan.add(reply);
    }
    Ok(plan)
}
