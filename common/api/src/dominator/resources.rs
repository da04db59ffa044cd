//! `Dominator.GetResources`: the resources of machines.

use serde::{Deserialize, Serialize};

use super::ListSubsRequest;
use crate::access::Access;
use crate::method::{Effect, Method};
use crate::subd::{ResourceReport, ResourcesReport};

/// Asks machines which resources they have, and how far these are. Refuses machines.
pub enum GetResources {}

/// The resources of one machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineResources {
    pub hostname: String,
    /// What the machine says; `None` if it cannot be asked.
    pub report: Option<ResourcesReport>,
    /// Why it cannot be asked.
    pub unknown: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GetResourcesReply {
    /// By host name. Machines without resources are left out, also those whose subd knows nothing
    /// of resources.
    pub machines: Vec<MachineResources>,
}

impl Method for GetResources {
    const NAME: &'static str = "Dominator.GetResources";
    const ACCESS: Access = Access::Authenticated;
    const EFFECT: Effect = Effect::Tells;
    const REPLY_BYTES_MAX: usize = 64 << 20;
    type Request = ListSubsRequest;
    type Reply = GetResourcesReply;
}

impl ResourceReport {
    /// The state that people are shown.
    #[must_use]
    pub fn shown_state(&self) -> &'static str {
        if self.is_orphan { "orphan" } else { self.state.name() }
    }
}
