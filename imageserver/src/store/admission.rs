//! Decides whether an image may be added: all that it needs is in the store, and it could be what
//! a machine has.
//!
//! The tree is put together from the directories of the store, looked through, and forgotten: the
//! server keeps no tree. A tree is a graph of directories that may be named many times, so a few
//! of them can stand for more paths than any memory holds: such a tree is refused before it is
//! walked.

use super::error::AdmissionError;
use std::collections::{BTreeMap, BTreeSet};

use model::image::Content;
use model::object::ObjectId;
use model::path::TreePath;
use model::tree::assembly::Assembly;
use model::tree::encode::{DIRECTORY_BYTES_MAX, references};
use model::tree::{Leaf, Node, Totals, Tree};

use crate::store::contract::{Objects, Pin};
use crate::store::error::{StoreError, failed};

/// The longest encodings of all paths of a tree together, in bytes, a directory counted as often
/// as it occurs: some 2,500,000 entries.
pub(crate) const TREE_BYTES_MAX: u64 = 256 << 20;

/// Checks that `content` may be added, and gives the sums over its tree.
///
/// Reads every directory, and looks for every object once.
///
/// # Errors
///
/// [`AdmissionError`] names the path or the object.
pub fn admit(store: &dyn Objects, content: &Content) -> Result<Admitted, AdmissionError> {
    let mut pins = Vec::new();
    let tree = assemble(store, content.root, &mut pins)?;
    content.verify(&tree).map_err(|source| AdmissionError::Image { source })?;
    check_files(store, &tree, &mut pins)?;
    Ok(Admitted { totals: tree.root().totals(), pins })
}

/// An image that may be added. While this lives, nothing that it needs is removed.
pub struct Admitted {
    /// The sums over its tree.
    pub totals: Totals,
    pins: Vec<Box<dyn Pin>>,
}

impl Admitted {
    /// Refuses an image that took so long to be looked through that what was seen may not be true
    /// any more.
    ///
    /// # Errors
    ///
    /// [`StoreError::TooLate`].
    pub fn expect_in_time(&self) -> Result<(), StoreError> {
        if self.pins.iter().all(|pin| pin.holds()) { Ok(()) } else { Err(StoreError::TooLate) }
    }
}

fn assemble(
    store: &dyn Objects,
    root: ObjectId,
    pins: &mut Vec<Box<dyn Pin>>,
) -> Result<Tree, AdmissionError> {
    let mut assembly = Assembly::new(root, |_| None);
    let mut shapes = BTreeMap::new();
    let mut bytes = 0;
    loop {
        let wanted = assembly.wanted();
        if wanted.is_empty() {
            break;
        }
        pins.extend(store.pin(&wanted)?);
        let missing = store.missing(&wanted)?;
        if let Some(&id) = missing.first() {
            return Err(AdmissionError::MissingDirectory { id, more: missing.len() - 1 });
        }
        store.ahead(&wanted);
        for id in wanted {
            let encoding = read_directory(store, id)?;
            bytes += encoding.len() as u64;
            if bytes > TREE_BYTES_MAX {
                return Err(too_large("the tree"));
            }
            let none = |source| AdmissionError::NoDirectory { id, source };
            let named = references(root.algorithm(), &encoding).map_err(none)?;
            shapes.insert(id, Shape { bytes: encoding.len() as u64, below: named.directories });
            assembly.insert(encoding, |_| None).map_err(none)?;
        }
    }
    if unfolded_bytes(root, &shapes) > TREE_BYTES_MAX {
        return Err(too_large("the tree, each directory counted as often as it occurs,"));
    }
    assembly.finish().map_err(|source| AdmissionError::Tree { root, source })
}

fn too_large(what: &str) -> AdmissionError {
    AdmissionError::TooLarge { what: what.to_owned(), limit: TREE_BYTES_MAX }
}

pub(crate) fn read_directory(store: &dyn Objects, id: ObjectId) -> Result<Vec<u8>, AdmissionError> {
    match store.open_verified(&id)? {
        None => Err(AdmissionError::MissingDirectory { id, more: 0 }),
        Some(content) if content.size_bytes() > DIRECTORY_BYTES_MAX as u64 => {
            let what = format!("directory {id}");
            Err(AdmissionError::TooLarge { what, limit: DIRECTORY_BYTES_MAX as u64 })
        }
        Some(content) => {
            let bytes = content.into_bytes().map_err(failed(format!("read directory {id}")))?;
            Ok(bytes.into())
        }
    }
}

/// What matters of a directory for the size of a tree.
struct Shape {
    bytes: u64,
    below: Vec<ObjectId>,
}

/// The length of all encodings of the tree, each counted as often as a path leads to it; takes
/// each directory once. A digest cannot be below itself, so the walk ends.
fn unfolded_bytes(root: ObjectId, shapes: &BTreeMap<ObjectId, Shape>) -> u64 {
    let mut sums: BTreeMap<ObjectId, u64> = BTreeMap::new();
    let mut stack = vec![root];
    while let Some(&id) = stack.last() {
        let Some(shape) = shapes.get(&id).filter(|_| !sums.contains_key(&id)) else {
            stack.pop();
            continue;
        };
        let unknown: BTreeSet<ObjectId> =
            shape.below.iter().filter(|below| !sums.contains_key(below)).copied().collect();
        if unknown.is_empty() {
            let below = shape.below.iter().filter_map(|below| sums.get(below));
            let sum = below.fold(shape.bytes, |sum, below| sum.saturating_add(*below));
            sums.insert(id, sum);
            stack.pop();
        } else {
            stack.extend(unknown);
        }
    }
    sums.get(&root).copied().unwrap_or(0)
}

fn check_files(
    store: &dyn Objects,
    tree: &Tree,
    pins: &mut Vec<Box<dyn Pin>>,
) -> Result<(), AdmissionError> {
    let wanted: BTreeMap<ObjectId, u64> =
        files(tree).map(|(_, file)| (file.object, file.size_bytes)).collect();
    let ids: Vec<ObjectId> = wanted.keys().copied().collect();
    pins.extend(store.pin(&ids)?);
    let mut sizes: BTreeMap<ObjectId, Option<u64>> = BTreeMap::new();
    for ((id, want), held) in wanted.into_iter().zip(store.all_held(&ids)?) {
        sizes.insert(id, size_of_intact(store, &id, want, held)?);
    }
    let mut missing: Option<(TreePath, ObjectId)> = None;
    for (path, file) in files(tree) {
        let size_bytes = sizes.get(&file.object).copied().flatten();
        match size_bytes {
            None if missing.is_none() => missing = Some((path, file.object)),
            Some(got) if got != file.size_bytes => {
                let (id, want) = (file.object, file.size_bytes);
                return Err(AdmissionError::WrongSize { path, id, want, got });
            }
            _ => {}
        }
    }
    match missing {
        None => Ok(()),
        Some((path, id)) => {
            let more = sizes.values().filter(|size_bytes| size_bytes.is_none()).count() - 1;
            Err(AdmissionError::MissingObject { path, id, more })
        }
    }
}

/// The length of an object. One that has not the length that is wanted may be damaged: it is read
/// then, and is missing if it is.
fn size_of_intact(
    store: &dyn Objects,
    id: &ObjectId,
    want: u64,
    held: Option<u64>,
) -> Result<Option<u64>, AdmissionError> {
    match held {
        Some(got) if got != want => {
            Ok(store.open_verified(id)?.map(|content| content.size_bytes()))
        }
        other => Ok(other),
    }
}

fn files(tree: &Tree) -> impl Iterator<Item = (TreePath, model::tree::File)> {
    tree.nodes().filter_map(|(path, node)| match node {
        Node::Leaf(Leaf::File(file)) => Some((path, file)),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use model::object::Algorithm;

    use super::*;

    fn id(number: u32) -> ObjectId {
        Algorithm::Blake3.digest(&number.to_le_bytes())
    }

    #[test]
    fn a_directory_counts_as_often_as_it_occurs() {
        let mut shapes = BTreeMap::new();
        shapes.insert(id(0), Shape { bytes: 1, below: vec![] });
        shapes.insert(id(1), Shape { bytes: 10, below: vec![id(0), id(0), id(0)] });
        shapes.insert(id(2), Shape { bytes: 100, below: vec![id(1), id(0), id(1)] });
        assert_eq!(unfolded_bytes(id(0), &shapes), 1);
        assert_eq!(unfolded_bytes(id(1), &shapes), 13);
        assert_eq!(unfolded_bytes(id(2), &shapes), 127);
    }

    #[test]
    fn a_bomb_of_directories_is_measured_without_being_walked() {
        let mut shapes = BTreeMap::new();
        shapes.insert(id(0), Shape { bytes: 1, below: vec![] });
        for level in 1..1_000 {
            shapes.insert(id(level), Shape { bytes: 1, below: vec![id(level - 1); 2] });
        }
        assert_eq!(unfolded_bytes(id(40), &shapes), (1 << 41) - 1);
        assert_eq!(unfolded_bytes(id(999), &shapes), u64::MAX);
    }
}
