//! `ImageServer.HoldImages`: which images are in use.

use serde::{Deserialize, Serialize};

use crate::Done;
use crate::{
    access::Access,
    method::{Effect, Method},
};
use model::image::ImageName;

/// The most images that one holder may hold.
pub const NAMES_MAX: usize = 10_000;

/// The longest that images are held for one request, in seconds.
pub const HOLD_SECONDS_MAX: u32 = 24 * 3_600;

/// The longest name of a holder, in bytes.
pub const HOLDER_BYTES_MAX: usize = 256;

/// Says which images a dominator's machines must have or will get next. Such an image does not
/// expire, and is deleted only by force. Each request of a holder replaces its last one.
pub enum HoldImages {}

/// See [`HoldImages`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HoldImagesRequest {
    /// Who holds them, for people: a host name and port.
    pub holder: String,
    /// The images: at most [`NAMES_MAX`].
    pub names: Vec<ImageName>,
    /// For how long, in seconds: at most [`HOLD_SECONDS_MAX`].
    pub seconds: u32,
}

impl Method for HoldImages {
    const NAME: &'static str = "ImageServer.HoldImages";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Tells;
    const REQUEST_BYTES_MAX: usize = 16 << 20;
    type Request = HoldImagesRequest;
    type Reply = Done;
}
