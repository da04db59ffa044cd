//! `ImageServer`: the directories that images are in, and who owns them.

use model::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::Done;
use crate::access::Owners;
use crate::audit::call_details::CallDetails;
use crate::{
    access::Access,
    method::{Effect, Method},
};
use model::image::ImageName;
use model::tree::Time;

/// Makes a directory. A directory that exists only because images are in it gets owners by this.
pub enum MakeDirectory {}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct MakeDirectoryRequest {
    pub name: ImageName,
    /// Makes missing directories above it too, and does nothing if it was made before.
    pub parents: bool,
    /// The owners; `None` for those of the directory above.
    pub owners: Option<Owners>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct MakeDirectoryReply {
    /// The directories that were made, the outermost first.
    pub made: Vec<ImageName>,
    /// The owners of the directory.
    pub owners: Owners,
}

impl Method for MakeDirectory {
    const NAME: &'static str = "ImageServer.MakeDirectory";
    const ACCESS: Access = Access::PowerOrOwner;
    const EFFECT: Effect = Effect::Changes;
    type Request = MakeDirectoryRequest;
    type Reply = MakeDirectoryReply;

    fn audit_details(request: &Self::Request) -> CallDetails {
        CallDetails::default()
            .with("directory", &request.name)
            .with_some("owners", request.owners.as_ref().map(Owners::in_words))
    }
}

/// Removes an empty directory. Names of deleted images in it remain unusable.
pub enum RemoveDirectory {}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RemoveDirectoryRequest {
    pub name: ImageName,
}

impl Method for RemoveDirectory {
    const NAME: &'static str = "ImageServer.RemoveDirectory";
    const ACCESS: Access = Access::PowerOrOwner;
    const EFFECT: Effect = Effect::Changes;
    type Request = RemoveDirectoryRequest;
    type Reply = Done;

    fn audit_details(request: &Self::Request) -> CallDetails {
        CallDetails::default().with("directory", &request.name)
    }
}

/// Replaces the owners of a directory.
pub enum ChangeOwner {}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ChangeOwnerRequest {
    /// The directory.
    pub name: ImageName,
    /// The new owners.
    pub owners: Owners,
}

impl Method for ChangeOwner {
    const NAME: &'static str = "ImageServer.ChangeOwner";
    const ACCESS: Access = Access::PowerOrOwner;
    const EFFECT: Effect = Effect::Changes;
    type Request = ChangeOwnerRequest;
    type Reply = Done;

    fn audit_details(request: &Self::Request) -> CallDetails {
        CallDetails::default()
            .with("directory", &request.name)
            .with("owners", request.owners.in_words())
    }
}

/// Lists directories, each before those below it.
pub enum ListDirectories {}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ListDirectoriesRequest {
    /// Only this directory and those below it.
    pub below: Option<ImageName>,
    /// Only directories after this one; for the next page.
    pub after: Option<ImageName>,
}

/// One directory in a list.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DirectorySummary {
    pub name: ImageName,
    /// When it was made; `None` if it exists only because images are in it.
    pub made_on: Option<Time>,
    /// Its own owners, or if it was never made those of the nearest directory above that was.
    pub owners: Owners,
    /// How many images are directly in it.
    pub images: u64,
    /// How many images are in it and below.
    pub images_below: u64,
    /// The total length of the files of these images, in bytes; shared files count for each.
    #[serde(with = "model::json::LargeNumber")]
    pub bytes_below: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ListDirectoriesReply {
    /// The directories, sorted by component.
    pub directories: Vec<DirectorySummary>,
    /// True if there are more after these.
    pub more: bool,
}

impl Method for ListDirectories {
    const NAME: &'static str = "ImageServer.ListDirectories";
    const ACCESS: Access = Access::Authenticated;
    const EFFECT: Effect = Effect::Tells;
    const REPLY_BYTES_MAX: usize = 16 << 20;
    type Request = ListDirectoriesRequest;
    type Reply = ListDirectoriesReply;
}
