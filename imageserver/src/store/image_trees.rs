//! Reads the trees of images: checks the tree of a new image, and records what all images need.
//!
//! To be added, an image must have a valid tree and all its objects in the store. The tree is
//! assembled from the directories in the store, checked, and dropped: the server keeps no tree. A
//! directory may occur many times in a tree, so a few directories can stand for more paths than any
//! memory holds. Such a tree is refused before it is assembled.
//!
//! To find what images need, each directory is read once, and its references are recorded.

use std::collections::{BTreeMap, BTreeSet};

use model::image::{Content, ImageName};
use model::object::ObjectId;
use model::path::TreePath;
use model::tree::assembly::Assembly;
use model::tree::encode::{DIRECTORY_BYTES_MAX, references};
use model::tree::{Leaf, Node, Totals, Tree};
use provisioning::image::{ImageError, ImageFile, definition};

use super::error::{AdmissionError, WalkError};
use crate::core::collection::removal::NeededObjects;
use crate::store::contract::{Objects, Pin};
use crate::store::error::{StoreError, failed};
use crate::store::private_images::Reader;

/// The longest encodings of all paths of a tree together, in bytes, each directory counted as often
/// as it occurs: about 2,500,000 entries.
pub(crate) const TREE_BYTES_MAX: u64 = 256 << 20;

/// Checks that `content` may be added, and gives the sums over its tree.
///
/// Reads every directory, and looks for every object once.
///
/// # Errors
///
/// [`AdmissionError`] names the path or the object.
pub fn check_tree(store: &dyn Objects, content: &Content) -> Result<CheckedTree, AdmissionError> {
    check_tree_for(&Reader::Everything, store, content)
}

/// The same for an image that `reader` adds: what they may not use counts as missing.
pub fn check_tree_for(
    reader: &Reader,
    store: &dyn Objects,
    content: &Content,
) -> Result<CheckedTree, AdmissionError> {
    checked_tree(reader, store, content).map(|(checked, _)| checked)
}

fn checked_tree(
    reader: &Reader,
    store: &dyn Objects,
    content: &Content,
) -> Result<(CheckedTree, Tree), AdmissionError> {
    let mut pins = Vec::new();
    let tree = assemble(reader, store, content.root, &mut pins)?;
    content.verify(&tree).map_err(|source| AdmissionError::Image { source })?;
    check_files(reader, store, &tree, &mut pins)?;
    Ok((CheckedTree { totals: tree.root().totals(), pins }, tree))
}

/// As [`check_tree_for`], for an image that is new: its daemon tasks must be ones that can run,
/// and its resources ones that can be provisioned.
pub fn check_new_tree_for(
    reader: &Reader,
    store: &dyn Objects,
    content: &Content,
) -> Result<CheckedTree, AdmissionError> {
    let (checked, tree) = checked_tree(reader, store, content)?;
    check_tasks(store, content, &tree)?;
    check_resources(store, content, &tree)?;
    Ok(checked)
}

/// Refuses daemon tasks without trigger or file, and files that cannot be read.
fn check_tasks(store: &dyn Objects, content: &Content, tree: &Tree) -> Result<(), AdmissionError> {
    let refused = |source| AdmissionError::Task { source };
    let (pairs, errors) = tasks::image::pairs(&content.triggers, tree);
    if let Some(first) = errors.into_iter().next() {
        return Err(refused(first));
    }
    for pair in pairs {
        let bytes = read_file(store, &pair.path, pair.file)?;
        pair.task(&bytes, jiff::tz::db()).map_err(refused)?;
    }
    Ok(())
}

/// Refuses resources that no machine could provision. A bundle may need the bindings of its base.
fn check_resources(
    store: &dyn Objects,
    content: &Content,
    tree: &Tree,
) -> Result<(), AdmissionError> {
    let read = |file: &ImageFile| read_file(store, &file.path, file.object);
    match definition(&content.triggers, tree, read) {
        Err(AdmissionError::Resources { source: ImageError::NoBindings })
            if content.is_sparse() =>
        {
            Ok(())
        }
        checked => checked.map(drop),
    }
}

fn read_file(
    store: &dyn Objects,
    path: &TreePath,
    id: ObjectId,
) -> Result<Vec<u8>, AdmissionError> {
    // It was there a moment ago.
    let missing = || AdmissionError::MissingObject { path: path.clone(), id, more: 0 };
    let bytes = store.open_verified(&id)?.ok_or_else(missing)?.into_bytes();
    Ok(bytes.map_err(failed(format!("read {path}")))?.into())
}

/// An image that may be added. While this lives, nothing that it needs is removed.
pub struct CheckedTree {
    /// The sums over its tree.
    pub totals: Totals,
    pins: Vec<Box<dyn Pin>>,
}

impl CheckedTree {
    /// Fails if checking took so long that objects may have been removed since.
    pub fn expect_in_time(&self) -> Result<(), StoreError> {
        if self.pins.iter().all(|pin| pin.is_valid()) { Ok(()) } else { Err(StoreError::TooLate) }
    }
}

fn assemble(
    reader: &Reader,
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
        let missing = reader.missing(store, &wanted)?;
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
            shapes.insert(
                id,
                DirectoryShape { bytes: encoding.len() as u64, below: named.directories },
            );
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

/// The size of a directory, and its subdirectories.
struct DirectoryShape {
    bytes: u64,
    below: Vec<ObjectId>,
}

/// Returns the length of all encodings of a tree, each counted as often as it occurs. Visits each
/// directory once. A digest cannot be below itself, so the walk ends.
fn unfolded_bytes(root: ObjectId, shapes: &BTreeMap<ObjectId, DirectoryShape>) -> u64 {
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
    reader: &Reader,
    store: &dyn Objects,
    tree: &Tree,
    pins: &mut Vec<Box<dyn Pin>>,
) -> Result<(), AdmissionError> {
    let wanted: BTreeMap<ObjectId, u64> =
        files(tree).map(|(_, file)| (file.object.id(), file.size_bytes)).collect();
    let ids: Vec<ObjectId> = wanted.keys().copied().collect();
    pins.extend(store.pin(&ids)?);
    let mut sizes: BTreeMap<ObjectId, Option<u64>> = BTreeMap::new();
    for ((id, want), held) in wanted.into_iter().zip(store.all_held(&ids)?) {
        sizes.insert(id, size_of_intact(store, &id, want, held)?);
    }
    for id in reader.unusable(&ids) {
        sizes.insert(id, None);
    }
    let mut missing: Option<(TreePath, ObjectId)> = None;
    for (path, file) in files(tree) {
        let size_bytes = sizes.get(&file.object.id()).copied().flatten();
        match size_bytes {
            None if missing.is_none() => missing = Some((path, file.object.id())),
            Some(got) if got != file.size_bytes => {
                let (id, want) = (file.object.id(), file.size_bytes);
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

/// Returns the length of an object. If it is not the expected one, the object is read, because it
/// may be damaged.
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

/// The objects from which a walk of an image starts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageRoots {
    pub image: ImageName,
    pub root: ObjectId,
    pub build_log: Option<ObjectId>,
}

/// Receives the objects that images need.
pub trait WalkedObjects {
    /// Records that an image needs `id`.
    fn add(&mut self, id: &ObjectId);

    /// Records that an image needs the directory `id`. Returns true if the directory must be
    /// walked.
    fn add_directory(&mut self, id: &ObjectId) -> bool;
}

impl WalkedObjects for NeededObjects {
    fn add(&mut self, id: &ObjectId) {
        Self::add(self, id);
    }

    fn add_directory(&mut self, id: &ObjectId) -> bool {
        Self::add_directory(self, id)
    }
}

/// Records the objects that images need. Skips directories that were walked before. Returns false
/// if `stop` returned true before the end.
pub fn walk(
    store: &dyn Objects,
    needed: &mut impl WalkedObjects,
    roots: &[ImageRoots],
    stop: impl Fn() -> bool,
) -> Result<bool, WalkError> {
    for ImageRoots { image, root, build_log } in roots {
        if let Some(log) = build_log {
            needed.add(log);
        }
        let failed = |source| WalkError { image: image.clone(), source };
        let mut stack = Vec::new();
        if needed.add_directory(root) {
            stack.push(*root);
        }
        while let Some(id) = stack.pop() {
            if stop() {
                return Ok(false);
            }
            let encoding = read_directory(store, id).map_err(failed)?;
            let named = references(root.algorithm(), &encoding)
                .map_err(|source| failed(AdmissionError::NoDirectory { id, source }))?;
            for (file, _) in &named.files {
                needed.add(file);
            }
            let before = stack.len();
            stack.extend(named.directories.into_iter().filter(|below| needed.add_directory(below)));
            store.ahead(&stack[before..]);
        }
    }
    Ok(true)
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
        shapes.insert(id(0), DirectoryShape { bytes: 1, below: vec![] });
        shapes.insert(id(1), DirectoryShape { bytes: 10, below: vec![id(0), id(0), id(0)] });
        shapes.insert(id(2), DirectoryShape { bytes: 100, below: vec![id(1), id(0), id(1)] });
        assert_eq!(unfolded_bytes(id(0), &shapes), 1);
        assert_eq!(unfolded_bytes(id(1), &shapes), 13);
        assert_eq!(unfolded_bytes(id(2), &shapes), 127);
    }

    #[test]
    fn a_bomb_of_directories_is_measured_without_being_walked() {
        let mut shapes = BTreeMap::new();
        shapes.insert(id(0), DirectoryShape { bytes: 1, below: vec![] });
        for level in 1..1_000 {
            shapes.insert(id(level), DirectoryShape { bytes: 1, below: vec![id(level - 1); 2] });
        }
        assert_eq!(unfolded_bytes(id(40), &shapes), (1 << 41) - 1);
        assert_eq!(unfolded_bytes(id(999), &shapes), u64::MAX);
    }
}
