//! Orders about machines: pause and go on, disturb in spite of a refusal, update now and watch, and
//! the image of those that the machine database gives none.

use serde::{Deserialize, Serialize};

use super::Status;
use crate::audit::brief::Brief;
use crate::{
    access::Access,
    method::{Effect, Method},
};
use model::image::ImageName;
use model::tree::Time;
use model::when::{lasting, moment};

/// The longest reason of a pause, in bytes.
pub const PAUSE_REASON_BYTES_MAX: usize = 1_000;

/// The longest pause, in seconds.
pub const PAUSE_SECONDS_MAX: u64 = 366 * 24 * 3_600;

/// The most names or patterns of machines in one order.
pub const PATTERNS_MAX: usize = 10_000;

/// True if the text is a pattern, of host names or paths, and not just a name.
#[must_use]
pub fn is_pattern(text: &str) -> bool {
    text.contains(['*', '?', '[', '{', '\\'])
}

/// That an operator has paused the updates of a machine.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct UpdatePause {
    /// Until when, by the dominator's clock.
    pub until: Time,
    /// Why.
    pub reason: String,
    /// Who said so.
    pub who: String,
    /// Since when, by the dominator's clock.
    pub since: Time,
}

impl UpdatePause {
    /// True if it is in force at this time of day. It is if the clock is set back before its end,
    /// too.
    #[must_use]
    pub fn holds(&self, now: Time) -> bool {
        now < self.until
    }
}

/// Pauses the updates of machines, also over a restart of the dominator: when this has returned,
/// no Commit is sent to them until the time has come. Objects are still fetched. An earlier pause
/// is replaced; those of machines that leave the machine database are forgotten.
pub enum PauseUpdates {}

/// When a pause ends, by the dominator's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PauseEnd {
    /// At this time of day.
    At(Time),
    /// So many seconds from now.
    After(#[serde(with = "model::wide")] u64),
}

/// See [`PauseUpdates`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PauseUpdatesRequest {
    /// Names of machines, or patterns in which `*` stands for anything and `?` for one character:
    /// 1 to [`PATTERNS_MAX`]. Each must mean a machine of the machine database.
    pub hosts: Vec<String>,
    /// Until when: at most [`PAUSE_SECONDS_MAX`] from now.
    pub end: PauseEnd,
    /// Why: at most [`PAUSE_REASON_BYTES_MAX`].
    pub reason: String,
    /// Who says so, as long as no certificate tells.
    pub who: String,
}

/// See [`PauseUpdates`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PauseUpdatesReply {
    /// The machines that are paused by this, sorted.
    pub hostnames: Vec<String>,
    /// Until when.
    pub until: Time,
}

impl Method for PauseUpdates {
    const NAME: &'static str = "Dominator.PauseUpdates";
    const ACCESS: Access = Access::PowerOrOwner;
    const EFFECT: Effect = Effect::Relieves;
    const REPLY_BYTES_MAX: usize = 16 << 20;
    type Request = PauseUpdatesRequest;
    type Reply = PauseUpdatesReply;

    fn brief(request: &Self::Request) -> Brief {
        let end = match request.end {
            PauseEnd::At(time) => moment(time),
            PauseEnd::After(seconds) => lasting(seconds),
        };
        Brief::default()
            .with_list("hosts", &request.hosts)
            .with("end", end)
            .why(&request.reason)
            .who(&request.who)
    }
}

/// Ends pauses before their time.
pub enum ResumeUpdates {}

/// See [`ResumeUpdates`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResumeUpdatesRequest {
    /// Names of machines, or patterns, as of [`PauseUpdatesRequest`].
    pub hosts: Vec<String>,
    /// Who says so, as long as no certificate tells.
    pub who: String,
    /// Why; may be empty.
    #[serde(default)]
    pub why: String,
}

/// See [`ResumeUpdates`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResumeUpdatesReply {
    /// Those of them that were paused, sorted.
    pub hostnames: Vec<String>,
}

impl Method for ResumeUpdates {
    const NAME: &'static str = "Dominator.ResumeUpdates";
    const ACCESS: Access = Access::PowerOrOwner;
    const EFFECT: Effect = Effect::Changes;
    const REPLY_BYTES_MAX: usize = 16 << 20;
    type Request = ResumeUpdatesRequest;
    type Reply = ResumeUpdatesReply;

    fn brief(request: &Self::Request) -> Brief {
        Brief::default().with_list("hosts", &request.hosts).why(&request.why).who(&request.who)
    }
}

/// Has the pending update of one machine made even if the machine does not want to be disturbed:
/// this plan, once.
pub enum ForceDisruptiveUpdate {}

/// See [`ForceDisruptiveUpdate`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForceDisruptiveUpdateRequest {
    /// The machine.
    pub hostname: String,
    /// Why; must not be empty.
    pub reason: String,
    /// Who says so, as long as no certificate tells.
    pub who: String,
}

impl Method for ForceDisruptiveUpdate {
    const NAME: &'static str = "Dominator.ForceDisruptiveUpdate";
    const ACCESS: Access = Access::PowerOrOwner;
    const EFFECT: Effect = Effect::Changes;
    type Request = ForceDisruptiveUpdateRequest;
    type Reply = super::Done;

    fn brief(request: &Self::Request) -> Brief {
        Brief::default().with("host", &request.hostname).why(&request.reason).who(&request.who)
    }
}

/// Has one machine polled and scanned at once, what failed there tried again, and whatever is then
/// to be done, done before that of others. It passes no brake, no pause and no safety shutoff.
/// [`WatchSub`] tells how it goes.
pub enum FastUpdate {}

/// See [`FastUpdate`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FastUpdateRequest {
    /// The machine.
    pub hostname: String,
    /// Who says so, as long as no certificate tells.
    pub who: String,
    /// Why; may be empty.
    #[serde(default)]
    pub why: String,
}

impl Method for FastUpdate {
    const NAME: &'static str = "Dominator.FastUpdate";
    const ACCESS: Access = Access::PowerOrOwner;
    const EFFECT: Effect = Effect::Changes;
    type Request = FastUpdateRequest;
    type Reply = super::Done;

    fn brief(request: &Self::Request) -> Brief {
        Brief::default().with("host", &request.hostname).why(&request.why).who(&request.who)
    }
}

/// Tells the status of one machine when it has changed.
pub enum WatchSub {}

/// The longest wait of [`WatchSub`], in milliseconds.
pub const WATCH_WAIT_MS_MAX: u32 = 60_000;

/// See [`WatchSub`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WatchSubRequest {
    /// The machine.
    pub hostname: String,
    /// The version that the caller knows; 0 to be told at once.
    #[serde(with = "model::wide")]
    pub have: u64,
    /// How long to wait for another one, in milliseconds: at most [`WATCH_WAIT_MS_MAX`].
    pub wait_ms: u32,
}

/// See [`WatchSub`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WatchSubReply {
    /// The machine.
    pub hostname: String,
    /// Another one than before if any of the following has changed.
    #[serde(with = "model::wide")]
    pub version: u64,
    /// What it is doing.
    pub status: Status,
    /// The same in words.
    pub detail: String,
    /// Since when it has this status.
    pub since: Time,
    /// False while a scan is awaited that [`FastUpdate`] asked for: the status may be out of date.
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
    /// True if a machine with this status goes on by itself and soon, or may do so at any time:
    /// whoever watches an update has not seen its end.
    #[must_use]
    pub fn is_under_way(self) -> bool {
        match self {
            Self::Connecting
            | Self::Unreachable
            | Self::PollFailed
            | Self::Rescanning
            | Self::Fetching
            | Self::Preparing
            | Self::Updating
            | Self::Rebooting
            | Self::WaitingForBudget => true,
            Self::WrongMachine
            | Self::ImageUndefined
            | Self::ImageNotReady
            | Self::InsufficientSpace
            | Self::Synced
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
            | Self::FetchFailed => false,
        }
    }
}

/// The image of machines whose record names none.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DefaultImage {
    /// The image.
    pub image: ImageName,
    /// Who said so.
    pub who: String,
    /// When.
    pub since: Time,
}

/// Gives machines without a `RequiredImage` this image, also over a restart of the dominator; or
/// leaves them alone again.
pub enum SetDefaultImage {}

/// See [`SetDefaultImage`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SetDefaultImageRequest {
    /// The image; `None` to have no default.
    pub image: Option<ImageName>,
    /// The order is refused if it would give more machines than that another image to become.
    pub machines_max: u32,
    /// Who says so, as long as no certificate tells.
    pub who: String,
    /// Why; may be empty.
    #[serde(default)]
    pub why: String,
}

/// See [`SetDefaultImage`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SetDefaultImageReply {
    /// How many machines the machine database gives no image.
    pub machines: u32,
}

impl Method for SetDefaultImage {
    const NAME: &'static str = "Dominator.SetDefaultImage";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Changes;
    type Request = SetDefaultImageRequest;
    type Reply = SetDefaultImageReply;

    fn brief(request: &Self::Request) -> Brief {
        Brief::default()
            .with_some("image", request.image.as_ref())
            .with("machines-max", request.machines_max)
            .why(&request.why)
            .who(&request.who)
    }
}
