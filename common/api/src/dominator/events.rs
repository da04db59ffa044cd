//! The event history: changes of machines, and orders.

use model::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::access::Access;
use crate::audit::call_details::CallDetails;
use crate::image_server::expiry::AcceptClockReply;
use crate::method::{Effect, Method};
use crate::subd::UpdateOutcome;
use model::escape::ByteText;
use model::object::ObjectId;
use model::path::TreePath;
use model::plan::Difference;
use model::tree::{Node, Time};

/// The most events of one reply.
pub const EVENTS_MAX: u32 = 1_000;

/// The most values of one filter.
pub const FILTERS_MAX: usize = 64;

/// The longest value of a filter, in bytes.
pub const FILTER_BYTES_MAX: usize = 4_096;

/// The most bytes of a backup in one reply.
pub const PIECE_BYTES_MAX: u32 = 4 << 20;

/// Why a path was changed.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum ChangeReason {
    /// The machine had drifted: its former image requires the same of the path as the new one.
    Drift,
    /// The image changed: the two images differ at the path, or the former one is not known.
    Image,
    /// The path is a computed file of the image.
    Computed,
}

impl ChangeReason {
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

/// The kind of an event.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum EventKind {
    /// The status of a machine changed.
    Status,
    /// An update was ordered.
    Update,
    /// An update changed a path.
    Change,
    /// An operator gave an order.
    Order,
}

impl EventKind {
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
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum PathOperation {
    /// The path did not exist.
    Create,
    /// The entry was replaced by another one.
    Replace,
    /// The owner, mode, attributes or time were set.
    Change,
    /// The entry was removed.
    Remove,
}

impl PathOperation {
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

/// An ordered change of one path.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PathChange {
    pub path: TreePath,
    pub operation: PathOperation,
    pub reason: ChangeReason,
    /// How the path differed from what is required.
    pub differs: Vec<Difference>,
    /// The entry before, according to the last scan; `None` for a new entry.
    pub old: Option<Node>,
    /// The entry afterwards; `None` for a removed entry.
    pub new: Option<Node>,
}

/// An update that was ordered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct UpdateSummary {
    /// The id of the update at the sub.
    #[serde(with = "model::json::LargeNumber")]
    pub update_id: u64,
    /// The new image.
    pub image: String,
    /// The image of the previous update; empty if unknown.
    pub former: String,
    /// How many paths are changed because of drift.
    pub drift: u32,
    /// How many paths are changed because the image changed.
    pub of_image: u32,
    /// How many computed files are changed.
    pub computed: u32,
    /// How it ended; `None` while that is not known. It stays unknown if the machine was removed or
    /// got another update before it reported the end.
    pub outcome: Option<UpdateOutcome>,
    /// When the end was recorded.
    pub ended: Option<Time>,
}

/// What happened, by kind of event.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum EventDetails {
    /// The status of the machine changed.
    Status {
        /// The name of the status. A text, because an old record may hold a status that no longer
        /// exists.
        status: String,
        /// Explains the status.
        detail: String,
    },
    /// An update was ordered. It is recorded before it is sent to the machine.
    Update(UpdateSummary),
    /// The change of a path was ordered.
    Change { update: UpdateSummary, change: Box<PathChange> },
    /// An operator gave an order. It is recorded before it takes effect.
    Order {
        verb: String,
        who: String,
        /// What exactly was ordered, such as the end of a pause, and the reason; empty if the verb
        /// says it and no reason was given.
        why: String,
    },
    /// Changes of status could not be recorded.
    Gap {
        #[serde(with = "model::json::LargeNumber")]
        lost: u64,
    },
    /// As [`EventDetails::Update`], but triggers failed.
    TriggersFailed {
        update: UpdateSummary,
        /// Describes the failures.
        triggers: String,
    },
}

/// One event of the history.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct HistoryEvent {
    /// The position in the history.
    pub at: EventPosition,
    /// When it was recorded, by the dominator's clock.
    pub time: Time,
    /// The machine, or what an order is about; empty for the whole fleet.
    pub about: String,
    /// What happened, by kind of event.
    pub what: EventDetails,
}

/// The position of an event in the history; later events have larger ones.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    Deserialize,
    JsonSchema,
)]
pub struct EventPosition {
    /// The number of the record.
    #[serde(with = "model::json::LargeNumber")]
    pub number: u64,
    /// The number of the path within one update.
    pub part: u32,
}

/// Returns events, newest first.
pub enum ListEvents {}

/// See [`ListEvents`]. Each list may have at most [`FILTERS_MAX`] values of [`FILTER_BYTES_MAX`];
/// an event must match one of each list that is not empty.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ListEventsRequest {
    /// Patterns of what events are about, in which `*` stands for any characters and `?` for one.
    /// An order about several machines or about a pattern matches each of them; an order about the
    /// whole fleet or a tag matches none.
    pub hosts: Vec<String>,
    /// Paths, or patterns of paths in which `*` stands for any characters except a slash and `**`
    /// for any characters. Only [`EventDetails::Change`] matches.
    pub paths: Vec<String>,
    /// Only changes for one of these reasons; without paths, only updates that have such changes.
    pub reasons: Vec<ChangeReason>,
    /// Kinds of events. If empty: changes if `paths` is set, else all kinds except changes.
    pub kinds: Vec<EventKind>,
    /// Only updates to one of these images, or to images below these.
    pub images: Vec<String>,
    /// Only orders by one of these users.
    pub who: Vec<String>,
    /// Only events that were recorded at or after this time.
    pub since: Option<Time>,
    /// Only events that were recorded at or before this time.
    pub until: Option<Time>,
    /// Only events before this position: where the last reply ended.
    pub before: Option<EventPosition>,
    /// The most events; 0 for [`EVENTS_MAX`], which is the upper limit.
    pub limit: u32,
    /// Only events of records after this one.
    pub after: Option<EventPosition>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ListEventsReply {
    /// The events, newest first.
    pub events: Vec<HistoryEvent>,
    /// Set if there may be more: the next value of `before`. It may be set in a reply without
    /// events, because each call reads a limited number of records.
    pub next: Option<EventPosition>,
}

impl Method for ListEvents {
    const NAME: &'static str = "Dominator.ListEvents";
    const ACCESS: Access = Access::Authenticated;
    const EFFECT: Effect = Effect::Tells;
    const REPLY_BYTES_MAX: usize = 64 << 20;
    type Request = ListEventsRequest;
    type Reply = ListEventsReply;
}

/// Confirms that the clock of the dominator's machine is right although it jumped: what is too old
/// is removed from the history again.
pub enum AcceptClock {}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct AcceptClockRequest {
    /// Who asks, if the call has no certificate.
    pub who: String,
    /// The reason; may be empty.
    #[serde(default)]
    pub why: String,
}

impl Method for AcceptClock {
    const NAME: &'static str = "Dominator.AcceptClock";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Changes;
    type Request = AcceptClockRequest;
    type Reply = AcceptClockReply;

    fn audit_details(request: &Self::Request) -> CallDetails {
        CallDetails::default().why(&request.why).who(&request.who)
    }
}

/// Copies the dominator's database, and returns the copy in pieces. A dominator that is started on
/// the copy starts with updates disabled.
pub enum Backup {}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct BackupRequest {
    /// The id of the copy to read; 0 makes a new copy and deletes the last.
    #[serde(with = "model::json::LargeNumber")]
    pub id: u64,
    /// The offset of the piece, in bytes.
    #[serde(with = "model::json::LargeNumber")]
    pub offset: u64,
    /// Who says so, as long as no certificate tells.
    pub who: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct BackupReply {
    /// The id of the copy.
    #[serde(with = "model::json::LargeNumber")]
    pub id: u64,
    /// The length of the copy.
    #[serde(with = "model::json::LargeNumber")]
    pub size_bytes: u64,
    /// The digest of the whole copy.
    pub digest: ObjectId,
    /// The piece: at most [`PIECE_BYTES_MAX`] bytes; empty at the end, after which the dominator
    /// deletes the copy.
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
