//! Why a machine is as it is, and what comes next.

use serde::{Deserialize, Serialize};

use super::Status;
use super::orders::{DefaultImage, UpdatePause};
use crate::subd::LastUpdate;
use crate::{
    access::Access,
    method::{Effect, Method},
};
use model::object::ObjectId;
use model::tree::Time;

/// Explains one machine.
pub enum Explain {}

/// See [`Explain`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExplainRequest {
    /// Its name in the machine database.
    pub hostname: String,
}

/// See [`Explain`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Explanation {
    /// The machine.
    pub hostname: String,
    /// What it is doing, or what it waits for.
    pub status: Status,
    /// The same in words.
    pub detail: String,
    /// Since when.
    pub since: Time,
    /// What the status means.
    pub means: String,
    /// What it has.
    pub has: Has,
    /// What it must have.
    pub must_have: MustHave,
    /// In what it differs, by the last comparison; `None` if it has not been compared.
    pub differs: Option<Differs>,
    /// Set while an operator has paused its updates.
    pub paused: Option<UpdatePause>,
    /// What was decided last: when, which status, and why; the newest first.
    pub decided: Vec<(Time, Status, String)>,
    /// What it waits for.
    pub waits_for: String,
    /// What is done next, and what sets it off.
    pub next: String,
    /// When that is done at the latest, if a time is known.
    pub next_at: Option<Time>,
    /// What an operator may do.
    pub may: Vec<Remedy>,
}

/// What a machine has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Has {
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

/// Who says which image a machine must have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ImageSource {
    /// Its record in the machine database.
    Record,
    /// The default for machines whose record names none.
    Default(DefaultImage),
    /// Nobody.
    Nobody,
}

/// What a machine must have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MustHave {
    /// The image; empty if none.
    pub image: String,
    /// Who says so.
    pub source: ImageSource,
    /// The digest of the image, if it is at hand.
    pub digest: Option<ObjectId>,
    /// The digest of its tree, if it is at hand.
    pub root: Option<ObjectId>,
    /// Why it is not at hand.
    pub missing: Option<String>,
    /// The image that it will get next; empty if none.
    pub planned: String,
    /// Its record says that its updates are disabled.
    pub disable_updates: bool,
}

/// In what a machine differs from its image.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Differs {
    /// How many paths are to be changed.
    pub operations: u32,
    /// What is to be done, and to how many paths: `create`, `replace`, `change`, `remove`.
    pub actions: Vec<(String, u32)>,
    /// In what they differ, and how many of them.
    pub reasons: Vec<(String, u32)>,
    /// The first of them, with what is wrong with each.
    pub paths: Vec<String>,
    /// Paths that cannot be changed, and why.
    pub blocked: Vec<String>,
    /// Why it must not be done without an operator's word.
    pub dangers: Vec<String>,
    /// True if an operator has given it.
    pub is_cleared: bool,
    /// Objects that it still has to fetch.
    pub missing_objects: u32,
    /// Their length together, in bytes.
    #[serde(with = "model::wide")]
    pub missing_bytes: u64,
}

/// Something that an operator may do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Remedy {
    /// The command; empty if there is none for it.
    pub command: String,
    /// What it does, or what else is to be done.
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
