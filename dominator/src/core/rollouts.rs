//! How machines stand to rollouts of environments.
// tidy: core

use std::collections::BTreeSet;

use api::dominator::Status;
use model::image::{Content, ImageName};
use model::tree::Time;
use rollouts::document::{MachineTaskState, RolloutState, StepState};
use rollouts::state::State;
use rollouts::steps::Said;

use crate::core::alarms::{AlarmSet, ROLLOUT_FAILED, ROLLOUT_VOTES};

/// Returns how a machine with this status is, and whether it can be reached.
#[must_use]
pub fn machine_state(status: Status, has_unhealthy_task: bool) -> (MachineTaskState, bool) {
    let state = match status {
        Status::Synced | Status::PartlySynced if has_unhealthy_task => MachineTaskState::Unhealthy,
        Status::Synced | Status::PartlySynced => MachineTaskState::Synced,
        // It has no image: nothing of it serves.
        Status::ImageUndefined => MachineTaskState::Stopped,
        Status::UpdateFailed
        | Status::UpdateStuck
        | Status::HealthFailed
        | Status::NotConverging
        | Status::TriggerFailed
        | Status::ImageStopped
        | Status::SignatureRefused
        | Status::SubdTooOld
        | Status::UnsafeUpdate
        | Status::InsufficientSpace
        | Status::ProvisionFailed => MachineTaskState::Failed,
        _ => MachineTaskState::Starting,
    };
    let is_reachable = !matches!(
        status,
        Status::Connecting
            | Status::Unreachable
            | Status::PollFailed
            | Status::WrongMachine
            | Status::UpdatesDisabled
            | Status::Paused
            | Status::Held
    );
    (state, is_reachable)
}

/// Refuses an image with this content that is to be a bundle, if it cannot be one.
///
/// # Errors
///
/// [`Said`] with code 400.
pub fn check_bundle(content: &Content) -> Result<(), Said> {
    if content.filter.is_none() && content.health_check.is_none() {
        return Ok(());
    }
    let why = "is no bundle: those have no filter and no health check";
    Err(Said::new(400, format!("{} {why}", content.name)))
}

/// Refuses bundles beside a default image: they are added to the image that the machine database
/// or an environment names.
///
/// # Errors
///
/// [`Said`] with code 409.
pub fn check_default(state: &State, default: Option<&ImageName>) -> Result<(), Said> {
    if default.is_none() || !state.environments.values().any(|one| one.has_bundles()) {
        return Ok(());
    }
    let why =
        "bundles and a default image do not go together: let the machine database name all images";
    Err(Said::new(409, why))
}

/// Raises the alarms about rollouts. That one was rolled back ends when another one of its
/// environments is started.
pub fn raise_alarms(state: &State, raised: &mut AlarmSet) {
    let mut newer: BTreeSet<String> = BTreeSet::new();
    let gated = state.rollouts.values().filter(|record| record.rollout.kind.is_gated());
    for record in gated.rev() {
        let (id, rollout) = (&record.rollout.id, &record.rollout);
        let since = |step: &str| record.since.get(step).copied();
        let waiting = |state: StepState| state == StepState::AwaitingApproval;
        for step in rollout.steps.iter().filter(|step| waiting(step.state)) {
            let about = format!("{id}/{}", step.id);
            raised.add(ROLLOUT_VOTES, &about, since(&step.id), step.cause.clone());
        }
        let environments = record.rollout.environments();
        let is_newest = environments.is_disjoint(&newer);
        newer.extend(environments);
        let since: Option<Time> = record.ended.or(Some(record.created));
        match rollout.state {
            RolloutState::RollbackFailed => {
                let text = format!("its rollback has failed: {}", rollout.cause);
                raised.add(ROLLOUT_FAILED, id, since, text);
            }
            RolloutState::RolledBack if is_newest => {
                let text = format!("it was rolled back: {}", rollout.cause);
                raised.add(ROLLOUT_FAILED, id, since, text);
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_synced_machine_with_healthy_tasks_is_healthy() {
        let healthy = |status: &Status| machine_state(*status, false).0.is_healthy();
        let all: Vec<Status> = Status::ALL.into_iter().filter(healthy).collect();
        assert_eq!(all, [Status::Synced, Status::PartlySynced]);
        let unhealthy = |status: &Status| machine_state(*status, true).0.is_healthy();
        assert!(!Status::ALL.iter().any(unhealthy));
    }
}
