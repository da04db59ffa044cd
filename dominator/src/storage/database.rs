//! The database file, and the values that it stores in single rows.

use std::cell::Cell;
use std::fs::{File, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, Once, OnceLock};
use std::time::Duration;

use model::lock::locked;
use redb::{Database, ReadableDatabase as _, TableDefinition, WriteTransaction};
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

/// How much of the database is held in memory, in bytes. The kernel holds more of it.
const CACHE_BYTES: usize = 2 << 20;

/// How often a database that failed is tried to be opened again, and the pause between.
const REOPENED_MAX: usize = 60;
const REOPEN_PAUSE: Duration = Duration::from_millis(50);

/// Smaller databases are not compacted.
const COMPACT_BYTES_MIN: u64 = 64 << 20;

/// Values by name, as JSON.
pub(super) const SETTINGS: TableDefinition<'static, &'static str, &'static [u8]> =
    TableDefinition::new("settings");

/// The open database file.
#[derive(Debug)]
pub(crate) struct OpenDatabase {
    pub(super) path: PathBuf,
    /// `None` after a failure: the database must be opened again, and cannot be yet.
    database: Mutex<Option<Database>>,
    /// What is wrong with the content of the file, once that is known. Nothing is read or written
    /// then.
    damage: OnceLock<String>,
}

impl OpenDatabase {
    /// Opens the database at `path`, or creates it. Fails with [`StorageError::InUse`] if another
    /// process has it open.
    pub(super) fn open(path: &Path) -> Result<Self, StorageError> {
        Ok(Self::new(path, open(path)?))
    }

    fn new(path: &Path, database: Database) -> Self {
        let database = Mutex::new(Some(database));
        Self { path: path.to_owned(), database, damage: OnceLock::new() }
    }

    /// As [`OpenDatabase::open`]. Reads the whole file first: fails with [`StorageError::Damaged`]
    /// if a page of it is damaged. Makes the file smaller if much of it is empty.
    pub(super) fn open_checked(path: &Path) -> Result<Self, StorageError> {
        let mut database = open(path)?;
        let failure = match no_panic(|| Ok(database.check_integrity()?)) {
            Ok(true) => None,
            Ok(false) => Some(WorkFailure::Damage("its latest change cannot be read".to_owned())),
            Err(failure) => Some(failure),
        };
        if let Some(failure) = failure {
            drop_quietly(database);
            return Err(failure.at("read", path));
        }
        if let Err(error) = compact(&mut database, path) {
            // A database that has failed refuses to work.
            tracing::warn!("cannot compact the database: {error}");
            drop_quietly(database);
            database = open(path)?;
        }
        Ok(Self::new(path, database))
    }

    /// Returns what is wrong with the content of the file, once that is known.
    pub(super) fn damage(&self) -> Option<&str> {
        self.damage.get().map(String::as_str)
    }

    /// Notes what has failed. Returns the error.
    pub(super) fn failed(&self, verb: &'static str, failure: WorkFailure) -> StorageError {
        if let WorkFailure::Damage(what) = &failure
            && self.damage.set(what.clone()).is_ok()
        {
            tracing::error!("the database {} is damaged: {what}", self.path.display());
        }
        failure.at(verb, &self.path)
    }

    /// Names a record, for errors.
    pub(super) fn place(&self, key: &str) -> String {
        format!("the record `{key}` of {}", self.path.display())
    }

    /// Calls `work` with the database. A database that has failed once refuses to work ever after,
    /// so it is opened again: a disk that was full must not cost the brake.
    pub(super) fn with<T>(
        &self,
        verb: &'static str,
        work: impl FnOnce(&Database) -> Result<T, redb::Error>,
    ) -> Result<T, StorageError> {
        if let Some(what) = self.damage() {
            return Err(StorageError::Damaged { path: self.path.clone(), what: what.to_owned() });
        }
        let mut held = locked(&self.database);
        let database = match held.take() {
            Some(database) => database,
            None => open_again(&self.path)?,
        };
        let result = no_panic(|| work(&database));
        match &result {
            Ok(_) => *held = Some(database),
            Err(WorkFailure::Damage(_)) => drop_quietly(database),
            Err(WorkFailure::Other(_)) => {
                // It locks its file until it is dropped.
                drop_quietly(database);
                *held = open_again(&self.path).ok();
            }
        }
        result.map_err(|failure| self.failed(verb, failure))
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

/// Opens a database that this process has closed. Another thread may still read from it for a
/// moment.
fn open_again(path: &Path) -> Result<Database, StorageError> {
    for _ in 0..REOPENED_MAX {
        match open(path) {
            Err(StorageError::InUse { .. }) => std::thread::sleep(REOPEN_PAUSE),
            result => return result,
        }
    }
    open(path)
}

/// Compacts a file that is more than half empty.
fn compact(database: &mut Database, path: &Path) -> Result<(), redb::Error> {
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

/// Why work with the database failed.
pub(super) enum WorkFailure {
    /// The content of the file is not that of a database.
    Damage(String),
    Other(redb::Error),
}

impl WorkFailure {
    fn at(self, verb: &'static str, path: &Path) -> StorageError {
        let path = path.to_owned();
        match self {
            Self::Damage(what) => StorageError::Damaged { path, what },
            Self::Other(source) => StorageError::Access { verb, path, source: Box::new(source) },
        }
    }
}

thread_local! {
    /// True while a panic of this thread is damage, and no fault of the program.
    static IS_GUARDED: Cell<bool> = const { Cell::new(false) };
}

/// Keeps panics that are damage from printing a backtrace.
fn install_hook() {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let print = take_hook();
        set_hook(Box::new(move |panic| {
            if !IS_GUARDED.get() {
                print(panic);
            }
        }));
    });
}

/// Calls `work`. redb panics at some damaged pages; that is damage like any other.
pub(super) fn no_panic<T>(work: impl FnOnce() -> Result<T, redb::Error>) -> Result<T, WorkFailure> {
    install_hook();
    let was_guarded = IS_GUARDED.replace(true);
    let result = catch_unwind(AssertUnwindSafe(work));
    IS_GUARDED.set(was_guarded);
    match result {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(redb::Error::Corrupted(what))) => Err(WorkFailure::Damage(what)),
        Ok(Err(error)) => Err(WorkFailure::Other(error)),
        Err(panic) => {
            let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
            let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
            let what = text.unwrap_or_else(|| "it cannot be read".to_owned());
            Err(WorkFailure::Damage(what))
        }
    }
}

/// Closes a database that has failed. Closing may meet the same damage.
fn drop_quietly(database: Database) {
    let _closed = no_panic(|| {
        drop(database);
        Ok(())
    });
}

impl Drop for OpenDatabase {
    fn drop(&mut self) {
        if let Some(database) = locked(&self.database).take() {
            drop_quietly(database);
        }
    }
}

/// Opens the database at `path`, or makes it. Only its owner may read it.
fn open(path: &Path) -> Result<Database, StorageError> {
    let mut builder = Database::builder();
    builder.set_cache_size(CACHE_BYTES);
    let opened = no_panic(|| Ok(builder.create_file(private_file(path)?)?));
    opened.map_err(|failure| match failure {
        WorkFailure::Damage(_) => failure.at("open", path),
        WorkFailure::Other(redb::Error::DatabaseAlreadyOpen) => {
            StorageError::InUse { path: path.to_owned() }
        }
        WorkFailure::Other(error) => {
            StorageError::Open { path: path.to_owned(), source: Box::new(error) }
        }
    })
}

/// Opens or makes a file that only its owner may read. Former releases made it readable for all.
fn private_file(path: &Path) -> io::Result<File> {
    let mut options = File::options();
    let file =
        options.read(true).write(true).create(true).truncate(false).mode(0o600).open(path)?;
    if file.metadata()?.mode() & 0o077 != 0 {
        file.set_permissions(Permissions::from_mode(0o600))?;
    }
    Ok(file)
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
        StorageError::Access { source, .. } => io::Error::other(source),
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
