//! What a plan needs and the sub does not have.
// tidy: core

use api::object_server::IDS_MAX;
use api::subd::{FetchObject, Space};

use super::View;
use api::planning::Planned;
use model::words::{counted, size};

/// What every file takes more than its length, in bytes: the block that it ends in.
const BLOCK_BYTES: u64 = 4_096;

/// The objects that a plan needs and the sub does not have.
#[derive(Debug, Default)]
pub(super) struct Missing {
    /// How many there are.
    pub(super) count: usize,
    /// Their length together, in bytes.
    pub(super) bytes: u64,
    /// What they take on the disk, in bytes, when all files are made of them.
    space: u64,
    /// As many of them as one Fetch takes.
    pub(super) objects: Vec<FetchObject>,
}

impl Missing {
    /// What `planned` needs and a sub that reports `view` does not have.
    pub(super) fn of(planned: &Planned, view: &View) -> Self {
        let mut missing = Self::default();
        for (&id, need) in planned.needs.iter().filter(|(id, _)| !view.cache.contains(id)) {
            missing.count += 1;
            missing.bytes = missing.bytes.saturating_add(need.size_bytes);
            let on_disk = need.size_bytes.div_ceil(BLOCK_BYTES).saturating_mul(BLOCK_BYTES);
            let files = u64::from(need.files.max(1));
            missing.space = missing.space.saturating_add(on_disk.saturating_mul(files));
            if missing.objects.len() < IDS_MAX {
                missing.objects.push(FetchObject { id, size_bytes: need.size_bytes });
            }
        }
        missing
    }

    /// How many, and how long, in words.
    pub(super) fn describe(&self) -> String {
        format!("{} ({})", counted(self.count as u64, "object"), size(self.bytes))
    }

    /// Why they do not fit into what is `free`; `None` if they do.
    pub(super) fn shortage(&self, free: Space) -> Option<String> {
        let fits = self.space <= free.free_bytes
            && u64::try_from(self.count).is_ok_and(|count| count <= free.free_inodes);
        (!fits).then(|| {
            format!(
                "{} need {} and as many inodes; {} and {} are free",
                counted(self.count as u64, "object"),
                size(self.space),
                size(free.free_bytes),
                counted(free.free_inodes, "inode")
            )
        })
    }
}
