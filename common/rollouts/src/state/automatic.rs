//! Rollouts that follow by themselves from what machines are: of machines that begin to match, and
//! of those that are dead. They say what happens to machines; they change none, because machines
//! get the committed revision from the gate, and are repaired as ever.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use model::display::counted;
use model::image::composition::split;
use model::tree::Time;

use super::{EnvironmentState, RolloutRecord, SharedMachines, State};
use crate::document::{
    Kind, MachineTaskState, Revision, Rollout, RolloutState, Step, StepState, name_of,
};
use crate::gate::{Applied, Gate, Gated};
use crate::view::{Seen, View};

/// How many hosts are named.
const NAMED_MAX: usize = 5;

impl State {
    /// Notes which machines each environment has. Of one that is not active, others get nothing.
    /// Machines that begin to match an active one are those of a rollout of the kind
    /// [`Kind::NewHost`].
    pub fn note_members(&mut self, mdb: &SharedMachines, now: Time) {
        let mut selected: BTreeMap<String, Vec<&String>> = BTreeMap::new();
        let gate = Gate::new(self);
        for machine in mdb.values() {
            for environment in gate.environments_of(machine) {
                match selected.get_mut(environment) {
                    Some(hosts) => hosts.push(&machine.hostname),
                    None => drop(selected.insert(environment.clone(), vec![&machine.hostname])),
                }
            }
        }
        let mut joined: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for (name, environment) in &self.environments {
            let Some(before) = self.members.get(name).filter(|_| environment.active) else {
                continue;
            };
            // Others were brought by a rollout.
            let is_new = |host: &&&String| {
                !before.contains(**host) && !environment.moved.contains_key(**host)
            };
            let applies = |host: &&&String| {
                let gated = gate.gated(&mdb[**host]);
                gated.is_some_and(|gated| gated.applied().any(|one| one.environment == *name))
            };
            let hosts = selected.get(name).into_iter().flatten();
            let new: BTreeSet<String> =
                hosts.filter(is_new).filter(applies).map(|host| (*host).clone()).collect();
            joined.insert(name.clone(), new);
        }
        for (name, environment) in &mut self.environments {
            let hosts = selected.remove(name).unwrap_or_default();
            let is_same = |members: &BTreeSet<String>| members.iter().eq(hosts.iter().copied());
            let all = || hosts.iter().copied().cloned().collect::<BTreeSet<String>>();
            if !environment.active {
                if environment.members.is_none() {
                    Arc::make_mut(environment).members = Some(all());
                }
            } else if !self.members.get(name).is_some_and(|members| is_same(members)) {
                self.members.insert(name.clone(), Arc::new(all()));
            }
        }
        self.members.retain(|name, _| self.environments.contains_key(name));
        for (name, hosts) in joined {
            self.start_automatic(Kind::NewHost, &name, hosts, now);
        }
    }

    /// Starts a rollout of the committed revision for these machines, or adds them to one that has
    /// not ended.
    pub(crate) fn start_automatic(
        &mut self,
        kind: Kind,
        name: &str,
        hosts: BTreeSet<String>,
        now: Time,
    ) {
        let Some(environment) = self.environments.get(name) else { return };
        if hosts.is_empty() || !environment.active || environment.committed == 0 {
            return;
        }
        let is_of_it = |record: &&Arc<RolloutRecord>| {
            record.rollout.kind == kind && record.rollout.environments().contains(name)
        };
        let open = self.unfinished().find(is_of_it).map(|record| record.number);
        let number = open.unwrap_or_else(|| self.next_rollout());
        let committed = environment.committed;
        let record = self
            .rollouts
            .entry(number)
            .or_insert_with(|| Arc::new(automatic(kind, number, name, committed, now)));
        if hosts.iter().any(|host| !record.waiting.contains(host)) {
            let record = Arc::make_mut(record);
            let before = record.waiting.len();
            record.waiting.extend(hosts);
            let more = u32::try_from(record.waiting.len() - before).unwrap_or(u32::MAX);
            record.machines = record.machines.saturating_add(more);
            record.tell_progress();
        }
    }

    /// Returns the number of the next rollout.
    pub(super) fn next_rollout(&self) -> u64 {
        self.rollouts.keys().next_back().copied().unwrap_or_default() + 1
    }

    /// Starts rollouts of machines that are dead, and ends those whose machines are healthy.
    pub(crate) fn follow_automatic(&mut self, mdb: &SharedMachines, view: &impl View, now: Time) {
        for (name, hosts) in self.dead(mdb, view) {
            self.start_automatic(Kind::HealthRepair, &name, hosts, now);
        }
        let open: Vec<Arc<RolloutRecord>> = self.unfinished_automatic().cloned().collect();
        let gate = Gate::new(self);
        let mut followed = Vec::new();
        for record in open {
            let mut next = RolloutRecord::clone(&record);
            next.follow(self, &gate, mdb, view, now);
            if next != *record {
                followed.push(Arc::new(next));
            }
        }
        for record in followed {
            self.rollouts.insert(record.number, record);
        }
    }

    /// Returns which rollouts have begun or ended by themselves since `before`, for events: the id
    /// of each, and a sentence.
    #[must_use]
    pub fn automatic_events(&self, before: &Self) -> Vec<(String, String)> {
        let automatic = self.rollouts.values().filter(|record| !record.rollout.kind.is_gated());
        let is_news = |record: &&Arc<RolloutRecord>| {
            let former = before.rollouts.get(&record.number);
            former.is_none_or(|former| former.rollout.state != record.rollout.state)
        };
        let news = automatic.filter(is_news);
        news.map(|record| (record.rollout.id.clone(), record.in_words())).collect()
    }

    /// Returns the machines of active environments that have failed, or of which a task is
    /// unhealthy, by environment: that of what is unhealthy, or that of the image. Machines that a
    /// rollout is changing are its own.
    fn dead(&self, mdb: &SharedMachines, view: &impl View) -> BTreeMap<String, BTreeSet<String>> {
        let gated = self.unfinished_gated();
        let steps = gated.flat_map(|record| &record.rollout.steps);
        let on_machines = steps.filter(|step| step.state.is_on_machines());
        let changing: BTreeSet<&String> = on_machines.map(|step| &step.environment).collect();
        let automatic = self.unfinished_automatic();
        let coming = automatic.flat_map(|record| {
            let environment = &record.rollout.steps[0].environment;
            record.waiting.iter().map(move |host| (environment, host))
        });
        let coming: BTreeSet<(&String, &String)> = coming.collect();
        let gate = Gate::new(self);
        let mut dead: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for machine in mdb.values() {
            let host = &machine.hostname;
            let seen = view.machine(host).filter(|seen| is_watched(seen) && is_dead(seen));
            let Some(seen) = seen else { continue };
            let Some(gated) = gate.gated(machine).filter(|gated| gated.image == seen.image) else {
                continue;
            };
            if gated.applied().any(|one| changing.contains(&one.environment)) {
                continue;
            }
            let names = ill_of(&gated, &seen).map(|one| &one.environment);
            for name in names.filter(|name| self.environments[*name].active) {
                if !coming.contains(&(name, host)) {
                    dead.entry(name.clone()).or_default().insert(host.clone());
                }
            }
        }
        dead
    }
}

/// Returns a rollout of the committed revision, without machines.
fn automatic(kind: Kind, number: u64, name: &str, committed: Revision, now: Time) -> RolloutRecord {
    let step = Step {
        id: name.to_owned(),
        environment: name.to_owned(),
        revision: Some(committed),
        from: Some(committed),
        state: StepState::Applying,
        ..Step::default()
    };
    let by = name_of(&kind);
    let why = match kind {
        Kind::NewHost => "machines begin to match",
        _ => "machines are not healthy",
    };
    let id = format!("r{number}");
    let since = BTreeMap::from([(name.to_owned(), now)]);
    RolloutRecord {
        number,
        rollout: Rollout {
            id,
            kind,
            state: RolloutState::Running,
            by,
            steps: vec![step],
            ..Rollout::default()
        },
        why: why.to_owned(),
        created: now,
        began: since.clone(),
        since,
        ..RolloutRecord::default()
    }
}

/// True if something is known of a machine now, and nobody keeps it out.
fn is_watched(seen: &Seen) -> bool {
    seen.reachable && !seen.unknown && !seen.held_out
}

fn is_dead(seen: &Seen) -> bool {
    matches!(seen.state, MachineTaskState::Unhealthy | MachineTaskState::Failed)
}

/// Returns the environments that have given a dead machine what is unhealthy; if that is not known,
/// the one of its image, or those of its bundles.
fn ill_of<'a>(gated: &'a Gated, seen: &'a Seen) -> impl Iterator<Item = &'a Applied> {
    let is_ill = |one: &&Applied| split(&one.image).any(|part| seen.ill.contains(part));
    let is_of_image = |one: &&Applied| gated.base.as_ref().is_none_or(|base| base == *one);
    let is_known = !seen.ill.is_empty();
    gated.of_image().filter(move |one| if is_known { is_ill(one) } else { is_of_image(one) })
}

/// True if the machine has what it is to have, and that is healthy. A bundle that is left out of
/// that is waited for no longer than the others.
fn is_well(gated: &Gated, seen: &Seen) -> bool {
    // It may be that it is to have no image.
    let is_empty = gated.image.is_empty() && seen.state == MachineTaskState::Stopped;
    let is_healthy = is_empty || seen.state.is_healthy();
    is_watched(seen) && seen.image == gated.image && is_healthy
}

impl RolloutRecord {
    /// Takes it on, if it is of one of the kinds that follow by themselves.
    fn follow(
        &mut self,
        state: &State,
        gate: &Gate<'_>,
        mdb: &SharedMachines,
        view: &impl View,
        now: Time,
    ) {
        let name = self.rollout.steps[0].environment.clone();
        let Some(environment) = state.environments.get(&name).filter(|one| one.active) else {
            let cause = format!("{name} is not active any more");
            return self.end(RolloutState::Stopped, cause, now);
        };
        let committed = Some(environment.committed);
        (self.rollout.steps[0].revision, self.rollout.steps[0].from) = (committed, committed);
        self.waiting.retain(|host| {
            let gated = mdb.get(host).and_then(|machine| gate.gated(machine));
            let gated = gated.filter(|gated| gated.applied().any(|one| one.environment == name));
            let (Some(gated), Some(seen)) = (gated, view.machine(host)) else {
                // It may just have been added to the machine database.
                return mdb.contains_key(host) && view.machine(host).is_none();
            };
            !seen.held_out && !is_well(&gated, &seen)
        });
        if self.waiting.is_empty() {
            let step = &mut self.rollout.steps[0];
            step.state = StepState::Succeeded;
            self.since.insert(name, now);
            self.tell_progress();
            let cause = self.rollout.steps[0].cause.clone();
            self.end(RolloutState::Succeeded, cause, now);
        } else {
            self.tell_progress();
        }
    }

    /// Says how many machines have come how far.
    fn tell_progress(&mut self) {
        let (all, waiting) = (u64::from(self.machines), self.waiting.len() as u64);
        let mut text =
            format!("{} of {} done", all.saturating_sub(waiting), counted(all, "machine"));
        if !self.waiting.is_empty() {
            let named: Vec<&str> =
                self.waiting.iter().take(NAMED_MAX).map(String::as_str).collect();
            let more = if self.waiting.len() > NAMED_MAX { ", ..." } else { "" };
            text = format!("{text}; waits for {}{more}", named.join(", "));
        }
        self.rollout.steps[0].cause = text;
    }

    fn in_words(&self) -> String {
        let Rollout { kind, state, steps, .. } = &self.rollout;
        let step = &steps[0];
        format!("{} of {} is {}: {}", name_of(kind), step.id, name_of(state), step.cause)
    }
}

impl EnvironmentState {
    /// Makes it active. Machines that it did not have until now are new, in `members`.
    pub(super) fn activate(
        &mut self,
        name: &str,
        members: &mut BTreeMap<String, Arc<BTreeSet<String>>>,
    ) {
        (self.active, self.deactivated) = (true, false);
        if let Some(own) = self.members.take() {
            members.insert(name.to_owned(), Arc::new(own));
        }
    }
}
