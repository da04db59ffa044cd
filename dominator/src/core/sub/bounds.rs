//! The limits that the sub is told to keep to: told again whenever it was told others, and never
//! so often that a sub which does not take them is kept busy.
// tidy: core

use core::time::Duration;

use api::subd::{Limits, SetConfigurationRequest};

use super::{Call, Context, Effect, Now, Purpose, Sub, View};
use crate::core::pace::{HOLD_FIRST, HOLD_LONGEST};
use model::backoff::{doubled, jittered};

/// What is wanted, and how telling it went.
#[derive(Clone, Debug, Default)]
pub(super) struct Bounds {
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
        let is_new = self.bounds.wanted != limits;
        if is_new {
            self.bounds = Bounds { wanted: limits, ..Bounds::default() };
        }
        is_new
    }

    /// Why the sub could not be told its limits, if the last try failed.
    #[must_use]
    pub fn configure_trouble(&self) -> Option<&str> {
        self.bounds.trouble.as_deref()
    }

    pub(super) fn not_configured(&mut self, why: String) {
        self.bounds.trouble = Some(why.into());
    }

    /// Tells the sub its limits, if it was told others last: what its own configuration makes of
    /// them is its own affair.
    pub(super) fn keep_bounds(
        &mut self,
        view: &View,
        now: Now,
        context: &Context<'_>,
        effects: &mut Vec<Effect>,
    ) {
        let wanted = self.bounds.wanted;
        if view.report.limits.told == wanted {
            self.bounds = Bounds { wanted, ..Bounds::default() };
            return;
        }
        let instance = view.report.version.instance;
        let told = self.bounds.told.filter(|(told, _)| *told == instance);
        if told.is_some() && now.elapsed < self.bounds.until {
            self.wake_by(self.bounds.until);
            return;
        }
        let request = SetConfigurationRequest { scan: None, limits: Some(wanted) };
        if self.call(now, Purpose::Limits, Call::SetConfiguration(request), effects) {
            let times = told.map_or(1, |(_, times)| times.saturating_add(1));
            let pause = jittered(doubled(HOLD_FIRST, HOLD_LONGEST, times), context.jitter);
            self.bounds.told = Some((instance, times));
            self.bounds.until = now.elapsed + pause;
            self.bounds.trouble = None;
        }
    }
}
