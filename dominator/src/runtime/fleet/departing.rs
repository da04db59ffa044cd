//! Machines that have left the machine database: notes them, stops their tasks, and lists them.
//! `core::departing` decides.
//!
//! They have no driver any more. What is asked of them is asked here.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use api::dominator::Status;
use api::dominator::departing::{DepartingState, ListDepartingReply, OrderDepartingRequest};
use api::dominator::resources::MachineResources;
use api::fault::FaultCode;
use api::subd::{
    DEPARTED_WHY, GetResources, GetResourcesRequest, GetTasks, HoldMachine, OrderTask,
    OrderTaskRequest, ResourceReport, ResourcesReport, TaskOrder, TaskReport, TaskState,
};
use futures_util::StreamExt as _;
use futures_util::stream;
use model::display::error_chain;
use model::lock::locked;
use model::mdb::Machine;
use model::tree::Time;
use rpc::client::{CallError, Client};

use super::orders::named;
use super::{Fleet, OrderError};
use crate::core::departing::{Departed, Departing, has_stopped, must_suspend};
use crate::core::orders::Order;
use crate::core::selectors::{HostsError, Selection, select_hosts};
use crate::core::sub::Sub;
use crate::core::timing::{Attempt, HOLD_LONGEST, RETRY_FIRST};
use crate::runtime::clock::jitter;
use crate::runtime::driver::{client_of, peer_of};
use crate::storage::{SharedMachines, with_order};

/// How often machines are decided about.
const INTERVAL: Duration = Duration::from_secs(2);

/// How long a machine may take to answer a call.
const CALL_LIMIT: Duration = Duration::from_secs(5);

/// How many machines are asked at the same time.
const ASKED_MAX: usize = 64;

/// The attempts to stop the tasks of machines, by host name.
pub(super) type Attempts = BTreeMap<String, Attempt>;

/// What became of an attempt to stop the tasks of a machine.
enum Outcome {
    /// Of so many tasks none runs.
    Stopped(u32),
    /// It is left alone, for this reason.
    Elsewhere(String),
    /// It is to be tried again, for this reason.
    NotYet(String),
}

/// What a machine has told.
struct Look {
    hostname: String,
    /// The state that it had, and since when.
    state: (DepartingState, Time),
    outcome: Option<Outcome>,
    resources: Option<Vec<ResourceReport>>,
}

impl Look {
    /// Takes it down, except for the outcome if something else was decided meanwhile.
    fn take(self, departed: &mut Departed, now: Time) {
        let Self { hostname: host, state, outcome, resources } = self;
        departed.resources = resources.or(departed.resources.take()).or_else(|| Some(Vec::new()));
        if (departed.state, departed.state_since) != state {
            return;
        }
        match outcome {
            None | Some(Outcome::NotYet(_)) => {}
            Some(Outcome::Stopped(tasks)) => {
                tracing::info!(host, tasks, "the machine has left; no task of it runs");
                departed.tasks = Some(tasks);
                departed.set(DepartingState::Stopped, departed.why.clone(), now);
            }
            Some(Outcome::Elsewhere(why)) => {
                tracing::warn!(host, "the machine has left, and is left alone: {why}");
                departed.set(DepartingState::Elsewhere, why, now);
            }
        }
    }
}

impl From<CallError> for Outcome {
    fn from(error: CallError) -> Self {
        Self::NotYet(error_chain(&error))
    }
}

impl Fleet {
    /// Notes which machines of `before` leave the machine database, and which are back, before
    /// `machines` are put in force: their drivers know what they run. Blocks on the disk.
    pub(super) fn note_departing(
        &self,
        before: Option<&SharedMachines>,
        machines: &SharedMachines,
    ) {
        let now = self.shared.clock.now().wall;
        let gone: Vec<(Arc<Machine>, Option<u32>)> = {
            let inner = self.locked();
            let gone = before
                .into_iter()
                .flatten()
                .filter(|(hostname, _)| !machines.contains_key(*hostname));
            let with_tasks = |(hostname, machine): (&String, &Arc<Machine>)| {
                let watched = inner.watched.get(hostname);
                let known = watched.and_then(|watched| watched.handle.with_sub(Sub::tasks).ok());
                (Arc::clone(machine), known.map(|known| run_count(&known.tasks)))
            };
            gone.map(with_tasks).collect()
        };
        self.change_departing(|departing| {
            departing.0.retain(|hostname, _| !machines.contains_key(hostname));
            for (machine, tasks) in gone {
                departing.leave(machine, tasks, now);
            }
        });
    }

    /// Changes the table. It is changed although it cannot be saved. Blocks on the disk.
    fn change_departing(&self, change: impl FnOnce(&mut Departing)) {
        self.state().departing.modify_behind(change);
        if let Err(error) = self.state().departing.save() {
            // The next change saves it.
            tracing::error!("cannot save which machines have left: {}", error_chain(&error));
        }
    }

    /// Looks after machines that have left, until the fleet stops.
    pub async fn run_departing(self: Arc<Self>) {
        let mut pause = tokio::time::interval(INTERVAL);
        pause.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            pause.tick().await;
            if self.state().departing.get().0.is_empty() {
                continue;
            }
            let fleet = Arc::clone(&self);
            // It ends early only by a panic, which has been logged.
            let _decided = tokio::task::spawn_blocking(move || fleet.decide_departing()).await;
            let departing = self.state().departing.get();
            let look = async |(_, departed): (&String, &Departed)| self.look_after(departed).await;
            let looks = stream::iter(departing.0.iter().map(look)).buffer_unordered(ASKED_MAX);
            // They share a write.
            let mut looks = std::pin::pin!(looks.filter_map(async |look| look).chunks(ASKED_MAX));
            while let Some(looks) = looks.next().await {
                let fleet = Arc::clone(&self);
                let take = move || fleet.take_looks(looks);
                let _taken = tokio::task::spawn_blocking(take).await;
            }
        }
    }

    /// Decides about machines that have left. Blocks on the disk.
    fn decide_departing(&self) {
        let listed = {
            let inner = self.locked();
            // Nothing is known of machines before the first machine database.
            if !inner.admission.is_in_force() {
                return;
            }
            inner.effective.len()
        };
        // While nothing is to be changed, or the time is not known, nothing is stopped.
        let may_stop =
            self.shared.gate.brake().is_none() && self.shared.history.clock_jumped().is_none();
        let (now, after) = (self.shared.clock.now().wall, self.shared.departing_after);
        let mut decisions = Vec::new();
        let decide = |departing: &mut Departing| {
            decisions = departing.decide(now, listed, after, may_stop);
        };
        self.change_departing(decide);
        let left = self.state().departing.get();
        locked(&self.departing_attempts).retain(|hostname, _| left.0.contains_key(hostname));
        for (hostname, decision) in decisions {
            tracing::warn!(host = hostname, "{}", decision.text());
            let about = format!("host={hostname}");
            self.shared.audit.record_decision("departing", &about, decision.text());
        }
    }

    /// Asks a machine that has left for its resources, and stops its tasks, if that is due.
    async fn look_after(&self, departed: &Departed) -> Option<Look> {
        let hostname = departed.machine.hostname.clone();
        let is_stopping = departed.state == DepartingState::Stopping;
        let elapsed = self.shared.clock.now().elapsed;
        let attempt = locked(&self.departing_attempts).get(&hostname).cloned();
        let is_held = attempt.is_some_and(|attempt| attempt.held_until(elapsed).is_some());
        if is_held || !is_stopping && departed.resources.is_some() {
            return None;
        }
        let (outcome, resources) = match self.other_at(&departed.machine) {
            Some(other) => {
                let why = format!("its address is that of {other} in the machine database");
                (Some(Outcome::Elsewhere(why)), None)
            }
            None => {
                let client = client_of(&departed.machine, &self.shared);
                let outcome = match is_stopping {
                    true => Some(self.stop_tasks(&client).await.unwrap_or_else(Outcome::from)),
                    false => None,
                };
                (outcome, resources_of(&client).await)
            }
        };
        let mut attempts = locked(&self.departing_attempts);
        if let Some(Outcome::NotYet(why)) = &outcome {
            let attempt = attempts.entry(hostname.clone()).or_default();
            let pause = attempt.count(RETRY_FIRST, HOLD_LONGEST, jitter());
            attempt.hold(self.shared.clock.now().elapsed + pause, why.clone());
        } else {
            attempts.remove(&hostname);
        }
        Some(Look { hostname, state: (departed.state, departed.state_since), outcome, resources })
    }

    /// Takes what became of machines. Blocks on the disk.
    fn take_looks(&self, looks: Vec<Look>) {
        let now = self.shared.clock.now().wall;
        self.change_departing(|departing| {
            for look in looks {
                if let Some(departed) = departing.0.get_mut(&look.hostname) {
                    look.take(departed, now);
                }
            }
        });
    }

    /// Returns the machine of the machine database that has the address of `machine`, if one has.
    fn other_at(&self, machine: &Machine) -> Option<String> {
        let place = |machine: &Machine| {
            let peer = peer_of(machine, self.shared.subd_port);
            peer.address.map(|address| (address, peer.port))
        };
        let wanted = place(machine)?;
        let inner = self.locked();
        let other = inner.effective.iter().find(|(_, other)| place(other) == Some(wanted));
        other.map(|(hostname, _)| hostname.clone())
    }

    /// Has a machine suspend its tasks, if it takes orders from this dominator.
    async fn stop_tasks(&self, client: &Client) -> Result<Outcome, CallError> {
        if let Err(error) = client.call_within::<HoldMachine>(&self.shared.holder, CALL_LIMIT).await
        {
            match error.code() {
                Some(FaultCode::Held) => return Ok(Outcome::Elsewhere(error_chain(&error))),
                // An earlier release, or a certificate of one.
                Some(FaultCode::NoMethod | FaultCode::Denied) => {}
                _ => return Err(error),
            }
        }
        let tasks = match client.call_within::<GetTasks>(&(), CALL_LIMIT).await {
            Err(error) if error.code() == Some(FaultCode::NoMethod) => Vec::new(),
            reply => reply?.tasks,
        };
        let hostname = &client.peer().host;
        for report in tasks.iter().filter(|report| must_suspend(report)) {
            // The machine may be back, or an operator may have decided.
            let departing = self.state().departing.get();
            let state = departing.0.get(hostname).map(|departed| departed.state);
            if state != Some(DepartingState::Stopping) {
                return Ok(Outcome::NotYet("something else is decided now".to_owned()));
            }
            let (task, why) = (report.name.clone(), DEPARTED_WHY.to_owned());
            // The machine numbers it.
            let request = OrderTaskRequest { task, order: TaskOrder::Suspend, why, number: 0 };
            client.call_within::<OrderTask>(&request, CALL_LIMIT).await?;
        }
        if let Some(live) = tasks.iter().find(|report| !has_stopped(report)) {
            return Ok(Outcome::NotYet(format!("the task {} is being stopped", live.name)));
        }
        Ok(Outcome::Stopped(run_count(&tasks)))
    }

    /// Returns what operators are shown of machines that have left.
    pub fn departing(&self) -> ListDepartingReply {
        let mut machines = self.state().departing.get().report(self.shared.departing_after);
        let attempts = locked(&self.departing_attempts);
        for machine in &mut machines {
            let attempt = attempts.get(&machine.hostname).and_then(Attempt::why);
            if let Some(why) = attempt.filter(|_| machine.state == DepartingState::Stopping) {
                why.clone_into(&mut machine.why);
            }
        }
        ListDepartingReply { machines }
    }

    /// Decides about machines that have left, as an operator orders. On an error nothing changes.
    pub async fn order_departing(
        self: &Arc<Self>,
        request: OrderDepartingRequest,
    ) -> Result<(), OrderError> {
        let OrderDepartingRequest { hosts, order, why, who } = request;
        let record = Order::new("departing", &who).about(named(&hosts)).why(&why);
        let record = record.what(order.name().to_owned());
        let record = record.reasoned("that is decided about machines that have left")?;
        let now = self.shared.clock.now().wall;
        let save = move |fleet: &Self| {
            let change = |departing: &mut Departing| {
                let chosen = select_hosts(&hosts, &departing.0).map_err(|error| match error {
                    HostsError::NoMatch { pattern } => OrderError::NotDeparting { pattern },
                    error => error.into(),
                })?;
                for hostname in &chosen {
                    departing.order(hostname, order, (&who, &why), now);
                }
                Ok(chosen)
            };
            let write = with_order::<OrderError>(&record);
            let chosen = fleet.state().departing.modify_through(change, write)?;
            locked(&fleet.departing_attempts).retain(|hostname, _| !chosen.contains(hostname));
            let (count, verb) = (chosen.len(), order.name());
            tracing::warn!(%who, %why, count, "machines that have left: {verb}");
            Ok(())
        };
        self.on_thread(save).await
    }

    /// Returns the resources of machines that have left: nothing needs them any more.
    pub(super) fn departed_resources(&self, selection: &Selection) -> Vec<MachineResources> {
        let departing = self.state().departing.get();
        let machine = |(hostname, departed): (&String, &Departed)| {
            let resources = departed.resources.as_ref().filter(|told| !told.is_empty())?;
            let is_wanted = selection.wants(&departed.machine, None, Status::Unreachable);
            let orphan = |told: &ResourceReport| ResourceReport { is_orphan: true, ..told.clone() };
            let resources = resources.iter().map(orphan).collect();
            let report = Some(ResourcesReport { resources, ..ResourcesReport::default() });
            let hostname = hostname.clone();
            is_wanted.then_some(MachineResources { hostname, report, unknown: None })
        };
        departing.0.iter().filter_map(machine).collect()
    }
}

/// Counts the tasks that the machine runs.
fn run_count(tasks: &[TaskReport]) -> u32 {
    let run = tasks.iter().filter(|task| task.state != TaskState::NotRun).count();
    u32::try_from(run).unwrap_or(u32::MAX)
}

/// Asks a machine for its resources; `None` if it does not tell.
async fn resources_of(client: &Client) -> Option<Vec<ResourceReport>> {
    let request = GetResourcesRequest::default();
    let reply = client.call_within::<GetResources>(&request, CALL_LIMIT).await.ok()?;
    Some(reply.report.unwrap_or_default().resources)
}
