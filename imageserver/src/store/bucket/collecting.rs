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
use model::lock::locked;
use model::object::ObjectId;
use model::report::report;
use serde::{Deserialize, Serialize};

use super::keys;
use super::leases::AllLeases;
use super::objects::BucketObjects;
use super::remote::Remote;
use crate::core::collection::leases::short;
use crate::core::collection::needed_objects::NeededObjects;
use crate::store::bucket::gc_lease::{
    ActiveDeletes, GcLease, GcLeaseState, LOOK_INTERVAL, withdraw_old,
};
use crate::store::bucket::removal_rules::{Clocks, Decision, Known, fate};
use crate::store::contract::{Collecting, CollectionProgress, Look};
use crate::store::error::CollectError;
use crate::store::error::StoreError;
use crate::store::image_walk::walk;
use crate::store::images::Images;

/// How many objects are removed at once.
const BATCH_MAX: usize = 500;

/// Of how many objects that no image needs it is remembered since when.
const REMEMBERED_MAX: usize = 1 << 20;

/// The longest key that says so, in bytes.
const BYTES_MAX: u64 = 64 << 20;

/// How often the lease is renewed.
const RENEW_INTERVAL: Duration = Duration::from_secs(30);

/// How long after the last collection, by any server, one is made without being asked for; and how
/// often it is looked when that was. In seconds.
const DUE_SECONDS: i64 = 12 * 3_600;
const DUE_LOOK_INTERVAL: Duration = Duration::from_secs(1_800);

/// What the key holds that says what no image needs.
#[derive(Default, Serialize, Deserialize)]
struct Unneeded {
    /// Those that were first seen at one time are together.
    seen: Vec<Seen>,
}

#[derive(Serialize, Deserialize)]
struct Seen {
    since: Clocks,
    /// As [`short`] gives them, in hexadecimal.
    ids: Vec<String>,
}

/// Collects the objects of a bucket.
pub struct BucketCollecting {
    remote: Arc<Remote>,
    objects: Arc<BucketObjects>,
    images: Arc<Images>,
    /// For how long no image must have needed what is removed, in seconds.
    unneeded_seconds: i64,
    looked: Mutex<Looked>,
    /// Held while this server removes objects, or takes back a list that it left.
    removing: Mutex<()>,
}

/// When it was last looked for what has to be done by itself.
#[derive(Default)]
struct Looked {
    tended: Option<Instant>,
    due: Option<Instant>,
}

impl BucketCollecting {
    pub(in crate::store) fn new(
        remote: Arc<Remote>,
        objects: Arc<BucketObjects>,
        images: Arc<Images>,
        unneeded_seconds: i64,
    ) -> Self {
        // Not at once: whoever starts a server has other things to ask of it.
        let looked = Looked { tended: None, due: Some(Instant::now()) };
        Self {
            remote,
            objects,
            images,
            unneeded_seconds,
            looked: Mutex::new(looked),
            removing: Mutex::default(),
        }
    }

    fn look_due(&self) -> Result<bool, StoreError> {
        let found = self.remote.head(&self.remote.key(keys::UNNEEDED))?;
        let now = self.remote.now().bucket;
        Ok(found.is_none_or(|meta| now.saturating_sub(meta.modified) > DUE_SECONDS))
    }
}

/// True if the last time was longer ago than `interval`; then it is now.
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
        let mut run = Run {
            collecting: self,
            request,
            progress,
            gc_lease: RefCell::new(gc_lease),
            renewed: Cell::new(Instant::now()),
            stop,
            needed: NeededObjects::default(),
            leases: AllLeases::default(),
            reply: CollectReply::default(),
        };
        let result = run.all();
        run.gc_lease.into_inner().end();
        result
    }

    fn tend(&self) {
        if !is_time(&mut locked(&self.looked).tended, LOOK_INTERVAL) {
            return;
        }
        let _removing = locked(&self.removing);
        let tended = self.remote.tell_time().and_then(|_| withdraw_old(&self.remote));
        if let Err(error) = tended {
            tracing::warn!("cannot do the periodic work on the bucket: {}", report(&error));
        }
    }

    fn is_due(&self) -> bool {
        if !is_time(&mut locked(&self.looked).due, DUE_LOOK_INTERVAL) {
            return false;
        }
        self.look_due().unwrap_or_else(|error| {
            tracing::warn!("cannot read when objects were last collected: {}", report(&error));
            false
        })
    }
}

/// An object that no image needs.
struct Candidate {
    id: ObjectId,
    modified: i64,
    bytes: u64,
    since: Clocks,
}

/// One collection.
struct Run<'run> {
    collecting: &'run BucketCollecting,
    request: CollectRequest,
    progress: &'run dyn CollectionProgress,
    gc_lease: RefCell<GcLease<'run>>,
    renewed: Cell<Instant>,
    stop: &'run dyn Fn() -> bool,
    needed: NeededObjects,
    leases: AllLeases,
    reply: CollectReply,
}

impl Run<'_> {
    fn all(&mut self) -> Result<CollectReply, CollectError> {
        let remote = &self.collecting.remote;
        self.walk()?;
        let now = remote.tell_time()?;
        let candidates = self.list(now)?;
        self.leases.read(remote)?;
        let mut free = Vec::new();
        for candidate in candidates {
            match self.fate(&candidate, now) {
                Decision::Goes => free.push(candidate),
                Decision::Leased => self.reply.leased.count(candidate.bytes),
                Decision::Waits => {}
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
                tracing::warn!("{}", report(&error));
                return true;
            }
        }
        (self.stop)()
    }

    fn expect_going_on(&self) -> Result<(), CollectError> {
        if self.is_over() { Err(CollectError::Stopped) } else { Ok(()) }
    }

    /// Walks all images that there are and that were not walked.
    fn walk(&mut self) -> Result<(), CollectError> {
        let BucketCollecting { images, objects, .. } = self.collecting;
        images.refresh(Look::Close)?;
        if let Some((image, _)) = images.damaged().into_iter().next() {
            return Err(CollectError::Damaged { image });
        }
        let (_, starts) = images.starts();
        let mut needed = std::mem::take(&mut self.needed);
        let walked = walk(&**objects, &mut needed, &starts, || self.is_over());
        self.needed = needed;
        if !walked.map_err(|source| CollectError::Walk { source })? {
            return Err(CollectError::Stopped);
        }
        self.reply.images = starts.len() as u64;
        Ok(())
    }

    /// Finds what no image needs, and writes down since when.
    fn list(&mut self, now: Clocks) -> Result<Vec<Candidate>, CollectError> {
        let remote = &self.collecting.remote;
        let key = remote.key(keys::UNNEEDED);
        let former: HashMap<u64, Clocks> = match remote.get(&key, BYTES_MAX)? {
            None => HashMap::new(),
            // What is damaged is written anew, and everything waits for another day.
            Some(entry) => since(&serde_json::from_slice(&entry.bytes).unwrap_or_default()),
        };
        let (mut objects, mut bytes, mut is_over) = (0, 0, false);
        let mut candidates = Vec::new();
        self.collecting.objects.visit(&mut |id, meta| {
            objects += 1;
            bytes += meta.size_bytes;
            if !self.needed.needs(&id) {
                self.reply.unneeded.count(meta.size_bytes);
                if candidates.len() < REMEMBERED_MAX {
                    let since = former.get(&short(&id)).copied().unwrap_or(now);
                    let (modified, bytes) = (meta.modified, meta.size_bytes);
                    candidates.push(Candidate { id, modified, bytes, since });
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

    fn fate(&self, candidate: &Candidate, now: Clocks) -> Decision {
        let known = Known {
            modified: candidate.modified,
            unneeded_since: candidate.since,
            is_leased: self.leases.hold(now, &candidate.id),
        };
        fate(known, self.collecting.unneeded_seconds, now)
    }

    fn is_enough(&self) -> bool {
        self.request.bytes > 0 && self.reply.removed.bytes >= self.request.bytes
    }

    fn remove(&mut self, batch: &[Candidate]) -> Result<(), CollectError> {
        self.expect_going_on()?;
        let _removing = locked(&self.collecting.removing);
        self.gc_lease.borrow_mut().renew()?;
        self.renewed.set(Instant::now());
        let ids = batch.iter().map(|candidate| candidate.id).collect();
        let deletes = self.gc_lease.borrow().announce_deletes(ids)?;
        match self.still_free(batch) {
            Ok(free) => self.execute(deletes, &free),
            Err(error) => {
                // Nothing was asked to be removed yet.
                deletes.withdraw()?;
                Err(error)
            }
        }
    }

    /// Those of `batch`, which is condemned, that nobody has leased or needs even now.
    fn still_free<'batch>(
        &mut self,
        batch: &'batch [Candidate],
    ) -> Result<Vec<&'batch Candidate>, CollectError> {
        let remote = &self.collecting.remote;
        self.leases.read(remote)?;
        self.walk()?;
        let now = remote.now();
        let ids: Vec<ObjectId> = batch.iter().map(|candidate| candidate.id).collect();
        let dates = self.collecting.objects.dates(&ids)?;
        let free = batch.iter().zip(dates).filter(|(candidate, date)| {
            // One that was stored again since it was listed is not the one that was listed.
            *date == Some(candidate.modified)
                && !self.needed.needs(&candidate.id)
                && self.fate(candidate, now) == Decision::Goes
        });
        Ok(free.map(|(candidate, _)| candidate).collect())
    }

    /// Removes them. If that is not answered the list stays, and is taken back later.
    fn execute(
        &mut self,
        deletes: ActiveDeletes<'_>,
        free: &[&Candidate],
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

fn unneeded(candidates: &[Candidate]) -> Unneeded {
    let mut seen: std::collections::BTreeMap<Clocks, Vec<String>> = Default::default();
    for candidate in candidates {
        seen.entry(candidate.since).or_default().push(format!("{:016x}", short(&candidate.id)));
    }
    Unneeded { seen: seen.into_iter().map(|(since, ids)| Seen { since, ids }).collect() }
}
