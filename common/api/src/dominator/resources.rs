//! `Dominator.GetResources`, `Dominator.PlanResources` and `Dominator.OrderResource`: the resources
//! of machines.

use model::JsonSchema;
use serde::{Deserialize, Serialize};

use super::ListSubsRequest;
use super::kept_files::ImageOfMachine;
use crate::Done;
use crate::access::Access;
use crate::audit::call_details::CallDetails;
use crate::method::{Effect, Method};
use crate::subd::{ResourceOrder, ResourceReport, ResourcesReport};
use model::image::ImageName;
use provisioning::machine::preview::PlannedResource;

/// Asks machines which resources they have, and how far these are. Refuses machines.
pub enum GetResources {}

/// The resources of one machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct MachineResources {
    pub hostname: String,
    /// What the machine says; `None` if it cannot be asked.
    pub report: Option<ResourcesReport>,
    /// Why it cannot be asked.
    pub unknown: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
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

/// Has machines ask their plugins what they would do for other images. Nothing changes, but plugins
/// may run commands that these images name: who may not have images required may not call this.
pub enum PlanResources {}

/// The most machines in one request: they are asked at the same time.
pub const PLANNING_MAX: usize = 50;

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PlanResourcesRequest {
    /// At most [`PLANNING_MAX`].
    pub machines: Vec<ImageOfMachine>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PlanResourcesReply {
    /// In the order of the request, without machines for which nothing would be done.
    pub machines: Vec<PlannedResources>,
}

/// What would be done about the resources of a machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PlannedResources {
    pub hostname: String,
    pub image: ImageName,
    /// By id.
    pub resources: Vec<PlannedResource>,
    /// Why nothing is known, or nothing could be done.
    pub unknown: Option<String>,
}

impl Method for PlanResources {
    const NAME: &'static str = "Dominator.PlanResources";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Changes;
    const REPLY_BYTES_MAX: usize = 64 << 20;
    type Request = PlanResourcesRequest;
    type Reply = PlanResourcesReply;

    fn audit_details(request: &Self::Request) -> CallDetails {
        let mut details = CallDetails::default().with("machines", request.machines.len());
        if let [ImageOfMachine { hostname, image }, ..] = &*request.machines {
            details = details.with("first", hostname).with("image", image);
        }
        details
    }
}

/// Gives a machine an order about an orphan: see [`crate::subd::OrderResource`], whose fault is the
/// answer too. It is recorded before the machine is told.
pub enum OrderResource {}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct OrderResourceRequest {
    pub hostname: String,
    pub id: String,
    pub order: ResourceOrder,
    /// The reason; must not be empty.
    pub why: String,
    /// Who asks, if the call has no certificate.
    #[serde(default)]
    pub who: String,
}

impl Method for OrderResource {
    const NAME: &'static str = "Dominator.OrderResource";
    const ACCESS: Access = Access::PowerOrOwner;
    const EFFECT: Effect = Effect::Changes;
    type Request = OrderResourceRequest;
    type Reply = Done;

    fn audit_details(request: &Self::Request) -> CallDetails {
        CallDetails::default()
            .with("host", &request.hostname)
            .with("resource", &request.id)
            .with("order", request.order.name())
            .why(&request.why)
            .who(&request.who)
    }
}

impl ResourceReport {
    /// The state that people are shown.
    #[must_use]
    pub fn shown_state(&self) -> &'static str {
        if self.is_orphan { "orphan" } else { self.state.name() }
    }
}
