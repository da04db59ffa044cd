//! `ImageServer`: how the directories of a master and their owners are replicated.
//!
//! A replica takes all of them at once, because one version covers the whole. A store that never
//! had directories replaces nothing, nor does one whose directories began separately.

use model::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::access::Owners;
use crate::{
    access::Access,
    method::{Effect, Method},
};
use model::image::ImageName;
use model::tree::Time;

/// The version of all directories of a store. Equal versions mean equal directories.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DirectoriesVersion {
    /// A random number from when the first directory of the store was made. Stores that began
    /// separately differ in it.
    #[serde(with = "model::json::LargeNumber")]
    pub line: u64,
    /// How often directories were changed since then.
    #[serde(with = "model::json::LargeNumber")]
    pub changes: u64,
    /// A random number from the last change.
    #[serde(with = "model::json::LargeNumber")]
    pub id: u64,
}

/// Lists the directories that were made, for replicas.
pub enum GetMadeDirectories {}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GetMadeDirectoriesRequest {
    /// Only directories after this one; for the next page.
    pub after: Option<ImageName>,
}

/// A directory that was made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct MadeDirectory {
    pub name: ImageName,
    pub owners: Owners,
    pub made_on: Time,
}

/// The most directories on one page.
pub const PAGE_DIRECTORIES_MAX: usize = 1_000;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GetMadeDirectoriesReply {
    /// The version that this page is a part of; `None` if no directory was ever made, or the record
    /// cannot be used. Pages of different versions must not be combined.
    pub version: Option<DirectoriesVersion>,
    /// The directories, sorted by name: at most [`PAGE_DIRECTORIES_MAX`].
    pub directories: Vec<MadeDirectory>,
    /// True if there are more after these.
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
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum DirectoriesTrouble {
    /// The master has none, or cannot use its record, and this replica has some.
    OnlyHere,
    /// The directories of the master and of this replica began separately.
    Conflict,
    /// The directories here were changed more often than those of the master.
    NewerHere,
    /// The record here is damaged.
    Damaged,
    /// They could not be fetched; it is retried.
    Failing,
}

impl DirectoriesTrouble {
    /// Returns the name in JSON and on pages.
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

/// Why the directories differ from those of the master.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TroubledDirectories {
    pub trouble: DirectoriesTrouble,
    /// Describes the problem and what to do.
    pub text: String,
}
