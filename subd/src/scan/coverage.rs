//! Decides which paths a scan records, and in which order the content pass visits the files.
// tidy: core

use std::sync::Arc;

use model::filter::Patterns;
use model::path::TreePath;
use model::scope::{Coverage, ScanSettings};

use crate::root::subd_directory;
use model::tree::{Child, Directory, File, Leaf, Tree};

/// The action of a scan for a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathAction {
    /// Records it, and enters it if it is a directory.
    Record,
    /// Does not read it, and marks its directory as one with kept content.
    Keep,
    /// Does not read it: it is subd's own.
    Ignore,
}

/// The paths that a scan under some settings records.
#[derive(Clone, Debug)]
pub struct PathCoverage {
    settings: Arc<ScanSettings>,
    exclusions: Patterns,
    subd_directory: TreePath,
}

impl PathCoverage {
    /// Covers what `settings` cover, without the local `exclusions`.
    pub fn new(settings: Arc<ScanSettings>, exclusions: Patterns) -> Self {
        Self { settings, exclusions, subd_directory: subd_directory() }
    }

    /// The settings.
    pub fn settings(&self) -> &ScanSettings {
        &self.settings
    }

    /// Decides on `path`, whose parent is recorded.
    pub fn action(&self, path: &TreePath) -> PathAction {
        if *path == self.subd_directory {
            return PathAction::Ignore;
        }
        let is_kept = self.exclusions.matches(path)
            || match &self.settings.coverage {
                Coverage::Full(filter) => filter.keeps_below_unkept(path),
                Coverage::Paths(paths) => !paths.contains(path),
            };
        if is_kept { PathAction::Keep } else { PathAction::Record }
    }
}

/// Returns the first regular file after `path` in component order, or the first of all. Costs a
/// binary search for each level of `path`, and one step for each entry that it skips.
pub fn file_after(tree: &Tree, path: Option<&TreePath>) -> Option<(TreePath, File)> {
    // The directories above `path`, each with the position of the next entry.
    let mut open: Vec<(TreePath, &Directory, usize)> = Vec::new();
    let mut directory: &Directory = tree.root();
    let mut place = TreePath::root();
    for component in path.iter().flat_map(|path| path.components()) {
        let entries = directory.entries();
        match entries.binary_search_by(|entry| entry.name.as_bytes().cmp(component)) {
            Ok(index) => {
                open.push((place.clone(), directory, index + 1));
                let Child::Directory(below) = &entries[index].child else { break };
                place = place.join(component).expect("names of a tree are names");
                directory = below;
            }
            Err(index) => {
                open.push((place.clone(), directory, index));
                break;
            }
        }
    }
    // The path itself may be a directory now, whose files follow it.
    if path.is_none_or(|path| *path == place) {
        open.push((place, directory, 0));
    }
    while let Some((place, directory, index)) = open.pop() {
        let Some(entry) = directory.entries().get(index) else { continue };
        open.push((place, directory, index + 1));
        let place = &open.last().expect("it was just pushed").0;
        let path = place.join(entry.name.as_bytes()).expect("names of a tree are names");
        match &entry.child {
            Child::Leaf(Leaf::File(file)) => return Some((path, file.clone())),
            Child::Directory(below) => open.push((path, below, 0)),
            Child::Leaf(_) => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use model::filter::Filter;

    use super::*;

    fn look(coverage: Coverage, exclusions: &[&str], path: &str) -> PathAction {
        let settings = Arc::new(ScanSettings { coverage, ..ScanSettings::default() });
        let exclusions = Patterns::new(exclusions).unwrap();
        PathCoverage::new(settings, exclusions).action(&path.parse().unwrap())
    }

    #[test]
    fn sees_what_is_covered() {
        let full = Coverage::Full(Filter::new(["/var/log/.*", "/home"]).unwrap());
        let listed = ["/", "/etc", "/etc/motd"].map(|path| path.parse().unwrap());
        let sparse = Coverage::Paths(listed.into());
        #[rustfmt::skip]
        let table = [
            (&full, "/etc", PathAction::Record), (&full, "/var/log", PathAction::Record),
            (&full, "/var/log/x", PathAction::Keep), (&full, "/home", PathAction::Keep),
            (&full, "/etc/local", PathAction::Keep), (&full, "/.subd", PathAction::Ignore),
            (&full, "/a/.subd", PathAction::Record), (&sparse, "/etc", PathAction::Record),
            (&sparse, "/etc/motd", PathAction::Record), (&sparse, "/etc/passwd", PathAction::Keep),
            (&sparse, "/usr", PathAction::Keep), (&sparse, "/.subd", PathAction::Ignore),
        ];
        for (coverage, path, expected) in table {
            assert_eq!(look(coverage.clone(), &["/etc/local"], path), expected, "{path}");
        }
    }
}

#[cfg(test)]
mod file_order_tests {
    use model::object::Algorithm;
    use model::tree::{Metadata, Node, TreeBuilder};

    use super::*;

    fn tree(files: &[&str], directories: &[&str]) -> Tree {
        let mut builder = TreeBuilder::new(Algorithm::Blake3);
        for path in directories {
            let node = Node::Directory(Metadata::new(0o755, 0, 0));
            builder.insert(path.parse().unwrap(), node).unwrap();
        }
        for path in files {
            let file = File {
                metadata: Metadata::new(0o644, 0, 0),
                mtime: Default::default(),
                size_bytes: 0,
                object: Algorithm::Blake3.digest(b"").into(),
            };
            builder.insert(path.parse().unwrap(), Node::Leaf(Leaf::File(file))).unwrap();
        }
        builder.finish().unwrap()
    }

    #[test]
    fn visits_every_file_once_in_component_order() {
        let files = ["/a/b/c", "/a/b/d", "/a/x", "/a-b", "/z/y"];
        let tree = tree(&files, &["/a", "/a/b", "/e", "/z"]);
        let mut seen = Vec::new();
        let mut last = None;
        while let Some((path, _)) = file_after(&tree, last.as_ref()) {
            seen.push(path.to_string());
            last = Some(path);
        }
        assert_eq!(seen, files);
    }

    #[test]
    fn goes_on_where_the_path_is_gone_or_is_something_else() {
        let tree = tree(&["/a/f", "/c", "/d/f", "/d/g"], &["/a", "/d"]);
        #[rustfmt::skip]
        let table = [
            ("/a", Some("/a/f")), ("/a/g", Some("/c")), ("/b/x/y", Some("/c")),
            ("/c/x", Some("/d/f")), ("/d/f/x", Some("/d/g")), ("/d/g", None), ("/e", None),
            ("/", Some("/a/f")),
        ];
        for (from, next) in table {
            let from: TreePath = from.parse().unwrap();
            let got = file_after(&tree, Some(&from)).map(|(path, _)| path.to_string());
            assert_eq!(got.as_deref(), next, "{from}");
        }
    }
}
