//! Lets connections in, or turns them away: [`super::admission`] at work, with limits of rates.
//!
//! A server that runs with `--insecure` knows nobody, lets everybody do everything, and turns
//! nobody away.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use governor::clock::{Clock as _, MonotonicClock};
use governor::middleware::NoOpMiddleware;
use governor::state::keyed::HashMapStateStore;
use governor::{Quota, RateLimiter};

use super::admission::{Book, Guest, Limits, Refusal, Source};

/// How many may be there.
pub(super) const LIMITS: Limits = Limits {
    // A rack behind one address that has been switched on.
    arriving: 1_024,
    // Half of all places: were the users of all subs one, it would be enough for them in turn.
    user: super::listen::CONNECTIONS_MAX / 2,
    // Browsers and monitoring, behind one proxy.
    strangers: 64,
    all_strangers: super::listen::CONNECTIONS_MAX / 8,
};

/// How many connections from one source are let in at once, and in each second from then on: a
/// fleet behind one address comes back within a minute.
const ARRIVALS: (u32, u32) = (4_096, 256);

/// How many may fail to say who they are.
const FAILURES: (u32, u32) = (128, 2);

/// After how many connections sources are forgotten that have been quiet.
const FORGET_EVERY: u32 = 4_096;

/// How often refusals are told in the log at most.
const TELL_EVERY: Duration = Duration::from_secs(60);

type Middleware = NoOpMiddleware<Instant>;
type Rate = RateLimiter<Source, HashMapStateStore<Source>, MonotonicClock, Middleware>;

fn rate((burst, each_second): (u32, u32)) -> Rate {
    let positive = |number| NonZeroU32::new(number).expect("the constants are not zero");
    let quota = Quota::per_second(positive(each_second)).allow_burst(positive(burst));
    RateLimiter::hashmap_with_clock(quota, MonotonicClock)
}

/// Where connections come in.
pub(super) struct Door {
    arrivals: Rate,
    failures: Rate,
    inside: Mutex<Inside>,
}

struct Inside {
    book: Book,
    /// Sources that have failed too often, and until when they are turned away.
    barred: BTreeMap<Source, Instant>,
    entered: u32,
    told: Option<Instant>,
}

impl Door {
    pub(super) fn new(limits: Limits) -> Self {
        let book = Book::new(limits);
        let inside = Inside { book, barred: BTreeMap::new(), entered: 0, told: None };
        Self { arrivals: rate(ARRIVALS), failures: rate(FAILURES), inside: Mutex::new(inside) }
    }

    fn inside(&self) -> MutexGuard<'_, Inside> {
        self.inside.lock().expect("no holder panics")
    }

    /// Lets in a connection that comes from `address`.
    pub(super) fn enter(self: &Arc<Self>, address: IpAddr) -> Result<Seat, Refusal> {
        let source = Source::of(address);
        let mut inside = self.inside();
        inside.entered += 1;
        let now = MonotonicClock.now();
        if inside.entered.is_multiple_of(FORGET_EVERY) {
            inside.barred.retain(|_, until| *until > now);
            for rate in [&self.arrivals, &self.failures] {
                rate.retain_recent();
                rate.shrink_to_fit();
            }
        }
        if inside.barred.get(&source).is_some_and(|until| *until > now) {
            return Err(Refusal::Failures);
        }
        self.arrivals.check_key(&source).map_err(|_| Refusal::Rate)?;
        let guest = Guest::Arriving(source);
        inside.book.enter(&guest)?;
        Ok(Seat { door: Arc::clone(self), source, guest })
    }

    /// True if it is time to tell of a refusal.
    pub(super) fn tells(&self) -> bool {
        let (mut inside, now) = (self.inside(), MonotonicClock.now());
        let is_due = inside.told.is_none_or(|told| now.duration_since(told) >= TELL_EVERY);
        if is_due {
            inside.told = Some(now);
        }
        is_due
    }
}

/// The place of a connection, as long as it lasts.
pub(super) struct Seat {
    door: Arc<Door>,
    source: Source,
    guest: Guest,
}

impl Seat {
    /// Where the connection came in.
    pub(super) fn door(&self) -> &Door {
        &self.door
    }

    /// The connection is of `user`, or of a stranger.
    pub(super) fn settle(&mut self, user: Option<&str>) -> Result<(), Refusal> {
        let guest = match user {
            Some(user) => Guest::User(user.to_owned()),
            None => Guest::Stranger(self.source),
        };
        let mut inside = self.door.inside();
        inside.book.enter(&guest)?;
        inside.book.leave(&self.guest);
        self.guest = guest;
        Ok(())
    }

    /// The connection has failed to say who it is.
    pub(super) fn failed(&self) {
        let Err(until) = self.door.failures.check_key(&self.source) else { return };
        let now = MonotonicClock.now();
        let until = now + until.wait_time_from(now);
        self.door.inside().barred.insert(self.source, until);
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.door.inside().book.leave(&self.guest);
    }
}
