//! What was accepted last: written when an update has succeeded, before its journal goes.
//!
//! It is a file of its own, `accepted.json` in the state directory, because nothing that a
//! dominator sends gets into it but the name and the digest of an image that was signed. One that
//! cannot be read is no reason to forget it: no update is accepted then.
//!
//! That it is there says that the machine takes only signed images. So it is made as soon as subd
//! starts with trusted keys, with `null` in it until an image is accepted; and in `/.subd/state`
//! even if the state is elsewhere. A subd that is then started without keys accepts nothing.
// tidy: core

use std::fmt;

use model::image::ImageName;
use model::object::ObjectId;
use model::tree::Time;
use model::when::moment;
use serde::{Deserialize, Serialize};

/// The image that was accepted last.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AcceptedImage {
    /// Its name.
    pub image: ImageName,
    /// The digest of its signed part.
    pub digest: ObjectId,
    /// When it was signed by as many keys as are needed, in seconds after 1970-01-01 UTC.
    pub signed: u64,
}

impl fmt::Display for AcceptedImage {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}, signed at {}", self.image, at(self.signed))
    }
}

/// The moment, for people.
pub fn at(seconds: u64) -> String {
    moment(Time { seconds: i64::try_from(seconds).unwrap_or(i64::MAX), nanoseconds: 0 })
}
