//! Averages over the last minute, a slot for each second.
// tidy: core

use std::time::Duration;

/// How far back the average goes, in seconds.
const WINDOW_SECONDS: u64 = 60;

/// Counts what is used. Times are since the meter was made, and may not run backwards far.
#[derive(Clone, Debug)]
pub struct Meter {
    slots: [u64; WINDOW_SECONDS as usize],
    /// The second of the newest slot.
    newest: u64,
}

impl Default for Meter {
    fn default() -> Self {
        Self { slots: [0; WINDOW_SECONDS as usize], newest: 0 }
    }
}

impl Meter {
    /// Counts `units` at the time `now`.
    pub fn add(&mut self, now: Duration, units: u64) {
        self.advance(now);
        let slot = &mut self.slots[slot_of(self.newest)];
        *slot = slot.saturating_add(units);
    }

    /// What was used in a second, on average over the minute before `now`, or over the time since
    /// the start if that is less.
    pub fn per_second(&mut self, now: Duration) -> u64 {
        self.advance(now);
        let sum = self.slots.iter().fold(0_u64, |sum, slot| sum.saturating_add(*slot));
        sum / (self.newest + 1).min(WINDOW_SECONDS)
    }

    /// Clears the slots of seconds in which nothing was counted.
    fn advance(&mut self, now: Duration) {
        let now = now.as_secs();
        let passed = now.saturating_sub(self.newest).min(WINDOW_SECONDS);
        for second in 0..passed {
            self.slots[slot_of(now - second)] = 0;
        }
        self.newest = self.newest.max(now);
    }
}

fn slot_of(second: u64) -> usize {
    usize::try_from(second % WINDOW_SECONDS).expect("it is less than sixty")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn averages_over_the_last_minute() {
        let at = Duration::from_secs;
        let mut meter = Meter::default();
        assert_eq!(meter.per_second(at(0)), 0);
        meter.add(at(0), 600);
        assert_eq!(meter.per_second(at(0)), 600);
        assert_eq!(meter.per_second(at(9)), 60);
        assert_eq!(meter.per_second(at(59)), 10);
        assert_eq!(meter.per_second(at(60)), 0);
        meter.add(at(61), 60);
        meter.add(at(90), 60);
        meter.add(at(89), 60);
        assert_eq!(meter.per_second(at(120)), 3);
        assert_eq!(meter.per_second(at(121)), 2);
        assert_eq!(meter.per_second(at(1_000_000)), 0);
        meter.add(at(1_000_000), u64::MAX);
        meter.add(at(1_000_000), u64::MAX);
        assert_eq!(meter.per_second(at(1_000_001)), u64::MAX / 60);
    }
}
