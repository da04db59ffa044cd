//! `ImageServer`: removes objects that nothing needs, and estimates what an image takes.

use model::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::access::Access;
use crate::audit::call_details::CallDetails;
use crate::method::{Effect, Method};
use model::image::ImageName;

/// Removes objects that no image needs and no lease holds, oldest first. Answers when that is done,
/// which may take minutes.
pub enum Collect {}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct CollectRequest {
    /// Only reports what could be removed.
    pub dry_run: bool,
    /// Stops after this much space was freed; 0 to remove all.
    #[serde(with = "model::json::LargeNumber")]
    pub bytes: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct CollectReply {
    /// How many images were read.
    #[serde(with = "model::json::LargeNumber")]
    pub images: u64,
    /// Objects that no image needs, before any is removed.
    pub unneeded: ObjectTotals,
    /// Those of them that leases hold.
    pub leased: ObjectTotals,
    /// Those of them that were removed; with `dry_run`, that would be removed.
    pub removed: ObjectTotals,
    /// With `dry_run`: for how much longer nothing is removed, in seconds.
    #[serde(with = "model::json::LargeNumber")]
    pub held_seconds: u64,
}

impl Method for Collect {
    const NAME: &'static str = "ImageServer.Collect";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Relieves;
    type Request = CollectRequest;
    type Reply = CollectReply;

    fn audit_details(request: &Self::Request) -> CallDetails {
        CallDetails::default().with("dry-run", request.dry_run).with("bytes", request.bytes)
    }
}

/// Reports how many objects only this image needs. Reads all images, which may take minutes.
pub enum EstimateImage {}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct EstimateImageRequest {
    pub name: ImageName,
}

/// A number of objects with their total size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ObjectTotals {
    /// How many objects: contents of files, directories, and the log of the build.
    #[serde(with = "model::json::LargeNumber")]
    pub objects: u64,
    /// Their total size, in bytes.
    #[serde(with = "model::json::LargeNumber")]
    pub bytes: u64,
}

impl ObjectTotals {
    /// Adds an object of `bytes` bytes.
    pub fn count(&mut self, bytes: u64) {
        self.objects += 1;
        self.bytes = self.bytes.saturating_add(bytes);
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct EstimateImageReply {
    /// Objects that only this image needs. A collection removes them after the image was deleted,
    /// unless a lease holds them.
    pub own: ObjectTotals,
    /// Objects that other images need too.
    pub shared: ObjectTotals,
}

impl Method for EstimateImage {
    const NAME: &'static str = "ImageServer.EstimateImage";
    const ACCESS: Access = Access::Authenticated;
    const EFFECT: Effect = Effect::Tells;
    type Request = EstimateImageRequest;
    type Reply = EstimateImageReply;
}
