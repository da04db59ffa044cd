//! What operators ask before they order: what would be done to one machine, or under a whole
//! machine database that is not in force. None of these changes anything, anywhere.

use serde::{Deserialize, Serialize};

use super::{Brake, Status};
use crate::planning::preview::{Preview, Summary};
use crate::{
    access::Access,
    method::{Effect, Method},
};
use model::image::ImageName;
use model::mdb::Machine;

/// Tells what an update of one machine would do.
pub enum PlanMachine {}

/// See [`PlanMachine`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlanMachineRequest {
    /// The machine.
    pub hostname: String,
    /// The image; if `None`, the one that the machine database names, or else the default.
    pub image: Option<ImageName>,
}

/// See [`PlanMachine`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlanMachineReply {
    /// What would be done.
    pub preview: Preview,
    /// Why it would not be done now, as statuses with words; what is in the plan itself, such as
    /// blocked paths, aside.
    pub waits: Vec<(Status, String)>,
}

impl Method for PlanMachine {
    const NAME: &'static str = "Dominator.PlanMachine";
    const ACCESS: Access = Access::Authenticated;
    const EFFECT: Effect = Effect::Tells;
    const REPLY_BYTES_MAX: usize = 128 << 20;
    type Request = PlanMachineRequest;
    type Reply = PlanMachineReply;
}

/// Tells what would be done to machines if these were their records.
pub enum PlanMachines {}

/// The most machines in one request.
pub const MACHINES_MAX: usize = 1_000;

/// See [`PlanMachines`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlanMachinesRequest {
    /// The records: at most [`MACHINES_MAX`].
    pub machines: Vec<Machine>,
}

/// See [`PlanMachines`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlanMachinesReply {
    /// The updates that differ from each other.
    pub updates: Vec<Summary>,
    /// The first of the machines that were asked for, at least one: the caller asks again for
    /// those that are not told, because that would have taken too long.
    pub machines: Vec<MachinePlan>,
}

/// What would be done to one machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachinePlan {
    /// The machine.
    pub hostname: String,
    /// What would be done.
    pub outlook: Outlook,
    /// Why it would not be done now, as statuses with words.
    pub waits: Vec<(Status, String)>,
}

/// What would be done to a machine, if that is known.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outlook {
    /// It has this update.
    Update {
        /// Which of the updates in the reply.
        update: u32,
        /// Objects that it would fetch.
        fetch_objects: u32,
        /// Their bytes.
        #[serde(with = "model::wide")]
        fetch_bytes: u64,
    },
    /// No plan can be made for it.
    Unknown {
        /// Why, for programs.
        gap: Gap,
        /// Why, in words.
        why: String,
    },
}

/// What is missing for a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Gap {
    /// The record names no image, and there is no default: nothing would be done.
    ImageUndefined,
    /// The image server does not have the image, or not all of it.
    ImageMissing,
    /// The machine is not looked after yet.
    NewMachine,
    /// The record gives the machine another address: nobody has looked what is there.
    OtherAddress,
    /// The machine does not answer.
    NotReached,
    /// The machine has not scanned its tree yet, or the scan cannot be read.
    NotScanned,
    /// The machine does not scan as the image asks: before the update it would be told to.
    OtherScan,
    /// No plan can be made of what is known.
    Impossible,
}

impl Gap {
    /// The word that scripts match.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::ImageUndefined => "image-undefined",
            Self::ImageMissing => "image-missing",
            Self::NewMachine => "new-machine",
            Self::OtherAddress => "other-address",
            Self::NotReached => "not-reached",
            Self::NotScanned => "not-scanned",
            Self::OtherScan => "other-scan",
            Self::Impossible => "impossible",
        }
    }
}

impl Method for PlanMachines {
    const NAME: &'static str = "Dominator.PlanMachines";
    const ACCESS: Access = Access::Authenticated;
    const EFFECT: Effect = Effect::Tells;
    const REQUEST_BYTES_MAX: usize = 16 << 20;
    const REPLY_BYTES_MAX: usize = 64 << 20;
    type Request = PlanMachinesRequest;
    type Reply = PlanMachinesReply;
}

/// Tells what a machine database would change of the one in force, and whether it would be held.
pub enum CheckMdb {}

/// See [`CheckMdb`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckMdbRequest {
    /// All machines of it.
    pub machines: Vec<Machine>,
}

/// See [`CheckMdb`]; host names are sorted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckMdbReply {
    /// Why it would be held until an operator accepts it, if it would.
    pub held: Option<String>,
    /// The brake, if it is on.
    pub brake: Option<Brake>,
    /// Machines that only it has.
    pub added: Vec<String>,
    /// Machines that it lacks: the dominator would let go of them, and leave them as they are.
    pub removed: Vec<String>,
    /// Machines whose records differ.
    pub changed: Vec<String>,
}

impl Method for CheckMdb {
    const NAME: &'static str = "Dominator.CheckMdb";
    const ACCESS: Access = Access::Authenticated;
    const EFFECT: Effect = Effect::Tells;
    const REQUEST_BYTES_MAX: usize = 64 << 20;
    const REPLY_BYTES_MAX: usize = 64 << 20;
    type Request = CheckMdbRequest;
    type Reply = CheckMdbReply;
}
