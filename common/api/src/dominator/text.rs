//! What the dominator reports, as text for people: `domtool` and the pages show the same.

use crate::dominator::events::{ChangeReason, EventDetails, EventKind, PathChange, UpdateSummary};
use crate::dominator::explain::{
    DifferenceSummary, EnvironmentImage, Explanation, ImageSource, RequiredState,
};
use crate::dominator::rollback::Rollback;
use crate::dominator::{PollSummary, SubDetail};
use crate::subd::{
    Activity, Health, LastFetch, LastUpdate, Load, ResourceUse, TriggerFailure, UpdateOutcome,
};
use model::display::{ago, counted, safe_text, size, utc};
use model::tree::{Leaf, Node, Time};

/// How many characters of a digest a table shows.
const DIGEST_SHOWN: usize = 12;

/// Parses the name of a reason.
///
/// # Errors
///
/// Names the known ones.
pub fn parse_reason(text: &str) -> Result<ChangeReason, String> {
    let known = ChangeReason::ALL.into_iter().find(|reason| reason.name() == text);
    known.ok_or_else(|| "the reasons are drift, image and computed".to_owned())
}

/// Parses the name of a kind.
///
/// # Errors
///
/// Names the known ones.
pub fn parse_kind(text: &str) -> Result<EventKind, String> {
    let known = EventKind::ALL.into_iter().find(|kind| kind.name() == text);
    known.ok_or_else(|| "the kinds are status, update, change and order".to_owned())
}

/// Returns the kind of an event, and a description.
#[must_use]
pub fn describe_event(what: &EventDetails) -> (&'static str, String) {
    match what {
        EventDetails::Status { status, detail } => ("status", format!("{status}: {detail}")),
        EventDetails::Order { verb, who, why } if why.is_empty() => {
            ("order", format!("{verb} by {who}"))
        }
        EventDetails::Order { verb, who, why } => ("order", format!("{verb} by {who}: {why}")),
        EventDetails::Gap { lost } => {
            ("status", format!("{} of status are not on record", counted(*lost, "change")))
        }
        EventDetails::Update(update) => ("update", of_update(update)),
        EventDetails::TriggersFailed { update, triggers } => {
            ("update", format!("{}, but {triggers}", of_update(update)))
        }
        EventDetails::Change { update, change } => {
            let text = format!("{}; to {}: {}", of_change(change), update.image, end_of(update));
            ("change", text)
        }
    }
}

fn of_update(update: &UpdateSummary) -> String {
    let counts: Vec<(u32, &str)> =
        [(update.drift, "drift"), (update.of_image, "image"), (update.computed, "computed")]
            .into_iter()
            .filter(|(count, _)| *count > 0)
            .collect();
    let all = u64::from(update.drift) + u64::from(update.of_image) + u64::from(update.computed);
    let counts = match counts.as_slice() {
        [] => "no changes".to_owned(),
        [(_, reason)] => format!("{} ({reason})", counted(all, "path")),
        many => {
            let many: Vec<String> =
                many.iter().map(|(count, reason)| format!("{count} {reason}")).collect();
            format!("{} ({})", counted(all, "path"), many.join(", "))
        }
    };
    let former = match update.former.as_str() {
        "" => String::new(),
        former if former == update.image => String::new(),
        former => format!(" from {former}"),
    };
    format!("to {}{former}: {counts}: {}", update.image, end_of(update))
}

fn end_of(update: &UpdateSummary) -> String {
    let ordered = || "ordered, no end reported yet".to_owned();
    update.outcome.as_ref().map_or_else(ordered, ToString::to_string)
}

fn of_change(change: &PathChange) -> String {
    let differs: Vec<&str> = change.differs.iter().map(|difference| difference.name()).collect();
    let node = |node: &Option<Node>| node.as_ref().map_or_else(|| "nothing".to_owned(), of_node);
    let nodes = match (node(&change.old), node(&change.new)) {
        // The file that both names have in common is another one.
        (old, new) if old == new => format!("{new}, anew"),
        (old, new) => format!("{old} -> {new}"),
    };
    format!(
        "{} {} {} ({}): {nodes}",
        change.reason.name(),
        change.operation.name(),
        change.path,
        differs.join(" "),
    )
}

fn of_node(node: &Node) -> String {
    let mut text = node.kind().to_owned();
    if let Some(metadata) = node.metadata() {
        text.push_str(&format!(" {:o} {}:{}", metadata.mode, metadata.uid, metadata.gid));
    }
    match node {
        Node::Leaf(Leaf::File(file)) => {
            let object = file.object.id().to_string();
            let shown = object.find(':').map_or(0, |colon| colon + 1) + DIGEST_SHOWN;
            text.push_str(&format!(" {}", &object[..shown.min(object.len())]));
        }
        Node::Leaf(Leaf::Symlink(link)) => text.push_str(&format!(" to {}", link.target)),
        Node::Leaf(Leaf::HardLink(first)) => text.push_str(&format!(" of {first}")),
        Node::Leaf(Leaf::Computed(_) | Leaf::Special(_)) | Node::Directory(_) => {}
    }
    text
}

/// The longest line, in bytes. Much of it comes from machines.
const LINE_BYTES_MAX: usize = 1_000;

/// The width of the column of names.
const WIDTH: usize = 12;

/// Said of two trees that differ in nothing but their digests.
const OTHER_DIGEST: &str = "the digests of the two trees differ, because each covers paths that \
                            are left to the machine: what the filter keeps, other file-systems, \
                            what cannot be changed; or because computed files have no content in \
                            the image";

/// Formats an explanation for `domtool explain` and its page.
#[must_use]
pub fn explanation_text(why: &Explanation, now: Time) -> String {
    let mut lines = vec![format!("{}: {}: {}", why.hostname, why.status, why.detail)];
    let mut part = |name: &str, value: &str| {
        lines.push(format!("{name:WIDTH$} {value}"));
    };
    part("means", &why.means);
    part("since", &format!("{} ({})", ago(now, why.since), utc(why.since)));
    part("has", &has(why, now));
    if let Some(update) = &why.has.last_update {
        part("last update", &updated(update));
    }
    part("must have", &must_have(&why.must_have));
    if !why.must_have.planned.is_empty() {
        part("comes next", &why.must_have.planned);
    }
    if why.must_have.disable_updates {
        part("", "its record says DisableUpdates");
    }
    if let Some(pause) = &why.paused {
        let (until, who, reason) = (utc(pause.until), &pause.who, &pause.reason);
        part("paused", &format!("until {until} by {who}, {}: {reason}", ago(now, pause.since)));
    }
    match &why.differs {
        None => part("differs", "it was not compared with its image yet"),
        Some(differs) => {
            part("differs", &sums(differs));
            if let (0, Some(has), Some(must)) =
                (differs.operations, why.has.root, why.must_have.root)
                && has != must
            {
                part("", OTHER_DIGEST);
            }
            for danger in &differs.dangers {
                let cleared = if differs.is_cleared { ", which an operator lets pass" } else { "" };
                part("DANGER", &format!("{danger}{cleared}"));
            }
            for blocked in &differs.blocked {
                part("BLOCKED", blocked);
            }
            for path in &differs.paths {
                part("", path);
            }
            let more = u64::from(differs.operations).saturating_sub(differs.paths.len() as u64);
            if more > 0 {
                part("", &format!("and {} more", counted(more, "path")));
            }
        }
    }
    for (index, (when, status, detail)) in why.decided.iter().enumerate() {
        let name = if index == 0 { "decided" } else { "" };
        part(name, &format!("{} {status}: {detail}", utc(*when)));
    }
    part("waits for", &why.waits_for);
    let at = why.next_at.map_or_else(String::new, |at| format!(" (at {} at the latest)", utc(at)));
    part("next", &format!("{}{at}", why.next));
    for (index, remedy) in why.may.iter().enumerate() {
        let name = if index == 0 { "you may" } else { "" };
        let separator = if remedy.command.is_empty() { "" } else { ": " };
        part(name, &format!("{}{separator}{}", remedy.command, remedy.what));
    }
    lines.iter().map(|line| safe_text(line.trim_end(), LINE_BYTES_MAX) + "\n").collect()
}

fn has(why: &Explanation, now: Time) -> String {
    let has = &why.has;
    let image = match has.image.as_str() {
        "" => "no image that it was updated to".to_owned(),
        image => format!("{image}, by its last good update"),
    };
    let tree = has.root.map_or_else(|| "no known tree".to_owned(), |root| format!("tree {root}"));
    let seen = match has.last_seen {
        None => "never seen".to_owned(),
        Some(seen) => format!("seen {}", ago(now, seen)),
    };
    let synced = match has.last_synced {
        None => "never known to be synced".to_owned(),
        Some(synced) => format!("synced {}", ago(now, synced)),
    };
    format!("{image}; {tree}; {seen}, {synced}")
}

fn must_have(must: &RequiredState) -> String {
    let source = match &must.source {
        ImageSource::Record => "by its record in the machine database".to_owned(),
        ImageSource::Default(default) => format!(
            "by default, because its record names none; set {} by {}",
            utc(default.since),
            default.who
        ),
        ImageSource::Rollback(rollback) => rollback_text(rollback),
        ImageSource::Environment(environment) => environment_text(environment),
        ImageSource::Nobody => {
            return "no image: its record names none, and there is no default".to_owned();
        }
    };
    let state = match (&must.root, &must.missing) {
        (Some(root), _) => format!("tree {root}"),
        (None, Some(why)) => format!("not at hand: {why}"),
        (None, None) => "not looked for yet".to_owned(),
    };
    format!("{}, {source}; {state}", must.image)
}

/// Returns from which image, by whom and why a machine was rolled back.
#[must_use]
pub fn rollback_text(rollback: &Rollback) -> String {
    let Rollback { from, who, why, .. } = rollback;
    let why = if why.is_empty() { String::new() } else { format!(": {why}") };
    format!("rolled back from {from} by {who}{why}")
}

fn sums(differs: &DifferenceSummary) -> String {
    if differs.operations == 0 && differs.blocked.is_empty() {
        return "in nothing".to_owned();
    }
    let list = |counts: &[(String, u32)]| {
        let texts: Vec<String> =
            counts.iter().map(|(name, count)| format!("{name} {count}")).collect();
        texts.join(", ")
    };
    let mut text = format!(
        "in {}: {} ({})",
        counted(differs.operations.into(), "path"),
        list(&differs.actions),
        list(&differs.reasons)
    );
    if differs.missing_objects > 0 {
        text.push_str(&format!(
            "; {}, {} still to fetch",
            counted(differs.missing_objects.into(), "object"),
            size(differs.missing_bytes)
        ));
    }
    text
}

/// The longest value, in bytes. Most come from the machine.
const VALUE_BYTES_MAX: usize = 1_000;

/// Returns which environments give a machine its image and bundles, and what they override.
#[must_use]
pub fn environment_text(image: &EnvironmentImage) -> String {
    let EnvironmentImage { environments, record, conflicts } = image;
    let record = if record.is_empty() { "no image" } else { record };
    let conflict = match conflicts.as_slice() {
        [] => String::new(),
        others => format!("; conflict: {} too, not applied", others.join(", ")),
    };
    let environments = environments.join(", ");
    format!("by {environments}; the machine database says {record}{conflict}")
}

/// Returns what is displayed of one machine, as names and values in order; `source` is where its
/// image comes from, if that is known.
#[must_use]
pub fn sub_facts(
    detail: &SubDetail,
    source: Option<&ImageSource>,
    now: Time,
) -> Vec<(&'static str, String)> {
    let summary = &detail.summary;
    let or_none = |text: &str| if text.is_empty() { "none".to_owned() } else { text.to_owned() };
    let maybe = |when: Option<Time>| when.map_or_else(|| "never".to_owned(), |at| ago(now, at));
    let mut facts = vec![
        ("since", format!("{} ({})", ago(now, summary.since), utc(summary.since))),
        ("required image", or_none(&summary.required_image)),
        ("planned image", or_none(&summary.planned_image)),
        ("last update to", or_none(&summary.last_image)),
        ("last seen", maybe(summary.last_seen)),
        ("last synced", maybe(summary.last_synced)),
    ];
    if let Some(ImageSource::Rollback(Rollback { from, .. })) = source {
        facts.push(("ROLLED BACK", format!("from {from}, which is required otherwise")));
    }
    if let Some(ImageSource::Environment(environment)) = source {
        facts.push(("environment", environment_text(environment)));
    }
    if let Some(address) = summary.address {
        facts.push(("address", address.to_string()));
    }
    if detail.missing_objects > 0 {
        let objects = counted(detail.missing_objects.into(), "object");
        let text = format!("{objects}, {}", size(detail.missing_bytes));
        facts.push(("still to fetch", text));
    }
    if let Some(pause) = &detail.pause {
        let (until, who, reason) = (utc(pause.until), &pause.who, &pause.reason);
        let since = ago(now, pause.since);
        facts.push(("PAUSED", format!("until {until} by {who}, {since}: {reason}")));
    }
    let Some(poll) = &detail.poll else { return facts };
    facts.extend(poll_facts(poll));
    for (_, value) in &mut facts {
        *value = safe_text(value, VALUE_BYTES_MAX);
    }
    facts
}

/// Returns what the last poll reports.
fn poll_facts(poll: &PollSummary) -> Vec<(&'static str, String)> {
    let or_none = |text: &str| if text.is_empty() { "none".to_owned() } else { text.to_owned() };
    let identity = &poll.identity;
    let free = match poll.space.free_inodes {
        u64::MAX => size(poll.space.free_bytes),
        inodes => format!("{}, {}", size(poll.space.free_bytes), counted(inodes, "inode")),
    };
    let mut facts = vec![
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
    ];
    if let Some(totals) = &poll.totals {
        let text = format!("{} entries, {}", totals.entries, size(totals.bytes));
        facts.push(("scanned", text));
    }
    facts.push(("load", load(&poll.load)));
    for alarm in &poll.alarms {
        facts.push(("ALARM", alarm.to_string()));
    }
    if let Some(paused) = &poll.paused {
        facts.push(("paused there", format!("until {}: {}", utc(paused.until), paused.reason)));
    }
    if let Some(fetch) = &poll.last_fetch {
        facts.push(("last fetch", fetched(fetch)));
        for complaint in &fetch.complaints {
            let lies = if complaint.lies { " LIES:" } else { ":" };
            facts.push(("source", format!("{}{lies} {}", complaint.source, complaint.text)));
        }
    }
    if let Some(update) = &poll.last_update {
        facts.extend(update_facts(update));
    }
    for failure in &poll.trigger_failures {
        facts.push(("failed trigger", failure.to_string()));
    }
    for (path, why) in &poll.unreadable {
        facts.push(("unreadable", format!("{path}: {why}")));
    }
    facts
}

/// Returns how the last update ended.
fn update_facts(update: &LastUpdate) -> Vec<(&'static str, String)> {
    let mut facts = vec![("last update", updated(update))];
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

/// Formats how much of the machine subd uses, with the limits.
fn load(load: &Load) -> String {
    let per_second =
        |what: &str, share: ResourceUse, text: &dyn Fn(u64) -> String| match share.limit {
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

/// Returns what the last fetch brought, or why it failed.
#[must_use]
pub fn fetched(fetch: &LastFetch) -> String {
    let objects = counted(fetch.objects, "object");
    let reused = match fetch.reused {
        0 => String::new(),
        reused => format!(", {} found on the machine", counted(reused, "object")),
    };
    let sums = format!("{objects}, {} in {} ms{reused}", size(fetch.bytes), fetch.took_ms);
    match &fetch.error {
        None => sums,
        Some(error) => format!("{sums}; {error}"),
    }
}

/// Returns how the last update ended.
#[must_use]
pub fn updated(update: &LastUpdate) -> String {
    let outcome = match &update.outcome {
        UpdateOutcome::Done if !update.trigger_failures.is_empty() => {
            format!("done, but {}", TriggerFailure::describe_all(&update.trigger_failures))
        }
        outcome => outcome.to_string(),
    };
    format!(
        "to {}: {outcome}; {} within {}.{:03} ms, ended {}",
        update.image,
        counted(update.operations.into(), "operation"),
        update.window_ns / 1_000_000,
        update.window_ns / 1_000 % 1_000,
        utc(update.ended)
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dominator::events::PathOperation;
    use model::plan::Difference;

    #[test]
    fn an_update_is_told_with_its_paths_by_reason_and_its_end() {
        let update = |former: &str, drift, of_image, outcome| UpdateSummary {
            update_id: 7,
            image: "web/8".to_owned(),
            former: former.to_owned(),
            drift,
            of_image,
            computed: 0,
            outcome,
            ended: None,
        };
        let table = [
            (
                update("web/7", 0, 67, Some(UpdateOutcome::Done)),
                "to web/8 from web/7: 67 paths (image): done",
            ),
            (update("web/8", 1, 0, Some(UpdateOutcome::Done)), "to web/8: 1 path (drift): done"),
            (
                update("", 7, 2, None),
                "to web/8: 9 paths (7 drift, 2 image): ordered, no end reported yet",
            ),
            (update("", 0, 0, Some(UpdateOutcome::Done)), "to web/8: no changes: done"),
        ];
        for (update, expected) in table {
            assert_eq!(
                describe_event(&EventDetails::Update(update)),
                ("update", expected.to_owned())
            );
        }
    }

    #[test]
    fn an_update_whose_triggers_failed_is_not_just_done() {
        let (image, former) = ("web/8".to_owned(), "web/7".to_owned());
        let outcome = Some(UpdateOutcome::Done);
        let update = UpdateSummary {
            update_id: 7,
            image,
            former,
            drift: 0,
            of_image: 1,
            computed: 0,
            outcome,
            ended: None,
        };
        let triggers = "start web failed: exit code 1".to_owned();
        let expected =
            "to web/8 from web/7: 1 path (image): done, but start web failed: exit code 1";
        assert_eq!(
            describe_event(&EventDetails::TriggersFailed { update, triggers }),
            ("update", expected.to_owned())
        );
    }

    #[test]
    fn a_further_name_of_a_file_that_is_replaced_differs_in_nothing_else() {
        let node = |first: &str| Some(Node::Leaf(Leaf::HardLink(first.parse().unwrap())));
        let change = |old, new| PathChange {
            path: "/b".parse().unwrap(),
            operation: PathOperation::Replace,
            reason: ChangeReason::Drift,
            differs: vec![Difference::Content],
            old,
            new,
        };
        let text = of_change(&change(node("/a"), node("/a")));
        assert_eq!(text, "drift replace /b (content): hard link of /a, anew");
        let text = of_change(&change(node("/a"), node("/c")));
        assert_eq!(text, "drift replace /b (content): hard link of /a -> hard link of /c");
    }
}
