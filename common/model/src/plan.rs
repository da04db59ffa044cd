//! Plans: the operations that make the tree of a sub equal to the required one.
//!
//! [`diff`] makes a plan from two trees, [`apply()`] applies one to a tree in memory, subd carries
//! one out on a real file-system. A plan is a flat list of operations on paths, each with its
//! reason, which can be read, sent, journalled and checked.
//!
//! # Invariants
//!
//! * `plan(t, t)` is empty.
//! * Applying `plan(have, want)` to `have` gives `want`, kept and blocked paths aside.
//! * No operation touches a kept path, and nothing that holds one is removed or replaced.
//! * Nothing is removed that the plan does not name: a directory goes only when it is empty.
//! * An operation needs nothing that a later one provides.

pub mod apply;
pub mod diff;
mod order;
pub mod refused;
pub mod safety;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::JsonSchema;
use crate::object::ObjectId;
use crate::path::TreePath;
use crate::tree::{Leaf, Node};

pub use apply::{ApplyError, apply};
pub use diff::{ScannedTree, plan};
pub use refused::{FormerTree, RefusedChange, RefusedChanges, RefusedKind, first_that_holds};

/// One change of one path.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Operation {
    pub path: TreePath,
    /// What is done.
    pub action: Action,
    /// How the path differs from what is required; never empty.
    pub reason: Vec<Difference>,
}

/// What is done to a path.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Action {
    /// Creates this entry where nothing exists. A directory is created empty; its content follows.
    Create(Node),
    /// Replaces the existing entry by this one, atomically.
    Replace {
        /// The new entry. Never a directory in place of a directory.
        node: Node,
        /// If a directory is replaced: all its content, in component order, so that nothing else is
        /// removed with it.
        displaced: Vec<TreePath>,
    },
    /// Sets owner, mode and extended attributes, and of a file or special file its mtime, to those
    /// of this node; inode and content stay. Never of a symlink, nor of a file that has or gets a
    /// set-id bit or capabilities: those are replaced.
    Change(Node),
    /// Removes the entry; a directory is empty by then.
    Remove,
}

/// How a path differs from what is required.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum Difference {
    /// It is missing.
    Missing,
    /// It should not exist.
    Extra,
    /// It is of another kind.
    Kind,
    /// It has other content.
    Content,
    /// It has another mode.
    Mode,
    /// It has another owner or group.
    Owner,
    /// It has other extended attributes.
    Xattrs,
    /// It has another modification time.
    Mtime,
    /// It points elsewhere.
    Target,
    /// It is another device.
    Device,
    /// It shares its inode with other paths than it should.
    Links,
}

impl Difference {
    /// Returns the name in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Missing => "missing",
            Self::Extra => "extra",
            Self::Kind => "kind",
            Self::Content => "content",
            Self::Mode => "mode",
            Self::Owner => "owner",
            Self::Xattrs => "xattrs",
            Self::Mtime => "mtime",
            Self::Target => "target",
            Self::Device => "device",
            Self::Links => "links",
        }
    }
}

/// A path that must change and cannot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Blocked {
    pub path: TreePath,
    pub why: Obstacle,
}

/// Why a path cannot be changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Obstacle {
    /// Something else than a directory is required where a directory holds kept content.
    HoldsKept {
        /// The directory that holds it directly.
        directory: TreePath,
    },
    /// The content of a computed file was not filled in.
    NotComputed {
        /// `host:port` of the filegen-server that should.
        source: String,
    },
    /// The path is or holds a mount point.
    MountPoint,
    /// The path is or holds an active swap file.
    SwapFile,
    /// The machine has refused the change.
    Refused {
        /// What failed, for people.
        why: String,
    },
    /// The root of another file-system is there, such as a btrfs subvolume, and is left as it is.
    Boundary,
    /// Another blocked path would have to change first: a directory above it, the file that it
    /// links to, or what it holds.
    Needs { path: TreePath },
}

impl std::fmt::Display for Obstacle {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::HoldsKept { directory } => {
                write!(formatter, "{directory} holds content that the machine keeps")
            }
            Self::NotComputed { source } => {
                write!(formatter, "the content that {source} should compute is missing")
            }
            Self::MountPoint => formatter.write_str("it is or holds a mount point"),
            Self::SwapFile => formatter.write_str("it is or holds an active swap file"),
            Self::Refused { why } => formatter.write_str(why),
            Self::Boundary => formatter.write_str(
                "another file-system, such as a btrfs subvolume, is there and is left as it is",
            ),
            Self::Needs { path } => write!(formatter, "{path} would have to change first"),
        }
    }
}

/// What the kernel uses a path for, so that it cannot be moved.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum Occupant {
    /// Another file-system is mounted upon it.
    MountPoint,
    /// The machine swaps to it.
    SwapFile,
}

impl Occupant {
    /// Returns the obstacle for a path that holds it.
    #[must_use]
    pub fn obstacle(self) -> Obstacle {
        match self {
            Self::MountPoint => Obstacle::MountPoint,
            Self::SwapFile => Obstacle::SwapFile,
        }
    }
}

/// The operations in order, and the paths that cannot be changed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Plan {
    /// The operations, in the order in which they are carried out.
    pub operations: Vec<Operation>,
    /// The paths that have to change and cannot, sorted; the operations leave them out. A Prepare
    /// has none.
    pub blocked: Vec<Blocked>,
}

impl Plan {
    /// Returns true if there is nothing to change: the machine is synced.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.operations.is_empty() && self.blocked.is_empty()
    }

    /// Returns the operations alone, as a Prepare has them.
    #[must_use]
    pub fn without_blocked(&self) -> Self {
        Self { operations: self.operations.clone(), blocked: Vec::new() }
    }

    /// Returns the objects that new files need.
    #[must_use]
    pub fn objects(&self) -> BTreeMap<ObjectId, Need> {
        let mut needs: BTreeMap<ObjectId, Need> = BTreeMap::new();
        for operation in &self.operations {
            if let Action::Create(Node::Leaf(Leaf::File(file)))
            | Action::Replace { node: Node::Leaf(Leaf::File(file)), .. } = &operation.action
            {
                let need = needs
                    .entry(file.object.id())
                    .or_insert(Need { size_bytes: file.size_bytes, files: 0 });
                need.files += 1;
            }
        }
        needs
    }

    /// Returns how many paths the plan removes, including those inside replaced directories.
    #[must_use]
    pub fn removals(&self) -> u64 {
        self.operations
            .iter()
            .map(|operation| match &operation.action {
                Action::Remove => 1,
                Action::Replace { displaced, .. } => displaced.len() as u64,
                Action::Create(_) | Action::Change(_) => 0,
            })
            .sum()
    }

    /// Returns the paths whose change may fire triggers: all except those that differ only in
    /// mtime.
    pub fn changed_paths(&self) -> impl Iterator<Item = &TreePath> {
        self.operations.iter().filter(|operation| operation.reason != [Difference::Mtime]).flat_map(
            |operation| {
                let displaced: &[TreePath] = match &operation.action {
                    Action::Replace { displaced, .. } => displaced,
                    _ => &[],
                };
                std::iter::once(&operation.path).chain(displaced)
            },
        )
    }
}

/// An object that a plan needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Need {
    /// Its length, in bytes.
    #[serde(with = "crate::json::LargeNumber")]
    pub size_bytes: u64,
    /// How many new files have it as their content.
    pub files: u32,
}

impl std::fmt::Display for Operation {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        use crate::tree::text::line_of;
        match &self.action {
            Action::Create(node) => write!(formatter, "create {}", line_of(&self.path, node))?,
            Action::Replace { node, displaced } => {
                write!(formatter, "replace {}", line_of(&self.path, node))?;
                if !displaced.is_empty() {
                    write!(formatter, " [displaces {} paths]", displaced.len())?;
                }
            }
            Action::Change(node) => write!(formatter, "change {}", line_of(&self.path, node))?,
            Action::Remove => write!(formatter, "remove {}", self.path)?,
        }
        formatter.write_str(" (")?;
        for (index, difference) in self.reason.iter().enumerate() {
            let separator = if index == 0 { "" } else { ", " };
            write!(formatter, "{separator}{}", difference.name())?;
        }
        formatter.write_str(")")
    }
}

#[cfg(test)]
mod tests;
