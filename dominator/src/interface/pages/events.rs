//! The page of events.

use std::sync::Arc;

use api::dominator::events::{
    ChangeReason, EventKind, EventPosition, HistoryEvent, ListEventsRequest,
};
use api::fault::{Fault, FaultCode};
use askama::Template;
use model::display::{safe_text, utc};
use rpc::page_frame::path_escape;
use rpc::server::Query;

use crate::interface::api::fault_of;
use crate::runtime::fleet::Fleet;
use api::dominator::text::{describe_event, parse_kind, parse_reason};
use system::clock::parse_past;

/// How many events are on one page.
const ROWS_MAX: u32 = 200;

/// How many searches one page takes at most: each looks at a limited number of rows.
const SEARCHES_MAX: usize = 10;

/// The longest text in a cell, in bytes.
const CELL_BYTES_MAX: usize = 1_000;

/// Parses a query: each filter of `domtool events`, as often as it is given.
fn request_of(query: &Query) -> Result<ListEventsRequest, String> {
    let all = |name: &str| query.all(name).into_iter();
    let time = |name: &str| query.all(name).last().map(|text| parse_past(text)).transpose();
    Ok(ListEventsRequest {
        hosts: query.all("host"),
        paths: query.all("path"),
        reasons: all("reason").map(|text| parse_reason(&text)).collect::<Result<_, _>>()?,
        kinds: all("kind").map(|text| parse_kind(&text)).collect::<Result<_, _>>()?,
        images: query.all("image"),
        who: query.all("who"),
        since: time("since")?,
        until: time("until")?,
        before: query.all("before").last().map(|text| position_of(text)).transpose()?,
        limit: ROWS_MAX,
        after: None,
    })
}

fn position_of(text: &str) -> Result<EventPosition, String> {
    let place = text.split_once('-').and_then(|(number, part)| {
        Some(EventPosition { number: number.parse().ok()?, part: part.parse().ok()? })
    });
    place.ok_or_else(|| format!("`{text}` is no place in the history"))
}

/// A filter of the form, with its present values.
struct FilterLine {
    label: &'static str,
    name: &'static str,
    inputs: Vec<Input>,
    remark: &'static str,
}

enum Input {
    Text(String),
    Choice { value: &'static str, is_chosen: bool },
}

struct EventRow {
    time: String,
    kind: &'static str,
    about: String,
    text: String,
}

/// The events that are asked for, below the form that asks for others.
#[derive(Template)]
#[template(path = "events.html")]
pub(super) struct EventsPage {
    lines: Vec<FilterLine>,
    rows: Vec<EventRow>,
    /// Names and values of the query, but for the position.
    filters: Vec<(String, String)>,
    /// Where the next page goes on.
    before: Option<EventPosition>,
}

impl EventsPage {
    /// Finds the events that `query` asks for.
    pub(super) async fn find(fleet: &Arc<Fleet>, query: &Query) -> Result<Self, Fault> {
        let bad = |text| Fault::new(FaultCode::BadRequest, text);
        let mut request = request_of(query).map_err(bad)?;
        let mut events = Vec::new();
        for _ in 0..SEARCHES_MAX {
            request.limit = ROWS_MAX - u32::try_from(events.len()).unwrap_or(ROWS_MAX);
            let reply = fleet.events(request.clone()).await.map_err(|error| fault_of(&error))?;
            events.extend(reply.events);
            request.before = reply.next;
            if request.before.is_none() || events.len() >= ROWS_MAX as usize {
                break;
            }
        }
        let row = |event: HistoryEvent| {
            let (kind, text) = describe_event(&event.what);
            let text = safe_text(&text, CELL_BYTES_MAX);
            EventRow { time: utc(event.time), kind, about: event.about, text }
        };
        let filters = query.pairs().filter(|(name, value)| *name != "before" && !value.is_empty());
        let escaped = filters.map(|(name, value)| (path_escape(name), path_escape(value)));
        Ok(Self {
            lines: form_lines(query),
            rows: events.into_iter().map(row).collect(),
            filters: escaped.collect(),
            before: request.before,
        })
    }
}

/// Returns the filters of the form. Each that may be given several times has a field for each value
/// and one more.
fn form_lines(query: &Query) -> Vec<FilterLine> {
    let fields = |name: &str| {
        let values = query.all(name).into_iter().chain([String::new()]);
        values.map(Input::Text).collect::<Vec<_>>()
    };
    let choices = |name: &str, known: &[&'static str]| {
        let chosen = query.all(name);
        let choice = |value: &&'static str| {
            let is_chosen = chosen.iter().any(|chosen| chosen == value);
            Input::Choice { value, is_chosen }
        };
        known.iter().map(choice).collect::<Vec<_>>()
    };
    let time = |name: &str| vec![Input::Text(query.get(name).unwrap_or_default().to_owned())];
    let line = |label, name, inputs, remark| FilterLine { label, name, inputs, remark };
    let about_remark = "machine or image; * is anything, ? one character";
    let path_remark = "changes of it; * is anything but a slash, ** anything";
    let kind_remark = "if none: all but changes, or changes of the paths";
    let time_remark = "12h or 1d ago, or 18:30, 2030-01-31T18:30";
    vec![
        line("about", "host", fields("host"), about_remark),
        line("path", "path", fields("path"), path_remark),
        line("kind", "kind", choices("kind", &EventKind::ALL.map(EventKind::name)), kind_remark),
        line("reason", "reason", choices("reason", &ChangeReason::ALL.map(ChangeReason::name)), ""),
        line("image", "image", fields("image"), "updates to it, or to one below it"),
        line("ordered by", "who", fields("who"), ""),
        line("since", "since", time("since"), time_remark),
        line("until", "until", time("until"), ""),
    ]
}
