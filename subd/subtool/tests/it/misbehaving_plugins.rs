//! Plugins that hang, print garbage, or answer for others.

use serde_json::json;

use crate::site::{Ended, LOGS, Site, binding};

/// What is said of a plugin that runs `script`, about the resource `a`.
fn said(script: &str) -> String {
    said_within(60, script)
}

/// As [`said`], of a plugin that may take so many seconds.
fn said_within(seconds: u32, script: &str) -> String {
    let site = Site::new(script);
    let binding = binding("shell", "k", "root");
    site.write("provisioners.toml", &binding.replace("= 60", &format!("= {seconds}")));
    site.resource("a", &json!({}));
    let ended = site.run(&[]);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert_eq!(ended.out["failed"][0]["id"], "a");
    let prefix = "error: a: dom-provisioner-shell: ";
    let lines = ended.said.lines().filter_map(|line| line.strip_prefix(prefix));
    lines.collect::<Vec<_>>().join("; ")
}

#[test]
fn each_is_named_with_its_resource() {
    let table = [
        ("exit 1", "exit status: 1"),
        ("echo first >&2; echo 'quota exceeded' >&2; exit 1", "exit status: 1: quota exceeded"),
        ("kill -9 $$", "signal: 9 (SIGKILL)"),
        ("", "its answer: is no JSON object"),
        ("echo garbage", "its answer: is no JSON object"),
        ("head -c 1000 /dev/urandom", "its answer: is no JSON object"),
        ("head -c 1000000000 /dev/zero", "prints more than 1048576 bytes"),
        ("head -c 1000000000 /dev/zero >&2; exit 1", "exit status: 1: "),
        (r#"echo '{"tasks": []}'"#, "its answer says nothing about `a`"),
        (r#"echo '{"tasks": [{"ids": ["b"], "success": {}}]}'"#, "its answer is about `b` too"),
        (r#"echo '{"tasks": [{"failed": {"error": "no such network"}}]}'"#, "no such network"),
        (
            r#"[ $1 = status ] && t=other || t=mine
            echo "{\"tasks\": [{\"running\": {\"token\": \"$t\"}}]}""#,
            "it answered with another token than it was asked about",
        ),
        (
            r#"[ $1 = status ] && exit 7; echo '{"tasks": [{"running": {"token": "t"}}]}'"#,
            "exit status: 7",
        ),
        (
            r#"[ $1 = status ] && t='"unknown": {}' || t='"running": {"token": "t"}'
            echo "{\"tasks\": [{$t}]}""#,
            "it forgot its token 3 times",
        ),
    ];
    for (script, expected) in table {
        let said = said(script);
        // What comes before the last line of a gigabyte is not pinned.
        let said = if expected.ends_with(": ") { &said[..expected.len()] } else { &said };
        assert_eq!(said, expected, "{script}");
    }
}

#[test]
fn one_that_hangs_is_killed_with_what_it_has_started() {
    let said = said_within(1, "sleep 600 & sleep 600");
    assert_eq!(said, "has not answered `provision` within 1 s, and was killed");
}

#[test]
fn one_that_hangs_when_it_is_asked_about_its_work_is_killed() {
    let running = r#"echo '{"tasks": [{"running": {"token": "t"}}]}'"#;
    let said = said_within(5, &format!("[ $1 = status ] && sleep 600; {running}"));
    assert_eq!(said, "has not answered `status` within 5 s, and was killed");
}

#[test]
fn the_token_of_other_work_is_refused() {
    let site = Site::new(r#"echo '{"tasks": [{"running": {"token": "same"}}]}'"#);
    site.resource("a", &json!({}));
    site.plugin(
        "shell",
        r#"cat >/dev/null; [ $1 = status ] && exit 1
        echo '{"tasks": [{"ids": ["a"], "running": {"token": "same"}},
            {"ids": ["b"], "running": {"token": "same"}}]}'"#,
    );
    site.resource("b", &json!({}));
    let failed = site.run(&[]).out["failed"].clone();
    let error = "it answered with a token of other work";
    let of = |id: &str| json!({"id": id, "provisioner": "shell", "error": error});
    assert_eq!(failed, json!([of("a"), of("b")]));
}

#[test]
fn a_plugin_or_user_that_is_not_there_is_named_before_anything_runs() {
    let site = Site::new(LOGS);
    site.resource("a", &json!({}));
    site.resource("b", &json!({"kind": "other", "needs": ["a"]}));
    let one = binding("shell", "k", "root");
    site.write("provisioners.toml", &(one.clone() + &binding("none", "other", "root")));
    let error = |ended: &Ended| ended.out["error"].as_str().unwrap().to_owned();
    let ended = site.run(&[]);
    assert!(error(&ended).starts_with("dom-provisioner-none is in none of /"), "{ended:?}");
    site.plugin("none", "exit 0");
    site.write("provisioners.toml", &(one + &binding("none", "other", "no-such-user")));
    assert_eq!(error(&site.run(&[])), "there is no user `no-such-user`");
    assert_eq!((site.log(), site.has("state/state.json")), (String::new(), false));
}

#[test]
fn what_was_created_before_a_failure_is_asked_for_with_the_same_key() {
    let site = Site::new(&format!("fail=$(test -e \"$log\" || echo 1)\n{LOGS}\nexit $fail"));
    site.resource("a", &json!({}));
    let ended = site.run(&[]);
    assert_eq!((ended.code, &ended.out["failed"][0]["error"]), (Some(1), &json!("exit status: 1")));
    assert_eq!(site.run(&["--plan"]).out["calls"][0]["previous"], json!([]));
    let ended = site.run(&[]);
    assert_eq!((ended.code, &ended.out["created"]), (Some(0), &json!(["a"])));
    let log = site.log();
    let lines: Vec<&str> = log.lines().collect();
    assert_eq!((lines.len(), lines[0].len() > 70, lines[0]), (2, true, lines[1]));
}

#[test]
fn one_failure_does_not_stop_others_of_the_wave_but_those_after_it() {
    let site = Site::new("exit 1");
    site.plugin("other", LOGS);
    let both = binding("shell", "k", "root") + &binding("other", "other", "root");
    site.write("provisioners.toml", &both);
    site.resource("a", &json!({}));
    site.resource("b", &json!({"kind": "other"}));
    site.resource("c", &json!({"kind": "other", "needs": ["b"]}));
    let ended = site.run(&[]);
    let keys = ["created", "waiting", "unchanged"];
    let expected = [json!(["b"]), json!(["c"]), json!([])];
    assert_eq!(keys.map(|key| ended.out[key].clone()), expected);
}

#[test]
fn a_plugin_that_takes_its_time_is_waited_for_as_long_as_the_caller_says() {
    let site = Site::new(
        r#"echo "$1" >>"$log"
        echo '{"tasks": [{"running": {"token": "t"}}]}'"#,
    );
    site.resource("a", &json!({}));
    let ended = site.run(&["--timeout", "1s"]);
    assert_eq!((ended.code, &ended.out["running"]), (Some(1), &json!(["a"])));
    assert!(ended.said.contains("gave up after 1 s: run again to go on"), "{}", ended.said);
    // The waits between questions grow: 50, 100, 200, 400 ms.
    let log = site.log();
    assert_eq!((&log[..10], log.lines().count() < 7), ("provision\n", true), "{log}");
}
