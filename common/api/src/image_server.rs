//! `ImageServer`: images by name.

pub mod collection;
pub mod directories;
pub mod estimate;
pub mod expiry;
pub mod holds;
pub mod notes;
pub mod replication;
pub mod signatures;

use serde::{Deserialize, Serialize};

use super::Done;
use crate::audit::brief::Brief;
use crate::{
    access::Access,
    method::{Effect, Method},
};
use model::image::tags::Tags;
use model::image::{Content, Image, ImageName, Notes};
use model::object::ObjectId;
use model::tree::{Time, Totals};

/// Makes an image visible. Its objects and directories are on the server already, and are made
/// durable before the image is seen.
pub enum AddImage {}

/// See [`AddImage`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AddImageRequest {
    /// What can be signed.
    pub content: Content,
    /// The rest; `created_by` and `created_on` are set by the server.
    pub notes: Notes,
}

/// See [`AddImage`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AddImageReply {
    /// The digest of the content: what the image is known by.
    pub digest: ObjectId,
}

impl Method for AddImage {
    const NAME: &'static str = "ImageServer.AddImage";
    const ACCESS: Access = Access::PowerOrOwner;
    const EFFECT: Effect = Effect::Changes;
    const REQUEST_BYTES_MAX: usize = 16 << 20;
    type Request = AddImageRequest;
    type Reply = AddImageReply;

    fn brief(request: &Self::Request) -> Brief {
        Brief::default().with("image", &request.content.name).with("root", request.content.root)
    }
}

/// Gives an image, without its tree: the directories are objects.
pub enum GetImage {}

/// See [`GetImage`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GetImageRequest {
    /// Its name.
    pub name: ImageName,
    /// How long to wait for it if it is not there yet, in milliseconds: at most 60,000.
    pub wait_ms: u32,
}

impl Method for GetImage {
    const NAME: &'static str = "ImageServer.GetImage";
    const ACCESS: Access = Access::Authenticated;
    const EFFECT: Effect = Effect::Tells;
    const REPLY_BYTES_MAX: usize = 16 << 20;
    type Request = GetImageRequest;
    type Reply = Image;
}

/// Lists images, sorted by name.
pub enum ListImages {}

/// See [`ListImages`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListImagesRequest {
    /// Only names that sort after this one; for the next page.
    pub after: Option<ImageName>,
}

/// One image in a list.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageSummary {
    /// Its name.
    pub name: ImageName,
    /// The digest of its content.
    pub digest: ObjectId,
    /// The digest of its tree.
    pub root: ObjectId,
    /// Sums over its tree.
    pub totals: Totals,
    /// Lines of its filter; `None` if it is sparse.
    pub filter_lines: Option<u32>,
    /// How many triggers it has.
    pub triggers: u32,
    /// When it was uploaded.
    pub created_on: Time,
    /// When it goes away by itself.
    pub expires_at: Option<Time>,
    /// Its tags.
    pub tags: Tags,
    /// How many signatures it has.
    #[serde(default)]
    pub signatures: u32,
}

/// See [`ListImages`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListImagesReply {
    /// The images, sorted by name.
    pub images: Vec<ImageSummary>,
    /// True if there are more after the last of these.
    pub more: bool,
}

impl Method for ListImages {
    const NAME: &'static str = "ImageServer.ListImages";
    const ACCESS: Access = Access::Authenticated;
    const EFFECT: Effect = Effect::Tells;
    const REPLY_BYTES_MAX: usize = 16 << 20;
    type Request = ListImagesRequest;
    type Reply = ListImagesReply;
}

/// Deletes an image. Its name is never used again.
pub enum DeleteImage {}

/// See [`DeleteImage`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeleteImageRequest {
    /// Its name.
    pub name: ImageName,
    /// Even if it is in use.
    pub force: bool,
}

impl Method for DeleteImage {
    const NAME: &'static str = "ImageServer.DeleteImage";
    const ACCESS: Access = Access::PowerOrOwner;
    const EFFECT: Effect = Effect::Relieves;
    type Request = DeleteImageRequest;
    type Reply = Done;

    fn brief(request: &Self::Request) -> Brief {
        Brief::default().with("image", &request.name).with("force", request.force)
    }
}
