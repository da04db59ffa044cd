//! Rollouts that follow by themselves from what machines are: of machines that begin to match, and
//! of those that are dead. They say what happens to machines; they change none, because machines
//! get the committed revision from the gate, and are repaired as ever.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use model::display::counted;
use model::tree::Time;

use super::{EnvironmentState, RolloutRecord, SharedMachines, State};
use crate::advance::{Seen, View};
use crate::document::{
    Kind, MachineTaskState, Revision, Rollout, RolloutState, Step, StepState, name_of,
};
use crate::gate::{Gate, Gated};

/// How many hosts are named.
const NAMED_MAX: usize = 5;

impl State {
    /// Notes which machines each environment has. Of an environment that is not active, others get
    /// nothing. Machines that begin to match an active one are those of a rollout of the kind
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
        for (name, environment) in &mut self.environments {
            let hosts = selected.remove(name).unwrap_or_default();
            let is_same = |members: &BTreeSet<String>| {
                !environment.active || members.iter().eq(hosts.iter().copied())
            };
            if environment.members.as_ref().is_some_and(is_same) {
                continue;
            }
            let hosts: BTreeSet<String> = hosts.into_iter().cloned().collect();
            if let Some(members) = &environment.members {
                // Others were brought by a rollout.
                let is_new = |host: &&String| {
                    !members.contains(*host) && !environment.moved.contains_key(*host)
                };
                joined.insert(name.clone(), hosts.iter().filter(is_new).cloned().collect());
            }
            Arc::make_mut(environment).members = Some(hosts);
        }
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
    /// Returns what happened, for events: the id of a rollout, and a sentence.
    pub(crate) fn follow_automatic(
        &mut self,
        mdb: &SharedMachines,
        view: &impl View,
        now: Time,
    ) -> Vec<(String, String)> {
        let newest = self.next_rollout();
        for (name, hosts) in self.dead(mdb, view) {
            self.start_automatic(Kind::HealthRepair, &name, hosts, now);
        }
        let mut events: Vec<(String, String)> = Vec::new();
        for record in self.rollouts.range(newest..).map(|(_, record)| record) {
            events.push((record.rollout.id.clone(), record.in_words()));
        }
        let open: Vec<Arc<RolloutRecord>> =
            self.unfinished().filter(|record| !record.rollout.kind.is_gated()).cloned().collect();
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
            if record.is_ended() {
                events.push((record.rollout.id.clone(), record.in_words()));
            }
            self.rollouts.insert(record.number, record);
        }
        events
    }

    /// Returns the machines of active environments that have failed, or of which a task is
    /// unhealthy, by environment. Those of rollouts under way are theirs.
    fn dead(&self, mdb: &SharedMachines, view: &impl View) -> BTreeMap<String, BTreeSet<String>> {
        let steps = self.unfinished().flat_map(|record| {
            let gated = record.rollout.kind.is_gated().then_some(&record.rollout.steps);
            gated.into_iter().flatten()
        });
        let changing: BTreeSet<&String> = steps
            .filter(|step| step.state.is_on_machines())
            .map(|step| &step.environment)
            .collect();
        let coming: BTreeSet<(&String, &String)> = self
            .unfinished()
            .filter(|record| !record.rollout.kind.is_gated())
            .flat_map(|record| {
                let environment = &record.rollout.steps[0].environment;
                record.waiting.iter().map(move |host| (environment, host))
            })
            .collect();
        let gate = Gate::new(self);
        let mut dead: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for machine in mdb.values() {
            let host = &machine.hostname;
            let seen = view.machine(host).filter(|seen| is_watched(seen) && is_dead(seen));
            let Some(seen) = seen else { continue };
            let Some(gated) = gate.gated(machine).filter(|gated| gated.image == seen.image) else {
                continue;
            };
            let names = gated.applied().map(|one| &one.environment);
            let active = names.filter(|name| self.environments[*name].active);
            for name in active.filter(|name| !changing.contains(name)) {
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

/// True if the environment has given the machine what it is to have, and that is healthy.
fn is_well(environment: &str, gated: &Gated, seen: &Seen) -> bool {
    let own = gated.applied().find(|one| one.environment == environment);
    let is_left_out = own.is_some_and(|one| {
        model::image::composition::split(&one.image).any(|part| seen.left_out.contains(part))
    });
    is_watched(seen) && seen.image == gated.image && seen.state.is_healthy() && !is_left_out
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
        if !state.environments.get(&name).is_some_and(|one: &Arc<EnvironmentState>| one.active) {
            let cause = format!("{name} is not active any more");
            self.end(RolloutState::Stopped, cause, now);
            return;
        }
        self.waiting.retain(|host| {
            let gated = mdb.get(host).and_then(|machine| gate.gated(machine));
            let gated = gated.filter(|gated| gated.applied().any(|one| one.environment == name));
            let (Some(gated), Some(seen)) = (gated, view.machine(host)) else {
                // It may just have been added to the machine database.
                return mdb.contains_key(host) && view.machine(host).is_none();
            };
            !seen.held_out && !is_well(&name, &gated, &seen)
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
