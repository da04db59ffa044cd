//! What survives a restart: the brake, the machine database in force, and the audit of orders, in
//! an embedded database.
//!
//! The database file is locked while it is open, so there is one dominator for each state
//! directory.
//!
//! # Invariant
//!
//! * State that an operator ordered is written in one transaction with the record of the order.

mod audit;

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use common::api::dominator::Brake;
use common::mdb::Machines;
use redb::{Database, ReadableDatabase as _, TableDefinition, WriteTransaction};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::chance::wall;
use crate::core::order::Order;

pub use audit::OrderRow;

/// The name of the database in the state directory.
pub const FILE: &str = "dominator.redb";

const SETTINGS: TableDefinition<'static, &'static str, &'static [u8]> =
    TableDefinition::new("settings");
const BRAKE: &str = "brake";
const MACHINES: &str = "machines";

/// State that cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StateError {
    /// The state directory cannot be made.
    #[error("cannot make the state directory {}", path.display())]
    Directory {
        /// The directory.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        source: std::io::Error,
    },
    /// Another process has the database open.
    #[error(
        "{} is in use: another dominator runs with this state directory; stop it first, or give \
         this one another --state",
        path.display()
    )]
    InUse {
        /// The database.
        path: PathBuf,
    },
    /// The database cannot be opened.
    #[error("cannot open the database {}", path.display())]
    Open {
        /// The database.
        path: PathBuf,
        /// What it said.
        #[source]
        source: Box<redb::Error>,
    },
    /// The database cannot be read or written.
    #[error("cannot {verb} the database {}", path.display())]
    Access {
        /// `read` or `write`.
        verb: &'static str,
        /// The database.
        path: PathBuf,
        /// What it said.
        #[source]
        source: Box<redb::Error>,
    },
    /// A record is no JSON of its kind.
    #[error("the record `{key}` of {} is damaged", path.display())]
    Record {
        /// The record.
        key: &'static str,
        /// The database.
        path: PathBuf,
        /// What is wrong with it.
        #[source]
        source: serde_json::Error,
    },
}

/// See the module's text.
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
        let path = directory.join(FILE);
        let database = Mutex::new(Some(open(&path)?));
        let state = Self { path, database };
        // So that reading need not ask whether the table is there.
        state.transact(None, |write| {
            write.open_table(SETTINGS)?;
            write.open_table(audit::ORDERS)?;
            write.open_table(audit::NUMBERS)?;
            Ok(())
        })?;
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

    /// The last `count` orders, the newest first.
    ///
    /// # Errors
    ///
    /// [`StateError`].
    pub fn orders(&self, count: usize) -> Result<Vec<OrderRow>, StateError> {
        let rows: Vec<Vec<u8>> = self.with("read", |database| {
            let table = database.begin_read()?.open_table(audit::ORDERS)?;
            let newest = table.range::<u64>(..)?.rev().take(count);
            newest.map(|row| Ok(row?.1.value().to_vec())).collect()
        })?;
        let read = |row: Vec<u8>| serde_json::from_slice(&row);
        rows.into_iter().map(|row| read(row).map_err(|e| self.damaged("order", e))).collect()
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
            None => open(&self.path)?,
        };
        let result = work(&database);
        if result.is_ok() {
            *held = Some(database);
        } else {
            // It locks its file until it is dropped.
            drop(database);
            *held = open(&self.path).ok();
        }
        result.map_err(|source| StateError::Access {
            verb,
            path: self.path.clone(),
            source: Box::new(source),
        })
    }
}

fn open(path: &Path) -> Result<Database, StateError> {
    Database::create(path).map_err(|error| match error {
        redb::DatabaseError::DatabaseAlreadyOpen => StateError::InUse { path: path.to_owned() },
        error => StateError::Open { path: path.to_owned(), source: Box::new(error.into()) },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use common::tree::Time;

    #[test]
    fn the_brake_is_kept_and_the_file_is_locked() {
        let directory = tempfile::tempdir().unwrap();
        let brake = Brake { reason: "storm".into(), who: "ops".into(), since: Time::default() };
        let state = State::open(directory.path()).unwrap();
        assert_eq!(state.brake().unwrap(), None);
        state.set_brake(Some(&brake), &Order::of("disable-updates", "ops").why("storm")).unwrap();
        let second = State::open(directory.path()).unwrap_err();
        assert!(matches!(second, StateError::InUse { .. }), "{second}");
        drop(state);
        let state = State::open(directory.path()).unwrap();
        assert_eq!(state.brake().unwrap(), Some(brake));
        state.set_brake(None, &Order::of("enable-updates", "ops")).unwrap();
        assert_eq!(state.brake().unwrap(), None);
        state.record(&Order::of("retry", "ann").about("web1")).unwrap();
        drop(state);
        let orders = State::open(directory.path()).unwrap().orders(10).unwrap();
        let texts: Vec<[&str; 4]> =
            orders.iter().map(|row| [&*row.verb, &row.about, &row.who, &row.why]).collect();
        let expected = [
            ["retry", "web1", "ann", ""],
            ["enable-updates", "", "ops", ""],
            ["disable-updates", "", "ops", "storm"],
        ];
        assert_eq!(texts, expected);
    }

    #[test]
    fn the_machines_are_kept() {
        let directory = tempfile::tempdir().unwrap();
        let text = r#"[{"Hostname": "a", "RequiredImage": "x"}, {"Hostname": "b"}]"#;
        let machines = common::mdb::parse(text).unwrap();
        let state = State::open(directory.path()).unwrap();
        assert_eq!(state.machines().unwrap(), None);
        state.set_machines(&machines, None).unwrap();
        drop(state);
        assert_eq!(State::open(directory.path()).unwrap().machines().unwrap(), Some(machines));
    }
}
