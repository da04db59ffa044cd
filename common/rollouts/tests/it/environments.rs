//! Tables of edits, of the gate, and of orders.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use model::image::ImageName;
use model::mdb::Machine;
use model::object::{Algorithm, ObjectId};
use model::tree::Time;
use rollouts::advance::advance;
use rollouts::content::ContentRevision;
use rollouts::document::{Analysis, Choice, Kind, MachineTaskState, VoteEvent, name_of};
use rollouts::gate::{InactiveParts, effective};
use rollouts::plan::plan;
use rollouts::state::{
    ENVIRONMENTS_MAX, Editor, Edits, RolloutOrder, SharedMachines, StartOrder, State,
    UNFINISHED_MAX,
};
use rollouts::steps::Said;
use rollouts::view::{ImageNotes, Question, Seen, View};
use serde_json::{Value, json};

use crate::left_out;

/// Machines, each as `HOST IMAGE`. The tag `tier` is the name without its last digit.
pub fn mdb(text: &str) -> SharedMachines {
    let machine = |words: &str| {
        let (hostname, image) = words.split_once(' ').unwrap_or((words, ""));
        let tier = hostname[..hostname.len() - 1].to_owned();
        let machine = Machine {
            hostname: hostname.to_owned(),
            required_image: image.to_owned(),
            tags: [("tier".to_owned(), tier)].into(),
            ..Machine::default()
        };
        (hostname.to_owned(), Arc::new(machine))
    };
    text.split(',').map(str::trim).map(machine).collect()
}

pub fn at(seconds: i64) -> Editor {
    Editor { who: "ann".to_owned(), why: "so".to_owned(), now: Time { seconds, nanoseconds: 0 } }
}

/// What an edit says of each environment: `NAME@REVISION WHAT`, and warnings.
pub type Outcomes = Result<Vec<String>, Said>;

fn edit_with(state: &mut State, mdb: &SharedMachines, edit: Value, whole: bool) -> Outcomes {
    let environments = vec![serde_json::from_value(edit).unwrap()];
    let outcomes = state.edit(Edits { environments, whole, ..Edits::default() }, &at(0), mdb)?;
    let text = |one: &rollouts::state::EditOutcome| {
        let revision = one.revision.map_or_else(String::new, |number| format!("@{number}"));
        let warnings: String = one.warnings.iter().map(|text| format!("; {text}")).collect();
        format!("{}{revision} {}{warnings}", one.name, one.what)
    };
    Ok(outcomes.iter().map(text).collect())
}

pub fn edit(state: &mut State, mdb: &SharedMachines, edit: Value) -> Outcomes {
    edit_with(state, mdb, edit, false)
}

pub fn environment(name: &str, image: &str) -> Value {
    json!({"name": name, "select": {"tags": {"tier": [name]}}, "source": {"image": image}})
}

/// All machines are healthy with what they must have at once, but one with a bad image.
struct Instant<'a>(&'a SharedMachines, SharedMachines);

impl View for Instant<'_> {
    fn machine(&self, hostname: &str) -> Option<Seen> {
        assert!(self.0.contains_key(hostname));
        let image = self.1[hostname].required_image.clone();
        let state = match image.as_str() {
            "" => MachineTaskState::Stopped,
            image if image.contains("bad") && hostname.ends_with('2') => MachineTaskState::Failed,
            _ => MachineTaskState::Synced,
        };
        Some(Seen {
            image,
            left_out: left_out(&self.1[hostname].required_image).into_keys().collect(),
            state,
            ill: BTreeSet::new(),
            reachable: true,
            unknown: false,
            held_out: false,
        })
    }

    fn left_out(&self, image: &str) -> Option<BTreeMap<String, String>> {
        Some(left_out(image))
    }

    fn digest(&self, image: &str) -> Option<ObjectId> {
        Some(Algorithm::Blake3.digest(image.as_bytes()))
    }

    fn notes(&self, image: &str) -> Option<ImageNotes> {
        let deprecated = image.ends_with("old").then(|| "is deprecated: too old".to_owned());
        let uploaded = at(if image.ends_with("new") { 1_000 } else { 0 }).now;
        (!image.ends_with("unknown")).then_some(ImageNotes { uploaded, deprecated })
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

/// Takes rollouts as far as they go at this moment.
pub fn go_on(state: &mut State, mdb: &SharedMachines, seconds: i64) {
    for _ in 0..20 {
        let now = effective(state, mdb).records;
        advance(state, mdb, &mut Instant(mdb, now), at(seconds).now);
    }
}

pub fn start(state: &mut State, what: &str, kind: Kind) -> Result<u64, Said> {
    let environments = vec![what.to_owned()];
    state.start(&StartOrder { environments, kind, ..StartOrder::default() }, &at(0))
}

/// Returns `STATE: CAUSE` of a rollout.
pub fn shown(state: &State, number: u64) -> String {
    let rollout = &state.rollouts[&number].rollout;
    format!("{}: {}", name_of(&rollout.state), rollout.cause)
}

/// Returns the images that machines must have, by host.
pub fn images(state: &State, mdb: &SharedMachines) -> String {
    let effective = effective(state, mdb).records;
    let image = |one: &Arc<Machine>| {
        format!("{} {}", one.hostname, one.required_image).trim_end().to_owned()
    };
    effective.values().map(image).collect::<Vec<_>>().join(", ").replace(" ,", ",")
}

fn ok(text: &str) -> Outcomes {
    Ok(vec![text.to_owned()])
}

pub fn said<T>(code: u16, message: &str) -> Result<T, Said> {
    Err(Said::new(code, message))
}

#[test]
fn edits_make_revisions_or_are_refused_whole() {
    let mdb = mdb("web1 a, web2 a, db1 a");
    let web = environment("web", "b");
    #[rustfmt::skip]
    let table: [(Value, Outcomes); 11] = [
        (web.clone(), ok("web@1 created")),
        (web, ok("web unchanged")),
        (json!({"name": "web", "base": 0, "source": {"image": "c"}}),
            said(409, "web exists already, with revision 1")),
        (json!({"name": "web", "base": 1, "source": {"image": "c"}}), ok("web@2 updated")),
        (json!({"name": "web", "base": 1, "source": {"image": "d"}}),
            said(409, "web has revision 2 now, and the edit was made from 1: look at what has \
                       changed, and edit again")),
        (json!({"name": "db", "base": 3, "source": {"image": "c"}}),
            said(409, "there is no environment db")),
        (json!({"name": "db", "source": {"image": "c"}}), said(400, "db.select: is missing")),
        (json!({"name": "db", "select": {}, "source": {"image": "c"}}),
            said(400, "db.select: names nothing; for all machines: {\"hosts\": [\"*\"]}")),
        (json!({"name": "db", "select": {"hosts": ["x*"]}, "source": {"image": "c"}}),
            ok("db@1 created; it selects no machine of the machine database")),
        (json!({"name": "db", "select": {"hosts": ["*"]}, "source": {"image": "c"}}),
            ok("db@2 updated; 2 machines are in web too: the one that comes to machines first applies")),
        (json!({"name": "db", "source": {"image": "c"}, "depends_on": ["db"]}),
            said(400, "environments: these depend on each other: db")),
    ];
    let mut state = State::default();
    for (change, expected) in table {
        let before = state.clone();
        let outcome = edit(&mut state, &mdb, change.clone());
        assert_eq!(outcome, expected, "{change}");
        assert!(outcome.is_ok() || state == before, "{change}");
        assert_eq!(images(&state, &mdb), "db1 a, web1 a, web2 a", "an edit changes no machine");
    }
    // A whole edit has defaults for what it leaves out.
    let group = json!({"name": "web", "source": {"image": "c"}, "start": "auto"});
    assert_eq!(
        edit(&mut state, &mdb, group),
        ok("web@3 updated; 2 machines are in db too: the \
        one that comes to machines first applies")
    );
    let whole = environment("web", "c");
    let again = edit_with(&mut state, &mdb, whole, true);
    let text =
        "web@4 updated; 2 machines are in db too: the one that comes to machines first applies";
    assert_eq!(again, ok(text));
}

#[test]
fn the_environment_that_was_committed_first_applies() {
    let mdb = mdb("web1 a, web2 a, db1 a");
    let mut state = State::default();
    edit(&mut state, &mdb, environment("web", "b")).unwrap();
    let all = json!({"name": "all", "select": {"hosts": ["d*", "*1"]}, "source": {"image": "c"}});
    edit(&mut state, &mdb, all).unwrap();
    assert_eq!(images(&state, &mdb), "db1 a, web1 a, web2 a");
    let bring = |state: &mut State, what| {
        let number = start(state, what, Kind::User).unwrap();
        go_on(state, &mdb, 0);
        assert_eq!(shown(state, number), "succeeded: all steps are done");
        images(state, &mdb)
    };
    assert_eq!(bring(&mut state, "all@1"), "db1 c, web1 c, web2 a");
    // `web` is older, and does not take over what has another one.
    assert_eq!(bring(&mut state, "web@1"), "db1 c, web1 c, web2 b");
    let gated = rollouts::gate::Gate::new(&state).gated(&mdb["web1"]).unwrap();
    assert_eq!(
        (gated.base.unwrap().environment.as_str(), gated.conflicts),
        ("all", vec!["web".to_owned()])
    );
    // That stays so with later revisions.
    let next = json!({"source": {"image": "d"}, "name": "all"});
    edit(&mut state, &mdb, next).unwrap();
    assert_eq!(bring(&mut state, "all@2"), "db1 d, web1 d, web2 b");
    // What joins gets it at once, unless the environment is not active.
    let more = self::mdb("web1 a, web2 a, web3 a, db1 a");
    assert_eq!(images(&state, &more), "db1 d, web1 d, web2 b, web3 b");
    state.set_active("web", false).unwrap();
    state.note_members(&mdb, at(0).now);
    assert_eq!(images(&state, &more), "db1 d, web1 d, web2 b, web3 a");
    // Without the environment another one applies, or the machine database: that needs force.
    let refused = state.delete("all", false, &mdb, at(0).now).unwrap_err();
    assert_eq!(refused.code, 409);
    state.delete("all", true, &mdb, at(0).now).unwrap();
    assert_eq!(images(&state, &more), "db1 a, web1 b, web2 b, web3 a");
}

#[test]
fn a_machine_that_a_rollout_has_changed_is_not_taken_over_by_another_commit() {
    let mdb = mdb("web1 a, web2 a");
    let mut state = State::default();
    let slow = json!({"name": "z", "select": {"hosts": ["*"]}, "source": {"image": "slow"},
        "strategy": {"soak_s": 5_000, "canary": 1}});
    let fast = json!({"name": "b", "select": {"hosts": ["*"]}, "source": {"image": "fast"}});
    edit(&mut state, &mdb, slow).unwrap();
    edit(&mut state, &mdb, fast).unwrap();
    start(&mut state, "z@1", Kind::User).unwrap();
    go_on(&mut state, &mdb, 0);
    let number = start(&mut state, "b@1", Kind::User).unwrap();
    go_on(&mut state, &mdb, 0);
    assert_eq!(shown(&state, number), "succeeded: all steps are done");
    assert_eq!(images(&state, &mdb), "web1 slow, web2 fast");
    // What never came to stay is not before it the next time.
    state.order("r1", RolloutOrder::RollBack, &at(0)).unwrap();
    go_on(&mut state, &mdb, 0);
    assert_eq!(images(&state, &mdb), "web1 fast, web2 fast");
    start(&mut state, "z@1", Kind::User).unwrap();
    go_on(&mut state, &mdb, 0);
    assert_eq!(images(&state, &mdb), "web1 fast, web2 fast");
}

#[test]
fn an_environment_is_not_deleted_under_the_rollout_of_another_one() {
    let all = mdb("web1 a, app1 a");
    let mut state = State::default();
    edit(&mut state, &all, environment("web", "b")).unwrap();
    let mut app = environment("app", "c");
    app["depends_on"] = json!(["web"]);
    edit(&mut state, &all, app).unwrap();
    for what in ["web@1", "app@1"] {
        start(&mut state, what, Kind::User).unwrap();
        go_on(&mut state, &all, 0);
    }
    edit(&mut state, &all, environment("web", "d")).unwrap();
    start(&mut state, "web@2", Kind::Mdb).unwrap();
    let refused = said(409, "r3 is of app: stop it first");
    assert_eq!(state.delete("app", true, &all, at(0).now), refused);
}

#[test]
fn edits_of_the_machine_database_wait_in_one_draft() {
    let first = mdb("web1 a, web2 a");
    let mut state = State::default();
    let web = json!({"name": "web", "select": {"hosts": ["web*"]}, "source": {"mdb": true}});
    edit(&mut state, &first, web).unwrap();
    let takes = |state: &mut State, text: &str| state.take_mdb(&mdb(text), at(5).now);
    let draft = |number| vec![("web".to_owned(), number)];
    assert_eq!(takes(&mut state, "web1 a, web2 a"), []);
    assert_eq!(takes(&mut state, "web1 b, web2 a"), draft(2));
    assert_eq!(images(&state, &mdb("web1 b, web2 a")), "web1 a, web2 a");
    // The next edit replaces the draft; one that is taken back leaves none.
    assert_eq!(takes(&mut state, "web1 b, web2 b"), draft(3));
    assert_eq!(Vec::from_iter(state.environments["web"].revisions.keys()), [&1, &3]);
    assert_eq!(takes(&mut state, "web1 a, web2 a"), []);
    assert_eq!(Vec::from_iter(state.environments["web"].revisions.keys()), [&1]);
    // Once it is started it stays as it was.
    assert_eq!(takes(&mut state, "web1 c, web2 a"), draft(2));
    let number = start(&mut state, "web@2", Kind::User).unwrap();
    assert_eq!(takes(&mut state, "web1 d, web2 a"), draft(3));
    go_on(&mut state, &mdb("web1 d, web2 a"), 0);
    assert_eq!(shown(&state, number), "succeeded: all steps are done");
    assert_eq!(images(&state, &mdb("web1 d, web2 a")), "web1 c, web2 a");
}

#[test]
fn votes_are_for_changes_and_not_for_machines() {
    let few = mdb("web1 a, web2 a");
    let mut state = State::default();
    edit(&mut state, &few, environment("web", "b")).unwrap();
    let known = |image: &str| Some(Algorithm::Blake3.digest(image.as_bytes()));
    let digest = |state: &State, mdb: &SharedMachines| plan(state, mdb, "web", 1, known).digest;
    let two = digest(&state, &few);
    assert_eq!(digest(&state, &mdb("web1 a, web2 a, web3 a, db1 z")), two, "the same change");
    assert_ne!(digest(&state, &mdb("web1 a, web2 a, web3 x")), two, "another change");
    let other = |image: &str| Some(Algorithm::Blake3.digest(image.to_uppercase().as_bytes()));
    assert_ne!(plan(&state, &few, "web", 1, other).digest, two, "another content of the image");
    let unknown = plan(&state, &few, "web", 1, |_| None);
    assert_eq!(unknown.digest, "", "nobody can vote yet");
    assert_eq!(Vec::from_iter(unknown.unknown_images), ["b"]);
}

#[test]
fn a_step_ends_when_nobody_votes_for_too_long() {
    let mdb = mdb("web1 a");
    let mut state = State::default();
    let mut web = environment("web", "b");
    web["approval"] = json!({"voters": ["bob"], "min_approvals": 1, "timeout_s": 60});
    edit(&mut state, &mdb, web).unwrap();
    let number = start(&mut state, "web@1", Kind::User).unwrap();
    go_on(&mut state, &mdb, 10);
    assert_eq!(shown(&state, number), "running: ");
    let vote = |voter: &str, digest: &str| VoteEvent {
        step: "web".to_owned(),
        voter: voter.to_owned(),
        vote: Choice::Approve,
        digest: digest.to_owned(),
        link_valid: true,
    };
    let id = format!("r{number}");
    assert_eq!(state.vote(&id, vote("bob", "0")).unwrap_err().code, 409);
    assert_eq!(state.vote(&id, vote("eve", "0")).unwrap_err().code, 403);
    go_on(&mut state, &mdb, 70);
    assert_eq!(shown(&state, number), "running: ", "it waits since 10");
    go_on(&mut state, &mdb, 71);
    let cause = "rolled_back: web failed: nobody has decided for 60 s";
    assert_eq!(shown(&state, number), cause);
    assert_eq!(images(&state, &mdb), "web1 a");
    assert_eq!(state.vote(&id, vote("bob", "0")).unwrap_err().code, 410);
}

#[test]
fn orders_fit_the_state_of_a_rollout() {
    let mdb = mdb("web1 a, db1 a");
    let mut state = State::default();
    let mut web = environment("web", "b");
    web["approval"] = json!({"voters": ["bob"], "min_approvals": 1});
    edit(&mut state, &mdb, web).unwrap();
    edit(&mut state, &mdb, environment("db", "b")).unwrap();
    let errors: BTreeMap<&str, (Kind, u16)> = [
        ("web", (Kind::User, 400)),
        ("web@7", (Kind::User, 409)),
        ("nothing@1", (Kind::User, 404)),
        ("nothing", (Kind::Rollback, 404)),
        ("web@x", (Kind::Rollback, 400)),
        ("web@9", (Kind::Rollback, 404)),
        // It was never anywhere else.
        ("db", (Kind::Rollback, 404)),
        ("db@0", (Kind::Rollback, 409)),
    ]
    .into();
    for (what, (kind, code)) in errors {
        assert_eq!(start(&mut state, what, kind).unwrap_err().code, code, "{what}");
    }
    let first = start(&mut state, "web@1", Kind::User).unwrap();
    go_on(&mut state, &mdb, 0);
    // It waits for the lock of the first, and is replaced by the next one.
    let second = start(&mut state, "web@1", Kind::User).unwrap();
    let third = start(&mut state, "web@1", Kind::User).unwrap();
    go_on(&mut state, &mdb, 0);
    assert_eq!(shown(&state, second), "canceled: replaced by r3");
    let order = |state: &mut State, number: u64, order| {
        state.order(&format!("r{number}"), order, &at(0)).map_err(|said| said.code)
    };
    assert_eq!(order(&mut state, first, RolloutOrder::Cancel), Err(409));
    assert_eq!(order(&mut state, first, RolloutOrder::Resolve), Err(409));
    assert_eq!(order(&mut state, third, RolloutOrder::Stop), Err(409));
    assert_eq!(order(&mut state, 99, RolloutOrder::Stop), Err(404));
    assert_eq!(order(&mut state, third, RolloutOrder::Cancel), Ok("r3 is canceled".to_owned()));
    assert_eq!(state.delete("web", true, &mdb, at(0).now).unwrap_err().code, 409, "r1 changes it");
    let stopped = "r1 is stopped; machines stay as they are; not active: web; tasks \
                   that end by themselves are not restarted, and new machines get nothing; files \
                   are still repaired"
        .to_owned();
    assert_eq!(order(&mut state, first, RolloutOrder::Stop), Ok(stopped));
    assert_eq!(shown(&state, first), "stopped: stopped by ann");
    assert!(!state.environments["web"].active);
    // It has no revision on the machine.
    assert_eq!(effective(&state, &mdb).inactive, BTreeMap::new());
    // Back to what the machine database says.
    start(&mut state, "db@1", Kind::User).unwrap();
    go_on(&mut state, &mdb, 0);
    assert_eq!(images(&state, &mdb), "db1 b, web1 a");
    start(&mut state, "db@0", Kind::Rollback).unwrap();
    go_on(&mut state, &mdb, 0);
    assert_eq!(images(&state, &mdb), "db1 a, web1 a");
}

#[test]
fn parts_of_machines_are_inactive_while_their_environment_is() {
    let mdb = mdb("web1 a,db1 a");
    let mut state = State::default();
    edit(&mut state, &mdb, environment("web", "b")).unwrap();
    let select = json!({"tags": {"tier": ["web", "db"]}});
    let hello = json!({"name": "hello", "select": select, "source": {"bundle": "hello/1"}});
    edit(&mut state, &mdb, hello).unwrap();
    for name in ["web@1", "hello@1"] {
        start(&mut state, name, Kind::User).unwrap();
        go_on(&mut state, &mdb, 0);
    }
    let inactive = |state: &State| -> Vec<String> {
        let of_host = |(host, parts): (&String, &InactiveParts)| {
            let part = |(part, name): (&ImageName, &String)| format!("{host} {part} of {name}");
            Vec::from_iter(parts.iter().map(part))
        };
        effective(state, &mdb).inactive.iter().flat_map(of_host).collect()
    };
    assert_eq!(inactive(&state), Vec::<String>::new());
    assert_eq!(state.set_active("hello", false), Ok(true));
    assert_eq!(inactive(&state), ["db1 hello/1 of hello", "web1 hello/1 of hello"]);
    assert_eq!(state.set_active("web", false), Ok(true));
    assert_eq!(state.set_active("hello", true), Ok(true));
    assert_eq!(inactive(&state), ["web1 b of web"]);
    // One that is active, and the machine database, give the same.
    assert_eq!(state.set_active("web", true), Ok(true));
    assert_eq!(state.set_active("hello", false), Ok(true));
    let also = json!({"name": "also", "select": {"hosts": ["web1"]},
        "source": {"bundle": "hello/1"}});
    edit(&mut state, &mdb, also).unwrap();
    start(&mut state, "also@1", Kind::User).unwrap();
    go_on(&mut state, &mdb, 0);
    assert_eq!(inactive(&state), ["db1 hello/1 of hello"]);
    let named = self::mdb("web1 a,db1 a + hello/1");
    assert_eq!(effective(&state, &named).inactive, BTreeMap::new());
}

#[test]
fn a_gate_that_nobody_has_made_inactive_lets_tasks_restart() {
    let mdb = mdb("web1 a");
    let mut state = State::default();
    let gate = json!({"name": "gate", "select": {"hosts": ["*"]}, "source": {"mdb": true}});
    edit(&mut state, &mdb, gate).unwrap();
    assert_eq!(effective(&state, &mdb).inactive, BTreeMap::new());
    // It is not active, and somebody wants it so.
    assert_eq!(state.set_active("gate", false), Ok(true));
    assert_eq!(state.set_active("gate", false), Ok(false));
    let parts = InactiveParts::from([("a".parse().unwrap(), "gate".to_owned())]);
    assert_eq!(effective(&state, &mdb).inactive, BTreeMap::from([("web1".to_owned(), parts)]));
}

#[test]
fn a_freeze_holds_rollouts_up_until_it_ends() {
    let mdb = mdb("web1 a");
    let mut state = State::default();
    let mut web = environment("web", "b");
    web["strategy"] = json!({"timeout_s": 60});
    edit(&mut state, &mdb, web).unwrap();
    let until = |seconds| Some(at(seconds).now);
    assert_eq!(state.freeze("db", None, &at(0)).unwrap_err().code, 404);
    assert_eq!(state.freeze("web", until(5), &at(5)).unwrap_err().code, 400);
    assert_eq!(state.unfreeze("web", &at(0)).unwrap_err().code, 409);
    let text = "web is frozen until 1970-01-01T00:05:00Z";
    assert_eq!(state.freeze("web", until(300), &at(0)), Ok(text.to_owned()));
    let text = "all environments are frozen until somebody ends it";
    assert_eq!(state.freeze(rollouts::state::ALL, None, &at(0)), Ok(text.to_owned()));
    let number = start(&mut state, "web@1", Kind::User).unwrap();
    // It is held up, and that does not count as its time.
    go_on(&mut state, &mdb, 10);
    go_on(&mut state, &mdb, 290);
    assert_eq!(images(&state, &mdb), "web1 a");
    assert_eq!(shown(&state, number), "running: ");
    state.unfreeze(rollouts::state::ALL, &at(290)).unwrap();
    go_on(&mut state, &mdb, 299);
    assert_eq!(images(&state, &mdb), "web1 a", "the environment is frozen itself");
    go_on(&mut state, &mdb, 300);
    assert_eq!(images(&state, &mdb), "web1 b");
    assert_eq!(shown(&state, number), "succeeded: all steps are done");
    assert!(state.freezes.is_empty());
}

#[test]
fn a_machine_may_have_no_image_before_and_after() {
    let mdb = mdb("web1, web2 a");
    let mut state = State::default();
    edit(&mut state, &mdb, environment("web", "b")).unwrap();
    let number = start(&mut state, "web@1", Kind::User).unwrap();
    go_on(&mut state, &mdb, 0);
    assert_eq!(shown(&state, number), "succeeded: all steps are done");
    assert_eq!(images(&state, &mdb), "web1 b, web2 b");
    let number = start(&mut state, "web@0", Kind::Rollback).unwrap();
    go_on(&mut state, &mdb, 0);
    assert_eq!(shown(&state, number), "succeeded: all steps are done");
    assert_eq!(images(&state, &mdb), "web1, web2 a");
}

#[test]
fn a_plan_is_held_up_by_what_its_images_are() {
    let said = |image: &str, strategy: Value, order: StartOrder, seconds: i64| {
        let mdb = mdb("web1 base, web2");
        let mut state = State::default();
        let mut edited = environment("web", image);
        edited["strategy"] = strategy;
        edit(&mut state, &mdb, edited).unwrap();
        state
            .start(&StartOrder { environments: vec!["web@1".to_owned()], ..order }, &at(0))
            .unwrap();
        go_on(&mut state, &mdb, seconds);
        let step = &state.rollouts[&1].rollout.steps[0];
        format!("{}: {}", name_of(&step.state), step.cause)
    };
    let age = || json!({"min_image_age_s": 60});
    let from = |images: &[&str]| json!({"requires_from": images});
    let urgent = || StartOrder { urgent: true, ..StartOrder::default() };
    let deprecated = || StartOrder { allow_deprecated: true, ..StartOrder::default() };
    let lines = [
        said("web/unknown", json!({}), StartOrder::default(), 1_000),
        said("web/new", age(), StartOrder::default(), 1_059),
        said("web/new", age(), StartOrder::default(), 1_060),
        said("web/new", age(), urgent(), 1_000),
        said("web/old", json!({}), StartOrder::default(), 0),
        said("web/old", json!({}), urgent(), 0),
        said("web/old", json!({}), deprecated(), 0),
        said("web/2", from(&["web/1"]), StartOrder::default(), 0),
        said("web/2", from(&["web/1", "base"]), StartOrder::default(), 0),
    ];
    expect_test::expect![[r#"
        planning: the image server has not given web/unknown yet
        planning: web/new is too new: it is taken from 1970-01-01T00:17:40Z
        succeeded: 2 of 2 machines are done
        succeeded: 2 of 2 machines are done
        failed: web/old is deprecated: too old; a start with --allow-deprecated brings it
        failed: web/old is deprecated: too old; a start with --allow-deprecated brings it
        succeeded: 2 of 2 machines are done
        failed: web1 has base, and web/2 may only follow web/1: see requires_from of the strategy
        succeeded: 2 of 2 machines are done
    "#]]
    .assert_eq(&(lines.join("\n") + "\n"));
}

#[test]
fn what_goes_back_was_there_before() {
    let mdb = mdb("web1 base");
    let mut state = State::default();
    for image in ["web/1-old", "web/2"] {
        let mut edited = environment("web", image);
        edited["strategy"] = json!({"requires_from": ["base", "web/1-old"]});
        edit(&mut state, &mdb, edited).unwrap();
        let number = state.environments["web"].newest();
        let environments = vec![format!("web@{number}")];
        let order = StartOrder { environments, allow_deprecated: true, ..StartOrder::default() };
        state.start(&order, &at(0)).unwrap();
        go_on(&mut state, &mdb, 0);
    }
    start(&mut state, "web@1", Kind::Rollback).unwrap();
    go_on(&mut state, &mdb, 0);
    assert_eq!(shown(&state, 3), "succeeded: all steps are done");
}

#[test]
fn a_machine_that_fails_within_what_is_allowed_does_not_hold_up_the_others() {
    let mdb = mdb("web1 base, web2 base, web3 base, web4 base");
    let mut state = State::default();
    let mut edited = environment("web", "web/bad");
    edited["strategy"] = json!({"min_healthy_percent": 50, "soak_s": 60});
    edit(&mut state, &mdb, edited).unwrap();
    start(&mut state, "web@1", Kind::User).unwrap();
    go_on(&mut state, &mdb, 0);
    let step = &state.rollouts[&1].rollout.steps[0];
    assert_eq!(
        (shown(&state, 1), step.cause.as_str()),
        ("succeeded: all steps are done".to_owned(), "3 of 4 machines are done")
    );
}

#[test]
fn a_step_that_waits_for_its_image_changes_nothing_meanwhile() {
    let mdb = mdb("web1 base");
    let mut state = State::default();
    let mut edited = environment("web", "web/new");
    edited["strategy"] = json!({"min_image_age_s": 60});
    edit(&mut state, &mdb, edited).unwrap();
    assert_eq!(state.not_started("web"), Some(1));
    start(&mut state, "web@1", Kind::User).unwrap();
    assert_eq!(state.not_started("web"), None);
    go_on(&mut state, &mdb, 1_000);
    let now = effective(&state, &mdb).records;
    assert!(!advance(&mut state, &mdb, &mut Instant(&mdb, now), at(1_001).now).changed);
    // What somebody has made inactive is left to people.
    edit(&mut state, &mdb, environment("web", "web/2")).unwrap();
    state.set_active("web", false).unwrap();
    assert_eq!(state.not_started("web"), None);
    state.set_active("web", true).unwrap();
    assert_eq!(state.not_started("web"), Some(2));
}

pub fn bundle(name: &str, tiers: &[&str], image: &str) -> Value {
    json!({"name": name, "select": {"tags": {"tier": tiers}}, "source": {"bundle": image}})
}

/// Carries out a rollout, and returns how it ended.
fn carried_out(state: &mut State, mdb: &SharedMachines, what: &str, kind: Kind) -> String {
    let number = start(state, what, kind).unwrap();
    go_on(state, mdb, 0);
    shown(state, number)
}

const DONE: &str = "succeeded: all steps are done";

#[test]
fn bundles_are_added_to_the_image_of_a_machine() {
    let mdb = mdb("web1 i0, web2 i0, db1 i0, bare1");
    let mut state = State::default();
    let log = || bundle("log", &["web", "db", "bare"], "l0");
    edit(&mut state, &mdb, log()).unwrap();
    edit(&mut state, &mdb, bundle("met", &["web"], "m0")).unwrap();
    assert_eq!(edit(&mut state, &mdb, environment("web", "i2")), ok("web@1 created"));
    for what in ["met@1", "log@1"] {
        assert_eq!(carried_out(&mut state, &mdb, what, Kind::User), DONE);
    }
    // In the order in which they were committed: if they clash, the later one is left out.
    let both = "bare1 (nothing) + l0, db1 i0 + l0, web1 i0 + m0 + l0, web2 i0 + m0 + l0";
    assert_eq!(images(&state, &mdb), both);
    // Another image for the same machines, and back.
    assert_eq!(carried_out(&mut state, &mdb, "web@1", Kind::User), DONE);
    let after = "bare1 (nothing) + l0, db1 i0 + l0, web1 i2 + m0 + l0, web2 i2 + m0 + l0";
    assert_eq!(images(&state, &mdb), after);
    assert_eq!(carried_out(&mut state, &mdb, "web@0", Kind::Rollback), DONE);
    assert_eq!(images(&state, &mdb), both);
    assert_eq!(carried_out(&mut state, &mdb, "log@0", Kind::Rollback), DONE);
    assert_eq!(images(&state, &mdb), "bare1, db1 i0, web1 i0 + m0, web2 i0 + m0");
    // A newer revision comes last, and a bad bundle goes back by itself.
    assert_eq!(carried_out(&mut state, &mdb, "log@1", Kind::User), DONE);
    edit(&mut state, &mdb, bundle("met", &["web"], "m1")).unwrap();
    assert_eq!(carried_out(&mut state, &mdb, "met@2", Kind::User), DONE);
    let newest = "bare1 (nothing) + l0, db1 i0 + l0, web1 i0 + l0 + m1, web2 i0 + l0 + m1";
    assert_eq!(images(&state, &mdb), newest);
    edit(&mut state, &mdb, bundle("log", &["web", "db", "bare"], "lbad")).unwrap();
    let mut bad = self::mdb("web1 i0, web2 i0, db1 i0, bare1");
    bad.remove("web1");
    let ended = carried_out(&mut state, &bad, "log@2", Kind::User);
    assert_eq!(ended, "rolled_back: log failed: failed: 1 machine, 0 may: web2");
    assert_eq!(images(&state, &bad), "bare1 (nothing) + l0, db1 i0 + l0, web2 i0 + l0 + m1");
    // What leaves loses it, what joins gets it, and an edit of the machine database passes.
    let moved = self::mdb("web1 i5, cache1 i0, db2 i0");
    assert_eq!(images(&state, &moved), "cache1 i0, db2 i0 + l0, web1 i5 + l0 + m1");
    assert_eq!(state.delete("met", false, &mdb, at(0).now).unwrap_err().code, 409);
}

#[test]
fn machines_fetch_what_a_rollout_is_about_to_bring() {
    let mdb = mdb("web1 i0, db1 i0");
    let mut state = State::default();
    let mut log = bundle("log", &["web"], "l0");
    log["approval"] = json!({"voters": ["bob"], "min_approvals": 1});
    edit(&mut state, &mdb, log).unwrap();
    edit(&mut state, &mdb, environment("web", "i2")).unwrap();
    let planned = |state: &State| -> Vec<String> {
        let machines = effective(state, &mdb).records;
        machines.values().map(|one| one.planned_image.clone()).collect()
    };
    assert_eq!(planned(&state), ["", ""]);
    start(&mut state, "log@1", Kind::User).unwrap();
    go_on(&mut state, &mdb, 0);
    assert_eq!(planned(&state), ["", "i0 + l0"]);
    start(&mut state, "web@1", Kind::User).unwrap();
    assert_eq!(planned(&state), ["", "i2 + l0"]);
}

#[test]
fn what_does_not_fit_together_is_refused_before_a_machine_changes() {
    let mdb = mdb("web1 i0, web2 i0");
    let mut state = State::default();
    edit(&mut state, &mdb, bundle("log", &["web"], "l4")).unwrap();
    let refused = "rolled_back: log failed: web1 cannot have l4 in i0 + l4: /x is taken";
    assert_eq!(carried_out(&mut state, &mdb, "log@1", Kind::User), refused);
    assert_eq!(images(&state, &mdb), "web1 i0, web2 i0");
    edit(&mut state, &mdb, bundle("log", &["web"], "l3")).unwrap();
    assert_eq!(carried_out(&mut state, &mdb, "log@2", Kind::User), DONE);
    edit(&mut state, &mdb, environment("web", "i1")).unwrap();
    let refused = "rolled_back: web failed: web1 cannot have l3 in i1 + l3: /x is taken";
    assert_eq!(carried_out(&mut state, &mdb, "web@1", Kind::User), refused);
    assert_eq!(images(&state, &mdb), "web1 i0 + l3, web2 i0 + l3");
    // Where it is so already, because the machine database was edited, it is in nobody's way.
    let edited = self::mdb("web1 i1, web2 i1");
    edit(&mut state, &edited, bundle("met", &["web"], "m0")).unwrap();
    assert_eq!(carried_out(&mut state, &edited, "met@1", Kind::User), DONE);
    assert_eq!(images(&state, &edited), "web1 i1 + l3 + m0, web2 i1 + l3 + m0");
}

#[test]
fn an_environment_has_bundles_or_images() {
    let mdb = mdb("web1 i0");
    let mut state = State::default();
    edit(&mut state, &mdb, environment("web", "i1")).unwrap();
    let other = |source: Value| json!({"name": "web", "source": source});
    let table = [
        (
            other(json!({"bundle": "l0"})),
            "web.source: an environment is about images, bundles or content for ever: make another",
        ),
        (
            other(json!({"image": "i1 + l0"})),
            "web.source: names more than one image: bundles have environments of their own",
        ),
    ];
    for (change, message) in table {
        assert_eq!(edit(&mut state, &mdb, change), said(400, message));
    }
    let whole = bundle("web", &["web"], "l0");
    let message =
        "web.source: an environment is about images, bundles or content for ever: make another";
    assert_eq!(edit_with(&mut state, &mdb, whole, true), said(400, message));
}

#[test]
fn a_bundle_that_is_named_twice_is_there_once() {
    let mdb = mdb("web1 i0 + l0, web2 i0");
    let mut state = State::default();
    for name in ["log", "logs"] {
        edit(&mut state, &mdb, bundle(name, &["web"], "l0")).unwrap();
        assert_eq!(carried_out(&mut state, &mdb, &format!("{name}@1"), Kind::User), DONE);
        assert_eq!(images(&state, &mdb), "web1 i0 + l0, web2 i0 + l0");
    }
}

#[test]
fn rollouts_that_do_not_fit_together_are_not_carried_out_both() {
    let mdb = mdb("web1 i0, web2 i0");
    let mut state = State::default();
    let mut log = bundle("log", &["web"], "l3");
    log["approval"] = json!({"voters": ["bob"], "min_approvals": 1});
    edit(&mut state, &mdb, log).unwrap();
    edit(&mut state, &mdb, environment("web", "i1")).unwrap();
    let first = start(&mut state, "log@1", Kind::User).unwrap();
    go_on(&mut state, &mdb, 0);
    assert_eq!(shown(&state, first), "running: ");
    let refused = "rolled_back: web failed: web1 cannot have l3 in i1 + l3: /x is taken";
    assert_eq!(carried_out(&mut state, &mdb, "web@1", Kind::User), refused);
}

#[test]
fn a_caller_has_so_many_rollouts_and_there_are_so_many_environments() {
    let mdb = mdb("web1 a");
    let mut state = State::default();
    for number in 0..=UNFINISHED_MAX {
        let mut one = environment(&format!("e{number}"), "b");
        one["select"] = json!({"hosts": ["web*"]});
        edit(&mut state, &mdb, one).unwrap();
    }
    for number in 0..UNFINISHED_MAX {
        start(&mut state, &format!("e{number}@1"), Kind::User).unwrap();
    }
    let before = state.clone();
    let message =
        "ann has started 50 rollouts that have not ended: wait for one, or stop one".to_owned();
    assert_eq!(start(&mut state, "e50@1", Kind::User), Err(Said::new(409, message)));
    assert_eq!(state, before);
    // One that takes the place of another is no more than before.
    assert_eq!(start(&mut state, "e0@1", Kind::User), Ok(51));

    let edit_of = |number: usize| {
        let select = json!({"hosts": ["web*"]});
        let edit =
            json!({"name": format!("e{number}"), "select": select, "source": {"image": "b"}});
        serde_json::from_value(edit).unwrap()
    };
    let environments = (0..=ENVIRONMENTS_MAX).map(edit_of).collect();
    let edits = Edits { environments, ..Edits::default() };
    let before = state.clone();
    let said = state.edit(edits, &at(0), &mdb).unwrap_err();
    assert_eq!(said, Said::new(409, "there can be at most 2000 environments"));
    assert_eq!(state, before);
}
