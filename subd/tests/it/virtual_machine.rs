//! A Debian tree with a kernel that is booted in a virtual machine: one that goes down and comes up
//! by itself, and whose power can be cut.
//!
//! ```sh
//! .ci/debian-trees DIR machine
//! SUBD_VIRTUAL_MACHINE=tcg DEBIAN_TREES=DIR cargo test -p subd --test it virtual_machine
//! ```
//!
//! `SUBD_VIRTUAL_MACHINE` is what QEMU is to run it with: `kvm`, or `tcg`, which is slower and
//! works everywhere. Without it the test says that it is skipped. It needs qemu-system-x86 and
//! mkfs.ext4. The machine is on a network of its own, which has nothing but the object server of
//! the test.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use api::subd::{
    Activity, GetFiles, GetFilesRequest, Health, LastUpdate, Piece, PollReply, UpdateOutcome,
};
use model::image::HealthCheck;

use crate::debian::{Scenario, free_address, install, tree};
use crate::fixture::{Edit, Source, path};
use crate::systemd::{health, install_units};

/// What the kernel says first.
const BOOTS: &str = "] Linux version ";

/// Where QEMU shows the loopback of the host to the machine.
const HOST: &str = "10.0.2.2";

/// The address of the machine, and no way out of its network.
const NETWORK: &str = "[Match]\nType=ether\n[Network]\nAddress=10.0.2.15/24\n";

const PORT: u16 = 6969;

const COMMAND_LINE: &str = "root=/dev/vda ro console=ttyS0 systemd.unit=multi-user.target \
    systemd.journald.forward_to_console=1 systemd.journald.max_level_console=info";

/// A machine that is switched on.
struct Machine {
    place: PathBuf,
    boot: PathBuf,
    accelerator: String,
    address: String,
    qemu: Child,
}

impl Machine {
    /// Puts `tree` with subd on a disk in `place`, and switches the machine on.
    fn make(tree: &Path, place: &Path, accelerator: &str) -> Self {
        let root = place.join("root");
        install(tree, &root, &format!("0.0.0.0:{PORT}"));
        install_units(&root);
        // The kernel mounts the root read-only, as on any machine.
        fs::write(root.join("etc/fstab"), "/dev/vda / ext4 errors=remount-ro 0 1\n").unwrap();
        fs::create_dir_all(root.join("etc/systemd/network")).unwrap();
        fs::write(root.join("etc/systemd/network/wire.network"), NETWORK).unwrap();
        let wants = root.join("etc/systemd/system/multi-user.target.wants");
        let network = "systemd-networkd.service";
        symlink(format!("/lib/systemd/system/{network}"), wants.join(network)).unwrap();
        let disk = place.join("disk");
        fs::File::create(&disk).unwrap().set_len(2 << 30).unwrap();
        let made = Command::new("mkfs.ext4").arg("-q").arg("-d").arg(&root).arg(&disk).status();
        assert!(made.unwrap().success());
        fs::remove_dir_all(&root).unwrap();
        let address = free_address("127.0.0.6");
        let boot = tree.join("boot");
        let qemu = switch_on(place, &boot, accelerator, &address);
        let accelerator = accelerator.to_owned();
        Self { place: place.to_owned(), boot, accelerator, address, qemu }
    }

    /// Cuts the power, and switches the machine on again.
    fn cut_power(&mut self) {
        self.qemu.kill().unwrap();
        self.qemu.wait().unwrap();
        self.qemu = switch_on(&self.place, &self.boot, &self.accelerator, &self.address);
    }

    /// All that it has said since it was made.
    fn console(&self) -> String {
        String::from_utf8_lossy(&fs::read(self.place.join("console")).unwrap()).into_owned()
    }

    /// How often it has said something.
    fn said(&self, text: &str) -> usize {
        self.console().matches(text).count()
    }

    /// Waits until it has said something `times` times.
    async fn says(&self, text: &str, times: usize) {
        testing::eventually_async(text, async || {
            if self.said(text) >= times { Ok(()) } else { Err(self.console()) }
        })
        .await;
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _gone = self.qemu.kill();
        let _status = self.qemu.wait();
    }
}

fn switch_on(place: &Path, boot: &Path, accelerator: &str, address: &str) -> Child {
    let only = |prefix: &str| {
        let names = fs::read_dir(boot).unwrap().map(|entry| entry.unwrap().file_name());
        let found = names.filter(|name| name.to_str().unwrap().starts_with(prefix));
        let [name] = found.collect::<Vec<_>>().try_into().unwrap();
        boot.join(name)
    };
    Command::new("qemu-system-x86_64")
        .current_dir(place)
        .args(["-nodefaults", "-no-user-config", "-display", "none"])
        .args(["-accel", accelerator, "-cpu", "max", "-smp", "2", "-m", "1024"])
        .arg("-kernel")
        .arg(only("vmlinuz-"))
        .arg("-initrd")
        .arg(only("initrd.img-"))
        .args(["-append", COMMAND_LINE])
        .args(["-chardev", "file,id=console,path=console,append=on", "-serial", "chardev:console"])
        .args(["-drive", "file=disk,format=raw,if=virtio,cache=writeback"])
        .args(["-netdev", &format!("user,id=wire,hostfwd=tcp:{address}-:{PORT}")])
        .args(["-device", "virtio-net-pci,netdev=wire,romfile=", "-device", "virtio-rng-pci"])
        .stdin(Stdio::null())
        .spawn()
        .unwrap()
}

const TRIGGERS: &str = r#"[{"MatchLines": ["/etc/test-kernel"], "Service": "reboot"},
    {"MatchLines": ["/etc/broken"], "Service": "broken", "DoReboot": true},
    {"MatchLines": ["/etc/systemd/system/slow.service"], "Service": "slow"}]"#;

#[tokio::test(flavor = "multi_thread")]
async fn a_virtual_machine_reboots_into_its_new_tree() {
    let Ok(accelerator) = std::env::var("SUBD_VIRTUAL_MACHINE") else {
        eprintln!("skipped: SUBD_VIRTUAL_MACHINE is not set; it may be kvm or tcg");
        return;
    };
    let Some(tree) = tree("machine") else { return };
    let place = tempfile::tempdir().unwrap();
    let mut machine = Machine::make(&tree, place.path(), &accelerator);
    let mut source = Source::start_at("127.0.0.1:0").await;
    source.address = source.address.replace("127.0.0.1", HOST);
    // The root is on the disk, where nobody looks but the machine itself.
    let mut scenario = Scenario::with(Path::new("/nowhere"), &machine.address, source).await;

    reboots(&mut scenario, &machine).await;
    does_not_reboot_after_a_failure(&mut scenario, &machine).await;
    comes_up_after_power_cuts(&mut scenario, &mut machine).await;
    assert!(!machine.console().contains("panicked"), "{}", machine.console());
    scenario.source.stop().await;
}

async fn reboots(scenario: &mut Scenario, machine: &Machine) {
    let check = "cat /proc/sys/kernel/random/boot_id > /var/log/booted; grep -q 1 /etc/test-kernel";
    let first = scenario.answers().await.identity.boot_id;
    assert_eq!(machine.said(BOOTS), 1);
    // It goes down by itself and comes up with the new tree, which is healthy.
    let second = boot_with(scenario, "1", health(check, 10)).await;
    let last = second.last_update.unwrap();
    assert_eq!((last.outcome, last.health), (UpdateOutcome::Done, Some(Health::Passed)));
    assert_eq!((last.trigger_failures, machine.said(BOOTS)), (vec![], 2));
    let second = second.identity.boot_id;
    assert_ne!(first, second);
    assert_eq!(content(scenario, "/var/log/booted").await.trim(), second);
    assert_eq!(content(scenario, "/etc/test-kernel").await, "1");
    // What is not healthy after the reboot is undone, and needs one more.
    let (before, tree) = scenario.sub.tree().await;
    let third = boot_with(scenario, "2", health(check, 10)).await;
    let last = third.last_update.unwrap();
    let why = "exit status: 1\nit did not pass within 10 s".to_owned();
    assert_eq!(last.health, Some(Health::Failed(why.clone())));
    assert_eq!((last.outcome, last.trigger_failures), (UpdateOutcome::Undone(why), vec![]));
    assert_eq!((third.last_image, machine.said(BOOTS)), (before.last_image, 4));
    let between = content(scenario, "/var/log/booted").await;
    let boots = [first, second, between.trim().to_owned(), third.identity.boot_id];
    assert!((1..4).all(|boot| !boots[..boot].contains(&boots[boot])), "{boots:?}");
    assert_eq!(scenario.sub.tree().await.1.digest(), tree.digest());
}

/// Has an update carried out that reboots the machine, and waits until it is complete.
async fn boot_with(scenario: &mut Scenario, kernel: &str, check: HealthCheck) -> PollReply {
    let id =
        scenario.commit(|edit| edit.file("/etc/test-kernel", kernel), TRIGGERS, Some(check)).await;
    scenario
        .until(|reply| {
            let last = reply.last_update.as_ref();
            let complete = |last: &LastUpdate| {
                last.update_id == id && last.health.is_some() && !last.awaits_boot
            };
            reply.activity == Activity::Idle && last.is_some_and(complete)
        })
        .await
}

/// What a file of the machine holds, as subd gives it.
async fn content(scenario: &Scenario, text: &str) -> String {
    let piece = Piece { path: path(text), offset: 0, length: 1 << 16 };
    let request = GetFilesRequest { pieces: vec![piece] };
    let reply = scenario.sub.client.call::<GetFiles>(&request).await.unwrap();
    let [piece] = reply.pieces.try_into().unwrap();
    String::from_utf8(piece.unwrap().bytes.0).unwrap()
}

async fn does_not_reboot_after_a_failure(scenario: &mut Scenario, machine: &Machine) {
    let before = scenario.answers().await;
    let unit = "[Service]\nType=oneshot\nExecStart=/bin/false\n";
    let last = scenario
        .update(
            |edit| {
                edit.file("/etc/systemd/system/broken.service", unit)
                    .file("/etc/broken", "1")
                    .file("/etc/test-kernel", "3")
            },
            TRIGGERS,
            None,
        )
        .await;
    assert_eq!((last.outcome, last.awaits_boot), (UpdateOutcome::Done, false));
    let [failed] = &last.trigger_failures[..] else { panic!("{:?}", last.trigger_failures) };
    assert_eq!((&*failed.service, &*failed.verb), ("broken", "start"));
    assert!(failed.output.contains("Job for broken.service failed"), "{}", failed.output);
    // A machine that was told to go down does so within this time.
    tokio::time::sleep(Duration::from_secs(5)).await;
    let after = scenario.answers().await;
    assert_eq!((after.trigger_failures, machine.said(BOOTS)), (last.trigger_failures, 4));
    assert_eq!(after.version.instance, before.version.instance);
    assert_eq!(after.identity, before.identity);
}

/// A service that says what happens to it while it takes its time.
const UNIT: &str = "[Service]\nType=oneshot\nRemainAfterExit=yes\n\
    ExecStart=/bin/sh -c 'echo slow VERSION starts > /dev/console; sleep 1'\n\
    ExecStop=/bin/sh -c 'echo slow VERSION stops > /dev/console; sleep 1; \
    echo slow VERSION has stopped > /dev/console'\n";

const FILES: usize = 2_000;

fn with_version<'a>(edit: Edit<'a>, version: &str) -> Edit<'a> {
    let edit = edit.directory("/etc/many", 0o755);
    let edit = edit.file("/etc/systemd/system/slow.service", &UNIT.replace("VERSION", version));
    (0..FILES).fold(edit, |edit, file| {
        edit.file(&format!("/etc/many/{file}"), &format!("{version} {file}"))
    })
}

/// The power is cut before, during and after the change of the tree.
async fn comes_up_after_power_cuts(scenario: &mut Scenario, machine: &mut Machine) {
    let last = scenario.update(|edit| with_version(edit, "0"), TRIGGERS, None).await;
    assert_eq!((last.outcome, last.trigger_failures), (UpdateOutcome::Done, vec![]));
    let moments = [
        ("slow OLD stops", 0),
        ("slow OLD has stopped", 100),
        ("slow OLD has stopped", 300),
        ("slow OLD has stopped", 500),
        ("slow NEW starts", 0),
    ];
    let mut running = "0".to_owned();
    for (cut, (moment, milliseconds)) in (1..).zip(moments) {
        let (_, old) = scenario.sub.tree().await;
        let newer = cut.to_string();
        let new = with_version(Edit::of(&old, &scenario.source), &newer).done();
        let digests = [old.digest(), new.digest()];
        let moment = moment.replace("OLD", &running).replace("NEW", &newer);
        let times = machine.said(&moment) + 1;
        let id = scenario.commit(|edit| with_version(edit, &newer), TRIGGERS, None).await;
        machine.says(&moment, times).await;
        tokio::time::sleep(Duration::from_millis(milliseconds)).await;
        machine.cut_power();
        // It is carried to one of its ends before anything sees the tree.
        let over = |reply: &PollReply| {
            let last = reply.last_update.as_ref();
            reply.activity == Activity::Idle && last.is_some_and(|last| last.update_id == id)
        };
        let last = scenario.until(over).await.last_update.unwrap();
        let found = scenario.sub.tree().await.1.digest();
        match last.outcome {
            UpdateOutcome::Done => running = newer,
            UpdateOutcome::RolledBack(_) => {}
            outcome => panic!("{outcome:?}"),
        }
        let expected = digests[usize::from(running == cut.to_string())];
        assert_eq!((found, last.trigger_failures), (expected, vec![]), "{moment}");
        let console = machine.console();
        let (_, since) = console.rsplit_once(BOOTS).unwrap();
        assert!(since.contains(&format!("slow {running} starts")), "{moment}: {since}");
        let phase = since.lines().find(|line| line.contains("was interrupted"));
        eprintln!("{moment} + {milliseconds} ms: {running} {phase:?}");
    }
    assert_eq!(machine.said(BOOTS), 4 + moments.len());
}
