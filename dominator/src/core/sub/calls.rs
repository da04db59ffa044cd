//! Calls to the sub: at most one is under way, and no other is sent before a poll shows that the
//! last one was carried out or lost.
// tidy: core

use api::dominator::Status;
use api::subd::Activity;
use model::scope::Scope;

use super::next_effects::{Check, stop};
use super::{Call, Context, Effect, Failure, FailureKind, Now, Sub, Ticket, View};
use crate::core::timing::{Attempt, RETRY_FIRST, RETRY_LONGEST};

/// What a call was for; tells whether a poll shows that it was carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CallPurpose {
    Scan(Scope),
    Limits,
    Fetch(u64),
    Prefetch(u64),
    Prepare(u64),
    Commit(u64),
    Cleanup,
    OfferSignatures,
}

/// A call that was accepted, and that no poll has shown yet.
#[derive(Clone, Copy, Debug)]
pub(super) struct AcceptedCall {
    pub(super) purpose: CallPurpose,
    /// A poll with this ticket or a later one was sent after the call was accepted: if it does
    /// not show the call, then the call was lost.
    pub(super) shown_from: Ticket,
}

/// The calls to one sub.
#[derive(Debug, Default)]
pub(super) struct Calls {
    pub(super) under_way: Option<(Ticket, CallPurpose)>,
    /// The last call, until a poll shows that it was carried out or lost.
    pub(super) accepted: Option<AcceptedCall>,
    pub(super) attempt: Attempt,
}

impl Sub {
    /// Sends a call, if that may be now. Says whether it did.
    pub(super) fn call(
        &mut self,
        now: Now,
        purpose: CallPurpose,
        call: Call,
        effects: &mut Vec<Effect>,
    ) -> bool {
        let ticket = self.ask(now, purpose);
        effects.extend(ticket.map(|ticket| Effect::Call(ticket, call)));
        ticket.is_some()
    }

    /// The ticket for a call that is sent now, if that may be.
    pub(super) fn ask(&mut self, now: Now, purpose: CallPurpose) -> Option<Ticket> {
        if !self.may_call(now) {
            return None;
        }
        self.calls.attempt.release();
        let ticket = self.next_ticket();
        self.calls.under_way = Some((ticket, purpose));
        Some(ticket)
    }

    /// No call is under way or waits to be seen, and none failed just now.
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

    /// The verdict, with why the last call failed if one did.
    pub(super) fn waiting<T>(&self, status: Status, detail: String) -> Check<T> {
        match self.calls.attempt.why() {
            None => stop(status, detail),
            Some(why) => stop(status, format!("{detail}; trying again, because: {why}")),
        }
    }

    /// Takes the answer that a call was accepted.
    pub(super) fn call_accepted(&mut self, purpose: CallPurpose) {
        match purpose {
            CallPurpose::Commit(id) => self.await_end(id),
            CallPurpose::OfferSignatures => self.offer_taken(),
            _ => {}
        }
        // A poll may have overtaken the answer to the call.
        let is_seen = self.view.as_ref().is_some_and(|view| is_shown(purpose, view));
        if !is_seen {
            let shown_from = Ticket(self.numbers.ticket + 1);
            self.calls.accepted = Some(AcceptedCall { purpose, shown_from });
        }
        self.calls.attempt = Attempt::default();
    }

    pub(super) fn call_failed(
        &mut self,
        now: Now,
        context: &Context<'_>,
        purpose: CallPurpose,
        failure: Failure,
    ) {
        if let CallPurpose::Prefetch(_) = purpose {
            return self.hold_prefetch(failure.text, now, context);
        }
        if let CallPurpose::Limits = purpose {
            return self.limits_refused(failure.text);
        }
        if purpose == CallPurpose::OfferSignatures && failure.kind == FailureKind::NoMethod {
            return self.offer_taken();
        }
        if failure.kind == FailureKind::Untrusted {
            // Whatever it was shown before, it does not have it any more.
            self.offer.taken = None;
        }
        if let CallPurpose::Cleanup = purpose {
            // What was to go may still be there.
            self.cleaned_generation = None;
        }
        let pause = self.calls.attempt.count(RETRY_FIRST, RETRY_LONGEST, context.jitter);
        let again = now.elapsed + pause;
        if let CallPurpose::Commit(id) = purpose {
            if matches!(failure.kind, FailureKind::Braked | FailureKind::Unsent) {
                self.claims.refused();
                self.updates.unsent = Some(id);
            }
            // It may have been carried out, unless it is not even on record.
            if failure.kind != FailureKind::Unsent {
                self.await_end(id);
            }
        }
        match failure.kind {
            FailureKind::Braked => self.calls.attempt.failures = 0,
            FailureKind::Unsent => {
                self.calls.attempt.hold(again, failure.text);
            }
            // The call may have been carried out; the same call with the same id does no harm.
            FailureKind::Unreachable | FailureKind::Busy | FailureKind::Stale => {
                self.calls.attempt.hold(again, failure.text);
            }
            FailureKind::NotFound => {
                self.updates.wanted = None;
                self.calls.attempt.hold(again, failure.text);
            }
            FailureKind::NoSpace
            | FailureKind::Refused
            | FailureKind::NoMethod
            | FailureKind::Untrusted
            | FailureKind::Held
            | FailureKind::Garbage => {
                let what = match purpose {
                    CallPurpose::Scan(_) | CallPurpose::Limits | CallPurpose::Cleanup => {
                        self.calls.attempt.hold(again, failure.text);
                        return;
                    }
                    CallPurpose::Fetch(_) | CallPurpose::Prefetch(_) => {
                        (Status::FetchFailed, "would not fetch")
                    }
                    CallPurpose::Prepare(_) => {
                        (Status::UpdateFailed, "would not prepare the update")
                    }
                    CallPurpose::OfferSignatures => {
                        (Status::UpdateFailed, "would not look at the signatures")
                    }
                    CallPurpose::Commit(_) => {
                        (Status::UpdateFailed, "would not carry out the update")
                    }
                };
                let status = match failure.kind {
                    FailureKind::NoSpace => Status::InsufficientSpace,
                    FailureKind::Held => Status::Held,
                    FailureKind::Untrusted => Status::SignatureRefused,
                    _ => what.0,
                };
                if status == Status::Held {
                    // What is staged stays staged for a while.
                    self.calls.attempt.failures = 0;
                } else {
                    (self.updates.wanted, self.fetch) = (None, None);
                }
                self.hold_back(now, context, status, format!("it {}: {}", what.1, failure.text));
            }
        }
    }
}

/// True if `view` shows that the call was carried out.
pub(super) fn is_shown(purpose: CallPurpose, view: &View) -> bool {
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
        // Nothing waits for it.
        CallPurpose::Limits | CallPurpose::Cleanup | CallPurpose::OfferSignatures => true,
    }
}
