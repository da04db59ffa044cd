//! The rows that subtool prints of what a machine reports: names and values.
// tidy: core

use api::subd::{
    Activity, Alarm, CacheReport, Configuration, FetchFailure, GetLimitsReply, Health, LastFetch,
    LastUpdate, Limits, PollReply, ResourceUse, UpdateOutcome,
};
use model::display::{ago, counted, safe_text, size, utc};
use model::object::ObjectId;
use model::scope::{Attributes, Coverage};

/// The longest value, in bytes. Most come from the machine.
const VALUE_BYTES_MAX: usize = 1_000;

/// Names and values.
pub type Rows = Vec<(&'static str, String)>;

/// Returns the rows of a poll.
pub fn poll_rows(reply: &PollReply) -> Rows {
    let none = || "none".to_owned();
    let identity = &reply.identity;
    let mut rows = vec![
        ("calls itself", identity.hostname.clone()),
        ("activity", activity(&reply.activity)),
        ("updates", reply.paused.as_ref().map_or_else(|| "allowed".to_owned(), paused)),
        ("last image", reply.last_image.as_ref().map_or_else(none, ToString::to_string)),
    ];
    rows.extend(reply.alarms.iter().map(|alarm| ("ALARM", self::alarm(alarm))));
    if let Some(update) = &reply.last_update {
        rows.push(("last update", updated(update, reply)));
        rows.extend(update.health.as_ref().map(|health| ("health check", health_text(health))));
    }
    for failure in &reply.trigger_failures {
        let end = failure.output.trim_end().lines().last().unwrap_or_default();
        rows.push(("failed trigger", format!("{} {}: {end}", failure.verb, failure.service)));
    }
    if let Some(fetch) = &reply.last_fetch {
        rows.push(("last fetch", fetched(fetch)));
    }
    match &reply.scan {
        None => rows.push(("tree", "the first scan is not complete".to_owned())),
        Some(scan) => {
            let entries = counted(scan.totals.entries, "path");
            rows.push(("tree", scan.root.to_string()));
            rows.push(("holds", format!("{entries}, {}", size(scan.totals.bytes))));
            for (path, why) in &scan.unreadable {
                rows.push(("unreadable", format!("{path}: {why}")));
            }
        }
    }
    rows.extend([
        ("cached objects", cached_objects(reply).len().to_string()),
        ("passes", passes(reply)),
        ("free space", space(reply)),
        ("load", load(reply)),
        ("generation", format!("{} of {:016x}", reply.version.generation, reply.version.instance)),
        ("machine id", identity.machine_id.clone()),
        ("boot id", identity.boot_id.clone()),
        ("subd", identity.subd_version.clone()),
        ("its clock", utc(reply.clock)),
    ]);
    for (_, value) in &mut rows {
        *value = safe_text(value, VALUE_BYTES_MAX);
    }
    rows
}

/// Returns the rows of the configuration that was set over the network, and the limits that hold,
/// if the machine tells.
pub fn configuration_rows(
    configuration: &Configuration,
    in_force: Option<&GetLimitsReply>,
) -> Rows {
    let Configuration { scan, limits } = configuration;
    let Limits { cpu_percent, scan_percent, write_percent, network_percent } = limits;
    let coverage = match &scan.coverage {
        Coverage::Full(filter) if filter.lines().is_empty() => "everything".to_owned(),
        Coverage::Full(filter) => {
            format!("everything but what {} keep", counted(filter.lines().len() as u64, "line"))
        }
        Coverage::Paths(paths) => format!("{} alone", counted(paths.len() as u64, "path")),
    };
    let attributes = match scan.attributes {
        Attributes::Basic => "without labels",
        Attributes::Labels => "with labels",
    };
    let mut rows = vec![
        ("digest", scan.algorithm.name().to_owned()),
        ("scans", coverage),
        ("attributes", attributes.to_owned()),
    ];
    if let Coverage::Full(filter) = &scan.coverage {
        let line = |line: &String| ("keeps", safe_text(line, VALUE_BYTES_MAX));
        rows.extend(filter.lines().iter().map(line));
    }
    if let Some(in_force) = in_force {
        rows.extend(in_force.rows());
        return rows;
    }
    let limit = |percent: &Option<u8>| match percent {
        None => "the machine's own".to_owned(),
        Some(percent) => format!("{percent} %, or the machine's own if that is lower"),
    };
    rows.extend([
        ("cpu limit", limit(cpu_percent)),
        ("scan limit", limit(scan_percent)),
        ("write limit", limit(write_percent)),
        ("network limit", limit(network_percent)),
    ]);
    rows
}

fn activity(activity: &Activity) -> String {
    match activity {
        Activity::Idle => "scanning".to_owned(),
        Activity::Fetching { objects, bytes, .. } => {
            format!("fetching: {}, {} so far", counted(*objects, "object"), size(*bytes))
        }
        Activity::Preparing { .. } => "staging an update".to_owned(),
        Activity::Prepared { .. } => "an update is staged".to_owned(),
        Activity::Updating { .. } => "carrying out an update".to_owned(),
    }
}

fn paused(paused: &api::subd::Paused) -> String {
    format!("PAUSED until {}: {}", utc(paused.until), paused.reason)
}

fn alarm(alarm: &Alarm) -> String {
    match alarm {
        Alarm::ReadOnly => "the root is mounted read-only: nothing can be repaired".to_owned(),
        Alarm::WriteFailed(why) => format!("a test file cannot be written: {why}"),
        Alarm::ScannerStalled(what) => format!("the scanner has stalled: {what}"),
        Alarm::JournalStuck(why) => format!("the journal of an update cannot be closed: {why}"),
    }
}

fn updated(update: &LastUpdate, reply: &PollReply) -> String {
    let outcome = match &update.outcome {
        UpdateOutcome::Done if update.awaits_boot => "done, waits for a reboot".to_owned(),
        UpdateOutcome::Done if update.verified_generation.is_none() => {
            "done, not verified".to_owned()
        }
        UpdateOutcome::Done => "done".to_owned(),
        UpdateOutcome::NotPrepared(why) => format!("not staged: {why}"),
        UpdateOutcome::RolledBack(why) => format!("undone: {why}"),
        UpdateOutcome::Stuck(why) => format!("STUCK: {why}"),
        UpdateOutcome::Undone(why) => format!("undone, because the health check failed: {why}"),
    };
    format!(
        "to {}: {outcome}; {} within {}.{:03} ms, {}",
        update.image,
        counted(update.operations.into(), "operation"),
        update.window_ns / 1_000_000,
        update.window_ns / 1_000 % 1_000,
        ago(reply.clock, update.ended),
    )
}

/// Describes the result of a health check.
pub fn health_text(health: &Health) -> String {
    match health {
        Health::Passed => "passed".to_owned(),
        Health::Failed(why) => format!("failed: {why}"),
    }
}

fn fetched(fetch: &LastFetch) -> String {
    let objects = counted(fetch.objects, "object");
    let mut text = format!("{objects}, {} in {} ms", size(fetch.bytes), fetch.took_ms);
    if fetch.reused > 0 {
        text.push_str(&format!("; {} were on the machine", fetch.reused));
    }
    match &fetch.error {
        None => {}
        Some(FetchFailure::InsufficientSpace { need_bytes, free_bytes }) => {
            let (need, free) = (size(*need_bytes), size(*free_bytes));
            text.push_str(&format!("; no space: {need} needed, {free} free"));
        }
        Some(FetchFailure::GaveWay) => text.push_str("; gave way to one that was needed"),
        Some(FetchFailure::Sources(why) | FetchFailure::Local(why)) => {
            text.push_str(&format!("; failed: {why}"));
        }
    }
    for complaint in &fetch.complaints {
        text.push_str(&format!("; {}: {}", complaint.source, complaint.text));
    }
    text
}

fn passes(reply: &PollReply) -> String {
    let counters = &reply.counters;
    format!(
        "{} of metadata, the last in {} ms; {} of content, {} ms; {} of the medium, {} ms",
        counters.metadata_passes,
        counters.metadata_pass_ms,
        counters.content_passes,
        counters.content_pass_ms,
        counters.media_passes,
        counters.media_pass_ms,
    )
}

fn space(reply: &PollReply) -> String {
    match reply.space.free_inodes {
        u64::MAX => size(reply.space.free_bytes),
        inodes => format!("{}, {}", size(reply.space.free_bytes), counted(inodes, "inode")),
    }
}

fn load(reply: &PollReply) -> String {
    let of_core = |microseconds: u64| {
        let hundredths = microseconds / 100;
        format!("{}.{:02} % of a core", hundredths / 100, hundredths % 100)
    };
    let rate = |bytes: u64| format!("{}/s", size(bytes));
    let part = |share: &ResourceUse, shown: &dyn Fn(u64) -> String| match share.limit {
        0 => shown(share.used),
        limit => format!("{} (at most {})", shown(share.used), shown(limit)),
    };
    let load = &reply.load;
    format!(
        "cpu {}; scan {}; write {}; network {}",
        part(&load.cpu, &of_core),
        part(&load.scan, &rate),
        part(&load.write, &rate),
        part(&load.network, &rate),
    )
}

/// Returns the cached objects of the machine, if the report lists all.
pub fn cached_objects(reply: &PollReply) -> &[ObjectId] {
    match &reply.cache {
        Some(CacheReport::Full(objects)) => objects,
        _ => &[],
    }
}
