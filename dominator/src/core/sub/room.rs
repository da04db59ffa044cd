//! Room on a disk that is too full for the objects of an update: what no image has is removed
//! first, by an update of its own.
//!
//! That is a repair of the image that the machine has: it removes only what neither that image nor
//! the required one has. A machine whose image is not known, or was scanned by another filter, must
//! be given room by an operator.
// tidy: core

use core::ops::ControlFlow::Continue;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use api::planning::{PlanKey, Planned};
use api::subd::{Activity, FreeSpace, ScanReport};
use model::image::required::RequiredImage;
use model::object::ObjectId;
use model::path::TreePath;
use model::plan::Action;
use model::tree::{Child, Leaf, Node, Tree};

use super::plans::{Missing, on_disk};
use super::{Check, Step, Sub, View};

/// The update that makes room, of the last plan that needed room.
#[derive(Debug)]
pub(super) struct Room {
    key: PlanKey,
    former: ObjectId,
    /// `None` if there is nothing to remove.
    planned: Option<Arc<Planned>>,
    /// What it frees.
    frees: FreeSpace,
}

impl Sub {
    /// Continues with the update that makes room for the objects of `planned`, and its image; with
    /// `None` if they fit, or if it would not make enough.
    pub(super) fn check_room(
        &mut self,
        view: &View,
        image: &Arc<RequiredImage>,
        scan: &ScanReport,
        planned: &Planned,
        step: &mut Step<'_>,
    ) -> Check<Option<(Arc<RequiredImage>, Arc<Planned>)>> {
        let missing = Missing::of(planned, view);
        let is_fetching = matches!(view.report.activity, Activity::Fetching { .. });
        let free = view.report.space;
        if missing.shortage(free).is_none()
            || (is_fetching && !self.prefetch.is_fetching(&view.report.activity))
        {
            return Continue(None);
        }
        let former = match self.is_recorded(view, image) {
            true => Some(Arc::clone(image)),
            false => self.check_former(view, step)?.flatten(),
        };
        // Also not again if the last update that made room was undone.
        let is_usable = |former: &Arc<RequiredImage>| {
            former.scan == image.scan && view.undone(former.name()).is_none()
        };
        let Some(former) = former.filter(is_usable) else {
            return Continue(None);
        };
        let is_same = |room: &Room| room.key == planned.key && room.former == former.digest;
        let room = match self.room.take().filter(|room| is_same(room)) {
            Some(room) => room,
            None => {
                let Some(have) = self.trees.tree() else { return Continue(None) };
                Box::new(Room::of(planned, &have, scan, &former))
            }
        };
        let then = FreeSpace {
            free_bytes: free.free_bytes.saturating_add(room.frees.free_bytes),
            free_inodes: free.free_inodes.saturating_add(room.frees.free_inodes),
        };
        let update = room.planned.clone().filter(|_| missing.shortage(then).is_none());
        self.room = Some(room);
        let Some(update) = update else { return Continue(None) };
        self.hold_if_repeated(&update, step);
        self.check_hold(image, planned, step)?;
        Continue(Some((former, update)))
    }
}

impl Room {
    fn of(planned: &Planned, have: &Tree, scan: &ScanReport, former: &RequiredImage) -> Self {
        let update = planned.part(former, |operation| {
            operation.action == Action::Remove && former.tree.get(&operation.path).is_none()
        });
        let update = update.ok().filter(|update| !update.plan.operations.is_empty());
        let removed = update.iter().flat_map(|update| &update.plan.operations);
        let removed: BTreeSet<&TreePath> = removed.map(|operation| &operation.path).collect();
        let frees = freed(have, &removed, &scan.externally_linked);
        Self { key: planned.key, former: former.digest, planned: update.map(Arc::new), frees }
    }
}

/// Returns the space that is free once the `removed` paths are gone. A file is gone with the last
/// of its names.
fn freed(have: &Tree, removed: &BTreeSet<&TreePath>, linked: &[TreePath]) -> FreeSpace {
    let mut files: BTreeMap<&TreePath, u64> = BTreeMap::new();
    for path in removed {
        if let Some(Child::Leaf(Leaf::File(file))) = have.get(path) {
            files.insert(path, on_disk(file.size_bytes));
        }
    }
    files.retain(|path, _| !linked.contains(path));
    if have.root().totals().hard_links > 0 {
        for (path, node) in have.nodes() {
            if let Node::Leaf(Leaf::HardLink(first)) = node
                && !removed.contains(&path)
            {
                files.remove(&first);
            }
        }
    }
    let free_bytes = files.values().fold(0, |sum: u64, bytes| sum.saturating_add(*bytes));
    FreeSpace { free_bytes, free_inodes: files.len() as u64 }
}
