//! The time that decisions are told, the pause before the next try, and how often a sub is polled.
//!
//! Jitter is an argument: a number from 0 to 999 that the shell draws and the simulation computes.
// tidy: core

use core::time::Duration;

use model::backoff::{doubled, jittered};
use model::tree::Time;

/// The time, as the shell read it or the simulation made it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Now {
    /// Time since some fixed moment; never goes back.
    pub elapsed: Duration,
    /// The time of day, for people.
    pub wall: Time,
}

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

/// Something that failed, and is tried again after a pause.
#[derive(Clone, Debug, Default)]
pub struct Attempt {
    /// How often it failed since it last succeeded.
    pub failures: u32,
    /// Until when it is not tried again, on the clock of `Now::elapsed`.
    until: Option<Duration>,
    why: String,
}

impl Attempt {
    /// Counts a failure, and returns the pause before the next try. The pause doubles with each
    /// failure, from `first` to `longest`.
    pub fn count(&mut self, first: Duration, longest: Duration, jitter: u16) -> Duration {
        self.failures = self.failures.saturating_add(1);
        jittered(doubled(first, longest, self.failures), jitter)
    }

    /// Does not try again before `until`.
    pub fn hold(&mut self, until: Duration, why: String) {
        (self.until, self.why) = (Some(until), why);
    }

    /// Says why the try failed that is held already.
    pub fn explain(&mut self, why: String) {
        self.why = why;
    }

    /// Lets it be tried again at once. Failures stay counted.
    pub fn release(&mut self) {
        (self.until, self.why) = (None, String::new());
    }

    /// When the next try is or was due, if the last one failed and the next did not begin.
    #[must_use]
    pub fn until(&self) -> Option<Duration> {
        self.until
    }

    /// Until when it is not tried again; `None` if it may be tried.
    #[must_use]
    pub fn held_until(&self, now: Duration) -> Option<Duration> {
        self.until.filter(|until| now < *until)
    }

    /// Why the last try failed; `None` since the next one began.
    #[must_use]
    pub fn why(&self) -> Option<&str> {
        self.until.map(|_| self.why.as_str())
    }
}

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
