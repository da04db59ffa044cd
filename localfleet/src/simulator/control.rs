//! What the benchmark asks of a simulator, over the wire, at a port of its own.
// tidy: core

use api::Done;
use api::{
    access::Access,
    method::{Effect, Method},
};
use serde::{Deserialize, Serialize};

use super::sub::FirstTimes;

/// Tells how the simulator is doing.
pub enum GetSimulatorStatus {}

/// See [`GetSimulatorStatus`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SimulatorStatus {
    /// The port that all subs listen on.
    pub port: u16,
    /// How many subs there are.
    pub subs: u32,
    /// Connections that were taken in since the start.
    pub connections: u64,
    /// Polls that were answered since the start.
    pub polls: u64,
    /// Subs that were told to do something since the first_times were cleared.
    pub ordered: u32,
    /// Subs whose update was verified since the first_times were cleared.
    pub verified: u32,
}

impl Method for GetSimulatorStatus {
    const NAME: &'static str = "Simulator.Report";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Tells;
    type Request = ();
    type Reply = SimulatorStatus;
}

/// Forgets when which sub first saw what; answers with the time, in nanoseconds on the monotonic
/// clock of the system.
pub enum ClearFirstTimes {}

impl Method for ClearFirstTimes {
    const NAME: &'static str = "Simulator.ClearMarks";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Tells;
    type Request = ();
    type Reply = u64;
}

/// Tells when each sub, in the order of their addresses, first saw what.
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

/// See [`Drift`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DriftRequest {
    /// The number of the sub, from 0.
    pub sub: u32,
    /// Which file, and how.
    pub chance: u64,
}

impl Method for Drift {
    const NAME: &'static str = "Simulator.Drift";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Tells;
    type Request = DriftRequest;
    type Reply = Done;
}

/// Lets shares of the fleet fail, until it is called again.
pub enum Disturb {}

/// See [`Disturb`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DisturbRequest {
    /// Subs that are dead, per cent: half of them refuse connections, half say nothing.
    pub dead_percent: u8,
    /// Subs that go down and come up again every few seconds, per cent.
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
    /// Not at all.
    #[default]
    Steady,
    /// It refuses connections.
    Refusing,
    /// It takes connections, and says nothing.
    Silent,
    /// It goes down and comes up.
    Flapping,
}

impl DisturbRequest {
    /// What becomes of the sub with number `sub`: in each hundred of them every disturbance is as
    /// frequent
    /// as was asked for.
    pub fn disturbance(self, sub: usize) -> Disturbance {
        // A number that has no factor in common with a hundred visits all of a hundred.
        let place = sub * 37 % 100;
        let dead = usize::from(self.dead_percent);
        if place < dead {
            if place.is_multiple_of(2) { Disturbance::Refusing } else { Disturbance::Silent }
        } else if place < dead + usize::from(self.flapping_percent) {
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
    fn fates_are_as_frequent_as_asked_for() {
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
