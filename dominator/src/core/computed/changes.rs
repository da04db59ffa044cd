//! The changes of content: how far each has come, on which machines it is tried, and how it went.
//!
//! A change goes to a few first machines. One that fails is replaced by another, until
//! [`FAILURES_MAX`] have failed: then the change is stopped. When it is verified on as many as a
//! first step allows, it is open for all. Failures are then counted as those of images are
//! ([`UpdateResults`]).
// tidy: core

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use api::dominator::content::{ContentCause, ContentChangeId, ContentStage};
use model::tree::Time;
use serde::{Deserialize, Serialize};

use super::rollout::Trial;
use crate::core::image_breaker::{FailureLimits, UpdateFailure, UpdateResults};

/// The least number of first machines.
const FIRST_LEAST: u32 = 3;

/// The share of all machines that are first machines, as its reciprocal.
const FIRST_SHARE: u32 = 1_000;

/// A change is stopped when so many of its first machines have failed.
const FAILURES_MAX: u32 = 3;

/// The most changes of one server that are kept after they have come to their end.
const ENDED_MAX: usize = 20;

/// Returns on how many machines of so many a change is tried first.
#[must_use]
pub fn first_machines(machines: usize) -> u32 {
    (u32::try_from(machines).unwrap_or(u32::MAX) / FIRST_SHARE).max(FIRST_LEAST)
}

/// What is stored of a change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredChange {
    pub id: ContentChangeId,
    pub stage: ContentStage,
    pub since: Time,
    pub verified: u32,
    pub failed: u32,
    pub order: u64,
    pub must_tell: bool,
    pub numbering: u64,
}

/// One change.
#[derive(Clone, Debug)]
pub(super) struct Change {
    pub(super) stage: ContentStage,
    /// Since when it has this stage.
    pub(super) since: Time,
    /// On how many machines it was verified since it began, or began anew.
    pub(super) verified: u32,
    /// On how many it failed since then.
    pub(super) failed: u32,
    /// The number of the last order of the server about it.
    pub(super) order: u64,
    /// True if the server is to be told that it is stopped, or resumed.
    pub(super) must_tell: bool,
    /// The machines that do not get it yet.
    pub(super) waiting: BTreeSet<String>,
    /// The first machines on which it is not verified yet.
    pub(super) trying: BTreeSet<String>,
    /// The other machines that have it, and on which it is not verified yet.
    pub(super) getting: BTreeSet<String>,
    /// First machines on which it failed, or was not verified in time. It is not tried on them
    /// again before it is open.
    in_vain: BTreeSet<String>,
    /// Machines on which it failed, and that went back.
    failed_on: BTreeSet<String>,
    results: UpdateResults<String>,
    /// True if there may be machines among the waiting ones that can get it now.
    pub(super) must_look: bool,
}

impl Change {
    fn new(now: Time) -> Self {
        Self {
            stage: ContentStage::First,
            since: now,
            verified: 0,
            failed: 0,
            order: 0,
            must_tell: false,
            waiting: BTreeSet::new(),
            trying: BTreeSet::new(),
            getting: BTreeSet::new(),
            in_vain: BTreeSet::new(),
            failed_on: BTreeSet::new(),
            results: UpdateResults::default(),
            must_look: true,
        }
    }

    pub(super) fn set_stage(&mut self, stage: ContentStage, now: Time) {
        if self.stage != stage {
            (self.stage, self.since) = (stage, now);
        }
        self.must_look = true;
    }

    /// Takes that a machine has it, perhaps as one of the first.
    pub(super) fn got(&mut self, hostname: &str, is_first: bool) {
        let machines = if is_first { &mut self.trying } else { &mut self.getting };
        machines.insert(hostname.to_owned());
    }

    /// Begins anew with first machines.
    pub(super) fn restart(&mut self, now: Time) {
        self.set_stage(ContentStage::First, now);
        self.restart_first();
        self.results = UpdateResults::default();
    }

    /// Begins anew with first machines. How it went on the others still counts.
    pub(super) fn restart_first(&mut self) {
        (self.verified, self.failed) = (0, 0);
        self.in_vain.clear();
        self.failed_on.clear();
        self.must_look = true;
    }

    /// True if a machine without any content for its path must wait. Machines that wait for
    /// something else do not count: `may_get` says which can get it.
    pub(super) fn is_closed(&self, may_get: impl Fn(&str) -> bool) -> bool {
        match &self.stage {
            ContentStage::First => {
                !self.trying.is_empty() || self.waiting.iter().any(|host| may_get(host))
            }
            ContentStage::Open => false,
            ContentStage::Stopped(_) => true,
        }
    }

    /// Returns how many more first machines it may have, of `first`.
    pub(super) fn free_places(&self, first: u32) -> usize {
        let used = self.verified as usize + self.trying.len();
        match self.stage {
            ContentStage::First => (first as usize).saturating_sub(used),
            ContentStage::Open | ContentStage::Stopped(_) => 0,
        }
    }

    /// True if it failed on this machine, or goes to none.
    pub(super) fn has_failed(&self, hostname: &str) -> bool {
        matches!(self.stage, ContentStage::Stopped(_)) || self.failed_on.contains(hostname)
    }

    /// True if it may be tried on this machine.
    pub(super) fn may_try(&self, hostname: &str) -> bool {
        !self.in_vain.contains(hostname)
    }

    /// True if nothing more happens to it, as long as no machine gets such content.
    fn is_over(&self) -> bool {
        !self.must_tell
            && [&self.waiting, &self.trying, &self.getting].into_iter().all(BTreeSet::is_empty)
    }
}

/// All changes.
#[derive(Debug, Default)]
pub(super) struct Changes {
    all: BTreeMap<Arc<ContentChangeId>, Change>,
    /// The numbering of the revisions of each server.
    numberings: BTreeMap<String, u64>,
    limits: Option<FailureLimits>,
}

impl Changes {
    /// Starts with what was stored.
    pub(super) fn new(stored: Vec<StoredChange>) -> Self {
        let mut changes = Self::default();
        for stored in stored {
            let StoredChange { id, stage, since, verified, failed, order, must_tell, numbering } =
                stored;
            let change = Change { stage, verified, failed, order, must_tell, ..Change::new(since) };
            if numbering > 0 {
                changes.numberings.insert(id.source.clone(), numbering);
            }
            changes.all.insert(Arc::new(id), change);
        }
        changes
    }

    /// Returns what is to be stored.
    pub(super) fn stored(&self) -> Vec<StoredChange> {
        let store = |(id, change): (&Arc<ContentChangeId>, &Change)| StoredChange {
            id: ContentChangeId::clone(id),
            stage: change.stage.clone(),
            since: change.since,
            verified: change.verified,
            failed: change.failed,
            order: change.order,
            must_tell: change.must_tell,
            numbering: self.numberings.get(&id.source).copied().unwrap_or_default(),
        };
        self.all.iter().map(store).collect()
    }

    /// Takes the numbering of the revisions of a server, and the newest one. If its numbers began
    /// anew, or it was restored from a backup, removes all that are known and returns true.
    pub(super) fn take_numbering(&mut self, source: &str, numbering: u64, newest: u64) -> bool {
        let known = self.numberings.insert(source.to_owned(), numbering);
        let is_other = known.is_some_and(|known| known != numbering);
        let is_of_it = |id: &ContentChangeId, is_gone: &dyn Fn(u64) -> bool| match id.cause {
            ContentCause::Revision(number) => id.source == source && is_gone(number),
            ContentCause::Path(_) => false,
        };
        let is_gone = |number| is_other || number > newest;
        let is_restarted = self.all.keys().any(|id| is_of_it(id, &is_gone));
        if is_restarted {
            self.all.retain(|id, _| !is_of_it(id, &|_| true));
        }
        is_restarted
    }

    /// Sets when updates stop after the first machines.
    pub(super) fn set_limits(&mut self, limits: FailureLimits) {
        self.limits = Some(limits);
    }

    pub(super) fn get(&self, id: &ContentChangeId) -> Option<&Change> {
        self.all.get(id)
    }

    pub(super) fn get_mut(&mut self, id: &ContentChangeId) -> Option<&mut Change> {
        self.all.get_mut(id)
    }

    /// Returns the change with this id, which is made if it is new, and its shared id.
    pub(super) fn entry(
        &mut self,
        id: ContentChangeId,
        now: Time,
    ) -> (Arc<ContentChangeId>, &mut Change) {
        let id = match self.all.get_key_value(&id) {
            Some((known, _)) => Arc::clone(known),
            None => Arc::new(id),
        };
        let change = self.all.entry(Arc::clone(&id)).or_insert_with(|| Change::new(now));
        (id, change)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&Arc<ContentChangeId>, &Change)> {
        self.all.iter()
    }

    /// Sets the changes for which a machine waits.
    pub(super) fn set_waiting(&mut self, hostname: &str, waits: &BTreeSet<Arc<ContentChangeId>>) {
        for (id, change) in &mut self.all {
            if !waits.contains(id) {
                change.waiting.remove(hostname);
            } else if change.waiting.insert(hostname.to_owned()) {
                change.must_look = true;
            }
        }
    }

    /// Takes for which changes a machine waits, and which is tried on it. What was stored of a
    /// change may be older than what was stored of its machines.
    pub(super) fn take_machine(
        &mut self,
        hostname: &str,
        waits: &BTreeSet<Arc<ContentChangeId>>,
        trial: Option<&Trial>,
        now: Time,
    ) {
        for id in waits {
            self.entry(ContentChangeId::clone(id), now);
        }
        if let Some(trial) = trial {
            let (_, change) = self.entry(ContentChangeId::clone(&trial.change), now);
            change.got(hostname, trial.is_first);
        }
        self.set_waiting(hostname, waits);
    }

    /// Notes that a machine that waits can get other content now, of changes that it `may_get`.
    pub(super) fn can_get(&mut self, hostname: &str, may_get: impl Fn(&ContentChangeId) -> bool) {
        for (id, change) in &mut self.all {
            if change.waiting.contains(hostname) && may_get(id) {
                change.must_look = true;
            }
        }
    }

    /// Forgets a machine.
    pub(super) fn forget(&mut self, hostname: &str) {
        for change in self.all.values_mut() {
            change.waiting.remove(hostname);
            change.must_look |= change.trying.remove(hostname);
            change.getting.remove(hostname);
            change.results.forget(&hostname.to_owned());
        }
    }

    /// Takes that a change was verified on a machine. Returns true if it is to be opened now, for
    /// `first` first machines.
    pub(super) fn verified(&mut self, id: &ContentChangeId, hostname: &str, first: u32) -> bool {
        let Some(change) = self.all.get_mut(id) else { return false };
        change.trying.remove(hostname);
        change.getting.remove(hostname);
        change.verified = change.verified.saturating_add(1);
        change.results.record(hostname.to_owned(), None);
        change.stage == ContentStage::First && change.verified >= first
    }

    /// Takes that an update to a change has failed on one of `machines` machines. Returns why the
    /// change must stop, if it must.
    pub(super) fn failed(
        &mut self,
        id: &ContentChangeId,
        hostname: &str,
        failure: UpdateFailure,
        machines: usize,
    ) -> Option<String> {
        let others = self.all.iter().filter(|(other, _)| ***other != *id);
        let others = others.fold((0, 0), |(all, bad), (_, other)| {
            (all + other.results.updated(), bad + other.results.failed())
        });
        let change = self.all.get_mut(id)?;
        let was_first = change.trying.remove(hostname);
        change.getting.remove(hostname);
        change.failed = change.failed.saturating_add(1);
        change.results.record(hostname.to_owned(), Some(failure));
        if matches!(change.stage, ContentStage::Stopped(_)) {
            return None;
        }
        if !was_first {
            return change.results.stop_reason(self.limits?, others);
        }
        change.in_vain.insert(hostname.to_owned());
        change.failed_on.insert(hostname.to_owned());
        change.must_look = true;
        let most = FAILURES_MAX.min(u32::try_from(machines).unwrap_or(u32::MAX));
        (change.stage == ContentStage::First && change.failed >= most).then(|| {
            format!("{}, which are enough of the first machines", change.results.summary())
        })
    }

    /// Takes that another change has replaced this one on a machine before it was verified.
    pub(super) fn replaced(&mut self, id: &ContentChangeId, hostname: &str) {
        if let Some(change) = self.all.get_mut(id) {
            change.getting.remove(hostname);
        }
    }

    /// Takes that a machine must go back, whatever came of the change there.
    pub(super) fn taken_back(&mut self, id: &ContentChangeId, hostname: &str) {
        if let Some(change) = self.all.get_mut(id) {
            change.trying.remove(hostname);
            change.getting.remove(hostname);
            change.in_vain.remove(hostname);
            change.failed_on.remove(hostname);
            change.must_look = true;
        }
    }

    /// Takes that a first machine could neither be updated nor failed. It is replaced, unless an
    /// environment brings the change to just this one.
    pub(super) fn withdrawn(&mut self, id: &ContentChangeId, hostname: &str, is_gated: bool) {
        if let Some(change) = self.all.get_mut(id) {
            change.trying.remove(hostname);
            if !is_gated {
                change.in_vain.insert(hostname.to_owned());
            }
            change.must_look = true;
        }
    }

    /// Removes changes of single paths that are over, and the oldest revisions of those of which
    /// each server has many. Returns their ids.
    pub(super) fn remove_ended(&mut self) -> Vec<Arc<ContentChangeId>> {
        let mut removed = Vec::new();
        let mut by_source: BTreeMap<&str, Vec<(u64, &Arc<ContentChangeId>)>> = BTreeMap::new();
        for (id, _) in self.all.iter().filter(|(_, change)| change.is_over()) {
            match id.cause {
                ContentCause::Path(_) => removed.push(Arc::clone(id)),
                ContentCause::Revision(number) => {
                    by_source.entry(&id.source).or_default().push((number, id));
                }
            }
        }
        for mut ended in by_source.into_values() {
            ended.sort_unstable();
            let surplus = ended.len().saturating_sub(ENDED_MAX);
            removed.extend(ended[..surplus].iter().map(|(_, id)| Arc::clone(id)));
        }
        removed.iter().for_each(|id| drop(self.all.remove(id)));
        removed
    }
}
