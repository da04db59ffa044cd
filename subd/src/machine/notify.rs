//! Notifies systemd, if it has started subd: ready, alive, stopping.
//!
//! Without `NOTIFY_SOCKET` in the environment nothing is sent.

use std::time::Duration;

use sd_notify::NotifyState;
use tokio_util::sync::CancellationToken;

/// Reports that subd answers calls.
pub fn ready() {
    tell(&[NotifyState::Ready]);
}

/// Reports that subd is about to stop.
pub fn stopping() {
    tell(&[NotifyState::Stopping]);
}

/// Reports that subd is alive, twice per watchdog interval of systemd, until `stop` is cancelled.
/// It does so from a task like those that answer calls.
pub async fn stay_alive(stop: CancellationToken) {
    let Some(interval) = sd_notify::watchdog_enabled().filter(|interval| !interval.is_zero())
    else {
        return;
    };
    let mut ticks = tokio::time::interval((interval / 2).max(Duration::from_millis(1)));
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            _ = ticks.tick() => tell(&[NotifyState::Watchdog]),
        }
    }
}

fn tell(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::warn!(%error, "cannot tell systemd");
    }
}
