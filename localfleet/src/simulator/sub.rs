//! One simulated machine with its subd: what it knows, and what it makes of what it is told.
//!
//! A machine is its tree in memory. It scans at once when something has changed; it fetches without
//! moving bytes; it stages by remembering the plan. All else is as subd does it, as far as a
//! dominator can see. What takes time is given back as [`Task`], and the caller says when it is
//! over.
//!
//! Its tree has nothing that an image's filter would keep, so that every scan sees all of it.
// tidy: core

use std::collections::BTreeSet;
use std::sync::Arc;

use api::fault::{Fault, FaultCode};
use api::subd::{
    Activity, CacheReport, FetchFailure, FetchProgress, FetchRequest, Identity, LastFetch,
    LastUpdate, Limits, LimitsReport, Outcome, PollReply, PrepareRequest, ScanReport, UpdatePhase,
    Version,
};
use model::image::ImageName;
use model::object::ObjectId;
use model::plan::Plan;
use model::scope::{ScanSettings, Scope};
use model::tree::{Time, Tree};
use serde::{Deserialize, Serialize};

/// Something that takes time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Task {
    /// A scan of what has changed.
    Scan,
    /// The fetch with this id.
    Fetch(u64),
    /// The staging of the update with this id.
    Prepare(u64),
    /// The update with this id.
    Update(u64),
}

/// When a machine first saw something, since the first_times were cleared: nanoseconds on the
/// monotonic
/// clock of the system.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FirstTimes {
    /// A scan found something else than the scan before, and no update had been made.
    pub drifted: Option<u64>,
    /// It was told to fetch.
    pub fetch: Option<u64>,
    /// It was told to stage an update.
    pub prepare: Option<u64>,
    /// It was told to carry an update out.
    pub commit: Option<u64>,
    /// What the update had changed was scanned.
    pub verified: Option<u64>,
}

impl FirstTimes {
    /// When it was first told to do something about its tree.
    pub fn order(&self) -> Option<u64> {
        [self.fetch, self.prepare].into_iter().flatten().min()
    }
}

/// One machine. See the module's text.
#[derive(Clone, Debug)]
pub struct Sub {
    identity: Arc<Identity>,
    /// False while the machine gives no answer.
    pub is_up: bool,
    /// What it has seen.
    pub first_times: FirstTimes,

    // On its disk.
    tree: Tree,
    scope: Scope,
    /// What it was told to take at most.
    limits: Limits,
    cache: BTreeSet<ObjectId>,
    last_update: Option<LastUpdate>,
    last_image: Option<ImageName>,

    // In the memory of its subd.
    version: Version,
    scan: Option<Tree>,
    update: UpdatePhase,
    staged: Option<Box<PrepareRequest>>,
    fetching: Option<Box<FetchRequest>>,
    last_fetch: Option<LastFetch>,
}

fn refuse(code: FaultCode, text: &str) -> Fault {
    Fault::new(code, text)
}

impl Sub {
    /// A machine that has `tree`, and has had an update to `image`; its subd starts as `instance`,
    /// and has scanned already.
    pub fn new(identity: Identity, tree: Tree, image: ImageName, instance: u64) -> Self {
        Self {
            identity: Arc::new(identity),
            is_up: true,
            first_times: FirstTimes::default(),
            scan: Some(tree.clone()),
            tree,
            scope: Scope::of(&ScanSettings::default(), &[]),
            limits: Limits::default(),
            cache: BTreeSet::new(),
            last_update: None,
            last_image: Some(image),
            version: Version { instance, generation: 1, status: 1 },
            update: UpdatePhase::Idle,
            staged: None,
            fetching: None,
            last_fetch: None,
        }
    }

    /// The tree of the last scan.
    pub fn scanned(&self) -> Option<&Tree> {
        self.scan.as_ref()
    }

    /// The tree that it has.
    pub fn tree(&self) -> &Tree {
        &self.tree
    }

    /// Which start of subd this is.
    pub fn instance(&self) -> u64 {
        self.version.instance
    }

    /// Goes down: what is not on the disk is lost.
    pub fn crash(&mut self) {
        self.is_up = false;
        self.scan = None;
        self.fetching = None;
        self.last_fetch = None;
        // An update that was under way has a journal.
        if !matches!(self.update, UpdatePhase::Updating(_)) {
            self.staged = None;
        }
        self.update = UpdatePhase::Idle;
    }

    /// What it is doing.
    fn activity(&self) -> Activity {
        let fetch = self.fetching.as_ref().map(|request| FetchProgress {
            fetch_id: request.fetch_id,
            ahead: request.ahead,
            ..FetchProgress::default()
        });
        Activity::of(self.update, fetch)
    }

    /// Comes up as `instance`, and finishes the update that was under way.
    pub fn start(&mut self, instance: u64, patch: impl FnOnce(&Tree, &Plan) -> Patched) -> Task {
        self.is_up = true;
        self.version = Version { instance, generation: 0, status: 1 };
        if let Some(request) = self.staged.take() {
            self.finish(&request, patch);
        }
        Task::Scan
    }

    /// True if a poll by one who knows `have` is to be answered at once.
    pub fn has_news(&self, have: Option<Version>) -> bool {
        have != Some(self.version)
    }

    /// The answer to a poll by one who knows `have`.
    pub fn report(&self, have: Option<Version>, clock: Time) -> PollReply {
        let is_news = have.is_none_or(|have| {
            (have.instance, have.generation) != (self.version.instance, self.version.generation)
        });
        let scan = self.scan.as_ref().filter(|_| is_news);
        let cache = || CacheReport::Full(self.cache.iter().copied().collect());
        PollReply {
            identity: Identity::clone(&self.identity),
            activity: self.activity(),
            scan: scan.map(|tree| ScanReport::of(self.scope, tree)),
            scanned: self.scan.is_some(),
            cache: is_news.then(cache),
            last_fetch: self.last_fetch.clone(),
            last_update: self.last_update.clone(),
            last_image: self.last_image.clone(),
            limits: LimitsReport { told: self.limits, ..LimitsReport::default() },
            clock,
            ..PollReply::idle(self.version, self.scope)
        }
    }

    /// Something on the machine changes that nobody asked for.
    pub fn drift(&mut self, tree: Tree) -> Task {
        self.tree = tree;
        Task::Scan
    }

    /// Is told how to scan.
    pub fn configure(&mut self, scope: Scope) -> Option<Task> {
        if self.scope == scope {
            return None;
        }
        self.scope = scope;
        self.scan = None;
        self.version.status += 1;
        Some(Task::Scan)
    }

    /// Is told what to take at most.
    pub fn limit(&mut self, limits: Limits) {
        if self.limits != limits {
            self.limits = limits;
            self.version.status += 1;
        }
    }

    /// Is told to fetch.
    ///
    /// # Errors
    ///
    /// That it is busy.
    pub fn fetch(&mut self, request: FetchRequest, at: u64) -> Result<Option<Task>, Fault> {
        let id = request.fetch_id;
        if !request.ahead {
            self.make_way(id);
        }
        let current = self.fetching.as_ref().map(|fetching| fetching.fetch_id);
        let last = self.last_fetch.as_ref().map(|last| last.fetch_id);
        if current.or(last) == Some(id) {
            return Ok(None);
        }
        if current.is_some() {
            return Err(refuse(FaultCode::Busy, "another fetch is under way"));
        }
        if let UpdatePhase::Preparing(_) | UpdatePhase::Updating(_) = self.update {
            return Err(refuse(FaultCode::Busy, "an update is under way"));
        }
        self.first_times.fetch.get_or_insert(at);
        self.fetching = Some(Box::new(request));
        self.version.status += 1;
        Ok(Some(Task::Fetch(id)))
    }

    /// Ends a fetch that is ahead of need and is not the one with this id.
    fn make_way(&mut self, fetch_id: u64) {
        let is_in_the_way =
            |fetching: &mut Box<FetchRequest>| fetching.ahead && fetching.fetch_id != fetch_id;
        if let Some(fetching) = self.fetching.take_if(is_in_the_way) {
            let (fetch_id, error) = (fetching.fetch_id, Some(FetchFailure::GaveWay));
            self.last_fetch = Some(LastFetch { fetch_id, error, ..LastFetch::default() });
            self.version.status += 1;
        }
    }

    /// Is told to stage an update. A fetch goes on meanwhile.
    ///
    /// # Errors
    ///
    /// That it is busy, or that it is not what the plan was made for.
    pub fn prepare(&mut self, request: PrepareRequest, at: u64) -> Result<Option<Task>, Fault> {
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
                return Err(refuse(FaultCode::Busy, "another update is under way"));
            }
            UpdatePhase::Idle | UpdatePhase::Prepared(_) => {}
        }
        if self.last_update.as_ref().is_some_and(|last| last.update_id == id) {
            return Ok(None);
        }
        let expects = request.expects;
        let root = self.scan.as_ref().map(Tree::digest);
        if (expects.instance, Some(expects.root), expects.scope)
            != (self.version.instance, root, self.scope)
        {
            return Err(refuse(FaultCode::Stale, "the plan was made upon another scan"));
        }
        self.first_times.prepare.get_or_insert(at);
        self.staged = Some(Box::new(request));
        self.update = UpdatePhase::Preparing(id);
        self.version.status += 1;
        Ok(Some(Task::Prepare(id)))
    }

    /// Is told to carry an update out.
    ///
    /// # Errors
    ///
    /// That no such update is staged.
    pub fn commit(&mut self, id: u64, at: u64) -> Result<Option<Task>, Fault> {
        match self.update {
            UpdatePhase::Updating(current) if current == id => Ok(None),
            UpdatePhase::Prepared(current) if current == id => {
                self.first_times.commit.get_or_insert(at);
                self.update = UpdatePhase::Updating(id);
                self.version.status += 1;
                Ok(Some(Task::Update(id)))
            }
            _ if self.last_update.as_ref().is_some_and(|last| last.update_id == id) => Ok(None),
            _ => Err(refuse(FaultCode::NotFound, "no such update is staged")),
        }
    }

    /// Is told to take objects out of its cache.
    ///
    /// # Errors
    ///
    /// That it is busy.
    pub fn clean(&mut self, objects: &[ObjectId]) -> Result<(), Fault> {
        if self.activity() != Activity::Idle {
            return Err(refuse(FaultCode::Busy, "a fetch or update is under way"));
        }
        let before = self.cache.len();
        objects.iter().for_each(|object| {
            self.cache.remove(object);
        });
        self.version.generation += u64::from(self.cache.len() != before);
        Ok(())
    }

    /// Some work is over; gives what follows from it.
    pub fn over(
        &mut self,
        work: Task,
        at: u64,
        patch: impl FnOnce(&Tree, &Plan) -> Patched,
    ) -> Option<Task> {
        match work {
            Task::Scan => self.scan_is_over(at),
            Task::Fetch(id) => self.fetch_is_over(id),
            Task::Prepare(id) => self.prepare_is_over(id),
            Task::Update(id) if self.update == UpdatePhase::Updating(id) => {
                if let Some(request) = self.staged.take() {
                    self.finish(&request, patch);
                    return Some(Task::Scan);
                }
            }
            Task::Update(_) => {}
        }
        None
    }

    fn scan_is_over(&mut self, at: u64) {
        let before = self.scan.replace(self.tree.clone());
        let is_same = before.as_ref().is_some_and(|before| *before == self.tree);
        self.version.generation += u64::from(!is_same);
        let unverified =
            self.last_update.as_mut().filter(|last| last.verified_generation.is_none());
        match unverified {
            Some(last) => {
                last.verified_generation = Some(self.version.generation);
                self.version.status += 1;
                self.first_times.verified.get_or_insert(at);
            }
            None if !is_same && before.is_some() => {
                self.first_times.drifted.get_or_insert(at);
            }
            None => {}
        }
    }

    fn fetch_is_over(&mut self, id: u64) {
        let Some(request) = self.fetching.take_if(|request| request.fetch_id == id) else { return };
        let before = self.cache.len();
        self.cache.extend(request.objects.iter().map(|object| object.id));
        self.version.generation += u64::from(self.cache.len() != before);
        self.version.status += 1;
        self.last_fetch = Some(LastFetch {
            fetch_id: id,
            objects: request.objects.len() as u64,
            bytes: request.objects.iter().map(|object| object.size_bytes).sum(),
            ..LastFetch::default()
        });
    }

    fn prepare_is_over(&mut self, id: u64) {
        if self.update != UpdatePhase::Preparing(id) {
            return;
        }
        let Some(staged) = self.staged.take() else { return };
        self.version.status += 1;
        if staged.plan.objects().keys().all(|object| self.cache.contains(object)) {
            self.staged = Some(staged);
            self.update = UpdatePhase::Prepared(id);
        } else {
            self.ended(&staged, Outcome::NotPrepared("an object is missing".to_owned()));
        }
    }

    fn finish(&mut self, request: &PrepareRequest, patch: impl FnOnce(&Tree, &Plan) -> Patched) {
        match patch(&self.tree, &request.plan) {
            Ok(tree) => {
                self.tree = tree;
                self.last_image = Some(request.image.clone());
                self.ended(request, Outcome::Done);
            }
            Err(why) => self.ended(request, Outcome::RolledBack(why)),
        }
    }

    fn ended(&mut self, request: &PrepareRequest, outcome: Outcome) {
        self.update = UpdatePhase::Idle;
        self.version.status += 1;
        let operations = u32::try_from(request.plan.operations.len()).unwrap_or(u32::MAX);
        let last = LastUpdate::new(request.update_id, request.image.clone(), outcome);
        self.last_update = Some(LastUpdate { operations, ..last });
    }
}

/// The tree after a plan, or why the plan does not fit.
pub type Patched = Result<Tree, String>;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simulator::patch::{drifted, patched};
    use api::subd::{Expects, FetchObject};
    use model::object::Algorithm;
    use model::plan::{Have, plan};
    use model::tree::text::from_text;
    use model::trigger::Triggers;

    fn tree() -> Tree {
        let object = Algorithm::Blake3.digest(b"one");
        let text = format!("d 755 0:0 /etc\nf 644 0:0 1.000000000 3 {object} /etc/one\n");
        from_text(Algorithm::Blake3, &text).unwrap()
    }

    fn patch(have: &Tree, plan: &Plan) -> Patched {
        patched(have, plan).map_err(|error| error.to_string())
    }

    fn sub(tree: Tree) -> Sub {
        Sub::new(Identity::default(), tree, ImageName::new("base").unwrap(), 7)
    }

    fn update(sub: &Sub, want: &Tree) -> PrepareRequest {
        let (kept, linked, occupied) = Default::default();
        let have = Have {
            tree: sub.tree(),
            kept_directories: &kept,
            externally_linked: &linked,
            occupied: &occupied,
            times: model::tree::Times::default(),
        };
        let report = sub.report(None, Time::default());
        PrepareRequest {
            update_id: 3,
            expects: Expects { instance: 7, root: report.scan.unwrap().root, scope: report.scope },
            image: ImageName::new("base").unwrap(),
            image_digest: want.digest(),
            plan: plan(&have, want),
            triggers: Triggers::default(),
            health_check: None,
            force_disruption: false,
            expires_seconds: 300,
        }
    }

    #[test]
    fn drift_is_repaired_and_each_step_is_news() {
        let mut sub = sub(tree());
        let mut known = sub.version;
        let mut must_be_news = |sub: &Sub| {
            assert!(sub.has_news(Some(known)), "{sub:?}");
            known = sub.version;
        };
        let work = sub.drift(drifted(&tree(), 5).unwrap());
        assert_eq!(sub.over(work, 10, patch), None);
        must_be_news(&sub);
        let request = update(&sub, &tree());
        let needs = request.plan.objects();
        let objects = needs
            .iter()
            .map(|(&id, need)| FetchObject { id, size_bytes: need.size_bytes })
            .collect();
        let fetch = FetchRequest { fetch_id: 1, sources: Vec::new(), objects, ahead: false };
        let work = sub.fetch(fetch.clone(), 20).unwrap().unwrap();
        must_be_news(&sub);
        assert_eq!(sub.fetch(fetch.clone(), 21), Ok(None), "a repeated call does nothing");
        let another = FetchRequest { fetch_id: 2, ..fetch.clone() };
        assert_eq!(sub.fetch(another, 22).unwrap_err().code, FaultCode::Busy);
        assert_eq!(sub.over(work, 25, patch), None);
        must_be_news(&sub);
        assert_eq!(sub.fetch(fetch, 26), Ok(None));
        let work = sub.prepare(request.clone(), 30).unwrap().unwrap();
        must_be_news(&sub);
        assert_eq!(sub.commit(3, 31).unwrap_err().code, FaultCode::NotFound);
        assert_eq!(sub.over(work, 35, patch), None);
        must_be_news(&sub);
        let work = sub.commit(3, 40).unwrap().unwrap();
        must_be_news(&sub);
        let scan = sub.over(work, 45, patch).unwrap();
        must_be_news(&sub);
        assert_eq!(sub.over(scan, 50, patch), None);
        must_be_news(&sub);
        assert_eq!(sub.scanned(), Some(&tree()));
        assert_eq!((sub.commit(3, 60), sub.prepare(request, 61)), (Ok(None), Ok(None)));
        let first_times = FirstTimes {
            drifted: Some(10),
            fetch: Some(20),
            prepare: Some(30),
            commit: Some(40),
            verified: Some(50),
        };
        assert_eq!((sub.first_times, sub.first_times.order()), (first_times, Some(20)));
        sub.clean(&[tree().digest()]).unwrap();
        assert!(!sub.has_news(Some(known)), "nothing of that was in the cache");
    }

    #[test]
    fn an_update_does_not_end_what_is_fetched_ahead_of_need() {
        let want = tree();
        let mut sub = sub(drifted(&want, 5).unwrap());
        let request = update(&sub, &want);
        sub.cache.extend(request.plan.objects().into_keys());
        let fetch = |fetch_id, ahead| FetchRequest {
            fetch_id,
            sources: Vec::new(),
            objects: Vec::new(),
            ahead,
        };
        let fetching = |fetch_id| Activity::Fetching { fetch_id, objects: 0, bytes: 0 };
        let ahead = sub.fetch(fetch(1, true), 1).unwrap().unwrap();
        assert_eq!(sub.activity(), fetching(1));
        let work = sub.prepare(request, 2).unwrap().unwrap();
        assert_eq!(sub.activity(), Activity::Preparing { update_id: 3 });
        sub.over(work, 3, patch);
        // Whoever waits for the update is not kept waiting.
        assert_eq!(sub.activity(), Activity::Prepared { update_id: 3 });
        let work = sub.commit(3, 4).unwrap().unwrap();
        sub.over(work, 5, patch);
        assert_eq!((sub.activity(), sub.last_fetch.clone()), (fetching(1), None));
        sub.over(ahead, 6, patch);
        let ended = |fetch_id, error| Some(LastFetch { fetch_id, error, ..LastFetch::default() });
        assert_eq!((sub.activity(), sub.last_fetch.clone()), (Activity::Idle, ended(1, None)));
        // One that is needed does.
        sub.fetch(fetch(2, true), 7).unwrap().unwrap();
        sub.fetch(fetch(4, false), 8).unwrap().unwrap();
        let gave_way = ended(2, Some(FetchFailure::GaveWay));
        assert_eq!((sub.activity(), sub.last_fetch.clone()), (fetching(4), gave_way));
    }

    #[test]
    fn a_crash_loses_what_is_staged_and_finishes_what_was_begun() {
        let want = tree();
        let mut sub = sub(drifted(&want, 5).unwrap());
        sub.cache.extend(update(&sub, &want).plan.objects().into_keys());
        let prepare = |sub: &mut Sub| {
            let mut request = update(sub, &want);
            request.expects.instance = sub.instance();
            let work = sub.prepare(request, 1).unwrap().unwrap();
            assert_eq!(sub.over(work, 2, patch), None);
        };
        prepare(&mut sub);
        sub.crash();
        let scan = sub.start(8, patch);
        sub.over(scan, 3, patch);
        assert_eq!(sub.commit(3, 4).unwrap_err().code, FaultCode::NotFound);
        prepare(&mut sub);
        let late = sub.commit(3, 5).unwrap().unwrap();
        sub.crash();
        let scan = sub.start(9, patch);
        sub.over(scan, 6, patch);
        assert_eq!(sub.scanned(), Some(&want));
        assert_eq!(sub.over(late, 7, patch), None);
        assert_eq!(sub.report(None, Time::default()).last_update.unwrap().outcome, Outcome::Done);
    }

    #[test]
    fn another_scope_makes_another_scan() {
        let mut sub = sub(tree());
        assert_eq!(sub.configure(sub.scope), None);
        let work = sub.configure(Scope(tree().digest())).unwrap();
        assert!(!sub.report(None, Time::default()).scanned);
        sub.over(work, 1, patch);
        let report = sub.report(None, Time::default());
        assert_eq!(report.scan.unwrap().scope, Scope(tree().digest()));
    }
}
