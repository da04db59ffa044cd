//! What subs say of their machines, and by what machines are known.
// tidy: core

use api::subd::Identity;
use model::object::ObjectId;
use model::tree::Time;
use serde::{Deserialize, Serialize};

/// The longest name or id of a machine that is looked at, in bytes; a machine may say anything.
const WORD_BYTES_MAX: usize = 256;

/// Where the content of a file of a machine comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Its image is not at hand yet.
    Unknown,
    /// The machine: its image leaves the path alone.
    Machine,
    /// Its image: all machines of it have this content.
    Image(ObjectId),
    /// Its image has the path in its care, and no content for it.
    Nobody,
}

impl Origin {
    /// True if `word` is the content that the image brings.
    pub(super) fn brings(self, word: &str) -> bool {
        let Self::Image(object) = self else { return false };
        let digest = |text: &str| object.algorithm().digest(text.as_bytes());
        digest(word) == object || digest(&format!("{word}\n")) == object
    }
}

/// Where the files come from that tell machines apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origins {
    /// Of `/etc/machine-id`.
    pub machine_id: Origin,
    /// Of `/etc/hostname`.
    pub hostname: Origin,
}

impl Origins {
    /// While the image is not at hand.
    pub const UNKNOWN: Self = Self { machine_id: Origin::Unknown, hostname: Origin::Unknown };
}

/// What a sub says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sighting {
    /// The start of subd.
    pub instance: u64,
    /// The host name.
    pub hostname: String,
    /// The machine id; empty if there is none.
    pub machine_id: String,
    /// The boot id of the kernel; empty if it is not known.
    pub boot_id: String,
    /// What of it an image may have brought.
    pub origins: Origins,
}

impl Sighting {
    /// What `identity` says.
    #[must_use]
    pub fn of(instance: u64, identity: &Identity, origins: Origins) -> Self {
        Self {
            instance,
            hostname: bounded(&identity.hostname).to_owned(),
            machine_id: bounded(&identity.machine_id).to_owned(),
            boot_id: bounded(&identity.boot_id).to_owned(),
            origins,
        }
    }

    /// True if `identity` says the same.
    #[must_use]
    pub fn is_of(&self, instance: u64, identity: &Identity, origins: Origins) -> bool {
        self.instance == instance
            && self.hostname == bounded(&identity.hostname)
            && self.machine_id == bounded(&identity.machine_id)
            && self.boot_id == bounded(&identity.boot_id)
            && self.origins == origins
    }

    /// True if its machine id is that of its image.
    pub(super) fn has_id_of_image(&self) -> bool {
        self.origins.machine_id.brings(&self.machine_id)
    }
}

fn bounded(word: &str) -> &str {
    &word[..word.floor_char_boundary(WORD_BYTES_MAX)]
}

/// An operator's word that a machine is the one that is meant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trust {
    /// The host name that it had then.
    pub hostname: String,
    /// Who said so.
    pub who: String,
    /// Why.
    pub why: String,
    /// When.
    pub since: Time,
}

/// By what a machine was last known. Kept over restarts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KnownIdentity {
    /// The machine id; empty if it may be any.
    pub machine_id: String,
    /// The id is the machine's own: one with another id is another machine.
    pub is_own: bool,
    /// Set once an operator has trusted the machine.
    pub trust: Option<Trust>,
}

/// The machine id that an image brought to the machine.
pub(super) fn id_of_image(known: &KnownIdentity) -> Option<&str> {
    (!known.is_own && !known.machine_id.is_empty()).then_some(known.machine_id.as_str())
}
