//! Rollouts that follow by themselves from what machines are.

use std::collections::{BTreeMap, BTreeSet};

use model::object::{Algorithm, ObjectId};
use rollouts::advance::advance;
use rollouts::content::ContentRevision;
use rollouts::document::{Analysis, Kind, MachineTaskState, name_of};
use rollouts::gate::effective;
use rollouts::state::{ENDED_MAX, RolloutOrder, SharedMachines, State};
use rollouts::view::{ImageNotes, Question, Seen, View};
use serde_json::json;

use crate::environments::{at, bundle, edit, environment, mdb, said, start};

/// How machines are; those that are not named are healthy with what they must have.
struct Watched<'a> {
    images: BTreeMap<String, String>,
    states: &'a [(&'a str, &'a str)],
    /// The parts that are unhealthy on those that are.
    ill: &'a [&'a str],
}

impl View for Watched<'_> {
    fn machine(&self, hostname: &str) -> Option<Seen> {
        let state = self.states.iter().find(|(host, _)| *host == hostname).map(|(_, state)| *state);
        let is = |text| state == Some(text);
        Some(Seen {
            image: self.images.get(hostname)?.clone(),
            left_out: BTreeSet::new(),
            state: match state {
                Some("failed") => MachineTaskState::Failed,
                Some("unhealthy") => MachineTaskState::Unhealthy,
                Some("starting") => MachineTaskState::Starting,
                Some("stopped") => MachineTaskState::Stopped,
                _ => MachineTaskState::Synced,
            },
            ill: self.ill.iter().map(|part| (*part).to_owned()).collect(),
            reachable: !is("away"),
            unknown: is("unknown"),
            held_out: is("held out"),
        })
    }

    fn left_out(&self, _: &str) -> Option<BTreeMap<String, String>> {
        Some(BTreeMap::new())
    }

    fn digest(&self, image: &str) -> Option<ObjectId> {
        Some(Algorithm::Blake3.digest(image.as_bytes()))
    }

    fn notes(&self, _: &str) -> Option<ImageNotes> {
        Some(ImageNotes { uploaded: at(0).now, deprecated: None })
    }

    fn content(&self, _: &str, _: &str, _: ContentRevision) -> Option<MachineTaskState> {
        None
    }

    fn newest_content(&self, _: &str) -> Option<ContentRevision> {
        None
    }

    fn analysis(&mut self, _: Question<'_>) -> Option<Analysis> {
        None
    }

    fn healthy_for_s(&mut self, _: u64, _: &str, healthy: bool) -> u64 {
        u64::from(healthy) * 1_000
    }
}

/// Takes rollouts as far as they go with machines in these states, and returns all that follow by
/// themselves: `ID KIND STATE: WHAT`.
fn go_on(state: &mut State, mdb: &SharedMachines, states: &[(&str, &str)]) -> Vec<String> {
    go_on_with(state, mdb, states, &[])
}

fn go_on_with(
    state: &mut State,
    mdb: &SharedMachines,
    states: &[(&str, &str)],
    ill: &[&str],
) -> Vec<String> {
    state.note_members(mdb, at(0).now);
    for _ in 0..20 {
        let images = effective(state, mdb).records;
        let images = images.iter().map(|(host, one)| (host.clone(), one.required_image.clone()));
        advance(state, mdb, &mut Watched { images: images.collect(), states, ill }, at(0).now);
    }
    let automatic = state.rollouts.values().filter(|record| !record.rollout.kind.is_gated());
    let text = |record: &rollouts::state::RolloutRecord| {
        let (rollout, step) = (&record.rollout, &record.rollout.steps[0]);
        let (kind, state) = (name_of(&rollout.kind), name_of(&rollout.state));
        let cause = if rollout.cause.is_empty() { &step.cause } else { &rollout.cause };
        format!("{} {kind} {state}: {cause}", rollout.id)
    };
    automatic.map(|record| text(record)).collect()
}

/// The environment `web`, whose revision with image `b` these machines have.
fn web(mdb: &SharedMachines) -> State {
    let mut state = State::default();
    let mut web = environment("web", "b");
    web["strategy"] = json!({"min_healthy_percent": 50});
    edit(&mut state, mdb, web).unwrap();
    start(&mut state, "web@1", Kind::User).unwrap();
    assert_eq!(go_on(&mut state, mdb, &[]), [""; 0], "a rollout has brought all machines");
    assert_eq!(state.environments["web"].committed, 1);
    state
}

#[test]
fn machines_that_begin_to_match_are_a_rollout() {
    let mut state = web(&mdb("web1 a, db1 a"));
    let two = mdb("web1 a, web2 a, db1 a");
    let shown = go_on(&mut state, &two, &[("web2", "starting")]);
    assert_eq!(shown, ["r2 new_host running: 0 of 1 machine done; waits for web2"]);
    let three = mdb("web1 a, web2 a, web3 a");
    let shown = go_on(&mut state, &three, &[("web2", "away"), ("web3", "failed")]);
    assert_eq!(shown, ["r2 new_host running: 0 of 2 machines done; waits for web2, web3"]);
    let shown = go_on(&mut state, &three, &[("web3", "failed")]);
    assert_eq!(shown, ["r2 new_host running: 1 of 2 machines done; waits for web3"]);
    // One that has gone is not waited for.
    let ended = "r2 new_host succeeded: 2 of 2 machines done";
    assert_eq!(go_on(&mut state, &two, &[]), [ended]);
    // Those that come back are new. A rollout that somebody starts brings others.
    let shown = go_on(&mut state, &three, &[("web3", "starting")]);
    let third = "r3 new_host running: 0 of 1 machine done; waits for web3";
    assert_eq!(shown, [ended, third]);
    let all = json!({"name": "web", "select": {"hosts": ["*"]}, "source": {"image": "b"}});
    edit(&mut state, &three, all).unwrap();
    start(&mut state, "web@2", Kind::User).unwrap();
    let more = mdb("web1 a, web2 a, web3 a, db1 a");
    let third = "r3 new_host succeeded: 1 of 1 machine done";
    assert_eq!(go_on(&mut state, &more, &[]), [ended, third]);
    assert_eq!(state.environments["web"].committed, 2);
}

#[test]
fn nothing_follows_by_itself_while_an_environment_is_not_active() {
    let mut state = web(&mdb("web1 a"));
    state.set_active("web", false).unwrap();
    state.note_members(&mdb("web1 a"), at(0).now);
    let two = mdb("web1 a, web2 a");
    assert_eq!(go_on(&mut state, &two, &[("web1", "failed")]), [""; 0]);
    assert_eq!(effective(&state, &two).records["web2"].required_image, "a");
    state.set_active("web", true).unwrap();
    let shown = go_on(&mut state, &two, &[("web1", "failed"), ("web2", "starting")]);
    let open = [
        "r2 new_host running: 0 of 1 machine done; waits for web2",
        "r3 health_repair running: 0 of 1 machine done; waits for web1",
    ];
    assert_eq!(shown, open);
    let message = "r2 follows by itself from what machines are: mend them, or make its environment \
                   not active";
    let stopped = state.order("r2", RolloutOrder::Stop, &at(0));
    assert_eq!(stopped, said(409, message));
    state.set_active("web", false).unwrap();
    let ended = [
        "r2 new_host stopped: web is not active any more",
        "r3 health_repair stopped: web is not active any more",
    ];
    assert_eq!(go_on(&mut state, &two, &[]), ended);
}

#[test]
fn machines_that_are_dead_are_a_rollout_until_they_are_healthy() {
    let mdb = mdb("web1 a, web2 a, web3 a, web4 a, db1 a");
    let mut state = web(&mdb);
    let nothing = [("web1", "away"), ("web2", "held out"), ("web3", "starting"), ("db1", "failed")];
    assert_eq!(go_on(&mut state, &mdb, &nothing), [""; 0]);
    assert_eq!(go_on(&mut state, &mdb, &[("web4", "unknown")]), [""; 0]);
    let shown = go_on(&mut state, &mdb, &[("web1", "failed"), ("web2", "unhealthy")]);
    let first = "r2 health_repair running: 0 of 2 machines done; waits for web1, web2";
    assert_eq!(shown, [first]);
    let shown = go_on(&mut state, &mdb, &[("web1", "starting"), ("web2", "held out")]);
    assert_eq!(shown, ["r2 health_repair running: 1 of 2 machines done; waits for web1"]);
    let ended = "r2 health_repair succeeded: 2 of 2 machines done";
    assert_eq!(go_on(&mut state, &mdb, &[]), [ended]);
    // Those that a rollout could not reach follow later, and those that fail by it are its own.
    let mut next = environment("web", "c");
    next["strategy"] = json!({"min_healthy_percent": 50});
    edit(&mut state, &mdb, next).unwrap();
    start(&mut state, "web@2", Kind::User).unwrap();
    let shown = go_on(&mut state, &mdb, &[("web4", "away")]);
    let left_out = "r4 health_repair running: 0 of 1 machine done; waits for web4";
    assert_eq!(shown, [ended, left_out]);
    assert_eq!(effective(&state, &mdb).records["web4"].required_image, "c");
    let ended = [ended, "r4 health_repair succeeded: 1 of 1 machine done"];
    assert_eq!(go_on(&mut state, &mdb, &[]), ended);
    let mut waits = environment("web", "d");
    waits["strategy"] = json!({"min_healthy_percent": 50, "canary": 1});
    edit(&mut state, &mdb, waits).unwrap();
    start(&mut state, "web@3", Kind::User).unwrap();
    let states = [("web1", "starting"), ("web3", "unhealthy")];
    assert_eq!(go_on(&mut state, &mdb, &states), ended, "a rollout is on the machines");
}

#[test]
fn a_deleted_environment_ends_what_nobody_has_started() {
    let mdb = mdb("web1 b");
    let mut state = web(&mdb);
    go_on(&mut state, &mdb, &[("web1", "failed")]);
    edit(&mut state, &mdb, environment("web", "c")).unwrap();
    start(&mut state, "web@2", Kind::User).unwrap();
    let refused = state.delete("web", true, &mdb, at(0).now);
    assert_eq!(refused, said(409, "r3 is of web: stop it first"));
    state.order("r3", RolloutOrder::Cancel, &at(0)).unwrap();
    state.delete("web", true, &mdb, at(0).now).unwrap();
    let ended = "r2 health_repair stopped: web is deleted";
    assert_eq!(go_on(&mut state, &mdb, &[("web1", "failed")]), [ended]);
}

#[test]
fn what_follows_by_itself_takes_no_place_of_others() {
    let mdb = mdb("web1 a");
    let mut state = web(&mdb);
    for _ in 0..ENDED_MAX + 10 {
        go_on(&mut state, &mdb, &[("web1", "failed")]);
        go_on(&mut state, &mdb, &[]);
    }
    assert_eq!(state.rollouts.len(), ENDED_MAX + 1);
    assert!(state.rollouts.contains_key(&1), "somebody has started it");
}

#[test]
fn a_dead_machine_is_of_the_environment_of_what_is_unhealthy() {
    let mdb = mdb("web1 a, web2 a");
    let mut state = web(&mdb);
    for (name, image) in [("log", "l0"), ("met", "m0")] {
        edit(&mut state, &mdb, bundle(name, &["web"], image)).unwrap();
        start(&mut state, &format!("{name}@1"), Kind::User).unwrap();
        go_on(&mut state, &mdb, &[]);
    }
    let names = |state: &State| {
        let open = state.unfinished().flat_map(|record| record.rollout.environments());
        open.collect::<Vec<_>>().join(" ")
    };
    let table: [(&str, &[&str], &str); 4] = [
        ("failed", &[], "web"),
        ("unhealthy", &["m0"], "met"),
        ("unhealthy", &["b", "l0"], "log web"),
        ("unhealthy", &["of the machine database"], ""),
    ];
    for (how, ill, expected) in table {
        go_on_with(&mut state, &mdb, &[("web1", how)], ill);
        assert_eq!(names(&state), expected, "{ill:?}");
        go_on(&mut state, &mdb, &[]);
        assert_eq!(names(&state), "");
    }
    // While a rollout of one of them changes machines, they are its own.
    edit(&mut state, &mdb, bundle("log", &["web"], "l1")).unwrap();
    let number = start(&mut state, "log@2", Kind::User).unwrap();
    go_on_with(&mut state, &mdb, &[("web2", "failed"), ("web1", "starting")], &[]);
    assert_eq!(
        (names(&state).as_str(), number),
        ("log", state.unfinished().next().unwrap().number)
    );
}

#[test]
fn a_new_machine_without_an_image_is_not_waited_for() {
    let one = mdb("web1 a");
    let mut state = State::default();
    let gate = json!({"name": "web", "select": {"hosts": ["web*"]}, "source": {"mdb": true}});
    edit(&mut state, &one, gate).unwrap();
    state.set_active("web", true).unwrap();
    go_on(&mut state, &one, &[]);
    let two = mdb("web1 a, web2");
    let ended = "r1 new_host succeeded: 1 of 1 machine done";
    assert_eq!(go_on(&mut state, &two, &[("web2", "stopped")]), [ended]);
}
