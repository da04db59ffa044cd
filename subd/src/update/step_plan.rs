//! Decides how a plan is staged and in which steps it becomes visible.
//!
//! A step plan says, for each operation of a plan, what is created in the staging area and which
//! single step makes it visible. Every staged entry is in a numbered slot; the number is that of
//! the operation. What lies below a directory that the same plan creates is staged inside that
//! directory's slot, so that both become visible in one step.
//!
//! # Invariants
//!
//! * Steps follow the order of the plan.
//! * In `staged` a directory comes before what it holds, and hard links come last.
//! * Each object is moved once, for its last use, and copied before that.
//! * The steps lead to the result of [`model::plan::apply()`]: a hard link is to the file at its
//!   target at that point of the plan, not to a later one.
//! * A plan that contradicts itself, or changes forbidden paths, causes an error that names the
//!   path.
// tidy: core

use std::collections::BTreeMap;

use model::object::ObjectId;
use model::path::TreePath;
use model::plan::{Action, Operation, Plan};
use model::tree::encode::TARGET_BYTES_MAX;
use model::tree::node::{MODE_BITS, SYMLINK_MODE};
use model::tree::{Leaf, Node};
use serde::{Deserialize, Serialize};

use crate::root::subd_directory;

/// The most operations in one plan.
pub const OPERATIONS_MAX: usize = 4_000_000;

/// The plan must not be carried out.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanFault {
    #[error("the plan is blocked at {path}: {why}")]
    Blocked {
        /// The first of the paths.
        path: TreePath,
        /// The reason in the plan.
        why: String,
    },
    #[error("{path} must not be touched: {why}")]
    Forbidden { path: TreePath, why: &'static str },
    #[error("invalid operation on {path}: {why}")]
    Operation { path: TreePath, why: &'static str },
    #[error("the plan has {count} operations, at most {OPERATIONS_MAX} are accepted")]
    TooLong { count: usize },
}

/// The location of a staged entry: a slot, or below the directory in a slot.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct SlotPath {
    /// The slot: the number of the operation that makes it visible.
    pub slot: u32,
    /// The path inside the slot; `/` for the slot's entry itself.
    pub below: TreePath,
}

/// An entry to create in the staging area.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StagedItem {
    pub place: SlotPath,
    /// The path that it will have.
    pub path: TreePath,
    pub what: StagedEntry,
}

/// The kind of a staged entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StagedEntry {
    /// An entry with metadata and, if it is a file, the content of a cached object.
    Entry {
        /// What it must be equal to.
        node: Node,
        /// True for the last use of a file's object: the object itself is taken.
        takes_object: bool,
    },
    /// A further name of a file that is staged too.
    LinkToStaged(SlotPath),
    /// A further name of a file of the tree, which the plan leaves where it is.
    LinkToLive(TreePath),
}

/// The step of an operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PlannedStep {
    /// The slot's entry is moved to a free path.
    Appear { path: TreePath, slot: u32 },
    /// The slot's entry and the entry at the path are exchanged.
    Exchange {
        path: TreePath,
        slot: u32,
        /// All that a directory at the path may hold.
        displaced: Vec<TreePath>,
    },
    /// The entry at the path is moved to the slot, until the update is verified.
    Vanish { path: TreePath, slot: u32 },
    /// The path gets other metadata.
    Change {
        path: TreePath,
        /// A node with the wanted metadata.
        node: Node,
    },
}

/// How a plan is staged and executed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepPlan {
    /// The entries to stage, in this order.
    pub staged: Vec<StagedItem>,
    /// The steps, in this order.
    pub steps: Vec<PlannedStep>,
}

impl StepPlan {
    /// Returns the first number that is that of no slot, nor are those after it.
    pub fn first_spare_slot(&self) -> u32 {
        let slots = self.steps.iter().map(|step| match step {
            PlannedStep::Appear { slot, .. }
            | PlannedStep::Exchange { slot, .. }
            | PlannedStep::Vanish { slot, .. } => *slot + 1,
            PlannedStep::Change { .. } => 0,
        });
        slots.max().unwrap_or_default()
    }

    /// Returns the needed objects: id and size in bytes, in staging order.
    pub fn objects(&self) -> impl Iterator<Item = (ObjectId, u64)> {
        self.staged.iter().filter_map(|staged| match &staged.what {
            StagedEntry::Entry { node: Node::Leaf(Leaf::File(file)), .. } => {
                Some((file.object.id(), file.size_bytes))
            }
            _ => None,
        })
    }

    /// Returns the sizes in bytes of the entries that staging creates: copies of objects, and
    /// entries without content, each of which needs an inode.
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

/// Makes the steps of `plan`. `kept` returns why the plan must not change a path, if so.
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

/// Checks an operation by itself.
fn check(
    operation: &Operation,
    kept: &impl Fn(&TreePath) -> Option<&'static str>,
) -> Result<(), PlanFault> {
    let own = subd_directory();
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
                return Err(fault(operation, "it is not a valid symlink"));
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
    /// The locations of the staged directories and files that later operations use.
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
                    let planned = PlannedStep::Appear { path: path.clone(), slot };
                    self.step_plan.steps.push(planned);
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
                let planned = PlannedStep::Change { path: path.clone(), node: node.clone() };
                self.step_plan.steps.push(planned);
            }
            Action::Remove => {
                self.step_plan.steps.push(PlannedStep::Vanish { path: path.clone(), slot });
            }
        }
        Ok(())
    }

    /// Returns where the operation's path is staged, if an earlier operation creates its directory.
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
                _ => return Err(fault(operation, "another operation removes its directory")),
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
                let left =
                    self.uses_left.get_mut(&file.object.id()).expect("all uses were counted");
                *left -= 1;
                *left == 0
            }
            _ => false,
        };
        if matches!(node, Node::Directory(_) | Node::Leaf(Leaf::File(_))) {
            self.places.insert(&operation.path, place.clone());
        }
        let what = StagedEntry::Entry { node: node.clone(), takes_object };
        self.step_plan.staged.push(StagedItem { place, path: operation.path.clone(), what });
    }

    fn finish(mut self) -> Result<StepPlan, PlanFault> {
        for (place, operation, target) in std::mem::take(&mut self.links) {
            let what = self.link(operation, target)?;
            self.step_plan.staged.push(StagedItem { place, path: operation.path.clone(), what });
        }
        Ok(self.step_plan)
    }

    /// Returns the file that the hard link of `operation` refers to: the file at `target` at that
    /// point of the plan, not a later one, because a plan is verified by applying it in its order.
    fn link(&self, operation: &Operation, target: &TreePath) -> Result<StagedEntry, PlanFault> {
        let no_file = || fault(operation, "its target is not a file at that point of the plan");
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
            // A change keeps the inode, before the link or after it.
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
