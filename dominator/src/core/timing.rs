//! The time that decisions are given, the pauses before retries, and the rate of polls.
//!
//! Jitter is an argument: a number from 0 to 999, random in the shell and computed in the
//! simulation.
// tidy: core

use core::num::NonZeroU32;
use core::time::Duration;

use model::backoff::{doubled, jittered};
use model::tree::Time;

/// The time, as the shell read it or the simulation made it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Now {
    /// The time since a fixed moment; monotonic.
    pub elapsed: Duration,
    /// The time of day, which may be set.
    pub wall: Time,
}

/// How long a poll waits for changes, before jitter.
pub const POLL_WAIT: Duration = Duration::from_secs(60);

/// How long a poll waits in the minute after the machine was busy, before jitter: the first call of
/// a quiet time replaces a connection whose buffers have grown.
pub const POLL_WAIT_AFTER_WORK: Duration = Duration::from_secs(20);

/// Polls without news end at multiples of this time. Those that end together take far less of
/// the processor: it finds code and common data in its cache, and sleeps undisturbed in between.
const POLL_END_INTERVAL: Duration = Duration::from_millis(250);

/// Returns how long a poll waits that is sent at `now` and should wait for about `wait`.
#[must_use]
pub fn poll_wait(now: Duration, wait: Duration) -> Duration {
    let interval = POLL_END_INTERVAL.as_millis();
    let end = (now + wait).as_millis().next_multiple_of(interval);
    let end = u64::try_from(end).map_or(Duration::MAX, Duration::from_millis);
    end.saturating_sub(now)
}

/// The first pause after a failed poll or call, before jitter.
pub const RETRY_FIRST: Duration = Duration::from_secs(1);
/// The longest pause after failed polls, before jitter. A machine that is back is known within five
/// seconds, while the shell can dial all that are away in that time.
pub const POLL_RETRY_LONGEST: Duration = Duration::from_secs(3);
/// How many machines that do not answer are dialled in a second.
pub const REDIALS_PER_SECOND: NonZeroU32 = NonZeroU32::new(200).expect("it is not 0");

/// The longest pause after failed calls, before jitter.
pub const RETRY_LONGEST: Duration = Duration::from_secs(30);

/// The first pause after an update or a fetch that failed, before jitter.
pub const HOLD_FIRST: Duration = Duration::from_secs(10);
/// The longest pause after updates or fetches that failed, before jitter.
pub const HOLD_LONGEST: Duration = Duration::from_secs(600);

/// The pause after a machine did not allow an update, before jitter. It does not grow, because
/// nothing failed.
pub const HELD_PAUSE: Duration = Duration::from_secs(60);

/// The failures of an action, and when it is tried again.
#[derive(Clone, Debug, Default)]
pub struct Attempt {
    /// The number of failures since it last succeeded.
    pub failures: u32,
    /// The earliest time of the next attempt, on the clock of `Now::elapsed`.
    until: Option<Duration>,
    why: String,
}

impl Attempt {
    /// Counts a failure, and returns the pause before the next attempt, which doubles with each
    /// failure from `first` to `longest`.
    pub fn count(&mut self, first: Duration, longest: Duration, jitter: u16) -> Duration {
        self.failures = self.failures.saturating_add(1);
        jittered(doubled(first, longest, self.failures), jitter)
    }

    /// Allows no attempt before `until`.
    pub fn hold(&mut self, until: Duration, why: String) {
        (self.until, self.why) = (Some(until), why);
    }

    /// Sets why the last attempt failed.
    pub fn explain(&mut self, why: String) {
        self.why = why;
    }

    /// Allows an attempt at once. Does not reset the number of failures.
    pub fn release(&mut self) {
        (self.until, self.why) = (None, String::new());
    }

    /// Returns when the next attempt is due, if the last one failed and the next has not begun.
    #[must_use]
    pub fn until(&self) -> Option<Duration> {
        self.until
    }

    /// Returns the time before which no attempt is allowed; `None` if one is allowed now.
    #[must_use]
    pub fn held_until(&self, now: Duration) -> Option<Duration> {
        self.until.filter(|until| now < *until)
    }

    /// Returns why the last attempt failed, if the next has not begun.
    #[must_use]
    pub fn why(&self) -> Option<&str> {
        self.until.map(|_| self.why.as_str())
    }
}

/// How many polls may be sent without pauses.
const POLL_BURST: u32 = 60;

/// The interval in which one more poll may be sent.
const POLL_REFILL: Duration = Duration::from_millis(200);

/// Limits the rate of polls by a token bucket: a sub whose status changes continuously is polled
/// five times a second.
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
    /// Returns when the next poll may be sent, and counts it.
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
        // This poll takes the next credit.
        self.counted = now + POLL_REFILL;
        self.counted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn polls_that_are_sent_at_any_time_end_together() {
        let at = Duration::from_micros;
        let ends = [0, 1, 100_400, 249_999].map(|now| {
            let wait = poll_wait(at(now), Duration::from_millis(400));
            (wait.as_millis(), (at(now) + wait).as_millis())
        });
        assert_eq!(ends, [(500, 500), (499, 500), (399, 500), (500, 750)]);
        assert_eq!(poll_wait(at(700_000), Duration::from_millis(50)), at(50_000));
    }

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
