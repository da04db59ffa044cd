//! What a browser shows.

mod events;

use std::sync::Arc;

use api::dominator::budgets::{BudgetReport, LimitUse};
use api::dominator::explain::Explanation;
use api::dominator::{DominatorStatus, ListSubsRequest, Status, SubDetail, SubSummary, TagFilter};
use api::fault::{Fault, FaultCode};
use rpc::page_frame::{Cell, Frame, Mark, html_escape, pairs, path_escape, table};
use rpc::server::{Page, Query, Router};

use crate::interface::api::{fault_of, selection};
use crate::runtime::fleet::Fleet;
use model::when::{ago, moment};
use model::words::counted;
use system::clock::wall;

/// The most machines on one page.
const ROWS_MAX: usize = 2_000;

/// The name of the daemon on its pages.
const DAEMON: &str = "dominator";

/// What the pages show, and what they are put into.
#[derive(Clone)]
pub struct Pages {
    fleet: Arc<Fleet>,
    frame: Frame,
}

/// Adds the pages to `router`.
pub fn pages<S: Clone + Send + Sync + 'static>(
    router: Router<S>,
    fleet: &Arc<Fleet>,
) -> Router<Pages> {
    let frame = Frame::new(DAEMON, &fleet.shared().security).link("/events", "events");
    router
        .frame(frame.clone())
        .with_state(Pages { fleet: Arc::clone(fleet), frame })
        .page("/", async |pages, request| start_page(&pages.fleet, &pages.frame, &request.query))
        .page("/sub", async |Pages { fleet, frame }, request| {
            let Some(host) = request.query.get("host") else {
                return Err(Fault::new(FaultCode::BadRequest, "which machine? /sub?host=NAME"));
            };
            let detail = fleet.show(host).map_err(|error| fault_of(&error))?;
            let why = fleet.explain(host).map_err(|error| fault_of(&error))?;
            let scheme = fleet.shared().security.scheme();
            Ok(Page::Html(frame.render(host, &sub_body(scheme, &detail, &why))))
        })
        .page("/mdb", async |Pages { fleet, frame }, _| {
            Ok(Page::Html(frame.render("Machine database", &held_body(&fleet))))
        })
        .page("/events", async |Pages { fleet, frame }, request| {
            let body = events::body(&fleet, &request.query).await?;
            Ok(Page::Html(frame.render("Events", &body)))
        })
}

/// What a machine database that is held would change.
fn held_body(fleet: &Fleet) -> String {
    let Some((notice, edit)) = fleet.held() else {
        return "<p>No machine database is held.</p>\n".to_owned();
    };
    let mut body = warning(&format!(
        "A machine database is held since {}: {}",
        moment(notice.since),
        notice.why
    ));
    body.push_str(&format!(
        "<p>To put it in force: <code>domtool mdb accept {}</code></p>\n<pre>",
        notice.digest
    ));
    let mut lines = edit.lines();
    for line in lines.by_ref().take(ROWS_MAX) {
        body.push_str(&html_escape(&line));
        body.push('\n');
    }
    body.push_str("</pre>\n");
    let more = lines.count();
    if more > 0 {
        body.push_str(&format!("<p>{more} more are not shown: use domtool mdb diff.</p>\n"));
    }
    body
}

fn start_page(fleet: &Fleet, frame: &Frame, query: &Query) -> Result<Page, Fault> {
    let status_of = |name: String| {
        let known = Status::ALL.into_iter().find(|status| status.name() == name);
        let unknown = || Fault::new(FaultCode::BadRequest, format!("there is no status `{name}`"));
        known.ok_or_else(unknown)
    };
    let statuses = query.all("status").into_iter().map(status_of).collect::<Result<Vec<_>, _>>()?;
    let request = ListSubsRequest {
        statuses: statuses.clone(),
        hosts: query.all("host"),
        images: query.all("image"),
        locations: query.all("location"),
        tags: query.all("tag").iter().map(|tag| TagFilter::parse(tag)).collect(),
    };
    let is_all = request == ListSubsRequest::default();
    let subs = fleet.list(&selection(request)?);
    let body = start_body(&fleet.status(), &subs, &statuses, is_all);
    Ok(Page::Html(frame.render("Machines", &body)))
}

/// The colour of a status.
fn mark_of(status: Status) -> Mark {
    match status {
        Status::Synced => Mark::Good,
        Status::Connecting
        | Status::Rescanning
        | Status::Fetching
        | Status::Preparing
        | Status::Updating
        | Status::Rebooting
        | Status::WaitingForBudget => Mark::Busy,
        Status::ImageUndefined => Mark::Quiet,
        Status::Unreachable
        | Status::PollFailed
        | Status::WrongMachine
        | Status::ImageNotReady
        | Status::InsufficientSpace
        | Status::UpdatesDisabled
        | Status::Paused
        | Status::Held
        | Status::UnsafeUpdate
        | Status::Blocked
        | Status::ImageStopped
        | Status::NotConverging
        | Status::SignatureRefused
        | Status::UpdateFailed
        | Status::UpdateStuck
        | Status::HealthFailed
        | Status::TriggerFailed
        | Status::FetchFailed => Mark::Bad,
    }
}

fn warning(text: &str) -> String {
    format!("<p class=\"bad\">{}</p>\n", html_escape(text))
}

fn start_body(
    status: &DominatorStatus,
    subs: &[SubSummary],
    statuses: &[Status],
    is_all: bool,
) -> String {
    let now = wall();
    let mut body = String::new();
    if let Some(brake) = &status.brake {
        body.push_str(&warning(&format!(
            "Updates are disabled since {} by {}: {}",
            moment(brake.since),
            brake.who,
            brake.reason
        )));
    }
    if let Some(error) = &status.mdb_error {
        body.push_str(&warning(&format!(
            "The machine database is not taken, the last good one is in force: {error}"
        )));
    }
    if let Some(error) = &status.mdb_unkept {
        body.push_str(&warning(&format!(
            "The machine database in force is not kept over a restart: {error}"
        )));
    }
    if let Some(held) = &status.mdb_held {
        body.push_str(&format!(
            "<p class=\"bad\">A machine database is held since {}, the last one is in force: {} \
             (<a href=\"/mdb\">what it changes</a>)</p>\n",
            moment(held.since),
            html_escape(&held.why)
        ));
    }
    if status.paused > 0 {
        body.push_str(&format!(
            "<p>Operators have paused the updates of {} (<a href=\"/?status=paused\">those that \
             differ</a>).</p>\n",
            counted(status.paused.into(), "machine")
        ));
    }
    if let Some(default) = &status.default_image {
        body.push_str(&format!(
            "<p>Machines whose record names no image get {}, as {} said {}.</p>\n",
            html_escape(default.image.as_str()),
            html_escape(&default.who),
            moment(default.since)
        ));
    }
    for remark in &status.image_remarks {
        body.push_str(&warning(remark));
    }
    if let Some(error) = &status.image_server_error {
        body.push_str(&warning(&format!("The image server: {error}")));
    }
    if let Some(error) = &status.alarm_error {
        body.push_str(&warning(&format!("Nobody is told of alarms: {error}")));
    }
    if let Some(error) = &status.history_error {
        body.push_str(&warning(&format!(
            "What happens cannot be put on record, and no update is ordered until it can: {error}"
        )));
    }
    for stop in &status.budgets.stopped {
        body.push_str(&warning(&format!(
            "Updates to {} have stopped since {}: {}; to go on: domtool resume-image {} --why TEXT",
            stop.image,
            moment(stop.since),
            stop.why,
            stop.image
        )));
    }
    let counts: Vec<Vec<Cell>> = status
        .counts
        .iter()
        .map(|(status, count)| {
            let path = format!("/?status={status}");
            vec![
                Cell::Link { path, text: status.name().to_owned() },
                Cell::Number(count.to_string()),
            ]
        })
        .collect();
    body.push_str(&table(&["status", "machines"], &counts));
    body.push_str(&format!(
        "<p class=\"quiet\">Machine database read {}; {} directories in memory.</p>\n",
        status.mdb_read.map_or_else(|| "never".to_owned(), |read| ago(now, read)),
        status.directories
    ));
    body.push_str(&budget_table(&status.budgets));
    if let [status] = statuses {
        body.push_str(&format!("<h2>{status}</h2>\n"));
    }
    if !is_all {
        body.push_str(&format!(
            "<p>{} (<a href=\"/\">all</a>)</p>\n",
            counted(subs.len() as u64, "machine")
        ));
    }
    let rows: Vec<Vec<Cell>> = subs
        .iter()
        .take(ROWS_MAX)
        .map(|sub| {
            let path = format!("/sub?host={}", path_escape(&sub.hostname));
            vec![
                Cell::Link { path, text: sub.hostname.clone() },
                Cell::Mark { mark: mark_of(sub.status), text: sub.status.to_string() },
                Cell::Text(sub.detail.clone()),
                Cell::Text(ago(now, sub.since)),
                Cell::Text(sub.required_image.clone()),
                Cell::Text(sub.planned_image.clone()),
                Cell::Text(sub.last_image.clone()),
                Cell::Text(sub.last_synced.map_or_else(String::new, |when| ago(now, when))),
                match sub.alarms {
                    0 => Cell::Text(String::new()),
                    count => Cell::Mark { mark: Mark::Bad, text: count.to_string() },
                },
            ]
        })
        .collect();
    let head = [
        "machine",
        "status",
        "detail",
        "since",
        "required",
        "planned",
        "last update",
        "last synced",
        "alarms",
    ];
    body.push_str(&table(&head, &rows));
    if subs.len() > ROWS_MAX {
        body.push_str(&format!(
            "<p>{} more are not shown: choose a status, or use domtool list-subs.</p>\n",
            subs.len() - ROWS_MAX
        ));
    }
    body
}

/// The limits that are in use, or that somebody waits for.
fn budget_table(budgets: &BudgetReport) -> String {
    let used = budgets.limits.iter().filter(|limit| {
        let LimitUse { repairs, rollouts, waiting, .. } = limit;
        (*repairs, *rollouts, *waiting) != (0, 0, 0)
    });
    let rows: Vec<Vec<Cell>> = used
        .map(|limit| {
            let numbers = [limit.places, limit.rollouts, limit.repairs, limit.waiting];
            let mut row = vec![Cell::Text(limit.limit.clone())];
            row.extend(numbers.map(|number| Cell::Number(number.to_string())));
            row
        })
        .collect();
    if rows.is_empty() {
        return String::new();
    }
    table(&["budget", "places", "rollouts", "repairs", "waiting"], &rows)
}

fn sub_body(scheme: &str, detail: &SubDetail, why: &Explanation) -> String {
    let mut body = table(
        &[],
        &[vec![
            Cell::Mark {
                mark: mark_of(detail.summary.status),
                text: detail.summary.status.to_string(),
            },
            Cell::Text(detail.summary.detail.clone()),
        ]],
    );
    if let Some(address) = detail.summary.address {
        // An address is digits, dots, colons and brackets: nothing to escape.
        body.push_str(&format!(
            "<p><a href=\"{scheme}://{address}/\">the machine's own page</a></p>\n"
        ));
    }
    let why = api::dominator::text::explain::text(why, wall());
    body.push_str(&format!("<h2>Why</h2>\n<pre>{}</pre>\n", html_escape(&why)));
    body.push_str(&pairs(
        api::dominator::text::facts::of(detail, wall())
            .iter()
            .map(|(name, value)| (*name, value.clone())),
    ));
    if !detail.plan.is_empty() {
        body.push_str(&format!("<h2>Plan: {} operations</h2>\n<pre>", detail.plan_operations));
        for line in &detail.plan {
            body.push_str(&html_escape(line));
            body.push('\n');
        }
        body.push_str("</pre>\n");
    }
    let rows: Vec<Vec<Cell>> = detail
        .history
        .iter()
        .map(|(when, status, text)| {
            vec![
                Cell::Text(moment(*when)),
                Cell::Mark { mark: mark_of(*status), text: status.to_string() },
                Cell::Text(text.clone()),
            ]
        })
        .collect();
    body.push_str(&format!(
        "<h2>History</h2>\n<p><a href=\"/events?host={}\">all of it, with updates</a></p>\n",
        path_escape(&detail.summary.hostname)
    ));
    body.push_str(&table(&["when", "status", "detail"], &rows));
    let record = serde_json::to_string_pretty(&detail.machine)
        .unwrap_or_else(|error| format!("the record has no JSON: {error}"));
    body.push_str(&format!("<h2>Machine database</h2>\n<pre>{}</pre>\n", html_escape(&record)));
    body
}
