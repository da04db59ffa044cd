//! The content pass: hashes every file whatever its metadata says, one chunk at a time.
//!
//! It changes nothing. Where a file holds something else than the tree says, a metadata pass is to
//! read that file again.

use std::time::{Duration, Instant};

use common::path::TreePath;
use common::scope::Attributes;
use common::tree::{Child, Leaf, Tree};

use super::counters::Counters;
use super::order::file_after;
use super::reading::Reading;
use crate::root::{Directory, Root};

/// What came of one chunk of work.
pub enum Step {
    /// There is more to do.
    More,
    /// The file at that path does not hold what the tree says.
    Differs(TreePath),
    /// All files were read; it took so long.
    End(Duration),
}

/// A file in the middle of being read.
struct Current {
    directory: Directory,
    reading: Reading,
}

/// A content pass that is under way.
pub struct ContentPass {
    started: Instant,
    /// The last file that is done.
    last: Option<TreePath>,
    current: Option<(TreePath, Current)>,
}

impl Default for ContentPass {
    fn default() -> Self {
        Self { started: Instant::now(), last: None, current: None }
    }
}

impl ContentPass {
    /// Closes the file that is being read; it is read from its start next time.
    pub fn leave(&mut self) {
        self.current = None;
    }

    /// Reads one chunk, or opens or ends one file, of the newest `tree`.
    pub fn step(
        &mut self,
        root: &Root,
        tree: &Tree,
        buffer: &mut [u8],
        counters: &Counters,
    ) -> Step {
        let Some((path, mut current)) = self.current.take() else {
            let Some((path, _)) = file_after(tree, self.last.as_ref()) else {
                return Step::End(self.started.elapsed());
            };
            match open(root, tree, &path) {
                Some(current) => self.current = Some((path, current)),
                // It went, or cannot be read: the metadata pass reports that.
                None => self.last = Some(path),
            }
            return Step::More;
        };
        match current.reading.step(buffer) {
            Ok(0) => {}
            Ok(length) => {
                counters.add_hashed(length);
                self.current = Some((path, current));
                return Step::More;
            }
            Err(_) => {
                // An error of the medium: the metadata pass reports it when it reads the file.
                self.last = Some(path.clone());
                return Step::Differs(path);
            }
        }
        self.last = Some(path.clone());
        let Current { directory, reading } = current;
        match reading.finish(&directory, path.name(), Attributes::Basic) {
            Ok(was)
                if was.stable && object_at(tree, &path).is_some_and(|said| said != was.object) =>
            {
                Step::Differs(path)
            }
            // A file that changes is the business of the metadata pass.
            Ok(_) | Err(_) => Step::More,
        }
    }
}

fn open(root: &Root, tree: &Tree, path: &TreePath) -> Option<Current> {
    let (directory, name) = root.parent(path).ok()?;
    let reading = Reading::start(&directory, name, tree.algorithm()).ok()?;
    Some(Current { directory, reading })
}

fn object_at(tree: &Tree, path: &TreePath) -> Option<common::object::ObjectId> {
    match tree.get(path)? {
        Child::Leaf(Leaf::File(file)) => Some(file.object),
        Child::Leaf(_) | Child::Directory(_) => None,
    }
}
