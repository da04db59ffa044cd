//! One limited rate, of whatever unit.
//!
//! Work is charged after it was done, when its cost is known: the caller then waits until the
//! charge is paid. The debt is common to all callers that share a budget, and none of them
//! continues while there is a debt, so it is never more than one piece of work of each of them.
//!
//! A quota of `governor` is fixed, so each new rate gets a new limiter. Its cells are fractions of
//! a rate and not bytes: the time of a cell is a whole number of nanoseconds, which would be
//! inaccurate for a byte of a fast device.

use std::fmt;
use std::num::NonZeroU32;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use api::subd::ResourceUse;
use governor::clock::{Clock, MonotonicClock, Reference};
use governor::middleware::NoOpMiddleware;
use governor::state::{InMemoryState, NotKeyed};
use governor::{Quota, RateLimiter};
use model::lock::locked;

use crate::limits::rates::UsageAverage;

/// The longest wait before a caller asks again; the rate may have changed.
pub const WAIT_MAX: Duration = Duration::from_secs(1);

/// The most cells of one second.
const CELLS_PER_SECOND: u64 = 10_000;

/// How many bursts a second is divided into. A burst is what can be saved up while nothing is
/// charged: a quarter of a second, so that a rate is already kept over a few seconds.
const BURSTS_PER_SECOND: u64 = 4;

type Limiter<C> = RateLimiter<NotKeyed, InMemoryState, C, NoOpMiddleware<<C as Clock>::Instant>>;

/// A rate, and the debt.
struct LimitedRate<C: Clock> {
    rate: u64,
    cell_units: u64,
    burst_cells: u32,
    limiter: Limiter<C>,
    debt_units: u64,
}

impl<C: Clock + Clone> LimitedRate<C> {
    fn new(rate: u64, debt_units: u64, clock: C) -> Self {
        let rate = rate.max(1);
        let cell_units = (rate / CELLS_PER_SECOND).max(1);
        let nanoseconds = u128::from(cell_units) * 1_000_000_000 / u128::from(rate);
        let period = Duration::from_nanos(u64::try_from(nanoseconds).unwrap_or(u64::MAX).max(1));
        let burst_cells = (rate / cell_units / BURSTS_PER_SECOND).max(1);
        let burst_cells = u32::try_from(burst_cells).unwrap_or(u32::MAX);
        let burst = NonZeroU32::new(burst_cells).unwrap_or(NonZeroU32::MIN);
        let quota = Quota::with_period(period).expect("it is not zero").allow_burst(burst);
        let limiter = RateLimiter::direct_with_clock(quota, clock);
        Self { rate, cell_units, burst_cells, limiter, debt_units }
    }

    /// Pays what can be paid now. Returns how long to wait if a debt is left.
    fn pay(&mut self, now: C::Instant) -> Option<Duration> {
        loop {
            let cells = (self.debt_units / self.cell_units).min(self.burst_cells.into());
            let cells = NonZeroU32::new(u32::try_from(cells).unwrap_or(u32::MAX))?;
            match self.limiter.check_n(cells) {
                Ok(Ok(())) => self.debt_units -= u64::from(cells.get()) * self.cell_units,
                Ok(Err(not_until)) => {
                    let wait = not_until.wait_time_from(now);
                    return Some(wait.clamp(Duration::from_millis(1), WAIT_MAX));
                }
                // Not reached: no more than a burst is requested.
                Err(_) => return None,
            }
        }
    }
}

struct BudgetState<C: Clock> {
    limited: Option<LimitedRate<C>>,
    average: UsageAverage,
}

/// A limited rate. The owner chooses the unit: bytes, or microseconds.
pub struct Budget<C: Clock = MonotonicClock> {
    clock: C,
    start: C::Instant,
    inner: Mutex<BudgetState<C>>,
}

impl<C: Clock> fmt::Debug for Budget<C> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Budget")
    }
}

impl Budget {
    /// A budget of `rate` units per second, or without a limit.
    pub fn new(rate: Option<u64>) -> Self {
        Self::with_clock(rate, MonotonicClock)
    }
}

impl<C: Clock + Clone> Budget<C> {
    /// As [`Budget::new`], by another clock.
    pub fn with_clock(rate: Option<u64>, clock: C) -> Self {
        let limited = rate.map(|rate| LimitedRate::new(rate, 0, clock.clone()));
        let inner = Mutex::new(BudgetState { limited, average: UsageAverage::default() });
        Self { start: clock.now(), clock, inner }
    }

    fn lock(&self) -> MutexGuard<'_, BudgetState<C>> {
        // Each change is one assignment, so a panic cannot leave it half done.
        locked(&self.inner)
    }

    /// Sets another rate; the debt stays. The same rate changes nothing.
    pub fn set_rate(&self, rate: Option<u64>) {
        let mut inner = self.lock();
        if inner.limited.as_ref().map(|limited| limited.rate) == rate {
            return;
        }
        let debt_units = inner.limited.as_ref().map_or(0, |limited| limited.debt_units);
        inner.limited = rate.map(|rate| LimitedRate::new(rate, debt_units, self.clock.clone()));
    }

    /// Charges `units` that were just used. Returns how long to wait before more are used, at most
    /// [`WAIT_MAX`]. Call it again with 0 units until there is no wait.
    #[must_use]
    pub fn charge(&self, units: u64) -> Option<Duration> {
        let now = self.clock.now();
        let mut inner = self.lock();
        if units > 0 {
            inner.average.add(now.duration_since(self.start).into(), units);
        }
        let limited = inner.limited.as_mut()?;
        limited.debt_units = limited.debt_units.saturating_add(units);
        limited.pay(now)
    }

    /// As [`Budget::charge`], and waits. If it is dropped early, the debt stays.
    pub async fn take(&self, units: u64) {
        let mut wait = self.charge(units);
        while let Some(time) = wait {
            tokio::time::sleep(time).await;
            wait = self.charge(0);
        }
    }

    /// Counts `units` without limiting them.
    pub fn note(&self, units: u64) {
        if units == 0 {
            return;
        }
        let now = self.clock.now().duration_since(self.start).into();
        self.lock().average.add(now, units);
    }

    /// The limit in force and what is used of it.
    pub fn share(&self) -> ResourceUse {
        let now = self.clock.now().duration_since(self.start).into();
        let mut inner = self.lock();
        let limit = inner.limited.as_ref().map_or(0, |limited| limited.rate);
        ResourceUse { limit, used: inner.average.per_second(now) }
    }
}

#[cfg(test)]
mod tests {
    use governor::clock::FakeRelativeClock;

    use super::*;

    /// Takes pieces of `piece` units for `time` by a clock of its own; returns how many were taken.
    fn taken(budget: &Budget<FakeRelativeClock>, piece: u64, time: Duration) -> u64 {
        let mut units = 0;
        let mut left = time;
        loop {
            let mut wait = budget.charge(piece);
            units += piece;
            while let Some(rest) = wait {
                if rest >= left {
                    budget.clock.advance(left);
                    return units;
                }
                budget.clock.advance(rest);
                left -= rest;
                wait = budget.charge(0);
            }
        }
    }

    #[test]
    fn a_rate_is_held_over_seconds() {
        #[rustfmt::skip]
        let table = [
            // rate          piece
            (1,              1),
            (7,              3),
            (1_000,          10),
            (50_000,         117),
            (333_333,        4_096),
            (20_000_000,     262_144),
            (3_999_999_999,  262_144),
            (90_000_000_000, 1_000_000),
        ];
        for (rate, piece) in table {
            let budget = Budget::with_clock(Some(rate), FakeRelativeClock::default());
            let got = taken(&budget, piece, Duration::from_secs(20));
            let exact = rate * 20;
            // A burst, and the piece at the end.
            let most = exact + rate / 4 + rate / 100 + piece + 1;
            assert!((exact - exact / 100..=most).contains(&got), "{rate} {piece}: {got}");
        }
    }

    #[test]
    fn a_piece_above_the_rate_is_paid_before_the_next() {
        let budget = Budget::with_clock(Some(1_000), FakeRelativeClock::default());
        let start = budget.clock.now();
        let mut wait = budget.charge(10_000);
        while let Some(rest) = wait {
            assert!(rest <= WAIT_MAX);
            budget.clock.advance(rest);
            wait = budget.charge(0);
        }
        let took: Duration = budget.clock.now().duration_since(start).into();
        assert_eq!(took, Duration::from_millis(9_750));
    }

    #[test]
    fn a_changed_rate_holds_at_once_and_debts_stay() {
        let budget = Budget::with_clock(Some(10), FakeRelativeClock::default());
        assert_eq!(budget.charge(1_000_000), Some(Duration::from_millis(200)));
        budget.set_rate(Some(10));
        assert_eq!(budget.charge(0), Some(Duration::from_millis(200)), "nothing is given for it");
        budget.set_rate(Some(10_000_000));
        assert_eq!(budget.charge(0), None);
        assert_eq!(budget.share(), ResourceUse { limit: 10_000_000, used: 1_000_000 });
        budget.set_rate(None);
        assert_eq!(budget.charge(1_000_000_000), None);
        assert_eq!(budget.share(), ResourceUse { limit: 0, used: 1_001_000_000 });
    }

    #[test]
    fn what_is_not_limited_is_counted() {
        let budget = Budget::with_clock(Some(10), FakeRelativeClock::default());
        budget.note(600);
        budget.clock.advance(Duration::from_secs(5));
        assert_eq!(budget.share(), ResourceUse { limit: 10, used: 100 });
        assert_eq!(budget.charge(1), None);
    }

    #[tokio::test]
    async fn several_share_a_budget() {
        let budget = Budget::new(Some(100_000));
        let start = std::time::Instant::now();
        let worker = || async {
            for _ in 0..5 {
                budget.take(5_000).await;
            }
        };
        tokio::join!(worker(), worker());
        // 50,000 units, of which a burst of 25,000 is free.
        assert!(start.elapsed() >= Duration::from_millis(200), "{:?}", start.elapsed());
    }
}
