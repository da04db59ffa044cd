//! The paths that an update changes, with the old and new node and the reason of each.
//!
//! The reason is *drift* if the previous image of the machine has the same node at the path as the
//! new one, *image* if the two differ there, and *computed* if the content of the path is computed
//! for each machine. A further name of a file (hard link) has the node of the file. If the previous
//! image is not known, the reason of all paths that are not computed is *image*.
// tidy: core

use std::sync::Arc;

use api::dominator::events::{ChangeReason, PathChange, PathOperation};
use model::image::ImageName;
use model::path::TreePath;
use model::plan::{Action, Difference};
use model::tree::{Leaf, Node, Tree};

use api::planning::Planned;
use model::image::required::RequiredImage;

/// An update that is about to be ordered, with all that its record is made from.
#[derive(Clone, Debug)]
pub struct OrderedUpdate {
    pub update_id: u64,
    /// The image of the last update of the machine, if there was one.
    pub former: Option<ImageName>,
    pub image: Arc<RequiredImage>,
    /// The tree of the machine.
    pub tree: Tree,
    pub planned: Arc<Planned>,
}

impl OrderedUpdate {
    /// Returns the number of [`changes`].
    #[must_use]
    pub fn changes_count(&self) -> usize {
        let displaced = |action: &Action| match action {
            Action::Replace { displaced, .. } => displaced.len(),
            Action::Create(_) | Action::Change(_) | Action::Remove => 0,
        };
        let operations = &self.planned.plan.operations;
        operations.iter().map(|operation| 1 + displaced(&operation.action)).sum()
    }
}

/// The previous image of a machine.
#[derive(Clone, Copy, Debug)]
pub enum PreviousImage<'a> {
    /// The new image.
    Same,
    /// Another image, with this tree.
    Other(&'a Tree),
    /// There was none, or it does not exist any more.
    Unknown,
}

/// Returns the changes of an update, in the order in which they are carried out. The content of a
/// replaced directory follows it.
#[must_use]
pub fn changes(ordered: &OrderedUpdate, former: PreviousImage<'_>) -> Vec<PathChange> {
    let at = |tree: &Tree, path: &TreePath| tree.get(path).map(|child| child.node());
    // A further name of a file changes as the file does.
    let with_file = |tree: &Tree, path: &TreePath| match at(tree, path) {
        Some(Node::Leaf(Leaf::HardLink(first))) => (Some(first.clone()), at(tree, &first)),
        node => (None, node),
    };
    let image = &ordered.image;
    let reason = |path: &TreePath| {
        if image.content.computed.binary_search_by(|rule| rule.path.cmp(path)).is_ok() {
            return ChangeReason::Computed;
        }
        match former {
            PreviousImage::Same => ChangeReason::Drift,
            PreviousImage::Other(tree) if with_file(tree, path) == with_file(&image.tree, path) => {
                ChangeReason::Drift
            }
            PreviousImage::Other(_) | PreviousImage::Unknown => ChangeReason::Image,
        }
    };
    let mut changes = Vec::with_capacity(ordered.planned.plan.operations.len());
    for operation in &ordered.planned.plan.operations {
        let (done, new): (PathOperation, Option<&Node>) = match &operation.action {
            Action::Create(node) => (PathOperation::Create, Some(node)),
            Action::Replace { node, .. } => (PathOperation::Replace, Some(node)),
            Action::Change(node) => (PathOperation::Change, Some(node)),
            Action::Remove => (PathOperation::Remove, None),
        };
        changes.push(PathChange {
            path: operation.path.clone(),
            operation: done,
            reason: reason(&operation.path),
            differs: operation.reason.clone(),
            old: at(&ordered.tree, &operation.path),
            new: new.cloned(),
        });
        let Action::Replace { displaced, .. } = &operation.action else { continue };
        changes.extend(displaced.iter().map(|path| PathChange {
            path: path.clone(),
            operation: PathOperation::Remove,
            reason: reason(path),
            differs: vec![Difference::Extra],
            old: at(&ordered.tree, path),
            new: None,
        }));
    }
    changes
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use api::planning::{PlanJob, PlanKey};
    use api::subd::ScanReport;
    use model::filter::{Filter, Patterns};
    use model::image::{ComputedRule, Content, FORMAT};
    use model::object::Algorithm;
    use model::scope::{ScanSettings, Scope};
    use model::tree::text::from_text;
    use model::trigger::Triggers;

    fn tree(text: &str) -> Tree {
        from_text(Algorithm::Blake3, text).unwrap()
    }

    fn file(path: &str, content: &str) -> String {
        let object = Algorithm::Blake3.digest(content.as_bytes());
        format!("f 644 0:0 1.000000000 {} {object} {path}\n", content.len())
    }

    pub(crate) fn ordered(have: &Tree, want: &Tree, computed: &[&str]) -> OrderedUpdate {
        let rule = |path: &&str| ComputedRule {
            path: TreePath::new(path).unwrap(),
            source: "filegen:6972".to_owned(),
        };
        let content = Content {
            format: FORMAT,
            name: ImageName::new("base").unwrap(),
            root: want.digest(),
            filter: Some(Filter::new::<&str>([]).unwrap()),
            triggers: Triggers::default(),
            computed: computed.iter().map(rule).collect(),
            health_check: None,
            signers: Vec::new(),
        };
        let image = Arc::new(RequiredImage::new(content, want.clone()));
        let scope = Scope::of(&ScanSettings::default(), &[]);
        let job = PlanJob {
            key: PlanKey { image: image.digest, scan: 1, computed: 0 },
            scan: Arc::new(ScanReport::of(scope, have)),
            tree: have.clone(),
            exclusions: Patterns::new::<&str>([]).unwrap(),
            image: Arc::clone(&image),
            computed: Arc::default(),
            refused: Arc::default(),
        };
        let planned = Arc::new(job.run().unwrap());
        OrderedUpdate { update_id: 7, former: None, image, tree: have.clone(), planned }
    }

    /// Path, operation and reason of each change.
    fn rows(
        ordered: &OrderedUpdate,
        former: PreviousImage<'_>,
    ) -> Vec<(String, &'static str, &'static str)> {
        let changes = changes(ordered, former);
        let row = |change: PathChange| {
            (change.path.to_string(), change.operation.name(), change.reason.name())
        };
        changes.into_iter().map(row).collect()
    }

    #[test]
    fn drift_is_told_from_what_differs_between_the_images() {
        let former = tree(&[file("/both", "1"), file("/new", "1"), file("/old", "1")].concat());
        let want = tree(&[file("/added", "1"), file("/both", "1"), file("/new", "2")].concat());
        // The machine lacks a file that both images have, and has one that neither has.
        let have = tree(&[file("/extra", "x"), file("/new", "1"), file("/old", "1")].concat());
        let ordered = ordered(&have, &want, &[]);
        let expected = |reasons: [&'static str; 5]| {
            let all = [
                ("/added", "create"),
                ("/both", "create"),
                ("/new", "replace"),
                ("/old", "remove"),
                ("/extra", "remove"),
            ];
            all.iter()
                .zip(reasons)
                .map(|((path, operation), reason)| ((*path).to_owned(), *operation, reason))
                .collect::<Vec<_>>()
        };
        let by_images = expected(["image", "drift", "image", "image", "drift"]);
        assert_eq!(rows(&ordered, PreviousImage::Other(&former)), by_images);
        assert_eq!(rows(&ordered, PreviousImage::Same), expected(["drift"; 5]));
        assert_eq!(rows(&ordered, PreviousImage::Unknown), expected(["image"; 5]));
    }

    #[test]
    fn all_names_of_a_file_change_for_the_same_reason() {
        let linked = |name: &str, content: &str| {
            let first = format!("/{name}");
            [file(&first, content), format!("h {first}.link -> {first}\n")].concat()
        };
        let both =
            |new: &str, same: &str| tree(&[linked("new", new), linked("same", same)].concat());
        let ordered = ordered(&both("1", "drifted"), &both("2", "1"), &[]);
        let reasons = rows(&ordered, PreviousImage::Other(&both("1", "1")));
        let reasons: Vec<_> =
            reasons.iter().map(|(path, _, reason)| (path.as_str(), *reason)).collect();
        let expected = [
            ("/new", "image"),
            ("/new.link", "image"),
            ("/same", "drift"),
            ("/same.link", "drift"),
        ];
        assert_eq!(reasons, expected);
    }

    #[test]
    fn changes_tell_what_was_there_and_what_is_there_then() {
        let want = tree(&file("/etc", "1"));
        let have = tree(&format!("d 755 0:0 /etc\n{}", file("/etc/passwd", "x")));
        let ordered = ordered(&have, &want, &["/etc"]);
        let node =
            |tree: &Tree, path: &str| Some(tree.get(&TreePath::new(path).unwrap()).unwrap().node());
        let expected = [
            PathChange {
                path: TreePath::new("/etc").unwrap(),
                operation: PathOperation::Replace,
                reason: ChangeReason::Computed,
                differs: vec![Difference::Kind],
                old: node(&have, "/etc"),
                new: node(&want, "/etc"),
            },
            PathChange {
                path: TreePath::new("/etc/passwd").unwrap(),
                operation: PathOperation::Remove,
                reason: ChangeReason::Drift,
                differs: vec![Difference::Extra],
                old: node(&have, "/etc/passwd"),
                new: None,
            },
        ];
        assert_eq!(changes(&ordered, PreviousImage::Same), expected);
        assert_eq!(ordered.changes_count(), 2);
    }
}
