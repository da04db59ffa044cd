//! subd on a machine without systemd: a Debian tree in namespaces of its own, whose services are
//! init scripts, driven by the real `service`.
//!
//! `DEBIAN_TREES` names a directory with the tree `minbase`, as `.ci/debian-trees` makes it;
//! without it the test says that it is skipped. Each boot of the machine has a boot id of its own.
//! It has no init that could reboot it: its `reboot` records that it was called.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use api::subd::{LastUpdate, PollReply, TriggerFailure, UpdateOutcome};

use testing::eventually;

use crate::debian::{Booted, Scenario, configuration, free_address, install, tree};
use crate::fixture::Edit;

/// Makes the directory `$1` the root of the machine, and becomes its first process.
const BOOT: &str = r#"set -e
mount --bind "$1" "$1"
cd "$1"
mount -t proc proc proc
mount -t tmpfs tmpfs run
cat proc/sys/kernel/random/uuid > run/boot-id
mount --bind run/boot-id proc/sys/kernel/random/boot_id
pivot_root . .
umount -l .
exec /sbin/init"#;

/// The first process, a shell: while it waits it buries all that have lost their parents.
const INIT: &str = "#!/bin/sh\nservice subd start\nsleep infinity\n";

const REBOOT: &str = r#"#!/bin/sh
journal=$(test -e /.subd/journal/update && echo open || echo closed)
echo "reboot, journal $journal" >> /var/log/services
"#;

/// The init script of subd.
const SUBD: &str = r#"#!/bin/sh
### BEGIN INIT INFO
# Provides:          subd
# Required-Start:    $remote_fs $network
# Required-Stop:     $remote_fs $network
# Default-Start:     2 3 4 5
# Default-Stop:      0 1 6
# Short-Description: Keeps the machine equal to its image
### END INIT INFO
journal=$(test -e /.subd/journal/update && echo open || echo closed)
echo "subd $1, journal $journal" >> /var/log/services
start() {
    start-stop-daemon --start --background --make-pidfile --pidfile /run/subd.pid \
        --output /var/log/subd --exec /opt/subd/subd
}
stop() {
    start-stop-daemon --stop --oknodo --retry TERM/60/KILL/5 --remove-pidfile \
        --pidfile /run/subd.pid
}
case "$1" in
    start) start;;
    stop) stop;;
    restart) stop && start;;
    *) echo "Usage: $0 start|stop|restart" >&2; exit 3;;
esac
"#;

/// The init script of a service: it records what it is told and what its configuration is then.
const HELLO: &str = r#"#!/bin/sh
### BEGIN INIT INFO
# Provides:          hello
# Required-Start:    $remote_fs
# Required-Stop:     $remote_fs
# Default-Start:     2 3 4 5
# Default-Stop:      0 1 6
# Short-Description: Says hello
### END INIT INFO
echo "VERSION: hello $1 $(cat /etc/hello.conf)" >> /var/log/services
case "$1" in
    start) start-stop-daemon --start --background --make-pidfile --pidfile /run/hello.pid \
        --exec /bin/sleep -- infinity;;
    stop) start-stop-daemon --stop --remove-pidfile --pidfile /run/hello.pid;;
    reload) start-stop-daemon --status --pidfile /run/hello.pid;;
    *) echo "Usage: $0 start|stop|reload" >&2; exit 3;;
esac
"#;

/// The init script of a service that cannot be started.
const BROKEN: &str = r#"#!/bin/sh
### BEGIN INIT INFO
# Provides:          broken
# Required-Start:    $remote_fs
# Required-Stop:     $remote_fs
# Default-Start:     2 3 4 5
# Default-Stop:      0 1 6
# Short-Description: Does not start
### END INIT INFO
journal=$(test -e /.subd/journal/update && echo open || echo closed)
echo "broken $1, journal $journal" >> /var/log/services
test "$1" = stop && exit 0
echo "broken: no such device" >&2
exit 1
"#;

/// The init script of a service whose start never ends.
const HANGING: &str = r#"#!/bin/sh
### BEGIN INIT INFO
# Provides:          hanging
# Required-Start:    $remote_fs
# Required-Stop:     $remote_fs
# Default-Start:     2 3 4 5
# Default-Stop:      0 1 6
# Short-Description: Hangs
### END INIT INFO
echo "hanging $1" >> /var/log/services
test "$1" = stop && exit 0
echo "waiting"
sleep 1000
"#;

const OF_HELLO: &str =
    r#"{"MatchLines": ["/etc/init.d/hello", "/etc/hello.conf"], "Service": "hello"}"#;
const RELOAD: &str =
    r#"{"MatchLines": ["/etc/hello.users"], "Service": "hello", "DoReload": true}"#;
const OF_BROKEN: &str =
    r#"{"MatchLines": ["/etc/init.d/broken", "/etc/broken.conf"], "Service": "broken"}"#;
const OF_HANGING: &str = r#"{"MatchLines": ["/etc/init.d/hanging"], "Service": "hanging"}"#;
const OF_SUBD: &str = r#"{"MatchLines": ["/opt/subd/subd", "/etc/subd/.*"], "Service": "subd"}"#;
const KERNEL: &str = r#"{"MatchLines": ["/etc/test-kernel"], "Service": "reboot"}"#;
const FIRMWARE: &str =
    r#"{"MatchLines": ["/etc/test-firmware"], "Service": "broken", "DoReboot": true}"#;

fn boot(root: &Path) -> Booted {
    let mut command = Command::new("unshare");
    command.args(["--mount", "--pid", "--fork", "--", "sh", "-c", BOOT, "sh"]).arg(root);
    Booted::start(root, &mut command)
}

fn install_scripts(root: &Path) {
    let scripts = [("sbin/init", INIT), ("sbin/reboot", REBOOT), ("etc/init.d/subd", SUBD)];
    for (name, script) in scripts {
        fs::write(root.join(name), script).unwrap();
        fs::set_permissions(root.join(name), PermissionsExt::from_mode(0o755)).unwrap();
    }
}

fn hello(version: &str) -> String {
    HELLO.replace("VERSION", version)
}

fn failure(service: &str, verb: &str, output: &str) -> TriggerFailure {
    let [service, verb, output] = [service, verb, output].map(str::to_owned);
    TriggerFailure { service, verb, output }
}

trait InitScripts {
    fn init_script(self, name: &str, content: &str) -> Self;
}

impl InitScripts for Edit<'_> {
    fn init_script(self, name: &str, content: &str) -> Self {
        let path = format!("/etc/init.d/{name}");
        self.file(&path, content).metadata(&path, |metadata| metadata.mode = 0o755)
    }
}

/// Updates the machine to an image with these triggers; gives what failed, and what the services
/// have recorded meanwhile.
async fn update(
    scenario: &mut Scenario,
    triggers: &[&str],
    edit: impl FnOnce(Edit<'_>) -> Edit<'_>,
) -> (LastUpdate, Vec<String>) {
    scenario.clear("services");
    let last = scenario.update(edit, &format!("[{}]", triggers.join(",")), None).await;
    assert_eq!(last.outcome, UpdateOutcome::Done);
    (last, recorded(scenario))
}

fn recorded(scenario: &Scenario) -> Vec<String> {
    scenario.log("services").lines().map(str::to_owned).collect()
}

/// As [`update`], where nothing fails.
async fn update_well(
    scenario: &mut Scenario,
    triggers: &[&str],
    edit: impl FnOnce(Edit<'_>) -> Edit<'_>,
) -> Vec<String> {
    let (last, recorded) = update(scenario, triggers, edit).await;
    assert_eq!(last.trigger_failures, []);
    recorded
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_with_init_scripts_is_updated_with_all_its_services() {
    let Some(tree) = tree("minbase") else { return };
    let place = tempfile::tempdir().unwrap();
    let root = place.path().join("machine");
    let address = free_address("127.0.0.7");
    install(&tree, &root, &address);
    install_scripts(&root);
    let machine = boot(&root);
    let mut scenario = Scenario::start(&root, &address).await;

    restarts_and_reloads(&mut scenario).await;
    tells_what_fails_until_all_is_well(&mut scenario).await;
    misses_no_script_that_is_gone(&mut scenario).await;
    restarts_itself_last(&mut scenario, &machine).await;
    kills_what_hangs(&mut scenario, &address).await;
    let machine = reboots(&mut scenario, machine).await;
    let said = scenario.log("subd");
    assert!(!said.contains("panicked"), "{said}");
    drop(machine);
    scenario.source.stop().await;
}

async fn restarts_and_reloads(scenario: &mut Scenario) {
    let triggers = [OF_HELLO, RELOAD];
    // A service that is new: there is no script that could have stopped it.
    let came = update_well(scenario, &triggers, |edit| {
        edit.init_script("hello", &hello("1")).file("/etc/hello.conf", "one")
    });
    assert_eq!(came.await, ["1: hello start one"]);
    let configured =
        update_well(scenario, &triggers, |edit| edit.file("/etc/hello.conf", "two")).await;
    assert_eq!(configured, ["1: hello stop one", "1: hello start two"]);
    let replaced =
        update_well(scenario, &triggers, |edit| edit.init_script("hello", &hello("2"))).await;
    assert_eq!(replaced, ["1: hello stop two", "2: hello start two"]);
    let reloaded = update_well(scenario, &triggers, |edit| edit.file("/etc/hello.users", "me"));
    assert_eq!(reloaded.await, ["2: hello reload two"]);
    let unconcerned = update_well(scenario, &triggers, |edit| edit.file("/etc/other", "x")).await;
    assert_eq!(unconcerned, [""; 0]);
}

async fn tells_what_fails_until_all_is_well(scenario: &mut Scenario) {
    let triggers = [OF_BROKEN, OF_HELLO];
    let (last, recorded) = update(scenario, &triggers, |edit| {
        edit.init_script("broken", BROKEN).file("/etc/hello.conf", "three")
    })
    .await;
    let failed = [failure("broken", "start", "broken: no such device\nexit status: 1")];
    assert_eq!(last.trigger_failures, failed);
    assert_eq!(
        recorded,
        ["2: hello stop two", "broken start, journal open", "2: hello start three"]
    );
    assert_eq!(scenario.answers().await.trigger_failures, failed);
    // Its script goes with the service, which is stopped before.
    let gone = update_well(scenario, &[OF_HELLO], |edit| edit.remove("/etc/init.d/broken")).await;
    assert_eq!(gone, ["broken stop, journal open"]);
    assert_eq!(scenario.answers().await.trigger_failures, []);
}

async fn misses_no_script_that_is_gone(scenario: &mut Scenario) {
    // For `service` a script that may not be executed is not there either.
    for path in ["/etc/broken.conf", "/etc/init.d/broken"] {
        let named = [OF_BROKEN, OF_HELLO];
        let (last, _) = update(scenario, &named, |edit| edit.file(path, BROKEN)).await;
        let failed = failure("broken", "start", "broken: unrecognized service\nexit status: 1");
        assert_eq!(last.trigger_failures, [failed]);
        // What is not there need not be stopped.
        let gone = update_well(scenario, &[OF_HELLO], |edit| edit.remove(path)).await;
        assert_eq!(gone, [""; 0]);
    }
}

async fn restarts_itself_last(scenario: &mut Scenario, machine: &Booted) {
    // Its script ends before the process has become what it starts.
    let hello = || {
        eventually("hello runs", || {
            let found =
                machine.run(&["sh", "-c", "cd /proc/$(cat /run/hello.pid) && pwd && cat comm"]);
            found.ends_with("\nsleep\n").then_some(found)
        })
    };
    let before = scenario.answers().await;
    let newer = scenario.newer_subd().await;
    let triggers = [OF_BROKEN, OF_HELLO, OF_SUBD];
    let (last, _) = update(scenario, &triggers, |edit| {
        edit.init_script("broken", BROKEN)
            .file("/etc/hello.conf", "four")
            .put("/opt/subd/subd", newer)
    })
    .await;
    let process = hello();
    let after = restarted(scenario, &before).await;
    let failed = [failure("broken", "start", "broken: no such device\nexit status: 1")];
    let wanted = (Some(in_another_scan(last, &after)), &failed[..]);
    assert_eq!((after.last_update, &*after.trigger_failures), wanted);
    assert_eq!(
        recorded(scenario),
        [
            "2: hello stop three",
            "broken start, journal open",
            "2: hello start four",
            "subd restart, journal closed",
        ]
    );
    machine.run(&["sh", "-c", "cmp /proc/$(cat /run/subd.pid)/exe /opt/subd/subd"]);
    assert_eq!(hello(), process);
    update_well(scenario, &[OF_HELLO, OF_SUBD], |edit| edit.remove("/etc/init.d/broken")).await;
}

/// Returns what the next subd has to report of `update`. One that was stopped before it had saved
/// in which scan it verified the update leaves that to the next.
fn in_another_scan(update: LastUpdate, reply: &PollReply) -> LastUpdate {
    let verified_generation = reply.last_update.as_ref().and_then(|last| last.verified_generation);
    LastUpdate { verified_generation, ..update }
}

/// Waits until another subd answers than that of `before`.
async fn restarted(scenario: &Scenario, before: &PollReply) -> PollReply {
    scenario.until(|reply| reply.version.instance != before.version.instance).await
}

async fn kills_what_hangs(scenario: &mut Scenario, address: &str) {
    let patient = configuration(address);
    let impatient = format!("{patient}service-timeout = 3\n");
    let before = scenario.answers().await;
    update_well(scenario, &[OF_HELLO, OF_SUBD], |edit| {
        edit.file("/etc/subd/config.toml", &impatient)
    })
    .await;
    let before = restarted(scenario, &before).await;
    assert_eq!(recorded(scenario), ["subd restart, journal closed"]);
    let (last, hung) =
        update(scenario, &[OF_HANGING, OF_SUBD], |edit| edit.init_script("hanging", HANGING)).await;
    let failed = failure("hanging", "start", "waiting\nkilled after 3 s");
    assert_eq!((last.trigger_failures, hung), (vec![failed], vec!["hanging start".to_owned()]));
    update_well(scenario, &[OF_HELLO, OF_SUBD], |edit| {
        edit.file("/etc/subd/config.toml", &patient).remove("/etc/init.d/hanging")
    })
    .await;
    restarted(scenario, &before).await;
    assert_eq!(recorded(scenario), ["hanging stop", "subd restart, journal closed"]);
}

async fn reboots(scenario: &mut Scenario, machine: Booted) -> Booted {
    let before = scenario.answers().await;
    let triggers = [OF_HELLO, KERNEL];
    let (last, _) = update(scenario, &triggers, |edit| {
        edit.file("/etc/test-kernel", "1").file("/etc/hello.conf", "five")
    })
    .await;
    // The reboot starts what is stopped for it.
    assert!(last.awaits_boot && last.trigger_failures.is_empty(), "{last:?}");
    assert_eq!(recorded(scenario), ["2: hello stop four", "reboot, journal closed"]);
    assert_eq!(scenario.answers().await.identity.boot_id, before.identity.boot_id);
    assert_eq!(machine.console(), "");
    drop(machine);
    let machine = boot(&scenario.sub.root);
    let after = restarted(scenario, &before).await;
    assert_ne!(after.identity.boot_id, before.identity.boot_id);
    let complete = in_another_scan(LastUpdate { awaits_boot: false, ..last }, &after);
    assert_eq!((after.last_update, after.trigger_failures), (Some(complete), vec![]));
    // What failed is not made worse by a reboot.
    let triggers = [FIRMWARE, KERNEL];
    let (last, recorded) = update(scenario, &triggers, |edit| {
        edit.init_script("broken", BROKEN).file("/etc/test-firmware", "1")
    })
    .await;
    let failed = [failure("broken", "start", "broken: no such device\nexit status: 1")];
    assert_eq!((last.awaits_boot, &*last.trigger_failures), (false, &failed[..]));
    assert_eq!(recorded, ["broken start, journal open"]);
    machine
}
