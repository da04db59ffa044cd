//! The directory `/.subd` below the root, and the directories in it.
//!
//! | directory | what |
//! |---|---|
//! | `objects` | the object cache |
//! | `staging` | staged updates, by update id |
//! | `undo` | what an update removed, until it has ended, by update id and phase |
//! | `journal` | the update that is being carried out |
//! | `reserve` | space for an update on a full disk |
//! | `state` | what survives a restart of subd; elsewhere with `--state` |
//! | `audit` | the audit log; elsewhere with `--state` or `--audit-log` |
//! | `tasks` | the daemon tasks that run, and their log files; elsewhere with `--state` |
//!
//! The first five are on the file-system of the root, because entries move between them and the
//! tree by rename, and are synced together with it. All belong to root, and only root may read
//! them. Nothing here is scanned.
//!
//! What is left in `staging`, and in `undo` of updates that have ended, is removed when subd
//! starts, when it is known that no journal needs it.

use std::sync::Arc;

use model::path::TreePath;
use model::scope::SUBD_DIRECTORY;
use nix::errno::Errno;

use crate::root::{Directory, Kind, Locks, Root, RootError};
use crate::state::reserve::Reserve;

/// The greatest depth that is removed. Nothing that subd creates is deeper.
const DEPTH_MAX: usize = 2 * model::path::DEPTH_MAX;

/// The directories below `/.subd`.
#[derive(Debug)]
pub struct Directories {
    pub objects: Arc<Directory>,
    pub staging: Directory,
    pub undo: Directory,
    /// The update that is being carried out.
    pub journal: Directory,
    /// Space for an update on a full disk.
    pub reserve: Arc<Reserve>,
}

impl Directories {
    /// Opens the directories, and creates those that are missing.
    pub fn open(root: &Root) -> Result<Self, RootError> {
        let top = root.directory(&TreePath::root())?;
        let own = own_directory(&top, &SUBD_DIRECTORY.as_bytes()[1..])?;
        root.learn_times(&own);
        Ok(Self {
            objects: Arc::new(own_directory(&own, b"objects")?),
            staging: own_directory(&own, b"staging")?,
            undo: own_directory(&own, b"undo")?,
            journal: own_directory(&own, b"journal")?,
            reserve: Arc::new(Reserve::open(&own)),
        })
    }

    /// Opens the directory for state: `state` in `base`, or in `/.subd` below `root`.
    pub fn state(root: &Root, base: Option<&Root>) -> Result<Directory, RootError> {
        Self::beside(root, base, b"state")
    }

    /// Opens the directory for the audit log: `audit`, beside the directory for state.
    pub fn audit(root: &Root, base: Option<&Root>) -> Result<Directory, RootError> {
        Self::beside(root, base, b"audit")
    }

    fn beside(root: &Root, base: Option<&Root>, name: &[u8]) -> Result<Directory, RootError> {
        match base {
            Some(base) => own_directory(&base.directory(&TreePath::root())?, name),
            None => {
                let top = root.directory(&TreePath::root())?;
                own_directory(&own_directory(&top, &SUBD_DIRECTORY.as_bytes()[1..])?, name)
            }
        }
    }
}

/// Returns the name of the directory of an update in `staging`, and in `undo` while it changes the
/// tree.
pub fn directory_name(update_id: u64) -> Vec<u8> {
    update_id.to_string().into_bytes()
}

/// Opens the directory `name`, creates it if it is missing, and gives it to root alone.
pub fn own_directory(parent: &Directory, name: &[u8]) -> Result<Directory, RootError> {
    match parent.make_directory(name, 0o700) {
        Err(error) if error.errno() != Some(Errno::EEXIST) => return Err(error),
        Ok(()) | Err(_) => {}
    }
    let directory = parent.open_child(name)?;
    let status = directory.status()?;
    if status.filesystem != parent.status()?.filesystem {
        return Err(RootError::OtherFileSystem { path: directory.path().clone() });
    }
    if (status.uid, status.gid, status.mode) != (0, 0, 0o700) {
        parent.set_owner(name, 0, 0)?;
        parent.set_mode(name, 0o700)?;
    }
    Ok(directory)
}

/// Removes everything inside `directory`, which is one of subd's own.
pub fn empty(directory: &Directory) -> Result<(), RootError> {
    for name in directory.names()? {
        remove_all(directory, &name)?;
    }
    Ok(())
}

/// Removes the entry `name` of `parent`, which is one of subd's own directories, with all that it
/// holds. An absent entry is no error.
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
            unlocking(holder, &done, || holder.remove_directory(&done))?;
        }
    }
    Ok(())
}

/// Removes `name` unless it is a directory. True if the entry no longer exists.
fn remove_leaf(parent: &Directory, name: &[u8]) -> Result<bool, RootError> {
    match parent.stat(name) {
        Err(error) if error.is_absent() => Ok(true),
        Err(error) => Err(error),
        Ok(status) if status.kind == Kind::Directory => Ok(false),
        Ok(_) => unlocking(parent, name, || parent.unlink(name)).map(|()| true),
    }
}

/// Removes the entry `name` of `parent` with `remove`. If that is not permitted, clears the
/// immutable and append-only flags of the entry and of `parent`, which removed entries can have,
/// and tries again.
fn unlocking(
    parent: &Directory,
    name: &[u8],
    remove: impl Fn() -> Result<(), RootError>,
) -> Result<(), RootError> {
    match remove() {
        Err(error) if error.errno() == Some(Errno::EPERM) => {
            parent.set_own_locks(Locks::NONE)?;
            let (inode, _) = parent.locks(name)?;
            parent.set_locks(name, inode, Locks::NONE)?;
            remove()
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn makes_its_directories_for_root_alone() {
        let place = tempfile::tempdir().unwrap();
        let root = Root::open(place.path()).unwrap();
        Directories::open(&root).unwrap();
        let again = Directories::open(&root).unwrap();
        assert_eq!(again.objects.status().unwrap().mode, 0o700);
        assert_eq!(
            Directories::state(&root, None).unwrap().names().unwrap(),
            Vec::<Box<[u8]>>::new()
        );
    }

    #[test]
    fn refuses_a_symlink_in_the_place_of_its_directory() {
        let place = tempfile::tempdir().unwrap();
        let root = Root::open(place.path()).unwrap();
        let top = root.directory(&TreePath::root()).unwrap();
        top.make_symlink(b".subd", b"/tmp").unwrap();
        assert_eq!(Directories::open(&root).unwrap_err().errno(), Some(Errno::ELOOP));
    }
}
