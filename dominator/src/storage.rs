//! Stores what survives a restart, in an embedded database: values that operators order, the
//! machine database in force, the last known identities of machines, and the history.
//!
//! The database file is locked while it is open, so there is one dominator for each state
//! directory.
//!
//! Single values are [`Durable`](system::durable::Durable)s, each in a row of one table. Identities
//! are rows of their own: a fleet has thousands, which are in memory already
//! ([`crate::core::identity::IdentityTable`], which also knows which of them are to be saved), and
//! one value would be rewritten as a whole at each change.
//!
//! # Invariant
//!
//! * Storage that an operator ordered is written in one transaction with the record of the order
//!   ([`with_order`]).

mod backup;
pub mod computed;
mod database;
mod history_log;
mod history_query;
pub mod history_rows;
pub mod offline;
mod rollouts;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ::database::DatabaseError;
use api::dominator::Brake;
use api::dominator::events::{ListEventsReply, ListEventsRequest};
use api::dominator::orders::{DefaultImage, StoppedImage};
use api::dominator::permits::Fence;
use model::image::ImageName;
use model::mdb::Machine;
use model::object::ObjectId;
use model::tree::Time;
use redb::{ReadableDatabase as _, ReadableTable as _, TableDefinition};
use system::durable::DurableError;
use system::trusted_clock::SavedClock;

use crate::core::departing::Departing;
use crate::core::event_filter::EventFilter;
use crate::core::identity::KnownIdentity;
use crate::core::orders::Order;
use crate::core::orders::Pauses;
use crate::core::rollback::Rollbacks;
use crate::core::settings::Settings;
use crate::core::task_orders::TaskOrders;
use crate::storage::computed::ComputedStore;
use crate::storage::database::{
    OpenDatabase, PausesJson, RowJson, SETTINGS, SettingsRow, StoredValue,
};
use crate::storage::history_log::HistoryLog;
use crate::storage::history_rows::{UndoneRow, row_of};

pub use backup::DatabaseCopy;
pub use database::{FILE, with_order};
pub use history_log::{HistoryLimits, HistoryRecord};
pub use rollouts::StoredRollouts;

/// How many rows may be removed with a record at least, so that a surplus does not stay for long.
pub const EVICTED_MIN: usize = 1_000;

/// The directory of the audit log in the state directory. Where it is, a dominator has run.
const AUDIT: &str = "audit";

/// The key of [`Storage::clock`].
const CLOCK: &str = "clock";

/// Last known identities of machines, as JSON by host name.
const IDENTITIES: TableDefinition<'static, &'static str, &'static [u8]> =
    TableDefinition::new("identities");

/// Storage that cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StorageError {
    #[error("cannot create the state directory {}", path.display())]
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
    #[error(
        "the database {} is damaged: {what}. Stop the dominator and restore a backup: domtool \
         database restore BACKUP --state {}; without a backup, save what can be read: domtool \
         database salvage --state {1}",
        path.display(), path.parent().unwrap_or(path).display()
    )]
    Damaged {
        path: PathBuf,
        /// What was found.
        what: String,
    },
    #[error(
        "nothing of the database {} can be read: {what}. Restore a backup; or move the file away: \
         the dominator then starts with an empty database and with updates disabled",
        path.display()
    )]
    Hopeless {
        path: PathBuf,
        /// What was found.
        what: String,
    },
    #[error("there is no database {}: is this the state directory (--state)?", path.display())]
    Missing { path: PathBuf },
    #[error("cannot {verb} {}", path.display())]
    File {
        verb: &'static str,
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("cannot make a copy of the database at {}", path.display())]
    Copy {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error(transparent)]
    Database(DatabaseError),
    #[error(transparent)]
    StoredValue(#[from] DurableError),
}

impl From<DatabaseError> for StorageError {
    fn from(error: DatabaseError) -> Self {
        match error {
            DatabaseError::InUse { path } => Self::InUse { path },
            DatabaseError::Damaged { path, what } => Self::Damaged { path, what },
            error => Self::Database(error),
        }
    }
}

/// Machines of a machine database, by host name.
pub type SharedMachines = BTreeMap<String, Arc<Machine>>;

/// All that survives a restart.
#[derive(Debug)]
pub struct Storage {
    pub(crate) database: Arc<OpenDatabase>,
    /// The brake, if it is on.
    pub brake: StoredValue<Option<Arc<Brake>>>,
    /// The pauses that operators ordered.
    pub pauses: StoredValue<Pauses, PausesJson>,
    /// The machines that operators keep at their former images.
    pub rollbacks: StoredValue<Rollbacks>,
    /// The machines that are off, as operators say, by host name.
    pub fences: StoredValue<BTreeMap<String, Fence>>,
    /// The longest time of a permit that may have been given, in seconds.
    pub permit_seconds: StoredValue<Option<u64>>,
    /// The orders about tasks that machines have not taken.
    pub task_orders: StoredValue<TaskOrders>,
    /// The machines that have left the machine database.
    pub departing: StoredValue<Departing>,
    /// The image of machines whose record names none.
    pub default_image: StoredValue<Option<Arc<DefaultImage>>>,
    /// The configuration of subs.
    pub settings: StoredValue<Settings>,
    /// The machine database in force; `None` before the first.
    pub machines: StoredValue<Option<SharedMachines>>,
    /// The images to which updates have stopped.
    pub stopped_images: StoredValue<Vec<StoppedImage>>,
    /// The digest of each image that was used, by its name.
    pub known_images: StoredValue<BTreeMap<ImageName, ObjectId>>,
    /// The name of this dominator, which subs know it by.
    pub name: StoredValue<Option<String>>,
    /// The key of links to vote, in hexadecimal.
    pub link_key: StoredValue<Option<String>>,
    /// Groups, environments and rollouts.
    pub rollouts: StoredRollouts,
    /// The clock when it was last trusted.
    pub clock: StoredValue<Option<SavedClock>>,
}

impl Storage {
    /// Opens the database in `directory`, or creates it.
    pub fn open(directory: &Path) -> Result<Self, StorageError> {
        fs_err::create_dir_all(directory)
            .map_err(|source| StorageError::Directory { path: directory.to_owned(), source })?;
        backup::clean(directory);
        // Copying a backup to a full disk leaves a file of no bytes.
        let was_used = [FILE, AUDIT].iter().any(|name| directory.join(name).exists());
        let state = Self::open_at(&directory.join(FILE), was_used)?;
        state.brake_marked()?;
        Ok(state)
    }

    /// Opens the database at `path`, or creates it. A new one gets a mark if one was used before.
    fn open_at(path: &Path, was_used: bool) -> Result<Self, StorageError> {
        Self::prepare(OpenDatabase::open_checked(path)?, was_used)
    }

    /// Makes the tables that are missing, and reads the values.
    fn prepare(database: OpenDatabase, was_used: bool) -> Result<Self, StorageError> {
        let database = Arc::new(database);
        // So that reading need not ask whether the table is there.
        let (has_settings, has_all) = database.with("read", |database| {
            let read = database.begin_read()?;
            let has_settings = read.open_table(SETTINGS).is_ok();
            let has_identities = read.open_table(IDENTITIES).is_ok();
            Ok((has_settings, has_settings && has_identities && history_log::is_made(&read)))
        })?;
        // If it has all of them it can be started upon although the disk is full.
        if !has_all {
            database.transact(None, |write| {
                let mut settings = write.open_table(SETTINGS)?;
                if was_used && !has_settings {
                    settings.insert(backup::LOST, &b"true"[..])?;
                }
                write.open_table(IDENTITIES)?;
                history_log::make(write)
            })?;
        }
        let row = |key| SettingsRow::new(&database, key);
        Ok(Self {
            brake: StoredValue::load_or_default_as(row("brake"), RowJson)?,
            pauses: StoredValue::load_or_default_as(row("pauses"), PausesJson)?,
            rollbacks: StoredValue::load_or_default_as(row("rollbacks"), RowJson)?,
            fences: StoredValue::load_or_default_as(row("fences"), RowJson)?,
            permit_seconds: StoredValue::load_or_default_as(row("permit-seconds"), RowJson)?,
            task_orders: StoredValue::load_or_default_as(row("task-orders"), RowJson)?,
            departing: StoredValue::load_or_default_as(row("departing"), RowJson)?,
            default_image: StoredValue::load_or_default_as(row("default-image"), RowJson)?,
            settings: StoredValue::load_or_default_as(row("subs"), RowJson)?,
            machines: StoredValue::load_or_default_as(row("machines"), RowJson)?,
            stopped_images: StoredValue::load_or_default_as(row("stopped-images"), RowJson)?,
            known_images: StoredValue::load_or_default_as(row("known-images"), RowJson)?,
            name: StoredValue::load_or_default_as(row("name"), RowJson)?,
            link_key: StoredValue::load_or_default_as(row("link-key"), RowJson)?,
            rollouts: StoredRollouts::load(&database)?,
            clock: StoredValue::load_or_default_as(row(CLOCK), RowJson)?,
            database,
        })
    }

    /// Opens the database of computed files, which is beside this one.
    pub fn open_computed(&self) -> Result<ComputedStore, StorageError> {
        ComputedStore::open(self.database.path().parent().unwrap_or(Path::new("/")))
    }

    /// Records an order that changes no state of its own; it is on the disk when this returns. On
    /// an error the order must not be carried out.
    pub fn record(&self, order: &Order) -> Result<(), StorageError> {
        self.database.transact(Some(order), |_| Ok(()))
    }

    /// Reads the last known identity of each machine.
    pub fn identities(&self) -> Result<BTreeMap<Arc<str>, KnownIdentity>, StorageError> {
        let rows = self.database.with("read", |database| {
            let table = database.begin_read()?.open_table(IDENTITIES)?;
            let mut rows: Vec<(Arc<str>, Vec<u8>)> = Vec::new();
            for row in table.iter()? {
                let (hostname, identity) = row?;
                rows.push((hostname.value().into(), identity.value().to_vec()));
            }
            Ok(rows)
        })?;
        let place = self.database.place("identities");
        let parsed = rows.into_iter().map(|(hostname, identity)| {
            let damaged =
                |error| DurableError::Damaged { place: place.clone(), source: Into::into(error) };
            let identity: KnownIdentity = serde_json::from_slice(&identity).map_err(damaged)?;
            Ok((hostname, identity))
        });
        parsed.collect()
    }

    /// Saves the last known identities of these machines, or removes them (`None`), with the order
    /// that they follow from if there is one. All of it is on the disk when this returns; on an
    /// error nothing is.
    pub fn save_identities(
        &self,
        identities: &[(Arc<str>, Option<KnownIdentity>)],
        order: Option<&Order>,
    ) -> Result<(), StorageError> {
        let encode = |identity| serde_json::to_vec(identity).expect("it is a plain structure");
        self.database.transact(order, |write| {
            let mut table = write.open_table(IDENTITIES)?;
            for (hostname, identity) in identities {
                match identity {
                    Some(identity) => table.insert(&**hostname, &encode(identity)[..])?,
                    None => table.remove(&**hostname)?,
                };
            }
            Ok(())
        })
    }

    /// Returns what is wrong with the content of the database, once that is known.
    pub fn damage(&self) -> Option<&str> {
        self.database.damage()
    }

    /// Adds records to the history, and removes the oldest that are too many or too old; it is on
    /// the disk when this returns. Without `now` none is too old: the clock is not trusted. Returns
    /// how many were removed. On an error nothing was added.
    pub fn append(
        &self,
        records: &[HistoryRecord],
        limits: HistoryLimits,
        now: Option<Time>,
    ) -> Result<usize, StorageError> {
        self.database.transact(None, |write| {
            let mut log = HistoryLog::open(write)?;
            log.record(records)?;
            log.finish()?;
            history_log::evict(write, limits, now, EVICTED_MIN + 4 * records.len())
        })
    }

    /// Returns the id of the last update of each machine that is in the history.
    pub fn last_updates(&self) -> Result<BTreeMap<String, u64>, StorageError> {
        self.database.with("read", |database| {
            let table = database.begin_read()?.open_table(history_log::LAST)?;
            let mut last = BTreeMap::new();
            for entry in table.range::<&str>(..)? {
                let (host, place) = entry?;
                last.insert(host.value().to_owned(), place.value().1);
            }
            Ok(last)
        })
    }

    /// Returns the update of `host` that failed its health check, if it is kept at its former
    /// image.
    pub fn undone(&self, host: &str) -> Result<Option<UndoneRow>, StorageError> {
        self.database.with("read", |database| {
            let table = database.begin_read()?.open_table(history_log::UNDONE)?;
            Ok(table.get(host)?.and_then(|row| row_of(row.value()).ok()))
        })
    }

    /// Returns the images that machines had before the required ones, as far as the history tells.
    /// `required` has the required image of each machine that is asked about.
    pub fn former_images(
        &self,
        required: BTreeMap<String, ImageName>,
    ) -> Result<BTreeMap<String, ImageName>, StorageError> {
        self.database.with("read", |database| {
            history_query::former_images(&database.begin_read()?, required)
        })
    }

    /// Finds the events that `request` asks for.
    pub fn events(
        &self,
        filter: EventFilter,
        request: &ListEventsRequest,
    ) -> Result<ListEventsReply, StorageError> {
        // Nobody has to wait for the search.
        self.database.read_beside(|read| history_query::search(read, filter, request))
    }
}

#[cfg(test)]
pub(crate) mod tests;
