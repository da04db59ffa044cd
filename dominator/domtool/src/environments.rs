//! `domtool env` and `domtool group`: environments, their revisions, and groups of them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use api::dominator::rollouts::{
    EditEnvironments, EditEnvironmentsReply, EditEnvironmentsRequest, EnvironmentInfo,
    EnvironmentOrder, ListEnvironments, ListEnvironmentsReply, ListEnvironmentsRequest,
    OrderEnvironment, OrderEnvironmentRequest, RevisionInfo,
};
use clap::Subcommand;
use daemon::EXIT_DONE;
use model::display::{counted, utc};
use model::json::{read_object, without_comments};
use rollouts::definition::{Definition, EnvironmentEdit, Source};
use rollouts::document::Group;
use rpc::client::Client;
use serde::de::DeserializeOwned;
use tool::{EXIT_DIFFERENT, Format, Output, PlacedError};

use super::orders::OptionalWhy;
use super::{ToolError, call, columns, text_of, who};
use crate::input_file::read;

/// The longest file, in bytes.
const FILE_BYTES_MAX: usize = 1 << 20;

/// Where to look for names.
pub(super) const NO_ENVIRONMENT: &str = "there is no such environment: domtool env list";

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Make an environment; no machine changes by it
    ///
    /// FILE has one JSON object: name, select (hosts, locations, tags), source ({"image": NAME},
    /// {"mdb": true}, or {"bundle": NAME} for an image that is added to the one that machines
    /// have), and, if wanted, group, owner_groups, owner_users, depends_on, strategy, approval,
    /// provides, requires, disjoint and start.
    /// An environment is not active until its first rollout.
    #[command(after_help = "Example: domtool env create web.json --why 'front ends'")]
    Create {
        /// The environment; - for stdin
        file: PathBuf,
        #[command(flatten)]
        why: OptionalWhy,
    },
    /// Make a new revision of an environment; no machine changes by it
    ///
    /// What FILE leaves out stays as it is; the source must be named.
    #[command(after_help = "Example: domtool env update web.json --base 4 --why 'web/8'")]
    Update {
        /// The environment; - for stdin
        file: PathBuf,
        /// The revision that the edit was made from: if there is a newer one, it is refused
        #[arg(long, value_name = "REVISION")]
        base: Option<u64>,
        #[command(flatten)]
        why: OptionalWhy,
    },
    /// Show an environment: its newest and its committed revision, and its machines
    Show {
        name: String,
        /// Show all revisions that are kept
        #[arg(long)]
        revisions: bool,
    },
    /// List environments
    List {
        /// Only those of a group
        #[arg(long, default_value = "", hide_default_value = true)]
        group: String,
    },
    /// Compare two revisions: by default the committed one with the newest
    ///
    /// Exit code 0: same, 3: different.
    Diff {
        name: String,
        /// The older revision
        from: Option<u64>,
        /// The newer revision
        to: Option<u64>,
    },
    /// Delete an environment: its machines get what the machine database says
    Delete {
        name: String,
        /// Delete it although machines get other images by it
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        why: OptionalWhy,
    },
    /// Let new machines get the committed revision, and restart tasks that end
    Activate {
        name: String,
        #[command(flatten)]
        why: OptionalWhy,
    },
    /// Let new machines get nothing, and restart no tasks that end; those that have it keep it
    Deactivate {
        name: String,
        #[command(flatten)]
        why: OptionalWhy,
    },
    /// Make groups and environments as the files of a directory say, all or none
    ///
    /// DIR/groups/*.json and DIR/environments/*.json have one object each. What a file leaves out
    /// has its default. Environments without a file stay. Exit codes with --plan: 0 same,
    /// 3 different.
    #[command(after_help = "Examples:\n  \
        domtool env apply fleet/ --plan\n  \
        domtool env apply fleet/ --why 'merge 4711'")]
    Apply {
        directory: PathBuf,
        /// Only say what would change
        #[arg(long)]
        plan: bool,
        #[command(flatten)]
        why: OptionalWhy,
    },
}

#[derive(Debug, Subcommand)]
pub(super) enum GroupCommand {
    /// Make or change a group of environments: name, depends_on, approval
    Set {
        /// The group; - for stdin
        file: PathBuf,
        #[command(flatten)]
        why: OptionalWhy,
    },
    /// List groups
    List,
}

fn object<T: DeserializeOwned>(file: &Path) -> Result<T, PlacedError> {
    let text = read(file, FILE_BYTES_MAX)?;
    read_object(&without_comments(&text)).map_err(|error| {
        PlacedError::new(format!("{}: {}", file.display(), error.at), error.problem)
    })
}

/// Runs a command.
pub(super) async fn run(
    client: &Client,
    format: Format,
    command: &Command,
) -> Result<Output, ToolError> {
    match command {
        Command::Create { file, why } => {
            let edit = EnvironmentEdit { base: Some(0), ..object(file)? };
            edit_one(client, format, edit, why).await
        }
        Command::Update { file, base, why } => {
            let edit: EnvironmentEdit = object(file)?;
            let edit = EnvironmentEdit { base: base.or(edit.base), ..edit };
            edit_one(client, format, edit, why).await
        }
        Command::Show { name, revisions } => {
            let environment = find(client, name, *revisions).await?;
            Ok(format.render(&environment, shown).into())
        }
        Command::List { group } => {
            let request = ListEnvironmentsRequest { group: group.clone(), ..Default::default() };
            let reply = call::<ListEnvironments>(client, &request).await?;
            Ok(format.render(&reply.environments, |all| listed(all)).into())
        }
        Command::Diff { name, from, to } => {
            let environment = find(client, name, true).await?;
            diff(format, &environment, *from, *to)
        }
        Command::Delete { name, force, why } => {
            order(client, format, name, EnvironmentOrder::Delete { force: *force }, &why.why).await
        }
        Command::Activate { name, why } => {
            order(client, format, name, EnvironmentOrder::Activate, &why.why).await
        }
        Command::Deactivate { name, why } => {
            order(client, format, name, EnvironmentOrder::Deactivate, &why.why).await
        }
        Command::Apply { directory, plan, why } => {
            expect_either(directory)?;
            let request = EditEnvironmentsRequest {
                groups: objects(&directory.join("groups"))?,
                environments: objects(&directory.join("environments"))?,
                whole: true,
                dry_run: *plan,
                why: why.why.clone(),
                who: who(),
            };
            let reply = call::<EditEnvironments>(client, &request).await?;
            let is_same = reply.outcomes.iter().all(|outcome| outcome.what == "unchanged");
            let code = if *plan && !is_same { EXIT_DIFFERENT } else { EXIT_DONE };
            Ok(Output { text: format.render(&reply, edited), code })
        }
    }
}

/// Runs a command about groups.
pub(super) async fn run_group(
    client: &Client,
    format: Format,
    command: &GroupCommand,
) -> Result<Output, ToolError> {
    match command {
        GroupCommand::Set { file, why } => {
            let request = EditEnvironmentsRequest {
                groups: vec![object(file)?],
                environments: Vec::new(),
                whole: false,
                dry_run: false,
                why: why.why.clone(),
                who: who(),
            };
            let reply = call::<EditEnvironments>(client, &request).await?;
            Ok(format.render(&reply, edited).into())
        }
        GroupCommand::List => {
            let request = ListEnvironmentsRequest::default();
            let reply = call::<ListEnvironments>(client, &request).await?;
            Ok(format.render(&reply.groups, |_| groups(&reply)).into())
        }
    }
}

async fn edit_one(
    client: &Client,
    format: Format,
    edit: EnvironmentEdit,
    why: &OptionalWhy,
) -> Result<Output, ToolError> {
    let request = EditEnvironmentsRequest {
        groups: Vec::new(),
        environments: vec![edit],
        whole: false,
        dry_run: false,
        why: why.why.clone(),
        who: who(),
    };
    let reply = call::<EditEnvironments>(client, &request).await?;
    Ok(format.render(&reply, edited).into())
}

/// Gives an order about an environment.
pub(super) async fn order(
    client: &Client,
    format: Format,
    name: &str,
    order: EnvironmentOrder,
    why: &str,
) -> Result<Output, ToolError> {
    let (name, why) = (name.to_owned(), why.to_owned());
    let request = OrderEnvironmentRequest { name, order, why, who: who() };
    let reply = call::<OrderEnvironment>(client, &request).await?;
    Ok(format.render(&reply, |reply| format!("{}\n", reply.message)).into())
}

async fn find(client: &Client, name: &str, all: bool) -> Result<EnvironmentInfo, ToolError> {
    let names = vec![name.to_owned()];
    let request = ListEnvironmentsRequest { names, all_revisions: all, ..Default::default() };
    let reply = call::<ListEnvironments>(client, &request).await?;
    let missing = || PlacedError::new(name, NO_ENVIRONMENT);
    Ok(reply.environments.into_iter().next().ok_or_else(missing)?)
}

/// Fails if a directory has neither groups nor environments: its name may be misspelt.
fn expect_either(directory: &Path) -> Result<(), PlacedError> {
    if ["groups", "environments"].iter().any(|name| directory.join(name).is_dir()) {
        return Ok(());
    }
    let problem = "has no directory groups or environments";
    Err(PlacedError::new(directory.display().to_string(), problem))
}

/// Reads the objects of a directory, by name. A directory that is missing counts as empty.
fn objects<T: DeserializeOwned>(directory: &Path) -> Result<Vec<T>, PlacedError> {
    let failed = |error: std::io::Error| PlacedError::new(directory.display().to_string(), error);
    let entries = match std::fs::read_dir(directory) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(failed)?,
    };
    let mut files = Vec::new();
    for entry in entries {
        let path = entry.map_err(failed)?.path();
        if path.extension().is_some_and(|extension| extension == "json") {
            files.push(path);
        }
    }
    files.sort();
    files.iter().map(|file| object(file)).collect()
}

fn edited(reply: &EditEnvironmentsReply) -> String {
    let mut text = String::new();
    for outcome in &reply.outcomes {
        let revision = outcome.revision.map_or_else(String::new, |number| format!("@{number}"));
        text += &format!("{}{revision}: {}\n", outcome.name, outcome.what);
        for warning in &outcome.warnings {
            text += &format!("  WARNING: {warning}\n");
        }
    }
    text
}

fn source_text(source: &Source) -> String {
    match source {
        Source::Image(image) => image.to_string(),
        Source::Mdb(_) => "the machine database".to_owned(),
        Source::Bundle(image) => format!("bundle {image}"),
        Source::Content(server) => format!("content of {server}"),
    }
}

fn newest(environment: &EnvironmentInfo) -> Option<&Definition> {
    environment.revisions.last().map(|revision| &revision.definition)
}

fn listed(environments: &[EnvironmentInfo]) -> String {
    let mut table = columns(&[
        "ENVIRONMENT",
        "GROUP",
        "COMMITTED",
        "NEWEST",
        "ACTIVE",
        "MACHINES",
        "HEALTHY",
        "ROLLOUT",
        "SOURCE",
    ]);
    for one in environments {
        let group = newest(one).and_then(|definition| definition.group.clone());
        table.add_row([
            one.name.clone(),
            group.unwrap_or_default(),
            one.committed.to_string(),
            one.newest.to_string(),
            if one.active { "yes" } else { "no" }.to_owned(),
            one.machines.to_string(),
            one.healthy.to_string(),
            one.rollout.clone(),
            newest(one).map(|definition| source_text(&definition.source)).unwrap_or_default(),
        ]);
    }
    text_of(&table)
}

fn shown(environment: &EnvironmentInfo) -> String {
    let EnvironmentInfo { name, newest, committed, active, selected, machines, .. } = environment;
    let state = if *active { "active" } else { "not active" };
    let has = |count: &u32| counted((*count).into(), "machine");
    let mut text = format!("{name}: {state}; committed {committed}, newest {newest}\n");
    text += &format!(
        "selects {}, {} have it, {} healthy, {} have another revision than the committed one\n",
        has(selected),
        machines,
        environment.healthy,
        environment.moved
    );
    if !environment.rollout.is_empty() {
        text += &format!("rollout: {}\n", environment.rollout);
    }
    if let Some(why) = &environment.closed {
        text += &format!("rollouts change no machines now: {why}\n");
    }
    if !environment.conflicts.is_empty() {
        let hosts = environment.conflicts.join(", ");
        text +=
            &format!("CONFLICT: an environment that came to machines earlier applies to {hosts}\n");
    }
    for revision in &environment.revisions {
        let RevisionInfo { number, definition, author, why, at, images, kept, content } = revision;
        let why = if why.is_empty() { String::new() } else { format!(": {why}") };
        text += &format!("\nrevision {number} by {author}, {}{why}\n", utc(*at));
        for (image, count) in images {
            text += &format!("  {image} for {}\n", has(count));
        }
        if *content > 0 {
            text += &format!("  content revision {content}\n");
        }
        for image in kept {
            text += &format!("  {image} stays beside it: others require what it provides\n");
        }
        let json = serde_json::to_string_pretty(definition).unwrap_or_default();
        text += &format!("{json}\n");
    }
    text
}

fn groups(reply: &ListEnvironmentsReply) -> String {
    let mut table = columns(&["GROUP", "AFTER", "VOTERS", "APPROVALS"]);
    for Group { name, depends_on, approval } in &reply.groups {
        let approval = approval.clone().unwrap_or_default();
        let voters: Vec<String> = approval.voters.into_iter().collect();
        let minimum = approval.min_approvals.to_string();
        table.add_row([name.clone(), depends_on.join(" "), voters.join(" "), minimum]);
    }
    text_of(&table)
}

/// The fields that differ, each with its values.
type Differences = BTreeMap<String, (serde_json::Value, serde_json::Value)>;

fn diff(
    format: Format,
    environment: &EnvironmentInfo,
    from: Option<u64>,
    to: Option<u64>,
) -> Result<Output, ToolError> {
    let fields = |number: u64| -> Result<serde_json::Map<String, serde_json::Value>, PlacedError> {
        if number == 0 {
            return Ok(serde_json::Map::new());
        }
        let found = environment.revisions.iter().find(|revision| revision.number == number);
        let revision = found.ok_or_else(|| {
            PlacedError::new(&environment.name, format!("there is no revision {number}"))
        })?;
        let mut value = serde_json::to_value(&revision.definition).unwrap_or_default();
        if !revision.images.is_empty() {
            value["images"] = serde_json::to_value(&revision.images).unwrap_or_default();
        }
        Ok(value.as_object().cloned().unwrap_or_default())
    };
    let before = fields(from.unwrap_or(environment.committed))?;
    let after = fields(to.unwrap_or(environment.newest))?;
    let mut differences = Differences::new();
    for key in before.keys().chain(after.keys()) {
        let value = |of: &serde_json::Map<_, _>| of.get(key).cloned().unwrap_or_default();
        if value(&before) != value(&after) {
            differences.insert(key.clone(), (value(&before), value(&after)));
        }
    }
    let code = if differences.is_empty() { EXIT_DONE } else { EXIT_DIFFERENT };
    let text = format.render(&differences, |differences| {
        let line = |(key, (before, after)): (&String, &(serde_json::Value, serde_json::Value))| {
            format!("{key}: {before} -> {after}\n")
        };
        differences.iter().map(line).collect()
    });
    Ok(Output { text, code })
}
