//! `Subd.Poll`: the state of a machine.

use std::fmt;

use model::JsonSchema;
use serde::{Deserialize, Serialize};

use super::limits::{Alarm, LimitsReport, Load};
use super::operator::Paused;
use crate::access::Access;
use crate::method::{Effect, Method};
use model::display::{counted, safe_text, size};
use model::image::ImageName;
use model::object::ObjectId;
use model::path::TreePath;
use model::plan::Occupant;
use model::scope::Scope;
use model::tree::{Time, TimePrecision, Totals, Tree};

/// The version of a sub's state. A poll answers when any part has changed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SubVersion {
    /// Random for each start of subd.
    #[serde(with = "model::json::LargeNumber")]
    pub instance: u64,
    /// Grows when, and only when, the scanned tree or the object cache has changed.
    #[serde(with = "model::json::LargeNumber")]
    pub generation: u64,
    /// Grows with every other change that a poll reports.
    #[serde(with = "model::json::LargeNumber")]
    pub status: u64,
}

/// Returns the state of the machine when it has changed.
pub enum Poll {}

/// The longest wait of a poll, in milliseconds.
pub const POLL_WAIT_MS_MAX: u32 = 120_000;

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PollRequest {
    /// The version that the caller knows; `None` to get everything at once.
    pub have: Option<SubVersion>,
    /// How long to wait for a change, in milliseconds: at most [`POLL_WAIT_MS_MAX`].
    pub wait_ms: u32,
}

/// The most unreadable paths in a [`ScanReport`].
pub const UNREADABLE_MAX: usize = 100;

/// The result of a scan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ScanReport {
    pub scope: Scope,
    /// The digest of the tree; [`super::GetDirectories`] returns its directories.
    pub root: ObjectId,
    /// Totals of the tree.
    pub totals: Totals,
    /// Directories of the tree that directly hold content outside the scope.
    pub kept_directories: Vec<TreePath>,
    /// Files of the tree that are also linked from outside it, and special files that have other
    /// names.
    pub externally_linked: Vec<TreePath>,
    /// Paths that the kernel uses, sorted. These, and directories that hold one, are never replaced
    /// or removed.
    pub occupied: Vec<(TreePath, Occupant)>,
    /// The precision of times on the file-system.
    pub times: TimePrecision,
    /// Paths that cannot be changed or could not be read, with the errors: at most
    /// [`UNREADABLE_MAX`].
    pub unreadable: Vec<(TreePath, String)>,
}

impl ScanReport {
    /// Returns the report of a scan in `scope` that found `tree` and nothing else.
    #[must_use]
    pub fn of(scope: Scope, tree: &Tree) -> Self {
        Self {
            scope,
            root: tree.digest(),
            totals: tree.root().totals(),
            kept_directories: Vec::new(),
            externally_linked: Vec::new(),
            occupied: Vec::new(),
            times: TimePrecision::default(),
            unreadable: Vec::new(),
        }
    }
}

/// The object cache, or its changes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum CacheReport {
    /// All objects of the cache, sorted.
    Full(Vec<ObjectId>),
    /// The changes since the generation that the caller has.
    Changes {
        /// New objects, sorted.
        added: Vec<ObjectId>,
        /// Removed objects, sorted.
        removed: Vec<ObjectId>,
    },
}

/// The result of a fetch.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct LastFetch {
    #[serde(with = "model::json::LargeNumber")]
    pub fetch_id: u64,
    /// The error, if it failed. Objects that had arrived are kept.
    pub error: Option<FetchFailure>,
    /// How many objects arrived.
    #[serde(with = "model::json::LargeNumber")]
    pub objects: u64,
    /// How many bytes arrived.
    #[serde(with = "model::json::LargeNumber")]
    pub bytes: u64,
    /// How long it took, in milliseconds.
    #[serde(with = "model::json::LargeNumber")]
    pub took_ms: u64,
    /// How many objects were copied from files of the machine instead.
    #[serde(with = "model::json::LargeNumber")]
    pub reused: u64,
    /// Errors of sources, even if another source had the objects.
    pub complaints: Vec<Complaint>,
}

/// An error of a source.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Complaint {
    /// `host:port`.
    pub source: String,
    /// True if it sent wrong content: it is malicious, or its disk is corrupt.
    pub lies: bool,
    /// Describes the error.
    pub text: String,
}

/// Why a fetch failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum FetchFailure {
    /// The objects do not fit on the file-system.
    InsufficientSpace {
        #[serde(with = "model::json::LargeNumber")]
        need_bytes: u64,
        #[serde(with = "model::json::LargeNumber")]
        free_bytes: u64,
    },
    /// No source had all objects.
    Sources(String),
    /// The cache could not be written.
    Local(String),
    /// It was a prefetch, and was ended by a fetch that is needed.
    GaveWay,
}

impl fmt::Display for FetchFailure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InsufficientSpace { need_bytes, free_bytes } => {
                let (need, free) = (size(*need_bytes), size(*free_bytes));
                write!(formatter, "no space: {need} needed, {free} free")
            }
            Self::Sources(why) => write!(formatter, "no source gave all: {why}"),
            Self::Local(why) => write!(formatter, "the cache failed: {why}"),
            Self::GaveWay => formatter.write_str("gave way to one that was needed"),
        }
    }
}

/// How an update ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum UpdateOutcome {
    /// The tree was changed as planned.
    Done,
    /// Staging failed; nothing was changed.
    NotPrepared(String),
    /// A step failed; all changes were undone.
    RolledBack(String),
    /// A step failed, and the undo failed too: the tree is in a mixed state. It is retried.
    Stuck(String),
    /// The tree was changed as planned, the health check failed as described, and all changes were
    /// undone.
    Undone(String),
}

impl fmt::Display for UpdateOutcome {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Done => formatter.write_str("done"),
            Self::NotPrepared(why) => write!(formatter, "not prepared: {why}"),
            Self::RolledBack(why) => write!(formatter, "failed and rolled back: {why}"),
            Self::Stuck(why) => write!(formatter, "stuck: {why}"),
            Self::Undone(why) => write!(formatter, "undone, as the health check failed: {why}"),
        }
    }
}

/// How a health check ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Health {
    /// It passed in time.
    Passed,
    /// It failed: the end of its output, and why it counts as failed.
    Failed(String),
}

/// A service that could not be stopped, started or reloaded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TriggerFailure {
    pub service: String,
    /// `stop`, `start`, `reload`, `restart` or `reboot`.
    pub verb: String,
    /// The error, or the end of its output, and then the end of the service's journal.
    pub output: String,
}

/// How many failures one line of text describes.
const FAILURES_LISTED: usize = 3;

/// How many lines of the output of a failed trigger one line of text has.
const OUTPUT_LINES: usize = 4;

/// The most bytes of each of them.
const OUTPUT_LINE_BYTES_MAX: usize = 160;

impl TriggerFailure {
    /// Describes several failures in one line.
    #[must_use]
    pub fn describe_all(failures: &[Self]) -> String {
        let mut texts: Vec<String> =
            failures.iter().take(FAILURES_LISTED).map(ToString::to_string).collect();
        if let more @ 1.. = failures.len().saturating_sub(FAILURES_LISTED) {
            texts.push(format!("and {}", counted(more as u64, "failure")));
        }
        texts.join("; ")
    }
}

impl fmt::Display for TriggerFailure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { service, verb, output } = self;
        let lines: Vec<&str> = output.lines().filter(|line| !line.trim().is_empty()).collect();
        let last = lines.iter().skip(lines.len().saturating_sub(OUTPUT_LINES));
        let last: Vec<String> =
            last.map(|line| safe_text(line.trim(), OUTPUT_LINE_BYTES_MAX)).collect();
        write!(formatter, "{verb} {service} failed: {}", last.join(" | "))
    }
}

/// The result of an update that was prepared or committed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct LastUpdate {
    #[serde(with = "model::json::LargeNumber")]
    pub update_id: u64,
    /// The new image.
    pub image: ImageName,
    /// How it ended.
    pub outcome: UpdateOutcome,
    /// The generation in which the changed paths were scanned again; `None` until then.
    pub verified_generation: Option<u64>,
    /// How many operations its plan has.
    pub operations: u32,
    /// Time from its first visible change to its last, in nanoseconds.
    #[serde(with = "model::json::LargeNumber")]
    pub window_ns: u64,
    /// Triggers that failed.
    pub trigger_failures: Vec<TriggerFailure>,
    /// How the health check ended; `None` if there was none, or it has not ended yet.
    pub health: Option<Health>,
    /// True while the reboot that is part of the update has not happened: the update is complete
    /// only after it.
    pub awaits_boot: bool,
    /// Paths whose immutable or append-only flag was removed; at most a hundred.
    pub unlocked: Vec<TreePath>,
    /// When it ended, by the machine's clock.
    pub ended: Time,
}

impl LastUpdate {
    /// Returns the result of an update without details, at an unknown time, whose paths are not
    /// scanned again yet.
    #[must_use]
    pub fn new(update_id: u64, image: ImageName, outcome: UpdateOutcome) -> Self {
        Self {
            update_id,
            image,
            outcome,
            verified_generation: None,
            operations: 0,
            window_ns: 0,
            trigger_failures: Vec::new(),
            health: None,
            awaits_boot: false,
            unlocked: Vec::new(),
            ended: Time::default(),
        }
    }
}

/// Free space of the root file-system.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct FreeSpace {
    /// Bytes that root may still write.
    #[serde(with = "model::json::LargeNumber")]
    pub free_bytes: u64,
    /// Inodes that may still be made; `u64::MAX` if the file-system has no limit.
    #[serde(with = "model::json::LargeNumber")]
    pub free_inodes: u64,
}

/// The identity of a machine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SubIdentity {
    /// Its host name.
    pub hostname: String,
    /// `/etc/machine-id`, or empty.
    pub machine_id: String,
    /// The kernel's boot id.
    pub boot_id: String,
    /// The version of subd.
    pub subd_version: String,
}

/// Counters of the scanner.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ScanCounters {
    /// Completed metadata passes.
    #[serde(with = "model::json::LargeNumber")]
    pub metadata_passes: u64,
    /// Completed content passes.
    #[serde(with = "model::json::LargeNumber")]
    pub content_passes: u64,
    /// How long the last metadata pass took, in milliseconds.
    #[serde(with = "model::json::LargeNumber")]
    pub metadata_pass_ms: u64,
    /// How long the last content pass took, in milliseconds.
    #[serde(with = "model::json::LargeNumber")]
    pub content_pass_ms: u64,
    /// Completed media passes.
    #[serde(with = "model::json::LargeNumber")]
    pub media_passes: u64,
    /// How long the last media pass took, in milliseconds.
    #[serde(with = "model::json::LargeNumber")]
    pub media_pass_ms: u64,
    /// Bytes that were hashed since subd started.
    #[serde(with = "model::json::LargeNumber")]
    pub hashed_bytes: u64,
    /// Bytes that were fetched since subd started.
    #[serde(with = "model::json::LargeNumber")]
    pub fetched_bytes: u64,
}

/// See [`Poll`]. Parts that are `None` have not changed since the caller's version.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PollReply {
    pub version: SubVersion,
    pub identity: SubIdentity,
    pub activity: Activity,
    /// The tree, if the generation has changed and a scan under the current settings is complete.
    pub scan: Option<ScanReport>,
    /// False until a scan under the current settings is complete.
    pub scanned: bool,
    /// The scope of the current settings.
    pub scope: Scope,
    /// Local exclusions, as the lines of [`model::filter::Patterns`]: these paths are neither
    /// scanned nor changed.
    pub exclusions: Vec<String>,
    /// The object cache, if the generation has changed.
    pub cache: Option<CacheReport>,
    /// How the last fetch ended.
    pub last_fetch: Option<LastFetch>,
    /// How the last update ended.
    pub last_update: Option<LastUpdate>,
    /// The image of the last successful update; it persists across restarts.
    pub last_image: Option<ImageName>,
    /// Trigger failures since the last successful update; they persist across restarts.
    pub trigger_failures: Vec<TriggerFailure>,
    pub space: FreeSpace,
    pub counters: ScanCounters,
    pub load: Load,
    pub limits: LimitsReport,
    /// Alarms, sorted.
    pub alarms: Vec<Alarm>,
    /// Set while updates are paused on the machine itself.
    pub paused: Option<Paused>,
    /// The time of the machine's clock.
    pub clock: Time,
}

impl PollReply {
    /// Returns the reply of an idle sub that has scanned in `scope`, with no changes of its tree
    /// and cache, no update so far, and ample space.
    #[must_use]
    pub fn idle(version: SubVersion, scope: Scope) -> Self {
        Self {
            version,
            identity: SubIdentity::default(),
            activity: Activity::Idle,
            scan: None,
            scanned: true,
            scope,
            exclusions: Vec::new(),
            cache: None,
            last_fetch: None,
            last_update: None,
            last_image: None,
            trigger_failures: Vec::new(),
            space: FreeSpace { free_bytes: 1 << 40, free_inodes: u64::MAX },
            counters: ScanCounters::default(),
            load: Load::default(),
            limits: LimitsReport::default(),
            alarms: Vec::new(),
            paused: None,
            clock: Time::default(),
        }
    }
}

impl Method for Poll {
    const NAME: &'static str = "Subd.Poll";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Tells;
    const REPLY_BYTES_MAX: usize = 64 << 20;
    type Request = PollRequest;
    type Reply = PollReply;
}

/// What a sub is doing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Activity {
    /// Only scanning.
    Idle,
    /// Fetching objects.
    Fetching {
        #[serde(with = "model::json::LargeNumber")]
        fetch_id: u64,
        /// How many objects were fetched so far.
        #[serde(with = "model::json::LargeNumber")]
        objects: u64,
        /// How many bytes were fetched so far.
        #[serde(with = "model::json::LargeNumber")]
        bytes: u64,
    },
    /// Staging an update.
    Preparing {
        #[serde(with = "model::json::LargeNumber")]
        update_id: u64,
    },
    /// An update is staged and waits for its Commit.
    Prepared {
        #[serde(with = "model::json::LargeNumber")]
        update_id: u64,
    },
    /// Changing the tree, or running triggers.
    Updating {
        #[serde(with = "model::json::LargeNumber")]
        update_id: u64,
    },
}

/// The phase of the update.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UpdatePhase {
    /// No update.
    #[default]
    Idle,
    /// Staging.
    Preparing(u64),
    /// Staged.
    Prepared(u64),
    /// Changing the tree or driving services.
    Updating(u64),
}

/// The progress of a fetch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FetchProgress {
    pub fetch_id: u64,
    /// True for a prefetch.
    pub ahead: bool,
    /// How many objects were fetched so far.
    pub objects: u64,
    /// How many bytes were fetched so far.
    pub bytes: u64,
}

impl Activity {
    /// Returns the activity that is reported while an update is in the phase `update` and `fetch`
    /// runs: a fetch and an update may be under way at the same time, and a poll reports one of
    /// them.
    #[must_use]
    pub fn of(update: UpdatePhase, fetch: Option<FetchProgress>) -> Self {
        match (update, fetch) {
            (UpdatePhase::Preparing(update_id), _) => Self::Preparing { update_id },
            (UpdatePhase::Updating(update_id), _) => Self::Updating { update_id },
            // A prefetch must not hide a staged update.
            (UpdatePhase::Prepared(update_id), None | Some(FetchProgress { ahead: true, .. })) => {
                Self::Prepared { update_id }
            }
            (_, Some(FetchProgress { fetch_id, objects, bytes, .. })) => {
                Self::Fetching { fetch_id, objects, bytes }
            }
            (UpdatePhase::Idle, None) => Self::Idle,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_thing_is_told_of_all_that_is_under_way() {
        let fetch = |ahead| Some(FetchProgress { fetch_id: 1, ahead, objects: 2, bytes: 3 });
        let (needed, ahead) = (fetch(false), fetch(true));
        let fetching = Activity::Fetching { fetch_id: 1, objects: 2, bytes: 3 };
        let (preparing, prepared, updating) = (
            Activity::Preparing { update_id: 9 },
            Activity::Prepared { update_id: 9 },
            Activity::Updating { update_id: 9 },
        );
        let table = [
            // update                    no fetch    needed     ahead of need
            (UpdatePhase::Idle, [&Activity::Idle, &fetching, &fetching]),
            (UpdatePhase::Preparing(9), [&preparing, &preparing, &preparing]),
            (UpdatePhase::Prepared(9), [&prepared, &fetching, &prepared]),
            (UpdatePhase::Updating(9), [&updating, &updating, &updating]),
        ];
        for (update, expected) in table {
            let told = [None, needed, ahead].map(|fetch| Activity::of(update, fetch));
            assert_eq!(told.each_ref(), expected, "{update:?}");
        }
    }
}
