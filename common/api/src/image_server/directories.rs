//! `ImageServer`: the directories that images are in, and who owns them.

use serde::{Deserialize, Serialize};

use crate::Done;
use crate::access::Owners;
use crate::audit::brief::Brief;
use crate::{
    access::Access,
    method::{Effect, Method},
};
use model::image::ImageName;
use model::tree::Time;

/// Makes a directory, or makes one that is there only by the names of images one that has owners.
pub enum MakeDirectory {}

/// See [`MakeDirectory`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MakeDirectoryRequest {
    /// Its name.
    pub name: ImageName,
    /// Make those above it too that are missing, and do nothing if it was made before.
    pub parents: bool,
    /// Who owns it; `None` for those who own the one above it.
    pub owners: Option<Owners>,
}

/// See [`MakeDirectory`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MakeDirectoryReply {
    /// What was made, the outermost first.
    pub made: Vec<ImageName>,
    /// Who owns the directory now.
    pub owners: Owners,
}

impl Method for MakeDirectory {
    const NAME: &'static str = "ImageServer.MakeDirectory";
    const ACCESS: Access = Access::PowerOrOwner;
    const EFFECT: Effect = Effect::Changes;
    type Request = MakeDirectoryRequest;
    type Reply = MakeDirectoryReply;

    fn brief(request: &Self::Request) -> Brief {
        Brief::default()
            .with("directory", &request.name)
            .with_some("owners", request.owners.as_ref().map(Owners::in_words))
    }
}

/// Removes a directory in which there is neither an image nor a directory. Names of images that
/// were deleted stay used.
pub enum RemoveDirectory {}

/// See [`RemoveDirectory`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoveDirectoryRequest {
    /// Its name.
    pub name: ImageName,
}

impl Method for RemoveDirectory {
    const NAME: &'static str = "ImageServer.RemoveDirectory";
    const ACCESS: Access = Access::PowerOrOwner;
    const EFFECT: Effect = Effect::Changes;
    type Request = RemoveDirectoryRequest;
    type Reply = Done;

    fn brief(request: &Self::Request) -> Brief {
        Brief::default().with("directory", &request.name)
    }
}

/// Gives a directory to others.
pub enum ChangeOwner {}

/// See [`ChangeOwner`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChangeOwnerRequest {
    /// The directory.
    pub name: ImageName,
    /// Who owns it from now on.
    pub owners: Owners,
}

impl Method for ChangeOwner {
    const NAME: &'static str = "ImageServer.ChangeOwner";
    const ACCESS: Access = Access::PowerOrOwner;
    const EFFECT: Effect = Effect::Changes;
    type Request = ChangeOwnerRequest;
    type Reply = Done;

    fn brief(request: &Self::Request) -> Brief {
        Brief::default().with("directory", &request.name).with("owners", request.owners.in_words())
    }
}

/// Lists directories, each before those in it.
pub enum ListDirectories {}

/// See [`ListDirectories`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListDirectoriesRequest {
    /// Only this directory and those below it.
    pub below: Option<ImageName>,
    /// Only those that come after this one; for the next page.
    pub after: Option<ImageName>,
}

/// One directory in a list.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DirectorySummary {
    /// Its name.
    pub name: ImageName,
    /// When it was made; `None` if it is there only by the names of images.
    pub made_on: Option<Time>,
    /// Who owns it: its own owners, or if it was never made those of the nearest one above that
    /// was.
    pub owners: Owners,
    /// How many images are in it, those further below not counted.
    pub images: u64,
    /// How many images are in it and below.
    pub images_below: u64,
    /// The length of all files of these images, in bytes; what they share counts for each.
    #[serde(with = "model::wide")]
    pub bytes_below: u64,
}

/// See [`ListDirectories`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListDirectoriesReply {
    /// The directories, sorted by component.
    pub directories: Vec<DirectorySummary>,
    /// True if there are more after the last of these.
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
