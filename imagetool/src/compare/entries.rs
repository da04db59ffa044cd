//! Compares two trees by path, from the top down; equal directories are not looked into.
//!
//! A hard link is compared as its file. If a file becomes a hard link to another with the same
//! content, only the links differ.
// tidy: core

use model::object::ObjectId;
use model::path::{DEPTH_MAX, TreePath};
use model::plan::Difference;
use model::tree::encode::{Item, Listing};
use model::tree::{ENTRIES_MAX, Leaf, Metadata, Name, Node, TreeError, Xattrs};
use serde::Serialize;

use super::{Ignore, IgnoredPart};
use crate::directory_cache::{DirectoryCache, Lookup};
use crate::output::entry::{EntryRecord, short_text};
use crate::output::{size, time};

/// A difference at one path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    pub path: TreePath,
    pub kind: ChangeKind,
}

/// The way in which a path differs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ChangeKind {
    /// Only the second tree has it.
    Added(Node),
    /// Only the first tree has it.
    Removed(Node),
    /// Both have it.
    Changed {
        /// In the first tree.
        before: ComparedEntry,
        /// In the second tree.
        after: ComparedEntry,
        /// The differing properties; never empty.
        what: Vec<Difference>,
    },
}

/// The entry of one tree at a path that both have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ComparedEntry {
    /// The entry; for a hard link its file.
    pub node: Node,
    /// For a hard link, the path of its file.
    pub link_to: Option<TreePath>,
}

/// Compares the trees of `before` and `after` and returns the differences, sorted by path.
///
/// The result is complete if `cache` wants nothing afterwards. Until then, directories that are not
/// in the cache count as equal.
///
/// # Errors
///
/// [`TreeError`] if a tree exceeds the limits of trees, or a hard link has no file.
pub fn compare(
    cache: &mut DirectoryCache,
    before: ObjectId,
    after: ObjectId,
    ignore: &Ignore,
) -> Result<Vec<Change>, TreeError> {
    let mut walk = Walk { cache, before, after, ignore, changes: Vec::new() };
    let root = PathPair {
        path: TreePath::root(),
        depth: 0,
        before: Some(Item::Directory(before)),
        after: Some(Item::Directory(after)),
    };
    let mut stack = vec![root];
    let mut seen = 0_u64;
    while let Some(pair) = stack.pop() {
        seen += 1;
        // A small tree can refer to equal directories any number of times.
        if seen > 2 * ENTRIES_MAX {
            return Err(TreeError::TooLarge);
        }
        if pair.depth > DEPTH_MAX {
            return Err(TreeError::TooDeep);
        }
        walk.pair(pair, &mut stack)?;
    }
    Ok(walk.changes)
}

/// A path to compare.
struct PathPair {
    path: TreePath,
    depth: usize,
    before: Option<Item>,
    after: Option<Item>,
}

struct Walk<'call> {
    cache: &'call mut DirectoryCache,
    before: ObjectId,
    after: ObjectId,
    ignore: &'call Ignore,
    changes: Vec<Change>,
}

impl Walk<'_> {
    fn pair(&mut self, pair: PathPair, stack: &mut Vec<PathPair>) -> Result<(), TreeError> {
        if pair.before == pair.after {
            return Ok(());
        }
        let directory = |item: &Option<Item>| match item {
            Some(Item::Directory(id)) => Some(*id),
            _ => None,
        };
        let (before_id, after_id) = (directory(&pair.before), directory(&pair.after));
        let mut list = |id: Option<ObjectId>| id.map(|id| self.cache.get(id));
        let (before, after) = (list(before_id), list(after_id));
        if matches!(before, Some(None)) || matches!(after, Some(None)) {
            // It is wanted now; the comparison is repeated when it has been fetched.
            return Ok(());
        }
        let (before, after) = (before.flatten(), after.flatten());
        let node = |item: &Option<Item>, listing: Option<&Listing>| match (item, listing) {
            (Some(Item::Leaf(leaf)), _) => Some(Node::Leaf(leaf.clone())),
            (_, listing) => listing.map(|listing| Node::Directory(listing.metadata.clone())),
        };
        let nodes = (node(&pair.before, before.as_deref()), node(&pair.after, after.as_deref()));
        let kind = match nodes {
            (None, None) => None,
            (None, Some(node)) => Some(ChangeKind::Added(node)),
            (Some(node), None) => Some(ChangeKind::Removed(node)),
            (Some(before), Some(after)) => self.both(&pair.path, before, after)?,
        };
        self.changes.extend(kind.map(|kind| Change { path: pair.path.clone(), kind }));
        let below = merged(before.as_deref(), after.as_deref());
        stack.extend(below.into_iter().rev().map(|(name, before, after)| {
            let path = pair.path.join(name.as_bytes()).expect("a name of a directory is one");
            PathPair { path, depth: pair.depth + 1, before, after }
        }));
        Ok(())
    }

    fn both(
        &mut self,
        path: &TreePath,
        before: Node,
        after: Node,
    ) -> Result<Option<ChangeKind>, TreeError> {
        let before = self.side(self.before, path, before)?;
        let after = self.side(self.after, path, after)?;
        let (Some(before), Some(after)) = (before, after) else { return Ok(None) };
        let mut what = differences(&before.node, &after.node);
        if before.link_to != after.link_to {
            what.push(Difference::Links);
        }
        what.retain(|one| ignored_by(*one).is_none_or(|ignored| !self.ignore.contains(&ignored)));
        Ok((!what.is_empty()).then_some(ChangeKind::Changed { before, after, what }))
    }

    /// Returns the file of a hard link; `None` if directories must be fetched first.
    fn side(
        &mut self,
        root: ObjectId,
        path: &TreePath,
        node: Node,
    ) -> Result<Option<ComparedEntry>, TreeError> {
        let Node::Leaf(Leaf::HardLink(target)) = node else {
            return Ok(Some(ComparedEntry { node, link_to: None }));
        };
        match self.cache.find(root, &target) {
            Lookup::NotFetched => Ok(None),
            Lookup::Leaf(leaf @ Leaf::File(_)) => {
                Ok(Some(ComparedEntry { node: Node::Leaf(leaf), link_to: Some(target) }))
            }
            _ => Err(TreeError::BadLink { path: path.clone(), target }),
        }
    }
}

/// Pairs the entries of both directories by name.
fn merged<'list>(
    before: Option<&'list Listing>,
    after: Option<&'list Listing>,
) -> Vec<(&'list Name, Option<Item>, Option<Item>)> {
    let entries = |listing: Option<&'list Listing>| {
        listing.map_or(&[][..], |listing| &listing.entries).iter().peekable()
    };
    let (mut before, mut after) = (entries(before), entries(after));
    let mut all = Vec::new();
    loop {
        let name = match (before.peek(), after.peek()) {
            (None, None) => return all,
            (Some((name, _)), None) | (None, Some((name, _))) => name,
            (Some((left, _)), Some((right, _))) => left.min(right),
        };
        let before = before.next_if(|(one, _)| one == name).map(|(_, item)| item.clone());
        let after = after.next_if(|(one, _)| one == name).map(|(_, item)| item.clone());
        all.push((name, before, after));
    }
}

/// Returns the differences of two entries, apart from their links.
fn differences(before: &Node, after: &Node) -> Vec<Difference> {
    if before.kind() != after.kind() {
        return vec![Difference::Kind];
    }
    let mut what = Vec::new();
    let mut note = |differs: bool, one: Difference| {
        if differs {
            what.push(one);
        }
    };
    let mut mtimes = None;
    match (before, after) {
        (Node::Leaf(Leaf::File(before)), Node::Leaf(Leaf::File(after))) => {
            note(before.object != after.object, Difference::Content);
            mtimes = Some((before.mtime, after.mtime));
        }
        (Node::Leaf(Leaf::Computed(before)), Node::Leaf(Leaf::Computed(after))) => {
            note(before.source != after.source, Difference::Content);
        }
        (Node::Leaf(Leaf::Symlink(before)), Node::Leaf(Leaf::Symlink(after))) => {
            note(before.target != after.target, Difference::Target);
        }
        (Node::Leaf(Leaf::Special(before)), Node::Leaf(Leaf::Special(after))) => {
            note(before.device != after.device, Difference::Device);
            mtimes = Some((before.mtime, after.mtime));
        }
        _ => {}
    }
    if let (Some(before), Some(after)) = (before.metadata(), after.metadata()) {
        note(before.mode != after.mode, Difference::Mode);
        note((before.uid, before.gid) != (after.uid, after.gid), Difference::Owner);
        note(before.xattrs != after.xattrs, Difference::Xattrs);
    }
    note(mtimes.is_some_and(|(before, after)| before != after), Difference::Mtime);
    what
}

/// Returns the flag that leaves a difference out.
fn ignored_by(difference: Difference) -> Option<IgnoredPart> {
    match difference {
        Difference::Missing | Difference::Extra | Difference::Kind => None,
        Difference::Content => Some(IgnoredPart::Content),
        Difference::Mode => Some(IgnoredPart::Mode),
        Difference::Owner => Some(IgnoredPart::Owner),
        Difference::Xattrs => Some(IgnoredPart::Xattrs),
        Difference::Mtime => Some(IgnoredPart::Mtime),
        Difference::Target => Some(IgnoredPart::Target),
        Difference::Device => Some(IgnoredPart::Device),
        Difference::Links => Some(IgnoredPart::Links),
    }
}

impl Change {
    /// Describes the change on one line.
    pub fn line(&self) -> String {
        let path = &self.path;
        match &self.kind {
            ChangeKind::Added(node) => format!("added   {path}: {}", short_text(node)),
            ChangeKind::Removed(node) => format!("removed {path}: {}", short_text(node)),
            ChangeKind::Changed { before, after, what } => {
                let words: Vec<String> =
                    what.iter().map(|one| difference_text(*one, before, after)).collect();
                format!("changed {path}: {}", words.join(", "))
            }
        }
    }
}

/// Returns a difference with both values: `mode 644 to 600`.
fn difference_text(
    difference: Difference,
    before: &ComparedEntry,
    after: &ComparedEntry,
) -> String {
    let name = difference.name();
    let value = |side: &ComparedEntry| value_of(difference, side);
    match difference {
        Difference::Xattrs => {
            let (before, after) = (xattrs_of(&before.node), xattrs_of(&after.node));
            format!("{name} {}", differing_names(&before, &after).join(" "))
        }
        _ => match (value(before), value(after)) {
            (Some(before), Some(after)) if before != after => format!("{name} {before} to {after}"),
            _ => name.to_owned(),
        },
    }
}

fn value_of(difference: Difference, side: &ComparedEntry) -> Option<String> {
    let metadata = || side.node.metadata();
    Some(match (difference, &side.node) {
        (Difference::Kind, node) => node.kind().to_owned(),
        (Difference::Content, Node::Leaf(Leaf::File(file))) => size(file.size_bytes),
        (Difference::Content, Node::Leaf(Leaf::Computed(computed))) => computed.source.clone(),
        (Difference::Mode, _) => format!("{:o}", metadata()?.mode),
        (Difference::Owner, _) => format!("{}:{}", metadata()?.uid, metadata()?.gid),
        (Difference::Mtime, Node::Leaf(Leaf::File(file))) => time(file.mtime),
        (Difference::Mtime, Node::Leaf(Leaf::Special(special))) => time(special.mtime),
        (Difference::Target, Node::Leaf(Leaf::Symlink(symlink))) => symlink.target.to_string(),
        (Difference::Device, node) => {
            let (major, minor) = EntryRecord::of(node).device?;
            format!("{major},{minor}")
        }
        (Difference::Links, _) => match &side.link_to {
            None => "none".to_owned(),
            Some(first) => first.to_string(),
        },
        _ => return None,
    })
}

fn xattrs_of(node: &Node) -> Xattrs {
    node.metadata().map_or_else(Xattrs::none, |Metadata { xattrs, .. }| xattrs.clone())
}

fn differing_names(before: &Xattrs, after: &Xattrs) -> Vec<String> {
    let gone = before.iter().filter(|(name, value)| after.get(name) != Some(value));
    let new = after.iter().filter(|(name, _)| before.get(name).is_none());
    let mut names: Vec<String> =
        gone.chain(new).map(|(name, _)| model::escape::escape(name)).collect();
    names.sort();
    names
}

/// All changes in JSON, each list sorted by path.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct TreeChangesRecord {
    /// Entries of the second tree only.
    pub added: Vec<PathRecord>,
    /// Entries of the first tree only.
    pub removed: Vec<PathRecord>,
    /// Entries of both trees that differ.
    pub changed: Vec<ChangedRecord>,
}

/// An entry of one tree in JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PathRecord {
    path: TreePath,
    #[serde(flatten)]
    entry: EntryRecord,
}

/// An entry of two trees in JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ChangedRecord {
    path: TreePath,
    what: Vec<Difference>,
    before: EntryRecord,
    after: EntryRecord,
}

impl TreeChangesRecord {
    /// Sorts `changes` by kind.
    pub fn of(changes: &[Change]) -> Self {
        let mut record = Self::default();
        for Change { path, kind } in changes {
            let path = path.clone();
            let one = |node| PathRecord { path: path.clone(), entry: EntryRecord::of(node) };
            match kind {
                ChangeKind::Added(node) => record.added.push(one(node)),
                ChangeKind::Removed(node) => record.removed.push(one(node)),
                ChangeKind::Changed { before, after, what } => {
                    let side = |side: &ComparedEntry| EntryRecord {
                        link_to: side.link_to.clone(),
                        ..EntryRecord::of(&side.node)
                    };
                    let (before, after) = (side(before), side(after));
                    record.changed.push(ChangedRecord { path, what: what.clone(), before, after });
                }
            }
        }
        record
    }
}

#[cfg(test)]
mod tests;
