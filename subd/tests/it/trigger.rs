//! Services around updates, driven by a command that records what it is told.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use api::subd::{Activity, PollReply, RetryTriggers, TriggerFailure, UpdateOutcome};

use crate::fixture::{Edit, Source, Sub, request};

/// Records service, verb and the content of `/version`, and does what the service's name says.
const SCRIPT: &str = r#"#!/bin/sh
cd "$(dirname "$0")"
echo "$1 $2 $(cat root/version 2>/dev/null)" >> log
case "$1" in
    fails) echo "cannot $2"; exit 7;;
    broken*) test -e repaired || { echo "cannot $2"; exit 7; };;
    hangs) sleep 1000;;
esac
"#;

struct Machine {
    place: tempfile::TempDir,
    /// How many lines of the log were looked at.
    seen: AtomicUsize,
    sub: Sub,
    source: Source,
}

impl Machine {
    async fn start() -> Self {
        let place = tempfile::tempdir().unwrap();
        std::fs::create_dir(place.path().join("root")).unwrap();
        let script = place.path().join("service");
        std::fs::write(&script, SCRIPT).unwrap();
        std::fs::set_permissions(&script, PermissionsExt::from_mode(0o755)).unwrap();
        let sub = subd(place.path()).await;
        Self { sub, source: Source::start().await, place, seen: AtomicUsize::new(0) }
    }

    async fn restart(self) -> Self {
        self.sub.stop().await;
        Self { sub: subd(self.place.path()).await, ..self }
    }

    /// What was recorded since the last look.
    fn log(&self) -> Vec<String> {
        let text = std::fs::read_to_string(self.place.path().join("log")).unwrap_or_default();
        let seen = self.seen.swap(text.lines().count(), Ordering::SeqCst);
        text.lines().skip(seen).map(str::to_owned).collect()
    }

    /// Converges to a tree with `version` in `/version` under an image with these services.
    async fn update(&self, id: u64, version: &str, services: &[&str]) -> Vec<TriggerFailure> {
        let (_, have) = self.sub.tree().await;
        let want = Edit::of(&have, &self.source).file("/version", version).done();
        let triggers = triggers(services);
        let last = self.sub.converge_with(id, &self.source, &want, &triggers).await;
        assert_eq!(last.outcome, UpdateOutcome::Done);
        last.trigger_failures
    }

    async fn stop(self) {
        self.source.stop().await;
        self.sub.stop().await;
    }
}

async fn subd(place: &Path) -> Sub {
    let command = place.join("service");
    let flags = ["--service-command", command.to_str().unwrap(), "--service-timeout", "1"];
    Sub::start_on(&place.join("root"), &flags).await
}

fn triggers(services: &[&str]) -> String {
    let trigger = |word: &&str| {
        let (service, reload) =
            word.strip_suffix(":reload").map_or((*word, false), |word| (word, true));
        format!(r#"{{"MatchLines":["/version"],"Service":"{service}","DoReload":{reload}}}"#)
    };
    format!("[{}]", services.iter().map(trigger).collect::<Vec<_>>().join(","))
}

#[tokio::test(flavor = "multi_thread")]
async fn services_are_stopped_before_the_change_and_started_after_it() {
    let machine = Machine::start().await;
    assert_eq!(machine.update(1, "one", &["b", "a10", "a9"]).await, []);
    // They may run already, though no image has named them yet.
    let expected =
        ["a9 stop ", "a10 stop ", "b stop ", "a9 start one", "a10 start one", "b start one"];
    assert_eq!(machine.log(), expected);
    assert_eq!(machine.update(2, "two", &["b:reload", "c:reload", "a9"]).await, []);
    let expected = [
        "a9 stop one",
        "a10 stop one",
        "b stop one",
        "a9 start two",
        "b start two",
        "c reload two",
    ];
    assert_eq!(machine.log(), expected);
    // The triggers of the last image are remembered.
    let machine = machine.restart().await;
    assert_eq!(machine.update(3, "three", &["a9", "reboot"]).await, []);
    assert_eq!(machine.log(), ["a9 stop two", "reboot reboot three"]);
    machine.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn failures_are_reported_and_stay_visible_until_the_next_good_update() {
    let machine = Machine::start().await;
    let failures = machine.update(1, "one", &["fails", "hangs", "works", "reboot"]).await;
    assert_eq!(failures, [], "a reboot starts everything");
    assert_eq!(machine.log(), ["reboot reboot one"]);
    let failures = machine.update(2, "two", &["fails", "hangs", "works"]).await;
    let failure = |service: &str, verb: &str, output: &str| TriggerFailure {
        service: service.to_owned(),
        verb: verb.to_owned(),
        output: output.to_owned(),
    };
    let expected = [
        failure("fails", "stop", "cannot stop\nexit status: 7"),
        failure("hangs", "stop", "killed after 1 s"),
        failure("fails", "start", "cannot start\nexit status: 7"),
        failure("hangs", "start", "killed after 1 s"),
    ];
    assert_eq!(failures, expected);
    assert_eq!(machine.log().last().unwrap(), "works start two");
    let machine = machine.restart().await;
    let reply = machine.sub.poll().await;
    assert_eq!(reply.trigger_failures, expected);
    assert_eq!(reply.last_image.unwrap().as_str(), "test/2");
    let (page, html) = machine.sub.client.get("/").await.unwrap();
    let html = String::from_utf8(html.to_vec()).unwrap();
    assert!(
        page == 200 && html.contains("fails stop") && html.contains("exit status: 7"),
        "{html}"
    );
    machine.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn services_run_again_after_an_update_that_was_rolled_back() {
    let machine = Machine::start().await;
    assert_eq!(machine.update(1, "one", &["a", "b"]).await, []);
    machine.log();
    let (_, have) = machine.sub.tree().await;
    let want = Edit::of(&have, &machine.source).file("/version", "two").file("/x", "x").done();
    let (_, plan) = machine.sub.plan(&want).await;
    machine.sub.fetch_for(2, &machine.source, &plan).await;
    let (reply, plan) = machine.sub.plan(&want).await;
    machine.sub.prepare(&request(2, &reply, &want, plan)).await.unwrap();
    std::fs::write(machine.sub.at("/x"), "mine").unwrap();
    let last = machine.sub.commit(2).await;
    assert!(matches!(last.outcome, UpdateOutcome::RolledBack(_)), "{last:?}");
    assert_eq!(machine.log(), ["a stop one", "b stop one", "a start one", "b start one"]);
    machine.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn triggers_that_failed_are_run_again_by_an_order() {
    let machine = Machine::start().await;
    let retry = async || {
        machine.sub.client.call::<RetryTriggers>(&()).await.unwrap();
        let idle = |reply: &PollReply| reply.activity == Activity::Idle;
        machine.sub.poll_until(idle).await.trigger_failures
    };
    assert_eq!(retry().await, []);
    let services = ["broken", "broken2:reload", "a"];
    let failures = machine.update(1, "one", &services).await;
    let failure = |service: &str, verb: &str| TriggerFailure {
        service: service.to_owned(),
        verb: verb.to_owned(),
        output: format!("cannot {verb}\nexit status: 7"),
    };
    let expected = [failure("broken", "start"), failure("broken2", "reload")];
    assert_eq!(failures, expected);
    machine.log();
    assert_eq!(retry().await, expected);
    assert_eq!(machine.log(), ["broken start one", "broken2 reload one"]);
    // A service that could not be stopped is started after it, as the image still has it.
    let expected = [failure("broken", "stop"), failure("broken", "start")];
    assert_eq!(machine.update(2, "two", &["a", "broken"]).await, expected);
    std::fs::write(machine.place.path().join("repaired"), "").unwrap();
    machine.log();
    assert_eq!(retry().await, []);
    assert_eq!(machine.log(), ["broken stop two", "broken2 reload two", "broken start two"]);
    machine.stop().await;
}
