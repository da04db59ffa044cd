//! How much of their machines subs may use: set by operators for the fleet, for machines with a
//! tag, or for one machine.
//!
//! For a machine, the value of its host has priority over those of its tags, and these over the
//! value of the fleet. Among the tags of a machine, the tag whose name sorts first has priority,
//! and `NAME=VALUE` over `NAME`.

use std::collections::BTreeMap;

use model::JsonSchema;
use serde::{Deserialize, Serialize};

use super::TagFilter;
use crate::audit::call_details::CallDetails;
use crate::subd::{GetLimitsReply, Limits, LimitsReport};
use crate::{
    access::Access,
    method::{Effect, Method},
};
use model::tree::Time;

/// One of the [`Limits`].
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum Limit {
    /// Processor time of the content and media passes, of one core.
    CpuPercent,
    /// Reads from the device, of its speed.
    ScanPercent,
    /// Writes of fetched content, of the device's speed.
    WritePercent,
    /// Fetches, of the network's speed.
    NetworkPercent,
}

impl Limit {
    pub const ALL: [Self; 4] =
        [Self::CpuPercent, Self::ScanPercent, Self::WritePercent, Self::NetworkPercent];

    /// Returns the name in commands and JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::CpuPercent => "cpu-percent",
            Self::ScanPercent => "scan-percent",
            Self::WritePercent => "write-percent",
            Self::NetworkPercent => "network-percent",
        }
    }

    /// Parses the name of a limit.
    ///
    /// # Errors
    ///
    /// Names the known ones.
    pub fn parse(text: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|limit| limit.name() == text).ok_or_else(|| {
            let names = Self::ALL.map(Self::name);
            format!("the limits are {}", names.join(", "))
        })
    }

    /// Parses `LIMIT=PERCENT`, as operators write it; without a value the limit is to be removed.
    ///
    /// # Errors
    ///
    /// If it is no such text.
    pub fn parse_change(text: &str) -> Result<(Self, Option<u8>), String> {
        let (name, value) = text.split_once('=').ok_or("expected LIMIT=PERCENT")?;
        let limit = Self::parse(name)?;
        if value.is_empty() {
            return Ok((limit, None));
        }
        let percent = value.parse().ok().filter(|percent| (1..=100).contains(percent));
        let percent = percent.ok_or_else(|| format!("`{value}` is not a number from 1 to 100"))?;
        Ok((limit, Some(percent)))
    }

    /// Returns its value in `limits`.
    #[must_use]
    pub fn of(self, limits: &Limits) -> Option<u8> {
        match self {
            Self::CpuPercent => limits.cpu_percent,
            Self::ScanPercent => limits.scan_percent,
            Self::WritePercent => limits.write_percent,
            Self::NetworkPercent => limits.network_percent,
        }
    }

    /// Returns a reference to its value in `limits`.
    pub fn of_mut(self, limits: &mut Limits) -> &mut Option<u8> {
        match self {
            Self::CpuPercent => &mut limits.cpu_percent,
            Self::ScanPercent => &mut limits.scan_percent,
            Self::WritePercent => &mut limits.write_percent,
            Self::NetworkPercent => &mut limits.network_percent,
        }
    }
}

/// The machines that a value applies to.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Level {
    /// All machines.
    Fleet,
    /// Machines with a tag.
    Tag(TagFilter),
    /// One machine.
    Host(String),
}

impl std::fmt::Display for Level {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Fleet => formatter.write_str("fleet"),
            Self::Tag(TagFilter { name, value: None }) => write!(formatter, "tag {name}"),
            Self::Tag(TagFilter { name, value: Some(value) }) => {
                write!(formatter, "tag {name}={value}")
            }
            Self::Host(hostname) => write!(formatter, "host {hostname}"),
        }
    }
}

/// A value, and who set it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Setting {
    /// The value, in per cent: 1 to 100.
    pub percent: u8,
    /// Who set it.
    pub who: String,
    pub why: String,
    pub since: Time,
}

/// The values that are set for one level.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct LevelSettings {
    pub level: Level,
    pub values: BTreeMap<Limit, Setting>,
}

/// Sets or unsets values of a level. They persist across restarts.
pub enum SetSubConfiguration {}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SetSubConfigurationRequest {
    pub level: Level,
    /// The new values, 1 to 100; `None` unsets one.
    pub values: BTreeMap<Limit, Option<u8>>,
    pub why: String,
    /// Who says so, as long as no certificate tells.
    pub who: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SetSubConfigurationReply {
    /// How many machines of the machine database in force the level includes.
    pub machines: u32,
}

impl Method for SetSubConfiguration {
    const NAME: &'static str = "Dominator.SetConfiguration";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Changes;
    type Request = SetSubConfigurationRequest;
    type Reply = SetSubConfigurationReply;

    fn audit_details(request: &Self::Request) -> CallDetails {
        let value = |(limit, value): (&Limit, &Option<u8>)| match value {
            Some(value) => format!("{}={value}", limit.name()),
            None => format!("{}=unset", limit.name()),
        };
        CallDetails::default()
            .with("level", &request.level)
            .with_list("values", request.values.iter().map(value))
            .why(&request.why)
            .who(&request.who)
    }
}

/// Returns the values of all levels, or those that apply to one machine.
pub enum GetSubConfiguration {}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GetSubConfigurationRequest {
    /// The machine; `None` for all levels.
    pub hostname: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GetSubConfigurationReply {
    /// The levels that have values: fleet, tags, hosts. For a machine the levels that include it,
    /// by descending priority.
    pub levels: Vec<LevelSettings>,
    /// The configuration of the requested machine.
    pub machine: Option<MachineConfiguration>,
}

/// The limits of one machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct MachineConfiguration {
    pub hostname: String,
    /// The resulting limits, which are sent to its sub.
    pub wanted: Limits,
    /// The level that each value comes from.
    pub from: BTreeMap<Limit, Level>,
    /// The limits that its sub last reported.
    pub reported: Option<LimitsReport>,
    /// Why the limits could not be sent, if the last try failed.
    pub trouble: Option<String>,
}

impl Method for GetSubConfiguration {
    const NAME: &'static str = "Dominator.GetConfiguration";
    const ACCESS: Access = Access::Authenticated;
    const EFFECT: Effect = Effect::Tells;
    const REPLY_BYTES_MAX: usize = 64 << 20;
    type Request = GetSubConfigurationRequest;
    type Reply = GetSubConfigurationReply;
}

/// Returns the limits that hold on one machine now, and why: the machine is asked.
pub enum GetSubLimits {}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GetSubLimitsRequest {
    pub hostname: String,
}

impl Method for GetSubLimits {
    const NAME: &'static str = "Dominator.GetSubLimits";
    const ACCESS: Access = Access::Authenticated;
    const EFFECT: Effect = Effect::Tells;
    type Request = GetSubLimitsRequest;
    type Reply = GetLimitsReply;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_read_as_operators_write_them() {
        let table = [
            ("network-percent=5", Ok((Limit::NetworkPercent, Some(5)))),
            ("cpu-percent=", Ok((Limit::CpuPercent, None))),
            ("cpu-percent=0", Err("`0` is not a number from 1 to 100")),
            ("cpu-percent=300", Err("`300` is not a number from 1 to 100")),
            ("cpu-percent", Err("expected LIMIT=PERCENT")),
            (
                "cpu=1",
                Err("the limits are cpu-percent, scan-percent, write-percent, network-percent"),
            ),
        ];
        for (text, expected) in table {
            assert_eq!(Limit::parse_change(text), expected.map_err(str::to_owned), "{text}");
        }
    }
}
