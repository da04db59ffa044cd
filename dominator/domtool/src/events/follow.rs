//! `domtool events --follow`: tells what happens as it is recorded.
//!
//! Asked again and again is first what the newest record is, whatever it is about, and then for
//! events after the newest one of the last time. So nothing is missed or told twice, and a question
//! about what happens rarely costs no search through all that happened.

use std::io::{ErrorKind, Write as _};
use std::time::Duration;

use api::dominator::events::{Event, EventKind, ListEvents, ListEventsRequest, Position};
use daemon::EXIT_DONE;
use model::report::report;
use model::when::moment;
use model::words::plain;
use rpc::client::{CallError, Client};
use tool::{Format, Output};

use super::{CELL_BYTES_MAX, ToolError, call, gather};
use api::dominator::text::events::words;

/// How often the dominator is asked.
const EVERY: Duration = Duration::from_secs(1);

/// How often, while it does not answer.
const EVERY_WHILE_AWAY: Duration = Duration::from_secs(5);

/// Tells the last `limit` events, or all if that is 0, and then new ones, until it is ended by a
/// signal or nobody reads any more. What fails at first is an error; later it is tried again.
pub(super) async fn follow(
    client: &Client,
    format: Format,
    mut request: ListEventsRequest,
    limit: usize,
) -> Result<Output, ToolError> {
    let mut mark = newest(client).await?;
    let (mut events, _) = gather(client, request.clone(), limit).await?;
    let mut is_away = false;
    loop {
        match tell(format, &events) {
            Ok(()) => {}
            // `domtool events --follow | head` is not a failure.
            Err(error) if error.kind() == ErrorKind::BrokenPipe => {
                return Ok(Output { text: String::new(), code: EXIT_DONE });
            }
            Err(source) => return Err(ToolError::Print { source }),
        }
        mark = events.last().map_or(mark, |event| mark.max(event.at));
        tokio::time::sleep(if is_away { EVERY_WHILE_AWAY } else { EVERY }).await;
        let news = news(client, &mut request, mark).await;
        if let Err(error) = &news
            && !is_away
        {
            eprintln!("{}; it is asked again", report(error));
        }
        is_away = news.is_err();
        events = Vec::new();
        if let Ok((newest, new)) = news {
            if newest < mark {
                eprintln!("The dominator was started on another history; what comes now is of it.");
            }
            (mark, events) = (newest, new);
        }
    }
}

/// The newest record, and the events that are asked for after `mark`; none if the record is older.
async fn news(
    client: &Client,
    request: &mut ListEventsRequest,
    mark: Position,
) -> Result<(Position, Vec<Event>), CallError> {
    let newest = newest(client).await?;
    if newest <= mark {
        return Ok((newest, Vec::new()));
    }
    request.after = Some(mark);
    let (events, _) = gather(client, request.clone(), 0).await?;
    Ok((newest, events))
}

/// The place of the newest record of all.
async fn newest(client: &Client) -> Result<Position, CallError> {
    let kinds = vec![EventKind::Status, EventKind::Update, EventKind::Order];
    let request = ListEventsRequest { kinds, limit: 1, ..ListEventsRequest::default() };
    let reply = call::<ListEvents>(client, &request).await?;
    let number = reply.events.first().map_or(0, |event| event.at.number);
    // All of a record is there at once.
    Ok(Position { number, part: u32::MAX })
}

fn tell(format: Format, events: &[Event]) -> std::io::Result<()> {
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

/// An event without the columns that are as wide as the widest of all.
fn line(event: &Event) -> String {
    let (kind, what) = words(&event.what);
    let about = if event.about.is_empty() { "" } else { " " };
    let text = format!("{kind:6}{about}{}: {what}", event.about);
    format!("{} {}", moment(event.time), plain(&text, CELL_BYTES_MAX))
}
