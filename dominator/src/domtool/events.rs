//! `domtool events`, `audit` and `backup`: what happened, and a copy of all that is known of it.

mod follow;

use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use common::api::dominator::events::{
    Backup, BackupRequest, Event, EventKind, ListEvents, ListEventsRequest, PathChange, Reason,
    UpdateFacts, What,
};
use common::api::subd::Outcome;
use common::object::{Algorithm, Hasher, ObjectId};
use common::tool::{Format, Output, json};
use common::tree::{Leaf, Node, Time};
use common::when::written;
use common::wire::client::{CallError, Client};
use common::words::{counted, plain, size};

use super::when::moment;
use super::{ToolError, call, columns, who};

/// How long the dominator may take to copy its database, which may have gigabytes on a slow disk,
/// or to give a piece of the copy.
const BACKUP_LIMIT: Duration = Duration::from_secs(600);

/// How many characters of a digest are shown in a table.
const DIGEST_SHOWN: usize = 12;

/// The longest text in a cell, in bytes.
const CELL_BYTES_MAX: usize = 400;

#[derive(Debug, Args)]
pub(super) struct EventsArguments {
    /// Only events about such a machine: `*` is anything, `?` one character; may be given several
    /// times, as all of these
    #[arg(long, value_name = "HOST")]
    host: Vec<String>,
    /// Only changes of this path, or of paths like it: `*` is anything but a slash, `**` anything
    #[arg(long, value_name = "PATH")]
    path: Vec<String>,
    /// Only changes for this reason: drift, image or computed
    #[arg(long, value_name = "REASON", value_parser = reason_of)]
    reason: Vec<Reason>,
    /// Only events of this kind: status, update, change (of one path) or order. If not given: all
    /// but changes, or only changes with --path
    #[arg(long, value_name = "KIND", value_parser = kind_of)]
    kind: Vec<EventKind>,
    /// Only updates to this image, or to one below it
    #[arg(long, value_name = "IMAGE")]
    image: Vec<String>,
    #[command(flatten)]
    common: Window,
}

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(super) struct AuditArguments {
    #[command(subcommand)]
    pub(super) log: Option<super::audit::Command>,
    /// Only orders about this machine or image: `*` is anything, `?` one character
    #[arg(long, value_name = "HOST")]
    host: Vec<String>,
    #[command(flatten)]
    common: Window,
}

#[derive(Debug, Args)]
pub(super) struct Window {
    /// Only orders given by this person
    #[arg(long, value_name = "WHO")]
    who: Vec<String>,
    /// Only events since then: 12h or 1d ago, or 18:30, 2030-01-31T18:30 or 2030-01-31T18:30:00Z
    #[arg(long, value_name = "TIME|DURATION", value_parser = past)]
    since: Option<Time>,
    /// Only events until then
    #[arg(long, value_name = "TIME|DURATION", value_parser = past)]
    until: Option<Time>,
    /// How many events at most, the newest; 0 for all
    #[arg(long, value_name = "COUNT", default_value_t = 200)]
    limit: usize,
    /// Then tell new events as they come, until Ctrl-C; as JSON, each in a line. Of an update its
    /// beginning is told; how it ended is told by the statuses after it
    #[arg(long, short, conflicts_with = "until")]
    follow: bool,
}

/// The reason of this name.
///
/// # Errors
///
/// Which there are.
pub fn reason_of(text: &str) -> Result<Reason, String> {
    let known = Reason::ALL.into_iter().find(|reason| reason.name() == text);
    known.ok_or_else(|| "the reasons are drift, image and computed".to_owned())
}

/// The kind of this name.
///
/// # Errors
///
/// Which there are.
pub fn kind_of(text: &str) -> Result<EventKind, String> {
    let known = EventKind::ALL.into_iter().find(|kind| kind.name() == text);
    known.ok_or_else(|| "the kinds are status, update, change and order".to_owned())
}

/// Reads a moment that lies behind, as `written::past` does.
///
/// # Errors
///
/// The text for people.
pub fn past(text: &str) -> Result<Time, String> {
    written::past(text, &jiff::Zoned::now())
}

pub(super) async fn list(
    client: &Client,
    format: Format,
    arguments: &EventsArguments,
) -> Result<Output, ToolError> {
    let request = ListEventsRequest {
        hosts: arguments.host.clone(),
        paths: arguments.path.clone(),
        reasons: arguments.reason.clone(),
        kinds: arguments.kind.clone(),
        images: arguments.image.clone(),
        ..ListEventsRequest::default()
    };
    show(client, format, request, &arguments.common).await
}

pub(super) async fn audit(
    client: &Client,
    format: Format,
    arguments: &AuditArguments,
) -> Result<Output, ToolError> {
    let request = ListEventsRequest {
        hosts: arguments.host.clone(),
        kinds: vec![EventKind::Order],
        ..ListEventsRequest::default()
    };
    show(client, format, request, &arguments.common).await
}

/// Asks page by page, and shows the newest last.
async fn show(
    client: &Client,
    format: Format,
    mut request: ListEventsRequest,
    window: &Window,
) -> Result<Output, ToolError> {
    request.who.clone_from(&window.who);
    request.since = window.since;
    request.until = window.until;
    if window.follow {
        return follow::follow(client, format, request, window.limit).await;
    }
    let (events, has_more) = gather(client, request, window.limit).await?;
    if has_more {
        eprintln!("There are more: --limit 0 shows all, --since and others fewer.");
    }
    let text = match format {
        Format::Table => table(&events),
        Format::Json => json(&events),
    };
    Ok(text.into())
}

/// The newest events, the oldest of them first, and whether there may be more; all if `limit` is 0.
async fn gather(
    client: &Client,
    mut request: ListEventsRequest,
    limit: usize,
) -> Result<(Vec<Event>, bool), CallError> {
    let wanted = if limit == 0 { usize::MAX } else { limit };
    let mut events: Vec<Event> = Vec::new();
    let has_more = loop {
        request.limit = u32::try_from(wanted - events.len()).unwrap_or(0);
        let reply = call::<ListEvents>(client, &request).await?;
        events.extend(reply.events);
        match reply.next {
            Some(next) if events.len() < wanted => request.before = Some(next),
            next => break next.is_some(),
        }
    };
    events.reverse();
    Ok((events, has_more))
}

fn table(events: &[Event]) -> String {
    let mut table = columns(&["TIME", "KIND", "ABOUT", "WHAT"]);
    for event in events {
        let (kind, text) = words(&event.what);
        let text = plain(&text, CELL_BYTES_MAX);
        table.add_row([moment(event.time), kind.to_owned(), event.about.clone(), text]);
    }
    format!("{}\n", table.trim_fmt())
}

/// The kind of an event, and what happened in words.
#[must_use]
pub fn words(what: &What) -> (&'static str, String) {
    match what {
        What::Status { status, detail } => ("status", format!("{status}: {detail}")),
        What::Order { verb, who, why } if why.is_empty() => ("order", format!("{verb} by {who}")),
        What::Order { verb, who, why } => ("order", format!("{verb} by {who}: {why}")),
        What::Gap { lost } => {
            ("status", format!("{} of status are not on record", counted(*lost, "change")))
        }
        What::Update(update) => ("update", of_update(update)),
        What::Change { update, change } => {
            let text = format!("{}; to {}: {}", of_change(change), update.image, end_of(update));
            ("change", text)
        }
    }
}

fn of_update(update: &UpdateFacts) -> String {
    let counts: Vec<(u32, &str)> =
        [(update.drift, "drift"), (update.of_image, "image"), (update.computed, "computed")]
            .into_iter()
            .filter(|(count, _)| *count > 0)
            .collect();
    let all = u64::from(update.drift) + u64::from(update.of_image) + u64::from(update.computed);
    let counts = match counts.as_slice() {
        [] => "no changes".to_owned(),
        [(_, reason)] => format!("{} ({reason})", counted(all, "path")),
        many => {
            let many: Vec<String> =
                many.iter().map(|(count, reason)| format!("{count} {reason}")).collect();
            format!("{} ({})", counted(all, "path"), many.join(", "))
        }
    };
    let former = match update.former.as_str() {
        "" => String::new(),
        former if former == update.image => String::new(),
        former => format!(" from {former}"),
    };
    format!("to {}{former}: {counts}: {}", update.image, end_of(update))
}

fn end_of(update: &UpdateFacts) -> String {
    match &update.outcome {
        None => "ordered, the end is not known".to_owned(),
        Some(Outcome::Done) => "done".to_owned(),
        Some(Outcome::NotPrepared(why)) => format!("not prepared: {why}"),
        Some(Outcome::RolledBack(why)) => format!("failed and put back: {why}"),
        Some(Outcome::Stuck(why)) => format!("stuck: {why}"),
        Some(Outcome::Undone(why)) => format!("undone, as the health check failed: {why}"),
    }
}

fn of_change(change: &PathChange) -> String {
    let differs: Vec<&str> = change.differs.iter().map(|difference| difference.name()).collect();
    let node = |node: &Option<Node>| node.as_ref().map_or_else(|| "nothing".to_owned(), of_node);
    format!(
        "{} {} {} ({}): {} -> {}",
        change.reason.name(),
        change.operation.name(),
        change.path,
        differs.join(" "),
        node(&change.old),
        node(&change.new)
    )
}

fn of_node(node: &Node) -> String {
    let mut text = node.kind().to_owned();
    if let Some(metadata) = node.metadata() {
        text.push_str(&format!(" {:o} {}:{}", metadata.mode, metadata.uid, metadata.gid));
    }
    match node {
        Node::Leaf(Leaf::File(file)) => {
            let object = file.object.to_string();
            let shown = object.find(':').map_or(0, |colon| colon + 1) + DIGEST_SHOWN;
            text.push_str(&format!(" {}", &object[..shown.min(object.len())]));
        }
        Node::Leaf(Leaf::Symlink(link)) => text.push_str(&format!(" to {}", link.target)),
        Node::Leaf(Leaf::HardLink(first)) => text.push_str(&format!(" of {first}")),
        Node::Leaf(Leaf::Computed(_) | Leaf::Special(_)) | Node::Directory(_) => {}
    }
    text
}

/// Writes a copy of the dominator's database to `path`, which must not be there.
pub(super) async fn backup(client: &Client, path: &Path) -> Result<(), ToolError> {
    let failed = |source| ToolError::Backup { path: path.to_owned(), source };
    if path.try_exists().map_err(failed)? {
        let there = std::io::Error::from(std::io::ErrorKind::AlreadyExists);
        return Err(failed(there));
    }
    let mut partial = path.to_owned().into_os_string();
    partial.push(".partial");
    let partial = PathBuf::from(partial);
    let result = copy(client, path, &partial).await;
    if result.is_err() {
        let _not_made = std::fs::remove_file(&partial);
    }
    let (size_bytes, digest) = result?;
    eprintln!("{} are in {}, as {digest}.", size(size_bytes), path.display());
    eprintln!("A dominator that is started on it starts with updates disabled.");
    Ok(())
}

async fn copy(client: &Client, path: &Path, partial: &Path) -> Result<(u64, ObjectId), ToolError> {
    let failed = |source| ToolError::Backup { path: path.to_owned(), source };
    let mut options = std::fs::OpenOptions::new();
    let file = options.write(true).create(true).truncate(true).mode(0o600);
    let mut file = file.open(partial).map_err(failed)?;
    let mut request = BackupRequest { id: 0, offset: 0, who: who() };
    let mut hasher = Hasher::new(Algorithm::Blake3);
    loop {
        let reply = client.call_within::<Backup>(&request, BACKUP_LIMIT).await?;
        request.id = reply.id;
        if reply.bytes.0.is_empty() {
            if request.offset != reply.size_bytes || hasher.finish() != reply.digest {
                return Err(ToolError::OtherCopy);
            }
            file.sync_all().map_err(failed)?;
            std::fs::rename(partial, path).map_err(failed)?;
            return Ok((reply.size_bytes, reply.digest));
        }
        file.write_all(&reply.bytes.0).map_err(failed)?;
        hasher.update(&reply.bytes.0);
        request.offset += reply.bytes.0.len() as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_update_is_told_with_its_paths_by_reason_and_its_end() {
        let update = |former: &str, drift, of_image, outcome| UpdateFacts {
            update_id: 7,
            image: "web/8".to_owned(),
            former: former.to_owned(),
            drift,
            of_image,
            computed: 0,
            outcome,
            ended: None,
        };
        let table = [
            (
                update("web/7", 0, 67, Some(Outcome::Done)),
                "to web/8 from web/7: 67 paths (image): done",
            ),
            (update("web/8", 1, 0, Some(Outcome::Done)), "to web/8: 1 path (drift): done"),
            (
                update("", 7, 2, None),
                "to web/8: 9 paths (7 drift, 2 image): ordered, the end is not known",
            ),
            (update("", 0, 0, Some(Outcome::Done)), "to web/8: no changes: done"),
        ];
        for (update, expected) in table {
            assert_eq!(words(&What::Update(update)), ("update", expected.to_owned()));
        }
    }
}
