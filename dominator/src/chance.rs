//! Chance and time, which the shell reads and hands to the cores.

use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use common::tree::Time;

use crate::core::sub::Now;

/// A random number. The standard library seeds its hash maps from the kernel.
#[must_use]
pub fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

/// The time of day.
#[must_use]
pub fn wall() -> Time {
    match SystemTime::now().duration_since(UNIX_EPOCH) {
        Ok(since) => Time {
            seconds: i64::try_from(since.as_secs()).unwrap_or(i64::MAX),
            nanoseconds: since.subsec_nanos(),
        },
        Err(_) => Time::default(),
    }
}

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
