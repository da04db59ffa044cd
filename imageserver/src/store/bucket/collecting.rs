//! Removes objects from a bucket that no image needs, one server at a time.
//!
//! # Why no object is lost
//!
//! Several servers take uploads and add images while one of them collects. They share no lock. They
//! coordinate through keys of the bucket, and a read returns the last value written. The test
//! `interleavings` tries all orders of their steps.
//!
//! 1. A server that promises an object to a client, or adds an image that needs it, first writes a
//!    *lease*, then reads the list of *pending deletes*, and waits while the object is on it. Only
//!    then it looks for the object, or stores it.
//! 2. The collector writes the objects that it will remove to that list first. Then it reads the
//!    leases and the names of all images, and walks the new ones. It removes what is neither leased
//!    nor needed, and clears the list when every removal was answered.
//!
//! So of a lease and a removal at the same time, one sees the other: if the collector did not read
//! the lease, the server that wrote the lease reads the list. An image that became visible too late
//! to be walked was leased before, and the collector saw the lease.
//!
//! 3. One server has the *lease of the collector*, by a conditional write. It acts on it for
//!    [`super::removal_rules::GC_LEASE_SECONDS_MAX`] after each renewal, by a clock that nobody can
//!    set. Another server takes the lease, or clears an abandoned list, only after
//!    [`super::removal_rules::SILENT_SECONDS`] without a renewal by the bucket's clock. By then
//!    each request has ended: a request is retried for at most a minute, and a bucket refuses one
//!    that was signed a quarter of an hour ago.
//! 4. Besides, an object is removed only if the bucket dates it at least a day back and a former
//!    collection found it unneeded a day ago, by the bucket's clock and by that of the server.
//!
//! A crash leaves the list. Its objects cannot be stored again until the same server clears it, a
//! minute after it has restarted, or another server does.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use api::image_server::collection::{CollectReply, CollectRequest};
use model::display::error_chain;
use model::lock::locked;
use model::object::ObjectId;
use serde::{Deserialize, Serialize};

use super::keys;
use super::leases::SharedLeases;
use super::objects::BucketObjects;
use super::remote::Remote;
use crate::core::collection::leases::short;
use crate::core::collection::removal::NeededObjects;
use crate::store::bucket::gc_lease::{
    ABANDONED_CHECK_INTERVAL, ActiveDeletes, GcLease, GcLeaseState, withdraw_old,
};
use crate::store::bucket::removal_rules::{BucketDecision, Clocks, UnneededState, decide};
use crate::store::contract::{Collecting, CollectionProgress, Refresh};
use crate::store::error::{CollectError, StoreError};
use crate::store::image_trees::walk;
use crate::store::images::Images;

/// How many objects are removed at once.
const BATCH_MAX: usize = 500;

/// The most unneeded objects whose first time is saved.
const REMEMBERED_MAX: usize = 1 << 20;

/// The longest key that says so, in bytes.
const BYTES_MAX: u64 = 64 << 20;

/// How often the lease is renewed.
const RENEW_INTERVAL: Duration = Duration::from_secs(30);

/// How long after the last collection by any server the next one is due, and how often that is
/// checked. In seconds.
const DUE_SECONDS: i64 = 12 * 3_600;
const DUE_CHECK_INTERVAL: Duration = Duration::from_secs(1_800);

/// The content of the key of unneeded objects.
#[derive(Default, Serialize, Deserialize)]
struct Unneeded {
    /// Grouped by the time at which they were first seen.
    seen: Vec<UnneededSince>,
}

#[derive(Serialize, Deserialize)]
struct UnneededSince {
    since: Clocks,
    /// The results of [`short`], in hexadecimal.
    ids: Vec<String>,
}

/// Collects the objects of a bucket.
pub struct BucketCollecting {
    remote: Arc<Remote>,
    objects: Arc<BucketObjects>,
    images: Arc<Images>,
    /// How long an object must be unneeded before it is removed, in seconds.
    unneeded_seconds: i64,
    last_checks: Mutex<LastChecks>,
    /// Held while this server removes objects or clears its list of pending deletes.
    removing: Mutex<()>,
}

/// The times of the last periodic checks.
#[derive(Default)]
struct LastChecks {
    maintained: Option<Instant>,
    due: Option<Instant>,
}

impl BucketCollecting {
    pub(in crate::store) fn new(
        remote: Arc<Remote>,
        objects: Arc<BucketObjects>,
        images: Arc<Images>,
        unneeded_seconds: i64,
    ) -> Self {
        // Not at once: a server that was just started has other work.
        let last_checks = LastChecks { maintained: None, due: Some(Instant::now()) };
        Self {
            remote,
            objects,
            images,
            unneeded_seconds,
            last_checks: Mutex::new(last_checks),
            removing: Mutex::default(),
        }
    }

    fn is_overdue(&self) -> Result<bool, StoreError> {
        let found = self.remote.head(&self.remote.key(keys::UNNEEDED))?;
        let now = self.remote.now().bucket;
        Ok(found.is_none_or(|meta| now.saturating_sub(meta.modified) > DUE_SECONDS))
    }
}

/// Returns true if the last time is longer ago than `interval`, and then sets it to now.
fn is_time(last: &mut Option<Instant>, interval: Duration) -> bool {
    let is_time = last.is_none_or(|last| last.elapsed() > interval);
    if is_time {
        *last = Some(Instant::now());
    }
    is_time
}

impl Collecting for BucketCollecting {
    fn collect(
        &self,
        request: CollectRequest,
        progress: &dyn CollectionProgress,
        stop: &dyn Fn() -> bool,
    ) -> Result<CollectReply, CollectError> {
        let gc_lease = match GcLease::take(&self.remote)? {
            GcLeaseState::Ours(gc_lease) => gc_lease,
            GcLeaseState::Of(server) => return Err(CollectError::Elsewhere { server }),
        };
        withdraw_old(&self.remote)?;
        let mut collection = BucketCollection {
            collecting: self,
            request,
            progress,
            gc_lease: RefCell::new(gc_lease),
            renewed: Cell::new(Instant::now()),
            stop,
            needed: NeededObjects::default(),
            leases: SharedLeases::default(),
            reply: CollectReply::default(),
        };
        let result = collection.run();
        collection.gc_lease.into_inner().end();
        result
    }

    fn maintain(&self) {
        if !is_time(&mut locked(&self.last_checks).maintained, ABANDONED_CHECK_INTERVAL) {
            return;
        }
        let _removing = locked(&self.removing);
        let maintained = self.remote.tell_time().and_then(|_| withdraw_old(&self.remote));
        if let Err(error) = maintained {
            tracing::warn!("cannot do the periodic work on the bucket: {}", error_chain(&error));
        }
    }

    fn is_due(&self) -> bool {
        if !is_time(&mut locked(&self.last_checks).due, DUE_CHECK_INTERVAL) {
            return false;
        }
        self.is_overdue().unwrap_or_else(|error| {
            tracing::warn!("cannot read when objects were last collected: {}", error_chain(&error));
            false
        })
    }
}

/// An object that no image needs.
struct UnneededObject {
    id: ObjectId,
    modified: i64,
    bytes: u64,
    since: Clocks,
}

/// One collection.
struct BucketCollection<'run> {
    collecting: &'run BucketCollecting,
    request: CollectRequest,
    progress: &'run dyn CollectionProgress,
    gc_lease: RefCell<GcLease<'run>>,
    renewed: Cell<Instant>,
    stop: &'run dyn Fn() -> bool,
    needed: NeededObjects,
    leases: SharedLeases,
    reply: CollectReply,
}

impl BucketCollection<'_> {
    fn run(&mut self) -> Result<CollectReply, CollectError> {
        let remote = &self.collecting.remote;
        self.walk()?;
        let now = remote.tell_time()?;
        let candidates = self.list(now)?;
        self.leases.read(remote)?;
        let mut free = Vec::new();
        for candidate in candidates {
            match self.decide(&candidate, now) {
                BucketDecision::Remove => free.push(candidate),
                BucketDecision::Leased => self.reply.leased.count(candidate.bytes),
                BucketDecision::Wait => {}
            }
        }
        free.sort_by_key(|candidate| (candidate.modified, candidate.id));
        if self.request.dry_run {
            for candidate in &free {
                if self.is_enough() {
                    break;
                }
                self.reply.removed.count(candidate.bytes);
            }
            return Ok(self.reply);
        }
        for batch in free.chunks(BATCH_MAX) {
            if self.is_enough() {
                break;
            }
            self.remove(batch)?;
        }
        remote.delete(self.leases.ended())?;
        Ok(self.reply)
    }

    /// Returns true if the run ends now. Renews the lease when that is due.
    fn is_over(&self) -> bool {
        if self.renewed.get().elapsed() > RENEW_INTERVAL {
            self.renewed.set(Instant::now());
            if let Err(error) = self.gc_lease.borrow_mut().renew() {
                // The removal checks the age of the lease itself.
                tracing::warn!("{}", error_chain(&error));
                return true;
            }
        }
        (self.stop)()
    }

    fn expect_going_on(&self) -> Result<(), CollectError> {
        if self.is_over() { Err(CollectError::Stopped) } else { Ok(()) }
    }

    /// Walks all images that were not walked yet.
    fn walk(&mut self) -> Result<(), CollectError> {
        let BucketCollecting { images, objects, .. } = self.collecting;
        images.refresh(Refresh::Complete)?;
        if let Some((image, _)) = images.damaged().into_iter().next() {
            return Err(CollectError::Damaged { image });
        }
        let (_, roots) = images.roots();
        let mut needed = std::mem::take(&mut self.needed);
        let walked = walk(&**objects, &mut needed, &roots, || self.is_over());
        self.needed = needed;
        if !walked.map_err(|source| CollectError::Walk { source })? {
            return Err(CollectError::Stopped);
        }
        self.reply.images = roots.len() as u64;
        Ok(())
    }

    /// Finds the objects that no image needs, and saves since when.
    fn list(&mut self, now: Clocks) -> Result<Vec<UnneededObject>, CollectError> {
        let remote = &self.collecting.remote;
        let key = remote.key(keys::UNNEEDED);
        let former: HashMap<u64, Clocks> = match remote.get(&key, BYTES_MAX)? {
            None => HashMap::new(),
            // A damaged key is written anew, and all objects wait for another day.
            Some(entry) => since(&serde_json::from_slice(&entry.bytes).unwrap_or_default()),
        };
        let (mut objects, mut bytes, mut is_over) = (0, 0, false);
        let mut candidates = Vec::new();
        self.collecting.objects.visit(&mut |id, meta| {
            objects += 1;
            bytes += meta.size_bytes;
            if !self.needed.contains(&id) {
                self.reply.unneeded.count(meta.size_bytes);
                if candidates.len() < REMEMBERED_MAX {
                    let since = former.get(&short(&id)).copied().unwrap_or(now);
                    let (modified, bytes) = (meta.modified, meta.size_bytes);
                    candidates.push(UnneededObject { id, modified, bytes, since });
                }
            }
            is_over = objects % 1_000 == 0 && self.is_over();
            !is_over
        })?;
        if is_over {
            return Err(CollectError::Stopped);
        }
        self.collecting.objects.stored.counted(objects, bytes);
        self.progress.unneeded(self.reply.unneeded);
        if !self.request.dry_run {
            let unneeded = unneeded(&candidates);
            let bytes = serde_json::to_vec(&unneeded).expect("numbers and strings can be written");
            remote.put(&key, bytes)?;
        }
        Ok(candidates)
    }

    fn decide(&self, candidate: &UnneededObject, now: Clocks) -> BucketDecision {
        let known = UnneededState {
            modified: candidate.modified,
            unneeded_since: candidate.since,
            is_leased: self.leases.is_leased(now, &candidate.id),
        };
        decide(known, self.collecting.unneeded_seconds, now)
    }

    fn is_enough(&self) -> bool {
        self.request.bytes > 0 && self.reply.removed.bytes >= self.request.bytes
    }

    fn remove(&mut self, batch: &[UnneededObject]) -> Result<(), CollectError> {
        self.expect_going_on()?;
        let _removing = locked(&self.collecting.removing);
        self.gc_lease.borrow_mut().renew()?;
        self.renewed.set(Instant::now());
        let ids = batch.iter().map(|candidate| candidate.id).collect();
        let deletes = self.gc_lease.borrow().announce_deletes(ids)?;
        match self.still_removable(batch) {
            Ok(free) => self.execute(deletes, &free),
            Err(error) => {
                // No removal was requested yet.
                deletes.withdraw()?;
                Err(error)
            }
        }
    }

    /// Returns the objects of `batch` that are still neither leased nor needed. The batch is
    /// pending.
    fn still_removable<'batch>(
        &mut self,
        batch: &'batch [UnneededObject],
    ) -> Result<Vec<&'batch UnneededObject>, CollectError> {
        let remote = &self.collecting.remote;
        self.leases.read(remote)?;
        self.walk()?;
        let now = remote.now();
        let ids: Vec<ObjectId> = batch.iter().map(|candidate| candidate.id).collect();
        let dates = self.collecting.objects.dates(&ids)?;
        let free = batch.iter().zip(dates).filter(|(candidate, date)| {
            // An object that was stored again since it was listed must stay.
            *date == Some(candidate.modified)
                && !self.needed.contains(&candidate.id)
                && self.decide(candidate, now) == BucketDecision::Remove
        });
        Ok(free.map(|(candidate, _)| candidate).collect())
    }

    /// Removes them. If that is not answered the list stays, and is taken back later.
    fn execute(
        &mut self,
        deletes: ActiveDeletes<'_>,
        free: &[&UnneededObject],
    ) -> Result<(), CollectError> {
        let remote = &self.collecting.remote;
        if let Err(error) = self.gc_lease.borrow().expect_fresh() {
            deletes.withdraw()?;
            return Err(error.into());
        }
        let keys: Vec<_> =
            free.iter().map(|candidate| remote.key(&keys::object(&candidate.id))).collect();
        remote.delete(&keys)?;
        deletes.withdraw()?;
        for candidate in free {
            self.collecting.objects.leasing.forget(&candidate.id);
            self.reply.removed.count(candidate.bytes);
            self.progress.removed(candidate.bytes);
        }
        Ok(())
    }
}

fn since(unneeded: &Unneeded) -> HashMap<u64, Clocks> {
    let all = unneeded.seen.iter().flat_map(|seen| seen.ids.iter().map(move |id| (id, seen.since)));
    all.filter_map(|(id, since)| Some((u64::from_str_radix(id, 16).ok()?, since))).collect()
}

fn unneeded(candidates: &[UnneededObject]) -> Unneeded {
    let mut seen: std::collections::BTreeMap<Clocks, Vec<String>> = Default::default();
    for candidate in candidates {
        seen.entry(candidate.since).or_default().push(format!("{:016x}", short(&candidate.id)));
    }
    Unneeded { seen: seen.into_iter().map(|(since, ids)| UnneededSince { since, ids }).collect() }
}
