//! Stores groups, environments, rollouts and freezes: a row for each, as JSON.
//!
//! # Invariant
//!
//! * What [`StoredRollouts::get`] returns is on the disk.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use model::lock::locked;
use redb::{ReadableDatabase as _, ReadableTable as _, TableDefinition, TableError};
use rollouts::state::State;
use serde::Serialize;
use serde::de::DeserializeOwned;
use system::durable::DurableError;

use super::StorageError;
use super::database::OpenDatabase;
use crate::core::orders::Order;

/// Rows by kind and name, such as `environment/web`.
const ROWS: TableDefinition<'static, &'static str, &'static [u8]> =
    TableDefinition::new("rollouts");

const GROUP: &str = "group/";
const ENVIRONMENT: &str = "environment/";
const ROLLOUT: &str = "rollout/";
const FREEZE: &str = "freeze/";

/// Rows of the table, by key.
pub(super) type Rows = BTreeMap<String, Vec<u8>>;

/// The groups, environments and rollouts: in memory, and in the database.
#[derive(Debug)]
pub struct StoredRollouts {
    database: Arc<OpenDatabase>,
    state: Mutex<Arc<State>>,
}

impl StoredRollouts {
    pub(super) fn load(database: &Arc<OpenDatabase>) -> Result<Self, StorageError> {
        let mut state = State::default();
        for (key, bytes) in read_rows(database)? {
            let row = Row { database, key: &key, bytes: &bytes };
            if let Some(name) = key.strip_prefix(GROUP) {
                state.groups.insert(name.to_owned(), row.decode()?);
            } else if let Some(name) = key.strip_prefix(ENVIRONMENT) {
                state.environments.insert(name.to_owned(), row.decode()?);
            } else if let Some(name) = key.strip_prefix(FREEZE) {
                state.freezes.insert(name.to_owned(), row.decode()?);
            } else if let Some(number) =
                key.strip_prefix(ROLLOUT).and_then(|text| text.parse().ok())
            {
                state.rollouts.insert(number, row.decode()?);
            }
        }
        Ok(Self { database: Arc::clone(database), state: Mutex::new(Arc::new(state)) })
    }

    pub fn get(&self) -> Arc<State> {
        Arc::clone(&locked(&self.state))
    }

    /// Replaces all of it, with the order that it follows from if there is one, in one transaction.
    /// On an error nothing has changed. Not to be called by two threads at once.
    pub fn replace(&self, next: State, order: Option<&Order>) -> Result<(), StorageError> {
        let before = self.get();
        let mut rows: BTreeMap<String, Option<Vec<u8>>> = BTreeMap::new();
        changed(&mut rows, GROUP, &before.groups, &next.groups);
        changed(&mut rows, ENVIRONMENT, &before.environments, &next.environments);
        changed(&mut rows, ROLLOUT, &before.rollouts, &next.rollouts);
        changed(&mut rows, FREEZE, &before.freezes, &next.freezes);
        if !rows.is_empty() || order.is_some() {
            self.database.transact(order, |write| {
                let mut table = write.open_table(ROWS)?;
                for (key, row) in &rows {
                    match row {
                        Some(bytes) => table.insert(key.as_str(), &bytes[..])?,
                        None => table.remove(key.as_str())?,
                    };
                }
                Ok(())
            })?;
        }
        *locked(&self.state) = Arc::new(next);
        Ok(())
    }
}

/// Adds the rows that differ; `None` for those that are gone.
fn changed<K: Ord + ToString, V: Serialize + PartialEq>(
    rows: &mut BTreeMap<String, Option<Vec<u8>>>,
    kind: &str,
    before: &BTreeMap<K, Arc<V>>,
    after: &BTreeMap<K, Arc<V>>,
) {
    let key = |name: &K| format!("{kind}{}", name.to_string());
    for (name, value) in after {
        let is_same = |former: &Arc<V>| Arc::ptr_eq(former, value) || former == value;
        if !before.get(name).is_some_and(is_same) {
            let bytes = serde_json::to_vec(&**value).expect("it is a plain structure");
            rows.insert(key(name), Some(bytes));
        }
    }
    let gone = before.keys().filter(|name| !after.contains_key(name));
    rows.extend(gone.map(|name| (key(name), None)));
}

/// Reads all rows. A database of an older release has none.
pub(super) fn read_rows(database: &OpenDatabase) -> Result<Rows, StorageError> {
    database.with("read", |database| {
        let table = match database.begin_read()?.open_table(ROWS) {
            Err(TableError::TableDoesNotExist(_)) => return Ok(Rows::new()),
            table => table?,
        };
        let mut rows = Rows::new();
        for row in table.iter()? {
            let (key, bytes) = row?;
            rows.insert(key.value().to_owned(), bytes.value().to_vec());
        }
        Ok(rows)
    })
}

/// Writes rows into a new database.
pub(super) fn write_rows(database: &OpenDatabase, rows: &Rows) -> Result<(), StorageError> {
    database.transact(None, |write| {
        let mut table = write.open_table(ROWS)?;
        for (key, bytes) in rows {
            table.insert(key.as_str(), &bytes[..])?;
        }
        Ok(())
    })
}

/// A row that is to be decoded.
struct Row<'a> {
    database: &'a OpenDatabase,
    key: &'a str,
    bytes: &'a [u8],
}

impl Row<'_> {
    fn decode<T: DeserializeOwned>(&self) -> Result<Arc<T>, StorageError> {
        let value = serde_json::from_slice(self.bytes).map_err(|error| DurableError::Damaged {
            place: self.database.place(self.key),
            source: error.into(),
        })?;
        Ok(Arc::new(value))
    }
}
