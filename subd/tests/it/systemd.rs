//! subd as a service of a real systemd: a Debian tree that is booted in a container, with the units
//! that subd is installed with.
//!
//! `DEBIAN_TREES` names a directory with the tree `systemd`, as `.ci/debian-trees` makes it;
//! without it the test says that it is skipped. It needs systemd-nspawn, which gives the container
//! a boot id of its own and a new one for each boot, so that reboots are real for subd too.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use api::subd::{Activity, CheckHealth, Health, PollReply, RetryTriggers, UpdateOutcome};
use model::display::error_chain;
use model::image::HealthCheck;

use crate::debian::{Booted, PATIENCE, Scenario, configuration, free_address, install, tree};

/// What nspawn exits with when the container wants to be booted again.
const REBOOTED: i32 = 133;

/// A program that says in its file what happens to it.
const UNIT: &str = "[Unit]\nDescription=VERSION\n[Service]\nType=exec\n\
    ExecStart=/bin/sh -c 'echo start VERSION >> /var/log/hello; exec sleep infinity'\n\
    ExecReload=/bin/sh -c 'echo reload VERSION >> /var/log/hello'\n\
    ExecStop=/bin/sh -c 'echo stop VERSION >> /var/log/hello'\n";

fn unit(version: &str) -> String {
    UNIT.replace("VERSION", version)
}

pub fn boot(root: &Path) -> Booted {
    let mut command = Command::new("systemd-nspawn");
    command
        .args(["--boot", "--register=no", "--keep-unit", "--quiet", "--console=pipe"])
        .arg("--directory")
        .arg(root)
        .arg("systemd.unit=multi-user.target");
    Booted::start(root, &mut command)
}

/// Waits until the machine has gone down to be booted again, and boots it.
fn boot_again(mut machine: Booted) -> Booted {
    let deadline = Instant::now() + PATIENCE;
    let status = loop {
        match machine.container.try_wait().unwrap() {
            Some(status) => break status,
            None if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(50)),
            None => panic!("it does not go down:\n{}", machine.console()),
        }
    };
    assert_eq!(status.code(), Some(REBOOTED), "{}", machine.console());
    boot(&machine.root.clone())
}

/// Installs the units of subd.
pub fn install_units(root: &Path) {
    let packaging = Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging/systemd");
    let units = root.join("etc/systemd/system");
    for (name, target) in
        [("subd.service", "multi-user.target"), ("subd-recover.service", "sysinit.target")]
    {
        let text = fs::read_to_string(packaging.join(name)).unwrap();
        fs::write(units.join(name), text.replace("/usr/sbin/subd", "/opt/subd/subd")).unwrap();
        let wants = units.join(format!("{target}.wants"));
        fs::create_dir_all(&wants).unwrap();
        symlink(format!("/etc/systemd/system/{name}"), wants.join(name)).unwrap();
    }
}

const HELLO: &str = r#"[{"MatchLines": ["/etc/systemd/system/hello.service"], "Service": "hello"},
    {"MatchLines": ["/etc/hello.conf"], "Service": "hello", "DoReload": true},
    {"MatchLines": ["/opt/subd/subd"], "Service": "subd"},
    {"MatchLines": ["/etc/broken"], "Service": "broken"},
    {"MatchLines": ["/etc/test-kernel"], "Service": "reboot"}]"#;

const HELLO_UNIT: &str = "/etc/systemd/system/hello.service";

/// A check that undoes the update if it fails.
pub fn health(script: &str, within_seconds: u32) -> HealthCheck {
    let command = ["/bin/sh", "-c", script].map(str::to_owned).into();
    HealthCheck { command, within_seconds, undo: true }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_with_systemd_is_updated_with_all_its_services() {
    let Some(tree) = tree("systemd") else { return };
    let place = tempfile::tempdir().unwrap();
    let root = place.path().join("machine");
    let address = free_address("127.0.0.6");
    install(&tree, &root, &address);
    install_units(&root);
    fs::write(root.join("etc/systemd/system/hang.service"), HANG).unwrap();
    let configured = configuration(&address) + "reboot-timeout = '15s'\n";
    fs::write(root.join("etc/subd/config.toml"), configured).unwrap();
    let scenario = is_installed_from_outside(&root).await;
    let (mut scenario, mut machine) = scenario.booted(&address, boot).await;

    has_its_health_checked_at_its_first_boot(&scenario).await;
    restarts_and_reloads(&mut scenario).await;
    undoes_what_is_not_healthy(&mut scenario).await;
    tells_what_fails_over_its_own_upgrade(&mut scenario).await;
    machine = reboots(&mut scenario, machine).await;
    assert!(!machine.console().contains("panicked"), "{}", machine.console());
    scenario.source.stop().await;
}

/// Installs an image whose check passes on the machine, and would fail on the host.
async fn is_installed_from_outside(root: &Path) -> Scenario {
    let mut scenario = Scenario::from_outside(root).await;
    let check = health("test -e /etc/only-in-the-image", 3);
    let edit = scenario.update(|edit| edit.file("/etc/only-in-the-image", ""), "[]", Some(check));
    let last = edit.await;
    assert_eq!((last.outcome, last.health), (UpdateOutcome::Done, None));
    let (_, page) = scenario.sub.client.get("/").await.unwrap();
    let page = String::from_utf8_lossy(&page);
    assert!(page.contains("health not checked: root is not /"), "{page}");
    let by_hand = scenario.sub.client.call::<CheckHealth>(&()).await.unwrap_err();
    let by_hand = error_chain(&by_hand);
    assert!(by_hand.contains("health checks are not run here"), "{by_hand}");
    scenario
}

async fn has_its_health_checked_at_its_first_boot(scenario: &Scenario) {
    let checked =
        |reply: &PollReply| reply.last_update.as_ref().is_some_and(|last| last.health.is_some());
    let last = scenario.until(checked).await.last_update.unwrap();
    assert_eq!((last.outcome, last.health), (UpdateOutcome::Done, Some(Health::Passed)));
}

async fn restarts_and_reloads(scenario: &mut Scenario) {
    // A service that is new: systemd has never heard of it.
    let last = scenario.update(|edit| edit.file(HELLO_UNIT, &unit("1")), HELLO, None).await;
    assert_eq!((last.outcome, last.trigger_failures), (UpdateOutcome::Done, vec![]));
    assert_eq!(scenario.log("hello"), "start 1\n");
    // Its unit changes: the old one is stopped as it was, the new one started as it is.
    let last = scenario.update(|edit| edit.file(HELLO_UNIT, &unit("2")), HELLO, None).await;
    assert_eq!((last.outcome, last.trigger_failures), (UpdateOutcome::Done, vec![]));
    assert_eq!(scenario.log("hello"), "start 1\nstop 1\nstart 2\n");
    let last = scenario.update(|edit| edit.file("/etc/hello.conf", "new"), HELLO, None).await;
    assert_eq!((last.outcome, last.trigger_failures), (UpdateOutcome::Done, vec![]));
    assert_eq!(scenario.log("hello"), "start 1\nstop 1\nstart 2\nreload 2\n");
}

async fn undoes_what_is_not_healthy(scenario: &mut Scenario) {
    scenario.clear("hello");
    let script = "cat /proc/self/cgroup /proc/self/oom_score_adj > /var/log/health; \
        ulimit -n >> /var/log/health; ! grep -q 3 /etc/systemd/system/hello.service";
    let last = scenario
        .update(|edit| edit.file(HELLO_UNIT, &unit("3")), HELLO, Some(health(script, 3)))
        .await;
    let text = "exit status: 1\nit did not pass within 3 s".to_owned();
    assert_eq!(last.health, Some(Health::Failed(text.clone())));
    assert_eq!((last.outcome, last.trigger_failures), (UpdateOutcome::Undone(text), vec![]));
    assert_eq!(scenario.log("hello"), "stop 2\nstart 3\nstop 3\nstart 2\n");
    let said = scenario.log("health");
    assert!(said.contains("run-") && !said.contains("subd.service"), "{said}");
    let last = scenario
        .update(|edit| edit.file(HELLO_UNIT, &unit("4")), HELLO, Some(health(script, 3)))
        .await;
    assert_eq!((last.outcome, last.health), (UpdateOutcome::Done, Some(Health::Passed)));
}

async fn tells_what_fails_over_its_own_upgrade(scenario: &mut Scenario) {
    let broken =
        "[Service]\nType=oneshot\nExecStart=/bin/sh -c 'echo no device; test -e /var/log/device'\n";
    let before = scenario.answers().await;
    let newer = scenario.newer_subd().await;
    let edited = scenario.update(
        |edit| {
            edit.file("/etc/systemd/system/broken.service", broken)
                .file("/etc/broken", "1")
                .put("/opt/subd/subd", newer)
        },
        HELLO,
        None,
    );
    let id = edited.await.update_id;
    let restarted = |reply: &PollReply| reply.version.instance != before.version.instance;
    let after = scenario.until(restarted).await;
    let last = after.last_update.unwrap();
    assert_eq!((last.update_id, last.outcome), (id, UpdateOutcome::Done));
    let [failed] = &after.trigger_failures[..] else { panic!("{:?}", after.trigger_failures) };
    assert_eq!((&*failed.service, &*failed.verb), ("broken", "start"));
    for said in ["Job for broken.service failed", "\nno device\n", "Failed to start"] {
        assert!(failed.output.contains(said), "{}", failed.output);
    }
    // They are told until they are run again with success.
    fs::write(scenario.sub.at("/var/log/device"), "").unwrap();
    scenario.sub.client.call::<RetryTriggers>(&()).await.unwrap();
    scenario.until(|reply| reply.trigger_failures.is_empty()).await;
}

/// A service that cannot be stopped.
const HANG: &str = "[Service]\nExecStart=/bin/sleep infinity\nExecStop=/bin/sleep infinity\n\
    TimeoutStopSec=infinity\n";

async fn reboots(scenario: &mut Scenario, machine: Booted) -> Booted {
    // The shutdown hangs, after subd has been stopped.
    machine.run(&["systemctl", "start", "hang"]);
    let check = "cat /proc/sys/kernel/random/boot_id > /var/log/booted; grep -q 1 /etc/test-kernel";
    let machine = boot_with(scenario, machine, "1", Some(health(check, 3))).await;
    let checked =
        |reply: &PollReply| reply.last_update.as_ref().is_some_and(|last| last.health.is_some());
    let reply = scenario.until(checked).await;
    let last = reply.last_update.unwrap();
    assert_eq!((last.outcome, last.health), (UpdateOutcome::Done, Some(Health::Passed)));
    assert_eq!(scenario.log("booted").trim(), reply.identity.boot_id);
    // The journal was open while it was down: it was looked at before anything else started.
    let show = |property| machine.run(&["systemctl", "show", "-P", property, "subd-recover"]);
    let said = ["ConditionResult", "Result", "ExecMainStatus"].map(&show);
    assert_eq!(said.each_ref().map(|text| text.trim()), ["yes", "success", "0"]);
    let ended: u64 = show("ExecMainExitTimestampMonotonic").trim().parse().unwrap();
    let line = ["systemctl", "show", "-P", "ActiveEnterTimestampMonotonic", "local-fs-pre.target"];
    let mounts: u64 = machine.run(&line).trim().parse().unwrap();
    assert!(0 < ended && ended <= mounts, "{ended} {mounts}");
    let log = machine.run(&["journalctl", "--boot", "--output=cat"]);
    assert!(!log.contains("ordering cycle"), "{log}");
    // What is not healthy after the reboot is undone, and needs one more.
    let machine = boot_with(scenario, machine, "2", Some(health(check, 3))).await;
    let machine = boot_again(machine);
    let complete = |reply: &PollReply| {
        let last = reply.last_update.as_ref().unwrap();
        !last.awaits_boot && reply.activity == Activity::Idle
    };
    let last = scenario.until(complete).await.last_update.unwrap();
    assert!(matches!(last.outcome, UpdateOutcome::Undone(_)), "{last:?}");
    assert_eq!(fs::read_to_string(scenario.sub.at("/etc/test-kernel")).unwrap(), "1");
    machine
}

/// Has an update carried out that reboots the machine, and boots it.
async fn boot_with(
    scenario: &mut Scenario,
    machine: Booted,
    kernel: &str,
    health_check: Option<HealthCheck>,
) -> Booted {
    scenario.commit(|edit| edit.file("/etc/test-kernel", kernel), HELLO, health_check).await;
    boot_again(machine)
}
