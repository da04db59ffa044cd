//! Explains the status of one machine, and what comes next.

use model::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Status;
use super::orders::{DefaultImage, UpdatePause};
use super::rollback::Rollback;
use crate::subd::LastUpdate;
use crate::{
    access::Access,
    method::{Effect, Method},
};
use model::object::ObjectId;
use model::tree::Time;

/// Explains the status of one machine.
pub enum Explain {}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ExplainRequest {
    /// Its name in the machine database.
    pub hostname: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Explanation {
    pub hostname: String,
    pub status: Status,
    /// Details of the status.
    pub detail: String,
    pub since: Time,
    /// What the status means.
    pub means: String,
    pub has: ActualState,
    pub must_have: RequiredState,
    /// The differences by the last comparison; `None` if there was none yet.
    pub differs: Option<DifferenceSummary>,
    /// Set while an operator has paused its updates.
    pub paused: Option<UpdatePause>,
    /// The last decisions: time, status and reason, newest first.
    pub decided: Vec<(Time, Status, String)>,
    pub waits_for: String,
    /// What is done next, and what starts it.
    pub next: String,
    /// The latest time for that, if known.
    pub next_at: Option<Time>,
    /// What an operator can do.
    pub may: Vec<Suggestion>,
}

/// The state of a machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ActualState {
    /// The image of the last update that was done; empty if none.
    pub image: String,
    /// The digest of its tree, if it was scanned.
    pub root: Option<ObjectId>,
    /// How its last update ended.
    pub last_update: Option<LastUpdate>,
    /// When it last answered a poll.
    pub last_seen: Option<Time>,
    /// When it was last known to be synced.
    pub last_synced: Option<Time>,
}

/// Where the required image of a machine comes from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ImageSource {
    /// The record in the machine database.
    Record,
    /// The default for machines whose record names none.
    Default(DefaultImage),
    Nobody,
    /// The order of an operator, although the record or the default is another one.
    Rollback(Rollback),
    /// Environments, whatever the record says.
    Environment(EnvironmentImage),
}

/// What environments say about a machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct EnvironmentImage {
    /// Those that apply, each as `NAME@REVISION`: the one that gives the image, if one does, and
    /// those that give bundles.
    pub environments: Vec<String>,
    /// The image that the machine database names; empty if none.
    pub record: String,
    /// Other environments that select the machine too, and are not applied.
    pub conflicts: Vec<String>,
}

impl RequiredState {
    /// True if no operator has rolled the machine back.
    #[must_use]
    pub fn is_ordinary(&self) -> bool {
        !matches!(self.source, ImageSource::Rollback(_))
    }
}

/// The state that a machine must have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RequiredState {
    /// The image; empty if none.
    pub image: String,
    pub source: ImageSource,
    /// The digest of the image, if it was read.
    pub digest: Option<ObjectId>,
    /// The digest of the image's tree, if it was read.
    pub root: Option<ObjectId>,
    /// Why the image could not be read.
    pub missing: Option<String>,
    /// The image that it will get next; empty if none.
    pub planned: String,
    /// True if the record disables updates.
    pub disable_updates: bool,
}

/// How a machine differs from its image.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DifferenceSummary {
    /// How many paths are to be changed.
    pub operations: u32,
    /// How many paths are changed by each operation: `create`, `replace`, `change`, `remove`.
    pub actions: Vec<(String, u32)>,
    /// How many paths differ in what.
    pub reasons: Vec<(String, u32)>,
    /// The first of the paths, with their differences.
    pub paths: Vec<String>,
    /// Paths that cannot be changed, with the reasons.
    pub blocked: Vec<String>,
    /// Why the update is unsafe.
    pub dangers: Vec<String>,
    /// True if an operator permitted the unsafe update.
    pub is_cleared: bool,
    /// Objects that it still has to fetch.
    pub missing_objects: u32,
    /// Their length together, in bytes.
    #[serde(with = "model::json::LargeNumber")]
    pub missing_bytes: u64,
}

/// Something that an operator can do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Suggestion {
    /// The command to run, such as `domtool retry web1`; empty if `what` is no command.
    pub command: String,
    /// What the command does, or what else to do.
    pub what: String,
}

impl Method for Explain {
    const NAME: &'static str = "Dominator.Explain";
    const ACCESS: Access = Access::Authenticated;
    const EFFECT: Effect = Effect::Tells;
    const REPLY_BYTES_MAX: usize = 16 << 20;
    type Request = ExplainRequest;
    type Reply = Explanation;
}
