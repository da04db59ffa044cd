//! Roots that cannot be written.

use rpc::tls::Security;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{ChildStderr, Command, Stdio};
use std::sync::Arc;

use api::fault::FaultCode;
use api::subd::{Alarm, UpdateOutcome};
use model::filter::Patterns;
use nix::errno::Errno;
use nix::mount::{MsFlags, mount};
use rpc::client::{Client, Peer};
use subd::machine::probe::Probe;
use subd::root::Root;
use subd::state::directories::Directories;
use subd::state::persisted_state::StateDirectory;
use subd::state::{Measured, ReportState};

use super::{in_own_mounts, mount_tmpfs, refusal, removal, unmount};
use crate::fixture::{Edit, Source, Sub};

fn remount(at: &Path, flags: MsFlags) {
    let none: Option<&str> = None;
    // It is busy while subd saves its state.
    testing::eventually("the file-system is mounted again", || {
        let remounted = mount(none, at, none, MsFlags::MS_REMOUNT | flags, none);
        (remounted != Err(Errno::EBUSY)).then_some(remounted)
    })
    .unwrap();
}

#[test]
fn a_root_that_becomes_read_only_is_reported_and_left_alone_until_it_is_writable() {
    in_own_mounts(async || {
        let place = tempfile::tempdir().unwrap();
        mount_tmpfs(place.path());
        // What cannot be recorded is refused for that alone: the log is on another disk.
        let elsewhere = tempfile::tempdir().unwrap();
        let log = elsewhere.path().join("audit.log").display().to_string();
        let sub = Sub::start_on(place.path(), &["--audit-log", &log]).await;
        let source = Source::start().await;
        let (_, empty) = sub.tree().await;
        let want = Edit::of(&empty, &source).file("/f", "f").done();
        assert_eq!(sub.converge(1, &source, &want).await.outcome, UpdateOutcome::Done);
        // The file-system itself, and the mount that the machine sees alone.
        for flags in [MsFlags::empty(), MsFlags::MS_BIND] {
            remount(place.path(), flags | MsFlags::MS_RDONLY);
            let (code, why) = refusal(&sub, 2, &empty, removal("/f")).await;
            let expected = "the root is mounted read-only: nothing can be changed";
            assert_eq!((code, why.as_str()), (FaultCode::Unavailable, expected));
            sub.poll_until(|reply| reply.alarms == [Alarm::ReadOnly]).await;
            remount(place.path(), flags);
            sub.poll_until(|reply| reply.alarms.is_empty()).await;
        }
        assert_eq!(sub.converge(3, &source, &empty).await.outcome, UpdateOutcome::Done);
        source.stop().await;
        sub.stop().await;
        unmount(place.path());
    });
}

/// The client of the subd that says next where it listens.
fn next_client(stderr: &mut BufReader<ChildStderr>) -> Client {
    let mut line = String::new();
    loop {
        line.clear();
        assert_ne!(stderr.read_line(&mut line).unwrap(), 0, "it has ended");
        if let Some((_, address)) = line.split_once("listening on http://") {
            return Client::new(Peer::parse(address.trim(), 1).unwrap(), &Security::Insecure);
        }
    }
}

#[test]
fn a_subd_that_starts_on_a_read_only_root_starts_over_when_it_can_be_written() {
    in_own_mounts(async || {
        let place = tempfile::tempdir().unwrap();
        mount_tmpfs(place.path());
        let source = Source::start().await;
        let empty = {
            let sub = Sub::start_on(place.path(), &[]).await;
            let (_, empty) = sub.tree().await;
            sub.stop().await;
            empty
        };
        remount(place.path(), MsFlags::MS_RDONLY);
        let mut child = Command::new(env!("CARGO_BIN_EXE_subd"))
            .args(["--insecure", "--listen", "127.0.0.5:0", "--config", "/dev/null", "--root"])
            .arg(place.path())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stderr = BufReader::new(child.stderr.take().unwrap());
        let sub = Sub::elsewhere(place.path(), next_client(&mut stderr));
        let reply = sub.poll_until(|reply| reply.alarms == [Alarm::ReadOnly]).await;
        assert!(reply.scanned || sub.tree().await.1.digest() == empty.digest());
        sub.stop().await;
        remount(place.path(), MsFlags::empty());
        let sub = Sub::elsewhere(place.path(), next_client(&mut stderr));
        let want = Edit::of(&empty, &source).file("/f", "f").done();
        assert_eq!(sub.converge(1, &source, &want).await.outcome, UpdateOutcome::Done);
        assert_eq!(sub.poll().await.alarms, []);
        sub.stop().await;
        child.kill().unwrap();
        child.wait().unwrap();
        source.stop().await;
    });
}

#[test]
fn a_trial_that_cannot_be_written_is_an_alarm_until_it_can() {
    in_own_mounts(async || {
        let place = tempfile::tempdir().unwrap();
        let size = Some("size=64k");
        mount(Some("tmpfs"), place.path(), Some("tmpfs"), MsFlags::empty(), size).unwrap();
        let root = Arc::new(Root::open(place.path()).unwrap());
        Directories::open(&root).unwrap();
        let exclusions = Patterns::new::<&str>([]).unwrap();
        let state = StateDirectory::lock(Directories::state(&root, None).unwrap()).unwrap();
        let saved = state.load().unwrap();
        let report_state = ReportState::new(1, Default::default(), exclusions, saved, []);
        let report_state = Arc::new(report_state);
        let probe = Probe { root, report_state: Arc::clone(&report_state) };
        let alarms = || report_state.reply(None, Measured::default()).alarms;
        let brim = place.path().join("brim");
        std::fs::write(&brim, vec![0; 128 << 10]).unwrap_err();
        probe.try_to_write();
        let why = "cannot write /.subd/trial: ENOSPC: No space left on device";
        assert_eq!(alarms(), [Alarm::WriteFailed(why.to_owned())]);
        std::fs::remove_file(&brim).unwrap();
        probe.try_to_write();
        assert_eq!(alarms(), []);
        assert!(!place.path().join(".subd/trial").exists());
        drop(probe);
        unmount(place.path());
    });
}
