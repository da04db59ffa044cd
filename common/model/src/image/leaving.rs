//! Bundles that leave a machine without a base.
//!
//! Such a machine is scanned for the paths of its image only, so files of a bundle that is no part
//! of it any more would stay. Until the update to the next image is done, the paths of the bundles
//! that leave are scanned too, and are removed because that image does not have them.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::ImageName;
use super::required::RequiredImage;
use crate::path::TreePath;
use crate::scope::{Coverage, ScanSettings};
use crate::tree::{Node, TreeBuilder, TreeError};

/// Directories that lie directly in these stay on a machine, although they may be empty without the
/// bundle.
const SYSTEM_DIRECTORIES: [&str; 4] = ["/", "/usr", "/usr/local", "/var"];

impl ImageName {
    /// Returns the bundles of `former` whose files go when a machine gets this image: none unless
    /// this one is without a base.
    #[must_use]
    pub fn leaving(&self, former: &Self) -> Vec<Self> {
        if !self.is_without_base() {
            return Vec::new();
        }
        let stays: BTreeSet<Self> = self.parts().collect();
        // The first part is no bundle.
        former.parts().skip(1).filter(|part| !stays.contains(part)).collect()
    }
}

impl RequiredImage {
    /// Returns the image together with those bundles of `former` that leave with it; `former` may
    /// lack parts that are not known.
    ///
    /// # Errors
    ///
    /// As [`RequiredImage::with_leaving`].
    pub fn after(&self, former: &Self) -> Result<Self, TreeError> {
        let names = self.name().leaving(former.name());
        let used = former.parts.iter().enumerate().filter(|(index, _)| former.is_used(*index));
        let leaving = used.map(|(_, part)| part).filter(|part| names.contains(part.name()));
        self.with_leaving(leaving.cloned().collect())
    }

    /// Returns the image together with bundles that leave with it: a machine is scanned for their
    /// paths too, and keeps none of these but the directories of a system.
    ///
    /// # Errors
    ///
    /// [`TreeError`] if a directory of a system would not fit into the tree.
    pub fn with_leaving(&self, leaving: Vec<Arc<Self>>) -> Result<Self, TreeError> {
        let Coverage::Paths(paths) = &self.scan.coverage else { return Ok(self.clone()) };
        let (mut paths, mut builder) = (paths.clone(), TreeBuilder::new(self.tree.algorithm()));
        for (path, node) in self.tree.nodes() {
            builder.insert(path, node)?;
        }
        // Without any bundle, the root stays as they have it.
        if let Some(bundle) = leaving.first().filter(|_| self.name().is_nothing()) {
            let root = bundle.tree.root().metadata().clone();
            builder.replace(TreePath::root(), Node::Directory(root));
        }
        for (path, node) in leaving.iter().flat_map(|one| one.tree.nodes()) {
            let is_new = paths.insert(path.clone());
            if is_new && matches!(node, Node::Directory(_)) && is_of_system(&path) {
                builder.insert(path, node)?;
            }
        }
        let scan = ScanSettings { coverage: Coverage::Paths(paths), ..self.scan.clone() };
        Ok(Self { scan, tree: builder.finish()?, leaving, ..self.clone() })
    }
}

/// True if a machine keeps the directory at `path`.
fn is_of_system(path: &TreePath) -> bool {
    let parent = path.parent();
    parent.is_some_and(|parent| SYSTEM_DIRECTORIES.contains(&&*parent.to_string()))
}
