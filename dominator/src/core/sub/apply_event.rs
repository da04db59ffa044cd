//! Applies an event to what is known of one machine. What follows from it is decided afterwards,
//! from all that is known (`next_effects`).
// tidy: core

use std::sync::Arc;

use model::mdb::Machine;

use super::signature_offer::signatures_of;
use super::{Context, Effect, Event, ImageState, Now, Polling, Sub};
use crate::core::timing::{Attempt, RETRY_FIRST, RETRY_LONGEST};

impl Sub {
    /// Applies `event` to what is known.
    pub(super) fn apply_event(
        &mut self,
        now: Now,
        event: Event,
        context: &Context<'_>,
        effects: &mut Vec<Effect>,
    ) {
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
            Event::HistoryTrouble(trouble) => self.history_trouble = trouble,
            Event::Ordered(order) => effects.push(Effect::OrderAnswered(self.take_order(order))),
            Event::IdentityJudged(verdict) => self.identity.take(verdict),
            Event::DefaultImage(default) => self.set_default(default),
            Event::Scanned(ticket, result) => self.scanned_at_once(ticket, result),
            Event::Polled(ticket, reply) => {
                if self.polls.next == Polling::UnderWay(ticket) {
                    self.polled(now, context, ticket, *reply);
                }
            }
            Event::PollFailed(ticket, failure) => {
                if self.polls.next == Polling::UnderWay(ticket) {
                    self.poll_failed(now, context, failure);
                }
            }
            Event::TreeRead(ticket, tree) => {
                if self.trees.asked.take_if(|(asked, _)| *asked == ticket).is_some() {
                    self.trees.tree = Some(tree);
                    self.trees.attempt = Attempt::default();
                }
            }
            Event::TreeFailed(ticket, failure) => {
                if self.trees.asked.take_if(|(asked, _)| *asked == ticket).is_some() {
                    let attempt = &mut self.trees.attempt;
                    let pause = attempt.count(RETRY_FIRST, RETRY_LONGEST, context.jitter);
                    attempt.hold(now.elapsed + pause, failure.text);
                }
            }
            Event::Planned(ticket, result) => {
                let is_for_prefetch = self.prefetch.plan.take(ticket, &result);
                if !is_for_prefetch {
                    self.plan.take(ticket, &result);
                }
            }
            Event::Accepted(ticket) => {
                if let Some((_, purpose)) =
                    self.calls.under_way.take_if(|(asked, _)| *asked == ticket)
                {
                    self.call_accepted(purpose);
                }
            }
            Event::CallFailed(ticket, failure) => {
                if let Some((_, purpose)) =
                    self.calls.under_way.take_if(|(asked, _)| *asked == ticket)
                {
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
            self.updates.done = None;
            self.updates.cleared = None;
            self.forget_force();
        }
        self.image = image;
    }

    /// Forgets that something failed, so that it is tried again at once.
    pub(super) fn clear_failures(&mut self) {
        self.updates.hold = None;
        self.updates.failures = 0;
        self.calls.attempt = Attempt::default();
    }
}
