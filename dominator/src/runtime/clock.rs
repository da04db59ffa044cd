//! The time and the jitter that the shell reads and hands to the cores.

use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::time::{Duration, Instant};

use system::clock::wall;

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

/// Returns a random number from 0 to 999, by which pauses are varied. Each event takes one: the
/// kernel is asked once for each thread.
pub fn jitter() -> u16 {
    u16::try_from(RandomState::new().build_hasher().finish() % 1_000).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::jitter;

    #[test]
    fn jitter_takes_all_values() {
        let values: BTreeSet<u16> = (0..20_000).map(|_| jitter()).collect();
        assert_eq!(values, (0..1_000).collect());
    }
}
