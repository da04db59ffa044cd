//! `domtool plan`: shows what would be done to a machine, or under another machine database.

mod fleet_plan;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use api::dominator::plan::{
    CheckMdb, CheckMdbRequest, PlanMachine, PlanMachineReply, PlanMachineRequest, PlanMachines,
    PlanMachinesRequest,
};
use clap::Args;
use daemon::EXIT_DONE;
use daemon::mdb_file::read;
use model::image::ImageName;
use model::mdb::Machine;
use rpc::client::Client;
use tool::{EXIT_DIFFERENT, Format, Output};

use super::ToolError;
use fleet_plan::FleetPlan;

/// Time limit for one answer: the dominator may have to get an image first.
const LIMIT: Duration = Duration::from_secs(600);

/// Machines in one request.
const BATCH: usize = 500;

/// Interval of progress messages.
const PROGRESS: Duration = Duration::from_secs(1);

#[derive(Debug, Args)]
pub(super) struct Command {
    /// Machine to plan for; without --image, for its required image
    #[arg(value_name = "HOST", required_unless_present = "mdb", conflicts_with = "mdb")]
    hostname: Option<String>,
    /// Plan an update of the machine to this image
    #[arg(long, value_name = "NAME", requires = "hostname")]
    image: Option<ImageName>,
    /// Plan as if this file were the machine database
    #[arg(long, value_name = "FILE")]
    mdb: Option<PathBuf>,
    /// Plan for all machines of the file instead of only those whose records differ
    #[arg(long, requires = "mdb")]
    all: bool,
    /// Print a line for every machine too
    #[arg(long, short, requires = "mdb")]
    verbose: bool,
}

impl Command {
    /// Returns true if the command is for one machine.
    pub(super) fn is_about_machine(&self) -> bool {
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
            let plan = plan_fleet(client, file.clone(), command.all).await?;
            let code = if plan.is_change() { EXIT_DIFFERENT } else { EXIT_DONE };
            let text = format.render(&plan, |plan| plan.text(command.verbose));
            Ok(Output { text, code })
        }
        (None, hostname) => {
            let hostname = hostname.clone().unwrap_or_default();
            let request = PlanMachineRequest { hostname, image: command.image.clone() };
            let reply = client.call_within::<PlanMachine>(&request, LIMIT).await?;
            let code = if reply.preview.same { EXIT_DONE } else { EXIT_DIFFERENT };
            let text = format.render(&reply, machine_text);
            Ok(Output { text, code })
        }
    }
}

fn machine_text(reply: &PlanMachineReply) -> String {
    let mut text = reply.preview.text();
    if !reply.preview.same {
        let waits = reply.waits.iter().map(|(status, why)| format!("WAITS {status}: {why}\n"));
        text.extend(waits);
    }
    text
}

/// Asks for plans in batches, and prints progress on stderr if that takes long.
async fn plan_fleet(client: &Client, file: PathBuf, all: bool) -> Result<FleetPlan, ToolError> {
    let machines = read(&file)?.machines;
    let request = CheckMdbRequest { machines: machines.values().cloned().collect() };
    let database = client.call_within::<CheckMdb>(&request, LIMIT).await?;
    let is_concerned = |machine: &&Machine| {
        let differs = |names: &Vec<String>| names.binary_search(&machine.hostname).is_ok();
        all || differs(&database.added) || differs(&database.changed)
    };
    let wanted: Vec<Machine> = request.machines.iter().filter(is_concerned).cloned().collect();
    drop(request);
    let mut plan = FleetPlan::new(database);
    let (mut done, mut progress_shown) = (0, Instant::now());
    while done < wanted.len() {
        if progress_shown.elapsed() >= PROGRESS {
            eprintln!("planned for {done} of {} machines", wanted.len());
            progress_shown = Instant::now();
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
