//! The computed files of one machine, and the tree of its image with their content filled in.

use std::sync::Arc;

use super::ComputedRule;
use crate::object::CompactId;
use crate::path::TreePath;
use crate::tree::{Child, Computed, Directory, Entry, File, Leaf, Time, Tree, TreeError};

/// A computed file whose content for one machine is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ComputedFile {
    pub rule: Arc<ComputedRule>,
    pub object: CompactId,
    pub size_bytes: u64,
    /// When the content became known: the modification time of a file that gets it.
    pub since: Time,
}

/// Why the content of a computed file is not known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unknown {
    pub rule: Arc<ComputedRule>,
    pub why: Arc<str>,
}

/// The computed files of one machine whose content is known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ComputedFiles {
    /// Sorted by rule.
    files: Box<[ComputedFile]>,
}

impl ComputedFiles {
    /// Takes files with different rules.
    #[must_use]
    pub fn new(mut files: Vec<ComputedFile>) -> Self {
        files.sort_by(|one, other| one.rule.cmp(&other.rule));
        Self { files: files.into_boxed_slice() }
    }

    /// Returns the files, sorted by path.
    pub fn iter(&self) -> impl Iterator<Item = &ComputedFile> {
        self.files.iter()
    }

    /// Returns the file at `path` that comes from `source`, `host:port` of a filegen-server.
    #[must_use]
    pub fn get(&self, path: &TreePath, source: &str) -> Option<&ComputedFile> {
        let key = |file: &ComputedFile| {
            file.rule.path.cmp(path).then_with(|| file.rule.source.as_str().cmp(source))
        };
        self.files.binary_search_by(key).ok().map(|index| &self.files[index])
    }
}

/// Returns `want` with the content of its computed files. A file that has its content already keeps
/// its modification time. A computed file that is not among `files` stays as the machine has it; if
/// it has none, the file is not filled in. Directories without computed files are shared.
///
/// # Errors
///
/// None for a tree that [`Tree::verify`] accepts.
pub fn fill_in(want: &Tree, files: &ComputedFiles, have: &Tree) -> Result<Tree, TreeError> {
    if want.root().totals().computed == 0 {
        return Ok(want.clone());
    }
    let fill = Fill { files, have };
    Ok(Tree::new(fill.directory(&TreePath::root(), want.root())?))
}

struct Fill<'a> {
    files: &'a ComputedFiles,
    have: &'a Tree,
}

impl Fill<'_> {
    fn directory(
        &self,
        path: &TreePath,
        want: &Arc<Directory>,
    ) -> Result<Arc<Directory>, TreeError> {
        let mut entries = want.entries().to_vec();
        for Entry { name, child } in &mut entries {
            let path = || path.join_name(name.as_bytes());
            match child {
                Child::Directory(below) if below.totals().computed > 0 => {
                    *child = Child::Directory(self.directory(&path(), below)?);
                }
                Child::Leaf(Leaf::Computed(computed)) => {
                    if let Some(file) = self.file(&path(), computed) {
                        *child = Child::Leaf(Leaf::File(file));
                    }
                }
                Child::Directory(_) | Child::Leaf(_) => {}
            }
        }
        let algorithm = want.digest().algorithm();
        Ok(Arc::new(Directory::new(algorithm, want.metadata().clone(), entries)?))
    }

    /// Returns the file with its content; `None` if that is not known.
    fn file(&self, path: &TreePath, computed: &Computed) -> Option<File> {
        let algorithm = self.have.algorithm();
        let known = self.files.get(path, &computed.source);
        let known = known.filter(|file| file.object.id().algorithm() == algorithm);
        let present = self.have.file(path);
        let (object, size_bytes, mtime) = match (known, present) {
            (Some(known), Some(present)) if known.object == present.object => {
                (present.object, present.size_bytes, present.mtime)
            }
            (Some(known), _) => (known.object.clone(), known.size_bytes, known.since),
            (None, Some(present)) => (present.object, present.size_bytes, present.mtime),
            (None, None) => return None,
        };
        Some(File { metadata: computed.metadata.clone(), mtime, size_bytes, object })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::object::Algorithm;
    use crate::tree::text::{from_text, to_text};

    fn tree(text: &str) -> Tree {
        let text = ["one", "two"].iter().fold(text.to_owned(), |text, content| {
            let id = Algorithm::Blake3.digest(content.as_bytes()).to_string();
            text.replace(&content.to_uppercase(), &id)
        });
        from_text(Algorithm::Blake3, &text).unwrap()
    }

    fn file(path: &str, source: &str, content: &str) -> ComputedFile {
        let rule = ComputedRule { path: TreePath::new(path).unwrap(), source: source.to_owned() };
        ComputedFile {
            rule: Arc::new(rule),
            object: Algorithm::Blake3.digest(content.as_bytes()).into(),
            size_bytes: 3,
            since: Time { seconds: 9, nanoseconds: 0 },
        }
    }

    const WANT: &str = "\
d 755 0:0 /
d 755 0:0 /a
g 600 0:7 files:1 /a/x
d 755 0:0 /b
f 644 0:0 1.000000000 3 ONE /b/plain
g 644 0:0 files:1 /y
g 644 0:0 files:1 /z
";

    #[test]
    fn known_content_is_filled_in_and_unknown_content_stays() {
        let have = "\
d 755 0:0 /
d 755 0:0 /a
f 644 0:0 4.000000000 3 ONE /a/x
f 644 0:0 5.000000000 3 TWO /y
";
        let sha = Algorithm::Sha512.digest(b"two").into();
        let other_algorithm = ComputedFile { object: sha, ..file("/z", "files:1", "two") };
        let table = [
            // Nothing is known: what the machine has stays, with the metadata of the image.
            (vec![], "4.000000000 3 ONE /a/x", "5.000000000 3 TWO /y"),
            // Of another server.
            (
                vec![file("/a/x", "files:2", "two")],
                "4.000000000 3 ONE /a/x",
                "5.000000000 3 TWO /y",
            ),
            // The machine has one of them; the other is new.
            (
                vec![file("/y", "files:1", "one"), file("/a/x", "files:1", "one"), other_algorithm],
                "4.000000000 3 ONE /a/x",
                "9.000000000 3 ONE /y",
            ),
        ];
        let want = tree(WANT);
        for (files, x, y) in table {
            let filled = fill_in(&want, &ComputedFiles::new(files), &tree(have)).unwrap();
            let expected = WANT
                .replace("g 600 0:7 files:1 /a/x", &format!("f 600 0:7 {x}"))
                .replace("g 644 0:0 files:1 /y", &format!("f 644 0:0 {y}"));
            assert_eq!(to_text(&filled), to_text(&tree(&expected)));
            let b = |tree: &Tree| match tree.get(&TreePath::new("/b").unwrap()) {
                Some(Child::Directory(directory)) => directory,
                other => panic!("{other:?}"),
            };
            assert!(Arc::ptr_eq(&b(&filled), &b(&want)), "untouched directories are shared");
        }
    }
}
