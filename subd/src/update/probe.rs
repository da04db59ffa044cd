//! Finds out, while an update is staged, whether the file-system would refuse its steps: before any
//! service is stopped, and without a visible change.

use std::collections::BTreeSet;

use model::path::TreePath;
use nix::errno::Errno;

use crate::root::{Directory, Locks, Root, RootError, is_unknown_flag};
use crate::update::metadata::Target;
use crate::update::step::EntryMetadata;
use model::scope::Attributes;

/// The entry in the staging area that probes use. Slots have numbers as names.
const PROBE: &[u8] = b"probe";

/// The most different metadata that are tried out. An image has a few dozen.
const METADATA_MAX: usize = 256;

/// Tries things out in a staging area. Remembers what it has tried.
#[derive(Debug)]
pub struct Probe<'a> {
    root: &'a Root,
    slots: &'a Directory,
    is_made: bool,
    exchanges: Option<bool>,
    free_parents: BTreeSet<TreePath>,
    metadata: Vec<(bool, EntryMetadata)>,
}

impl<'a> Probe<'a> {
    pub fn new(root: &'a Root, slots: &'a Directory) -> Self {
        let (free_parents, metadata) = (BTreeSet::new(), Vec::new());
        Self { root, slots, is_made: false, exchanges: None, free_parents, metadata }
    }

    /// Fails if the directory at `path` cannot be renamed: because it is a mount point, on overlay
    /// without `redirect_dir`, or for any other reason of the kernel.
    pub fn directory_moves(&mut self, path: &TreePath) -> Result<(), RootError> {
        if !std::mem::replace(&mut self.is_made, true) {
            self.slots.make_directory(PROBE, 0o700)?;
            self.slots.open_child(PROBE)?.make_directory(PROBE, 0o700)?;
        }
        let (parent, name) = self.root.parent(path)?;
        // A directory is never renamed over one that is not empty. All other checks come first.
        match parent.rename_over(name, self.slots, PROBE) {
            Ok(()) => self.slots.rename_noreplace(PROBE, &parent, name),
            Err(error) => match error.errno() {
                Some(Errno::ENOTEMPTY | Errno::EEXIST) => Ok(()),
                // The flags are cleared for the update.
                Some(Errno::EPERM) if self.is_locked(&parent, name)? => Ok(()),
                _ => Err(error),
            },
        }
    }

    /// True if the file-system can exchange two entries. Some FUSE servers and NFS cannot.
    pub fn exchanges(&mut self) -> Result<bool, RootError> {
        if let Some(known) = self.exchanges {
            return Ok(known);
        }
        const NAMES: [&[u8]; 2] = [b"probe-of-exchange", b"probe-of-exchange-2"];
        for name in NAMES {
            drop(self.slots.create_file(name, 0o600)?);
        }
        let exchanged = self.slots.exchange(NAMES[0], self.slots, NAMES[1]);
        for name in NAMES {
            self.slots.unlink(name)?;
        }
        let can = match exchanged {
            Ok(()) => true,
            Err(error) => match error.errno() {
                Some(errno) if is_unknown_flag(errno) => false,
                _ => return Err(error),
            },
        };
        if !can {
            tracing::warn!(
                "the file-system of the root cannot exchange entries: each path that is replaced \
                 is missing for a moment"
            );
        }
        self.exchanges = Some(can);
        Ok(can)
    }

    fn is_locked(&self, parent: &Directory, name: &[u8]) -> Result<bool, RootError> {
        Ok(parent.locks(name)?.1 != Locks::NONE || parent.own_locks()?.1 != Locks::NONE)
    }

    /// Returns why nothing can be moved from the staging area into the directory of `path`, if that
    /// is known.
    pub fn refuses_entries(&mut self, path: &TreePath) -> Result<Option<&'static str>, RootError> {
        let Some(parent) = path.parent() else { return Ok(None) };
        if self.free_parents.contains(&parent) {
            return Ok(None);
        }
        let why = self.root.directory(&parent)?.barrier_to(self.slots)?;
        if why.is_none() {
            self.free_parents.insert(parent);
        }
        Ok(why)
    }

    /// Fails if an entry cannot get this metadata, by giving it to another one.
    pub fn takes_metadata(
        &mut self,
        is_directory: bool,
        managed: Attributes,
        wanted: &EntryMetadata,
    ) -> Result<(), RootError> {
        let tried = (is_directory, EntryMetadata { mtime: None, ..wanted.clone() });
        if self.metadata.len() >= METADATA_MAX || self.metadata.contains(&tried) {
            return Ok(());
        }
        const NAME: &[u8] = b"probe-of-metadata";
        let taken = if is_directory {
            self.slots.make_directory(NAME, 0o700)?;
            let taken = Target::Entry(self.slots, NAME).apply(managed, &tried.1);
            self.slots.remove_directory(NAME)?;
            taken
        } else {
            drop(self.slots.create_file(NAME, 0o600)?);
            let taken = Target::Entry(self.slots, NAME).apply(managed, &tried.1);
            self.slots.unlink(NAME)?;
            taken
        };
        if taken.is_ok() {
            self.metadata.push(tried);
        }
        taken
    }
}

impl Drop for Probe<'_> {
    fn drop(&mut self) {
        if self.is_made
            && let Err(error) = crate::state::directories::remove_all(self.slots, PROBE)
        {
            tracing::warn!(%error, "cannot remove what probes used");
        }
    }
}
