//! A staged update: how it is staged, discarded and freed.

use std::collections::BTreeSet;

use ::tasks::image::ImageTasks;
use api::subd::{LastUpdate, PrepareRequest, UpdateOutcome};
use model::display::error_chain;
use model::image::{HealthCheck, ImageName};
use model::object::ObjectId;
use model::path::TreePath;
use model::plan::{Action, Plan};
use model::scope::Attributes;
use model::tree::Tree;
use model::trigger::Triggers;
use model::trigger::services::{SUBD_SERVICE, ServiceCalls, service_calls};
use provisioning::image::Definition;
use system::clock::wall;

use tokio_util::sync::CancellationToken;

use crate::cache::{Cache, Visible};
use crate::root::Root;
use crate::state::directories::{Directories, directory_name, remove_all};
use crate::tasks::staged::TaskChange;
use crate::trust::verification::{AcceptedImage, VerifiedUpdate};
use crate::update::journal::{Journal, JournalHead};
use crate::update::running_update::RunningUpdate;
use crate::update::stage::{self, StageError, Stager, TakenObject};
use crate::update::step::Phase;
use crate::update::step::Script;
use crate::update::step_plan::StepPlan;

/// An update without its steps.
#[derive(Clone, Debug)]
pub struct UpdateSpec {
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
    /// Do work of high impact without permission of the disruption command.
    pub force_disruption: bool,
    pub operations: u32,
    /// The paths that may fire triggers.
    pub changed: Vec<TreePath>,
    /// All paths that the update touches.
    pub touched: BTreeSet<TreePath>,
    /// Recorded when the update has succeeded, if the image had to be signed.
    pub accepted: Option<AcceptedImage>,
    /// The daemon tasks of the image.
    pub tasks: ImageTasks,
    /// What the image asks for, which is to be there before it.
    pub resources: Definition,
}

impl UpdateSpec {
    /// Takes over `request`.
    pub fn new(request: PrepareRequest) -> Self {
        let PrepareRequest { update_id, image, image_digest, triggers, plan, .. } = request;
        Self {
            update_id,
            image,
            image_digest,
            triggers,
            health_check: request.health_check,
            own_service: SUBD_SERVICE.to_owned(),
            force_disruption: request.force_disruption,
            operations: u32::try_from(plan.operations.len()).unwrap_or(u32::MAX),
            changed: plan.changed_paths().cloned().collect(),
            touched: touched_paths(&plan),
            accepted: None,
            tasks: ImageTasks::default(),
            resources: Definition::default(),
        }
    }

    /// Returns the update as it was verified: the changed paths are those that were computed, not
    /// those of the plan.
    pub fn verified(self, verified: VerifiedUpdate) -> Self {
        let VerifiedUpdate { accepted, changed } = verified;
        Self { accepted: Some(accepted), changed, ..self }
    }

    /// Returns the report of an update that could not be staged.
    pub fn not_prepared(&self, why: String) -> LastUpdate {
        let last =
            LastUpdate::new(self.update_id, self.image.clone(), UpdateOutcome::NotPrepared(why));
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

/// The inputs of staging.
#[derive(Clone, Copy, Debug)]
pub struct StageContext<'a> {
    pub root: &'a Root,
    pub directories: &'a Directories,
    pub cache: &'a Cache,
    pub scanned: &'a Tree,
    pub managed: Attributes,
    /// Ends the staging when it is cancelled.
    pub stop: &'a CancellationToken,
}

/// A staged update. All of it is on the medium.
#[derive(Debug)]
pub struct Prepared {
    pub spec: UpdateSpec,
    script: Script,
    taken: Vec<TakenObject>,
}

impl Prepared {
    /// Stages the update: nothing visible changes. Blocks.
    ///
    /// # Errors
    ///
    /// [`StageError`] names the path. Nothing stays staged then.
    pub fn stage(
        context: &StageContext<'_>,
        spec: UpdateSpec,
        step_plan: &StepPlan,
    ) -> Result<Self, StageError> {
        let area = |source| StageError::Area { source };
        let Directories { staging, undo, reserve, .. } = context.directories;
        let name = directory_name(spec.update_id);
        remove_all(staging, &name).map_err(area)?;
        for over in Phase::OVER {
            remove_all(undo, &over.directory(spec.update_id)).map_err(area)?;
        }
        reserve.fill();
        reserve.make_directory(staging, &name).map_err(area)?;
        let slots = staging.open_child(&name).map_err(area)?;
        let StageContext { root, cache, scanned, managed, stop, .. } = *context;
        let stager = Stager { root, cache, slots: &slots, scanned, managed, stop };
        let mut taken = Vec::new();
        match stager.stage(spec.update_id, step_plan, &mut taken) {
            Ok(script) => Ok(Self { spec, script, taken }),
            Err(error) => {
                stage::discard(cache, staging, &name, &taken, Visible::No);
                Err(error)
            }
        }
    }

    /// Removes what was staged, and puts the objects back into the cache.
    pub fn discard(&self, directories: &Directories, cache: &Cache) {
        let name = directory_name(self.spec.update_id);
        stage::discard(cache, &directories.staging, &name, &self.taken, Visible::No);
    }

    /// Returns the service calls of the update, on a machine whose image has the triggers `old`.
    pub fn calls(&self, old: &Triggers) -> ServiceCalls {
        let UpdateSpec { triggers, changed, own_service, .. } = &self.spec;
        service_calls(old, triggers, changed.iter(), own_service)
    }

    /// Returns the journal of the update in the boot `boot_id`, on a machine whose image has the
    /// triggers `old` and the tasks `old_tasks`.
    pub fn journal(self, old: &Triggers, old_tasks: &ImageTasks, boot_id: &str) -> Journal {
        let calls = self.calls(old);
        let Self { spec, script, taken } = self;
        let tasks = TaskChange::new(old_tasks, spec.tasks, [old, &spec.triggers], &spec.changed);
        let head = JournalHead {
            update_id: spec.update_id,
            image: spec.image,
            image_digest: spec.image_digest,
            operations: spec.operations,
            triggers: spec.triggers,
            health_check: spec.health_check,
            calls,
            boot_id: boot_id.to_owned(),
            managed: script.managed,
            accepted: spec.accepted,
            tasks,
            resources: spec.resources,
        };
        Journal { head, taken, script }
    }
}

/// Frees the slots of an update whose journal is closed. If the update was undone, its objects are
/// put back into the cache.
pub fn free(update: &RunningUpdate, directories: &Directories, cache: &Cache) {
    let taken = &update.journal.taken;
    let name = update.phase.directory(update.update_id());
    match update.phase {
        Phase::Staged => stage::discard(cache, &directories.staging, &name, taken, Visible::No),
        Phase::RolledBack | Phase::Undone => {
            stage::discard(cache, &directories.undo, &name, taken, Visible::Yes);
        }
        _ => {
            if let Err(error) = remove_all(&directories.undo, &name) {
                tracing::warn!("cannot free the slots of an update: {}", error_chain(&error));
            }
        }
    }
    directories.reserve.fill();
}

/// Removes from the cache the objects that have become part of the tree.
pub fn forget_taken(update: &RunningUpdate, cache: &Cache) {
    let taken: Vec<ObjectId> = update.journal.taken.iter().map(|taken| taken.object).collect();
    let _gone = cache.forget(&taken);
}
