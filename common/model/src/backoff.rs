//! How long to wait before a retry.
//!
//! Jitter is an argument: a number from 0 to 999, which is random in production and computed in
//! simulations.

use core::time::Duration;

/// Doubles `base` for each failure after the first, up to `longest`.
#[must_use]
pub fn doubled(base: Duration, longest: Duration, failures: u32) -> Duration {
    base.saturating_mul(1 << failures.saturating_sub(1).min(16)).min(longest)
}

/// Varies `base` by up to 20 % in both directions.
#[must_use]
pub fn jittered(base: Duration, jitter: u16) -> Duration {
    base * (800 + u32::from(jitter % 1_000) * 2 / 5) / 1_000
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest() {
        let pauses: Vec<u64> = [0, 1, 2, 3, 5, 6, 100]
            .map(|failures| {
                doubled(Duration::from_secs(1), Duration::from_secs(30), failures).as_secs()
            })
            .to_vec();
        assert_eq!(pauses, [1, 1, 2, 4, 16, 30, 30]);
    }

    #[test]
    fn jitter_is_a_fifth_to_both_sides() {
        let waits: Vec<u128> = [0, 500, 999]
            .map(|jitter| jittered(Duration::from_secs(60), jitter).as_millis())
            .to_vec();
        assert_eq!(waits, [48_000, 60_000, 71_940]);
    }
}
