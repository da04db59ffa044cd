//! `ImageServer`: images by name.

pub mod collection;
pub mod directories;
pub mod expiry;
pub mod notes;
pub mod private;
pub mod replication;

use model::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Done;
use crate::audit::call_details::CallDetails;
use crate::{
    access::Access,
    method::{Effect, Method},
};
use model::image::tags::Tags;
use model::image::{Content, Image, ImageName, Notes};
use model::object::ObjectId;
use model::tree::{Time, Totals};

/// Adds an image. Its objects and directories must be on the server; they are made durable before
/// the image becomes visible.
pub enum AddImage {}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct AddImageRequest {
    /// The part that is signed.
    pub content: Content,
    /// The part that is not signed; the server sets `created_by` and `created_on`.
    pub notes: Notes,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct AddImageReply {
    /// The digest of the content, which identifies the image.
    pub digest: ObjectId,
}

impl Method for AddImage {
    const NAME: &'static str = "ImageServer.AddImage";
    const ACCESS: Access = Access::PowerOrOwner;
    const EFFECT: Effect = Effect::Changes;
    const REQUEST_BYTES_MAX: usize = 16 << 20;
    type Request = AddImageRequest;
    type Reply = AddImageReply;

    fn audit_details(request: &Self::Request) -> CallDetails {
        CallDetails::default()
            .with("image", &request.content.name)
            .with("root", request.content.root)
    }
}

/// Returns an image without its tree; the directories are objects.
pub enum GetImage {}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GetImageRequest {
    pub name: ImageName,
    /// How long to wait for the image if it does not exist yet, in milliseconds: at most 60,000.
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

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ListImagesRequest {
    /// Only names after this one; for the next page.
    pub after: Option<ImageName>,
}

/// One image in a list.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ImageSummary {
    pub name: ImageName,
    /// The digest of its content.
    pub digest: ObjectId,
    /// The digest of its tree.
    pub root: ObjectId,
    /// Totals of its tree.
    pub totals: Totals,
    /// Lines of its filter; `None` if it is sparse.
    pub filter_lines: Option<u32>,
    /// How many triggers it has.
    pub triggers: u32,
    /// When it was uploaded.
    pub created_on: Time,
    /// When it expires.
    pub expires_at: Option<Time>,
    pub tags: Tags,
    /// How many signatures it has.
    #[serde(default)]
    pub signatures: u32,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ListImagesReply {
    /// The images, sorted by name.
    pub images: Vec<ImageSummary>,
    /// True if there are more after these.
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

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DeleteImageRequest {
    pub name: ImageName,
    /// Deletes it even if it is in use.
    pub force: bool,
}

impl Method for DeleteImage {
    const NAME: &'static str = "ImageServer.DeleteImage";
    const ACCESS: Access = Access::PowerOrOwner;
    const EFFECT: Effect = Effect::Relieves;
    type Request = DeleteImageRequest;
    type Reply = Done;

    fn audit_details(request: &Self::Request) -> CallDetails {
        CallDetails::default().with("image", &request.name).with("force", request.force)
    }
}
