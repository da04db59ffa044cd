//! Takes a file of unknown content into the cache.

use std::fs::File;

use model::object::{Algorithm, ObjectId};
use model::scope::Attributes;

use super::{Cache, CacheError, Holding, Seal, digest_as, name_of};
use crate::root::{Directory, Status};

/// A file that is in the cache now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Adopted {
    pub id: ObjectId,
    /// Its length, in bytes.
    pub size_bytes: u64,
    /// True if the cache had the same object already; then the file is gone.
    pub duplicate: bool,
}

impl Cache {
    /// Makes the file `name` in `from` an object of root alone, named by what it hashes to.
    ///
    /// `from` must be a directory that nobody else can enter, on the file-system of the cache, and
    /// nobody may have the file open for writing: what is hashed must be what is kept.
    ///
    /// # Errors
    ///
    /// [`CacheError`]; then the file is still in `from`.
    pub fn adopt(
        &self,
        from: &Directory,
        name: &[u8],
        algorithm: Algorithm,
    ) -> Result<Adopted, CacheError> {
        for (key, _) in from.xattrs(name, Attributes::Labels)? {
            from.remove_xattr(name, &key)?;
        }
        from.set_owner(name, 0, 0)?;
        from.set_mode(name, 0o600)?;
        let mut file = from.open_file(name)?;
        let unread = |source: std::io::Error| from.error("read", name, errno_of(&source));
        let status =
            |file: &File| Status::of(file).map_err(|errno| from.error("look at", name, errno));
        let before = status(&file)?;
        let id = digest_as(&mut file, algorithm).map_err(unread)?;
        let after = status(&file)?;
        let private = after.links == 1 && (after.uid, after.mode) == (0, 0o600);
        if !private || Seal::of(&before) != Seal::of(&after) {
            return Err(from.error("verify", name, nix::errno::Errno::EBUSY).into());
        }
        let size_bytes = after.size_bytes;
        let duplicate = self.size_of(&id).is_some();
        if duplicate {
            from.unlink(name)?;
        } else {
            let object = name_of(&id);
            from.rename_noreplace(name, &self.directory, &object)?;
            let seal = Seal::of(&self.directory.stat(&object)?);
            self.lock().insert(id, Holding::Stored(seal));
        }
        Ok(Adopted { id, size_bytes, duplicate })
    }
}

fn errno_of(error: &std::io::Error) -> nix::errno::Errno {
    error.raw_os_error().map_or(nix::errno::Errno::EIO, nix::errno::Errno::from_raw)
}
