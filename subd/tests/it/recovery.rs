//! Updates that are cut short, and what a restart, or `--recover`, makes of them.

use std::path::{Path, PathBuf};

use api::fault::FaultCode;
use api::subd::{Activity, Alarm, Commit, CommitRequest, PollReply, UpdateOutcome};
use model::tree::Tree;
use model::trigger::Triggers;

use crate::fixture::{Edit, Source, Sub, request, set_immutable};
use crate::process::{Process, output};

const TRIGGERS: &str = r#"[{"MatchLines": ["/d/f"], "Service": "web"},
    {"MatchLines": ["/d/f"], "Service": "fresh", "DoReload": true}]"#;

/// A machine whose subd is killed in the middle of its second update: `/d/f` from `one` to `two`,
/// `/g` goes, `/new` comes.
struct Machine {
    place: tempfile::TempDir,
    root: PathBuf,
    source: Source,
    second: Tree,
}

impl Machine {
    /// Kills it when `verb` is asked of a service.
    async fn killed_at(verb: &str) -> Self {
        let (place, source) = (tempfile::tempdir().unwrap(), Source::start().await);
        let root = place.path().join("root");
        std::fs::create_dir(&root).unwrap();
        let log = place.path().join("log");
        std::fs::write(place.path().join("tame"), format!("echo $2 $1 >> {}", log.display()))
            .unwrap();
        let deadly = format!("[ $2 != {verb} ] || kill -9 $PPID");
        std::fs::write(place.path().join("deadly"), deadly).unwrap();
        let mut process = start(place.path(), "tame");
        let sub = Sub::elsewhere(&root, process.client.clone());
        let (_, empty) = sub.tree().await;
        let edit = Edit::of(&empty, &source).directory("/d", 0o755);
        let first = edit.file("/d/f", "one").file("/g", "g").done();
        let last = sub.converge_with(1, &source, &first, TRIGGERS).await;
        assert_eq!((last.outcome, last.trigger_failures.len()), (UpdateOutcome::Done, 0));
        sub.stop().await;
        assert_eq!(process.stop(), Some(0));
        process = start(place.path(), "deadly");
        let sub = Sub::elsewhere(&root, process.client.clone());
        let edit = Edit::of(&first, &source).file("/d/f", "two").remove("/g");
        let second = edit.file("/new", "new").done();
        let (_, plan) = sub.plan(&second).await;
        sub.fetch_for(2, &source, &plan).await;
        let (reply, plan) = sub.plan(&second).await;
        let mut request = request(2, &reply, &second, plan);
        request.triggers = Triggers::from_json(TRIGGERS).unwrap();
        sub.prepare(&request).await.unwrap();
        // The answer may come before the end or not.
        let _answer = sub.client.call::<Commit>(&CommitRequest { update_id: 2 }).await;
        assert_eq!(process.child.wait().unwrap().code(), None);
        sub.stop().await;
        std::fs::write(&log, "").unwrap();
        Self { place, root, source, second }
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.place.path().join("log")).unwrap()
    }

    fn read(&self, path: &str) -> Option<String> {
        std::fs::read_to_string(self.root.join(path)).ok()
    }

    fn undo(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.root.join(".subd/undo")).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    /// Starts it again, and waits until the update is over and verified.
    async fn restarted(&self) -> (Process, PollReply) {
        let process = start(self.place.path(), "tame");
        let sub = Sub::elsewhere(&self.root, process.client.clone());
        let over = |reply: &PollReply| reply.activity == Activity::Idle && reply.scanned;
        let reply = sub.poll_until(over).await;
        sub.stop().await;
        (process, reply)
    }

    /// Expects that the second update is done, as if nothing had happened.
    async fn expect_done(&self, services: &str) {
        let (process, reply) = self.restarted().await;
        let last = reply.last_update.unwrap();
        assert_eq!((last.update_id, last.outcome, last.operations), (2, UpdateOutcome::Done, 3));
        assert_eq!((last.trigger_failures, reply.alarms), (vec![], vec![]));
        assert!(last.verified_generation.is_some());
        assert_eq!(reply.last_image.unwrap().as_str(), "test/2");
        assert_eq!(reply.scan.unwrap().root, self.second.digest());
        assert_eq!(self.log(), services);
        assert_eq!(process.stop(), Some(0));
        assert_eq!(self.undo(), Vec::<String>::new());
        for empty in ["staging", "journal", "objects"] {
            let left = std::fs::read_dir(self.root.join(".subd").join(empty)).unwrap();
            assert_eq!(left.count(), 0, "{empty}");
        }
    }

    async fn stop(self) {
        self.source.stop().await;
    }
}

fn flags(place: &Path, script: &str) -> Vec<String> {
    let command = format!("sh {}", place.join(script).display());
    let flags = ["--insecure", "--retry-after", "1", "--service-command", &command];
    flags.map(str::to_owned).into()
}

fn start(place: &Path, script: &str) -> Process {
    let flags = flags(place, script);
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    Process::start_with(&place.join("root"), &flags)
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_before_its_first_step_it_finishes_and_starts_what_it_had_stopped() {
    let machine = Machine::killed_at("stop").await;
    assert_eq!(machine.read("d/f").unwrap(), "one");
    assert_eq!(machine.undo(), ["2"]);
    machine.expect_done("stop web\nreload fresh\nstart web\n").await;
    machine.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_after_its_last_step_it_starts_what_it_had_stopped() {
    let machine = Machine::killed_at("start").await;
    assert_eq!(machine.read("d/f").unwrap(), "two");
    machine.expect_done("reload fresh\nstart web\n").await;
    machine.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn in_early_boot_the_tree_is_finished_and_no_service_is_touched() {
    let machine = Machine::killed_at("stop").await;
    let flags = flags(machine.place.path(), "tame");
    let recover: Vec<&str> = flags.iter().map(String::as_str).chain(["--recover"]).collect();
    for _ in 0..2 {
        let output = output(&machine.root, &recover);
        let text = String::from_utf8(output.stdout).unwrap();
        let expected = "update 2 to test/2 was interrupted: the tree is as the update planned it\n";
        assert_eq!((output.status.code(), text.as_str()), (Some(0), expected));
        assert_eq!(
            (machine.read("d/f").unwrap(), machine.log()),
            ("two".to_owned(), String::new())
        );
    }
    machine.expect_done("reload fresh\nstart web\n").await;
    let output = output(&machine.root, &recover);
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!((output.status.code(), text.as_str()), (Some(0), "no update was interrupted\n"));
    machine.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crash_between_two_steps_is_finished_or_undone_as_a_whole() {
    // Whether somebody has made a file where one is to appear.
    for spoilt in [false, true] {
        let machine = Machine::killed_at("stop").await;
        exchange_by_hand(&machine);
        assert_eq!(machine.read("d/f").unwrap(), "two");
        if !spoilt {
            machine.expect_done("stop web\nreload fresh\nstart web\n").await;
            continue;
        }
        std::fs::write(machine.root.join("new"), "mine").unwrap();
        let (process, reply) = machine.restarted().await;
        let last = reply.last_update.unwrap();
        let why = "/new changed since it was scanned: something is there now".to_owned();
        assert_eq!((last.update_id, last.outcome), (2, UpdateOutcome::RolledBack(why)));
        assert_eq!(reply.last_image.unwrap().as_str(), "test/1");
        let files = ["d/f", "g", "new"].map(|file| machine.read(file).unwrap());
        assert_eq!(files, ["one", "g", "mine"]);
        assert_eq!(machine.log(), "stop web\nstart web\n");
        assert_eq!(process.stop(), Some(0));
        assert_eq!(machine.undo(), Vec::<String>::new());
        let objects = std::fs::read_dir(machine.root.join(".subd/objects")).unwrap();
        assert_eq!(objects.count(), 2, "they are cached again");
        machine.stop().await;
    }
}

/// The slot of the update that was cut short in which `content` is.
fn slot(machine: &Machine, content: &str) -> PathBuf {
    let slots = std::fs::read_dir(machine.root.join(".subd/undo/2")).unwrap();
    let mut slots = slots.map(|entry| entry.unwrap().path());
    slots.find(|slot| std::fs::read_to_string(slot).unwrap() == content).unwrap()
}

/// Does the step for `/d/f`, as subd does it.
fn exchange_by_hand(machine: &Machine) {
    let (slot, path) = (slot(machine, "two"), machine.root.join("d/f"));
    let between = machine.place.path().join("between");
    std::fs::rename(&slot, &between).unwrap();
    std::fs::rename(&path, &slot).unwrap();
    std::fs::rename(&between, &path).unwrap();
}

/// Puts another file with `content` at `/name`, which does not get the same inode number.
fn replace(machine: &Machine, name: &str, content: &str) {
    let (other, path) = (machine.place.path().join("other"), machine.root.join(name));
    std::fs::write(&other, content).unwrap();
    std::fs::rename(other, path).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_others_have_changed_meanwhile_is_theirs_and_gets_no_update_stuck() {
    // The new file is replaced in its place, or its place is taken away.
    for gone in [false, true] {
        let machine = Machine::killed_at("stop").await;
        exchange_by_hand(&machine);
        // Held, so that its inode number is not that of another file.
        let _held = std::fs::File::open(machine.root.join("d/f")).unwrap();
        let (what, changed) = match gone {
            false => {
                replace(&machine, "d/f", "three");
                ("/d/f changed since it was scanned: it was replaced during the update", 1)
            }
            true => {
                std::fs::remove_dir_all(machine.root.join("d")).unwrap();
                (
                    "/d/f cannot be changed: cannot open the directory /d: ENOENT: No such file or \
                  directory",
                    2,
                )
            }
        };
        std::fs::write(machine.root.join("new"), "mine").unwrap();
        let (process, reply) = machine.restarted().await;
        let last = reply.last_update.unwrap();
        let why = match changed {
            1 => "/new changed since it was scanned: something is there now".to_owned(),
            _ => what.to_owned(),
        };
        let why = format!("{why}; not undone because it was changed in the meantime: {what}");
        assert_eq!((last.update_id, last.outcome), (2, UpdateOutcome::RolledBack(why)));
        assert_eq!((reply.alarms, machine.undo()), (vec![], vec![]));
        let files = ["d/f", "g", "new"].map(|file| machine.read(file));
        let f = (!gone).then(|| "three".to_owned());
        assert_eq!(files, [f, Some("g".into()), Some("mine".into())]);
        assert_eq!(machine.log(), "stop web\nstart web\n");
        let sub = Sub::elsewhere(&machine.root, process.client.clone());
        let last = sub.converge_with(3, &machine.source, &machine.second, TRIGGERS).await;
        assert_eq!(last.outcome, UpdateOutcome::Done);
        sub.stop().await;
        assert_eq!(process.stop(), Some(0));
        machine.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_can_be_neither_finished_nor_undone_is_told_and_tried_again_until_it_can() {
    let machine = Machine::killed_at("stop").await;
    exchange_by_hand(&machine);
    // What has come to `/d/f` can't be taken away, and what is to come to `/new` cannot come.
    assert!(set_immutable(&machine.root.join("d/f"), true));
    std::fs::write(machine.root.join("new"), "mine").unwrap();
    let refused = |slots: &str| {
        format!(
            "undoing it failed: /d/f cannot be changed: cannot rename /.subd/undo/{slots}/0: \
             EPERM: Operation not permitted"
        )
    };
    let why = "/new changed since it was scanned: something is there now";
    let why = format!("{why}; {}", refused("2"));
    let flags = flags(machine.place.path(), "tame");
    let recover: Vec<&str> = flags.iter().map(String::as_str).chain(["--recover"]).collect();
    let output = output(&machine.root, &recover);
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(text.contains(&format!("error: update 2 to test/2 is stuck: {why}\nhint: ")), "{text}");
    let (process, reply) = machine.restarted().await;
    let undo = refused("2.back");
    let last = reply.last_update.as_ref().unwrap();
    assert_eq!((last.update_id, &last.outcome), (2, &UpdateOutcome::Stuck(undo.clone())));
    assert_eq!(reply.alarms, [Alarm::JournalStuck(undo)]);
    assert_eq!(machine.undo(), ["2.back"]);
    assert_eq!(machine.log(), "stop web\nstart web\n");
    let sub = Sub::elsewhere(&machine.root, process.client.clone());
    let (reply, plan) = sub.plan(&machine.second).await;
    let refused = sub.prepare(&request(3, &reply, &machine.second, plan)).await.unwrap_err();
    assert_eq!(refused.fault().map(|fault| fault.code), Some(FaultCode::Busy), "{refused}");
    assert!(set_immutable(&machine.root.join("d/f"), false));
    let over = |reply: &PollReply| reply.alarms.is_empty() && reply.activity == Activity::Idle;
    let reply = sub.poll_until(over).await;
    let last = reply.last_update.unwrap();
    assert!(matches!(last.outcome, UpdateOutcome::RolledBack(_)), "{last:?}");
    assert_eq!(
        (machine.read("d/f").unwrap(), machine.read("g").unwrap()),
        ("one".into(), "g".into())
    );
    assert_eq!(machine.log(), "stop web\nstart web\nstop web\nstart web\n");
    let last = sub.converge_with(4, &machine.source, &machine.second, TRIGGERS).await;
    assert_eq!(last.outcome, UpdateOutcome::Done);
    sub.stop().await;
    assert_eq!(process.stop(), Some(0));
    machine.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_journal_is_nothing_unless_an_update_was_begun() {
    let machine = Machine::killed_at("stop").await;
    let subd = machine.root.join(".subd");
    std::fs::write(subd.join("journal/update"), "{").unwrap();
    let (process, reply) = machine.restarted().await;
    let name = "an update was interrupted and has no journal; what it displaced is in \
                /.subd/undo/2: repair the tree, then remove that directory";
    assert_eq!(reply.alarms, [Alarm::JournalStuck(name.to_owned())]);
    let sub = Sub::elsewhere(&machine.root, process.client.clone());
    let (reply, plan) = sub.plan(&machine.second).await;
    let refused = sub.prepare(&request(3, &reply, &machine.second, plan)).await.unwrap_err();
    assert_eq!(refused.fault().map(|fault| fault.code), Some(FaultCode::Busy), "{refused}");
    assert_eq!((machine.read("d/f").unwrap(), machine.undo()), ("one".into(), vec!["2".into()]));
    std::fs::remove_dir_all(subd.join("undo/2")).unwrap();
    sub.poll_until(|reply| reply.alarms.is_empty()).await;
    assert_eq!(std::fs::read(subd.join("journal/update.bad")).unwrap(), b"{");
    let last = sub.converge_with(4, &machine.source, &machine.second, TRIGGERS).await;
    assert_eq!(last.outcome, UpdateOutcome::Done);
    sub.stop().await;
    assert_eq!(process.stop(), Some(0));
    machine.stop().await;
}
