//! The time and the jitter that the shell reads and hands to the cores.

use std::time::{Duration, Instant};

use system::clock::wall;
use system::random::random;

use crate::core::timing::Now;

/// A clock that starts at zero.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    started: Instant,
}

impl Clock {
    pub fn start() -> Self {
        Self { started: Instant::now() }
    }

    /// Returns the time on this clock, and the time of day.
    pub fn now(&self) -> Now {
        Now { elapsed: self.elapsed(), wall: wall() }
    }

    /// Returns the time on this clock.
    pub fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }

    /// Returns the moment at which this clock shows `elapsed`.
    pub fn moment(&self, elapsed: Duration) -> Instant {
        self.started + elapsed
    }
}

/// Returns a random number from 0 to 999, by which pauses are varied.
pub fn jitter() -> u16 {
    u16::try_from(random() % 1_000).unwrap_or_default()
}
