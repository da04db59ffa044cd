//! Commands about rollouts that a dominator carries out, about votes, and about locks.

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::PathBuf;

use api::dominator::rollouts::{
    ListEnvironments, ListEnvironmentsRequest, ListRollouts, ListRolloutsReply,
    ListRolloutsRequest, OrderRollout, OrderRolloutRequest, PlanRollout, PlanRolloutReply,
    PlanRolloutRequest, RolloutInfo, RolloutVerb, StartRollout, StartRolloutRequest, VoteOnStep,
    VoteOnStepRequest,
};
use clap::{Args, Subcommand, ValueEnum};
use daemon::EXIT_DONE;
use daemon::mdb_file;
use model::display::{counted, utc};
use rollouts::document::{Choice, RolloutState, Scan, Step, name_of};
use rollouts::plan::{Class, StepPlan};
use rpc::client::Client;
use serde::Serialize;
use tokio::time::{Duration, sleep};
use tool::{EXIT_DIFFERENT, Format, Output, PlacedError};

use super::environments::NO_ENVIRONMENT;
use super::orders::{OptionalWhy, RequiredWhy};
use super::{ToolError, call, columns, text_of, who};

/// How often a rollout that is watched is looked at.
const WATCH_INTERVAL: Duration = Duration::from_secs(1);

/// Which environments a start takes.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(super) enum ScanArgument {
    Graph,
    Plan,
}

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Say what rollouts would do; nothing is stored
    ///
    /// Without ENV: of all environments with a revision that is not committed. With --mdb: under
    /// another machine database. Exit codes: 0 same, 3 different, 1 failed, 2 misuse.
    #[command(after_help = "Examples:\n  \
        domtool rollout plan web\n  \
        domtool rollout plan --mdb candidate.json --format json")]
    Plan {
        /// An environment, as NAME or NAME@REVISION
        #[arg(value_name = "ENV")]
        environments: Vec<String>,
        /// A machine database that is not in force
        #[arg(long, value_name = "FILE")]
        mdb: Option<PathBuf>,
    },
    /// Bring the newest revisions of environments to their machines
    ///
    /// Each environment is a step, and comes after those that it depends on. A start replaces one
    /// that waits, and waits for one in progress.
    #[command(after_help = "Example: domtool rollout start db@8 web@5 --why 'release 12'")]
    Start {
        /// Environments with their newest revisions
        #[arg(value_name = "ENV@REVISION", required = true)]
        environments: Vec<String>,
        /// graph: with all that depend on them; plan: only those that change
        #[arg(long, value_enum, default_value_t = ScanArgument::Graph)]
        scan: ScanArgument,
        /// Do not wait for maintenance windows, freezes, soaking, a least duration and the age of
        /// an image; the votes are not yours alone
        #[arg(long)]
        urgent: bool,
        /// Bring images although they are deprecated
        #[arg(long)]
        allow_deprecated: bool,
        #[command(flatten)]
        why: RequiredWhy,
    },
    /// Show a rollout: its steps, plans, votes and batches
    ///
    /// Exit codes with --watch: 0 succeeded, 3 ended otherwise, or waits for `resolve`.
    Show {
        /// Such as r12
        id: String,
        /// Print it again whenever it changes, until it goes on no more
        #[arg(long)]
        watch: bool,
    },
    /// List rollouts, the newest first
    List {
        /// Only those of an environment
        #[arg(long, value_name = "ENV", default_value = "", hide_default_value = true)]
        env: String,
        /// Only those that have not ended
        #[arg(long)]
        unfinished: bool,
    },
    /// Stop a rollout: machines stay as they are, and its environments are not active any more
    Stop(OrderArguments),
    /// Cancel a rollout that waits
    Cancel(OrderArguments),
    /// End a rollout whose rollback has failed: its machines get the committed revisions
    Resolve(OrderArguments),
    /// Take a running rollout back, or bring an old revision of an environment to its machines
    #[command(after_help = "Examples:\n  \
        domtool rollout rollback r12 --why 'errors'\n  \
        domtool rollout rollback web --to 4 --why 'errors since web/8'")]
    Rollback {
        /// A running rollout such as r12, or an environment
        #[arg(value_name = "ID|ENV")]
        what: String,
        /// The revision; by default the one that was committed before
        #[arg(long, value_name = "REVISION")]
        to: Option<u64>,
        #[command(flatten)]
        why: RequiredWhy,
    },
}

#[derive(Debug, Args)]
pub(super) struct OrderArguments {
    /// Such as r12
    id: String,
    #[command(flatten)]
    why: RequiredWhy,
}

#[derive(Debug, Args)]
pub(super) struct VoteArguments {
    /// The step, such as r12/web
    step: String,
    /// The digest of the plan that you have seen: domtool rollout show
    #[arg(long)]
    digest: String,
    #[command(flatten)]
    why: OptionalWhy,
}

#[derive(Debug, Subcommand)]
pub(super) enum LockCommand {
    /// Say whether a rollout has locked environments
    ///
    /// Exit code 0: free, 3: locked.
    #[command(after_help = "Example: domtool lock check web || exit 1")]
    Check {
        /// Environments; without any: all
        #[arg(value_name = "ENV")]
        environments: Vec<String>,
    },
}

/// Runs a command about rollouts.
pub(super) async fn run(
    client: &Client,
    format: Format,
    command: &Command,
) -> Result<Output, ToolError> {
    match command {
        Command::Plan { environments, mdb } => {
            let machines = match mdb {
                Some(file) => Some(mdb_file::read(file)?.machines.into_values().collect()),
                None => None,
            };
            let request = PlanRolloutRequest { environments: environments.clone(), machines };
            let reply = call::<PlanRollout>(client, &request).await?;
            let is_same = reply.plans.iter().all(StepPlan::is_empty);
            let code = if is_same { EXIT_DONE } else { EXIT_DIFFERENT };
            Ok(Output { text: format.render(&reply, planned), code })
        }
        Command::Start { environments, scan, urgent, allow_deprecated, why } => {
            let scan = match scan {
                ScanArgument::Graph => Scan::Graph,
                ScanArgument::Plan => Scan::Plan,
            };
            let request = StartRolloutRequest {
                environments: environments.clone(),
                scan,
                urgent: *urgent,
                allow_deprecated: *allow_deprecated,
                why: why.why.clone(),
                ..StartRolloutRequest::default()
            };
            start(client, format, request).await
        }
        Command::Show { id, watch: false } => {
            let reply = find(client, id).await?;
            Ok(format.render(&reply, shown).into())
        }
        Command::Show { id, watch: true } => watch(client, format, id).await,
        Command::List { env, unfinished } => {
            let (environment, unfinished) = (env.clone(), *unfinished);
            let request = ListRolloutsRequest { environment, unfinished, ids: Vec::new() };
            let reply = call::<ListRollouts>(client, &request).await?;
            Ok(format.render(&reply, listed).into())
        }
        Command::Stop(arguments) => order(client, format, arguments, RolloutVerb::Stop).await,
        Command::Cancel(arguments) => order(client, format, arguments, RolloutVerb::Cancel).await,
        Command::Resolve(arguments) => order(client, format, arguments, RolloutVerb::Resolve).await,
        Command::Rollback { what, to, why } => {
            let is_id = what.strip_prefix('r').is_some_and(|rest| rest.parse::<u64>().is_ok());
            if is_id && to.is_none() {
                let request = request(what, why, RolloutVerb::RollBack);
                return ordered(client, format, &request).await;
            }
            let revision = to.map_or_else(String::new, |number| format!("@{number}"));
            let request = StartRolloutRequest {
                environments: vec![format!("{what}{revision}")],
                rollback: true,
                why: why.why.clone(),
                ..StartRolloutRequest::default()
            };
            start(client, format, request).await
        }
    }
}

async fn start(
    client: &Client,
    format: Format,
    request: StartRolloutRequest,
) -> Result<Output, ToolError> {
    let request = StartRolloutRequest { who: who(), ..request };
    let reply = call::<StartRollout>(client, &request).await?;
    eprintln!("domtool rollout show {} --watch shows how it goes on", reply.id);
    Ok(format.render(&reply, |reply| format!("{}\n", reply.id)).into())
}

fn request(id: &str, why: &RequiredWhy, order: RolloutVerb) -> OrderRolloutRequest {
    OrderRolloutRequest { id: id.to_owned(), order, why: why.why.clone(), who: who() }
}

async fn order(
    client: &Client,
    format: Format,
    arguments: &OrderArguments,
    verb: RolloutVerb,
) -> Result<Output, ToolError> {
    ordered(client, format, &request(&arguments.id, &arguments.why, verb)).await
}

async fn ordered(
    client: &Client,
    format: Format,
    request: &OrderRolloutRequest,
) -> Result<Output, ToolError> {
    let reply = call::<OrderRollout>(client, request).await?;
    Ok(format.render(&reply, |reply| format!("{}\n", reply.message)).into())
}

/// Approves or rejects the plan of a step.
pub(super) async fn vote(
    client: &Client,
    format: Format,
    arguments: &VoteArguments,
    vote: Choice,
) -> Result<Output, ToolError> {
    let VoteArguments { step, digest, why } = arguments;
    let bad = || PlacedError::new(step, "is no step: expected ROLLOUT/STEP, such as r12/web");
    let (rollout, step) = step.split_once('/').ok_or_else(bad)?;
    let (rollout, step) = (rollout.to_owned(), step.to_owned());
    let (digest, why) = (digest.clone(), why.why.clone());
    let once = false;
    let request = VoteOnStepRequest { rollout, step, vote, digest, once, why, who: who() };
    let reply = call::<VoteOnStep>(client, &request).await?;
    Ok(format.render(&reply, |reply| format!("{}\n", reply.message)).into())
}

/// Says whether environments are locked.
pub(super) async fn check_lock(
    client: &Client,
    format: Format,
    command: &LockCommand,
) -> Result<Output, ToolError> {
    let LockCommand::Check { environments } = command;
    let request = ListEnvironmentsRequest { names: environments.clone(), ..Default::default() };
    let known = call::<ListEnvironments>(client, &request).await?.environments;
    let is_unknown = |name: &&String| known.iter().all(|one| one.name != **name);
    if let Some(name) = environments.iter().find(is_unknown) {
        return Err(PlacedError::new(name, NO_ENVIRONMENT).into());
    }
    let request = ListRolloutsRequest { unfinished: true, ..ListRolloutsRequest::default() };
    let reply = call::<ListRollouts>(client, &request).await?;
    let holders = holders(&reply, environments);
    let code = if holders.is_empty() { EXIT_DONE } else { EXIT_DIFFERENT };
    let text = format.render(&holders, |holders| {
        let line = |lock: &Lock| format!("{}: locked by {}\n", lock.environment, lock.rollout);
        holders.iter().map(line).collect()
    });
    Ok(Output { text, code })
}

/// A rollout that has locked an environment.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct Lock {
    environment: String,
    rollout: String,
}

/// Returns which of these environments are locked; of all, if none is named.
fn holders(reply: &ListRolloutsReply, environments: &[String]) -> Vec<Lock> {
    let holding = reply.rollouts.iter().filter(|info| info.rollout.state.holds_lock());
    let locks = holding.flat_map(|info| {
        let lock =
            |name: &String| Lock { environment: name.clone(), rollout: info.rollout.id.clone() };
        info.locks.iter().map(lock)
    });
    let is_meant =
        |lock: &Lock| environments.is_empty() || environments.contains(&lock.environment);
    locks.filter(is_meant).collect()
}

async fn find(client: &Client, id: &str) -> Result<ListRolloutsReply, ToolError> {
    let request = ListRolloutsRequest { ids: vec![id.to_owned()], ..Default::default() };
    let reply = call::<ListRollouts>(client, &request).await?;
    if reply.rollouts.is_empty() {
        let problem = "there is no such rollout: domtool rollout list";
        return Err(PlacedError::new(id, problem).into());
    }
    Ok(reply)
}

/// Prints a rollout whenever it changes, until it goes on no more.
async fn watch(client: &Client, format: Format, id: &str) -> Result<Output, ToolError> {
    let mut last = String::new();
    loop {
        let reply = find(client, id).await?;
        let text = format.render(&reply, shown);
        let state = reply.rollouts[0].rollout.state;
        if reply.rollouts[0].ended.is_some() || state == RolloutState::RollbackFailed {
            let is_done = state == RolloutState::Succeeded;
            return Ok(Output { text, code: if is_done { EXIT_DONE } else { EXIT_DIFFERENT } });
        }
        if text != last {
            let mut stdout = std::io::stdout();
            let printed = stdout.write_all(format!("{text}\n").as_bytes());
            printed.map_err(|source| ToolError::Print { source })?;
            last = text;
        }
        sleep(WATCH_INTERVAL).await;
    }
}

fn planned(reply: &PlanRolloutReply) -> String {
    let mut text = String::new();
    for plan in &reply.plans {
        let StepPlan { environment, revision, from, digest, .. } = plan;
        writeln!(text, "{environment}: {from} -> {revision}, digest {digest}").expect("no I/O");
        text += &classes(plan);
    }
    text
}

fn classes(plan: &StepPlan) -> String {
    let mut text = String::new();
    let named = |image: &str| if image.is_empty() { "nothing" } else { image }.to_owned();
    for Class { from, to, machines, hosts } in &plan.classes {
        let more = if hosts.len() < *machines as usize { ", ..." } else { "" };
        let (from, to, hosts) = (named(from), named(to), hosts.join(", "));
        let machines = counted((*machines).into(), "machine");
        writeln!(text, "  {machines}: {from} -> {to} ({hosts}{more})").expect("no I/O");
    }
    if plan.is_empty() {
        text += "  nothing changes\n";
    }
    for image in &plan.unknown_images {
        writeln!(text, "  the image server has not given {image} yet").expect("no I/O");
    }
    text
}

fn listed(reply: &ListRolloutsReply) -> String {
    let mut table = columns(&["ID", "KIND", "STATE", "ENVIRONMENTS", "BY", "CREATED", "WHY"]);
    for RolloutInfo { rollout, why, created, .. } in &reply.rollouts {
        let names = Vec::from_iter(rollout.environments());
        table.add_row([
            rollout.id.clone(),
            name_of(&rollout.kind),
            name_of(&rollout.state),
            names.join(" "),
            rollout.by.clone(),
            utc(*created),
            why.clone(),
        ]);
    }
    let paused = reply.paused.as_ref();
    paused.map_or_else(String::new, |why| format!("No rollout goes on: {why}\n")) + &text_of(&table)
}

fn shown(reply: &ListRolloutsReply) -> String {
    let mut text = String::new();
    if let Some(why) = &reply.paused {
        writeln!(text, "No rollout goes on: {why}").expect("no I/O");
    }
    for info in &reply.rollouts {
        text += &shown_one(info);
    }
    text
}

fn shown_one(info: &RolloutInfo) -> String {
    let RolloutInfo { rollout, why, created, since, batches, locks, .. } = info;
    let (state, cause) = (name_of(&rollout.state), after_colon(&rollout.cause));
    let mut text = format!("{}: {state}{cause}\n", rollout.id);
    text += &format!("started by {}, {}: {why}\n", rollout.by, utc(*created));
    if !locks.is_empty() {
        text += &format!("locks: {}\n", locks.join(" "));
    }
    let mut table = columns(&["STEP", "FROM", "TO", "STATE", "SINCE", "VOTES", "WHY"]);
    for step in &rollout.steps {
        let at = since.iter().find(|(id, _)| *id == step.id).map(|(_, at)| utc(*at));
        let number = |revision: Option<u64>| revision.unwrap_or_default().to_string();
        table.add_row([
            step.id.clone(),
            number(step.from),
            number(step.revision),
            name_of(&step.state),
            at.unwrap_or_default(),
            votes(step),
            step.cause.clone(),
        ]);
    }
    text += &text_of(&table);
    for batch in batches {
        let (state, hosts) = (name_of(&batch.state), batch.hosts.join(", "));
        let (done, machines) = (batch.done, batch.machines);
        let reason = &batch.reason;
        text += &format!("{}: {state}: {reason}; {done} of {machines} done", batch.step);
        text += &if hosts.is_empty() { "\n".to_owned() } else { format!(": {hosts}\n") };
    }
    for (step, plan) in info.steps_with_plans() {
        text += &format!("the plan of {}:\n{}", step.id, classes(plan));
        let digest = &plan.digest;
        text += &format!("  domtool approve {}/{} --digest {digest}\n", rollout.id, step.id);
    }
    text
}

fn after_colon(text: &str) -> String {
    if text.is_empty() { String::new() } else { format!(": {text}") }
}

fn votes(step: &Step) -> String {
    let vote = |vote: &rollouts::document::Vote| {
        let is_old = step.digest.as_ref() != Some(&vote.digest);
        let old = if is_old { " (another plan)" } else { "" };
        format!("{} {}{old}", vote.voter, name_of(&vote.vote))
    };
    step.votes.iter().map(vote).collect::<Vec<_>>().join(", ")
}
