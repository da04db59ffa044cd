//! `ImageServer`: signatures of images.

use serde::{Deserialize, Serialize};

use crate::audit::brief::Brief;
use crate::{
    access::Access,
    method::{Effect, Method},
};
use model::image::ImageName;
use model::signing::Signature;

/// Adds signatures to an image, and takes some away. Each key has one: a later one takes the place
/// of the former.
pub enum ChangeSignatures {}

/// See [`ChangeSignatures`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChangeSignaturesRequest {
    /// Its name.
    pub name: ImageName,
    /// Signatures to add. Each must be about this image.
    pub add: Vec<Signature>,
    /// Fingerprints of keys (`SHA256:...`) whose signatures are removed first; they must be there.
    pub remove: Vec<String>,
}

/// See [`ChangeSignatures`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChangeSignaturesReply {
    /// All signatures that the image has now.
    pub signatures: Vec<Signature>,
}

impl Method for ChangeSignatures {
    const NAME: &'static str = "ImageServer.ChangeSignatures";
    const ACCESS: Access = Access::PowerOrOwner;
    const EFFECT: Effect = Effect::Changes;
    type Request = ChangeSignaturesRequest;
    type Reply = ChangeSignaturesReply;

    fn brief(request: &Self::Request) -> Brief {
        Brief::default()
            .with("image", &request.name)
            .with("add", request.add.len())
            .with_list("remove", &request.remove)
    }
}
