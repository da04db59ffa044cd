//! The database file, and the values that it stores in single rows.

use std::io;
use std::path::Path;
use std::sync::Arc;

use database::{DatabaseError, DatabaseFile};
use redb::{Database, ReadTransaction, ReadableDatabase as _, TableDefinition, WriteTransaction};
use serde::Serialize;
use serde::de::DeserializeOwned;
use system::clock::wall;
use system::durable::{Codec, Durable, Medium};

use super::StorageError;
use super::history_log::append_order;
use crate::core::orders::Order;
use crate::core::orders::{Pauses, SavedPause};

/// The name of the database in the state directory.
pub const FILE: &str = "dominator.redb";

/// Values by name, as JSON.
pub(super) const SETTINGS: TableDefinition<'static, &'static str, &'static [u8]> =
    TableDefinition::new("settings");

/// A database file of a dominator.
#[derive(Debug)]
pub(crate) struct OpenDatabase(DatabaseFile);

impl OpenDatabase {
    /// See [`DatabaseFile::open`].
    pub(super) fn open(path: &Path) -> Result<Self, StorageError> {
        Ok(Self(DatabaseFile::open(path)?))
    }

    /// See [`DatabaseFile::open_checked`].
    pub(super) fn open_checked(path: &Path) -> Result<Self, StorageError> {
        Ok(Self(DatabaseFile::open_checked(path)?))
    }

    /// See [`DatabaseFile::open_or_renew`].
    pub(super) fn open_or_renew(
        path: &Path,
        prepare: impl Fn(&Database) -> Result<(), redb::Error>,
        lost: &str,
    ) -> Result<Self, StorageError> {
        Ok(Self(DatabaseFile::open_or_renew(path, prepare, lost)?))
    }

    pub(super) fn path(&self) -> &Path {
        self.0.path()
    }

    /// See [`DatabaseFile::damage`].
    pub(super) fn damage(&self) -> Option<&str> {
        self.0.damage()
    }

    /// Names a record, for errors.
    pub(super) fn place(&self, key: &str) -> String {
        format!("the record `{key}` of {}", self.path().display())
    }

    /// See [`DatabaseFile::with`].
    pub(super) fn with<T>(
        &self,
        verb: &'static str,
        work: impl FnOnce(&Database) -> Result<T, redb::Error>,
    ) -> Result<T, StorageError> {
        Ok(self.0.with(verb, work)?)
    }

    /// See [`DatabaseFile::read_beside`].
    pub(super) fn read_beside<T>(
        &self,
        work: impl FnOnce(&ReadTransaction) -> Result<T, redb::Error>,
    ) -> Result<T, StorageError> {
        Ok(self.0.read_beside(work)?)
    }

    /// Makes a change, and records the order that it follows from if there is one, in one
    /// transaction. Both are on the disk when this returns; on an error neither is.
    pub(crate) fn transact<T>(
        &self,
        order: Option<&Order>,
        change: impl FnOnce(&WriteTransaction) -> Result<T, redb::Error>,
    ) -> Result<T, StorageError> {
        self.with("write", |database| {
            let write = database.begin_write()?;
            let result = change(&write)?;
            if let Some(order) = order {
                append_order(&write, wall(), order)?;
            }
            write.commit()?;
            Ok(result)
        })
    }
}

/// A row of [`SETTINGS`]: the medium of one value. No bytes mean that there is no row.
#[derive(Clone, Debug)]
pub struct SettingsRow {
    database: Arc<OpenDatabase>,
    key: &'static str,
}

/// A value of the database: in memory, and in a row.
pub type StoredValue<T, C = RowJson> = Durable<T, SettingsRow, C>;

impl SettingsRow {
    pub(super) fn new(database: &Arc<OpenDatabase>, key: &'static str) -> Self {
        Self { database: Arc::clone(database), key }
    }

    fn write(&self, bytes: &[u8], order: Option<&Order>) -> Result<(), StorageError> {
        self.database.transact(order, |write| self.insert(write, bytes))
    }

    /// Writes the row in the transaction `write`.
    pub(super) fn insert(&self, write: &WriteTransaction, bytes: &[u8]) -> Result<(), redb::Error> {
        let mut table = write.open_table(SETTINGS)?;
        match bytes {
            [] => table.remove(self.key)?,
            bytes => table.insert(self.key, bytes)?,
        };
        Ok(())
    }
}

/// Returns a writer for [`Durable::modify_through`] that records `order` in the transaction in
/// which the value is written.
pub fn with_order<E: From<StorageError>>(
    order: &Order,
) -> impl FnOnce(&SettingsRow, &[u8]) -> Result<(), E> + use<'_, E> {
    |row, bytes| Ok(row.write(bytes, Some(order))?)
}

impl Medium for SettingsRow {
    fn place(&self) -> String {
        self.database.place(self.key)
    }

    fn read(&self) -> io::Result<Option<Vec<u8>>> {
        let read = self.database.with("read", |database| {
            let table = database.begin_read()?.open_table(SETTINGS)?;
            Ok(table.get(self.key)?.map(|row| row.value().to_vec()))
        });
        read.map_err(io_error)
    }

    fn replace(&self, bytes: &[u8]) -> io::Result<()> {
        self.write(bytes, None).map_err(io_error)
    }
}

/// Drops the name of the database from an error: that of the row has it, too.
fn io_error(error: StorageError) -> io::Error {
    match error {
        StorageError::Database(DatabaseError::Access { source, .. }) => io::Error::other(source),
        error => io::Error::other(error),
    }
}

/// JSON; no bytes of a default value, so that it has no row.
#[derive(Clone, Copy, Debug)]
pub struct RowJson;

impl<T: Serialize + DeserializeOwned + Default + PartialEq> Codec<T> for RowJson {
    fn encode(&self, value: &T) -> io::Result<Vec<u8>> {
        Ok(if *value == T::default() { Vec::new() } else { serde_json::to_vec(value)? })
    }

    fn decode(&self, bytes: &[u8]) -> io::Result<T> {
        Ok(serde_json::from_slice(bytes)?)
    }
}

/// Pauses as JSON: each with the machines that have it.
#[derive(Clone, Copy, Debug)]
pub struct PausesJson;

impl Codec<Pauses> for PausesJson {
    fn encode(&self, pauses: &Pauses) -> io::Result<Vec<u8>> {
        RowJson.encode(&pauses.saved())
    }

    fn decode(&self, bytes: &[u8]) -> io::Result<Pauses> {
        Codec::<Vec<SavedPause>>::decode(&RowJson, bytes).map(Pauses::from_saved)
    }
}
