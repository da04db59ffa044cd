//! The wanted update and the wanted fetch: how they end, and how long updates are held after a
//! failure.
// tidy: core

use core::mem::{Discriminant, discriminant};
use core::ops::ControlFlow::{Break, Continue};
use core::time::Duration;
use std::sync::Arc;

use api::dominator::Status;
use api::planning::{PlanKey, Planned};
use api::subd::{Activity, FetchFailure, TriggerFailure, UpdateOutcome};
use model::backoff::{doubled, jittered};
use model::display::size;
use model::image::required::RequiredImage;
use model::object::ObjectId;
use model::tree::Tree;

use super::Check;
use super::plans::{Missing, paths_within};
use super::{Effect, Step, Sub, View};
use crate::core::changes::OrderedUpdate;
use crate::core::timing::{HELD_PAUSE, HOLD_FIRST, HOLD_LONGEST};

/// The length of all paths that the detail of `not-converging` lists, in bytes: leaves room for the
/// rest of the detail.
const PATHS_BYTES_MAX: usize = 800;

/// The wanted update, with the id that the sub knows.
#[derive(Clone, Copy, Debug)]
pub(super) struct WantedUpdate {
    pub(super) id: u64,
    pub(super) key: PlanKey,
    pub(super) instance: u64,
    pub(super) plan: ObjectId,
}

/// A wanted or ordered fetch, with the id that the sub knows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fetching {
    pub(super) id: u64,
    pub(super) plan: ObjectId,
    /// The number of objects that were missing.
    pub(super) missing: usize,
}

/// Holds updates after a failure until it is time to try again.
#[derive(Clone, Debug)]
pub(super) struct Hold {
    pub(super) status: Status,
    detail: String,
    image: ObjectId,
    /// The plan that failed, if another plan may be tried at once.
    plan: Option<ObjectId>,
    /// The scan that the failed update was made from. With another scan it is tried again sooner.
    scan: u64,
    since: Duration,
    until: Duration,
}

impl Hold {
    /// Returns the end of the hold if the last scan has this number.
    pub(super) fn end(&self, scan: u64) -> Duration {
        let ignores_scans = self.plan.is_some() || self.status == Status::Held;
        if ignores_scans || self.scan == scan {
            self.until
        } else {
            self.until.min(self.since + HOLD_FIRST)
        }
    }
}

/// The update that was ordered last, whose end must be reported.
#[derive(Clone, Copy, Debug)]
struct AwaitedUpdate {
    id: u64,
    /// The outcome that was reported last.
    reported: Option<Discriminant<UpdateOutcome>>,
}

/// The updates of one machine.
#[derive(Debug, Default)]
pub(super) struct Updates {
    pub(super) wanted: Option<WantedUpdate>,
    /// The update whose last Commit was not sent: if it expires on the sub, that is no failure.
    pub(super) unsent: Option<u64>,
    /// The plan that was carried out last.
    pub(super) done: Option<ObjectId>,
    pub(super) hold: Option<Box<Hold>>,
    /// How many updates and fetches failed since the machine last equalled its image.
    pub(super) failures: u32,
    /// The unsafe plan that an operator has approved.
    pub(super) approved_plan: Option<ObjectId>,
    awaited: Option<AwaitedUpdate>,
}

impl Updates {
    /// Forgets the last update and its failures, because the machine equals its image.
    pub(super) fn reset(&mut self) {
        (self.hold, self.failures) = (None, 0);
        (self.wanted, self.done, self.approved_plan) = (None, None, None);
    }
}

impl Sub {
    /// Holds updates if the last one made the changes of `planned`, and they are needed again.
    pub(super) fn hold_if_repeated(&mut self, planned: &Planned, step: &Step<'_>) {
        if self.updates.hold.is_none() && self.updates.done == Some(planned.digest) {
            self.updates.done = None;
            let detail = format!(
                "the update was carried out, and the same changes are needed again: {}; does \
                 something on the machine undo it?",
                paths_within(&planned.plan, PATHS_BYTES_MAX)
            );
            self.hold_updates(Status::NotConverging, detail, step);
        }
    }

    /// Stops while updates are held after a failure.
    pub(super) fn check_hold(
        &mut self,
        image: &RequiredImage,
        planned: &Planned,
        step: &Step<'_>,
    ) -> Check<()> {
        self.hold_if_repeated(planned, step);
        let Some(hold) = &self.updates.hold else { return Continue(()) };
        let is_same =
            hold.image == image.digest && hold.plan.is_none_or(|failed| failed == planned.digest);
        let until = hold.end(planned.key.scan);
        if is_same && step.now.elapsed < until {
            let status = (hold.status, format!("{}; will be tried again", hold.detail));
            self.wake_by(until);
            return Break(status);
        }
        (self.updates.hold, self.updates.done) = (None, None);
        Continue(())
    }

    /// Records how the wanted update ended.
    pub(super) fn record_update_end(&mut self, step: &Step<'_>) {
        let Some(update) = self.updates.wanted else { return };
        let Some(view) = &self.view else { return };
        let Some(last) = view.outcome_of(update.id) else { return };
        let outcome = last.outcome.clone();
        self.updates.wanted = None;
        // An update that was not even staged may still be forced.
        if !matches!(outcome, UpdateOutcome::NotPrepared(_)) {
            self.orders.forced_plan.take_if(|forced| *forced == update.plan);
        }
        let (status, detail) = match &outcome {
            UpdateOutcome::Done => {
                self.updates.done = Some(update.plan);
                return;
            }
            // A staged update may expire while updates are disabled or paused. That is no failure.
            UpdateOutcome::NotPrepared(_)
                if self.brake.is_some()
                    || self.updates.unsent == Some(update.id)
                    || self.pause_text().is_some()
                    || !self.claims.is_granted() =>
            {
                return;
            }
            UpdateOutcome::NotPrepared(why) => {
                (Status::UpdateFailed, format!("not prepared: {why}"))
            }
            UpdateOutcome::RolledBack(why) => {
                (Status::UpdateFailed, format!("failed, and was rolled back: {why}"))
            }
            UpdateOutcome::Stuck(why) => {
                (Status::UpdateStuck, format!("failed, and could not be rolled back: {why}"))
            }
            // The sub reports this until its next update, also after restarts.
            UpdateOutcome::Undone(_) => return,
        };
        self.hold_updates(status, format!("the update {detail}"), step);
    }

    /// Records how the wanted fetch ended.
    pub(super) fn record_fetch_end(&mut self, step: &Step<'_>) {
        let Some(fetch) = self.fetch else { return };
        let Some(view) = &self.view else { return };
        let activity = &view.report.activity;
        if matches!(activity, Activity::Fetching { fetch_id, .. } if *fetch_id == fetch.id) {
            return;
        }
        let Some(last) = view.fetch_of(fetch.id) else { return };
        self.fetch = None;
        let (status, detail) = match &last.error {
            None => {
                let planned =
                    self.plan.made.as_ref().filter(|planned| planned.digest == fetch.plan);
                let missing = planned.map_or(0, |planned| Missing::of(planned, view).count);
                if missing < fetch.missing {
                    return;
                }
                (Status::FetchFailed, "the fetch brought no missing objects".to_owned())
            }
            Some(FetchFailure::InsufficientSpace { need_bytes, free_bytes }) => (
                Status::InsufficientSpace,
                format!("the objects need {}, {} are free", size(*need_bytes), size(*free_bytes)),
            ),
            Some(FetchFailure::Sources(why)) => {
                (Status::FetchFailed, format!("no source gave all objects: {why}"))
            }
            // The fetch was not ordered as a prefetch, but if it gave way it is ordered again.
            Some(FetchFailure::GaveWay) => return,
            Some(FetchFailure::Local(why)) => {
                (Status::FetchFailed, format!("the object cache cannot be written: {why}"))
            }
        };
        self.hold_updates(status, detail, step);
    }

    /// Holds updates for a while, which grows with each failure.
    pub(super) fn hold_updates(&mut self, status: Status, detail: String, step: &Step<'_>) {
        let Some(image) = self.target().map(|image| image.digest) else { return };
        let pause = if status == Status::Held {
            HELD_PAUSE
        } else {
            self.updates.failures += 1;
            doubled(HOLD_FIRST, HOLD_LONGEST, self.updates.failures)
        };
        self.updates.hold = Some(Box::new(Hold {
            status,
            detail,
            image,
            plan: match status {
                Status::NotConverging => self.plan.made.as_ref().map(|planned| planned.digest),
                _ => None,
            },
            scan: self.scans,
            since: step.now.elapsed,
            until: step.now.elapsed + jittered(pause, step.context.jitter),
        }));
    }

    /// True if the Commit of this update, which has been recorded, is still to be sent: it is
    /// staged on the right machine, and was made from its latest scan, image, computed files and
    /// record.
    #[must_use]
    pub fn is_commit_wanted(&self, update_id: u64) -> bool {
        let (Some(update), Some(view)) = (self.updates.wanted, &self.view) else { return false };
        let is_latest = self.target().is_some_and(|image| {
            self.plan_key(image, view) == update.key && self.is_provisioned(view, image)
        }) && update.instance == view.report.version.instance;
        let is_staged = matches!(
            view.report.activity,
            Activity::Prepared { update_id: staged } if staged == update_id
        );
        update.id == update_id
            && is_latest
            && is_staged
            && self.identity.is_verified()
            && !self.machine.disable_updates
            && view.report.paused.is_none()
    }

    /// Reports the end of this update, which was ordered before the dominator was restarted.
    pub fn await_update_end(&mut self, update_id: u64) {
        self.updates.awaited = Some(AwaitedUpdate { id: update_id, reported: None });
    }

    /// Reports the end of this update, whose Commit may have been carried out.
    pub(super) fn await_end(&mut self, update_id: u64) {
        if self.updates.awaited.is_none_or(|awaited| awaited.id != update_id) {
            self.await_update_end(update_id);
        }
    }

    /// Returns what is recorded of an update that is about to be ordered.
    pub(super) fn ordered_update(
        &self,
        update_id: u64,
        view: &View,
        image: &Arc<RequiredImage>,
        planned: &Arc<Planned>,
    ) -> OrderedUpdate {
        // There is a plan, so its tree was read. With an empty tree all paths would count as new.
        let tree = self.trees.tree().unwrap_or_else(|| Tree::empty(image.tree.algorithm()));
        OrderedUpdate {
            update_id,
            former: view.report.last_image.clone(),
            image: Arc::clone(image),
            tree,
            planned: Arc::clone(planned),
        }
    }

    /// Reports how the last ordered update ended, when the sub has reported it.
    pub(super) fn report_update_end(&mut self, effects: &mut Vec<Effect>) {
        let (Some(awaited), Some(view)) = (&mut self.updates.awaited, &self.view) else { return };
        let Some(last) = view.outcome_of(awaited.id) else { return };
        let outcome = discriminant(&last.outcome);
        if awaited.reported != Some(outcome) {
            awaited.reported = Some(outcome);
            let triggers = TriggerFailure::describe_all(&last.trigger_failures);
            effects.push(Effect::UpdateEnded(awaited.id, last.outcome.clone(), triggers));
        }
    }
}
