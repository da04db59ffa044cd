//! `ImageServer`: copies of images, tags, signatures, and the latest image of a directory.

use std::collections::BTreeSet;

use model::JsonSchema;
use serde::{Deserialize, Serialize};

use super::AddImageReply;
use crate::access::Access;
use crate::audit::call_details::CallDetails;
use crate::method::{Effect, Method};
use model::image::ImageName;
use model::image::tags::Tags;
use model::signing::Signature;

/// Adds an image under another name, with the tree, the filter, the triggers and the notes of an
/// existing one, except for its owners, its expiry and the tag `deprecated`.
pub enum CopyImage {}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct CopyImageRequest {
    /// The existing image.
    pub from: ImageName,
    /// The name of the new image.
    pub to: ImageName,
    /// In how many seconds the new image expires; `None` for never.
    pub expires_in_seconds: Option<u32>,
}

impl Method for CopyImage {
    const NAME: &'static str = "ImageServer.CopyImage";
    const ACCESS: Access = Access::PowerOrOwner;
    const EFFECT: Effect = Effect::Changes;
    type Request = CopyImageRequest;
    type Reply = AddImageReply;

    fn audit_details(request: &Self::Request) -> CallDetails {
        CallDetails::default().with("from", &request.from).with("to", &request.to)
    }
}

/// Sets and removes tags of an image.
pub enum ChangeTags {}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ChangeTagsRequest {
    pub name: ImageName,
    /// Tags to set.
    pub set: Tags,
    /// Names of tags to remove, which must exist.
    pub remove: BTreeSet<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ChangeTagsReply {
    /// All tags of the image afterwards.
    pub tags: Tags,
}

impl Method for ChangeTags {
    const NAME: &'static str = "ImageServer.ChangeTags";
    const ACCESS: Access = Access::PowerOrOwner;
    const EFFECT: Effect = Effect::Changes;
    type Request = ChangeTagsRequest;
    type Reply = ChangeTagsReply;

    fn audit_details(request: &Self::Request) -> CallDetails {
        CallDetails::default()
            .with("image", &request.name)
            .with_list("set", request.set.iter().map(|(name, value)| format!("{name}={value}")))
            .with_list("remove", &request.remove)
    }
}

/// Finds the newest image in a directory.
pub enum FindLatestImage {}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct FindLatestImageRequest {
    /// The directory; images in directories below it do not count.
    pub directory: ImageName,
    /// Only images that have these tags.
    pub tags: Tags,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct FindLatestImageReply {
    /// The name of the newest image in the directory; `None` if no image there has the tags.
    pub name: Option<ImageName>,
}

impl Method for FindLatestImage {
    const NAME: &'static str = "ImageServer.FindLatestImage";
    const ACCESS: Access = Access::Authenticated;
    const EFFECT: Effect = Effect::Tells;
    type Request = FindLatestImageRequest;
    type Reply = FindLatestImageReply;
}

/// Adds signatures to an image, and removes some. An image has one signature of each key; a new one
/// replaces the former.
pub enum ChangeSignatures {}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ChangeSignaturesRequest {
    pub name: ImageName,
    /// Signatures to add. Each must be for this image.
    pub add: Vec<Signature>,
    /// Fingerprints of keys (`SHA256:...`) whose signatures are removed first; they must exist.
    pub remove: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ChangeSignaturesReply {
    /// All signatures of the image afterwards.
    pub signatures: Vec<Signature>,
}

impl Method for ChangeSignatures {
    const NAME: &'static str = "ImageServer.ChangeSignatures";
    const ACCESS: Access = Access::PowerOrOwner;
    const EFFECT: Effect = Effect::Changes;
    type Request = ChangeSignaturesRequest;
    type Reply = ChangeSignaturesReply;

    fn audit_details(request: &Self::Request) -> CallDetails {
        CallDetails::default()
            .with("image", &request.name)
            .with("add", request.add.len())
            .with_list("remove", &request.remove)
    }
}
