//! The page of what happened.

use api::dominator::events::{EventKind, ListEventsRequest, Position, Reason};
use api::fault::{Fault, FaultCode};
use model::words::plain;
use rpc::page_frame::{Cell, html_escape, path_escape, table};
use rpc::server::Query;

use crate::interface::api::fault_of;
use crate::runtime::fleet::Fleet;
use api::dominator::text::events::{kind_of, reason_of, words};
use model::when::moment;
use system::clock::past;

/// How many events are on one page.
const ROWS_MAX: u32 = 200;

/// How often the log is searched on for one page, if little of it is asked for.
const SEARCHES_MAX: usize = 10;

/// The longest text in a cell, in bytes.
const CELL_BYTES_MAX: usize = 1_000;

/// What this query asks for: each filter of `domtool events`, as often as it is given.
fn request_of(query: &Query) -> Result<ListEventsRequest, String> {
    let all = |name: &str| query.all(name).into_iter();
    let time = |name: &str| query.all(name).last().map(|text| past(text)).transpose();
    Ok(ListEventsRequest {
        hosts: query.all("host"),
        paths: query.all("path"),
        reasons: all("reason").map(|text| reason_of(&text)).collect::<Result<_, _>>()?,
        kinds: all("kind").map(|text| kind_of(&text)).collect::<Result<_, _>>()?,
        images: query.all("image"),
        who: query.all("who"),
        since: time("since")?,
        until: time("until")?,
        before: query.all("before").last().map(|text| position_of(text)).transpose()?,
        limit: ROWS_MAX,
        after: None,
    })
}

fn position_of(text: &str) -> Result<Position, String> {
    let place = text.split_once('-').and_then(|(number, part)| {
        Some(Position { number: number.parse().ok()?, part: part.parse().ok()? })
    });
    place.ok_or_else(|| format!("`{text}` is no place in the history"))
}

pub(super) async fn body(fleet: &Fleet, query: &Query) -> Result<String, Fault> {
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
    let rows: Vec<Vec<Cell>> = events
        .into_iter()
        .map(|event| {
            let (kind, text) = words(&event.what);
            let path = format!("/events?host={}", path_escape(&event.about));
            vec![
                Cell::Text(moment(event.time)),
                Cell::Text(kind.to_owned()),
                match event.about.as_str() {
                    "" => Cell::Text(String::new()),
                    _ => Cell::Link { path, text: event.about },
                },
                Cell::Text(plain(&text, CELL_BYTES_MAX)),
            ]
        })
        .collect();
    let mut body = form(query);
    body.push_str(&table(&["when", "kind", "about", "what"], &rows));
    if let Some(before) = request.before {
        body.push_str(&format!("<p><a href=\"{}\">older ones</a></p>\n", older(query, before)));
    }
    Ok(body)
}

/// The path of the page that goes on where this one ends.
fn older(query: &Query, before: Position) -> String {
    let mut path = "/events?".to_owned();
    for (name, value) in query.pairs() {
        if name != "before" && !value.is_empty() {
            path.push_str(&format!("{}={}&amp;", path_escape(name), path_escape(value)));
        }
    }
    format!("{path}before={}-{}", before.number, before.part)
}

/// The filters, with what is asked for now. Each that may be given several times has a field for
/// each value and one more.
fn form(query: &Query) -> String {
    let mut form = "<form action=\"/events\">\n".to_owned();
    let mut line = |label: &str, fields: Vec<String>, remark: &str| {
        let fields = fields.join(" ");
        let remark = format!("<span class=\"quiet\">{remark}</span>");
        form.push_str(&format!("<p>{label}: {fields} {remark}</p>\n"));
    };
    let field = |name: &str, label: &str, value: &str| {
        let value = html_escape(value);
        format!("<input name=\"{name}\" aria-label=\"{label}\" value=\"{value}\">")
    };
    let fields = |name: &str, label: &str| {
        let values = query.all(name).into_iter().chain([String::new()]);
        values.map(|value| field(name, label, &value)).collect::<Vec<String>>()
    };
    let boxes = |name: &str, known: &[&str]| {
        let asked = query.all(name);
        let one = |known: &&str| {
            let is_asked = asked.iter().any(|asked| asked == known);
            let checked = if is_asked { " checked" } else { "" };
            format!(
                "<label><input type=\"checkbox\" name=\"{name}\" value=\"{known}\"{checked}> \
                 {known}</label>"
            )
        };
        known.iter().map(one).collect::<Vec<String>>()
    };
    line("about", fields("host", "about"), "machine or image; * is anything, ? one character");
    line("path", fields("path", "path"), "changes of it; * is anything but a slash, ** anything");
    let kinds = EventKind::ALL.map(EventKind::name);
    line("kind", boxes("kind", &kinds), "if none: all but changes, or changes of the paths");
    line("reason", boxes("reason", &Reason::ALL.map(Reason::name)), "");
    line("image", fields("image", "image"), "updates to it, or to one below it");
    line("ordered by", fields("who", "ordered by"), "");
    let time = |name: &str| vec![field(name, name, query.get(name).unwrap_or_default())];
    line("since", time("since"), "12h or 1d ago, or 18:30, 2030-01-31T18:30");
    line("until", time("until"), "");
    form.push_str("<p><button>Show</button> <a href=\"/events\">all</a></p>\n</form>\n");
    form
}
