//! The log of events in the database: numbered rows, limited in size and age.
//!
//! There are three streams (orders, updates, statuses), so that frequent events do not evict
//! important ones. Numbers are common to all. NumberedRows whose numbers differ only in the last
//! [`SEGMENT_BITS`] bits form a *segment*, whose first and last time and size are stored. So a time
//! is found without reading each row, also if the clock jumped, and sizes are known without a sum
//! over all rows.

use std::collections::BTreeMap;

use api::subd::UpdateOutcome;
use model::tree::Time;
use redb::{ReadTransaction, ReadableTable, TableDefinition, WriteTransaction};

use crate::core::orders::Order;
use crate::storage::history_rows::{
    ChangeList, EndRow, ListDigest, OrderRow, StatusRow, UndoneRow, UpdateRow, bytes_of, row_of,
};

/// DriverCounters, by name.
const NUMBERS: TableDefinition<'static, &'static str, u64> = TableDefinition::new("numbers");

type NumberedRows = TableDefinition<'static, u64, &'static [u8]>;

/// Orders by number; JSON.
pub(super) const ORDERS: NumberedRows = TableDefinition::new("orders");
/// Updates by number: [`UpdateRow`].
pub(super) const UPDATES: NumberedRows = TableDefinition::new("updates");
/// How updates ended, by the number of the update: [`EndRow`].
pub(super) const ENDS: NumberedRows = TableDefinition::new("ends");
/// Changes of status by number: [`StatusRow`].
pub(super) const STATUSES: NumberedRows = TableDefinition::new("statuses");
/// The last update of each machine: its number in the log, and its id.
pub(super) const LAST: TableDefinition<'static, &'static str, (u64, u64)> =
    TableDefinition::new("last-updates");

/// The update of each machine that failed its health check, by host: [`UndoneRow`]. It is kept,
/// however old it is, until the machine gets that image after all, or another one.
pub(super) const UNDONE: TableDefinition<'static, &'static str, &'static [u8]> =
    TableDefinition::new("undone");
/// Lists of changes by digest: how many rows name it, and its chunks.
pub(super) const LISTS: TableDefinition<'static, &'static [u8], (u64, &'static [u8])> =
    TableDefinition::new("lists");
/// Chunks of lists by digest: how many lists name it, and its bytes.
pub(super) const CHUNKS: TableDefinition<'static, &'static [u8], (u64, &'static [u8])> =
    TableDefinition::new("chunks");
/// First second, last second, rows and bytes of each segment of each stream.
pub(super) const SEGMENTS: TableDefinition<'static, (u8, u64), (i64, i64, u64, u64)> =
    TableDefinition::new("segments");

/// How many low bits of a number are the position in its segment.
pub(super) const SEGMENT_BITS: u32 = 12;

/// The approximate overhead of a row, in bytes.
const ROW_BYTES: u64 = 24;

/// The approximate overhead of a list or a chunk, in bytes.
const LIST_BYTES: u64 = 64;

/// The number of the next event of any kind: numbers are in the order of recording.
const NEXT_EVENT: &str = "next-event";

/// The size of all lists and chunks, in bytes.
const LISTS_SIZE: &str = "size-lists";

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Stream {
    Orders,
    Updates,
    Statuses,
}

impl Stream {
    pub(super) const ALL: [Self; 3] = [Self::Orders, Self::Updates, Self::Statuses];

    pub(super) fn rows(self) -> NumberedRows {
        match self {
            Self::Orders => ORDERS,
            Self::Updates => UPDATES,
            Self::Statuses => STATUSES,
        }
    }

    pub(super) fn code(self) -> u8 {
        match self {
            Self::Orders => 0,
            Self::Updates => 1,
            Self::Statuses => 2,
        }
    }

    fn size_key(self) -> &'static str {
        match self {
            Self::Orders => "size-orders",
            Self::Updates => "size-updates",
            Self::Statuses => "size-statuses",
        }
    }
}

/// The limits of the history.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HistoryLimits {
    /// The size of all records, in bytes. The file takes up to twice as much.
    pub bytes: u64,
    /// The age of updates and statuses, in seconds. Orders have no limit of age.
    pub seconds: i64,
}

impl HistoryLimits {
    fn stream_bytes(self, stream: Stream) -> u64 {
        match stream {
            Stream::Orders => self.bytes / 8,
            Stream::Updates => self.bytes / 8 * 5,
            Stream::Statuses => self.bytes / 4,
        }
    }

    fn oldest(self, stream: Stream, now: Option<Time>) -> i64 {
        match (stream, now) {
            (Stream::Orders, _) | (_, None) => i64::MIN,
            (Stream::Updates | Stream::Statuses, Some(now)) => {
                now.seconds.saturating_sub(self.seconds)
            }
        }
    }
}

#[derive(Clone, Debug)]
pub enum HistoryRecord {
    /// A status, or a gap.
    Status(StatusRow),
    /// An update that is about to be ordered; one of the same id is recorded once.
    Update(UpdateRow, std::sync::Arc<ChangeList>),
    /// How the last update of a machine ended, if it has this id.
    End { host: String, update_id: u64, row: EndRow },
}

#[derive(Clone, Copy, Debug)]
struct Segment {
    first: i64,
    last: i64,
    rows: u64,
    bytes: u64,
}

/// Creates all tables.
pub(super) fn make(write: &WriteTransaction) -> Result<(), redb::Error> {
    for rows in [ORDERS, UPDATES, ENDS, STATUSES] {
        write.open_table(rows)?;
    }
    write.open_table(LAST)?;
    write.open_table(UNDONE)?;
    write.open_table(LISTS)?;
    write.open_table(CHUNKS)?;
    write.open_table(SEGMENTS)?;
    write.open_table(NUMBERS)?;
    Ok(())
}

/// True if all tables are there.
pub(super) fn is_made(read: &ReadTransaction) -> bool {
    [ORDERS, UPDATES, ENDS, STATUSES].iter().all(|rows| read.open_table(*rows).is_ok())
        && read.open_table(LAST).is_ok()
        && read.open_table(UNDONE).is_ok()
        && read.open_table(LISTS).is_ok()
        && read.open_table(CHUNKS).is_ok()
        && read.open_table(SEGMENTS).is_ok()
        && read.open_table(NUMBERS).is_ok()
}

/// NumberedRows that are being added in one transaction.
pub(super) struct HistoryLog<'a> {
    write: &'a WriteTransaction,
    next: u64,
    added: BTreeMap<(u8, u64), Segment>,
}

impl<'a> HistoryLog<'a> {
    pub(super) fn open(write: &'a WriteTransaction) -> Result<Self, redb::Error> {
        let next = write.open_table(NUMBERS)?.get(NEXT_EVENT)?.map_or(1, |next| next.value());
        Ok(Self { write, next, added: BTreeMap::new() })
    }

    /// Adds a row. Returns its number.
    pub(super) fn add(
        &mut self,
        stream: Stream,
        time: Time,
        row: &[u8],
    ) -> Result<u64, redb::Error> {
        let number = self.next;
        self.next += 1;
        self.write.open_table(stream.rows())?.insert(number, row)?;
        let seconds = time.seconds;
        let key = (stream.code(), number >> SEGMENT_BITS);
        let none = Segment { first: seconds, last: seconds, rows: 0, bytes: 0 };
        let segment = self.added.entry(key).or_insert(none);
        segment.first = segment.first.min(seconds);
        segment.last = segment.last.max(seconds);
        segment.rows += 1;
        segment.bytes += row.len() as u64 + ROW_BYTES;
        Ok(number)
    }

    pub(super) fn record(&mut self, records: &[HistoryRecord]) -> Result<(), redb::Error> {
        for record in records {
            match record {
                HistoryRecord::Status(row) => {
                    self.add(Stream::Statuses, row.time(), &bytes_of(row))?;
                }
                HistoryRecord::Update(row, list) => self.update(row, list)?,
                HistoryRecord::End { host, update_id, row } => self.end(host, *update_id, row)?,
            }
        }
        Ok(())
    }

    fn last_of(&self, host: &str) -> Result<Option<(u64, u64)>, redb::Error> {
        Ok(self.write.open_table(LAST)?.get(host)?.map(|last| last.value()))
    }

    fn update(&mut self, row: &UpdateRow, list: &ChangeList) -> Result<(), redb::Error> {
        if self.last_of(&row.host)?.is_some_and(|(_, id)| id == row.update_id) {
            return Ok(());
        }
        let number = self.add(Stream::Updates, row.time, &bytes_of(row))?;
        self.write.open_table(LAST)?.insert(row.host.as_str(), (number, row.update_id))?;
        add_list_use(self.write, list)
    }

    fn end(&mut self, host: &str, update_id: u64, row: &EndRow) -> Result<(), redb::Error> {
        let Some((number, id)) = self.last_of(host)? else { return Ok(()) };
        let mut ends = self.write.open_table(ENDS)?;
        let known = match ends.get(number)? {
            Some(known) => EndRow::of(known.value()).ok(),
            None => None,
        };
        // The machine reports the end again after a restart: the first time counts.
        if id == update_id && known.is_none_or(|known| known.outcome != row.outcome) {
            ends.insert(number, &row.bytes()[..])?;
            drop(ends);
            self.note_undone(host, number, update_id, &row.outcome)?;
        }
        Ok(())
    }

    /// Remembers an update that was undone, or forgets it. A repair of the image that a machine was
    /// put back to changes nothing.
    fn note_undone(
        &mut self,
        host: &str,
        number: u64,
        update_id: u64,
        outcome: &UpdateOutcome,
    ) -> Result<(), redb::Error> {
        let updates = self.write.open_table(UPDATES)?;
        let update = updates.get(number)?.and_then(|row| row_of::<UpdateRow>(row.value()).ok());
        let Some(update) = update.filter(|update| update.image != update.former) else {
            return Ok(());
        };
        let mut undone = self.write.open_table(UNDONE)?;
        match outcome {
            UpdateOutcome::Undone(why) => {
                let row = UndoneRow { update_id, image: update.image, why: why.clone() };
                undone.insert(host, &bytes_of(&row)[..])?;
            }
            UpdateOutcome::Done => {
                undone.remove(host)?;
            }
            _ => {}
        }
        Ok(())
    }

    /// Writes the sizes of the added rows.
    pub(super) fn finish(self) -> Result<(), redb::Error> {
        let mut numbers = self.write.open_table(NUMBERS)?;
        numbers.insert(NEXT_EVENT, self.next)?;
        let mut segments = self.write.open_table(SEGMENTS)?;
        for ((code, place), added) in &self.added {
            let known = segments.get((*code, *place))?.map(|known| known.value());
            let (first, last, rows, bytes) = known.unwrap_or((i64::MAX, i64::MIN, 0, 0));
            let sum = (
                first.min(added.first),
                last.max(added.last),
                rows + added.rows,
                bytes + added.bytes,
            );
            segments.insert((*code, *place), sum)?;
        }
        for stream in Stream::ALL {
            let of_stream = self.added.iter().filter(|((code, _), _)| *code == stream.code());
            let bytes: u64 = of_stream.map(|(_, added)| added.bytes).sum();
            grow(&mut numbers, stream.size_key(), bytes)?;
        }
        Ok(())
    }
}

/// Adds an order.
pub(super) fn append_order(
    write: &WriteTransaction,
    time: Time,
    order: &Order,
) -> Result<(), redb::Error> {
    let Order { verb, about, what, who, why } = order.clone();
    let row = OrderRow { time, verb: verb.to_owned(), about, what, who, why };
    let row = serde_json::to_vec(&row).expect("an order is a plain structure");
    let mut log = HistoryLog::open(write)?;
    log.add(Stream::Orders, time, &row)?;
    log.finish()
}

fn grow(
    numbers: &mut redb::Table<'_, &'static str, u64>,
    key: &str,
    bytes: u64,
) -> Result<(), redb::Error> {
    let before = size(numbers, key)?;
    numbers.insert(key, before + bytes)?;
    Ok(())
}

fn shrink(
    numbers: &mut redb::Table<'_, &'static str, u64>,
    key: &str,
    bytes: u64,
) -> Result<(), redb::Error> {
    let before = size(numbers, key)?;
    numbers.insert(key, before.saturating_sub(bytes))?;
    Ok(())
}

fn size(numbers: &impl ReadableTable<&'static str, u64>, key: &str) -> Result<u64, redb::Error> {
    Ok(numbers.get(key)?.map_or(0, |size| size.value()))
}

/// Adds a use of a list. Stores it, and those of its chunks that are not stored yet, at the first
/// use.
fn add_list_use(write: &WriteTransaction, list: &ChangeList) -> Result<(), redb::Error> {
    let mut lists = write.open_table(LISTS)?;
    let index = list.index();
    let named = lists.get(&list.digest[..])?.map_or(0, |known| known.value().0);
    lists.insert(&list.digest[..], (named + 1, &index[..]))?;
    if named > 0 {
        return Ok(());
    }
    let mut chunks = write.open_table(CHUNKS)?;
    let mut bytes = index.len() as u64 + LIST_BYTES;
    for (digest, chunk) in &list.chunks {
        let named = chunks.get(&digest[..])?.map_or(0, |known| known.value().0);
        chunks.insert(&digest[..], (named + 1, &chunk[..]))?;
        if named == 0 {
            bytes += chunk.len() as u64 + LIST_BYTES;
        }
    }
    grow(&mut write.open_table(NUMBERS)?, LISTS_SIZE, bytes)
}

/// Removes a use of a list. Removes the list and its chunks when nothing uses them.
fn remove_list_use(write: &WriteTransaction, digest: &ListDigest) -> Result<(), redb::Error> {
    let mut lists = write.open_table(LISTS)?;
    let known = lists.get(&digest[..])?.map(|known| {
        let (named, index) = known.value();
        (named, index.to_vec())
    });
    let Some((named, index)) = known else { return Ok(()) };
    if named > 1 {
        lists.insert(&digest[..], (named - 1, &index[..]))?;
        return Ok(());
    }
    lists.remove(&digest[..])?;
    let mut chunks = write.open_table(CHUNKS)?;
    let mut bytes = index.len() as u64 + LIST_BYTES;
    for digest in index.chunks(size_of::<ListDigest>()) {
        let known = chunks.get(digest)?.map(|known| {
            let (named, chunk) = known.value();
            (named, chunk.to_vec())
        });
        match known {
            None => {}
            Some((0 | 1, chunk)) => {
                chunks.remove(digest)?;
                bytes += chunk.len() as u64 + LIST_BYTES;
            }
            Some((named, chunk)) => {
                chunks.insert(digest, (named - 1, &chunk[..]))?;
            }
        }
    }
    shrink(&mut write.open_table(NUMBERS)?, LISTS_SIZE, bytes)
}

/// Removes the oldest rows that are too many or, with `now`, too old, at most `rows_max` of them.
/// Returns how many.
pub(super) fn evict(
    write: &WriteTransaction,
    limits: HistoryLimits,
    now: Option<Time>,
    rows_max: usize,
) -> Result<usize, redb::Error> {
    let mut removed = 0;
    for stream in Stream::ALL {
        let mut lost_bytes = 0;
        while removed < rows_max {
            let (is_much, has_lists) = {
                let numbers = write.open_table(NUMBERS)?;
                let rows = size(&numbers, stream.size_key())?.saturating_sub(lost_bytes);
                let lists = if stream == Stream::Updates { size(&numbers, LISTS_SIZE)? } else { 0 };
                (rows + lists > limits.stream_bytes(stream), lists > 0)
            };
            let oldest = {
                let segments = write.open_table(SEGMENTS)?;
                let mut of_stream = segments.range((stream.code(), 0)..(stream.code() + 1, 0))?;
                let oldest = of_stream.next().transpose()?;
                oldest.map(|(key, segment)| (key.value(), segment.value()))
            };
            let Some((key, (first, last, rows, bytes))) = oldest else { break };
            let is_old = last < limits.oldest(stream, now);
            if !is_much && !is_old {
                break;
            }
            // A whole segment is removed at once, unless the lists may be what is too much.
            let wanted = if has_lists && !is_old { 64 } else { 1 << SEGMENT_BITS };
            let rows_max = wanted.min(rows_max - removed);
            let (taken, mut taken_bytes) = remove_rows(write, stream, key.1, rows_max)?;
            removed += taken;
            let mut segments = write.open_table(SEGMENTS)?;
            if taken == 0 || rows <= taken as u64 {
                segments.remove(key)?;
                // The segment is empty, whatever its sum was.
                taken_bytes = taken_bytes.max(bytes);
            } else {
                let left = (rows - taken as u64, bytes.saturating_sub(taken_bytes));
                segments.insert(key, (first, last, left.0, left.1))?;
            }
            lost_bytes += taken_bytes;
        }
        shrink(&mut write.open_table(NUMBERS)?, stream.size_key(), lost_bytes)?;
    }
    Ok(removed)
}

/// Removes the oldest rows of a stream up to the end of the segment `place`, at most `rows_max`.
/// Returns how many, and their size in bytes.
fn remove_rows(
    write: &WriteTransaction,
    stream: Stream,
    place: u64,
    rows_max: usize,
) -> Result<(usize, u64), redb::Error> {
    let end = (place + 1) << SEGMENT_BITS;
    let (mut removed, mut bytes) = (0, 0);
    while removed < rows_max {
        let mut table = write.open_table(stream.rows())?;
        let oldest = table.first()?.map(|(number, _)| number.value());
        let Some(number) = oldest.filter(|number| *number < end) else { break };
        let row = table.remove(number)?.map(|row| row.value().to_vec()).unwrap_or_default();
        drop(table);
        removed += 1;
        bytes += row.len() as u64 + ROW_BYTES;
        if stream == Stream::Updates {
            forget_update(write, number, &row)?;
        }
    }
    Ok((removed, bytes))
}

fn forget_update(write: &WriteTransaction, number: u64, row: &[u8]) -> Result<(), redb::Error> {
    write.open_table(ENDS)?.remove(number)?;
    // A row that cannot be decoded uses no list.
    let Ok(row) = row_of::<UpdateRow>(row) else { return Ok(()) };
    let mut last = write.open_table(LAST)?;
    if last.get(row.host.as_str())?.is_some_and(|last| last.value().0 == number) {
        last.remove(row.host.as_str())?;
    }
    drop(last);
    remove_list_use(write, &row.list)
}
