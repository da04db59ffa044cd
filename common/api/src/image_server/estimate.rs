//! `ImageServer.EstimateImage`: what an image takes on the server.

use serde::{Deserialize, Serialize};

use crate::{
    access::Access,
    method::{Effect, Method},
};
use model::image::ImageName;

/// Says how much of what an image needs no other image does. Looks through all images, which may
/// take minutes.
pub enum EstimateImage {}

/// See [`EstimateImage`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EstimateImageRequest {
    /// Its name.
    pub name: ImageName,
}

/// So many objects, and their length together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sum {
    /// How many: contents of files, directories, and the log of the build.
    #[serde(with = "model::wide")]
    pub objects: u64,
    /// Their length together, in bytes.
    #[serde(with = "model::wide")]
    pub bytes: u64,
}

impl Sum {
    /// Counts one more object, which has so many bytes.
    pub fn count(&mut self, bytes: u64) {
        self.objects += 1;
        self.bytes = self.bytes.saturating_add(bytes);
    }
}

/// See [`EstimateImage`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EstimateImageReply {
    /// What only this image needs: a collection removes it once the image was deleted, unless it is
    /// held for an upload.
    pub own: Sum,
    /// What other images need too.
    pub shared: Sum,
}

impl Method for EstimateImage {
    const NAME: &'static str = "ImageServer.EstimateImage";
    const ACCESS: Access = Access::Authenticated;
    const EFFECT: Effect = Effect::Tells;
    type Request = EstimateImageRequest;
    type Reply = EstimateImageReply;
}
