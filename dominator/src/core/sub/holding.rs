//! Holds the machine before it gets orders, so that two dominators do not take turns.
// tidy: core

use core::ops::ControlFlow::Continue;
use core::time::Duration;

use api::dominator::Status;

use super::calls::CallPurpose;
use super::{Call, Check, Effect, Failure, FailureKind, Now, Step, Sub, stop};
use crate::core::timing::HELD_PAUSE;

/// How long orders may be given after the machine has agreed. It agrees for an hour, but an
/// operator may give it to another dominator.
const TRUSTED: Duration = Duration::from_secs(30);

/// How long a machine that cannot be held is not asked again: its release is an earlier one.
const NOT_ASKED: Duration = Duration::from_secs(600);

/// Whether this dominator holds the machine.
#[derive(Debug, Default)]
pub(super) struct Holding {
    /// Until when orders may be given.
    until: Duration,
    /// Why another dominator gives orders, and when the machine is asked again.
    refused: Option<(String, Duration)>,
}

impl Holding {
    pub(super) fn accepted(&mut self, now: Now) {
        *self = Self { until: now.elapsed + TRUSTED, refused: None };
    }

    /// Asks the machine again before the next order, although another dominator held it.
    pub(super) fn ask_again(&mut self) {
        self.refused = None;
    }

    pub(super) fn is_refused(&self) -> bool {
        self.refused.is_some()
    }

    /// True while another dominator gives orders.
    pub(super) fn refuses(&self, now: Now) -> bool {
        self.refused.as_ref().is_some_and(|(_, until)| now.elapsed < *until)
    }

    /// Takes a failure to hold the machine. Returns true if orders may be given all the same, or
    /// another dominator gives them.
    pub(super) fn failed(&mut self, failure: &Failure, now: Now) -> bool {
        match failure.kind {
            FailureKind::Held => {
                self.refused = Some((failure.text.clone(), now.elapsed + HELD_PAUSE));
                true
            }
            FailureKind::NoMethod | FailureKind::Refused => {
                *self = Self { until: now.elapsed + NOT_ASKED, refused: None };
                true
            }
            _ => false,
        }
    }
}

impl Sub {
    /// Returns true if orders may be given now. If not, holds the machine: the answer starts a
    /// step that decides again.
    pub(super) fn hold_machine(&mut self, step: &mut Step<'_>) -> bool {
        if step.now.elapsed < self.holding.until {
            return true;
        }
        let request_id = self.begin_call(step.now, CallPurpose::Hold);
        step.effects.extend(request_id.map(|request_id| Effect::Call(request_id, Call::Hold)));
        false
    }

    /// Stops while another dominator gives orders.
    pub(super) fn check_holder(&mut self, now: Now) -> Check<()> {
        match &self.holding.refused {
            Some((why, until)) if now.elapsed < *until => {
                let (why, until) = (why.clone(), *until);
                self.wake_by(until);
                stop(Status::Held, why)
            }
            _ => Continue(()),
        }
    }

    /// Returns why another dominator gives orders to the machine, if that is so.
    #[must_use]
    pub fn held_by_other(&self) -> Option<&str> {
        let (why, _) = self.holding.refused.as_ref()?;
        (self.shown.status == Status::Held).then_some(why)
    }
}
