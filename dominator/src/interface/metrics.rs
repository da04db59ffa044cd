//! Metrics that are read from the fleet when they are requested.

use std::sync::{Arc, OnceLock, Weak};

use api::dominator::DominatorStatus;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric as _};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::gauge::ConstGauge;
use rollouts::document::{RolloutState, name_of};

use crate::runtime::fleet::{Fleet, RolloutCounts};

#[derive(Debug, Default)]
pub struct FleetCollector {
    fleet: OnceLock<Weak<Fleet>>,
}

impl FleetCollector {
    /// Sets the fleet that is read.
    pub fn watch(&self, fleet: &Arc<Fleet>) {
        self.fleet.get_or_init(|| Arc::downgrade(fleet));
    }
}

impl Collector for FleetCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let Some(fleet) = self.fleet.get().and_then(Weak::upgrade) else { return Ok(()) };
        let status = fleet.status();
        let mut subs =
            encoder.encode_descriptor("subs", "Machines by status", None, MetricType::Gauge)?;
        for known in api::dominator::Status::ALL {
            let counted = status.counts.iter().find(|(status, _)| *status == known);
            let gauge = ConstGauge::new(i64::from(counted.map_or(0, |(_, count)| *count)));
            gauge.encode(subs.encode_family(&[("status", known.name())])?)?;
        }
        let (alarms, paused) = fleet.alarms();
        let help = "Machines that raise an alarm, by kind; show-sub tells more";
        let mut raised = encoder.encode_descriptor("subs_alarms", help, None, MetricType::Gauge)?;
        for kind in api::subd::Alarm::KINDS {
            let count = alarms.get(kind).copied().unwrap_or_default();
            ConstGauge::new(i64::from(count)).encode(raised.encode_family(&[("kind", kind)])?)?;
        }
        let counts = fleet.task_counts();
        let help = "Daemon tasks of all machines, by state";
        let mut tasks = encoder.encode_descriptor("tasks", help, None, MetricType::Gauge)?;
        for state in api::subd::TaskState::ALL {
            let count = counts.get(&state).copied().unwrap_or_default();
            let gauge = ConstGauge::new(i64::from(count));
            gauge.encode(tasks.encode_family(&[("state", state.name())])?)?;
        }
        let departing = fleet.departing().machines;
        let help = "Machines that have left the machine database, by what becomes of their tasks";
        let mut left = encoder.encode_descriptor("departing", help, None, MetricType::Gauge)?;
        for state in api::dominator::departing::DepartingState::ALL {
            let count = departing.iter().filter(|machine| machine.state == state).count();
            let gauge = ConstGauge::new(i64::try_from(count).unwrap_or(i64::MAX));
            gauge.encode(left.encode_family(&[("state", state.name())])?)?;
        }
        encode_rollouts(&mut encoder, &fleet.rollout_counts())?;
        let mut one = |name, help, value: i64| {
            let encoder = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            ConstGauge::new(value).encode(encoder)
        };
        one("subs_paused", "Machines that are paused on the machine itself", paused.into())?;
        one(
            "subs_paused_by_operators",
            "Machines whose updates operators have paused on the dominator",
            status.paused.into(),
        )?;
        let budgets = &status.budgets;
        let help = "Machines that are being updated, or may be";
        one("claims_held", help, budgets.under_way.into())?;
        let help = "Machines that wait for their turn to be updated";
        one("claims_waiting", help, budgets.waiting.into())?;
        let help = "Machines that wait for their share of the network";
        one("fetches_waiting", help, budgets.fetches_waiting.into())?;
        let stopped = i64::try_from(budgets.stopped.len()).unwrap_or(i64::MAX);
        one("images_stopped", "Images to which updates have stopped by themselves", stopped)?;
        for (name, help, holds) in conditions(&status, fleet.shared().history.clock_jumped()) {
            one(name, help, i64::from(holds))?;
        }
        let directories = i64::try_from(status.directories).unwrap_or(i64::MAX);
        one("directories", "Distinct directories held in memory", directories)
    }
}

fn encode_rollouts(
    encoder: &mut DescriptorEncoder<'_>,
    counts: &RolloutCounts,
) -> Result<(), std::fmt::Error> {
    let gauge = |count: usize| ConstGauge::new(i64::try_from(count).unwrap_or(i64::MAX));
    let help = "Rollouts that have not ended, by state";
    let mut rollouts = encoder.encode_descriptor("rollouts", help, None, MetricType::Gauge)?;
    for state in RolloutState::UNFINISHED {
        let count = counts.rollouts.get(&state).copied().unwrap_or_default();
        gauge(count).encode(rollouts.encode_family(&[("state", name_of(&state))])?)?;
    }
    let help = "Steps of rollouts that wait for votes";
    let waiting = encoder.encode_descriptor("rollouts_votes", help, None, MetricType::Gauge)?;
    gauge(counts.waiting_for_votes).encode(waiting)?;
    let help = "Machines that an environment gives an image, by revision";
    let mut machines =
        encoder.encode_descriptor("environment_subs", help, None, MetricType::Gauge)?;
    for ((environment, revision), count) in &counts.machines {
        let labels = [("environment", environment.clone()), ("revision", revision.to_string())];
        gauge(*count).encode(machines.encode_family(&labels)?)?;
    }
    Ok(())
}

/// Returns the metrics that are 1 while a condition holds.
fn conditions(
    status: &DominatorStatus,
    clock_jumped: Option<i64>,
) -> [(&'static str, &'static str, bool); 8] {
    [
        ("updates_disabled", "1 while the brake is on", status.brake.is_some()),
        ("mdb_refused", "1 while the machine database cannot be taken", status.mdb_error.is_some()),
        ("mdb_held", "1 while a machine database waits to be accepted", status.mdb_held.is_some()),
        (
            "mdb_not_kept",
            "1 while the machine database in force is not kept over a restart",
            status.mdb_unkept.is_some(),
        ),
        (
            "image_server_failing",
            "1 while the image server does not give an image that is wanted",
            status.image_server_error.is_some(),
        ),
        (
            "alarm_command_failing",
            "1 while the command that tells of alarms fails",
            status.alarm_error.is_some(),
        ),
        (
            "history_failing",
            "1 while what happens cannot be put on record; no update is ordered then",
            status.history_error.is_some(),
        ),
        (
            "clock_jumped",
            "1 while nothing of the history is removed for its age, because the clock jumped",
            clock_jumped.is_some(),
        ),
    ]
}
