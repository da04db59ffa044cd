//! What the scanner knows at one moment.

use std::sync::Arc;

use api::subd::ScanReport;
use model::scope::{ScanSettings, Scope};
use model::tree::Tree;

/// A scan under some settings: immutable, and complete or empty. Directories that did not change
/// are the same `Arc` in one snapshot and the next.
#[derive(Clone, Debug)]
pub struct Snapshot {
    pub settings: Arc<ScanSettings>,
    /// The digest of the settings and of the local exclusions.
    pub scope: Scope,
    /// Grows when, and only when, anything in the snapshot has changed; from 1.
    pub revision: u64,
    /// `None` until a pass under these settings is complete.
    pub tree: Option<Tree>,
    /// What polls report of the tree; `None` as long as there is none.
    pub report: Option<ScanReport>,
}
