//! What happens to machines, on record: one thread writes it, many records in one transaction.
//!
//! # What is promised
//!
//! * An update is on the disk before the machine is told to carry it out. One that cannot be
//!   recorded is not ordered.
//! * How it ended is written within a second, and asked again of the machine after a crash.
//! * Changes of status are written within a second. Those of the last second before a crash are
//!   lost. While nothing can be written the first of them wait in memory, and those that come when
//!   there is no place left are lost; how many is recorded when writing is possible again.

mod change_lists;

use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use api::dominator::Status;
use api::subd::Outcome;
use model::image::required::RequiredImage;
use model::report::report;
use model::words::plain;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot, watch};

use crate::core::changes::{Former, Ordered, changes};
use crate::runtime::history::change_lists::{Lists, Source};
use crate::runtime::images::Images;
use crate::storage::history_rows::{EndRow, List, StatusRow, UpdateRow};
use crate::storage::{HistoryLimits, Record, State, StateError};
use rpc::trees::Reader;
use system::clock::wall;

/// How many updates may wait to be written.
const UPDATES_WAITING: usize = 1_024;

/// How many changes the lists may have together that are being made, or wait to be written: each
/// takes some hundred bytes.
const CHANGES_WAITING: usize = 1 << 20;

/// How many changes of status may wait to be written, or wait for a disk that is full.
const STATUSES_WAITING: usize = 16_384;

/// How many ends of updates may. Changes of status, which are many, must not take their places.
const ENDS_WAITING: usize = 16_384;

/// How many records are written in one transaction.
const BATCH: usize = 1_024;

/// How long changes of status wait for others, to be written with them.
const LINGER: Duration = Duration::from_millis(500);

/// The pause after something could not be written, unless an update is to be written. Updates are
/// not ordered before something was written again, so it is tried even if nothing waits.
const PAUSE: Duration = Duration::from_secs(5);

/// The shortest pause after something could not be written.
const FAILED_PAUSE: Duration = Duration::from_secs(1);

/// How often old records are looked for when nothing happens.
const IDLE: Duration = Duration::from_secs(600);

/// The longest text of an outcome, in bytes. It comes from machines.
const OUTCOME_BYTES_MAX: usize = 4_096;

/// An update that is not on record, so that it must not be ordered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecordError {
    #[error("the update cannot be recorded, and is not ordered before it is: {why}")]
    Write { why: String },
    #[error("the dominator is stopping")]
    Stopping,
}

struct Entry {
    record: Record,
    /// Who waits for an update to be on the disk.
    done: Option<oneshot::Sender<Result<(), String>>>,
    /// Gives the place in the queue back.
    _place: OwnedSemaphorePermit,
    /// The same for that of a list that was made for this.
    _room: Option<OwnedSemaphorePermit>,
}

#[derive(Debug)]
pub struct History {
    queue: Mutex<Option<Sender<Entry>>>,
    updates: Arc<Semaphore>,
    changes: Arc<Semaphore>,
    statuses: Arc<Semaphore>,
    ends: Arc<Semaphore>,
    lost: Arc<Mutex<u64>>,
    trouble: watch::Sender<Option<Arc<str>>>,
    lists: Arc<Lists>,
    /// The last update of each machine that was recorded.
    last: Mutex<BTreeMap<String, u64>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl std::fmt::Debug for Entry {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.record.fmt(formatter)
    }
}

impl History {
    /// Starts the thread that writes to `state`.
    ///
    /// # Errors
    ///
    /// [`StateError`] if what is on record cannot be read.
    pub fn start(state: Arc<State>, limits: HistoryLimits) -> Result<Self, StateError> {
        let last = Mutex::new(state.last_updates()?);
        let (queue, entries) = channel();
        let lost = Arc::new(Mutex::new(0));
        let trouble = watch::Sender::new(None);
        let writer = Writer {
            state,
            limits,
            entries,
            lost: Arc::clone(&lost),
            trouble: trouble.clone(),
            told: None,
            has_more: true,
        };
        let thread = std::thread::spawn(move || writer.run());
        Ok(Self {
            queue: Mutex::new(Some(queue)),
            updates: Arc::new(Semaphore::new(UPDATES_WAITING)),
            changes: Arc::new(Semaphore::new(CHANGES_WAITING)),
            statuses: Arc::new(Semaphore::new(STATUSES_WAITING)),
            ends: Arc::new(Semaphore::new(ENDS_WAITING)),
            lost,
            trouble,
            lists: Arc::default(),
            last,
            thread: Mutex::new(Some(thread)),
        })
    }

    /// Writes what waits to be written, and ends the thread. To be called when all drivers have
    /// ended; waits for the disk.
    pub fn close(&self) {
        drop(self.queue.lock().unwrap_or_else(PoisonError::into_inner).take());
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if thread.is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the writer of the history has panicked");
        }
    }

    /// Why nothing can be written, if it cannot.
    #[must_use]
    pub fn trouble(&self) -> Option<String> {
        self.trouble.borrow().as_deref().map(str::to_owned)
    }

    /// The same, and each change of it.
    #[must_use]
    pub fn watch_trouble(&self) -> watch::Receiver<Option<Arc<str>>> {
        self.trouble.subscribe()
    }

    /// The last update of this machine that is on record.
    #[must_use]
    pub fn last_update(&self, hostname: &str) -> Option<u64> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner).get(hostname).copied()
    }

    /// Records a change of status, soon.
    pub fn status(&self, hostname: &str, status: Status, detail: &str) {
        let record = Record::Status(StatusRow::Status {
            time: wall(),
            host: hostname.to_owned(),
            status: status.name().to_owned(),
            detail: detail.to_owned(),
        });
        self.later(&self.statuses, record);
    }

    /// Records how an update ended, soon.
    pub fn ended(&self, hostname: &str, update_id: u64, outcome: Outcome) {
        let row = EndRow { time: wall(), outcome: short(outcome) };
        self.later(&self.ends, Record::End { host: hostname.to_owned(), update_id, row });
    }

    fn later(&self, places: &Arc<Semaphore>, record: Record) {
        let place = Arc::clone(places).try_acquire_owned();
        let entry = |place| Entry { record, done: None, _place: place, _room: None };
        if !place.is_ok_and(|place| self.send(entry(place))) {
            *self.lost.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        }
    }

    fn send(&self, entry: Entry) -> bool {
        let queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        queue.as_ref().is_some_and(|queue| queue.send(entry).is_ok())
    }

    /// Records an update that is about to be ordered; it is on the disk when this returns.
    ///
    /// # Errors
    ///
    /// [`RecordError`]; it must not be ordered then.
    pub async fn order(
        &self,
        hostname: &str,
        ordered: Box<Ordered>,
        images: &Arc<Images>,
        reader: &Reader,
    ) -> Result<(), RecordError> {
        let update_id = ordered.update_id;
        if self.last_update(hostname) == Some(update_id) {
            return Ok(());
        }
        let (image, former) = (ordered.image.name().to_string(), ordered.former.clone());
        // It may have to be asked for: whoever waits for that has no place.
        let had = Had::of(&ordered, images).await;
        let place = Arc::clone(&self.updates).acquire_owned().await;
        let place = place.map_err(|_| RecordError::Stopping)?;
        let (list, room) = self.list(ordered, had, reader).await?;
        let row = UpdateRow {
            time: wall(),
            host: hostname.to_owned(),
            update_id,
            image,
            former: former.map(String::from).unwrap_or_default(),
            list: list.digest,
            marks: list.marks,
            reasons: list.reasons,
        };
        let (done, is_done) = oneshot::channel();
        let record = Record::Update(row, list);
        if !self.send(Entry { record, done: Some(done), _place: place, _room: room }) {
            return Err(RecordError::Stopping);
        }
        let result = is_done.await.map_err(|_| RecordError::Stopping)?;
        result.map_err(|why| RecordError::Write { why })?;
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        last.insert(hostname.to_owned(), update_id);
        Ok(())
    }

    /// What the update changes, and the room that the list takes if it was made for this.
    async fn list(
        &self,
        ordered: Box<Ordered>,
        had: Had,
        reader: &Reader,
    ) -> Result<(Arc<List>, Option<OwnedSemaphorePermit>), RecordError> {
        let source = Source {
            tree: ordered.tree.digest(),
            image: ordered.image.digest,
            plan: ordered.planned.digest,
            former: match &had {
                Had::Same => Some(ordered.image.digest),
                Had::Other(image) => Some(image.digest),
                Had::Unknown => None,
            },
        };
        if let Some(list) = self.lists.find(source) {
            return Ok((list, None));
        }
        let room = ordered.changes_count().min(CHANGES_WAITING);
        let room = u32::try_from(room).expect("it is no more than there may be");
        let room = Arc::clone(&self.changes).acquire_many_owned(room).await;
        let room = room.map_err(|_| RecordError::Stopping)?;
        let lists = Arc::clone(&self.lists);
        let made = reader.compute(move || {
            // Another may have made the same while this one waited for its turn.
            if let Some(list) = lists.find(source) {
                return (list, None);
            }
            let former = match &had {
                Had::Same => Former::Same,
                Had::Other(image) => Former::Other(&image.tree),
                Had::Unknown => Former::Unknown,
            };
            (lists.keep(source, List::of(&changes(&ordered, former))), Some(room))
        });
        made.await.map_err(|_| RecordError::Stopping)
    }
}

/// The image that a machine had.
enum Had {
    /// The one that it gets.
    Same,
    /// This one.
    Other(Arc<RequiredImage>),
    /// None, or nobody gives it any more.
    Unknown,
}

impl Had {
    async fn of(ordered: &Ordered, images: &Arc<Images>) -> Self {
        let Some(name) = &ordered.former else { return Self::Unknown };
        if name == ordered.image.name() {
            return Self::Same;
        }
        images.former(name).await.map_or(Self::Unknown, Self::Other)
    }
}

/// The same outcome, without more text than is kept.
fn short(outcome: Outcome) -> Outcome {
    let short = |text: String| plain(&text, OUTCOME_BYTES_MAX);
    match outcome {
        Outcome::Done => Outcome::Done,
        Outcome::NotPrepared(why) => Outcome::NotPrepared(short(why)),
        Outcome::RolledBack(why) => Outcome::RolledBack(short(why)),
        Outcome::Stuck(why) => Outcome::Stuck(short(why)),
        Outcome::Undone(why) => Outcome::Undone(short(why)),
    }
}

struct Writer {
    state: Arc<State>,
    limits: HistoryLimits,
    entries: Receiver<Entry>,
    lost: Arc<Mutex<u64>>,
    trouble: watch::Sender<Option<Arc<str>>>,
    /// What operators were told of why nothing can be written, and when it last could not.
    told: Option<(String, Instant)>,
    /// The last transaction may have left something to take away.
    has_more: bool,
}

impl Writer {
    fn run(mut self) {
        let mut batch: Vec<Entry> = Vec::new();
        loop {
            let wait = match (batch.is_empty() && self.told.is_none(), self.has_more) {
                (true, true) => Duration::ZERO,
                (true, false) => IDLE,
                (false, _) => PAUSE,
            };
            let is_open = match self.entries.recv_timeout(wait) {
                Ok(entry) => {
                    batch.push(entry);
                    self.fill(&mut batch)
                }
                Err(RecvTimeoutError::Timeout) => true,
                Err(RecvTimeoutError::Disconnected) => false,
            };
            self.write(&mut batch);
            if !is_open {
                if !batch.is_empty() {
                    tracing::error!("{} records of the history are lost", batch.len());
                }
                return;
            }
        }
    }

    /// Takes what else there is to be written. False if nothing will come any more.
    fn fill(&self, batch: &mut Vec<Entry>) -> bool {
        let until = Instant::now() + if self.told.is_some() { PAUSE } else { LINGER };
        let is_urgent = |entry: &Entry| entry.done.is_some();
        let mut has_urgent = batch.iter().any(is_urgent);
        while batch.len() < BATCH + STATUSES_WAITING + ENDS_WAITING {
            let wait = match has_urgent || batch.len() >= BATCH {
                true => Duration::ZERO,
                false => until.saturating_duration_since(Instant::now()),
            };
            match self.entries.recv_timeout(wait) {
                Ok(entry) => {
                    has_urgent |= is_urgent(&entry);
                    batch.push(entry);
                }
                Err(RecvTimeoutError::Timeout) => return true,
                Err(RecvTimeoutError::Disconnected) => return false,
            }
        }
        true
    }

    /// Writes the batch. What nobody waits for stays in it if it cannot be written.
    fn write(&mut self, batch: &mut Vec<Entry>) {
        if let Some((_, failed)) = &self.told {
            // To open a database again that failed takes time, and holds up orders.
            std::thread::sleep(FAILED_PAUSE.saturating_sub(failed.elapsed()));
        }
        let lost = *self.lost.lock().unwrap_or_else(PoisonError::into_inner);
        let mut records: Vec<Record> = batch.iter().map(|entry| entry.record.clone()).collect();
        if lost > 0 {
            records.push(Record::Status(StatusRow::Gap { time: wall(), lost }));
        }
        match self.state.append(&records, self.limits, wall()) {
            Ok(evicted) => {
                if self.told.take().is_some() {
                    tracing::info!("the history is written again");
                    self.trouble.send_replace(None);
                }
                *self.lost.lock().unwrap_or_else(PoisonError::into_inner) -= lost;
                for done in batch.drain(..).filter_map(|entry| entry.done) {
                    // A driver that was told to stop does not wait any more.
                    let _gone = done.send(Ok(()));
                }
                self.has_more = evicted >= BATCH;
            }
            Err(error) => {
                let why = report(&error);
                if self.told.as_ref().is_none_or(|(told, _)| *told != why) {
                    tracing::error!(
                        "the history cannot be written, and no update is ordered before it can: \
                         {why}"
                    );
                }
                // Before those are told who wait, so that they do not try again in vain.
                self.trouble.send_if_modified(|trouble| {
                    let is_news = trouble.as_deref() != Some(&why);
                    *trouble = Some(why.as_str().into());
                    is_news
                });
                for entry in batch.iter_mut() {
                    if let Some(done) = entry.done.take() {
                        let _gone = done.send(Err(why.clone()));
                    }
                }
                batch.retain(|entry| !matches!(entry.record, Record::Update(..)));
                self.told = Some((why, Instant::now()));
                self.has_more = false;
            }
        }
    }
}

#[cfg(test)]
mod tests;
