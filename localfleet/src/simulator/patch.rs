//! Applies plans to large trees in memory, and makes drift in them. Reads only the directories that
//! change.
//!
//! Uses [`model::plan::apply()`] on a tree in which each directory that the plan does not touch is
//! replaced by an empty one. Otherwise ten thousand machines of 40,000 files would take too long.
// tidy: core

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use model::path::TreePath;
use model::plan::{Action, ApplyError, Plan, apply};
use model::tree::{Child, Directory, Entry, File, Leaf, Node, Tree, TreeError};

/// Directories that were replaced by empty ones, by path.
type Replaced = BTreeMap<TreePath, Arc<Directory>>;

/// Applies `plan` to `have` and returns the resulting tree, which shares unchanged directories with
/// `have`.
///
/// A tree with hard links is patched as a whole, because a link may lead anywhere.
///
/// # Errors
///
/// As [`apply()`].
pub fn patched(have: &Tree, plan: &Plan) -> Result<Tree, ApplyError> {
    let links = |operation: &model::plan::Operation| {
        let (Action::Create(node) | Action::Replace { node, .. }) = &operation.action else {
            return false;
        };
        matches!(node, Node::Leaf(Leaf::HardLink(_)))
    };
    if have.root().totals().hard_links > 0 || plan.operations.iter().any(links) {
        return apply(have, plan);
    }
    let mut touched = BTreeSet::new();
    for operation in &plan.operations {
        touched.extend(operation.path.ancestors());
        if let Action::Replace { displaced, .. } = &operation.action {
            touched.extend(displaced.iter().cloned());
        }
    }
    let tree = |source| ApplyError::Tree { source };
    let mut replaced = Replaced::new();
    let small =
        without_untouched(have.root(), &TreePath::root(), &touched, &mut replaced).map_err(tree)?;
    let small = apply(&Tree::new(Arc::new(small)), plan)?;
    let whole = with_untouched(small.root(), &TreePath::root(), &replaced).map_err(tree)?;
    Ok(Tree::new(Arc::new(whole)))
}

/// Returns `directory`, which is at `path`, with empty directories in place of those that are not
/// `touched`.
fn without_untouched(
    directory: &Directory,
    path: &TreePath,
    touched: &BTreeSet<TreePath>,
    replaced: &mut Replaced,
) -> Result<Directory, TreeError> {
    changed(directory, |entry, below| {
        let at = path_of(path, entry);
        if touched.contains(&at) {
            return without_untouched(below, &at, touched, replaced).map(Arc::new);
        }
        replaced.insert(at, Arc::clone(below));
        let algorithm = below.digest().algorithm();
        Directory::new(algorithm, below.metadata().clone(), Vec::new()).map(Arc::new)
    })
}

/// Undoes [`without_untouched`].
fn with_untouched(
    directory: &Directory,
    path: &TreePath,
    replaced: &Replaced,
) -> Result<Directory, TreeError> {
    changed(directory, |entry, below| {
        let at = path_of(path, entry);
        match replaced.get(&at) {
            Some(whole) => Ok(Arc::clone(whole)),
            None => with_untouched(below, &at, replaced).map(Arc::new),
        }
    })
}

/// Returns the path of `entry` in the directory at `path`.
fn path_of(path: &TreePath, entry: &Entry) -> TreePath {
    path.join(entry.name.as_bytes()).expect("the name of an entry is valid")
}

/// Returns `directory` after `change` to each of its sub-directories.
fn changed(
    directory: &Directory,
    mut change: impl FnMut(&Entry, &Arc<Directory>) -> Result<Arc<Directory>, TreeError>,
) -> Result<Directory, TreeError> {
    let mut entries = Vec::with_capacity(directory.entries().len());
    for entry in directory.entries() {
        let child = match &entry.child {
            Child::Directory(below) => Child::Directory(change(entry, below)?),
            Child::Leaf(leaf) => Child::Leaf(leaf.clone()),
        };
        entries.push(Entry { name: entry.name.clone(), child });
    }
    Directory::new(directory.digest().algorithm(), directory.metadata().clone(), entries)
}

/// Returns `tree` with other content in the file that `chance` chooses; `None` if it has no file.
pub fn drifted(tree: &Tree, chance: u64) -> Option<Tree> {
    with_one_file(tree, chance, &mut |file| {
        file.object = file.object.id().algorithm().digest(&chance.to_le_bytes()).into();
        file.mtime.seconds += 1;
    })
}

/// Returns `tree` after `change` to the file that `chance` chooses; `None` if it has no file.
pub fn with_one_file(tree: &Tree, chance: u64, change: &mut dyn FnMut(&mut File)) -> Option<Tree> {
    Some(Tree::new(Arc::new(with_one_file_below(tree.root(), chance, change)?)))
}

fn with_one_file_below(
    directory: &Directory,
    chance: u64,
    change: &mut dyn FnMut(&mut File),
) -> Option<Directory> {
    let count = directory.entries().len();
    let algorithm = directory.digest().algorithm();
    // The upper bits choose here; sub-directories get other bits.
    let start = usize::try_from(chance >> 33).ok()?.checked_rem(count)?;
    let below = chance.wrapping_mul(0x2545_f491_4f6c_dd1d) ^ (chance >> 29);
    let (at, child) = (start..count).chain(0..start).find_map(|at| {
        let child = match &directory.entries()[at].child {
            Child::Directory(inner) => {
                Child::Directory(Arc::new(with_one_file_below(inner, below, change)?))
            }
            Child::Leaf(Leaf::File(file)) => {
                let mut file = file.clone();
                change(&mut file);
                Child::Leaf(Leaf::File(file))
            }
            Child::Leaf(_) => return None,
        };
        Some((at, child))
    })?;
    let mut entries = directory.entries().to_vec();
    entries[at].child = child;
    Directory::new(algorithm, directory.metadata().clone(), entries).ok()
}

/// Returns the directories of `tree` that are neither `known` nor below a known one, by digest.
pub fn own_directories(
    tree: &Tree,
    known: impl Fn(&Directory) -> bool,
) -> BTreeMap<model::object::ObjectId, Arc<Directory>> {
    let mut own = BTreeMap::new();
    let mut stack = vec![tree.root()];
    while let Some(directory) = stack.pop() {
        if known(directory) || own.insert(directory.digest(), Arc::clone(directory)).is_some() {
            continue;
        }
        stack.extend(directory.entries().iter().filter_map(|entry| match &entry.child {
            Child::Directory(below) => Some(below),
            Child::Leaf(_) => None,
        }));
    }
    own
}

#[cfg(test)]
mod tests {
    use super::*;
    use model::object::Algorithm;
    use model::plan::{RefusedChanges, ScannedTree, plan};
    use model::tree::text::from_text;
    use std::fmt::Write as _;

    fn file(path: &str, content: &str) -> String {
        let object = Algorithm::Blake3.digest(content.as_bytes());
        format!("f 644 0:0 1.000000000 {} {object} {path}\n", content.len())
    }

    fn tree(version: u32) -> String {
        let mut text = String::new();
        for directory in ["/bin", "/etc", "/etc/app", "/lib", "/lib/deep", "/lib/deep/er"] {
            writeln!(text, "d 755 0:0 {directory}").unwrap();
            for number in 0..5 {
                text += &file(&format!("{directory}/file-{number}"), &format!("{number}"));
            }
        }
        match version {
            1 => text + "l 0:0 /opt -> lib\n" + &file("/srv", "a file"),
            2 => text + "d 700 0:0 /opt\nd 755 0:0 /opt/x\n" + &file("/opt/x/y", "new"),
            _ => text + &file("/etc/app/one", "links") + "h /lib/two -> /etc/app/one\n",
        }
    }

    fn plan_of(have: &Tree, want: &Tree) -> Plan {
        let (kept, linked, occupied) = (BTreeSet::new(), BTreeSet::new(), BTreeMap::new());
        let have = ScannedTree {
            tree: have,
            kept_directories: &kept,
            externally_linked: &linked,
            occupied: &occupied,
            refused: &RefusedChanges::default(),
            times: model::tree::TimePrecision::default(),
        };
        plan(&have, want)
    }

    #[test]
    fn a_patched_tree_is_the_one_that_is_planned_for() {
        let mut trees: Vec<Tree> =
            (1..=3).map(|version| from_text(Algorithm::Blake3, &tree(version)).unwrap()).collect();
        let fewer: String = tree(1)
            .lines()
            .filter(|line| !line.contains("/lib"))
            .fold(String::new(), |all, line| all + line + "\n");
        trees.push(from_text(Algorithm::Blake3, &fewer).unwrap());
        trees.push(drifted(&trees[0], 0xdead_beef_1234_5678).unwrap());
        for have in &trees {
            for want in &trees {
                let plan = plan_of(have, want);
                assert_eq!(patched(have, &plan), Ok(want.clone()));
                assert_eq!(apply(have, &plan), Ok(want.clone()));
            }
        }
    }

    #[test]
    fn a_plan_for_another_tree_does_not_fit() {
        let one = from_text(Algorithm::Blake3, &tree(1)).unwrap();
        let two = from_text(Algorithm::Blake3, &tree(2)).unwrap();
        let plan = plan_of(&one, &two);
        assert_eq!(patched(&two, &plan), apply(&two, &plan));
        assert!(patched(&two, &plan).is_err());
    }

    #[test]
    fn drift_is_one_file_and_shares_the_rest() {
        let one = from_text(Algorithm::Blake3, &tree(1)).unwrap();
        let mut seen = BTreeSet::new();
        for chance in 0..100_u64 {
            let chance = (chance + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let drifted = drifted(&one, chance).unwrap();
            let plan = plan_of(&drifted, &one);
            assert_eq!(plan.operations.len(), 1, "{plan:?}");
            seen.insert(plan.operations[0].path.clone());
            let common = own_directories(&one, |_| false);
            let own =
                own_directories(&drifted, |directory| common.contains_key(&directory.digest()));
            assert!((1..=4).contains(&own.len()), "{}", own.len());
        }
        assert!(seen.len() > 10, "{seen:?}");
        assert_eq!(drifted(&Tree::empty(Algorithm::Blake3), 7), None);
    }
}
