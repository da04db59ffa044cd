//! Finds events in the log, the newest first, a limited number of rows at a time.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use api::dominator::events::{
    EVENTS_MAX, EventDetails, EventKind, EventPosition, HistoryEvent, ListEventsReply,
    ListEventsRequest, PathChange, UpdateSummary,
};
use api::subd::UpdateOutcome;
use model::image::ImageName;
use redb::{ReadOnlyTable, ReadTransaction};

use crate::core::event_filter::EventFilter;
use crate::core::rollback::{FormerImage, former_image};
use crate::storage::history_log::{CHUNKS, ENDS, LISTS, SEGMENT_BITS, SEGMENTS, Stream, UPDATES};
use crate::storage::history_rows::{
    EndRow, ListDigest, OrderRow, StatusRow, UpdateRow, bytes_of, count_of, row_of,
};
use api::dominator::orders::is_pattern;

/// How many rows and changes are read for one reply.
const WORK_MAX: usize = 200_000;

/// The approximate size of a reply, in bytes.
const REPLY_BYTES: usize = 4 << 20;

/// The approximate size of an event without its change, in bytes.
const FACTS_BYTES: usize = 200;

/// The cost of matching the pattern of an order with the hosts asked for, in rows.
const PATTERN_WORK: usize = 20;

/// How many rows are read ahead.
const AHEAD: usize = 256;

/// The rows of one stream, the newest first.
struct StreamReader {
    stream: Stream,
    table: ReadOnlyTable<u64, &'static [u8]>,
    /// The rows from this number on were returned or skipped.
    below: u64,
    ahead: VecDeque<(u64, Vec<u8>)>,
}

impl StreamReader {
    /// Returns the number of the next row.
    fn peek(
        &mut self,
        segments: &ReadOnlyTable<(u8, u64), (i64, i64, u64, u64)>,
        filter: &EventFilter,
    ) -> Result<Option<u64>, redb::Error> {
        while self.ahead.is_empty() {
            let Some(newest) = self.table.range(..self.below)?.next_back() else { return Ok(None) };
            let place = newest?.0.value() >> SEGMENT_BITS;
            let start = place << SEGMENT_BITS;
            let known = segments.get((self.stream.code(), place))?.map(|known| known.value());
            let time = |seconds, nanoseconds| model::tree::Time { seconds, nanoseconds };
            let is_wanted = known.is_none_or(|(first, last, ..)| {
                filter.wants_span(time(first, 0), time(last, 999_999_999))
            });
            if !is_wanted {
                self.below = start;
                continue;
            }
            for row in self.table.range(start..self.below)?.rev().take(AHEAD) {
                let (number, row) = row?;
                self.ahead.push_back((number.value(), row.value().to_vec()));
            }
            self.below = self.ahead.back().map_or(start, |(number, _)| *number);
        }
        Ok(self.ahead.front().map(|(number, _)| *number))
    }
}

/// The chunks of a list, each with how many changes come before it.
type Chunks = Arc<Vec<(ListDigest, u32)>>;

struct Search<'a> {
    read: &'a ReadTransaction,
    filter: EventFilter,
    before: EventPosition,
    /// The rows up to this number are not asked for.
    after: u64,
    limit: usize,
    events: Vec<HistoryEvent>,
    bytes: usize,
    work: usize,
    /// Lists that were read.
    lists: BTreeMap<ListDigest, Chunks>,
    /// Chunks without a change that is asked for.
    barren: BTreeSet<ListDigest>,
}

/// Finds the events that are asked for.
pub(super) fn search(
    read: &ReadTransaction,
    filter: EventFilter,
    request: &ListEventsRequest,
) -> Result<ListEventsReply, redb::Error> {
    let limit = match request.limit {
        0 => EVENTS_MAX,
        limit => limit.min(EVENTS_MAX),
    };
    let last = EventPosition { number: u64::MAX, part: u32::MAX };
    let search = Search {
        read,
        filter,
        before: request.before.unwrap_or(last),
        after: request.after.map_or(0, |after| after.number),
        limit: limit as usize,
        events: Vec::new(),
        bytes: 0,
        work: 0,
        lists: BTreeMap::new(),
        barren: BTreeSet::new(),
    };
    search.run()
}

impl Search<'_> {
    fn run(mut self) -> Result<ListEventsReply, redb::Error> {
        let segments = self.read.open_table(SEGMENTS)?;
        let wants = |stream| match stream {
            Stream::Orders => self.filter.wants_kind(EventKind::Order),
            Stream::Updates => {
                self.filter.wants_kind(EventKind::Update)
                    || self.filter.wants_kind(EventKind::Change)
            }
            Stream::Statuses => self.filter.wants_kind(EventKind::Status),
        };
        let mut walks = Vec::new();
        for stream in Stream::ALL.into_iter().filter(|stream| wants(*stream)) {
            let table = self.read.open_table(stream.rows())?;
            let below = self.before.number.saturating_add(1);
            walks.push(StreamReader { stream, table, below, ahead: VecDeque::new() });
        }
        loop {
            let mut newest: Option<(u64, usize)> = None;
            for (index, walk) in walks.iter_mut().enumerate() {
                if let Some(number) = walk.peek(&segments, &self.filter)? {
                    newest = newest.max(Some((number, index)));
                }
            }
            let newest = newest.filter(|(number, _)| *number > self.after);
            let Some((number, index)) = newest else {
                return Ok(ListEventsReply { events: self.events, next: None });
            };
            let is_full = self.events.len() >= self.limit || self.bytes >= REPLY_BYTES;
            if is_full || self.work >= WORK_MAX {
                // The next reply begins with this row.
                let next = Some(EventPosition { number, part: u32::MAX });
                return Ok(ListEventsReply { events: self.events, next });
            }
            let Some((_, row)) = walks[index].ahead.pop_front() else { continue };
            self.work += 1;
            let next = match walks[index].stream {
                Stream::Orders => self.order(number, &row),
                Stream::Statuses => self.status(number, &row),
                Stream::Updates => self.update(number, &row)?,
            };
            if next.is_some() {
                return Ok(ListEventsReply { events: self.events, next });
            }
        }
    }

    fn give(&mut self, number: u64, time: model::tree::Time, about: String, what: EventDetails) {
        self.events.push(HistoryEvent { at: EventPosition { number, part: 0 }, time, about, what });
    }

    fn order(&mut self, number: u64, row: &[u8]) -> Option<EventPosition> {
        let order: OrderRow = serde_json::from_slice(row).ok()?;
        let OrderRow { time, verb, about, what, who, why } = order;
        if is_pattern(&about) {
            self.work += PATTERN_WORK;
        }
        let is_wanted = self.filter.wants_who(&who) && self.filter.wants_order(time, &verb, &about);
        if self.is_new(number) && is_wanted {
            self.bytes += row.len();
            let why = [what, why].into_iter().filter(|text| !text.is_empty());
            let why = why.collect::<Vec<_>>().join("; ");
            self.give(number, time, about, EventDetails::Order { verb, who, why });
        }
        None
    }

    fn status(&mut self, number: u64, bytes: &[u8]) -> Option<EventPosition> {
        let row: StatusRow = row_of(bytes).ok()?;
        let (time, about, what) = match row {
            StatusRow::Status { time, host, status, detail } => {
                (time, host, EventDetails::Status { status, detail })
            }
            StatusRow::Gap { time, lost } => (time, String::new(), EventDetails::Gap { lost }),
        };
        if self.is_new(number) && self.filter.wants(time, &about) {
            self.bytes += bytes.len();
            self.give(number, time, about, what);
        }
        None
    }

    /// True unless the former reply had the row.
    fn is_new(&self, number: u64) -> bool {
        number < self.before.number || self.before.part > 0
    }

    fn update(&mut self, number: u64, bytes: &[u8]) -> Result<Option<EventPosition>, redb::Error> {
        let Ok(row) = row_of::<UpdateRow>(bytes) else { return Ok(None) };
        let filter = &self.filter;
        let is_wanted = filter.wants(row.time, &row.host)
            && filter.wants_image(&row.image)
            && filter.wants_reasons(|reason| row.has(reason))
            && filter.wants_marks(row.marks);
        if !is_wanted {
            return Ok(None);
        }
        // Backwards: the last path first, the update itself after its paths.
        let upto = if number == self.before.number { self.before.part } else { u32::MAX };
        if self.filter.wants_kind(EventKind::Change)
            && let Some(next) = self.changes(number, &row, upto)?
        {
            return Ok(Some(next));
        }
        if self.filter.wants_kind(EventKind::Update) && upto > 0 {
            if self.events.len() >= self.limit {
                return Ok(Some(EventPosition { number, part: 1 }));
            }
            let end = self.end(number)?;
            let triggers = end.as_ref().map(|end| end.failed_triggers.clone());
            let update = summary(&row, end);
            self.bytes += bytes.len();
            let what = match triggers.filter(|triggers| !triggers.is_empty()) {
                Some(triggers) => EventDetails::TriggersFailed { update, triggers },
                None => EventDetails::Update(update),
            };
            self.give(number, row.time, row.host, what);
        }
        Ok(None)
    }

    /// Adds the changes of an update whose places in its list are below `upto`; they count from 1.
    /// Returns where to go on if the reply is full.
    fn changes(
        &mut self,
        number: u64,
        row: &UpdateRow,
        upto: u32,
    ) -> Result<Option<EventPosition>, redb::Error> {
        let table = self.read.open_table(CHUNKS)?;
        let mut facts = None;
        for (digest, start) in self.chunks(&row.list)?.iter().rev() {
            if start + 1 >= upto || self.barren.contains(digest) {
                continue;
            }
            let changes = match table.get(&digest[..])? {
                Some(known) => row_of::<Vec<PathChange>>(known.value().1).unwrap_or_default(),
                None => Vec::new(),
            };
            self.work += changes.len();
            let mut is_barren = true;
            for (part, change) in (start + 1..).zip(changes).collect::<Vec<_>>().into_iter().rev() {
                if !self.filter.wants_change(&change) {
                    continue;
                }
                is_barren = false;
                if part >= upto {
                    continue;
                }
                if self.events.len() >= self.limit || self.bytes >= REPLY_BYTES {
                    return Ok(Some(EventPosition { number, part: part + 1 }));
                }
                let update = match &facts {
                    Some(facts) => UpdateSummary::clone(facts),
                    None => facts.insert(summary(row, self.end(number)?)).clone(),
                };
                self.bytes += bytes_of(&change).len() + FACTS_BYTES;
                self.events.push(HistoryEvent {
                    at: EventPosition { number, part },
                    time: row.time,
                    about: row.host.clone(),
                    what: EventDetails::Change { update, change: Box::new(change) },
                });
            }
            if is_barren {
                self.barren.insert(*digest);
            }
        }
        Ok(None)
    }

    /// Returns how the update with this number ended, if that is known.
    fn end(&self, number: u64) -> Result<Option<EndRow>, redb::Error> {
        let ends = self.read.open_table(ENDS)?;
        Ok(ends.get(number)?.and_then(|end| EndRow::of(end.value()).ok()))
    }

    fn chunks(&mut self, list: &ListDigest) -> Result<Chunks, redb::Error> {
        if let Some(chunks) = self.lists.get(list) {
            return Ok(Arc::clone(chunks));
        }
        let lists = self.read.open_table(LISTS)?;
        let index = lists.get(&list[..])?.map(|known| known.value().1.to_vec());
        let table = self.read.open_table(CHUNKS)?;
        let (mut chunks, mut before) = (Vec::new(), 0_u32);
        for digest in index.unwrap_or_default().chunks(size_of::<ListDigest>()) {
            let Ok(digest) = ListDigest::try_from(digest) else { continue };
            let known = table.get(&digest[..])?;
            let count = known.map_or(0, |known| count_of(known.value().1));
            chunks.push((digest, before));
            before = before.saturating_add(count);
        }
        let chunks = Arc::new(chunks);
        self.lists.insert(*list, Arc::clone(&chunks));
        Ok(chunks)
    }
}

/// Returns the images that machines had before the required ones; see `Storage::former_images`.
pub(super) fn former_images(
    read: &ReadTransaction,
    mut required: BTreeMap<String, ImageName>,
) -> Result<BTreeMap<String, ImageName>, redb::Error> {
    let (updates, ends) = (read.open_table(UPDATES)?, read.open_table(ENDS)?);
    let mut found = BTreeMap::new();
    for entry in updates.range(0..)?.rev() {
        if required.is_empty() {
            break;
        }
        let (number, row) = entry?;
        let Ok(row) = row_of::<UpdateRow>(row.value()) else { continue };
        let Some(image) = required.get(&row.host) else { continue };
        let end = ends.get(number.value())?.and_then(|end| EndRow::of(end.value()).ok());
        let is_done = end.is_some_and(|end| end.outcome == UpdateOutcome::Done);
        let former = former_image(image, &row.image, &row.former, is_done);
        if former != FormerImage::Older {
            required.remove(&row.host);
        }
        if let FormerImage::Known(image) = former {
            found.insert(row.host, image);
        }
    }
    Ok(found)
}

fn summary(row: &UpdateRow, end: Option<EndRow>) -> UpdateSummary {
    let [drift, of_image, computed] = row.reasons;
    UpdateSummary {
        update_id: row.update_id,
        image: row.image.clone(),
        former: row.former.clone(),
        drift,
        of_image,
        computed,
        ended: end.as_ref().map(|end| end.time),
        outcome: end.map(|end| end.outcome),
    }
}
