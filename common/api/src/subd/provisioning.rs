//! `Subd.Provision`, `Subd.ContinueProvisioning`, `Subd.GiveUpProvisioning`, `Subd.PlanResources`,
//! `Subd.GetResources` and `Subd.OrderResource`: the resources of a machine.

use model::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::Done;
use crate::access::Access;
use crate::audit::call_details::CallDetails;
use crate::method::{Effect, Method};
use model::image::ImageName;
use model::object::ObjectId;
use provisioning::image::Definition;
use provisioning::machine::preview::PlannedResource;

/// Starts to provision the resources of the staged update, with the first wave. If these are
/// provisioned already, or on the way to it, nothing is started; otherwise they replace those of
/// the former image, when what plugins still work on has ended.
///
/// What was started belongs to the image: it goes on when the update is not staged any more.
/// `Commit` of an update is refused until its resources are provisioned.
pub enum Provision {}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ProvisionRequest {
    /// The update; the answer is [`crate::fault::FaultCode::NotFound`] if it is not staged.
    #[serde(with = "model::json::LargeNumber")]
    pub update_id: u64,
}

impl Method for Provision {
    const NAME: &'static str = "Subd.Provision";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Changes;
    type Request = ProvisionRequest;
    type Reply = Done;

    fn audit_details(request: &Self::Request) -> CallDetails {
        CallDetails::default().with("update", request.update_id)
    }
}

/// Starts the next wave, or what has failed once more.
pub enum ContinueProvisioning {}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ContinueProvisioningRequest {
    /// The image; the answer is [`crate::fault::FaultCode::NotFound`] if its resources are not
    /// those that are provisioned.
    pub image_digest: ObjectId,
    /// [`ProvisioningReport::step`] as the caller knows it. A call with a former step has no
    /// effect.
    pub step: u32,
}

impl Method for ContinueProvisioning {
    const NAME: &'static str = "Subd.ContinueProvisioning";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Changes;
    type Request = ContinueProvisioningRequest;
    type Reply = Done;

    fn audit_details(request: &Self::Request) -> CallDetails {
        CallDetails::default().with("digest", request.image_digest).with("step", request.step)
    }
}

/// Gives up the resources of an image that is not to come any more. When what plugins still work on
/// has ended, what was changed for it is made as the active image asks for, and what was made for
/// it leaves or stays as its file says. Has no effect if others are provisioned, or the image is
/// active. The answer is [`crate::fault::FaultCode::Busy`] while an update is carried out.
pub enum GiveUpProvisioning {}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GiveUpProvisioningRequest {
    /// The image, as in [`ProvisioningReport`].
    pub image_digest: ObjectId,
}

impl Method for GiveUpProvisioning {
    const NAME: &'static str = "Subd.GiveUpProvisioning";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Changes;
    type Request = GiveUpProvisioningRequest;
    type Reply = Done;

    fn audit_details(request: &Self::Request) -> CallDetails {
        CallDetails::default().with("digest", request.image_digest)
    }
}

/// Asks plugins what they would do for an image that is not there yet. Nothing changes. One caller
/// is served at a time; the answer to others is [`crate::fault::FaultCode::Busy`].
pub enum PlanResources {}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PlanResourcesRequest {
    /// What the image asks for.
    pub definition: Definition,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PlanResourcesReply {
    /// By id, without those that stay as they are.
    pub resources: Vec<PlannedResource>,
    /// Why nothing is known, as on machines with trusted keys, or nothing could be done.
    pub unknown: Option<String>,
}

impl Method for PlanResources {
    const NAME: &'static str = "Subd.PlanResources";
    const ACCESS: Access = Access::Power;
    // It runs plugins.
    const EFFECT: Effect = Effect::Changes;
    const REQUEST_BYTES_MAX: usize = 16 << 20;
    const REPLY_BYTES_MAX: usize = 16 << 20;
    type Request = PlanResourcesRequest;
    type Reply = PlanResourcesReply;
}

/// Returns the resources of the machine, and how far they are. A subd that has this method
/// provisions, where its root and its flags allow that.
pub enum GetResources {}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GetResourcesRequest {
    /// [`GetResourcesReply::version`] that the caller knows.
    pub have: Option<ObjectId>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GetResourcesReply {
    /// A digest of the report. When it changes, [`super::SubVersion::status`] grows.
    pub version: ObjectId,
    /// `None` if the caller has it.
    pub report: Option<ResourcesReport>,
}

/// The resources of a machine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ResourcesReport {
    /// Why the machine does not provision.
    pub not_run: Option<String>,
    /// What was asked for last with [`Provision`].
    pub provisioning: Option<ProvisioningReport>,
    /// True if [`super::GetFleetResources`] has something to tell.
    pub has_fleet: bool,
    /// A JSON object: by id, the outputs of the resources of the image that the machine has,
    /// without those that are sensitive. Empty if it has none.
    pub outputs: String,
    /// By id.
    pub resources: Vec<ResourceReport>,
}

/// How far the resources of an image are.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ProvisioningReport {
    pub image: ImageName,
    pub image_digest: ObjectId,
    pub stage: ProvisioningStage,
    /// Grows with each [`ContinueProvisioning`] that had an effect.
    pub step: u32,
}

/// How far the resources of an image are. Waves count from 1.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ProvisioningStage {
    /// Plugins work on a wave; 0 if it is what is left of a former image.
    Running { wave: u32, waves: u32 },
    /// The wave waits for [`ContinueProvisioning`].
    Waits { wave: u32, waves: u32 },
    /// All are as asked for.
    Finished,
    /// Some failed, or cannot be provisioned: what plugins said, or what is wrong. It waits for
    /// [`ContinueProvisioning`].
    Failed { error: String },
    /// It waits for what another machine makes for the fleet, as the text says.
    Awaits { text: String },
}

/// A resource.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ResourceReport {
    pub id: String,
    pub kind: String,
    /// Who makes it.
    pub provisioner: String,
    pub state: ResourceState,
    /// Says why.
    pub text: String,
    /// How it differed from what was made when its plugin was asked last. If it is `made`, or on
    /// the way to that, it was made again since.
    pub drift: Option<String>,
    /// True if no image of the machine has it any more, and it stays.
    pub is_orphan: bool,
    /// The ids of the resources that it needs.
    pub needs: Vec<String>,
    /// A JSON object: its outputs, without those that are sensitive.
    pub outputs: String,
}

/// The state of a resource.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum ResourceState {
    /// It is to be made or changed.
    Waiting,
    /// A plugin works on it.
    Running,
    /// It is as asked for.
    Made,
    Failed,
    /// It is to be destroyed, or on the way to it.
    Leaving,
    /// It is not as it was made.
    Drifted,
    /// It is of the fleet, and is as another image asks.
    Conflict,
}

impl ResourceState {
    /// The name in tables and JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Running => "running",
            Self::Made => "made",
            Self::Failed => "failed",
            Self::Leaving => "leaving",
            Self::Drifted => "drifted",
            Self::Conflict => "conflict",
        }
    }
}

impl Method for GetResources {
    const NAME: &'static str = "Subd.GetResources";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Tells;
    const REPLY_BYTES_MAX: usize = 16 << 20;
    type Request = GetResourcesRequest;
    type Reply = GetResourcesReply;
}

/// Gives an order about an orphan: a resource that stays although no image of the machine has it
/// any more. When it is answered, the order holds over restarts of subd and of the machine.
///
/// The answer is [`crate::fault::FaultCode::NotFound`] if there is no such resource,
/// [`crate::fault::FaultCode::BadRequest`] if it is no orphan or others need it, and
/// [`crate::fault::FaultCode::Busy`] while its plugin works on it.
pub enum OrderResource {}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct OrderResourceRequest {
    pub id: String,
    pub order: ResourceOrder,
    /// The reason: at most [`RESOURCE_WHY_BYTES_MAX`], and not empty.
    pub why: String,
}

/// The longest reason of an order about a resource, in bytes.
pub const RESOURCE_WHY_BYTES_MAX: usize = 1_000;

/// What is to become of an orphan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ResourceOrder {
    /// The machine forgets it, and it stays as it is.
    Forget,
    /// The plugin that made it destroys it. That is tried until it is gone.
    Destroy,
}

impl ResourceOrder {
    /// The name on command lines and in the audit log.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Forget => "forget",
            Self::Destroy => "destroy",
        }
    }
}

impl Method for OrderResource {
    const NAME: &'static str = "Subd.OrderResource";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Changes;
    type Request = OrderResourceRequest;
    type Reply = Done;

    fn audit_details(request: &Self::Request) -> CallDetails {
        CallDetails::default()
            .with("resource", &request.id)
            .with("order", request.order.name())
            .why(&request.why)
    }
}
