//! Polls: when the next one is sent, and what an answer or its absence says of the sub.
// tidy: core

use core::time::Duration;

use api::dominator::Status;
use api::subd::{PollReply, PollRequest};
use model::backoff::jittered;
use model::report::report;
use model::tree::Time;

use super::calls::is_shown;
use super::{Context, Effect, Failure, FailureKind, Now, Sub, Ticket, Unusable, View};
use crate::core::timing::{Attempt, POLL_WAIT, PollPace, RETRY_FIRST, RETRY_LONGEST};

/// Whether the sub answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Reach {
    /// Nobody knows yet.
    Unknown,
    /// It answered the last poll.
    Good,
    /// It did not.
    Bad(Failure),
}

/// The poll that is under way, or when the next is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Polling {
    Due(Duration),
    UnderWay(Ticket),
}

/// The polls of one sub.
#[derive(Debug)]
pub(super) struct Polls {
    pub(super) reach: Reach,
    pub(super) next: Polling,
    pace: PollPace,
    attempt: Attempt,
    /// The next poll asks for everything, because a report was missed.
    asks_all: bool,
    /// When the sub last answered, on the clock of [`Now::elapsed`].
    pub(super) answered: Duration,
    pub(super) last_seen: Option<Time>,
}

impl Polls {
    pub(super) fn new(now: Duration) -> Self {
        Self {
            reach: Reach::Unknown,
            next: Polling::Due(now),
            pace: PollPace::default(),
            attempt: Attempt::default(),
            asks_all: false,
            answered: now,
            last_seen: None,
        }
    }
}

impl Sub {
    pub(super) fn keep_polling(
        &mut self,
        now: Now,
        context: &Context<'_>,
        effects: &mut Vec<Effect>,
    ) {
        let Polling::Due(at) = self.polls.next else { return };
        if now.elapsed < at {
            self.wake_by(at);
            return;
        }
        let have = match &self.view {
            Some(view) if !self.polls.asks_all => Some(view.report.version),
            _ => None,
        };
        let wait = jittered(POLL_WAIT, context.jitter).as_millis();
        let wait_ms = u32::try_from(wait).expect("a poll waits for about a minute");
        let ticket = self.next_ticket();
        self.polls.next = Polling::UnderWay(ticket);
        effects.push(Effect::Poll(ticket, PollRequest { have, wait_ms }));
    }

    pub(super) fn polled(
        &mut self,
        now: Now,
        context: &Context<'_>,
        ticket: Ticket,
        reply: PollReply,
    ) {
        let was_paused = self.view.as_ref().is_some_and(|view| view.report.paused.is_some());
        let before = if self.polls.asks_all { None } else { self.view.take() };
        let view = match View::after(before, reply, self.scans + 1) {
            Ok(view) => view,
            Err(Unusable::Incomplete) if !self.polls.asks_all => {
                self.polls.asks_all = true;
                self.polls.next = Polling::Due(self.polls.pace.next(now.elapsed));
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
            self.calls.attempt.release();
        }
        self.polls.asks_all = false;
        self.claims.polled();
        self.polls.reach = Reach::Good;
        self.polls.attempt.failures = 0;
        self.polls.answered = now.elapsed;
        self.polls.last_seen = Some(now.wall);
        self.polls.next = Polling::Due(self.polls.pace.next(now.elapsed));
        if self
            .calls
            .accepted
            .is_some_and(|pending| ticket >= pending.shown_from || is_shown(pending.purpose, &view))
        {
            self.calls.accepted = None;
        }
        if was_paused && view.report.paused.is_none() {
            self.updates.hold.take_if(|hold| hold.status == Status::Held);
        }
        self.view = Some(view);
        self.record_update_end(now, context);
        self.record_fetch_end(now, context);
    }

    pub(super) fn poll_failed(&mut self, now: Now, context: &Context<'_>, failure: Failure) {
        let pause = self.polls.attempt.count(RETRY_FIRST, RETRY_LONGEST, context.jitter);
        self.polls.next = Polling::Due(now.elapsed + pause);
        self.polls.asks_all = failure.kind == FailureKind::Garbage;
        self.polls.reach = Reach::Bad(failure);
    }
}
