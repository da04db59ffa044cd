//! What holds of all resources and all answers.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use provisioning::{Call, Next, Resources, State, plan};
use serde_json::{Value, json};

use crate::{answer, bindings, resources};

const KINDS: [&str; 3] = ["database", "queue", "module"];

/// Resources without cycles: each may need those before it.
fn set() -> impl Strategy<Value = Resources> {
    let one = (any::<[bool; 6]>(), 0..3_u8, any::<bool>(), any::<bool>());
    proptest::collection::vec(one, 6).prop_map(|all| {
        let mut texts: Vec<(String, Value)> = Vec::new();
        let mut there: Vec<usize> = Vec::new();
        for (index, (needs, spec, destroy, is_there)) in all.into_iter().enumerate() {
            if !is_there {
                continue;
            }
            let needs = there.iter().filter(|before| needs[**before]);
            let needs: Vec<String> = needs.map(|before| format!("r{before}")).collect();
            let on_removal = if destroy { "destroy" } else { "keep" };
            let fields = json!({"needs": needs, "spec": {"n": spec}, "on_removal": on_removal});
            texts.push((format!("{}.r{index}", KINDS[index % 3]), fields));
            there.push(index);
        }
        let texts: Vec<(&str, Value)> =
            texts.iter().map(|(name, fields)| (name.as_str(), fields.clone())).collect();
        resources(&texts)
    })
}

/// What a plugin does: 0-3 success, 4 a token, 5 failure, 6 an unknown token.
type Answers = Vec<u8>;

/// A world that knows what plugins have made.
#[derive(Default)]
struct World {
    /// What is there: the key of each resource.
    made: BTreeMap<String, String>,
    tokens: u32,
}

impl World {
    /// Carries a call out, and checks that it may be made.
    fn ask(&mut self, call: &Call, all: &Resources, how: u8) -> Value {
        let request = call.request();
        let removed = match call {
            Call::Provision(call) if call.destroys() => call.ids(),
            _ => BTreeSet::new(),
        };
        if let Call::Provision(_) = call {
            for want in &request.desired {
                for need in &want.resource.needs {
                    assert!(self.made.contains_key(need), "{need} is needed and not there");
                    assert!(want.inputs.contains_key(need));
                }
            }
            for id in &removed {
                let needed = all.iter().any(|one| one.needs.contains(id));
                assert!(!needed, "{id} is needed");
            }
        }
        let token = || match &request.token {
            Some(token) => token.clone(),
            None => format!("t{}", self.tokens),
        };
        let task = match (how, call) {
            (4, _) => json!({"running": {"token": token()}}),
            (5, _) => json!({"failed": {"error": "no"}}),
            (6, Call::Status(_)) => json!({"unknown": {}}),
            _ => {
                for want in &request.desired {
                    self.made.insert(want.resource.id.clone(), want.key.clone());
                }
                if request.desired.is_empty() {
                    for id in call.ids() {
                        self.made.remove(&id);
                    }
                }
                json!({"success": {}})
            }
        };
        self.tokens += 1;
        json!({"tasks": [task]})
    }

    /// Provisions with answers until these are used up, and then with success. The state is
    /// written and read again after each call, as after a crash.
    fn provision(&mut self, all: &Resources, state: &mut State, answers: &mut Answers) -> usize {
        let mut calls_made = 0;
        state.retry();
        loop {
            let now = plan(all, &bindings(), state);
            assert_eq!(now, plan(all, &bindings(), state));
            match now.next(state) {
                Next::Finished => return calls_made,
                Next::Refused | Next::Awaits => panic!("{now:?}"),
                Next::Failed => state.retry(),
                Next::Calls(calls) => {
                    for call in calls {
                        calls_made += 1;
                        assert!(calls_made < 1_000);
                        let how = answers.pop().unwrap_or_default();
                        state.begin(&call);
                        *state = State::parse(&serde_json::to_string(state).unwrap()).unwrap();
                        let said = self.ask(&call, all, how);
                        // Sometimes the answer is lost.
                        if how != 3 {
                            state.end(&call, Ok(answer(&said)));
                        }
                        *state = State::parse(&serde_json::to_string(state).unwrap()).unwrap();
                    }
                }
            }
        }
    }
}

proptest! {
    #[test]
    fn all_is_there_in_the_end_and_asked_for_once(
        sets in proptest::collection::vec(set(), 1..4),
        answers in proptest::collection::vec(0..7_u8, 0..12),
    ) {
        let (mut world, mut state, mut answers) = (World::default(), State::new("web1"), answers);
        for all in &sets {
            world.provision(all, &mut state, &mut answers);
            state.settle(all);
            for one in all.iter() {
                prop_assert_eq!(world.made.get(&one.id), Some(&one.key("web1")));
            }
            // What is there is known, and the other way round.
            let known: Vec<&String> = world.made.keys().collect();
            prop_assert!(known.iter().all(|id| state.knows(id)));
            let finished = plan(all, &bindings(), &state);
            prop_assert_eq!(finished.next(&state), Next::Finished);
            prop_assert!(finished.calls.is_empty() && state.running().is_empty());
            let orphans: BTreeSet<&String> = finished.orphans.iter().map(|one| &one.id).collect();
            let mut extra = world.made.keys().filter(|id| all.get(id).is_none());
            prop_assert!(extra.all(|id| orphans.contains(id)));
            prop_assert_eq!(world.provision(all, &mut state, &mut Answers::new()), 0);
        }
    }

    #[test]
    fn removal_is_the_reverse_of_creation(all in set()) {
        let (mut world, mut state) = (World::default(), State::new("web1"));
        world.provision(&all, &mut state, &mut Answers::new());
        let none = resources(&[]);
        let kept: BTreeSet<String> =
            plan(&none, &bindings(), &state).orphans.iter().map(|one| one.id.clone()).collect();
        let mut there: BTreeSet<String> = world.made.keys().cloned().collect();
        for call in plan(&none, &bindings(), &state).calls {
            for id in call.ids() {
                let needed = |other: &String| {
                    !call.ids().contains(other) && all.get(other).unwrap().needs.contains(&id)
                };
                prop_assert!(!there.iter().any(needed), "{} is still needed", id);
            }
            there.retain(|id| !call.ids().contains(id));
        }
        prop_assert_eq!(there, kept);
    }

    #[test]
    fn waves_respect_needs(all in set()) {
        let waves = plan(&all, &bindings(), &State::new("web1")).waves;
        let wave = |id: &str| {
            waves.iter().position(|wave| wave.iter().any(|one| one == id)).unwrap()
        };
        prop_assert_eq!(waves.iter().flatten().count(), all.iter().count());
        for one in all.iter() {
            let after = one.needs.iter().map(|need| wave(need) + 1).max().unwrap_or(0);
            prop_assert_eq!(wave(&one.id), after);
        }
    }
}
