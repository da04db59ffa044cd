//! Scope: what a scan covered. Trees are compared only within the same scope.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::JsonSchema;
use crate::filter::{Filter, Patterns};
use crate::object::{Algorithm, ObjectId};
use crate::path::TreePath;
use crate::tree::{Tree, TreeError};

/// Where subd keeps its cache and its state; never scanned, never part of an image.
pub const SUBD_DIRECTORY: &str = "/.subd";

/// Which paths a scan covers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Coverage {
    /// Everything that the filter does not keep.
    Full(Filter),
    /// Only these paths, for a sparse image.
    Paths(BTreeSet<TreePath>),
}

/// Which attributes a scan records in addition to mode, owner, times, `user.*`, capabilities and
/// ACLs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Attributes {
    /// No others.
    #[default]
    Basic,
    /// `security.selinux` too, because the image has labels.
    Labels,
}

impl Attributes {
    /// Returns true if the extended attribute `name` is managed.
    #[must_use]
    pub fn manage(self, name: &[u8]) -> bool {
        match name {
            b"security.capability" | b"system.posix_acl_access" | b"system.posix_acl_default" => {
                true
            }
            b"security.selinux" => self == Self::Labels,
            _ => name.starts_with(b"user."),
        }
    }

    /// Returns the attributes of a tree: labels if any of its entries has one.
    #[must_use]
    pub fn of(tree: &Tree) -> Self {
        let labelled = tree.nodes().any(|(_, node)| {
            node.metadata()
                .is_some_and(|metadata| metadata.xattrs.get(b"security.selinux").is_some())
        });
        if labelled { Self::Labels } else { Self::Basic }
    }
}

/// How a sub has to scan, as set by its dominator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ScanSettings {
    /// The algorithm of the required image.
    pub algorithm: Algorithm,
    /// Which paths.
    pub coverage: Coverage,
    /// Which attributes.
    pub attributes: Attributes,
}

impl Default for ScanSettings {
    /// Returns the settings before a dominator sets others: all paths, with the default algorithm.
    fn default() -> Self {
        let all = Filter::new::<&str>([]).expect("an empty filter has no bad line");
        Self {
            algorithm: Algorithm::default(),
            coverage: Coverage::Full(all),
            attributes: Attributes::Basic,
        }
    }
}

/// The digest of scan settings and exclusions: two trees may be compared if theirs are equal.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
pub struct Scope(pub ObjectId);

impl Scope {
    /// Returns the scope of a scan under `settings`, without the local `exclusions`: lines of
    /// [`Patterns`].
    #[must_use]
    pub fn of(settings: &ScanSettings, exclusions: &[String]) -> Self {
        // Length before content, so that no two different lists give the same bytes.
        let mut bytes = b"scope-1\0".to_vec();
        let mut item = |tag: u8, content: &[u8]| {
            bytes.push(tag);
            bytes.extend_from_slice(&(content.len() as u64).to_le_bytes());
            bytes.extend_from_slice(content);
        };
        item(1, &[settings.algorithm.code()]);
        item(2, &[u8::from(settings.attributes == Attributes::Labels)]);
        match &settings.coverage {
            Coverage::Full(filter) => {
                item(3, b"");
                filter.lines().iter().for_each(|line| item(4, line.as_bytes()));
            }
            Coverage::Paths(paths) => {
                item(5, b"");
                paths.iter().for_each(|path| item(6, path.as_bytes()));
            }
        }
        exclusions.iter().for_each(|line| item(7, line.as_bytes()));
        Self(Algorithm::Blake3.digest(&bytes))
    }
}

/// Returns the part of `tree` that a scan under `exclusions` covers.
pub fn visible(tree: &Tree, exclusions: &Patterns) -> Result<Tree, TreeError> {
    let own = TreePath::new(SUBD_DIRECTORY).expect("the constant is a path");
    if exclusions.is_empty() && tree.get(&own).is_none() {
        return Ok(tree.clone());
    }
    tree.without(|path| *path == own || exclusions.matches(path))
}
