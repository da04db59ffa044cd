//! How often the passes run: pure arithmetic over durations. The budgets of [`crate::limits`] hold
//! how much they use meanwhile.
// tidy: core

use std::time::Duration;

/// The shortest sleep; shorter ones are added up.
pub const REST_MIN: Duration = Duration::from_millis(20);

/// How often the scanner works.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    /// A metadata pass starts this many times the processor time of the last one after it ended:
    /// 200 is half a per cent of a core.
    pub metadata_interval_factor: u32,
    /// The shortest time between two metadata passes.
    pub metadata_interval_min: Duration,
    /// The longest time between two metadata passes.
    pub metadata_interval_max: Duration,
    /// The time between two content passes.
    pub content_pause: Duration,
    /// The time between two media passes.
    pub media_pause: Duration,
    /// A scanner is never stalled before this time without progress, because a sleeping disk takes
    /// seconds to wake.
    pub stall_min: Duration,
}

impl Default for Pace {
    fn default() -> Self {
        Self {
            metadata_interval_factor: 200,
            metadata_interval_min: Duration::from_secs(1),
            metadata_interval_max: Duration::from_secs(10 * 60),
            content_pause: Duration::from_secs(15 * 60),
            media_pause: Duration::from_secs(60 * 60),
            stall_min: Duration::from_secs(10),
        }
    }
}

impl Pace {
    /// How long to wait after a metadata pass that took `cpu` of processor time, hashing aside.
    pub fn metadata_interval(&self, cpu: Duration) -> Duration {
        cpu.saturating_mul(self.metadata_interval_factor)
            .max(self.metadata_interval_min)
            .min(self.metadata_interval_max)
    }

    /// For how long a pass may go on, or stand still, that comes `interval` after the one before
    /// it, which took `took`: two of its periods.
    pub fn stall_limit(&self, interval: Duration, took: Duration) -> Duration {
        interval.saturating_add(took).saturating_mul(2).max(self.stall_min)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_a_per_cent_of_a_core_within_limits() {
        let pace = Pace::default();
        #[rustfmt::skip]
        let table = [(0, 1_000), (5, 1_000), (80, 16_000), (300, 60_000), (9_000, 600_000)];
        for (cpu, interval) in table {
            let got = pace.metadata_interval(Duration::from_millis(cpu));
            assert_eq!(got, Duration::from_millis(interval), "{cpu} ms");
        }
    }

    #[test]
    fn two_periods_are_the_limit_of_a_pass() {
        let pace = Pace::default();
        #[rustfmt::skip]
        let table = [(1_000, 5, 10_000), (16_000, 80, 32_160), (60_000, 90_000, 300_000)];
        for (interval, took, limit) in table {
            let got =
                pace.stall_limit(Duration::from_millis(interval), Duration::from_millis(took));
            assert_eq!(got, Duration::from_millis(limit), "{interval} ms");
        }
    }
}
