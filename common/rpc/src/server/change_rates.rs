//! How often a caller may change something.
//!
//! A server that runs with `--insecure` cannot tell its callers apart and limits nobody.

use std::num::NonZeroU32;
use std::time::Instant;

use governor::clock::{Clock as _, MonotonicClock};
use governor::middleware::NoOpMiddleware;
use governor::state::keyed::HashMapStateStore;
use governor::{Quota, RateLimiter};

use api::fault::{Fault, FaultCode};

use super::caller::Caller;

/// How many calls may come at once, as a multiple of those of a second.
const BURST: u32 = 20;

/// Once there are so many callers, those that made no call lately are forgotten.
const CALLERS_MAX: usize = 4_096;

type Middleware = NoOpMiddleware<Instant>;

/// The calls of each user that change something.
#[derive(Debug)]
pub(super) struct ChangeRates {
    each_second: NonZeroU32,
    limiter: RateLimiter<String, HashMapStateStore<String>, MonotonicClock, Middleware>,
}

impl ChangeRates {
    pub(super) fn new(each_second: NonZeroU32) -> Self {
        let burst = each_second.saturating_mul(NonZeroU32::new(BURST).expect("it is not zero"));
        let quota = Quota::per_second(each_second).allow_burst(burst);
        Self { each_second, limiter: RateLimiter::hashmap_with_clock(quota, MonotonicClock) }
    }

    /// Counts a call.
    ///
    /// # Errors
    ///
    /// A fault if the caller has made too many lately.
    pub(super) fn count(&self, caller: &Caller) -> Result<(), Fault> {
        let Some(user) = caller.identity.in_words() else { return Ok(()) };
        if self.limiter.len() > CALLERS_MAX {
            self.limiter.retain_recent();
        }
        self.limiter.check_key(&user).map_err(|too_early| {
            let wait = too_early.wait_time_from(MonotonicClock.now()).as_millis();
            let most = self.each_second;
            let text = format!(
                "{user} changes more than {most} things a second: try again in {wait} ms, or have \
                 one call change many"
            );
            Fault::new(FaultCode::Throttled, text)
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use api::access::Identity;

    use super::*;

    #[test]
    fn each_caller_has_a_rate_of_its_own() {
        let rates = ChangeRates::new(NonZeroU32::MIN);
        let counted = |user: Option<&str>, address: &str| {
            let identity = Identity { user: user.map(str::to_owned), ..Identity::default() };
            let (address, identity) = (address.parse().unwrap(), Arc::new(identity));
            let caller = Caller { address, local: address, unpacks: false, identity, proof: None };
            rates.count(&caller).map_err(|fault| fault.code)
        };
        assert!((0..BURST).all(|_| counted(Some("ann"), "10.0.0.1:1").is_ok()));
        assert_eq!(counted(Some("ann"), "10.0.0.2:1"), Err(FaultCode::Throttled));
        assert_eq!(counted(Some("ben"), "10.0.0.1:1"), Ok(()));
        assert!((0..=BURST).all(|_| counted(None, "10.0.0.1:1").is_ok()));
    }
}
