//! Checks, restores and salvages the database of a dominator that does not run.

use std::fs::File;
use std::io;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use model::tree::Time;
use redb::{ReadableDatabase as _, ReadableTable as _};
use serde::Serialize;
use system::clock::wall;

use super::backup::{COPIED, SALVAGED};
use super::database::{FILE, OpenDatabase, SETTINGS, SettingsRow};
use super::history_log::{HistoryLog, ORDERS, Stream};
use super::history_rows::OrderRow;
use super::rollouts::{Rows, read_rows, write_rows};
use super::{IDENTITIES, Storage, StorageError};
use crate::core::identity::KnownIdentity;

/// The name of a database before it takes its place.
const NEW: &str = "dominator.redb.new";

/// The name of the copy that is salvaged.
const SOURCE: &str = "dominator.redb.source";

/// The name that a replaced database gets.
pub const REPLACED: &str = "dominator.redb.replaced";

/// The settings that are salvaged.
const SAVED_SETTINGS: [&str; 12] = [
    "brake",
    "pauses",
    "rollbacks",
    "default-image",
    "subs",
    "machines",
    "departing",
    "stopped-images",
    "known-images",
    "fences",
    "permit-seconds",
    "name",
];

/// What a database contains.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DatabaseSummary {
    /// The machines of the machine database in force.
    pub machines: usize,
    /// The machines whose last known identity is stored.
    pub identities: usize,
    /// Why updates are disabled, if they are.
    pub brake: Option<String>,
    /// When the copy was made, if it is one that no dominator was started on yet.
    pub copied: Option<Time>,
}

/// What was salvaged.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Salvaged {
    pub database: DatabaseSummary,
    /// How many orders were saved.
    pub orders: usize,
    /// What could not be read.
    pub lost: Vec<String>,
}

/// Reads the whole database in the state directory `state`, as a dominator does at its start.
/// Fails with [`StorageError::Damaged`] if a page or a value of it is damaged.
pub fn check(state: &Path) -> Result<DatabaseSummary, StorageError> {
    let path = state.join(FILE);
    drop(lock(&path)?.ok_or_else(|| StorageError::Missing { path: path.clone() })?);
    summary(&path)
}

/// Checks `backup`, and puts a copy of it into the place of the database in the state directory
/// `state`. On an error the former database stays. The former one is renamed to [`REPLACED`].
pub fn restore(backup: &Path, state: &Path) -> Result<DatabaseSummary, StorageError> {
    let locked = lock(&state.join(FILE))?;
    let new = NewFile::copy(backup, state, NEW)?;
    let summary = summary(&new.path)?;
    if summary.copied.is_none() {
        // It is not from `domtool backup`, but a dominator must not go on from it either.
        mark(&new.path, COPIED, &wall())?;
    }
    new.replace(state)?;
    drop(locked);
    Ok(summary)
}

/// Saves what can be read of the damaged database in the state directory `state` into a new one:
/// what operators ordered, the machine database in force, and identities. The history of updates
/// and statuses is not saved. On an error nothing changes.
pub fn salvage(state: &Path) -> Result<Salvaged, StorageError> {
    let path = state.join(FILE);
    let locked = lock(&path)?.ok_or_else(|| StorageError::Missing { path: path.clone() })?;
    // Opening may change the file.
    let source = NewFile::copy(&path, state, SOURCE)?;
    let new = NewFile::reserve(state, NEW)?;
    if let Err(error) = OpenDatabase::open(&source.path) {
        return Err(match error {
            StorageError::Damaged { what, .. } => StorageError::Hopeless { path, what },
            error => error,
        });
    }
    let rows = DamagedRows::read(&source.path)?;
    drop(Storage::open_at(&new.path, false)?);
    let (mut lost, orders) = (rows.lost, rows.orders.len());
    for (key, value) in rows.settings {
        // A value that cannot be decoded would keep the dominator from starting.
        set(&new.path, key, Some(&value))?;
        if Storage::open_at(&new.path, false).is_err() {
            set(&new.path, key, None)?;
            lost.push(key.to_owned());
        }
    }
    let database = OpenDatabase::open(&new.path)?;
    write_rows(&database, &rows.rollouts)?;
    database.transact(None, |write| {
        let mut identities = write.open_table(IDENTITIES)?;
        for (host, identity) in &rows.identities {
            identities.insert(host.as_str(), &identity[..])?;
        }
        drop(identities);
        let mut log = HistoryLog::open(write)?;
        for (time, order) in &rows.orders {
            log.add(Stream::Orders, *time, order)?;
        }
        log.finish()
    })?;
    drop(database);
    lost.push("the history of updates and statuses".to_owned());
    mark(&new.path, SALVAGED, &lost)?;
    let database = summary(&new.path)?;
    new.replace(state)?;
    drop(locked);
    Ok(Salvaged { database, orders, lost })
}

fn mark(path: &Path, key: &'static str, value: &impl Serialize) -> Result<(), StorageError> {
    let value = serde_json::to_vec(value).expect("it is a plain structure");
    set(path, key, Some(&value))
}

/// Sets or removes a setting of the database at `path`.
fn set(path: &Path, key: &'static str, value: Option<&[u8]>) -> Result<(), StorageError> {
    let database = Arc::new(OpenDatabase::open(path)?);
    let row = SettingsRow::new(&database, key);
    database.transact(None, |write| row.insert(write, value.unwrap_or_default()))
}

/// Returns what the database at `path` contains.
fn summary(path: &Path) -> Result<DatabaseSummary, StorageError> {
    let database = OpenDatabase::open_checked(path)?;
    let has_settings = database
        .with("read", |database| Ok(database.begin_read()?.open_table(SETTINGS).is_ok()))?;
    if !has_settings {
        let what = "it is not the database of a dominator".to_owned();
        return Err(StorageError::Damaged { path: path.to_owned(), what });
    }
    let storage = Storage::prepare(database, false)?;
    Ok(DatabaseSummary {
        machines: storage.machines.get().as_ref().as_ref().map_or(0, |machines| machines.len()),
        identities: storage.identities()?.len(),
        brake: storage.brake.get().as_ref().as_ref().map(|brake| brake.reason.clone()),
        copied: storage.copied()?,
    })
}

/// Locks the database so that no dominator starts on it; `None` if there is no
/// database.
fn lock(path: &Path) -> Result<Option<File>, StorageError> {
    let file = match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file.map_err(|source| file_error("open", path, source))?,
    };
    match file.try_lock() {
        Ok(()) => Ok(Some(file)),
        Err(std::fs::TryLockError::WouldBlock) => {
            Err(StorageError::InUse { path: path.to_owned() })
        }
        Err(std::fs::TryLockError::Error(source)) => Err(file_error("lock", path, source)),
    }
}

fn file_error(verb: &'static str, path: &Path, source: io::Error) -> StorageError {
    StorageError::File { verb, path: path.to_owned(), source }
}

/// A file in the state directory that does not have its place yet. Dropping it removes it.
struct NewFile {
    path: PathBuf,
}

impl NewFile {
    /// Takes a name that no file has.
    fn reserve(state: &Path, name: &str) -> Result<Self, StorageError> {
        let new = Self { path: state.join(name) };
        new.remove()?;
        Ok(new)
    }

    fn copy(from: &Path, state: &Path, name: &str) -> Result<Self, StorageError> {
        let new = Self::reserve(state, name)?;
        std::fs::copy(from, &new.path).map_err(|source| file_error("copy", from, source))?;
        Ok(new)
    }

    fn remove(&self) -> Result<(), StorageError> {
        match std::fs::remove_file(&self.path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(file_error("remove", &self.path, error))
            }
            _ => Ok(()),
        }
    }

    /// Gives the file the place of the database, durably. Its owner is that of the directory.
    fn replace(self, state: &Path) -> Result<(), StorageError> {
        let place = || -> io::Result<()> {
            let owner = std::fs::metadata(state)?;
            let file = File::open(&self.path)?;
            file.set_permissions(PermissionsExt::from_mode(0o600))?;
            chown(&self.path, Some(owner.uid()), Some(owner.gid()))?;
            file.sync_all()?;
            let (former, replaced) = (state.join(FILE), state.join(REPLACED));
            if former.try_exists()? {
                let _none_before = std::fs::remove_file(&replaced);
                std::fs::hard_link(&former, &replaced)?;
            }
            std::fs::rename(&self.path, &former)?;
            File::open(state)?.sync_all()
        };
        place().map_err(|source| file_error("replace", &state.join(FILE), source))
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        // An error is of no interest: the next call removes it.
        let _removed = self.remove();
    }
}

/// What can be read of a damaged database.
struct DamagedRows {
    settings: Vec<(&'static str, Vec<u8>)>,
    identities: Vec<(String, Vec<u8>)>,
    orders: Vec<(Time, Vec<u8>)>,
    /// Groups, environments and rollouts.
    rollouts: Rows,
    /// What cannot be read.
    lost: Vec<String>,
}

impl DamagedRows {
    fn read(path: &Path) -> Result<Self, StorageError> {
        let mut rows = Self {
            settings: Vec::new(),
            identities: Vec::new(),
            orders: Vec::new(),
            rollouts: Rows::new(),
            lost: Vec::new(),
        };
        for key in SAVED_SETTINGS {
            match read_setting(path, key) {
                Ok(Some(value)) => rows.settings.push((key, value)),
                Ok(None) => {}
                Err(StorageError::Damaged { .. }) => rows.lost.push(key.to_owned()),
                Err(error) => return Err(error),
            }
        }
        let identities = &mut rows.identities;
        let read = OpenDatabase::open(path)?.with("read", |database| {
            for row in database.begin_read()?.open_table(IDENTITIES)?.iter()? {
                let (host, identity) = row?;
                if serde_json::from_slice::<KnownIdentity>(identity.value()).is_ok() {
                    identities.push((host.value().to_owned(), identity.value().to_vec()));
                }
            }
            Ok(())
        });
        rows.note(read, "identities of machines")?;
        let orders = &mut rows.orders;
        let read = OpenDatabase::open(path)?.with("read", |database| {
            for row in database.begin_read()?.open_table(ORDERS)?.iter()? {
                let row = row?.1.value().to_vec();
                if let Ok(order) = serde_json::from_slice::<OrderRow>(&row) {
                    orders.push((order.time, row));
                }
            }
            Ok(())
        });
        rows.note(read, "orders")?;
        match read_rows(&OpenDatabase::open(path)?) {
            Ok(rollouts) => rows.rollouts = rollouts,
            Err(StorageError::Damaged { .. }) => {
                rows.lost.push("environments and rollouts".to_owned());
            }
            Err(error) => return Err(error),
        }
        Ok(rows)
    }

    /// Notes that not all rows could be read.
    fn note(&mut self, read: Result<(), StorageError>, what: &str) -> Result<(), StorageError> {
        match read {
            Err(StorageError::Damaged { .. }) => self.lost.push(format!("some {what}")),
            read => return read,
        }
        Ok(())
    }
}

/// Reads one setting. A database that was found damaged is opened again for the next.
fn read_setting(path: &Path, key: &'static str) -> Result<Option<Vec<u8>>, StorageError> {
    OpenDatabase::open(path)?.with("read", |database| {
        let table = database.begin_read()?.open_table(SETTINGS)?;
        Ok(table.get(key)?.map(|row| row.value().to_vec()))
    })
}

#[cfg(test)]
mod tests;
