//! The update and the fetch that are wanted: how they end, what is held back after a failure, and
//! what is put on record.
// tidy: core

use core::mem::{Discriminant, discriminant};
use core::ops::ControlFlow::{Break, Continue};
use core::time::Duration;
use std::sync::Arc;

use api::dominator::Status;
use api::planning::{PlanKey, Planned};
use api::subd::{Activity, FetchFailure, Outcome};
use model::backoff::{doubled, jittered};
use model::image::required::RequiredImage;
use model::object::ObjectId;
use model::tree::Tree;
use model::words::size;

use super::missing_objects::Missing;
use super::next_effects::{Check, paths_within};
use super::{Context, Effect, ImageState, Now, Sub, View};
use crate::core::changes::Ordered;
use crate::core::timing::{HELD_PAUSE, HOLD_FIRST, HOLD_LONGEST};

/// How long the paths are together that `not-converging` names, in bytes: the rest of the sentence
/// has room beside them.
const NOT_CONVERGING_BYTES: usize = 800;

/// The update that is wanted, under the id by which the sub knows it.
#[derive(Clone, Copy, Debug)]
pub(super) struct WantedUpdate {
    pub(super) id: u64,
    pub(super) key: PlanKey,
    pub(super) instance: u64,
    pub(super) plan: ObjectId,
}

/// A fetch that is wanted or was ordered, under the id by which the sub knows it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fetching {
    pub(super) id: u64,
    pub(super) plan: ObjectId,
    pub(super) missing: usize,
}

/// Something failed: do not try the same again before the time has come.
#[derive(Clone, Debug)]
pub(super) struct Hold {
    pub(super) status: Status,
    detail: String,
    image: ObjectId,
    /// The plan that failed, if another plan may be tried at once.
    plan: Option<ObjectId>,
    /// The scan that it failed upon: upon another it is tried again soon.
    scan: u64,
    since: Duration,
    until: Duration,
}

impl Hold {
    /// Until when nothing is tried again, if the last scan has this number.
    pub(super) fn end(&self, scan: u64) -> Duration {
        let is_firm = self.plan.is_some() || self.status == Status::Held;
        if is_firm || self.scan == scan {
            self.until
        } else {
            self.until.min(self.since + HOLD_FIRST)
        }
    }
}

/// The update that was ordered last, of which the end is to be told.
#[derive(Clone, Copy, Debug)]
pub(super) struct Awaited {
    id: u64,
    /// What was told of it.
    told: Option<Discriminant<Outcome>>,
}

/// The updates of one machine.
#[derive(Debug, Default)]
pub(super) struct Updates {
    pub(super) wanted: Option<WantedUpdate>,
    /// The update whose last Commit was not sent: what was staged for it may go without harm.
    pub(super) unsent: Option<u64>,
    /// The plan that was carried out last.
    pub(super) done: Option<ObjectId>,
    /// What failed, and is not tried again yet.
    pub(super) hold: Option<Hold>,
    /// How often updates or fetches failed since the machine last equalled its image.
    pub(super) failures: u32,
    /// The unsafe plan that an operator lets pass.
    pub(super) cleared: Option<ObjectId>,
    /// The update that failed its health check, and whose image an operator wants once more.
    pub(super) retried: Option<u64>,
    awaited: Option<Awaited>,
}

impl Sub {
    /// Nothing failed so shortly ago that it is too early to try again.
    pub(super) fn not_held(
        &mut self,
        image: &RequiredImage,
        planned: &Planned,
        now: Now,
        context: &Context<'_>,
    ) -> Check<()> {
        if self.updates.hold.is_none() && self.updates.done == Some(planned.digest) {
            self.updates.done = None;
            let detail = format!(
                "the update was carried out, and the same is to be done again: {}; does something \
                 on the machine undo it?",
                paths_within(&planned.plan, NOT_CONVERGING_BYTES)
            );
            self.hold_back(now, context, Status::NotConverging, detail);
        }
        let Some(hold) = &self.updates.hold else { return Continue(()) };
        let is_same =
            hold.image == image.digest && hold.plan.is_none_or(|failed| failed == planned.digest);
        let until = hold.end(planned.key.scan);
        if is_same && now.elapsed < until {
            let verdict = (hold.status, format!("{}; will be tried again", hold.detail));
            self.wake_by(until);
            return Break(verdict);
        }
        (self.updates.hold, self.updates.done) = (None, None);
        Continue(())
    }

    /// Records how the wanted update ended.
    pub(super) fn record_update_end(&mut self, now: Now, context: &Context<'_>) {
        let Some(update) = self.updates.wanted else { return };
        let Some(view) = &self.view else { return };
        let Some(last) = view.outcome_of(update.id) else { return };
        let outcome = last.outcome.clone();
        self.end_force(update, &outcome);
        let (status, detail) = match &outcome {
            Outcome::Done => {
                self.updates.done = Some(update.plan);
                self.updates.wanted = None;
                return;
            }
            // What is staged does not stay so for the whole of a pause: that is no failure.
            Outcome::NotPrepared(_)
                if self.brake.is_some()
                    || self.updates.unsent == Some(update.id)
                    || self.pause_in_words().is_some()
                    || !self.claims.is_granted() =>
            {
                self.updates.wanted = None;
                return;
            }
            Outcome::NotPrepared(why) => (Status::UpdateFailed, format!("not prepared: {why}")),
            Outcome::RolledBack(why) => {
                (Status::UpdateFailed, format!("failed, and was put back: {why}"))
            }
            Outcome::Stuck(why) => {
                (Status::UpdateStuck, format!("failed, and could not be put back: {why}"))
            }
            // The report itself says so, over restarts, until another update.
            Outcome::Undone(_) => {
                self.updates.wanted = None;
                return;
            }
        };
        self.updates.wanted = None;
        self.hold_back(now, context, status, format!("the update {detail}"));
    }

    /// Records how the wanted fetch ended.
    pub(super) fn record_fetch_end(&mut self, now: Now, context: &Context<'_>) {
        let Some(fetch) = self.fetch else { return };
        let Some(view) = &self.view else { return };
        let activity = &view.report.activity;
        if matches!(activity, Activity::Fetching { fetch_id, .. } if *fetch_id == fetch.id) {
            return;
        }
        let Some(last) = view.fetch_of(fetch.id) else { return };
        let (status, detail) = match &last.error {
            None => {
                let planned =
                    self.plan.made.as_ref().filter(|planned| planned.digest == fetch.plan);
                let missing = planned.map_or(0, |planned| Missing::of(planned, view).count);
                self.fetch = None;
                if missing < fetch.missing {
                    return;
                }
                (Status::FetchFailed, "it fetched, and has no more objects than before".to_owned())
            }
            Some(FetchFailure::InsufficientSpace { need_bytes, free_bytes }) => (
                Status::InsufficientSpace,
                format!("the objects need {}, {} are free", size(*need_bytes), size(*free_bytes)),
            ),
            Some(FetchFailure::Sources(why)) => {
                (Status::FetchFailed, format!("no source gave all objects: {why}"))
            }
            // It was not ordered so; but if it says so it is asked again.
            Some(FetchFailure::GaveWay) => {
                self.fetch = None;
                return;
            }
            Some(FetchFailure::Local(why)) => {
                (Status::FetchFailed, format!("the object cache cannot be written: {why}"))
            }
        };
        self.fetch = None;
        self.hold_back(now, context, status, detail);
    }

    /// Tries nothing more for a while, that grows with each time.
    pub(super) fn hold_back(
        &mut self,
        now: Now,
        context: &Context<'_>,
        status: Status,
        detail: String,
    ) {
        let ImageState::Ready(image) = &self.image else { return };
        let pause = if status == Status::Held {
            HELD_PAUSE
        } else {
            self.updates.failures += 1;
            doubled(HOLD_FIRST, HOLD_LONGEST, self.updates.failures)
        };
        self.updates.hold = Some(Hold {
            status,
            detail,
            image: image.digest,
            plan: match status {
                Status::NotConverging => self.plan.made.as_ref().map(|planned| planned.digest),
                _ => None,
            },
            scan: self.scans,
            since: now.elapsed,
            until: now.elapsed + jittered(pause, context.jitter),
        });
    }

    /// True if the Commit of this update, which was put on record meanwhile, is still to be sent:
    /// it is staged on the machine that is meant, and made from the scan, the image and the record
    /// of the machine that are the latest.
    #[must_use]
    pub fn still_orders(&self, update_id: u64) -> bool {
        let (Some(update), Some(view)) = (self.updates.wanted, &self.view) else { return false };
        let is_latest = self.image.digest() == Some(update.key.image)
            && update.key.scan == view.scan_number
            && update.instance == view.report.version.instance;
        let is_staged = matches!(
            view.report.activity,
            Activity::Prepared { update_id: staged } if staged == update_id
        );
        update.id == update_id
            && is_latest
            && is_staged
            && self.identity.is_good()
            && !self.machine.disable_updates
            && view.report.paused.is_none()
    }

    /// Remembers that this update was ordered before the dominator was restarted: how it ended is
    /// still to be told.
    pub fn recall(&mut self, update_id: u64) {
        self.updates.awaited = Some(Awaited { id: update_id, told: None });
    }

    /// The Commit of this update is over, and may have been carried out: how it ends is to be told.
    pub(super) fn await_end(&mut self, update_id: u64) {
        if self.updates.awaited.is_none_or(|awaited| awaited.id != update_id) {
            self.recall(update_id);
        }
    }

    /// What is put on record of an update that is about to be ordered.
    pub(super) fn ordered(
        &self,
        update_id: u64,
        view: &View,
        image: &Arc<RequiredImage>,
        planned: &Arc<Planned>,
    ) -> Ordered {
        // There is a plan, so its tree was read; without it all would count as new.
        let tree = self.trees.tree.clone().unwrap_or_else(|| Tree::empty(image.tree.algorithm()));
        Ordered {
            update_id,
            former: view.report.last_image.clone(),
            image: Arc::clone(image),
            tree,
            planned: Arc::clone(planned),
        }
    }

    /// Reports how the last ordered update ended, when the sub says so.
    pub(super) fn tell_end(&mut self, effects: &mut Vec<Effect>) {
        let (Some(awaited), Some(view)) = (&mut self.updates.awaited, &self.view) else { return };
        let Some(last) = view.outcome_of(awaited.id) else { return };
        let outcome = discriminant(&last.outcome);
        if awaited.told != Some(outcome) {
            awaited.told = Some(outcome);
            effects.push(Effect::UpdateEnded(awaited.id, last.outcome.clone()));
        }
    }
}
