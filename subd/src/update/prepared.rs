//! An update that is staged: how it is made ready, and what is left of one that is not wanted.

use std::collections::BTreeSet;

use api::subd::{LastUpdate, Outcome, PrepareRequest};
use model::image::{HealthCheck, ImageName};
use model::object::ObjectId;
use model::path::TreePath;
use model::plan::{Action, Plan};
use model::report::report;
use model::scope::Attributes;
use model::tree::Tree;
use model::trigger::Triggers;
use model::trigger::services::{OWN_SERVICE, ServiceCalls, service_calls};

use super::executor::RunningUpdate;
use super::journal::{Head, Journal};
use super::phase::Phase;
use super::stage::{self, StageError, Stager, TakenObject};
use super::step::Script;
use crate::cache::Cache;
use crate::root::Root;
use crate::state::accepted_image::AcceptedImage;
use crate::state::directories::{Directories, directory_name, remove_all};
use crate::trust::verification::VerifiedUpdate;
use crate::update::step_plan::StepPlan;
use system::clock::wall;

/// What is known of an update besides its steps.
#[derive(Clone, Debug)]
pub struct UpdateSpec {
    /// Which update.
    pub update_id: u64,
    /// The image that it is for.
    pub image: ImageName,
    /// The digest of the content of the image.
    pub image_digest: ObjectId,
    /// The triggers of the image.
    pub triggers: Triggers,
    /// The health check of the image.
    pub health_check: Option<HealthCheck>,
    /// The name of subd's own service.
    pub own_service: String,
    /// Do work of high impact without asking anybody.
    pub force_disruption: bool,
    /// Operations of its plan.
    pub operations: u32,
    /// The paths that may fire triggers.
    pub changed: Vec<TreePath>,
    /// All paths that the update touches.
    pub touched: BTreeSet<TreePath>,
    /// What is to be remembered when it has succeeded, of an image that had to be signed.
    pub accepted: Option<AcceptedImage>,
}

impl UpdateSpec {
    /// What `request` orders.
    #[must_use]
    pub fn new(request: PrepareRequest) -> Self {
        let PrepareRequest { update_id, image, image_digest, triggers, plan, .. } = request;
        Self {
            update_id,
            image,
            image_digest,
            triggers,
            health_check: request.health_check,
            own_service: OWN_SERVICE.to_owned(),
            force_disruption: request.force_disruption,
            operations: u32::try_from(plan.operations.len()).unwrap_or(u32::MAX),
            changed: plan.changed_paths().cloned().collect(),
            touched: touched_paths(&plan),
            accepted: None,
        }
    }

    /// The same order, as it was verified: which paths have changed is not what the plan says.
    #[must_use]
    pub fn verified(self, verified: VerifiedUpdate) -> Self {
        let VerifiedUpdate { accepted, changed } = verified;
        Self { accepted: Some(accepted), changed, ..self }
    }

    /// What is reported if it cannot be staged.
    #[must_use]
    pub fn not_prepared(&self, why: String) -> LastUpdate {
        let last = LastUpdate::new(self.update_id, self.image.clone(), Outcome::NotPrepared(why));
        LastUpdate { operations: self.operations, ended: wall(), ..last }
    }
}

fn touched_paths(plan: &Plan) -> BTreeSet<TreePath> {
    let mut touched = BTreeSet::new();
    for operation in &plan.operations {
        touched.insert(operation.path.clone());
        if let Action::Replace { displaced, .. } = &operation.action {
            touched.extend(displaced.iter().cloned());
        }
    }
    touched
}

/// Where updates are staged, and from what.
#[derive(Clone, Copy, Debug)]
pub struct StageContext<'a> {
    /// The tree.
    pub root: &'a Root,
    /// Where they are staged.
    pub directories: &'a Directories,
    /// The objects.
    pub cache: &'a Cache,
    /// What the scan saw.
    pub scanned: &'a Tree,
    /// Which attributes are managed.
    pub managed: Attributes,
}

/// An update that is staged. All of it is on the medium.
#[derive(Debug)]
pub struct Prepared {
    /// What it is.
    pub order: UpdateSpec,
    script: Script,
    taken: Vec<TakenObject>,
}

impl Prepared {
    /// Stages the update: nothing visible changes. Blocks.
    ///
    /// # Errors
    ///
    /// [`StageError`] names the path. Then nothing is left of it.
    pub fn stage(
        context: &StageContext<'_>,
        order: UpdateSpec,
        step_plan: &StepPlan,
    ) -> Result<Self, StageError> {
        let area = |source| StageError::Area { source };
        let Directories { staging, undo, .. } = context.directories;
        let name = directory_name(order.update_id);
        remove_all(staging, &name).map_err(area)?;
        for over in Phase::OVER {
            remove_all(undo, &over.directory(order.update_id)).map_err(area)?;
        }
        staging.make_directory(&name, 0o700).map_err(area)?;
        let slots = staging.open_child(&name).map_err(area)?;
        let StageContext { root, cache, scanned, managed, .. } = *context;
        let stager = Stager { root, cache, slots: &slots, scanned, managed };
        let mut taken = Vec::new();
        match stager.stage(order.update_id, step_plan, &mut taken) {
            Ok(script) => Ok(Self { order, script, taken }),
            Err(error) => {
                stage::give_up(cache, staging, &name, &taken);
                Err(error)
            }
        }
    }

    /// Removes what was staged; the objects are cached again.
    pub fn give_up(&self, directories: &Directories, cache: &Cache) {
        let name = directory_name(self.order.update_id);
        stage::give_up(cache, &directories.staging, &name, &self.taken);
    }

    /// What it would do to which services of a machine with an image that has the triggers `old`.
    #[must_use]
    pub fn calls(&self, old: &Triggers) -> ServiceCalls {
        let UpdateSpec { triggers, changed, own_service, .. } = &self.order;
        service_calls(old, triggers, changed.iter(), own_service)
    }

    /// The journal of carrying it out in the boot `boot_id`, on a machine with an image that has
    /// the triggers `old`.
    #[must_use]
    pub fn journal(self, old: &Triggers, boot_id: &str) -> Journal {
        let calls = self.calls(old);
        let Self { order, script, taken } = self;
        let head = Head {
            update_id: order.update_id,
            image: order.image,
            image_digest: order.image_digest,
            operations: order.operations,
            triggers: order.triggers,
            health_check: order.health_check,
            calls,
            boot_id: boot_id.to_owned(),
            managed: script.managed,
            accepted: order.accepted,
        };
        Journal { head, taken, script }
    }
}

/// Frees what the slots of an update hold whose journal is closed: what it took away, or what it
/// brought and was taken back; then the objects are cached again.
pub fn free(update: &RunningUpdate, directories: &Directories, cache: &Cache) {
    let taken = &update.journal.taken;
    let name = update.phase.directory(update.update_id());
    match update.phase {
        Phase::Staged => stage::give_up(cache, &directories.staging, &name, taken),
        Phase::RolledBack | Phase::Undone => stage::give_up(cache, &directories.undo, &name, taken),
        _ => {
            if let Err(error) = remove_all(&directories.undo, &name) {
                tracing::warn!("cannot free what an update took away: {}", report(&error));
            }
        }
    }
}

/// Tells the cache which objects have become a part of the tree, once its update is done.
pub fn forget_taken(update: &RunningUpdate, cache: &Cache) {
    let taken: Vec<ObjectId> = update.journal.taken.iter().map(|taken| taken.object).collect();
    let _gone = cache.forget(&taken);
}
