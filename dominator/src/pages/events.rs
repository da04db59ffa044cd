//! The page of what happened.

use std::collections::BTreeMap;
use std::sync::Arc;

use common::api::dominator::events::{EventKind, ListEventsRequest, Reason};
use common::daemon::page::{Cell, Frame, path_escape, table};
use common::wire::server::{Page, Router};
use common::wire::{Fault, FaultCode};
use common::words::plain;

use crate::api::fault_of;
use crate::domtool::events::words;
use crate::domtool::when::moment;
use crate::fleet::Fleet;

/// How many events are on one page.
const ROWS_MAX: u32 = 200;

/// How often the log is searched on for one page, if little of it is asked for.
const SEARCHES_MAX: usize = 10;

/// The longest text in a cell, in bytes.
const CELL_BYTES_MAX: usize = 1_000;

/// Adds the page to `router`.
#[must_use]
pub fn page(router: Router, fleet: &Arc<Fleet>, frame: Frame) -> Router {
    let fleet = Arc::clone(fleet);
    router.page("/events", move |request| {
        let (fleet, frame) = (Arc::clone(&fleet), frame.clone());
        async move {
            let body = body(&fleet, &request.query).await?;
            Ok(Page::Html(frame.render("Events", &body)))
        }
    })
}

async fn body(fleet: &Fleet, query: &BTreeMap<String, String>) -> Result<String, Fault> {
    let all = |name: &str| query.get(name).cloned().into_iter().collect::<Vec<String>>();
    let unknown =
        |what: &str| Fault::new(FaultCode::BadRequest, format!("there is no such {what}"));
    let reason = |name: String| {
        let known = Reason::ALL.into_iter().find(|reason| reason.name() == name);
        known.ok_or_else(|| unknown("reason"))
    };
    let kind = |name: String| {
        let known = EventKind::ALL.into_iter().find(|kind| kind.name() == name);
        known.ok_or_else(|| unknown("kind"))
    };
    let mut request = ListEventsRequest {
        hosts: all("host"),
        paths: all("path"),
        reasons: all("reason").into_iter().map(reason).collect::<Result<_, _>>()?,
        kinds: all("kind").into_iter().map(kind).collect::<Result<_, _>>()?,
        images: all("image"),
        who: all("who"),
        limit: ROWS_MAX,
        ..ListEventsRequest::default()
    };
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
                Cell::Link { path, text: event.about },
                Cell::Text(plain(&text, CELL_BYTES_MAX)),
            ]
        })
        .collect();
    let mut body = table(&["when", "kind", "about", "what"], &rows);
    if request.before.is_some() {
        body.push_str("<p>There are more: use domtool events.</p>\n");
    }
    Ok(body)
}
