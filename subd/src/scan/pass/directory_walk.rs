//! A directory that is being walked.

use std::iter::Peekable;
use std::sync::Arc;
use std::vec::IntoIter;

use model::path::TreePath;
use model::tree::{Child, Entry, Name, Xattrs};

use crate::root::{Directory, Root, Status};
use crate::scan::known_entries::{
    KnownDirectory, KnownEntries, KnownEntry, Mark, RecordedEntries, Stamp,
};

/// A directory of whose entries some are read.
pub struct DirectoryWalk {
    /// Its name in its parent; the root has none.
    pub name: Option<Name>,
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
    built: Option<Arc<model::tree::Directory>>,
    /// The names still to be read, sorted.
    pub names: IntoIter<Box<[u8]>>,
    /// What the last pass left of the entries from here on.
    former: FormerEntries,
    /// The entries that were recorded, sorted by name.
    pub entries: RecordedEntries,
    /// What else is known of these, for the next pass.
    pub marks: Vec<Mark>,
    /// True if it has content that is not recorded.
    pub kept: bool,
    /// True if it has too many entries: none is read.
    pub is_left_alone: bool,
}

/// The entries of a directory.
pub struct Listing {
    /// The names of those that are recorded, sorted.
    pub names: Vec<Box<[u8]>>,
    /// True if there are others, which the machine keeps.
    pub is_kept: bool,
    /// True if there are too many.
    pub is_left_alone: bool,
}

impl DirectoryWalk {
    /// Starts with the attributes and the entries of the directory.
    pub fn new(
        directory: Directory,
        status: Status,
        stamp: Stamp,
        name: Option<Name>,
        depth: usize,
        (xattrs, listing): (Xattrs, Listing),
        former: Option<KnownDirectory>,
    ) -> Self {
        let Listing { names, is_kept, is_left_alone } = listing;
        let (built, entries) = match former {
            Some(former) => (former.built, former.entries),
            None => (None, KnownEntries::Named(Vec::new())),
        };
        Self {
            name,
            path: directory.path().clone(),
            depth,
            directory: Some(directory),
            status,
            stamp,
            xattrs,
            former: FormerEntries::new(entries, built.as_ref()),
            entries: RecordedEntries::new(built.clone(), names.len()),
            built,
            marks: Vec::with_capacity(names.len()),
            names: names.into_iter(),
            kept: is_kept,
            is_left_alone,
        }
    }

    /// Takes what the last pass left of `name`. Names are requested in order.
    pub fn recall(&mut self, name: &Name) -> Option<KnownEntry> {
        while self.former.peek()? < name {
            self.former.next();
        }
        (self.former.peek()? == name).then(|| self.former.next())?.and_then(|(_, known)| known)
    }

    /// Records an entry, and what else is known of it.
    pub fn record(&mut self, name: Name, child: Child, mark: Mark) {
        self.entries.add(Entry { name, child });
        self.marks.push(mark);
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

/// The entries of a directory that a pass left, from a name on.
enum FormerEntries {
    OfBuilt { built: Arc<model::tree::Directory>, next: usize, marks: IntoIter<Mark> },
    Named(Peekable<IntoIter<(Name, KnownEntry)>>),
}

impl FormerEntries {
    fn new(entries: KnownEntries, built: Option<&Arc<model::tree::Directory>>) -> Self {
        match (entries, built) {
            (KnownEntries::OfBuilt(marks), Some(built)) => Self::OfBuilt {
                built: Arc::clone(built),
                next: 0,
                marks: marks.into_vec().into_iter(),
            },
            (KnownEntries::OfBuilt(_), None) => Self::Named(Vec::new().into_iter().peekable()),
            (KnownEntries::Named(named), _) => Self::Named(named.into_iter().peekable()),
        }
    }

    /// The next name.
    fn peek(&mut self) -> Option<&Name> {
        match self {
            Self::OfBuilt { built, next, .. } => {
                built.entries().get(*next).map(|entry| &entry.name)
            }
            Self::Named(named) => named.peek().map(|(name, _)| name),
        }
    }
}

impl Iterator for FormerEntries {
    type Item = (Name, Option<KnownEntry>);

    fn next(&mut self) -> Option<Self::Item> {
        match self {
            Self::OfBuilt { built, next, marks } => {
                let entry = built.entries().get(*next)?;
                *next += 1;
                Some((entry.name.clone(), KnownEntry::new(marks.next()?, &entry.child)))
            }
            Self::Named(named) => named.next().map(|(name, known)| (name, Some(known))),
        }
    }
}

/// Returns what a walk that ends early leaves: what it has read of each open directory, and for the
/// rest what was known before.
pub fn collapse(mut stack: Vec<DirectoryWalk>) -> Option<KnownDirectory> {
    let mut below: Option<(Option<Name>, KnownDirectory)> = None;
    while let Some(directory_walk) = stack.pop() {
        let recorded = directory_walk.entries.into_entries().into_iter().zip(directory_walk.marks);
        let recorded =
            recorded.map(|(entry, mark)| (entry.name, KnownEntry::new(mark, &entry.child)));
        let opened = below.and_then(|(name, memory)| {
            Some((name?, Some(KnownEntry::Directory(Box::new(memory)))))
        });
        let known = recorded.chain(opened).chain(directory_walk.former);
        let memory = KnownDirectory {
            stamp: directory_walk.stamp,
            xattrs: directory_walk.xattrs,
            built: directory_walk.built,
            entries: KnownEntries::Named(
                known.filter_map(|(name, known)| Some((name, known?))).collect(),
            ),
        };
        below = Some((directory_walk.name, memory));
    }
    below.map(|(_, memory)| memory)
}
