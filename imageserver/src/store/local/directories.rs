//! The file of a data directory that records which directories were made, and who owns them.

use std::io;
use std::path::{Path, PathBuf};

use super::records::write;
use crate::store::contract::{Register, Version};
use crate::store::error::{StoreError, failed};
use crate::store::files::sync_directory;
use crate::store::layout;

/// The name under which the former file is kept until the new one is durable.
const FORMER: &str = "directories.former";

/// The file of a data directory, which only this server changes.
pub struct LocalRegister(PathBuf);

impl LocalRegister {
    pub(crate) fn new(data: &Path) -> Self {
        Self(data.to_owned())
    }
}

impl Register for LocalRegister {
    fn read(&self, _: usize) -> Result<Option<(Vec<u8>, Version)>, StoreError> {
        match fs_err::read(self.place()) {
            Ok(bytes) => Ok(Some((bytes, Version::default()))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(failed("read the directories")(error)),
        }
    }

    fn replace(&self, _: &Version, bytes: &[u8]) -> Result<Version, StoreError> {
        replace(&self.0, bytes).map(|()| Version::default())
    }

    fn has_changed(&self, _: &Version) -> Result<bool, StoreError> {
        Ok(false)
    }

    fn place(&self) -> PathBuf {
        self.0.join(layout::DIRECTORIES)
    }
}

/// Puts `bytes` in the place of the file, durably. If it fails the former one is there.
fn replace(data: &Path, bytes: &[u8]) -> Result<(), StoreError> {
    let what = || failed("change the directories");
    let path = data.join(layout::DIRECTORIES);
    let incoming = data.join(layout::INCOMING);
    let (temporary, former) = (incoming.join(layout::DIRECTORIES), incoming.join(FORMER));
    // One may be left of a change that failed.
    remove(&former).map_err(what())?;
    let has_former = match fs_err::hard_link(&path, &former) {
        Ok(()) => true,
        Err(error) if error.kind() == io::ErrorKind::NotFound => false,
        Err(error) => return Err(what()(error)),
    };
    let placed = write(&temporary, bytes).and_then(|()| fs_err::rename(&temporary, &path));
    let done = match placed.map_err(what()) {
        Ok(()) => sync_directory(data).inspect_err(|_| {
            let back = if has_former { fs_err::rename(&former, &path) } else { remove(&path) };
            if let Err(error) = back {
                tracing::error!(%error, "a change that was refused shows after the next start");
            }
        }),
        Err(error) => Err(error),
    };
    for left in [former, temporary] {
        if let Err(error) = remove(&left) {
            tracing::warn!(%error, "a temporary file stays until the next start");
        }
    }
    done
}

fn remove(path: &Path) -> io::Result<()> {
    match fs_err::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}
