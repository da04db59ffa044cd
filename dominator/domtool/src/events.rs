//! `domtool events`, `audit` and `backup`: what happened, and a copy of all that is known of it.

mod follow;

use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use api::dominator::events::{
    Backup, BackupRequest, Event, EventKind, ListEvents, ListEventsRequest, Reason,
};
use api::dominator::text::events::{kind_of, reason_of, words};
use clap::Args;
use model::object::{Algorithm, Hasher, ObjectId};
use model::tree::Time;
use model::words::{plain, size};
use rpc::client::{CallError, Client};
use system::clock::past;
use tool::{Format, Output, json};

use super::{ToolError, call, columns, who};
use model::when::moment;

/// How long the dominator may take to copy its database, which may have gigabytes on a slow disk,
/// or to give a piece of the copy.
const BACKUP_LIMIT: Duration = Duration::from_secs(600);

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
