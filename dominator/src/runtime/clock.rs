//! The clock that the dominator's shell reads and hands to its cores.

use std::time::Instant;

use system::clock::wall;

use crate::core::timing::Now;

/// A clock that starts at zero.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    started: Instant,
}

impl Clock {
    /// Starts a clock.
    #[must_use]
    pub fn start() -> Self {
        Self { started: Instant::now() }
    }

    /// The time on this clock, and the time of day.
    #[must_use]
    pub fn now(&self) -> Now {
        Now { elapsed: self.started.elapsed(), wall: wall() }
    }

    /// The moment at which this clock shows `elapsed`.
    #[must_use]
    pub fn moment(&self, elapsed: std::time::Duration) -> Instant {
        self.started + elapsed
    }
}
