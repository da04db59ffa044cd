//! How machines stand to rollouts of environments.
// tidy: core

use api::dominator::Status;
use rollouts::document::MachineTaskState;

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
