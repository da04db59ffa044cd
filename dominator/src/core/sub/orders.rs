//! The orders of operators about one machine: pauses, forced and fast updates, retries, approval of
//! unsafe updates; and the default image.
// tidy: core

use core::time::Duration;
use std::sync::Arc;

use api::dominator::Status;
use api::dominator::orders::{DefaultImage, UpdatePause, WatchSubReply};
use api::dominator::rollback::Rollback;
use api::planning::Planned;
use api::subd::SubVersion;
use model::display::utc;
use model::image::ImageName;
use model::object::ObjectId;
use model::tree::Time;

use super::polls::Reachability;
use super::{Check, Effect, Failure, Now, RequestId, Sub, SubOrder, View, stop};
use crate::core::required_image;

/// The interval in which the time of day is read during a pause, because the clock may be set.
const CLOCK_INTERVAL: Duration = Duration::from_secs(60);

/// The progress of an ordered fast update.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FastUpdate {
    /// The machine must scan.
    Wanted,
    /// The scan was requested and has not ended.
    Scanning,
    /// The scan has ended: a report of this version, or a later one, contains its result.
    Scanned(SubVersion),
    /// The result of the scan is known. The update comes before those of other machines.
    Known,
}

/// The orders about one machine that are in force.
#[derive(Clone, Debug, Default)]
pub(super) struct Orders {
    pause: Option<Arc<UpdatePause>>,
    /// True if the pause was in force in this step.
    is_paused: bool,
    /// The image of machines whose record names none.
    pub(super) default: Option<Arc<DefaultImage>>,
    pub(super) rollback: Option<Arc<Rollback>>,
    /// The plan to carry out even if the machine does not allow disruptive updates.
    pub(super) forced_plan: Option<ObjectId>,
    /// True if the triggers that failed are to be run again.
    pub(super) retry_triggers: bool,
    fast_update: Option<FastUpdate>,
    /// The request for a scan that has no answer yet; there is at most one.
    scan: Option<RequestId>,
    /// Counts the changes of [`Sub::watch_reply`].
    watch_version: u64,
    /// Its `is_current` when it was last counted.
    was_current: bool,
}

impl Orders {
    pub(super) fn new(watch_version: u64) -> Self {
        Self { watch_version, ..Self::default() }
    }
}

impl Sub {
    /// Takes an order. Returns true if it has an effect.
    pub(super) fn take_order(&mut self, order: SubOrder) -> bool {
        match order {
            SubOrder::ClearSafety => self.clear_safety(),
            SubOrder::Retry => self.retry(),
            SubOrder::ForceDisruptive => self.force_disruptive(),
            SubOrder::GoOn => self.go_on(),
            SubOrder::SetLimits(limits) => self.set_limits(limits),
            SubOrder::FastUpdate => {
                self.fast_update();
                true
            }
            SubOrder::WantTaskOrders(wanted) => {
                self.want_task_orders(wanted);
                true
            }
            SubOrder::SetInactive(parts) => {
                self.set_inactive(parts);
                true
            }
            SubOrder::Pause(pause) => {
                self.orders.pause = pause;
                true
            }
        }
    }

    fn clear_safety(&mut self) -> bool {
        let Some(digest) = self.unsafe_plan().map(|planned| planned.digest) else {
            return false;
        };
        self.updates.approved_plan = Some(digest);
        self.clear_failures();
        true
    }

    pub(super) fn retry(&mut self) -> bool {
        let is_held = self.can_retry();
        self.polls.hurry();
        self.retry_undone();
        self.orders.retry_triggers = self.has_failed_triggers();
        self.clear_failures();
        is_held
    }

    /// True if something failed and waits for a retry, so that [`SubOrder::Retry`] has an effect.
    #[must_use]
    pub fn can_retry(&self) -> bool {
        self.is_undone()
            || self.updates.hold.is_some()
            || self.calls.attempt.why().is_some()
            || self.holding.is_refused()
            || self.provisioning.failing.why().is_some()
            || self.polls.is_away()
            || self.has_failed_triggers()
    }

    fn has_failed_triggers(&self) -> bool {
        self.view.as_ref().is_some_and(|view| !view.report.trigger_failures.is_empty())
    }

    /// Returns the pause that an operator ordered, if it is in force at this time.
    #[must_use]
    pub fn paused(&self, now: Time) -> Option<&Arc<UpdatePause>> {
        self.orders.pause.as_ref().filter(|pause| pause.holds(now))
    }

    /// Records whether the pause is in force now, and plans the step at its end.
    pub(super) fn check_pause(&mut self, now: Now) {
        let until = self.paused(now.wall).map(|pause| pause.until);
        self.orders.is_paused = until.is_some();
        if let Some(until) = until {
            self.wake_by(now.elapsed + between(now.wall, until).min(CLOCK_INTERVAL));
        }
    }

    /// Returns why updates are paused, if they are.
    pub(super) fn pause_text(&self) -> Option<String> {
        let pause = self.orders.pause.as_ref().filter(|_| self.orders.is_paused)?;
        let (until, who, reason) = (utc(pause.until), &pause.who, &pause.reason);
        Some(format!("updates are paused until {until} by {who}: {reason}"))
    }

    /// Returns the image of machines whose record names none.
    #[must_use]
    pub fn default_image(&self) -> Option<&DefaultImage> {
        self.orders.default.as_deref()
    }

    /// Returns the image that the machine must have.
    #[must_use]
    pub fn required(&self) -> Option<ImageName> {
        let rollback = self.orders.rollback.as_deref();
        required_image::required(&self.machine, self.default_image(), rollback)
    }

    /// Returns the rollback of the machine, if it is in force.
    #[must_use]
    pub fn rollback(&self) -> Option<&Rollback> {
        let ordinary = required_image::ordinary(&self.machine, self.default_image());
        let rollback = self.orders.rollback.as_deref()?;
        required_image::rolled_back(&ordinary?, rollback).is_some().then_some(rollback)
    }

    /// Returns the pending plan: made from the latest scan and image, not empty, and not begun.
    fn pending_plan(&self) -> Option<&Arc<Planned>> {
        let (view, planned) = (self.view.as_ref()?, self.plan.made.as_ref()?);
        let image = self.target()?;
        let is_latest = planned.key == self.plan_key(image, view);
        let is_needed = !planned.plan.is_empty() || !self.is_recorded(view, image);
        let is_begun = self.check_not_finishing_update(view).is_break()
            || self.check_not_updating(view).is_break();
        Some(planned).filter(|_| is_latest && is_needed && !is_begun)
    }

    /// True if a plan is pending, so that [`SubOrder::ForceDisruptive`] has an effect.
    #[must_use]
    pub fn has_pending_plan(&self) -> bool {
        self.pending_plan().is_some()
    }

    pub(super) fn force_disruptive(&mut self) -> bool {
        let Some(digest) = self.pending_plan().map(|planned| planned.digest) else { return false };
        self.orders.forced_plan = Some(digest);
        // It may be staged already, without force.
        self.updates.wanted = None;
        self.clear_failures();
        true
    }

    /// True if this plan is to be carried out even if the machine does not allow it.
    pub(super) fn is_forced(&self, planned: &Planned) -> bool {
        self.orders.forced_plan == Some(planned.digest)
    }

    fn fast_update(&mut self) {
        let _was_held = self.retry();
        self.trees.attempt.release();
        self.orders.fast_update = Some(FastUpdate::Wanted);
    }

    /// True while an operator waits for a fast update, which comes before all others.
    pub(super) fn is_urgent(&self) -> bool {
        self.orders.fast_update.is_some()
    }

    /// True if the status includes the result of an ordered scan.
    fn is_current(&self) -> bool {
        matches!(self.orders.fast_update, None | Some(FastUpdate::Known))
    }

    /// Stops until an ordered scan has ended.
    pub(super) fn check_ordered_scan(
        &mut self,
        view: &View,
        effects: &mut Vec<Effect>,
    ) -> Check<()> {
        match self.orders.fast_update {
            None | Some(FastUpdate::Known) => return Check::Continue(()),
            Some(FastUpdate::Wanted) if self.orders.scan.is_none() => {
                let request_id = self.next_request_id();
                self.orders.scan = Some(request_id);
                self.orders.fast_update = Some(FastUpdate::Scanning);
                effects.push(Effect::Scan(request_id, view.report.version));
            }
            Some(FastUpdate::Wanted | FastUpdate::Scanning) => {}
            Some(FastUpdate::Scanned(version)) => {
                let seen = view.report.version;
                // Another instance scans by itself before it reports anything.
                if seen.instance != version.instance || seen.generation >= version.generation {
                    self.orders.fast_update = Some(FastUpdate::Known);
                    return Check::Continue(());
                }
            }
        }
        stop(Status::Rescanning, "scanning at once, as an operator ordered")
    }

    /// Takes the answer to the request for a scan.
    pub(super) fn take_scan_answer(
        &mut self,
        request_id: RequestId,
        result: Result<SubVersion, Failure>,
    ) {
        let is_awaited = self.orders.scan.take_if(|asked| *asked == request_id).is_some();
        if is_awaited && self.orders.fast_update == Some(FastUpdate::Scanning) {
            // A sub that cannot scan at once scans continuously. Its last scan must do.
            self.orders.fast_update = Some(result.map_or(FastUpdate::Known, FastUpdate::Scanned));
        }
    }

    /// Counts a change of [`Sub::watch_reply`], and ends a fast update when it is done.
    pub(super) fn count_watch_version(&mut self, has_status_changed: bool) {
        let is_known = self.polls.reachability == Reachability::Answered && self.view.is_some();
        if is_known && !self.shown.status.is_under_way() {
            self.orders.fast_update = None;
        }
        let is_current = self.is_current();
        if has_status_changed || is_current != self.orders.was_current {
            self.orders.watch_version = self.orders.watch_version.wrapping_add(1);
        }
        self.orders.was_current = is_current;
    }

    /// Returns the reply to operators who watch the progress of an update.
    #[must_use]
    pub fn watch_reply(&self) -> WatchSubReply {
        WatchSubReply {
            hostname: self.machine.hostname.clone(),
            version: self.orders.watch_version,
            status: self.shown.status,
            detail: self.shown.detail.clone(),
            since: self.shown.since,
            is_current: self.is_current(),
        }
    }

    /// Returns a number that grows with each change of [`Sub::watch_reply`].
    #[must_use]
    pub fn watch_version(&self) -> u64 {
        self.orders.watch_version
    }
}

/// Returns the time from `now` until `then`; zero if that has passed.
fn between(now: Time, then: Time) -> Duration {
    let nanoseconds =
        |time: Time| i128::from(time.seconds) * 1_000_000_000 + i128::from(time.nanoseconds);
    let left = (nanoseconds(then) - nanoseconds(now)).max(0);
    // A pause ends exactly at its end, so nanoseconds are not rounded.
    u64::try_from(left).map_or(Duration::MAX, Duration::from_nanos)
}
