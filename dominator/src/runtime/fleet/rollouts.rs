//! Environments and rollouts: takes rollouts on, and gives machines the records that follow.
//!
//! Whatever changes is on the disk before a machine gets another record for it. All of it is done
//! under the lock of decisions about machine databases.

mod analysis;
mod orders;
mod reports;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use api::dominator::Status;
use model::display::error_chain;
use model::image::ImageName;
use model::lock::locked;
use model::object::{Algorithm, ObjectId};
use rollouts::advance::{Advanced, advance};
use rollouts::batch::Batch;
use rollouts::content::{ContentRevision, NewestContent};
use rollouts::definition::{Start, Subject};
use rollouts::document::{Analysis, Kind, MachineTaskState, Revision};
use rollouts::gate::{Effective, Gate, InactiveParts, effective};
use rollouts::state::{
    Editor, EnvironmentState, SharedMachines, StartOrder, State, StoredRevision,
};
use rollouts::steps::Said;
use rollouts::view::{ImageNotes, Question, Seen, View};
use tokio::sync::Notify;

pub(super) use analysis::AnalysisService;
pub use reports::RolloutCounts;

use super::{DrivenMachine, Fleet, FleetState, OrderError};
use crate::core::computed::gates::ContentGates;
use crate::core::orders::Order;
use crate::core::rollouts::machine_state;
use crate::core::sub::SubOrder;
use crate::runtime::images::Images;
use crate::runtime::shared::Shared;

/// How often rollouts are taken on that change machines or make plans.
const INTERVAL: Duration = Duration::from_millis(500);

/// How often those are looked at that wait for votes, for locks or for an operator.
const WAITING_INTERVAL: Duration = Duration::from_secs(5);

/// How often dead machines of environments are looked for.
const WATCH_INTERVAL: Duration = Duration::from_secs(30);

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

/// What was seen of machines at one moment.
struct FleetView<'a> {
    shared: &'a Shared,
    analysis: &'a AnalysisService,
    machines: HashMap<String, Seen>,
    contents: NewestContent,
    healthy_since: BTreeMap<(u64, String), Instant>,
}

/// Returns what is seen of machines now.
fn seen(machines: &FleetState, images: &Images) -> HashMap<String, Seen> {
    let watched = machines.watched.iter();
    watched.map(|(hostname, watched)| (hostname.clone(), seen_of(watched, images))).collect()
}

/// Returns what is seen of a machine now.
fn seen_of(watched: &DrivenMachine, images: &Images) -> Seen {
    watched.handle.with_sub(|sub| {
        let has_trouble = sub.task_troubles().next().is_some();
        let (status, required) = (sub.status(), sub.required());
        let (state, reachable) = machine_state(status, has_trouble);
        let is_asked_for = || required.as_ref().is_some_and(|image| images.is_asked_for(image));
        Seen {
            left_out: sub.left_out().iter().map(|one| one.bundle.to_string()).collect(),
            state,
            ill: sub.ill_parts().map(String::from).collect(),
            reachable,
            unknown: status == Status::Connecting
                || (status == Status::ImageNotReady && is_asked_for()),
            held_out: watched.machine.disable_updates || sub.rollback().is_some(),
            image: required.map_or_else(String::new, String::from),
        }
    })
}

impl View for FleetView<'_> {
    fn machine(&self, hostname: &str) -> Option<Seen> {
        self.machines.get(hostname).cloned()
    }

    fn left_out(&self, image: &str) -> Option<BTreeMap<String, String>> {
        let Ok(name) = ImageName::new(image) else { return Some(BTreeMap::new()) };
        let left_out = self.shared.images.left_out(&name)?.into_iter();
        Some(left_out.map(|one| (one.bundle.to_string(), one.why.to_string())).collect())
    }

    fn digest(&self, image: &str) -> Option<ObjectId> {
        digest_of(self.shared, image)
    }

    fn notes(&self, image: &str) -> Option<ImageNotes> {
        self.shared.images.rollout_notes(&ImageName::new(image).ok()?)
    }

    fn content(
        &self,
        hostname: &str,
        server: &str,
        content: ContentRevision,
    ) -> Option<MachineTaskState> {
        self.shared.computed.content_state(hostname, server, content)
    }

    fn newest_content(&self, server: &str) -> Option<ContentRevision> {
        self.contents.get(server).copied()
    }

    fn analysis(&mut self, question: Question<'_>) -> Option<Analysis> {
        self.analysis.ask(&question)
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

/// Returns the digest of an image; of a composed one that of the digests of its parts.
fn digest_of(shared: &Shared, image: &str) -> Option<ObjectId> {
    let (name, known) = (ImageName::new(image).ok()?, shared.state.known_images.get());
    let parts = name.parts().filter(|part| !part.is_nothing());
    let digests: Option<Vec<ObjectId>> = parts.map(|part| known.get(&part).copied()).collect();
    match digests?.as_slice() {
        [digest] => Some(*digest),
        digests => {
            let texts: Vec<String> = digests.iter().map(ToString::to_string).collect();
            Some(Algorithm::Blake3.digest(texts.join(" ").as_bytes()))
        }
    }
}

impl Fleet {
    /// Takes rollouts on, until the fleet stops.
    pub async fn run_rollouts(self: Arc<Self>) {
        let mut pause = tokio::time::interval(INTERVAL);
        pause.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        // The machine database may have been edited just before the end of the dominator.
        let mut is_edited = true;
        let mut looked = Instant::now();
        loop {
            tokio::select! {
                () = self.rollouts_changed.notified() => is_edited = true,
                _ = pause.tick() => {}
            }
            let state = self.state().rollouts.get();
            let since = looked.elapsed();
            let is_late = since >= WAITING_INTERVAL;
            let is_watched = || state.environments.values().any(|one| one.active);
            let is_due = state.unfinished().any(|record| is_late || record.is_under_way())
                || (since >= WATCH_INTERVAL && is_watched())
                || self.has_new_content(&state);
            if state.environments.is_empty() || !(is_edited || is_due) {
                continue;
            }
            looked = Instant::now();
            let fleet = Arc::clone(&self);
            let taken = tokio::task::spawn_blocking(move || fleet.take_rollouts_on(is_edited));
            // It ends early only by a panic, which has been logged.
            is_edited &= !taken.await.unwrap_or(false);
        }
    }

    /// True if an environment waits for a content revision that it does not have.
    fn has_new_content(&self, state: &State) -> bool {
        let is_gated = |one: &Arc<EnvironmentState>| one.subject() == Some(Subject::Content);
        let mut gated = state.environments.values().filter(|one| is_gated(one)).peekable();
        if gated.peek().is_none() {
            return false;
        }
        let newest = self.shared.computed.newest_content();
        gated.any(|one| one.awaits(&newest))
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
            (mdb, seen(&inner, &self.shared.images))
        };
        if is_edited {
            next.note_members(&mdb, now);
            for (name, revision) in next.take_mdb(&mdb, now) {
                let what = "the machine database was edited: its images wait as a revision";
                tracing::info!("{name}@{revision}: {what}");
                start_by_itself(&mut next, &name, revision, now);
            }
        }
        let healthy_since = std::mem::take(&mut locked(&self.rollout_progress).healthy_since);
        let contents = self.shared.computed.newest_content();
        for (name, revision) in next.take_content(&contents, now) {
            let what = "there is a new content revision: it waits as a revision";
            tracing::info!("{name}@{revision}: {what}");
            start_by_itself(&mut next, &name, revision, now);
        }
        let (shared, analysis) = (&*self.shared, &self.analysis);
        let mut view = FleetView { shared, analysis, machines, contents, healthy_since };
        let advanced = match self.rollouts_paused() {
            Some(_) => Advanced::default(),
            None => advance(&mut next, &mdb, &mut view, now),
        };
        let unfinished: BTreeSet<u64> = next.unfinished().map(|record| record.number).collect();
        view.healthy_since.retain(|(number, _), _| unfinished.contains(number));
        self.analysis.retain(&unfinished);
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
        let automatic = self.state().rollouts.get().automatic_events(&before);
        for (id, what) in advanced.events.into_iter().chain(automatic) {
            self.tell_rollout(&id, &what);
        }
        self.put_rollouts_in_force();
        true
    }

    /// Notes what has happened to a rollout.
    fn tell_rollout(&self, id: &str, what: &str) {
        tracing::info!(rollout = id, "{what}");
        self.shared.audit.record_decision("rollout", &format!("id={id}"), what);
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
            next.note_members(&mdb, now);
        }
        let automatic = next.automatic_events(&self.state().rollouts.get());
        self.state().rollouts.replace(next, Some(order))?;
        for (id, what) in automatic {
            self.tell_rollout(&id, &what);
        }
        self.put_rollouts_in_force();
        self.rollouts_changed.notify_one();
        Ok(result)
    }

    /// Returns all that is remembered of environments and rollouts.
    pub fn rollout_state(&self) -> Arc<State> {
        self.state().rollouts.get()
    }

    /// Sets the words of the command that says whether steps go on.
    pub fn set_analysis_command(&self, words: Vec<String>) {
        self.analysis.set_program(words);
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

    /// Returns what machines get, given the machine database.
    pub(super) fn effective(&self, mdb: &SharedMachines) -> Effective {
        effective(&self.state().rollouts.get(), mdb)
    }

    /// Lets machines have such content of computed files as environments allow.
    pub(super) fn gate_content(&self, mdb: &SharedMachines) {
        let state = self.state().rollouts.get();
        let is_gate = |one: &Arc<EnvironmentState>| one.subject() == Some(Subject::Content);
        let mut gates = ContentGates::new();
        if state.environments.values().any(is_gate) {
            let gate = Gate::new(&state);
            let limits = mdb.values().map(|one| (one.hostname.clone(), gate.content_limits(one)));
            gates.extend(limits.filter(|(_, limits)| !limits.is_empty()));
        }
        self.shared.computed.set_gates(gates);
    }

    /// Tells the drivers of machines which parts come from environments that are not active.
    pub(super) fn tell_inactive(
        &self,
        inner: &mut FleetState,
        inactive: BTreeMap<String, InactiveParts>,
    ) {
        let former = std::mem::replace(&mut inner.inactive, inactive);
        let hostnames: BTreeSet<&String> = former.keys().chain(inner.inactive.keys()).collect();
        for hostname in hostnames {
            let parts = inner.inactive.get(hostname);
            let Some(watched) = inner.watched.get(hostname) else { continue };
            if parts != former.get(hostname) {
                let order = SubOrder::SetInactive(parts.cloned().unwrap_or_default());
                watched.handle.order(order, &self.shared);
            }
        }
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
        let gated = state.unfinished_gated();
        let steps = gated.flat_map(|record| &record.rollout.steps);
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
    let author = environment.revisions[&revision].author.clone();
    let is_auto = environment.definition().is_some_and(|one| one.start == Start::Auto);
    if !is_auto || !environment.active {
        return;
    }
    let environments = vec![format!("{name}@{revision}")];
    let start = StartOrder { environments, kind: Kind::Mdb, ..StartOrder::default() };
    let why = environment.revisions[&revision].why.clone();
    if let Err(said) = state.start(&start, &Editor { who: author, why, now }) {
        tracing::error!("{name}@{revision} cannot be started: {}", said.message);
    }
}

fn images_in(revision: &StoredRevision) -> BTreeSet<ImageName> {
    let kept = revision.kept.iter().map(|kept| kept.image.clone());
    match revision.definition.source.image() {
        Some(image) => kept.chain([image.clone()]).collect(),
        None => {
            let images = revision.images.values().filter_map(|one| ImageName::new(one).ok());
            images.flat_map(|image| image.parts().collect::<Vec<_>>()).collect()
        }
    }
}
