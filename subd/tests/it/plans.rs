//! What a plan does to a real tree is what `apply` says of it, whoever made it.
//!
//! A machine that takes only signed images judges a plan by `apply`, which reads it in order; it
//! is staged by path. So plans are made by chance here, out of honest ones: shuffled, cut short,
//! with other operations in between, and with many hard links. Each is carried out on a real
//! directory that is then looked at. It is refused, or undone as a whole, or does what `apply`
//! says.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;

use api::subd::{Health, LastUpdate};
use model::escape::ByteText;
use model::image::{HealthCheck, ImageName};
use model::object::Algorithm;
use model::path::TreePath;
use model::plan::{Action, Difference, Operation, Plan, RefusedChanges, ScannedTree, apply, plan};
use model::scope::{Attributes, ScanSettings};
use model::tree::text::to_text;
use model::tree::{
    Device, File, Leaf, Metadata, Node, Special, Symlink, Time, TimePrecision, Tree, TreeBuilder,
};
use model::trigger::Triggers;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use subd::cache::Cache;
use subd::root::Root;
use subd::state::directories::Directories;
use subd::state::persisted_state::PersistError;
use subd::update::executor::{Executor, Machine};
use subd::update::prepared::{Prepared, StageContext, UpdateSpec};
use subd::update::running_update::FinalTree;
use subd::update::step_plan::plan_steps;
use tokio_util::sync::CancellationToken;

use crate::fixture::path;
use crate::scan::{independent, on_demand, start_on};

/// Where memory is a file-system, so that nothing waits for a disk.
const MEMORY: &str = "/dev/shm";

/// All paths, in component order.
const PATHS: [&str; 10] = ["/a", "/b", "/c", "/d", "/d/a", "/d/b", "/d/e", "/d/e/a", "/f", "/f/a"];

/// How many plans are tried.
const CASES: u32 = 400;

/// Of how many that were carried out one is scanned too: a scanner stands back on a busy machine.
const SCAN_EACH: u32 = 40;

/// How many contents there are.
const CONTENTS: u8 = 3;

/// Something that is at a path, or is put there.
#[derive(Clone, Copy, Debug)]
enum What {
    Directory { open: bool },
    File { content: u8, open: bool },
    Symlink(u8),
    Fifo { open: bool },
    Link(usize),
}

/// What an operation does, where and with what.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    at: usize,
    kind: u8,
    what: What,
    /// A replacement says nothing of what it displaces.
    silent: bool,
}

fn what() -> impl Strategy<Value = What> {
    prop_oneof![
        2 => any::<bool>().prop_map(|open| What::Directory { open }),
        4 => (0..CONTENTS, any::<bool>()).prop_map(|(content, open)| What::File { content, open }),
        1 => (0..2_u8).prop_map(What::Symlink),
        1 => any::<bool>().prop_map(|open| What::Fifo { open }),
        5 => (0..PATHS.len()).prop_map(What::Link),
    ]
}

fn whats() -> impl Strategy<Value = Vec<Option<What>>> {
    prop::collection::vec(prop::option::weighted(0.8, what()), PATHS.len())
}

fn candidate() -> impl Strategy<Value = Candidate> {
    (0..PATHS.len(), 0..5_u8, what(), prop::bool::weighted(0.1))
        .prop_map(|(at, kind, what, silent)| Candidate { at, kind, what, silent })
}

fn mode(open: bool) -> u32 {
    if open { 0o755 } else { 0o640 }
}

fn content(content: u8) -> Vec<u8> {
    vec![b'x'; usize::from(content)]
}

fn node(what: What) -> Node {
    let mtime = Time { seconds: 1_600_000_000, nanoseconds: 5 };
    match what {
        What::Directory { open } => Node::Directory(Metadata::new(mode(open), 0, 0)),
        What::File { content: number, open } => {
            let bytes = content(number);
            Node::Leaf(Leaf::File(File {
                metadata: Metadata::new(mode(open), 0, 0),
                mtime,
                size_bytes: bytes.len() as u64,
                object: Algorithm::Blake3.digest(&bytes).into(),
            }))
        }
        What::Symlink(target) => Node::Leaf(Leaf::Symlink(Symlink {
            metadata: Metadata::new(0o777, 0, 0),
            target: ByteText(vec![b'a' + target]),
        })),
        What::Fifo { open } => Node::Leaf(Leaf::Special(Special {
            metadata: Metadata::new(mode(open), 0, 0),
            mtime,
            device: Device::Fifo,
        })),
        What::Link(target) => Node::Leaf(Leaf::HardLink(path(PATHS[target]))),
    }
}

/// Makes what can be made of `whats` below `root`.
fn make(root: &Path, whats: &[Option<What>]) {
    for (at, what) in PATHS.iter().zip(whats) {
        let Some(what) = what else { continue };
        let at = root.join(&at[1..]);
        if !at.parent().unwrap().is_dir() || at.parent().unwrap().is_symlink() {
            continue;
        }
        let open = match *what {
            What::Directory { open } => {
                fs::create_dir(&at).unwrap();
                open
            }
            What::File { content: number, open } => {
                fs::write(&at, content(number)).unwrap();
                open
            }
            What::Symlink(target) => {
                std::os::unix::fs::symlink(["a", "b"][usize::from(target)], &at).unwrap();
                continue;
            }
            What::Fifo { open } => {
                nix::unistd::mkfifo(&at, nix::sys::stat::Mode::S_IRUSR).unwrap();
                open
            }
            What::Link(target) => {
                let target = root.join(&PATHS[target][1..]);
                if target.symlink_metadata().is_ok_and(|target| !target.is_dir()) {
                    fs::hard_link(target, &at).unwrap();
                }
                continue;
            }
        };
        fs::set_permissions(&at, fs::Permissions::from_mode(mode(open))).unwrap();
    }
}

/// The tree of `whats`, with the root of `have`.
fn tree(have: &Tree, whats: &[Option<What>]) -> Tree {
    let mut builder = TreeBuilder::new(Algorithm::Blake3);
    let root = Node::Directory(have.root().metadata().clone());
    builder.insert(TreePath::root(), root).unwrap();
    for (at, what) in PATHS.iter().zip(whats) {
        let (Some(what), at) = (what, path(at)) else { continue };
        let node = match *what {
            What::Link(target) => {
                let is_file = |node: &Node| matches!(node, Node::Leaf(Leaf::File(_)));
                match builder.get(&path(PATHS[target])) {
                    Some(found) if is_file(found) => node(*what),
                    _ => continue,
                }
            }
            _ => node(*what),
        };
        if builder.get(&at.parent().unwrap()).is_some_and(Node::is_directory) {
            builder.insert(at, node).unwrap();
        }
    }
    builder.finish().unwrap()
}

fn between(have: &Tree, want: &Tree) -> Plan {
    let have = ScannedTree {
        tree: have,
        kept_directories: &BTreeSet::new(),
        externally_linked: &BTreeSet::new(),
        occupied: &BTreeMap::new(),
        refused: &RefusedChanges::default(),
        times: TimePrecision::default(),
    };
    plan(&have, want)
}

impl Candidate {
    fn operation(self, have: &Tree) -> Operation {
        let (at, new) = (path(PATHS[self.at]), node(self.what));
        let below = |at: &TreePath| {
            let paths = have.nodes().map(|(path, _)| path);
            paths.filter(|path| path != at && path.starts_with(at)).collect()
        };
        let action = match self.kind {
            0 => Action::Create(new),
            1 | 2 => {
                let silent = self.silent || new.is_directory();
                let displaced = if silent { Vec::new() } else { below(&at) };
                Action::Replace { node: new, displaced }
            }
            3 => {
                // Only what can be changed in place.
                let found = have.get(&at).map(|child| child.node());
                let file = have.file(&at).map(|file| Node::Leaf(Leaf::File(file)));
                let mut changed = file.or(found).unwrap_or_else(|| new.clone());
                if let (Some(changed), Some(new)) = (changed.metadata_mut(), new.metadata()) {
                    changed.mode = new.mode;
                    changed.uid = u32::from(self.silent);
                }
                if let (true, Node::Leaf(Leaf::File(file))) = (self.silent, &mut changed) {
                    file.mtime.seconds += 1;
                }
                Action::Change(changed)
            }
            _ => Action::Remove,
        };
        Operation { path: at, action, reason: vec![Difference::Content] }
    }
}

/// Each operation of `pool` that `apply` takes after those before it.
fn those_that_fit(have: &Tree, pool: Vec<Operation>) -> (Plan, Tree) {
    let (mut fitting, mut after) = (Plan::default(), have.clone());
    for operation in pool {
        if fitting.operations.iter().any(|other| other.path == operation.path) {
            continue;
        }
        fitting.operations.push(operation);
        match apply(have, &fitting) {
            Ok(tree) => after = tree,
            Err(_) => drop(fitting.operations.pop()),
        }
    }
    (fitting, after)
}

struct Quiet;

impl Machine for Quiet {
    fn check_health(&self, _check: &HealthCheck) -> Health {
        Health::Passed
    }

    fn note(&self, _last: &LastUpdate, _done: Option<&Triggers>) -> Result<(), PersistError> {
        Ok(())
    }
}

/// A directory, subd's own things below it, and who scans.
struct Place {
    directory: tempfile::TempDir,
    root: Arc<Root>,
    directories: Directories,
    cache: Cache,
    stop: CancellationToken,
}

impl Place {
    fn new(whats: &[Option<What>]) -> Self {
        let mut builder = tempfile::Builder::new();
        let directory = builder.prefix("plans.").tempdir_in(MEMORY);
        let directory = directory.or_else(|_| builder.tempdir()).unwrap();
        make(directory.path(), whats);
        let root = Arc::new(Root::open(directory.path()).unwrap());
        let directories = Directories::open(&root).unwrap();
        let (cache, _) = Cache::open(Arc::clone(&directories.objects)).unwrap();
        for number in 0..CONTENTS {
            let content = content(number);
            let id = Algorithm::Blake3.digest(&content);
            let mut receiving = cache.receive(id, content.len() as u64).unwrap();
            receiving.write(&content).unwrap();
            receiving.finish().unwrap();
        }
        Self { directory, root, directories, cache, stop: CancellationToken::new() }
    }

    /// What is there now, found without any of subd's code.
    fn tree(&self) -> Tree {
        independent(self.directory.path(), Algorithm::Blake3)
    }

    /// What is there now, by a scanner that knows nothing of before.
    fn scan(&self) -> Tree {
        let root = Arc::clone(&self.root);
        let scanner = start_on(root, ScanSettings::default(), &[], on_demand());
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(scanner.rescan_now()).unwrap().tree.clone().unwrap()
    }

    /// Carries `plan` out; `None` if it is refused.
    fn carry_out(&self, have: &Tree, plan: &Plan) -> Option<FinalTree> {
        let step_plan = plan_steps(plan, |_| None).ok()?;
        let order = UpdateSpec {
            resources: provisioning::image::Definition::default(),
            update_id: 7,
            image: ImageName::new("test/7").unwrap(),
            image_digest: have.digest(),
            triggers: Triggers::default(),
            health_check: None,
            own_service: "subd".to_owned(),
            force_disruption: false,
            operations: 1,
            changed: Vec::new(),
            touched: BTreeSet::new(),
            accepted: None,
            tasks: Default::default(),
        };
        let context = StageContext {
            root: &self.root,
            directories: &self.directories,
            cache: &self.cache,
            scanned: have,
            managed: Attributes::default(),
            stop: &self.stop,
        };
        let prepared = Prepared::stage(&context, order, &step_plan).ok()?;
        let journal = prepared.journal(&Triggers::default(), &Default::default(), "boot");
        let (root, directories) = (&self.root, &self.directories);
        let executor = Executor { root, directories, services: None, boot_id: "boot" };
        let (_, ended) = executor.commit(&Quiet, journal);
        Some(ended.settled.expect("nobody else changes anything"))
    }
}

/// How many plans were carried out, undone and refused.
#[derive(Debug, Default)]
struct Count {
    carried_out: u32,
    undone: u32,
    refused: u32,
}

#[test]
fn a_plan_does_what_apply_says_or_nothing() {
    let pool = prop::collection::vec(candidate(), 0..12);
    let order = prop::option::of(prop::collection::vec(any::<u16>(), 40));
    let config = Config { failure_persistence: None, ..Config::with_cases(CASES) };
    let mut runner = TestRunner::new(config);
    let count = std::cell::RefCell::new(Count::default());
    let result = runner.run(&(whats(), whats(), pool, order), |(have, want, more, order)| {
        let place = Place::new(&have);
        let have = &place.tree();
        let mut pool = between(have, &tree(have, &want)).operations;
        pool.splice(0..0, more.iter().map(|candidate| candidate.operation(have)));
        if let Some(order) = order {
            let mut numbered: Vec<_> = order.iter().cycle().zip(pool).collect();
            numbered.sort_by_key(|(number, _)| **number);
            pool = numbered.into_iter().map(|(_, operation)| operation).collect();
        }
        let (plan, said) = those_that_fit(have, pool);
        let shown: Vec<String> = plan.operations.iter().map(ToString::to_string).collect();
        let settled = place.carry_out(have, &plan);
        let expected = if settled == Some(FinalTree::New) { &said } else { have };
        let is = to_text(&place.tree());
        prop_assert_eq!(&is, &to_text(expected), "{:?} {:#?}", settled, shown);
        let mut count = count.borrow_mut();
        if count.carried_out % SCAN_EACH == 0 {
            prop_assert_eq!(to_text(&place.scan()), is);
        }
        match settled {
            Some(FinalTree::New) => count.carried_out += 1,
            Some(FinalTree::Old) => count.undone += 1,
            None => count.refused += 1,
        }
        drop(place.directory);
        Ok(())
    });
    let count = count.into_inner();
    println!("{count:?}");
    if let Err(error) = result {
        panic!("{error}");
    }
    assert!(
        count.carried_out > CASES / 2,
        "too few plans are carried out to say anything: {count:?}"
    );
}
