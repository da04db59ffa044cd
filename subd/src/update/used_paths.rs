//! Refuses updates that would move what the kernel uses, which are mount points and swap files, and
//! updates of a read-only root.

use std::collections::BTreeMap;

use api::fault::{Fault, FaultCode};
use model::display::error_chain;
use model::path::TreePath;
use model::plan::{Action, Occupant, Plan};

use crate::root::{Root, RootError};
use crate::update::activate::{Activation, StepError, changed};
use crate::update::step::FormerEntry;

/// Refuses a plan that cannot be carried out on this machine now. `reported` has the paths that the
/// last scan reported as used by the kernel.
///
/// # Errors
///
/// `Unavailable` on a read-only root; `BadRequest` for a plan that moves what is reported as used,
/// and `Stale` for one that moves what is used only since.
pub(super) fn admit(
    root: &Root,
    reported: &[(TreePath, Occupant)],
    plan: &Plan,
) -> Result<(), Fault> {
    let internal = |error: RootError| Fault::new(FaultCode::Internal, error_chain(&error));
    if root.is_read_only().map_err(internal)? {
        let text = "the root is mounted read-only: nothing can be changed";
        return Err(Fault::new(FaultCode::Unavailable, text));
    }
    let occupied = root.used_paths().map_err(internal)?;
    let Some((path, used, occupant)) = moved(plan, &occupied) else { return Ok(()) };
    let known = reported.iter().any(|(reported, _)| *reported == used);
    let (code, then) = match known {
        true => (FaultCode::BadRequest, ""),
        false => (FaultCode::Stale, ": poll and plan again"),
    };
    let why = occupant.obstacle();
    Err(Fault::new(code, format!("{path} must not be moved: {why} ({used}){then}")))
}

/// Returns the first path that the plan replaces or removes although it is or holds a used path,
/// and that used path.
fn moved(
    plan: &Plan,
    occupied: &BTreeMap<TreePath, Occupant>,
) -> Option<(TreePath, TreePath, Occupant)> {
    let taken = plan
        .operations
        .iter()
        .filter(|operation| matches!(operation.action, Action::Replace { .. } | Action::Remove));
    taken.map(|operation| &operation.path).find_map(|path| {
        let (used, occupant) = held(path, occupied)?;
        Some((path.clone(), used.clone(), occupant))
    })
}

/// Returns the first used path at or below `path`.
fn held<'map>(
    path: &TreePath,
    occupied: &'map BTreeMap<TreePath, Occupant>,
) -> Option<(&'map TreePath, Occupant)> {
    let (used, occupant) = occupied.range(path.clone()..).next()?;
    used.starts_with(path).then_some((used, *occupant))
}

impl Activation<'_> {
    /// Fails if `path` is a directory that holds a path that the kernel uses.
    pub(super) fn expect_free(
        &self,
        path: &TreePath,
        former: &FormerEntry,
    ) -> Result<(), StepError> {
        if former.directory { self.expect_unoccupied(path, path) } else { Ok(()) }
    }

    /// Fails for `path` if the kernel now uses a path at or below `at`. The kernel itself keeps a
    /// mount point from being moved, but not the directories above it.
    pub(super) fn expect_unoccupied(
        &self,
        path: &TreePath,
        at: &TreePath,
    ) -> Result<(), StepError> {
        match held(at, &self.root.used_paths()?) {
            None => Ok(()),
            Some((_, occupant)) => Err(changed(path, &occupant.obstacle().to_string())),
        }
    }
}

#[cfg(test)]
mod tests {
    use model::plan::{Difference, Operation};
    use model::tree::{Metadata, Node};

    use super::*;

    #[test]
    fn what_holds_an_occupied_path_is_not_moved() {
        let path = |text: &str| -> TreePath { text.parse().unwrap() };
        let occupied = BTreeMap::from([
            (path("/mnt/disk"), Occupant::MountPoint),
            (path("/var/swap"), Occupant::SwapFile),
        ]);
        let node = || Node::Directory(Metadata::new(0o755, 0, 0));
        let replace = || Action::Replace { node: node(), displaced: Vec::new() };
        let table = [
            ("/mnt", Action::Remove, Some("/mnt/disk")),
            ("/mnt/disk", replace(), Some("/mnt/disk")),
            ("/mnt/disk", Action::Change(node()), None),
            ("/mnt/disk/in", Action::Remove, None),
            ("/mnt/dis", replace(), None),
            ("/mnt/disk2", replace(), None),
            ("/var", replace(), Some("/var/swap")),
            ("/var/swap", Action::Create(node()), None),
        ];
        for (text, action, expected) in table {
            let reason = vec![Difference::Kind];
            let operation = Operation { path: path(text), action, reason };
            let shown = operation.to_string();
            let plan = Plan { operations: vec![operation], blocked: Vec::new() };
            let found = moved(&plan, &occupied).map(|(_, used, _)| used.to_string());
            assert_eq!(found.as_deref(), expected, "{shown}");
        }
    }
}
