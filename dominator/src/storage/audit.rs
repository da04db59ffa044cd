//! The audit of orders: who, what, when, why.

use model::tree::Time;
use redb::{TableDefinition, WriteTransaction};
use serde::{Deserialize, Serialize};

use crate::core::order::Order;
use crate::storage::history_log::{Log, Stream};

/// Numbers that go on over restarts.
pub(super) const NUMBERS: TableDefinition<'static, &'static str, u64> =
    TableDefinition::new("numbers");

/// An order as it is recorded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OrderRow {
    /// When it was given.
    pub time: Time,
    /// See [`Order`].
    pub verb: String,
    /// See [`Order`].
    pub about: String,
    /// See [`Order`].
    pub who: String,
    /// See [`Order`].
    pub why: String,
}

/// Records an order.
pub(super) fn append(
    write: &WriteTransaction,
    time: Time,
    order: &Order,
) -> Result<(), redb::Error> {
    let Order { verb, about, who, why } = order.clone();
    let row = OrderRow { time, verb: verb.to_owned(), about, who, why };
    let row = serde_json::to_vec(&row).expect("an order is a plain structure");
    let mut log = Log::open(write)?;
    log.add(Stream::Orders, time, &row)?;
    log.finish()
}
