//! A directory that is being walked.

use std::iter::Peekable;
use std::sync::Arc;
use std::vec::IntoIter;

use model::path::TreePath;
use model::tree::{Entry, Xattrs};

use crate::root::{Directory, Root, Status};
use crate::scan::known_entries::{KnownDirectory, KnownEntry, Stamp};

/// A directory of whose entries some are read.
pub struct DirectoryWalk {
    /// Its name in its parent.
    pub name: Box<[u8]>,
    pub path: TreePath,
    /// How many directories are above it.
    pub depth: usize,
    /// `None` while the walk is far below.
    pub directory: Option<Directory>,
    /// Its status when it was opened.
    pub status: Status,
    pub stamp: Stamp,
    pub xattrs: Xattrs,
    /// The directory of the last complete pass.
    pub built: Option<Arc<model::tree::Directory>>,
    /// The names still to be read, sorted.
    pub names: IntoIter<Box<[u8]>>,
    /// What the last pass left of the entries from here on, sorted by name.
    before: Peekable<IntoIter<(Box<[u8]>, KnownEntry)>>,
    /// The entries that were recorded, sorted by name.
    pub entries: Vec<Entry>,
    /// What is left for the next pass, sorted by name.
    pub after: Vec<(Box<[u8]>, KnownEntry)>,
    /// True if it has content that is not recorded.
    pub kept: bool,
}

impl DirectoryWalk {
    /// Starts with the attributes and the sorted names of the directory.
    pub fn new(
        directory: Directory,
        status: Status,
        stamp: Stamp,
        name: Box<[u8]>,
        depth: usize,
        (xattrs, names): (Xattrs, Vec<Box<[u8]>>),
        former: Option<KnownDirectory>,
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

    /// Takes what the last pass left of `name`. Names are requested in order.
    pub fn recall(&mut self, name: &[u8]) -> Option<KnownEntry> {
        while self.before.next_if(|(former, _)| &former[..] < name).is_some() {}
        self.before.next_if(|(former, _)| &former[..] == name).map(|(_, memory)| memory)
    }

    /// Opens the directory again if it was closed. It must be the same.
    ///
    /// # Errors
    ///
    /// The text says why the walk cannot continue.
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
            Err(error) => Err(model::display::error_chain(&error)),
        }
    }
}

/// Returns what a walk that ends early leaves: what it has read of each open directory, and for the
/// rest what was known before.
pub fn collapse(mut stack: Vec<DirectoryWalk>) -> Option<KnownDirectory> {
    let mut below: Option<(Box<[u8]>, KnownDirectory)> = None;
    while let Some(directory_walk) = stack.pop() {
        let mut entries = directory_walk.after;
        if let Some((name, memory)) = below {
            entries.push((name, KnownEntry::Directory(Box::new(memory))));
        }
        entries.extend(directory_walk.before);
        let memory = KnownDirectory {
            stamp: directory_walk.stamp,
            xattrs: directory_walk.xattrs,
            built: directory_walk.built,
            entries,
        };
        below = Some((directory_walk.name, memory));
    }
    below.map(|(_, memory)| memory)
}
