//! Database files: readable for their owner alone, checked when they are opened, and opened again
//! after a failure.
//!
//! # Invariants
//!
//! * A database that has failed refuses to work ever after, so it is opened again: a disk that was
//!   full must not cost more than what could not be written.
//! * A damaged page is an error, also where redb panics.

use std::cell::Cell;
use std::fs::{File, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, Once, OnceLock};
use std::time::Duration;

use model::display::error_chain;
use model::lock::locked;
use redb::{Database, ReadTransaction, ReadableDatabase as _};

/// How much of the database is held in memory, in bytes. The kernel holds more of it.
const CACHE_BYTES: usize = 2 << 20;

/// How often a database that failed is tried to be opened again, and the pause between.
const REOPENED_MAX: usize = 60;
const REOPEN_PAUSE: Duration = Duration::from_millis(50);

/// Smaller databases are not compacted.
const COMPACT_BYTES_MIN: u64 = 64 << 20;

/// Why a database cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DatabaseError {
    #[error("{} is in use by another process: has that the same state directory?", path.display())]
    InUse { path: PathBuf },
    #[error("cannot open the database {}", path.display())]
    Open {
        path: PathBuf,
        #[source]
        source: Box<redb::Error>,
    },
    #[error("cannot {verb} the database {}", path.display())]
    Access {
        /// What was done: `read` or `write`.
        verb: &'static str,
        path: PathBuf,
        #[source]
        source: Box<redb::Error>,
    },
    #[error("the database {} is damaged: {what}", path.display())]
    Damaged {
        path: PathBuf,
        /// What was found.
        what: String,
    },
}

impl DatabaseError {
    /// True if the file is not that of a database, or damaged.
    fn is_damage(&self) -> bool {
        match self {
            Self::Damaged { .. } => true,
            Self::Open { source, .. } => match &**source {
                redb::Error::Io(error) => error.kind() == ErrorKind::InvalidData,
                _ => false,
            },
            Self::InUse { .. } | Self::Access { .. } => false,
        }
    }
}

/// The open database file.
#[derive(Debug)]
pub struct DatabaseFile {
    path: PathBuf,
    /// `None` after a failure: the database must be opened again, and cannot be yet.
    database: Mutex<Option<Database>>,
    /// What is wrong with the content of the file, once that is known. Nothing is read or written
    /// then.
    damage: OnceLock<String>,
}

impl DatabaseFile {
    /// Opens the database at `path`, or creates it.
    ///
    /// # Errors
    ///
    /// [`DatabaseError::InUse`] if another process has it open.
    pub fn open(path: &Path) -> Result<Self, DatabaseError> {
        Ok(Self::new(path, open(path)?))
    }

    fn new(path: &Path, database: Database) -> Self {
        let database = Mutex::new(Some(database));
        Self { path: path.to_owned(), database, damage: OnceLock::new() }
    }

    /// As [`DatabaseFile::open`]. Reads the whole file first, and makes it smaller if much of it is
    /// empty.
    ///
    /// # Errors
    ///
    /// [`DatabaseError::Damaged`] if a page of it is damaged.
    pub fn open_checked(path: &Path) -> Result<Self, DatabaseError> {
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

    /// Opens a database of which nothing is lost for good, and calls `prepare` with it. If it is
    /// damaged, it is made anew; `lost` says what that costs.
    ///
    /// # Errors
    ///
    /// [`DatabaseError`], except for damage.
    pub fn open_or_renew(
        path: &Path,
        prepare: impl Fn(&Database) -> Result<(), redb::Error>,
        lost: &str,
    ) -> Result<Self, DatabaseError> {
        let open = || -> Result<Self, DatabaseError> {
            let database = Self::open_checked(path)?;
            database.with("write", &prepare)?;
            Ok(database)
        };
        match open() {
            Err(error) if error.is_damage() => {
                let why = error_chain(&error);
                tracing::error!("{} is made anew, and {lost}: {why}", path.display());
                std::fs::remove_file(path).map_err(|error| DatabaseError::Open {
                    path: path.to_owned(),
                    source: Box::new(error.into()),
                })?;
                open()
            }
            opened => opened,
        }
    }

    /// Returns where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns what is wrong with the content of the file, once that is known.
    #[must_use]
    pub fn damage(&self) -> Option<&str> {
        self.damage.get().map(String::as_str)
    }

    /// Notes what has failed. Returns the error.
    fn failed(&self, verb: &'static str, failure: WorkFailure) -> DatabaseError {
        if let WorkFailure::Damage(what) = &failure
            && self.damage.set(what.clone()).is_ok()
        {
            tracing::error!("the database {} is damaged: {what}", self.path.display());
        }
        failure.at(verb, &self.path)
    }

    /// Calls `work` with the database; `verb` says in errors what that is.
    ///
    /// # Errors
    ///
    /// [`DatabaseError::Access`], or [`DatabaseError::Damaged`], also of earlier work.
    pub fn with<T>(
        &self,
        verb: &'static str,
        work: impl FnOnce(&Database) -> Result<T, redb::Error>,
    ) -> Result<T, DatabaseError> {
        if let Some(what) = self.damage() {
            return Err(DatabaseError::Damaged { path: self.path.clone(), what: what.to_owned() });
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

    /// Calls `work` with what the database is now. Others can use the database meanwhile.
    ///
    /// # Errors
    ///
    /// As [`DatabaseFile::with`].
    pub fn read_beside<T>(
        &self,
        work: impl FnOnce(&ReadTransaction) -> Result<T, redb::Error>,
    ) -> Result<T, DatabaseError> {
        let read = self.with("read", |database| Ok(database.begin_read()?))?;
        no_panic(|| work(&read)).map_err(|failure| self.failed("read", failure))
    }
}

/// Opens a database that this process has closed. Another thread may still read from it for a
/// moment.
fn open_again(path: &Path) -> Result<Database, DatabaseError> {
    for _ in 0..REOPENED_MAX {
        match open(path) {
            Err(DatabaseError::InUse { .. }) => std::thread::sleep(REOPEN_PAUSE),
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

/// Why work with a database failed.
#[derive(Debug)]
enum WorkFailure {
    /// The content of the file is not that of a database.
    Damage(String),
    Other(redb::Error),
}

impl WorkFailure {
    fn at(self, verb: &'static str, path: &Path) -> DatabaseError {
        let path = path.to_owned();
        match self {
            Self::Damage(what) => DatabaseError::Damaged { path, what },
            Self::Other(source) => DatabaseError::Access { verb, path, source: Box::new(source) },
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
fn no_panic<T>(work: impl FnOnce() -> Result<T, redb::Error>) -> Result<T, WorkFailure> {
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

impl Drop for DatabaseFile {
    fn drop(&mut self) {
        if let Some(database) = locked(&self.database).take() {
            drop_quietly(database);
        }
    }
}

/// Opens the database at `path`, or makes it. Only its owner may read it.
fn open(path: &Path) -> Result<Database, DatabaseError> {
    let mut builder = Database::builder();
    builder.set_cache_size(CACHE_BYTES);
    let opened = no_panic(|| Ok(builder.create_file(private_file(path)?)?));
    opened.map_err(|failure| match failure {
        WorkFailure::Damage(_) => failure.at("open", path),
        WorkFailure::Other(redb::Error::DatabaseAlreadyOpen) => {
            DatabaseError::InUse { path: path.to_owned() }
        }
        WorkFailure::Other(error) => {
            DatabaseError::Open { path: path.to_owned(), source: Box::new(error) }
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

#[cfg(test)]
mod tests {
    use redb::TableDefinition;

    use super::*;

    const NUMBERS: TableDefinition<'static, u64, u64> = TableDefinition::new("numbers");

    fn prepare(database: &Database) -> Result<(), redb::Error> {
        let write = database.begin_write()?;
        write.open_table(NUMBERS)?;
        Ok(write.commit()?)
    }

    fn insert(file: &DatabaseFile, number: u64) -> Result<(), DatabaseError> {
        file.with("write", |database| {
            let write = database.begin_write()?;
            write.open_table(NUMBERS)?.insert(number, number)?;
            Ok(write.commit()?)
        })
    }

    fn numbers(file: &DatabaseFile) -> Vec<u64> {
        let read = file.with("read", |database| {
            let table = database.begin_read()?.open_table(NUMBERS)?;
            table.range::<u64>(..)?.map(|row| Ok(row?.0.value())).collect()
        });
        read.unwrap()
    }

    #[test]
    fn a_database_that_has_failed_is_opened_again() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("it.redb");
        let open = || DatabaseFile::open_or_renew(&path, prepare, "nothing is lost");
        let file = open().unwrap();
        insert(&file, 1).unwrap();
        let failed = file.with("write", |_| Err::<(), _>(redb::Error::PreviousIo));
        assert!(matches!(failed, Err(DatabaseError::Access { verb: "write", .. })), "{failed:?}");
        insert(&file, 2).unwrap();
        assert!(matches!(open(), Err(DatabaseError::InUse { .. })));
        drop(file);
        assert_eq!(numbers(&open().unwrap()), [1, 2]);
    }

    #[test]
    fn a_panic_is_damage_and_what_is_damaged_is_made_anew() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("it.redb");
        let open = || DatabaseFile::open_or_renew(&path, prepare, "nothing is lost").unwrap();
        let file = open();
        insert(&file, 1).unwrap();
        let failed = file.with("read", |_| -> Result<(), redb::Error> { panic!("a page") });
        let is_damage = |result: &Result<(), DatabaseError>| match result {
            Err(DatabaseError::Damaged { what, .. }) => what == "a page",
            _ => false,
        };
        assert!(is_damage(&failed), "{failed:?}");
        let later = insert(&file, 2);
        assert!(is_damage(&later), "{later:?}");
        drop(file);
        std::fs::write(&path, vec![b'x'; 100_000]).unwrap();
        assert_eq!(numbers(&open()), Vec::<u64>::new());
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
    }
}
