//! Changes that a machine refuses, which plans leave out, and whether a new image may be installed
//! without them.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::{Blocked, Obstacle};
use crate::JsonSchema;
use crate::path::TreePath;
use crate::tree::{Child, Leaf, Node, Tree};

/// A change that was tried on a machine and failed, or would fail.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RefusedChange {
    pub path: TreePath,
    pub kind: RefusedKind,
    /// What failed, for people.
    pub why: String,
}

/// Which changes of a path are refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum RefusedKind {
    /// Nothing can be put there, nor can its metadata be changed.
    Any,
    /// It cannot become this.
    Become(Box<Node>),
    /// It cannot be moved away, nor can a directory above it.
    Removal,
    /// Nothing below the directory can be changed, because a user changes it meanwhile.
    Below,
    /// The root of another file-system is there, such as a btrfs subvolume.
    Boundary,
    /// The directory holds too much to be scanned, and is left as it is with all of that: it is
    /// blocked whatever is required of it.
    LeftAlone,
}

/// The refused changes of a machine by path: at most one for each.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RefusedChanges(BTreeMap<TreePath, RefusedChange>);

impl FromIterator<RefusedChange> for RefusedChanges {
    fn from_iter<T: IntoIterator<Item = RefusedChange>>(changes: T) -> Self {
        Self(changes.into_iter().map(|refused| (refused.path.clone(), refused)).collect())
    }
}

impl RefusedChanges {
    /// Returns these and `others`.
    #[must_use]
    pub fn with(&self, others: Vec<RefusedChange>) -> Self {
        self.0.values().cloned().chain(others).collect()
    }

    /// True if some change of `path` was refused.
    #[must_use]
    pub fn has(&self, path: &TreePath) -> bool {
        self.0.contains_key(path) || self.of_directory_above(path).is_some()
    }

    /// Returns why `path` cannot become `node`, if so.
    #[must_use]
    pub fn of_put(&self, path: &TreePath, node: &Node) -> Option<Obstacle> {
        let obstacle = |refused: &RefusedChange| match &refused.kind {
            RefusedKind::Any | RefusedKind::LeftAlone => Some(refused.obstacle()),
            RefusedKind::Become(other) if **other == *node => Some(refused.obstacle()),
            RefusedKind::Boundary => Some(Obstacle::Boundary),
            _ => None,
        };
        self.0.get(path).and_then(obstacle).or_else(|| self.of_directory_above(path))
    }

    /// Returns why `path`, with all that `have` holds there, cannot be moved away, if so.
    #[must_use]
    pub fn of_removal(&self, path: &TreePath, have: &Tree) -> Option<Obstacle> {
        let mut here = self.0.range(path.clone()..).take_while(|(at, _)| at.starts_with(path));
        let stays = |refused: &RefusedChange| {
            let can_move = matches!(refused.kind, RefusedKind::Any | RefusedKind::Become(_));
            !can_move && have.get(&refused.path).is_some()
        };
        match here.find(|(_, refused)| stays(refused)) {
            Some((at, refused)) if at == path => Some(refused.obstacle()),
            Some((at, _)) => Some(Obstacle::Needs { path: at.clone() }),
            None => self.of_directory_above(path),
        }
    }

    /// Returns the directories that are left alone, sorted by path.
    pub(super) fn left_alone(&self) -> impl Iterator<Item = Blocked> {
        let is_left_alone = |refused: &&RefusedChange| refused.kind == RefusedKind::LeftAlone;
        let blocked = |refused: &RefusedChange| Blocked {
            path: refused.path.clone(),
            why: refused.obstacle(),
        };
        self.0.values().filter(is_left_alone).map(blocked)
    }

    fn of_directory_above(&self, path: &TreePath) -> Option<Obstacle> {
        if self.0.is_empty() {
            return None;
        }
        let above = path.ancestors().skip(1).find_map(|above| {
            self.0.get(&above).filter(|refused| {
                use RefusedKind::{Below, Boundary, LeftAlone};
                matches!(refused.kind, Below | Boundary | LeftAlone)
            })
        })?;
        match above.kind {
            RefusedKind::Below | RefusedKind::LeftAlone => Some(above.obstacle()),
            _ => Some(Obstacle::Needs { path: above.path.clone() }),
        }
    }
}

impl RefusedChange {
    fn obstacle(&self) -> Obstacle {
        Obstacle::Refused { why: self.why.clone() }
    }
}

/// The image that a machine has before it gets another one.
#[derive(Clone, Copy, Debug)]
pub enum FormerTree<'a> {
    /// It never had one.
    Nothing,
    /// It cannot be loaded.
    Unknown,
    Known(&'a Tree),
}

/// Returns the first blocked path because of which the image with the tree `want` is not installed
/// on a machine with the image `former`. A path holds nothing back if both images require the same
/// of it, or if it is a directory that exists as another file-system.
#[must_use]
pub fn first_that_holds<'a>(
    blocked: &'a [Blocked],
    want: &Tree,
    former: FormerTree<'_>,
) -> Option<&'a Blocked> {
    let is_directory = |path: &TreePath| matches!(want.get(path), Some(Child::Directory(_)));
    let boundaries: BTreeSet<&TreePath> = blocked
        .iter()
        .filter(|blocked| blocked.why == Obstacle::Boundary && is_directory(&blocked.path))
        .map(|blocked| &blocked.path)
        .collect();
    blocked.iter().find(|Blocked { path, .. }| {
        let is_same = match former {
            FormerTree::Nothing => required(want, path).is_none(),
            FormerTree::Unknown => false,
            FormerTree::Known(former) => required(want, path) == required(former, path),
        };
        !is_same && !path.ancestors().any(|at| boundaries.contains(&at))
    })
}

/// Returns what `tree` has at `path`; of a hard link the file.
fn required(tree: &Tree, path: &TreePath) -> Option<Node> {
    match tree.get(path)? {
        Child::Leaf(Leaf::HardLink(_)) => Some(Node::Leaf(Leaf::File(tree.file(path)?))),
        child => Some(child.node()),
    }
}
