//! subd's own directories: `/.subd` below the root, and what it holds.
//!
//! | directory | what |
//! |---|---|
//! | `objects` | the object cache |
//! | `staging` | what is prepared for the next update, by update id |
//! | `undo` | what an update took away, until it is verified, by update id |
//! | `state` | what subd remembers over restarts; elsewhere with `--state` |
//!
//! The first three are on the file-system of the root, because entries move between them and the
//! tree by rename. All belong to root and nobody else may look inside. Nothing here is scanned.
//!
//! What a crash leaves in `staging` and `undo` is cleared at the start: until updates are
//! journalled, the tree of an update that was cut short is not finished but planned again from a
//! new scan. What an update took away that could not be put back stays until the next one is done.

use std::sync::Arc;

use common::path::TreePath;
use common::scope::SUBD_DIRECTORY;
use nix::errno::Errno;

use crate::root::{Directory, Kind, Root, RootError};

/// The deepest that is cleared. Nothing that subd makes is deeper.
const DEPTH_MAX: usize = 2 * common::path::DEPTH_MAX;

/// The directories below `/.subd`.
#[derive(Debug)]
pub struct Home {
    /// The object cache.
    pub objects: Arc<Directory>,
    /// What is prepared.
    pub staging: Directory,
    /// What was taken away.
    pub undo: Directory,
}

/// What an update that was cut short left behind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Leftovers {
    /// Updates that were prepared.
    pub staged: usize,
    /// Updates that had begun to change the tree.
    pub begun: usize,
}

impl Home {
    /// Opens the directories, and makes those that are missing.
    ///
    /// # Errors
    ///
    /// [`RootError`] if one cannot be made, or something else is in its place.
    pub fn open(root: &Root) -> Result<Self, RootError> {
        let top = root.directory(&TreePath::root())?;
        let own = own_directory(&top, &SUBD_DIRECTORY.as_bytes()[1..])?;
        Ok(Self {
            objects: Arc::new(own_directory(&own, b"objects")?),
            staging: own_directory(&own, b"staging")?,
            undo: own_directory(&own, b"undo")?,
        })
    }

    /// The directory for state: `state` in `base`, or in `/.subd` below `root`.
    ///
    /// # Errors
    ///
    /// As [`Home::open`].
    pub fn state(root: &Root, base: Option<&Root>) -> Result<Directory, RootError> {
        match base {
            Some(base) => own_directory(&base.directory(&TreePath::root())?, b"state"),
            None => {
                let top = root.directory(&TreePath::root())?;
                own_directory(&own_directory(&top, &SUBD_DIRECTORY.as_bytes()[1..])?, b"state")
            }
        }
    }

    /// Clears what an update that was cut short left behind; says how much it was. What the update
    /// called `stuck` took away stays, for whoever has to repair it.
    ///
    /// # Errors
    ///
    /// [`RootError`] if something cannot be removed.
    pub fn clear(&self, stuck: Option<u64>) -> Result<Leftovers, RootError> {
        let staged = self.staging.names()?.len();
        empty(&self.staging)?;
        let stuck = stuck.map(directory_name);
        let mut begun = 0;
        for name in self.undo.names()? {
            if stuck.as_deref() != Some(&name) {
                remove_all(&self.undo, &name)?;
                begun += 1;
            }
        }
        Ok(Leftovers { staged, begun })
    }
}

/// The name of what belongs to an update in `staging` and in `undo`.
#[must_use]
pub fn directory_name(update_id: u64) -> Vec<u8> {
    update_id.to_string().into_bytes()
}

/// Opens the directory `name`, makes it if it is missing, and closes it to everybody else.
fn own_directory(parent: &Directory, name: &[u8]) -> Result<Directory, RootError> {
    match parent.make_directory(name, 0o700) {
        Err(error) if error.errno() != Some(Errno::EEXIST) => return Err(error),
        Ok(()) | Err(_) => {}
    }
    let directory = parent.open_child(name)?;
    let status = directory.status()?;
    if (status.uid, status.gid, status.mode) != (0, 0, 0o700) {
        parent.set_owner(name, 0, 0)?;
        parent.set_mode(name, 0o700)?;
    }
    Ok(directory)
}

/// Removes everything inside `directory`, which is one of subd's own.
///
/// # Errors
///
/// [`RootError`] for the first entry that cannot be removed.
pub fn empty(directory: &Directory) -> Result<(), RootError> {
    for name in directory.names()? {
        remove_all(directory, &name)?;
    }
    Ok(())
}

/// Removes the entry `name` of `parent`, which is one of subd's own directories, with all that it
/// holds. That it is gone already is no error.
///
/// # Errors
///
/// [`RootError`] for the first entry that cannot be removed.
pub fn remove_all(parent: &Directory, name: &[u8]) -> Result<(), RootError> {
    // Depth first, without recursion; only directories that are open are on the stack.
    let mut stack: Vec<(Directory, Vec<Box<[u8]>>)> = Vec::new();
    let mut current: Option<Box<[u8]>> = Some(Box::from(name));
    while let Some(entry) = current.take() {
        let holder = stack.last().map_or(parent, |(directory, _)| directory);
        if !remove_leaf(holder, &entry)? {
            if stack.len() == DEPTH_MAX {
                return Err(RootError::Call {
                    operation: "clear",
                    path: holder.path().clone(),
                    source: Errno::ELOOP,
                });
            }
            let below = holder.open_child(&entry)?;
            let names = below.names()?;
            stack.push((below, names));
        }
        while let Some((directory, names)) = stack.last_mut() {
            if let Some(next) = names.pop() {
                current = Some(next);
                break;
            }
            let done = directory.path().name().to_vec();
            stack.pop();
            let holder = stack.last().map_or(parent, |(directory, _)| directory);
            holder.remove_directory(&done)?;
        }
    }
    Ok(())
}

/// Removes `name` unless it is a directory; true if nothing has that name any more.
fn remove_leaf(parent: &Directory, name: &[u8]) -> Result<bool, RootError> {
    match parent.stat(name) {
        Err(error) if error.is_absent() => Ok(true),
        Err(error) => Err(error),
        Ok(status) if status.kind == Kind::Directory => Ok(false),
        Ok(_) => parent.unlink(name).map(|()| true),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn makes_its_directories_and_clears_what_is_left() {
        let place = tempfile::tempdir().unwrap();
        let root = Root::open(place.path()).unwrap();
        let home = Home::open(&root).unwrap();
        home.staging.make_directory(b"7", 0o755).unwrap();
        let slot = home.staging.open_child(b"7").unwrap();
        slot.make_directory(b"0", 0o755).unwrap();
        slot.open_child(b"0").unwrap().create_file(b"\xff", 0o600).unwrap();
        slot.make_symlink(b"1", b"/etc").unwrap();
        home.undo.create_file(b"x", 0o600).unwrap();
        home.undo.make_directory(b"7", 0o700).unwrap();
        assert_eq!(home.clear(Some(7)).unwrap(), Leftovers { staged: 1, begun: 1 });
        assert_eq!(home.clear(Some(7)).unwrap(), Leftovers::default());
        assert_eq!(home.clear(None).unwrap(), Leftovers { staged: 0, begun: 1 });
        let again = Home::open(&root).unwrap();
        assert_eq!(again.objects.status().unwrap().mode, 0o700);
        assert_eq!(Home::state(&root, None).unwrap().names().unwrap(), Vec::<Box<[u8]>>::new());
    }

    #[test]
    fn refuses_a_symlink_in_the_place_of_its_directory() {
        let place = tempfile::tempdir().unwrap();
        let root = Root::open(place.path()).unwrap();
        let top = root.directory(&TreePath::root()).unwrap();
        top.make_symlink(b".subd", b"/tmp").unwrap();
        assert_eq!(Home::open(&root).unwrap_err().errno(), Some(Errno::ELOOP));
    }
}
