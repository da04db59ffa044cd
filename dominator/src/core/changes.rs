//! Which paths an update changes, from what to what, and why each.
//!
//! A path is changed because of *drift* if the image that the machine had says the same of it as
//! the one that it gets, because of the *image* if the two differ in it, and as *computed* if the
//! content of the path is made for each machine. If the former image is not known, all that is not
//! computed counts as a change of image.
// tidy: core

use std::sync::Arc;

use api::dominator::events::{Operation, PathChange, Reason};
use model::image::ImageName;
use model::path::TreePath;
use model::plan::{Action, Difference};
use model::tree::{Node, Tree};

use api::planning::Planned;
use model::image::required::RequiredImage;

/// An update that is about to be ordered: all that its record is made from.
#[derive(Clone, Debug)]
pub struct Ordered {
    /// The id by which the sub knows it.
    pub update_id: u64,
    /// The image of the last update of the machine, if it had one.
    pub former: Option<ImageName>,
    /// The image that it gets.
    pub image: Arc<RequiredImage>,
    /// What it has.
    pub tree: Tree,
    /// What is to be changed.
    pub planned: Arc<Planned>,
}

impl Ordered {
    /// How many [`changes`] there are.
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

/// What is known of the image that a machine had.
#[derive(Clone, Copy, Debug)]
pub enum Former<'a> {
    /// It is the one that it gets.
    Same,
    /// It is this one.
    Other(&'a Tree),
    /// Nothing: it had none, or nobody has it any more.
    Unknown,
}

/// The changes of an update, in the order in which they are carried out. What a directory that
/// makes way holds is taken away with it, and named after it.
#[must_use]
pub fn changes(ordered: &Ordered, former: Former<'_>) -> Vec<PathChange> {
    let at = |tree: &Tree, path: &TreePath| tree.get(path).map(|child| child.node());
    let image = &ordered.image;
    let reason = |path: &TreePath| {
        if image.content.computed.binary_search_by(|rule| rule.path.cmp(path)).is_ok() {
            return Reason::Computed;
        }
        match former {
            Former::Same => Reason::Drift,
            Former::Other(tree) if at(tree, path) == at(&image.tree, path) => Reason::Drift,
            Former::Other(_) | Former::Unknown => Reason::Image,
        }
    };
    let mut changes = Vec::with_capacity(ordered.planned.plan.operations.len());
    for operation in &ordered.planned.plan.operations {
        let (done, new): (Operation, Option<&Node>) = match &operation.action {
            Action::Create(node) => (Operation::Create, Some(node)),
            Action::Replace { node, .. } => (Operation::Replace, Some(node)),
            Action::Change(node) => (Operation::Change, Some(node)),
            Action::Remove => (Operation::Remove, None),
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
            operation: Operation::Remove,
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

    pub(crate) fn ordered(have: &Tree, want: &Tree, computed: &[&str]) -> Ordered {
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
        };
        let image = Arc::new(RequiredImage::new(content, want.clone()));
        let scope = Scope::of(&ScanSettings::default(), &[]);
        let job = PlanJob {
            key: PlanKey { image: image.digest, scan: 1 },
            scan: Arc::new(ScanReport::of(scope, have)),
            tree: have.clone(),
            exclusions: Patterns::new::<&str>([]).unwrap(),
            image: Arc::clone(&image),
        };
        let planned = Arc::new(job.run().unwrap());
        Ordered { update_id: 7, former: None, image, tree: have.clone(), planned }
    }

    /// Path, operation and reason of each change.
    fn brief(ordered: &Ordered, former: Former<'_>) -> Vec<(String, &'static str, &'static str)> {
        let changes = changes(ordered, former);
        let brief = |change: PathChange| {
            (change.path.to_string(), change.operation.name(), change.reason.name())
        };
        changes.into_iter().map(brief).collect()
    }

    #[test]
    fn drift_is_told_from_what_differs_between_the_images() {
        let former = tree(&[file("/both", "1"), file("/new", "1"), file("/old", "1")].concat());
        let want = tree(&[file("/added", "1"), file("/both", "1"), file("/new", "2")].concat());
        // The machine lost what both images have, and got something that neither has.
        let have = tree(&[file("/extra", "x"), file("/new", "1"), file("/old", "1")].concat());
        let ordered = ordered(&have, &want, &[]);
        let told = |reasons: [&'static str; 5]| {
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
        let by_images = told(["image", "drift", "image", "image", "drift"]);
        assert_eq!(brief(&ordered, Former::Other(&former)), by_images);
        assert_eq!(brief(&ordered, Former::Same), told(["drift"; 5]));
        assert_eq!(brief(&ordered, Former::Unknown), told(["image"; 5]));
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
                operation: Operation::Replace,
                reason: Reason::Computed,
                differs: vec![Difference::Kind],
                old: node(&have, "/etc"),
                new: node(&want, "/etc"),
            },
            PathChange {
                path: TreePath::new("/etc/passwd").unwrap(),
                operation: Operation::Remove,
                reason: Reason::Drift,
                differs: vec![Difference::Extra],
                old: node(&have, "/etc/passwd"),
                new: None,
            },
        ];
        assert_eq!(changes(&ordered, Former::Same), expected);
        assert_eq!(ordered.changes_count(), 2);
    }
}
