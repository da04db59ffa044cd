//! `domtool plan`: shows what would be done to a machine, or under another machine database.

mod fleet_plan;
mod kept_files;
mod resources;

use std::path::PathBuf;
use std::slice::Chunks;
use std::time::{Duration, Instant};

use api::dominator::Status;
use api::dominator::kept_files::ImageOfMachine;
use api::dominator::plan::{
    CheckMdb, CheckMdbRequest, MachinePlan, PlanMachine, PlanMachineReply, PlanMachineRequest,
    PlanMachines, PlanMachinesRequest, PlanOutcome,
};
use api::fault::FaultCode;
use api::method::Method;
use clap::Args;
use daemon::EXIT_DONE;
use daemon::mdb_file::read;
use model::display::{counted, error_chain, safe_text};
use model::image::ImageName;
use model::mdb::Machine;
use rpc::client::Client;
use serde::Serialize;
use tool::{EXIT_DIFFERENT, Format, Output};

use super::ToolError;
use fleet_plan::FleetPlan;
use kept_files::KeptByMachines;
use resources::ResourcesOfMachines;

/// Time limit for one answer, because the dominator may have to get an image first, and for waiting
/// until machines have scanned for their plans.
const LIMIT: Duration = Duration::from_secs(600);

/// Machines in one request.
const BATCH: usize = 500;

/// Interval of progress messages, and of questions whether a scan has ended.
const PROGRESS: Duration = Duration::from_secs(1);

/// The longest text of a machine in a progress message, in bytes.
const SAID_BYTES_MAX: usize = 500;

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
    /// Ask the machines, too, what their plugins would do about resources
    #[arg(long)]
    resources: bool,
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
            let mut plan = plan_fleet(client, file.clone(), command.all).await?;
            let changing = plan.changing_machines();
            plan.kept_files = kept_files::ask(client, &changing).await;
            if command.resources {
                plan.resources = Some(resources::ask(client, &changing).await);
            }
            let code = if plan.is_change() { EXIT_DIFFERENT } else { EXIT_DONE };
            let text = format.render(&plan, |plan| plan.text(command.verbose));
            Ok(Output { text, code })
        }
        (None, hostname) => {
            let hostname = hostname.clone().unwrap_or_default();
            let request = PlanMachineRequest { hostname, image: command.image.clone() };
            let reply = plan_machine(client, &request).await?;
            let code = if reply.preview.same { EXIT_DONE } else { EXIT_DIFFERENT };
            let preview = &reply.preview;
            let is_other = preview.from.as_ref() != Some(&preview.image);
            let machine = (is_other && !preview.same).then(|| ImageOfMachine {
                hostname: request.hostname.clone(),
                image: preview.image.clone(),
            });
            let machine = machine.as_slice();
            let kept_files = kept_files::ask(client, machine).await;
            let resources = match command.resources {
                true => Some(resources::ask(client, machine).await),
                false => None,
            };
            let plan = PlanOfMachine { reply, kept_files, resources };
            let text = format.render(&plan, PlanOfMachine::text);
            Ok(Output { text, code })
        }
    }
}

/// The plan of one machine.
#[derive(Debug, Serialize)]
struct PlanOfMachine {
    #[serde(flatten)]
    reply: PlanMachineReply,
    kept_files: KeptByMachines,
    #[serde(skip_serializing_if = "Option::is_none")]
    resources: Option<ResourcesOfMachines>,
}

impl PlanOfMachine {
    fn text(&self) -> String {
        let Self { reply, kept_files, resources } = self;
        let mut text = reply.preview.text();
        let resources = resources.iter().flat_map(ResourcesOfMachines::lines);
        text.extend(resources.chain(kept_files.lines(None)).map(|line| line + "\n"));
        if !reply.preview.same {
            let waits = reply.waits.iter().map(|(status, why)| format!("WAITS {status}: {why}\n"));
            text.extend(waits);
        }
        text
    }
}

/// Has the dominator ask machines, batch by batch, and prints progress on stderr if that takes
/// long. Returns why not all were asked, if so.
async fn ask_machines<M: Method>(
    client: &Client,
    batches: Chunks<'_, ImageOfMachine>,
    what: &str,
    request: impl Fn(Vec<ImageOfMachine>) -> M::Request,
    mut take: impl FnMut(M::Reply),
) -> Option<String> {
    let (start, count) = (Instant::now(), batches.clone().flatten().count());
    let mut done = 0;
    for batch in batches {
        if start.elapsed() > LIMIT {
            let left = counted((count - done) as u64, "machine");
            return Some(format!("{left} were not asked, because it takes too long"));
        }
        let request = request(batch.to_vec());
        let mut call = std::pin::pin!(client.call_within::<M>(&request, LIMIT));
        let reply = loop {
            if let Ok(reply) = tokio::time::timeout(PROGRESS, &mut call).await {
                break reply;
            }
            eprintln!("waiting: {what}: {done} of {count} machines");
        };
        match reply {
            Ok(reply) => take(reply),
            Err(error) if error.code() == Some(FaultCode::NoMethod) => {
                return Some("the dominator is of a release that does not ask for it".to_owned());
            }
            Err(error) => return Some(error_chain(&error)),
        }
        done += batch.len();
    }
    None
}

/// Asks for the plan of one machine, and waits while the machine scans for it.
async fn plan_machine(
    client: &Client,
    request: &PlanMachineRequest,
) -> Result<PlanMachineReply, ToolError> {
    let start = Instant::now();
    loop {
        match client.call_within::<PlanMachine>(request, LIMIT).await {
            Err(error) if error.code() == Some(FaultCode::Busy) && start.elapsed() < LIMIT => {
                let said = error.fault().map(|fault| fault.message.as_str()).unwrap_or_default();
                eprintln!("waiting: {}", safe_text(said, SAID_BYTES_MAX));
                tokio::time::sleep(PROGRESS).await;
            }
            result => return Ok(result?),
        }
    }
}

/// Asks for plans in batches, and prints progress on stderr if that takes long. Waits for machines
/// that scan for their plan.
async fn plan_fleet(client: &Client, file: PathBuf, all: bool) -> Result<FleetPlan, ToolError> {
    let machines = read(&file)?.machines;
    let request = CheckMdbRequest { machines: machines.values().cloned().collect() };
    let database = client.call_within::<CheckMdb>(&request, LIMIT).await?;
    let is_concerned = |machine: &&Machine| {
        let differs = |names: &Vec<String>| names.binary_search(&machine.hostname).is_ok();
        all || differs(&database.added) || differs(&database.changed)
    };
    let mut wanted: Vec<Machine> = request.machines.iter().filter(is_concerned).cloned().collect();
    drop(request);
    let mut run = FleetRun { plan: FleetPlan::new(database), done: 0, shown: Instant::now() };
    let (count, start) = (wanted.len(), Instant::now());
    loop {
        let is_last = start.elapsed() > LIMIT;
        wanted = run.ask(client, &wanted, count, is_last).await?;
        if wanted.is_empty() {
            break;
        }
        tokio::time::sleep(PROGRESS).await;
    }
    run.plan.machines.sort_by(|one, other| one.hostname.cmp(&other.hostname));
    Ok(run.plan)
}

/// The plans so far.
struct FleetRun {
    plan: FleetPlan,
    done: usize,
    /// When the progress was shown last.
    shown: Instant,
}

impl FleetRun {
    /// Asks for the plans of `machines`, of `count` altogether. Returns those that scan for their
    /// plans now, unless this is the last time.
    async fn ask(
        &mut self,
        client: &Client,
        mut machines: &[Machine],
        count: usize,
        is_last: bool,
    ) -> Result<Vec<Machine>, ToolError> {
        let mut scanning = Vec::new();
        while !machines.is_empty() {
            if self.shown.elapsed() >= PROGRESS {
                eprintln!("planned for {} of {count} machines", self.done);
                self.shown = Instant::now();
            }
            let batch = &machines[..machines.len().min(BATCH)];
            let request = PlanMachinesRequest { machines: batch.to_vec() };
            let mut reply = client.call_within::<PlanMachines>(&request, LIMIT).await?;
            let answered = reply.machines.len();
            if answered == 0 || answered > batch.len() {
                return Err(ToolError::NoProgress);
            }
            let is_planned = |plan: &MachinePlan| is_last || scan_of(plan).is_none();
            let unplanned = batch.iter().zip(&reply.machines).filter(|(_, plan)| !is_planned(plan));
            scanning.extend(unplanned.map(|(machine, _)| machine.clone()));
            if let Some(first) = reply.machines.iter().find(|plan| !is_planned(plan)) {
                let why = safe_text(scan_of(first).unwrap_or_default(), SAID_BYTES_MAX);
                eprintln!("waiting: {}: {why}", first.hostname);
                self.shown = Instant::now();
            }
            reply.machines.retain(is_planned);
            self.done += reply.machines.len();
            self.plan.add(reply);
            machines = &machines[answered..];
        }
        Ok(scanning)
    }
}

/// Returns what the machine says of the scan that it makes for its plan, if it does.
fn scan_of(plan: &MachinePlan) -> Option<&str> {
    let scan = plan.waits.iter().find(|(status, _)| *status == Status::Rescanning);
    matches!(plan.outlook, PlanOutcome::Unknown { .. })
        .then_some(scan)
        .flatten()
        .map(|(_, why)| why.as_str())
}
