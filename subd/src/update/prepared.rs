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

use super::executor::Undertaking;
use super::journal::{Head, Journal};
use super::phase::Phase;
use super::stage::{self, StageError, Taken, Workshop};
use super::step::Script;
use crate::cache::Cache;
use crate::root::Root;
use crate::state::accepted_image::Accepted;
use crate::state::directories::{Home, directory_name, remove_all};
use crate::trust::judge::Judged;
use crate::update::step_plan::Arrangement;
use system::clock::wall;

/// What is known of an update besides its steps.
#[derive(Clone, Debug)]
pub struct Order {
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
    pub accepted: Option<Accepted>,
}

impl Order {
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

    /// The same order, as it was judged: which paths have changed is not what the plan says.
    #[must_use]
    pub fn judged(self, judged: Judged) -> Self {
        let Judged { accepted, changed } = judged;
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
pub struct Bench<'a> {
    /// The tree.
    pub root: &'a Root,
    /// Where they are staged.
    pub home: &'a Home,
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
    pub order: Order,
    script: Script,
    taken: Vec<Taken>,
}

impl Prepared {
    /// Stages the update: nothing visible changes. Blocks.
    ///
    /// # Errors
    ///
    /// [`StageError`] names the path. Then nothing is left of it.
    pub fn stage(
        bench: &Bench<'_>,
        order: Order,
        arrangement: &Arrangement,
    ) -> Result<Self, StageError> {
        let area = |source| StageError::Area { source };
        let Home { staging, undo, .. } = bench.home;
        let name = directory_name(order.update_id);
        remove_all(staging, &name).map_err(area)?;
        for over in Phase::OVER {
            remove_all(undo, &over.directory(order.update_id)).map_err(area)?;
        }
        staging.make_directory(&name, 0o700).map_err(area)?;
        let slots = staging.open_child(&name).map_err(area)?;
        let Bench { root, cache, scanned, managed, .. } = *bench;
        let workshop = Workshop { root, cache, slots: &slots, scanned, managed };
        let mut taken = Vec::new();
        match workshop.stage(order.update_id, arrangement, &mut taken) {
            Ok(script) => Ok(Self { order, script, taken }),
            Err(error) => {
                stage::give_up(cache, staging, &name, &taken);
                Err(error)
            }
        }
    }

    /// Removes what was staged; the objects are cached again.
    pub fn give_up(&self, home: &Home, cache: &Cache) {
        let name = directory_name(self.order.update_id);
        stage::give_up(cache, &home.staging, &name, &self.taken);
    }

    /// What it would do to which services of a machine with an image that has the triggers `old`.
    #[must_use]
    pub fn calls(&self, old: &Triggers) -> ServiceCalls {
        let Order { triggers, changed, own_service, .. } = &self.order;
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
pub fn free(update: &Undertaking, home: &Home, cache: &Cache) {
    let taken = &update.journal.taken;
    let name = update.phase.directory(update.update_id());
    match update.phase {
        Phase::Staged => stage::give_up(cache, &home.staging, &name, taken),
        Phase::RolledBack | Phase::Undone => stage::give_up(cache, &home.undo, &name, taken),
        _ => {
            if let Err(error) = remove_all(&home.undo, &name) {
                tracing::warn!("cannot free what an update took away: {}", report(&error));
            }
        }
    }
}

/// Tells the cache which objects have become a part of the tree, once its update is done.
pub fn forget_taken(update: &Undertaking, cache: &Cache) {
    let taken: Vec<ObjectId> = update.journal.taken.iter().map(|taken| taken.object).collect();
    let _gone = cache.forget(&taken);
}
