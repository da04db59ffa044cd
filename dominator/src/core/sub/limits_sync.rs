//! The limits that the sub is told to keep to: told again whenever it was told others, and never
//! so often that a sub which does not take them is kept busy.
// tidy: core

use core::time::Duration;

use api::subd::{Limits, SetConfigurationRequest};

use super::{Call, CallPurpose, Context, Effect, Now, Sub, View};
use crate::core::timing::{HOLD_FIRST, HOLD_LONGEST};
use model::backoff::{doubled, jittered};

/// What is wanted, and how telling it went.
#[derive(Clone, Debug, Default)]
pub(super) struct LimitsSync {
    wanted: Limits,
    /// The instance of the sub that was told, and how often in vain.
    told: Option<(u64, u32)>,
    /// It is not told again before this.
    until: Duration,
    /// Why the last try failed.
    trouble: Option<Box<str>>,
}

impl Sub {
    /// Wants the sub to keep to `limits`; the next step acts on it. True if they are others than
    /// before.
    #[must_use]
    pub fn configure(&mut self, limits: Limits) -> bool {
        let is_new = self.limits_sync.wanted != limits;
        if is_new {
            self.limits_sync = LimitsSync { wanted: limits, ..LimitsSync::default() };
        }
        is_new
    }

    /// Why the sub could not be told its limits, if the last try failed.
    #[must_use]
    pub fn configure_trouble(&self) -> Option<&str> {
        self.limits_sync.trouble.as_deref()
    }

    pub(super) fn limits_refused(&mut self, why: String) {
        self.limits_sync.trouble = Some(why.into());
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
        let wanted = self.limits_sync.wanted;
        if view.report.limits.told == wanted {
            self.limits_sync = LimitsSync { wanted, ..LimitsSync::default() };
            return;
        }
        let instance = view.report.version.instance;
        let told = self.limits_sync.told.filter(|(told, _)| *told == instance);
        if told.is_some() && now.elapsed < self.limits_sync.until {
            self.wake_by(self.limits_sync.until);
            return;
        }
        let request = SetConfigurationRequest { scan: None, limits: Some(wanted) };
        if self.call(now, CallPurpose::Limits, Call::SetConfiguration(request), effects) {
            let times = told.map_or(1, |(_, times)| times.saturating_add(1));
            let pause = jittered(doubled(HOLD_FIRST, HOLD_LONGEST, times), context.jitter);
            self.limits_sync.told = Some((instance, times));
            self.limits_sync.until = now.elapsed + pause;
            self.limits_sync.trouble = None;
        }
    }
}
