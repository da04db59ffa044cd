//! Decisions: which calls are made of which resources, state and answers.

use provisioning::{Call, Next, Resources, State, plan};
use serde_json::{Value, json};

use crate::{
    answer, bindings, failures, ids, orphans, outputs, planned, problems, provision,
    provision_with, resources, success,
};

/// The calls that would be made of `new` after `old` was provisioned, what is unchanged, and the
/// orphans.
fn step(old: &[(&str, Value)], new: &[(&str, Value)]) -> (Vec<String>, Vec<String>, Vec<String>) {
    let mut state = State::new("web1");
    provision(&resources(old), &mut state);
    let plan = plan(&resources(new), &bindings(), &state);
    assert_eq!(problems(&plan), [""; 0]);
    (planned(&plan), plan.unchanged.clone(), orphans(&plan))
}

#[test]
fn what_differs_is_called_for_in_waves() {
    let size = |gib: u32| json!({"spec": {"gib": gib}});
    let after_db = json!({"needs": ["foodb"]});
    type Row<'a> = (
        &'a str,
        &'a [(&'a str, Value)],
        &'a [(&'a str, Value)],
        (&'a [&'a str], &'a [&'a str], &'a [&'a str]),
    );
    #[rustfmt::skip]
    let table: &[Row] = &[
        ("nothing", &[], &[], (&[], &[], &[])),
        ("a new module with its database", &[],
         &[("module.a", after_db.clone()), ("database.foodb", json!({}))],
         (&["1: aws [foodb] []", "2: ftl [a] []"], &[], &[])),
        ("kinds of one provisioner are one call", &[],
         &[("database.b", json!({})), ("queue.a", json!({})), ("module.m", json!({}))],
         (&["1: aws [a b] []", "1: ftl [m] []"], &[], &[])),
        ("the same again", &[("database.a", size(1)), ("module.b", json!({"needs": ["a"]}))],
         &[("database.a", size(1)), ("module.b", json!({"needs": ["a"]}))],
         (&[], &["a", "b"], &[])),
        ("one of two changes", &[("database.a", size(1)), ("database.b", size(1))],
         &[("database.a", size(2)), ("database.b", size(1))],
         (&["1: aws [a] [a]"], &["b"], &[])),
        ("a module that depends on the former", &[("module.a", json!({}))],
         &[("module.a", json!({})), ("module.b", json!({"needs": ["a"]}))],
         (&["2: ftl [b] []"], &["a"], &[])),
        ("what is needed changes", &[("database.foodb", size(1)), ("module.a", after_db.clone())],
         &[("database.foodb", size(2)), ("module.a", after_db)],
         (&["1: aws [foodb] [foodb]"], &["a"], &[])),
        ("another kind of one provisioner", &[("database.a", json!({}))], &[("queue.a", json!({}))],
         (&["1: aws [a] [a]"], &[], &[])),
        ("removed and kept", &[("database.a", json!({})), ("module.m", json!({}))],
         &[("module.m", json!({}))],
         (&[], &["m"], &["a: its on_removal is keep"])),
        ("removed and destroyed", &[("database.a", json!({"on_removal": "destroy"})), ("module.m", json!({}))],
         &[("module.m", json!({}))],
         (&["2: aws [] [a]"], &["m"], &[])),
        ("all removed, in reverse order",
         &[("database.a", json!({"on_removal": "destroy"})),
           ("module.b", json!({"needs": ["a"], "on_removal": "destroy"})),
           ("queue.c", json!({"needs": ["b"], "on_removal": "destroy"})),
           ("queue.d", json!({"on_removal": "destroy"}))],
         &[],
         (&["1: aws [] [c]", "2: ftl [] [b]", "3: aws [] [a d]"], &[], &[])),
        ("what an orphan needs stays",
         &[("database.a", json!({"on_removal": "destroy"})),
           ("queue.b", json!({"needs": ["a"], "on_removal": "destroy"})),
           ("module.c", json!({"needs": ["b"]}))],
         &[],
         (&[], &[], &["a: b, which stays, needs a", "b: c, which stays, needs b",
                      "c: its on_removal is keep"])),
        ("changed and removed at once",
         &[("database.a", size(1)), ("database.b", json!({"on_removal": "destroy"}))],
         &[("database.a", size(2)), ("queue.c", json!({"needs": ["a"]}))],
         (&["1: aws [a] [a]", "2: aws [c] []", "3: aws [] [b]"], &[], &[])),
        ("only what is no input", &[("database.a", json!({}))],
         &[("database.a", json!({"on_removal": "destroy", "sensitive": ["x"], "on_drift": "repair"}))],
         (&[], &["a"], &[])),
    ];
    for (name, old, new, (calls, unchanged, orphans)) in table {
        let got = step(old, new);
        let owned = |list: &[&str]| list.iter().map(|one| (*one).to_owned()).collect::<Vec<_>>();
        assert_eq!(got, (owned(calls), owned(unchanged), owned(orphans)), "{name}");
    }
}

#[test]
fn a_plugin_is_told_of_its_resources_that_stay_as_they_are() {
    let of = |n: u8| {
        resources(&[
            ("database.a", json!({"spec": {"n": n}})),
            ("queue.b", json!({})),
            ("module.c", json!({"needs": ["a"]})),
            ("database.d", json!({"needs": ["c"]})),
        ])
    };
    let mut state = State::new("web1");
    provision_with(&of(1), &mut state, |call| {
        let of_d = call.ids().contains("d");
        Ok(success(&if of_d { json!({"d": {"port": 1}}) } else { json!({}) }))
    });
    let Next::Calls(calls) = plan(&of(2), &bindings(), &state).next(&state) else { panic!() };
    let unchanged = &calls[0].request().unchanged;
    let told: Vec<_> =
        unchanged.iter().map(|one| (one.resource.id.as_str(), one.outputs.len())).collect();
    assert_eq!((calls.len(), told), (1, vec![("b", 0), ("d", 1)]));
}

#[test]
fn what_is_wrong_is_told_before_anything_runs() {
    let mut state = State::new("web1");
    provision(&resources(&[("database.old", json!({}))]), &mut state);
    let said = |all: &[(&str, Value)]| {
        let plan = plan(&resources(all), &bindings(), &state);
        assert_eq!(plan.next(&state), Next::Refused);
        problems(&plan).join("; ")
    };
    let needs = |ids: &[&str]| json!({"needs": ids});
    let sql = |version: &str| json!({"provides": {"sql": version}});
    let app = |range: &str| json!({"requires": {"sql": range}});
    let of_db = |range: &str| json!({"requires": {"sql": range}, "needs": ["a"]});
    #[rustfmt::skip]
    let table: &[(&[(&str, Value)], &str)] = &[
        (&[("cache.a", json!({}))], "a.json: kind: no provisioner is bound to the kind `cache`"),
        (&[("module.a", needs(&["b"]))], "a.json: needs: there is no resource `b`"),
        (&[("module.a", needs(&["b"])), ("module.b", needs(&["a"])), ("module.c", needs(&["a"]))],
         "a.json: needs: these need each other: a, b; and these need them: c"),
        (&[("module.a", needs(&["a"]))], "a.json: needs: these need each other: a"),
        (&[("module.old", json!({}))],
         "old.json: kind: `old` is or may be there as a `database`, of aws: give the new resource another id"),
        (&[("module.m", app(">=15"))], "m.json: requires.sql: nothing provides `sql`"),
        (&[("module.m", app(">=15")), ("database.a", sql("14.1"))],
         "m.json: requires.sql: >=15 is required, and a provides 14.1"),
        // What the resource needs counts, if it provides it.
        (&[("module.m", of_db(">=15")), ("database.a", sql("14")), ("database.b", sql("15"))],
         "m.json: requires.sql: >=15 is required, and a provides 14"),
    ];
    for (all, expected) in table {
        assert_eq!(said(all), *expected);
    }
    let fine: &[&[(&str, Value)]] = &[
        &[("module.m", app(">=15")), ("database.a", sql("14")), ("database.b", sql("15.1"))],
        &[("module.m", of_db(">=15, <16")), ("database.a", sql("15.1"))],
    ];
    for all in fine {
        assert_eq!(problems(&plan(&resources(all), &bindings(), &state)), [""; 0]);
    }
}

#[test]
fn a_kind_that_is_bound_twice_is_refused_even_if_nothing_has_it() {
    let twice = provisioning::Bindings::parse(
        "[[provisioner]]\nname = 'one'\nkinds = ['a', 'b']\nuser = 'root'\n\
         [[provisioner]]\nname = 'two'\nkinds = ['b']\nuser = 'root'\n",
    )
    .unwrap();
    let state = State::new("web1");
    let plan = plan(&resources(&[("a.x", json!({})), ("c.y", json!({}))]), &twice, &state);
    let expected = [
        "provisioners.toml: provisioner: the kind `b` is bound to one and to two",
        "y.json: kind: no provisioner is bound to the kind `c`",
    ];
    assert_eq!(problems(&plan), expected);
    assert_eq!(
        (&*plan.bound_twice, &*plan.unbound),
        (&["b".to_owned()][..], &["c".to_owned()][..])
    );
}

#[test]
fn outputs_are_inputs_of_what_needs_them_and_start_nothing() {
    let of = |gib: u32| {
        resources(&[
            ("database.db", json!({"spec": {"gib": gib}, "sensitive": ["password"]})),
            ("module.app", json!({"needs": ["db"]})),
        ])
    };
    let mut state = State::new("web1");
    let mut seen = Vec::new();
    let mut port = 5_432;
    let mut run = |all: &Resources, state: &mut State| {
        port += 1;
        let told = json!({"db": {"port": port, "password": "x"}});
        provision_with(all, state, |call| {
            if let Some(want) = call.request().desired.first() {
                seen.push(json!({&want.resource.id: want.inputs}));
            }
            let of_app = json!({});
            Ok(success(if call.provisioner().0 == "aws" { &told } else { &of_app }))
        })
    };
    assert_eq!(run(&of(1), &mut state), ["1: aws [db] []", "2: ftl [app] []"]);
    assert_eq!(failures(&state), [""; 0]);
    assert_eq!(run(&of(2), &mut state), ["1: aws [db] [db]"]);
    let told = json!({"port": 5_434, "password": "x"});
    assert_eq!(outputs(&state, "db").map(Value::Object), Some(told));
    let first = json!({"port": 5_433, "password": "x"});
    assert_eq!(seen, [json!({"db": {}}), json!({"app": {"db": first}}), json!({"db": {}})]);
    // People see no secrets, neither of others nor of its own.
    let changed = resources(&[
        ("database.db", json!({"spec": {"gib": 3}, "sensitive": ["password"]})),
        ("module.app", json!({"needs": ["db"], "spec": {"n": 1}})),
    ]);
    let shown: Vec<String> = plan(&changed, &bindings(), &state)
        .calls
        .iter()
        .map(|call| serde_json::to_string(&state.without_secrets(&call.request)).unwrap())
        .collect();
    assert_eq!(shown.len(), 2);
    assert!(shown.iter().all(|text| text.contains("5434") && !text.contains("\"x\"")), "{shown:?}");
}

/// A plugin that works by itself: `status` answers are taken from the list, last first.
fn run_tokens(state: &mut State, mut said: Vec<Value>) -> Vec<String> {
    let all = resources(&[("database.a", json!({}))]);
    provision_with(&all, state, |_| Ok(answer(&json!({"tasks": [said.pop().unwrap()]}))))
}

#[test]
fn a_token_is_followed_to_its_end() {
    let running = |token: &str| json!({"running": {"token": token}});
    let done = json!({"success": {"outputs": {"a": {"port": 1}}}});
    let mut state = State::new("web1");
    let calls = run_tokens(&mut state, vec![done.clone(), running("t"), running("t")]);
    let status = "aws status t [a] []";
    assert_eq!(calls, ["1: aws [a] []", status, status]);
    assert_eq!(outputs(&state, "a").map(Value::Object), Some(json!({"port": 1})));

    // It fails.
    let mut state = State::new("web1");
    let calls = run_tokens(&mut state, vec![json!({"failed": {"error": "quota"}}), running("t")]);
    assert_eq!(
        (calls, failures(&state)),
        (vec!["1: aws [a] []".into(), status.into()], vec!["a: quota".into()])
    );
    // What has failed is called again with the same key.
    let former = plan(&resources(&[("database.a", json!({}))]), &bindings(), &State::new("web1"));
    let mut keys = vec![former.calls[0].request.key.clone()];
    let calls = provision_with(&resources(&[("database.a", json!({}))]), &mut state, |call| {
        keys.push(call.request().key.clone());
        Ok(success(&json!({})))
    });
    assert_eq!((calls, keys[0] == keys[1]), (vec!["1: aws [a] []".to_owned()], true));

    // It is forgotten once.
    let mut state = State::new("web1");
    let calls =
        run_tokens(&mut state, vec![done, running("u"), json!({"unknown": {}}), running("t")]);
    assert_eq!(calls, ["1: aws [a] []", status, "1: aws [a] []", "aws status u [a] []"]);
    assert_eq!(failures(&state), [""; 0]);

    // It is forgotten each time.
    let mut state = State::new("web1");
    let each = [json!({"unknown": {"token": "t"}}), running("t")];
    let calls = run_tokens(&mut state, [each.clone(), each.clone(), each].concat());
    assert_eq!((calls.len(), failures(&state)), (6, vec!["a: it forgot its token 3 times".into()]));
}

#[test]
fn work_goes_on_after_a_crash_at_any_moment() {
    let all = resources(&[("database.a", json!({})), ("module.b", json!({"needs": ["a"]}))]);
    let next = |state: &State| match plan(&all, &bindings(), state).next(state) {
        Next::Calls(calls) => calls,
        other => panic!("{other:?}"),
    };
    let read = |state: &State| State::parse(&serde_json::to_string(state).unwrap()).unwrap();
    let mut state = State::new("web1");
    let first = next(&state);
    state.begin(&first[0]);
    // Killed during the call: the same call again.
    let mut state = read(&state);
    assert_eq!((next(&state), state.interrupted()), (first.clone(), ids(&["a"])));
    state.begin(&first[0]);
    state.end(&first[0], Ok(answer(&json!({"tasks": [{"running": {"token": "t"}}]}))));
    // Killed with a token: it is asked about.
    let mut state = read(&state);
    assert_eq!(state.interrupted(), ids(&[]));
    let question = next(&state);
    let Call::Status(status) = &question[0] else { panic!("{question:?}") };
    assert_eq!((&*status.token, &status.ids), ("t", &ids(&["a"])));
    state.begin(&question[0]);
    state.end(&question[0], Ok(success(&json!({"a": {"port": 1}}))));
    let mut state = read(&state);
    assert_eq!(provision(&all, &mut state), ["2: ftl [b] []"]);
    assert_eq!(plan(&all, &bindings(), &state).next(&state), Next::Finished);
}

#[test]
fn answers_that_are_not_about_the_call_fail_it() {
    let all = resources(&[("database.a", json!({})), ("queue.b", json!({}))]);
    let running = |token: &str| json!({"running": {"token": token}});
    let good = json!({"success": {}});
    let of = |ids: &[&str], task: &Value| {
        let mut task = task.clone();
        task["ids"] = json!(ids);
        task
    };
    let table = [
        (json!([]), "its answer says nothing about `a`"),
        (json!([of(&["a"], &good)]), "its answer says nothing about `b`"),
        (json!([of(&["a", "c"], &good)]), "its answer is about `c` too"),
        (
            json!([{}]),
            "its answer has a task that is not one of `running`, `success`, `failed` and `unknown`",
        ),
        (
            json!([{"success": {}, "failed": {"error": "x"}}]),
            "its answer has a task that is not one of `running`, `success`, `failed` and `unknown`",
        ),
        (json!([{"success": {"outputs": {"c": {}}}}]), "its answer has outputs of `c`"),
        (json!([running("")]), "its token has 0 bytes, and not 1-4096"),
        (
            json!([of(&["a"], &running("t")), of(&["b"], &running("t"))]),
            "it answered with a token of other work",
        ),
        (json!([{"unknown": {}}]), "it answered that it knows no token, and got none"),
    ];
    for (tasks, expected) in table {
        let mut state = State::new("web1");
        provision_with(&all, &mut state, |_| Ok(answer(&json!({"tasks": tasks}))));
        let expected = [format!("a: {expected}"), format!("b: {expected}")];
        assert_eq!(failures(&state), expected, "{tasks}");
        assert!(state.running().is_empty(), "{tasks}");
    }
}

#[test]
fn a_wrong_answer_about_a_token_keeps_the_token() {
    let all = resources(&[("database.a", json!({}))]);
    let two = json!([{"success": {}}, {"success": {}}]);
    let table = [
        (Err("exit status: 1".to_owned()), "exit status: 1"),
        (
            Ok(json!([{"running": {"token": "other"}}])),
            "it answered with another token than it was asked about",
        ),
        (Ok(two), "it answered with more than one task"),
    ];
    for (said, expected) in table {
        let mut state = State::new("web1");
        provision_with(&all, &mut state, |call| match call {
            Call::Provision(_) => Ok(answer(&json!({"tasks": [{"running": {"token": "t"}}]}))),
            Call::Status(_) => said.clone().map(|tasks| answer(&json!({"tasks": tasks}))),
        });
        assert_eq!(failures(&state), [format!("a: {expected}")]);
        assert_eq!(state.running(), ids(&["a"]));
        // Asked again, it is done.
        assert_eq!(provision(&all, &mut state), ["aws status t [a] []"]);
        assert!(outputs(&state, "a").is_some());
    }
}

#[test]
fn parts_of_a_call_may_end_differently() {
    let all =
        resources(&[("database.a", json!({})), ("queue.b", json!({})), ("queue.c", json!({}))]);
    let tasks = json!([
        {"ids": ["a"], "success": {"outputs": {"a": {"n": 1}}}},
        {"ids": ["b"], "failed": {"error": "quota"}},
        {"ids": ["c"], "running": {"token": "t"}},
        {"ids": ["c"], "success": {"outputs": {"c": {"n": 2}}}},
    ]);
    let mut state = State::new("web1");
    let calls = provision_with(&all, &mut state, |call| match call {
        Call::Provision(_) => Ok(answer(&json!({"tasks": tasks}))),
        Call::Status(_) => Ok(success(&json!({"c": {"m": 3}}))),
    });
    assert_eq!(calls, ["1: aws [a b c] []", "aws status t [c] []"]);
    assert_eq!(failures(&state), ["b: quota"]);
    assert_eq!(outputs(&state, "a").map(Value::Object), Some(json!({"n": 1})));
    assert_eq!(outputs(&state, "c").map(Value::Object), Some(json!({"n": 2, "m": 3})));
    assert_eq!(provision(&all, &mut state), ["1: aws [b] []"]);
}

#[test]
fn a_failure_ends_it_after_its_wave() {
    let all = resources(&[
        ("database.bar", json!({})),
        ("module.foo", json!({})),
        ("module.baz", json!({"needs": ["foo", "bar"]})),
    ]);
    let mut state = State::new("web1");
    let calls = provision_with(&all, &mut state, |call| match call.provisioner().0 {
        "aws" => Err("exit status: 1".to_owned()),
        _ => Ok(success(&json!({}))),
    });
    assert_eq!(calls, ["1: aws [bar] []", "1: ftl [foo] []"]);
    assert_eq!(failures(&state), ["bar: exit status: 1"]);
    assert_eq!(plan(&all, &bindings(), &state).next(&state), Next::Failed);
    assert_eq!(provision(&all, &mut state), ["1: aws [bar] []", "2: ftl [baz] []"]);
}

#[test]
fn what_was_tried_is_not_forgotten() {
    let of = |gib: u32, on_removal: &str| {
        resources(&[("database.a", json!({"spec": {"gib": gib}, "on_removal": on_removal}))])
    };
    let fail = |_: &Call| Err("exit status: 1".to_owned());
    let none = resources(&[]);
    // Never made, perhaps half: it is destroyed like any other.
    let mut state = State::new("web1");
    provision_with(&of(1, "destroy"), &mut state, fail);
    assert_eq!(provision_with(&none, &mut state, fail), ["1: aws [] [a?]"]);
    assert_eq!(provision_with(&none, &mut state, fail), ["1: aws [] [a?]"]);
    assert_eq!(provision(&none, &mut state), ["1: aws [] [a?]"]);
    assert_eq!(state, State::new("web1"));
    // Or is an orphan.
    provision_with(&of(1, "keep"), &mut state, fail);
    let plan_of_none = plan(&none, &bindings(), &state);
    assert_eq!(orphans(&plan_of_none), ["a: its on_removal is keep"]);
    assert_eq!(provision(&of(1, "keep"), &mut state), ["1: aws [a] []"]);
    // A change that failed, and is taken back.
    provision_with(&of(2, "keep"), &mut state, fail);
    assert_eq!(provision(&of(1, "keep"), &mut state), ["1: aws [a] [a a?]"]);
    assert_eq!(provision(&of(1, "keep"), &mut state), [""; 0]);
    // A removal that failed, and is taken back.
    provision(&of(1, "destroy"), &mut state);
    provision_with(&none, &mut state, fail);
    assert_eq!(provision(&of(1, "destroy"), &mut state), ["1: aws [a] [a]"]);
}

#[test]
fn a_newer_request_waits_for_the_work_of_the_former() {
    let of = |gib: u32| resources(&[("database.a", json!({"spec": {"gib": gib}}))]);
    let mut state = State::new("web1");
    provision_with(&of(1), &mut state, |call| match call {
        Call::Provision(_) => Ok(answer(&json!({"tasks": [{"running": {"token": "t"}}]}))),
        Call::Status(_) => Err("killed".to_owned()),
    });
    let calls = provision(&of(2), &mut state);
    assert_eq!(calls, ["aws status t [a] []", "1: aws [a] [a]"]);
    let none = resources(&[]);
    assert_eq!(orphans(&plan(&none, &bindings(), &state)), ["a: its on_removal is keep"]);
}

#[test]
fn one_that_removes_is_as_the_last_file_says() {
    let of = |on_removal: &str| resources(&[("database.a", json!({"on_removal": on_removal}))]);
    let mut state = State::new("web1");
    provision(&of("keep"), &mut state);
    assert_eq!(provision(&of("destroy"), &mut state), [""; 0]);
    assert_eq!(provision(&resources(&[]), &mut state), ["1: aws [] [a]"]);
    assert!(!state.knows("a"));
}

#[test]
fn the_plugin_that_made_it_destroys_it() {
    let mut state = State::new("web1");
    let all = resources(&[("database.a", json!({"on_removal": "destroy"}))]);
    provision(&all, &mut state);
    let none = provisioning::Bindings::default();
    let plan = plan(&resources(&[]), &none, &state);
    assert_eq!((problems(&plan), planned(&plan)), (vec![], vec!["1: aws [] [a]".to_owned()]));
    assert_eq!(plan.calls[0].user, "cloud");
}
