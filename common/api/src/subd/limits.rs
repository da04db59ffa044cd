//! What subd may take of the machine, and what it takes.

use serde::{Deserialize, Serialize};

/// Ceilings, each in per cent. `None` leaves the machine's own ceiling as it is; a value above that
/// changes nothing, because over the wire ceilings can only be lowered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Limits {
    /// Of one core, for the content and media passes: 1 to 100.
    pub cpu_percent: Option<u8>,
    /// Of the speed at which the device of the root can be read, for reading it: 1 to 100.
    pub scan_percent: Option<u8>,
    /// Of that same speed, for writing what is fetched: 1 to 100.
    pub write_percent: Option<u8>,
    /// Of the speed of the network, for fetching: 1 to 100.
    pub network_percent: Option<u8>,
}

/// What a sub was told to take at most, and what the machine's own configuration allows at most.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LimitsReport {
    /// The limits that came over the wire last, as they came.
    pub told: Limits,
    /// The machine's own ceilings.
    pub ceilings: Limits,
}

impl LimitsReport {
    /// The limits in force: of each two the lower.
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

/// One ceiling that is in force, and what is used of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Share {
    /// The most in a second; 0 if there is no ceiling.
    #[serde(with = "model::wide")]
    pub limit: u64,
    /// What was used in a second, on average over the last minute.
    #[serde(with = "model::wide")]
    pub used: u64,
}

/// What subd takes of the machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Load {
    /// Processor time of the passes, in microseconds of one core.
    pub cpu: Share,
    /// Bytes read from the device of the root.
    pub scan: Share,
    /// Bytes of fetched files written.
    pub write: Share,
    /// Bytes fetched over the network.
    pub network: Share,
}

/// Something that an operator should know, and that may go away by itself.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Alarm {
    /// The root is mounted read-only: nothing can be repaired.
    ReadOnly,
    /// A file that was written as a trial could not be: what the kernel said.
    WriteFailed(String),
    /// A pass has not come to its end for two of its periods: which one, and what it is at.
    ScannerStalled(String),
    /// The journal of an update cannot be closed: why. The update is retried.
    JournalStuck(String),
}

impl Alarm {
    /// The kinds of alarm, sorted.
    pub const KINDS: [&str; 4] = ["journal-stuck", "read-only", "scanner-stalled", "write-failed"];

    /// The kind of the alarm, as JSON and metrics know it.
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
                write!(formatter, "an update can neither be finished nor put back: {why}")
            }
        }
    }
}
