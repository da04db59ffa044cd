//! The executor of updates on a real directory, with a machine that exists in this test only.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use api::subd::{Health, LastUpdate, TriggerFailure, UpdateOutcome};
use model::image::{HealthCheck, ImageName};
use model::object::{Algorithm, ObjectId};
use model::plan::{RefusedChanges, ScannedTree, plan};
use model::scope::Attributes;
use model::tree::{File, Leaf, Metadata, Node, Time, TimePrecision, Tree, TreeBuilder};
use model::trigger::Triggers;
use model::trigger::services::{ServiceCall, ServiceCalls, ServiceVerb};
use subd::cache::Cache;
use subd::root::Root;
use subd::state::directories::Directories;
use subd::state::persisted_state::PersistError;
use subd::tasks::staged::TaskChange;
use subd::update::executor::{Executor, JournalState, Machine, Services, UpdateEnd};
use subd::update::journal::Journal;
use subd::update::prepared::{Prepared, StageContext, UpdateSpec, free};
use subd::update::running_update::{FinalTree, RunningUpdate};
use subd::update::stage::StageError;
use subd::update::step::Phase;
use subd::update::step_plan::plan_steps;
use tasks::image::{Definition, ImageTasks};
use tokio_util::sync::CancellationToken;

use crate::fixture::path;

/// Records what it is told.
struct Recorder {
    log: RefCell<Vec<String>>,
    health: Health,
    /// How many notes fail.
    notes_to_refuse: Cell<u32>,
}

impl Recorder {
    fn new(health: Health) -> Self {
        Self { log: RefCell::default(), health, notes_to_refuse: Cell::new(0) }
    }

    fn take(&self) -> String {
        self.log.take().join(", ")
    }
}

impl Services for Recorder {
    fn drive(&self, calls: &[ServiceCall]) -> Vec<TriggerFailure> {
        let words = calls.iter().map(|call| format!("{} {}", call.verb.name(), call.service));
        self.log.borrow_mut().extend(words);
        Vec::new()
    }

    fn pause_tasks(&self, tasks: &BTreeSet<String>) -> Vec<TriggerFailure> {
        self.log.borrow_mut().extend(tasks.iter().map(|task| format!("pause {task}")));
        Vec::new()
    }

    fn run_tasks(&self, tasks: &ImageTasks) {
        self.log.borrow_mut().extend(tasks.0.keys().map(|task| format!("run {task}")));
    }
}

impl Machine for Recorder {
    fn check_health(&self, _check: &HealthCheck) -> Health {
        self.log.borrow_mut().push("check".to_owned());
        self.health.clone()
    }

    fn note(&self, last: &LastUpdate, done: Option<&Triggers>) -> Result<(), PersistError> {
        let left = self.notes_to_refuse.get();
        if left > 0 {
            self.notes_to_refuse.set(left - 1);
            return Err(PersistError::Locked);
        }
        let done = if done.is_some() { " done" } else { "" };
        self.log.borrow_mut().push(format!("note {:?}{done}", last.outcome));
        Ok(())
    }
}

/// A root with `/f` and the directory `/d`, and an update that replaces the one, removes the other
/// and makes `/new`.
struct Place {
    place: tempfile::TempDir,
    root: Root,
    directories: Directories,
    cache: Cache,
    stop: CancellationToken,
}

const MTIME: Time = Time { seconds: 1_600_000_000, nanoseconds: 5 };

fn file(content: &str) -> Node {
    let object = Algorithm::Blake3.digest(content.as_bytes());
    let metadata = Metadata::new(0o644, 0, 0);
    Node::Leaf(Leaf::File(File {
        metadata,
        mtime: MTIME,
        size_bytes: content.len() as u64,
        object: object.into(),
    }))
}

fn tree(nodes: &[(&str, Node)]) -> Tree {
    let mut builder = TreeBuilder::new(Algorithm::Blake3);
    builder.insert(path("/"), Node::Directory(Metadata::new(0o755, 0, 0))).unwrap();
    for (at, node) in nodes {
        builder.insert(path(at), node.clone()).unwrap();
    }
    builder.finish().unwrap()
}

impl Place {
    fn new() -> Self {
        let place = tempfile::tempdir().unwrap();
        let root = Root::open(place.path()).unwrap();
        let top = root.directory(&path("/")).unwrap();
        std::fs::write(place.path().join("f"), "one").unwrap();
        top.set_mode(b"f", 0o644).unwrap();
        top.set_mtime(b"f", MTIME).unwrap();
        top.make_directory(b"d", 0o755).unwrap();
        top.set_mode(b"d", 0o755).unwrap();
        top.set_xattr(b"d", b"trusted.of-nobody", b"x").unwrap();
        let directories = Directories::open(&root).unwrap();
        let (cache, _) = Cache::open(Arc::clone(&directories.objects)).unwrap();
        for content in ["two", "new"] {
            let id = Algorithm::Blake3.digest(content.as_bytes());
            let mut receiving = cache.receive(id, content.len() as u64).unwrap();
            receiving.write(content.as_bytes()).unwrap();
            receiving.finish().unwrap();
        }
        Self { place, root, directories, cache, stop: CancellationToken::new() }
    }

    fn journal(&self, health_check: Option<HealthCheck>, reboot: bool) -> Journal {
        let prepared = self.stage(health_check).unwrap();
        let mut journal = prepared.journal(&Triggers::default(), &Default::default(), "boot 1");
        let call = |verb| {
            let web = r#"{"service": "web", "verb": "VERB"}"#.replace("VERB", verb);
            vec![serde_json::from_str::<ServiceCall>(&web).unwrap()]
        };
        journal.head.calls = ServiceCalls {
            before: call(ServiceVerb::Stop.name()),
            after: call(ServiceVerb::Start.name()),
            reboot,
            ..ServiceCalls::default()
        };
        journal
    }

    fn stage(&self, health_check: Option<HealthCheck>) -> Result<Prepared, StageError> {
        let directory = Node::Directory(Metadata::new(0o755, 0, 0));
        let have = tree(&[("/d", directory), ("/f", file("one"))]);
        let want = tree(&[("/f", file("two")), ("/new", file("new"))]);
        let plan = plan(
            &ScannedTree {
                tree: &have,
                kept_directories: &BTreeSet::new(),
                externally_linked: &BTreeSet::new(),
                occupied: &BTreeMap::new(),
                refused: &RefusedChanges::default(),
                times: TimePrecision::default(),
            },
            &want,
        );
        let order = UpdateSpec {
            resources: provisioning::image::Definition::default(),
            update_id: 7,
            image: ImageName::new("test/7").unwrap(),
            image_digest: want.digest(),
            triggers: Triggers::default(),
            health_check,
            own_service: "subd".to_owned(),
            force_disruption: false,
            operations: 3,
            changed: Vec::new(),
            touched: BTreeSet::new(),
            accepted: None,
            tasks: Default::default(),
        };
        let context = StageContext {
            root: &self.root,
            directories: &self.directories,
            cache: &self.cache,
            scanned: &have,
            managed: Attributes::default(),
            stop: &self.stop,
        };
        let step_plan = plan_steps(&plan, |_| None).unwrap();
        Prepared::stage(&context, order, &step_plan)
    }

    fn executor<'a>(&'a self, services: &'a Recorder, boot_id: &'a str) -> Executor<'a> {
        Executor {
            root: &self.root,
            directories: &self.directories,
            services: Some(services),
            boot_id,
        }
    }

    /// What is in the tree now.
    fn tree(&self) -> String {
        let read = |name| std::fs::read_to_string(self.place.path().join(name));
        let file = |name| read(name).unwrap_or_else(|_| "-".to_owned());
        let top = self.root.directory(&path("/")).unwrap();
        let directory = top.xattrs(b"d", Attributes::default()).map(|_| "d");
        let kept = xattr::get(self.place.path().join("d"), "trusted.of-nobody");
        let kept = kept.ok().flatten().map_or("", |_| "+x");
        format!("{} {} {}{kept}", file("f"), file("new"), directory.unwrap_or("-"))
    }

    fn undo(&self) -> Vec<Option<(u64, Phase)>> {
        let names = self.directories.undo.names().unwrap();
        names.iter().map(|name| Phase::of_directory(name)).collect()
    }

    /// Expects that nothing is left of the update but the objects of `cached`.
    fn expect_freed(&self, update: &RunningUpdate, cached: &[&str]) {
        assert!(self.directories.journal.names().unwrap().is_empty());
        free(update, &self.directories, &self.cache);
        assert_eq!(self.undo(), []);
        assert!(self.directories.staging.names().unwrap().is_empty());
        let mut ids: Vec<ObjectId> =
            cached.iter().map(|content| Algorithm::Blake3.digest(content.as_bytes())).collect();
        ids.sort();
        let (cache, _) = Cache::open(Arc::clone(&self.directories.objects)).unwrap();
        assert_eq!(cache.ids(), ids);
    }
}

const OLD: &str = "one - d+x";
const NEW: &str = "two new -";

fn check(undo: bool) -> Option<HealthCheck> {
    Some(HealthCheck { command: vec!["true".to_owned()], within_seconds: 1, undo })
}

fn sick() -> Health {
    Health::Failed("sick".to_owned())
}

fn expect(ended: &UpdateEnd, outcome: UpdateOutcome, journal: JournalState, reboot: bool) {
    let got = (&ended.last.outcome, &ended.journal, ended.reboot);
    assert_eq!(got, (&outcome, &journal, reboot));
}

#[test]
fn an_update_is_carried_out_in_its_order() {
    let (place, machine) = (Place::new(), Recorder::new(Health::Passed));
    assert_eq!(place.tree(), OLD);
    let journal = place.journal(check(true), true);
    let again = journal.clone();
    // Of another update: it is not touched.
    std::fs::write(place.place.path().join(".subd/journal/update"), "x").unwrap();
    let (update, ended) = place.executor(&machine, "boot 1").commit(&machine, again);
    let why = UpdateOutcome::RolledBack("the journal of another update is not closed".to_owned());
    expect(&ended, why, JournalState::Closed, false);
    assert_eq!((place.tree(), update.phase), (OLD.to_owned(), Phase::Staged));
    machine.take();
    std::fs::remove_file(place.place.path().join(".subd/journal/update")).unwrap();
    let journal = Journal { head: common_head(journal.head.clone()), ..journal };
    let (update, ended) = place.executor(&machine, "boot 1").commit(&machine, journal);
    expect(&ended, UpdateOutcome::Done, JournalState::Closed, false);
    assert_eq!((place.tree(), ended.settled), (NEW.to_owned(), Some(FinalTree::New)));
    assert_eq!(machine.take(), "stop web, start web, check, note Done done");
    assert!(ended.last.window_ns > 0);
    place.expect_freed(&update, &[]);
}

/// Without reboot.
fn common_head(mut head: subd::update::journal::JournalHead) -> subd::update::journal::JournalHead {
    head.calls.reboot = false;
    head
}

#[test]
fn a_finished_update_is_undone_when_the_machine_is_not_well() {
    for (undo, tree) in [(true, OLD), (false, NEW)] {
        let (place, machine) = (Place::new(), Recorder::new(sick()));
        let journal = place.journal(check(undo), false);
        let (update, ended) = place.executor(&machine, "boot 1").commit(&machine, journal);
        assert_eq!((place.tree(), &ended.last.health), (tree.to_owned(), &Some(sick())));
        if undo {
            expect(&ended, UpdateOutcome::Undone("sick".to_owned()), JournalState::Closed, false);
            let log = machine.take();
            assert!(log.starts_with("stop web, start web, check, stop web, "), "{log}");
            assert!(log.ends_with("start web, note Undone(\"sick\")"), "{log}");
            place.expect_freed(&update, &["two", "new"]);
        } else {
            expect(&ended, UpdateOutcome::Done, JournalState::Closed, false);
            place.expect_freed(&update, &[]);
        }
    }
}

#[test]
fn after_a_reboot_the_health_is_checked_and_the_previous_tree_booted_again() {
    let (place, machine) = (Place::new(), Recorder::new(sick()));
    let journal = place.journal(check(true), true);
    let (_, ended) = place.executor(&machine, "boot 1").commit(&machine, journal);
    expect(&ended, UpdateOutcome::Done, JournalState::AwaitsBoot, true);
    assert!(ended.last.awaits_boot);
    assert_eq!(machine.take(), "stop web, start web, note Done");
    let executor = place.executor(&machine, "boot 2");
    let mut update = executor.find().unwrap().unwrap();
    assert_eq!(update.phase, Phase::Live { boot_id: "boot 1".to_owned() });
    let carried = executor.settle_tree(&mut update);
    let ended = executor.finish(&machine, &mut update, carried);
    expect(&ended, UpdateOutcome::Undone("sick".to_owned()), JournalState::Closed, true);
    assert_eq!(place.tree(), OLD);
    place.expect_freed(&update, &["two", "new"]);
}

#[test]
fn what_cannot_be_noted_is_noted_later_and_nothing_is_done_twice() {
    let (place, machine) = (Place::new(), Recorder::new(Health::Passed));
    // The second note is made when the slots are empty.
    let why =
        format!("all changes were made, but that cannot be recorded: {}", PersistError::Locked);
    for (refused, journal) in [(1, JournalState::Closed), (3, JournalState::Stuck(why))] {
        let place = if refused == 1 { &place } else { &Place::new() };
        machine.notes_to_refuse.set(refused);
        let work = place.journal(None, false);
        let executor = place.executor(&machine, "boot 1");
        let (mut update, ended) = executor.commit(&machine, work);
        expect(&ended, UpdateOutcome::Done, journal.clone(), false);
        assert_eq!(place.tree(), NEW);
        if refused == 3 {
            assert_eq!(machine.take(), "stop web, start web");
            assert_eq!(place.undo(), [Some((7, Phase::Done))]);
            expect(
                &executor.retry(&machine, &mut update),
                UpdateOutcome::Done,
                JournalState::Closed,
                false,
            );
            assert_eq!(machine.take(), "note Done done");
        } else {
            assert_eq!(machine.take(), "stop web, start web, note Done done");
        }
        place.expect_freed(&update, &[]);
    }
}

#[test]
fn what_was_found_anywhere_on_its_way_comes_to_one_of_its_ends() {
    // What the directory is called when it is found, and what comes of it.
    let live = Phase::Live { boot_id: "boot 1".to_owned() };
    let table = [
        (Phase::Staged, NEW, "stop web, start web, note Done done"),
        (Phase::Begun, NEW, "stop web, start web, note Done done"),
        (live, NEW, "start web, note Done done"),
        (Phase::Done, NEW, "note Done done"),
        (Phase::Back, OLD, "stop web, start web, note RolledBack"),
        (Phase::Undoing, OLD, "stop web, start web, note Undone"),
        (Phase::RolledBack, OLD, "note RolledBack"),
        (Phase::Undone, OLD, "note Undone"),
    ];
    for (phase, tree, log) in table {
        let (place, machine) = (Place::new(), Recorder::new(Health::Passed));
        let journal = place.journal(None, false);
        subd::update::journal::write(
            &place.directories.journal,
            &place.directories.reserve,
            &journal,
        )
        .unwrap();
        let executor = place.executor(&machine, "boot 1");
        if phase != Phase::Staged {
            let (staging, undo) = (&place.directories.staging, &place.directories.undo);
            staging.rename_noreplace(b"7", undo, &phase.directory(7)).unwrap();
        }
        if matches!(phase, Phase::Live { .. } | Phase::Done | Phase::Back | Phase::Undoing) {
            let slots = place.directories.undo.open_child(&phase.directory(7)).unwrap();
            let stage = subd::update::activate::Activation { root: &place.root, slots: &slots };
            stage.activate(&journal.script).unwrap();
            assert_eq!(place.tree(), NEW);
        }
        let mut update = executor.find().unwrap().unwrap();
        assert_eq!(update.phase, phase);
        let carried = executor.settle_tree(&mut update);
        assert_eq!(place.tree(), tree, "{phase:?}");
        let ended = executor.finish(&machine, &mut update, carried);
        assert_eq!(ended.journal, JournalState::Closed, "{phase:?}");
        assert_eq!(machine.take().split('(').next().unwrap(), log, "{phase:?}");
        place.expect_freed(&update, if tree == OLD { &["two", "new"] } else { &[] });
        assert!(executor.find().unwrap().is_none());
    }
}

#[test]
fn an_update_is_not_staged_while_subd_stops_and_its_objects_stay_cached() {
    let place = Place::new();
    place.stop.cancel();
    let before = place.cache.ids();
    assert_eq!(before.len(), 2);
    assert!(matches!(place.stage(None), Err(StageError::Stopping)));
    assert_eq!(place.cache.ids(), before);
    let staging = place.place.path().join(".subd/staging");
    assert_eq!(std::fs::read_dir(staging).unwrap().count(), 0);
    assert_eq!(std::fs::read_to_string(place.place.path().join("f")).unwrap(), "one");
}

/// An update that turns the task `old` into the task `new`.
fn task_change() -> TaskChange {
    let tasks = |name: &str| {
        let definition = Definition { text: String::new(), programs: Vec::new() };
        ImageTasks([(name.to_owned(), definition)].into())
    };
    let names = |name: &str| [name.to_owned()].into();
    let (stop, stop_to_undo) = (names("old"), names("new"));
    TaskChange { old: tasks("old"), new: tasks("new"), stop, stop_to_undo }
}

#[test]
fn tasks_stop_before_services_and_run_after_them() {
    let begun = "pause old, stop web, start web";
    let undone = "check, pause new, stop web, start web, run old, note Undone(\"sick\")";
    let table = [
        (Health::Passed, false, "boot 1", format!("{begun}, run new, check, note Done done")),
        (sick(), false, "boot 1", format!("{begun}, run new, {undone}")),
        // What runs once must not begin right before the reboot.
        (Health::Passed, true, "boot 1", format!("{begun}, note Done")),
    ];
    for (health, reboots, boot_id, told) in table {
        let (place, machine) = (Place::new(), Recorder::new(health));
        let mut journal = place.journal(check(true), reboots);
        journal.head.tasks = task_change();
        let (update, _) = place.executor(&machine, boot_id).commit(&machine, journal);
        assert_eq!(machine.take(), told);
        if reboots {
            drop(update);
            let executor = place.executor(&machine, "boot 2");
            let mut found = executor.find().unwrap().unwrap();
            let settled = executor.settle_tree(&mut found);
            executor.finish(&machine, &mut found, settled);
            assert_eq!(machine.take(), "run new, check, note Done done");
        }
    }
}
