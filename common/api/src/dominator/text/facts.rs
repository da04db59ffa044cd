//! What is shown of one machine, on the page and by `show-sub`.

use crate::dominator::SubDetail;
use crate::subd::{Activity, FetchFailure, Health, LastFetch, LastUpdate, Load, Outcome, Share};
use model::tree::Time;

use model::when::{ago, moment};
use model::words::{counted, plain, size};

/// The longest value, in bytes. Most come from the machine.
const VALUE_BYTES_MAX: usize = 1_000;

/// Names and values, in the order in which they are read.
#[must_use]
pub fn of(detail: &SubDetail, now: Time) -> Vec<(&'static str, String)> {
    let summary = &detail.summary;
    let or_none = |text: &str| if text.is_empty() { "none".to_owned() } else { text.to_owned() };
    let maybe = |when: Option<Time>| when.map_or_else(|| "never".to_owned(), |at| ago(now, at));
    let mut facts = vec![
        ("since", format!("{} ({})", ago(now, summary.since), moment(summary.since))),
        ("required image", or_none(&summary.required_image)),
        ("planned image", or_none(&summary.planned_image)),
        ("last update to", or_none(&summary.last_image)),
        ("last seen", maybe(summary.last_seen)),
        ("last synced", maybe(summary.last_synced)),
    ];
    if let Some(address) = summary.address {
        facts.push(("address", address.to_string()));
    }
    if detail.missing_objects > 0 {
        let objects = counted(detail.missing_objects.into(), "object");
        let text = format!("{objects}, {}", size(detail.missing_bytes));
        facts.push(("still to fetch", text));
    }
    if let Some(pause) = &detail.pause {
        let (until, who, reason) = (moment(pause.until), &pause.who, &pause.reason);
        let since = ago(now, pause.since);
        facts.push(("PAUSED", format!("until {until} by {who}, {since}: {reason}")));
    }
    let Some(poll) = &detail.poll else { return facts };
    let identity = &poll.identity;
    let free = match poll.space.free_inodes {
        u64::MAX => size(poll.space.free_bytes),
        inodes => format!("{}, {}", size(poll.space.free_bytes), counted(inodes, "inode")),
    };
    facts.extend([
        ("calls itself", or_none(&identity.hostname)),
        ("machine id", or_none(&identity.machine_id)),
        ("boot id", or_none(&identity.boot_id)),
        ("subd", or_none(&identity.subd_version)),
        ("activity", activity(&poll.activity)),
        ("generation", format!("{} of {:016x}", poll.version.generation, poll.version.instance)),
        ("tree", poll.root.map_or_else(|| "not scanned yet".to_owned(), |root| root.to_string())),
        ("free space", free),
        (
            "scans",
            format!(
                "{} of metadata, the last in {} ms; {} of content, the last in {} ms; {} of the \
                 medium, the last in {} ms",
                poll.counters.metadata_passes,
                poll.counters.metadata_pass_ms,
                poll.counters.content_passes,
                poll.counters.content_pass_ms,
                poll.counters.media_passes,
                poll.counters.media_pass_ms
            ),
        ),
        (
            "so far",
            format!(
                "{} hashed, {} fetched",
                size(poll.counters.hashed_bytes),
                size(poll.counters.fetched_bytes)
            ),
        ),
    ]);
    if let Some(totals) = &poll.totals {
        let text = format!("{} entries, {}", totals.entries, size(totals.bytes));
        facts.push(("scanned", text));
    }
    facts.push(("load", load(&poll.load)));
    for alarm in &poll.alarms {
        facts.push(("ALARM", alarm.to_string()));
    }
    if let Some(paused) = &poll.paused {
        facts.push(("paused there", format!("until {}: {}", moment(paused.until), paused.reason)));
    }
    if let Some(fetch) = &poll.last_fetch {
        facts.push(("last fetch", fetched(fetch)));
        for complaint in &fetch.complaints {
            let lies = if complaint.lies { " LIES:" } else { ":" };
            facts.push(("source", format!("{}{lies} {}", complaint.source, complaint.text)));
        }
    }
    if let Some(update) = &poll.last_update {
        facts.push(("last update", updated(update)));
        match &update.health {
            None => {}
            Some(Health::Passed) => facts.push(("health check", "passed".to_owned())),
            Some(Health::Failed(why)) => {
                facts.push(("health check", format!("FAILED: {}", why.trim_end())));
            }
        }
        if update.awaits_boot {
            facts.push(("reboot", "awaited: the update is complete after it".to_owned()));
        }
        if !update.unlocked.is_empty() {
            let paths: Vec<String> = update.unlocked.iter().map(ToString::to_string).collect();
            facts.push(("unlocked", format!("were immutable or append-only: {}", paths.join(" "))));
        }
    }
    for failure in &poll.trigger_failures {
        let end = failure.output.trim_end().lines().last().unwrap_or_default();
        facts.push(("failed trigger", format!("{} {}: {end}", failure.verb, failure.service)));
    }
    for (path, why) in &poll.unreadable {
        facts.push(("unreadable", format!("{path}: {why}")));
    }
    for (_, value) in &mut facts {
        *value = plain(value, VALUE_BYTES_MAX);
    }
    facts
}

fn activity(activity: &Activity) -> String {
    match activity {
        Activity::Idle => "idle".to_owned(),
        Activity::Fetching { objects, bytes, .. } => {
            format!("fetching: {}, {} so far", counted(*objects, "object"), size(*bytes))
        }
        Activity::Preparing { .. } => "staging an update".to_owned(),
        Activity::Prepared { .. } => "an update is staged".to_owned(),
        Activity::Updating { .. } => "carrying out an update".to_owned(),
    }
}

/// What subd takes of the machine, each with its ceiling.
fn load(load: &Load) -> String {
    let per_second = |what: &str, share: Share, text: &dyn Fn(u64) -> String| match share.limit {
        0 => format!("{what} {}", text(share.used)),
        limit => format!("{what} {} (at most {})", text(share.used), text(limit)),
    };
    let cpu = |microseconds: u64| {
        format!("{}.{:02} % of a core", microseconds / 10_000, microseconds / 100 % 100)
    };
    let bytes = |bytes: u64| format!("{}/s", size(bytes));
    [
        per_second("passes", load.cpu, &cpu),
        per_second("reads", load.scan, &bytes),
        per_second("writes", load.write, &bytes),
        per_second("fetches", load.network, &bytes),
    ]
    .join("; ")
}

fn fetched(fetch: &LastFetch) -> String {
    let objects = counted(fetch.objects, "object");
    let reused = match fetch.reused {
        0 => String::new(),
        reused => format!(", {} found on the machine", counted(reused, "object")),
    };
    let sums = format!("{objects}, {} in {} ms{reused}", size(fetch.bytes), fetch.took_ms);
    match &fetch.error {
        None => sums,
        Some(FetchFailure::InsufficientSpace { need_bytes, free_bytes }) => {
            format!("{sums}; no space: {} needed, {} free", size(*need_bytes), size(*free_bytes))
        }
        Some(FetchFailure::Sources(why)) => format!("{sums}; no source gave all: {why}"),
        Some(FetchFailure::GaveWay) => format!("{sums}; gave way to one that was needed"),
        Some(FetchFailure::Local(why)) => format!("{sums}; the cache failed: {why}"),
    }
}

pub(super) fn updated(update: &LastUpdate) -> String {
    let outcome = match &update.outcome {
        Outcome::Done => "done".to_owned(),
        Outcome::NotPrepared(why) => format!("not prepared: {why}"),
        Outcome::RolledBack(why) => format!("put back: {why}"),
        Outcome::Stuck(why) => format!("stuck: {why}"),
        Outcome::Undone(why) => format!("put back, as the health check failed: {why}"),
    };
    format!(
        "to {}: {outcome}; {} within {}.{:03} ms, ended {}",
        update.image,
        counted(update.operations.into(), "operation"),
        update.window_ns / 1_000_000,
        update.window_ns / 1_000 % 1_000,
        moment(update.ended)
    )
}
