//! A sub as the dominator sees it, without disk, network or time: it scans, fetches, stages and
//! updates a small tree in memory, with `model::plan::apply`.

use std::collections::BTreeSet;
use std::time::Duration;

use api::subd::{
    Activity, Alarm, CacheReport, FetchFailure, FetchProgress, FetchRequest, Identity, LastFetch,
    LastUpdate, Limits, LimitsReport, Outcome, Paused, PollReply, PollRequest, PrepareRequest,
    ScanCounters, ScanReport, UpdatePhase, Version,
};
use dominator::core::sub::{Call, Failure, FailureKind, Ticket};
use model::image::ImageName;
use model::object::ObjectId;
use model::path::TreePath;
use model::plan::apply;
use model::scope::{Coverage, ScanSettings, Scope};
use model::tree::{Time, Tree, TreeBuilder};

use crate::random::Random;

/// What the image server that machines fetch from does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Server {
    /// What it should.
    #[default]
    Good,
    /// It is away: what has arrived has arrived.
    Away,
    /// A fetch takes a quarter of an hour.
    Slow,
    /// It gives other bytes than are asked for.
    Lying,
}

/// Something that will be over later.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Work {
    Scan,
    Fetch(u64),
    Prepare(u64),
    Update(u64),
    Expire(u64),
    /// Tries again to close the journal.
    Retry,
    /// The machine goes down to come up again; the simulation does that.
    Boot,
}

/// What a sub is asked, apart from polls.
#[derive(Clone, Debug)]
pub enum Request {
    ReadTree(ObjectId),
    Scan,
    Call(Call),
    Commit(u64),
}

/// What it answers.
#[derive(Clone, Debug)]
pub enum Answer {
    Tree(Tree),
    Scanned(Version),
    Accepted,
    Failed(Failure),
}

/// A poll that waits for news.
#[derive(Clone, Debug)]
pub struct Waiting {
    pub run: u64,
    pub ticket: Ticket,
    pub have: Option<Version>,
}

/// A machine with its sub.
pub struct Model {
    pub tree: Tree,
    pub is_up: bool,
    pub instance: u64,
    /// What the sub says of the machine.
    pub identity: Identity,
    pub updates_done: u64,
    pub fails: bool,
    /// What the scanner hangs at.
    pub stalls: Option<String>,
    /// Updates are allowed only by force.
    pub guarded: bool,
    /// Updates to this image do not pass their health check.
    pub sick: Option<ImageName>,
    /// The machine is never seen again after an update to this image.
    pub vanishes: Option<ImageName>,
    /// Updates to this image are complete only after a reboot.
    pub reboots: Option<ImageName>,
    /// Updates can neither be finished nor put back.
    pub sticks: bool,
    /// Where it fetches from.
    pub server: Server,
    /// What it did when the fetch began.
    server_before: Server,
    /// The machine itself, and not its subd alone, starts next.
    pub boots: bool,
    /// Work that was started and when it is over; the simulation takes it out.
    pub started: Vec<(Duration, Work)>,
    pub waiting: Vec<Waiting>,

    // On disk.
    settings: ScanSettings,
    /// What it was told to take at most.
    pub limits: Limits,
    pub cache: BTreeSet<ObjectId>,
    journal: Option<Box<PrepareRequest>>,
    last_image: Option<ImageName>,
    last_update: Option<LastUpdate>,
    paused: Option<Paused>,

    // In memory.
    passes: u64,
    generation: u64,
    status: u64,
    scan: Option<(ScanReport, Tree)>,
    last_scan: Option<(ObjectId, Vec<TreePath>)>,
    update: UpdatePhase,
    staged: Option<Box<PrepareRequest>>,
    fetching: Option<FetchRequest>,
    last_fetch: Option<LastFetch>,
}

fn failed(kind: FailureKind, text: &str) -> Answer {
    Answer::Failed(Failure { kind, text: text.to_owned() })
}

impl Model {
    pub fn new(tree: Tree) -> Self {
        Self {
            tree,
            is_up: false,
            instance: 0,
            identity: Identity::default(),
            updates_done: 0,
            fails: false,
            stalls: None,
            guarded: false,
            sick: None,
            vanishes: None,
            reboots: None,
            sticks: false,
            server: Server::Good,
            server_before: Server::Good,
            boots: false,
            started: Vec::new(),
            waiting: Vec::new(),
            settings: ScanSettings::default(),
            limits: Limits::default(),
            cache: BTreeSet::new(),
            journal: None,
            last_image: None,
            last_update: None,
            paused: None,
            passes: 0,
            generation: 0,
            status: 0,
            scan: None,
            last_scan: None,
            update: UpdatePhase::Idle,
            staged: None,
            fetching: None,
            last_fetch: None,
        }
    }

    /// Loses all that is not on disk.
    pub fn crash(&mut self) {
        self.is_up = false;
        self.started.clear();
        self.waiting.clear();
        self.scan = None;
        self.last_scan = None;
        self.staged = None;
        self.fetching = None;
        self.update = UpdatePhase::Idle;
        self.last_fetch = None;
    }

    /// Starts again; an update that was cut is finished or put back.
    pub fn start(&mut self, random: &mut Random) {
        self.is_up = true;
        self.instance = random.next();
        self.generation = 0;
        self.status = 1;
        let boots = std::mem::take(&mut self.boots);
        if let Some(last) = &mut self.last_update {
            last.awaits_boot &= !boots;
            if last.awaits_boot {
                self.work(1_000, Work::Boot);
            }
        }
        if self.sticks && self.journal.is_some() {
            self.work(1_000, Work::Retry);
        } else if let Some(request) = self.journal.take() {
            if random.chance(50) {
                self.finish(&request);
            } else {
                self.ended(&request, Outcome::RolledBack("subd was cut short".into()));
            }
        }
        self.work(500 + random.below(2_000), Work::Scan);
    }

    fn work(&mut self, milliseconds: u64, work: Work) {
        self.started.push((Duration::from_millis(milliseconds), work));
    }

    /// What it is doing.
    pub fn activity(&self) -> Activity {
        let fetch = self.fetching.as_ref().map(|request| FetchProgress {
            fetch_id: request.fetch_id,
            ahead: request.ahead,
            ..FetchProgress::default()
        });
        Activity::of(self.update, fetch)
    }

    fn version(&self) -> Version {
        Version { instance: self.instance, generation: self.generation, status: self.status }
    }

    /// Takes the polls that have news, or all of them.
    pub fn answers(&mut self, everyone: bool) -> Vec<(Waiting, PollReply)> {
        let version = self.version();
        let (answered, waiting): (Vec<_>, Vec<_>) = std::mem::take(&mut self.waiting)
            .into_iter()
            .partition(|poll| everyone || poll.have != Some(version));
        self.waiting = waiting;
        answered
            .into_iter()
            .map(|poll| {
                let reply = self.report(poll.have);
                (poll, reply)
            })
            .collect()
    }

    /// Answers one poll whose wait is over.
    pub fn give_up(&mut self, run: u64, ticket: Ticket) -> Option<(Waiting, PollReply)> {
        let at = self.waiting.iter().position(|poll| poll.run == run && poll.ticket == ticket)?;
        let poll = self.waiting.remove(at);
        let reply = self.report(poll.have);
        Some((poll, reply))
    }

    pub fn poll(&mut self, run: u64, ticket: Ticket, request: &PollRequest) {
        self.waiting.push(Waiting { run, ticket, have: request.have });
    }

    fn report(&self, have: Option<Version>) -> PollReply {
        let is_news = have.is_none_or(|have| {
            (have.instance, have.generation) != (self.instance, self.generation)
        });
        let scan = self.scan.as_ref().filter(|_| is_news).map(|(report, _)| report.clone());
        let cache = self.cache.iter().copied().collect();
        PollReply {
            identity: self.identity.clone(),
            activity: self.activity(),
            scan,
            scanned: self.scan.is_some(),
            cache: is_news.then_some(CacheReport::Full(cache)),
            last_fetch: self.last_fetch.clone(),
            last_update: self.last_update.clone(),
            last_image: self.last_image.clone(),
            counters: ScanCounters { metadata_passes: self.passes, ..ScanCounters::default() },
            limits: LimitsReport { told: self.limits, ..LimitsReport::default() },
            alarms: self
                .is_stuck()
                .then(|| Alarm::JournalStuck("full".into()))
                .into_iter()
                .chain(self.stalls.clone().map(Alarm::ScannerStalled))
                .collect(),
            paused: self.paused.clone(),
            ..PollReply::idle(self.version(), self.scope())
        }
    }

    /// True if there is an update that nobody carries out.
    fn is_stuck(&self) -> bool {
        self.journal.is_some() && !self.is_updating()
    }

    fn is_updating(&self) -> bool {
        matches!(self.update, UpdatePhase::Updating(_))
    }

    /// Somebody on the machine pauses updates, or lets them go on.
    pub fn pause(&mut self, reason: Option<&str>) {
        let until = Time { seconds: 1 << 40, nanoseconds: 0 };
        self.paused = reason.map(|reason| Paused { until, reason: reason.to_owned() });
        self.status += 1;
    }

    /// The image of the last update that has ended, however.
    pub fn updated_to(&self) -> Option<&ImageName> {
        self.last_update.as_ref().map(|last| &last.image)
    }

    pub fn is_paused(&self) -> bool {
        self.paused.is_some()
    }

    /// Why an update is not allowed now.
    fn held(&self, random: &mut Random, is_forced: bool) -> Option<Answer> {
        let is_guarded = (self.fails && random.chance(20) || self.guarded) && !is_forced;
        (self.paused.is_some() || is_guarded).then(|| failed(FailureKind::Held, "not now"))
    }

    fn scope(&self) -> Scope {
        Scope::of(&self.settings, &[])
    }

    /// The part of the tree that a scan under `settings` sees, with the directories that hold
    /// what it does not see.
    pub fn seen(&self, settings: &ScanSettings) -> (Tree, Vec<TreePath>) {
        let sees = |path: &TreePath| match &settings.coverage {
            Coverage::Full(filter) => !filter.keeps(path),
            Coverage::Paths(paths) => paths.contains(path),
        };
        let mut builder = TreeBuilder::new(settings.algorithm);
        let mut kept = BTreeSet::new();
        for (path, node) in self.tree.nodes() {
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

    /// The tree of the last scan.
    pub fn scanned(&self) -> Option<&Tree> {
        self.scan.as_ref().map(|(_, tree)| tree)
    }

    /// Something on the machine has changed: the next scan sees it.
    pub fn drift(&mut self, tree: Tree, random: &mut Random) {
        self.tree = tree;
        if self.is_up {
            self.work(random.below(5_000), Work::Scan);
        }
    }

    pub fn ask(&mut self, request: Request, random: &mut Random) -> Answer {
        match request {
            Request::ReadTree(root) => match &self.scan {
                Some((_, tree)) if tree.digest() == root => Answer::Tree(tree.clone()),
                _ => failed(FailureKind::Stale, "the tree has changed"),
            },
            Request::Scan => {
                self.scan_is_over();
                Answer::Scanned(self.version())
            }
            Request::Call(Call::SetConfiguration(configuration)) => {
                if let Some(limits) = configuration.limits
                    && self.limits != limits
                {
                    self.limits = limits;
                    self.status += 1;
                }
                if let Some(scan) = configuration.scan
                    && self.settings != scan
                {
                    self.settings = scan;
                    self.scan = None;
                    self.status += 1;
                    self.work(200 + random.below(1_000), Work::Scan);
                }
                Answer::Accepted
            }
            // A model trusts everybody.
            Request::Call(Call::Offer(_)) => Answer::Accepted,
            Request::Call(Call::Fetch(request)) => self.fetch(request, random),
            Request::Call(Call::Prepare(request)) => self.prepare(request, random),
            Request::Commit(update_id) => self.commit(update_id, random),
            Request::Call(Call::Cleanup(request)) => {
                if self.activity() != Activity::Idle {
                    return failed(FailureKind::Busy, "busy");
                }
                let before = self.cache.len();
                for object in &request.objects {
                    self.cache.remove(object);
                }
                self.generation += u64::from(self.cache.len() != before);
                Answer::Accepted
            }
        }
    }

    fn fetch(&mut self, request: FetchRequest, random: &mut Random) -> Answer {
        let id = request.fetch_id;
        if !request.ahead {
            self.make_way(id);
        }
        let current = self.fetching.as_ref().map(|fetching| fetching.fetch_id);
        let last = self.last_fetch.as_ref().map(|last| last.fetch_id);
        if current.or(last) == Some(id) {
            return Answer::Accepted;
        }
        let is_updating =
            matches!(self.update, UpdatePhase::Preparing(_) | UpdatePhase::Updating(_));
        if current.is_some() || is_updating {
            return failed(FailureKind::Busy, "busy");
        }
        self.fetching = Some(request);
        self.status += 1;
        self.server_before = self.server;
        let slowly = if self.server == Server::Slow { 900_000 } else { 0 };
        self.work(slowly + 50 + random.below(3_000), Work::Fetch(id));
        Answer::Accepted
    }

    /// Ends a fetch that is ahead of need and is not the one with this id.
    fn make_way(&mut self, fetch_id: u64) {
        let is_in_the_way =
            |fetching: &mut FetchRequest| fetching.ahead && fetching.fetch_id != fetch_id;
        if let Some(fetching) = self.fetching.take_if(is_in_the_way) {
            let (fetch_id, error) = (fetching.fetch_id, Some(FetchFailure::GaveWay));
            self.last_fetch = Some(LastFetch { fetch_id, error, ..LastFetch::default() });
            self.status += 1;
        }
    }

    fn prepare(&mut self, request: Box<PrepareRequest>, random: &mut Random) -> Answer {
        let id = request.update_id;
        let known = self.last_update.as_ref().is_some_and(|last| last.update_id == id);
        match self.update {
            UpdatePhase::Preparing(current)
            | UpdatePhase::Prepared(current)
            | UpdatePhase::Updating(current)
                if current == id =>
            {
                return Answer::Accepted;
            }
            UpdatePhase::Preparing(_) | UpdatePhase::Updating(_) => {
                return failed(FailureKind::Busy, "busy");
            }
            _ if known => return Answer::Accepted,
            _ if self.is_stuck() => return failed(FailureKind::Busy, "stuck"),
            UpdatePhase::Idle | UpdatePhase::Prepared(_) => {}
        }
        if let Some(held) = self.held(random, request.force_disruption) {
            return held;
        }
        let fits = self.scan.as_ref().is_some_and(|(report, _)| {
            let expects = request.expects;
            (expects.instance, expects.root, expects.scope)
                == (self.instance, report.root, report.scope)
        });
        if !fits {
            return failed(FailureKind::Stale, "planned upon another tree");
        }
        self.staged = Some(request);
        self.update = UpdatePhase::Preparing(id);
        self.status += 1;
        self.work(20 + random.below(500), Work::Prepare(id));
        Answer::Accepted
    }

    fn commit(&mut self, id: u64, random: &mut Random) -> Answer {
        let done = self.last_update.as_ref().is_some_and(|last| last.update_id == id);
        match self.update {
            UpdatePhase::Updating(current) if current == id => Answer::Accepted,
            UpdatePhase::Prepared(current) if current == id => {
                let is_forced = self.staged.as_ref().is_some_and(|staged| staged.force_disruption);
                if let Some(held) = self.held(random, is_forced) {
                    return held;
                }
                assert!(self.journal.is_none(), "two updates at one time");
                let staged = self.staged.take().expect("a prepared update is staged");
                assert_eq!(staged.update_id, id);
                self.journal = Some(staged);
                self.update = UpdatePhase::Updating(id);
                self.status += 1;
                self.work(50 + random.below(1_000), Work::Update(id));
                Answer::Accepted
            }
            _ if done => Answer::Accepted,
            _ => failed(FailureKind::NotFound, "no such update is staged"),
        }
    }

    /// Some work is over.
    pub fn over(&mut self, work: &Work, random: &mut Random) {
        match *work {
            Work::Scan => self.scan_is_over(),
            Work::Fetch(id) => self.fetch_is_over(id, random),
            Work::Prepare(id) => {
                if self.update != UpdatePhase::Preparing(id) {
                    return;
                }
                let staged = self.staged.as_ref().expect("what is prepared is staged");
                let needs = staged.plan.objects();
                self.status += 1;
                if needs.keys().all(|object| self.cache.contains(object)) {
                    self.update = UpdatePhase::Prepared(id);
                    self.work(1_000 * u64::from(staged.expires_seconds), Work::Expire(id));
                } else {
                    let staged = self.staged.take().expect("it was there just now");
                    self.ended(&staged, Outcome::NotPrepared("an object is missing".into()));
                }
            }
            Work::Update(id) => {
                if self.update != UpdatePhase::Updating(id) {
                    return;
                }
                let request = self.journal.take().expect("an update has a journal");
                if self.sticks {
                    self.ended(&request, Outcome::Stuck("full".into()));
                    self.journal = Some(request);
                    self.work(1_000, Work::Retry);
                } else if self.fails && random.chance(10) {
                    self.ended(&request, Outcome::RolledBack("a step failed".into()));
                } else {
                    self.finish(&request);
                }
                self.work(20 + random.below(200), Work::Scan);
            }
            Work::Retry if self.sticks => self.work(1_000, Work::Retry),
            Work::Retry => {
                if let Some(request) = self.journal.take() {
                    self.finish(&request);
                    self.work(20 + random.below(200), Work::Scan);
                }
            }
            Work::Boot => {}
            Work::Expire(id) => {
                if self.update == UpdatePhase::Prepared(id) {
                    let staged = self.staged.take().expect("what is prepared is staged");
                    self.ended(&staged, Outcome::NotPrepared("expired".into()));
                }
            }
        }
    }

    /// A pass over the tree has come to its end.
    pub fn scan_is_over(&mut self) {
        if self.is_updating() {
            return;
        }
        self.passes += 1;
        let (tree, kept_directories) = self.seen(&self.settings);
        let report = ScanReport { kept_directories, ..ScanReport::of(self.scope(), &tree) };
        let seen = (report.root, report.kept_directories.clone());
        let was_scanned = self.scan.is_some();
        self.scan = Some((report, tree));
        if self.last_scan.as_ref() != Some(&seen) {
            self.last_scan = Some(seen);
            self.generation += 1;
        }
        self.status += u64::from(!was_scanned);
        let generation = self.generation;
        if let Some(last) = &mut self.last_update
            && last.verified_generation.is_none()
        {
            last.verified_generation = Some(generation);
            self.status += 1;
        }
    }

    fn fetch_is_over(&mut self, id: u64, random: &mut Random) {
        let Some(request) = self.fetching.take_if(|request| request.fetch_id == id) else { return };
        let why = match self.server {
            Server::Away => Some("images:6971 does not answer"),
            Server::Lying => Some("images:6971 gives other bytes than it was asked for"),
            _ if self.fails && random.chance(10) => Some("the object server is down"),
            Server::Good | Server::Slow => None,
        };
        let error = why.map(|why| FetchFailure::Sources(why.into()));
        let before = self.cache.len();
        let arrived = match (&error, self.server) {
            (None, _) => request.objects.len(),
            (Some(_), Server::Away) if self.server_before != Server::Away => {
                random.below(request.objects.len() as u64 + 1) as usize
            }
            (Some(_), _) => 0,
        };
        self.cache.extend(request.objects[..arrived].iter().map(|object| object.id));
        self.generation += u64::from(self.cache.len() != before);
        self.status += 1;
        self.last_fetch = Some(LastFetch { fetch_id: id, error, ..LastFetch::default() });
    }

    fn finish(&mut self, request: &PrepareRequest) {
        if self.sick.as_ref() == Some(&request.image) {
            return self.ended(request, Outcome::Undone("it does not answer".into()));
        }
        match apply(&self.tree, &request.plan) {
            Ok(tree) => {
                self.tree = tree;
                self.updates_done += 1;
                self.last_image = Some(request.image.clone());
                self.ended(request, Outcome::Done);
                if self.reboots.as_ref() == Some(&request.image)
                    && let Some(last) = &mut self.last_update
                {
                    last.awaits_boot = true;
                    self.work(500, Work::Boot);
                }
            }
            Err(error) => self.ended(request, Outcome::RolledBack(error.to_string())),
        }
    }

    fn ended(&mut self, request: &PrepareRequest, outcome: Outcome) {
        self.update = UpdatePhase::Idle;
        self.status += 1;
        let operations = u32::try_from(request.plan.operations.len()).unwrap();
        let last = LastUpdate::new(request.update_id, request.image.clone(), outcome);
        self.last_update = Some(LastUpdate { operations, ..last });
    }
}
