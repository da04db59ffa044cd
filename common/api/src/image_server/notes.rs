//! `ImageServer`: copies of images under other names, tags, and the latest of several.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::AddImageReply;
use crate::audit::brief::Brief;
use crate::{
    access::Access,
    method::{Effect, Method},
};
use model::image::ImageName;
use model::image::tags::Tags;

/// Makes an image with another name of the tree, the filter, the triggers and the notes of one that
/// is there, except for its owners, its expiry and the tag `deprecated`.
pub enum CopyImage {}

/// See [`CopyImage`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CopyImageRequest {
    /// The image that is there.
    pub from: ImageName,
    /// The name of the new one.
    pub to: ImageName,
    /// In how many seconds from now on the new one goes; `None` for never.
    pub expires_in_seconds: Option<u32>,
}

impl Method for CopyImage {
    const NAME: &'static str = "ImageServer.CopyImage";
    const ACCESS: Access = Access::PowerOrOwner;
    const EFFECT: Effect = Effect::Changes;
    type Request = CopyImageRequest;
    type Reply = AddImageReply;

    fn brief(request: &Self::Request) -> Brief {
        Brief::default().with("from", &request.from).with("to", &request.to)
    }
}

/// Sets and removes tags of an image.
pub enum ChangeTags {}

/// See [`ChangeTags`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChangeTagsRequest {
    /// Its name.
    pub name: ImageName,
    /// Tags to set.
    pub set: Tags,
    /// Names of tags to remove, which must be there.
    pub remove: BTreeSet<String>,
}

/// See [`ChangeTags`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChangeTagsReply {
    /// All tags that the image has now.
    pub tags: Tags,
}

impl Method for ChangeTags {
    const NAME: &'static str = "ImageServer.ChangeTags";
    const ACCESS: Access = Access::PowerOrOwner;
    const EFFECT: Effect = Effect::Changes;
    type Request = ChangeTagsRequest;
    type Reply = ChangeTagsReply;

    fn brief(request: &Self::Request) -> Brief {
        Brief::default()
            .with("image", &request.name)
            .with_list("set", request.set.iter().map(|(name, value)| format!("{name}={value}")))
            .with_list("remove", &request.remove)
    }
}

/// Finds the image of a directory that was added last.
pub enum FindLatestImage {}

/// See [`FindLatestImage`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FindLatestImageRequest {
    /// The directory: the name of the image less its last component. Not what is below.
    pub directory: ImageName,
    /// Only images that have these tags.
    pub tags: Tags,
}

/// See [`FindLatestImage`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FindLatestImageReply {
    /// Its name; `None` if there is no such image.
    pub name: Option<ImageName>,
}

impl Method for FindLatestImage {
    const NAME: &'static str = "ImageServer.FindLatestImage";
    const ACCESS: Access = Access::Authenticated;
    const EFFECT: Effect = Effect::Tells;
    type Request = FindLatestImageRequest;
    type Reply = FindLatestImageReply;
}
