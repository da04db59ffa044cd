//! `ImageServer`: how the directories of a master, and who owns them, come to a replica.
//!
//! A replica takes all of them at once: each has the version of the whole. What never had any does
//! not take the place of anything, and neither does what began apart.

use serde::{Deserialize, Serialize};

use crate::access::Owners;
use crate::{
    access::Access,
    method::{Effect, Method},
};
use model::image::ImageName;
use model::tree::Time;

/// Which state of the directories a store has. Two with the same version are equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DirectoriesVersion {
    /// Made by chance when the first directory of a store was made: what began apart differs.
    #[serde(with = "model::wide")]
    pub line: u64,
    /// How often directories were changed since.
    #[serde(with = "model::wide")]
    pub changes: u64,
    /// Made by chance with the last change.
    #[serde(with = "model::wide")]
    pub id: u64,
}

/// Lists the directories that were made, for replicas.
pub enum GetMadeDirectories {}

/// See [`GetMadeDirectories`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GetMadeDirectoriesRequest {
    /// Only those that sort after this one; for the next page.
    pub after: Option<ImageName>,
}

/// A directory that was made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MadeDirectory {
    /// Its name.
    pub name: ImageName,
    /// Who owns it.
    pub owners: Owners,
    /// When it was made.
    pub made_on: Time,
}

/// The most directories on one page.
pub const PAGE_DIRECTORIES_MAX: usize = 1_000;

/// See [`GetMadeDirectories`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GetMadeDirectoriesReply {
    /// What these are a part of; `None` if none was ever made, or what was cannot be used. Pages
    /// of different versions do not belong together.
    pub version: Option<DirectoriesVersion>,
    /// The directories, sorted by name: at most [`PAGE_DIRECTORIES_MAX`].
    pub directories: Vec<MadeDirectory>,
    /// True if there are more after the last of these.
    pub more: bool,
}

impl Method for GetMadeDirectories {
    const NAME: &'static str = "ImageServer.GetMadeDirectories";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Tells;
    const REPLY_BYTES_MAX: usize = 16 << 20;
    type Request = GetMadeDirectoriesRequest;
    type Reply = GetMadeDirectoriesReply;
}

/// Why the directories of a replica are not those of its master.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DirectoriesTrouble {
    /// The master never had any, or cannot use what it has; there are some here.
    OnlyHere,
    /// Those of the master began apart from those that are here.
    Conflict,
    /// Those that are here were changed more often than those of the master.
    NewerHere,
    /// What is here is damaged.
    Damaged,
    /// They could not be had; it is tried again.
    Failing,
}

impl DirectoriesTrouble {
    /// The word of it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::OnlyHere => "only-here",
            Self::Conflict => "conflict",
            Self::NewerHere => "newer-here",
            Self::Damaged => "damaged",
            Self::Failing => "failing",
        }
    }
}

/// Directories with which there is trouble.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TroubledDirectories {
    /// What kind of trouble.
    pub trouble: DirectoriesTrouble,
    /// What it is, and what may be done.
    pub text: String,
}
