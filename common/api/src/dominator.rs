//! `Dominator`: the methods that operators call at the controller.

pub mod content;
pub mod departing;
pub mod events;
pub mod explain;
pub mod kept_files;
pub mod mdb;
pub mod orders;
pub mod permits;
pub mod plan;
pub mod resources;
pub mod rollback;
pub mod rollouts;
pub mod settings;
pub mod tasks;
pub mod text;

use core::net::SocketAddr;

use model::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Done;
use crate::audit::call_details::CallDetails;
use crate::{
    access::Access,
    method::{Effect, Method},
};
use model::tree::Time;

/// The status of a machine. `docs/OPERATING.md` explains each.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum Status {
    /// Not reached yet since the dominator started, or since the machine was added.
    Connecting,
    /// Cannot be reached.
    Unreachable,
    /// Answers polls with errors.
    PollFailed,
    /// Answers, but is not the machine that the record means.
    WrongMachine,
    /// The machine has no required image.
    ImageUndefined,
    /// The image server does not have its image, or not all of its objects.
    ImageNotReady,
    /// Scans, because it just started or got other scan settings.
    Rescanning,
    /// Fetches objects.
    Fetching,
    /// The objects do not fit on its disk.
    InsufficientSpace,
    /// Stages an update.
    Preparing,
    /// Carries out an update.
    Updating,
    /// Reboots, because the last update requires it.
    Rebooting,
    /// Equals its required image, as verified by a scan.
    Synced,
    /// Differs, but updates are disabled.
    UpdatesDisabled,
    /// Differs, but an operator has paused the updates of this machine.
    Paused,
    /// Differs, but updates are paused on the machine itself.
    Held,
    /// Differs, but the update would remove too much.
    UnsafeUpdate,
    /// Differs, and what cannot be changed holds its image back.
    Blocked,
    /// Differs, but the budget of concurrent updates is used up.
    WaitingForBudget,
    /// Differs, but updates to its image were stopped, because they failed too often.
    ImageStopped,
    /// An update was carried out, and the same differences remain.
    NotConverging,
    /// The last update failed and was undone.
    UpdateFailed,
    /// The last update can neither be finished nor undone for now.
    UpdateStuck,
    /// The health check of its required image failed, and the update was undone.
    HealthFailed,
    /// Equals its required image, but a service could not be stopped, started or reloaded.
    TriggerFailed,
    /// The last fetch failed.
    FetchFailed,
    /// Differs, but its image lacks signatures that the machine trusts.
    SignatureRefused,
    /// Equals its required image, except for paths that cannot be changed.
    PartlySynced,
    /// Must get content of computed files that is not known.
    WaitingForComputedFiles,
    /// Differs, but its subd is of a release that lacks what its image needs.
    SubdTooOld,
    /// Plugins make the resources of its image, before anything of the update is carried out.
    Provisioning,
    /// A resource of its image could not be made, and nothing of the update was carried out.
    ProvisionFailed,
}

impl Status {
    pub const ALL: [Self; 32] = [
        Self::Connecting,
        Self::Unreachable,
        Self::PollFailed,
        Self::WrongMachine,
        Self::ImageUndefined,
        Self::ImageNotReady,
        Self::Rescanning,
        Self::Fetching,
        Self::InsufficientSpace,
        Self::Preparing,
        Self::Updating,
        Self::Rebooting,
        Self::Synced,
        Self::UpdatesDisabled,
        Self::Paused,
        Self::Held,
        Self::UnsafeUpdate,
        Self::Blocked,
        Self::WaitingForBudget,
        Self::ImageStopped,
        Self::NotConverging,
        Self::UpdateFailed,
        Self::UpdateStuck,
        Self::HealthFailed,
        Self::TriggerFailed,
        Self::FetchFailed,
        Self::SignatureRefused,
        Self::PartlySynced,
        Self::WaitingForComputedFiles,
        Self::SubdTooOld,
        Self::Provisioning,
        Self::ProvisionFailed,
    ];

    /// Returns the name in JSON, commands and metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Connecting => "connecting",
            Self::Unreachable => "unreachable",
            Self::PollFailed => "poll-failed",
            Self::WrongMachine => "wrong-machine",
            Self::ImageUndefined => "image-undefined",
            Self::ImageNotReady => "image-not-ready",
            Self::Rescanning => "rescanning",
            Self::Fetching => "fetching",
            Self::InsufficientSpace => "insufficient-space",
            Self::Preparing => "preparing",
            Self::Updating => "updating",
            Self::Rebooting => "rebooting",
            Self::Synced => "synced",
            Self::PartlySynced => "partly-synced",
            Self::UpdatesDisabled => "updates-disabled",
            Self::Paused => "paused",
            Self::Held => "held",
            Self::UnsafeUpdate => "unsafe-update",
            Self::Blocked => "blocked",
            Self::WaitingForBudget => "waiting-for-budget",
            Self::ImageStopped => "image-stopped",
            Self::NotConverging => "not-converging",
            Self::SignatureRefused => "signature-refused",
            Self::UpdateFailed => "update-failed",
            Self::UpdateStuck => "update-stuck",
            Self::HealthFailed => "health-failed",
            Self::TriggerFailed => "trigger-failed",
            Self::FetchFailed => "fetch-failed",
            Self::WaitingForComputedFiles => "waiting-for-computed-files",
            Self::SubdTooOld => "subd-too-old",
            Self::Provisioning => "provisioning",
            Self::ProvisionFailed => "provision-failed",
        }
    }
}

impl std::fmt::Display for Status {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.pad(self.name())
    }
}

/// A machine in a list.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SubSummary {
    /// The name in the machine database.
    pub hostname: String,
    /// The address, once the name was resolved.
    pub address: Option<SocketAddr>,
    pub status: Status,
    /// Explains the status: what the machine waits for, and what an operator can do.
    pub detail: String,
    /// Since when it has this status.
    pub since: Time,
    /// The required image; empty if none.
    pub required_image: String,
    /// The planned image; empty if none.
    pub planned_image: String,
    /// The image of the last successful update; empty if none.
    pub last_image: String,
    /// When it last answered a poll.
    pub last_seen: Option<Time>,
    /// When it was last known to be synced.
    pub last_synced: Option<Time>,
    /// How many alarms it reports; [`ShowSub`] returns them.
    pub alarms: u32,
}

/// Lists the machines, sorted by host name.
pub enum ListSubs {}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ListSubsRequest {
    /// Only machines with one of these statuses; all if empty.
    pub statuses: Vec<Status>,
    /// Only machines whose names match one of these patterns, in which `*` stands for anything and
    /// `?` for one character; all if empty.
    pub hosts: Vec<String>,
    /// Only machines whose required image is one of these, or below one of these; all if empty.
    pub images: Vec<String>,
    /// Only machines at one of these locations, or below; all if empty.
    pub locations: Vec<String>,
    /// Only machines that have all of these tags.
    pub tags: Vec<TagFilter>,
}

/// Selects machines by a tag.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
pub struct TagFilter {
    pub name: String,
    /// The value; any if `None`.
    pub value: Option<String>,
}

impl TagFilter {
    /// Reads `NAME` or `NAME=VALUE`.
    #[must_use]
    pub fn parse(text: &str) -> Self {
        match text.split_once('=') {
            Some((name, value)) => Self { name: name.into(), value: Some(value.into()) },
            None => Self { name: text.into(), value: None },
        }
    }

    /// Returns true if `machine` has the tag.
    #[must_use]
    pub fn is_of(&self, machine: &model::mdb::Machine) -> bool {
        let value = machine.tags.get(&self.name);
        value.is_some_and(|value| self.value.as_ref().is_none_or(|wanted| wanted == value))
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ListSubsReply {
    pub subs: Vec<SubSummary>,
}

impl Method for ListSubs {
    const NAME: &'static str = "Dominator.ListSubs";
    const ACCESS: Access = Access::Authenticated;
    const EFFECT: Effect = Effect::Tells;
    const REPLY_BYTES_MAX: usize = 64 << 20;
    type Request = ListSubsRequest;
    type Reply = ListSubsReply;
}

/// Returns everything that is known about one machine.
pub enum ShowSub {}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ShowSubRequest {
    /// The name in the machine database.
    pub hostname: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SubDetail {
    /// The same as in the list.
    pub summary: SubSummary,
    /// The record in the machine database.
    pub machine: model::mdb::Machine,
    /// The last poll, without the lists that only a dominator needs; `None` before the first.
    pub poll: Option<PollSummary>,
    /// The first operations of the current plan.
    pub plan: Vec<String>,
    /// How many operations the plan has.
    pub plan_operations: u32,
    /// Objects that are still to be fetched.
    pub missing_objects: u32,
    /// Their total length, in bytes.
    #[serde(with = "model::json::LargeNumber")]
    pub missing_bytes: u64,
    /// The last changes of the status: time, status and explanation, newest first.
    pub history: Vec<(Time, Status, String)>,
    /// Set while an operator has paused the machine's updates.
    pub pause: Option<orders::UpdatePause>,
}

/// The parts of a poll that are shown to operators.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PollSummary {
    pub version: super::subd::SubVersion,
    pub identity: super::subd::SubIdentity,
    pub activity: super::subd::Activity,
    /// The digest of the tree, if it was scanned.
    pub root: Option<model::object::ObjectId>,
    /// Totals of the tree.
    pub totals: Option<model::tree::Totals>,
    /// Paths that could not be read, with the errors.
    pub unreadable: Vec<(model::path::TreePath, String)>,
    /// How the last fetch ended.
    pub last_fetch: Option<super::subd::LastFetch>,
    /// How the last update ended.
    pub last_update: Option<super::subd::LastUpdate>,
    /// Triggers that failed since the last successful update.
    pub trigger_failures: Vec<super::subd::TriggerFailure>,
    pub space: super::subd::FreeSpace,
    pub counters: super::subd::ScanCounters,
    /// How much of the machine subd uses.
    pub load: super::subd::Load,
    pub alarms: Vec<super::subd::Alarm>,
    /// Set while updates are paused on the machine itself.
    pub paused: Option<super::subd::Paused>,
}

impl Method for ShowSub {
    const NAME: &'static str = "Dominator.ShowSub";
    const ACCESS: Access = Access::Authenticated;
    const EFFECT: Effect = Effect::Tells;
    const REPLY_BYTES_MAX: usize = 16 << 20;
    type Request = ShowSubRequest;
    type Reply = SubDetail;
}

/// Returns the state of the dominator itself.
pub enum GetStatus {}

/// The state after `disable-updates`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Brake {
    pub reason: String,
    pub who: String,
    pub since: Time,
}

/// The begin of a remark that is about the machine database.
pub const MDB_REMARK: &str = "machine database: ";

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DominatorStatus {
    /// Set while updates are disabled.
    pub brake: Option<Brake>,
    /// How many machines have each status; statuses without machines are left out.
    pub counts: Vec<(Status, u32)>,
    /// Why the machine database cannot be read; the last valid one stays in force.
    pub mdb_error: Option<String>,
    /// Set while a new machine database is held; the former one stays in force.
    pub mdb_held: Option<mdb::HeldMdb>,
    /// When the machine database in force was read.
    pub mdb_read: Option<Time>,
    /// Why the machine database in force could not be saved; it is retried.
    pub mdb_unkept: Option<String>,
    /// Required images that are missing, deleted, deprecated or about to expire; and, after
    /// [`MDB_REMARK`], what is odd about the machine database.
    pub image_remarks: Vec<String>,
    /// The last error of the image server, if it fails.
    pub image_server_error: Option<String>,
    /// Why the last alarm could not be sent.
    pub alarm_error: Option<String>,
    /// Why events cannot be recorded; no update is ordered until they can.
    pub history_error: Option<String>,
    /// Updates under way, waiting machines, and stopped images.
    pub budgets: orders::BudgetReport,
    /// Distinct directories held in memory for all images and machines.
    #[serde(with = "model::json::LargeNumber")]
    pub directories: u64,
    /// How many machines are paused by operators.
    pub paused: u32,
    /// The image of machines whose record names none.
    pub default_image: Option<orders::DefaultImage>,
}

impl Method for GetStatus {
    const NAME: &'static str = "Dominator.GetStatus";
    const ACCESS: Access = Access::Authenticated;
    const EFFECT: Effect = Effect::Tells;
    type Request = ();
    type Reply = DominatorStatus;
}

/// Disables updates: after this call has returned, no Commit is sent, also after a restart.
pub enum DisableUpdates {}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DisableUpdatesRequest {
    /// The reason; must not be empty.
    pub reason: String,
    /// Who asks, if the call has no certificate.
    pub who: String,
}

impl Method for DisableUpdates {
    const NAME: &'static str = "Dominator.DisableUpdates";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Relieves;
    type Request = DisableUpdatesRequest;
    type Reply = Done;

    fn audit_details(request: &Self::Request) -> CallDetails {
        CallDetails::default().why(&request.reason).who(&request.who)
    }
}

/// Enables updates again.
pub enum EnableUpdates {}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct EnableUpdatesRequest {
    /// Who asks, if the call has no certificate.
    pub who: String,
    /// The reason; may be empty.
    #[serde(default)]
    pub why: String,
}

impl Method for EnableUpdates {
    const NAME: &'static str = "Dominator.EnableUpdates";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Changes;
    type Request = EnableUpdatesRequest;
    type Reply = Done;

    fn audit_details(request: &Self::Request) -> CallDetails {
        CallDetails::default().why(&request.why).who(&request.who)
    }
}

/// Permits the pending unsafe update of one machine.
pub enum ClearSafetyShutoff {}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ClearSafetyShutoffRequest {
    pub hostname: String,
    /// Who asks, if the call has no certificate.
    #[serde(default)]
    pub who: String,
    /// The reason; may be empty.
    #[serde(default)]
    pub why: String,
}

impl Method for ClearSafetyShutoff {
    const NAME: &'static str = "Dominator.ClearSafetyShutoff";
    const ACCESS: Access = Access::PowerOrOwner;
    const EFFECT: Effect = Effect::Changes;
    type Request = ClearSafetyShutoffRequest;
    type Reply = Done;

    fn audit_details(request: &Self::Request) -> CallDetails {
        CallDetails::default().with("host", &request.hostname).why(&request.why).who(&request.who)
    }
}

/// Retries at once what failed on one machine. An image whose health check failed there is tried
/// once more, and triggers that failed are run again.
pub enum Retry {}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RetryRequest {
    pub hostname: String,
    /// Who asks, if the call has no certificate.
    #[serde(default)]
    pub who: String,
    /// The reason; may be empty.
    #[serde(default)]
    pub why: String,
}

impl Method for Retry {
    const NAME: &'static str = "Dominator.Retry";
    const ACCESS: Access = Access::PowerOrOwner;
    const EFFECT: Effect = Effect::Changes;
    type Request = RetryRequest;
    type Reply = Done;

    fn audit_details(request: &Self::Request) -> CallDetails {
        CallDetails::default().with("host", &request.hostname).why(&request.why).who(&request.who)
    }
}
