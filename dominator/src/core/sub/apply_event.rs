//! Takes note of what happens to one machine. What follows from it is decided afterwards, from all
//! that is known (`next_effects`).
// tidy: core

use core::time::Duration;
use std::sync::Arc;

use api::dominator::Status;
use api::subd::{Activity, FetchFailure, Outcome, PollReply};
use model::mdb::Machine;
use model::report::report;

use super::{
    CallPurpose, Context, Event, Failure, FailureKind, Hold, ImageState, Now, Pending, Polling,
    Reach, Sub, Ticket, Unusable, View,
};
use crate::core::sub::missing_objects::Missing;
use crate::core::sub::signature_offer::signatures_of;
use crate::core::timing::{HELD_PAUSE, HOLD_FIRST, HOLD_LONGEST, RETRY_FIRST, RETRY_LONGEST};
use model::backoff::{doubled, jittered};
use model::words::size;

impl Sub {
    /// Takes note of `event`.
    pub(super) fn apply_event(&mut self, now: Now, event: Event, context: &Context<'_>) {
        match event {
            Event::Assigned { machine, image, planned } => {
                if self.prefetch.assigned(planned) {
                    // Other objects are worth keeping.
                    self.cleaned_generation = None;
                }
                self.assigned(machine, image);
            }
            Event::Brake(brake) => {
                if brake.is_none() && self.brake.is_some() {
                    self.clear_failures();
                }
                self.brake = brake;
            }
            Event::HistoryTrouble(trouble) => self.unrecordable = trouble,
            Event::SafetyCleared => {
                let _there_was_one = self.clear_danger();
            }
            Event::Retried => {
                let _was_held = self.retry();
            }
            Event::IdentityJudged(verdict) => self.identity.take(verdict),
            Event::Pause(pause) => self.pause_updates(pause),
            Event::DefaultImage(default) => self.set_default(default),
            Event::Forced => {
                let _was_pending = self.force_disruptive();
            }
            Event::Hurried => self.hurry(),
            Event::Scanned(ticket, result) => self.scanned_at_once(ticket, result),
            Event::Polled(ticket, reply) => {
                if self.polling == Polling::UnderWay(ticket) {
                    self.polled(now, context, ticket, *reply);
                }
            }
            Event::PollFailed(ticket, failure) => {
                if self.polling == Polling::UnderWay(ticket) {
                    self.poll_failed(now, context, failure);
                }
            }
            Event::TreeRead(ticket, tree) => {
                if self.reading.take_if(|(asked, _)| *asked == ticket).is_some() {
                    self.tree = Some(tree);
                    self.read_again = None;
                    self.reads_failed = 0;
                }
            }
            Event::TreeFailed(ticket, failure) => {
                if self.reading.take_if(|(asked, _)| *asked == ticket).is_some() {
                    self.reads_failed += 1;
                    let pause = self.pause(self.reads_failed, context);
                    self.read_again = Some((now.elapsed + pause, failure.text));
                }
            }
            Event::Planned(ticket, result) => {
                if self.prefetch.planned(ticket, &result) {
                    return;
                }
                if let Some((_, key)) = self.planning.take_if(|(asked, _)| *asked == ticket) {
                    match result {
                        Ok(planned) => self.planned = Some(planned),
                        Err(text) => self.plan_failed = Some((key, text)),
                    }
                }
            }
            Event::Accepted(ticket) => {
                if let Some((_, purpose)) = self.calling.take_if(|(asked, _)| *asked == ticket) {
                    match purpose {
                        CallPurpose::Commit(id) => self.await_end(id),
                        CallPurpose::OfferSignatures => self.offer_taken(),
                        _ => {}
                    }
                    // A poll may have overtaken the answer to the call.
                    let is_seen = self.view.as_ref().is_some_and(|view| is_shown(purpose, view));
                    if !is_seen {
                        let shown_from = Ticket(self.last_ticket + 1);
                        self.pending = Some(Pending { purpose, shown_from });
                    }
                    self.call_again = None;
                    self.calls_failed = 0;
                }
            }
            Event::CallFailed(ticket, failure) => {
                if let Some((_, purpose)) = self.calling.take_if(|(asked, _)| *asked == ticket) {
                    self.call_failed(now, context, purpose, failure);
                }
            }
            Event::Claimed(purpose, answer) => self.claims.answered(purpose, answer, now),
            Event::Wake => {}
        }
    }

    fn assigned(&mut self, machine: Arc<Machine>, image: ImageState) {
        if self.machine != machine {
            self.machine = machine;
            self.clear_failures();
        }
        if signatures_of(&self.image) != signatures_of(&image) {
            self.clear_failures();
        }
        if self.image.digest() != image.digest() {
            self.clear_failures();
            self.done = None;
            self.cleared = None;
            self.forget_force();
        }
        self.image = image;
    }

    /// Forgets that something failed, so that it is tried again at once.
    pub(super) fn clear_failures(&mut self) {
        self.hold = None;
        self.holds = 0;
        self.call_again = None;
        self.calls_failed = 0;
    }

    fn polled(&mut self, now: Now, context: &Context<'_>, ticket: Ticket, reply: PollReply) {
        let was_paused = self.view.as_ref().is_some_and(|view| view.report.paused.is_some());
        let before = if self.ask_all { None } else { self.view.take() };
        let view = match View::after(before, reply, self.scans + 1) {
            Ok(view) => view,
            Err(Unusable::Incomplete) if !self.ask_all => {
                self.ask_all = true;
                self.polling = Polling::Due(self.pace.next(now.elapsed));
                return;
            }
            Err(unusable) => {
                let failure = Failure { kind: FailureKind::Garbage, text: report(&unusable) };
                return self.poll_failed(now, context, failure);
            }
        };
        if view.scan_number > self.scans {
            self.scans = view.scan_number;
            // Whatever was refused was asked for upon another scan.
            self.call_again = None;
        }
        self.ask_all = false;
        self.claims.polled();
        self.reach = Reach::Good;
        self.polls_failed = 0;
        self.answered = now.elapsed;
        self.last_seen = Some(now.wall);
        self.polling = Polling::Due(self.pace.next(now.elapsed));
        if self
            .pending
            .is_some_and(|pending| ticket >= pending.shown_from || is_shown(pending.purpose, &view))
        {
            self.pending = None;
        }
        if was_paused && view.report.paused.is_none() {
            self.hold.take_if(|hold| hold.status == Status::Held);
        }
        self.view = Some(view);
        self.record_update_end(now, context);
        self.record_fetch_end(now, context);
    }

    fn poll_failed(&mut self, now: Now, context: &Context<'_>, failure: Failure) {
        self.polls_failed += 1;
        let pause = self.pause(self.polls_failed, context);
        self.polling = Polling::Due(now.elapsed + pause);
        self.ask_all = failure.kind == FailureKind::Garbage;
        self.reach = Reach::Bad(failure);
    }

    fn pause(&self, failures: u32, context: &Context<'_>) -> Duration {
        jittered(doubled(RETRY_FIRST, RETRY_LONGEST, failures), context.jitter)
    }

    fn call_failed(
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
            self.offered = None;
        }
        if let CallPurpose::Cleanup = purpose {
            // What was to go may still be there.
            self.cleaned_generation = None;
        }
        self.calls_failed += 1;
        let pause = self.pause(self.calls_failed, context);
        if let CallPurpose::Commit(id) = purpose {
            if matches!(failure.kind, FailureKind::Braked | FailureKind::Unsent) {
                self.claims.refused();
                self.unsent = Some(id);
            }
            // It may have been carried out, unless it is not even on record.
            if failure.kind != FailureKind::Unsent {
                self.await_end(id);
            }
        }
        match failure.kind {
            FailureKind::Braked => self.calls_failed = 0,
            FailureKind::Unsent => {
                self.call_again = Some((now.elapsed + pause, failure.text));
            }
            // The call may have been carried out; the same call with the same id does no harm.
            FailureKind::Unreachable | FailureKind::Busy | FailureKind::Stale => {
                self.call_again = Some((now.elapsed + pause, failure.text));
            }
            FailureKind::NotFound => {
                self.update = None;
                self.call_again = Some((now.elapsed + pause, failure.text));
            }
            FailureKind::NoSpace
            | FailureKind::Refused
            | FailureKind::NoMethod
            | FailureKind::Untrusted
            | FailureKind::Held
            | FailureKind::Garbage => {
                let what = match purpose {
                    CallPurpose::Scan(_) | CallPurpose::Limits | CallPurpose::Cleanup => {
                        self.call_again = Some((now.elapsed + pause, failure.text));
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
                    self.calls_failed = 0;
                } else {
                    (self.update, self.fetch) = (None, None);
                }
                self.hold_back(now, context, status, format!("it {}: {}", what.1, failure.text));
            }
        }
    }

    /// Takes note of how the update ended that this state machine asked for.
    fn record_update_end(&mut self, now: Now, context: &Context<'_>) {
        let Some(update) = self.update else { return };
        let Some(view) = &self.view else { return };
        let Some(last) = view.outcome_of(update.id) else { return };
        let outcome = last.outcome.clone();
        self.end_force(update, &outcome);
        let (status, detail) = match &outcome {
            Outcome::Done => {
                self.done = Some(update.plan);
                self.update = None;
                return;
            }
            // What is staged does not stay so for the whole of a pause: that is no failure.
            Outcome::NotPrepared(_)
                if self.brake.is_some()
                    || self.unsent == Some(update.id)
                    || self.pause_in_words().is_some()
                    || !self.claims.is_granted() =>
            {
                self.update = None;
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
                self.update = None;
                return;
            }
        };
        self.update = None;
        self.hold_back(now, context, status, format!("the update {detail}"));
    }

    /// Takes note of how the fetch ended that this state machine asked for.
    fn record_fetch_end(&mut self, now: Now, context: &Context<'_>) {
        let Some(fetch) = self.fetch else { return };
        let Some(view) = &self.view else { return };
        let activity = &view.report.activity;
        if matches!(activity, Activity::Fetching { fetch_id, .. } if *fetch_id == fetch.id) {
            return;
        }
        let Some(last) = view.fetch_of(fetch.id) else { return };
        let (status, detail) = match &last.error {
            None => {
                let planned = self.planned.as_ref().filter(|planned| planned.digest == fetch.plan);
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
            self.holds += 1;
            doubled(HOLD_FIRST, HOLD_LONGEST, self.holds)
        };
        self.hold = Some(Hold {
            status,
            detail,
            image: image.digest,
            plan: match status {
                Status::NotConverging => self.planned.as_ref().map(|planned| planned.digest),
                _ => None,
            },
            scan: self.scans,
            since: now.elapsed,
            until: now.elapsed + jittered(pause, context.jitter),
        });
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
        // Nothing waits for it.
        CallPurpose::Limits | CallPurpose::Cleanup | CallPurpose::OfferSignatures => true,
    }
}
