//! Space for subd's own files, which is taken while there is some.
//!
//! A disk may be full because of what an update would remove, so an update must be possible on a
//! full disk. The reserve is in `/.subd/reserve`: files that have blocks and no content, and empty
//! directories. Where the file-system refuses to create a file of subd's own for lack of space or
//! inodes, one of these is moved to its name and written: no other process gets the space in
//! between. File-systems that copy on write may need new blocks for that all the same.

use std::fs::File;

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};

use crate::root::{Directory, RootError};
use crate::state::directories::{own_directory, remove_all};

/// The number of files: the journal, two states, and the state of an update that is undone.
const FILES: u8 = 4;

/// The number of directories: one for a staged update, and one for the next.
const DIRECTORIES: u8 = 2;

/// The size of a file in bytes: a journal of about two thousand steps.
const FILE_BYTES: i64 = 256 << 10;

/// Files and directories that are ready to be used.
#[derive(Debug)]
pub struct Reserve {
    /// `None` if there was no space for the directory itself.
    directory: Option<Directory>,
}

impl Reserve {
    /// A reserve that has nothing.
    pub fn none() -> Self {
        Self { directory: None }
    }

    /// Opens the reserve in `own`, and fills it as far as there is space.
    pub fn open(own: &Directory) -> Self {
        let directory = own_directory(own, b"reserve");
        let directory = directory.inspect_err(|error| {
            tracing::warn!("there is no reserve for a full disk: {error}");
        });
        let reserve = Self { directory: directory.ok() };
        reserve.fill();
        reserve
    }

    /// Makes what is missing of the reserve, as far as there is space.
    pub fn fill(&self) {
        let Some(directory) = &self.directory else { return };
        let made = (0..FILES)
            .try_for_each(|number| make_file(directory, &file_name(number)))
            .and_then(|()| {
                (0..DIRECTORIES).try_for_each(|number| {
                    is_made(directory.make_directory(&directory_name(number), 0o700))
                })
            });
        if let Err(error) = made {
            tracing::debug!("the reserve is not complete: {error}");
        }
    }

    /// Creates the file `name` in `to` and has `write` fill it. `is_full` is true for errors that
    /// mean that there is no space: then `write` fills a file of the reserve.
    pub fn write_file<E: From<RootError>>(
        &self,
        to: &Directory,
        name: &[u8],
        is_full: impl FnOnce(&E) -> bool,
        write: impl Fn(File) -> Result<(), E>,
    ) -> Result<(), E> {
        let written = to.create_file(name, 0o600).map_err(E::from).and_then(&write);
        match written {
            Err(error) if is_full(&error) => match self.take_file(to, name) {
                Some(file) => write(file),
                None => Err(error),
            },
            written => written,
        }
    }

    /// Creates the directory `name` in `to`.
    pub fn make_directory(&self, to: &Directory, name: &[u8]) -> Result<(), RootError> {
        let made = to.make_directory(name, 0o700);
        match made {
            Err(error) if error.is_full() => {
                let taken = self.take((0..DIRECTORIES).map(directory_name), to, name);
                taken.then_some(()).ok_or(error)
            }
            made => made,
        }
    }

    fn take_file(&self, to: &Directory, name: &[u8]) -> Option<File> {
        // What there is of it has no space.
        remove_all(to, name).ok()?;
        let taken = self.take((0..FILES).map(file_name), to, name);
        taken.then(|| to.append_file(name).ok())?
    }

    /// Moves the first of `names` that is there to `name` in `to`.
    fn take(&self, mut names: impl Iterator<Item = Vec<u8>>, to: &Directory, name: &[u8]) -> bool {
        let Some(directory) = &self.directory else { return false };
        names.any(|reserved| directory.rename_noreplace(&reserved, to, name).is_ok())
    }
}

fn file_name(number: u8) -> Vec<u8> {
    format!("file-{number}").into_bytes()
}

fn directory_name(number: u8) -> Vec<u8> {
    format!("directory-{number}").into_bytes()
}

/// True also if it was there.
fn is_made(made: Result<(), RootError>) -> Result<(), RootError> {
    match made {
        Err(error) if error.errno() == Some(Errno::EEXIST) => Ok(()),
        made => made,
    }
}

fn make_file(directory: &Directory, name: &[u8]) -> Result<(), RootError> {
    let file = match directory.create_file(name, 0o600) {
        Err(error) if error.errno() == Some(Errno::EEXIST) => return Ok(()),
        file => file?,
    };
    let allocated = fallocate(&file, FallocateFlags::FALLOC_FL_KEEP_SIZE, 0, FILE_BYTES);
    allocated.map_err(|errno| {
        // A file without blocks is of no use.
        let _removed = directory.unlink(name);
        directory.error("reserve space in", name, errno)
    })
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::os::unix::fs::MetadataExt as _;

    use model::path::TreePath;

    use super::*;
    use crate::root::{Root, errno_of};

    fn names(place: &std::path::Path) -> Vec<String> {
        let names = std::fs::read_dir(place).unwrap();
        let mut names: Vec<String> =
            names.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn what_finds_no_space_takes_what_is_reserved() {
        let place = tempfile::tempdir().unwrap();
        let root = Root::open(place.path()).unwrap();
        let own = own_directory(&root.directory(&TreePath::root()).unwrap(), b".subd").unwrap();
        let reserve = Reserve::open(&own);
        let all = ["directory-0", "directory-1", "file-0", "file-1", "file-2", "file-3"];
        let at = place.path().join(".subd");
        assert_eq!(names(&at.join("reserve")), all);
        let blocks = std::fs::metadata(at.join("reserve/file-0")).unwrap().blocks();
        assert_eq!(blocks * 512, FILE_BYTES.unsigned_abs());

        let inode = std::fs::metadata(at.join("reserve/file-0")).unwrap().ino();
        let tries = std::cell::Cell::new(0);
        let write = |mut file: File| {
            tries.set(tries.get() + 1);
            let full = || own.error("write", b"state", Errno::ENOSPC);
            if tries.get() == 1 {
                return Err(full());
            }
            file.write_all(b"content")
                .map_err(|error| own.error("write", b"state", errno_of(error)))
        };
        reserve.write_file(&own, b"state", RootError::is_full, write).unwrap();
        assert_eq!(std::fs::read(at.join("state")).unwrap(), b"content");
        assert_eq!(std::fs::metadata(at.join("state")).unwrap().ino(), inode);
        let left = ["directory-0", "directory-1", "file-1", "file-2", "file-3"];
        assert_eq!(names(&at.join("reserve")), left);
        reserve.fill();
        assert_eq!(names(&at.join("reserve")), all);
        reserve.make_directory(&own, b"new").unwrap();
        assert_eq!(names(&at.join("reserve")), all, "there was space");
    }
}
