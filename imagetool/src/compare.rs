//! Compares two images: their trees path by path, and what else belongs to an image.
// tidy: core

pub mod disk_usage;
pub mod entries;
pub mod metadata;

use std::collections::BTreeSet;

/// What a comparison can leave out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum IgnoredPart {
    /// What files hold, and which filegen-server computes them
    Content,
    /// Permission bits
    Mode,
    /// Owner and group
    Owner,
    /// Times of modification
    Mtime,
    /// Extended attributes, ACLs and capabilities
    Xattrs,
    /// What symlinks point to
    Target,
    /// Device numbers
    Device,
    /// Which names are hard links of each other
    Links,
    /// The whole tree
    Tree,
    /// Filters
    Filter,
    /// Triggers
    Triggers,
    /// The list of computed files
    Computed,
    /// Health checks
    Health,
    /// ListChange of packages
    Packages,
}

/// What a comparison leaves out.
pub type Ignore = BTreeSet<IgnoredPart>;
