//! What subs may take of their machines, as operators say it for the fleet, for machines with a
//! tag, or for one machine.
//!
//! Of the values that are given for a machine, the one for the host counts before those for its
//! tags, and these before the one for the fleet. Of several tags of a machine, the one whose name
//! comes first in the alphabet counts, and of one name `NAME=VALUE` before `NAME`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::TagFilter;
use crate::audit::brief::Brief;
use crate::subd::{Limits, LimitsReport};
use crate::{
    access::Access,
    method::{Effect, Method},
};
use model::tree::Time;

/// One of the [`Limits`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Limit {
    /// Of one core, for the content and media passes.
    CpuPercent,
    /// Of the device's speed, for reading it.
    ScanPercent,
    /// Of the device's speed, for writing what is fetched.
    WritePercent,
    /// Of the network's speed, for fetching.
    NetworkPercent,
}

impl Limit {
    /// All of them.
    pub const ALL: [Self; 4] =
        [Self::CpuPercent, Self::ScanPercent, Self::WritePercent, Self::NetworkPercent];

    /// The word for it in commands and JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::CpuPercent => "cpu-percent",
            Self::ScanPercent => "scan-percent",
            Self::WritePercent => "write-percent",
            Self::NetworkPercent => "network-percent",
        }
    }

    /// Its value among `limits`.
    #[must_use]
    pub fn of(self, limits: &Limits) -> Option<u8> {
        match self {
            Self::CpuPercent => limits.cpu_percent,
            Self::ScanPercent => limits.scan_percent,
            Self::WritePercent => limits.write_percent,
            Self::NetworkPercent => limits.network_percent,
        }
    }

    /// Its place among `limits`.
    pub fn of_mut(self, limits: &mut Limits) -> &mut Option<u8> {
        match self {
            Self::CpuPercent => &mut limits.cpu_percent,
            Self::ScanPercent => &mut limits.scan_percent,
            Self::WritePercent => &mut limits.write_percent,
            Self::NetworkPercent => &mut limits.network_percent,
        }
    }
}

/// What a value is given for.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
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

/// A value, and who gave it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Setting {
    /// The value, in per cent: 1 to 100.
    pub percent: u8,
    /// Who gave it.
    pub who: String,
    /// Why.
    pub why: String,
    /// When.
    pub since: Time,
}

/// The values that are given for one level.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LevelSettings {
    /// The level.
    pub level: Level,
    /// The values.
    pub values: BTreeMap<Limit, Setting>,
}

/// Gives values for a level, or takes some back. Kept over restarts.
pub enum SetSubConfiguration {}

/// See [`SetSubConfiguration`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SetSubConfigurationRequest {
    /// The level.
    pub level: Level,
    /// The new values, 1 to 100; `None` takes one back.
    pub values: BTreeMap<Limit, Option<u8>>,
    /// Why.
    pub why: String,
    /// Who says so, as long as no certificate tells.
    pub who: String,
}

/// See [`SetSubConfiguration`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SetSubConfigurationReply {
    /// How many machines of the database in force the level is about.
    pub machines: u32,
}

impl Method for SetSubConfiguration {
    const NAME: &'static str = "Dominator.SetConfiguration";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Changes;
    type Request = SetSubConfigurationRequest;
    type Reply = SetSubConfigurationReply;

    fn brief(request: &Self::Request) -> Brief {
        let value = |(limit, value): (&Limit, &Option<u8>)| match value {
            Some(value) => format!("{}={value}", limit.name()),
            None => format!("{}=unset", limit.name()),
        };
        Brief::default()
            .with("level", &request.level)
            .with_list("values", request.values.iter().map(value))
            .why(&request.why)
            .who(&request.who)
    }
}

/// Tells the values that are given, for all levels or as they concern one machine.
pub enum GetSubConfiguration {}

/// See [`GetSubConfiguration`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GetSubConfigurationRequest {
    /// The machine; all levels are told if `None`.
    pub hostname: Option<String>,
}

/// See [`GetSubConfiguration`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GetSubConfigurationReply {
    /// The levels that have values: fleet, tags, hosts. For a machine those that are about it, the
    /// one that counts most first.
    pub levels: Vec<LevelSettings>,
    /// How it is with the machine that was asked for.
    pub machine: Option<MachineConfiguration>,
}

/// The limits of one machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineConfiguration {
    /// The machine.
    pub hostname: String,
    /// What follows from all levels: what its sub is to be told.
    pub wanted: Limits,
    /// Which level each value comes from.
    pub from: BTreeMap<Limit, Level>,
    /// What its sub was told, and what its own configuration allows at most, by the last poll.
    pub reported: Option<LimitsReport>,
    /// Why it could not be told, if the last try failed.
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
