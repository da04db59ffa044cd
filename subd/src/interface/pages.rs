//! The status page of a sub.

use std::sync::Arc;

use api::dominator::text;
use api::subd::{
    Activity, Complaint, GetTasksReply, Health, LastFetch, LastUpdate, Paused, PollReply,
    ResourceState, ResourceUse, ResourcesReport, TaskState,
};
use askama::Template;
use model::display::{size, utc};
use model::path::TreePath;
use rpc::page_frame::Frame;
use rpc::server::{Page, Router};

use crate::interface::Service;
use crate::state::holder::Holder;
use system::clock::wall;

/// Adds the status page to `router`.
pub fn add_pages(router: Router<Arc<Service>>, frame: Frame) -> Router<Arc<Service>> {
    router.page("/", move |service, _| {
        let html = page(&service, &frame);
        async move { Ok(Page::Html(html)) }
    })
}

#[derive(Template)]
#[template(path = "status.html")]
struct StatusPage<'a> {
    reply: &'a PollReply,
    activity: String,
    updates: String,
    holder: String,
    last_image: String,
    last_update: String,
    last_fetch: String,
    root: String,
    instance: String,
    /// Which images are accepted; `None` if all are.
    images: Option<String>,
    cached_objects: usize,
    metadata_passes: String,
    content_passes: String,
    media_passes: String,
    cpu: String,
    scan_reads: String,
    fetch_writes: String,
    network: String,
    tasks: &'a GetTasksReply,
    resources: &'a ResourcesReport,
    complaints: &'a [Complaint],
    unreadable: &'a [(TreePath, String)],
}

impl Service {
    /// Returns which dominator gives orders, for people.
    fn holder_text(&self) -> String {
        let holder = self.report_state.read(|state| state.persisted.holder.clone());
        match holder.filter(|holder| holder.holds(wall())) {
            Some(Holder { dominator, until, .. }) => format!("{dominator}, until {}", utc(until)),
            None => "the first dominator that asks".to_owned(),
        }
    }
}

fn page(service: &Service, frame: &Frame) -> String {
    let reply = service.report_state.reply(None, service.measured());
    let (counters, load) = (&reply.counters, &reply.load);
    let (tasks, resources) = (service.tasks(), service.resources());
    let none = || "none".to_owned();
    let health = match reply.last_update.as_ref().and_then(|last| last.health.as_ref()) {
        Some(Health::Passed) => ", healthy",
        Some(Health::Failed(_)) => ", not healthy",
        None if service.report_state.read(|state| state.persisted.health_unchecked) => {
            ", health not checked: root is not /"
        }
        None => "",
    };
    let page = StatusPage {
        activity: activity(&reply.activity),
        holder: service.holder_text(),
        updates: reply.paused.as_ref().map_or_else(|| "allowed".to_owned(), paused),
        last_image: reply.last_image.as_ref().map_or_else(none, ToString::to_string),
        last_update: reply.last_update.as_ref().map_or_else(none, |last| update(last, health)),
        last_fetch: reply.last_fetch.as_ref().map_or_else(none, fetch),
        root: service.root.path().display().to_string(),
        instance: format!("{:016x}", reply.version.instance),
        images: service.updater.trust.as_ref().map(|trust| trust.text()),
        cached_objects: service.report_state.cached_count(),
        metadata_passes: passes(counters.metadata_passes, counters.metadata_pass_ms),
        content_passes: passes(counters.content_passes, counters.content_pass_ms),
        media_passes: media(counters.media_passes, counters.media_pass_ms, service),
        cpu: share(load.cpu, of_core),
        scan_reads: share(load.scan, per_second),
        fetch_writes: share(load.write, per_second),
        network: share(load.network, per_second),
        tasks: &tasks,
        resources: &resources,
        complaints: reply.last_fetch.as_ref().map_or(&[], |last| &last.complaints),
        unreadable: reply.scan.as_ref().map_or(&[], |scan| &scan.unreadable),
        reply: &reply,
    };
    let body = page.render().expect("writing to a String cannot fail");
    frame.render(&format!("subd on {}", reply.identity.hostname), &body)
}

/// The last line of the output of a command. What it printed before may be for fewer eyes; subtool
/// poll shows it.
fn last_line(output: &str) -> &str {
    output.trim_end().lines().last().unwrap_or_default()
}

/// The class of the state of a task.
fn task_class(state: TaskState) -> &'static str {
    match state {
        TaskState::Running | TaskState::Succeeded => "good",
        TaskState::Unhealthy
        | TaskState::Waiting
        | TaskState::NotRestarted
        | TaskState::Failed
        | TaskState::Refused => "bad",
        _ => "quiet",
    }
}

/// The class of the state of a resource.
fn resource_class(state: ResourceState) -> &'static str {
    match state {
        ResourceState::Made => "good",
        ResourceState::Failed | ResourceState::Drifted => "bad",
        _ => "quiet",
    }
}

fn passes(count: u64, last_ms: u64) -> String {
    format!("{count}, the last one in {last_ms} ms")
}

fn media(count: u64, last_ms: u64, service: &Service) -> String {
    let text = passes(count, last_ms);
    match service.scanner.media_skipped() {
        0 => text,
        files => format!("{text}, in which {files} files could not be read around the page cache"),
    }
}

fn share(share: ResourceUse, text: fn(u64) -> String) -> String {
    let used = text(share.used);
    match share.limit {
        0 => format!("{used} in the last minute, without a limit"),
        limit => format!("{used} in the last minute, of {} at most", text(limit)),
    }
}

/// Formats processor time, in microseconds per second.
fn of_core(microseconds: u64) -> String {
    format!("{}.{:02} % of a core", microseconds / 10_000, microseconds / 100 % 100)
}

fn per_second(bytes: u64) -> String {
    format!("{}/s", size(bytes))
}

fn activity(activity: &Activity) -> String {
    match activity {
        Activity::Idle => "scanning".to_owned(),
        Activity::Fetching { fetch_id, objects, bytes } => {
            format!("fetch {fetch_id}: {objects} objects, {bytes} bytes so far")
        }
        Activity::Preparing { update_id } => format!("staging update {update_id}"),
        Activity::Prepared { update_id } => format!("update {update_id} waits for its Commit"),
        Activity::Updating { update_id } => format!("carrying out update {update_id}"),
    }
}

fn paused(paused: &Paused) -> String {
    format!("paused until {}: {}", utc(paused.until), paused.reason)
}

fn update(last: &LastUpdate, health: &str) -> String {
    let verified = match last.verified_generation {
        Some(generation) => format!("verified in generation {generation}"),
        None => "not verified".to_owned(),
    };
    let boot = if last.awaits_boot { ", waits for its reboot" } else { "" };
    // The failed triggers have rows of their own, with less of what was printed.
    let shown = text::updated(&LastUpdate { trigger_failures: Vec::new(), ..last.clone() });
    format!("{}: {shown}{health}{boot}, {verified}", last.update_id)
}

fn fetch(last: &LastFetch) -> String {
    format!("{}: {}", last.fetch_id, text::fetched(last))
}
