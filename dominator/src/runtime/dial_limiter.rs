//! Limits how often machines that do not answer are dialled.

use std::num::NonZeroU32;

use governor::{DefaultDirectRateLimiter, Quota, RateLimiter};
use tokio::sync::Mutex;

use crate::core::timing::REDIALS_PER_SECOND;

/// Permits [`REDIALS_PER_SECOND`] dials a second, in the order in which they are asked for.
#[derive(Debug)]
pub struct DialLimiter {
    /// The limiter wakes all that wait for it, each time, to permit one. So only one waits for it,
    /// and the others wait for this lock, which is given in order.
    limiter: Mutex<DefaultDirectRateLimiter>,
}

impl Default for DialLimiter {
    fn default() -> Self {
        let quota = Quota::per_second(REDIALS_PER_SECOND).allow_burst(NonZeroU32::MIN);
        Self { limiter: Mutex::new(RateLimiter::direct(quota)) }
    }
}

impl DialLimiter {
    /// Waits until a machine may be dialled.
    pub async fn permit(&self) {
        self.limiter.lock().await.until_ready().await;
    }
}

#[cfg(test)]
mod tests {
    use std::future::{Future as _, poll_fn};
    use std::sync::atomic::{AtomicUsize, Ordering};

    use futures_util::future::join_all;

    use super::*;

    #[tokio::test]
    async fn who_waits_is_not_woken_for_others() {
        const MACHINES: usize = 100;
        let (limiter, polls) = (DialLimiter::default(), AtomicUsize::new(0));
        let dials = (0..MACHINES).map(|_| {
            let mut permit = Box::pin(limiter.permit());
            let polls = &polls;
            poll_fn(move |context| {
                polls.fetch_add(1, Ordering::Relaxed);
                permit.as_mut().poll(context)
            })
        });
        join_all(dials).await;
        let polls = polls.into_inner();
        assert!(polls <= 6 * MACHINES, "{MACHINES} machines were woken {polls} times");
    }
}
