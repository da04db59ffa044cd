//! One plan for one machine, as the dominator and subtool make it, with what is derived from it.
//!
//! A [`PlanJob`] is what the state machine asks for; the shell runs it where CPU time is cheap and
//! brings the [`Planned`] back as an event.

pub mod preview;

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::codec::{CodecError, Encoding, encode};
use crate::subd::ScanReport;
use model::filter::Patterns;
use model::object::{Algorithm, ObjectId};
use model::plan::{Have, Need, Plan, plan};
use model::tree::{Tree, TreeError};
use model::trigger::Trigger;

use model::image::required::{RequiredImage, required_tree};
use model::plan::safety;

/// What a plan was made from, as far as one sub can tell its own plans apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlanKey {
    /// The digest of the image's content.
    pub image: ObjectId,
    /// The number of the scan, counted by the state machine: another scan, another number.
    pub scan: u64,
}

/// All that a plan is made from.
#[derive(Clone, Debug)]
pub struct PlanJob {
    /// Which plan it is.
    pub key: PlanKey,
    /// The scanned tree.
    pub tree: Tree,
    /// What else the scan found.
    pub scan: Arc<ScanReport>,
    /// The machine's own exclusions.
    pub exclusions: Patterns,
    /// The image that is wanted.
    pub image: Arc<RequiredImage>,
}

/// How many entries a machine may have more than its image, for a plan to be made. Each would be
/// an operation, and more than that are no plan that fits into a Prepare.
pub const SURPLUS_MAX: u64 = 1 << 20;

/// A plan that could not be made.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// The part of the image that the machine can see is no tree.
    #[error("the image less the exclusions of the machine is no tree")]
    Required {
        /// Why.
        #[source]
        source: TreeError,
    },
    /// The machine claims to have far more than the image.
    #[error(
        "the machine has {has} entries and its image {wants}: a plan removes at most \
         {SURPLUS_MAX}; if they are real, let the filter of the image keep them"
    )]
    TooLarge {
        /// How many entries the machine has.
        has: u64,
        /// How many entries the image has.
        wants: u64,
    },
    /// The plan cannot be digested.
    #[error("the plan cannot be digested")]
    Digest {
        /// Why.
        #[source]
        source: CodecError,
    },
}

/// A plan with all that is derived from it.
#[derive(Clone, Debug)]
pub struct Planned {
    /// Which plan it is.
    pub key: PlanKey,
    /// The plan.
    pub plan: Arc<Plan>,
    /// The digest of its operations: the same changes of the same paths have the same.
    pub digest: ObjectId,
    /// The objects that the plan needs.
    pub needs: Arc<BTreeMap<ObjectId, Need>>,
    /// True if it makes the machine reboot, or fires a trigger of high impact of the image.
    pub is_high_impact: bool,
    /// Why it must not be carried out without an operator's word; empty if it may.
    pub dangers: Vec<String>,
}

/// True if carrying `plan` out disturbs the machine much. Triggers of the former image, which are
/// not known here, do not count.
fn is_high_impact(plan: &Plan, image: &RequiredImage) -> bool {
    let triggers = image.content.triggers.0.iter();
    let severe: Vec<&Trigger> =
        triggers.filter(|trigger| trigger.reboots() || trigger.high_impact).collect();
    !severe.is_empty()
        && plan.changed_paths().any(|path| severe.iter().any(|trigger| trigger.fires_on(path)))
}

impl PlanJob {
    /// Makes the plan. Takes time in proportion to the directories that differ.
    ///
    /// # Errors
    ///
    /// [`PlanError`]; no tree that was verified makes one.
    pub fn run(&self) -> Result<Planned, PlanError> {
        let want = required_tree(&self.image, &self.exclusions)
            .map_err(|source| PlanError::Required { source })?;
        // A small directory that is named again and again is a huge tree.
        let (has, wants) = (self.tree.root().totals().entries, want.root().totals().entries);
        if has.saturating_sub(wants) > SURPLUS_MAX {
            return Err(PlanError::TooLarge { has, wants });
        }
        let kept_directories = self.scan.kept_directories.iter().cloned().collect();
        let externally_linked = self.scan.externally_linked.iter().cloned().collect();
        let occupied = self.scan.occupied.iter().cloned().collect();
        let have = Have {
            tree: &self.tree,
            kept_directories: &kept_directories,
            externally_linked: &externally_linked,
            occupied: &occupied,
            times: self.scan.times,
        };
        let plan = plan(&have, &want);
        let changes: Vec<_> =
            plan.operations.iter().map(|operation| (&operation.path, &operation.action)).collect();
        let bytes = encode(Encoding::Bincode, "plan", &changes)
            .map_err(|source| PlanError::Digest { source })?;
        let dangers = if plan.is_empty() {
            Vec::new()
        } else {
            safety::dangers(&self.tree, &want, &plan, self.image.content.is_sparse())
        };
        Ok(Planned {
            key: self.key,
            digest: Algorithm::Blake3.digest(&bytes),
            needs: Arc::new(plan.objects()),
            is_high_impact: is_high_impact(&plan, &self.image),
            dangers,
            plan: Arc::new(plan),
        })
    }
}
