//! Detects a silent server whose connection is still open.

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

/// Ends when the server has said nothing for [`KEEP_ALIVE_INTERVAL`] and has not answered a ping
/// within [`KEEP_ALIVE_TIMEOUT`].
pub(super) async fn silence(mut pings: PingPong, heard: &LastHeard) {
    loop {
        let due = heard.last() + KEEP_ALIVE_INTERVAL;
        if Instant::now() < due {
            sleep_until(due).await;
            continue;
        }
        match timeout(KEEP_ALIVE_TIMEOUT, pings.ping(Ping::opaque())).await {
            Ok(Ok(_pong)) => heard.note(),
            // Something else may have arrived; a connection that fails ends by itself.
            _ if heard.last() < due => return,
            _ => {}
        }
    }
}
