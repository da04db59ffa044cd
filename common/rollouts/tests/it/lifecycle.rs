//! The whole of it over many days of a small fleet: edits, starts, votes, stops, machines that
//! fail, are cut off and join, edits of the machine database, and a dominator that is killed.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use model::mdb::Machine;
use model::object::{Algorithm, ObjectId};
use model::tree::Time;
use proptest::prelude::*;
use rollouts::advance::advance;
use rollouts::content::ContentRevision;
use rollouts::definition::EnvironmentEdit;
use rollouts::document::{
    Advice, Analysis, Choice, Direction, MachineTaskState as Task, Revision, RolloutState,
    StepState, VoteEvent,
};
use rollouts::gate::{Gate, effective};
use rollouts::state::{
    ALL, Editor, Edits, RolloutOrder, RolloutRecord, SharedMachines, StartOrder, State,
};
use rollouts::view::{ImageNotes, Question, Seen, View};

use crate::left_out;

/// Numbers that look random, of a seed.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % limit.max(1)
    }

    fn one_in(&mut self, count: usize) -> bool {
        self.below(count) == 0
    }
}

/// A machine: what it has, and what it is being brought to.
#[derive(Clone, Debug, Default)]
struct Host {
    has: String,
    wants: String,
    state: Option<Task>,
    is_cut: bool,
}

impl Host {
    /// True if it has what an environment is to give it, and is healthy.
    fn is_healthy(&self, environment: &str) -> bool {
        let is_without = environment == "log" && !left_out(&self.wants).is_empty();
        let is_there = self.state == Some(Task::Synced) && self.has == self.wants;
        !self.is_cut && is_there && !is_without
    }
}

#[derive(Default)]
struct Fleet {
    hosts: BTreeMap<String, Host>,
    healthy: BTreeMap<(u64, String), u64>,
    now: u64,
}

impl View for Fleet {
    fn machine(&self, hostname: &str) -> Option<Seen> {
        let host = self.hosts.get(hostname)?;
        Some(Seen {
            image: host.wants.clone(),
            left_out: left_out(&host.wants).into_keys().collect(),
            state: host.state.unwrap_or(Task::Starting),
            ill: BTreeSet::new(),
            reachable: !host.is_cut,
            unknown: host.state.is_none(),
            held_out: false,
        })
    }

    fn left_out(&self, image: &str) -> Option<BTreeMap<String, String>> {
        Some(left_out(image))
    }

    fn digest(&self, image: &str) -> Option<ObjectId> {
        Some(Algorithm::Blake3.digest(image.as_bytes()))
    }

    /// One image is deprecated, and one is new.
    fn notes(&self, image: &str) -> Option<ImageNotes> {
        let deprecated = (image == "i4").then(|| "is deprecated".to_owned());
        let seconds = if image == "i3" { 300 } else { 0 };
        Some(ImageNotes { uploaded: Time { seconds, nanoseconds: 0 }, deprecated })
    }

    fn content(&self, _: &str, _: &str, _: ContentRevision) -> Option<Task> {
        None
    }

    fn newest_content(&self, _: &str) -> Option<ContentRevision> {
        None
    }

    fn analysis(&mut self, question: Question<'_>) -> Option<Analysis> {
        assert!(!question.hosts.is_empty());
        let advice = match self.now / 5 % 16 {
            0 => return None,
            1..4 => Advice::Wait,
            4 => Advice::RollBack,
            _ => Advice::Go,
        };
        Some(Analysis { advice, why: "so".to_owned() })
    }

    fn healthy_for_s(&mut self, rollout: u64, step: &str, healthy: bool) -> u64 {
        let key = (rollout, step.to_owned());
        if !healthy {
            self.healthy.remove(&key);
            return 0;
        }
        self.now - *self.healthy.entry(key).or_insert(self.now)
    }
}

/// `log` brings bundles to all tiers.
const ENVIRONMENTS: [&str; 4] = ["web", "db", "gate", "log"];

struct World {
    random: Random,
    mdb: SharedMachines,
    /// On the disk.
    saved: State,
    state: State,
    fleet: Fleet,
    log: Vec<String>,
}

impl World {
    fn new(seed: u64) -> Self {
        let machine = |number: usize| {
            let tier = ["web", "db", "gate", "none"][number % 4];
            let machine = Machine {
                hostname: format!("m{number:02}"),
                required_image: "i0".to_owned(),
                tags: [("tier".to_owned(), tier.to_owned())].into(),
                ..Machine::default()
            };
            (machine.hostname.clone(), Arc::new(machine))
        };
        let mdb: SharedMachines = (0..24).map(machine).collect();
        let host = |name: &String| {
            let (has, wants) = ("i0".to_owned(), "i0".to_owned());
            (name.clone(), Host { has, wants, state: Some(Task::Synced), is_cut: false })
        };
        let fleet = Fleet { hosts: mdb.keys().map(host).collect(), ..Fleet::default() };
        let (saved, state) = Default::default();
        Self { random: Random(seed), mdb, saved, state, fleet, log: Vec::new() }
    }

    fn editor(&self, who: &str) -> Editor {
        let seconds = i64::try_from(self.fleet.now).unwrap();
        Editor { who: who.to_owned(), why: "so".to_owned(), now: Time { seconds, nanoseconds: 0 } }
    }

    /// Somebody does something.
    fn disturb(&mut self) {
        let name = ENVIRONMENTS[self.random.below(4)];
        let ids: Vec<String> =
            self.state.rollouts.values().rev().map(|record| record.rollout.id.clone()).collect();
        let id = ids.first().cloned().unwrap_or_default();
        let what = self.random.below(13);
        let done = match what {
            0 | 1 => {
                let image = self.random.below(6);
                let source = match name {
                    "gate" => r#"{"mdb": true}"#.to_owned(),
                    "log" => format!(r#"{{"bundle": "l{image}"}}"#),
                    _ => format!(r#"{{"image": "i{image}"}}"#),
                };
                let voters = if self.random.one_in(2) { 1 } else { 0 };
                let soak = self.random.below(3) * 20;
                let percent = [0, 50, 80, 99][self.random.below(4)];
                let duration = self.random.below(2) * 60;
                let age = self.random.below(2) * 200;
                let analysis = ["null", "{}"][self.random.below(2)];
                let from = ["[]", r#"["i0", "i1", "i2", "l0", "l1"]"#][self.random.below(2)];
                let tiers = if name == "log" { "web\", \"db\", \"gate" } else { name };
                let text = format!(
                    r#"{{"name": "{name}", "source": {source},
                        "select": {{"tags": {{"tier": ["{tiers}"]}}}},
                        "strategy": {{"soak_s": {soak}, "min_healthy_percent": {percent},
                            "min_duration_s": {duration}, "min_image_age_s": {age},
                            "analysis": {analysis}, "requires_from": {from}}},
                        "approval": {{"voters": ["bob", "eve"], "min_approvals": {voters}}}}}"#
                );
                let edit: EnvironmentEdit = serde_json::from_str(&text).unwrap();
                let editor = self.editor("ann");
                self.state
                    .edit(
                        Edits { environments: vec![edit], ..Edits::default() },
                        &editor,
                        &self.mdb,
                    )
                    .map(|_| text)
            }
            2..=4 => {
                let newest = self.state.environments.get(name).map_or(0, |one| one.newest());
                let order = StartOrder {
                    environments: vec![format!("{name}@{newest}")],
                    urgent: self.random.one_in(8),
                    allow_deprecated: self.random.one_in(2),
                    ..StartOrder::default()
                };
                let editor = self.editor("ann");
                self.state.start(&order, &editor).map(|number| format!("start {name}: r{number}"))
            }
            5 => {
                let order = [RolloutOrder::Stop, RolloutOrder::RollBack, RolloutOrder::Resolve]
                    [self.random.below(3)];
                let editor = self.editor("ann");
                self.state.order(&id, order, &editor)
            }
            6..=8 => {
                let step = self.state.find(&id).ok().and_then(|record| {
                    let waits =
                        |one: &&rollouts::document::Step| one.state == StepState::AwaitingApproval;
                    record.rollout.steps.iter().find(waits).cloned()
                });
                let Some(step) = step else { return };
                let vote = VoteEvent {
                    step: step.id,
                    voter: ["bob", "eve", "mallory"][self.random.below(3)].to_owned(),
                    vote: if self.random.one_in(8) { Choice::Reject } else { Choice::Approve },
                    digest: if self.random.one_in(8) {
                        "x".to_owned()
                    } else {
                        step.digest.unwrap_or_default()
                    },
                    link_valid: true,
                };
                self.state.vote(&id, vote)
            }
            9 => {
                // An edit of the machine database: an image, or a machine that joins a tier.
                let names: Vec<String> = self.mdb.keys().cloned().collect();
                let host = &names[self.random.below(names.len())];
                let mut machine = Machine::clone(&self.mdb[host]);
                if self.random.one_in(2) {
                    machine.required_image = format!("i{}", self.random.below(6));
                } else {
                    let tier = ["web", "db", "gate", "none"][self.random.below(4)];
                    machine.tags.insert("tier".to_owned(), tier.to_owned());
                }
                self.mdb.insert(host.clone(), Arc::new(machine));
                return;
            }
            10 => {
                let name = if self.random.one_in(3) { ALL } else { name };
                let editor = self.editor("ann");
                if self.random.one_in(3) {
                    self.state.unfreeze(name, &editor)
                } else {
                    let seconds = editor.now.seconds + 100;
                    self.state.freeze(name, Some(Time { seconds, nanoseconds: 0 }), &editor)
                }
            }
            11 => {
                let names: Vec<String> = self.mdb.keys().cloned().collect();
                let host = &names[self.random.below(names.len())];
                let host = self.fleet.hosts.get_mut(host).unwrap();
                host.is_cut = !host.is_cut;
                return;
            }
            _ => {
                // The dominator is killed: what is not saved is lost.
                self.state = self.saved.clone();
                self.fleet.healthy.clear();
                return;
            }
        };
        match done {
            Ok(what) => self.log.push(what),
            // A refused order changes nothing.
            Err(_) => assert_eq!(self.state, self.saved),
        }
        self.saved = self.state.clone();
    }

    /// The dominator looks, saves, and gives machines their records.
    fn tick(&mut self) -> Result<(), TestCaseError> {
        let before = self.state.clone();
        let editor = self.editor("");
        self.state.note_members(&self.mdb, editor.now);
        self.state.take_mdb(&self.mdb, editor.now);
        let advanced = advance(&mut self.state, &self.mdb, &mut self.fleet, editor.now);
        for (number, batches) in &advanced.batches {
            self.log.push(format!("r{number}: {batches:?}"));
        }
        self.check(&before)?;
        // It may be killed before or after the save; machines hear of it afterwards only.
        if self.random.one_in(40) {
            self.state = before;
            return Ok(());
        }
        self.saved = self.state.clone();
        for (name, machine) in effective(&self.state, &self.mdb).records {
            let host = self.fleet.hosts.get_mut(&name).unwrap();
            if host.wants != machine.required_image && !host.is_cut {
                host.wants.clone_from(&machine.required_image);
                host.state = Some(Task::Starting);
            }
        }
        Ok(())
    }

    /// Machines go on.
    fn work(&mut self) {
        self.fleet.now += 5;
        for host in self.fleet.hosts.values_mut().filter(|host| !host.is_cut) {
            if host.has == host.wants {
                host.state = Some(Task::Synced);
            } else if self.random.one_in(2) {
                // The last image is bad, and the last bundle.
                let is_bad = host.wants.contains('5') && self.random.one_in(2);
                host.state = Some(if is_bad { Task::Failed } else { Task::Synced });
                if !is_bad {
                    host.has.clone_from(&host.wants);
                }
            }
        }
    }

    /// How many machines of an environment are healthy, and how many it has with `revision`.
    fn healthy(&self, before: &State, environment: &str, revision: Revision) -> (usize, usize) {
        let now = &self.state.environments[environment];
        let new = now.revisions.get(&revision);
        let is_member = |machine: &&Arc<Machine>| {
            let former = before.environments.get(environment);
            former.is_some_and(|former| former.revision_on(machine).is_some())
                || new.is_some_and(|new| new.definition.select.selects(machine))
        };
        let members = self.mdb.values().filter(is_member);
        let hosts: Vec<&Host> = members.map(|one| &self.fleet.hosts[&one.hostname]).collect();
        (hosts.iter().filter(|host| host.is_healthy(environment)).count(), hosts.len())
    }

    /// True if an environment has given a machine another revision.
    fn is_moved(&self, before: &State, environment: &str, host: &str) -> bool {
        let now = &self.state.environments[environment];
        let former = before.environments.get(environment);
        former.is_some_and(|former| former.number_on(host) != now.number_on(host))
    }

    /// Returns the rollouts that change machines.
    fn gated(&self) -> impl Iterator<Item = &Arc<RolloutRecord>> {
        self.state.rollouts.values().filter(|record| record.rollout.kind.is_gated())
    }

    /// Returns the number of the rollout that is on the machines of an environment.
    fn mover(&self, environment: &str) -> Option<u64> {
        let mut records = self.gated().filter(|record| {
            let mut steps = record.rollout.steps.iter();
            steps.any(|step| step.environment == environment && step.state.is_on_machines())
        });
        records.next().map(|record| record.number)
    }

    fn check(&self, before: &State) -> Result<(), TestCaseError> {
        for (name, environment) in &self.state.environments {
            let former = before.environments.get(name);
            let moved: BTreeMap<&String, Revision> =
                environment.moved.iter().map(|(host, revision)| (host, *revision)).collect();
            let is_new = |host: &&&String| {
                former.is_none_or(|former| former.number_on(host) != environment.number_on(host))
            };
            let taken: Vec<&&String> = moved.keys().filter(is_new).collect();
            // Only a step that votes have allowed moves machines.
            let steps = self.gated().flat_map(|record| &record.rollout.steps);
            let of_it: Vec<_> = steps.filter(|step| step.environment == *name).collect();
            for host in &taken {
                let revision = environment.number_on(host);
                let allowed = of_it.iter().any(|step| {
                    step.revision == Some(revision) && (step.applied || step.state.is_on_machines())
                });
                prop_assert!(allowed, "{name}: {host} has got {revision}: {of_it:?}");
                let is_held = |record: &Arc<RolloutRecord>| {
                    let mut steps = record.rollout.steps.iter();
                    !record.rollout.urgent
                        && steps.any(|step| {
                            step.environment == *name
                                && step.revision == Some(revision)
                                && step.direction == Direction::Forward
                                && step.state.is_on_machines()
                        })
                };
                let is_frozen = before.opening(name, self.editor("").now).is_err();
                let held = self.gated().any(is_held);
                prop_assert!(!(is_frozen && held), "{name}: {host} has changed in a freeze");
            }
            // Another committed revision is one that a step has brought.
            if let Some(former) = former.filter(|former| former.committed != environment.committed)
            {
                let done: BTreeSet<Option<Revision>> = of_it
                    .iter()
                    .filter(|step| step.state.is_done())
                    .map(|step| step.revision)
                    .collect();
                let committed = environment.committed;
                let what = format!("{name}: {} to {committed}", former.committed);
                prop_assert!(done.contains(&Some(committed)), "{what}");
            }
            // As many stay healthy as the definition asks for.
            let image = |state: &State, host: &str| Gate::new(state).image_of(&self.mdb[host]);
            // Where a bundle and an image come at once, the earlier rollout has taken the machine.
            let is_first = |host: &str| {
                let others = self.state.environments.keys().filter(|other| *other != name);
                let mut others = others.filter(|other| self.is_moved(before, other, host));
                others.all(|other| self.mover(name) < self.mover(other))
            };
            let serving = taken.iter().filter(|hostname| {
                let given = |state: &State| given_by(name, image(state, hostname));
                if given(before) == given(&self.state) || !is_first(hostname) {
                    return false;
                }
                let host = &self.fleet.hosts[hostname.as_str()];
                host.is_healthy(name) && host.wants == image(before, hostname)
            });
            // A step back has the strategy of the revision that it takes back.
            let strategies = self.gated().filter(|record| {
                let mut steps = record.rollout.steps.iter();
                steps.any(|step| step.environment == *name && step.state.is_on_machines())
            });
            let strategies = strategies.filter_map(|record| {
                let mut steps = record.rollout.steps.iter();
                steps.find(|step| step.environment == *name)
            });
            for step in strategies {
                let revision = environment.revisions.get(&step.revision.unwrap_or_default());
                let Some(revision) = revision else { continue };
                let number = step.revision.unwrap_or_default();
                let (healthy, all) = self.healthy(before, name, number);
                let percent = usize::from(revision.definition.strategy.min_healthy_percent);
                let floor = (all * percent).div_ceil(100);
                let serving = serving.clone().count();
                prop_assert!(
                    serving <= 1 || healthy.saturating_sub(serving) + 1 >= floor,
                    "{name}: {serving} of {healthy} healthy are taken, {floor} of {all} must stay"
                );
            }
        }
        // What follows by itself is of active environments, and says which machines it waits for.
        for record in self.state.unfinished().filter(|one| !one.rollout.kind.is_gated()) {
            let environment = &self.state.environments[&record.rollout.steps[0].environment];
            prop_assert!(environment.active && !record.waiting.is_empty(), "{record:?}");
            prop_assert!(record.waiting.iter().all(|host| self.mdb.contains_key(host)));
        }
        // Machines in no environment have what the machine database says.
        for (name, machine) in effective(&self.state, &self.mdb).records {
            if Gate::new(&self.state).gated(&self.mdb[&name]).is_none() {
                prop_assert_eq!(&machine.required_image, &self.mdb[&name].required_image);
            }
        }
        Ok(())
    }

    /// Everybody leaves it alone, votes for all, and mends machines: all rollouts end.
    fn settle(&mut self) -> Result<(), TestCaseError> {
        for host in self.fleet.hosts.values_mut() {
            host.is_cut = false;
        }
        for round in 0..2_000 {
            let open: Vec<_> = self.state.unfinished().cloned().collect();
            if open.is_empty() {
                break;
            }
            prop_assert!(round < 1_999, "no end: {:?}", open);
            // As many cannot have a bundle as may be ill: the rest waits until somebody stops it.
            let cannot = |host: &Host| !left_out(&host.wants).is_empty();
            let is_stuck = round > 1_000 && self.fleet.hosts.values().any(cannot);
            for record in open {
                let id = record.rollout.id.clone();
                for step in &record.rollout.steps {
                    if step.state == StepState::AwaitingApproval {
                        let (step, voter) = (step.clone(), "bob".to_owned());
                        let digest = step.digest.unwrap_or_default();
                        let (vote, link_valid) = (Choice::Approve, true);
                        let step = step.id;
                        let _refused = self
                            .state
                            .vote(&id, VoteEvent { step, voter, vote, digest, link_valid });
                    }
                }
                let is_stuck = is_stuck && record.rollout.environments().contains("log");
                let order = if is_stuck { RolloutOrder::Stop } else { RolloutOrder::Resolve };
                let editor = self.editor("ann");
                let _other_state = self.state.order(&id, order, &editor);
            }
            self.saved = self.state.clone();
            self.tick()?;
            self.work();
        }
        // Machines of one environment differ only after a stop.
        for (name, environment) in &self.state.environments {
            let was_stopped = self.gated().any(|record| {
                record.rollout.state == RolloutState::Stopped
                    && record.rollout.environments().contains(name)
            });
            let is_mixed = environment.moved.values().any(|moved| *moved != environment.committed);
            prop_assert!(was_stopped || !is_mixed, "{name} is mixed: {environment:?}");
        }
        Ok(())
    }
}

/// Returns what an environment gives of an image: the bundles, or the rest.
fn given_by(environment: &str, image: String) -> String {
    let (base, bundles) = image.split_once(" + ").unwrap_or((&image, ""));
    if environment == "log" { bundles } else { base }.to_owned()
}

fn live(seed: u64) -> Result<(), TestCaseError> {
    let mut world = World::new(seed);
    for _ in 0..150 {
        if world.random.one_in(4) {
            world.disturb();
        }
        world.tick()?;
        world.work();
    }
    world.settle()
}

#[test]
fn fleets_live_with_environments_for_a_long_time() {
    let number = |name| std::env::var(name).ok().and_then(|text| text.parse().ok());
    let first = number("ROLLOUT_FIRST_SEED").unwrap_or(0);
    for seed in first..first + number("ROLLOUT_SEEDS").unwrap_or(1_000) {
        if let Err(error) = live(seed) {
            panic!("seed {seed}: {error}");
        }
    }
}
