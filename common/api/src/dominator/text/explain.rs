//! An explanation of one machine as text, for `domtool explain` and for its page.

use crate::dominator::explain::{Differs, Explanation, ImageSource, MustHave};
use model::tree::Time;

use super::facts::updated;
use model::when::{ago, moment};
use model::words::{counted, plain, size};

/// The longest line, in bytes. Much of it comes from machines.
const LINE_BYTES_MAX: usize = 1_000;

/// How wide the names of parts are.
const WIDTH: usize = 12;

/// The explanation, in the order in which it is read.
#[must_use]
pub fn text(why: &Explanation, now: Time) -> String {
    let mut lines = vec![format!("{}: {}: {}", why.hostname, why.status, why.detail)];
    let mut part = |name: &str, value: &str| {
        lines.push(format!("{name:WIDTH$} {value}"));
    };
    part("means", &why.means);
    part("since", &format!("{} ({})", ago(now, why.since), moment(why.since)));
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
        let (until, who, reason) = (moment(pause.until), &pause.who, &pause.reason);
        part("paused", &format!("until {until} by {who}, {}: {reason}", ago(now, pause.since)));
    }
    match &why.differs {
        None => part("differs", "it was not compared with its image yet"),
        Some(differs) => {
            part("differs", &sums(differs));
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
        part(name, &format!("{} {status}: {detail}", moment(*when)));
    }
    part("waits for", &why.waits_for);
    let at =
        why.next_at.map_or_else(String::new, |at| format!(" (at {} at the latest)", moment(at)));
    part("next", &format!("{}{at}", why.next));
    for (index, remedy) in why.may.iter().enumerate() {
        let name = if index == 0 { "you may" } else { "" };
        let separator = if remedy.command.is_empty() { "" } else { ": " };
        part(name, &format!("{}{separator}{}", remedy.command, remedy.what));
    }
    lines.iter().map(|line| plain(line.trim_end(), LINE_BYTES_MAX) + "\n").collect()
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

fn must_have(must: &MustHave) -> String {
    let source = match &must.source {
        ImageSource::Record => "by its record in the machine database".to_owned(),
        ImageSource::Default(default) => format!(
            "by default, because its record names none; set {} by {}",
            moment(default.since),
            default.who
        ),
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

fn sums(differs: &Differs) -> String {
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
