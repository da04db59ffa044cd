//! Tells systemd how subd is, if systemd has started it: ready, alive, stopping.
//!
//! Without `NOTIFY_SOCKET` in the environment nothing is told.

use std::time::Duration;

use sd_notify::NotifyState;
use tokio_util::sync::CancellationToken;

/// Says that calls are answered from now on.
pub fn ready() {
    tell(&[NotifyState::Ready]);
}

/// Says that subd is about to end.
pub fn stopping() {
    tell(&[NotifyState::Stopping]);
}

/// Says that subd is alive, at half the interval that systemd wants, until `stop` is cancelled.
/// What says so is a task like those that answer calls.
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
