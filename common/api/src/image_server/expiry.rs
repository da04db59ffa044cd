//! `ImageServer`: when images go away by themselves.

use serde::{Deserialize, Serialize};

use crate::Done;
use crate::audit::brief::Brief;
use crate::{
    access::Access,
    method::{Effect, Method},
};
use model::image::ImageName;
use model::tree::Time;

/// Lets an image stay for longer, or for ever. An image never goes earlier than it was said to.
pub enum ChangeExpiry {}

/// See [`ChangeExpiry`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChangeExpiryRequest {
    /// Its name.
    pub name: ImageName,
    /// In how many seconds from now on it goes; `None` for never.
    pub expires_in_seconds: Option<u32>,
}

/// See [`ChangeExpiry`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChangeExpiryReply {
    /// When it goes, by the server's clock; `None` for never.
    pub expires_at: Option<Time>,
}

impl Method for ChangeExpiry {
    const NAME: &'static str = "ImageServer.ChangeExpiry";
    const ACCESS: Access = Access::PowerOrOwner;
    const EFFECT: Effect = Effect::Changes;
    type Request = ChangeExpiryRequest;
    type Reply = ChangeExpiryReply;

    fn brief(request: &Self::Request) -> Brief {
        Brief::default()
            .with("image", &request.name)
            .with_some("expires-in-seconds", request.expires_in_seconds)
    }
}

/// Confirms that the server's clock is right although it jumped: images expire again.
pub enum AcceptClock {}

/// See [`AcceptClock`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AcceptClockReply {
    /// What the clock shows.
    pub now: Time,
    /// By how many seconds it had jumped; 0 if it was trusted.
    pub jumped_seconds: i64,
}

impl Method for AcceptClock {
    const NAME: &'static str = "ImageServer.AcceptClock";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Changes;
    type Request = Done;
    type Reply = AcceptClockReply;
}
