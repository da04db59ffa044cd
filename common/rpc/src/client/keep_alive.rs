//! Detects a silent server whose connection is still open.

use std::future::{Future as _, poll_fn};
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use h2::{Ping, PingPong};
use tokio::time::{Instant, sleep_until, timeout};

use crate::{KEEP_ALIVE_INTERVAL, KEEP_ALIVE_TIMEOUT};

/// When a server last sent something.
#[derive(Debug)]
pub(super) struct LastHeard {
    start: Instant,
    /// In milliseconds after `start`.
    last: AtomicU64,
}

impl LastHeard {
    pub(super) fn new() -> Self {
        Self { start: Instant::now(), last: AtomicU64::new(0) }
    }

    /// Notes that the server has sent something.
    pub(super) fn note(&self) {
        let after = u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last.store(after, Ordering::Relaxed);
    }

    fn last(&self) -> Instant {
        self.start + Duration::from_millis(self.last.load(Ordering::Relaxed))
    }
}

/// Waits until the server has said nothing for [`KEEP_ALIVE_INTERVAL`]. Returns when that was.
///
/// Each poll postpones the timer, which costs little. So the task of a connection that is used does
/// not wake for the timer.
async fn quiet(heard: &LastHeard) -> Instant {
    let mut timer = pin!(sleep_until(heard.last() + KEEP_ALIVE_INTERVAL));
    poll_fn(|context| {
        let due = heard.last() + KEEP_ALIVE_INTERVAL;
        if timer.deadline() != due {
            timer.as_mut().reset(due);
        }
        timer.as_mut().poll(context).map(|()| due)
    })
    .await
}

/// Ends when the server has said nothing for [`KEEP_ALIVE_INTERVAL`] and has not answered a ping
/// within [`KEEP_ALIVE_TIMEOUT`].
pub(super) async fn silence(mut pings: PingPong, heard: &LastHeard) {
    loop {
        let due = quiet(heard).await;
        match timeout(KEEP_ALIVE_TIMEOUT, pings.ping(Ping::opaque())).await {
            Ok(Ok(_pong)) => heard.note(),
            // Something else may have arrived; a connection that fails ends by itself.
            _ if heard.last() < due => return,
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::task::{Context, Wake, Waker};
    use tokio::time::sleep;

    #[derive(Default)]
    struct Wakes(AtomicU64);

    impl Wake for Wakes {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_that_is_used_does_not_wake_for_the_timer() {
        let wakes = Arc::new(Wakes::default());
        let waker = Waker::from(Arc::clone(&wakes));
        let mut context = Context::from_waker(&waker);
        let (heard, start) = (LastHeard::new(), Instant::now());
        let mut quiet = pin!(quiet(&heard));
        for _ in 0..5 {
            assert!(quiet.as_mut().poll(&mut context).is_pending());
            sleep(Duration::from_secs(60)).await;
            heard.note();
        }
        assert!(quiet.as_mut().poll(&mut context).is_pending());
        sleep(Duration::from_secs(79)).await;
        assert_eq!(wakes.0.load(Ordering::Relaxed), 0);
        sleep(Duration::from_secs(2)).await;
        assert_eq!(wakes.0.load(Ordering::Relaxed), 1);
        let due = start + Duration::from_secs(380);
        assert_eq!(quiet.as_mut().poll(&mut context), std::task::Poll::Ready(due));
    }
}
