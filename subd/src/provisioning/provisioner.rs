//! Carries out what is decided about resources, and answers the methods about them.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use api::fault::{Fault, FaultCode};
use api::subd::{
    ContinueProvisioningRequest, OrderResourceRequest, ResourceOrder, ResourcesReport,
};
use daemon::plugins::{Caller, Ended, Host, Plugin, program};
use model::boot_time::BootTime;
use model::display::error_chain;
use model::image::ImageName;
use model::object::ObjectId;
use provisioning::binding::Binding;
use provisioning::image::Definition;
use provisioning::machine::drift::Schedule;
use provisioning::machine::orphans::{OrphanError, OrphanOrder};
use provisioning::machine::{KeptPlugin, Machine, Outputs, Todo};
use provisioning::{Call, State};
use system::clock::boot_now;
use tokio::runtime::Handle;
use tokio::sync::{Mutex, Notify};
use tokio_util::sync::CancellationToken;

use crate::provisioning::plugins::Plugins;
use crate::provisioning::records::SavedRecords;
use crate::provisioning::{outputs, report};
use crate::state::persisted_state::PersistError;

/// Why a machine does not provision.
pub const NOT_HERE: &str = "the root is not /: --supervisor direct provisions in that root";

/// When what could not be removed, or the state that could not be written, is tried again. Each
/// order about resources lets this time begin anew.
pub(super) const RETRY_AFTER: Duration = Duration::from_secs(600);

/// How long a call may take whose provisioner no binding names any more, in seconds.
pub(super) const TIMEOUT_S: u32 = 60;

/// Provisions for one root.
pub struct Provisioner {
    records: SavedRecords,
    pub plugins: Plugins,
    /// The name of which keys are made.
    pub(super) name: String,
    /// Which boot of the machine this is.
    boot_id: String,
    pub(super) surroundings: Surroundings,
    pub(super) changed: Notify,
    /// Held while plugins are asked about an image that is not there yet.
    pub(super) previewing: Mutex<()>,
    pub(super) stop: CancellationToken,
}

/// What else of the machine it needs to know.
pub struct Surroundings {
    /// Called after each change.
    pub tell: Box<dyn Fn() + Send + Sync>,
    /// Returns the last update; `None` while one is carried out.
    pub last_update: Box<dyn Fn() -> Option<u64> + Send + Sync>,
    /// When plugins are asked whether resources have drifted; `None` if never.
    pub checks: Option<Schedule>,
}

impl Provisioner {
    /// Takes over the records of a machine called `name` in the boot `boot_id`. Does nothing before
    /// [`Provisioner::run`].
    pub fn new(
        records: SavedRecords,
        plugins: Plugins,
        (name, boot_id): (&str, &str),
        surroundings: Surroundings,
        stop: CancellationToken,
    ) -> Self {
        let (name, boot_id) = (name.to_owned(), boot_id.to_owned());
        let (changed, previewing) = (Notify::new(), Mutex::default());
        Self { records, plugins, name, boot_id, surroundings, changed, previewing, stop }
    }

    /// Provisions, until it is stopped. Blocks.
    pub fn run(&self) {
        Handle::current().block_on(self.serve());
    }

    /// Provisions, until it is stopped. Blocks on the disk.
    pub async fn serve(&self) {
        let needed: BTreeSet<String> = self.machine(|machine| machine.copies().collect());
        if let Err(error) = self.plugins.collect(&needed) {
            tracing::warn!("copies of plugins cannot be removed: {error}");
        }
        self.write_outputs();
        let mut caller = Caller::new(self);
        while !self.stop.is_cancelled() {
            if self.look_at_permits().is_err() {
                self.pause(Some(RETRY_AFTER)).await;
                continue;
            }
            let pause = match self.machine(Machine::next) {
                Todo::Nothing => match self.check().await {
                    Ok(pause) => pause,
                    Err(_) => Some(RETRY_AFTER),
                },
                Todo::Settle => match self.change(Machine::settle) {
                    Ok(()) => continue,
                    Err(_) => Some(RETRY_AFTER),
                },
                Todo::RetryLater => {
                    if self.pause(Some(RETRY_AFTER)).await {
                        let _logged = self.change(Machine::retry);
                    }
                    continue;
                }
                Todo::Calls(calls) => match self.carry_out(&mut caller, calls).await {
                    Ok(Ended::Answered) => continue,
                    Ok(Ended::Over) => return,
                    Err(_) => Some(RETRY_AFTER),
                },
            };
            self.pause(pause).await;
        }
    }

    /// The time since the boot of the machine.
    pub(super) fn boot_now(&self) -> BootTime {
        boot_now(&self.boot_id)
    }

    /// Gives up permits that have ended or are not needed.
    fn look_at_permits(&self) -> Result<(), PersistError> {
        let now = self.boot_now();
        let has_changed =
            |machine: &Machine| machine.has_permits() && machine.clone().look_at_permits(&now);
        match self.machine(has_changed) {
            true => self.change(|machine| _ = machine.look_at_permits(&now)),
            false => Ok(()),
        }
    }

    async fn carry_out(
        &self,
        caller: &mut Caller<&Self>,
        calls: Vec<Call>,
    ) -> Result<Ended, PersistError> {
        let provisions = calls.iter().any(|call| matches!(call, Call::Provision(_)));
        if provisions && let Err(why) = self.check_plugins() {
            self.change(|machine| machine.refuse(why))?;
            return Ok(Ended::Answered);
        }
        let destroys = |call: &Call| matches!(call, Call::Provision(call) if call.destroys());
        let is_removal = calls.iter().any(destroys);
        let ended = caller.carry_out(calls).await?;
        if is_removal || !self.machine(Machine::has_target) {
            self.write_outputs();
        }
        Ok(ended)
    }

    /// Waits until something has changed, for `time` at most. Returns true if nothing has.
    async fn pause(&self, time: Option<Duration>) -> bool {
        let sleep = async {
            match time {
                Some(time) => tokio::time::sleep(time).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = self.changed.notified() => false,
            () = self.stop.cancelled() => false,
            () = sleep => true,
        }
    }

    pub(super) fn machine<T>(&self, look: impl FnOnce(&Machine) -> T) -> T {
        look(&self.records.get().machine)
    }

    /// As [`Provisioner::change`], and has it looked at at once.
    pub(super) fn order(&self, change: impl FnOnce(&mut Machine)) -> Result<(), PersistError> {
        let changed = self.change(change);
        self.changed.notify_one();
        changed
    }

    /// Changes the records, tells of it, and returns when that is on the medium.
    pub(super) fn change(&self, change: impl FnOnce(&mut Machine)) -> Result<(), PersistError> {
        let saved = self.save(change);
        (self.surroundings.tell)();
        saved
    }

    /// As [`Provisioner::change`], of what nobody has to be told.
    pub(super) fn save(&self, change: impl FnOnce(&mut Machine)) -> Result<(), PersistError> {
        let saved = self.records.modify(|records| change(&mut records.machine));
        if let Err(error) = &saved {
            tracing::error!("what is provisioned cannot be recorded: {}", error_chain(error));
        }
        Ok(saved?)
    }

    /// Starts to provision what an image asks for. Blocks.
    ///
    /// # Errors
    ///
    /// `Internal` if that cannot be recorded.
    pub fn provision(
        &self,
        image: &ImageName,
        image_digest: ObjectId,
        definition: &Definition,
    ) -> Result<(), Fault> {
        self.order(|machine| machine.provision(image, image_digest, definition, &self.name))
            .map_err(|error| internal(&error))
    }

    /// Starts the next wave, or what has failed once more. Blocks.
    ///
    /// # Errors
    ///
    /// `NotFound` if other resources are provisioned.
    pub fn go_on(&self, request: &ContinueProvisioningRequest) -> Result<(), Fault> {
        let ContinueProvisioningRequest { image_digest, step } = *request;
        let mut known = None;
        self.order(|machine| known = machine.go_on(image_digest, step))
            .map_err(|error| internal(&error))?;
        match known {
            Some(_) => Ok(()),
            None => {
                let text = "the resources of that image are not what is provisioned";
                Err(Fault::new(FaultCode::NotFound, text))
            }
        }
    }

    /// Has an orphan forgotten or destroyed. Blocks.
    ///
    /// # Errors
    ///
    /// It is no orphan, or that cannot be recorded.
    pub fn order_orphan(&self, request: &OrderResourceRequest) -> Result<(), Fault> {
        let OrderResourceRequest { id, order, why } = request;
        let orphan_order = match order {
            ResourceOrder::Forget => OrphanOrder::Forget,
            ResourceOrder::Destroy => OrphanOrder::Destroy,
        };
        let mut done = Ok(());
        self.order(|machine| done = machine.order_orphan(id, orphan_order))
            .map_err(|error| internal(&error))?;
        done.map_err(|error| {
            let code = match error {
                OrphanError::Unknown { .. } => FaultCode::NotFound,
                OrphanError::Working { .. } => FaultCode::Busy,
                _ => FaultCode::BadRequest,
            };
            Fault::new(code, error.to_string())
        })?;
        tracing::warn!(resource = id, why, "an operator orders: {} it", order.name());
        Ok(())
    }

    /// Returns how the resources are.
    pub fn report(&self) -> ResourcesReport {
        self.machine(report::report)
    }

    /// Says why the update to an image must not begin yet.
    ///
    /// # Errors
    ///
    /// `Unavailable`: resources are missing.
    pub fn check_commit(
        &self,
        image_digest: ObjectId,
        definition: &Definition,
    ) -> Result<(), Fault> {
        self.machine(|machine| machine.check_commit(image_digest, definition))
            .map_err(|why| Fault::new(FaultCode::Unavailable, why))
    }

    /// Notes that an image is active, and its update verified. May be repeated. Blocks.
    pub fn activated(
        &self,
        image_digest: ObjectId,
        definition: &Definition,
    ) -> Result<(), PersistError> {
        self.records.doubt();
        self.order(|machine| machine.activated(image_digest, definition))?;
        self.write_outputs();
        Ok(())
    }

    /// Notes that an update was undone. May be repeated. Blocks.
    pub fn undone(&self, image_digest: ObjectId) -> Result<(), PersistError> {
        self.records.doubt();
        self.order(|machine| machine.give_up(image_digest))?;
        self.write_outputs();
        Ok(())
    }

    /// Gives up the resources of an image that is not to come any more. May be repeated. The caller
    /// sees to it that no update begins meanwhile. Blocks.
    ///
    /// # Errors
    ///
    /// `Internal` if that cannot be recorded.
    pub fn give_up(&self, image_digest: ObjectId) -> Result<(), Fault> {
        if self.machine(|machine| machine.awaits(image_digest)) {
            tracing::info!(%image_digest, "the resources of an image are given up");
            self.order(|machine| machine.give_up(image_digest))
                .map_err(|error| internal(&error))?;
        }
        Ok(())
    }

    /// Writes the outputs for the programs of the tree that is there now, before they are started:
    /// of an image with this definition, or of the active one.
    pub fn tree_settled(&self, definition: Option<&Definition>) {
        self.write(&self.machine(|machine| match definition {
            Some(definition) => machine.outputs_of(definition),
            None => machine.outputs(),
        }));
    }

    pub(super) fn write_outputs(&self) {
        self.write(&self.machine(Machine::outputs));
    }

    fn write(&self, outputs: &BTreeMap<String, Outputs>) {
        if let Err(error) = outputs::write(&self.plugins.root, outputs) {
            tracing::error!("the outputs of resources cannot be written: {error}");
        }
    }

    /// Says why plugins that are needed for the target cannot be run.
    fn check_plugins(&self) -> Result<(), String> {
        let planned = self.machine(Machine::planned);
        let names: BTreeSet<String> = planned.into_iter().map(|call| call.provisioner).collect();
        for name in names {
            let copy = self.current(&name)?;
            self.plugins.check(&copy).map_err(|why| format!("{}: {why}", program(&name)))?;
        }
        Ok(())
    }

    /// Returns the copy of the plugin that the image brings, or else of the installed one.
    fn current(&self, provisioner: &str) -> Result<String, String> {
        let brought = self.machine(|machine| {
            machine.definition().plugins.get(provisioner).map(ObjectId::to_string)
        });
        brought.map_or_else(|| self.plugins.keep_installed(provisioner), Ok)
    }

    /// Returns the plugin that makes what the image asks for.
    pub(super) fn current_plugin(&self, provisioner: &str) -> Result<KeptPlugin, String> {
        let timeout_s = self.timeout_s(provisioner).unwrap_or(TIMEOUT_S);
        Ok(KeptPlugin { copy: self.current(provisioner)?, timeout_s })
    }

    fn timeout_s(&self, provisioner: &str) -> Option<u32> {
        let bindings = self.machine(|machine| machine.definition().read().ok())?.1;
        bindings.of_name(provisioner).map(|Binding { timeout_s, .. }| *timeout_s)
    }
}

impl Host for &Provisioner {
    type Error = PersistError;

    fn change(&self, change: impl FnOnce(&mut State)) -> Result<(), PersistError> {
        Provisioner::change(self, |machine| machine.change_state(change))
    }

    fn plugin(&self, call: &Call) -> Result<Plugin, String> {
        let (name, user) = call.provisioner();
        let makes = matches!(call, Call::Provision(call) if !call.destroys());
        // What was made is asked about, and destroyed, by what made it.
        let kept = self.machine(|machine| machine.kept(name).cloned()).filter(|_| !makes);
        let plugin = match kept {
            Some(kept) => kept,
            None => self.current_plugin(name)?,
        };
        if makes {
            let keep = |machine: &mut Machine| machine.keep(name, plugin.clone());
            Provisioner::change(self, keep).map_err(|error| error_chain(&error))?;
        }
        let now = self.boot_now();
        let ends_at_ms = self.machine(|machine| machine.call_ends_at_ms(call, &now))?;
        let ends = ends_at_ms.map(|ends_at_ms| (ends_at_ms, now.ms));
        Ok(self.plugins.plugin(&plugin.copy, user, plugin.timeout_s, ends))
    }

    fn is_over(&self) -> bool {
        self.stop.is_cancelled()
    }

    async fn over(&self) {
        self.stop.cancelled().await;
    }

    fn announce(&self, call: &Call) {
        if let Call::Provision(provision) = call {
            let verb = if provision.destroys() { "destroy" } else { "provision" };
            let ids: Vec<String> = call.ids().into_iter().collect();
            tracing::info!(provisioner = provision.provisioner, ids = ids.join(", "), "{verb}");
        }
    }
}

pub(super) fn internal(error: &PersistError) -> Fault {
    Fault::new(FaultCode::Internal, error_chain(error))
}
