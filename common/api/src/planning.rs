//! The plan for one machine, as the dominator and subtool make it, with what is derived from it.
//!
//! The state machine requests a [`PlanJob`]. The driver runs it and returns the [`Planned`] as an
//! event.

pub mod preview;

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::codec::{CodecError, Encoding, encode};
use crate::object_server::IDS_MAX;
use crate::subd::{FetchObject, ScanReport};
use model::filter::Patterns;
use model::object::{Algorithm, ObjectId};
use model::plan::safety::{self, Extent};
use model::plan::{Need, Operation, Plan, RefusedChanges, ScannedTree, plan};
use model::tree::{Tree, TreeError};
use model::trigger::Trigger;

use model::image::computed::{ComputedFiles, fill_in};
use model::image::required::{RequiredImage, required_tree};

/// Identifies a plan among those of one sub.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlanKey {
    /// The digest of the image's content.
    pub image: ObjectId,
    /// The number of the scan, counted by the state machine.
    pub scan: u64,
    /// The number of the content of computed files, counted by the state machine.
    pub computed: u64,
}

/// The inputs of a plan.
#[derive(Clone, Debug)]
pub struct PlanJob {
    pub key: PlanKey,
    /// The scanned tree.
    pub tree: Tree,
    /// The report of the scan.
    pub scan: Arc<ScanReport>,
    /// The machine's own exclusions.
    pub exclusions: Patterns,
    /// The required image.
    pub image: Arc<RequiredImage>,
    /// The content of its computed files. Where it is not known, that of the machine stays.
    pub computed: Arc<ComputedFiles>,
    /// Changes that the machine refuses.
    pub refused: Arc<RefusedChanges>,
}

/// How many more entries than its image a machine may have for a plan to be made. Each would be an
/// operation, and more than that do not fit into a Prepare.
pub const SURPLUS_MAX: u64 = 1 << 20;

/// How many hard links and paths of the scan report a plan may have that is made at once.
const IN_PLACE_MAX: u64 = 1_000;

/// Why a plan could not be made.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// The image without the machine's exclusions is not a valid tree.
    #[error("the image less the exclusions of the machine is no tree")]
    Required {
        #[source]
        source: TreeError,
    },
    /// The machine has far more entries than the image.
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
    /// The plan cannot be encoded for its digest.
    #[error("the plan cannot be digested")]
    Digest {
        #[source]
        source: CodecError,
    },
}

/// A plan with everything that is derived from it.
#[derive(Clone, Debug)]
pub struct Planned {
    pub key: PlanKey,
    pub plan: Arc<Plan>,
    /// The digest of its operations. Plans with equal operations have equal digests.
    pub digest: ObjectId,
    /// The objects that the plan needs, except the content of computed files.
    pub needs: Arc<BTreeMap<ObjectId, Need>>,
    /// The content of computed files that the plan needs, which no image server has.
    pub computed: Arc<BTreeMap<ObjectId, Need>>,
    /// The first of them, as many as one Fetch takes.
    pub objects: Arc<[FetchObject]>,
    /// True if it reboots the machine, or fires a trigger of high impact.
    pub is_high_impact: bool,
    /// Why it is unsafe and needs an operator's permission; empty if it is safe.
    pub dangers: Vec<String>,
}

/// Returns true if `plan` has a high impact on the machine. Triggers of the former image are not
/// known here and do not count.
fn is_high_impact(plan: &Plan, image: &RequiredImage) -> bool {
    let triggers = image.content.triggers.0.iter();
    let severe: Vec<&Trigger> =
        triggers.filter(|trigger| trigger.reboots() || trigger.high_impact).collect();
    !severe.is_empty()
        && plan.changed_paths().any(|path| severe.iter().any(|trigger| trigger.fires_on(path)))
}

/// Returns the first objects, as many as one Fetch takes.
fn first_of(needs: &BTreeMap<ObjectId, Need>) -> Arc<[FetchObject]> {
    let first = needs.iter().take(IDS_MAX);
    first.map(|(&id, need)| FetchObject { id, size_bytes: need.size_bytes }).collect()
}

/// Takes the content of computed files out of `needs`.
fn take_computed<'a>(
    needs: &mut BTreeMap<ObjectId, Need>,
    known: impl IntoIterator<Item = &'a ObjectId>,
) -> BTreeMap<ObjectId, Need> {
    known.into_iter().filter_map(|id| needs.remove_entry(id)).collect()
}

/// Returns the digest of the operations.
fn digest_of(plan: &Plan) -> Result<ObjectId, PlanError> {
    let changes: Vec<_> =
        plan.operations.iter().map(|operation| (&operation.path, &operation.action)).collect();
    let bytes = encode(Encoding::Bincode, "plan", &changes)
        .map_err(|source| PlanError::Digest { source })?;
    Ok(Algorithm::Blake3.digest(&bytes))
}

impl Planned {
    /// Returns the operations alone, as a Prepare has them.
    #[must_use]
    pub fn unblocked(&self) -> Arc<Plan> {
        match self.plan.blocked.is_empty() {
            true => Arc::clone(&self.plan),
            false => Arc::new(self.plan.without_blocked()),
        }
    }

    /// Returns the plan of those operations for which `is_part` is true, which must not need
    /// others, as an update to `image`. Dangers are those of the whole plan.
    ///
    /// # Errors
    ///
    /// As [`PlanJob::run`].
    pub fn part(
        &self,
        image: &RequiredImage,
        is_part: impl Fn(&Operation) -> bool,
    ) -> Result<Self, PlanError> {
        let operations = self.plan.operations.iter().filter(|operation| is_part(operation));
        let plan = Plan { operations: operations.cloned().collect(), blocked: Vec::new() };
        let mut needs = plan.objects();
        let computed = take_computed(&mut needs, self.computed.keys());
        Ok(Self {
            key: self.key,
            digest: digest_of(&plan)?,
            objects: first_of(&needs),
            needs: Arc::new(needs),
            computed: Arc::new(computed),
            is_high_impact: is_high_impact(&plan, image),
            dangers: self.dangers.clone(),
            plan: Arc::new(plan),
        })
    }
}

impl PlanJob {
    /// True if it is known without much work that the machine has what it must have, and that
    /// [`Self::run`] takes little time. Takes time in proportion to the directories with computed
    /// files.
    #[must_use]
    pub fn is_in_place(&self) -> bool {
        let ScanReport { kept_directories, externally_linked, occupied, .. } = &*self.scan;
        let listed = kept_directories.len() + externally_linked.len() + occupied.len();
        // Hard links are compared also in equal trees.
        let is_small = self.tree.root().totals().hard_links + listed as u64 <= IN_PLACE_MAX;
        let want = || fill_in(&self.image.tree, &self.computed, &self.tree);
        is_small
            && self.exclusions.is_empty()
            && want().is_ok_and(|want| want.digest() == self.tree.digest())
    }

    /// Makes the plan. Takes time in proportion to the directories that differ.
    ///
    /// # Errors
    ///
    /// Never fails for a verified tree.
    pub fn run(&self) -> Result<Planned, PlanError> {
        let want = required_tree(&self.image, &self.exclusions)
            .and_then(|want| fill_in(&want, &self.computed, &self.tree))
            .map_err(|source| PlanError::Required { source })?;
        // A small directory that is used many times makes a huge tree.
        let (has, wants) = (self.tree.root().totals().entries, want.root().totals().entries);
        if has.saturating_sub(wants) > SURPLUS_MAX {
            return Err(PlanError::TooLarge { has, wants });
        }
        let kept_directories = self.scan.kept_directories.iter().cloned().collect();
        let externally_linked = self.scan.externally_linked.iter().cloned().collect();
        let occupied = self.scan.occupied.iter().cloned().collect();
        let have = ScannedTree {
            tree: &self.tree,
            kept_directories: &kept_directories,
            externally_linked: &externally_linked,
            occupied: &occupied,
            refused: &self.refused,
            times: self.scan.times,
        };
        let plan = plan(&have, &want);
        let dangers = if plan.is_empty() {
            Vec::new()
        } else {
            let extent = match (self.image.content.is_sparse(), self.image.leaving.is_empty()) {
                (false, _) => Extent::Whole,
                (true, true) => Extent::Sparse,
                (true, false) => Extent::Leaving,
            };
            safety::dangers(&self.tree, &want, &plan, extent)
        };
        let mut needs = plan.objects();
        let known: Vec<ObjectId> = self.computed.iter().map(|file| file.object.id()).collect();
        let computed = take_computed(&mut needs, &known);
        Ok(Planned {
            key: self.key,
            digest: digest_of(&plan)?,
            objects: first_of(&needs),
            needs: Arc::new(needs),
            computed: Arc::new(computed),
            is_high_impact: is_high_impact(&plan, &self.image),
            dangers,
            plan: Arc::new(plan),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use model::filter::Filter;
    use model::image::computed::ComputedFile;
    use model::image::{ComputedRule, Content, FORMAT, ImageName, computed_rules};
    use model::path::TreePath;
    use model::scope::{ScanSettings, Scope};
    use model::tree::Time;
    use model::tree::text::from_text;
    use model::trigger::Triggers;

    #[test]
    fn a_machine_is_in_place_if_its_files_have_the_content_that_is_known_now() {
        let tree = |text: &str| from_text(Algorithm::Blake3, text).expect("it is a tree");
        let object = |content: &str| Algorithm::Blake3.digest(content.as_bytes());
        let want = tree("d 755 0:0 /etc\ng 644 0:0 files:1 /x\n");
        let have = tree(&format!("d 755 0:0 /etc\nf 644 0:0 4.000000000 3 {} /x\n", object("one")));
        let content = Content {
            format: FORMAT,
            name: ImageName::new("base").expect("it is a name"),
            root: want.digest(),
            filter: Some(Filter::new::<&str>([]).expect("it is a filter")),
            triggers: Triggers::default(),
            computed: computed_rules(&want),
            health_check: None,
            signers: Vec::new(),
        };
        let image = Arc::new(RequiredImage::new(content, want));
        let known = |content: &str| ComputedFile {
            rule: Arc::new(ComputedRule {
                path: TreePath::new("/x").expect("it is a path"),
                source: "files:1".to_owned(),
            }),
            object: object(content).into(),
            size_bytes: 3,
            since: Time::default(),
        };
        let job = |have: &Tree, computed: Vec<ComputedFile>, exclusions: &[&str]| PlanJob {
            key: PlanKey { image: image.digest, scan: 1, computed: 0 },
            scan: Arc::new(ScanReport::of(Scope::of(&ScanSettings::default(), &[]), have)),
            tree: have.clone(),
            exclusions: Patterns::new(exclusions).expect("they are patterns"),
            image: Arc::clone(&image),
            computed: Arc::new(ComputedFiles::new(computed)),
            refused: Arc::default(),
        };
        let table = [
            (job(&have, vec![known("one")], &[]), true, 0),
            (job(&have, vec![known("two")], &[]), false, 1),
            // What is not known stays as the machine has it.
            (job(&have, Vec::new(), &[]), true, 0),
            (job(&tree("d 755 0:0 /etc\n"), vec![known("one")], &[]), false, 1),
            (job(&tree(""), Vec::new(), &[]), false, 1),
            // That takes longer to find out.
            (job(&have, vec![known("one")], &["/var"]), false, 0),
        ];
        for (job, is_in_place, operations) in table {
            let planned = job.run().expect("the trees are valid");
            assert_eq!(
                (job.is_in_place(), planned.plan.operations.len()),
                (is_in_place, operations),
                "{job:?}"
            );
        }
    }
}
