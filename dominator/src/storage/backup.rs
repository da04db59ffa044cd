//! Copies of the database, and what becomes of one that is started upon.
//!
//! A copy has a mark. The dominator that finds it pulls the brake before it does anything: the
//! fleet has gone on since the copy was made, and may have an image since then that the copy does
//! not know of.

use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use api::dominator::Brake;
use model::object::{Algorithm, Hasher, ObjectId};
use model::tree::Time;
use model::when::moment;
use redb::Database;

use super::{BRAKE, SETTINGS, State, StateError, open};
use crate::core::order::Order;
use system::clock::wall;

/// The mark of a copy: when it was made.
const COPIED: &str = "copied";

/// The name that a copy has while it is made.
const COPY: &str = "backup.redb";

/// How much of a copy is read at once, in bytes.
const BUFFER_BYTES: usize = 1 << 20;

/// Databases of fewer bytes are left as they are.
const COMPACT_BYTES_MIN: u64 = 64 << 20;

/// A copy of the database; it has no name and goes when this does.
#[derive(Debug)]
pub struct Copy {
    file: File,
    /// Its length, in bytes.
    pub size_bytes: u64,
    /// The digest of all of it.
    pub digest: ObjectId,
}

impl Copy {
    /// The bytes from `offset` on, at most `length`.
    ///
    /// # Errors
    ///
    /// What the kernel says.
    pub fn read(&self, offset: u64, length: usize) -> std::io::Result<Vec<u8>> {
        let left = self.size_bytes.saturating_sub(offset);
        let length = usize::try_from(left).unwrap_or(usize::MAX).min(length);
        let mut bytes = vec![0; length];
        self.file.read_exact_at(&mut bytes, offset)?;
        Ok(bytes)
    }
}

impl State {
    /// Makes a copy of all that is kept. Nothing is written meanwhile.
    ///
    /// # Errors
    ///
    /// [`StateError`].
    pub fn copy(&self) -> Result<Copy, StateError> {
        let path = self.path.with_file_name(COPY);
        let result = self.copy_to(&path);
        remove(&path);
        result
    }

    fn copy_to(&self, path: &Path) -> Result<Copy, StateError> {
        let failed = |source| StateError::Copy { path: path.to_owned(), source };
        remove(path);
        self.with("read", |_database| Ok(std::fs::copy(&self.path, path)))?.map_err(failed)?;
        // It was not closed, so this repairs it.
        let copy = Self { path: path.to_owned(), database: Some(open(path)?).into() };
        copy.set(COPIED, Some(&wall()), None)?;
        drop(copy);
        let mut file = File::open(path).map_err(failed)?;
        let (mut hasher, mut size_bytes) = (Hasher::new(Algorithm::Blake3), 0);
        let mut buffer = vec![0; BUFFER_BYTES];
        loop {
            let length = file.read(&mut buffer).map_err(failed)?;
            if length == 0 {
                return Ok(Copy { file, size_bytes, digest: hasher.finish() });
            }
            hasher.update(&buffer[..length]);
            size_bytes += length as u64;
        }
    }

    /// Pulls the brake if this database is a copy that was not started upon yet.
    pub(super) fn brake_copy(&self) -> Result<(), StateError> {
        let Some(copied) = self.get::<Time>(COPIED)? else { return Ok(()) };
        let mut reason = format!(
            "the dominator was started on the backup of {}: compare the machine database, the \
             orders and the fleet with what they should be, then enable updates",
            moment(copied)
        );
        if let Some(before) = self.brake()? {
            reason = format!("{reason}; before that they were disabled because: {}", before.reason);
        }
        let who = "the dominator".to_owned();
        let order = Order::of("disable-updates", &who).why(&reason);
        let brake = Brake { reason, who, since: wall() };
        let record = serde_json::to_vec(&brake).map_err(|error| self.damaged(BRAKE, error))?;
        self.transact(Some(&order), |write| {
            let mut settings = write.open_table(SETTINGS)?;
            settings.insert(BRAKE, &record[..])?;
            settings.remove(COPIED)?;
            Ok(())
        })
    }
}

fn remove(path: &Path) {
    if let Err(error) = std::fs::remove_file(path)
        && error.kind() != std::io::ErrorKind::NotFound
    {
        tracing::warn!("cannot remove {}: {error}", path.display());
    }
}

/// Takes away what a copy has left that was cut short.
pub(super) fn clean(directory: &Path) {
    remove(&directory.join(COPY));
}

/// Makes a file smaller that is more than half empty.
pub(super) fn compact(database: &mut Database, path: &Path) -> Result<(), redb::Error> {
    let length = std::fs::metadata(path).map_or(0, |metadata| metadata.len());
    if length < COMPACT_BYTES_MIN {
        return Ok(());
    }
    let write = database.begin_write()?;
    let stats = write.stats()?;
    write.abort()?;
    let used = stats.stored_bytes() + stats.metadata_bytes();
    if used >= length / 2 {
        return Ok(());
    }
    database.compact()?;
    let left = std::fs::metadata(path).map_or(0, |metadata| metadata.len());
    tracing::info!(before = length, after = left, used, "the database was compacted");
    Ok(())
}
