//! One simulated machine of the benchmark: a [`SubModel`] that records when it first saw what.
//!
//! Its tree has nothing that an image's filter would keep, so each scan sees all of it. Its fetches
//! always succeed.
// tidy: core

use std::sync::Arc;

use api::fault::Fault;
use api::subd::{
    FetchRequest, GetTaskStatesReply, GetTaskStatesRequest, Health, PollReply, PrepareRequest,
    SubIdentity, SubVersion, TaskReport, TaskState, TaskStates, TasksVersion, UpdateOutcome,
};
use model::boot_time::BootTime;
use model::image::ImageName;
use model::object::ObjectId;
use model::plan::Plan;
use model::tree::{Time, Tree};
use serde::{Deserialize, Serialize};
use testing::sub_model::{SubModel, Task};

/// When a machine first saw something, since the first times were cleared, in nanoseconds on the
/// monotonic clock of the system.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FirstTimes {
    /// A scan found another tree than the scan before, without an update.
    pub drifted: Option<u64>,
    /// It was ordered to fetch, or got content.
    pub fetch: Option<u64>,
    /// It was ordered to stage an update.
    pub prepare: Option<u64>,
    /// It was ordered to carry an update out.
    pub commit: Option<u64>,
    /// The changes of the update were scanned.
    pub verified: Option<u64>,
}

impl FirstTimes {
    /// Returns when it was first ordered to do something about its tree.
    pub fn order(&self) -> Option<u64> {
        [self.fetch, self.prepare].into_iter().flatten().min()
    }
}

/// The tree after a plan, or why the plan does not fit.
pub type Patched = Result<Tree, String>;

#[derive(Clone, Debug)]
pub struct Sub {
    pub model: SubModel,
    /// False while the machine gives no answer.
    pub is_up: bool,
    /// The number of its daemon tasks, which run all the time.
    pub tasks: u32,
    pub first_times: FirstTimes,
}

impl Sub {
    /// Makes a machine that has `tree`, and has had an update to `image`. Its subd starts as
    /// `instance`, and has scanned already.
    pub fn new(identity: SubIdentity, tree: Tree, image: ImageName, instance: u64) -> Self {
        let mut model = SubModel::new(tree.clone());
        model.identity = Arc::new(identity);
        model.last_image = Some(image);
        model.start(instance);
        model.end_scan(tree, Vec::new());
        Self { model, is_up: true, tasks: 0, first_times: FirstTimes::default() }
    }

    /// Goes down: what is not on the disk is lost.
    pub fn crash(&mut self) {
        self.is_up = false;
        self.model.crash();
    }

    /// Comes up as `instance`, and finishes an interrupted update.
    pub fn start(&mut self, instance: u64, patch: impl FnOnce(&Tree, &Plan) -> Patched) -> Task {
        self.is_up = true;
        self.model.start(instance);
        self.finish_update(patch);
        Task::Scan
    }

    /// Returns the answer to a poll of a caller who knows `have`.
    pub fn report(&self, have: Option<SubVersion>, clock: Time) -> PollReply {
        PollReply { clock, ..self.model.report(have) }
    }

    /// Returns how its daemon tasks are.
    pub fn task_states(&self, request: GetTaskStatesRequest) -> GetTaskStatesReply {
        let version = TasksVersion(self.tasks.into());
        let task = |number: u32| TaskReport {
            name: format!("task-{number}"),
            state: TaskState::Running,
            detail: "healthy".to_owned(),
            run: Some("always".to_owned()),
            started: Some(Time::default()),
            starts: 1,
            last_end: None,
            health: Some(Health::Passed),
            next_at: None,
            again_at: None,
            permit: None,
            order_number: 0,
            not_restarted: None,
        };
        let states = (request.have != Some(version)).then(|| TaskStates {
            tasks: (0..self.tasks).map(task).collect(),
            ..TaskStates::default()
        });
        GetTaskStatesReply { version, said_at: BootTime::default(), states }
    }

    /// Changes the tree without an update.
    pub fn drift(&mut self, tree: Tree) -> Task {
        self.model.tree = tree;
        Task::Scan
    }

    /// Is ordered to fetch.
    ///
    /// # Errors
    ///
    /// If it is busy.
    pub fn fetch(&mut self, request: FetchRequest, now: u64) -> Result<Option<Task>, Fault> {
        let task = self.model.fetch(request)?;
        if task.is_some() {
            self.first_times.fetch.get_or_insert(now);
        }
        Ok(task)
    }

    /// Gets the content of computed files.
    pub fn add(&mut self, objects: &[ObjectId], now: u64) {
        self.model.add_objects(objects);
        self.first_times.fetch.get_or_insert(now);
    }

    /// Is ordered to stage an update.
    ///
    /// # Errors
    ///
    /// If it is busy, or the plan was made for another scan.
    pub fn prepare(&mut self, request: PrepareRequest, now: u64) -> Result<Option<Task>, Fault> {
        let task = self.model.prepare(Box::new(request), |_| true)?;
        if task.is_some() {
            self.first_times.prepare.get_or_insert(now);
        }
        Ok(task)
    }

    /// Is ordered to carry an update out.
    ///
    /// # Errors
    ///
    /// If no such update is staged.
    pub fn commit(&mut self, id: u64, now: u64) -> Result<Option<Task>, Fault> {
        let task = self.model.commit(id, |_| true)?;
        if task.is_some() {
            self.first_times.commit.get_or_insert(now);
        }
        Ok(task)
    }

    /// Ends a task and returns the task that follows.
    pub fn end(
        &mut self,
        task: Task,
        now: u64,
        patch: impl FnOnce(&Tree, &Plan) -> Patched,
    ) -> Option<Task> {
        match task {
            Task::Scan => {
                let tree = self.model.tree.clone();
                if let Some(end) = self.model.end_scan(tree, Vec::new()) {
                    if end.verifies_update {
                        self.first_times.verified.get_or_insert(now);
                    } else if end.has_changed {
                        self.first_times.drifted.get_or_insert(now);
                    }
                }
            }
            Task::Fetch(id) => {
                if let Some(objects) = self.model.objects_of_fetch(id) {
                    self.model.end_fetch(id, objects, None);
                }
            }
            Task::Prepare(id) => {
                self.model.end_prepare(id);
            }
            Task::Update(id) if self.model.is_updating(id) => {
                self.finish_update(patch);
                return Some(Task::Scan);
            }
            Task::Update(_) => {}
        }
        None
    }

    fn finish_update(&mut self, patch: impl FnOnce(&Tree, &Plan) -> Patched) {
        if let Some(request) = self.model.journal() {
            let patched = patch(&self.model.tree, &request.plan);
            self.model.end_update(patched.map_err(UpdateOutcome::RolledBack));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simulator::patch::{drifted, patched};
    use api::fault::FaultCode;
    use api::subd::{Activity, ExpectedState, FetchFailure, FetchObject, LastFetch};
    use model::object::Algorithm;
    use model::plan::{RefusedChanges, ScannedTree, plan};
    use model::scope::Scope;
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
        Sub::new(SubIdentity::default(), tree, ImageName::new("base").unwrap(), 7)
    }

    fn update(sub: &Sub, want: &Tree) -> PrepareRequest {
        let (kept, linked, occupied) = Default::default();
        let have = ScannedTree {
            tree: &sub.model.tree,
            kept_directories: &kept,
            externally_linked: &linked,
            occupied: &occupied,
            refused: &RefusedChanges::default(),
            times: model::tree::TimePrecision::default(),
        };
        let report = sub.report(None, Time::default());
        PrepareRequest {
            update_id: 3,
            expects: ExpectedState {
                instance: 7,
                root: report.scan.unwrap().root,
                scope: report.scope,
            },
            image: ImageName::new("base").unwrap(),
            image_digest: want.digest(),
            plan: plan(&have, want).into(),
            triggers: Triggers::default(),
            health_check: None,
            force_disruption: false,
            expires_seconds: 300,
        }
    }

    #[test]
    fn drift_is_repaired_and_each_step_is_news() {
        let mut sub = sub(tree());
        let mut known = sub.model.version;
        let mut must_be_news = |sub: &Sub| {
            assert!(sub.model.has_news(Some(known)), "{sub:?}");
            known = sub.model.version;
        };
        let work = sub.drift(drifted(&tree(), 5).unwrap());
        assert_eq!(sub.end(work, 10, patch), None);
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
        assert_eq!(sub.end(work, 25, patch), None);
        must_be_news(&sub);
        assert_eq!(sub.fetch(fetch, 26), Ok(None));
        let work = sub.prepare(request.clone(), 30).unwrap().unwrap();
        must_be_news(&sub);
        assert_eq!(sub.commit(3, 31).unwrap_err().code, FaultCode::NotFound);
        assert_eq!(sub.end(work, 35, patch), None);
        must_be_news(&sub);
        let work = sub.commit(3, 40).unwrap().unwrap();
        must_be_news(&sub);
        let scan = sub.end(work, 45, patch).unwrap();
        must_be_news(&sub);
        assert_eq!(sub.end(scan, 50, patch), None);
        must_be_news(&sub);
        assert_eq!(sub.model.scanned(), Some(&tree()));
        assert_eq!((sub.commit(3, 60), sub.prepare(request, 61)), (Ok(None), Ok(None)));
        let first_times = FirstTimes {
            drifted: Some(10),
            fetch: Some(20),
            prepare: Some(30),
            commit: Some(40),
            verified: Some(50),
        };
        assert_eq!((sub.first_times, sub.first_times.order()), (first_times, Some(20)));
        sub.model.remove_objects(&[tree().digest()]).unwrap();
        assert!(!sub.model.has_news(Some(known)), "nothing of that was in the cache");
    }

    #[test]
    fn an_update_does_not_end_what_is_fetched_ahead_of_need() {
        let want = tree();
        let mut sub = sub(drifted(&want, 5).unwrap());
        let request = update(&sub, &want);
        sub.model.cache.extend(request.plan.objects().into_keys());
        let fetch = |fetch_id, ahead| FetchRequest {
            fetch_id,
            sources: Vec::new(),
            objects: [].into(),
            ahead,
        };
        let fetching = |fetch_id| Activity::Fetching { fetch_id, objects: 0, bytes: 0 };
        let ahead = sub.fetch(fetch(1, true), 1).unwrap().unwrap();
        assert_eq!(sub.model.activity(), fetching(1));
        let work = sub.prepare(request, 2).unwrap().unwrap();
        assert_eq!(sub.model.activity(), Activity::Preparing { update_id: 3 });
        sub.end(work, 3, patch);
        // Whoever waits for the update is not kept waiting.
        assert_eq!(sub.model.activity(), Activity::Prepared { update_id: 3 });
        let work = sub.commit(3, 4).unwrap().unwrap();
        sub.end(work, 5, patch);
        assert_eq!((sub.model.activity(), sub.model.report(None).last_fetch), (fetching(1), None));
        sub.end(ahead, 6, patch);
        let ended = |fetch_id, error| Some(LastFetch { fetch_id, error, ..LastFetch::default() });
        assert_eq!(
            (sub.model.activity(), sub.model.report(None).last_fetch),
            (Activity::Idle, ended(1, None))
        );
        // One that is needed does.
        sub.fetch(fetch(2, true), 7).unwrap().unwrap();
        sub.fetch(fetch(4, false), 8).unwrap().unwrap();
        let gave_way = ended(2, Some(FetchFailure::GaveWay));
        assert_eq!(
            (sub.model.activity(), sub.model.report(None).last_fetch),
            (fetching(4), gave_way)
        );
    }

    #[test]
    fn a_crash_loses_what_is_staged_and_finishes_what_was_begun() {
        let want = tree();
        let mut sub = sub(drifted(&want, 5).unwrap());
        sub.model.cache.extend(update(&sub, &want).plan.objects().into_keys());
        let prepare = |sub: &mut Sub| {
            let mut request = update(sub, &want);
            request.expects.instance = sub.model.version.instance;
            let work = sub.prepare(request, 1).unwrap().unwrap();
            assert_eq!(sub.end(work, 2, patch), None);
        };
        prepare(&mut sub);
        sub.crash();
        let scan = sub.start(8, patch);
        sub.end(scan, 3, patch);
        assert_eq!(sub.commit(3, 4).unwrap_err().code, FaultCode::NotFound);
        prepare(&mut sub);
        let late = sub.commit(3, 5).unwrap().unwrap();
        sub.crash();
        let scan = sub.start(9, patch);
        sub.end(scan, 6, patch);
        assert_eq!(sub.model.scanned(), Some(&want));
        assert_eq!(sub.end(late, 7, patch), None);
        assert_eq!(
            sub.report(None, Time::default()).last_update.unwrap().outcome,
            UpdateOutcome::Done
        );
    }

    #[test]
    fn another_scope_makes_another_scan() {
        let mut sub = sub(tree());
        let scope = sub.model.report(None).scope;
        assert!(!sub.model.set_scope(scope));
        assert!(sub.model.set_scope(Scope(tree().digest())));
        assert!(!sub.model.report(None).scanned);
        sub.end(Task::Scan, 1, patch);
        let report = sub.report(None, Time::default());
        assert_eq!(report.scan.unwrap().scope, Scope(tree().digest()));
    }
}
