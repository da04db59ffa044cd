//! A directory in the middle of its walk.

use std::iter::Peekable;
use std::sync::Arc;
use std::vec::IntoIter;

use model::path::TreePath;
use model::tree::{Entry, Xattrs};

use crate::root::{Directory, Root, Status};
use crate::scan::memory::{DirectoryMemory, Memory, Stamp};

/// A directory some of whose entries are read.
pub struct Frame {
    /// Its name in its parent.
    pub name: Box<[u8]>,
    pub path: TreePath,
    /// How many directories are above it.
    pub depth: usize,
    /// The open directory; `None` while the walk is far below.
    pub directory: Option<Directory>,
    /// What it was when it was opened.
    pub status: Status,
    pub stamp: Stamp,
    pub xattrs: Xattrs,
    /// What the last complete pass made of it.
    pub built: Option<Arc<model::tree::Directory>>,
    /// The names still to be read, sorted.
    pub names: IntoIter<Box<[u8]>>,
    /// What the last pass left about entries from here on, sorted by name.
    before: Peekable<IntoIter<(Box<[u8]>, Memory)>>,
    /// The entries that were recorded, sorted by name.
    pub entries: Vec<Entry>,
    /// What to leave to the next pass about them, sorted by name.
    pub after: Vec<(Box<[u8]>, Memory)>,
    /// True if it holds something that is not recorded.
    pub kept: bool,
}

impl Frame {
    /// Starts on a directory with its attributes and its sorted names.
    pub fn new(
        directory: Directory,
        status: Status,
        stamp: Stamp,
        name: Box<[u8]>,
        depth: usize,
        (xattrs, names): (Xattrs, Vec<Box<[u8]>>),
        former: Option<DirectoryMemory>,
    ) -> Self {
        let (built, before) = match former {
            Some(former) => (former.built, former.entries),
            None => (None, Vec::new()),
        };
        Self {
            name,
            path: directory.path().clone(),
            depth,
            directory: Some(directory),
            status,
            stamp,
            xattrs,
            built,
            entries: Vec::with_capacity(names.len()),
            after: Vec::with_capacity(names.len()),
            names: names.into_iter(),
            before: before.into_iter().peekable(),
            kept: false,
        }
    }

    /// Takes what the last pass left about `name`; names are asked for in order.
    pub fn recall(&mut self, name: &[u8]) -> Option<Memory> {
        while self.before.next_if(|(former, _)| &former[..] < name).is_some() {}
        self.before.next_if(|(former, _)| &former[..] == name).map(|(_, memory)| memory)
    }

    /// Opens the directory again if it was closed meanwhile; it must be the same.
    ///
    /// # Errors
    ///
    /// Says why it cannot be gone on with.
    pub fn reopen(&mut self, root: &Root) -> Result<(), String> {
        if self.directory.is_some() {
            return Ok(());
        }
        let reopened = root.directory(&self.path).and_then(|directory| {
            let status = directory.status()?;
            Ok((directory, status))
        });
        match reopened {
            Ok((directory, status))
                if status.inode == self.status.inode
                    && status.filesystem == self.status.filesystem =>
            {
                self.directory = Some(directory);
                Ok(())
            }
            Ok(_) => Err("it was replaced while it was scanned".to_owned()),
            Err(error) => Err(model::report::report(&error)),
        }
    }
}

/// What a walk that ends early leaves: of each open directory what it read, and for the rest what
/// was known before.
pub fn collapse(mut stack: Vec<Frame>) -> Option<DirectoryMemory> {
    let mut below: Option<(Box<[u8]>, DirectoryMemory)> = None;
    while let Some(frame) = stack.pop() {
        let mut entries = frame.after;
        if let Some((name, memory)) = below {
            entries.push((name, Memory::Directory(Box::new(memory))));
        }
        entries.extend(frame.before);
        let memory = DirectoryMemory {
            stamp: frame.stamp,
            xattrs: frame.xattrs,
            built: frame.built,
            entries,
        };
        below = Some((frame.name, memory));
    }
    below.map(|(_, memory)| memory)
}
