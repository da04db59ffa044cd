//! Environments and rollouts: takes edits and orders, takes rollouts on, and tells of them.
//!
//! Whatever changes is on the disk before a machine gets another record for it. All of it is done
//! under the lock of decisions about machine databases.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use api::dominator::Status;
use api::dominator::explain::EnvironmentImage;
use api::dominator::rollouts::{
    EditEnvironmentsReply, EditEnvironmentsRequest, EnvironmentInfo, EnvironmentOrder,
    ListEnvironmentsReply, ListEnvironmentsRequest, ListRolloutsReply, ListRolloutsRequest,
    OrderEnvironmentRequest, OrderRolloutRequest, OrderedReply, PlanRolloutReply,
    PlanRolloutRequest, RevisionInfo, RolloutInfo, RolloutVerb, StartRolloutReply,
    StartRolloutRequest, VoteOnStepRequest,
};
use model::display::error_chain;
use model::image::ImageName;
use model::lock::locked;
use model::mdb::Machine;
use model::object::ObjectId;
use rollouts::advance::{Advanced, Seen, StepPlan, View, advance, plan};
use rollouts::batch::Batch;
use rollouts::definition::{Source, Start};
use rollouts::dependencies::Dependencies;
use rollouts::document::{Kind, Revision, RolloutState, StepState, VoteEvent};
use rollouts::gate::{Gate, effective};
use rollouts::lock::lock;
use rollouts::selector_index::SelectorIndex;
use rollouts::state::{
    Editor, Edits, EnvironmentState, RolloutOrder, RolloutRecord, SharedMachines, StartOrder,
    State, StoredRevision,
};
use rollouts::steps::Said;
use tokio::sync::Notify;

use super::{Fleet, FleetState, OrderError};
use crate::core::orders::{Order, end_of};
use crate::core::rollouts::machine_state;
use crate::runtime::shared::Shared;

/// How often rollouts are taken on.
const INTERVAL: Duration = Duration::from_millis(500);

/// How many hosts with a conflict are named.
const CONFLICTS_MAX: usize = 20;

/// What is known of rollouts beside what is stored.
#[derive(Debug, Default)]
pub(super) struct Progress {
    /// What the steps on machines did at the last look, by rollout.
    batches: BTreeMap<u64, Vec<Batch>>,
    /// Since when all machines that a step has changed are healthy, by rollout and step.
    healthy_since: BTreeMap<(u64, String), Instant>,
    /// Why the state could not be saved, if it could not.
    error: Option<String>,
    /// Why the command that tells of rollouts failed, if it did.
    command_error: Option<String>,
}

/// How many there are, for metrics.
#[derive(Debug, Default)]
pub struct RolloutCounts {
    /// Those that have not ended.
    pub rollouts: BTreeMap<RolloutState, usize>,
    pub waiting_for_votes: usize,
    /// By environment and revision.
    pub machines: BTreeMap<(String, Revision), usize>,
}

/// What was seen of machines at one moment.
struct FleetView<'a> {
    shared: &'a Shared,
    machines: HashMap<String, Seen>,
    healthy_since: BTreeMap<(u64, String), Instant>,
}

/// Returns what is seen of machines now.
fn seen(machines: &FleetState) -> HashMap<String, Seen> {
    let seen = machines.watched.iter().map(|(hostname, watched)| {
        let seen = watched.handle.with_sub(|sub| {
            let has_trouble = sub.task_troubles().next().is_some();
            let (state, reachable) = machine_state(sub.status(), has_trouble);
            Seen {
                image: sub.required().map_or_else(String::new, String::from),
                state,
                reachable,
                unknown: sub.status() == Status::Connecting,
                held_out: watched.machine.disable_updates || sub.rollback().is_some(),
            }
        });
        (hostname.clone(), seen)
    });
    seen.collect()
}

impl View for FleetView<'_> {
    fn machine(&self, hostname: &str) -> Option<Seen> {
        self.machines.get(hostname).cloned()
    }

    fn digest(&self, image: &str) -> Option<ObjectId> {
        digest_of(self.shared, image)
    }

    fn healthy_for_s(&mut self, rollout: u64, step: &str, healthy: bool) -> u64 {
        let key = (rollout, step.to_owned());
        if !healthy {
            self.healthy_since.remove(&key);
            return 0;
        }
        self.healthy_since.entry(key).or_insert_with(Instant::now).elapsed().as_secs()
    }
}

fn digest_of(shared: &Shared, image: &str) -> Option<ObjectId> {
    shared.state.known_images.get().get(&ImageName::new(image).ok()?).copied()
}

impl Fleet {
    /// Takes rollouts on, until the fleet stops.
    pub async fn run_rollouts(self: Arc<Self>) {
        let mut pause = tokio::time::interval(INTERVAL);
        pause.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        // The machine database may have been edited just before the end of the dominator.
        let mut is_edited = true;
        loop {
            tokio::select! {
                () = self.rollouts_changed.notified() => is_edited = true,
                _ = pause.tick() => {}
            }
            let state = self.state().rollouts.get();
            if state.environments.is_empty() || (!is_edited && state.unfinished().next().is_none())
            {
                continue;
            }
            let fleet = Arc::clone(&self);
            let taken = tokio::task::spawn_blocking(move || fleet.take_rollouts_on(is_edited));
            // It ends early only by a panic, which has been logged.
            is_edited &= !taken.await.unwrap_or(false);
        }
    }

    /// Takes rollouts on once, and edits of the machine database if there may be some. Returns
    /// false if that has to be done again. Blocks on the disk.
    fn take_rollouts_on(&self, is_edited: bool) -> bool {
        let _decision = locked(&self.mdb_decisions);
        let before = self.state().rollouts.get();
        let mut next = State::clone(&before);
        let now = self.shared.clock.now().wall;
        // Decisions about many machines take long: nothing else waits for them.
        let (mdb, machines) = {
            let inner = self.locked();
            // Nothing is known of machines before the first machine database.
            if !inner.admission.is_in_force() {
                return false;
            }
            let mdb = inner.admission.current().machines().clone();
            (mdb, seen(&inner))
        };
        if is_edited {
            next.note_members(&mdb);
            for (name, revision) in next.take_mdb(&mdb, now) {
                let what = "the machine database was edited: its images wait as a revision";
                tracing::info!("{name}@{revision}: {what}");
                start_by_itself(&mut next, &name, revision, now);
            }
        }
        let healthy_since = std::mem::take(&mut locked(&self.rollout_progress).healthy_since);
        let mut view = FleetView { shared: &self.shared, machines, healthy_since };
        let advanced = match self.rollouts_paused() {
            Some(_) => Advanced::default(),
            None => advance(&mut next, &mdb, &mut view, now),
        };
        let unfinished: BTreeSet<u64> = next.unfinished().map(|record| record.number).collect();
        view.healthy_since.retain(|(number, _), _| unfinished.contains(number));
        {
            let mut progress = locked(&self.rollout_progress);
            progress.batches.clone_from(&advanced.batches);
            progress.healthy_since = view.healthy_since;
        }
        if next == *before {
            return true;
        }
        let saved = self.state().rollouts.replace(next, None);
        let error = saved.as_ref().err().map(|error| error_chain(error));
        let former = std::mem::replace(&mut locked(&self.rollout_progress).error, error.clone());
        if let Some(error) = error {
            if former.as_ref() != Some(&error) {
                tracing::error!("rollouts do not go on until they can be saved: {error}");
            }
            return false;
        }
        for (id, what) in advanced.events {
            tracing::info!(rollout = id, "{what}");
            self.shared.audit.record_decision("rollout", &format!("id={id}"), &what);
        }
        self.put_rollouts_in_force();
        true
    }

    /// Returns why no rollout goes on, if none does.
    fn rollouts_paused(&self) -> Option<String> {
        let brake = self.shared.gate.brake()?;
        Some(format!("updates are disabled by {}: {}", brake.who, brake.reason))
    }

    /// Gives machines the records that follow from what is stored.
    fn put_rollouts_in_force(&self) {
        let admission = self.locked().admission.clone();
        self.carry_out(admission);
        self.forget_rollbacks();
    }

    /// Makes a change of what is stored, with the order, and carries it out. Returns what `change`
    /// returns. On an error nothing has changed. Blocks on the disk.
    fn change_rollouts<T>(
        &self,
        order: &Order,
        change: impl FnOnce(&mut State, &SharedMachines, &Editor) -> Result<T, Said>,
    ) -> Result<T, OrderError> {
        let _decision = locked(&self.mdb_decisions);
        let (mdb, is_in_force) = {
            let inner = self.locked();
            (inner.admission.current().machines().clone(), inner.admission.is_in_force())
        };
        let mut next = State::clone(&self.state().rollouts.get());
        let now = self.shared.clock.now().wall;
        let editor = Editor { who: order.who.clone(), why: order.why.clone(), now };
        let result = change(&mut next, &mdb, &editor)?;
        if is_in_force {
            next.note_members(&mdb);
        }
        self.state().rollouts.replace(next, Some(order))?;
        self.put_rollouts_in_force();
        self.rollouts_changed.notify_one();
        Ok(result)
    }

    /// Edits groups and environments.
    pub async fn edit_environments(
        self: &Arc<Self>,
        request: EditEnvironmentsRequest,
    ) -> Result<EditEnvironmentsReply, OrderError> {
        let EditEnvironmentsRequest { groups, environments, whole, dry_run, why, who } = request;
        let images = environments.iter().filter_map(|edit| match &edit.source {
            Source::Image(image) => Some(image.clone()),
            Source::Mdb(_) => None,
        });
        self.expect_images(images.collect()).await?;
        let names: Vec<&str> = environments.iter().map(|edit| edit.name.as_str()).collect();
        let order = Order::new("edit-environments", &who).about(names.join(" ")).why(&why);
        let order = order.checked()?;
        let edits = Edits { groups, environments, whole };
        let edit = move |fleet: &Self| {
            if dry_run {
                let mdb = fleet.locked().admission.current().machines().clone();
                let mut next = State::clone(&fleet.state().rollouts.get());
                let now = fleet.shared.clock.now().wall;
                let editor = Editor { who, why, now };
                return Ok(next.edit(edits, &editor, &mdb)?);
            }
            fleet.change_rollouts(&order, |state, mdb, editor| state.edit(edits, editor, mdb))
        };
        Ok(EditEnvironmentsReply { outcomes: self.on_thread(edit).await? })
    }

    /// Fails if the image server does not give one of these images.
    async fn expect_images(&self, images: BTreeSet<ImageName>) -> Result<(), OrderError> {
        for image in images {
            if let Err(why) = self.shared.images.get_content(&image).await {
                let message = format!("the image server does not give {image}: {why}");
                return Err(Said::new(404, message).into());
            }
        }
        Ok(())
    }

    /// Deletes an environment, freezes it, or says whether it is active.
    pub async fn order_environment(
        self: &Arc<Self>,
        request: OrderEnvironmentRequest,
    ) -> Result<OrderedReply, OrderError> {
        let OrderEnvironmentRequest { name, order: what, why, who } = request;
        let verb = match what {
            EnvironmentOrder::Activate => "activate-environment",
            EnvironmentOrder::Deactivate => "deactivate-environment",
            EnvironmentOrder::Delete { .. } => "delete-environment",
            EnvironmentOrder::Freeze { .. } => "freeze-environment",
            EnvironmentOrder::Unfreeze => "unfreeze-environment",
        };
        let order = Order::new(verb, &who).about(&name).why(&why);
        let order = match what {
            EnvironmentOrder::Freeze { .. } => order.reasoned("the environment is frozen")?,
            _ => order.checked()?,
        };
        let change = move |fleet: &Self| {
            fleet.change_rollouts(&order, |state, mdb, editor| {
                let is_active = match what {
                    EnvironmentOrder::Delete { force } => {
                        state.delete(&name, force, mdb)?;
                        return Ok(format!("{name} is deleted"));
                    }
                    EnvironmentOrder::Freeze { until } => {
                        let until = until.map(|end| end_of(end, editor.now));
                        return state.freeze(&name, until, editor);
                    }
                    EnvironmentOrder::Unfreeze => return state.unfreeze(&name, editor),
                    EnvironmentOrder::Activate => true,
                    EnvironmentOrder::Deactivate => false,
                };
                let has_changed = state.set_active(&name, is_active)?;
                let was = if has_changed { "is now" } else { "was already" };
                let not = if is_active { "" } else { "not " };
                Ok(format!("{name} {was} {not}active"))
            })
        };
        Ok(OrderedReply { message: self.on_thread(change).await? })
    }

    /// Starts a rollout.
    pub async fn start_rollout(
        self: &Arc<Self>,
        request: StartRolloutRequest,
    ) -> Result<StartRolloutReply, OrderError> {
        let StartRolloutRequest { environments, scan, rollback, urgent, why, who } = request;
        let order = Order::new("start-rollout", &who).about(environments.join(" ")).why(&why);
        let order = order.reasoned("the rollout is started")?;
        self.expect_images(self.images_of(&environments)).await?;
        let kind = if rollback { Kind::Rollback } else { Kind::User };
        let start = StartOrder { environments, kind, scan, urgent };
        let change = move |fleet: &Self| {
            fleet.change_rollouts(&order, |state, _, editor| state.start(&start, editor))
        };
        Ok(StartRolloutReply { id: format!("r{}", self.on_thread(change).await?) })
    }

    /// Returns the images of revisions that are named as `NAME@REVISION`.
    fn images_of(&self, named: &[String]) -> BTreeSet<ImageName> {
        let state = self.state().rollouts.get();
        let of = |text: &String| {
            let (name, number) = text.split_once('@')?;
            let revision =
                state.environments.get(name)?.revisions.get(&number.parse::<Revision>().ok()?)?;
            Some(images_in(revision))
        };
        named.iter().filter_map(of).flatten().collect()
    }

    /// Carries out an order about a rollout.
    pub async fn order_rollout(
        self: &Arc<Self>,
        request: OrderRolloutRequest,
    ) -> Result<OrderedReply, OrderError> {
        let OrderRolloutRequest { id, order: verb, why, who } = request;
        let (name, what) = match verb {
            RolloutVerb::Stop => ("stop-rollout", RolloutOrder::Stop),
            RolloutVerb::Cancel => ("cancel-rollout", RolloutOrder::Cancel),
            RolloutVerb::RollBack => ("roll-back-rollout", RolloutOrder::RollBack),
            RolloutVerb::Resolve => ("resolve-rollout", RolloutOrder::Resolve),
        };
        let order = Order::new(name, &who).about(&id).why(&why);
        let order = order.reasoned("the rollout does not go on as it was started")?;
        let change = move |fleet: &Self| {
            fleet.change_rollouts(&order, |state, _, editor| state.order(&id, what, editor))
        };
        Ok(OrderedReply { message: self.on_thread(change).await? })
    }

    /// Takes a vote.
    pub async fn vote(
        self: &Arc<Self>,
        request: VoteOnStepRequest,
    ) -> Result<OrderedReply, OrderError> {
        let VoteOnStepRequest { rollout, step, vote, digest, why, who } = request;
        let about = format!("{rollout}/{step}");
        let what = format!("{vote:?} {digest}");
        let order = Order::new("vote", &who).about(about).what(what).why(&why).checked()?;
        let vote = VoteEvent { step, voter: who, vote, digest, link_valid: true };
        let change = move |fleet: &Self| {
            fleet.change_rollouts(&order, |state, _, _| state.vote(&rollout, vote))
        };
        Ok(OrderedReply { message: self.on_thread(change).await? })
    }

    /// Returns what rollouts would do.
    pub fn plan_rollout(
        &self,
        request: PlanRolloutRequest,
    ) -> Result<PlanRolloutReply, OrderError> {
        let mut state = State::clone(&self.state().rollouts.get());
        let mdb = match request.machines {
            Some(machines) => {
                let shared = |one: Machine| (one.hostname.clone(), Arc::new(one));
                machines.into_iter().map(shared).collect()
            }
            None => self.locked().admission.current().machines().clone(),
        };
        state.take_mdb(&mdb, self.shared.clock.now().wall);
        let mut named: BTreeMap<String, Revision> = BTreeMap::new();
        for text in &request.environments {
            let (name, number) = text.split_once('@').unwrap_or((text, ""));
            let missing = || Said::new(404, format!("there is no environment `{name}`"));
            let environment = state.environments.get(name).ok_or_else(missing)?;
            let number = match number {
                "" => environment.newest(),
                text => {
                    text.parse().map_err(|_| Said::new(400, format!("`{text}` is no revision")))?
                }
            };
            if !environment.revisions.contains_key(&number) {
                return Err(Said::new(404, format!("{name} has no revision {number}")).into());
            }
            named.insert(name.to_owned(), number);
        }
        if request.environments.is_empty() {
            let open = state.environments.iter().filter(|(_, one)| one.newest() != one.committed);
            named = open.map(|(name, one)| (name.clone(), one.newest())).collect();
        }
        let digest = |image: &str| digest_of(&self.shared, image);
        let plans = named.iter().map(|(name, number)| plan(&state, &mdb, name, *number, digest));
        Ok(PlanRolloutReply { plans: plans.collect() })
    }

    /// Returns all that is remembered of environments and rollouts.
    pub fn rollout_state(&self) -> Arc<State> {
        self.state().rollouts.get()
    }

    /// Notes whether the command that tells of rollouts fails.
    pub fn note_rollout_command(&self, error: Option<String>) {
        locked(&self.rollout_progress).command_error = error;
    }

    /// Returns why the command that tells of rollouts fails, if it does.
    pub(super) fn rollout_command_error(&self) -> Option<String> {
        let error = locked(&self.rollout_progress).command_error.clone()?;
        Some(format!("the rollout command fails: {error}"))
    }

    /// Counts rollouts, and the machines of environments.
    pub fn rollout_counts(&self) -> RolloutCounts {
        let state = self.state().rollouts.get();
        let mut counts = RolloutCounts::default();
        for record in state.unfinished() {
            *counts.rollouts.entry(record.rollout.state).or_default() += 1;
            let waiting = record.rollout.steps.iter();
            let waiting = waiting.filter(|step| step.state == StepState::AwaitingApproval);
            counts.waiting_for_votes += waiting.count();
        }
        if !state.environments.is_empty() {
            let gate = Gate::new(&state);
            let mdb = self.locked().admission.current().machines().clone();
            for gated in mdb.values().filter_map(|machine| gate.gated(machine)) {
                *counts.machines.entry((gated.environment, gated.revision)).or_default() += 1;
            }
        }
        counts
    }

    /// Lists environments.
    pub fn environments(&self, request: &ListEnvironmentsRequest) -> ListEnvironmentsReply {
        let state = self.state().rollouts.get();
        let inner = self.locked();
        let mdb = inner.admission.current().machines();
        let is_wanted = |(name, one): &(&String, &Arc<EnvironmentState>)| {
            let group = one.definition().and_then(|definition| definition.group.as_deref());
            (request.names.is_empty() || request.names.contains(name))
                && (request.group.is_empty() || group == Some(request.group.as_str()))
        };
        let mut environments = BTreeMap::new();
        for (name, one) in state.environments.iter().filter(is_wanted) {
            let mut info = info(&state, name, one, request.all_revisions);
            info.closed = state.opening(name, self.shared.clock.now().wall).err();
            environments.insert(name, info);
        }
        let gate = Gate::new(&state);
        let newest = state.environments.iter().filter_map(|(name, one)| {
            environments.contains_key(name).then_some((&one.definition()?.select, name))
        });
        let newest = SelectorIndex::new(newest.collect::<Vec<_>>());
        for machine in mdb.values() {
            for name in newest.selecting(machine) {
                environments.entry(name).and_modify(|info| info.selected += 1);
            }
            let Some(gated) = gate.gated(machine) else { continue };
            for name in &gated.conflicts {
                let info = environments.get_mut(name);
                if let Some(info) = info.filter(|info| info.conflicts.len() < CONFLICTS_MAX) {
                    info.conflicts.push(machine.hostname.clone());
                }
            }
            let Some(info) = environments.get_mut(&gated.environment) else { continue };
            info.machines += 1;
            let watched = inner.watched.get(&machine.hostname);
            let is_healthy = watched.is_some_and(|watched| {
                watched.handle.with_sub(|sub| {
                    let has_trouble = sub.task_troubles().next().is_some();
                    let (state, reachable) = machine_state(sub.status(), has_trouble);
                    reachable && state.is_healthy()
                })
            });
            info.healthy += u32::from(is_healthy);
        }
        ListEnvironmentsReply {
            groups: state.groups.values().map(|group| (**group).clone()).collect(),
            environments: environments.into_values().collect(),
        }
    }

    /// Lists rollouts.
    pub fn rollouts(&self, request: &ListRolloutsRequest) -> ListRolloutsReply {
        let state = self.state().rollouts.get();
        let mdb = self.locked().admission.current().machines().clone();
        let progress = locked(&self.rollout_progress);
        let is_wanted = |record: &&Arc<RolloutRecord>| {
            (request.ids.is_empty() || request.ids.contains(&record.rollout.id))
                && (request.environment.is_empty()
                    || record.rollout.environments().contains(&request.environment))
                && !(request.unfinished && record.is_ended())
        };
        let rollouts = state.rollouts.values().rev().filter(is_wanted).map(|record| {
            let waiting = record.rollout.steps.iter();
            let waiting = waiting.filter(|step| step.state == StepState::AwaitingApproval);
            let plans = waiting.map(|step| {
                let revision = step.revision.unwrap_or_default();
                plan(&state, &mdb, &step.environment, revision, |image| {
                    digest_of(&self.shared, image)
                })
            });
            let document = state.document(Some(record));
            let locks = match record.is_ended() {
                true => BTreeSet::new(),
                false => lock(&document, &Dependencies::of(&document), &record.rollout).scope,
            };
            RolloutInfo {
                rollout: record.rollout.clone(),
                why: record.why.clone(),
                created: record.created,
                ended: record.ended,
                since: record.since.clone().into_iter().collect(),
                batches: progress.batches.get(&record.number).cloned().unwrap_or_default(),
                plans: plans.collect::<Vec<StepPlan>>(),
                locks: locks.into_iter().collect(),
            }
        });
        let paused = progress.error.clone().or_else(|| self.rollouts_paused());
        ListRolloutsReply { rollouts: rollouts.collect(), paused }
    }

    /// Returns what environments say about a machine, if one applies.
    pub(super) fn environment_of(&self, hostname: &str) -> Option<EnvironmentImage> {
        let record = self.locked().admission.current().machines().get(hostname).cloned()?;
        let gated = Gate::new(&self.state().rollouts.get()).gated(&record)?;
        Some(EnvironmentImage {
            environment: gated.environment,
            revision: gated.revision,
            record: record.required_image.clone(),
            conflicts: gated.conflicts,
        })
    }

    /// Returns the records that machines get, given the machine database.
    pub(super) fn effective(&self, mdb: &SharedMachines) -> SharedMachines {
        effective(&self.state().rollouts.get(), mdb)
    }

    /// Returns the images of revisions that machines have, or may get again.
    pub(super) fn kept_images(&self) -> BTreeSet<ImageName> {
        let state = self.state().rollouts.get();
        let kept = state.environments.values().flat_map(|one| one.kept_revisions());
        kept.flat_map(images_in).collect()
    }

    /// Returns the images of unfinished rollouts, so that they are loaded.
    pub(super) fn rollout_images(&self) -> BTreeSet<ImageName> {
        let state = self.state().rollouts.get();
        let steps = state.unfinished().flat_map(|record| &record.rollout.steps);
        let revisions = steps.filter_map(|step| {
            state.environments.get(&step.environment)?.revisions.get(&step.revision?)
        });
        revisions.flat_map(images_in).collect()
    }
}

/// Notified when there is something to be decided about rollouts.
pub(super) type RolloutsChanged = Notify;

/// Starts the new revision of an environment that says so.
fn start_by_itself(state: &mut State, name: &str, revision: Revision, now: model::tree::Time) {
    let environment = &state.environments[name];
    let is_auto = environment.definition().is_some_and(|one| one.start == Start::Auto);
    if !is_auto || !environment.active {
        return;
    }
    let environments = vec![format!("{name}@{revision}")];
    let start = StartOrder { environments, kind: Kind::Mdb, ..StartOrder::default() };
    let (who, why) = ("the machine database".to_owned(), "it was edited".to_owned());
    if let Err(said) = state.start(&start, &Editor { who, why, now }) {
        tracing::error!("{name}@{revision} cannot be started: {}", said.message);
    }
}

fn images_in(revision: &StoredRevision) -> BTreeSet<ImageName> {
    match &revision.definition.source {
        Source::Image(image) => BTreeSet::from([image.clone()]),
        Source::Mdb(_) => {
            revision.images.values().filter_map(|one| ImageName::new(one).ok()).collect()
        }
    }
}

/// Returns what is known of an environment without a look at machines.
fn info(state: &State, name: &str, one: &EnvironmentState, all: bool) -> EnvironmentInfo {
    let is_wanted = |number: &Revision| all || *number == one.newest() || *number == one.committed;
    let revisions = one.revisions.iter().filter(|(number, _)| is_wanted(number));
    let revisions = revisions.map(|(&number, stored)| {
        let mut images: BTreeMap<&String, u32> = BTreeMap::new();
        stored.images.values().for_each(|image| *images.entry(image).or_default() += 1);
        RevisionInfo {
            number,
            definition: stored.definition.clone(),
            author: stored.author.clone(),
            why: stored.why.clone(),
            at: stored.at,
            images: images.into_iter().map(|(image, count)| (image.clone(), count)).collect(),
        }
    });
    let rollout = state.unfinished().find(|record| record.rollout.environments().contains(name));
    EnvironmentInfo {
        name: name.to_owned(),
        newest: one.newest(),
        committed: one.committed,
        active: one.active,
        selected: 0,
        machines: 0,
        healthy: 0,
        moved: u32::try_from(one.moved.len()).unwrap_or(u32::MAX),
        conflicts: Vec::new(),
        rollout: rollout.map(|record| record.rollout.id.clone()).unwrap_or_default(),
        closed: None,
        revisions: revisions.collect(),
    }
}
