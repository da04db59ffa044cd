//! Rollouts of whole fleets, with machines that fail, are cut off and come back.

use std::collections::BTreeSet;

use proptest::prelude::*;
use rollouts::document::{
    Document, Environment, Machine, MachineTask, MachineTaskState, Rollout, RolloutState, Step,
    StepState,
};
use rollouts::strategy::Strategy;
use rollouts::{Answer, decide};

/// A fleet: environments that depend on earlier ones, and how many machines each has.
#[derive(Clone, Debug)]
struct Fleet {
    environments: Vec<(usize, u8, Option<usize>, Vec<prop::sample::Index>)>,
    /// Which starts of tasks fail, of a hundred.
    failures: u8,
    seed: u64,
}

fn fleets() -> impl Strategy_<Value = Fleet> {
    let needs = prop::collection::vec(any::<prop::sample::Index>(), 0..3);
    let environment = (0..12_usize, 0..=99_u8, prop::option::of(0..4_usize), needs);
    let environments = prop::collection::vec(environment, 1..6);
    (environments, prop::sample::select(vec![0, 5, 60]), any::<u64>())
        .prop_map(|(environments, failures, seed)| Fleet { environments, failures, seed })
}

use proptest::strategy::Strategy as Strategy_;

/// Numbers that look random, of a seed.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit.max(1)
    }
}

fn document(fleet: &Fleet) -> Document {
    let mut document = Document::default();
    for (index, (machines, percent, canary, needs)) in fleet.environments.iter().enumerate() {
        let name = format!("e{index}");
        let needs = needs.iter().filter(|_| index > 0);
        let strategy =
            Strategy { min_healthy_percent: *percent, canary: *canary, ..Strategy::default() };
        document.environments.push(Environment {
            name: name.clone(),
            desired: 2,
            committed: Some(1),
            active: true,
            depends_on: needs.map(|need| format!("e{}", need.index(index))).collect(),
            strategy,
            ..Environment::default()
        });
        document.machines.extend((0..*machines).map(|machine| Machine {
            host: format!("{name}-{machine}"),
            reachable: true,
            environments: [name.clone()].into(),
            tasks: vec![MachineTask {
                environment: name.clone(),
                revision: 1,
                state: MachineTaskState::Running,
            }],
        }));
    }
    let steps = document.environments.iter().map(|environment| Step {
        id: environment.name.clone(),
        environment: environment.name.clone(),
        revision: Some(2),
        from: Some(1),
        ..Step::default()
    });
    document.rollout = Some(Rollout {
        id: "r1".to_owned(),
        state: RolloutState::Running,
        steps: steps.collect(),
        ..Rollout::default()
    });
    document
}

/// Does what the answer says, and lets the machines go on.
fn act(document: &mut Document, answer: &Answer, fleet: &Fleet, random: &mut Random) {
    for machine in document.machines.iter_mut().filter(|machine| machine.reachable) {
        for task in &mut machine.tasks {
            task.state = match task.state {
                MachineTaskState::Stopping => MachineTaskState::Stopped,
                MachineTaskState::Starting if task.revision == 1 => MachineTaskState::Running,
                MachineTaskState::Starting => match random.below(100) {
                    chance if chance < fleet.failures.into() => MachineTaskState::Failed,
                    _ => MachineTaskState::Running,
                },
                state => state,
            };
        }
        let Some(actions) = answer.tasks.iter().find(|actions| actions.host == machine.host) else {
            continue;
        };
        for stop in &actions.stop {
            let stopped = machine.tasks.iter_mut().find(|task| task.revision == stop.revision);
            stopped.unwrap().state = MachineTaskState::Stopping;
        }
        for start in &actions.start {
            assert!(machine.tasks.iter().all(|task| !task.state.is_present()), "{machine:?}");
            machine.tasks = vec![MachineTask {
                environment: start.environment.clone(),
                revision: start.revision,
                state: MachineTaskState::Starting,
            }];
        }
    }
    let mut rollout = answer.rollout.clone().unwrap();
    for step in &mut rollout.steps {
        if step.state == StepState::Planning {
            step.digest = Some("d".to_owned());
        }
        step.soaked = step.state == StepState::Soaking;
    }
    document.rollout = Some(rollout);
    document.pending.clone_from(&answer.pending);
}

/// The healthy machines of an environment that a step stops stay above what it asks for.
fn check(document: &Document, answer: &Answer) {
    for batch in &answer.batches {
        let step = answer.rollout.as_ref().unwrap().steps.iter().find(|step| step.id == batch.step);
        let environment = document.environment(&step.unwrap().environment).unwrap();
        let of_it =
            || document.machines.iter().filter(|one| one.environments.contains(&environment.name));
        let serves = |machine: &&Machine| {
            machine.reachable && machine.tasks.iter().any(|task| task.state.is_healthy())
        };
        let stopped = of_it().filter(serves).filter(|machine| {
            let actions = answer.tasks.iter().find(|actions| actions.host == machine.host);
            actions.is_some_and(|actions| !actions.stop.is_empty())
        });
        let (stopped, healthy) = (stopped.count(), of_it().filter(serves).count());
        let percent = usize::from(environment.strategy.min_healthy_percent);
        let floor = (of_it().count() * percent).div_ceil(100);
        let rounds_to_none = floor == of_it().count() && stopped <= 1;
        assert!(stopped == 0 || healthy - stopped >= floor || rounds_to_none, "{batch:?}");
    }
}

/// Returns machines that cannot be reached while a step ends: what is committed comes to them
/// later.
fn left_out_now(document: &Document, answer: &Answer) -> Vec<String> {
    let before = document.rollout.iter().flat_map(|rollout| &rollout.steps);
    let open: BTreeSet<&String> =
        before.filter(|step| !step.state.is_finished()).map(|step| &step.id).collect();
    let steps = answer.rollout.iter().flat_map(|rollout| &rollout.steps);
    let ended: BTreeSet<&String> = steps
        .filter(|step| step.state.is_finished() && open.contains(&step.id))
        .map(|step| &step.environment)
        .collect();
    let is_left_out = |machine: &&Machine| {
        !machine.reachable && machine.environments.iter().any(|name| ended.contains(name))
    };
    document.machines.iter().filter(is_left_out).map(|machine| machine.host.clone()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn a_rollout_ends_and_keeps_machines_healthy(fleet in fleets()) {
        let mut document = document(&fleet);
        let mut random = Random(fleet.seed);
        let mut left_out = BTreeSet::new();
        for _ in 0..400 {
            let answer = decide(&document);
            left_out.extend(left_out_now(&document, &answer));
            check(&document, &answer);
            let again = decide(&Document {
                rollout: answer.rollout.clone(),
                pending: answer.pending.clone(),
                event: None,
                ..document.clone()
            });
            prop_assert_eq!((&again.rollout, &again.tasks), (&answer.rollout, &answer.tasks));
            let rollout = answer.rollout.as_ref().unwrap();
            for step in rollout.steps.iter().filter(|step| step.applied) {
                let details = answer.steps.iter().find(|details| details.id == step.id).unwrap();
                for before in &details.depends_on {
                    let before = rollout.steps.iter().find(|one| one.id == *before).unwrap();
                    prop_assert!(before.state.is_finished(), "{} before {}", step.id, before.id);
                }
            }
            if matches!(rollout.state, RolloutState::Succeeded | RolloutState::RolledBack) {
                let revision = if rollout.state == RolloutState::Succeeded { 2 } else { 1 };
                let failed = |machine: &&Machine| {
                    machine.reachable
                        && !left_out.contains(&machine.host)
                        && machine.tasks.iter().any(|task| task.revision != revision)
                };
                let odd: Vec<&Machine> = document.machines.iter().filter(failed).collect();
                prop_assert!(odd.is_empty(), "{odd:?}");
                return Ok(());
            }
            act(&mut document, &answer, &fleet, &mut random);
            if random.below(20) == 0 && !document.machines.is_empty() {
                let index = random.below(document.machines.len() as u64) as usize;
                document.machines[index].reachable ^= true;
            } else {
                document.machines.iter_mut().for_each(|machine| machine.reachable = true);
            }
        }
        prop_assert!(false, "no end: {:?}", document.rollout);
    }
}
