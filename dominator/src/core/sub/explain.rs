//! Explains to operators the status of a machine: what it has, what it must have, and how they
//! differ. `status_texts` says what the status means and what may be done about it.
//!
//! Everything is read from the state by which the state machine decides.
// tidy: core

use core::time::Duration;
use std::collections::BTreeMap;
use std::sync::Arc;

use api::dominator::Status;
use api::dominator::explain::{
    ActualState, DifferenceSummary, Explanation, ImageSource, RequiredState,
};
use api::dominator::orders::UpdatePause;
use api::planning::Planned;
use model::object::ObjectId;
use model::plan::{Action, Difference};
use model::tree::Time;

use super::plans::{Missing, path_of};
use super::polls::{Polling, Reachability};
use super::report::number;
use super::{ImageState, Now, Sub};

/// How many paths an explanation lists.
const PATHS_MAX: usize = 100;

/// How many earlier changes of the status an explanation lists.
const CHANGES_LISTED: usize = 5;

impl Sub {
    /// Explains the status of the machine at this time.
    #[must_use]
    pub fn explain(&self, now: Now) -> Explanation {
        let texts = self.status_texts(now);
        let mut decided = self.shown.history.newest_first();
        decided.truncate(CHANGES_LISTED);
        Explanation {
            hostname: self.machine.hostname.clone(),
            status: self.shown.status,
            detail: self.shown.detail.clone(),
            since: self.shown.since,
            means: texts.meaning.to_owned(),
            has: self.has(),
            must_have: self.must_have(),
            differs: self.differs(),
            paused: self.paused(now.wall).map(|pause| UpdatePause::clone(pause)),
            decided,
            waits_for: texts.waits_for,
            next: texts.next,
            next_at: self.next_at(now),
            may: texts.remedies,
        }
    }

    fn has(&self) -> ActualState {
        let report = self.view.as_ref().map(|view| &view.report);
        ActualState {
            image: report
                .and_then(|report| report.last_image.clone())
                .map_or_else(String::new, String::from),
            root: self.scanned_root(),
            last_update: report.and_then(|report| report.last_update.clone()),
            last_seen: self.polls.last_seen,
            last_synced: self.shown.last_synced,
        }
    }

    fn scanned_root(&self) -> Option<ObjectId> {
        Some(self.view.as_ref()?.scan.as_ref()?.root)
    }

    fn must_have(&self) -> RequiredState {
        let source = match (self.rollback(), self.machine.required(), self.default_image()) {
            (Some(rollback), _, _) => ImageSource::Rollback(rollback.clone()),
            (None, Some(_), _) => ImageSource::Record,
            (None, None, Some(default)) => ImageSource::Default(default.clone()),
            (None, None, None) => ImageSource::Nobody,
        };
        let (digest, root, missing) = match &self.image {
            ImageState::Ready(image) => (Some(image.digest), Some(image.tree.digest()), None),
            ImageState::Missing(why) => (None, None, Some(why.to_string())),
            ImageState::Undefined => (None, None, None),
        };
        RequiredState {
            image: self.required().map_or_else(String::new, String::from),
            source,
            digest,
            root,
            missing,
            planned: self.machine.planned().map_or_else(String::new, String::from),
            disable_updates: self.machine.disable_updates,
        }
    }

    fn differs(&self) -> Option<DifferenceSummary> {
        let (image, view) = (self.target()?.digest, self.view.as_ref()?);
        // What an update has changed is compared anew when the machine has come up.
        let is_current =
            |planned: &&Arc<Planned>| planned.key.image == image && !view.is_rebooting();
        let planned = self.plan.made.as_ref().filter(is_current)?;
        let missing = Missing::of(planned, view);
        let mut actions: BTreeMap<&str, u32> = BTreeMap::new();
        let mut reasons: BTreeMap<Difference, u32> = BTreeMap::new();
        for operation in &planned.plan.operations {
            let action = match operation.action {
                Action::Create(_) => "create",
                Action::Replace { .. } => "replace",
                Action::Change(_) => "change",
                Action::Remove => "remove",
            };
            *actions.entry(action).or_default() += 1;
            for reason in &operation.reason {
                *reasons.entry(*reason).or_default() += 1;
            }
        }
        let blocked = planned.plan.blocked.iter();
        Some(DifferenceSummary {
            operations: number(planned.plan.operations.len()),
            actions: actions.into_iter().map(|(name, count)| (name.to_owned(), count)).collect(),
            reasons: reasons
                .into_iter()
                .map(|(reason, count)| (reason.name().to_owned(), count))
                .collect(),
            paths: planned.plan.operations.iter().take(PATHS_MAX).map(path_of).collect(),
            blocked: blocked
                .take(PATHS_MAX)
                .map(|blocked| format!("{}: {}", blocked.path, blocked.why))
                .collect(),
            dangers: planned.dangers.clone(),
            is_cleared: self.updates.approved_plan == Some(planned.digest),
            missing_objects: number(missing.count),
            missing_bytes: missing.bytes,
        })
    }

    /// Returns when the next step happens at the latest, if that is known.
    fn next_at(&self, now: Now) -> Option<Time> {
        let held_until = || {
            let hold =
                self.updates.hold.as_ref().filter(|hold| hold.status == self.shown.status)?;
            Some(hold.end(self.scans))
        };
        let next_call = || self.calls.attempt.until();
        let elapsed = match self.shown.status {
            Status::Unreachable | Status::PollFailed => {
                match (&self.polls.reachability, self.polls.next) {
                    (Reachability::Failed(_), Polling::Due(at)) => Some(at),
                    (Reachability::Failed(_), Polling::UnderWay(_)) => None,
                    _ => self.trees.attempt.until(),
                }
            }
            Status::Paused => return self.paused(now.wall).map(|pause| pause.until),
            Status::ProvisionFailed => self.provisioning.failing.until(),
            Status::Synced | Status::PartlySynced | Status::TriggerFailed => None,
            _ => held_until().or_else(next_call),
        };
        let left = elapsed?.saturating_sub(now.elapsed);
        Some(after(now.wall, left))
    }
}

/// Returns `time` plus `left`.
fn after(time: Time, left: Duration) -> Time {
    let nanoseconds = u64::from(time.nanoseconds) + u64::from(left.subsec_nanos());
    let seconds = left.as_secs().saturating_add(nanoseconds / 1_000_000_000);
    Time {
        seconds: time.seconds.saturating_add(i64::try_from(seconds).unwrap_or(i64::MAX)),
        nanoseconds: u32::try_from(nanoseconds % 1_000_000_000).unwrap_or_default(),
    }
}
