//! `Subd`: the methods of the agent on a machine.
//!
//! `Poll`, `SetConfiguration`, `GetDirectories`, `Fetch`, `Prepare` and `Commit` in their version 1
//! are frozen: every later release of subd and of the dominator supports them, so that a machine
//! that returns after a year can be updated, including its subd.
//!
//! Fetch, Prepare and Commit answer as soon as the work is accepted; Poll reports the result. Each
//! may be repeated with the same id without effect.

mod add_objects;
mod count_owners;
mod directory_blocks;
mod fleet_resources;
mod holder;
mod limits;
mod limits_in_force;
mod offer_contents;
mod operator;
mod poll;
mod preview_scan;
mod provisioning;
mod refused;
mod replace_certificate;
mod tasks;

use std::sync::Arc;

use model::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Done;
use crate::audit::call_details::CallDetails;
use crate::{
    access::Access,
    method::{Effect, Method},
};
use model::image::{Content, HealthCheck, ImageName};
use model::object::ObjectId;
use model::plan::Plan;
use model::scope::{Coverage, ScanSettings, Scope};
use model::signing::Signature;
use model::trigger::Triggers;

pub use add_objects::{AddObjects, AddObjectsRequest};
pub use count_owners::{
    COUNT_MS_MAX, CountOwners, CountOwnersReply, CountOwnersRequest, OWNERS_MAX,
};
pub use directory_blocks::{
    BLOCKS_BYTES_MIN, DirectoryBlock, GetDirectoryBlocks, GetDirectoryBlocksReply,
    GetDirectoryBlocksRequest, HAVE_MAX,
};
pub use fleet_resources::{
    FleetResourceNews, FleetResourceReport, GetFleetResources, GetFleetResourcesReply,
    GetFleetResourcesRequest, MadeReport, OUTPUTS_BYTES_MAX, PermitResource, SharedResource,
    TellFleetResources, TellFleetResourcesRequest,
};
pub use holder::{
    DOMINATOR_BYTES_MAX, HOLD_SECONDS, HoldMachine, HoldMachineRequest, TakeOver, TakeOverReply,
    TakeOverRequest,
};
pub use limits::{Alarm, Limits, LimitsReport, Load, ResourceUse};
pub use limits_in_force::{
    GetLimits, GetLimitsReply, Hurry, LimitInForce, LimitReason, SpeedSource,
};
pub use offer_contents::{
    ForgetIssued, ForgetIssuedReply, ForgetIssuedRequest, OfferContents, OfferContentsRequest,
};
pub use operator::{
    CheckHealth, CheckHealthReply, GetFiles, GetFilesReply, GetFilesRequest, PIECE_BYTES_MAX,
    PIECES_MAX, Pause, Paused, Piece, PieceContent, Resume, RetryTriggers, ScanNow, ScanNowRequest,
};
pub use poll::{
    Activity, CacheReport, Complaint, FetchFailure, FetchProgress, FreeSpace, Health, LastFetch,
    LastUpdate, POLL_WAIT_MS_MAX, Poll, PollReply, PollRequest, ScanCounters, ScanReport,
    SubIdentity, SubVersion, TriggerFailure, UNREADABLE_MAX, UpdateOutcome, UpdatePhase,
};
pub use preview_scan::{PreviewScan, PreviewScanReply, PreviewScanRequest};
pub use provisioning::{
    ContinueProvisioning, ContinueProvisioningRequest, GetResources, GetResourcesReply,
    GetResourcesRequest, GiveUpProvisioning, GiveUpProvisioningRequest, OrderResource,
    OrderResourceRequest, PlanResources, PlanResourcesReply, PlanResourcesRequest, Provision,
    ProvisionRequest, ProvisioningReport, ProvisioningStage, RESOURCE_WHY_BYTES_MAX, ResourceOrder,
    ResourceReport, ResourceState, ResourcesReport,
};
pub use refused::{GetRefusedChanges, GetRefusedChangesReply, REFUSED_MAX};
pub use replace_certificate::{OWN_CERTIFICATE, ReplaceCertificate, ReplaceCertificateRequest};
pub use tasks::{
    DEPARTED_WHY, GetTaskLog, GetTaskLogReply, GetTaskLogRequest, GetTaskStates,
    GetTaskStatesReply, GetTaskStatesRequest, GetTasks, GetTasksReply, OrderTask, OrderTaskRequest,
    PermitReport, PermitTask, PermitTaskReply, PermitTaskRequest, SetNotRestarted,
    SetNotRestartedRequest, TASK_LOG_BYTES_MAX, TASK_WHY_BYTES_MAX, TaskOrder, TaskReport,
    TaskState, TaskStates, TasksVersion,
};

/// Returns directories of the scanned tree by digest.
pub enum GetDirectories {}

/// The most digests in one request.
pub const DIRECTORIES_MAX: usize = 4_096;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GetDirectoriesRequest {
    /// The digests: at most [`DIRECTORIES_MAX`].
    pub digests: Vec<ObjectId>,
}

/// The encoding of one directory (`tree-1`).
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, JsonSchema)]
pub struct EncodedDirectory(pub model::escape::ByteText);

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GetDirectoriesReply {
    /// The directories that the scanned tree has, in the order of the request. Others are left out:
    /// the tree has changed, so poll again. The server may stop early to keep the reply small; ask
    /// again for the rest.
    pub directories: Vec<EncodedDirectory>,
    /// Digests that the scanned tree does not have.
    pub absent: Vec<ObjectId>,
}

impl Method for GetDirectories {
    const NAME: &'static str = "Subd.GetDirectories";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Tells;
    const REPLY_BYTES_MAX: usize = 64 << 20;
    type Request = GetDirectoriesRequest;
    type Reply = GetDirectoriesReply;
}

/// Starts to fetch objects into the cache. Content that a file of the machine has is copied from
/// there.
pub enum Fetch {}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct FetchRequest {
    /// Chosen by the caller. A repeated call with the same id has no effect.
    #[serde(with = "model::json::LargeNumber")]
    pub fetch_id: u64,
    /// `host:port` of object servers, tried in this order.
    pub sources: Vec<String>,
    /// The objects: at most [`super::object_server::IDS_MAX`].
    pub objects: Arc<[FetchObject]>,
    /// True if the objects are prefetched: a fetch that is needed ends this one.
    pub ahead: bool,
}

/// One object to fetch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct FetchObject {
    pub id: ObjectId,
    /// Its length, in bytes.
    #[serde(with = "model::json::LargeNumber")]
    pub size_bytes: u64,
}

impl Method for Fetch {
    const NAME: &'static str = "Subd.Fetch";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Changes;
    const REQUEST_BYTES_MAX: usize = 16 << 20;
    type Request = FetchRequest;
    type Reply = Done;

    fn audit_details(request: &Self::Request) -> CallDetails {
        CallDetails::default()
            .with("fetch", request.fetch_id)
            .with_list("sources", &request.sources)
            .with("objects", request.objects.len())
            .with("ahead", request.ahead)
    }
}

/// Stages an update. No visible path changes.
pub enum Prepare {}

/// The state that the plan is based on. If any of it differs the answer is
/// [`crate::fault::FaultCode::Stale`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ExpectedState {
    /// The instance of the sub.
    #[serde(with = "model::json::LargeNumber")]
    pub instance: u64,
    /// The digest of the scanned tree.
    pub root: ObjectId,
    /// The scope of the scan.
    pub scope: Scope,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PrepareRequest {
    /// Chosen by the caller. A repeated call with the same id has no effect.
    #[serde(with = "model::json::LargeNumber")]
    pub update_id: u64,
    /// The state that the plan is based on.
    pub expects: ExpectedState,
    /// The new image.
    pub image: ImageName,
    /// The digest of the image's content.
    pub image_digest: ObjectId,
    pub plan: Arc<Plan>,
    /// The triggers of the image.
    pub triggers: Triggers,
    /// The health check of the image.
    pub health_check: Option<HealthCheck>,
    /// Does not ask the machine's disruption command about changes of high impact.
    pub force_disruption: bool,
    /// How long the staged update waits for its Commit, in seconds.
    pub expires_seconds: u32,
}

impl Method for Prepare {
    const NAME: &'static str = "Subd.Prepare";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Changes;
    const REQUEST_BYTES_MAX: usize = 128 << 20;
    type Request = PrepareRequest;
    type Reply = Done;

    fn audit_details(request: &Self::Request) -> CallDetails {
        CallDetails::default()
            .with("update", request.update_id)
            .with("image", &request.image)
            .with("digest", request.image_digest)
            .with("operations", request.plan.operations.len())
            .with("force-disruption", request.force_disruption)
    }
}

/// Carries out the staged update.
pub enum Commit {}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct CommitRequest {
    /// The update; the answer is [`crate::fault::FaultCode::NotFound`] if it is not staged.
    #[serde(with = "model::json::LargeNumber")]
    pub update_id: u64,
}

impl Method for Commit {
    const NAME: &'static str = "Subd.Commit";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Changes;
    type Request = CommitRequest;
    type Reply = Done;

    fn audit_details(request: &Self::Request) -> CallDetails {
        CallDetails::default().with("update", request.update_id)
    }
}

/// Removes objects from the cache.
pub enum Cleanup {}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct CleanupRequest {
    /// The objects: at most [`super::object_server::IDS_MAX`]. Unknown ones are ignored.
    pub objects: Vec<ObjectId>,
}

impl Method for Cleanup {
    const NAME: &'static str = "Subd.Cleanup";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Relieves;
    const REQUEST_BYTES_MAX: usize = 16 << 20;
    type Request = CleanupRequest;
    type Reply = Done;

    fn audit_details(request: &Self::Request) -> CallDetails {
        CallDetails::default().with_list("objects", &request.objects)
    }
}

/// Returns the configuration in force.
pub enum GetConfiguration {}

/// The configuration that a dominator sets.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Configuration {
    /// How to scan.
    pub scan: ScanSettings,
    /// How much of the machine subd may use, within the machine's own limits.
    pub limits: Limits,
}

impl Method for GetConfiguration {
    const NAME: &'static str = "Subd.GetConfiguration";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Tells;
    const REPLY_BYTES_MAX: usize = 16 << 20;
    type Request = ();
    type Reply = Configuration;
}

/// The new configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SetConfigurationRequest {
    /// How to scan; `None` leaves it unchanged.
    pub scan: Option<ScanSettings>,
    /// The limits; `None` leaves them unchanged.
    pub limits: Option<Limits>,
}

/// Changes the configuration; it persists across restarts. A change of the scan settings starts a
/// new scan, which hashes only what it must.
pub enum SetConfiguration {}

impl Method for SetConfiguration {
    const NAME: &'static str = "Subd.SetConfiguration";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Changes;
    const REQUEST_BYTES_MAX: usize = 16 << 20;
    type Request = SetConfigurationRequest;
    type Reply = Done;

    fn audit_details(request: &Self::Request) -> CallDetails {
        let coverage = request.scan.as_ref().map(|scan| match &scan.coverage {
            Coverage::Full(_) => "full",
            Coverage::Paths(_) => "sparse",
        });
        let limits = request.limits.unwrap_or_default();
        CallDetails::default()
            .with_some("scan", coverage)
            .with("limits", request.limits.is_some())
            .with_some("cpu-percent", limits.cpu_percent)
            .with_some("scan-percent", limits.scan_percent)
            .with_some("write-percent", limits.write_percent)
            .with_some("network-percent", limits.network_percent)
    }
}

/// The most sources in one offer.
pub const SOURCES_MAX: usize = 64;

/// Sends the signed part of an image with its signatures, before a Prepare for it. A sub that has
/// trusted keys verifies them and fetches the directories of the tree by digest. It answers when it
/// has them, and `busy` until then: ask again. A sub without trusted keys has nothing to do.
pub enum OfferImage {}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct OfferImageRequest {
    pub content: Content,
    /// The signatures: at most [`model::signing::SIGNATURES_MAX`].
    pub signatures: Vec<Signature>,
    /// `host:port` of object servers that have the directories, tried in this order: at most
    /// [`SOURCES_MAX`].
    pub sources: Vec<String>,
}

impl Method for OfferImage {
    const NAME: &'static str = "Subd.OfferImage";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Changes;
    const REQUEST_BYTES_MAX: usize = 16 << 20;
    type Request = OfferImageRequest;
    type Reply = Done;

    fn audit_details(request: &Self::Request) -> CallDetails {
        CallDetails::default()
            .with("image", &request.content.name)
            .with("digest", request.content.digest())
            .with("signatures", request.signatures.len())
            .with_list("sources", &request.sources)
    }
}
