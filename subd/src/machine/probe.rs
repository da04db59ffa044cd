//! Checks that the root can be written: without that nothing can be repaired.
//!
//! Whether the root is mounted read-only is checked often, because that is cheap. From time to time
//! a test file is written and synced, which detects a disk that fails or is full. Both raise
//! alarms, which end when their cause ends.

use std::sync::Arc;
use std::time::Duration;

use api::subd::Alarm;
use model::display::error_chain;
use tokio::time::{Instant, MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use crate::root::Root;
use crate::state::ReportState;

/// How often the root is checked for being read-only.
const READ_ONLY_CHECK_INTERVAL: Duration = Duration::from_secs(2);

/// How often a test file is written.
const WRITE_INTERVAL: Duration = Duration::from_secs(300);

/// Checks the root.
#[derive(Clone)]
pub struct Probe {
    pub root: Arc<Root>,
    pub report_state: Arc<ReportState>,
}

impl Probe {
    /// Checks until `stop` is cancelled, by others or by itself: when a read-only root has become
    /// writable, it and all that was opened through it must be opened again.
    pub async fn watch(self, stop: CancellationToken) {
        let mut ticks = interval(READ_ONLY_CHECK_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut write_due = Instant::now();
        loop {
            tokio::select! {
                _ = ticks.tick() => {}
                () = stop.cancelled() => return,
            }
            if !self.check_read_only() {
                continue;
            }
            if self.root.is_outdated().unwrap_or(false) {
                tracing::info!("the root has become writable: starting again");
                return stop.cancel();
            }
            if write_due <= Instant::now() {
                write_due = Instant::now() + WRITE_INTERVAL;
                let probe = self.clone();
                if let Err(error) = tokio::task::spawn_blocking(move || probe.try_to_write()).await
                {
                    tracing::error!(%error, "the write test failed");
                }
            }
        }
    }

    /// Raises or clears [`Alarm::ReadOnly`]; true if a test file can be written.
    pub fn check_read_only(&self) -> bool {
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
                tracing::warn!("{}", error_chain(&error));
                false
            }
        }
    }

    /// Writes a test file, and raises or clears [`Alarm::WriteFailed`].
    pub fn try_to_write(&self) {
        match self.root.try_to_write() {
            Ok(()) => self.report_state.clear(|alarm| matches!(alarm, Alarm::WriteFailed(_))),
            Err(error) => {
                let text = error_chain(&error);
                tracing::error!("the root cannot be written: {text}");
                self.report_state.raise(Alarm::WriteFailed(text));
            }
        }
    }
}
