//! `ImageServer`: how a replica follows its master, and forwards changes to it.
//!
//! A replica first reads a list of all images that its master has or had, page by page, then waits
//! for changes. It deletes an image only when the master reports that this very image has ended;
//! images missing in the list are left alone. Directories are replicated as a whole
//! ([`directories`]).

pub mod directories;

use std::collections::BTreeSet;

use model::JsonSchema;
use serde::{Deserialize, Serialize};

use directories::{DirectoriesVersion, TroubledDirectories};

use super::directories::{
    ChangeOwner, ChangeOwnerRequest, MakeDirectory, MakeDirectoryReply, MakeDirectoryRequest,
    RemoveDirectory, RemoveDirectoryRequest,
};
use super::expiry::{ChangeExpiry, ChangeExpiryReply, ChangeExpiryRequest};
use super::notes::{
    ChangeSignatures, ChangeSignaturesReply, ChangeSignaturesRequest, ChangeTags, ChangeTagsReply,
    ChangeTagsRequest, CopyImage, CopyImageRequest,
};
use super::{AddImage, AddImageReply, AddImageRequest, DeleteImage, DeleteImageRequest};
use crate::Done;
use crate::audit::call_details::CallDetails;
use crate::{
    access::Access,
    method::{Effect, Method},
};
use model::image::{Image, ImageName};
use model::object::ObjectId;
use model::tree::Time;

/// The most servers that a call or a change may pass through.
pub const SERVERS_MAX: usize = 64;

/// The most changes in one reply.
pub const CHANGES_MAX: usize = 1_000;

/// The longest address of a server in a request, in bytes.
pub const ADDRESS_BYTES_MAX: usize = 300;

/// Identifies the store of a server: 32 random hexadecimal digits, generated when the store was
/// made.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(try_from = "String", into = "String")]
pub struct ServerId(String);

/// A text that is no [`ServerId`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the id of a server has 32 hexadecimal digits")]
pub struct ServerIdError;

impl TryFrom<String> for ServerId {
    type Error = ServerIdError;

    fn try_from(text: String) -> Result<Self, ServerIdError> {
        let is_hex = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
        if text.len() == 32 && text.bytes().all(is_hex) {
            Ok(Self(text))
        } else {
            Err(ServerIdError)
        }
    }
}

impl From<ServerId> for String {
    fn from(id: ServerId) -> Self {
        id.0
    }
}

impl From<u128> for ServerId {
    fn from(number: u128) -> Self {
        Self(format!("{number:032x}"))
    }
}

impl std::fmt::Display for ServerId {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(&self.0)
    }
}

/// A position in the changes of a server.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
pub struct Cursor {
    /// Random for each start of a server.
    #[serde(with = "model::json::LargeNumber")]
    pub instance: u64,
    /// Grows with each change.
    #[serde(with = "model::json::LargeNumber")]
    pub sequence: u64,
}

/// What a replica requests.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ReplicationPosition {
    /// The first page of the list.
    Start,
    /// The next page of a list. If the master was restarted since its first page, the first page.
    After {
        /// [`Cursor::instance`] of the first page.
        #[serde(with = "model::json::LargeNumber")]
        instance: u64,
        /// The last name of the page before.
        name: ImageName,
    },
    /// The changes since then; the first page of the list if they are no longer known.
    Since(Cursor),
}

/// The state of a replica, as it reports it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ReplicaReport {
    pub server: ServerId,
    /// The port on which it listens. Its address is the source address of the call.
    pub port: u16,
    /// True if it has all images that it wants.
    pub is_level: bool,
    /// Images that are still to be fetched or changed.
    #[serde(with = "model::json::LargeNumber")]
    pub images_behind: u64,
}

/// Lists all images, present and ended, then waits for changes.
pub enum GetImageUpdates {}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GetImageUpdatesRequest {
    pub position: ReplicationPosition,
    /// How long to wait for a change, in milliseconds: at most 60,000.
    pub wait_ms: u32,
    pub replica: ReplicaReport,
    /// The version of the directories that the replica has; another version ends the wait.
    pub directories: Option<DirectoriesVersion>,
}

/// How an image ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ImageEnd {
    /// It was deleted.
    Deleted,
    /// It expired.
    Expired,
}

impl ImageEnd {
    /// Returns the name in texts.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Deleted => "deleted",
            Self::Expired => "expired",
        }
    }
}

/// The state of a name. Later releases may have other kinds of changes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ImageChange {
    /// An image of this name exists.
    Image {
        name: ImageName,
        /// The digest of its content.
        digest: ObjectId,
        /// The digest of its notes, without the expiry.
        notes: ObjectId,
        /// When it expires.
        expires_at: Option<Time>,
        /// The total length of its files.
        #[serde(with = "model::json::LargeNumber")]
        bytes: u64,
    },
    /// An image of this name has ended. The name is never used again.
    Ended {
        name: ImageName,
        /// How it ended.
        how: ImageEnd,
        /// The digest of its content, if known.
        digest: Option<ObjectId>,
    },
}

impl ImageChange {
    /// Returns the name of the image.
    #[must_use]
    pub fn name(&self) -> &ImageName {
        match self {
            Self::Image { name, .. } | Self::Ended { name, .. } => name,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GetImageUpdatesReply {
    pub server: ServerId,
    /// The stores of its master, of the master's master, and so on; at most [`SERVERS_MAX`].
    pub upstream: Vec<ServerId>,
    /// The position after these changes; of a list, when its page was made.
    pub cursor: Cursor,
    /// True if this is a page of the list, sorted by name.
    pub is_list: bool,
    /// The changes: at most [`CHANGES_MAX`].
    pub changes: Vec<ImageChange>,
    pub more: bool,
    /// The version of the directories; `None` if none was ever made, or the record cannot be used.
    pub directories: Option<DirectoriesVersion>,
}

impl Method for GetImageUpdates {
    const NAME: &'static str = "ImageServer.GetImageUpdates";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Tells;
    const REPLY_BYTES_MAX: usize = 16 << 20;
    type Request = GetImageUpdatesRequest;
    type Reply = GetImageUpdatesReply;
}

/// A method whose calls a replica forwards to its master, which decides.
pub trait ForwardedMethod: Method {
    /// Returns the request as the body of [`Forward`].
    fn write(request: Self::Request) -> ForwardedWrite;

    /// Returns the reply to the caller of the replica; `None` if `written` is that of another
    /// method.
    fn reply(written: WriteReply) -> Option<Self::Reply>;
}

/// Makes [`ForwardedWrite`] and everything that depends on the method, from one line for each
/// method: the variant and its body, the method, the changed image or directory, the log text, and
/// the reply for a [`WriteReply`]. The order of the lines is the encoding.
macro_rules! forwarded_methods {
    ($(
        $variant:ident($body:ty) = $method:ty, $request:ident => $name:expr, $done:literal,
        $written:pat => $reply:expr;
    )+) => {
        /// The request of a forwarded method. The objects of a new image are on the master already.
        #[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
        pub enum ForwardedWrite {
            $($variant($body),)+
        }

        impl ForwardedWrite {
            /// Returns the name of the method.
            #[must_use]
            pub fn method(&self) -> &'static str {
                match self {
                    $(Self::$variant(_) => <$method>::NAME,)+
                }
            }

            /// Returns the name of the image or directory that is changed.
            #[must_use]
            pub fn name(&self) -> &ImageName {
                match self {
                    $(Self::$variant($request) => $name,)+
                }
            }

            /// Returns what was done to it when the call succeeded, for logs.
            #[must_use]
            pub fn done(&self) -> &'static str {
                match self {
                    $(Self::$variant(_) => $done,)+
                }
            }

            fn audit_details(&self) -> CallDetails {
                match self {
                    $(Self::$variant(request) => <$method>::audit_details(request),)+
                }
            }
        }

        $(impl ForwardedMethod for $method {
            fn write(request: Self::Request) -> ForwardedWrite {
                ForwardedWrite::$variant(request.into())
            }

            fn reply(written: WriteReply) -> Option<Self::Reply> {
                match written {
                    $written => Some($reply),
                    _ => None,
                }
            }
        })+
    };
}

forwarded_methods! {
    Add(Box<AddImageRequest>) = AddImage, add => &add.content.name, "added",
        WriteReply::Image(image) => AddImageReply { digest: image.content.digest() };
    Delete(DeleteImageRequest) = DeleteImage, delete => &delete.name, "deleted",
        WriteReply::Deleted => Done {};
    Copy(CopyImageRequest) = CopyImage, copy => &copy.to, "copied",
        WriteReply::Image(image) => AddImageReply { digest: image.content.digest() };
    Tags(ChangeTagsRequest) = ChangeTags, change => &change.name, "changed tags",
        WriteReply::Tags(reply) => reply;
    Expiry(ChangeExpiryRequest) = ChangeExpiry, change => &change.name, "changed an expiry",
        WriteReply::Expiry(reply) => reply;
    MakeDirectory(MakeDirectoryRequest) = MakeDirectory, make => &make.name, "made a directory",
        WriteReply::Made(reply) => reply;
    RemoveDirectory(RemoveDirectoryRequest) = RemoveDirectory, remove => &remove.name,
        "removed a directory",
        WriteReply::Directories => Done {};
    ChangeOwner(ChangeOwnerRequest) = ChangeOwner, change => &change.name, "changed the owners",
        WriteReply::Directories => Done {};
    Signatures(ChangeSignaturesRequest) = ChangeSignatures, change => &change.name,
        "changed signatures",
        WriteReply::Signatures(reply) => reply;
}

/// The result of a [`ForwardedWrite`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum WriteReply {
    /// Of [`ForwardedWrite::Add`] and [`ForwardedWrite::Copy`]: the image as it is now.
    Image(Box<Image>),
    Deleted,
    Tags(ChangeTagsReply),
    Expiry(ChangeExpiryReply),
    Made(MakeDirectoryReply),
    /// Of [`ForwardedWrite::RemoveDirectory`] and [`ForwardedWrite::ChangeOwner`].
    Directories,
    Signatures(ChangeSignaturesReply),
}

/// The caller who requested a change, as reported by the replica.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ForwardOrigin {
    /// An address and port.
    pub address: String,
    /// The user, if it has a certificate.
    pub user: Option<String>,
    /// The groups that the user is in.
    pub groups: BTreeSet<String>,
    /// True if the user has the power for the method.
    pub has_power: bool,
}

/// Forwards a change to the server that decides on it. Only for replicas, which vouch for the
/// identity of the caller.
pub enum Forward {}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ForwardRequest {
    /// The stores of the replicas that it has passed through, the first one first: at most
    /// [`SERVERS_MAX`].
    pub path: Vec<ServerId>,
    /// The caller of the first replica.
    pub origin: ForwardOrigin,
    pub write: ForwardedWrite,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ForwardReply {
    pub written: WriteReply,
    /// The position that includes the change.
    pub cursor: Cursor,
    /// The version of the directories that includes the change.
    pub directories: Option<DirectoriesVersion>,
}

impl Method for Forward {
    const NAME: &'static str = "ImageServer.Forward";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Changes;
    const REQUEST_BYTES_MAX: usize = 17 << 20;
    const REPLY_BYTES_MAX: usize = 17 << 20;
    type Request = ForwardRequest;
    type Reply = ForwardReply;

    fn audit_details(request: &Self::Request) -> CallDetails {
        let ForwardOrigin { address, user, .. } = &request.origin;
        let user = user.as_deref().unwrap_or("somebody");
        request
            .write
            .audit_details()
            .with("write", request.write.method())
            .who(&format!("{user} at {address}"))
    }
}

/// Returns how far a server is behind its master, and its replicas.
pub enum GetReplication {}

/// The state of the connection from a replica to its master.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum LinkState {
    /// It has not answered yet.
    Connecting,
    /// It answers.
    Connected,
    /// It does not answer any more.
    Broken,
    /// The server is its own master, directly or through others. Nothing is replicated.
    Loop,
}

impl LinkState {
    /// Returns the name in JSON and metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Connecting => "connecting",
            Self::Connected => "connected",
            Self::Broken => "broken",
            Self::Loop => "loop",
        }
    }
}

/// Why an image differs from the master's.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum ReplicationTrouble {
    /// Another image of this name exists here.
    Conflict,
    /// The image has ended here, and exists on the master.
    EndedHere,
    /// The master has ended another image of this name.
    EndedOther,
    /// The image has ended on the master, but is in use here.
    Held,
    /// Its record is damaged here.
    Damaged,
    /// It could not be fetched or changed; it is retried.
    Failing,
}

impl ReplicationTrouble {
    /// Returns the name in JSON and metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Conflict => "conflict",
            Self::EndedHere => "ended-here",
            Self::EndedOther => "ended-other",
            Self::Held => "held",
            Self::Damaged => "damaged",
            Self::Failing => "failing",
        }
    }
}

/// An image that differs from the master's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TroubledImage {
    pub name: ImageName,
    pub trouble: ReplicationTrouble,
    /// Describes the problem and what to do.
    pub text: String,
}

/// The most images that a list in the reply names.
pub const NAMED_MAX: usize = 1_000;

/// The state of replication from the master.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct MasterState {
    /// The address of the master.
    pub address: String,
    /// The store of the master, if known.
    pub server: Option<ServerId>,
    /// The stores of its master, of the master's master, and so on.
    pub upstream: Vec<ServerId>,
    /// Whether the master answers.
    pub link: LinkState,
    pub since: Time,
    /// True if all images of the master that match the patterns are here.
    pub is_level: bool,
    /// When that was last true.
    pub level_at: Option<Time>,
    /// Images that are still to be fetched or changed.
    #[serde(with = "model::json::LargeNumber")]
    pub images_behind: u64,
    /// An upper bound of the bytes to be fetched for them.
    #[serde(with = "model::json::LargeNumber")]
    pub bytes_left: u64,
    /// The last error, and when it happened.
    pub last_error: Option<(Time, String)>,
    /// Only images whose name matches one of these patterns are replicated; all if empty.
    pub include: Vec<String>,
    /// Images whose name matches one of these patterns are not replicated.
    pub exclude: Vec<String>,
    /// True if images that have ended on the master are kept.
    pub is_archive: bool,
    /// Images that differ from the master's, sorted by name: at most [`NAMED_MAX`].
    pub troubles: Vec<TroubledImage>,
    #[serde(with = "model::json::LargeNumber")]
    pub troubles_total: u64,
    /// Images that the master does not know, sorted by name: at most [`NAMED_MAX`].
    pub only_here: Vec<ImageName>,
    #[serde(with = "model::json::LargeNumber")]
    pub only_here_total: u64,
    /// Images here that the patterns exclude.
    #[serde(with = "model::json::LargeNumber")]
    pub not_followed: u64,
    /// Why the directories differ from the master's; `None` if they are equal or about to be.
    pub directories: Option<TroubledDirectories>,
}

/// A replica, as its master knows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ReplicaState {
    pub server: ServerId,
    /// The address of the replica.
    pub address: String,
    /// When it last called.
    pub seen: Time,
    /// True if a call of it is waiting.
    pub is_connected: bool,
    /// As it last reported.
    pub is_level: bool,
    /// As it last reported.
    #[serde(with = "model::json::LargeNumber")]
    pub images_behind: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GetReplicationReply {
    pub server: ServerId,
    /// The state of replication; `None` without a master.
    pub master: Option<MasterState>,
    /// Its replicas, sorted by address.
    pub replicas: Vec<ReplicaState>,
}

impl Method for GetReplication {
    const NAME: &'static str = "ImageServer.GetReplication";
    const ACCESS: Access = Access::Authenticated;
    const EFFECT: Effect = Effect::Tells;
    const REPLY_BYTES_MAX: usize = 16 << 20;
    type Request = Done;
    type Reply = GetReplicationReply;
}

/// Removes an image from this replica only: one that conflicts with the master's, that the patterns
/// exclude, or that the master does not have. No tombstone is left: an image of this name may be
/// replicated later.
pub enum DropCopy {}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DropCopyRequest {
    pub name: ImageName,
    /// Removes it even if it is in use.
    pub force: bool,
}

impl Method for DropCopy {
    const NAME: &'static str = "ImageServer.DropCopy";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Relieves;
    type Request = DropCopyRequest;
    type Reply = Done;

    fn audit_details(request: &Self::Request) -> CallDetails {
        CallDetails::default().with("image", &request.name).with("force", request.force)
    }
}
