//! Decides which updates are accepted, and when a pause of updates is in force.
//!
//! A pause lasts until a time by the machine's clock. A clock that was wrong when it was set, or
//! is wrong after a boot, must not end it early where that can be avoided; but no clock can make it
//! last for ever: it also ends when it has been in force for [`PAUSE_MAX`] in one run of subd.
// tidy: core

use core::time::Duration;
use std::sync::Arc;

use api::fault::{Fault, FaultCode};
use api::subd::{LastUpdate, Paused, PrepareRequest, UpdateOutcome, UpdatePhase};
use model::display::{error_chain, utc};
use model::filter::Patterns;
use model::scope::{Coverage, ScanSettings};
use model::time_parse::later;
use model::tree::Time;

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

/// The longest pause.
pub const PAUSE_MAX: Duration = Duration::from_secs(30 * 24 * 3_600);

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
    match time_until_end(pause, now) {
        Duration::ZERO => bad(format!("{until} is over: the machine's clock says {clock}")),
        left if left > PAUSE_MAX => bad(format!(
            "{until} is too far away: a pause lasts at most {} days, and the machine's clock \
             says {clock}",
            PAUSE_MAX.as_secs() / (24 * 3_600)
        )),
        _ => Ok(()),
    }
}

/// Returns the rest of `pause` at `now` by the machine's clock, at most `longest`; zero if it has
/// ended.
pub fn pause_left(pause: &Paused, now: Time, longest: Duration) -> Duration {
    time_until_end(pause, now).min(longest)
}

/// How much the clock may differ from the elapsed time.
const CLOCK_ERROR_MAX: Duration = Duration::from_secs(60);

/// Returns the pause with the end that is right by a clock that was set back, if `longest` is left
/// of it by the elapsed time.
pub fn corrected_pause(pause: &Paused, now: Time, longest: Duration) -> Option<Paused> {
    let is_wrong = time_until_end(pause, now) > longest + CLOCK_ERROR_MAX;
    is_wrong.then(|| Paused { until: later(now, longest), ..pause.clone() })
}

/// Refuses an update at `now`, by the machine's clock, if `pause` is in force then.
///
/// # Errors
///
/// `Held` says until when updates are paused, and why.
pub fn refuse_if_paused(pause: Option<&Paused>, now: Time) -> Result<(), Fault> {
    match pause {
        Some(pause) if !pause_left(pause, now, PAUSE_MAX).is_zero() => {
            let (until, reason) = (utc(pause.until), &pause.reason);
            let text = format!("updates are paused until {until}: {reason}");
            Err(Fault::new(FaultCode::Held, text))
        }
        _ => Ok(()),
    }
}

/// Returns the time from `now` to the end of `pause`.
fn time_until_end(pause: &Paused, now: Time) -> Duration {
    let nanoseconds = |time: Time| {
        i128::from(time.seconds) * 1_000_000_000 + i128::from(time.nanoseconds.min(999_999_999))
    };
    let left = (nanoseconds(pause.until) - nanoseconds(now)).max(0);
    let seconds = u64::try_from(left / 1_000_000_000).unwrap_or(u64::MAX);
    let rest = u32::try_from(left % 1_000_000_000).unwrap_or(0);
    Duration::new(seconds, rest)
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

    #[test]
    fn a_pause_ends_by_the_clock_and_outlasts_no_month_whatever_the_clock_says() {
        let pause = until(100 * DAY, "works");
        let days = |days: u64| Duration::from_secs(days * 24 * 3_600);
        #[rustfmt::skip]
        let table = [
            // now, at most, left
            (at(99 * DAY),  days(30), days(1)),
            (at(99 * DAY),  days(7),  days(1)),
            (at(100 * DAY), days(30), days(0)),
            (at(200 * DAY), days(30), days(0)),
            // A clock that was set back, or has forgotten the time.
            (at(0),         days(30), days(30)),
            (at(0),         days(1),  days(1)),
            (at(0),         days(0),  days(0)),
            (at(i64::MIN),  days(0),  days(0)),
        ];
        for (now, longest, expected) in table {
            assert_eq!(pause_left(&pause, now, longest), expected, "{now:?} {longest:?}");
        }
    }

    #[test]
    fn the_end_of_a_pause_follows_a_clock_that_is_set_back() {
        let hour = Duration::from_secs(3_600);
        // It was paused for two hours, an hour ago, with the clock twenty years ahead.
        let pause = until(20 * 365 * DAY, "works");
        let corrected = corrected_pause(&pause, at(DAY), hour);
        assert_eq!(corrected, Some(until(DAY + 3_600, "works")));
        // A clock that differs a little, or is set forward, changes nothing.
        let before = |seconds: i64| at(20 * 365 * DAY - seconds);
        for now in [before(3_600), before(3_660), before(60), before(-DAY)] {
            assert_eq!(corrected_pause(&pause, now, hour), None);
        }
    }
}
