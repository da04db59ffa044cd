//! Decides the next status and effects from all that is known of a sub.
//!
//! The checks follow the life of an update: reach the sub, know its image, have it scan the right
//! paths, know its tree, have a plan; then fetch, prepare, commit, clean up. The first check that
//! does not continue gives the status and, if nothing is under way, the effect of the next step.
// tidy: core

use core::ops::ControlFlow::{Break, Continue};
use core::time::Duration;
use std::fmt::Write as _;
use std::sync::Arc;

use api::dominator::Status;
use api::dominator::text::rollback_text;
use api::object_server::IDS_MAX;
use api::planning::Planned;
use api::subd::{
    Activity, Alarm, CleanupRequest, ExpectedState, FetchRequest, PrepareRequest, ScanReport,
    SetConfigurationRequest, TriggerFailure, UNREADABLE_MAX, UpdateOutcome,
};
use model::image::required::RequiredImage;

use super::calls::CallPurpose;
use super::plans::{Missing, describe};
use super::polls::Reachability;
use super::target::Leaving;
use super::updates::{Fetching, WantedUpdate};
use super::{Call, Effect, Failure, FailureKind, ImageState, Now, Step, Sub, View};
use super::{Check, StatusAndDetail, stop};

/// How long a staged update waits for its Commit.
const EXPIRES_SECONDS: u32 = 300;

/// How long a rebooting machine may give no answer before its status is `unreachable`.
const REBOOT_LONGEST: Duration = Duration::from_secs(900);

/// Stops if nothing can be changed on the machine.
fn check_writable(view: &View) -> Check<()> {
    if view.report.alarms.contains(&Alarm::ReadOnly) {
        return stop(Status::UpdateFailed, "its root is mounted read-only: nothing can be changed");
    }
    Continue(())
}

/// Says which paths the machine cannot read, or no image can have.
fn left_alone(view: &View) -> Option<String> {
    let unreadable = &view.scan.as_ref()?.unreadable;
    let (path, why) = unreadable.first()?;
    let count = match unreadable.len() {
        UNREADABLE_MAX => format!("{UNREADABLE_MAX} paths or more are"),
        1 => "1 path is".to_owned(),
        count => format!("{count} paths are"),
    };
    Some(format!("{count} left alone: {path}: {why}"))
}

/// Says that the health check of the image was not run.
fn unchecked_health(view: &View, image: &RequiredImage) -> Option<String> {
    image.content.health_check.as_ref()?;
    let last = view.report.last_update.as_ref()?;
    let is_unchecked = last.outcome == UpdateOutcome::Done && last.health.is_none();
    let is_of_image = last.image == *image.name();
    (is_unchecked && is_of_image).then(|| "health not checked: root is not /".to_owned())
}

/// Says that an update only makes room.
fn making_room((status, detail): StatusAndDetail) -> StatusAndDetail {
    (status, format!("making room: {detail}"))
}

impl Sub {
    pub(super) fn next_effects(&mut self, step: &mut Step<'_>) {
        self.wake = None;
        self.report_update_end(&mut step.effects);
        self.check_pause(step.now);
        self.poll_if_due(step);
        self.look_at_tasks(step);
        let status = match (&self.polls.reachability, self.view.take()) {
            (Reachability::Failed(failure), view) => {
                let failure = failure.clone();
                self.view = view;
                self.report_lost(&mut step.effects);
                self.status_of_failed_poll(failure, step.now)
            }
            // There was no reply yet, or a full report is requested again.
            (Reachability::Unknown | Reachability::Answered, None) => {
                (self.shown.status, self.shown.detail.clone())
            }
            (Reachability::Unknown | Reachability::Answered, Some(view)) => {
                let (Break(status) | Continue(status)) = self.check_all(&view, step);
                self.view = Some(view);
                status
            }
        };
        self.set_status(status, step);
        self.settle_claims(self.shown.status, step);
        self.report_content(self.shown.status, &mut step.effects);
    }

    fn status_of_failed_poll(&self, failure: Failure, now: Now) -> StatusAndDetail {
        if failure.kind != FailureKind::Unreachable {
            return (Status::PollFailed, failure.text);
        }
        let unanswered = now.elapsed.saturating_sub(self.polls.answered);
        let is_rebooting = self.view.as_ref().is_some_and(View::is_rebooting);
        if is_rebooting && unanswered < REBOOT_LONGEST {
            return (Status::Rebooting, format!("rebooting; no answer yet: {}", failure.text));
        }
        (Status::Unreachable, failure.text)
    }

    fn check_all(&mut self, view: &View, step: &mut Step<'_>) -> Check<StatusAndDetail> {
        self.check_identity(view, &mut step.effects)?;
        self.sync_tasks(view, step);
        self.note_undone(view);
        self.check_not_finishing_update(view)?;
        self.check_not_updating(view)?;
        self.check_holder(step.now)?;
        self.check_ordered_scan(view, &mut step.effects)?;
        self.sync_limits(view, step);
        let image = match &self.image {
            ImageState::Undefined => match self.emptied(view) {
                Some(nothing) => nothing,
                None => {
                    self.leaving = Leaving::default();
                    let why = "the machine database names no image for it";
                    return stop(Status::ImageUndefined, why);
                }
            },
            ImageState::Missing(why) => return stop(Status::ImageNotReady, &**why),
            ImageState::Ready(image) => Arc::clone(image),
        };
        self.bring_to_target(view, &image, step)
    }

    /// Brings the machine to `image` and keeps it there.
    pub(super) fn bring_to(
        &mut self,
        view: &View,
        image: &Arc<RequiredImage>,
        step: &mut Step<'_>,
    ) -> Check<StatusAndDetail> {
        let scan = self.check_scan(view, image, step)?;
        let planned = self.check_plan(view, image, &scan, step)?;
        let needs_no_update = self.is_recorded(view, image) || self.are_updates_prevented(view);
        if planned.plan.is_empty() && needs_no_update {
            return self.finish_synced(view, image, step);
        }
        if planned.plan.operations.is_empty() && self.is_recorded(view, image) {
            let (status, mut detail) = self.finish_partly_synced(image, &planned.plan.blocked);
            if let Some(failed) = self.failed_triggers(view, step) {
                write!(detail, "; {failed}").expect("writing to a String cannot fail");
            }
            return Continue((status, detail));
        }
        self.check_blocked(view, image, &planned, step)?;
        self.check_allowed(&planned)?;
        self.check_hold(image, &planned, step)?;
        check_writable(view)?;
        if let Some((former, room)) = self.check_room(view, image, &scan, &planned, step)? {
            self.check_signatures(view, &former, step)?;
            return self.carry_out(view, &former, &scan, &room, step).map_break(making_room);
        }
        self.check_objects(view, image, &planned, step)?;
        self.check_content(view, &planned, step)?;
        self.check_signatures(view, image, step)?;
        self.carry_out(view, image, &scan, &planned, step)
    }

    /// True if the sub has recorded that it has this image. A sub that has the same tree from
    /// another image gets an update without changes, which brings it the triggers of this one.
    pub(super) fn is_recorded(&self, view: &View, image: &RequiredImage) -> bool {
        view.report.last_image.as_ref() == Some(image.name())
    }

    pub(super) fn are_updates_prevented(&self, view: &View) -> bool {
        self.brake.is_some()
            || self.history_error.is_some()
            || self.machine.disable_updates
            || self.pause_text().is_some()
            || view.report.paused.is_some()
    }

    /// Stops while the sub must finish or roll back its last update. It does so by itself and
    /// refuses other calls meanwhile.
    pub(super) fn check_not_finishing_update(&self, view: &View) -> Check<()> {
        if let Some(why) = view.stuck() {
            let detail = format!(
                "the update cannot be closed: {why}; subd tries again, and \
                 the update continues when the cause is repaired"
            );
            return stop(Status::UpdateStuck, detail);
        }
        if view.is_rebooting() {
            return stop(Status::Rebooting, "waiting for the reboot of the update");
        }
        Continue(())
    }

    pub(super) fn check_not_updating(&self, view: &View) -> Check<()> {
        if matches!(view.report.activity, Activity::Updating { .. }) {
            return stop(Status::Updating, "carrying out the update and its triggers");
        }
        if self.calls.has_commit() {
            return stop(Status::Updating, "the update was ordered");
        }
        Continue(())
    }

    /// Continues with a complete scan in the scope of the image, made after the last update.
    fn check_scan(
        &mut self,
        view: &View,
        image: &RequiredImage,
        step: &mut Step<'_>,
    ) -> Check<Arc<ScanReport>> {
        let scope = self.known_scope(image, view).scope;
        if view.report.scope != scope {
            let scan = Some(image.scan.clone());
            let call = Call::SetConfiguration(SetConfigurationRequest { scan, limits: None });
            self.call(CallPurpose::Scan(scope), call, step);
            let detail = format!("setting the scan filter of {}", image.name());
            return self.stop_waiting(Status::Rescanning, detail);
        }
        let Some(scan) = &view.scan else {
            return stop(Status::Rescanning, "waiting for the first complete scan");
        };
        if view.is_unverified() {
            return stop(Status::Rescanning, "scanning what the update changed");
        }
        Continue(Arc::clone(scan))
    }

    /// Handles that the machine equals its image: prefetches the next image, and cleans up the
    /// cache.
    fn finish_synced(
        &mut self,
        view: &View,
        image: &RequiredImage,
        step: &mut Step<'_>,
    ) -> Check<StatusAndDetail> {
        self.updates.reset();
        self.blocked.forget_former();
        self.fetch = None;
        self.report_synced(&mut step.effects);
        self.orders.forced_plan = None;
        let prefetch = self.prefetch_next(view, image, step);
        self.clean_up_cache(view, image, step);
        self.computed.is_in_sync = self.image.digest() == Some(image.digest);
        let mut detail = format!("equals {}", image.name());
        if let Some(failed) = self.failed_triggers(view, step) {
            write!(detail, ", but {failed}").expect("writing to a String cannot fail");
            return Continue((Status::TriggerFailed, detail));
        }
        let left_out = image.left_out.iter().map(ToString::to_string);
        let more = left_out.chain(unchecked_health(view, image)).chain(left_alone(view));
        let rollback = self.rollback().map(rollback_text);
        let held = self.computed.held.clone();
        for more in more.chain(held).chain(prefetch).chain(rollback).chain(self.pause_text()) {
            write!(detail, "; {more}").expect("writing to a String cannot fail");
        }
        Continue((Status::Synced, detail))
    }

    /// Has the machine run the triggers again that failed, if an operator ordered that. Describes
    /// them, if there are some.
    fn failed_triggers(&mut self, view: &View, step: &mut Step<'_>) -> Option<String> {
        let failures = &view.report.trigger_failures;
        if failures.is_empty() {
            self.orders.retry_triggers = false;
            return None;
        }
        let next = match (self.orders.retry_triggers, self.are_updates_prevented(view)) {
            (false, _) => format!("to run them again: domtool retry {}", self.machine.hostname),
            (true, true) => "they are run again when updates are not held back".to_owned(),
            (true, false) => {
                self.call(CallPurpose::RetryTriggers, Call::RetryTriggers, step);
                match self.calls.attempt.why() {
                    Some(why) => format!("they cannot be run again: {why}"),
                    None => "running them again".to_owned(),
                }
            }
        };
        Some(format!("{}; {next}", TriggerFailure::describe_all(failures)))
    }

    /// Removes from the cache what the next image does not need.
    fn clean_up_cache(&mut self, view: &View, image: &RequiredImage, step: &mut Step<'_>) {
        let generation = view.report.version.generation;
        if self.cleaned_generation == Some(generation)
            || self.awaits_resources(view)
            || !matches!(view.report.activity, Activity::Idle)
        {
            return;
        }
        let Some(needed) = self.prefetch.needed_objects(image, |next| self.plan_key(next, view))
        else {
            return;
        };
        let unneeded = view.cache.iter().filter(|object| !needed.contains(object));
        let objects: Vec<_> = unneeded.take(IDS_MAX).collect();
        if !objects.is_empty() {
            let call = Call::Cleanup(CleanupRequest { objects });
            if self.call(CallPurpose::Cleanup, call, step) {
                self.cleaned_generation = Some(generation);
            }
        }
    }

    /// Stops if the plan is unsafe, or if updates of the machine are disabled.
    fn check_allowed(&self, planned: &Planned) -> Check<()> {
        if self.machine.disable_updates {
            let detail =
                format!("{}; the machine database says DisableUpdates", describe(&planned.plan));
            return stop(Status::UpdatesDisabled, detail);
        }
        if !planned.dangers.is_empty() && self.updates.approved_plan != Some(planned.digest) {
            let detail = format!(
                "{}; if that is intended: domtool clear-safety-shutoff {}",
                planned.dangers.join(", "),
                self.machine.hostname
            );
            return stop(Status::UnsafeUpdate, detail);
        }
        Continue(())
    }

    /// Continues if all objects that the plan needs are in the cache; else fetches them.
    fn check_objects(
        &mut self,
        view: &View,
        image: &RequiredImage,
        planned: &Planned,
        step: &mut Step<'_>,
    ) -> Check<()> {
        let missing = Missing::of(planned, view);
        if missing.count == 0 {
            return Continue(());
        }
        let wanted = missing.describe();
        match view.report.activity {
            // The sub ends a prefetch when it gets another fetch.
            Activity::Fetching { .. } if self.prefetch.is_fetching(&view.report.activity) => {}
            Activity::Fetching { .. } => {
                let detail = format!("fetching; {wanted} left");
                return self.stop_unless_disabled(Status::Fetching, detail);
            }
            Activity::Preparing { .. } | Activity::Updating { .. } => {
                return stop(Status::Preparing, "still staging another update");
            }
            Activity::Idle | Activity::Prepared { .. } => {}
        }
        if let Some(shortage) = missing.shortage(view.report.space) {
            return stop(Status::InsufficientSpace, shortage);
        }
        let fetch = match self.fetch {
            Some(fetch) if fetch.plan == planned.digest => fetch,
            _ => {
                self.check_fetch_claim(view, image, planned, &missing, step)?;
                Fetching { id: self.next_id(), plan: planned.digest, missing: missing.count }
            }
        };
        self.fetch = Some(fetch);
        let sources = step.context.sources.to_vec();
        let (fetch_id, objects) = (fetch.id, missing.objects(planned, view));
        let call = Call::Fetch(FetchRequest { fetch_id, sources, objects, ahead: false });
        self.call(CallPurpose::Fetch(fetch_id), call, step);
        let detail = format!("fetching {wanted}");
        self.stop_unless_disabled(Status::Fetching, detail)
    }

    /// Returns the update that is wanted already if it has this plan; else a new one.
    fn wanted_update(&mut self, planned: &Planned, instance: u64) -> WantedUpdate {
        let (key, plan) = (planned.key, planned.digest);
        let is_same = |update: &WantedUpdate| {
            (update.key, update.instance, update.plan) == (key, instance, plan)
        };
        match self.updates.wanted.filter(is_same) {
            Some(update) => update,
            None => WantedUpdate { id: self.next_id(), key, instance, plan },
        }
    }

    /// Stages the update, and sends its Commit when it is staged.
    fn carry_out(
        &mut self,
        view: &View,
        image: &Arc<RequiredImage>,
        scan: &ScanReport,
        planned: &Arc<Planned>,
        step: &mut Step<'_>,
    ) -> Check<StatusAndDetail> {
        let instance = view.report.version.instance;
        let update = self.wanted_update(planned, instance);
        self.updates.wanted = Some(update);
        let todo = describe(&planned.plan);
        self.check_not_prevented(view, &todo)?;
        let is_prefetching = self.prefetch.is_fetching(&view.report.activity);
        let can_prepare = match view.report.activity {
            Activity::Fetching { .. } => is_prefetching,
            Activity::Preparing { update_id } => update_id == update.id,
            Activity::Updating { .. } => false,
            Activity::Idle | Activity::Prepared { .. } => true,
        };
        let is_provisioned = self.is_provisioned(view, image);
        if can_prepare && is_provisioned {
            self.check_claim(view, image, planned, step)?;
        }
        match view.report.activity {
            Activity::Fetching { .. } if !is_prefetching => {
                stop(Status::Fetching, "waiting for the end of a fetch")
            }
            Activity::Preparing { update_id } if update_id == update.id => {
                stop(Status::Preparing, format!("staging {todo}"))
            }
            Activity::Preparing { .. } | Activity::Updating { .. } => {
                stop(Status::Preparing, "still staging another update")
            }
            Activity::Prepared { update_id } if update_id == update.id && !is_provisioned => {
                self.begin_provisioning(view, image, update_id, &todo, step)
            }
            Activity::Prepared { update_id } if update_id == update.id => {
                match self.order_commit(update_id, view, image, planned, step) {
                    true => stop(Status::Updating, format!("carrying out {todo}")),
                    false => self.stop_waiting(Status::Preparing, format!("staged {todo}")),
                }
            }
            Activity::Idle | Activity::Prepared { .. } | Activity::Fetching { .. } => {
                let request = PrepareRequest {
                    update_id: update.id,
                    expects: ExpectedState { instance, root: scan.root, scope: scan.scope },
                    image: image.name().clone(),
                    image_digest: image.digest,
                    plan: planned.unblocked(),
                    triggers: image.content.triggers.clone(),
                    health_check: image.content.health_check.clone(),
                    force_disruption: self.is_forced(planned),
                    expires_seconds: EXPIRES_SECONDS,
                };
                let contents = self.contents_to_sign(image).map(Box::new);
                let call = Call::Prepare(Box::new(request), contents);
                self.call(CallPurpose::Prepare(update.id), call, step);
                self.stop_waiting(Status::Preparing, format!("staging {todo}"))
            }
        }
    }

    /// Orders the Commit of the staged update. Returns false if it cannot be sent now.
    fn order_commit(
        &mut self,
        update_id: u64,
        view: &View,
        image: &Arc<RequiredImage>,
        planned: &Arc<Planned>,
        step: &mut Step<'_>,
    ) -> bool {
        if !self.hold_machine(step) {
            return false;
        }
        let purpose = CallPurpose::Commit(update_id);
        let Some(request_id) = self.begin_call(step.now, purpose) else { return false };
        self.updates.unsent = None;
        let ordered = self.ordered_update(update_id, view, image, planned);
        step.effects.push(Effect::Commit(request_id, Box::new(ordered)));
        self.report_changing(&mut step.effects);
        let content = self.changed_content(!self.is_recorded(view, image));
        self.claims.commit_sent(update_id, content, step.now);
        true
    }

    /// Stops before an update is staged if the brake, a pause or the history prevents it: a staged
    /// update would only expire. Fetching does no harm meanwhile.
    pub(super) fn check_not_prevented(&self, view: &View, todo: &str) -> Check<()> {
        if self.brake.is_some() {
            let detail = format!("{todo}, all objects are there");
            return self.stop_unless_disabled(Status::UpdatesDisabled, detail);
        }
        if let Some(why) = self.pause_text() {
            return stop(Status::Paused, format!("{todo}, all objects are there; {why}"));
        }
        if let Some(why) = view.pause_text() {
            return stop(Status::Held, format!("{todo}; {why}"));
        }
        if let Some(why) = &self.history_error {
            let unordered = "the update cannot be recorded, and is not ordered before it is";
            let detail = format!("{todo}, all objects are there; {unordered}: {why}");
            return stop(Status::UpdatesDisabled, detail);
        }
        Continue(())
    }

    /// Stops with this status, or with `updates-disabled` or `paused` if updates are.
    pub(super) fn stop_unless_disabled<T>(&self, status: Status, detail: String) -> Check<T> {
        match (&self.brake, self.pause_text()) {
            (None, None) => self.stop_waiting(status, detail),
            (Some(reason), _) => stop(
                Status::UpdatesDisabled,
                format!("{detail}; updates of all machines are disabled: {reason}"),
            ),
            (None, Some(why)) => stop(Status::Paused, format!("{detail}; {why}")),
        }
    }
}
