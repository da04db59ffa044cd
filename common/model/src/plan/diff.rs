//! Compares the tree of a sub with the required one, and plans the change.
//!
//! One ordered walk over both trees. Sub-trees of equal digest are skipped, unless they hold hard
//! links: whether a link is right depends on what becomes of its file elsewhere.
//!
//! # Hard links
//!
//! A required file that other paths share is decided once, at its first path: it *keeps an inode*
//! that the sub has (as it is, or with its metadata set in place), or it is *new*. Each further
//! path of the group is then compared with that decision. An inode serves at most one group, and
//! is changed in place only if exactly the paths of the group share it.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    Action, Blocked, Difference, Obstacle, Occupant, Operation, Plan, RefusedChanges, order,
};
use crate::path::TreePath;
use crate::tree::{
    Child, Directory, Entry, File, Leaf, Metadata, Node, Special, Symlink, Time, TimePrecision,
    Tree,
};

/// The scanned tree of a sub.
#[derive(Clone, Copy, Debug)]
pub struct ScannedTree<'have> {
    /// The last complete scan.
    pub tree: &'have Tree,
    /// Directories of the tree that directly hold content outside the scope.
    pub kept_directories: &'have BTreeSet<TreePath>,
    /// Files of the tree that are also linked from outside it, by their first path; and special
    /// files that have other names, wherever those are.
    pub externally_linked: &'have BTreeSet<TreePath>,
    /// Paths of the tree that the kernel uses.
    pub occupied: &'have BTreeMap<TreePath, Occupant>,
    /// Changes that the machine refuses.
    pub refused: &'have RefusedChanges,
    /// The precision of times on the file-system.
    pub times: TimePrecision,
}

/// Computes the operations that turn `have` into `want`.
///
/// `want` holds no path that the scan's scope left out; both trees are of one scope. The result is
/// at most `h + w` operations for trees of `h` and `w` entries: first what is put in place or
/// changed, each after what it needs, libraries first and boot files last; then what is removed,
/// the deepest first. Equal inputs give equal plans.
///
/// What cannot be changed is blocked, with what lies below it, links to it, or holds it; so is each
/// directory that is left alone.
///
/// Takes one pass over the directories that differ or hold hard links.
#[must_use]
pub fn plan(have: &ScannedTree<'_>, want: &Tree) -> Plan {
    let mut planner = Planner {
        have: *have,
        want,
        have_links: Links::of(have.tree),
        want_links: Links::of(want),
        fates: BTreeMap::new(),
        claimed: BTreeSet::new(),
        puts: Vec::new(),
        removals: Vec::new(),
        blocked: Vec::new(),
        unmade: BTreeSet::new(),
    };
    planner.walk();
    planner.block_dependents();
    planner.block_left_alone();
    planner.blocked.sort_by(|one, other| one.path.cmp(&other.path));
    let mut operations = order::order_puts(planner.puts);
    // A directory comes right before what it holds, so in reverse it comes right after.
    planner.removals.reverse();
    operations.extend(planner.removals.into_iter().map(|path| Operation {
        path,
        action: Action::Remove,
        reason: vec![Difference::Extra],
    }));
    Plan { operations, blocked: planner.blocked }
}

/// The groups of hard links of a tree: the further paths of each file, by its first path.
struct Links(BTreeMap<TreePath, BTreeSet<TreePath>>);

impl Links {
    fn of(tree: &Tree) -> Self {
        let mut groups: BTreeMap<TreePath, BTreeSet<TreePath>> = BTreeMap::new();
        let mut stack = vec![(TreePath::root(), tree.root())];
        while let Some((path, directory)) = stack.pop() {
            for entry in directory.entries() {
                match &entry.child {
                    Child::Directory(below) if below.totals().hard_links > 0 => {
                        stack.push((path.join_name(entry.name.as_bytes()), below));
                    }
                    Child::Leaf(Leaf::HardLink(first)) => {
                        let link = path.join_name(entry.name.as_bytes());
                        groups.entry(first.clone()).or_default().insert(link);
                    }
                    Child::Directory(_) | Child::Leaf(_) => {}
                }
            }
        }
        Self(groups)
    }

    /// The further paths of the file that is first at `first`, if it has any.
    fn further(&self, first: &TreePath) -> Option<&BTreeSet<TreePath>> {
        self.0.get(first)
    }
}

/// What becomes of a required file.
#[derive(Clone)]
enum Fate {
    /// It is the file that the sub has first at this path.
    Inode(TreePath),
    /// It is put in place as a new file.
    New,
}

struct Planner<'plan> {
    have: ScannedTree<'plan>,
    want: &'plan Tree,
    have_links: Links,
    want_links: Links,
    /// Of the required files that were looked at, by first path.
    fates: BTreeMap<TreePath, Fate>,
    /// First paths of the inodes that a required file keeps.
    claimed: BTreeSet<TreePath>,
    puts: Vec<Operation>,
    removals: Vec<TreePath>,
    blocked: Vec<Blocked>,
    /// The blocked paths where something new is required.
    unmade: BTreeSet<TreePath>,
}

/// A directory that is being walked: its entries on both sides.
struct Frame<'plan> {
    path: TreePath,
    have: &'plan [Entry],
    want: &'plan [Entry],
}

impl<'plan> Frame<'plan> {
    /// The next name, with what either side has there.
    fn next(&mut self) -> Option<(&'plan [u8], Option<&'plan Child>, Option<&'plan Child>)> {
        let name = match (self.have.first(), self.want.first()) {
            (None, None) => return None,
            (Some(entry), None) | (None, Some(entry)) => &entry.name,
            (Some(have), Some(want)) => (&have.name).min(&want.name),
        };
        let take = |side: &mut &'plan [Entry]| match side.split_first() {
            Some((first, rest)) if first.name == *name => {
                *side = rest;
                Some(&first.child)
            }
            _ => None,
        };
        let (have, want) = (take(&mut self.have), take(&mut self.want));
        Some((name.as_bytes(), have, want))
    }
}

impl<'plan> Planner<'plan> {
    fn walk(&mut self) {
        let (have, want) = (self.have.tree.root(), self.want.root());
        let root = TreePath::root();
        let mut stack: Vec<Frame<'plan>> = Vec::new();
        stack.extend(self.both_directories(&root, have, want));
        while let Some(frame) = stack.last_mut() {
            let Some((name, have, want)) = frame.next() else {
                stack.pop();
                continue;
            };
            let path = frame.path.join_name(name);
            stack.extend(self.pair(path, have, want));
        }
    }

    /// Plans one path; gives the frame for what lies below it.
    fn pair(
        &mut self,
        path: TreePath,
        have: Option<&'plan Child>,
        want: Option<&'plan Child>,
    ) -> Option<Frame<'plan>> {
        match (have, want) {
            (Some(Child::Directory(have)), Some(Child::Directory(want))) => {
                self.both_directories(&path, have, want)
            }
            (Some(have), None) => self.extra(path, have),
            (have, Some(Child::Directory(directory))) => {
                let node = Node::Directory(directory.metadata().clone());
                let put = match have {
                    None => (Action::Create(node), Difference::Missing),
                    Some(_) => (Action::Replace { node, displaced: Vec::new() }, Difference::Kind),
                };
                self.put(path.clone(), put.0, vec![put.1]);
                Some(Frame { path, have: &[], want: directory.entries() })
            }
            (Some(Child::Directory(directory)), Some(Child::Leaf(leaf))) => {
                self.displace(path, directory, leaf);
                None
            }
            (Some(Child::Leaf(have)), Some(Child::Leaf(want))) => {
                self.leaf(path, Some(have), want);
                None
            }
            (None, Some(Child::Leaf(want))) => {
                self.leaf(path, None, want);
                None
            }
            (None, None) => None,
        }
    }

    fn both_directories(
        &mut self,
        path: &TreePath,
        have: &'plan Directory,
        want: &'plan Directory,
    ) -> Option<Frame<'plan>> {
        if have.digest() == want.digest() && have.totals().hard_links == 0 {
            return None;
        }
        let reason = differences_of_metadata(have.metadata(), want.metadata());
        if !reason.is_empty() {
            let node = Node::Directory(want.metadata().clone());
            self.put(path.clone(), Action::Change(node), reason);
        }
        Some(Frame { path: path.clone(), have: have.entries(), want: want.entries() })
    }

    fn extra(&mut self, path: TreePath, have: &'plan Child) -> Option<Frame<'plan>> {
        match have {
            Child::Leaf(_) => {
                self.remove(path);
                None
            }
            Child::Directory(directory) => {
                if self.kept_below(&path).is_none() {
                    self.remove(path.clone());
                }
                Some(Frame { path, have: directory.entries(), want: &[] })
            }
        }
    }

    fn remove(&mut self, path: TreePath) {
        let refused = || self.have.refused.of_removal(&path, self.have.tree);
        match self.occupant(&path).or_else(refused) {
            Some(why) => self.blocked.push(Blocked { path, why }),
            None => self.removals.push(path),
        }
    }

    /// Returns why `path` cannot be moved, if the kernel uses it or anything below it.
    fn occupant(&self, path: &TreePath) -> Option<Obstacle> {
        let (used, occupant) = self.have.occupied.range(path.clone()..).next()?;
        used.starts_with(path).then(|| occupant.obstacle())
    }

    /// The first directory at or below `path` that holds kept content.
    fn kept_below(&self, path: &TreePath) -> Option<&'plan TreePath> {
        let next = self.have.kept_directories.range(path.clone()..).next();
        next.filter(|kept| kept.starts_with(path))
    }

    fn displace(&mut self, path: TreePath, directory: &'plan Directory, want: &Leaf) {
        let kept = self.kept_below(&path);
        let kept = kept.map(|kept| Obstacle::HoldsKept { directory: kept.clone() });
        if let Some(why) = kept.or_else(|| self.have.refused.of_removal(&path, self.have.tree)) {
            return self.block_new(path, why);
        }
        if let Some(node) = self.new_leaf(&path, want) {
            let displaced = paths_below(&path, directory);
            self.put(path, Action::Replace { node, displaced }, vec![Difference::Kind]);
        }
    }

    /// Notes that what is required at `path` is put there anew; `None` if it cannot be.
    fn new_leaf(&mut self, path: &TreePath, want: &Leaf) -> Option<Node> {
        match want {
            Leaf::Computed(computed) => {
                let why = Obstacle::NotComputed { source: computed.source.clone() };
                self.block_new(path.clone(), why);
                None
            }
            Leaf::File(_) => {
                self.fates.insert(path.clone(), Fate::New);
                Some(Node::Leaf(want.clone()))
            }
            Leaf::HardLink(_) | Leaf::Symlink(_) | Leaf::Special(_) => {
                Some(Node::Leaf(want.clone()))
            }
        }
    }

    fn leaf(&mut self, path: TreePath, have: Option<&Leaf>, want: &Leaf) {
        let reason = match (have, want) {
            (None, _) => vec![Difference::Missing],
            (Some(Leaf::Symlink(have)), Leaf::Symlink(want)) => differences_of_symlinks(have, want),
            (Some(Leaf::Special(have)), Leaf::Special(want)) => {
                let reason = differences_of_specials(have, want, self.have.times);
                let same_device =
                    !reason.iter().any(|one| matches!(one, Difference::Kind | Difference::Device));
                let shared = self.have.externally_linked.contains(&path);
                if same_device && !shared && !reason.is_empty() {
                    let node = Node::Leaf(Leaf::Special(want.clone()));
                    self.put(path, Action::Change(node), reason);
                    return;
                }
                reason
            }
            (Some(Leaf::File(_) | Leaf::HardLink(_)), Leaf::File(file)) => {
                return self.shared_file(path, have, file);
            }
            (Some(Leaf::File(_) | Leaf::HardLink(_)), Leaf::HardLink(first)) => {
                if let Fate::Inode(inode) = self.fate(first)
                    && self.inode_at(&path, have) == Some(inode)
                {
                    return;
                }
                vec![Difference::Links]
            }
            (Some(_), _) => vec![Difference::Kind],
        };
        if reason.is_empty() {
            return;
        }
        if let Some(node) = self.new_leaf(&path, want) {
            let action = match have {
                None => Action::Create(node),
                Some(_) => Action::Replace { node, displaced: Vec::new() },
            };
            self.put(path, action, reason);
        }
    }

    /// Decides about the required file `want`, first at `path`, where the sub has a regular file.
    fn shared_file(&mut self, path: TreePath, have: Option<&Leaf>, want: &File) {
        let inode = self.inode_at(&path, have);
        let file = inode.as_ref().and_then(|inode| self.have.tree.file(inode));
        let (Some(inode), Some(file)) = (inode, file) else {
            // A scan whose hard link leads nowhere: put the file there anew.
            let node = Node::Leaf(Leaf::File(want.clone()));
            self.fates.insert(path.clone(), Fate::New);
            let action = Action::Replace { node, displaced: Vec::new() };
            return self.put(path, action, vec![Difference::Links]);
        };
        let mut reason = differences_of_files(&file, want, self.have.times);
        let free = !self.is_claimed(&inode, &path);
        if reason.is_empty() && free {
            return self.keep(path, inode);
        }
        let same_links =
            inode == path && self.have_links.further(&inode) == self.want_links.further(&path);
        let in_place = free
            && same_links
            && !reason.contains(&Difference::Content)
            && !self.have.externally_linked.contains(&inode)
            && file.metadata.may_become(&want.metadata);
        let node = Node::Leaf(Leaf::File(want.clone()));
        if in_place {
            self.keep(path.clone(), inode);
            return self.put(path, Action::Change(node), reason);
        }
        if reason.is_empty() {
            reason.push(Difference::Links);
        }
        self.fates.insert(path.clone(), Fate::New);
        self.put(path, Action::Replace { node, displaced: Vec::new() }, reason);
    }

    fn keep(&mut self, path: TreePath, inode: TreePath) {
        self.claimed.insert(inode.clone());
        self.fates.insert(path, Fate::Inode(inode));
    }

    /// The first path of the regular file that the sub has at `path`.
    fn inode_at(&self, path: &TreePath, have: Option<&Leaf>) -> Option<TreePath> {
        match have? {
            Leaf::File(_) => Some(path.clone()),
            Leaf::HardLink(first) => Some(first.clone()),
            Leaf::Computed(_) | Leaf::Symlink(_) | Leaf::Special(_) => None,
        }
    }

    /// What was decided about the required file that is first at `first`. One that was not looked
    /// at is in a sub-tree that is equal on both sides, and stays.
    fn fate(&self, first: &TreePath) -> Fate {
        self.fates.get(first).cloned().unwrap_or_else(|| Fate::Inode(first.clone()))
    }

    /// True if another required file than the one first at `path` keeps `inode`.
    fn is_claimed(&self, inode: &TreePath, path: &TreePath) -> bool {
        if inode == path {
            return false;
        }
        let stays_unseen = || {
            let required = self.want.get(inode);
            matches!(required, Some(Child::Leaf(Leaf::File(_)))) && !self.fates.contains_key(inode)
        };
        self.claimed.contains(inode) || stays_unseen()
    }

    fn put(&mut self, path: TreePath, action: Action, reason: Vec<Difference>) {
        let (node, occupant) = match &action {
            Action::Create(node) => (node, None),
            Action::Replace { node, .. } => (node, self.occupant(&path)),
            Action::Change(node) => {
                if let Some(why) = self.have.refused.of_put(&path, node) {
                    // Its other names have the same metadata.
                    for link in self.have_links.further(&path).into_iter().flatten() {
                        let why = Obstacle::Needs { path: path.clone() };
                        self.blocked.push(Blocked { path: link.clone(), why });
                    }
                    return self.blocked.push(Blocked { path, why });
                }
                return self.puts.push(Operation { path, action, reason });
            }
            Action::Remove => unreachable!("what is removed is not put"),
        };
        match occupant.or_else(|| self.have.refused.of_put(&path, node)) {
            Some(why) => self.block_new(path, why),
            None => self.puts.push(Operation { path, action, reason }),
        }
    }

    /// Blocks `path`, where something new is required.
    fn block_new(&mut self, path: TreePath, why: Obstacle) {
        self.unmade.insert(path.clone());
        self.fates.insert(path.clone(), Fate::New);
        self.blocked.push(Blocked { path, why });
    }

    /// Blocks what is put below blocked directories, and links to blocked files.
    fn block_dependents(&mut self) {
        if self.unmade.is_empty() {
            return;
        }
        // In component order, so that a directory comes before what it holds, and a file before its
        // links.
        for operation in std::mem::take(&mut self.puts) {
            let is_unmade = |path: &TreePath| self.unmade.contains(path);
            let file = match &operation.action {
                Action::Create(Node::Leaf(Leaf::HardLink(first)))
                | Action::Replace { node: Node::Leaf(Leaf::HardLink(first)), .. } => Some(first),
                _ => None,
            };
            let needs = file.cloned().filter(is_unmade);
            match needs.or_else(|| operation.path.parent().filter(is_unmade)) {
                Some(path) => self.block_new(operation.path, Obstacle::Needs { path }),
                None => self.puts.push(operation),
            }
        }
    }

    /// Blocks the directories that are left alone even if no change of them is known.
    fn block_left_alone(&mut self) {
        for blocked in self.have.refused.left_alone() {
            let is_there = self.have.tree.get(&blocked.path).is_some();
            if is_there && self.blocked.iter().all(|known| known.path != blocked.path) {
                self.blocked.push(blocked);
            }
        }
    }
}

fn paths_below(path: &TreePath, directory: &Directory) -> Vec<TreePath> {
    let mut paths = Vec::new();
    let mut stack = vec![(path.clone(), directory.entries().iter())];
    while let Some((path, entries)) = stack.last_mut() {
        let Some(entry) = entries.next() else {
            stack.pop();
            continue;
        };
        let path = path.join_name(entry.name.as_bytes());
        paths.push(path.clone());
        if let Child::Directory(below) = &entry.child {
            stack.push((path, below.entries().iter()));
        }
    }
    paths
}

fn differences_of_metadata(have: &Metadata, want: &Metadata) -> Vec<Difference> {
    let mut found = Vec::new();
    let mut note = |differs: bool, difference: Difference| {
        if differs {
            found.push(difference);
        }
    };
    note(have.mode != want.mode, Difference::Mode);
    note((have.uid, have.gid) != (want.uid, want.gid), Difference::Owner);
    note(have.xattrs != want.xattrs, Difference::Xattrs);
    found
}

fn differences_of_files(have: &File, want: &File, times: TimePrecision) -> Vec<Difference> {
    let mut found = Vec::new();
    if (&have.object, have.size_bytes) != (&want.object, want.size_bytes) {
        found.push(Difference::Content);
    }
    found.extend(differences_of_metadata(&have.metadata, &want.metadata));
    if differs_in_time(have.mtime, want.mtime, times) {
        found.push(Difference::Mtime);
    }
    found
}

/// True if setting `want` would make another time of `have`.
fn differs_in_time(have: Time, want: Time, times: TimePrecision) -> bool {
    have != want && have != times.rounded(want)
}

fn differences_of_symlinks(have: &Symlink, want: &Symlink) -> Vec<Difference> {
    let mut found = differences_of_metadata(&have.metadata, &want.metadata);
    if have.target != want.target {
        found.insert(0, Difference::Target);
    }
    found
}

fn differences_of_specials(
    have: &Special,
    want: &Special,
    times: TimePrecision,
) -> Vec<Difference> {
    if std::mem::discriminant(&have.device) != std::mem::discriminant(&want.device) {
        return vec![Difference::Kind];
    }
    let mut found = Vec::new();
    if have.device != want.device {
        found.push(Difference::Device);
    }
    found.extend(differences_of_metadata(&have.metadata, &want.metadata));
    if differs_in_time(have.mtime, want.mtime, times) {
        found.push(Difference::Mtime);
    }
    found
}
