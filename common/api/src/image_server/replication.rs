//! `ImageServer`: how a replica follows its master, and how changes travel up to it.
//!
//! A replica first gets a list of all images that its master has or had, page by page, then waits
//! for changes. It ends an image only when the master says that this very image has ended: what a
//! list does not name is left alone. The directories of images come as a whole ([`directories`]).

pub mod directories;

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use directories::{DirectoriesVersion, TroubledDirectories};

use super::directories::{
    ChangeOwner, ChangeOwnerRequest, MakeDirectory, MakeDirectoryReply, MakeDirectoryRequest,
    RemoveDirectory, RemoveDirectoryRequest,
};
use super::expiry::{ChangeExpiry, ChangeExpiryReply, ChangeExpiryRequest};
use super::notes::{ChangeTags, ChangeTagsReply, ChangeTagsRequest, CopyImage, CopyImageRequest};
use super::signatures::{ChangeSignatures, ChangeSignaturesReply, ChangeSignaturesRequest};
use super::{AddImage, AddImageReply, AddImageRequest, DeleteImage, DeleteImageRequest};
use crate::Done;
use crate::audit::brief::Brief;
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

/// The longest address of a server that is told to another, in bytes.
pub const ADDRESS_BYTES_MAX: usize = 300;

/// Which store a server has: 32 hexadecimal digits, made by chance when the store was made.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
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

/// How far changes were followed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Cursor {
    /// Random for each start of a server, so that no other run is taken for this one.
    #[serde(with = "model::wide")]
    pub instance: u64,
    /// Grows with each change.
    #[serde(with = "model::wide")]
    pub sequence: u64,
}

/// What a replica asks for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Position {
    /// The first page of the list.
    Start,
    /// The next page of a list that this run of the master began; of another run the first one.
    After {
        /// [`Cursor::instance`] of the first page.
        #[serde(with = "model::wide")]
        instance: u64,
        /// The last name of the page before.
        name: ImageName,
    },
    /// What has changed since; or the first page of the list if that is not known any more.
    Since(Cursor),
}

/// What a replica says of itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplicaReport {
    /// Its store.
    pub server: ServerId,
    /// The port on which it answers; its address is the one that it calls from.
    pub port: u16,
    /// Whether it has all that it wants, as far as it knows.
    pub is_level: bool,
    /// Images that it has still to get or to change.
    #[serde(with = "model::wide")]
    pub images_behind: u64,
}

/// Lists what has become of all images, then waits for changes.
pub enum GetImageUpdates {}

/// See [`GetImageUpdates`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GetImageUpdatesRequest {
    /// From where on.
    pub position: Position,
    /// How long to wait for a change, in milliseconds: at most 60,000.
    pub wait_ms: u32,
    /// Who asks.
    pub replica: ReplicaReport,
    /// The version of the master's directories that it was told last: another one is news.
    pub directories: Option<DirectoriesVersion>,
}

/// How an image ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Ended {
    /// It was deleted.
    Deleted,
    /// Its time had come.
    Expired,
}

impl Ended {
    /// As a participle.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Deleted => "deleted",
            Self::Expired => "expired",
        }
    }
}

/// What is to be known of a name. Later releases have other kinds of changes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Change {
    /// There is an image of that name.
    Image {
        /// Its name.
        name: ImageName,
        /// The digest of its content.
        digest: ObjectId,
        /// A digest of its notes, except for when it expires.
        notes: ObjectId,
        /// When it expires.
        expires_at: Option<Time>,
        /// The length of all its files, in bytes.
        #[serde(with = "model::wide")]
        bytes: u64,
    },
    /// There was one, and its name is never used again.
    Ended {
        /// Its name.
        name: ImageName,
        /// How it ended.
        how: Ended,
        /// The digest of its content, if that is known.
        digest: Option<ObjectId>,
    },
}

impl Change {
    /// Whose change it is.
    #[must_use]
    pub fn name(&self) -> &ImageName {
        match self {
            Self::Image { name, .. } | Self::Ended { name, .. } => name,
        }
    }
}

/// See [`GetImageUpdates`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GetImageUpdatesReply {
    /// The store of the server.
    pub server: ServerId,
    /// The stores of its master, of that one's master, and so on; at most [`SERVERS_MAX`].
    pub upstream: Vec<ServerId>,
    /// How far these changes go; of a page of a list, when it was made.
    pub cursor: Cursor,
    /// True if this is a page of the list, sorted by name.
    pub is_list: bool,
    /// The changes: at most [`CHANGES_MAX`].
    pub changes: Vec<Change>,
    /// True if there are more after these.
    pub more: bool,
    /// The version of the directories; `None` if none was ever made, or what was cannot be used.
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
    fn write(request: Self::Request) -> Write;

    /// Returns the reply to the caller of the replica; `None` if `written` is that of another
    /// method.
    fn reply(written: Written) -> Option<Self::Reply>;
}

/// Makes [`Write`] and all that depends on the method, from one line for each method: the variant
/// and its body, the method, the image or directory that is changed, what happened to it, and the
/// reply that [`Written`] stands for. The order of the lines is the encoding.
macro_rules! forwarded_methods {
    ($(
        $variant:ident($body:ty) = $method:ty, $request:ident => $name:expr, $done:literal,
        $written:pat => $reply:expr;
    )+) => {
        /// The request of a forwarded method. The objects of a new image are on the master already.
        #[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
        pub enum Write {
            $($variant($body),)+
        }

        impl Write {
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

            fn brief(&self) -> Brief {
                match self {
                    $(Self::$variant(request) => <$method>::brief(request),)+
                }
            }
        }

        $(impl ForwardedMethod for $method {
            fn write(request: Self::Request) -> Write {
                Write::$variant(request.into())
            }

            fn reply(written: Written) -> Option<Self::Reply> {
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
        Written::Image(image) => AddImageReply { digest: image.content.digest() };
    Delete(DeleteImageRequest) = DeleteImage, delete => &delete.name, "deleted",
        Written::Deleted => Done {};
    Copy(CopyImageRequest) = CopyImage, copy => &copy.to, "copied",
        Written::Image(image) => AddImageReply { digest: image.content.digest() };
    Tags(ChangeTagsRequest) = ChangeTags, change => &change.name, "changed tags",
        Written::Tags(reply) => reply;
    Expiry(ChangeExpiryRequest) = ChangeExpiry, change => &change.name, "changed an expiry",
        Written::Expiry(reply) => reply;
    MakeDirectory(MakeDirectoryRequest) = MakeDirectory, make => &make.name, "made a directory",
        Written::Made(reply) => reply;
    RemoveDirectory(RemoveDirectoryRequest) = RemoveDirectory, remove => &remove.name,
        "removed a directory",
        Written::Directories => Done {};
    ChangeOwner(ChangeOwnerRequest) = ChangeOwner, change => &change.name, "changed the owners",
        Written::Directories => Done {};
    Signatures(ChangeSignaturesRequest) = ChangeSignatures, change => &change.name,
        "changed signatures",
        Written::Signatures(reply) => reply;
}

/// The result of a [`Write`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Written {
    /// Of [`Write::Add`] and [`Write::Copy`]: the image as it is now.
    Image(Box<Image>),
    Deleted,
    Tags(ChangeTagsReply),
    Expiry(ChangeExpiryReply),
    Made(MakeDirectoryReply),
    /// Of [`Write::RemoveDirectory`] and [`Write::ChangeOwner`].
    Directories,
    Signatures(ChangeSignaturesReply),
}

/// Who asked a replica for a change, by its word.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Origin {
    /// An address and port.
    pub address: String,
    /// The name of the user, if an authority vouches for it.
    pub user: Option<String>,
    /// The groups that the user is in.
    pub groups: BTreeSet<String>,
    /// Whether the user may make such a change, whoever owns the image.
    pub has_power: bool,
}

/// Carries a change up to the server that decides on it. For replicas only: they answer for who
/// the caller is.
pub enum Forward {}

/// See [`Forward`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForwardRequest {
    /// The stores of the replicas that it has passed through, the first one first: at most
    /// [`SERVERS_MAX`].
    pub path: Vec<ServerId>,
    /// Who asked the first of them.
    pub origin: Origin,
    /// What for.
    pub write: Write,
}

/// See [`Forward`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForwardReply {
    /// What came of it.
    pub written: Written,
    /// Who follows changes up to here has it.
    pub cursor: Cursor,
    /// The version of the directories, with what came of it.
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

    fn brief(request: &Self::Request) -> Brief {
        let Origin { address, user, .. } = &request.origin;
        let user = user.as_deref().unwrap_or("somebody");
        request
            .write
            .brief()
            .with("write", request.write.method())
            .who(&format!("{user} at {address}"))
    }
}

/// Says how far behind its master a server is, and which replicas it has.
pub enum GetReplication {}

/// How a replica stands with its master.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Link {
    /// It has not answered yet.
    Connecting,
    /// It answers.
    Connected,
    /// It does not answer any more.
    Broken,
    /// The server is its own master, over others or not: nothing is followed.
    Loop,
}

impl Link {
    /// The word of it.
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

/// Why an image is not as the master has it, and will not be by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Trouble {
    /// There is another image of that name here.
    Conflict,
    /// An image of that name has ended here, and the master has one.
    EndedHere,
    /// The master has ended another image of that name than the one that is here.
    EndedOther,
    /// The master has ended it, but it is in use here and stays until it is not.
    Held,
    /// Its record is damaged here.
    Damaged,
    /// It could not be fetched or changed; it is tried again.
    Failing,
}

impl Trouble {
    /// The word of it.
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

/// One image with which there is trouble.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TroubledImage {
    /// Its name.
    pub name: ImageName,
    /// What kind of trouble.
    pub trouble: Trouble,
    /// What it is, and what may be done.
    pub text: String,
}

/// The most troubled images, and others, that are named.
pub const NAMED_MAX: usize = 1_000;

/// How a replica stands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MasterState {
    /// Where the master is.
    pub address: String,
    /// Its store, if that is known.
    pub server: Option<ServerId>,
    /// The stores of its master, of that one's master, and so on.
    pub upstream: Vec<ServerId>,
    /// Whether it answers.
    pub link: Link,
    /// Since when.
    pub since: Time,
    /// Whether all is here that the master has and the patterns name.
    pub is_level: bool,
    /// When that was last so.
    pub level_at: Option<Time>,
    /// Images that are still to be fetched or changed.
    #[serde(with = "model::wide")]
    pub images_behind: u64,
    /// The most bytes that are still to be fetched for them.
    #[serde(with = "model::wide")]
    pub bytes_left: u64,
    /// What went wrong last, and when.
    pub last_error: Option<(Time, String)>,
    /// Patterns of names of which one must match, unless there are none.
    pub include: Vec<String>,
    /// Patterns of names of which none may match.
    pub exclude: Vec<String>,
    /// Whether images stay that have ended on the master.
    pub is_archive: bool,
    /// Images with which there is trouble, sorted by name: at most [`NAMED_MAX`].
    pub troubles: Vec<TroubledImage>,
    /// How many there are.
    #[serde(with = "model::wide")]
    pub troubles_total: u64,
    /// Images that the master never had or has lost, sorted by name: at most [`NAMED_MAX`].
    pub only_here: Vec<ImageName>,
    /// How many there are.
    #[serde(with = "model::wide")]
    pub only_here_total: u64,
    /// Images that are here, and that the patterns do not name.
    #[serde(with = "model::wide")]
    pub not_followed: u64,
    /// Why the directories are not those of the master; `None` if they are, or will be at once.
    pub directories: Option<TroubledDirectories>,
}

/// A replica, as its master knows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplicaState {
    /// Its store.
    pub server: ServerId,
    /// Where it is.
    pub address: String,
    /// When it last asked.
    pub seen: Time,
    /// Whether it asks just now.
    pub is_connected: bool,
    /// What it said of itself.
    pub is_level: bool,
    /// What it said of itself.
    #[serde(with = "model::wide")]
    pub images_behind: u64,
}

/// See [`GetReplication`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GetReplicationReply {
    /// The store of this server.
    pub server: ServerId,
    /// How it follows its master; `None` if it has none.
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

/// Takes an image away from a replica, and from nowhere else: one that conflicts with the
/// master's, that the patterns do not name, or that the master has not got. It leaves no mark: an
/// image of that name may come from the master.
pub enum DropCopy {}

/// See [`DropCopy`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DropCopyRequest {
    /// Its name.
    pub name: ImageName,
    /// Even if it is in use.
    pub force: bool,
}

impl Method for DropCopy {
    const NAME: &'static str = "ImageServer.DropCopy";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Relieves;
    type Request = DropCopyRequest;
    type Reply = Done;

    fn brief(request: &Self::Request) -> Brief {
        Brief::default().with("image", &request.name).with("force", request.force)
    }
}
