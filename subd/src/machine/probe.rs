//! Watches whether the root can be written: nothing can be repaired on one that cannot.
//!
//! Whether the root is mounted read-only is asked all the time, because that costs nothing. Now
//! and then a file is written as a trial and synced: a disk that fails, or is full, shows only
//! then. Both are alarms, which end when their cause has.

use std::sync::Arc;
use std::time::Duration;

use api::subd::Alarm;
use model::report::report;
use tokio::time::{Instant, MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use crate::root::Root;
use crate::state::report_state::ReportState;

/// How often it is asked whether the root is read-only.
const LOOK_INTERVAL: Duration = Duration::from_secs(2);

/// How often a file is written as a trial.
const WRITE_INTERVAL: Duration = Duration::from_secs(300);

/// Looks after the root.
#[derive(Clone)]
pub struct Probe {
    /// The root.
    pub root: Arc<Root>,
    /// Who is told.
    pub report_state: Arc<ReportState>,
}

impl Probe {
    /// Watches until `stop` is cancelled, by others or by itself: the handle of a root that was
    /// read-only and is not any more must be opened again, and all that was opened through it.
    pub async fn watch(self, stop: CancellationToken) {
        let mut ticks = interval(LOOK_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut trial_due = Instant::now();
        loop {
            tokio::select! {
                _ = ticks.tick() => {}
                () = stop.cancelled() => return,
            }
            if !self.look() {
                continue;
            }
            if self.root.is_outdated().unwrap_or(false) {
                tracing::info!("the root has become writable: starting over");
                return stop.cancel();
            }
            if trial_due <= Instant::now() {
                trial_due = Instant::now() + WRITE_INTERVAL;
                let probe = self.clone();
                if let Err(error) = tokio::task::spawn_blocking(move || probe.try_to_write()).await
                {
                    tracing::error!(%error, "the trial did not end");
                }
            }
        }
    }

    /// Raises or clears [`Alarm::ReadOnly`]; true if a trial makes sense.
    pub fn look(&self) -> bool {
        match self.root.is_read_only() {
            Ok(true) if self.root.is_outdated().unwrap_or(false) => true,
            Ok(true) => {
                self.report_state.clear(|alarm| matches!(alarm, Alarm::WriteFailed(_)));
                self.report_state.raise(Alarm::ReadOnly);
                false
            }
            Ok(false) => {
                self.report_state.clear(|alarm| *alarm == Alarm::ReadOnly);
                true
            }
            Err(error) => {
                tracing::warn!("{}", report(&error));
                false
            }
        }
    }

    /// Writes a file as a trial, and raises or clears [`Alarm::WriteFailed`].
    pub fn try_to_write(&self) {
        match self.root.try_to_write() {
            Ok(()) => self.report_state.clear(|alarm| matches!(alarm, Alarm::WriteFailed(_))),
            Err(error) => {
                let text = report(&error);
                tracing::error!("the root cannot be written: {text}");
                self.report_state.raise(Alarm::WriteFailed(text));
            }
        }
    }
}
