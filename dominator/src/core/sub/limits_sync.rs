//! The limits that the sub is told to keep to: told again whenever it was told others, and never
//! so often that a sub which does not take them is kept busy.
// tidy: core

use api::subd::{Limits, SetConfigurationRequest};

use super::{Call, CallPurpose, Context, Effect, Now, Sub, View};
use crate::core::timing::{Attempt, HOLD_FIRST, HOLD_LONGEST};

/// What is wanted, and how telling it went.
#[derive(Clone, Debug, Default)]
pub(super) struct LimitsSync {
    wanted: Limits,
    /// The instance of the sub that was told last.
    told: Option<u64>,
    /// Counts how often it was told in vain.
    attempt: Attempt,
}

impl Sub {
    pub(super) fn set_limits(&mut self, limits: Limits) -> bool {
        let is_new = self.limits.wanted != limits;
        if is_new {
            self.limits = LimitsSync { wanted: limits, ..LimitsSync::default() };
        }
        is_new
    }

    /// Why the sub could not be told its limits, if the last try failed.
    #[must_use]
    pub fn limits_trouble(&self) -> Option<&str> {
        self.limits.attempt.why().filter(|why| !why.is_empty())
    }

    pub(super) fn limits_refused(&mut self, why: String) {
        self.limits.attempt.explain(why);
    }

    /// Tells the sub its limits, if it was told others last: what its own configuration makes of
    /// them is its own affair.
    pub(super) fn sync_limits(
        &mut self,
        view: &View,
        now: Now,
        context: &Context<'_>,
        effects: &mut Vec<Effect>,
    ) {
        let wanted = self.limits.wanted;
        if view.report.limits.told == wanted {
            self.limits = LimitsSync { wanted, ..LimitsSync::default() };
            return;
        }
        let instance = view.report.version.instance;
        if self.limits.told != Some(instance) {
            self.limits.attempt = Attempt::default();
        } else if let Some(until) = self.limits.attempt.held_until(now.elapsed) {
            self.wake_by(until);
            return;
        }
        let request = SetConfigurationRequest { scan: None, limits: Some(wanted) };
        if self.call(now, CallPurpose::Limits, Call::SetConfiguration(request), effects) {
            let attempt = &mut self.limits.attempt;
            let pause = attempt.count(HOLD_FIRST, HOLD_LONGEST, context.jitter);
            attempt.hold(now.elapsed + pause, String::new());
            self.limits.told = Some(instance);
        }
    }
}
