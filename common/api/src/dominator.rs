//! `Dominator`: what operators ask of the controller.

pub mod budgets;
pub mod events;
pub mod explain;
pub mod identity;
pub mod machine_database;
pub mod orders;
pub mod plan;
pub mod settings;
pub mod text;

use core::net::SocketAddr;

use serde::{Deserialize, Serialize};

use super::Done;
use crate::audit::brief::Brief;
use crate::{
    access::Access,
    method::{Effect, Method},
};
use model::tree::Time;

/// The status of a machine: what it is doing, or what it waits for. `docs/OPERATING.md` explains
/// each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Status {
    /// Not reached yet since the dominator started, or since the machine was added.
    Connecting,
    /// Cannot be reached now.
    Unreachable,
    /// Answers, but not as a sub should.
    PollFailed,
    /// Answers, but is another machine than the one that is meant.
    WrongMachine,
    /// No image is required of it.
    ImageUndefined,
    /// The image server does not have its image, or not all of it.
    ImageNotReady,
    /// Is scanning, because it just started or was told to scan otherwise.
    Rescanning,
    /// Gets objects from the image server.
    Fetching,
    /// The objects do not fit.
    InsufficientSpace,
    /// Stages an update.
    Preparing,
    /// Is carrying out an update.
    Updating,
    /// Comes up again, as the last update asks for it.
    Rebooting,
    /// Equals its required image, and that has been verified.
    Synced,
    /// Differs, but updates are disabled.
    UpdatesDisabled,
    /// Differs, but an operator has paused the updates of this machine.
    Paused,
    /// Differs, but the machine itself does not allow updates for now.
    Held,
    /// Differs, but the update would destroy too much.
    UnsafeUpdate,
    /// Differs, but content that it keeps is in the way.
    Blocked,
    /// Differs, but as many machines as may be are under way already.
    WaitingForBudget,
    /// Differs, but updates to its image have stopped, because they failed too often.
    ImageStopped,
    /// An update was carried out and changed nothing of what it should.
    NotConverging,
    /// The last update failed and was put back.
    UpdateFailed,
    /// The last update can neither be finished nor put back for now.
    UpdateStuck,
    /// The health check of its required image failed, and the update was put back.
    HealthFailed,
    /// Equals its required image, but a service could not be acted on.
    TriggerFailed,
    /// The last fetch failed.
    FetchFailed,
    /// Differs, but takes only images that are signed by keys it trusts.
    SignatureRefused,
}

impl Status {
    /// All of them.
    pub const ALL: [Self; 27] = [
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
    ];

    /// The word that scripts match.
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
        }
    }
}

impl std::fmt::Display for Status {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.pad(self.name())
    }
}

/// A machine in a list.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SubSummary {
    /// Its name in the machine database.
    pub hostname: String,
    /// Where it is reached, once its name was resolved.
    pub address: Option<SocketAddr>,
    /// What it is doing.
    pub status: Status,
    /// The same in words: what it waits for, and what an operator may do.
    pub detail: String,
    /// Since when it has this status.
    pub since: Time,
    /// The image it must have; empty if none.
    pub required_image: String,
    /// The image it will get next; empty if none.
    pub planned_image: String,
    /// The image of the last update that was done; empty if none.
    pub last_image: String,
    /// When it last answered a poll.
    pub last_seen: Option<Time>,
    /// When it was last known to be synced.
    pub last_synced: Option<Time>,
    /// How many alarms it has raised; [`ShowSub`] tells them.
    pub alarms: u32,
}

/// Lists the machines, sorted by host name.
pub enum ListSubs {}

/// See [`ListSubs`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListSubsRequest {
    /// Only machines with one of these; all if empty.
    pub statuses: Vec<Status>,
    /// Only machines whose names match one of these patterns, in which `*` stands for anything and
    /// `?` for one character; all if empty.
    pub hosts: Vec<String>,
    /// Only machines that must have one of these images, or one below these; all if empty.
    pub images: Vec<String>,
    /// Only machines at one of these locations, or below; all if empty.
    pub locations: Vec<String>,
    /// Only machines that have all of these tags.
    pub tags: Vec<TagFilter>,
}

/// A tag that machines have.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct TagFilter {
    /// Its name.
    pub name: String,
    /// Its value; any if `None`.
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

    /// True if `machine` has it.
    #[must_use]
    pub fn is_of(&self, machine: &model::mdb::Machine) -> bool {
        let value = machine.tags.get(&self.name);
        value.is_some_and(|value| self.value.as_ref().is_none_or(|wanted| wanted == value))
    }
}

/// See [`ListSubs`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListSubsReply {
    /// The machines.
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

/// Tells all about one machine.
pub enum ShowSub {}

/// See [`ShowSub`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShowSubRequest {
    /// Its name in the machine database.
    pub hostname: String,
}

/// See [`ShowSub`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SubDetail {
    /// As in the list.
    pub summary: SubSummary,
    /// Its record in the machine database.
    pub machine: model::mdb::Machine,
    /// The last poll, without the lists that only a dominator needs; `None` before the first.
    pub poll: Option<PollSummary>,
    /// The first operations of the plan that is being carried out, or that is held back.
    pub plan: Vec<String>,
    /// How many operations that plan has.
    pub plan_operations: u32,
    /// Objects that it still has to fetch.
    pub missing_objects: u32,
    /// Their length together, in bytes.
    #[serde(with = "model::wide")]
    pub missing_bytes: u64,
    /// The last changes of its status: when, which, and in words; the newest first.
    pub history: Vec<(Time, Status, String)>,
    /// Set while an operator has paused its updates.
    pub pause: Option<orders::UpdatePause>,
}

/// What is worth showing of a poll.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PollSummary {
    /// Where the sub is in its history.
    pub version: super::subd::Version,
    /// Who it is.
    pub identity: super::subd::Identity,
    /// What it does.
    pub activity: super::subd::Activity,
    /// The digest of its tree, if it was scanned.
    pub root: Option<model::object::ObjectId>,
    /// Sums over its tree.
    pub totals: Option<model::tree::Totals>,
    /// Paths that it could not read.
    pub unreadable: Vec<(model::path::TreePath, String)>,
    /// How its last fetch ended.
    pub last_fetch: Option<super::subd::LastFetch>,
    /// How its last update ended.
    pub last_update: Option<super::subd::LastUpdate>,
    /// Triggers that failed since the last good update.
    pub trigger_failures: Vec<super::subd::TriggerFailure>,
    /// Free space.
    pub space: super::subd::Space,
    /// Scan counters.
    pub counters: super::subd::ScanCounters,
    /// What subd takes of the machine.
    pub load: super::subd::Load,
    /// What an operator should know.
    pub alarms: Vec<super::subd::Alarm>,
    /// Whether updates are paused on the machine itself.
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

/// Tells how the dominator itself is doing.
pub enum GetStatus {}

/// A brake that an operator pulled.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Brake {
    /// Why.
    pub reason: String,
    /// Who.
    pub who: String,
    /// When.
    pub since: Time,
}

/// See [`GetStatus`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DominatorStatus {
    /// Set while updates are disabled.
    pub brake: Option<Brake>,
    /// How many machines have each status; statuses without machines are left out.
    pub counts: Vec<(Status, u32)>,
    /// What is wrong with the machine database; the last good one stays in force.
    pub mdb_error: Option<String>,
    /// Set while a machine database is held; the last one stays in force.
    pub mdb_held: Option<machine_database::HeldMdb>,
    /// When the machine database in force was read.
    pub mdb_read: Option<Time>,
    /// Why the machine database in force is not kept over a restart; that is tried again.
    pub mdb_unkept: Option<String>,
    /// Images that machines must have and that are missing, deleted, deprecated or about to expire.
    pub image_remarks: Vec<String>,
    /// What is wrong with the image server.
    pub image_server_error: Option<String>,
    /// Why nobody could be told of alarms the last time.
    pub alarm_error: Option<String>,
    /// Why what happens cannot be put on record; no update is ordered until it can.
    pub history_error: Option<String>,
    /// What is under way, what waits for its turn, and which images have stopped.
    pub budgets: budgets::BudgetReport,
    /// Distinct directories held in memory for all images and machines together.
    #[serde(with = "model::wide")]
    pub directories: u64,
    /// How many machines' updates are paused by operators.
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

/// Pulls the brake: when this has returned, no Commit is sent. Survives a restart.
pub enum DisableUpdates {}

/// See [`DisableUpdates`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DisableUpdatesRequest {
    /// Why; must not be empty.
    pub reason: String,
    /// Who says so, as long as no certificate tells.
    pub who: String,
}

impl Method for DisableUpdates {
    const NAME: &'static str = "Dominator.DisableUpdates";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Relieves;
    type Request = DisableUpdatesRequest;
    type Reply = Done;

    fn brief(request: &Self::Request) -> Brief {
        Brief::default().why(&request.reason).who(&request.who)
    }
}

/// Releases the brake.
pub enum EnableUpdates {}

/// See [`EnableUpdates`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EnableUpdatesRequest {
    /// Who says so, as long as no certificate tells.
    pub who: String,
    /// Why; may be empty.
    #[serde(default)]
    pub why: String,
}

impl Method for EnableUpdates {
    const NAME: &'static str = "Dominator.EnableUpdates";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Changes;
    type Request = EnableUpdatesRequest;
    type Reply = Done;

    fn brief(request: &Self::Request) -> Brief {
        Brief::default().why(&request.why).who(&request.who)
    }
}

/// Lets one unsafe update of one machine pass.
pub enum ClearSafetyShutoff {}

/// See [`ClearSafetyShutoff`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClearSafetyShutoffRequest {
    /// The machine.
    pub hostname: String,
    /// Who says so, as long as no certificate tells.
    #[serde(default)]
    pub who: String,
    /// Why; may be empty.
    #[serde(default)]
    pub why: String,
}

impl Method for ClearSafetyShutoff {
    const NAME: &'static str = "Dominator.ClearSafetyShutoff";
    const ACCESS: Access = Access::PowerOrOwner;
    const EFFECT: Effect = Effect::Changes;
    type Request = ClearSafetyShutoffRequest;
    type Reply = Done;

    fn brief(request: &Self::Request) -> Brief {
        Brief::default().with("host", &request.hostname).why(&request.why).who(&request.who)
    }
}

/// Tries again now what is held back on one machine because it failed. An image whose health check
/// failed there is offered once more.
pub enum Retry {}

/// See [`Retry`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RetryRequest {
    /// The machine.
    pub hostname: String,
    /// Who says so, as long as no certificate tells.
    #[serde(default)]
    pub who: String,
    /// Why; may be empty.
    #[serde(default)]
    pub why: String,
}

impl Method for Retry {
    const NAME: &'static str = "Dominator.Retry";
    const ACCESS: Access = Access::PowerOrOwner;
    const EFFECT: Effect = Effect::Changes;
    type Request = RetryRequest;
    type Reply = Done;

    fn brief(request: &Self::Request) -> Brief {
        Brief::default().with("host", &request.hostname).why(&request.why).who(&request.who)
    }
}
