//! Calls to the sub: at most one is under way, and the next one is not sent before a poll shows
//! that the last one was carried out or lost.
//!
//! The calls that set the limits of the sub and send it the signatures of an image are here as a
//! whole; the others are decided in `next_effects` and `prefetch`.
// tidy: core

use core::ops::ControlFlow::Continue;
use core::time::Duration;
use std::sync::Arc;

use api::dominator::Status;
use api::subd::{Activity, Limits, OfferImageRequest, SOURCES_MAX, SetConfigurationRequest};
use model::image::required::RequiredImage;
use model::object::ObjectId;
use model::scope::Scope;

use super::computed::has_arrived;
use super::{Call, Effect, Failure, FailureKind, Now, RequestId, Step, Sub, View};
use super::{Check, stop};
use crate::core::timing::{Attempt, HOLD_FIRST, HOLD_LONGEST, RETRY_FIRST, RETRY_LONGEST};

/// After so many failures in a row, which take a quarter of a minute, the status is a failure.
const FAILURES_LASTING: u32 = 5;

/// The purpose of a call: decides how a poll shows that it was carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CallPurpose {
    Scan(Scope),
    Limits,
    Fetch(u64),
    Prefetch(u64),
    Prepare(u64),
    Commit(u64),
    Hold,
    Cleanup,
    OfferSignatures,
    RetryTriggers,
    /// The last of the objects.
    AddObjects(ObjectId),
    Provision,
    OrderTask,
    NotRestarted,
}

/// A call that was accepted, and that no poll has shown yet.
#[derive(Clone, Copy, Debug)]
struct AcceptedCall {
    purpose: CallPurpose,
    /// Polls with this request id or a later one were sent after the call was accepted: if such a
    /// poll does not show the call, the call was lost.
    shown_from: RequestId,
}

/// The calls to one sub.
#[derive(Debug, Default)]
pub(super) struct Calls {
    under_way: Option<(RequestId, CallPurpose)>,
    /// The last call, until a poll shows that it was carried out or lost.
    accepted: Option<AcceptedCall>,
    pub(super) attempt: Attempt,
    /// How often the last calls in a row failed at the sub, and why the last of them did.
    failing: (u32, String),
}

impl Calls {
    /// Ends the call that is under way if this is its id, and returns its purpose.
    pub(super) fn answered(&mut self, request_id: RequestId) -> Option<CallPurpose> {
        self.under_way.take_if(|(asked, _)| *asked == request_id).map(|(_, purpose)| purpose)
    }

    /// Takes the view after the poll `request_id`: the accepted call was carried out or lost.
    pub(super) fn polled(&mut self, request_id: RequestId, view: &View) {
        self.accepted.take_if(|call| request_id >= call.shown_from || is_shown(call.purpose, view));
    }

    /// True if the last call failed and is tried again.
    pub(super) fn are_failing(&self) -> bool {
        self.attempt.why().is_some() || self.failing.0 > 0
    }

    /// True if a Commit was sent and no poll has shown its effect.
    pub(super) fn has_commit(&self) -> bool {
        let under_way = self.under_way.map(|(_, purpose)| purpose);
        let accepted = self.accepted.map(|call| call.purpose);
        [under_way, accepted]
            .into_iter()
            .flatten()
            .any(|purpose| matches!(purpose, CallPurpose::Commit(_)))
    }
}

/// The limits that the sub is to have, and the attempts to set them.
#[derive(Clone, Debug, Default)]
pub(super) struct LimitsSync {
    wanted: Limits,
    /// The instance of the sub to which they were sent last.
    sent_to: Option<u64>,
    /// Counts how often they were sent without effect.
    attempt: Attempt,
}

/// An image whose signatures were offered, and the instance of the sub to which.
#[derive(Clone, Debug)]
struct OfferedImage {
    instance: u64,
    image: Arc<RequiredImage>,
}

impl OfferedImage {
    fn is_of(&self, instance: u64, image: &RequiredImage) -> bool {
        self.instance == instance
            && self.image.digest == image.digest
            && self.image.signatures == image.signatures
    }
}

/// The signatures that were sent to the machine, and those that it has accepted.
///
/// Each machine decides by its own configuration whether it accepts only signed images. That is not
/// known here, so all signatures are offered: once to each instance of the sub, and again when the
/// image has other signatures.
#[derive(Debug, Default)]
pub(super) struct SignatureOffer {
    sent: Option<OfferedImage>,
    /// Of a composed image each part.
    accepted: Vec<OfferedImage>,
}

impl Sub {
    /// Sends a call if it may be sent now. Returns true if it was sent.
    pub(super) fn call(&mut self, purpose: CallPurpose, call: Call, step: &mut Step<'_>) -> bool {
        if !self.hold_machine(step) {
            return false;
        }
        let request_id = self.begin_call(step.now, purpose);
        step.effects.extend(request_id.map(|request_id| Effect::Call(request_id, call)));
        request_id.is_some()
    }

    /// Returns the id for a call that the caller sends now, if it may be sent.
    pub(super) fn begin_call(&mut self, now: Now, purpose: CallPurpose) -> Option<RequestId> {
        if !self.may_call(now) {
            return None;
        }
        self.calls.attempt.release();
        let request_id = self.next_request_id();
        self.calls.under_way = Some((request_id, purpose));
        Some(request_id)
    }

    /// True if no call is under way or waits for a poll to show it, and no retry is pending.
    pub(super) fn may_call(&mut self, now: Now) -> bool {
        if self.calls.under_way.is_some() || self.calls.accepted.is_some() {
            return false;
        }
        if let Some(at) = self.calls.attempt.held_until(now.elapsed) {
            self.wake_by(at);
            return false;
        }
        true
    }

    /// Stops with this status. If the last call failed, the detail says why. If calls go on
    /// failing at the sub, the status says that, too.
    pub(super) fn stop_waiting<T>(&self, status: Status, detail: String) -> Check<T> {
        let (failures, why) = &self.calls.failing;
        let (status, why) = match (*failures >= FAILURES_LASTING, status) {
            (false, _) => (status, self.calls.attempt.why()),
            (true, Status::Fetching) => (Status::FetchFailed, Some(why.as_str())),
            (true, _) => (Status::UpdateFailed, Some(why.as_str())),
        };
        match why {
            None => stop(status, detail),
            Some(why) => stop(status, format!("{detail}; trying again, because: {why}")),
        }
    }

    /// Handles that the sub accepted a call.
    pub(super) fn call_accepted(&mut self, purpose: CallPurpose, step: &mut Step<'_>) {
        match purpose {
            // It says nothing of the order that follows.
            CallPurpose::Hold => return self.holding.accepted(step.now),
            // Updates have nothing to do with it.
            CallPurpose::OrderTask => return self.task_order_taken(&mut step.effects),
            CallPurpose::NotRestarted => return self.not_restarted_taken(),
            CallPurpose::Commit(id) => self.await_end(id),
            CallPurpose::OfferSignatures => self.offer_accepted(),
            CallPurpose::RetryTriggers => self.orders.retry_triggers = false,
            CallPurpose::Provision => self.provisioning.ask_again(),
            _ => {}
        }
        // A poll may have overtaken the answer to the call.
        let is_seen = self.view.as_ref().is_some_and(|view| is_shown(purpose, view));
        if !is_seen {
            let shown_from = RequestId(self.last_request_id + 1);
            self.calls.accepted = Some(AcceptedCall { purpose, shown_from });
        }
        self.calls.attempt = Attempt::default();
        self.calls.failing = (0, String::new());
    }

    /// Handles that a call failed.
    pub(super) fn call_failed(
        &mut self,
        purpose: CallPurpose,
        failure: Failure,
        step: &mut Step<'_>,
    ) {
        match purpose {
            CallPurpose::OrderTask => return self.task_order_failed(failure, step),
            CallPurpose::NotRestarted => return self.not_restarted_failed(failure, step),
            CallPurpose::Hold if self.holding.failed(&failure, step.now) => return,
            CallPurpose::Prefetch(_) => return self.hold_prefetch(failure.text, step),
            CallPurpose::Limits => return self.limits.attempt.explain(failure.text),
            CallPurpose::OfferSignatures if failure.kind == FailureKind::NoMethod => {
                return self.offer_accepted();
            }
            // The objects may still be in the cache.
            CallPurpose::Cleanup => self.cleaned_generation = None,
            CallPurpose::Provision => self.provisioning.order_failed(),
            CallPurpose::Commit(id) => self.commit_failed(id, failure.kind),
            _ => {}
        }
        if failure.kind == FailureKind::Untrusted {
            // The machine has lost the signatures that it had accepted.
            self.offer.accepted.clear();
        }
        // Without the settings of its image nothing else is ordered.
        let is_lasting = matches!(purpose, CallPurpose::Scan(_))
            || matches!(failure.kind, FailureKind::Unreachable | FailureKind::Unavailable);
        self.calls.failing = match is_lasting {
            true => (self.calls.failing.0.saturating_add(1), failure.text.clone()),
            false => (0, String::new()),
        };
        let pause = self.calls.attempt.count(RETRY_FIRST, RETRY_LONGEST, step.context.jitter);
        let retry_at = step.now.elapsed + pause;
        match failure.kind {
            FailureKind::Cancelled => self.calls.attempt.failures = 0,
            // The call may have been carried out; the same call with the same id does no harm.
            FailureKind::NotRecorded
            | FailureKind::Unreachable
            | FailureKind::Busy
            | FailureKind::Unavailable
            | FailureKind::Stale => self.calls.attempt.hold(retry_at, failure.text),
            FailureKind::NotFound => {
                self.updates.wanted = None;
                self.calls.attempt.hold(retry_at, failure.text);
            }
            FailureKind::NoSpace
            | FailureKind::Refused
            | FailureKind::NoMethod
            | FailureKind::Untrusted
            | FailureKind::Held
            | FailureKind::InvalidReply => {
                self.call_refused(retry_at, purpose, failure, step);
            }
        }
    }

    fn commit_failed(&mut self, update_id: u64, kind: FailureKind) {
        if matches!(kind, FailureKind::Cancelled | FailureKind::NotRecorded) {
            self.claims.commit_not_sent();
            self.updates.unsent = Some(update_id);
        }
        // The Commit may have been carried out, unless it was not even recorded.
        if kind != FailureKind::NotRecorded {
            self.await_end(update_id);
        }
    }

    /// Handles that the same call would fail again: holds updates for a while.
    fn call_refused(
        &mut self,
        retry_at: Duration,
        purpose: CallPurpose,
        failure: Failure,
        step: &Step<'_>,
    ) {
        let (status, refused) = match purpose {
            CallPurpose::Scan(_)
            | CallPurpose::Limits
            | CallPurpose::Cleanup
            | CallPurpose::RetryTriggers
            | CallPurpose::OrderTask
            | CallPurpose::NotRestarted
            | CallPurpose::Hold => {
                self.calls.attempt.hold(retry_at, failure.text);
                return;
            }
            // An update has not failed.
            CallPurpose::Provision => {
                let why = format!("the machine refused to provision: {}", failure.text);
                return self.hold_provisioning(why, step);
            }
            CallPurpose::Fetch(_) | CallPurpose::Prefetch(_) => (Status::FetchFailed, "to fetch"),
            // Prepare itself is known to every release.
            CallPurpose::Prepare(_) if failure.kind == FailureKind::NoMethod => {
                return self.hold_updates(Status::SubdTooOld, self.too_old("daemon tasks"), step);
            }
            CallPurpose::Prepare(_) => (Status::UpdateFailed, "to prepare the update"),
            CallPurpose::OfferSignatures => (Status::UpdateFailed, "to check the signatures"),
            CallPurpose::AddObjects(_) if failure.kind == FailureKind::NoMethod => {
                return self.hold_updates(Status::SubdTooOld, self.too_old("computed files"), step);
            }
            CallPurpose::AddObjects(_) => (Status::UpdateFailed, "the content of computed files"),
            CallPurpose::Commit(_) => (Status::UpdateFailed, "to carry out the update"),
        };
        let status = match failure.kind {
            FailureKind::NoSpace => Status::InsufficientSpace,
            FailureKind::Held => Status::Held,
            FailureKind::Untrusted => Status::SignatureRefused,
            _ => status,
        };
        if status == Status::Held {
            // A staged update stays staged for a while.
            self.calls.attempt.failures = 0;
        } else {
            (self.updates.wanted, self.fetch) = (None, None);
        }
        let detail = format!("the machine refused {refused}: {}", failure.text);
        self.hold_updates(status, detail, step);
    }

    /// Sets the limits that the sub is to have. Returns true if they differ from the last ones.
    pub(super) fn set_limits(&mut self, limits: Limits) -> bool {
        let is_new = self.limits.wanted != limits;
        if is_new {
            self.limits = LimitsSync { wanted: limits, ..LimitsSync::default() };
        }
        is_new
    }

    /// Why the limits could not be sent to the sub, if the last attempt failed.
    #[must_use]
    pub fn limits_error(&self) -> Option<&str> {
        self.limits.attempt.why().filter(|why| !why.is_empty())
    }

    /// Sends the limits to the sub if it reports that others were sent to it last. Which of them
    /// are in force depends on its own configuration.
    pub(super) fn sync_limits(&mut self, view: &View, step: &mut Step<'_>) {
        let wanted = self.limits.wanted;
        if view.report.limits.told == wanted {
            self.limits = LimitsSync { wanted, ..LimitsSync::default() };
            return;
        }
        let instance = view.report.version.instance;
        if self.limits.sent_to != Some(instance) {
            self.limits.attempt = Attempt::default();
        } else if let Some(until) = self.limits.attempt.held_until(step.now.elapsed) {
            self.wake_by(until);
            return;
        }
        let request = SetConfigurationRequest { scan: None, limits: Some(wanted) };
        if self.call(CallPurpose::Limits, Call::SetConfiguration(request), step) {
            let attempt = &mut self.limits.attempt;
            let pause = attempt.count(HOLD_FIRST, HOLD_LONGEST, step.context.jitter);
            attempt.hold(step.now.elapsed + pause, String::new());
            self.limits.sent_to = Some(instance);
        }
    }

    /// Continues if the machine has the signatures of the image, and of bundles that leave with it,
    /// as far as there are some.
    pub(super) fn check_signatures(
        &mut self,
        view: &View,
        image: &Arc<RequiredImage>,
        step: &mut Step<'_>,
    ) -> Check<()> {
        let instance = view.report.version.instance;
        let itself = image.parts.is_empty().then_some(image);
        let parts = || itself.into_iter().chain(&image.parts);
        let all = || parts().chain(&image.leaving);
        self.offer.accepted.retain(|offer| all().any(|part| offer.is_of(instance, part)));
        let is_known =
            |part: &RequiredImage| self.offer.accepted.iter().any(|one| one.is_of(instance, part));
        // What leaves need not be signed.
        let signed = parts().filter(|part| !part.signatures.is_empty()).chain(&image.leaving);
        let Some(image) = { signed }.find(|part| !is_known(part)) else { return Continue(()) };
        let request = OfferImageRequest {
            content: image.content.clone(),
            signatures: image.signatures.clone(),
            sources: step.context.sources.iter().take(SOURCES_MAX).cloned().collect(),
        };
        let call = Call::Offer(Box::new(request));
        if self.call(CallPurpose::OfferSignatures, call, step) {
            self.offer.sent = Some(OfferedImage { instance, image: Arc::clone(image) });
        }
        let detail = format!("sending the signatures of {}", image.name());
        self.stop_unless_disabled(Status::Preparing, detail)
    }

    /// Handles that the machine has accepted the signatures, or does not know the method.
    fn offer_accepted(&mut self) {
        self.offer.accepted.extend(self.offer.sent.take());
    }
}

/// True if `view` shows that the call was carried out.
fn is_shown(purpose: CallPurpose, view: &View) -> bool {
    match purpose {
        CallPurpose::Scan(scope) => view.report.scope == scope,
        CallPurpose::Fetch(id) | CallPurpose::Prefetch(id) => {
            matches!(view.report.activity, Activity::Fetching { fetch_id, .. } if fetch_id == id)
                || view.fetch_of(id).is_some()
        }
        CallPurpose::Prepare(id) => {
            matches!(
                view.report.activity,
                Activity::Preparing { update_id }
                    | Activity::Prepared { update_id }
                    | Activity::Updating { update_id } if update_id == id
            ) || view.outcome_of(id).is_some()
        }
        CallPurpose::Commit(id) => {
            matches!(view.report.activity, Activity::Updating { update_id } if update_id == id)
                || view.outcome_of(id).is_some()
        }
        CallPurpose::AddObjects(last) => has_arrived(view, &last),
        // Nothing waits for the effect of these calls.
        CallPurpose::Limits
        | CallPurpose::Cleanup
        | CallPurpose::RetryTriggers
        | CallPurpose::Provision
        | CallPurpose::Hold
        | CallPurpose::OrderTask
        | CallPurpose::NotRestarted
        | CallPurpose::OfferSignatures => true,
    }
}
