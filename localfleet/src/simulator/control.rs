//! The methods with which the benchmark controls a simulator.
// tidy: core

use api::Done;
use api::{
    access::Access,
    method::{Effect, Method},
};
use serde::{Deserialize, Serialize};

use super::sub::FirstTimes;

/// Returns the counters of the simulator.
pub enum GetSimulatorStatus {}

/// The reply of [`GetSimulatorStatus`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SimulatorStatus {
    /// The port that all subs listen on.
    pub port: u16,
    /// The number of subs.
    pub subs: u32,
    /// Connections that were accepted since the start.
    pub connections: u64,
    /// Polls that were answered since the start.
    pub polls: u64,
    /// Subs that were ordered to do something since the first times were cleared.
    pub ordered: u32,
    /// Subs whose update was verified since the first times were cleared.
    pub verified: u32,
}

impl Method for GetSimulatorStatus {
    const NAME: &'static str = "Simulator.Report";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Tells;
    type Request = ();
    type Reply = SimulatorStatus;
}

/// Clears the first times of all subs. Returns the time, in nanoseconds on the monotonic clock of
/// the system.
pub enum ClearFirstTimes {}

impl Method for ClearFirstTimes {
    const NAME: &'static str = "Simulator.ClearMarks";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Tells;
    type Request = ();
    type Reply = u64;
}

/// Returns the first times of all subs, in the order of their addresses.
pub enum GetFirstTimes {}

impl Method for GetFirstTimes {
    const NAME: &'static str = "Simulator.GetMarks";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Tells;
    const REPLY_BYTES_MAX: usize = 64 << 20;
    type Request = ();
    type Reply = Vec<FirstTimes>;
}

/// Changes one file of one sub.
pub enum Drift {}

/// The request of [`Drift`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DriftRequest {
    /// The number of the sub, from 0.
    pub sub: u32,
    /// Chooses the file and the change.
    pub chance: u64,
}

impl Method for Drift {
    const NAME: &'static str = "Simulator.Drift";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Tells;
    type Request = DriftRequest;
    type Reply = Done;
}

/// Gives each sub as many running daemon tasks.
pub enum SetTasks {}

impl Method for SetTasks {
    const NAME: &'static str = "Simulator.SetTasks";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Tells;
    type Request = u32;
    type Reply = Done;
}

/// Makes parts of the fleet fail, until it is called again.
pub enum Disturb {}

/// The request of [`Disturb`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DisturbRequest {
    /// The percentage of dead subs: half of them refuse connections, half send nothing.
    pub dead_percent: u8,
    /// The percentage of subs that go down and come up again every few seconds.
    pub flapping_percent: u8,
}

impl Method for Disturb {
    const NAME: &'static str = "Simulator.Disturb";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Tells;
    type Request = DisturbRequest;
    type Reply = Done;
}

/// How a sub is disturbed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Disturbance {
    #[default]
    Steady,
    /// It refuses connections.
    Refusing,
    /// It accepts connections, and sends nothing.
    Silent,
    /// It goes down and comes up again and again.
    Flapping,
}

impl DisturbRequest {
    /// Returns the disturbance of the sub with number `sub`. Each hundred subs have the requested
    /// percentages.
    pub fn disturbance(self, sub: usize) -> Disturbance {
        // 37 is coprime to 100, so a hundred subs in a row have all hundred remainders.
        let remainder = sub * 37 % 100;
        let dead = usize::from(self.dead_percent);
        if remainder < dead {
            if remainder.is_multiple_of(2) { Disturbance::Refusing } else { Disturbance::Silent }
        } else if remainder < dead + usize::from(self.flapping_percent) {
            Disturbance::Flapping
        } else {
            Disturbance::Steady
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disturbances_have_the_requested_percentages() {
        let request = DisturbRequest { dead_percent: 10, flapping_percent: 5 };
        let count =
            |disturbance| (0..1_000).filter(|&sub| request.disturbance(sub) == disturbance).count();
        let counts = [
            Disturbance::Steady,
            Disturbance::Refusing,
            Disturbance::Silent,
            Disturbance::Flapping,
        ]
        .map(count);
        assert_eq!(counts, [850, 50, 50, 50]);
        assert!(
            (0..1_000).all(|sub| DisturbRequest::default().disturbance(sub) == Disturbance::Steady)
        );
    }
}
