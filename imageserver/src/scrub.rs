//! Reads the whole store in the background, for ever, and says what is lost.
//!
//! One thread reads every object from the medium within a period ([`course`] decides how fast),
//! puts corrupt ones aside, and finds out which images need what is lost. Another server, if one is
//! named, is asked for that ([`repairs`] decides when); what comes is hashed as every upload is.

use rpc::tls::Security;
use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use api::object_server::GetObjectsRequest;
use governor::clock::{Clock as _, MonotonicClock};
use governor::middleware::NoOpMiddleware;
use governor::state::{InMemoryState, NotKeyed};
use governor::{Quota, RateLimiter};
use model::image::ImageName;
use model::object::ObjectId;
use model::report::report;
use rpc::client::{Client, Peer};
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::core::missing_objects::{Holds, Survey};
use crate::store::contract::Objects;
use crate::store::counters::Counters;
use crate::store::damaged_objects::Wound;
use crate::store::medium_reader::MediumReader;
use crate::store::medium_reader::OnMedium;
use crate::store::upload::store_objects;
use crate::store::{Store, error::StoreError, layout};

use crate::core::scrub_progress::{Course, Limits, Step};
use crate::core::scrub_repairs::{Ask, Repairs};

/// How many bytes are charged as one: no device reads less at once.
const CELL_BYTES: u64 = 4_096;

/// The most that is charged at once, in cells: what [`MediumReader`] reads at once.
const BURST_CELLS: u32 = 256;

/// How often it is written down how far a pass is.
const SAVE_EVERY: Duration = Duration::from_secs(10);

/// How far the thread steps back behind others (`nice`).
const NICENESS: i32 = 19;

/// What an operator has set.
#[derive(Clone, Debug)]
pub struct Settings {
    /// How fast all is read; `None` not to read it.
    pub limits: Option<Limits>,
    /// Who is asked for what is lost.
    pub repair_from: Option<Peer>,
}

/// What is lost, and who needs it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Losses {
    /// What images need and is not there or cannot be read.
    pub images: BTreeMap<ImageName, BTreeSet<ObjectId>>,
    /// What is wrong with these objects.
    pub objects: BTreeMap<ObjectId, Wound>,
    /// How many more are known to be lost, that no image needs.
    pub unneeded: usize,
}

/// What others may see of the scrub.
#[derive(Debug)]
pub struct Scrub {
    losses: watch::Sender<Arc<Losses>>,
    /// Bytes that were read since the start.
    pub bytes: AtomicU64,
    /// Directories that were read in the present pass.
    pub directories: AtomicU64,
    /// When a pass was last completed, in seconds since 1970.
    pub completed: AtomicU64,
}

impl Default for Scrub {
    fn default() -> Self {
        let (losses, _) = watch::channel(Arc::default());
        let (bytes, directories, completed) = Default::default();
        Self { losses, bytes, directories, completed }
    }
}

impl Scrub {
    /// What is lost.
    #[must_use]
    pub fn losses(&self) -> Arc<Losses> {
        Arc::clone(&self.losses.borrow())
    }
}

/// Starts reading, and repairing, until `stop` is cancelled; tracked by `tasks`.
pub fn start(
    scrub: &Arc<Scrub>,
    settings: Settings,
    store: &Arc<Store>,
    counters: &Arc<Counters>,
    (security, tasks, stop): (&Security, &TaskTracker, &CancellationToken),
) {
    if let Some(peer) = settings.repair_from {
        let repairer = Repairer {
            client: Client::new(peer, security),
            store: Arc::clone(store),
            counters: Arc::clone(counters),
            tasks: tasks.clone(),
        };
        let (losses, stop) = (scrub.losses.subscribe(), stop.clone());
        tasks.spawn(async move {
            tokio::select! {
                () = repairer.run(losses) => {}
                () = stop.cancelled() => {}
            }
        });
    }
    let reader = Reader {
        scrub: Arc::clone(scrub),
        limits: settings.limits,
        store: Arc::clone(store),
        stop: stop.clone(),
        runtime: Handle::current(),
        state: store.data().join(layout::SCRUB),
        saved: None,
        surveyed: None,
        all_read: false,
    };
    // A thread of its own: its priority is not that of the others.
    let thread = std::thread::Builder::new().name("scrub".to_owned()).spawn(|| reader.run());
    match thread {
        Ok(thread) => {
            tasks.spawn_blocking(move || {
                if thread.join().is_err() {
                    tracing::error!("reading the store has failed; it goes on at the next start");
                }
            });
        }
        Err(error) => tracing::error!(%error, "the store is not read in the background"),
    }
}

/// The thread that reads.
struct Reader {
    scrub: Arc<Scrub>,
    limits: Option<Limits>,
    store: Arc<Store>,
    stop: CancellationToken,
    runtime: Handle,
    /// The file that says how far a pass is.
    state: PathBuf,
    saved: Option<Instant>,
    /// When it was last found out who needs what, and how long that took.
    surveyed: Option<(Instant, Duration)>,
    /// True if the present pass began since the start, and has left out nothing yet.
    all_read: bool,
}

impl Reader {
    fn run(mut self) {
        // No process is named: Linux takes that for the calling thread alone.
        if let Err(error) = rustix::process::setpriority_process(None, NICENESS) {
            tracing::warn!("the store is read with normal priority: {error}");
        }
        let places = u16::try_from(layout::places().count()).expect("there are 512");
        let mut course = self.load(places);
        if self.store.objects.is_doubtful() {
            // Only a pass from the beginning reads all that a former server has left.
            course = Course { completed: course.completed, ..Course::default() };
        }
        let mut late = false;
        if self.store.objects.wounds().count() > 0 {
            self.survey();
        }
        while !self.stop.is_cancelled() {
            self.scrub.directories.store(course.next.into(), Ordering::Relaxed);
            self.scrub.completed.store(course.completed, Ordering::Relaxed);
            let Some(limits) = self.limits else {
                self.wait(Duration::from_secs(3_600));
                continue;
            };
            let held_bytes = self.store.objects.holdings().bytes;
            let now = now();
            match course.next(now, places, held_bytes, &limits) {
                Step::Begin => {
                    course = Course::begin(now, course.completed);
                    course.hurry = self.store.objects.is_doubtful();
                    self.all_read = true;
                    late = false;
                    self.save(&course);
                }
                Step::Read { place, bytes_per_second } => {
                    let Some((objects, bytes)) = self.read(place, bytes_per_second) else {
                        continue;
                    };
                    course.read(objects, bytes);
                    if self.saved.is_none_or(|saved| saved.elapsed() > SAVE_EVERY) {
                        self.save(&course);
                    }
                    if !late && course.is_late(now, places, &limits) {
                        late = true;
                        tracing::warn!(
                            "reading all objects takes longer than --scrub-every: raise \
                             --scrub-rate, or the time"
                        );
                    }
                    self.survey_if_due();
                }
                Step::Complete => {
                    self.survey();
                    if std::mem::take(&mut self.all_read) {
                        self.store.objects.all_read();
                    }
                    course.complete(now);
                    let Course { objects, bytes, .. } = course;
                    tracing::info!(objects, bytes, "every object was read");
                    self.save(&course);
                }
                Step::Wait(time) => self.wait(time),
            }
        }
        self.save(&course);
    }

    /// Waits until what is lost has changed, but not longer than `time`.
    fn wait(&mut self, time: Duration) {
        let changed = self.runtime.block_on(async {
            tokio::select! {
                () = self.stop.cancelled() => false,
                () = tokio::time::sleep(time) => false,
                () = self.store.objects.wounds().changed() => true,
            }
        });
        if changed {
            self.pause();
            self.survey();
        }
    }

    /// Waits so long that finding out who needs what takes but a tenth of the time.
    fn pause(&self) {
        let Some((at, took)) = self.surveyed else { return };
        let rest = (took * 10).saturating_sub(at.elapsed());
        self.stopped_within(rest);
    }

    fn survey_if_due(&mut self) {
        let is_due = self.surveyed.is_none_or(|(at, took)| at.elapsed() >= took * 10);
        if is_due && self.store.objects.wounds().take_changed() {
            self.survey();
        }
    }

    /// True if the server was told to stop before `time` was over.
    fn stopped_within(&self, time: Duration) -> bool {
        // A timer needs the runtime already when it is made.
        self.runtime
            .block_on(async { tokio::time::timeout(time, self.stop.cancelled()).await.is_ok() })
    }

    /// Reads a directory; gives the objects and bytes that were read, or nothing if the server is
    /// to stop.
    fn read(&mut self, place: u16, bytes_per_second: u64) -> Option<(u64, u64)> {
        let below = layout::places().nth(place.into())?;
        let rate = Rate::new(bytes_per_second);
        let mut reader = MediumReader::default();
        let (mut objects, mut bytes) = (0, 0);
        let mut pace = |read: u64| {
            self.scrub.bytes.fetch_add(read, Ordering::Relaxed);
            bytes += read;
            let mut wait = rate.charge(read);
            while let Some(time) = wait {
                if self.stopped_within(time) {
                    return false;
                }
                wait = rate.charge(0);
            }
            !self.stop.is_cancelled()
        };
        let mut skipped = false;
        let ids = self.store.objects.list(&below).unwrap_or_else(|error| {
            tracing::error!("{}", report(&error));
            skipped = true;
            Vec::new()
        });
        for id in ids {
            match self.store.objects.read_medium(&id, &mut reader, &mut pace) {
                Ok(OnMedium::Stopped) => return None,
                Ok(OnMedium::Whole(_)) => objects += 1,
                Ok(OnMedium::Absent | OnMedium::Corrupt) => {}
                Err(error) => {
                    tracing::error!("{}", report(&error));
                    // One that is known to be unreadable is not believed to be there.
                    skipped |= self.store.objects.wounds().of(&id).is_none();
                }
            }
        }
        self.all_read &= !skipped;
        Some((objects, bytes))
    }

    /// Finds out what images need and is not there, and tells it.
    fn survey(&mut self) {
        let start = Instant::now();
        let losses = self.find_losses();
        self.surveyed = Some((Instant::now(), start.elapsed()));
        let losses = match losses {
            Ok(losses) => Arc::new(losses),
            Err(error) => {
                return tracing::error!("who needs what is lost is not known: {}", report(&error));
            }
        };
        let changed = *self.scrub.losses.borrow() != losses;
        if !changed {
            return;
        }
        for (image, objects) in &losses.images {
            tracing::error!(
                %image, objects = objects.len(), such_as = ?objects.first(),
                "an image is not whole: upload it again under another name, or name a server that \
                 has it with --repair-from"
            );
        }
        if losses.images.is_empty() {
            tracing::info!("every image is whole");
        }
        self.scrub.losses.send_replace(losses);
    }

    fn find_losses(&self) -> Result<Losses, StoreError> {
        let objects = &*self.store.objects;
        let mut survey = Survey::default();
        let mut losses = Losses::default();
        let mut after = None;
        loop {
            let page = self.store.images.list(after.as_ref(), 1_000);
            for image in &page.images {
                if self.stop.is_cancelled() {
                    return Ok(self.scrub.losses().as_ref().clone());
                }
                let lacks = survey.lacks(image.root, &mut Present(objects))?;
                for id in &lacks {
                    let wound = objects.wounds().of(id).unwrap_or(Wound::Missing);
                    losses.objects.insert(*id, wound);
                }
                if !lacks.is_empty() {
                    losses.images.insert(image.name.clone(), lacks);
                }
            }
            after = page.images.last().map(|image| image.name.clone());
            if !page.more {
                break;
            }
        }
        let known = objects.wounds().all();
        losses.unneeded = known.keys().filter(|id| !losses.objects.contains_key(id)).count();
        for (id, wound) in &losses.objects {
            if *wound == Wound::Missing {
                objects.wounds().add(*id, Wound::Missing);
            }
        }
        objects.wounds().forget_missing(|id| losses.objects.contains_key(id));
        Ok(losses)
    }

    fn load(&self, places: u16) -> Course {
        let text = match fs_err::read(&self.state) {
            Ok(text) => text,
            Err(error) => {
                if error.kind() != std::io::ErrorKind::NotFound {
                    tracing::warn!(%error, "reading all objects begins anew");
                }
                return Course::default();
            }
        };
        let course: Option<Course> = serde_json::from_slice(&text).ok();
        course.filter(|course| course.is_possible(places)).unwrap_or_default()
    }

    /// Writes down how far the pass is. A file that was cut short costs a pass too early: nothing
    /// else depends on it.
    fn save(&mut self, course: &Course) {
        self.saved = Some(Instant::now());
        let saved = serde_json::to_vec(course)
            .map_err(std::io::Error::other)
            .and_then(|text| fs_err::write(&self.state, text));
        if let Err(error) = saved {
            tracing::warn!(%error, "how far reading all objects is will be forgotten at a restart");
        }
    }
}

/// The store as images need it.
struct Present<'store>(&'store dyn Objects);

impl Holds for Present<'_> {
    type Error = StoreError;

    fn directory(&mut self, id: &ObjectId) -> Result<Option<Vec<u8>>, StoreError> {
        match self.0.open_verified(id) {
            Ok(None) => Ok(None),
            Ok(Some(content)) => Ok(content.into_bytes().ok().map(Vec::from)),
            Err(_) if self.0.wounds().of(id).is_some() => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn has(&mut self, id: &ObjectId, size_bytes: u64) -> Result<bool, StoreError> {
        Ok(self.0.wounds().of(id) != Some(Wound::Unreadable)
            && self.0.size_bytes(id)? == Some(size_bytes))
    }
}

/// A rate of reading that is held.
struct Rate {
    limiter: RateLimiter<NotKeyed, InMemoryState, MonotonicClock, NoOpMiddleware>,
    owed: std::cell::Cell<u32>,
}

impl Rate {
    fn new(bytes_per_second: u64) -> Self {
        let cells = u32::try_from(bytes_per_second / CELL_BYTES).unwrap_or(u32::MAX);
        let cells = NonZeroU32::new(cells).unwrap_or(NonZeroU32::MIN);
        let burst = NonZeroU32::new(BURST_CELLS).expect("it is not zero");
        let quota = Quota::per_second(cells).allow_burst(burst);
        let limiter = RateLimiter::direct_with_clock(quota, MonotonicClock);
        Self { limiter, owed: std::cell::Cell::new(0) }
    }

    /// Charges `bytes` that were read; gives how long to wait before it is asked again.
    fn charge(&self, bytes: u64) -> Option<Duration> {
        let more = u32::try_from(bytes.div_ceil(CELL_BYTES)).unwrap_or(u32::MAX);
        self.owed.set(self.owed.get().saturating_add(more));
        while let Some(cells) = NonZeroU32::new(self.owed.get().min(BURST_CELLS)) {
            match self.limiter.check_n(cells) {
                Ok(Ok(())) => self.owed.set(self.owed.get() - cells.get()),
                Ok(Err(not_until)) => return Some(not_until.wait_time_from(MonotonicClock.now())),
                // Never asked for: no more than a burst is.
                Err(_) => return None,
            }
        }
        None
    }
}

/// Asks another server for what is lost.
struct Repairer {
    client: Client,
    store: Arc<Store>,
    counters: Arc<Counters>,
    tasks: TaskTracker,
}

impl Repairer {
    async fn run(self, mut losses: watch::Receiver<Arc<Losses>>) {
        let start = tokio::time::Instant::now();
        let mut repairs = Repairs::default();
        loop {
            let wanted: BTreeSet<ObjectId> =
                losses.borrow_and_update().objects.keys().copied().collect();
            // What has come since is not lost any more, though it may not be told yet.
            let wanted: BTreeSet<ObjectId> = wanted
                .into_iter()
                .filter(|id| self.store.objects.wounds().of(id).is_some())
                .collect();
            match repairs.next(start.elapsed(), &wanted) {
                Ask::For(ids) => {
                    if let Err(why) = self.fetch(&ids).await {
                        tracing::warn!("what is lost was not repaired: {why}");
                    }
                    repairs.asked(start.elapsed(), &ids);
                }
                Ask::Later(at) => {
                    tokio::select! {
                        () = tokio::time::sleep_until(start + at) => {}
                        changed = losses.changed() => if changed.is_err() { return },
                    }
                }
                Ask::Never => {
                    if losses.changed().await.is_err() {
                        return;
                    }
                }
            }
        }
    }

    async fn fetch(&self, ids: &[ObjectId]) -> Result<(), String> {
        let request = GetObjectsRequest { ids: ids.to_vec() };
        let reader = self.client.get_objects(&request).await.map_err(|error| report(&error))?;
        let (store, counters) = (Arc::clone(&self.store), Arc::clone(&self.counters));
        let stored = store_objects(store, counters, &self.tasks, reader, ids).await;
        let came = ids.iter().filter(|id| self.store.objects.wounds().of(id).is_none()).count();
        if came > 0 {
            tracing::info!(objects = came, from = %self.client.peer(), "repaired what was lost");
            self.counters.objects_repaired.inc_by(came as u64);
            let store = Arc::clone(&self.store);
            let synced = tokio::task::spawn_blocking(move || store.objects.sync()).await;
            synced.map_err(|lost| lost.to_string())?.map_err(|error| report(&error))?;
        }
        stored.map(drop).map_err(|fault| fault.message)
    }
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
