//! What survives a restart: the brake, pauses, the default image, the machine database in force,
//! the images to which updates have stopped, by what machines were last known, and what happened,
//! in an embedded database.
//!
//! The database file is locked while it is open, so there is one dominator for each state
//! directory.
//!
//! # Invariant
//!
//! * State that an operator ordered is written in one transaction with the record of the order.

mod audit;
mod backup;
mod history_log;
mod history_query;
pub mod history_rows;
mod identities;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use api::dominator::Brake;
use api::dominator::budgets::StoppedImage;
use api::dominator::events::{ListEventsReply, ListEventsRequest};
use api::dominator::orders::DefaultImage;
use model::mdb::Machines;
use model::tree::Time;
use redb::{Database, ReadableDatabase as _, TableDefinition, WriteTransaction};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::core::event_filter::EventFilter;
use crate::core::order::Order;
use crate::core::pauses::KeptPause;
use system::clock::wall;

use crate::storage::history_log::Log;

pub use crate::storage::history_log::{HistoryLimits, Record};
pub use audit::OrderRow;
pub use backup::Copy;

/// The name of the database in the state directory.
pub const FILE: &str = "dominator.redb";

/// How many rows may be taken away with a record at least, so that much is not left for long.
const EVICTED_MIN: usize = 1_000;

/// How much of the database is held in memory, in bytes. The kernel holds more of it.
const CACHE_BYTES: usize = 32 << 20;

/// How often a database that failed is tried to be opened again, and the pause between.
const REOPENED_MAX: usize = 60;
const REOPEN_PAUSE: Duration = Duration::from_millis(50);

const SETTINGS: TableDefinition<'static, &'static str, &'static [u8]> =
    TableDefinition::new("settings");
const BRAKE: &str = "brake";
const MACHINES: &str = "machines";
const PAUSES: &str = "pauses";
const DEFAULT_IMAGE: &str = "default-image";
const STOPPED_IMAGES: &str = "stopped-images";

/// State that cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StateError {
    #[error("cannot make the state directory {}", path.display())]
    Directory {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error(
        "{} is in use: another dominator runs with this state directory; stop it first, or give \
         this one another --state",
        path.display()
    )]
    InUse { path: PathBuf },
    #[error("cannot open the database {}", path.display())]
    Open {
        path: PathBuf,
        #[source]
        source: Box<redb::Error>,
    },
    #[error("cannot {verb} the database {}", path.display())]
    Access {
        /// `read` or `write`.
        verb: &'static str,
        path: PathBuf,
        #[source]
        source: Box<redb::Error>,
    },
    #[error("cannot make a copy of the database at {}", path.display())]
    Copy {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("the record `{key}` of {} is damaged", path.display())]
    Record {
        key: &'static str,
        path: PathBuf,
        #[source]
        source: serde_json::Error,
    },
}

#[derive(Debug)]
pub struct State {
    path: PathBuf,
    /// `None` after a failure: the database must be opened again, and cannot be yet.
    database: Mutex<Option<Database>>,
}

impl State {
    /// Opens the database in `directory`, or makes it.
    ///
    /// # Errors
    ///
    /// [`StateError::InUse`] if another process has it open.
    pub fn open(directory: &Path) -> Result<Self, StateError> {
        fs_err::create_dir_all(directory)
            .map_err(|source| StateError::Directory { path: directory.to_owned(), source })?;
        backup::clean(directory);
        let path = directory.join(FILE);
        let mut database = open(&path)?;
        if let Err(error) = backup::compact(&mut database, &path) {
            // One that has failed refuses to work.
            tracing::warn!("the database is not compacted: {error}");
            drop(database);
            database = open(&path)?;
        }
        let state = Self { path, database: Mutex::new(Some(database)) };
        // So that reading need not ask whether the table is there.
        let has_all = state.with("read", |database| {
            let read = database.begin_read()?;
            let has_settings = read.open_table(SETTINGS).is_ok();
            let has_identities = read.open_table(identities::IDENTITIES).is_ok();
            Ok(has_settings && has_identities && history_log::is_made(&read))
        })?;
        // If it has all of them it can be started upon although the disk is full.
        if !has_all {
            state.transact(None, |write| {
                write.open_table(SETTINGS)?;
                write.open_table(identities::IDENTITIES)?;
                history_log::make(write)
            })?;
        }
        state.brake_copy()?;
        Ok(state)
    }

    /// The brake, if it was on.
    ///
    /// # Errors
    ///
    /// [`StateError`].
    pub fn brake(&self) -> Result<Option<Brake>, StateError> {
        self.get(BRAKE)
    }

    /// Keeps the brake; it is on the disk when this returns.
    ///
    /// # Errors
    ///
    /// [`StateError`].
    pub fn set_brake(&self, brake: Option<&Brake>, order: &Order) -> Result<(), StateError> {
        self.set_ordered(BRAKE, brake, order)
    }

    /// The machine database that was in force.
    ///
    /// # Errors
    ///
    /// [`StateError`].
    pub fn machines(&self) -> Result<Option<Machines>, StateError> {
        self.get(MACHINES)
    }

    /// Keeps the machine database in force, with the order that put it there if one did; it is on
    /// the disk when this returns.
    ///
    /// # Errors
    ///
    /// [`StateError`].
    pub fn set_machines(
        &self,
        machines: &Machines,
        order: Option<&Order>,
    ) -> Result<(), StateError> {
        self.set(MACHINES, Some(machines), order)
    }

    /// The images to which updates had stopped.
    ///
    /// # Errors
    ///
    /// [`StateError`].
    pub fn stopped_images(&self) -> Result<Vec<StoppedImage>, StateError> {
        Ok(self.get(STOPPED_IMAGES)?.unwrap_or_default())
    }

    /// Keeps the images to which updates have stopped, with the order that lets one go on if there
    /// was one; it is on the disk when this returns.
    ///
    /// # Errors
    ///
    /// [`StateError`].
    pub fn set_stopped_images(
        &self,
        stopped: &[StoppedImage],
        order: Option<&Order>,
    ) -> Result<(), StateError> {
        self.set(STOPPED_IMAGES, Some(&stopped), order)
    }

    /// Records an order that changes no state of its own; it is on the disk when this returns.
    ///
    /// # Errors
    ///
    /// [`StateError`]; the order must not be acted on then.
    pub fn record(&self, order: &Order) -> Result<(), StateError> {
        self.transact(Some(order), |_| Ok(()))
    }

    /// Keeps `value` under `key`, or takes it away, as it was ordered; both are on the disk when
    /// this returns.
    ///
    /// # Errors
    ///
    /// [`StateError`]; neither is on the disk then, and the order must not be acted on.
    pub fn set_ordered<T: Serialize>(
        &self,
        key: &'static str,
        value: Option<&T>,
        order: &Order,
    ) -> Result<(), StateError> {
        self.set(key, value, Some(order))
    }

    /// What is kept under `key`.
    ///
    /// # Errors
    ///
    /// [`StateError`].
    pub fn get<T: DeserializeOwned>(&self, key: &'static str) -> Result<Option<T>, StateError> {
        let record = self.with("read", |database| {
            let table = database.begin_read()?.open_table(SETTINGS)?;
            Ok(table.get(key)?.map(|record| record.value().to_vec()))
        })?;
        let Some(record) = record else { return Ok(None) };
        serde_json::from_slice(&record).map(Some).map_err(|source| self.damaged(key, source))
    }

    fn set<T: Serialize>(
        &self,
        key: &'static str,
        value: Option<&T>,
        order: Option<&Order>,
    ) -> Result<(), StateError> {
        let record = value.map(serde_json::to_vec).transpose();
        let record = record.map_err(|source| self.damaged(key, source))?;
        self.transact(order, |write| {
            let mut table = write.open_table(SETTINGS)?;
            match &record {
                Some(record) => table.insert(key, &record[..])?,
                None => table.remove(key)?,
            };
            Ok(())
        })
    }

    fn damaged(&self, key: &'static str, source: serde_json::Error) -> StateError {
        StateError::Record { key, path: self.path.clone(), source }
    }

    /// Makes a change, and records the order that it follows from if there is one, in one
    /// transaction; it is on the disk when this returns.
    ///
    /// # Errors
    ///
    /// [`StateError`]; nothing is on the disk then.
    pub fn transact<T>(
        &self,
        order: Option<&Order>,
        change: impl FnOnce(&WriteTransaction) -> Result<T, redb::Error>,
    ) -> Result<T, StateError> {
        self.with("write", |database| {
            let write = database.begin_write()?;
            let result = change(&write)?;
            if let Some(order) = order {
                audit::append(&write, wall(), order)?;
            }
            write.commit()?;
            Ok(result)
        })
    }

    /// Adds records to the log, and takes the oldest away that are too many or too old; all of them
    /// are on the disk when this returns. Gives how many went.
    ///
    /// # Errors
    ///
    /// [`StateError`]; nothing was added then.
    pub fn append(
        &self,
        records: &[Record],
        limits: HistoryLimits,
        now: Time,
    ) -> Result<usize, StateError> {
        self.transact(None, |write| {
            let mut log = Log::open(write)?;
            log.record(records)?;
            log.finish()?;
            history_log::evict(write, limits, now, EVICTED_MIN + 4 * records.len())
        })
    }

    /// The id of the last update of each machine that is in the log.
    ///
    /// # Errors
    ///
    /// [`StateError`].
    pub fn last_updates(&self) -> Result<BTreeMap<String, u64>, StateError> {
        self.with("read", |database| {
            let table = database.begin_read()?.open_table(history_log::LAST)?;
            let mut last = BTreeMap::new();
            for entry in table.range::<&str>(..)? {
                let (host, place) = entry?;
                last.insert(host.value().to_owned(), place.value().1);
            }
            Ok(last)
        })
    }

    /// The events that are asked for.
    ///
    /// # Errors
    ///
    /// [`StateError`].
    pub fn events(
        &self,
        filter: EventFilter,
        request: &ListEventsRequest,
    ) -> Result<ListEventsReply, StateError> {
        // What is read stays as it is, so nobody has to wait for the search.
        let read = self.with("read", |database| Ok(database.begin_read()?))?;
        history_query::search(&read, filter, request).map_err(|source| self.failed("read", source))
    }

    fn failed(&self, verb: &'static str, source: redb::Error) -> StateError {
        StateError::Access { verb, path: self.path.clone(), source: Box::new(source) }
    }

    /// Does `work` with the database. One that has failed once refuses to work ever after, so it
    /// is opened again: a disk that was full must not cost the brake.
    fn with<T>(
        &self,
        verb: &'static str,
        work: impl FnOnce(&Database) -> Result<T, redb::Error>,
    ) -> Result<T, StateError> {
        let mut held = self.database.lock().unwrap_or_else(PoisonError::into_inner);
        let database = match held.take() {
            Some(database) => database,
            None => open_again(&self.path)?,
        };
        let result = work(&database);
        if result.is_ok() {
            *held = Some(database);
        } else {
            // It locks its file until it is dropped.
            drop(database);
            *held = open_again(&self.path).ok();
        }
        result.map_err(|source| self.failed(verb, source))
    }
}

/// Opens a database that this process has closed. Somebody may still read from it, which is over
/// soon.
fn open_again(path: &Path) -> Result<Database, StateError> {
    for _ in 0..REOPENED_MAX {
        match open(path) {
            Err(StateError::InUse { .. }) => std::thread::sleep(REOPEN_PAUSE),
            result => return result,
        }
    }
    open(path)
}

fn open(path: &Path) -> Result<Database, StateError> {
    let mut builder = Database::builder();
    builder.set_cache_size(CACHE_BYTES);
    builder.create(path).map_err(|error| match error {
        redb::DatabaseError::DatabaseAlreadyOpen => StateError::InUse { path: path.to_owned() },
        error => StateError::Open { path: path.to_owned(), source: Box::new(error.into()) },
    })
}

impl State {
    /// The pauses that operators ordered.
    ///
    /// # Errors
    ///
    /// [`StateError`].
    pub fn pauses(&self) -> Result<Vec<KeptPause>, StateError> {
        Ok(self.get(PAUSES)?.unwrap_or_default())
    }

    /// Keeps the pauses of all machines, with the order that changed them if one did; they are on
    /// the disk when this returns.
    ///
    /// # Errors
    ///
    /// [`StateError`]; nothing is changed then.
    pub fn set_pauses(
        &self,
        pauses: &[KeptPause],
        order: Option<&Order>,
    ) -> Result<(), StateError> {
        self.set(PAUSES, Some(&pauses).filter(|pauses| !pauses.is_empty()), order)
    }

    /// The image of machines whose record names none.
    ///
    /// # Errors
    ///
    /// [`StateError`].
    pub fn default_image(&self) -> Result<Option<DefaultImage>, StateError> {
        self.get(DEFAULT_IMAGE)
    }

    /// Keeps the image of machines whose record names none; it is on the disk when this returns.
    ///
    /// # Errors
    ///
    /// [`StateError`]; nothing is changed then.
    pub fn set_default_image(
        &self,
        image: Option<&DefaultImage>,
        order: &Order,
    ) -> Result<(), StateError> {
        self.set_ordered(DEFAULT_IMAGE, image, order)
    }
}

#[cfg(test)]
pub(crate) mod tests;
