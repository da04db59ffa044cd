//! Decides which machine uses which content: other content than before waits until its change may
//! go to the machine.
//!
//! # Invariants
//!
//! * A machine is tried with one change at a time. One whose image changes meanwhile goes back to
//!   its former content, and another is tried.
//! * What is stopped goes to no machine. The machines that have it go back to their former content
//!   at once.
//! * Former content is kept until the file changes again.
// tidy: core

use core::time::Duration;
use std::collections::BTreeSet;
use std::sync::Arc;

use api::dominator::content::{
    ContentCause, ContentChange, ContentChangeId, ContentOrder, ContentStage,
};
use api::file_generator::RevisionOrder;
use model::path::TreePath;
use serde::{Deserialize, Serialize};

use super::changes::{Change, first_machines};
use super::{ComputedTable, Contents, KnownContent, MachineFiles};
use crate::core::image_breaker::UpdateFailure;
use crate::core::timing::Now;

/// A first machine on which a change was not verified after so long is replaced by another.
pub const FIRST_LONGEST: Duration = Duration::from_secs(900);

/// The longest reason of a stop, in bytes.
const WHY_BYTES_MAX: usize = 1_000;

/// Content, and the change that brought it or took its place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChangedContent {
    pub(super) change: Arc<ContentChangeId>,
    pub(super) content: KnownContent,
}

/// A change that a machine has got, and that is not verified on it yet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trial {
    pub(super) change: Arc<ContentChangeId>,
    /// True if the machine is one of the first.
    pub(super) is_first: bool,
    /// Since when it has it, on the clock of [`Now::elapsed`].
    #[serde(skip)]
    pub(super) since: Duration,
}

/// How a machine is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Standing {
    /// It does not answer, or something is under way.
    #[default]
    Away,
    /// It differs from its image, and nothing is under way.
    Settled,
    /// It equals its image and its computed files.
    InSync,
    /// It does, but other updates of it are held back.
    Held,
}

/// What a machine says of its computed files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContentReport {
    Is(Standing),
    /// The update to the files failed.
    Failed(UpdateFailure),
}

/// Why the files of a machine are not those that it had.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ContentUpdate {
    /// They are, as far as is known.
    #[default]
    None,
    /// Certificates were renewed because of their age.
    Renewal,
    /// A change of content.
    Change,
}

/// Why an order about a change is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ContentOrderError {
    #[error("no change of content {0} is known: domtool computed list")]
    Unknown(ContentChangeId),
    #[error("{0} has not been stopped")]
    NotStopped(ContentChangeId),
    #[error("{0} has been stopped already")]
    Stopped(ContentChangeId),
    #[error("{0} has been opened already")]
    Open(ContentChangeId),
    #[error(
        "no machine has former content of {0}, to which it could go back; restore the former \
         configuration of the filegen-server"
    )]
    NoFormer(ContentChangeId),
}

impl Contents {
    /// Puts what waits for `change` into use.
    fn promote(&mut self, change: &Arc<ContentChangeId>) {
        if let Some(next) = self.next.take_if(|next| next.change == *change) {
            let former = self.used.replace(next.content);
            self.former = former
                .map(|content| Box::new(ChangedContent { change: Arc::clone(change), content }));
        }
    }

    /// Puts what `change` replaced into use again. Returns true if there was something.
    fn undo(&mut self, change: &Arc<ContentChangeId>) -> bool {
        let Some(former) = self.former.take_if(|former| former.change == *change) else {
            return false;
        };
        if let Some(content) = self.used.replace(former.content)
            && self.next.is_none()
        {
            self.next = Some(Box::new(ChangedContent { change: Arc::clone(change), content }));
        }
        true
    }
}

impl MachineFiles {
    /// Returns the changes for which the machine waits.
    pub(super) fn waits(&self) -> BTreeSet<Arc<ContentChangeId>> {
        let next = self.files.iter().filter_map(|file| file.contents.next.as_ref());
        next.map(|next| Arc::clone(&next.change)).collect()
    }

    fn promote(&mut self, change: &Arc<ContentChangeId>, is_first: bool, since: Duration) {
        self.files.iter_mut().for_each(|file| file.contents.promote(change));
        self.trial = Some(Trial { change: Arc::clone(change), is_first, since });
        self.use_others();
    }

    /// Goes back to what `change` replaced. Returns true if there was something.
    fn undo(&mut self, change: &Arc<ContentChangeId>) -> bool {
        let mut is_undone = false;
        for file in &mut self.files {
            is_undone |= file.contents.undo(change);
        }
        let is_tried = self.trial.take_if(|trial| trial.change == *change).is_some();
        if is_undone {
            self.use_others();
        }
        is_undone || is_tried
    }

    /// Notes that other content is in use: it is not known yet how the machine is with it.
    pub(super) fn use_others(&mut self) {
        self.round += 1;
        self.standing = Standing::Away;
    }

    fn has_former(&self, change: &Arc<ContentChangeId>) -> bool {
        let mut former = self.files.iter().filter_map(|file| file.contents.former.as_ref());
        former.any(|former| former.change == *change)
    }

    pub(super) fn update(&self) -> ContentUpdate {
        match (&self.trial, self.is_renewing) {
            (Some(_), _) => ContentUpdate::Change,
            (None, true) => ContentUpdate::Renewal,
            (None, false) => ContentUpdate::None,
        }
    }
}

impl ComputedTable {
    /// Returns how many machines have computed files.
    fn fleet(&self) -> usize {
        self.machines.len() + self.restored.len()
    }

    /// Takes what a machine says of the files that it was told with this number, and then puts
    /// content into use that may be used now.
    pub fn report(&mut self, hostname: &str, round: u64, report: ContentReport, now: Now) {
        let Some(files) = self.machines.get_mut(hostname) else { return };
        let is_of_now = files.round == round;
        files.standing = match report {
            ContentReport::Is(standing) if is_of_now => standing,
            ContentReport::Is(_) => Standing::Away,
            ContentReport::Failed(_) => Standing::Settled,
        };
        match report {
            ContentReport::Is(Standing::InSync | Standing::Held) if is_of_now => {
                files.is_renewing = false;
                let trial = files.trial.take();
                self.changes.can_get(hostname, |change| self.gates.allow(hostname, change));
                if let Some(trial) = trial {
                    self.changed.insert(hostname.to_owned());
                    self.verified(&trial, hostname, now);
                }
            }
            ContentReport::Is(Standing::Settled) => {
                self.changes.can_get(hostname, |change| self.gates.allow(hostname, change));
            }
            ContentReport::Is(_) => {}
            ContentReport::Failed(failure) if is_of_now => {
                let trial = files.trial.clone();
                self.changes.can_get(hostname, |change| self.gates.allow(hostname, change));
                if let Some(trial) = trial {
                    self.update_failed(&trial, hostname, failure, now);
                }
            }
            ContentReport::Failed(_) => {}
        }
        self.advance(now);
    }

    fn verified(&mut self, trial: &Trial, hostname: &str, now: Now) {
        let first = first_machines(self.fleet());
        if self.changes.verified(&trial.change, hostname, first) {
            self.open(&trial.change, now);
        }
    }

    fn update_failed(&mut self, trial: &Trial, hostname: &str, failure: UpdateFailure, now: Now) {
        let machines = self.fleet();
        let why = self.changes.failed(&trial.change, hostname, failure, machines);
        if trial.is_first {
            self.undo_on(&trial.change, hostname);
        }
        if let Some(why) = why {
            self.stop(&trial.change, why, now);
            self.undo(&trial.change);
        }
    }

    /// Takes a first machine back to its former content, because nothing can be learnt from it.
    pub(super) fn withdraw(&mut self, hostname: &str) {
        let Some(files) = self.machines.get(hostname) else { return };
        let Some(trial) = files.trial.clone().filter(|trial| trial.is_first) else { return };
        let is_gated = self.gates.are_for(hostname, &trial.change.source);
        self.changes.withdrawn(&trial.change, hostname, is_gated);
        self.undo_on(&trial.change, hostname);
    }

    pub(super) fn undo_on(&mut self, change: &Arc<ContentChangeId>, hostname: &str) {
        let Some(files) = self.machines.get_mut(hostname) else { return };
        if files.undo(change) {
            self.changes.set_waiting(hostname, &files.waits());
            self.changed.insert(hostname.to_owned());
        }
    }

    /// Takes all machines that have a change back to their former content.
    fn undo(&mut self, change: &Arc<ContentChangeId>) {
        let hostnames: Vec<String> = self.machines.keys().cloned().collect();
        for hostname in hostnames {
            self.undo_on(change, &hostname);
        }
        // Machines that want nothing yet do when they are known.
        for (hostname, stored) in &mut self.restored {
            let mut is_undone = false;
            for (_, contents) in &mut stored.files {
                is_undone |= contents.undo(change);
            }
            let is_tried = stored.trial.take_if(|trial| trial.change == *change).is_some();
            if is_undone || is_tried {
                self.changed.insert(hostname.clone());
            }
        }
        if let Some(change) = self.changes.get_mut(change) {
            change.trying.clear();
            change.getting.clear();
        }
    }

    fn stop(&mut self, id: &ContentChangeId, why: String, now: Now) {
        let Some(change) = self.changes.get_mut(id) else { return };
        change.set_stage(ContentStage::Stopped(why), now.wall);
        change.must_tell = matches!(id.cause, ContentCause::Revision(_));
        self.is_saved = false;
    }

    /// Gives a change to all machines that wait for it. Machines that get another content of a
    /// path later are a change of their own; those that get a revision later get it at once.
    fn open(&mut self, id: &Arc<ContentChangeId>, now: Now) {
        let Some(change) = self.changes.get_mut(id) else { return };
        self.is_saved = false;
        change.set_stage(ContentStage::Open, now.wall);
        self.promote_waiting(id, now);
        if let ContentCause::Path(_) = id.cause
            && let Some(change) = self.changes.get_mut(id)
        {
            change.set_stage(ContentStage::First, now.wall);
            change.restart_first();
        }
    }

    /// Gives an open change to the machines that wait for it, except those on which another is
    /// tried.
    fn promote_waiting(&mut self, id: &Arc<ContentChangeId>, now: Now) {
        let Some(change) = self.changes.get_mut(id) else { return };
        change.must_look = false;
        for hostname in change.waiting.clone() {
            let Some(files) = self.machines.get_mut(&hostname) else { continue };
            if !self.gates.allow(&hostname, id) {
                continue;
            }
            match &files.trial {
                Some(trial) if trial.is_first && trial.change != *id => continue,
                Some(former) => self.changes.replaced(&former.change, &hostname),
                None => {}
            }
            files.promote(id, false, now.elapsed);
            self.changes.set_waiting(&hostname, &files.waits());
            if let Some(change) = self.changes.get_mut(id) {
                change.got(&hostname, false);
            }
            self.changed.insert(hostname);
        }
    }

    /// Puts content into use that may be used now, and replaces first machines on which nothing
    /// can be learnt.
    pub fn advance(&mut self, now: Now) {
        let is_late = |hostname: &&String| {
            let trial = self.machines.get(*hostname).and_then(|files| files.trial.as_ref());
            trial.is_some_and(|trial| now.elapsed >= trial.since + FIRST_LONGEST)
        };
        let trying = self.changes.iter().flat_map(|(_, change)| &change.trying);
        for hostname in trying.filter(is_late).cloned().collect::<Vec<_>>() {
            self.withdraw(&hostname);
        }
        let first = first_machines(self.fleet());
        let must_look = |(_, change): &(&Arc<ContentChangeId>, &Change)| change.must_look;
        let ids: Vec<_> =
            self.changes.iter().filter(must_look).map(|(id, _)| Arc::clone(id)).collect();
        for id in ids {
            self.try_first(&id, first, now);
            if self.changes.get(&id).is_some_and(|change| change.stage == ContentStage::Open) {
                self.promote_waiting(&id, now);
            }
        }
        for id in self.changes.remove_ended() {
            self.is_saved = false;
            // The next change of the same path is another one.
            for (hostname, files) in &mut self.machines {
                for file in &mut files.files {
                    if file.contents.former.take_if(|former| former.change == id).is_some() {
                        self.changed.insert(hostname.clone());
                    }
                }
            }
        }
    }

    /// Gives a change to first machines, as many as it may have more. Machines in sync come before
    /// those that differ from their image for another reason.
    fn try_first(&mut self, id: &Arc<ContentChangeId>, first: u32, now: Now) {
        let Some(change) = self.changes.get_mut(id) else { return };
        change.must_look = false;
        let free = change.free_places(first);
        if free == 0 {
            return;
        }
        let change = &*change;
        let of_standing = |standing: Standing| {
            let (machines, gates) = (&self.machines, &self.gates);
            change.waiting.iter().filter(move |hostname| {
                let files = machines.get(*hostname);
                change.may_try(hostname)
                    && gates.allow(hostname, id)
                    && files
                        .is_some_and(|files| files.standing == standing && files.trial.is_none())
            })
        };
        let all = of_standing(Standing::InSync).chain(of_standing(Standing::Settled));
        let chosen: Vec<String> = all.take(free).cloned().collect();
        for hostname in chosen {
            let Some(files) = self.machines.get_mut(&hostname) else { continue };
            files.promote(id, true, now.elapsed);
            self.changes.set_waiting(&hostname, &files.waits());
            if let Some(change) = self.changes.get_mut(id) {
                change.got(&hostname, true);
            }
            self.changed.insert(hostname);
        }
    }

    /// Carries out the order of an operator.
    ///
    /// # Errors
    ///
    /// If there is no such change, or it has come so far already.
    pub fn order(
        &mut self,
        id: &ContentChangeId,
        order: ContentOrder,
        why: &str,
        now: Now,
    ) -> Result<(), ContentOrderError> {
        let unknown = || ContentOrderError::Unknown(id.clone());
        let shared = self.changes.iter().map(|(known, _)| known).find(|known| ***known == *id);
        let shared = Arc::clone(shared.ok_or_else(unknown)?);
        let change = self.changes.get_mut(id).ok_or_else(unknown)?;
        let is_stopped = matches!(change.stage, ContentStage::Stopped(_));
        match order {
            ContentOrder::Stop if is_stopped => {
                return Err(ContentOrderError::Stopped(id.clone()));
            }
            ContentOrder::Resume if !is_stopped => {
                return Err(ContentOrderError::NotStopped(id.clone()));
            }
            ContentOrder::Open if change.stage == ContentStage::Open => {
                return Err(ContentOrderError::Open(id.clone()));
            }
            ContentOrder::Stop => self.stop(id, stop_text(why), now),
            ContentOrder::RollBack => {
                if !self.machines.values().any(|files| files.has_former(&shared)) {
                    return Err(ContentOrderError::NoFormer(id.clone()));
                }
                self.stop(id, stop_text(why), now);
                self.undo(&shared);
            }
            ContentOrder::Resume | ContentOrder::Open => {
                change.must_tell = is_stopped && matches!(id.cause, ContentCause::Revision(_));
                change.restart(now.wall);
                if order == ContentOrder::Open {
                    self.open(&shared, now);
                }
            }
        }
        self.is_saved = false;
        self.advance(now);
        Ok(())
    }

    /// Takes how a server numbers its revisions. If its numbers began anew, what waits is asked for
    /// again, and nothing can go back to what they replaced.
    pub(super) fn take_numbering(&mut self, source: &str, numbering: u64, newest: u64, now: Now) {
        if !self.changes.take_numbering(source, numbering, newest) {
            return;
        }
        self.is_saved = false;
        let is_of_it = |change: &ContentChangeId| {
            change.source == source && matches!(change.cause, ContentCause::Revision(_))
        };
        for (hostname, files) in &mut self.machines {
            if files.trial.take_if(|trial| is_of_it(&trial.change)).is_some() {
                self.changed.insert(hostname.clone());
            }
            for file in &mut files.files {
                let contents = &mut file.contents;
                contents.former.take_if(|former| is_of_it(&former.change));
                if contents.next.take_if(|next| is_of_it(&next.change)).is_some() {
                    file.ask_at = Some(now.elapsed);
                    self.changed.insert(hostname.clone());
                }
            }
        }
    }

    /// Takes the orders that a server has about its revisions.
    pub(super) fn take_orders(&mut self, source: &str, orders: &[RevisionOrder], now: Now) {
        for order in orders {
            let cause = ContentCause::Revision(order.revision);
            let (id, change) =
                self.changes.entry(ContentChangeId { source: source.to_owned(), cause }, now.wall);
            if order.number <= change.order {
                continue;
            }
            change.order = order.number;
            self.is_saved = false;
            let is_stopped = matches!(change.stage, ContentStage::Stopped(_));
            match &order.stopped {
                Some(why) if !is_stopped => {
                    let why = model::display::safe_text(why, WHY_BYTES_MAX);
                    change.set_stage(ContentStage::Stopped(why), now.wall);
                    self.undo(&id);
                }
                None if is_stopped => change.restart(now.wall),
                Some(_) | None => {}
            }
        }
        self.advance(now);
    }

    /// Returns the revisions of a server that it is to be told of: why each is stopped, or that it
    /// was resumed.
    #[must_use]
    pub fn orders_to_tell(&self, source: &str) -> Vec<(u64, Option<String>)> {
        let to_tell = self.changes.iter().filter_map(|(id, change)| {
            let ContentCause::Revision(revision) = id.cause else { return None };
            let why = match &change.stage {
                ContentStage::Stopped(why) => Some(why.clone()),
                ContentStage::First | ContentStage::Open => None,
            };
            (change.must_tell && id.source == source).then_some((revision, why))
        });
        to_tell.collect()
    }

    /// Takes that a server was told that a revision is stopped, or resumed, as its order with this
    /// number.
    pub fn told_order(&mut self, source: &str, revision: u64, is_stopped: bool, number: u64) {
        let cause = ContentCause::Revision(revision);
        let id = ContentChangeId { source: source.to_owned(), cause };
        let Some(change) = self.changes.get_mut(&id) else { return };
        if matches!(change.stage, ContentStage::Stopped(_)) == is_stopped {
            change.must_tell = false;
        }
        change.order = change.order.max(number);
        self.is_saved = false;
    }

    /// Says why other content of a machine is not in use yet, if there is some.
    pub(super) fn held_text(&self, files: &MachineFiles) -> Option<String> {
        let next = files.files.iter().find_map(|file| file.contents.next.as_ref())?;
        Some(self.waiting_text(&files.machine.hostname, &next.change))
    }

    pub(super) fn waiting_text(&self, hostname: &str, id: &ContentChangeId) -> String {
        let is_gated = !self.gates.allow(hostname, id);
        let why = match self.changes.get(id).map(|change| &change.stage) {
            Some(ContentStage::First | ContentStage::Open) if is_gated => {
                "comes with a rollout of an environment".to_owned()
            }
            Some(ContentStage::Stopped(why)) => format!("is stopped: {why}"),
            Some(ContentStage::First) => "is being tried on the first machines".to_owned(),
            Some(ContentStage::Open) | None => "comes next".to_owned(),
        };
        format!("content of {id} waits, which {why}")
    }

    /// Describes all changes of a server, or of all.
    #[must_use]
    pub fn described_changes(&self, source: &str) -> Vec<ContentChange> {
        let wanted = self.changes.iter().filter(|(id, _)| source.is_empty() || id.source == source);
        wanted.map(|(id, change)| self.described_change(id, change)).collect()
    }

    fn described_change(&self, id: &Arc<ContentChangeId>, change: &Change) -> ContentChange {
        let paths: Vec<TreePath> = match &id.cause {
            ContentCause::Path(path) => vec![path.clone()],
            ContentCause::Revision(number) => {
                let versions = self.generators.get(&id.source).into_iter().flatten();
                let is_of_it = versions.filter(|(_, version)| version.revision == *number);
                is_of_it.map(|(path, _)| path.clone()).collect()
            }
        };
        let number = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        let reversible = self.machines.values().filter(|files| files.has_former(id)).count();
        ContentChange {
            id: ContentChangeId::clone(id),
            stage: change.stage.clone(),
            since: change.since,
            paths,
            waiting: number(change.waiting.len()),
            trying: change.trying.iter().cloned().collect(),
            verified: change.verified,
            failed: change.failed,
            reversible: number(reversible),
        }
    }
}

fn stop_text(why: &str) -> String {
    format!("by order: {}", model::display::safe_text(why, WHY_BYTES_MAX))
}
