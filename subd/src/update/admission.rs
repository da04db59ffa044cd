//! Decides which updates are accepted.
// tidy: core

use std::sync::Arc;

use api::fault::{Fault, FaultCode};
use api::subd::{LastUpdate, Outcome, PrepareRequest};
use model::filter::Patterns;
use model::report::report;
use model::scope::{Coverage, ScanSettings};

use crate::state::report_state::{State, UpdatePhase};
use crate::state::snapshot::Snapshot;
use crate::update::step_plan::{StepPlan, plan_steps};

/// Says whether the update may be staged now: the scan that it is based on, or `None` if it is
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
    if let Some(why) = &state.stuck {
        let text = format!("the journal of an update is not closed, it is tried again: {why}");
        return Err(Fault::new(FaultCode::Busy, text));
    }
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

/// Checks what can be checked of a plan without looking at the machine.
pub(super) fn check_plan(
    request: &PrepareRequest,
    settings: &ScanSettings,
    exclusions: &Patterns,
) -> Result<StepPlan, Fault> {
    let bad = |text: String| Fault::new(FaultCode::BadRequest, text);
    request.triggers.verify().map_err(|error| bad(report(&error)))?;
    let step_plan = plan_steps(&request.plan, |path| {
        if exclusions.covers(path) {
            return Some("it is excluded on this machine");
        }
        match &settings.coverage {
            Coverage::Full(filter) if filter.keeps(path) => Some("the machine keeps it"),
            _ => None,
        }
    });
    step_plan.map_err(|error| bad(report(&error)))
}

/// True if the update was committed, however that ended.
pub(super) fn was_carried(last: &LastUpdate) -> bool {
    !matches!(last.outcome, Outcome::NotPrepared(_))
}
