//! The audit of orders: who, what, when, why.

use common::tree::Time;
use redb::{ReadableTable as _, TableDefinition, WriteTransaction};
use serde::{Deserialize, Serialize};

use crate::core::order::Order;

/// Orders by number; JSON.
pub(super) const ORDERS: TableDefinition<'static, u64, &'static [u8]> =
    TableDefinition::new("orders");

/// Numbers that go on over restarts.
pub(super) const NUMBERS: TableDefinition<'static, &'static str, u64> =
    TableDefinition::new("numbers");

/// The number of the next event of any kind: numbers tell in which order events were recorded.
const NEXT_EVENT: &str = "next-event";

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

/// Takes `count` numbers, and gives the first.
pub(super) fn number(write: &WriteTransaction, count: u64) -> Result<u64, redb::Error> {
    let mut numbers = write.open_table(NUMBERS)?;
    let next = numbers.get(NEXT_EVENT)?.map_or(1, |next| next.value());
    numbers.insert(NEXT_EVENT, next + count)?;
    Ok(next)
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
    let number = number(write, 1)?;
    write.open_table(ORDERS)?.insert(number, &row[..])?;
    Ok(())
}
