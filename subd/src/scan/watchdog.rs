//! Notices from outside that the scanner stands still: it cannot notice that itself.

use std::sync::Arc;
use std::time::Duration;

use api::subd::Alarm;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use crate::scan::Scanner;
use crate::scan::stall::StallDetector;
use crate::state::report_state::ReportState;

/// How often it looks.
const INTERVAL: Duration = Duration::from_secs(2);

/// Raises [`Alarm::ScannerStalled`] while the scanner stands still.
pub async fn watch(scanner: Arc<Scanner>, report_state: Arc<ReportState>, stop: CancellationToken) {
    let mut ticks = tokio::time::interval(INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut watch = StallDetector::default();
    let mut raised: Option<String> = None;
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            () = stop.cancelled() => return,
        }
        let stalled = scanner.stalled(&mut watch);
        if stalled == raised {
            continue;
        }
        match &stalled {
            Some(what) => {
                tracing::warn!("the scanner stands still: {what}");
                report_state.raise(Alarm::ScannerStalled(what.clone()));
            }
            None => {
                tracing::info!("the scanner moves again");
                report_state.clear(|alarm| matches!(alarm, Alarm::ScannerStalled(_)));
            }
        }
        raised = stalled;
    }
}
