//! Decides which updates and which pauses are accepted.
// tidy: core

use core::time::Duration;
use std::sync::Arc;

use api::fault::{Fault, FaultCode};
use api::subd::{LastUpdate, Paused, PrepareRequest, UpdateOutcome, UpdatePhase};
use model::display::{error_chain, utc};
use model::filter::Patterns;
use model::scope::{Coverage, ScanSettings};
use model::tree::Time;

use crate::state::pause::{PAUSE_MAX, time_until};
use crate::state::{Snapshot, State};
use crate::update::step_plan::{StepPlan, plan_steps};

/// Returns the scan on which an update is staged, if it may be staged now; `None` if the update is
/// known already.
pub(super) fn admit(
    state: &State,
    request: &PrepareRequest,
) -> Result<Option<Arc<Snapshot>>, Fault> {
    let update_id = request.update_id;
    match state.update {
        UpdatePhase::Preparing(current)
        | UpdatePhase::Prepared(current)
        | UpdatePhase::Updating(current)
            if current == update_id =>
        {
            return Ok(None);
        }
        UpdatePhase::Preparing(current) | UpdatePhase::Updating(current) => {
            let text = format!("update {current} is under way");
            return Err(Fault::new(FaultCode::Busy, text));
        }
        UpdatePhase::Idle | UpdatePhase::Prepared(_) => {}
    }
    if state.persisted.last_update.as_ref().is_some_and(|last| last.update_id == update_id) {
        return Ok(None);
    }
    refuse_if_stuck(state)?;
    let stale = |what: String| Fault::new(FaultCode::Stale, format!("{what}: poll and plan again"));
    if request.expects.instance != state.version.instance {
        return Err(stale("subd was restarted".to_owned()));
    }
    let report = state.scan_report();
    let (Some(report), Some(snapshot)) = (report, &state.snapshot) else {
        return Err(stale("no scan under the current settings is complete".to_owned()));
    };
    if request.expects.scope != report.scope {
        return Err(stale("the plan was made for another scope".to_owned()));
    }
    if request.expects.root != report.root {
        let (want, have) = (request.expects.root, report.root);
        return Err(stale(format!("the tree is {have}, the plan was made for {want}")));
    }
    Ok(Some(Arc::clone(snapshot)))
}

/// Refuses while the journal of an update cannot be closed.
pub(super) fn refuse_if_stuck(state: &State) -> Result<(), Fault> {
    let Some(why) = &state.stuck else { return Ok(()) };
    let text = format!("the journal of an update is not closed, it is tried again: {why}");
    Err(Fault::new(FaultCode::Busy, text))
}

/// Checks a plan as far as that is possible without reading the machine.
pub(super) fn check_plan(
    request: &PrepareRequest,
    settings: &ScanSettings,
    exclusions: &Patterns,
) -> Result<StepPlan, Fault> {
    let bad = |text: String| Fault::new(FaultCode::BadRequest, text);
    request.triggers.verify().map_err(|error| bad(error_chain(&error)))?;
    let step_plan = plan_steps(&request.plan, |path| {
        if exclusions.covers(path) {
            return Some("it is excluded on this machine");
        }
        match &settings.coverage {
            Coverage::Full(filter) if filter.keeps(path) => Some("the machine keeps it"),
            _ => None,
        }
    });
    step_plan.map_err(|error| bad(error_chain(&error)))
}

/// True if the update was committed, with any result.
pub(super) fn was_committed(last: &LastUpdate) -> bool {
    !matches!(last.outcome, UpdateOutcome::NotPrepared(_))
}

/// The longest reason, in bytes.
const REASON_BYTES_MAX: usize = 1_000;

/// Refuses an invalid pause, at `now` by the machine's clock.
pub fn check_pause(pause: &Paused, now: Time) -> Result<(), Fault> {
    let bad = |text: String| Err(Fault::new(FaultCode::BadRequest, text));
    if pause.reason.trim().is_empty() {
        return bad("a pause needs a reason".to_owned());
    }
    if pause.reason.len() > REASON_BYTES_MAX {
        return bad(format!("the reason has at most {REASON_BYTES_MAX} bytes"));
    }
    if pause.until.nanoseconds >= 1_000_000_000 {
        return bad("the end of the pause is not a valid time".to_owned());
    }
    let (until, clock) = (utc(pause.until), utc(now));
    match time_until(pause.until, now) {
        Duration::ZERO => bad(format!("{until} is over: the machine's clock says {clock}")),
        left if left > PAUSE_MAX => bad(format!(
            "{until} is too far away: a pause lasts at most {} days, and the machine's clock \
             says {clock}",
            PAUSE_MAX.as_secs() / (24 * 3_600)
        )),
        _ => Ok(()),
    }
}

/// Refuses an update during `pause`.
///
/// # Errors
///
/// `Held` says until when updates are paused, and why.
pub fn refuse_if_paused(pause: Option<Paused>) -> Result<(), Fault> {
    let Some(Paused { until, reason }) = pause else { return Ok(()) };
    let text = format!("updates are paused until {}: {reason}", utc(until));
    Err(Fault::new(FaultCode::Held, text))
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: i64 = 24 * 3_600;

    fn at(seconds: i64) -> Time {
        Time { seconds, nanoseconds: 0 }
    }

    fn until(seconds: i64, reason: &str) -> Paused {
        Paused { until: at(seconds), reason: reason.to_owned() }
    }

    #[test]
    fn a_pause_has_a_reason_and_an_end_that_is_near() {
        let long = "x".repeat(1_001);
        let table = [
            (until(2_000, "works"), ""),
            (until(1_000 + 30 * DAY, "works"), ""),
            (until(2_000, " "), "a pause needs a reason"),
            (until(2_000, &long), "the reason has at most 1000 bytes"),
            (
                until(1_000, "works"),
                "1970-01-01T00:16:40Z is over: the machine's clock says 1970-01-01T00:16:40Z",
            ),
            (
                until(1_001 + 30 * DAY, "works"),
                "1970-01-31T00:16:41Z is too far away: a pause lasts at most 30 days, and the \
                 machine's clock says 1970-01-01T00:16:40Z",
            ),
            (until(i64::MAX, "works"), "9223372036854775807 s after 1970 is too far away"),
        ];
        for (pause, expected) in table {
            let got = check_pause(&pause, at(1_000))
                .map_or_else(|fault| fault.message, |()| String::new());
            assert!(got.starts_with(expected) && got.is_empty() == expected.is_empty(), "{got}");
        }
    }
}
