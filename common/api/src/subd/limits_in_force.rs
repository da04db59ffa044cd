//! `Subd.GetLimits` and `Subd.Hurry`: which limits hold on a machine and why, and how those that
//! nobody set are lifted.

use model::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::Done;
use crate::access::Access;
use crate::method::{Effect, Method};
use model::display::size;

/// Returns the limits that hold now, and why.
pub enum GetLimits {}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GetLimitsReply {
    /// Processor time of the passes.
    pub cpu: LimitInForce,
    /// Reads of scanning.
    pub scan: LimitInForce,
    /// Writes of fetching.
    pub write: LimitInForce,
    /// Fetching over the network.
    pub network: LimitInForce,
}

/// A limit with its reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct LimitInForce {
    /// The most per second, in microseconds of a core or in bytes; 0 for no limit.
    #[serde(with = "model::json::LargeNumber")]
    pub limit: u64,
    /// The share of the speed, in per cent.
    pub percent: u8,
    pub reason: LimitReason,
    /// The speed, in the same unit; 0 if it is not known.
    #[serde(with = "model::json::LargeNumber")]
    pub speed: u64,
    pub speed_source: SpeedSource,
}

/// Why a share is what it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum LimitReason {
    /// The machine's own configuration sets it.
    Ceiling,
    /// A dominator or subtool has set it.
    Told,
    /// Nobody has set it.
    Default,
    /// Nobody has set it, and an installation is not held back.
    Installation,
    /// Nobody has set it, and a fetch that an operator called urgent is not held back.
    Urgent,
}

/// Where a speed comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum SpeedSource {
    /// It is that of a core.
    Core,
    /// The machine's own configuration.
    Configured,
    /// What the network interface reports.
    Interface,
    /// It was measured.
    Measured,
    /// It could not be measured, or what was measured is not plausible.
    Assumed,
    /// It is not known yet.
    Unknown,
}

impl GetLimitsReply {
    /// Returns the limits with their names.
    #[must_use]
    pub fn rows(&self) -> Vec<(&'static str, String)> {
        let Self { cpu, scan, write, network } = self;
        let named = [
            ("cpu limit", cpu),
            ("scan limit", scan),
            ("write limit", write),
            ("network limit", network),
        ];
        named.into_iter().map(|(name, limit)| (name, limit.text())).collect()
    }
}

impl LimitInForce {
    /// Describes the limit and its reason.
    #[must_use]
    pub fn text(&self) -> String {
        let Self { limit, percent, reason, speed, speed_source } = self;
        let reason = match reason {
            LimitReason::Ceiling => "by the machine's own configuration",
            LimitReason::Told => "as set by a dominator or subtool",
            LimitReason::Default => "by default",
            LimitReason::Installation => return "none: this is an installation".to_owned(),
            LimitReason::Urgent => return "none: an operator called the update urgent".to_owned(),
        };
        let speed = match speed_source {
            SpeedSource::Core => return format!("{percent} % of a core {reason}"),
            SpeedSource::Unknown => {
                return format!("none until the speed is known; then {percent} % of it {reason}");
            }
            SpeedSource::Configured => format!("{}/s as configured", size(*speed)),
            SpeedSource::Interface => format!("{}/s as the interface reports", size(*speed)),
            SpeedSource::Measured => format!("{}/s as measured", size(*speed)),
            SpeedSource::Assumed => format!("{}/s, which is assumed", size(*speed)),
        };
        match limit {
            0 => format!("none: {percent} % {reason}"),
            limit => format!("{}/s: {percent} % {reason}, of {speed}", size(*limit)),
        }
    }
}

impl Method for GetLimits {
    const NAME: &'static str = "Subd.GetLimits";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Tells;
    type Request = ();
    type Reply = GetLimitsReply;
}

/// Lifts the limits of fetching that nobody has set, for the fetch that an update needs now and for
/// those that start within ten minutes: an operator called the update urgent.
pub enum Hurry {}

impl Method for Hurry {
    const NAME: &'static str = "Subd.Hurry";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Changes;
    type Request = ();
    type Reply = Done;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_limit_says_why_it_holds() {
        use LimitReason::{Ceiling, Default, Installation, Told, Urgent};
        use SpeedSource::{Assumed, Core, Interface, Measured, Unknown};
        #[rustfmt::skip]
        let table = [
            (50_000, 5, Default, 1_000_000, Core, "5 % of a core by default"),
            (100, 10, Default, 1_000, Assumed,
             "100 bytes/s: 10 % by default, of 1.0 kB/s, which is assumed"),
            (20, 2, Ceiling, 1_000, Measured,
             "20 bytes/s: 2 % by the machine's own configuration, of 1.0 kB/s as measured"),
            (500, 50, Told, 1_000, Interface,
             "500 bytes/s: 50 % as set by a dominator or subtool, of 1.0 kB/s as the interface \
              reports"),
            (0, 100, Ceiling, 1_000, Measured, "none: 100 % by the machine's own configuration"),
            (0, 10, Default, 0, Unknown, "none until the speed is known; then 10 % of it by default"),
            (0, 100, Installation, 1_000, Assumed, "none: this is an installation"),
            (0, 100, Urgent, 1_000, Measured, "none: an operator called the update urgent"),
        ];
        for (limit, percent, reason, speed, speed_source, text) in table {
            let limit = LimitInForce { limit, percent, reason, speed, speed_source };
            assert_eq!(limit.text(), text);
        }
    }
}
