//! A simulated machine that fails in many ways: a [`SubModel`] with the faults that tests set, the
//! time that its work takes, and the polls that wait for news.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use api::fault::{Fault, FaultCode};
use api::subd::{
    Alarm, FetchFailure, FreeSpace, Paused, PollReply, PollRequest, PrepareRequest, ScanCounters,
    SubVersion, UpdateOutcome,
};
use dominator::core::sub::{Call, Failure, FailureKind, RequestId};
use model::image::ImageName;
use model::object::ObjectId;
use model::path::TreePath;
use model::plan::{RefusedChanges, apply};
use model::scope::{Coverage, ScanSettings, Scope};
use model::tree::{Leaf, Node, Time, Tree, TreeBuilder};
use testing::random::Random;
use testing::sub_model::{SubModel, Task};

/// What a small file takes on a disk.
const BLOCK_BYTES: u64 = 4_096;

/// The state of the image server that machines fetch from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Server {
    #[default]
    Good,
    /// It is away: objects that have arrived are complete.
    Away,
    /// A fetch takes a quarter of an hour.
    Slow,
    /// It sends other bytes than were asked for.
    Lying,
}

/// Work that ends later.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Work {
    Task(Task),
    Expire(u64),
    /// Tries again to close the journal.
    Retry,
    /// The machine goes down to come up again; the simulation does that.
    Boot,
}

/// A request to a sub, apart from polls.
#[derive(Clone, Debug)]
pub enum Request {
    ReadTree(ObjectId),
    Scan,
    Call(Call),
    Commit(u64),
}

/// The answer to a [`Request`].
#[derive(Clone, Debug)]
pub enum Answer {
    Tree(Tree, Arc<RefusedChanges>),
    Scanned(SubVersion),
    Accepted,
    Failed(Fault),
}

/// A poll that waits for news.
#[derive(Clone, Debug)]
pub struct Waiting {
    pub run: u64,
    pub request_id: RequestId,
    pub have: Option<SubVersion>,
}

/// A machine with its sub.
pub struct Model {
    pub sub: SubModel,
    pub is_up: bool,
    pub updates_done: u64,
    /// Fetches, updates and permissions fail now and then.
    pub fails: bool,
    /// The path at which the scanner hangs.
    pub stalls: Option<String>,
    /// Updates are permitted only by force.
    pub guarded: bool,
    /// Updates to this image do not pass their health check.
    pub sick: Option<ImageName>,
    /// The machine is never seen again after an update to this image.
    pub vanishes: Option<ImageName>,
    /// Updates to this image are complete only after a reboot.
    pub reboots: Option<ImageName>,
    /// Updates can neither be finished nor undone.
    pub sticks: bool,
    /// How much its disk holds; `None` for ample space.
    pub disk_bytes: Option<u64>,
    /// The server that it fetches from.
    pub server: Server,
    /// The state of the server when the fetch began.
    server_before: Server,
    /// The machine itself, and not its subd alone, starts next.
    pub boots: bool,
    /// Work that was started, and how long it takes. The simulation takes it out.
    pub started: Vec<(Duration, Work)>,
    pub waiting: Vec<Waiting>,
    settings: ScanSettings,
    paused: Option<Paused>,
    passes: u64,
    /// The last result of [`Model::seen`], with the digest of the tree and the settings.
    seen: RefCell<Option<(ObjectId, ScanSettings, Seen)>>,
}

/// The part of a tree that a scan sees, and the directories that hold what it does not see.
type Seen = (Tree, Vec<TreePath>);

impl Model {
    pub fn new(tree: Tree) -> Self {
        Self {
            sub: SubModel::new(tree),
            is_up: false,
            updates_done: 0,
            fails: false,
            stalls: None,
            guarded: false,
            sick: None,
            vanishes: None,
            reboots: None,
            sticks: false,
            disk_bytes: None,
            server: Server::Good,
            server_before: Server::Good,
            boots: false,
            started: Vec::new(),
            waiting: Vec::new(),
            settings: ScanSettings::default(),
            paused: None,
            passes: 0,
            seen: RefCell::default(),
        }
    }

    /// Loses everything that is not on disk.
    pub fn crash(&mut self) {
        self.is_up = false;
        self.started.clear();
        self.waiting.clear();
        self.sub.crash();
    }

    /// Starts again. An interrupted update is finished or undone.
    pub fn start(&mut self, random: &mut Random) {
        self.is_up = true;
        self.sub.start(random.number());
        let boots = std::mem::take(&mut self.boots);
        if boots {
            Arc::make_mut(&mut self.sub.identity).boot_id.push_str(", again");
        }
        if let Some(last) = &mut self.sub.last_update {
            last.awaits_boot &= !boots;
            if last.awaits_boot {
                self.work(1_000, Work::Boot);
            }
        }
        if let Some(request) = self.sub.journal() {
            if self.sticks {
                self.work(1_000, Work::Retry);
            } else if random.chance(50) {
                let result = self.result(request);
                self.end_update(result);
            } else {
                self.end_update(Err(UpdateOutcome::RolledBack("subd was interrupted".into())));
            }
        }
        self.work(500 + random.below(2_000), Work::Task(Task::Scan));
    }

    fn work(&mut self, milliseconds: u64, work: Work) {
        self.started.push((Duration::from_millis(milliseconds), work));
    }

    /// Takes the polls that have news, or all of them, with their answers.
    pub fn answers(&mut self, all: bool) -> Vec<(Waiting, PollReply)> {
        let (answered, waiting): (Vec<_>, Vec<_>) = std::mem::take(&mut self.waiting)
            .into_iter()
            .partition(|poll| all || self.sub.has_news(poll.have));
        self.waiting = waiting;
        answered
            .into_iter()
            .map(|poll| {
                let reply = self.report(poll.have);
                (poll, reply)
            })
            .collect()
    }

    /// Answers one poll whose wait has ended.
    pub fn give_up(&mut self, run: u64, request_id: RequestId) -> Option<(Waiting, PollReply)> {
        let at = self
            .waiting
            .iter()
            .position(|poll| poll.run == run && poll.request_id == request_id)?;
        let poll = self.waiting.remove(at);
        let reply = self.report(poll.have);
        Some((poll, reply))
    }

    pub fn poll(&mut self, run: u64, request_id: RequestId, request: &PollRequest) {
        self.waiting.push(Waiting { run, request_id, have: request.have });
    }

    fn report(&self, have: Option<SubVersion>) -> PollReply {
        let stuck = self.sub.is_stuck().then(|| Alarm::JournalStuck("full".into()));
        let stalled = self.stalls.clone().map(Alarm::ScannerStalled);
        let reply = self.sub.report(have);
        let free_bytes = self.disk_bytes.map(|bytes| bytes.saturating_sub(self.used_bytes()));
        let space =
            FreeSpace { free_bytes: free_bytes.unwrap_or(reply.space.free_bytes), ..reply.space };
        PollReply {
            space,
            counters: ScanCounters { metadata_passes: self.passes, ..ScanCounters::default() },
            alarms: stuck.into_iter().chain(stalled).collect(),
            paused: self.paused.clone(),
            ..reply
        }
    }

    /// Returns what the files of the tree and the object cache take on the disk.
    pub fn used_bytes(&self) -> u64 {
        let files = self.sub.tree.nodes().map(|(_, node)| match node {
            Node::Leaf(Leaf::File(file)) => file.size_bytes.div_ceil(BLOCK_BYTES) * BLOCK_BYTES,
            _ => 0,
        });
        files.sum::<u64>() + self.sub.cache.len() as u64 * BLOCK_BYTES
    }

    /// Somebody on the machine pauses updates, or lets them go on.
    pub fn pause(&mut self, reason: Option<&str>) {
        let until = Time { seconds: 1 << 40, nanoseconds: 0 };
        self.paused = reason.map(|reason| Paused { until, reason: reason.to_owned() });
        self.sub.version.status += 1;
    }

    /// Returns the image of the last update that has ended, with whatever outcome.
    pub fn updated_to(&self) -> Option<&ImageName> {
        self.sub.last_update.as_ref().map(|last| &last.image)
    }

    pub fn is_paused(&self) -> bool {
        self.paused.is_some()
    }

    /// Returns the part of the tree that a scan with `settings` sees, and the directories that hold
    /// what it does not see.
    pub fn seen(&self, settings: &ScanSettings) -> Seen {
        let mut last = self.seen.borrow_mut();
        let digest = self.sub.tree.digest();
        let known = last.as_ref().filter(|(of, with, _)| *of == digest && with == settings);
        if let Some((_, _, seen)) = known {
            return seen.clone();
        }
        let seen = self.scan(settings);
        *last = Some((digest, settings.clone(), seen.clone()));
        seen
    }

    fn scan(&self, settings: &ScanSettings) -> Seen {
        let sees = |path: &TreePath| match &settings.coverage {
            Coverage::Full(filter) => !filter.keeps(path),
            Coverage::Paths(paths) => paths.contains(path),
        };
        let mut builder = TreeBuilder::new(settings.algorithm);
        let mut kept = BTreeSet::new();
        for (path, node) in self.sub.tree.nodes() {
            if path.is_root() || sees(&path) {
                builder.insert(path, node).unwrap();
            } else if let Some(parent) = path.parent()
                && (parent.is_root() || sees(&parent))
            {
                kept.insert(parent);
            }
        }
        (builder.finish().unwrap(), kept.into_iter().collect())
    }

    /// Something on the machine has changed: the next scan sees it.
    pub fn drift(&mut self, tree: Tree, random: &mut Random) {
        self.sub.tree = tree;
        if self.is_up {
            self.work(random.below(5_000), Work::Task(Task::Scan));
        }
    }

    pub fn ask(&mut self, request: Request, random: &mut Random) -> Answer {
        let (paused, guarded, fails) = (self.paused.is_some(), self.guarded, self.fails);
        let permits = |random: &mut Random, is_forced: bool| {
            let is_guarded = (fails && random.chance(20) || guarded) && !is_forced;
            !paused && !is_guarded
        };
        let started = match request {
            Request::ReadTree(root) => match self.sub.scanned() {
                Some(tree) if tree.digest() == root => {
                    return Answer::Tree(tree.clone(), Arc::new(self.sub.refused()));
                }
                _ => Err(Fault::new(FaultCode::Stale, "the tree has changed")),
            },
            Request::Scan => {
                self.end_scan();
                return Answer::Scanned(self.sub.version);
            }
            Request::Call(Call::SetConfiguration(configuration)) => {
                if let Some(limits) = configuration.limits {
                    self.sub.set_limits(limits);
                }
                let scan = configuration.scan.filter(|scan| {
                    self.settings != *scan && self.sub.set_scope(Scope::of(scan, &[]))
                });
                if let Some(scan) = scan {
                    self.settings = scan;
                    self.work(200 + random.below(1_000), Work::Task(Task::Scan));
                }
                Ok(None)
            }
            // A model trusts everybody, and no image of it has resources.
            Request::Call(
                Call::Offer(_)
                | Call::Hold
                | Call::RetryTriggers
                | Call::Provision(_)
                | Call::ContinueProvisioning(_)
                | Call::GiveUpProvisioning(_)
                | Call::OrderTask(_)
                | Call::SetNotRestarted(_),
            ) => Ok(None),
            Request::Call(Call::Fetch(request)) => self.sub.fetch(request),
            Request::Call(Call::Prepare(request, _)) => {
                self.sub.prepare(request, |is_forced| permits(random, is_forced))
            }
            Request::Commit(id) => self.sub.commit(id, |is_forced| permits(random, is_forced)),
            Request::Call(Call::AddObjects(ids)) => {
                self.sub.add_objects(&ids);
                Ok(None)
            }
            Request::Call(Call::Cleanup(request)) => {
                self.sub.remove_objects(&request.objects).map(|()| None)
            }
        };
        match started {
            Ok(Some(task)) => {
                self.start_task(task, random);
                Answer::Accepted
            }
            Ok(None) => Answer::Accepted,
            Err(fault) => Answer::Failed(fault),
        }
    }

    fn start_task(&mut self, task: Task, random: &mut Random) {
        let milliseconds = match task {
            Task::Scan => 20 + random.below(200),
            Task::Fetch(_) => {
                self.server_before = self.server;
                let slowly = if self.server == Server::Slow { 900_000 } else { 0 };
                slowly + 50 + random.below(3_000)
            }
            Task::Prepare(_) => 20 + random.below(500),
            Task::Update(_) => 50 + random.below(1_000),
        };
        self.work(milliseconds, Work::Task(task));
    }

    /// Ends work that was started.
    pub fn end(&mut self, work: &Work, random: &mut Random) {
        match *work {
            Work::Task(Task::Scan) => self.end_scan(),
            Work::Task(Task::Fetch(id)) => self.end_fetch(id, random),
            Work::Task(Task::Prepare(id)) => {
                if let Some(seconds) = self.sub.end_prepare(id) {
                    self.work(1_000 * u64::from(seconds), Work::Expire(id));
                }
            }
            Work::Task(Task::Update(id)) => {
                if !self.sub.is_updating(id) {
                    return;
                }
                if self.sticks {
                    self.end_update(Err(UpdateOutcome::Stuck("full".into())));
                    self.work(1_000, Work::Retry);
                } else if self.fails && random.chance(10) {
                    self.end_update(Err(UpdateOutcome::RolledBack("a step failed".into())));
                } else {
                    let result = self.result(self.sub.journal().expect("an update has a journal"));
                    self.end_update(result);
                }
                self.start_task(Task::Scan, random);
            }
            Work::Retry if self.sticks => self.work(1_000, Work::Retry),
            Work::Retry => {
                if let Some(request) = self.sub.journal() {
                    let result = self.result(request);
                    self.end_update(result);
                    self.start_task(Task::Scan, random);
                }
            }
            Work::Boot => {}
            Work::Expire(id) => self.sub.expire(id),
        }
    }

    /// Ends a pass over the tree.
    pub fn end_scan(&mut self) {
        let (tree, kept_directories) = self.seen(&self.settings);
        self.passes += u64::from(self.sub.end_scan(tree, kept_directories).is_some());
    }

    fn end_fetch(&mut self, id: u64, random: &mut Random) {
        let Some(objects) = self.sub.objects_of_fetch(id) else { return };
        let error = match self.server {
            Server::Away => Some("images:6971 does not answer"),
            Server::Lying => Some("images:6971 gives other bytes than it was asked for"),
            _ if self.fails && random.chance(10) => Some("the object server is down"),
            Server::Good | Server::Slow => None,
        };
        let arrived = match (error, self.server) {
            (None, _) => objects,
            (Some(_), Server::Away) if self.server_before != Server::Away => {
                random.below(objects as u64 + 1) as usize
            }
            (Some(_), _) => 0,
        };
        let error = error.map(|error| FetchFailure::Sources(error.into()));
        self.sub.end_fetch(id, arrived, error);
    }

    /// Returns the tree after an update, or the outcome of its failure.
    fn result(&self, request: &PrepareRequest) -> Result<Tree, UpdateOutcome> {
        if self.sick.as_ref() == Some(&request.image) {
            return Err(UpdateOutcome::Undone("it does not answer".into()));
        }
        apply(&self.sub.tree, &request.plan)
            .map_err(|error| UpdateOutcome::RolledBack(error.to_string()))
    }

    fn end_update(&mut self, result: Result<Tree, UpdateOutcome>) {
        let is_done = result.is_ok();
        self.sub.end_update(result);
        if !is_done {
            return;
        }
        self.updates_done += 1;
        if self.reboots.as_ref() == self.updated_to()
            && let Some(last) = &mut self.sub.last_update
        {
            last.awaits_boot = true;
            self.work(500, Work::Boot);
        }
    }
}

/// Returns the failure that a driver makes of the fault of a sub.
pub fn failure(fault: Fault) -> Failure {
    let kind = match fault.code {
        FaultCode::Busy => FailureKind::Busy,
        FaultCode::Held => FailureKind::Held,
        FaultCode::Stale => FailureKind::Stale,
        FaultCode::NotFound => FailureKind::NotFound,
        code => panic!("a model answers with {code:?}"),
    };
    Failure { kind, text: fault.message }
}
