//! The steps of an update, as data.
//!
//! A [`Script`] is all that is needed to carry an update out, to carry it out again after it was
//! interrupted anywhere, and to undo it: each step names the inode that it puts in place and the
//! one that was there. It is complete before the first step is taken, and [`super::activate`] does
//! nothing but what it says. The [journal](super::journal) keeps it over a crash.
// tidy: core

use model::path::TreePath;
use model::scope::Attributes;
use model::tree::{Metadata, Time};
use serde::{Deserialize, Serialize};

use crate::root::Locks;
use crate::update::step_plan::SlotPath;

/// All steps of one update, in order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Script {
    /// Which update.
    pub update_id: u64,
    /// Which extended attributes are managed.
    pub managed: Attributes,
    /// The steps.
    pub steps: Vec<Step>,
}

/// What was at a path when the update was prepared, as far as it must still be the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Former {
    /// Its inode.
    pub inode: u64,
    /// True for a directory; then size and time say nothing.
    pub directory: bool,
    /// Its length, in bytes.
    pub size_bytes: u64,
    /// When its content was changed. Not ctime: renaming another name of the inode moves that.
    pub mtime: Time,
}

/// What is changed in place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Appearance {
    /// Mode, owner, managed extended attributes.
    pub metadata: Metadata,
    /// Time of modification, where it is managed.
    pub mtime: Option<Time>,
}

/// One step. Each can be repeated, and can be undone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Step {
    /// Give a file of the tree a further name in a slot. Nothing visible changes.
    Link {
        /// The file.
        carrier: TreePath,
        /// Its inode.
        inode: u64,
        /// The name.
        place: SlotPath,
    },
    /// Move a slot's entry to a path where nothing is.
    Appear {
        /// The path.
        path: TreePath,
        /// The slot.
        slot: u32,
        /// The inode in the slot.
        inode: u64,
    },
    /// Swap a slot's entry with what is at a path.
    Exchange {
        /// The path.
        path: TreePath,
        /// The slot.
        slot: u32,
        /// The inode in the slot.
        inode: u64,
        /// What is at the path.
        former: Former,
        /// If that is a directory: all that it holds.
        displaced: Vec<TreePath>,
    },
    /// Move what is at a path into a slot; a directory must be empty.
    Vanish {
        /// The path.
        path: TreePath,
        /// The slot.
        slot: u32,
        /// What is at the path.
        former: Former,
    },
    /// Take the flags away that keep an inode from being changed.
    Unlock {
        /// The path.
        path: TreePath,
        /// The inode.
        inode: u64,
        /// The flags that it has.
        locks: Locks,
    },
    /// Give an inode back the flags that [`Step::Unlock`] took from it.
    Lock {
        /// The path.
        path: TreePath,
        /// The inode.
        inode: u64,
        /// The flags that it had.
        locks: Locks,
    },
    /// Change the metadata at a path in place.
    Change {
        /// The path.
        path: TreePath,
        /// The inode.
        inode: u64,
        /// How it was.
        former: Appearance,
        /// How it shall be.
        wanted: Appearance,
    },
}

impl Step {
    /// The path that the step is for.
    #[must_use]
    pub fn path(&self) -> &TreePath {
        match self {
            Self::Link { carrier: path, .. }
            | Self::Appear { path, .. }
            | Self::Exchange { path, .. }
            | Self::Vanish { path, .. }
            | Self::Unlock { path, .. }
            | Self::Lock { path, .. }
            | Self::Change { path, .. } => path,
        }
    }

    /// True if others can see what the step does.
    #[must_use]
    pub fn is_visible(&self) -> bool {
        !matches!(self, Self::Link { .. } | Self::Unlock { .. } | Self::Lock { .. })
    }
}
