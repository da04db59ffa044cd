//! How much of the machine the scanner may take: pure arithmetic over durations.
//!
//! The passes ask after each piece of work how long to rest. Limits of the rate of reading, and
//! the share of a device for a pass around the cache, are further questions to the same value.
// tidy: core

use std::time::Duration;

/// The shortest rest worth going to sleep for; shorter ones are saved up.
const REST_MIN: Duration = Duration::from_millis(20);

/// How fast the scanner works.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    /// A metadata pass starts this many times the processor time of the last one after it ended:
    /// 200 is half a per cent of a core.
    pub metadata_interval_factor: u32,
    /// The shortest time between two metadata passes.
    pub metadata_interval_min: Duration,
    /// The longest time between two metadata passes.
    pub metadata_interval_max: Duration,
    /// The content pass rests this many times as long as it worked: 19 is a twentieth of a core.
    pub content_rest_factor: u32,
    /// The time between two content passes.
    pub content_pause: Duration,
}

impl Default for Pace {
    fn default() -> Self {
        Self {
            metadata_interval_factor: 200,
            metadata_interval_min: Duration::from_secs(1),
            metadata_interval_max: Duration::from_secs(60),
            content_rest_factor: 19,
            content_pause: Duration::from_secs(300),
        }
    }
}

impl Pace {
    /// How long to wait after a metadata pass that took `cpu` of processor time, hashing aside.
    #[must_use]
    pub fn metadata_interval(&self, cpu: Duration) -> Duration {
        cpu.saturating_mul(self.metadata_interval_factor)
            .max(self.metadata_interval_min)
            .min(self.metadata_interval_max)
    }

    /// How long the content pass has to rest for `worked`, the time since its last rest; `None`
    /// if it may go on first.
    #[must_use]
    pub fn content_rest(&self, worked: Duration) -> Option<Duration> {
        let rest = worked.saturating_mul(self.content_rest_factor);
        (rest >= REST_MIN).then_some(rest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_a_per_cent_of_a_core_within_limits() {
        let pace = Pace::default();
        #[rustfmt::skip]
        let table = [(0, 1_000), (5, 1_000), (80, 16_000), (300, 60_000), (9_000, 60_000)];
        for (cpu, interval) in table {
            let got = pace.metadata_interval(Duration::from_millis(cpu));
            assert_eq!(got, Duration::from_millis(interval), "{cpu} ms");
        }
    }

    #[test]
    fn the_content_pass_works_a_twentieth_of_the_time() {
        let pace = Pace::default();
        let rest = |worked| pace.content_rest(Duration::from_millis(worked));
        assert_eq!(rest(0), None);
        assert_eq!(rest(1), None);
        assert_eq!(rest(2), Some(Duration::from_millis(38)));
        assert_eq!(rest(1_000), Some(Duration::from_secs(19)));
    }
}
