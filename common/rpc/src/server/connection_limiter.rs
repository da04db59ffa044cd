//! Limits how many connections are open, and how fast new ones come, by source address and by user.
//!
//! A server that runs with `--insecure` cannot tell its callers apart and limits nobody.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use governor::clock::{Clock as _, MonotonicClock};
use governor::middleware::NoOpMiddleware;
use governor::state::keyed::HashMapStateStore;
use governor::{Quota, RateLimiter};

use model::lock::locked;
use tokio_util::sync::CancellationToken;

use super::connection_counts::{ConnectionCounts, ConnectionKind, Full, Limits, Refusal, Source};
use super::handshakes::{HandshakeLimits, Handshakes};

/// How many connections from one source are accepted in a burst, and then in each second. A fleet
/// behind one address is connected again within a minute.
const ARRIVALS: (u32, u32) = (4_096, 256);

/// How many failed handshakes of one source are accepted in a burst, and then in each second.
const FAILURES: (u32, u32) = (128, 2);

/// After how many connections idle sources are removed.
const FORGET_EVERY: u32 = 4_096;

/// The shortest interval between two log lines about refusals.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

type Middleware = NoOpMiddleware<Instant>;
type Rate = RateLimiter<Source, HashMapStateStore<Source>, MonotonicClock, Middleware>;

fn rate((burst, each_second): (u32, u32)) -> Rate {
    let positive = |number| NonZeroU32::new(number).expect("the constants are not zero");
    let quota = Quota::per_second(positive(each_second)).allow_burst(positive(burst));
    RateLimiter::hashmap_with_clock(quota, MonotonicClock)
}

pub(super) struct ConnectionLimiter {
    started: Instant,
    arrivals: Rate,
    failures: Rate,
    state: Mutex<State>,
}

struct State {
    counts: ConnectionCounts,
    handshakes: Handshakes<CancellationToken>,
    /// Sources with too many failed handshakes, and until when they are refused.
    barred: BTreeMap<Source, Instant>,
    entered: u32,
    logged: Option<Instant>,
}

impl ConnectionLimiter {
    pub(super) fn new(limits: Limits, handshakes: HandshakeLimits) -> Self {
        let (counts, handshakes) = (ConnectionCounts::new(limits), Handshakes::new(handshakes));
        let barred = BTreeMap::new();
        let state = Mutex::new(State { counts, handshakes, barred, entered: 0, logged: None });
        let (arrivals, failures) = (rate(ARRIVALS), rate(FAILURES));
        Self { started: Instant::now(), arrivals, failures, state }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        locked(&self.state)
    }

    /// Returns a permit for a new connection from `address`, or why it is refused.
    pub(super) fn enter(self: &Arc<Self>, address: IpAddr) -> Result<ConnectionPermit, Refusal> {
        let source = Source::of(address);
        let mut state = self.state();
        state.entered += 1;
        let now = MonotonicClock.now();
        if state.entered.is_multiple_of(FORGET_EVERY) {
            state.barred.retain(|_, until| *until > now);
            for rate in [&self.arrivals, &self.failures] {
                rate.retain_recent();
                rate.shrink_to_fit();
            }
        }
        if state.barred.get(&source).is_some_and(|until| *until > now) {
            return Err(Refusal::Failures);
        }
        self.arrivals.check_key(&source).map_err(|_| Refusal::Rate)?;
        let ended = CancellationToken::new();
        let (number, oldest) = state
            .handshakes
            .enter(source, ended.clone(), self.started.elapsed())
            .map_err(|Full| Refusal::Arriving)?;
        if let Some(oldest) = oldest {
            oldest.cancel();
        }
        let kind = PermitKind::Handshake { number, ended };
        Ok(ConnectionPermit { limiter: Arc::clone(self), source, kind })
    }

    /// Returns true if a refusal is to be logged now.
    pub(super) fn must_log(&self) -> bool {
        let (mut state, now) = (self.state(), MonotonicClock.now());
        let is_due = state.logged.is_none_or(|logged| now.duration_since(logged) >= LOG_INTERVAL);
        if is_due {
            state.logged = Some(now);
        }
        is_due
    }
}

/// Counts a connection as open until it is dropped.
pub(super) struct ConnectionPermit {
    limiter: Arc<ConnectionLimiter>,
    source: Source,
    kind: PermitKind,
}

enum PermitKind {
    Handshake {
        number: u64,
        /// Cancelled when the handshake gives way to a newer one.
        ended: CancellationToken,
    },
    Settled(ConnectionKind),
}

impl ConnectionPermit {
    pub(super) fn limiter(&self) -> &ConnectionLimiter {
        &self.limiter
    }

    /// Waits until the handshake must give way to a newer one.
    pub(super) async fn gives_way(&self) {
        match &self.kind {
            PermitKind::Handshake { ended, .. } => ended.cancelled().await,
            PermitKind::Settled(_) => std::future::pending().await,
        }
    }

    /// Records that the connection belongs to `user`, or to nobody if `user` is `None`.
    pub(super) fn settle(&mut self, user: Option<&str>) -> Result<(), Refusal> {
        let kind = match user {
            Some(user) => ConnectionKind::User(user.to_owned()),
            None => ConnectionKind::Anonymous(self.source),
        };
        let mut state = self.limiter.state();
        state.counts.enter(&kind)?;
        if user.is_some() {
            state.handshakes.note_known(self.source, self.limiter.started.elapsed());
        }
        let former = std::mem::replace(&mut self.kind, PermitKind::Settled(kind));
        state.leave(&former);
        Ok(())
    }

    /// Records that the handshake failed.
    pub(super) fn failed(&self) {
        let Err(until) = self.limiter.failures.check_key(&self.source) else { return };
        let now = MonotonicClock.now();
        let until = now + until.wait_time_from(now);
        self.limiter.state().barred.insert(self.source, until);
    }
}

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        self.limiter.state().leave(&self.kind);
    }
}

impl State {
    fn leave(&mut self, kind: &PermitKind) {
        match kind {
            PermitKind::Handshake { number, .. } => self.handshakes.leave(*number),
            PermitKind::Settled(kind) => self.counts.leave(kind),
        }
    }
}
