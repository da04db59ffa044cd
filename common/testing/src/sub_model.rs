//! A simulated sub: what a dominator can see of subd, as a state machine over a tree in memory.
//!
//! It scans without reading, fetches without moving bytes, and stages an update by storing its
//! plan. Work that takes time is returned as a [`Task`], and the caller reports the end and the
//! result of each task. So the caller decides what fails, and this module needs no clock and no
//! randomness.
// tidy: core

use std::collections::BTreeSet;
use std::sync::Arc;

use api::fault::{Fault, FaultCode};
use api::subd::{
    Activity, CacheReport, FetchFailure, FetchProgress, FetchRequest, LastFetch, LastUpdate,
    Limits, LimitsReport, PollReply, PrepareRequest, ScanReport, SubIdentity, SubVersion,
    UpdateOutcome, UpdatePhase,
};
use model::image::ImageName;
use model::object::ObjectId;
use model::path::TreePath;
use model::plan::{Action, RefusedChange, RefusedChanges, RefusedKind};
use model::scope::{ScanSettings, Scope};
use model::tree::Tree;

/// Work that takes time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Task {
    Scan,
    /// The fetch with this id.
    Fetch(u64),
    /// The staging of the update with this id.
    Prepare(u64),
    /// The update with this id.
    Update(u64),
}

/// What a scan found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScanEnd {
    /// The tree differs from the scan before.
    pub has_changed: bool,
    /// It is the first scan after an update.
    pub verifies_update: bool,
}

#[derive(Clone, Debug)]
struct Scan {
    tree: Tree,
    kept_directories: Vec<TreePath>,
}

/// One machine with its sub.
#[derive(Clone, Debug)]
pub struct SubModel {
    pub identity: Arc<SubIdentity>,

    // On disk.
    pub tree: Tree,
    scope: Scope,
    /// The limits that the dominator has set.
    pub limits: Limits,
    pub cache: BTreeSet<ObjectId>,
    journal: Option<Box<PrepareRequest>>,
    pub last_update: Option<LastUpdate>,
    pub last_image: Option<ImageName>,
    /// Paths that cannot be changed, which it finds out when an update of them is staged.
    pub obstacles: BTreeSet<TreePath>,

    // In memory.
    pub version: SubVersion,
    scan: Option<Scan>,
    last_scan: Option<(ObjectId, Vec<TreePath>)>,
    update: UpdatePhase,
    staged: Option<Box<PrepareRequest>>,
    fetching: Option<Box<FetchRequest>>,
    last_fetch: Option<LastFetch>,
    refused: Vec<RefusedChange>,
}

fn busy(text: &str) -> Fault {
    Fault::new(FaultCode::Busy, text)
}

impl SubModel {
    /// Returns a machine that has `tree` and whose sub was never started.
    #[must_use]
    pub fn new(tree: Tree) -> Self {
        Self {
            identity: Arc::default(),
            tree,
            scope: Scope::of(&ScanSettings::default(), &[]),
            limits: Limits::default(),
            cache: BTreeSet::new(),
            journal: None,
            last_update: None,
            last_image: None,
            obstacles: BTreeSet::new(),
            version: SubVersion { instance: 0, generation: 0, status: 0 },
            scan: None,
            last_scan: None,
            update: UpdatePhase::Idle,
            staged: None,
            fetching: None,
            last_fetch: None,
            refused: Vec::new(),
        }
    }

    /// Loses everything that is not on disk.
    pub fn crash(&mut self) {
        self.scan = None;
        self.last_scan = None;
        self.staged = None;
        self.fetching = None;
        self.update = UpdatePhase::Idle;
        self.last_fetch = None;
        self.refused.clear();
    }

    /// Starts as `instance`. The caller ends the update in the journal, if there is one, and starts
    /// a scan.
    pub fn start(&mut self, instance: u64) {
        self.version = SubVersion { instance, generation: 0, status: 1 };
    }

    /// Returns what it is doing.
    #[must_use]
    pub fn activity(&self) -> Activity {
        let fetch = self.fetching.as_ref().map(|request| FetchProgress {
            fetch_id: request.fetch_id,
            ahead: request.ahead,
            ..FetchProgress::default()
        });
        Activity::of(self.update, fetch)
    }

    /// Returns the tree of the last scan.
    #[must_use]
    pub fn scanned(&self) -> Option<&Tree> {
        self.scan.as_ref().map(|scan| &scan.tree)
    }

    /// Returns true if a poll of a caller who knows `have` must be answered at once.
    #[must_use]
    pub fn has_news(&self, have: Option<SubVersion>) -> bool {
        have != Some(self.version)
    }

    /// Returns the answer to a poll of a caller who knows `have`.
    #[must_use]
    pub fn report(&self, have: Option<SubVersion>) -> PollReply {
        let is_news = have.is_none_or(|have| {
            (have.instance, have.generation) != (self.version.instance, self.version.generation)
        });
        let scan = self.scan.as_ref().filter(|_| is_news).map(|scan| ScanReport {
            kept_directories: scan.kept_directories.clone(),
            unreadable: self
                .refused
                .iter()
                .map(|one| (one.path.clone(), one.why.clone()))
                .collect(),
            ..ScanReport::of(self.scope, &scan.tree)
        });
        PollReply {
            identity: SubIdentity::clone(&self.identity),
            activity: self.activity(),
            scan,
            scanned: self.scan.is_some(),
            cache: is_news.then(|| CacheReport::Full(self.cache.iter().copied().collect())),
            last_fetch: self.last_fetch.clone(),
            last_update: self.last_update.clone(),
            last_image: self.last_image.clone(),
            limits: LimitsReport { told: self.limits, ..LimitsReport::default() },
            ..PollReply::idle(self.version, self.scope)
        }
    }

    /// Sets the scope of scans. Returns true if another scan is needed.
    pub fn set_scope(&mut self, scope: Scope) -> bool {
        if self.scope == scope {
            return false;
        }
        self.scope = scope;
        self.scan = None;
        self.version.status += 1;
        true
    }

    /// Sets the limits.
    pub fn set_limits(&mut self, limits: Limits) {
        if self.limits != limits {
            self.limits = limits;
            self.version.status += 1;
        }
    }

    /// Starts a fetch; a repeated call does nothing.
    ///
    /// # Errors
    ///
    /// If it is busy.
    pub fn fetch(&mut self, request: FetchRequest) -> Result<Option<Task>, Fault> {
        let id = request.fetch_id;
        if !request.ahead {
            self.cancel_fetch_ahead(id);
        }
        let current = self.fetching.as_ref().map(|fetching| fetching.fetch_id);
        let last = self.last_fetch.as_ref().map(|last| last.fetch_id);
        if current.or(last) == Some(id) {
            return Ok(None);
        }
        if current.is_some() {
            return Err(busy("another fetch is under way"));
        }
        if let UpdatePhase::Preparing(_) | UpdatePhase::Updating(_) = self.update {
            return Err(busy("an update is under way"));
        }
        self.fetching = Some(Box::new(request));
        self.version.status += 1;
        Ok(Some(Task::Fetch(id)))
    }

    /// Ends a fetch ahead of need that is not the one with this id.
    fn cancel_fetch_ahead(&mut self, fetch_id: u64) {
        let is_ahead =
            |fetching: &mut Box<FetchRequest>| fetching.ahead && fetching.fetch_id != fetch_id;
        if let Some(fetching) = self.fetching.take_if(is_ahead) {
            let (fetch_id, error) = (fetching.fetch_id, Some(FetchFailure::GaveWay));
            self.last_fetch = Some(LastFetch { fetch_id, error, ..LastFetch::default() });
            self.version.status += 1;
        }
    }

    /// Stages an update; a repeated call does nothing. A fetch goes on meanwhile. `is_permitted`
    /// says whether the machine permits an update now, given whether it is forced.
    ///
    /// # Errors
    ///
    /// If it is busy, the update is not permitted, or the plan was made for another scan.
    pub fn prepare(
        &mut self,
        request: Box<PrepareRequest>,
        is_permitted: impl FnOnce(bool) -> bool,
    ) -> Result<Option<Task>, Fault> {
        let id = request.update_id;
        match self.update {
            UpdatePhase::Preparing(current)
            | UpdatePhase::Prepared(current)
            | UpdatePhase::Updating(current)
                if current == id =>
            {
                return Ok(None);
            }
            UpdatePhase::Preparing(_) | UpdatePhase::Updating(_) => {
                return Err(busy("another update is under way"));
            }
            _ if self.is_last_update(id) => return Ok(None),
            _ if self.journal.is_some() => return Err(busy("an update is stuck")),
            UpdatePhase::Idle | UpdatePhase::Prepared(_) => {}
        }
        must_be_permitted(is_permitted(request.force_disruption))?;
        let expects = request.expects;
        let root = self.scanned().map(Tree::digest);
        if (expects.instance, Some(expects.root), expects.scope)
            != (self.version.instance, root, self.scope)
        {
            return Err(Fault::new(FaultCode::Stale, "the plan was made for another scan"));
        }
        self.staged = Some(request);
        self.update = UpdatePhase::Preparing(id);
        self.version.status += 1;
        Ok(Some(Task::Prepare(id)))
    }

    /// Starts the staged update; a repeated call does nothing. `is_permitted` as for
    /// [`SubModel::prepare`].
    ///
    /// # Errors
    ///
    /// If no such update is staged, or it is not permitted.
    pub fn commit(
        &mut self,
        id: u64,
        is_permitted: impl FnOnce(bool) -> bool,
    ) -> Result<Option<Task>, Fault> {
        match self.update {
            UpdatePhase::Updating(current) if current == id => Ok(None),
            UpdatePhase::Prepared(current) if current == id => {
                let staged = self.staged.as_ref().expect("a prepared update is staged");
                assert_eq!(staged.update_id, id);
                must_be_permitted(is_permitted(staged.force_disruption))?;
                assert!(self.journal.is_none(), "two updates at one time");
                self.journal = self.staged.take();
                self.update = UpdatePhase::Updating(id);
                self.version.status += 1;
                Ok(Some(Task::Update(id)))
            }
            _ if self.is_last_update(id) => Ok(None),
            _ => Err(Fault::new(FaultCode::NotFound, "no such update is staged")),
        }
    }

    fn is_last_update(&self, id: u64) -> bool {
        self.last_update.as_ref().is_some_and(|last| last.update_id == id)
    }

    /// Removes objects from the cache.
    ///
    /// # Errors
    ///
    /// If it is busy.
    pub fn remove_objects(&mut self, objects: &[ObjectId]) -> Result<(), Fault> {
        if self.activity() != Activity::Idle {
            return Err(busy("a fetch or update is under way"));
        }
        let before = self.cache.len();
        for object in objects {
            self.cache.remove(object);
        }
        self.version.generation += u64::from(self.cache.len() != before);
        Ok(())
    }

    /// Adds objects to the cache, as an AddObjects does.
    pub fn add_objects(&mut self, objects: &[ObjectId]) {
        let before = self.cache.len();
        self.cache.extend(objects);
        self.version.generation += u64::from(self.cache.len() != before);
    }

    /// Ends a scan that found `tree` and the directories that hold what is outside the scope.
    /// Returns `None` if an update is under way: the scan is dropped.
    pub fn end_scan(&mut self, tree: Tree, kept_directories: Vec<TreePath>) -> Option<ScanEnd> {
        if matches!(self.update, UpdatePhase::Updating(_)) {
            return None;
        }
        let has_changed = self.scanned().is_some_and(|before| *before != tree);
        let found = (tree.digest(), kept_directories.clone());
        let was_scanned = self.scan.replace(Scan { tree, kept_directories }).is_some();
        if self.last_scan.as_ref() != Some(&found) {
            self.last_scan = Some(found);
            self.version.generation += 1;
        }
        self.version.status += u64::from(!was_scanned);
        let unverified =
            self.last_update.as_mut().filter(|last| last.verified_generation.is_none());
        let verifies_update = unverified.is_some();
        if let Some(last) = unverified {
            last.verified_generation = Some(self.version.generation);
            self.version.status += 1;
        }
        Some(ScanEnd { has_changed, verifies_update })
    }

    /// Returns how many objects the fetch with this id is for, if it is under way.
    #[must_use]
    pub fn objects_of_fetch(&self, id: u64) -> Option<usize> {
        let fetching = self.fetching.as_ref().filter(|request| request.fetch_id == id);
        fetching.map(|request| request.objects.len())
    }

    /// Ends the fetch with this id: the first `arrived` objects are in the cache.
    pub fn end_fetch(&mut self, id: u64, arrived: usize, error: Option<FetchFailure>) {
        let Some(request) = self.fetching.take_if(|request| request.fetch_id == id) else { return };
        let arrived = &request.objects[..arrived];
        let before = self.cache.len();
        self.cache.extend(arrived.iter().map(|object| object.id));
        self.version.generation += u64::from(self.cache.len() != before);
        self.version.status += 1;
        self.last_fetch = Some(LastFetch {
            fetch_id: id,
            error,
            objects: arrived.len() as u64,
            bytes: arrived.iter().map(|object| object.size_bytes).sum(),
            ..LastFetch::default()
        });
    }

    /// Ends the staging of the update with this id. Returns after how many seconds the update
    /// expires, if it could be staged.
    pub fn end_prepare(&mut self, id: u64) -> Option<u32> {
        if self.update != UpdatePhase::Preparing(id) {
            return None;
        }
        let staged = self.staged.take().expect("a prepared update is staged");
        self.version.status += 1;
        if self.finds_obstacles(&staged) {
            self.end(&staged, UpdateOutcome::NotPrepared("paths cannot be changed".to_owned()));
            return None;
        }
        if staged.plan.objects().keys().all(|object| self.cache.contains(object)) {
            self.update = UpdatePhase::Prepared(id);
            return Some(self.staged.insert(staged).expires_seconds);
        }
        self.end(&staged, UpdateOutcome::NotPrepared("an object is missing".to_owned()));
        None
    }

    /// Refuses the changes of paths that cannot be changed. Returns true if there are any.
    fn finds_obstacles(&mut self, staged: &PrepareRequest) -> bool {
        let operations = staged.plan.operations.iter();
        let found = operations.filter(|operation| self.obstacles.contains(&operation.path));
        let refused = found.map(|operation| RefusedChange {
            path: operation.path.clone(),
            kind: match operation.action {
                Action::Remove => RefusedKind::Removal,
                _ => RefusedKind::Any,
            },
            why: "it cannot be changed".to_owned(),
        });
        let refused: Vec<RefusedChange> = refused.collect();
        self.version.generation += u64::from(!refused.is_empty());
        self.refused.extend(refused.iter().cloned());
        !refused.is_empty()
    }

    /// The changes that it refuses.
    #[must_use]
    pub fn refused(&self) -> RefusedChanges {
        self.refused.iter().cloned().collect()
    }

    /// Removes all obstacles, and forgets what was refused.
    pub fn remove_obstacles(&mut self) {
        self.obstacles.clear();
        self.refused.clear();
        self.version.generation += 1;
    }

    /// Drops the update with this id if it is still staged.
    pub fn expire(&mut self, id: u64) {
        if self.update == UpdatePhase::Prepared(id) {
            let staged = self.staged.take().expect("a prepared update is staged");
            self.end(&staged, UpdateOutcome::NotPrepared("expired".to_owned()));
        }
    }

    /// Returns true if the update with this id is under way.
    #[must_use]
    pub fn is_updating(&self, id: u64) -> bool {
        self.update == UpdatePhase::Updating(id)
    }

    /// Returns true if an update was neither finished nor undone, and is not under way.
    #[must_use]
    pub fn is_stuck(&self) -> bool {
        self.journal.is_some() && !matches!(self.update, UpdatePhase::Updating(_))
    }

    /// Returns the update that is under way, was interrupted by a crash, or is stuck.
    #[must_use]
    pub fn journal(&self) -> Option<&PrepareRequest> {
        self.journal.as_deref()
    }

    /// Ends the update in the journal with the tree that results from it, or with the outcome of
    /// its failure. A stuck update stays in the journal.
    pub fn end_update(&mut self, result: Result<Tree, UpdateOutcome>) {
        let Some(request) = self.journal.take() else { return };
        let outcome = match result {
            Ok(tree) => {
                self.tree = tree;
                self.last_image = Some(request.image.clone());
                UpdateOutcome::Done
            }
            Err(outcome) => outcome,
        };
        let is_stuck = matches!(outcome, UpdateOutcome::Stuck(_));
        self.end(&request, outcome);
        self.journal = Some(request).filter(|_| is_stuck);
    }

    fn end(&mut self, request: &PrepareRequest, outcome: UpdateOutcome) {
        self.update = UpdatePhase::Idle;
        self.version.status += 1;
        let operations = u32::try_from(request.plan.operations.len()).unwrap_or(u32::MAX);
        let last = LastUpdate::new(request.update_id, request.image.clone(), outcome);
        self.last_update = Some(LastUpdate { operations, ..last });
    }
}

fn must_be_permitted(is_permitted: bool) -> Result<(), Fault> {
    let held = || Fault::new(FaultCode::Held, "updates are not permitted now");
    is_permitted.then_some(()).ok_or_else(held)
}
