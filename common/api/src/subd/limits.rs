//! How much of the machine subd may use and uses, and alarms.

use model::JsonSchema;
use serde::{Deserialize, Serialize};

/// Limits, each in per cent. `None` leaves the machine's own limit in force. A value above that has
/// no effect, because remote limits can only be lower.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Limits {
    /// Processor time of the content and media passes, of one core: 1 to 100.
    pub cpu_percent: Option<u8>,
    /// Reads from the device of the root, of its read speed: 1 to 100.
    pub scan_percent: Option<u8>,
    /// Writes of fetched content, of the same speed: 1 to 100.
    pub write_percent: Option<u8>,
    /// Fetches, of the speed of the network: 1 to 100.
    pub network_percent: Option<u8>,
}

/// The limits of a sub.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct LimitsReport {
    /// The limits that the dominator set, unchanged.
    pub told: Limits,
    /// The machine's own limits.
    pub ceilings: Limits,
}

impl LimitsReport {
    /// Returns the limits in force: the lower of each two.
    #[must_use]
    pub fn in_force(&self) -> Limits {
        let of = |told: Option<u8>, ceiling: Option<u8>| match (told, ceiling) {
            (Some(told), Some(ceiling)) => Some(told.min(ceiling)),
            (told, ceiling) => told.or(ceiling),
        };
        let Self { told, ceilings } = self;
        Limits {
            cpu_percent: of(told.cpu_percent, ceilings.cpu_percent),
            scan_percent: of(told.scan_percent, ceilings.scan_percent),
            write_percent: of(told.write_percent, ceilings.write_percent),
            network_percent: of(told.network_percent, ceilings.network_percent),
        }
    }
}

/// A limit in force, and how much of it is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ResourceUse {
    /// The most per second; 0 for no limit.
    #[serde(with = "model::json::LargeNumber")]
    pub limit: u64,
    /// The use per second, averaged over the last minute.
    #[serde(with = "model::json::LargeNumber")]
    pub used: u64,
}

/// How much of the machine subd uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Load {
    /// Processor time of the passes, in microseconds of one core.
    pub cpu: ResourceUse,
    /// Bytes read from the device of the root.
    pub scan: ResourceUse,
    /// Bytes of fetched files written.
    pub write: ResourceUse,
    /// Bytes fetched over the network.
    pub network: ResourceUse,
}

/// A fault that an operator should know of, and that may disappear by itself.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Alarm {
    /// The root is mounted read-only: nothing can be repaired.
    ReadOnly,
    /// A test file could not be written, with the error.
    WriteFailed(String),
    /// A pass has not ended for two of its periods: its name and its position.
    ScannerStalled(String),
    /// The journal of an update cannot be closed, with the reason. The update is retried.
    JournalStuck(String),
}

impl Alarm {
    /// The kinds of alarm, sorted.
    pub const KINDS: [&str; 4] = ["journal-stuck", "read-only", "scanner-stalled", "write-failed"];

    /// Returns the kind in JSON and metrics.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::ReadOnly => "read-only",
            Self::WriteFailed(_) => "write-failed",
            Self::ScannerStalled(_) => "scanner-stalled",
            Self::JournalStuck(_) => "journal-stuck",
        }
    }
}

impl std::fmt::Display for Alarm {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::ReadOnly => write!(formatter, "the root is read-only: nothing can be repaired"),
            Self::WriteFailed(why) => write!(formatter, "the root cannot be written: {why}"),
            Self::ScannerStalled(what) => write!(formatter, "the scanner stalls: {what}"),
            Self::JournalStuck(why) => {
                write!(formatter, "an update cannot be closed: {why}")
            }
        }
    }
}
