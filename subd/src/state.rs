//! What subd knows and polls report, and what of it survives a restart.
//!
//! | module | what |
//! |---|---|
//! | [`cache_changes`] | which objects were added to the cache or removed, by generation |
//! | [`persisted_state`] | `state.json` |
//! | [`holder`] | which dominator gives orders |
//! | [`pause`] | the pause of updates, and when it ends |
//! | [`refusals`] | the changes that the machine refuses |
//! | [`directories`] | `/.subd` and what it holds |
//!
//! [`ReportState`] owns everything that a poll reports. Other modules report changes to it. It
//! decides which number of the version grows, and wakes the polls that wait.
//!
//! # Invariants
//!
//! * `generation` grows when the report of the scanned tree, the refused changes or the set of
//!   cached objects changed, and never otherwise.
//! * `status` grows on every other change that a poll reports. Free space, counters and the clock
//!   are reported as they are at that time and change no number.
//! * All parts of a reply are of the same time.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

use api::subd::{
    Activity, Alarm, CacheReport, FetchProgress, FreeSpace, Health, LastFetch, LastUpdate, Limits,
    LimitsReport, Load, Paused, PollReply, ScanCounters, ScanReport, SubIdentity, SubVersion,
    TriggerFailure, UNREADABLE_MAX, UpdatePhase,
};
use model::boot_time::BootTime;
use model::display::error_chain;
use model::filter::Patterns;
use model::image::ImageName;
use model::lock::locked;
use model::object::{Algorithm, ObjectId};
use model::path::TreePath;
use model::plan::{RefusedChange, RefusedChanges};
use model::scope::{ScanSettings, Scope};
use model::tree::{Child, Directory, Time, Tree};
use model::trigger::Triggers;
use system::clock::{boot_now, wall};
use tokio::sync::watch;

use crate::state::cache_changes::ChangeLog;
use crate::state::persisted_state::{PersistError, PersistedState, SavedState};
use crate::state::refusals::Refusals;

pub mod cache_changes;
pub mod directories;
pub mod holder;
pub mod pause;
pub mod persisted_state;
pub mod refusals;
pub mod reserve;

/// The most trigger failures that are remembered.
const TRIGGER_FAILURES_MAX: usize = 64;

/// A scan under some settings: immutable, and complete or empty. Directories that did not change
/// are the same `Arc` in one snapshot and the next.
#[derive(Clone, Debug)]
pub struct Snapshot {
    pub settings: Arc<ScanSettings>,
    /// The digest of the settings and of the local exclusions.
    pub scope: Scope,
    /// Grows when, and only when, anything in the snapshot has changed; from 1.
    pub revision: u64,
    /// `None` until a pass under these settings is complete.
    pub tree: Option<Tree>,
    /// What polls report of the tree; `None` before the first complete scan.
    pub report: Option<ScanReport>,
    /// Directories of the tree that have too many entries, sorted by path.
    pub left_alone: Vec<RefusedChange>,
    /// The directories of the tree by digest, once they were requested.
    pub index: OnceLock<BTreeMap<ObjectId, Arc<Directory>>>,
}

impl Snapshot {
    /// Returns the directory of the tree with that digest.
    pub fn directory(&self, digest: &ObjectId) -> Option<&Arc<Directory>> {
        let tree = self.tree.as_ref()?;
        self.index.get_or_init(|| directories_of(tree)).get(digest)
    }
}

/// Returns all directories of `tree` by digest.
fn directories_of(tree: &Tree) -> BTreeMap<ObjectId, Arc<Directory>> {
    let mut index = BTreeMap::new();
    let mut stack = vec![tree.root()];
    while let Some(directory) = stack.pop() {
        if index.insert(directory.digest(), Arc::clone(directory)).is_some() {
            continue;
        }
        stack.extend(directory.entries().iter().filter_map(|entry| match &entry.child {
            Child::Directory(below) => Some(below),
            Child::Leaf(_) => None,
        }));
    }
    index
}

/// Values that are measured at the moment of a reply.
#[derive(Clone, Debug, Default)]
pub struct Measured {
    pub space: FreeSpace,
    pub counters: ScanCounters,
    pub load: Load,
    pub ceilings: Limits,
    pub clock: Time,
}

/// The state that polls report.
#[derive(Clone, Debug)]
pub struct State {
    pub version: SubVersion,
    pub identity: SubIdentity,
    pub fetch: Option<FetchProgress>,
    pub update: UpdatePhase,
    /// Why the journal of an update cannot be closed; no other update is accepted in the meantime.
    pub stuck: Option<String>,
    pub snapshot: Option<Arc<Snapshot>>,
    pub last_fetch: Option<LastFetch>,
    /// What survives a restart: what memory has of the saved state.
    pub persisted: Arc<PersistedState>,
    /// The scope of the current settings.
    pub scope: Scope,
    /// At most one of each kind.
    pub alarms: BTreeSet<Alarm>,
    /// What the health check of this image has said last.
    pub image_health: Option<(ImageName, Health)>,
    pub refusals: Refusals,
}

impl State {
    /// Returns what the sub is doing, as polls report it.
    pub fn activity(&self) -> Activity {
        Activity::of(self.update, self.fetch)
    }

    /// Returns the time since the boot of the machine.
    pub fn boot_now(&self) -> BootTime {
        boot_now(&self.identity.boot_id)
    }

    /// Returns the pause that is in force now.
    pub fn pause_in_force(&self) -> Option<Paused> {
        self.persisted.paused.as_ref()?.in_force(wall(), &self.boot_now())
    }

    /// Returns the id of the last update, or zero; `None` while one is carried out.
    pub fn last_update_done(&self) -> Option<u64> {
        let is_updating = matches!(self.activity(), Activity::Updating { .. });
        let id = self.persisted.last_update.as_ref().map_or(0, |update| update.update_id);
        (!is_updating).then_some(id)
    }

    /// Returns the alarms, sorted.
    pub fn alarms(&self) -> Vec<Alarm> {
        let stuck = self.stuck.iter().cloned().map(Alarm::JournalStuck);
        let unusable = self.unusable_settings().map(Alarm::ScannerStalled);
        let all: BTreeSet<Alarm> =
            self.alarms.iter().cloned().chain(stuck).chain(unusable).collect();
        all.into_iter().collect()
    }

    /// Why nothing is scanned, if the saved scan settings cannot be used.
    pub fn unusable_settings(&self) -> Option<String> {
        let why = self.persisted.unusable_settings.as_ref()?;
        Some(format!(
            "the filter that was set last cannot be used: {why}; nothing is scanned or changed \
             until the dominator, or `subtool push-image`, sets another"
        ))
    }

    /// Returns the changes that the machine refuses now, by path.
    pub fn refused_changes(&self) -> BTreeMap<&TreePath, &RefusedChange> {
        let left_alone = self.snapshot.iter().flat_map(|snapshot| &snapshot.left_alone);
        let all = self.refusals.in_force().chain(left_alone);
        all.map(|refused| (&refused.path, refused)).collect()
    }

    /// Returns all changes that the machine refuses or has refused lately.
    pub fn known_refused_changes(&self) -> RefusedChanges {
        let left_alone = self.snapshot.iter().flat_map(|snapshot| &snapshot.left_alone);
        self.refusals.known().chain(left_alone).cloned().collect()
    }

    /// True if a scan under the current settings is complete.
    pub fn is_scanned(&self) -> bool {
        self.scan_report().is_some()
    }

    /// The report of the scan, if it is of the current settings.
    pub fn scan_report(&self) -> Option<&ScanReport> {
        let report = self.snapshot.as_ref().and_then(|snapshot| snapshot.report.as_ref());
        report.filter(|report| report.scope == self.scope)
    }
}

struct ReportedState {
    state: State,
    cached: BTreeSet<ObjectId>,
    changes: ChangeLog,
}

/// The state that polls report, and the polls that wait for changes of it.
pub struct ReportState {
    /// Its turn is taken before the lock of `inner`, never while that is held: polls would wait for
    /// the medium.
    saved: SavedState,
    inner: Mutex<ReportedState>,
    version: watch::Sender<SubVersion>,
    exclusions: Patterns,
    started: Instant,
}

impl ReportState {
    /// Starts with the saved state and the cached objects.
    pub fn new(
        instance: u64,
        identity: SubIdentity,
        exclusions: Patterns,
        saved: SavedState,
        cached: impl IntoIterator<Item = ObjectId>,
    ) -> Self {
        let version = SubVersion { instance, generation: 1, status: 1 };
        let persisted = saved.get();
        let scope = scope_of(&persisted, &exclusions);
        let state = State {
            version,
            identity,
            fetch: None,
            update: UpdatePhase::Idle,
            stuck: None,
            snapshot: None,
            last_fetch: None,
            persisted,
            scope,
            alarms: BTreeSet::new(),
            image_health: None,
            refusals: Refusals::default(),
        };
        let cached = cached.into_iter().collect();
        let inner = ReportedState { state, cached, changes: ChangeLog::new(version.generation) };
        let (inner, version) = (Mutex::new(inner), watch::Sender::new(version));
        Self { saved, inner, version, exclusions, started: Instant::now() }
    }

    fn lock(&self) -> MutexGuard<'_, ReportedState> {
        // A panic elsewhere cannot leave it half changed.
        locked(&self.inner)
    }

    /// Calls `look` with the state, which is locked for that time: `look` must be quick and must
    /// not use this value.
    pub fn read<T>(&self, look: impl FnOnce(&State) -> T) -> T {
        look(&self.lock().state)
    }

    /// Returns the number of cached objects.
    pub fn cached_count(&self) -> usize {
        self.lock().cached.len()
    }

    /// Local exclusions.
    pub fn exclusions(&self) -> &Patterns {
        &self.exclusions
    }

    /// Returns a receiver of each new version.
    pub fn watch(&self) -> watch::Receiver<SubVersion> {
        self.version.subscribe()
    }

    /// Changes the saved state, write-through: the change is in force only once it is on the
    /// medium, and an error leaves memory unchanged. Writes nothing if nothing changes, unless the
    /// last write failed. Blocks.
    pub fn persist(&self, change: impl FnOnce(&mut PersistedState)) -> Result<(), PersistError> {
        let old = self.saved.get();
        self.saved.modify(change)?;
        if !Arc::ptr_eq(&old, &self.saved.get()) {
            self.take_saved();
        }
        Ok(())
    }

    /// As [`ReportState::persist`], and writes even if nothing changes: what was read at the start
    /// may not be on the medium yet, if a killed subd had not synced it.
    pub fn persist_always(
        &self,
        change: impl FnOnce(&mut PersistedState),
    ) -> Result<(), PersistError> {
        self.saved.doubt();
        self.persist(change)
    }

    /// Reports what is saved, and puts the configuration in it in force.
    fn take_saved(&self) {
        let mut inner = self.lock();
        let state = &mut inner.state;
        let was_scanned = state.is_scanned();
        state.persisted = self.saved.get();
        state.scope = scope_of(&state.persisted, &self.exclusions);
        // A caller may have seen that there is no scan in this very generation.
        if state.is_scanned() && !was_scanned {
            state.version.generation += 1;
        }
        state.version.status += 1;
        self.version.send_replace(state.version);
    }

    /// Changes the state and the saved state together, write-behind: memory changes first, also if
    /// the medium cannot be written, which is logged; the next write carries the change. Each
    /// caller says in a comment why it may be lost in a crash. Must not change the configuration.
    pub async fn persist_behind(
        self: &Arc<Self>,
        change: impl FnOnce(&mut State, &mut PersistedState) + Send + 'static,
    ) {
        let report_state = Arc::clone(self);
        let writing = tokio::task::spawn_blocking(move || {
            report_state.saved.modify_behind(|persisted| {
                report_state.change(|state| {
                    change(state, persisted);
                    state.persisted = Arc::new(persisted.clone());
                });
            });
            report_state.saved.save()
        });
        match writing.await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::error!("{}", error_chain(&error)),
            Err(error) => tracing::error!(%error, "cannot write the state"),
        }
    }

    /// Changes anything but the saved state, the scanned tree and the cache, and wakes the polls.
    pub fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let mut inner = self.lock();
        let result = change(&mut inner.state);
        inner.state.version.status += 1;
        self.version.send_replace(inner.state.version);
        result
    }

    /// As [`ReportState::change`], but wakes no poll if `change` returns `None` or an error.
    ///
    /// # Errors
    ///
    /// The error of `change`, which must not have changed anything then.
    pub fn try_change<T, E>(
        &self,
        change: impl FnOnce(&mut State) -> Result<Option<T>, E>,
    ) -> Result<Option<T>, E> {
        let mut inner = self.lock();
        let result = change(&mut inner.state)?;
        if result.is_some() {
            inner.state.version.status += 1;
            self.version.send_replace(inner.state.version);
        }
        Ok(result)
    }

    /// Raises `alarm`, which replaces one of the same kind. An equal alarm wakes no poll, so texts
    /// should not differ each time.
    pub fn raise(&self, alarm: Alarm) {
        let mut inner = self.lock();
        if !inner.state.alarms.contains(&alarm) {
            let kind = std::mem::discriminant(&alarm);
            inner.state.alarms.retain(|raised| std::mem::discriminant(raised) != kind);
            inner.state.alarms.insert(alarm);
            inner.state.version.status += 1;
            self.version.send_replace(inner.state.version);
        }
    }

    /// Clears the alarms for which `is_such` is true.
    pub fn clear(&self, is_such: impl Fn(&Alarm) -> bool) {
        let mut inner = self.lock();
        let before = inner.state.alarms.len();
        inner.state.alarms.retain(|alarm| !is_such(alarm));
        if inner.state.alarms.len() != before {
            inner.state.version.status += 1;
            self.version.send_replace(inner.state.version);
        }
    }

    /// Reports the latest scan, unless a later one is known. Returns the generation in which it is
    /// reported.
    pub fn take_snapshot(&self, snapshot: Arc<Snapshot>, identity: SubIdentity) -> u64 {
        let mut inner = self.lock();
        let ReportedState { state, .. } = &mut *inner;
        if state.snapshot.as_ref().is_some_and(|old| old.revision >= snapshot.revision) {
            return state.version.generation;
        }
        let (was_scanned, before) = (state.is_scanned(), state.version);
        let same = state.snapshot.as_ref().is_some_and(|old| {
            old.report == snapshot.report && old.left_alone == snapshot.left_alone
        });
        // An empty snapshot is reported by `scanned`, not by the generation.
        if !same && snapshot.report.is_some() {
            state.version.generation += 1;
        }
        state.snapshot = Some(snapshot);
        if state.is_scanned() != was_scanned || state.identity != identity {
            state.identity = identity;
            state.version.status += 1;
        }
        if state.version != before {
            self.version.send_replace(state.version);
        }
        state.version.generation
    }

    /// Records which objects are cached. `now` is called while the state is locked, so that no
    /// older answer overwrites a newer one.
    pub fn set_cache(&self, now: impl FnOnce() -> Vec<ObjectId>) {
        let mut inner = self.lock();
        let now: BTreeSet<ObjectId> = now().into_iter().collect();
        let added = now.difference(&inner.cached).map(|id| (*id, true));
        let removed = inner.cached.difference(&now).map(|id| (*id, false));
        let news = added.chain(removed).collect();
        inner.cached = now;
        self.record(inner, news);
    }

    /// Records that those objects of `arrived` for which `is_there` is true are cached.
    pub fn add_to_cache(&self, arrived: &[ObjectId], is_there: impl Fn(&ObjectId) -> bool) {
        let mut inner = self.lock();
        let there = arrived.iter().filter(|id| is_there(id));
        let news = there.filter(|id| inner.cached.insert(**id)).map(|id| (*id, true)).collect();
        self.record(inner, news);
    }

    /// The time at which a refusal ends that ends at `end` after the start.
    pub fn end_of(&self, end: Duration) -> Instant {
        self.started + end
    }

    /// Changes the refused changes; `change` also gets the time since the start.
    pub fn change_refusals<T>(&self, change: impl FnOnce(&mut Refusals, Duration) -> T) -> T {
        let mut inner = self.lock();
        let state = &mut inner.state;
        let before: Vec<RefusedChange> = state.refusals.in_force().cloned().collect();
        let result = change(&mut state.refusals, self.started.elapsed());
        if !state.refusals.in_force().eq(&before) {
            state.version.generation += 1;
            self.version.send_replace(state.version);
        }
        result
    }

    fn record(&self, mut inner: MutexGuard<'_, ReportedState>, news: Vec<(ObjectId, bool)>) {
        let ReportedState { state, changes, .. } = &mut *inner;
        if !news.is_empty() {
            state.version.generation += 1;
            changes.record(state.version.generation, news);
            self.version.send_replace(state.version);
        }
    }

    /// Returns the reply to a poll of a caller that knows `have`.
    pub fn reply(&self, have: Option<SubVersion>, measured: Measured) -> PollReply {
        let inner = self.lock();
        let ReportedState { state, cached, changes } = &*inner;
        let known = have
            .filter(|have| have.instance == state.version.instance)
            .map(|have| have.generation)
            .filter(|generation| *generation <= state.version.generation);
        let moved = known != Some(state.version.generation);
        let cache = || match known.and_then(|generation| changes.since(generation)) {
            Some(changes) => {
                CacheReport::Changes { added: changes.added, removed: changes.removed }
            }
            None => CacheReport::Full(cached.iter().copied().collect()),
        };
        let paused = state.persisted.paused.as_ref();
        let paused = paused.map(|pause| pause.shown(measured.clock, &state.boot_now()));
        PollReply {
            version: state.version,
            identity: state.identity.clone(),
            activity: state.activity(),
            scan: state.scan_report().filter(|_| moved).map(|scan| reported(scan, &state.refusals)),
            scanned: state.is_scanned(),
            scope: state.scope,
            exclusions: self.exclusions.lines().to_vec(),
            cache: moved.then(cache),
            last_fetch: state.last_fetch.clone(),
            last_update: state.persisted.last_update.clone(),
            last_image: state.persisted.last_image.clone(),
            trigger_failures: state.persisted.trigger_failures.clone(),
            space: measured.space,
            counters: measured.counters,
            load: measured.load,
            limits: LimitsReport {
                told: state.persisted.configuration.limits,
                ceilings: measured.ceilings,
            },
            alarms: state.alarms(),
            paused,
            clock: measured.clock,
        }
    }
}

/// Returns the scope of the settings in force; that of no other settings if they cannot be used.
fn scope_of(persisted: &PersistedState, exclusions: &Patterns) -> Scope {
    match persisted.unusable_settings {
        None => Scope::of(&persisted.configuration.scan, exclusions.lines()),
        Some(_) => Scope(Algorithm::Blake3.digest(b"unusable settings")),
    }
}

/// Returns the report of a scan with the refused changes.
fn reported(scan: &ScanReport, refusals: &Refusals) -> ScanReport {
    let refused = refusals.in_force();
    let refused =
        refused.map(|refused| (refused.path.clone(), format!("not changed: {}", refused.why)));
    let unreadable = refused.chain(scan.unreadable.iter().cloned()).take(UNREADABLE_MAX).collect();
    ScanReport { unreadable, ..scan.clone() }
}

/// Records the result of an update. `done` has the triggers of the image if the update was carried
/// out.
pub fn note_update(persisted: &mut PersistedState, last: &LastUpdate, done: Option<&Triggers>) {
    if let Some(triggers) = done {
        persisted.last_image = Some(last.image.clone());
        persisted.triggers = triggers.clone();
        // An update without operations ran no triggers, so the failures stand.
        if last.trigger_failures.is_empty() && last.operations > 0 {
            persisted.trigger_failures.clear();
        }
    }
    note_failures(&mut persisted.trigger_failures, &last.trigger_failures);
    persisted.last_update = Some(last.clone());
}

/// Records in which boot a reboot became due. It stays due until there is another boot, whatever
/// other updates there are.
pub fn note_reboot(persisted: &mut PersistedState, boot_id: &str) {
    let Some(last) = &mut persisted.last_update else { return };
    if last.awaits_boot {
        persisted.reboot_due_in = Some(boot_id.to_owned());
    }
    last.awaits_boot = persisted.reboot_due_in.as_deref() == Some(boot_id);
}

/// Adds `new` failures. A failure replaces an older one of the same service and verb.
pub fn note_failures(known: &mut Vec<TriggerFailure>, new: &[TriggerFailure]) {
    for failure in new {
        known.retain(|old| (&old.service, &old.verb) != (&failure.service, &failure.verb));
        known.push(failure.clone());
    }
    let excess = known.len().saturating_sub(TRIGGER_FAILURES_MAX);
    known.drain(..excess);
}

#[cfg(test)]
mod tests;
