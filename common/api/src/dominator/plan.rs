//! Previews: what would be done to one machine, or under a machine database that is not in force.
//! None of these methods changes anything.

use model::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Brake, Status};
use crate::planning::preview::{PlanSummary, Preview};
use crate::{
    access::Access,
    method::{Effect, Method},
};
use model::image::ImageName;
use model::mdb::Machine;

/// Returns what an update of one machine would do.
pub enum PlanMachine {}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PlanMachineRequest {
    pub hostname: String,
    /// The image; `None` for the required image of the machine.
    pub image: Option<ImageName>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PlanMachineReply {
    pub preview: Preview,
    /// Why it would not be done now, as statuses with explanations. Obstacles that the plan itself
    /// shows, such as blocked paths, are not repeated.
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

/// Returns what would be done to machines with these records.
pub enum PlanMachines {}

/// The most machines in one request.
pub const MACHINES_MAX: usize = 1_000;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PlanMachinesRequest {
    /// The records: at most [`MACHINES_MAX`].
    pub machines: Vec<Machine>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PlanMachinesReply {
    /// The distinct updates.
    pub updates: Vec<PlanSummary>,
    /// The first of the requested machines, at least one. If the request would take too long the
    /// reply omits the rest, and the caller asks again for those.
    pub machines: Vec<MachinePlan>,
}

/// What would be done to one machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct MachinePlan {
    pub hostname: String,
    pub outlook: PlanOutcome,
    /// Why it would not be done now, as statuses with explanations. Obstacles that the plan itself
    /// shows, such as blocked paths, are not repeated.
    pub waits: Vec<(Status, String)>,
}

/// What would be done to a machine, if that is known.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum PlanOutcome {
    /// It would get this update.
    Update {
        /// The index of the update in the reply.
        update: u32,
        /// How many objects it would fetch.
        fetch_objects: u32,
        #[serde(with = "model::json::LargeNumber")]
        fetch_bytes: u64,
    },
    /// No plan can be made for it.
    Unknown {
        /// The reason, for programs.
        gap: NoPlanReason,
        /// The reason, for people.
        why: String,
    },
}

/// Why no plan can be made.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum NoPlanReason {
    /// The record names no image, and there is no default: nothing would be done.
    ImageUndefined,
    /// The image server does not have the image, or not all of it.
    ImageMissing,
    /// The machine is not managed yet.
    NewMachine,
    /// The record has another address, which was not polled yet.
    OtherAddress,
    /// The machine does not answer.
    NotReached,
    /// The machine has not scanned its tree yet, or the scan cannot be read.
    NotScanned,
    /// The machine must scan with other settings first.
    OtherScan,
    /// No plan can be made from the scan.
    Impossible,
}

impl NoPlanReason {
    /// Returns the name in JSON and commands.
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

/// Returns what a machine database would change in the one in force, and whether it would be held.
pub enum CheckMdb {}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct CheckMdbRequest {
    pub machines: Vec<Machine>,
}

/// See [`CheckMdb`]; host names are sorted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct CheckMdbReply {
    /// Why it would be held until an operator accepts it; `None` if it would not.
    pub held: Option<String>,
    /// The brake, if it is on.
    pub brake: Option<Brake>,
    /// Machines that are only in the new one.
    pub added: Vec<String>,
    /// Machines that are missing in the new one: the dominator would stop managing them.
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
