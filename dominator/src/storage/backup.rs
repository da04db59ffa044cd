//! Backups: copies of the database, and the start on one, or without the former database.
//!
//! A copy has a mark, and so has a new database in place of a lost one. A dominator that finds a
//! mark pulls the brake first: the fleet may have images that this database does not know, and an
//! operator may have disabled updates since.

use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::Arc;

use api::dominator::Brake;
use model::display::utc;
use model::object::{Algorithm, Hasher, ObjectId};
use model::tree::Time;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::database::{OpenDatabase, RowJson, SETTINGS, SettingsRow, StoredValue};
use super::{CLOCK, Storage, StorageError};
use crate::core::orders::Order;
use system::clock::wall;

/// The mark of a copy: when it was made.
pub(super) const COPIED: &str = "copied";

/// The mark of a new database in a state directory that was used before.
pub(super) const LOST: &str = "lost";

/// The mark of a database that has what could be read of a damaged one: what is lost.
pub(super) const SALVAGED: &str = "salvaged";

/// The name of a copy while it is made.
const COPY: &str = "backup.redb";

/// The size of the buffer for reading a copy, in bytes.
const BUFFER_BYTES: usize = 1 << 20;

/// A copy of the database in a file without a name, which exists until this is dropped.
#[derive(Debug)]
pub struct DatabaseCopy {
    file: File,
    pub size_bytes: u64,
    pub digest: ObjectId,
}

impl DatabaseCopy {
    /// Reads at most `length` bytes at `offset`.
    pub fn read(&self, offset: u64, length: usize) -> std::io::Result<Vec<u8>> {
        let left = self.size_bytes.saturating_sub(offset);
        let length = usize::try_from(left).unwrap_or(usize::MAX).min(length);
        let mut bytes = vec![0; length];
        self.file.read_exact_at(&mut bytes, offset)?;
        Ok(bytes)
    }
}

impl Storage {
    /// Makes a copy of the database. Nothing is written meanwhile.
    pub fn copy(&self) -> Result<DatabaseCopy, StorageError> {
        let path = self.database.path().with_file_name(COPY);
        let result = self.copy_to(&path);
        remove(&path);
        result
    }

    fn copy_to(&self, path: &Path) -> Result<DatabaseCopy, StorageError> {
        let failed = |source| StorageError::Copy { path: path.to_owned(), source };
        remove(path);
        let original = &self.database;
        original.with("read", |_| Ok(std::fs::copy(original.path(), path)))?.map_err(failed)?;
        // The original was not closed, so opening repairs the copy.
        let copy = OpenDatabase::open(path)?;
        let mark = serde_json::to_vec(&wall()).expect("a time is a plain structure");
        copy.transact(None, |write| {
            let mut settings = write.open_table(SETTINGS)?;
            settings.insert(COPIED, &mark[..])?;
            // The copy may be started much later, or on another machine.
            settings.remove(CLOCK)?;
            Ok(())
        })?;
        drop(copy);
        let mut file = File::open(path).map_err(failed)?;
        let (mut hasher, mut size_bytes) = (Hasher::new(Algorithm::Blake3), 0);
        let mut buffer = vec![0; BUFFER_BYTES];
        loop {
            let length = file.read(&mut buffer).map_err(failed)?;
            if length == 0 {
                return Ok(DatabaseCopy { file, size_bytes, digest: hasher.finish() });
            }
            hasher.update(&buffer[..length]);
            size_bytes += length as u64;
        }
    }

    /// Pulls the brake if this database has a mark: no dominator was started upon it yet.
    pub(super) fn brake_marked(&self) -> Result<(), StorageError> {
        self.brake_if_marked(COPIED, |copied: Time| {
            format!(
                "the dominator was started on the backup of {}: compare the machine database, the \
                 orders and the fleet with what they should be, then enable updates",
                utc(copied)
            )
        })?;
        self.brake_if_marked(SALVAGED, |lost: Vec<String>| {
            format!(
                "the database was damaged, and has only what could be read: compare the machine \
                 database, the orders and the fleet with what they should be, then enable \
                 updates; lost: {}",
                lost.join(", ")
            )
        })?;
        self.brake_if_marked(LOST, |_: bool| {
            format!(
                "{} was missing or empty, and a dominator has run here before: its brake, pauses, \
                 settings and machine database are lost; restore a backup, or compare the machine \
                 database and the fleet with what they should be, then enable updates",
                self.database.path().display()
            )
        })
    }

    /// Returns when this copy was made, if it is one that no dominator was started upon yet.
    pub(super) fn copied(&self) -> Result<Option<Time>, StorageError> {
        let row = SettingsRow::new(&self.database, COPIED);
        let mark: StoredValue<Option<Time>> = StoredValue::load_or_default_as(row, RowJson)?;
        Ok(*mark.get())
    }

    /// Pulls the brake and removes the mark `key`, if it is there.
    fn brake_if_marked<T>(
        &self,
        key: &'static str,
        reason: impl FnOnce(T) -> String,
    ) -> Result<(), StorageError>
    where
        T: Serialize + DeserializeOwned + PartialEq + Clone,
    {
        let row = SettingsRow::new(&self.database, key);
        let mark: StoredValue<Option<T>> = StoredValue::load_or_default_as(row, RowJson)?;
        let Some(mark) = Option::clone(&mark.get()) else { return Ok(()) };
        let mut reason = reason(mark);
        if let Some(before) = &*self.brake.get() {
            reason = format!("{reason}; before that they were disabled because: {}", before.reason);
        }
        let who = "the dominator".to_owned();
        let order = Order::new("disable-updates", &who).why(&reason);
        let brake = Brake { reason, who, since: wall() };
        self.brake.set_through(Some(Arc::new(brake)), |row, bytes| {
            self.database.transact(Some(&order), |write| {
                row.insert(write, bytes)?;
                write.open_table(SETTINGS)?.remove(key)?;
                Ok(())
            })
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

/// Removes what an interrupted copy has left.
pub(super) fn clean(directory: &Path) {
    remove(&directory.join(COPY));
}
