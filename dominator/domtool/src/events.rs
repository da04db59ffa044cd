//! `domtool events` and `audit`: the dominator's history, also as it grows.

use std::io::{ErrorKind, Write as _};
use std::time::Duration;

use api::dominator::events::{
    ChangeReason, EventKind, EventPosition, HistoryEvent, ListEvents, ListEventsRequest,
};
use api::dominator::text::{describe_event, parse_kind, parse_reason};
use clap::Args;
use model::display::{error_chain, safe_text, utc};
use model::tree::Time;
use rpc::client::{CallError, Client};
use system::clock::parse_past;
use tool::{Format, Output};

use super::{ToolError, call, columns, text_of};

/// Longest text in a cell, in bytes.
const CELL_BYTES_MAX: usize = 400;

/// Interval of requests for new events.
const FOLLOW_INTERVAL: Duration = Duration::from_secs(1);

/// Interval of requests while the dominator does not answer.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);

#[derive(Debug, Args)]
pub(super) struct EventsArguments {
    /// Only events of machines with a matching name: `*` matches any text, `?` one character; may
    /// be repeated, as all filters here
    #[arg(long, value_name = "HOST")]
    host: Vec<String>,
    /// Only changes of matching paths: `*` matches any text without a slash, `**` any text
    #[arg(long, value_name = "PATH")]
    path: Vec<String>,
    /// Only changes for this reason: drift, image or computed
    #[arg(long, value_name = "REASON", value_parser = parse_reason)]
    reason: Vec<ChangeReason>,
    /// Only events of this kind: status, update, change (of one path) or order. Default: all but
    /// changes; with --path, only changes
    #[arg(long, value_name = "KIND", value_parser = parse_kind)]
    kind: Vec<EventKind>,
    /// Only updates to this image or one below it
    #[arg(long, value_name = "IMAGE")]
    image: Vec<String>,
    #[command(flatten)]
    window: Window,
}

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(super) struct AuditArguments {
    #[command(subcommand)]
    pub(super) log: Option<super::audit::Command>,
    /// Only orders about matching machines or images: `*` matches any text, `?` one character
    #[arg(long, value_name = "HOST")]
    host: Vec<String>,
    #[command(flatten)]
    window: Window,
}

#[derive(Debug, Args)]
pub(super) struct Window {
    /// Only orders of this person
    #[arg(long, value_name = "WHO")]
    who: Vec<String>,
    /// Only events since then: 12h or 1d ago, or 18:30, 2030-01-31T18:30 or 2030-01-31T18:30:00Z
    #[arg(long, value_name = "TIME|DURATION", value_parser = parse_past)]
    since: Option<Time>,
    /// Only events until then
    #[arg(long, value_name = "TIME|DURATION", value_parser = parse_past)]
    until: Option<Time>,
    /// Print at most this many events, the newest; 0 for all
    #[arg(long, value_name = "COUNT", default_value_t = 200)]
    limit: usize,
    /// Then print new events as they come, until Ctrl-C; as JSON, one per line. An update is
    /// printed when it begins; the status events after it show how it ended
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
    show(client, format, request, &arguments.window).await
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
    show(client, format, request, &arguments.window).await
}

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
        return follow(client, format, request, window.limit).await;
    }
    let (events, has_more) = read_events(client, request, window.limit).await?;
    if has_more {
        eprintln!("There are more events: --limit 0 shows all, --since and other filters fewer.");
    }
    Ok(format.render(&events, |events| table(events)).into())
}

/// Shows the newest `limit` events that match, or all if `limit` is 0, oldest first.
pub(super) async fn list_matching(
    client: &Client,
    format: Format,
    request: ListEventsRequest,
    limit: usize,
    matches: impl Fn(&HistoryEvent) -> bool,
) -> Result<Output, ToolError> {
    let (mut events, _) = read_events(client, request, 0).await?;
    events.retain(matches);
    let surplus = if limit == 0 { 0 } else { events.len().saturating_sub(limit) };
    events.drain(..surplus);
    Ok(format.render(&events, |events| table(events)).into())
}

/// Reads the newest `limit` events page by page, or all if `limit` is 0. Returns them oldest first,
/// and whether there may be more.
async fn read_events(
    client: &Client,
    mut request: ListEventsRequest,
    limit: usize,
) -> Result<(Vec<HistoryEvent>, bool), CallError> {
    let wanted = if limit == 0 { usize::MAX } else { limit };
    let mut events: Vec<HistoryEvent> = Vec::new();
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

fn table(events: &[HistoryEvent]) -> String {
    let mut table = columns(&["TIME", "KIND", "ABOUT", "WHAT"]);
    for event in events {
        let (kind, text) = describe_event(&event.what);
        let text = safe_text(&text, CELL_BYTES_MAX);
        table.add_row([utc(event.time), kind.to_owned(), event.about.clone(), text]);
    }
    text_of(&table)
}

/// Prints the last `limit` events, or all if that is 0, and then new ones, until a signal or until
/// nobody reads stdout. Only the first requests may fail; later ones are retried.
///
/// Each round asks first for the position of the newest record of any kind, and only if that has
/// grown for the events after the last position. So no event is lost or printed twice, and a filter
/// that rarely matches causes no search through the whole history.
async fn follow(
    client: &Client,
    format: Format,
    mut request: ListEventsRequest,
    limit: usize,
) -> Result<Output, ToolError> {
    let mut position = newest_position(client).await?;
    let (mut events, _) = read_events(client, request.clone(), limit).await?;
    let mut is_away = false;
    loop {
        match print_lines(format, &events) {
            Ok(()) => {}
            // `domtool events --follow | head` is not a failure.
            Err(error) if error.kind() == ErrorKind::BrokenPipe => return Ok(String::new().into()),
            Err(source) => return Err(ToolError::Print { source }),
        }
        position = events.last().map_or(position, |event| position.max(event.at));
        tokio::time::sleep(if is_away { RETRY_INTERVAL } else { FOLLOW_INTERVAL }).await;
        let result = read_new(client, &mut request, position).await;
        if let Err(error) = &result
            && !is_away
        {
            eprintln!("{}; retrying", error_chain(error));
        }
        is_away = result.is_err();
        events = Vec::new();
        if let Ok((newest, new)) = result {
            if newest < position {
                eprintln!(
                    "The dominator was restarted on another history; new events are from it."
                );
            }
            (position, events) = (newest, new);
        }
    }
}

/// Returns the position of the newest record, and the matching events after `position`.
async fn read_new(
    client: &Client,
    request: &mut ListEventsRequest,
    position: EventPosition,
) -> Result<(EventPosition, Vec<HistoryEvent>), CallError> {
    let newest = newest_position(client).await?;
    if newest <= position {
        return Ok((newest, Vec::new()));
    }
    request.after = Some(position);
    let (events, _) = read_events(client, request.clone(), 0).await?;
    Ok((newest, events))
}

/// Returns the position of the newest record of any kind.
async fn newest_position(client: &Client) -> Result<EventPosition, CallError> {
    let kinds = vec![EventKind::Status, EventKind::Update, EventKind::Order];
    let request = ListEventsRequest { kinds, limit: 1, ..ListEventsRequest::default() };
    let reply = call::<ListEvents>(client, &request).await?;
    let number = reply.events.first().map_or(0, |event| event.at.number);
    // All parts of a record appear at once.
    Ok(EventPosition { number, part: u32::MAX })
}

fn print_lines(format: Format, events: &[HistoryEvent]) -> std::io::Result<()> {
    let mut text = String::new();
    for event in events {
        match format {
            Format::Table => text.push_str(&line(event)),
            Format::Json => text.push_str(&serde_json::to_string(event)?),
        }
        text.push('\n');
    }
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(text.as_bytes())?;
    stdout.flush()
}

/// Formats an event without columns, whose widths are unknown while events still come.
fn line(event: &HistoryEvent) -> String {
    let (kind, what) = describe_event(&event.what);
    let about = if event.about.is_empty() { "" } else { " " };
    let text = format!("{kind:6}{about}{}: {what}", event.about);
    format!("{} {}", utc(event.time), safe_text(&text, CELL_BYTES_MAX))
}
