//! Every method that one daemon offers to another, with its request and reply, their encoding, and
//! who may call it.
//!
//! Each method implements [`method::Method`]. [`codec`] holds the two encodings, [`fault`] the
//! errors that a server answers. [`access`] decides who may call, from what a [`certificate`]
//! states about its holder. [`audit`] is the format of the audit log.
//!
//! `docs/PROTOCOL.md` lists the methods. Names of later releases are reserved here, so that powers
//! in certificates and access rules need not change when they come. Everything here is a function
//! of its arguments; `rpc` carries the calls.

pub mod access;
pub mod audit;
pub mod certificate;
pub mod codec;
pub mod dominator;
pub mod fault;
pub mod file_generator;
pub mod image_server;
pub mod mdb;
pub mod method;
pub mod object_server;
pub mod object_stream;
pub mod planning;
pub mod subd;

use access::Access;
use method::MethodInfo;
use model::JsonSchema;
use serde::{Deserialize, Serialize};

/// The version of the protocol that this release speaks.
pub const PROTOCOL: u32 = 1;

/// The oldest version that this release still answers.
pub const PROTOCOL_OLDEST: u32 = 1;

/// The header that carries the protocol version on every call and reply.
pub const PROTOCOL_HEADER: &str = "dominator-protocol";

/// The reply of methods that return nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Done {}

// tidy: table
/// Returns all methods, sorted by name, including the reserved ones.
#[must_use]
pub fn methods() -> Vec<MethodInfo> {
    use Access::Authenticated;
    let reserve = MethodInfo::reserve;
    let mut methods = vec![
        MethodInfo::of::<subd::Poll>(),
        MethodInfo::of::<subd::GetDirectories>(),
        MethodInfo::of::<subd::GetDirectoryBlocks>(),
        MethodInfo::of::<subd::Fetch>(),
        MethodInfo::of::<subd::Prepare>(),
        MethodInfo::of::<subd::Commit>(),
        MethodInfo::of::<subd::Cleanup>(),
        MethodInfo::of::<subd::GetConfiguration>(),
        MethodInfo::of::<subd::SetConfiguration>(),
        MethodInfo::of::<subd::ScanNow>(),
        MethodInfo::of::<subd::Pause>(),
        MethodInfo::of::<subd::Resume>(),
        MethodInfo::of::<subd::GetFiles>(),
        MethodInfo::of::<subd::CheckHealth>(),
        MethodInfo::of::<subd::OfferImage>(),
        MethodInfo::of::<subd::OfferContents>(),
        MethodInfo::of::<subd::ForgetIssued>(),
        MethodInfo::of::<subd::GetRefusedChanges>(),
        MethodInfo::of::<subd::HoldMachine>(),
        MethodInfo::of::<subd::TakeOver>(),
        MethodInfo::of::<subd::RetryTriggers>(),
        MethodInfo::of::<subd::PreviewScan>(),
        MethodInfo::of::<subd::CountOwners>(),
        MethodInfo::of::<subd::GetLimits>(),
        MethodInfo::of::<subd::Hurry>(),
        MethodInfo::of::<dominator::settings::GetSubLimits>(),
        MethodInfo::of::<dominator::orders::GoOn>(),
        MethodInfo::of::<dominator::tasks::ListTasks>(),
        MethodInfo::of::<dominator::tasks::GetTask>(),
        MethodInfo::of::<dominator::tasks::OrderTasks>(),
        MethodInfo::of::<dominator::tasks::GetTaskLog>(),
        MethodInfo::of::<dominator::permits::FenceMachine>(),
        MethodInfo::of::<dominator::permits::ListPermits>(),
        MethodInfo::of::<dominator::departing::ListDeparting>(),
        MethodInfo::of::<dominator::departing::OrderDeparting>(),
        MethodInfo::of::<dominator::rollouts::EditEnvironments>(),
        MethodInfo::of::<dominator::rollouts::OrderEnvironment>(),
        MethodInfo::of::<dominator::rollouts::ListEnvironments>(),
        MethodInfo::of::<dominator::rollouts::PlanRollout>(),
        MethodInfo::of::<dominator::rollouts::StartRollout>(),
        MethodInfo::of::<dominator::rollouts::OrderRollout>(),
        MethodInfo::of::<dominator::rollouts::VoteOnStep>(),
        MethodInfo::of::<dominator::rollouts::ListRollouts>(),
        MethodInfo::of::<subd::GetTasks>(),
        MethodInfo::of::<subd::GetTaskStates>(),
        MethodInfo::of::<subd::OrderTask>(),
        MethodInfo::of::<subd::PermitTask>(),
        MethodInfo::of::<subd::SetNotRestarted>(),
        MethodInfo::of::<subd::GetTaskLog>(),
        MethodInfo::of::<subd::Provision>(),
        MethodInfo::of::<subd::ContinueProvisioning>(),
        MethodInfo::of::<subd::GiveUpProvisioning>(),
        MethodInfo::of::<subd::GetResources>(),
        MethodInfo::of::<subd::PlanResources>(),
        MethodInfo::of::<subd::OrderResource>(),
        MethodInfo::of::<subd::GetFleetResources>(),
        MethodInfo::of::<subd::TellFleetResources>(),
        MethodInfo::of::<subd::AddObjects>(),
        MethodInfo::of::<subd::ReplaceCertificate>(),
        MethodInfo::of::<image_server::AddImage>(),
        MethodInfo::of::<image_server::GetImage>(),
        MethodInfo::of::<image_server::ListImages>(),
        MethodInfo::of::<image_server::DeleteImage>(),
        MethodInfo::of::<image_server::collection::Collect>(),
        MethodInfo::of::<image_server::collection::EstimateImage>(),
        MethodInfo::of::<image_server::expiry::AcceptClock>(),
        MethodInfo::of::<image_server::expiry::ChangeExpiry>(),
        MethodInfo::of::<image_server::expiry::HoldImages>(),
        MethodInfo::of::<image_server::directories::ChangeOwner>(),
        MethodInfo::of::<image_server::directories::ListDirectories>(),
        MethodInfo::of::<image_server::directories::MakeDirectory>(),
        MethodInfo::of::<image_server::directories::RemoveDirectory>(),
        MethodInfo::of::<image_server::notes::ChangeTags>(),
        MethodInfo::of::<image_server::notes::CopyImage>(),
        MethodInfo::of::<image_server::notes::FindLatestImage>(),
        MethodInfo::of::<image_server::notes::ChangeSignatures>(),
        MethodInfo::of::<image_server::private::ChangeReaders>(),
        MethodInfo::of::<image_server::private::GetPrivateDirectories>(),
        MethodInfo::of::<image_server::replication::GetImageUpdates>(),
        MethodInfo::of::<image_server::replication::directories::GetMadeDirectories>(),
        MethodInfo::of::<image_server::replication::Forward>(),
        MethodInfo::of::<image_server::replication::GetReplication>(),
        MethodInfo::of::<image_server::replication::DropCopy>(),
        MethodInfo::of::<object_server::AddObjects>(),
        MethodInfo::of::<object_server::CheckObjects>(),
        MethodInfo::of::<object_server::GetObjects>(),
        MethodInfo::of::<dominator::ListSubs>(),
        MethodInfo::of::<dominator::ShowSub>(),
        MethodInfo::of::<dominator::GetStatus>(),
        MethodInfo::of::<dominator::DisableUpdates>(),
        MethodInfo::of::<dominator::EnableUpdates>(),
        MethodInfo::of::<dominator::ClearSafetyShutoff>(),
        MethodInfo::of::<dominator::Retry>(),
        MethodInfo::of::<dominator::orders::Trust>(),
        MethodInfo::of::<dominator::orders::AcceptImage>(),
        MethodInfo::of::<dominator::orders::ResumeImage>(),
        MethodInfo::of::<dominator::content::ListContentChanges>(),
        MethodInfo::of::<dominator::content::OrderContentChange>(),
        MethodInfo::of::<dominator::mdb::ShowMdb>(),
        MethodInfo::of::<dominator::mdb::AcceptMdb>(),
        MethodInfo::of::<dominator::events::ListEvents>(),
        MethodInfo::of::<dominator::events::AcceptClock>(),
        MethodInfo::of::<dominator::events::Backup>(),
        MethodInfo::of::<dominator::explain::Explain>(),
        MethodInfo::of::<dominator::orders::PauseUpdates>(),
        MethodInfo::of::<dominator::orders::ResumeUpdates>(),
        MethodInfo::of::<dominator::rollback::RollBack>(),
        MethodInfo::of::<dominator::rollback::EndRollback>(),
        MethodInfo::of::<dominator::rollback::ListLastingOrders>(),
        MethodInfo::of::<dominator::orders::ForceDisruptiveUpdate>(),
        MethodInfo::of::<dominator::orders::FastUpdate>(),
        MethodInfo::of::<dominator::orders::WatchSub>(),
        MethodInfo::of::<dominator::orders::SetDefaultImage>(),
        MethodInfo::of::<dominator::plan::PlanMachine>(),
        MethodInfo::of::<dominator::plan::PlanMachines>(),
        MethodInfo::of::<dominator::kept_files::CountKeptFiles>(),
        MethodInfo::of::<dominator::resources::GetResources>(),
        MethodInfo::of::<dominator::resources::PlanResources>(),
        MethodInfo::of::<dominator::resources::OrderResource>(),
        MethodInfo::of::<dominator::plan::CheckMdb>(),
        MethodInfo::of::<dominator::settings::SetSubConfiguration>(),
        MethodInfo::of::<dominator::settings::GetSubConfiguration>(),
        MethodInfo::of::<file_generator::Generate>(),
        MethodInfo::of::<file_generator::GetContents>(),
        MethodInfo::of::<file_generator::GetSecrets>(),
        MethodInfo::of::<file_generator::GetGenerators>(),
        MethodInfo::of::<file_generator::RenewCertificates>(),
        MethodInfo::of::<file_generator::OrderRevision>(),
        MethodInfo::of::<file_generator::SignContents>(),
        MethodInfo::of::<file_generator::Load>(),
        MethodInfo::of::<mdb::GetMdb>(),
        reserve("MdbServer.GetMdbUpdates", Authenticated),
    ];
    methods.sort_by_key(|method| method.name);
    methods
}
