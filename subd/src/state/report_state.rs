//! The one owner of what a poll reports.
//!
//! Whoever changes something tells the board; the board decides which of the version's numbers
//! moves and wakes the polls that wait.
//!
//! # Invariants
//!
//! * `generation` moves when the report of the scanned tree or the set of cached objects changed,
//!   and never otherwise.
//! * `status` moves on every other change that a poll reports. Free space, counters and the clock
//!   are reported as they are at the moment and move nothing.
//! * All parts of a reply are of one moment.

use std::collections::BTreeSet;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use api::subd::{
    Activity, Alarm, CacheReport, Identity, LastFetch, LastUpdate, Limits, LimitsReport, Load,
    PollReply, ScanCounters, ScanReport, Space, TriggerFailure, Version,
};
pub use api::subd::{FetchProgress, UpdatePhase};
use model::filter::Patterns;
use model::object::ObjectId;
use model::scope::Scope;
use model::tree::Time;
use model::trigger::Triggers;
use tokio::sync::watch;

use crate::state::cache_changes::ChangeLog;
use crate::state::persisted_state::{PersistError, PersistedState, StateDirectory};
use crate::state::snapshot::Snapshot;

/// The most trigger failures that are remembered.
const TRIGGER_FAILURES_MAX: usize = 64;

/// What is measured at the moment of a reply.
#[derive(Clone, Debug, Default)]
pub struct Measured {
    /// Free space.
    pub space: Space,
    /// Scan counters.
    pub counters: ScanCounters,
    /// What subd takes of the machine.
    pub load: Load,
    /// The machine's own ceilings.
    pub ceilings: Limits,
    /// The clock.
    pub clock: Time,
}

/// The state that polls report.
#[derive(Clone, Debug)]
pub struct State {
    /// Where the sub is.
    pub version: Version,
    /// Who the machine is.
    pub identity: Identity,
    /// The fetch that is running.
    pub fetch: Option<FetchProgress>,
    /// What the update machinery is at.
    pub update: UpdatePhase,
    /// Why the journal of an update cannot be closed. No other update is accepted until it is.
    pub stuck: Option<String>,
    /// The latest scan.
    pub snapshot: Option<Arc<Snapshot>>,
    /// How the last fetch ended.
    pub last_fetch: Option<LastFetch>,
    /// What is remembered over restarts.
    pub persisted: PersistedState,
    /// The scope of the current settings.
    pub scope: Scope,
    /// What an operator should know: at most one of each kind.
    pub alarms: BTreeSet<Alarm>,
}

impl State {
    /// What the sub is doing, in the words of the wire.
    #[must_use]
    pub fn activity(&self) -> Activity {
        Activity::of(self.update, self.fetch)
    }

    /// What an operator should know, sorted.
    #[must_use]
    pub fn alarms(&self) -> Vec<Alarm> {
        let stuck = self.stuck.iter().cloned().map(Alarm::JournalStuck);
        let all: BTreeSet<Alarm> = self.alarms.iter().cloned().chain(stuck).collect();
        all.into_iter().collect()
    }

    /// True if a scan under the current settings is complete.
    #[must_use]
    pub fn is_scanned(&self) -> bool {
        self.scan_report().is_some()
    }

    /// The report of the scan, if it is of the current settings.
    #[must_use]
    pub fn scan_report(&self) -> Option<&ScanReport> {
        let report = self.snapshot.as_ref().and_then(|snapshot| snapshot.report.as_ref());
        report.filter(|report| report.scope == self.scope)
    }
}

struct Inner {
    state: State,
    cached: BTreeSet<ObjectId>,
    changes: ChangeLog,
}

/// The state, and who waits for it.
pub struct ReportState {
    inner: Mutex<Inner>,
    version: watch::Sender<Version>,
    exclusions: Patterns,
}

impl ReportState {
    /// Starts with what was remembered and what is cached.
    #[must_use]
    pub fn new(
        instance: u64,
        identity: Identity,
        exclusions: Patterns,
        persisted: PersistedState,
        cached: impl IntoIterator<Item = ObjectId>,
    ) -> Self {
        let version = Version { instance, generation: 1, status: 1 };
        let scope = Scope::of(&persisted.configuration.scan, exclusions.lines());
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
        };
        let cached = cached.into_iter().collect();
        let inner = Inner { state, cached, changes: ChangeLog::new(version.generation) };
        Self { inner: Mutex::new(inner), version: watch::Sender::new(version), exclusions }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // A panic elsewhere cannot leave it half changed: nothing below can panic in between.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks at the state; `look` must be quick and must not ask the board for anything else.
    pub fn read<T>(&self, look: impl FnOnce(&State) -> T) -> T {
        look(&self.lock().state)
    }

    /// How many objects are cached.
    #[must_use]
    pub fn cached_count(&self) -> usize {
        self.lock().cached.len()
    }

    /// Local exclusions.
    #[must_use]
    pub fn exclusions(&self) -> &Patterns {
        &self.exclusions
    }

    /// What tells of each new version.
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<Version> {
        self.version.subscribe()
    }

    /// Changes what is remembered over restarts, write-through: the change is in force only once it
    /// is on the medium. `change` is called twice, with a copy and with the state in memory, and
    /// must do the same both times. Writes nothing if nothing changes,
    /// unless the last write failed. Blocks.
    ///
    /// # Errors
    ///
    /// [`PersistError`]; then the state in memory is unchanged.
    pub fn persist(
        &self,
        directory: &StateDirectory,
        change: impl Fn(&mut PersistedState),
    ) -> Result<(), PersistError> {
        let changed = |failed| {
            let before = self.read(|state| state.persisted.clone());
            let mut persisted = before.clone();
            change(&mut persisted);
            (failed || persisted != before).then_some(persisted)
        };
        directory.store_before(changed, || self.change_saved(&change))
    }

    /// Changes what is remembered in memory, and puts the configuration in it in force.
    fn change_saved(&self, change: impl FnOnce(&mut PersistedState)) {
        let mut inner = self.lock();
        let state = &mut inner.state;
        let was_scanned = state.is_scanned();
        change(&mut state.persisted);
        state.scope = Scope::of(&state.persisted.configuration.scan, self.exclusions.lines());
        // A caller may have been told that there is no scan in this very generation.
        if state.is_scanned() && !was_scanned {
            state.version.generation += 1;
        }
        state.version.status += 1;
        self.version.send_replace(state.version);
    }

    /// Writes what is to be remembered over restarts, as it is when it is this caller's turn. For
    /// what has happened already, and is therefore in memory even if it cannot be written (the end
    /// of an update or a pause, a measured speed); the next write carries it. Orders are given by
    /// [`ReportState::persist`]. Blocks.
    ///
    /// # Errors
    ///
    /// [`PersistError`]; what was written before is still there.
    pub fn save_blocking(&self, state: &StateDirectory) -> Result<(), PersistError> {
        state.store(|| self.read(|state| state.persisted.clone()))
    }

    /// As [`ReportState::save_blocking`], where waiting for the disk holds nobody up.
    ///
    /// # Errors
    ///
    /// As [`ReportState::save_blocking`].
    pub async fn save(self: &Arc<Self>, state: &Arc<StateDirectory>) -> Result<(), PersistError> {
        let (report_state, state) = (Arc::clone(self), Arc::clone(state));
        let kept = tokio::task::spawn_blocking(move || report_state.save_blocking(&state)).await;
        kept.unwrap_or_else(|error| {
            Err(PersistError::Content { operation: "write", source: io::Error::other(error) })
        })
    }

    /// Changes what is not scanned tree or cache; `change` says whether there is news.
    pub fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let mut inner = self.lock();
        let result = change(&mut inner.state);
        inner.state.version.status += 1;
        self.version.send_replace(inner.state.version);
        result
    }

    /// As [`ReportState::change`], but tells nobody if `change` gives an error.
    ///
    /// # Errors
    ///
    /// What `change` gives; then it has changed nothing.
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

    /// Raises `alarm`; one of the same kind that was raised before makes way for it. An equal one
    /// is no news. Texts that differ each time wake every poll each time: avoid them.
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

    /// Clears the alarms that are such as `is_such` says. That there are none is no news.
    pub fn clear(&self, is_such: impl Fn(&Alarm) -> bool) {
        let mut inner = self.lock();
        let before = inner.state.alarms.len();
        inner.state.alarms.retain(|alarm| !is_such(alarm));
        if inner.state.alarms.len() != before {
            inner.state.version.status += 1;
            self.version.send_replace(inner.state.version);
        }
    }

    /// Takes the latest scan, unless a later one was taken already; gives the generation that it
    /// is reported in.
    pub fn take_snapshot(&self, snapshot: Arc<Snapshot>, identity: Identity) -> u64 {
        let mut inner = self.lock();
        let Inner { state, .. } = &mut *inner;
        if state.snapshot.as_ref().is_some_and(|old| old.revision >= snapshot.revision) {
            return state.version.generation;
        }
        let (was_scanned, before) = (state.is_scanned(), state.version);
        let same = state.snapshot.as_ref().is_some_and(|old| old.report == snapshot.report);
        // An empty snapshot is no news of the tree: that there is none yet is told by `scanned`.
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

    /// Notes which objects are cached now, whatever was noted before. `now` is asked while nobody
    /// else can note anything, so that an older answer never overwrites a newer one.
    pub fn set_cache(&self, now: impl FnOnce() -> Vec<ObjectId>) {
        let mut inner = self.lock();
        let now: BTreeSet<ObjectId> = now().into_iter().collect();
        let added = now.difference(&inner.cached).map(|id| (*id, true));
        let removed = inner.cached.difference(&now).map(|id| (*id, false));
        let news = added.chain(removed).collect();
        inner.cached = now;
        self.record(inner, news);
    }

    /// Notes that objects came into the cache: those of `arrived` that are still there, says
    /// `is_there`.
    pub fn add_to_cache(&self, arrived: &[ObjectId], is_there: impl Fn(&ObjectId) -> bool) {
        let mut inner = self.lock();
        let there = arrived.iter().filter(|id| is_there(id));
        let news = there.filter(|id| inner.cached.insert(**id)).map(|id| (*id, true)).collect();
        self.record(inner, news);
    }

    fn record(&self, mut inner: MutexGuard<'_, Inner>, news: Vec<(ObjectId, bool)>) {
        let Inner { state, changes, .. } = &mut *inner;
        if !news.is_empty() {
            state.version.generation += 1;
            changes.record(state.version.generation, news);
            self.version.send_replace(state.version);
        }
    }

    /// The reply to a poll of a caller that knows `have`.
    #[must_use]
    pub fn reply(&self, have: Option<Version>, measured: Measured) -> PollReply {
        let inner = self.lock();
        let Inner { state, cached, changes } = &*inner;
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
        PollReply {
            version: state.version,
            identity: state.identity.clone(),
            activity: state.activity(),
            scan: state.scan_report().filter(|_| moved).cloned(),
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
            paused: state.persisted.paused.clone(),
            clock: measured.clock,
        }
    }
}

/// Notes how an update ended in what is remembered: `done` has the triggers of the image if the
/// update was carried out.
pub fn note_update(persisted: &mut PersistedState, last: &LastUpdate, done: Option<&Triggers>) {
    if let Some(triggers) = done {
        persisted.last_image = Some(last.image.clone());
        persisted.triggers = triggers.clone();
        // An update without changes ran no triggers, so it says nothing of the services.
        if last.trigger_failures.is_empty() && last.operations > 0 {
            persisted.trigger_failures.clear();
        }
    }
    note_failures(&mut persisted.trigger_failures, &last.trigger_failures);
    persisted.last_update = Some(last.clone());
}

/// Notes in which boot a reboot has become due. It stays due, whatever other updates there are,
/// until there is another boot.
pub fn note_reboot(state: &mut State) {
    let boot_id = &state.identity.boot_id;
    let Some(last) = &mut state.persisted.last_update else { return };
    if last.awaits_boot {
        state.persisted.reboot_due_in = Some(boot_id.clone());
    }
    last.awaits_boot = state.persisted.reboot_due_in.as_ref() == Some(boot_id);
}

/// Adds `new` failures; one of the same service and verb takes the place of the old one.
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
