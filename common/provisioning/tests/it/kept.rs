//! What a machine does about what it has: drift of resources, and orders about orphans.

use std::collections::BTreeMap;
use std::time::Duration;

use model::image::ImageName;
use model::object::{Algorithm, ObjectId};
use provisioning::image::Definition;
use provisioning::machine::drift::{NextCheck, Schedule};
use provisioning::machine::orphans::{OrphanError, OrphanOrder};
use provisioning::machine::{Condition, Machine, Todo};
use provisioning::plan::Provision;
use provisioning::protocol::{Answer, PlanAnswer};
use provisioning::{Call, State};
use serde_json::{Value, json};

use crate::{answer, shown, success};

fn digest(text: &str) -> ObjectId {
    Algorithm::Blake3.digest(text.as_bytes())
}

/// What an image asks for, of kinds `a.x` and `b.x` whose plugins are `a` and `b`.
fn definition(resources: &[(&str, &str, Value)]) -> Definition {
    let bind = |name: &str| {
        format!("[[provisioner]]\nname = \"{name}\"\nkinds = [\"{name}.x\"]\nuser = \"root\"\n")
    };
    let files: BTreeMap<String, String> = resources
        .iter()
        .map(|(id, kind, fields)| {
            let mut fields = fields.as_object().cloned().unwrap_or_default();
            fields.insert("id".to_owned(), json!(id));
            fields.insert("kind".to_owned(), json!(kind));
            (format!("{id}.json"), Value::Object(fields).to_string())
        })
        .collect();
    let bindings = [bind("a"), bind("b")].concat();
    let fields = json!({"bindings": bindings, "files": files, "plugins": {}});
    serde_json::from_value(fields).unwrap()
}

/// Does all that is to be done now, and returns the calls.
fn finish(machine: &mut Machine, answer: impl Fn(&Call) -> Result<Answer, String>) -> Vec<String> {
    let mut made = Vec::new();
    loop {
        match machine.next() {
            Todo::Calls(calls) => {
                for call in calls {
                    made.push(shown(&call));
                    machine.change_state(|state: &mut State| state.begin(&call));
                    let answer = answer(&call);
                    machine.change_state(|state: &mut State| state.end(&call, answer));
                }
            }
            Todo::Settle => machine.settle(),
            Todo::Nothing | Todo::RetryLater => return made,
        }
        // Each change is kept, and read again.
        let kept = serde_json::to_string(machine).unwrap();
        assert_eq!(serde_json::from_str::<Machine>(&kept).unwrap(), *machine);
        assert!(made.len() < 100, "{made:?}");
    }
}

fn good(_: &Call) -> Result<Answer, String> {
    Ok(success(&json!({})))
}

/// Gives a machine an image, and does all that is to be done.
fn activate(machine: &mut Machine, name: &str, definition: &Definition) {
    let image = ImageName::new(name).unwrap();
    machine.provision(&image, digest(name), definition, "web1");
    finish(machine, good);
    while let Some(target) = machine.target()
        && machine.go_on(digest(name), target.step) == Some(true)
    {
        finish(machine, good);
    }
    machine.activated(digest(name), definition);
    finish(machine, good);
}

fn conditions(machine: &Machine) -> Vec<(String, Condition, String)> {
    machine.standings().into_iter().map(|one| (one.id, one.condition, one.text)).collect()
}

fn is(id: &str, condition: Condition, text: &str) -> (String, Condition, String) {
    (id.to_owned(), condition, text.to_owned())
}

/// What is asked, as `a [x y]`.
fn questions(machine: &Machine) -> Vec<String> {
    let name = |call: &Provision| {
        let ids: Vec<String> = call.ids().into_iter().collect();
        assert_eq!(call.request.previous.len(), ids.len());
        format!("{} [{}]", call.provisioner, ids.join(" "))
    };
    machine.questions().iter().map(name).collect()
}

fn check(machine: &mut Machine, answers: &[Value], now: u64) -> Vec<String> {
    let asked = machine.questions();
    assert_eq!(asked.len(), answers.len());
    let answers = answers.iter().map(|answer| match answer.as_str() {
        Some(error) => Err(error.to_owned()),
        None => Ok(PlanAnswer::parse(json!({"changes": answer}).to_string().as_bytes()).unwrap()),
    });
    let found = machine.checked(&asked, answers.collect(), now);
    found.into_iter().map(|(id, text)| format!("{id}: {text}")).collect()
}

#[test]
fn each_machine_checks_once_in_a_period_at_a_time_of_its_own() {
    let day = Duration::from_secs(86_400);
    assert_eq!(Schedule::new(Duration::ZERO, "web1"), None);
    let schedule = Schedule::new(day, "web1").unwrap();
    let start = 1_000_000_u64;
    let first = schedule.due_in(start, start);
    assert!((1..=86_400).contains(&first), "{first}");
    assert_eq!(schedule.due_in(start, start + first - 1), 1);
    assert_eq!(schedule.due_in(start, start + first), 0);
    // It was late: the next one is at the same time of the day as always.
    assert_eq!(schedule.due_in(start + first + 100, start + first + 100), 86_400 - 100);
    // The clock was set back.
    assert_eq!(schedule.due_in(start + 10 * 86_400, start), 0);
    let hours = |host: usize| {
        let schedule = Schedule::new(day, &format!("web{host}")).unwrap();
        usize::try_from(schedule.due_in(0, 0) / 3_600).unwrap()
    };
    let mut counts = [0; 25];
    (0..2_400).for_each(|host| counts[hours(host)] += 1);
    assert!(counts[..24].iter().all(|count| (50..150).contains(count)), "{counts:?}");
}

#[test]
fn what_plugins_would_do_is_drift() {
    let mut machine = Machine::default();
    let schedule = Schedule::new(Duration::from_secs(100), "web1").unwrap();
    assert_eq!(machine.next_check(&schedule, 0), NextCheck::None);
    let repair = json!({"on_drift": "repair", "needs": ["one"]});
    let full = definition(&[
        ("one", "a.x", json!({})),
        ("three", "b.x", json!({"needs": ["two"]})),
        ("two", "a.x", repair),
    ]);
    let image = ImageName::new("full").unwrap();
    machine.provision(&image, digest("full"), &full, "web1");
    assert_eq!(questions(&machine), [""; 0]);
    activate(&mut machine, "full", &full);
    assert_eq!(machine.next_check(&schedule, 1_000), NextCheck::Begin);
    machine.begin_checks(1_000);
    assert!(matches!(machine.next_check(&schedule, 1_000), NextCheck::In(1..=100)));
    assert_eq!(machine.next_check(&schedule, 1_200), NextCheck::In(0));
    assert_eq!(questions(&machine), ["a [one two]", "b [three]"]);
    let made = |id: &str| is(id, Condition::Made, "");

    // All is well. What an answer leaves out is well too.
    let none = json!([{"id": "one", "op": "none", "text": "it is there"}]);
    assert_eq!(check(&mut machine, &[none.clone(), json!([])], 1_200), [""; 0]);
    assert_eq!(conditions(&machine), [made("one"), made("three"), made("two")]);
    assert!(matches!(machine.next_check(&schedule, 1_200), NextCheck::In(1..=100)));
    assert_eq!(machine.next(), Todo::Nothing);

    // A plugin that fails finds no drift, and is named. So is one that answers nonsense.
    let refused = json!([{"id": "one", "op": "none", "error": "no login"}]);
    let other = json!([{"id": "one", "op": "update"}]);
    check(&mut machine, &[refused, other], 1_300);
    let unknown = |id: &str, why: &str| {
        let text = format!("its plugin cannot say whether it differs: {why}");
        is(id, Condition::Made, &text)
    };
    let foreign = unknown("three", "its answer is about `one` too");
    assert_eq!(conditions(&machine), [unknown("one", "no login"), foreign, made("two")]);
    check(&mut machine, &[json!("signal: 9"), json!([])], 1_400);
    let dead = |id: &str| unknown(id, "signal: 9");
    assert_eq!(conditions(&machine), [dead("one"), made("three"), dead("two")]);
    assert_eq!(machine.next(), Todo::Nothing);

    // What differs is reported; what says so is made again, with the same inputs.
    let update = json!([{"id": "one", "op": "update", "text": "mode 0644", "error": "busy"},
        {"id": "two", "op": "create"}]);
    let found = check(&mut machine, &[update.clone(), json!([])], 1_500);
    assert_eq!(found, ["one: mode 0644, which would be refused: busy", "two: create it"]);
    let text = "mode 0644, which would be refused: busy";
    let drifted = is("one", Condition::Drifted, text);
    let waits = is("two", Condition::Waiting, "its plugin runs, or was cut short");
    assert_eq!(conditions(&machine), [drifted.clone(), made("three"), waits]);
    assert_eq!(finish(&mut machine, |_| Err("no room".to_owned())), ["2: a [two] [two]"]);
    let failed = is("two", Condition::Failed, "no room");
    assert_eq!(conditions(&machine), [drifted.clone(), made("three"), failed]);
    assert_eq!(machine.standings()[2].drift.as_deref(), Some("create it"));
    machine.retry();
    assert_eq!(finish(&mut machine, good), ["2: a [two] [two]"]);
    let again = is("two", Condition::Made, "it differed, and was made again: create it");
    assert_eq!(conditions(&machine), [drifted, made("three"), again]);

    // It is well again.
    check(&mut machine, &[none, json!([])], 1_600);
    assert_eq!(conditions(&machine), [made("one"), made("three"), made("two")]);
    // What is to come is not drift, and nothing is asked meanwhile.
    check(&mut machine, &[update, json!([])], 1_700);
    finish(&mut machine, good);
    let next = definition(&[("one", "a.x", json!({"spec": {"n": 2}}))]);
    machine.provision(&ImageName::new("next").unwrap(), digest("next"), &next, "web1");
    assert_eq!(machine.next_check(&schedule, 9_000), NextCheck::None);
    assert_eq!(conditions(&machine)[0].1, Condition::Waiting);
    activate(&mut machine, "next", &next);
    assert_eq!(conditions(&machine)[0], made("one"));
    assert_eq!(questions(&machine), ["a [one]"]);
}

#[test]
fn only_orphans_are_forgotten_or_destroyed() {
    let destroy = json!({"on_removal": "destroy"});
    let first = definition(&[
        ("asked", "a.x", json!({})),
        ("base", "a.x", json!({})),
        ("lone", "b.x", json!({})),
        ("needy", "a.x", json!({"needs": ["base"]})),
        ("stuck", "b.x", destroy),
    ]);
    let second = definition(&[("asked", "a.x", json!({}))]);
    let mut start = Machine::default();
    activate(&mut start, "first", &first);
    start.activated(digest("second"), &second);
    finish(&mut start, |_| Err("no such server".to_owned()));

    let unknown = Err(OrphanError::Unknown { id: "none".to_owned() });
    let asked = Err(OrphanError::Asked { id: "asked".to_owned() });
    let needed = Err(OrphanError::Needed {
        id: "base".to_owned(),
        why: "needy, which stays, needs base".to_owned(),
    });
    let leaving = Err(OrphanError::Leaving { id: "stuck".to_owned() });
    use OrphanOrder::{Destroy, Forget};
    // The calls that follow when what failed is tried again, and what is left.
    type Row<'a> = (&'a str, OrphanOrder, Result<(), OrphanError>, &'a [&'a str], &'a [&'a str]);
    let all: &[&str] = &["asked", "base", "lone", "needy"];
    let table: [Row; 10] = [
        ("none", Destroy, unknown.clone(), &["2: b [] [stuck]"], all),
        ("none", Forget, unknown, &["2: b [] [stuck]"], all),
        ("asked", Destroy, asked.clone(), &["2: b [] [stuck]"], all),
        ("asked", Forget, asked, &["2: b [] [stuck]"], all),
        ("lone", Destroy, Ok(()), &["2: b [] [lone stuck]"], &["asked", "base", "needy"]),
        ("lone", Forget, Ok(()), &["2: b [] [stuck]"], &["asked", "base", "needy"]),
        ("base", Destroy, needed, &["2: b [] [stuck]"], all),
        ("base", Forget, Ok(()), &["2: b [] [stuck]"], &["asked", "lone", "needy"]),
        ("stuck", Destroy, leaving, &["2: b [] [stuck]"], all),
        // What cannot be destroyed may be forgotten.
        ("stuck", Forget, Ok(()), &[], all),
    ];
    for (id, order, done, calls, left) in table {
        let mut machine = start.clone();
        assert_eq!(machine.order_orphan(id, order), done, "{order:?} {id}");
        assert!(done.is_ok() || machine == start, "{order:?} {id}");
        machine.retry();
        assert_eq!(finish(&mut machine, good), calls, "{order:?} {id}");
        let ids: Vec<String> = machine.standings().into_iter().map(|one| one.id).collect();
        assert_eq!(ids, left, "{order:?} {id}");
    }
    // Before what it needs.
    start.retry();
    assert_eq!(start.order_orphan("needy", Destroy), Ok(()));
    assert_eq!(start.order_orphan("base", Destroy), Ok(()));
    let calls = ["2: a [] [needy]", "2: a [] [base]", "2: b [] [stuck]"];
    assert_eq!(finish(&mut start, good), calls);
    // With its image back, a resource is none that is to be destroyed.
    assert_eq!(start.order_orphan("lone", Destroy), Ok(()));
    activate(&mut start, "first", &first);
    assert!(start.standings().iter().all(|one| one.condition == Condition::Made));
    assert_eq!(start.standings().len(), 5);
}

#[test]
fn an_orphan_on_which_a_plugin_works_is_not_forgotten() {
    let first = definition(&[("db", "a.x", json!({}))]);
    let none = Definition::default();
    let token = |_: &Call| Ok(answer(&json!({"tasks": [{"running": {"token": "t-1"}}]})));
    let mut machine = Machine::default();
    machine.activated(digest("plain"), &none);
    machine.provision(&ImageName::new("first").unwrap(), digest("first"), &first, "web1");
    let Todo::Calls(calls) = machine.next() else { panic!("nothing is to be done") };
    machine.change_state(|state| state.begin(&calls[0]));
    machine.activated(digest("plain"), &none);
    machine.give_up(digest("first"));

    // While it runs, its end is of no interest any more.
    let mut forgotten = machine.clone();
    assert_eq!(forgotten.order_orphan("db", OrphanOrder::Forget), Ok(()));
    forgotten.change_state(|state| state.end(&calls[0], token(&calls[0])));
    assert_eq!((forgotten.next(), forgotten.standings().len()), (Todo::Nothing, 0));
    // By a token it is followed to its end.
    machine.change_state(|state| state.end(&calls[0], token(&calls[0])));
    let working = Err(OrphanError::Working { id: "db".to_owned() });
    assert_eq!(machine.order_orphan("db", OrphanOrder::Forget), working);
    assert_eq!(machine.order_orphan("db", OrphanOrder::Destroy), Ok(()));
    assert_eq!(finish(&mut machine, good), ["a status t-1 [db] []", "1: a [] [db]"]);
    assert_eq!(machine.standings().len(), 0);
}
