//! Orders about machines and images: pause and resume updates, override refusals, update at once
//! and watch, the default image, and budgets.

use model::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Status;
use crate::Done;
use crate::access::Access;
use crate::audit::call_details::CallDetails;
use crate::method::{Effect, Method};
use model::display::{rough_duration, utc};
use model::image::ImageName;
use model::tree::Time;

/// The longest reason of a pause, in bytes.
pub const PAUSE_REASON_BYTES_MAX: usize = 1_000;

/// The longest pause, in seconds.
pub const PAUSE_SECONDS_MAX: u64 = 366 * 24 * 3_600;

/// The most names or patterns of machines in one order.
pub const PATTERNS_MAX: usize = 10_000;

/// Returns true if `text` is a pattern of host names or paths, and not a plain name.
#[must_use]
pub fn is_pattern(text: &str) -> bool {
    text.contains(['*', '?', '[', '{', '\\'])
}

/// A pause of a machine's updates by an operator.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
pub struct UpdatePause {
    /// When it ends, by the dominator's clock.
    pub until: Time,
    pub reason: String,
    /// Who ordered it.
    pub who: String,
    /// When it began, by the dominator's clock.
    pub since: Time,
}

impl UpdatePause {
    /// Returns true if it is in force at `now`. A clock that is set back before its end leaves it
    /// in force.
    #[must_use]
    pub fn holds(&self, now: Time) -> bool {
        now < self.until
    }
}

/// Pauses the updates of machines, also across restarts of the dominator: after this call has
/// returned, no Commit is sent to them until the pause ends. Objects are still fetched. A new pause
/// replaces an earlier one; pauses of machines that leave the machine database are deleted.
pub enum PauseUpdates {}

/// When a pause ends, by the dominator's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum PauseEnd {
    /// At this time.
    At(Time),
    /// After this many seconds.
    After(#[serde(with = "model::json::LargeNumber")] u64),
}

impl PauseEnd {
    /// Returns the time, or how long it is until then.
    #[must_use]
    pub fn text(self) -> String {
        match self {
            Self::At(time) => utc(time),
            Self::After(seconds) => rough_duration(seconds),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PauseUpdatesRequest {
    /// Names of machines, or patterns in which `*` stands for any characters and `?` for one: 1 to
    /// [`PATTERNS_MAX`]. Each must match a machine of the machine database.
    pub hosts: Vec<String>,
    /// When the pause ends: at most [`PAUSE_SECONDS_MAX`] from now.
    pub end: PauseEnd,
    /// The reason: at most [`PAUSE_REASON_BYTES_MAX`].
    pub reason: String,
    /// Who asks, if the call has no certificate.
    pub who: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PauseUpdatesReply {
    /// The paused machines, sorted.
    pub hostnames: Vec<String>,
    pub until: Time,
}

impl Method for PauseUpdates {
    const NAME: &'static str = "Dominator.PauseUpdates";
    const ACCESS: Access = Access::PowerOrOwner;
    const EFFECT: Effect = Effect::Relieves;
    const REPLY_BYTES_MAX: usize = 16 << 20;
    type Request = PauseUpdatesRequest;
    type Reply = PauseUpdatesReply;

    fn audit_details(request: &Self::Request) -> CallDetails {
        CallDetails::default()
            .with_list("hosts", &request.hosts)
            .with("end", request.end.text())
            .why(&request.reason)
            .who(&request.who)
    }
}

/// Ends pauses before their time.
pub enum ResumeUpdates {}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ResumeUpdatesRequest {
    /// Names of machines, or patterns, as in [`PauseUpdatesRequest`].
    pub hosts: Vec<String>,
    /// Who asks, if the call has no certificate.
    pub who: String,
    /// The reason; may be empty.
    #[serde(default)]
    pub why: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ResumeUpdatesReply {
    /// Those machines that were paused, sorted.
    pub hostnames: Vec<String>,
}

impl Method for ResumeUpdates {
    const NAME: &'static str = "Dominator.ResumeUpdates";
    const ACCESS: Access = Access::PowerOrOwner;
    const EFFECT: Effect = Effect::Changes;
    const REPLY_BYTES_MAX: usize = 16 << 20;
    type Request = ResumeUpdatesRequest;
    type Reply = ResumeUpdatesReply;

    fn audit_details(request: &Self::Request) -> CallDetails {
        CallDetails::default()
            .with_list("hosts", &request.hosts)
            .why(&request.why)
            .who(&request.who)
    }
}

/// Permits the pending update of one machine even if its disruption command refuses: this plan,
/// once.
pub enum ForceDisruptiveUpdate {}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ForceDisruptiveUpdateRequest {
    pub hostname: String,
    /// The reason; must not be empty.
    pub reason: String,
    /// Who asks, if the call has no certificate.
    pub who: String,
}

impl Method for ForceDisruptiveUpdate {
    const NAME: &'static str = "Dominator.ForceDisruptiveUpdate";
    const ACCESS: Access = Access::PowerOrOwner;
    const EFFECT: Effect = Effect::Changes;
    type Request = ForceDisruptiveUpdateRequest;
    type Reply = super::Done;

    fn audit_details(request: &Self::Request) -> CallDetails {
        CallDetails::default()
            .with("host", &request.hostname)
            .why(&request.reason)
            .who(&request.who)
    }
}

/// Polls and scans one machine at once, retries what failed there, and gives its update priority
/// over others. It overrides no brake, no pause and no safety shutoff. [`WatchSub`] reports the
/// progress.
pub enum FastUpdate {}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct FastUpdateRequest {
    pub hostname: String,
    /// Who asks, if the call has no certificate.
    pub who: String,
    /// The reason; may be empty.
    #[serde(default)]
    pub why: String,
}

impl Method for FastUpdate {
    const NAME: &'static str = "Dominator.FastUpdate";
    const ACCESS: Access = Access::PowerOrOwner;
    const EFFECT: Effect = Effect::Changes;
    type Request = FastUpdateRequest;
    type Reply = super::Done;

    fn audit_details(request: &Self::Request) -> CallDetails {
        CallDetails::default().with("host", &request.hostname).why(&request.why).who(&request.who)
    }
}

/// Installs the required image on one machine without the paths that are blocked there, until it
/// requires another image.
pub enum GoOn {}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GoOnRequest {
    pub hostname: String,
    /// The reason; must not be empty.
    pub why: String,
    /// Who asks, if the call has no certificate.
    pub who: String,
}

impl Method for GoOn {
    const NAME: &'static str = "Dominator.GoOn";
    const ACCESS: Access = Access::PowerOrOwner;
    const EFFECT: Effect = Effect::Changes;
    type Request = GoOnRequest;
    type Reply = Done;

    fn audit_details(request: &Self::Request) -> CallDetails {
        CallDetails::default().with("host", &request.hostname).why(&request.why).who(&request.who)
    }
}

/// Returns the status of one machine when it has changed.
pub enum WatchSub {}

/// The longest wait of [`WatchSub`], in milliseconds.
pub const WATCH_WAIT_MS_MAX: u32 = 60_000;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct WatchSubRequest {
    pub hostname: String,
    /// The version that the caller knows; 0 to get an answer at once.
    #[serde(with = "model::json::LargeNumber")]
    pub have: u64,
    /// How long to wait for another version, in milliseconds: at most [`WATCH_WAIT_MS_MAX`].
    pub wait_ms: u32,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct WatchSubReply {
    pub hostname: String,
    /// A version that changes with any of the following fields.
    #[serde(with = "model::json::LargeNumber")]
    pub version: u64,
    pub status: Status,
    /// Details of the status.
    pub detail: String,
    pub since: Time,
    /// False while a scan that [`FastUpdate`] requested is not complete: the status may be
    /// outdated.
    pub is_current: bool,
}

impl Method for WatchSub {
    const NAME: &'static str = "Dominator.WatchSub";
    const ACCESS: Access = Access::Authenticated;
    const EFFECT: Effect = Effect::Tells;
    type Request = WatchSubRequest;
    type Reply = WatchSubReply;
}

impl Status {
    /// Returns true if a machine with this status may change it by itself soon: whoever watches an
    /// update has not seen its end.
    #[must_use]
    pub fn is_under_way(self) -> bool {
        match self {
            Self::Connecting
            | Self::Unreachable
            | Self::PollFailed
            | Self::Rescanning
            | Self::Fetching
            | Self::Preparing
            | Self::Provisioning
            | Self::Updating
            | Self::Rebooting
            | Self::WaitingForBudget => true,
            Self::WrongMachine
            | Self::ImageUndefined
            | Self::ImageNotReady
            | Self::InsufficientSpace
            | Self::Synced
            | Self::PartlySynced
            | Self::UpdatesDisabled
            | Self::Paused
            | Self::Held
            | Self::UnsafeUpdate
            | Self::Blocked
            | Self::ImageStopped
            | Self::NotConverging
            | Self::SignatureRefused
            | Self::UpdateFailed
            | Self::UpdateStuck
            | Self::HealthFailed
            | Self::TriggerFailed
            | Self::FetchFailed
            | Self::WaitingForComputedFiles
            | Self::SubdTooOld
            | Self::ProvisionFailed => false,
        }
    }
}

/// The image of machines whose record names none.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DefaultImage {
    pub image: ImageName,
    /// Who ordered it.
    pub who: String,
    pub since: Time,
}

/// Sets or removes the image of machines without a `RequiredImage`, also across restarts of the
/// dominator.
pub enum SetDefaultImage {}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SetDefaultImageRequest {
    /// The image; `None` for no default.
    pub image: Option<ImageName>,
    /// Refuses the order if it would change the required image of more machines than this.
    pub machines_max: u32,
    /// Who asks, if the call has no certificate.
    pub who: String,
    /// The reason; may be empty.
    #[serde(default)]
    pub why: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SetDefaultImageReply {
    /// How many machines have no image in the machine database.
    pub machines: u32,
}

impl Method for SetDefaultImage {
    const NAME: &'static str = "Dominator.SetDefaultImage";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Changes;
    type Request = SetDefaultImageRequest;
    type Reply = SetDefaultImageReply;

    fn audit_details(request: &Self::Request) -> CallDetails {
        CallDetails::default()
            .with_some("image", request.image.as_ref())
            .with("machines-max", request.machines_max)
            .why(&request.why)
            .who(&request.who)
    }
}

/// Confirms that the host that answers for a `wrong-machine` is the right one: it was reinstalled,
/// or shares its name or machine id with others for a reason.
pub enum Trust {}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TrustRequest {
    /// The name in the machine database.
    pub hostname: String,
    /// The reason; must not be empty.
    pub why: String,
    /// Who asks, if the call has no certificate.
    pub who: String,
}

impl Method for Trust {
    const NAME: &'static str = "Dominator.Trust";
    const ACCESS: Access = Access::PowerOrOwner;
    const EFFECT: Effect = Effect::Changes;
    type Request = TrustRequest;
    type Reply = Done;

    fn audit_details(request: &Self::Request) -> CallDetails {
        CallDetails::default().with("host", &request.hostname).why(&request.why).who(&request.who)
    }
}

/// One limit, and how much of it is used.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct LimitUse {
    /// The flag that sets it, such as `--max-updating nyc=10%`.
    pub limit: String,
    /// How many machines may be updated at once.
    pub places: u32,
    /// How many of these places are reserved for repairs; 0 if there is only one place.
    pub for_repairs: u32,
    /// Repairs under way.
    pub repairs: u32,
    /// Rollouts under way.
    pub rollouts: u32,
    /// Waiting machines that this limit counts.
    pub waiting: u32,
}

/// An image to which updates were stopped, because they failed too often.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct StoppedImage {
    pub image: ImageName,
    /// Describes how often they failed.
    pub why: String,
    pub since: Time,
}

/// Updates under way, waiting machines, and stopped images.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct BudgetReport {
    /// Machines that are being updated, or may be.
    pub under_way: u32,
    /// Machines that wait for their turn to be updated.
    pub waiting: u32,
    /// Machines that wait for the network budget.
    pub fetches_waiting: u32,
    /// How many bytes they will fetch.
    #[serde(with = "model::json::LargeNumber")]
    pub bytes_waiting: u64,
    /// The limits that have counted machines, those with most waiting machines first; at most a
    /// hundred.
    pub limits: Vec<LimitUse>,
    /// Stopped images, sorted by name.
    pub stopped: Vec<StoppedImage>,
}

/// Takes the content that the image server has now under the name of an image that was used with
/// another content.
pub enum AcceptImage {}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct AcceptImageRequest {
    pub image: ImageName,
    /// The reason; must not be empty.
    pub why: String,
    /// Who asks, if the call has no certificate.
    pub who: String,
}

impl Method for AcceptImage {
    const NAME: &'static str = "Dominator.AcceptImage";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Changes;
    type Request = AcceptImageRequest;
    type Reply = Done;

    fn audit_details(request: &Self::Request) -> CallDetails {
        CallDetails::default().with("image", &request.image).why(&request.why).who(&request.who)
    }
}

/// Resumes updates to a stopped image, and resets its count of failures.
pub enum ResumeImage {}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ResumeImageRequest {
    pub image: ImageName,
    /// The reason; must not be empty.
    pub why: String,
    /// Who asks, if the call has no certificate.
    pub who: String,
}

impl Method for ResumeImage {
    const NAME: &'static str = "Dominator.ResumeImage";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Changes;
    type Request = ResumeImageRequest;
    type Reply = Done;

    fn audit_details(request: &Self::Request) -> CallDetails {
        CallDetails::default().with("image", &request.image).why(&request.why).who(&request.who)
    }
}
