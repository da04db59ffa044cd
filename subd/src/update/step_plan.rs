//! Decides how a plan is staged and in which steps it becomes visible.
//!
//! A step plan says, for each operation of a plan, what is made ready in the staging area and
//! which single step makes it visible. Every staged thing lives in a numbered slot; the number is
//! that of the operation. What lies below a directory that the same plan makes is staged inside
//! that directory's slot, so that it becomes visible with it, in one step.
//!
//! # Invariants
//!
//! * Steps follow the order of the plan.
//! * In `staged` a directory comes before what it holds, and hard links come last.
//! * Each object is moved once, for its last use, and copied before that.
//! * What the steps lead to is what [`model::plan::apply()`] says of the plan: a hard link is to
//!   what is at its target at that point of the plan, not to what comes there later.
//! * A plan that contradicts itself, or touches what is not its business, gives an error that
//!   names the path.
// tidy: core

use std::collections::BTreeMap;

use model::object::ObjectId;
use model::path::TreePath;
use model::plan::{Action, Operation, Plan};
use model::scope::SUBD_DIRECTORY;
use model::tree::encode::TARGET_BYTES_MAX;
use model::tree::node::{MODE_BITS, SYMLINK_MODE};
use model::tree::{Leaf, Node};
use serde::{Deserialize, Serialize};

/// The most operations in one plan.
pub const OPERATIONS_MAX: usize = 4_000_000;

/// A plan that must not be carried out.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanFault {
    /// The plan says itself that paths are in the way.
    #[error("the plan is blocked at {path}: {why}")]
    Blocked {
        /// The first of the paths.
        path: TreePath,
        /// What the plan says of it.
        why: String,
    },
    /// The path is outside of what the plan may touch.
    #[error("{path} must not be touched: {why}")]
    Forbidden {
        /// The path.
        path: TreePath,
        /// Whose it is.
        why: &'static str,
    },
    /// The operation contradicts another one, or makes no sense.
    #[error("bad operation on {path}: {why}")]
    Operation {
        /// Its path.
        path: TreePath,
        /// What is wrong.
        why: &'static str,
    },
    /// The plan has too many operations.
    #[error("the plan has {count} operations, at most {OPERATIONS_MAX} are accepted")]
    TooLong {
        /// How many.
        count: usize,
    },
}

/// Where something is staged: in a slot, or below the directory in a slot.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct SlotPath {
    /// The slot: the number of the operation that makes it visible.
    pub slot: u32,
    /// The path inside the slot; `/` for the slot's entry itself.
    pub below: TreePath,
}

/// Something to make in the staging area.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Staged {
    /// Where it is made.
    pub place: SlotPath,
    /// The path that it will have.
    pub path: TreePath,
    /// What it is.
    pub what: StagedEntry,
}

/// What is made in the staging area.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StagedEntry {
    /// Something with metadata and, if it is a file, the content of a cached object.
    Entry {
        /// What it has to equal.
        node: Node,
        /// True for the last use of a file's object: the object itself is taken.
        takes_object: bool,
    },
    /// A further name of a file that is staged too.
    LinkToStaged(SlotPath),
    /// A further name of a file of the tree, which the plan leaves where it is.
    LinkToLive(TreePath),
}

/// How an operation becomes visible.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PlannedStep {
    /// The slot's entry takes a free path.
    Appear {
        /// The path.
        path: TreePath,
        /// The slot.
        slot: u32,
    },
    /// The slot's entry and what is at the path change places.
    Exchange {
        /// The path.
        path: TreePath,
        /// The slot.
        slot: u32,
        /// All that a directory at the path may hold.
        displaced: Vec<TreePath>,
    },
    /// What is at the path goes; the slot keeps it until the update is verified.
    Vanish {
        /// The path.
        path: TreePath,
        /// The slot.
        slot: u32,
    },
    /// The path gets other metadata.
    Change {
        /// The path.
        path: TreePath,
        /// What has the metadata that is wanted.
        node: Node,
    },
}

/// A plan, planned.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepPlan {
    /// What to stage, in this order.
    pub staged: Vec<Staged>,
    /// How it becomes visible, in this order.
    pub steps: Vec<PlannedStep>,
}

impl StepPlan {
    /// The objects that are taken: id and size in bytes, in staging order.
    pub fn objects(&self) -> impl Iterator<Item = (ObjectId, u64)> {
        self.staged.iter().filter_map(|staged| match &staged.what {
            StagedEntry::Entry { node: Node::Leaf(Leaf::File(file)), .. } => {
                Some((file.object, file.size_bytes))
            }
            _ => None,
        })
    }

    /// The sizes in bytes of the content of what staging makes anew: copies of objects, and
    /// entries without content, each of which is an inode more.
    pub fn made(&self) -> impl Iterator<Item = u64> {
        self.staged.iter().filter_map(|staged| match &staged.what {
            StagedEntry::Entry { node: Node::Leaf(Leaf::File(file)), takes_object: false } => {
                Some(file.size_bytes)
            }
            StagedEntry::Entry { takes_object: false, .. } => Some(0),
            StagedEntry::Entry { .. }
            | StagedEntry::LinkToStaged(_)
            | StagedEntry::LinkToLive(_) => None,
        })
    }
}

/// Arranges `plan`; `kept` says of a path why the plan must not touch it, if so.
///
/// # Errors
///
/// [`PlanFault`] for the first operation that is wrong.
///
/// Takes one look-up for each component of each path.
pub fn plan_steps(
    plan: &Plan,
    kept: impl Fn(&TreePath) -> Option<&'static str>,
) -> Result<StepPlan, PlanFault> {
    if let Some(blocked) = plan.blocked.first() {
        let (path, why) = (blocked.path.clone(), blocked.why.to_string());
        return Err(PlanFault::Blocked { path, why });
    }
    if plan.operations.len() > OPERATIONS_MAX {
        return Err(PlanFault::TooLong { count: plan.operations.len() });
    }
    let mut index: BTreeMap<&TreePath, usize> = BTreeMap::new();
    for (number, operation) in plan.operations.iter().enumerate() {
        check(operation, &kept)?;
        if index.insert(&operation.path, number).is_some() {
            return Err(fault(operation, "the plan has another operation on this path"));
        }
    }
    let mut planner = Planner {
        plan,
        index,
        uses_left: object_uses(plan),
        places: BTreeMap::new(),
        links: Vec::new(),
        step_plan: StepPlan::default(),
    };
    for number in 0..plan.operations.len() {
        planner.operation(number)?;
    }
    planner.finish()
}

fn fault(operation: &Operation, why: &'static str) -> PlanFault {
    PlanFault::Operation { path: operation.path.clone(), why }
}

fn object_uses(plan: &Plan) -> BTreeMap<ObjectId, u32> {
    plan.objects().into_iter().map(|(id, need)| (id, need.files)).collect()
}

/// Checks what can be said of an operation by itself.
fn check(
    operation: &Operation,
    kept: &impl Fn(&TreePath) -> Option<&'static str>,
) -> Result<(), PlanFault> {
    let own = TreePath::new(SUBD_DIRECTORY).expect("the constant is a path");
    let allow = |path: &TreePath| {
        let why = if path.starts_with(&own) { Some("it belongs to subd") } else { kept(path) };
        why.map_or(Ok(()), |why| Err(PlanFault::Forbidden { path: path.clone(), why }))
    };
    allow(&operation.path)?;
    if operation.path.is_root() && !matches!(operation.action, Action::Change(Node::Directory(_))) {
        return Err(fault(operation, "the root can only get other metadata"));
    }
    match &operation.action {
        Action::Create(node) => check_node(operation, node),
        Action::Replace { node, displaced } => {
            if node.is_directory() && !displaced.is_empty() {
                return Err(fault(operation, "a directory cannot replace a directory"));
            }
            for path in displaced {
                if *path == operation.path || !path.starts_with(&operation.path) {
                    return Err(fault(operation, "a displaced path does not lie below it"));
                }
                allow(path)?;
            }
            check_node(operation, node)
        }
        Action::Change(Node::Leaf(Leaf::HardLink(_))) => {
            Err(fault(operation, "a hard link has no metadata of its own"))
        }
        Action::Change(node) => check_node(operation, node),
        Action::Remove => Ok(()),
    }
}

fn check_node(operation: &Operation, node: &Node) -> Result<(), PlanFault> {
    if let Some(metadata) = node.metadata()
        && metadata.mode & !MODE_BITS != 0
    {
        return Err(fault(operation, "its mode has unknown bits"));
    }
    match node {
        Node::Leaf(Leaf::Computed(_)) => {
            Err(fault(operation, "the content of the computed file was not filled in"))
        }
        Node::Leaf(Leaf::Symlink(symlink)) => {
            let target = &symlink.target.0;
            let bad = target.is_empty() || target.len() > TARGET_BYTES_MAX || target.contains(&0);
            if bad || symlink.metadata.mode != SYMLINK_MODE {
                return Err(fault(operation, "it is no valid symlink"));
            }
            Ok(())
        }
        _ => Ok(()),
    }
}

struct Planner<'plan> {
    plan: &'plan Plan,
    index: BTreeMap<&'plan TreePath, usize>,
    uses_left: BTreeMap<ObjectId, u32>,
    /// Where the directories and files are staged that later operations build upon.
    places: BTreeMap<&'plan TreePath, SlotPath>,
    links: Vec<(SlotPath, &'plan Operation, &'plan TreePath)>,
    step_plan: StepPlan,
}

impl<'plan> Planner<'plan> {
    fn operation(&mut self, number: usize) -> Result<(), PlanFault> {
        let operation = &self.plan.operations[number];
        let slot = u32::try_from(number).expect("the number of operations was checked");
        let path = &operation.path;
        let inside = self.staged_parent(number)?;
        match &operation.action {
            Action::Create(node) => {
                let place = inside.unwrap_or(SlotPath { slot, below: TreePath::root() });
                if place.below.is_root() {
                    let outline = PlannedStep::Appear { path: path.clone(), slot };
                    self.step_plan.steps.push(outline);
                }
                self.stage(place, operation, node);
            }
            _ if inside.is_some() => {
                return Err(fault(operation, "it lies in a directory that the plan makes"));
            }
            Action::Replace { node, displaced } => {
                let (path, displaced) = (path.clone(), displaced.clone());
                self.step_plan.steps.push(PlannedStep::Exchange { path, slot, displaced });
                self.stage(SlotPath { slot, below: TreePath::root() }, operation, node);
            }
            Action::Change(node) => {
                let outline = PlannedStep::Change { path: path.clone(), node: node.clone() };
                self.step_plan.steps.push(outline);
            }
            Action::Remove => {
                self.step_plan.steps.push(PlannedStep::Vanish { path: path.clone(), slot });
            }
        }
        Ok(())
    }

    /// Where the operation's path is staged if an earlier operation makes its directory.
    fn staged_parent(&self, number: usize) -> Result<Option<SlotPath>, PlanFault> {
        let operation = &self.plan.operations[number];
        let above = operation.path.ancestors().skip(1);
        for ancestor in above {
            let Some(&at) = self.index.get(&ancestor) else { continue };
            match &self.plan.operations[at].action {
                Action::Change(_) => {}
                Action::Create(Node::Directory(_))
                | Action::Replace { node: Node::Directory(_), .. }
                    if at < number =>
                {
                    let is_parent = operation.path.parent().as_ref() == Some(&ancestor);
                    let Some(place) = self.places.get(&ancestor).filter(|_| is_parent) else {
                        return Err(fault(operation, "nothing makes its directory"));
                    };
                    let below = place.below.join(operation.path.name());
                    let below = below.expect("the last component of a path is a name");
                    return Ok(Some(SlotPath { slot: place.slot, below }));
                }
                Action::Remove if at > number && operation.action == Action::Remove => {}
                _ => return Err(fault(operation, "another operation takes its directory away")),
            }
        }
        Ok(None)
    }

    fn stage(&mut self, place: SlotPath, operation: &'plan Operation, node: &'plan Node) {
        let takes_object = match node {
            Node::Leaf(Leaf::HardLink(target)) => {
                self.links.push((place, operation, target));
                return;
            }
            Node::Leaf(Leaf::File(file)) => {
                let left = self.uses_left.get_mut(&file.object).expect("all uses were counted");
                *left -= 1;
                *left == 0
            }
            _ => false,
        };
        if matches!(node, Node::Directory(_) | Node::Leaf(Leaf::File(_))) {
            self.places.insert(&operation.path, place.clone());
        }
        let what = StagedEntry::Entry { node: node.clone(), takes_object };
        self.step_plan.staged.push(Staged { place, path: operation.path.clone(), what });
    }

    fn finish(mut self) -> Result<StepPlan, PlanFault> {
        for (place, operation, target) in std::mem::take(&mut self.links) {
            let what = self.link(operation, target)?;
            self.step_plan.staged.push(Staged { place, path: operation.path.clone(), what });
        }
        Ok(self.step_plan)
    }

    /// What the hard link of `operation` is a further name of: the file that is at `target` when
    /// it is the operation's turn. What comes to `target` later must not be taken for it: a plan
    /// is judged by carrying it out in its order.
    fn link(&self, operation: &Operation, target: &TreePath) -> Result<StagedEntry, PlanFault> {
        let no_file = || fault(operation, "it links to what is no file at that point of the plan");
        let here = self.index[&operation.path];
        let at = |path: &TreePath| {
            let at = *self.index.get(path)?;
            Some((at, &self.plan.operations[at].action))
        };
        match at(target) {
            Some((
                made,
                Action::Create(Node::Leaf(Leaf::File(_)))
                | Action::Replace { node: Node::Leaf(Leaf::File(_)), .. },
            )) if made < here => Ok(StagedEntry::LinkToStaged(self.places[target].clone())),
            // A change leaves the inode where it is, before the link or after it.
            None | Some((_, Action::Change(Node::Leaf(Leaf::File(_))))) => {
                let goes = |above: TreePath| {
                    at(&above).is_some_and(|(gone, action)| {
                        gone < here && matches!(action, Action::Replace { .. })
                    })
                };
                if target.ancestors().skip(1).any(goes) {
                    return Err(no_file());
                }
                Ok(StagedEntry::LinkToLive(target.clone()))
            }
            Some(_) => Err(no_file()),
        }
    }
}

#[cfg(test)]
mod tests;
