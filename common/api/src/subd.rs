//! `Subd`: what a dominator asks of the agent on a machine.
//!
//! `Poll`, `SetConfiguration`, `GetDirectories`, `Fetch`, `Prepare` and `Commit` in their version 1
//! are frozen: every later release of subd and of the dominator speaks them, so that a machine that
//! comes back after a year can be brought up to date, its subd included.
//!
//! Fetch, Prepare and Commit answer as soon as the work is accepted; how it ends is told by Poll.
//! Each may be repeated with the same id: what is done already is not done again.

mod activity;
mod by_hand;
mod limits;
mod offer;

use serde::{Deserialize, Serialize};

use super::Done;
use crate::audit::brief::Brief;
use crate::{
    access::Access,
    method::{Effect, Method},
};
use model::image::{HealthCheck, ImageName};
use model::object::ObjectId;
use model::path::TreePath;
use model::plan::{Difference, Occupant, Plan};
use model::scope::{Coverage, ScanSettings, Scope};
use model::tree::{Time, Times, Totals, Tree};
use model::trigger::Triggers;

pub use activity::{Activity, FetchProgress, UpdatePhase};
pub use by_hand::{
    CheckHealth, CheckHealthReply, GetFiles, GetFilesReply, GetFilesRequest, PIECE_BYTES_MAX,
    PIECES_MAX, Pause, Paused, Piece, PieceContent, Resume, ScanNow, ScanNowRequest,
};
pub use limits::{Alarm, Limits, LimitsReport, Load, Share};
pub use offer::{OfferImage, OfferImageRequest, SOURCES_MAX};

/// Where a sub is in its own history. A poll answers when any of the three has moved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Version {
    /// Random for each start of subd, so that a restarted sub never passes for its former self.
    #[serde(with = "model::wide")]
    pub instance: u64,
    /// Grows when, and only when, the scanned tree or the object cache has changed.
    #[serde(with = "model::wide")]
    pub generation: u64,
    /// Grows on every other change that a poll reports.
    #[serde(with = "model::wide")]
    pub status: u64,
}

/// Reports the machine; waits until there is news.
pub enum Poll {}

/// The longest wait of a poll, in milliseconds.
pub const POLL_WAIT_MS_MAX: u32 = 120_000;

/// See [`Poll`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PollRequest {
    /// What the caller knows already; `None` to be told everything at once.
    pub have: Option<Version>,
    /// How long to wait for news, in milliseconds: at most [`POLL_WAIT_MS_MAX`].
    pub wait_ms: u32,
}

/// What a scan found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScanReport {
    /// What the scan looked at.
    pub scope: Scope,
    /// The digest of the tree; directories are asked for with [`GetDirectories`].
    pub root: ObjectId,
    /// Sums over the tree.
    pub totals: Totals,
    /// Directories of the tree that directly hold content outside the scope.
    pub kept_directories: Vec<TreePath>,
    /// Files of the tree that are also linked from outside it, and special files that have other
    /// names.
    pub externally_linked: Vec<TreePath>,
    /// Paths that the kernel uses, sorted: what is or holds one is never replaced or removed.
    pub occupied: Vec<(TreePath, Occupant)>,
    /// What the file-system keeps of a time that is set.
    pub times: Times,
    /// Paths that could not be read, with what the kernel said; at most a hundred.
    pub unreadable: Vec<(TreePath, String)>,
}

impl ScanReport {
    /// The report of a scan in `scope` that found `tree` and nothing to remark.
    #[must_use]
    pub fn of(scope: Scope, tree: &Tree) -> Self {
        Self {
            scope,
            root: tree.digest(),
            totals: tree.root().totals(),
            kept_directories: Vec::new(),
            externally_linked: Vec::new(),
            occupied: Vec::new(),
            times: Times::default(),
            unreadable: Vec::new(),
        }
    }
}

/// How the object cache differs from what the caller knows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CacheReport {
    /// All objects of the cache, sorted.
    Full(Vec<ObjectId>),
    /// The changes since the generation that the caller has.
    Changes {
        /// New objects, sorted.
        added: Vec<ObjectId>,
        /// Objects that went, sorted.
        removed: Vec<ObjectId>,
    },
}

/// How a fetch ended.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LastFetch {
    /// Which fetch.
    #[serde(with = "model::wide")]
    pub fetch_id: u64,
    /// What went wrong, if something did; what had arrived is kept.
    pub error: Option<FetchFailure>,
    /// Objects that arrived.
    #[serde(with = "model::wide")]
    pub objects: u64,
    /// Bytes that arrived.
    #[serde(with = "model::wide")]
    pub bytes: u64,
    /// How long it took, in milliseconds.
    #[serde(with = "model::wide")]
    pub took_ms: u64,
    /// Objects that were not fetched, because a file of the machine had the same content.
    #[serde(with = "model::wide")]
    pub reused: u64,
    /// What was wrong with which source, even if another one had the objects.
    pub complaints: Vec<Complaint>,
}

/// What was wrong with a source.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Complaint {
    /// `host:port`.
    pub source: String,
    /// True if it sent other content than the object has: it lies, or its disk does.
    pub lies: bool,
    /// What was wrong.
    pub text: String,
}

/// Why a fetch failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FetchFailure {
    /// The objects do not fit on the file-system.
    InsufficientSpace {
        /// What is needed, in bytes.
        #[serde(with = "model::wide")]
        need_bytes: u64,
        /// What is free, in bytes.
        #[serde(with = "model::wide")]
        free_bytes: u64,
    },
    /// No source gave all objects.
    Sources(String),
    /// The cache could not be written.
    Local(String),
    /// It was ahead of need, and was ended by one that is needed.
    GaveWay,
}

/// How an update ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// The tree was changed as planned.
    Done,
    /// Staging failed; nothing was changed.
    NotPrepared(String),
    /// A step failed; all that was changed was put back.
    RolledBack(String),
    /// A step failed, and putting back failed too: the tree is mixed. It is tried again.
    Stuck(String),
    /// The tree was changed as planned, the health check failed, and all that was changed was put
    /// back: how it failed.
    Undone(String),
}

/// How a health check ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Health {
    /// It passed in time.
    Passed,
    /// It did not: the end of its output, and why it counts as failed.
    Failed(String),
}

/// A trigger whose service could not be stopped, started or reloaded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TriggerFailure {
    /// The service.
    pub service: String,
    /// `stop`, `start`, `reload` or `reboot`.
    pub verb: String,
    /// What it said, or what went wrong; the end of its output.
    pub output: String,
}

/// The last update that was prepared or committed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LastUpdate {
    /// Which update.
    #[serde(with = "model::wide")]
    pub update_id: u64,
    /// The image it was for.
    pub image: ImageName,
    /// How it ended.
    pub outcome: Outcome,
    /// The generation in which the touched paths had been scanned again; `None` until then.
    pub verified_generation: Option<u64>,
    /// Operations of its plan.
    pub operations: u32,
    /// Time from its first visible change to its last, in nanoseconds.
    #[serde(with = "model::wide")]
    pub window_ns: u64,
    /// Triggers that failed.
    pub trigger_failures: Vec<TriggerFailure>,
    /// How the health check ended; `None` if there was none, or it has not ended yet.
    pub health: Option<Health>,
    /// True while the reboot that is part of the update has not happened: the update is complete
    /// only when the machine has come up again.
    pub awaits_boot: bool,
    /// Paths whose immutable or append-only flag had to be taken away; at most a hundred.
    pub unlocked: Vec<TreePath>,
    /// When it ended, by the machine's clock.
    pub ended: Time,
}

impl LastUpdate {
    /// An update that has ended so, at a time that nobody knows; there is nothing to remark, and
    /// what it touched is not scanned again yet.
    #[must_use]
    pub fn new(update_id: u64, image: ImageName, outcome: Outcome) -> Self {
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
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Space {
    /// Bytes that a process of root may still write.
    #[serde(with = "model::wide")]
    pub free_bytes: u64,
    /// Inodes that may still be made; `u64::MAX` where the file-system has no limit.
    #[serde(with = "model::wide")]
    pub free_inodes: u64,
}

/// Who the machine is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// Its host name.
    pub hostname: String,
    /// `/etc/machine-id`, or empty.
    pub machine_id: String,
    /// The kernel's boot id.
    pub boot_id: String,
    /// The version of subd.
    pub subd_version: String,
}

/// How the scanner is doing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScanCounters {
    /// Metadata passes that were completed.
    #[serde(with = "model::wide")]
    pub metadata_passes: u64,
    /// Content passes that were completed.
    #[serde(with = "model::wide")]
    pub content_passes: u64,
    /// How long the last metadata pass took, in milliseconds.
    #[serde(with = "model::wide")]
    pub metadata_pass_ms: u64,
    /// How long the last content pass took, in milliseconds.
    #[serde(with = "model::wide")]
    pub content_pass_ms: u64,
    /// Media passes that were completed.
    #[serde(with = "model::wide")]
    pub media_passes: u64,
    /// How long the last media pass took, in milliseconds.
    #[serde(with = "model::wide")]
    pub media_pass_ms: u64,
    /// Bytes that were hashed since subd started.
    #[serde(with = "model::wide")]
    pub hashed_bytes: u64,
    /// Bytes that were fetched since subd started.
    #[serde(with = "model::wide")]
    pub fetched_bytes: u64,
}

/// See [`Poll`]. Parts that are `None` have not changed since the caller's version.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PollReply {
    /// Where the sub is now.
    pub version: Version,
    /// Who it is.
    pub identity: Identity,
    /// What it does.
    pub activity: Activity,
    /// The tree, if the generation has moved and a scan under the current settings is complete.
    pub scan: Option<ScanReport>,
    /// False until a scan under the current settings is complete.
    pub scanned: bool,
    /// The scope of the current settings.
    pub scope: Scope,
    /// Local exclusions, as the lines of [`model::filter::Patterns`]: nothing there is scanned or
    /// changed.
    pub exclusions: Vec<String>,
    /// The object cache, if the generation has moved.
    pub cache: Option<CacheReport>,
    /// How the last fetch ended.
    pub last_fetch: Option<LastFetch>,
    /// How the last update ended.
    pub last_update: Option<LastUpdate>,
    /// The image of the last update that was done, kept over restarts.
    pub last_image: Option<ImageName>,
    /// Trigger failures since the last good update, kept over restarts.
    pub trigger_failures: Vec<TriggerFailure>,
    /// Free space.
    pub space: Space,
    /// Scan counters.
    pub counters: ScanCounters,
    /// What subd takes of the machine.
    pub load: Load,
    /// What it was told to take at most, and what its own configuration allows.
    pub limits: LimitsReport,
    /// What an operator should know, sorted.
    pub alarms: Vec<Alarm>,
    /// Whether updates are paused on the machine itself.
    pub paused: Option<Paused>,
    /// The machine's clock.
    pub clock: Time,
}

impl PollReply {
    /// The reply of a sub that has scanned in `scope`, does nothing, and has no news of its tree
    /// and its cache; it has had no update, and has space for all that comes.
    #[must_use]
    pub fn idle(version: Version, scope: Scope) -> Self {
        Self {
            version,
            identity: Identity::default(),
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
            space: Space { free_bytes: 1 << 40, free_inodes: u64::MAX },
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

/// Gives directories of the scanned tree by digest.
pub enum GetDirectories {}

/// The most digests in one request.
pub const DIRECTORIES_MAX: usize = 4_096;

/// See [`GetDirectories`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GetDirectoriesRequest {
    /// The digests: at most [`DIRECTORIES_MAX`].
    pub digests: Vec<ObjectId>,
}

/// The encoding of one directory (`tree-1`).
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct EncodedDirectory(pub model::escape::ByteText);

/// See [`GetDirectories`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GetDirectoriesReply {
    /// Those that the scanned tree has, in the order of the request. Others are left out: the
    /// tree has changed, so poll again. The server may stop early to keep the reply small; ask
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

/// Starts to get objects into the cache; what a file of the machine has is taken from there.
pub enum Fetch {}

/// See [`Fetch`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FetchRequest {
    /// Chosen by the caller; a repeated call with the same id does nothing more.
    #[serde(with = "model::wide")]
    pub fetch_id: u64,
    /// `host:port` of object servers, tried in this order.
    pub sources: Vec<String>,
    /// The objects, with their sizes in bytes: at most [`super::object_server::IDS_MAX`].
    pub objects: Vec<FetchObject>,
    /// Nobody waits for these objects: another fetch, that is needed, ends this one.
    pub ahead: bool,
}

/// One object to fetch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FetchObject {
    /// The object.
    pub id: ObjectId,
    /// Its length, in bytes.
    #[serde(with = "model::wide")]
    pub size_bytes: u64,
}

impl Method for Fetch {
    const NAME: &'static str = "Subd.Fetch";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Changes;
    const REQUEST_BYTES_MAX: usize = 16 << 20;
    type Request = FetchRequest;
    type Reply = Done;

    fn brief(request: &Self::Request) -> Brief {
        Brief::default()
            .with("fetch", request.fetch_id)
            .with_list("sources", &request.sources)
            .with("objects", request.objects.len())
            .with("ahead", request.ahead)
    }
}

/// Stages an update. Nothing visible changes.
pub enum Prepare {}

/// What the caller planned upon; if any differs the answer is [`crate::fault::FaultCode::Stale`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Expects {
    /// The instance of the sub.
    #[serde(with = "model::wide")]
    pub instance: u64,
    /// The digest of the scanned tree.
    pub root: ObjectId,
    /// The scope of the scan.
    pub scope: Scope,
}

/// See [`Prepare`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PrepareRequest {
    /// Chosen by the caller; a repeated call with the same id does nothing more.
    #[serde(with = "model::wide")]
    pub update_id: u64,
    /// What the plan was made upon.
    pub expects: Expects,
    /// The image that is wanted.
    pub image: ImageName,
    /// The digest of its content.
    pub image_digest: ObjectId,
    /// What to change.
    pub plan: Plan,
    /// The triggers of the image.
    pub triggers: Triggers,
    /// The health check of the image.
    pub health_check: Option<HealthCheck>,
    /// Do work of high impact without asking the machine's disruption command.
    pub force_disruption: bool,
    /// How long the staged update may wait for its Commit, in seconds.
    pub expires_seconds: u32,
}

impl Method for Prepare {
    const NAME: &'static str = "Subd.Prepare";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Changes;
    const REQUEST_BYTES_MAX: usize = 128 << 20;
    type Request = PrepareRequest;
    type Reply = Done;

    fn brief(request: &Self::Request) -> Brief {
        Brief::default()
            .with("update", request.update_id)
            .with("image", &request.image)
            .with("digest", request.image_digest)
            .with("operations", request.plan.operations.len())
            .with("force-disruption", request.force_disruption)
    }
}

/// Carries out the update that was staged.
pub enum Commit {}

/// See [`Commit`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommitRequest {
    /// The update; [`crate::fault::FaultCode::NotFound`] if it is not staged.
    #[serde(with = "model::wide")]
    pub update_id: u64,
}

impl Method for Commit {
    const NAME: &'static str = "Subd.Commit";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Changes;
    type Request = CommitRequest;
    type Reply = Done;

    fn brief(request: &Self::Request) -> Brief {
        Brief::default().with("update", request.update_id)
    }
}

/// Takes objects out of the cache.
pub enum Cleanup {}

/// See [`Cleanup`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
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

    fn brief(request: &Self::Request) -> Brief {
        Brief::default().with_list("objects", &request.objects)
    }
}

/// Gives the configuration in force.
pub enum GetConfiguration {}

/// What a dominator may tell a sub.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Configuration {
    /// How to scan.
    pub scan: ScanSettings,
    /// What subd may take of the machine, within the machine's own ceilings.
    pub limits: Limits,
}

impl Method for GetConfiguration {
    const NAME: &'static str = "Subd.GetConfiguration";
    const ACCESS: Access = Access::Authenticated;
    const EFFECT: Effect = Effect::Tells;
    const REPLY_BYTES_MAX: usize = 16 << 20;
    type Request = ();
    type Reply = Configuration;
}

/// Changes what a dominator may tell a sub.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SetConfigurationRequest {
    /// How to scan from now on; `None` to leave that as it is.
    pub scan: Option<ScanSettings>,
    /// The limits from now on; `None` to leave them as they are.
    pub limits: Option<Limits>,
}

/// Changes the configuration; kept over restarts. A change of the scan settings starts a new
/// scan, which hashes only what it must.
pub enum SetConfiguration {}

impl Method for SetConfiguration {
    const NAME: &'static str = "Subd.SetConfiguration";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Changes;
    const REQUEST_BYTES_MAX: usize = 16 << 20;
    type Request = SetConfigurationRequest;
    type Reply = Done;

    fn brief(request: &Self::Request) -> Brief {
        let coverage = request.scan.as_ref().map(|scan| match &scan.coverage {
            Coverage::Full(_) => "full",
            Coverage::Paths(_) => "sparse",
        });
        let limits = request.limits.unwrap_or_default();
        Brief::default()
            .with_some("scan", coverage)
            .with("limits", request.limits.is_some())
            .with_some("cpu-percent", limits.cpu_percent)
            .with_some("scan-percent", limits.scan_percent)
            .with_some("write-percent", limits.write_percent)
            .with_some("network-percent", limits.network_percent)
    }
}

/// A difference in a path, as reports show it.
pub type PathDifference = (TreePath, Vec<Difference>);
