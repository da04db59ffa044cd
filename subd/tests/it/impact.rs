//! What an update does to the machine beside its files: disruption, reboots, health checks, the way
//! back, and the restart of subd itself; with commands that record what they are told.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use api::fault::{Fault, FaultCode};
use api::subd::{
    Activity, CheckHealth, Commit, CommitRequest, Health, LastUpdate, Pause, Paused, PollReply,
    Resume, TriggerFailure, UpdateOutcome,
};
use model::image::HealthCheck;
use model::tree::Time;
use model::trigger::Triggers;
use rpc::client::CallError;

use crate::fixture::{Edit, Source, Sub, request};

/// Records service and verb with the content of `/version`.
const SERVICE: &str = r#"#!/bin/sh
cd "$(dirname "$0")"
echo "$1 $2 $(cat root/version)" >> log
test "$1" != fails
"#;

/// Records the question and exits as the file `permission` says, once there is no file `wait`.
const DISRUPTION: &str = r#"#!/bin/sh
cd "$(dirname "$0")"
test "$1" = check || echo "$1" >> log
while test -e wait; do sleep 0.02; done
exit "$(cat permission)"
"#;

struct Machine {
    place: tempfile::TempDir,
    /// How many lines of the log were looked at.
    seen: AtomicUsize,
    sub: Sub,
    source: Source,
}

impl Machine {
    async fn start(flags: &[&str]) -> Self {
        let place = tempfile::tempdir().unwrap();
        std::fs::create_dir(place.path().join("root")).unwrap();
        std::fs::write(place.path().join("root/version"), "0").unwrap();
        for (name, script) in [("service", SERVICE), ("disruption", DISRUPTION)] {
            std::fs::write(place.path().join(name), script).unwrap();
            let mode = PermissionsExt::from_mode(0o755);
            std::fs::set_permissions(place.path().join(name), mode).unwrap();
        }
        let sub = subd(place.path(), flags).await;
        Self { sub, source: Source::start().await, place, seen: AtomicUsize::new(0) }
    }

    async fn restart(self, flags: &[&str]) -> Self {
        self.sub.stop().await;
        Self { sub: subd(self.place.path(), flags).await, ..self }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.place.path().join(name)
    }

    /// What was recorded since the last look.
    fn log(&self) -> Vec<String> {
        let text = std::fs::read_to_string(self.at("log")).unwrap_or_default();
        let seen = self.seen.swap(text.lines().count(), Ordering::SeqCst);
        text.lines().skip(seen).map(str::to_owned).collect()
    }

    /// Waits until this is recorded.
    async fn logs(&self, expected: &[&str]) {
        let mut log = Vec::new();
        testing::eventually_async("all calls are recorded", async || {
            log.extend(self.log());
            assert!(log.len() <= expected.len(), "{log:?}");
            log == expected
        })
        .await;
    }

    /// Stages an update that writes `version`, under an image with these triggers.
    async fn stage(&self, id: u64, version: &str, triggers: &str, also: impl FnOnce(&mut Order)) {
        let (_, have) = self.sub.tree().await;
        let want = Edit::of(&have, &self.source).file("/version", version).done();
        let (_, needs) = self.sub.plan(&want).await;
        self.sub.fetch_for(id, &self.source, &needs).await;
        let (reply, plan) = self.sub.plan(&want).await;
        let mut request = request(id, &reply, &want, plan);
        request.triggers = Triggers::from_json(triggers).unwrap();
        also(&mut request);
        self.sub.prepare(&request).await.unwrap();
    }

    async fn update(
        &self,
        id: u64,
        version: &str,
        triggers: &str,
        health_check: Option<HealthCheck>,
    ) -> LastUpdate {
        self.stage(id, version, triggers, |order| order.health_check = health_check).await;
        self.sub.commit(id).await
    }

    async fn commit(&self, update_id: u64) -> Result<(), CallError> {
        self.sub.client.call::<Commit>(&CommitRequest { update_id }).await.map(|_| ())
    }

    async fn stop(self) {
        self.source.stop().await;
        self.sub.stop().await;
    }
}

type Order = api::subd::PrepareRequest;

async fn subd(place: &Path, flags: &[&str]) -> Sub {
    let command = place.join("service");
    let command = command.to_str().unwrap();
    let mut all = vec!["--service-command", command, "--health-command", "env"];
    let disruption = place.join("disruption");
    if flags.contains(&"--disruption-command") {
        all.extend(["--disruption-command", disruption.to_str().unwrap()]);
    }
    all.extend(flags.iter().filter(|flag| **flag != "--disruption-command"));
    Sub::start_on(&place.join("root"), &all).await
}

fn trigger(service: &str, more: &str) -> String {
    format!(r#"[{{"MatchLines": ["/version"], "Service": "{service}"{more}}}]"#)
}

const HIGH: &str = r#", "HighImpact": true"#;

fn health(script: &str, within_seconds: u32, undo: bool) -> Option<HealthCheck> {
    let command = ["/bin/sh", "-c", script].map(str::to_owned).into();
    Some(HealthCheck { command, within_seconds, undo })
}

#[tokio::test(flavor = "multi_thread")]
async fn work_of_high_impact_waits_for_permission() {
    let machine = Machine::start(&["--disruption-command"]).await;
    let permission = |code: &str| std::fs::write(machine.at("permission"), code).unwrap();
    permission("1");
    // Nobody is asked for what disturbs nobody.
    assert_eq!(machine.update(1, "1", &trigger("a", ""), None).await.outcome, UpdateOutcome::Done);
    assert_eq!(machine.log(), ["a stop 0", "a start 1"]);
    machine.stage(2, "2", &trigger("a", HIGH), |_| {}).await;
    let held = |error: CallError, text: &str| {
        let message = format!("the machine may not be disturbed now: {text}");
        assert_eq!(error.fault(), Some(&Fault::new(FaultCode::Held, message)));
    };
    held(machine.commit(2).await.unwrap_err(), "it is requested");
    assert_eq!(machine.log(), ["request"]);
    assert_eq!(machine.sub.poll().await.activity, Activity::Prepared { update_id: 2 });
    // It stays staged, and is carried out once the command permits it.
    permission("0");
    testing::eventually_async("the update is permitted", async || machine.commit(2).await.is_ok())
        .await;
    let done = |reply: &PollReply| {
        reply.activity == Activity::Idle
            && reply.last_update.as_ref().is_some_and(|last| last.update_id == 2)
    };
    machine.sub.poll_until(done).await;
    machine.logs(&["a stop 1", "a start 2", "cancel"]).await;
    // Denied, forced, and a command that fails.
    permission("2");
    machine.stage(3, "3", &trigger("a", HIGH), |_| {}).await;
    held(machine.commit(3).await.unwrap_err(), "it is denied");
    assert_eq!(machine.log(), ["request"]);
    permission("7");
    machine.stage(4, "4", &trigger("a", HIGH), |order| order.force_disruption = true).await;
    // The update that wanted to disturb is given up.
    machine.logs(&["cancel"]).await;
    assert_eq!(machine.sub.commit(4).await.outcome, UpdateOutcome::Done);
    assert_eq!(machine.log(), ["a stop 2", "a start 4"]);
    machine.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pause_that_comes_while_commit_waits_for_permission_refuses_the_update() {
    let machine = Machine::start(&["--disruption-command"]).await;
    std::fs::write(machine.at("permission"), "0").unwrap();
    machine.stage(1, "1", &trigger("a", HIGH), |_| {}).await;
    std::fs::write(machine.at("wait"), "").unwrap();
    let client = machine.sub.client.clone();
    let commit =
        tokio::spawn(async move { client.call::<Commit>(&CommitRequest { update_id: 1 }).await });
    machine.logs(&["request"]).await;
    let clock = machine.sub.poll().await.clock;
    let until = Time { seconds: clock.seconds + 3_600, ..clock };
    let paused = Paused { until, reason: "disk swap".to_owned() };
    machine.sub.client.call::<Pause>(&paused).await.unwrap();
    std::fs::remove_file(machine.at("wait")).unwrap();
    let error = commit.await.unwrap().unwrap_err();
    let message = format!("updates are paused until {}: disk swap", model::display::utc(until));
    assert_eq!(error.fault(), Some(&Fault::new(FaultCode::Held, message)));
    assert_eq!(machine.sub.poll().await.activity, Activity::Prepared { update_id: 1 });
    machine.sub.client.call::<Resume>(&()).await.unwrap();
    assert_eq!(machine.sub.commit(1).await.outcome, UpdateOutcome::Done);
    machine.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reboot_that_does_not_happen_is_reported_and_asked_for_again() {
    let machine = Machine::start(&["--reboot-timeout", "1"]).await;
    let last = machine.update(1, "1", &trigger("reboot", ""), None).await;
    assert_eq!((last.outcome, last.awaits_boot), (UpdateOutcome::Done, true));
    machine.logs(&["reboot reboot 1", "reboot reboot 1"]).await;
    let failed = |reply: &PollReply| !reply.trigger_failures.is_empty();
    let reply = machine.sub.poll_until(failed).await;
    let output = "a reboot was requested and the machine is still up after 1 s".to_owned();
    let (service, verb) = ("reboot".to_owned(), "reboot".to_owned());
    assert_eq!(reply.trigger_failures, [TriggerFailure { service, verb, output }]);
    // Other updates, and a restart of subd, do not make it a boot.
    let last = machine.update(2, "2", "[]", None).await;
    assert!(last.awaits_boot);
    let machine = machine.restart(&[]).await;
    assert!(machine.sub.poll().await.last_update.unwrap().awaits_boot);
    // Another boot id does.
    let state = machine.at("root/.subd/state/state.json");
    machine.sub.stop().await;
    let text = std::fs::read_to_string(&state).unwrap();
    let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    std::fs::write(&state, text.replace(boot_id.trim(), "an-earlier-boot")).unwrap();
    let sub = subd(machine.place.path(), &[]).await;
    assert!(!sub.poll().await.last_update.unwrap().awaits_boot);
    sub.stop().await;
    machine.source.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn services_are_stopped_for_a_reboot_and_started_if_it_does_not_come() {
    let machine = Machine::start(&["--reboot-timeout", "1"]).await;
    machine.update(1, "1", &trigger("a", ""), None).await;
    machine.log();
    let last = machine.update(2, "2", &with_a("reboot"), None).await;
    assert!(last.awaits_boot);
    machine.logs(&["a stop 1", "reboot reboot 2", "a start 2", "reboot reboot 2"]).await;
    machine.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restarted_subd_starts_what_was_stopped_for_a_reboot() {
    let machine = Machine::start(&["--reboot-timeout", "1h"]).await;
    machine.update(1, "1", &trigger("a", ""), None).await;
    machine.update(2, "2", &with_a("reboot"), None).await;
    machine.logs(&["a stop 0", "a start 1", "a stop 1", "reboot reboot 2"]).await;
    let machine = machine.restart(&["--reboot-timeout", "1"]).await;
    machine.logs(&["a start 2", "reboot reboot 2", "reboot reboot 2"]).await;
    machine.stop().await;
}

/// The trigger of `a`, and one that asks for a reboot.
fn with_a(service: &str) -> String {
    let reboot = trigger(service, r#", "DoReboot": true"#);
    let (a, reboot) = (trigger("a", ""), reboot.trim_start_matches('[').to_owned());
    format!("{},{reboot}", a.trim_end_matches(']'))
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_rebooted_after_a_failure() {
    let machine = Machine::start(&[]).await;
    machine.update(1, "1", &trigger("a", ""), None).await;
    machine.log();
    let last = machine.update(2, "2", &with_a("fails"), None).await;
    assert_eq!((last.trigger_failures.len(), last.awaits_boot), (1, false));
    assert_eq!(machine.log(), ["a stop 1", "fails start 2", "a start 2"]);
    machine.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn subd_is_never_stopped_and_restarted_last() {
    let machine = Machine::start(&["--own-service", "agent"]).await;
    let triggers = r#"[{"MatchLines": ["/version"], "Service": "agent"},
        {"MatchLines": ["/version"], "Service": "z"}]"#;
    let last = machine.update(1, "1", triggers, None).await;
    assert_eq!((last.outcome, last.trigger_failures), (UpdateOutcome::Done, vec![]));
    machine.logs(&["z stop 0", "z start 1", "agent restart 1"]).await;
    assert!(!machine.at("root/.subd/journal/update").exists());
    machine.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_healthy_is_undone_with_its_services() {
    let machine = Machine::start(&[]).await;
    let check = format!("test $(cat {}/version) -ge 2", machine.at("root").display());
    let last = machine.update(1, "1", &trigger("a", ""), health(&check, 1, false)).await;
    let text = "exit status: 1\nit did not pass within 1 s".to_owned();
    assert_eq!((last.outcome, last.health), (UpdateOutcome::Done, Some(Health::Failed(text))));
    let last = machine.update(2, "2", &trigger("a", ""), health(&check, 60, true)).await;
    assert_eq!((last.outcome, last.health), (UpdateOutcome::Done, Some(Health::Passed)));
    machine.log();
    let last = machine.update(3, "1", &trigger("a", ""), health(&check, 1, true)).await;
    let text = "exit status: 1\nit did not pass within 1 s".to_owned();
    assert_eq!(last.health, Some(Health::Failed(text.clone())));
    assert_eq!(last.outcome, UpdateOutcome::Undone(text));
    assert_eq!(machine.log(), ["a stop 2", "a start 1", "a stop 1", "a start 2"]);
    assert_eq!(std::fs::read_to_string(machine.sub.at("/version")).unwrap(), "2");
    assert_eq!(machine.sub.poll().await.last_image.unwrap().as_str(), "test/2");
    machine.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn checks_are_made_by_hand_too_and_with_the_priority_of_services() {
    let machine = Machine::start(&[]).await;
    let by_hand = async || machine.sub.client.call::<CheckHealth>(&()).await.unwrap().health;
    assert_eq!(by_hand().await, None);
    let said = machine.at("said");
    let script = "ps -o ni= -p $$; ionice -p $$; umask; cat /proc/self/oom_score_adj";
    let check = health(&format!("({script}) > {}; test -e {0}", said.display()), 60, false);
    let last = machine.update(1, "1", "[]", check).await;
    assert_eq!(last.health, Some(Health::Passed));
    assert_eq!(by_hand().await, Some(Health::Passed));
    let text = std::fs::read_to_string(&said).unwrap();
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    let own = std::fs::read_to_string("/proc/self/oom_score_adj").unwrap();
    let id = std::process::id().to_string();
    let nice = std::process::Command::new("ps").args(["-o", "ni=", "-p", &id]).output().unwrap();
    let nice = String::from_utf8(nice.stdout).unwrap();
    assert_eq!((lines[0], lines[2], lines[3]), (nice.trim(), "0022", own.trim()));
    assert!(lines[1].starts_with("none") || lines[1].starts_with("best-effort"), "{text}");
    machine.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_health_check_that_is_interrupted_is_made_again() {
    let machine = Machine::start(&[]).await;
    let healthy = machine.at("healthy");
    let check = health(&format!("test -e {}", healthy.display()), 3_600, true);
    machine.stage(1, "1", &trigger("a", ""), |order| order.health_check = check).await;
    machine.commit(1).await.unwrap();
    machine.logs(&["a stop 0", "a start 1"]).await;
    let machine = machine.restart(&[]).await;
    std::fs::write(&healthy, "").unwrap();
    let done = |reply: &PollReply| {
        reply.last_update.as_ref().is_some_and(|last| last.health == Some(Health::Passed))
    };
    let last = machine.sub.poll_until(done).await.last_update.unwrap();
    assert_eq!((last.update_id, last.outcome), (1, UpdateOutcome::Done));
    machine.stop().await;
}

/// Firmware is a trigger whose service writes the device; here the device is a file.
#[tokio::test(flavor = "multi_thread")]
async fn firmware_is_written_by_the_service_of_its_trigger() {
    let machine = Machine::start(&[]).await;
    let script = r#"#!/bin/sh
        cd "$(dirname "$0")"
        test "$1 $2" = "firmware-nic start" || exit 0
        cmp -s root/version device && exit 0
        cat root/version > device
        cmp root/version device"#;
    std::fs::write(machine.at("service"), script).unwrap();
    std::fs::write(machine.at("device"), "old firmware").unwrap();
    let last = machine.update(1, "new firmware", &trigger("firmware-nic", HIGH), None).await;
    assert_eq!((last.outcome, last.trigger_failures), (UpdateOutcome::Done, vec![]));
    assert_eq!(std::fs::read_to_string(machine.at("device")).unwrap(), "new firmware");
    machine.stop().await;
}
