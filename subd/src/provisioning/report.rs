//! What is told of resources.

use api::subd::{
    ProvisioningReport, ProvisioningStage, ResourceReport, ResourceState, ResourcesReport,
};
use provisioning::machine::{Condition, Machine, Stage, Standing, TargetReport};

/// Returns what is told of a machine. Secret outputs are left out.
#[must_use]
pub fn report(machine: &Machine) -> ResourcesReport {
    ResourcesReport {
        not_run: None,
        provisioning: machine.target().map(provisioning),
        has_fleet: !machine.fleet().is_empty(),
        outputs: match machine.plain_outputs() {
            none if none.is_empty() => String::new(),
            outputs => serde_json::Value::Object(outputs).to_string(),
        },
        resources: machine.standings().into_iter().map(resource).collect(),
    }
}

fn provisioning(target: TargetReport) -> ProvisioningReport {
    let TargetReport { image, image_digest, step, stage } = target;
    let number = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
    let stage = match stage {
        Stage::Running { wave, waves } => {
            ProvisioningStage::Running { wave: number(wave), waves: number(waves) }
        }
        Stage::Waits { wave, waves } => {
            ProvisioningStage::Waits { wave: number(wave), waves: number(waves) }
        }
        Stage::Awaits(text) => ProvisioningStage::Awaits { text },
        Stage::Finished => ProvisioningStage::Finished,
        Stage::Failed(error) => ProvisioningStage::Failed { error },
    };
    ProvisioningReport { image, image_digest, stage, step }
}

fn resource(standing: Standing) -> ResourceReport {
    let Standing { id, kind, provisioner, needs, condition, text, drift, is_orphan, outputs } =
        standing;
    let state = match condition {
        Condition::Waiting => ResourceState::Waiting,
        Condition::Running => ResourceState::Running,
        Condition::Made => ResourceState::Made,
        Condition::Failed => ResourceState::Failed,
        Condition::Leaving => ResourceState::Leaving,
        Condition::Drifted => ResourceState::Drifted,
        Condition::Conflict => ResourceState::Conflict,
    };
    let outputs = serde_json::Value::Object(outputs).to_string();
    ResourceReport { id, kind, provisioner, state, text, drift, is_orphan, needs, outputs }
}
