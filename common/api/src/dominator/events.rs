//! What operators ask about what happened: changes of machines, and orders.

use serde::{Deserialize, Serialize};

use crate::subd::Outcome;
use crate::{
    access::Access,
    method::{Effect, Method},
};
use model::escape::ByteText;
use model::object::ObjectId;
use model::path::TreePath;
use model::plan::Difference;
use model::tree::{Node, Time};

/// The most events of one reply.
pub const EVENTS_MAX: u32 = 1_000;

/// The most values that a request may give for one filter.
pub const FILTERS_MAX: usize = 64;

/// The longest value of a filter, in bytes.
pub const FILTER_BYTES_MAX: usize = 4_096;

/// The most bytes of a backup in one reply.
pub const PIECE_BYTES_MAX: u32 = 4 << 20;

/// Why a path was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reason {
    /// The machine had left its image: the image that it had before says nothing else of the path
    /// than the one that it got.
    Drift,
    /// Another image: the two say different things of the path, or the former is not known.
    Image,
    /// It is a computed file of the image.
    Computed,
}

impl Reason {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Drift, Self::Image, Self::Computed];

    /// The word that scripts match.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Drift => "drift",
            Self::Image => "image",
            Self::Computed => "computed",
        }
    }
}

/// The kinds of events.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum EventKind {
    /// A machine has another status.
    Status,
    /// An update was ordered.
    Update,
    /// A path was changed by an update.
    Change,
    /// An operator gave an order.
    Order,
}

impl EventKind {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Status, Self::Update, Self::Change, Self::Order];

    /// The word that scripts match.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Status => "status",
            Self::Update => "update",
            Self::Change => "change",
            Self::Order => "order",
        }
    }
}

/// What was done to a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Operation {
    /// Nothing was there before.
    Create,
    /// Something else took its place.
    Replace,
    /// Its owner, mode, attributes or time were set.
    Change,
    /// It was taken away.
    Remove,
}

impl Operation {
    /// The word that scripts match.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Create => "create",
            Self::Replace => "replace",
            Self::Change => "change",
            Self::Remove => "remove",
        }
    }
}

/// One path that was ordered to be changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PathChange {
    /// Where.
    pub path: TreePath,
    /// What is done.
    pub operation: Operation,
    /// Why.
    pub reason: Reason,
    /// In what the path differed from what is required.
    pub differs: Vec<Difference>,
    /// What was there, as the last scan saw it; `None` if nothing was.
    pub old: Option<Node>,
    /// What is there from then on; `None` if nothing is.
    pub new: Option<Node>,
}

/// An update that was ordered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UpdateFacts {
    /// The id by which the sub knows it.
    #[serde(with = "model::wide")]
    pub update_id: u64,
    /// The image that it brings.
    pub image: String,
    /// The image of the update before it; empty if none is known.
    pub former: String,
    /// How many paths it changes because of drift.
    pub drift: u32,
    /// How many because of another image.
    pub of_image: u32,
    /// How many computed files it changes.
    pub computed: u32,
    /// How it ended; `None` while that is not known, which it may never be: the machine may have
    /// gone away, or got another update, before it told.
    pub outcome: Option<Outcome>,
    /// When that was recorded.
    pub ended: Option<Time>,
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum What {
    /// The machine has another status.
    Status {
        /// Its name, as in `docs/OPERATING.md`; a text, because an old record may have one that is
        /// not used any more.
        status: String,
        /// In words.
        detail: String,
    },
    /// An update was ordered; it was recorded before the machine was told.
    Update(UpdateFacts),
    /// A path was ordered to be changed.
    Change {
        /// By which update.
        update: UpdateFacts,
        /// How.
        change: Box<PathChange>,
    },
    /// An operator gave an order; it was recorded before it was acted on.
    Order {
        /// The command.
        verb: String,
        /// Who gave it.
        who: String,
        /// Why; empty if nobody said.
        why: String,
    },
    /// Changes of status could not be recorded.
    Gap {
        /// How many.
        #[serde(with = "model::wide")]
        lost: u64,
    },
}

/// Something that happened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// Where it is in the list of all events.
    pub at: Position,
    /// When it was recorded, by the clock of the dominator.
    pub time: Time,
    /// The machine; of an order whatever it was about; empty for the whole fleet.
    pub about: String,
    /// What happened.
    pub what: What,
}

/// The place of an event in the list of all: the later, the larger.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct Position {
    /// Counts records.
    #[serde(with = "model::wide")]
    pub number: u64,
    /// Counts the paths of one update.
    pub part: u32,
}

/// Gives events, the newest first.
pub enum ListEvents {}

/// See [`ListEvents`]. Each list may have at most [`FILTERS_MAX`] values of [`FILTER_BYTES_MAX`];
/// an event must match one of each list that is not empty.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ListEventsRequest {
    /// Patterns of what events are about, in which `*` stands for anything and `?` for one
    /// character. An order about several machines, or about a pattern of such, is about each; one
    /// about the whole fleet or a tag is about none.
    pub hosts: Vec<String>,
    /// Paths, or patterns of paths, in which `*` stands for anything but a slash and `**` for
    /// anything: only [`What::Change`] matches.
    pub paths: Vec<String>,
    /// Only changes for one of these reasons; without paths, only updates that have such.
    pub reasons: Vec<Reason>,
    /// Kinds of events. If empty: changes if there are paths, else all but changes.
    pub kinds: Vec<EventKind>,
    /// Only updates to one of these images, or to one below these.
    pub images: Vec<String>,
    /// Only orders by one of these.
    pub who: Vec<String>,
    /// Only events that were recorded then or later.
    pub since: Option<Time>,
    /// Only events that were recorded then or before.
    pub until: Option<Time>,
    /// Only events before this place: where the last reply ended.
    pub before: Option<Position>,
    /// How many at most; never more than [`EVENTS_MAX`]; 0 for as many as may be.
    pub limit: u32,
    /// Only events of records that were made after this one: what is new since then.
    pub after: Option<Position>,
}

/// See [`ListEvents`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListEventsReply {
    /// The events, the newest first.
    pub events: Vec<Event>,
    /// Set if there may be more: what to give as `before`. A reply may have no events and still
    /// have this, because each looks at a limited number of records.
    pub next: Option<Position>,
}

impl Method for ListEvents {
    const NAME: &'static str = "Dominator.ListEvents";
    const ACCESS: Access = Access::Authenticated;
    const EFFECT: Effect = Effect::Tells;
    const REPLY_BYTES_MAX: usize = 64 << 20;
    type Request = ListEventsRequest;
    type Reply = ListEventsReply;
}

/// Makes a copy of the dominator's database, and gives it piece by piece. A dominator that is
/// started on the copy starts with updates disabled.
pub enum Backup {}

/// See [`Backup`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct BackupRequest {
    /// The copy that pieces are asked of; 0 makes a new one, and forgets the last.
    #[serde(with = "model::wide")]
    pub id: u64,
    /// Where the piece starts, in bytes.
    #[serde(with = "model::wide")]
    pub offset: u64,
    /// Who says so, as long as no certificate tells.
    pub who: String,
}

/// See [`Backup`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BackupReply {
    /// The copy.
    #[serde(with = "model::wide")]
    pub id: u64,
    /// Its length, in bytes.
    #[serde(with = "model::wide")]
    pub size_bytes: u64,
    /// The digest of the whole copy.
    pub digest: ObjectId,
    /// The piece: at most [`PIECE_BYTES_MAX`] bytes; none at the end, upon which the dominator
    /// forgets the copy.
    pub bytes: ByteText,
}

impl Method for Backup {
    const NAME: &'static str = "Dominator.Backup";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Tells;
    const REPLY_BYTES_MAX: usize = 32 << 20;
    type Request = BackupRequest;
    type Reply = BackupReply;
}
