//! Records updates and changes of status: one thread writes them, many in one transaction.
//!
//! # Guarantees
//!
//! * An update is on the disk before it is ordered. An update that cannot be recorded is not
//!   ordered.
//! * The end of an update is written within a second; after a crash the machine is asked again.
//! * Changes of status are written within a second. Those of the last second before a crash are
//!   lost. While nothing can be written, the first ones wait in memory and the others are lost; how
//!   many is recorded later.
//! * Nothing is removed for its age while the clock is not trusted.

use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use api::dominator::Status;
use api::subd::UpdateOutcome;
use model::display::{error_chain, safe_text};
use model::image::ImageName;
use model::image::required::RequiredImage;
use model::lock::locked;
use model::object::ObjectId;
use model::tree::Time;
use system::trusted_clock::{ClockReading, ClockTrust, ClockUse, TrustedClock};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot, watch};

use crate::core::changes::{OrderedUpdate, PreviousImage, changes};
use crate::core::sub::UndoneUpdate;
use crate::runtime::clock::Clock;
use crate::runtime::images::Images;
use crate::runtime::recent::Recent;
use crate::runtime::unused::UNUSED_MAX;
use crate::storage::history_rows::{ChangeList, EndRow, StatusRow, UndoneRow, UpdateRow};
use crate::storage::{EVICTED_MIN, HistoryLimits, HistoryRecord, Storage, StorageError};
use rpc::trees::TreeReader;

/// How many updates may wait to be written.
const UPDATES_WAITING: usize = 1_024;

/// How many changes all lists together may have that are made, or wait to be written. A change
/// takes some hundred bytes.
const CHANGES_WAITING: usize = 1 << 20;

/// The most lists of changes that are held.
const LISTS_MAX: usize = 32;

/// The most bytes of all lists that are held, except that the last list is always held.
const LISTS_BYTES_MAX: usize = 32 << 20;

/// How many changes of status may wait to be written.
const STATUSES_WAITING: usize = 16_384;

/// How many ends of updates may wait to be written. They have their own limit, because changes of
/// status are many.
const ENDS_WAITING: usize = 16_384;

/// How many records are written in one transaction.
const BATCH: usize = 1_024;

/// How long changes of status wait for others, to share a transaction.
const LINGER: Duration = Duration::from_millis(500);

/// The pause after a failed write, unless an update is to be written. No update is ordered before a
/// write succeeds, so it is tried even if nothing waits.
const PAUSE: Duration = Duration::from_secs(5);

/// The shortest pause after a failed write.
const FAILED_PAUSE: Duration = Duration::from_secs(1);

/// How often old records are removed when nothing is written.
const IDLE: Duration = Duration::from_secs(600);

/// How long the clock must have run evenly before records are removed for their age, in seconds.
const CLOCK_SETTLE: i64 = 600;

const CLOCK_USE: ClockUse = ClockUse {
    stopped: "nothing of the history is removed for its age",
    resumed: "what is too old is removed from the history",
    accept: "domtool accept-clock",
};

/// The longest text of an outcome, in bytes. It comes from machines.
const OUTCOME_BYTES_MAX: usize = 4_096;

/// Why an update cannot be recorded and must not be ordered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HistoryError {
    #[error("the update cannot be recorded, and is not ordered before it is: {why}")]
    Write { why: String },
    #[error("the dominator is stopping")]
    Stopping,
}

struct QueuedRecord {
    record: HistoryRecord,
    /// Notified when the update is on the disk.
    done: Option<oneshot::Sender<Result<(), String>>>,
    /// Returns the place in the queue when dropped.
    _place: OwnedSemaphorePermit,
    /// Returns the room of a list that was made for this entry.
    _room: Option<OwnedSemaphorePermit>,
}

#[derive(Debug)]
pub struct History {
    clock: Clock,
    queue: Mutex<Option<Sender<QueuedRecord>>>,
    updates: Arc<Semaphore>,
    changes: Arc<Semaphore>,
    statuses: Arc<Semaphore>,
    ends: Arc<Semaphore>,
    lost: Arc<Mutex<u64>>,
    trouble: watch::Sender<Option<Arc<str>>>,
    wall_clock: Arc<Mutex<TrustedClock>>,
    state: Arc<Storage>,
    lists: Arc<Recent<ListInput, Arc<ChangeList>>>,
    /// The last update of each machine that was recorded.
    last: Mutex<BTreeMap<String, u64>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl std::fmt::Debug for QueuedRecord {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.record.fmt(formatter)
    }
}

impl History {
    /// Starts the thread that writes to `state`.
    pub fn start(
        state: Arc<Storage>,
        limits: HistoryLimits,
        clock: Clock,
    ) -> Result<Self, StorageError> {
        let last = Mutex::new(state.last_updates()?);
        let (queue, entries) = channel();
        let lost = Arc::new(Mutex::new(0));
        let trouble = watch::Sender::new(None);
        let saved = state.clock.get();
        let wall_clock = TrustedClock::new(CLOCK_USE, Option::as_ref(&saved), CLOCK_SETTLE);
        let wall_clock = Arc::new(Mutex::new(wall_clock));
        let writer = HistoryWriter {
            state: Arc::clone(&state),
            limits,
            clock,
            wall_clock: Arc::clone(&wall_clock),
            entries,
            lost: Arc::clone(&lost),
            trouble: trouble.clone(),
            last_error: None,
            has_more: true,
        };
        let thread = std::thread::spawn(move || writer.run());
        Ok(Self {
            clock,
            queue: Mutex::new(Some(queue)),
            updates: Arc::new(Semaphore::new(UPDATES_WAITING)),
            changes: Arc::new(Semaphore::new(CHANGES_WAITING)),
            statuses: Arc::new(Semaphore::new(STATUSES_WAITING)),
            ends: Arc::new(Semaphore::new(ENDS_WAITING)),
            lost,
            trouble,
            wall_clock,
            state,
            lists: Arc::new(Recent::new(LISTS_MAX, LISTS_BYTES_MAX)),
            last,
            thread: Mutex::new(Some(thread)),
        })
    }

    /// Writes what waits to be written, and ends the thread. Called when all drivers have ended.
    /// Blocks on the disk.
    pub fn close(&self) {
        drop(locked(&self.queue).take());
        let thread = locked(&self.thread).take();
        if thread.is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the writer of the history has panicked");
        }
    }

    /// Returns why the history cannot be written, if it cannot.
    pub fn trouble(&self) -> Option<String> {
        let trouble = self.trouble.borrow().as_deref().map(str::to_owned);
        trouble.or_else(|| self.state.damage().map(str::to_owned))
    }

    /// Returns by how many seconds the clock of this machine jumped, if it did.
    pub fn clock_jumped(&self) -> Option<i64> {
        let mut wall_clock = locked(&self.wall_clock);
        wall_clock.read(ClockReading::now());
        match wall_clock.trust() {
            ClockTrust::Jumped(seconds) => Some(seconds),
            ClockTrust::Trusted | ClockTrust::Settling(_) => None,
        }
    }

    /// Trusts the clock as it is. Returns by how many seconds it had jumped. Called after the order
    /// was recorded.
    pub fn accept_clock(&self) -> i64 {
        locked(&self.wall_clock).accept(ClockReading::now())
    }

    /// Returns a receiver of the same.
    pub fn watch_trouble(&self) -> watch::Receiver<Option<Arc<str>>> {
        self.trouble.subscribe()
    }

    /// Returns the last recorded update of a machine.
    pub fn last_update(&self, hostname: &str) -> Option<u64> {
        locked(&self.last).get(hostname).copied()
    }

    /// Returns the update of a machine that failed its health check, if it is kept at its former
    /// image. Reads the disk.
    pub fn undone(&self, hostname: &str) -> Option<UndoneUpdate> {
        let row = self.state.undone(hostname).unwrap_or_else(|error| {
            tracing::error!("{}", error_chain(&error));
            None
        })?;
        let UndoneRow { update_id, image, why } = row;
        Some(UndoneUpdate { update_id, image: ImageName::new(&image).ok()?, why })
    }

    /// Records a change of status without waiting.
    pub fn status(&self, hostname: &str, status: Status, detail: &str) {
        let record = HistoryRecord::Status(StatusRow::Status {
            time: self.clock.now().wall,
            host: hostname.to_owned(),
            status: status.name().to_owned(),
            detail: detail.to_owned(),
        });
        self.later(&self.statuses, record);
    }

    /// Records what operators are told of a task, as a change of status, without waiting.
    pub fn task(&self, hostname: &str, event: String, text: String) {
        let (time, host) = (self.clock.now().wall, hostname.to_owned());
        let row = StatusRow::Status { time, host, status: event, detail: text };
        self.later(&self.statuses, HistoryRecord::Status(row));
    }

    /// Records how an update ended without waiting. `triggers` describes those that failed.
    pub fn ended(&self, hostname: &str, update_id: u64, outcome: UpdateOutcome, triggers: &str) {
        let time = self.clock.now().wall;
        let failed_triggers = safe_text(triggers, OUTCOME_BYTES_MAX);
        let row = EndRow { time, outcome: short(outcome), failed_triggers };
        self.later(&self.ends, HistoryRecord::End { host: hostname.to_owned(), update_id, row });
    }

    fn later(&self, places: &Arc<Semaphore>, record: HistoryRecord) {
        let place = Arc::clone(places).try_acquire_owned();
        let entry = |place| QueuedRecord { record, done: None, _place: place, _room: None };
        if !place.is_ok_and(|place| self.send(entry(place))) {
            *locked(&self.lost) += 1;
        }
    }

    fn send(&self, entry: QueuedRecord) -> bool {
        let queue = locked(&self.queue);
        queue.as_ref().is_some_and(|queue| queue.send(entry).is_ok())
    }

    /// Records an update that is about to be ordered; it is on the disk when this returns. On an
    /// error the update must not be ordered.
    pub async fn order(
        &self,
        hostname: &str,
        ordered: Box<OrderedUpdate>,
        images: &Arc<Images>,
        reader: &TreeReader,
    ) -> Result<(), HistoryError> {
        let update_id = ordered.update_id;
        if self.last_update(hostname) == Some(update_id) {
            return Ok(());
        }
        let (image, former) = (ordered.image.name().to_string(), ordered.former.clone());
        // The former image may have to be loaded: wait for it before taking a place in the queue.
        let had = FormerImage::load(&ordered, images).await;
        let place = Arc::clone(&self.updates).acquire_owned().await;
        let place = place.map_err(|_| HistoryError::Stopping)?;
        let (list, room) = self.list(ordered, had, reader).await?;
        let row = UpdateRow {
            time: self.clock.now().wall,
            host: hostname.to_owned(),
            update_id,
            image,
            former: former.map(String::from).unwrap_or_default(),
            list: list.digest,
            marks: list.marks,
            reasons: list.reasons,
        };
        let (done, is_done) = oneshot::channel();
        let record = HistoryRecord::Update(row, list);
        if !self.send(QueuedRecord { record, done: Some(done), _place: place, _room: room }) {
            return Err(HistoryError::Stopping);
        }
        let result = is_done.await.map_err(|_| HistoryError::Stopping)?;
        result.map_err(|why| HistoryError::Write { why })?;
        let mut last = locked(&self.last);
        last.insert(hostname.to_owned(), update_id);
        Ok(())
    }

    /// Forgets the lists of changes that no machine needed lately.
    pub fn forget_unused(&self) {
        self.lists.forget_unused(UNUSED_MAX);
    }

    /// Returns the list of changes, and its room if it was made for this update.
    async fn list(
        &self,
        ordered: Box<OrderedUpdate>,
        had: FormerImage,
        reader: &TreeReader,
    ) -> Result<(Arc<ChangeList>, Option<OwnedSemaphorePermit>), HistoryError> {
        let source = ListInput {
            tree: ordered.tree.digest(),
            image: ordered.image.digest,
            plan: ordered.planned.digest,
            former: match &had {
                FormerImage::Same => Some(ordered.image.digest),
                FormerImage::Other(image) => Some(image.digest),
                FormerImage::Unknown => None,
            },
        };
        if let Some(list) = self.lists.find(|known| *known == source) {
            return Ok((list, None));
        }
        let room = ordered.changes_count().min(CHANGES_WAITING);
        let room = u32::try_from(room).expect("it is no more than there may be");
        let room = Arc::clone(&self.changes).acquire_many_owned(room).await;
        let room = room.map_err(|_| HistoryError::Stopping)?;
        let lists = Arc::clone(&self.lists);
        let made = reader.compute(move || {
            // Another driver may have made the same meanwhile.
            if let Some(list) = lists.find(|known| *known == source) {
                return (list, None);
            }
            let former = match &had {
                FormerImage::Same => PreviousImage::Same,
                FormerImage::Other(image) => PreviousImage::Other(&image.tree),
                FormerImage::Unknown => PreviousImage::Unknown,
            };
            let list = ChangeList::new(&changes(&ordered, former));
            let bytes = list.bytes();
            (lists.add(source, Arc::new(list), bytes), Some(room))
        });
        made.await.map_err(|_| HistoryError::Stopping)
    }
}

/// What a list of changes is made from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ListInput {
    tree: ObjectId,
    image: ObjectId,
    plan: ObjectId,
    former: Option<ObjectId>,
}

/// The former image of a machine.
enum FormerImage {
    /// The image that it gets.
    Same,
    Other(Arc<RequiredImage>),
    /// The machine had no image before, or its image cannot be loaded any more.
    Unknown,
}

impl FormerImage {
    async fn load(ordered: &OrderedUpdate, images: &Arc<Images>) -> Self {
        let Some(name) = &ordered.former else { return Self::Unknown };
        if name == ordered.image.name() {
            return Self::Same;
        }
        images.former(name).await.map_or(Self::Unknown, Self::Other)
    }
}

/// Returns the outcome with its text cut to the limit.
fn short(outcome: UpdateOutcome) -> UpdateOutcome {
    let short = |text: String| safe_text(&text, OUTCOME_BYTES_MAX);
    match outcome {
        UpdateOutcome::Done => UpdateOutcome::Done,
        UpdateOutcome::NotPrepared(why) => UpdateOutcome::NotPrepared(short(why)),
        UpdateOutcome::RolledBack(why) => UpdateOutcome::RolledBack(short(why)),
        UpdateOutcome::Stuck(why) => UpdateOutcome::Stuck(short(why)),
        UpdateOutcome::Undone(why) => UpdateOutcome::Undone(short(why)),
    }
}

struct HistoryWriter {
    state: Arc<Storage>,
    limits: HistoryLimits,
    clock: Clock,
    wall_clock: Arc<Mutex<TrustedClock>>,
    entries: Receiver<QueuedRecord>,
    lost: Arc<Mutex<u64>>,
    trouble: watch::Sender<Option<Arc<str>>>,
    /// The last error, which was logged, and when it occurred.
    last_error: Option<(String, Duration)>,
    /// True if the last transaction may have left old records.
    has_more: bool,
}

impl HistoryWriter {
    fn run(mut self) {
        let mut batch: Vec<QueuedRecord> = Vec::new();
        loop {
            let wait = match (batch.is_empty() && self.last_error.is_none(), self.has_more) {
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

    /// Adds further entries to the batch. Returns false if the queue is closed.
    fn fill(&self, batch: &mut Vec<QueuedRecord>) -> bool {
        let until = self.clock.elapsed() + if self.last_error.is_some() { PAUSE } else { LINGER };
        let is_urgent = |entry: &QueuedRecord| entry.done.is_some();
        let mut has_urgent = batch.iter().any(is_urgent);
        while batch.len() < BATCH + STATUSES_WAITING + ENDS_WAITING {
            let wait = match has_urgent || batch.len() >= BATCH {
                true => Duration::ZERO,
                false => until.saturating_sub(self.clock.elapsed()),
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

    /// Returns the time of day if it is trusted.
    fn read_clock(&self) -> Option<Time> {
        let reading = ClockReading::now();
        let mut wall_clock = locked(&self.wall_clock);
        let trusted = wall_clock.read(reading);
        let unsaved = wall_clock.unsaved(reading);
        // Nobody waits for the disk to ask about the clock.
        drop(wall_clock);
        if let Some(clock) = unsaved {
            match self.state.clock.set(Some(clock)) {
                Ok(()) => locked(&self.wall_clock).note_saved(reading),
                Err(error) => tracing::error!("cannot save the clock: {}", error_chain(&error)),
            }
        }
        trusted
    }

    /// Writes the batch. On an error only updates are removed from it: their drivers try again.
    fn write(&mut self, batch: &mut Vec<QueuedRecord>) {
        if let Some((_, failed)) = &self.last_error {
            // Opening a failed database again takes time and delays orders.
            std::thread::sleep((*failed + FAILED_PAUSE).saturating_sub(self.clock.elapsed()));
        }
        let now = self.clock.now().wall;
        let lost = *locked(&self.lost);
        let mut records: Vec<HistoryRecord> =
            batch.iter().map(|entry| entry.record.clone()).collect();
        if lost > 0 {
            records.push(HistoryRecord::Status(StatusRow::Gap { time: now, lost }));
        }
        let trusted = self.read_clock();
        match self.state.append(&records, self.limits, trusted) {
            Ok(evicted) => {
                if self.last_error.take().is_some() {
                    tracing::info!("the history is written again");
                    self.trouble.send_replace(None);
                }
                *locked(&self.lost) -= lost;
                for done in batch.drain(..).filter_map(|entry| entry.done) {
                    // A driver that was stopped does not wait any more.
                    let _gone = done.send(Ok(()));
                }
                self.has_more = evicted >= EVICTED_MIN;
            }
            Err(error) => {
                let why = error_chain(&error);
                if self.last_error.as_ref().is_none_or(|(last_error, _)| *last_error != why) {
                    tracing::error!(
                        "the history cannot be written, and no update is ordered before it can: \
                         {why}"
                    );
                }
                // Before the drivers that wait are notified, so that they do not try again in vain.
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
                batch.retain(|entry| !matches!(entry.record, HistoryRecord::Update(..)));
                self.last_error = Some((why, self.clock.elapsed()));
                self.has_more = false;
            }
        }
    }
}

#[cfg(test)]
mod tests;
