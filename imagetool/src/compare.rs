//! Compares two images: their trees path by path, and everything else of an image.
// tidy: core

pub mod entries;
pub mod metadata;

use std::collections::BTreeSet;

/// A part that a comparison can leave out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum IgnoredPart {
    /// Contents of files, and the filegen-server of computed files
    Content,
    /// Permission bits
    Mode,
    /// Owner and group
    Owner,
    /// Modification times
    Mtime,
    /// Extended attributes, ACLs and capabilities
    Xattrs,
    /// Targets of symlinks
    Target,
    /// Device numbers
    Device,
    /// Hard links
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
    /// Lists of packages
    Packages,
}

/// The parts that a comparison leaves out.
pub type Ignore = BTreeSet<IgnoredPart>;
