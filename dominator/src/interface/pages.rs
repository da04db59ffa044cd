//! The pages for browsers.

mod events;
mod resources;
mod rollouts;
mod shared_page;
mod tasks;
mod timeline;
mod vote_link;
mod webhook;

use std::sync::Arc;

use api::dominator::content::ContentChange;
use api::dominator::orders::{DefaultImage, LimitUse};
use api::dominator::rollouts::VoteOnStep;
use api::dominator::{DominatorStatus, ListSubsRequest, Status, SubDetail, SubSummary, TagFilter};
use api::fault::{Fault, FaultCode};
use askama::Template;
use model::display::{ago, counted, utc};
use model::tree::Time;
use rpc::page_frame::{Frame, path_escape};
use rpc::server::{Page, Query, Router};

use shared_page::SharedPage;
use tasks::TaskRow;

use crate::core::alarms::clock_text;
use crate::core::selectors::Selection;
use crate::core::vote_links;
use crate::interface::api::{fault_of, selection};
use crate::runtime::fleet::Fleet;
use system::clock::wall;

/// The most machines, or lines of a difference, on one page.
const ROWS_MAX: usize = 2_000;

/// The name of the daemon on its pages.
const DAEMON: &str = "dominator";

/// The state of the page handlers.
#[derive(Clone)]
pub struct Pages {
    fleet: Arc<Fleet>,
    frame: Frame,
    machines: SharedPage,
}

impl Pages {
    fn html(&self, title: &str, body: &impl Template) -> Page {
        Page::Html(self.text(title, body))
    }

    fn text(&self, title: &str, body: &impl Template) -> String {
        let body = body.render().expect("writing to a String cannot fail");
        self.frame.render(title, &body)
    }
}

/// Adds the pages to `router`.
pub fn pages<S: Clone + Send + Sync + 'static>(
    router: Router<S>,
    fleet: &Arc<Fleet>,
) -> Router<Pages> {
    let frame = Frame::new(DAEMON, &fleet.shared().security)
        .link("/environments", "environments")
        .link("/rollouts", "rollouts")
        .link("/timeline", "timeline")
        .link("/tasks", "tasks")
        .link("/events", "events");
    let has_webhooks = !fleet.shared().webhooks.is_empty();
    let router = router
        .frame(frame.clone())
        .with_state(Pages { fleet: Arc::clone(fleet), frame, machines: SharedPage::default() })
        .page("/", async |pages, request| machines_page(pages, &request.query).await)
        .page("/healthz", async |pages, _| match pages.fleet.shared().history.trouble() {
            None => Ok(Page::Text("ok\n".to_owned())),
            Some(why) => Err(Fault::new(FaultCode::Unavailable, why)),
        })
        .page("/sub", async |pages, request| machine_page(&pages, &request.query))
        .page("/resources", async |pages, request| resources::page(&pages, &request.query).await)
        .page("/environments", async |pages, _| Ok(rollouts::environments(&pages)))
        .page("/rollouts", async |pages, request| Ok(rollouts::rollouts(&pages, &request.query)))
        .page("/rollouts/", async |pages, request| rollouts::rollout(&pages, &request))
        .page("/timeline", async |pages, request| timeline::page(&pages, &request.query))
        .form::<VoteOnStep>("/vote", rollouts::read_vote)
        .page(vote_links::PAGE, async |pages, request| vote_link::page(&pages, &request))
        .form_with_proof::<VoteOnStep>(vote_links::PAGE, vote_link::read)
        .page("/mdb", async |pages, _| {
            Ok(pages.html("Machine database", &HeldMdbPage::new(&pages.fleet)))
        })
        .page("/tasks", async |pages, request| {
            Ok(pages.html("Tasks", &tasks::TasksPage::find(&pages.fleet, &request.query)?))
        })
        .page("/events", async |pages, request| {
            let body = events::EventsPage::find(&pages.fleet, &request.query).await?;
            Ok(pages.html("Events", &body))
        });
    if !has_webhooks {
        return router;
    }
    router.post("/webhook/", webhook::BYTES_MAX, async |pages, request| {
        webhook::take(&pages, &request)
    })
}

/// What a machine database that is held would change.
#[derive(Template)]
#[template(path = "held_mdb.html")]
struct HeldMdbPage {
    held: Option<HeldEdit>,
}

struct HeldEdit {
    since: String,
    why: String,
    digest: String,
    lines: Vec<String>,
    /// How many more lines there are.
    hidden: usize,
}

impl HeldMdbPage {
    fn new(fleet: &Fleet) -> Self {
        let held = fleet.held().map(|(notice, edit)| {
            let mut lines = edit.lines();
            HeldEdit {
                since: utc(notice.since),
                why: notice.why,
                digest: notice.digest.to_string(),
                lines: lines.by_ref().take(ROWS_MAX).collect(),
                hidden: lines.count(),
            }
        });
        Self { held }
    }
}

/// All machines, or those that are asked for.
#[derive(Template)]
#[template(path = "machines.html")]
struct MachinesPage<'a> {
    first_warnings: Vec<String>,
    /// Since when and why a machine database is held.
    held: Option<(String, &'a str)>,
    /// How many machines are paused.
    paused: Option<String>,
    default_image: Option<&'a DefaultImage>,
    warnings: Vec<String>,
    counts: &'a [(Status, u32)],
    /// When the machine database was read.
    read: String,
    directories: u64,
    /// The name by which machines know this dominator.
    name: &'a str,
    /// The limits that are in use, or that somebody waits for.
    limits: Vec<&'a LimitUse>,
    only_status: Option<Status>,
    /// How many machines are shown, unless it is all of them.
    selected: Option<String>,
    subs: &'a [SubSummary],
    /// How many more machines there are.
    hidden: usize,
    now: Time,
}

async fn machines_page(pages: Pages, query: &Query) -> Result<Page, Fault> {
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
    let selection = selection(request)?;
    let machines = pages.machines.clone();
    let render = move || machines_html(&pages, &statuses, &selection, is_all);
    machines.get(query, render).await.map(Page::Html)
}

/// Renders the machines of a selection; `is_all` if that is every machine.
fn machines_html(
    pages: &Pages,
    statuses: &[Status],
    selection: &Selection,
    is_all: bool,
) -> String {
    let subs = pages.fleet.list(selection);
    let (status, now) = (pages.fleet.status(), wall());
    let limits = status.budgets.limits.iter().filter(|limit| {
        let LimitUse { repairs, rollouts, waiting, .. } = limit;
        (*repairs, *rollouts, *waiting) != (0, 0, 0)
    });
    let body = MachinesPage {
        first_warnings: first_warnings(&status),
        held: status.mdb_held.as_ref().map(|held| (utc(held.since), &*held.why)),
        paused: (status.paused > 0).then(|| counted(status.paused.into(), "machine")),
        default_image: status.default_image.as_ref(),
        warnings: warnings(
            &status,
            pages.fleet.shared().history.clock_jumped(),
            &pages.fleet.shared().computed.changes(""),
        ),
        counts: &status.counts,
        read: status.mdb_read.map_or_else(|| "never".to_owned(), |read| ago(now, read)),
        directories: status.directories,
        name: pages.fleet.name(),
        limits: limits.collect(),
        only_status: if let [status] = *statuses { Some(status) } else { None },
        selected: (!is_all).then(|| counted(subs.len() as u64, "machine")),
        subs: &subs[..subs.len().min(ROWS_MAX)],
        hidden: subs.len().saturating_sub(ROWS_MAX),
        now,
    };
    pages.text("Machines", &body)
}

/// Returns the warnings that stand above all else.
fn first_warnings(status: &DominatorStatus) -> Vec<String> {
    let brake = status.brake.as_ref().map(|brake| {
        let since = utc(brake.since);
        format!("Updates are disabled since {since} by {}: {}", brake.who, brake.reason)
    });
    let refused = status.mdb_error.as_ref().map(|error| {
        format!("The machine database is not taken, the last good one is in force: {error}")
    });
    let unsaved = status
        .mdb_unkept
        .as_ref()
        .map(|error| format!("The machine database in force is not kept over a restart: {error}"));
    [brake, refused, unsaved].into_iter().flatten().collect()
}

fn warnings(
    status: &DominatorStatus,
    clock_jumped: Option<i64>,
    changes: &[ContentChange],
) -> Vec<String> {
    let mut warnings = status.image_remarks.clone();
    let image_server = &status.image_server_error;
    warnings.extend(image_server.as_ref().map(|error| format!("The image server: {error}")));
    let alarm = &status.alarm_error;
    warnings.extend(alarm.as_ref().map(|error| format!("The alarm command fails: {error}")));
    warnings.extend(status.history_error.as_ref().map(|error| {
        format!("The history cannot be written, and no update is ordered until it can: {error}")
    }));
    warnings.extend(clock_jumped.map(clock_text));
    warnings.extend(status.budgets.stopped.iter().map(|stop| {
        format!(
            "Updates to {} have stopped since {}: {}; to go on: domtool resume-image {} --why TEXT",
            stop.image,
            utc(stop.since),
            stop.why,
            stop.image
        )
    }));
    warnings.extend(changes.iter().filter_map(content_warning));
    warnings
}

/// Says that a change of content is stopped, or that machines wait for it.
fn content_warning(change: &ContentChange) -> Option<String> {
    let id = &change.id;
    if change.waiting == 0 {
        return None;
    }
    Some(match change.stopped_text() {
        Some(text) => format!("{text} (since {}); domtool computed show {id}", utc(change.since)),
        None => format!(
            "{} for the change of content {id}, which is being tried on {}; domtool computed show \
             {id}",
            match change.waiting {
                1 => "1 machine waits".to_owned(),
                count => format!("{} wait", counted(count.into(), "machine")),
            },
            counted(change.trying.len() as u64, "machine")
        ),
    })
}

/// Returns a time as text; templates pass references.
fn time_text(time: &Time) -> String {
    utc(*time)
}

/// Returns how long ago `time` was.
fn age(now: &Time, time: &Time) -> String {
    ago(*now, *time)
}

/// Returns the style class of a status: its colour.
fn class_of(status: &Status) -> &'static str {
    match status {
        Status::Synced => "good",
        Status::Connecting
        | Status::Rescanning
        | Status::Fetching
        | Status::Preparing
        | Status::Provisioning
        | Status::Updating
        | Status::Rebooting
        | Status::WaitingForBudget => "busy",
        Status::ImageUndefined => "quiet",
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
        | Status::PartlySynced
        | Status::ImageStopped
        | Status::NotConverging
        | Status::SignatureRefused
        | Status::UpdateFailed
        | Status::UpdateStuck
        | Status::HealthFailed
        | Status::TriggerFailed
        | Status::FetchFailed
        | Status::WaitingForComputedFiles
        | Status::SubdTooOld
        | Status::ProvisionFailed => "bad",
    }
}

/// All that is known of one machine.
#[derive(Template)]
#[template(path = "machine.html")]
struct MachinePage<'a> {
    detail: &'a SubDetail,
    scheme: &'static str,
    explanation: String,
    facts: Vec<(&'static str, String)>,
    /// Its tasks, or why they are not known.
    tasks: Result<Vec<TaskRow>, String>,
    /// The record of the machine, as JSON.
    record: String,
}

fn machine_page(pages: &Pages, query: &Query) -> Result<Page, Fault> {
    let Some(host) = query.get("host") else {
        return Err(Fault::new(FaultCode::BadRequest, "which machine? /sub?host=NAME"));
    };
    let fleet = &pages.fleet;
    let detail = fleet.show(host).map_err(|error| fault_of(&error))?;
    let why = fleet.explain(host).map_err(|error| fault_of(&error))?;
    let now = wall();
    let body = MachinePage {
        scheme: fleet.shared().security.scheme(),
        explanation: api::dominator::text::explanation_text(&why, now),
        facts: api::dominator::text::sub_facts(&detail, Some(&why.must_have.source), now),
        record: serde_json::to_string_pretty(&detail.machine)
            .unwrap_or_else(|error| format!("the record has no JSON: {error}")),
        tasks: tasks::tasks_of(fleet, host),
        detail: &detail,
    };
    Ok(pages.html(host, &body))
}
