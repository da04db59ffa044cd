//! `ImageServer`: private images, and the machines that may read them.

use std::collections::BTreeSet;

use model::JsonSchema;
use serde::{Deserialize, Serialize};

use super::replication::directories::DirectoriesVersion;
use crate::audit::call_details::CallDetails;
use crate::{
    access::Access,
    method::{Effect, Method},
};
use model::image::ImageName;

/// The most directories on one page.
pub const PAGE_PRIVATE_MAX: usize = 100;

/// The most bytes that the names of all machines of one directory may have together.
pub const READERS_BYTES_MAX: usize = 64 << 10;

/// Lists the private directories of a server, and the machines that may read the images below them.
///
/// The power to call this is also the power to read all private images of the server.
pub enum GetPrivateDirectories {}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GetPrivateDirectoriesRequest {
    /// Only this directory and those below it, which its owners may ask for too.
    pub below: Option<ImageName>,
    /// Only directories after this one; for the next page.
    pub after: Option<ImageName>,
}

/// A directory that is private, or that machines are named for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PrivateDirectory {
    pub name: ImageName,
    /// True if the images below it are private on this server.
    pub is_private: bool,
    /// Patterns of the host names of machines that may read the images below it, besides those of
    /// the directories above; `*` stands for any letters.
    pub machines: BTreeSet<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GetPrivateDirectoriesReply {
    /// The version of all directories that this page is a part of.
    pub version: Option<DirectoriesVersion>,
    /// The directories, sorted by name: at most [`PAGE_PRIVATE_MAX`].
    pub directories: Vec<PrivateDirectory>,
    /// True if there are more after these.
    pub more: bool,
}

impl Method for GetPrivateDirectories {
    const NAME: &'static str = "ImageServer.GetPrivateDirectories";
    const ACCESS: Access = Access::PowerOrOwner;
    const EFFECT: Effect = Effect::Tells;
    const REPLY_BYTES_MAX: usize = 16 << 20;
    type Request = GetPrivateDirectoriesRequest;
    type Reply = GetPrivateDirectoriesReply;
}

/// Changes which machines may read the private images below a directory.
pub enum ChangeReaders {}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ChangeReadersRequest {
    /// The directory.
    pub name: ImageName,
    /// Patterns of host names to add.
    pub add: BTreeSet<String>,
    /// Patterns to remove, which must be there.
    pub remove: BTreeSet<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ChangeReadersReply {
    /// All patterns of the directory afterwards.
    pub machines: BTreeSet<String>,
    /// True if the images below it are private on this server.
    pub is_private: bool,
}

impl Method for ChangeReaders {
    const NAME: &'static str = "ImageServer.ChangeReaders";
    const ACCESS: Access = Access::PowerOrOwner;
    const EFFECT: Effect = Effect::Changes;
    type Request = ChangeReadersRequest;
    type Reply = ChangeReadersReply;

    fn audit_details(request: &Self::Request) -> CallDetails {
        CallDetails::default()
            .with("directory", &request.name)
            .with_list("add", &request.add)
            .with_list("remove", &request.remove)
    }
}
