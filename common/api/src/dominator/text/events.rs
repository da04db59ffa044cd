//! Events in words, and the names of their kinds and reasons.

use model::tree::{Leaf, Node};
use model::words::counted;

use crate::dominator::events::{EventKind, PathChange, Reason, UpdateFacts, What};
use crate::subd::Outcome;

/// How many characters of a digest are shown in a table.
const DIGEST_SHOWN: usize = 12;

/// The reason of this name.
///
/// # Errors
///
/// Which there are.
pub fn reason_of(text: &str) -> Result<Reason, String> {
    let known = Reason::ALL.into_iter().find(|reason| reason.name() == text);
    known.ok_or_else(|| "the reasons are drift, image and computed".to_owned())
}

/// The kind of this name.
///
/// # Errors
///
/// Which there are.
pub fn kind_of(text: &str) -> Result<EventKind, String> {
    let known = EventKind::ALL.into_iter().find(|kind| kind.name() == text);
    known.ok_or_else(|| "the kinds are status, update, change and order".to_owned())
}

/// The kind of an event, and what happened in words.
#[must_use]
pub fn words(what: &What) -> (&'static str, String) {
    match what {
        What::Status { status, detail } => ("status", format!("{status}: {detail}")),
        What::Order { verb, who, why } if why.is_empty() => ("order", format!("{verb} by {who}")),
        What::Order { verb, who, why } => ("order", format!("{verb} by {who}: {why}")),
        What::Gap { lost } => {
            ("status", format!("{} of status are not on record", counted(*lost, "change")))
        }
        What::Update(update) => ("update", of_update(update)),
        What::Change { update, change } => {
            let text = format!("{}; to {}: {}", of_change(change), update.image, end_of(update));
            ("change", text)
        }
    }
}

fn of_update(update: &UpdateFacts) -> String {
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

fn end_of(update: &UpdateFacts) -> String {
    match &update.outcome {
        None => "ordered, the end is not known".to_owned(),
        Some(Outcome::Done) => "done".to_owned(),
        Some(Outcome::NotPrepared(why)) => format!("not prepared: {why}"),
        Some(Outcome::RolledBack(why)) => format!("failed and put back: {why}"),
        Some(Outcome::Stuck(why)) => format!("stuck: {why}"),
        Some(Outcome::Undone(why)) => format!("undone, as the health check failed: {why}"),
    }
}

fn of_change(change: &PathChange) -> String {
    let differs: Vec<&str> = change.differs.iter().map(|difference| difference.name()).collect();
    let node = |node: &Option<Node>| node.as_ref().map_or_else(|| "nothing".to_owned(), of_node);
    format!(
        "{} {} {} ({}): {} -> {}",
        change.reason.name(),
        change.operation.name(),
        change.path,
        differs.join(" "),
        node(&change.old),
        node(&change.new)
    )
}

fn of_node(node: &Node) -> String {
    let mut text = node.kind().to_owned();
    if let Some(metadata) = node.metadata() {
        text.push_str(&format!(" {:o} {}:{}", metadata.mode, metadata.uid, metadata.gid));
    }
    match node {
        Node::Leaf(Leaf::File(file)) => {
            let object = file.object.to_string();
            let shown = object.find(':').map_or(0, |colon| colon + 1) + DIGEST_SHOWN;
            text.push_str(&format!(" {}", &object[..shown.min(object.len())]));
        }
        Node::Leaf(Leaf::Symlink(link)) => text.push_str(&format!(" to {}", link.target)),
        Node::Leaf(Leaf::HardLink(first)) => text.push_str(&format!(" of {first}")),
        Node::Leaf(Leaf::Computed(_) | Leaf::Special(_)) | Node::Directory(_) => {}
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_update_is_told_with_its_paths_by_reason_and_its_end() {
        let update = |former: &str, drift, of_image, outcome| UpdateFacts {
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
                update("web/7", 0, 67, Some(Outcome::Done)),
                "to web/8 from web/7: 67 paths (image): done",
            ),
            (update("web/8", 1, 0, Some(Outcome::Done)), "to web/8: 1 path (drift): done"),
            (
                update("", 7, 2, None),
                "to web/8: 9 paths (7 drift, 2 image): ordered, the end is not known",
            ),
            (update("", 0, 0, Some(Outcome::Done)), "to web/8: no changes: done"),
        ];
        for (update, expected) in table {
            assert_eq!(words(&What::Update(update)), ("update", expected.to_owned()));
        }
    }
}
