//! Reads the whole store again in the background, and reports lost objects.
//!
//! One thread reads every object from the medium within a period
//! ([`crate::core::scrub`] decides how fast), moves corrupt objects to the quarantine, and
//! finds the images that need a lost object. If another server is configured, the lost objects are
//! requested from it ([`crate::core::scrub`] decides when) and verified like an upload.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use api::object_server::GetObjectsRequest;
use governor::clock::{Clock as _, MonotonicClock};
use governor::middleware::NoOpMiddleware;
use governor::state::{InMemoryState, NotKeyed};
use governor::{Quota, RateLimiter};
use model::display::error_chain;
use model::image::ImageName;
use model::object::ObjectId;
use rpc::client::{Client, Peer};
use rpc::tls::Security;
use system::clock::wall;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::core::missing_objects::{MissingObjects, ObjectLookup};
use crate::core::scrub::{RepairStep, Repairs, ScrubLimits, ScrubProgress, ScrubStep};
use crate::store::contract::Objects;
use crate::store::damaged_objects::Damage;
use crate::store::error::StoreError;
use crate::store::medium_reader::{MediumReader, OnMedium};
use crate::store::upload::{AbsentObjects, store_objects};
use crate::store::{Counters, Store, layout};

/// The unit of the rate limit, in bytes: no device reads less at once.
const CELL_BYTES: u64 = 4_096;

/// The burst of the rate limit, in cells: the length of one read of [`MediumReader`].
const BURST_CELLS: u32 = 256;

/// How often the progress of a pass is saved.
const SAVE_EVERY: Duration = Duration::from_secs(10);

/// The `nice` value of the scrub thread.
const NICENESS: i32 = 19;

/// The settings of the scrub.
#[derive(Clone, Debug)]
pub struct ScrubSettings {
    /// How fast all objects are read; `None` to read none.
    pub limits: Option<ScrubLimits>,
    /// The server from which lost objects are requested.
    pub repair_from: Option<Peer>,
}

/// The lost objects, and the images that need them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Losses {
    /// The lost objects that each image needs.
    pub images: BTreeMap<ImageName, BTreeSet<ObjectId>>,
    /// The damage of each lost object.
    pub objects: BTreeMap<ObjectId, Damage>,
    /// How many other objects are lost, which no image needs.
    pub unneeded: usize,
}

/// The state of the scrub that others may read.
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
    /// Returns the lost objects.
    #[must_use]
    pub fn losses(&self) -> Arc<Losses> {
        Arc::clone(&self.losses.borrow())
    }
}

/// Starts the scrub and the repairs, which run until `stop` is cancelled and are tracked by
/// `tasks`.
pub fn start(
    scrub: &Arc<Scrub>,
    settings: ScrubSettings,
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
    let thread = ScrubThread {
        scrub: Arc::clone(scrub),
        limits: settings.limits,
        store: Arc::clone(store),
        stop: stop.clone(),
        runtime: Handle::current(),
        state: store.data().join(layout::SCRUB),
        saved: None,
        losses_updated: None,
        all_read: false,
    };
    // The scrub has a thread of its own because it lowers the priority.
    let thread = std::thread::Builder::new().name("scrub".to_owned()).spawn(|| thread.run());
    match thread {
        Ok(thread) => {
            tasks.spawn_blocking(move || {
                if thread.join().is_err() {
                    tracing::error!("the scrub failed; it continues after the next start");
                }
            });
        }
        Err(error) => tracing::error!(%error, "cannot start the scrub"),
    }
}

/// The thread of the scrub.
struct ScrubThread {
    scrub: Arc<Scrub>,
    limits: Option<ScrubLimits>,
    store: Arc<Store>,
    stop: CancellationToken,
    runtime: Handle,
    /// The file with the progress of a pass.
    state: PathBuf,
    saved: Option<Instant>,
    /// When the losses were last updated, and how long that took.
    losses_updated: Option<(Instant, Duration)>,
    /// True if the current pass began after the start and has skipped nothing.
    all_read: bool,
}

impl ScrubThread {
    fn run(mut self) {
        // Without a process id Linux changes the calling thread only.
        if let Err(error) = rustix::process::setpriority_process(None, NICENESS) {
            tracing::warn!("the scrub runs with normal priority: {error}");
        }
        let directory_count =
            u16::try_from(layout::object_directories().count()).expect("there are 512");
        let mut progress = self.load(directory_count);
        if self.store.objects.is_doubtful() {
            // Only a pass from the beginning reads all objects of a former server.
            progress = ScrubProgress { completed: progress.completed, ..ScrubProgress::default() };
        }
        let mut late = false;
        if self.store.objects.damaged_objects().count() > 0 {
            self.update_losses();
        }
        while !self.stop.is_cancelled() {
            self.scrub.directories.store(progress.next.into(), Ordering::Relaxed);
            self.scrub.completed.store(progress.completed, Ordering::Relaxed);
            let Some(limits) = self.limits else {
                self.wait(Duration::from_secs(3_600));
                continue;
            };
            let held_bytes = self.store.objects.object_counts().bytes;
            let now = u64::try_from(wall().seconds).unwrap_or(0);
            match progress.next(now, directory_count, held_bytes, &limits) {
                ScrubStep::Begin => {
                    progress = ScrubProgress::begin(now, progress.completed);
                    progress.hurry = self.store.objects.is_doubtful();
                    self.all_read = true;
                    late = false;
                    self.save(&progress);
                }
                ScrubStep::Read { directory, bytes_per_second } => {
                    let Some((objects, bytes)) = self.read(directory, bytes_per_second) else {
                        continue;
                    };
                    progress.read(objects, bytes);
                    if self.saved.is_none_or(|saved| saved.elapsed() > SAVE_EVERY) {
                        self.save(&progress);
                    }
                    if !late && progress.is_late(now, directory_count, &limits) {
                        late = true;
                        tracing::warn!(
                            "a scrub takes longer than --scrub-every: raise --scrub-rate or \
                             --scrub-every"
                        );
                    }
                    self.update_losses_if_due();
                }
                ScrubStep::Complete => {
                    self.update_losses();
                    if std::mem::take(&mut self.all_read) {
                        self.store.objects.all_read();
                    }
                    progress.complete(now);
                    let ScrubProgress { objects, bytes, .. } = progress;
                    tracing::info!(objects, bytes, "the scrub has read every object");
                    self.save(&progress);
                }
                ScrubStep::Wait(time) => self.wait(time),
            }
        }
        self.save(&progress);
    }

    /// Waits until the damaged objects change, but not longer than `time`.
    fn wait(&mut self, time: Duration) {
        let changed = self.runtime.block_on(async {
            tokio::select! {
                () = self.stop.cancelled() => false,
                () = tokio::time::sleep(time) => false,
                () = self.store.objects.damaged_objects().changed() => true,
            }
        });
        if changed {
            self.pause();
            self.update_losses();
        }
    }

    /// Waits, so that updating the losses takes at most a tenth of the time.
    fn pause(&self) {
        let Some((at, took)) = self.losses_updated else { return };
        let rest = (took * 10).saturating_sub(at.elapsed());
        self.stopped_within(rest);
    }

    fn update_losses_if_due(&mut self) {
        let is_due = self.losses_updated.is_none_or(|(at, took)| at.elapsed() >= took * 10);
        if is_due && self.store.objects.damaged_objects().take_changed() {
            self.update_losses();
        }
    }

    /// Waits for `time`. Returns true if the server stops before.
    fn stopped_within(&self, time: Duration) -> bool {
        // A timer must be created inside the runtime.
        self.runtime
            .block_on(async { tokio::time::timeout(time, self.stop.cancelled()).await.is_ok() })
    }

    /// Reads a directory of objects. Returns the number of objects and bytes, or `None` if the
    /// server stops.
    fn read(&mut self, directory: u16, bytes_per_second: u64) -> Option<(u64, u64)> {
        let below = layout::object_directories().nth(directory.into())?;
        let rate = RateLimit::new(bytes_per_second);
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
            tracing::error!("{}", error_chain(&error));
            skipped = true;
            Vec::new()
        });
        for id in ids {
            match self.store.objects.read_medium(&id, &mut reader, &mut pace) {
                Ok(OnMedium::Stopped) => return None,
                Ok(OnMedium::Whole(_)) => objects += 1,
                Ok(OnMedium::Absent | OnMedium::Corrupt) => {}
                Err(error) => {
                    tracing::error!("{}", error_chain(&error));
                    // A known unreadable object does not count as present.
                    skipped |= self.store.objects.damaged_objects().damage(&id).is_none();
                }
            }
        }
        self.all_read &= !skipped;
        Some((objects, bytes))
    }

    /// Updates and publishes the lost objects and the incomplete images.
    fn update_losses(&mut self) {
        let start = Instant::now();
        let losses = self.find_losses();
        self.losses_updated = Some((Instant::now(), start.elapsed()));
        let losses = match losses {
            Ok(losses) => Arc::new(losses),
            Err(error) => {
                return tracing::error!(
                    "cannot find the images that need lost objects: {}",
                    error_chain(&error)
                );
            }
        };
        let changed = *self.scrub.losses.borrow() != losses;
        if !changed {
            return;
        }
        for (image, objects) in &losses.images {
            tracing::error!(
                %image, objects = objects.len(),
                first = objects.first().map(tracing::field::display),
                "an image is incomplete: upload it again under another name, or name a server that \
                 has it with --repair-from"
            );
        }
        if losses.images.is_empty() {
            tracing::info!("every image is complete");
        }
        self.scrub.losses.send_replace(losses);
    }

    fn find_losses(&self) -> Result<Losses, StoreError> {
        let objects = &*self.store.objects;
        let mut missing_objects = MissingObjects::default();
        let mut losses = Losses::default();
        let mut after = None;
        loop {
            let page = self.store.images.list(after.as_ref(), 1_000);
            for image in &page.images {
                if self.stop.is_cancelled() {
                    return Ok(self.scrub.losses().as_ref().clone());
                }
                let missing = missing_objects.of_tree(image.root, &mut StoredObjects(objects))?;
                for id in &missing {
                    let damage = objects.damaged_objects().damage(id).unwrap_or(Damage::Missing);
                    losses.objects.insert(*id, damage);
                }
                if !missing.is_empty() {
                    losses.images.insert(image.name.clone(), missing);
                }
            }
            after = page.images.last().map(|image| image.name.clone());
            if !page.more {
                break;
            }
        }
        let known = objects.damaged_objects().all();
        losses.unneeded = known.keys().filter(|id| !losses.objects.contains_key(id)).count();
        for (id, damage) in &losses.objects {
            if *damage == Damage::Missing {
                objects.damaged_objects().add(*id, Damage::Missing);
            }
        }
        objects.damaged_objects().forget_missing(|id| losses.objects.contains_key(id));
        Ok(losses)
    }

    fn load(&self, directory_count: u16) -> ScrubProgress {
        let text = match fs_err::read(&self.state) {
            Ok(text) => text,
            Err(error) => {
                if error.kind() != std::io::ErrorKind::NotFound {
                    tracing::warn!(%error, "the progress of the scrub is lost; it starts again");
                }
                return ScrubProgress::default();
            }
        };
        let progress: Option<ScrubProgress> = serde_json::from_slice(&text).ok();
        progress.filter(|progress| progress.is_possible(directory_count)).unwrap_or_default()
    }

    /// Saves the progress. If the file is damaged the next pass begins too early; nothing else
    /// depends on it.
    fn save(&mut self, progress: &ScrubProgress) {
        self.saved = Some(Instant::now());
        let saved = serde_json::to_vec(progress)
            .map_err(std::io::Error::other)
            .and_then(|text| fs_err::write(&self.state, text));
        if let Err(error) = saved {
            tracing::warn!(%error, "cannot save the progress of the scrub");
        }
    }
}

/// Looks up the stored objects, without the damaged ones.
struct StoredObjects<'store>(&'store dyn Objects);

impl ObjectLookup for StoredObjects<'_> {
    type Error = StoreError;

    fn directory(&mut self, id: &ObjectId) -> Result<Option<Vec<u8>>, StoreError> {
        match self.0.open_verified(id) {
            Ok(None) => Ok(None),
            Ok(Some(content)) => Ok(content.into_bytes().ok().map(Vec::from)),
            Err(_) if self.0.damaged_objects().damage(id).is_some() => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn has(&mut self, id: &ObjectId, size_bytes: u64) -> Result<bool, StoreError> {
        Ok(self.0.damaged_objects().damage(id) != Some(Damage::Unreadable)
            && self.0.size_bytes(id)? == Some(size_bytes))
    }
}

/// Limits the rate of reading.
struct RateLimit {
    limiter: RateLimiter<NotKeyed, InMemoryState, MonotonicClock, NoOpMiddleware>,
    owed: std::cell::Cell<u32>,
}

impl RateLimit {
    fn new(bytes_per_second: u64) -> Self {
        let cells = u32::try_from(bytes_per_second / CELL_BYTES).unwrap_or(u32::MAX);
        let cells = NonZeroU32::new(cells).unwrap_or(NonZeroU32::MIN);
        let burst = NonZeroU32::new(BURST_CELLS).expect("it is not zero");
        let quota = Quota::per_second(cells).allow_burst(burst);
        let limiter = RateLimiter::direct_with_clock(quota, MonotonicClock);
        Self { limiter, owed: std::cell::Cell::new(0) }
    }

    /// Charges `bytes` that were read. Returns how long to wait before the next call.
    fn charge(&self, bytes: u64) -> Option<Duration> {
        let more = u32::try_from(bytes.div_ceil(CELL_BYTES)).unwrap_or(u32::MAX);
        self.owed.set(self.owed.get().saturating_add(more));
        while let Some(cells) = NonZeroU32::new(self.owed.get().min(BURST_CELLS)) {
            match self.limiter.check_n(cells) {
                Ok(Ok(())) => self.owed.set(self.owed.get() - cells.get()),
                Ok(Err(not_until)) => return Some(not_until.wait_time_from(MonotonicClock.now())),
                // Never returned, because at most a burst is requested.
                Err(_) => return None,
            }
        }
        None
    }
}

/// Fetches lost objects from another server.
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
            // An object that was stored since is not lost any more.
            let wanted: BTreeSet<ObjectId> = wanted
                .into_iter()
                .filter(|id| self.store.objects.damaged_objects().damage(id).is_some())
                .collect();
            match repairs.next(start.elapsed(), &wanted) {
                RepairStep::Request(ids) => {
                    if let Err(why) = self.fetch(&ids).await {
                        tracing::warn!("cannot repair lost objects: {why}");
                    }
                    repairs.note_requested(start.elapsed(), &ids);
                }
                RepairStep::WaitUntil(at) => {
                    tokio::select! {
                        () = tokio::time::sleep_until(start + at) => {}
                        changed = losses.changed() => if changed.is_err() { return },
                    }
                }
                RepairStep::Wait => {
                    if losses.changed().await.is_err() {
                        return;
                    }
                }
            }
        }
    }

    async fn fetch(&self, ids: &[ObjectId]) -> Result<(), String> {
        let request = GetObjectsRequest { ids: ids.to_vec() };
        let reader =
            self.client.get_objects(&request).await.map_err(|error| error_chain(&error))?;
        let (store, counters) = (Arc::clone(&self.store), Arc::clone(&self.counters));
        let absent = AbsentObjects::Skipped;
        let stored = store_objects(store, counters, &self.tasks, reader, absent).await;
        let came = ids
            .iter()
            .filter(|id| self.store.objects.damaged_objects().damage(id).is_none())
            .count();
        if came > 0 {
            tracing::info!(objects = came, from = %self.client.peer(), "repaired lost objects");
            self.counters.objects_repaired.inc_by(came as u64);
            let store = Arc::clone(&self.store);
            let synced = tokio::task::spawn_blocking(move || store.objects.sync()).await;
            synced.map_err(|lost| lost.to_string())?.map_err(|error| error_chain(&error))?;
        }
        stored.map(drop).map_err(|fault| fault.message)
    }
}
