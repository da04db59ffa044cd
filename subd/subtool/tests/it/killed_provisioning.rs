//! `subtool provision` that is stopped or killed, and two of it.

use std::process::Child;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;
use testing::eventually;

use crate::site::{Ended, LOGS, Site};

/// Two resources, of which the first is made behind a token. The plugin makes each once for each
/// key, and logs that, and each call.
fn site_of_two() -> Site {
    let site = Site::new("");
    site.plugin(
        "shell",
        r#"request=$(cat)
        key=$(echo "$request" | sed 's/.*"key":"\([0-9a-f]*\)","desired.*/\1/')
        # Of a caller that was killed.
        [ -n "$request" ] || exit 1
        [ "$1" = status ] || echo "asked $key" >>"$log"
        mkdir "$log.$key" 2>/dev/null && echo "made $key" >>"$log"
        case "$1 $request" in
            provision*'"id":"a"'*'"inputs":{}'*) echo '{"tasks": [{"running": {"token": "t"}}]}';;
            *) echo '{"tasks": [{"success": {}}]}';;
        esac"#,
    );
    site.resource("a", &json!({}));
    site.resource("b", &json!({"needs": ["a"]}));
    site
}

/// Runs it under strace with a fault in the place of the call `number` of that name.
fn disturbed(site: &Site, calls: &str, fault: &str, number: u32) -> Ended {
    let command = site.command(&["--format", "json"]);
    let mut strace = std::process::Command::new("strace");
    strace.arg("-o").arg(site.path("trace")).arg("-e");
    strace.arg(format!("inject={calls}:{fault}:when={number}")).arg("--");
    strace.arg(command.get_program()).args(command.get_args()).current_dir(site.path("."));
    Ended::of(&strace.output().unwrap())
}

fn assert_made_once(site: &Site, what: &str) {
    let ended = site.run(&[]);
    let all =
        ["created", "changed", "unchanged"].map(|key| ended.out[key].as_array().unwrap().len());
    assert_eq!((ended.code, all.iter().sum()), (Some(0), 2), "{what}: {ended:?}");
    let log = site.log();
    let of =
        |verb: &str| log.lines().filter_map(|line| line.strip_prefix(verb)).collect::<Vec<_>>();
    let (made, mut asked) = (of("made "), of("asked "));
    asked.sort_unstable();
    asked.dedup();
    assert_eq!((made.len(), asked.len()), (2, 2), "{what}: {log}");
}

#[test]
fn killed_at_any_call_it_goes_on_and_makes_nothing_twice() {
    let mut points = 0;
    for calls in ["write", "fsync", "/^rename", "flock", "/^(clone|vfork)", "mkdir", "wait4,waitid"]
    {
        for number in 1.. {
            let site = site_of_two();
            let ended = disturbed(&site, calls, "signal=KILL", number);
            assert_made_once(&site, &format!("{calls} {number}"));
            if ended.code.is_some() {
                assert_eq!(ended.code, Some(0), "{ended:?}");
                break;
            }
            points += 1;
        }
    }
    assert!(points > 20, "{points}");
}

#[test]
fn a_medium_that_fails_ends_it_and_it_goes_on_later() {
    for fault in ["error=EIO", "error=ENOSPC"] {
        for calls in ["fsync", "/^rename"] {
            for number in 1.. {
                let site = site_of_two();
                let ended = disturbed(&site, calls, fault, number);
                assert_made_once(&site, &format!("{calls} {number}"));
                if ended.code == Some(0) {
                    break;
                }
                // Of the state directory when it is made, and later of the state.
                let place = site.path("state").display().to_string();
                let said = format!("{}{}", ended.said, ended.out["at"]);
                assert!(said.contains(&place), "{said}");
                assert!(number == 1 || said.contains(&format!("cannot write {place}/")), "{said}");
            }
        }
    }
}

fn send(child: &Child, signal: Signal) {
    kill(Pid::from_raw(i32::try_from(child.id()).unwrap()), signal).unwrap();
}

/// Waits as long as the site is there.
const WAITS: &str = "while [ -e \"$log\" ]; do sleep 0.1; done";

#[test]
fn a_call_that_was_cut_short_is_made_again_with_the_same_key() {
    let first = "[ -e \"$log\" ] || first=1";
    let site = Site::new(&format!("{first}\n{LOGS}\n[ -z \"$first\" ] || {{ {WAITS}; }}"));
    site.resource("a", &json!({}));
    let mut child = site.spawn();
    eventually("the plugin runs", || site.log().ends_with('\n'));
    send(&child, Signal::SIGKILL);
    child.wait().unwrap();
    let ended = site.run(&[]);
    assert_eq!((ended.code, &ended.out["created"]), (Some(0), &json!(["a"])));
    let log = site.log();
    let lines: Vec<&str> = log.lines().collect();
    assert_eq!((lines.len(), lines[0]), (2, lines[1]));
}

#[test]
fn a_token_is_on_the_medium_before_it_is_asked_about_and_work_is_started_once() {
    let site = Site::new("");
    let state = site.path("state/state.json");
    site.plugin(
        "shell",
        &format!(
            r#"echo "$1" >>"$log"
            case $1 in
                provision) echo '{{"tasks": [{{"running": {{"token": "t-77"}}}}]}}';;
                status) grep -q t-77 '{}' || exit 9
                    [ -e "$log.end" ] && t='"success": {{}}' || t='"running": {{"token": "t-77"}}'
                    echo "{{\"tasks\": [{{$t}}]}}";;
            esac"#,
            state.display()
        ),
    );
    site.resource("a", &json!({}));
    for _ in 0..3 {
        let before = site.log().len();
        let mut child = site.spawn();
        eventually("it is asked about", || site.log()[before..].contains("status"));
        send(&child, Signal::SIGKILL);
        child.wait().unwrap();
        assert_eq!(site.run(&["--plan"]).out["running"], json!(["a"]));
    }
    std::fs::write(site.path("log.end"), "").unwrap();
    let ended = site.run(&[]);
    assert_eq!((ended.code, &ended.out["created"]), (Some(0), &json!(["a"])));
    assert_eq!(site.log().matches("provision").count(), 1);
    assert_eq!(site.state()["open"], json!([]));
}

#[test]
fn a_signal_ends_it_after_the_plugin_or_after_a_while() {
    // The plugin ends by itself.
    let site = Site::new(&format!(
        "touch \"$log.began\"\nwhile ! [ -e \"$log.end\" ]; do sleep 0.01; done\n{LOGS}"
    ));
    site.resource("a", &json!({}));
    site.resource("b", &json!({"needs": ["a"]}));
    let child = site.spawn();
    eventually("the plugin runs", || site.has("log.began"));
    send(&child, Signal::SIGTERM);
    std::fs::write(site.path("log.end"), "").unwrap();
    let ended = Ended::of(&child.wait_with_output().unwrap());
    assert_eq!((ended.code, &ended.out["created"]), (Some(1), &json!(["a"])), "{ended:?}");
    assert_eq!(ended.out["waiting"], json!(["b"]));
    assert!(ended.said.ends_with("error: stopped by a signal: run again to go on\n"), "{ended:?}");
    // It does not, and is killed.
    let site = Site::new(&format!("trap '' TERM\ntouch \"$log\"; {WAITS}"));
    site.resource("a", &json!({}));
    let child = site.spawn();
    eventually("the plugin runs", || site.has("log"));
    send(&child, Signal::SIGTERM);
    let ended = Ended::of(&child.wait_with_output().unwrap());
    assert_eq!((ended.code, &ended.out["interrupted"]), (Some(1), &json!(["a"])));
    assert_eq!(ended.out["waiting"], json!([]));
    // Work is under way.
    let site = Site::new(
        r#"echo "$1" >>"$log"
        echo '{"tasks": [{"running": {"token": "t"}}]}'"#,
    );
    site.resource("a", &json!({}));
    let child = site.spawn();
    eventually("it is asked about", || site.log().contains("status"));
    send(&child, Signal::SIGTERM);
    let ended = Ended::of(&child.wait_with_output().unwrap());
    assert_eq!((ended.code, &ended.out["running"]), (Some(1), &json!(["a"])));
}

#[test]
fn two_at_once_do_not_share_a_state() {
    let site = Site::new(&format!("touch \"$log\"; {WAITS}"));
    site.resource("a", &json!({}));
    let mut child = site.spawn();
    eventually("the plugin runs", || site.has("log"));
    let ended = site.run(&[]);
    let expected = json!({
        "at": site.path("state").display().to_string(),
        "error": "is in use: another subtool provision runs with this state",
    });
    assert_eq!((ended.code, ended.out), (Some(1), expected));
    // A plan only reads.
    assert_eq!(site.run(&["--plan"]).code, Some(3));
    send(&child, Signal::SIGKILL);
    child.wait().unwrap();
}
