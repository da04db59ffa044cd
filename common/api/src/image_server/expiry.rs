//! `ImageServer`: when images expire, and which are in use and cannot.

use model::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::Done;
use crate::access::Access;
use crate::audit::call_details::CallDetails;
use crate::method::{Effect, Method};
use model::image::ImageName;
use model::tree::Time;

/// Postpones the expiry of an image, or removes it. An expiry is never brought forward.
pub enum ChangeExpiry {}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ChangeExpiryRequest {
    pub name: ImageName,
    /// In how many seconds it expires; `None` for never.
    pub expires_in_seconds: Option<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ChangeExpiryReply {
    /// When it expires, by the server's clock; `None` for never.
    pub expires_at: Option<Time>,
}

impl Method for ChangeExpiry {
    const NAME: &'static str = "ImageServer.ChangeExpiry";
    const ACCESS: Access = Access::PowerOrOwner;
    const EFFECT: Effect = Effect::Changes;
    type Request = ChangeExpiryRequest;
    type Reply = ChangeExpiryReply;

    fn audit_details(request: &Self::Request) -> CallDetails {
        CallDetails::default()
            .with("image", &request.name)
            .with_some("expires-in-seconds", request.expires_in_seconds)
    }
}

/// Confirms that the server's clock is right although it jumped: images expire again.
pub enum AcceptClock {}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct AcceptClockReply {
    /// The time of the server's clock.
    pub now: Time,
    /// By how many seconds the clock had jumped; 0 if it was trusted.
    pub jumped_seconds: i64,
}

impl Method for AcceptClock {
    const NAME: &'static str = "ImageServer.AcceptClock";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Changes;
    type Request = Done;
    type Reply = AcceptClockReply;
}

/// The most images that one holder may hold.
pub const NAMES_MAX: usize = 10_000;

/// The longest time for which one request holds images, in seconds.
pub const HOLD_SECONDS_MAX: u32 = 24 * 3_600;

/// The longest name of a holder, in bytes.
pub const HOLDER_BYTES_MAX: usize = 256;

/// Holds the required and planned images of a dominator's machines. A held image does not expire,
/// and is deleted only by force. Each request of a holder replaces its previous one.
pub enum HoldImages {}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct HoldImagesRequest {
    /// The holder, for people: a host name and port.
    pub holder: String,
    /// The images: at most [`NAMES_MAX`].
    pub names: Vec<ImageName>,
    /// For how long they are held, in seconds: at most [`HOLD_SECONDS_MAX`].
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
