//! How long to wait before the next try, and how often a sub may be polled.
//!
//! Jitter is an argument: a number from 0 to 999 that the shell draws and the simulation computes.
// tidy: core

use core::time::Duration;

/// How long a poll waits for news, before jitter.
pub const POLL_WAIT: Duration = Duration::from_secs(60);

/// The first pause after a failed poll or call, and the longest.
pub const RETRY_FIRST: Duration = Duration::from_secs(1);
/// The longest pause after failed polls or calls, before jitter.
pub const RETRY_LONGEST: Duration = Duration::from_secs(30);

/// The first pause after an update or a fetch that failed.
pub const HOLD_FIRST: Duration = Duration::from_secs(10);
/// The longest pause after updates or fetches that failed.
pub const HOLD_LONGEST: Duration = Duration::from_secs(600);

/// The pause after a machine did not allow an update, before jitter. It does not grow: somebody
/// said no for now, and nothing failed.
pub const HELD_PAUSE: Duration = Duration::from_secs(60);

/// Polls that may follow each other at once.
const POLL_BURST: u32 = 60;

/// The interval in which one more poll may be sent at once.
const POLL_REFILL: Duration = Duration::from_millis(200);

/// Lets polls follow each other at once as long as they are few: a sub whose status changes all
/// the time is polled five times a second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PollPace {
    credits: u32,
    counted: Duration,
}

impl Default for PollPace {
    fn default() -> Self {
        Self { credits: POLL_BURST, counted: Duration::ZERO }
    }
}

impl PollPace {
    /// Says when a poll may be sent, and counts it as sent then.
    pub fn next(&mut self, now: Duration) -> Duration {
        let refills = now.saturating_sub(self.counted).as_millis() / POLL_REFILL.as_millis();
        if refills > 0 {
            let refills = u32::try_from(refills).unwrap_or(POLL_BURST);
            self.credits = self.credits.saturating_add(refills).min(POLL_BURST);
            self.counted = now;
        }
        if self.credits > 0 {
            self.credits -= 1;
            return now;
        }
        // The next credit is spent on this poll.
        self.counted = now + POLL_REFILL;
        self.counted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_restless_sub_is_polled_five_times_a_second() {
        let mut pace = PollPace::default();
        let mut now = Duration::from_secs(1);
        let mut polls = 0;
        while now < Duration::from_secs(11) {
            let at = pace.next(now);
            polls += 1;
            now = at.max(now + Duration::from_millis(1));
        }
        assert!((100..=115).contains(&polls), "{polls} polls in ten seconds");
    }
}
