//! The leases of this server and of the other servers of a bucket.
//!
//! A lease is a key. It holds until both the bucket's clock and the reader's clock have advanced by
//! its length. The server that wrote it remembers it, so that it need not write it again. After
//! writing a lease the server reads the list of pending deletes ([`super::gc_lease`]) before it
//! answers. The collector writes that list before it reads the leases. So one of them sees the
//! other.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use api::object_server::LEASE_SECONDS_MAX;
use model::lock::locked;
use model::object::ObjectId;
use object_store::path::Path;
use serde::{Deserialize, Serialize};

use super::keys;
use super::remote::{Remote, nonce};
use crate::core::collection::leases::{LEASES_MAX, Leases, short};
use crate::store::bucket::gc_lease;
use crate::store::bucket::removal_rules::{Clocks, holds};
use crate::store::contract::Leasing;
use crate::store::error::StoreError;

/// How long to wait for the removal of an object before it can be stored again.
const REMOVAL_WAIT: Duration = Duration::from_secs(30);

/// How often the list of pending deletes is read meanwhile.
const REMOVAL_CHECK_INTERVAL: Duration = Duration::from_millis(200);

/// The longest key of leases, in bytes.
const BYTES_MAX: u64 = 64 << 20;

/// The most objects in one such key.
const IDS_MAX: usize = 100_000;

/// The fraction by which a lease is longer in the bucket than its server assumes, because clocks
/// differ.
const SLACK_PART: u32 = 24;

/// The content of a key of leases.
#[derive(Serialize, Deserialize)]
struct LeaseChunk {
    seconds: u32,
    /// The time of day of the server that wrote it.
    server_time: i64,
    /// The results of [`short`], in hexadecimal.
    ids: Vec<String>,
}

/// The leases of this server.
pub struct BucketLeasing {
    remote: Arc<Remote>,
    started: Instant,
    /// Random, to distinguish this run of the server from others.
    run: String,
    next: AtomicU64,
    longest: AtomicU32,
    table: Mutex<Leases>,
    /// The lengths of leased objects that were found or stored by this server.
    sizes: Mutex<HashMap<ObjectId, u64>>,
}

impl BucketLeasing {
    pub fn new(remote: Arc<Remote>) -> Self {
        Self {
            remote,
            started: Instant::now(),
            run: nonce()[..8].to_owned(),
            next: AtomicU64::new(0),
            longest: AtomicU32::new(LEASE_SECONDS_MAX),
            table: Mutex::default(),
            sizes: Mutex::default(),
        }
    }

    fn now(&self) -> u64 {
        self.started.elapsed().as_secs()
    }

    /// Writes a lease and waits until none of `ids` is being removed. Gives the key.
    fn write(&self, ids: &[ObjectId], seconds: u32) -> Result<Vec<Path>, StoreError> {
        let mut written = Vec::new();
        for ids in ids.chunks(IDS_MAX) {
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            let key = self.remote.key(&keys::lease(self.remote.server(), &self.run, number));
            let chunk = LeaseChunk {
                seconds: seconds.saturating_add(seconds.div_ceil(SLACK_PART)),
                server_time: self.remote.now().server,
                ids: ids.iter().map(|id| format!("{:016x}", short(id))).collect(),
            };
            let bytes = serde_json::to_vec(&chunk).expect("numbers and strings can be written");
            self.remote.put(&key, bytes)?;
            written.push(key);
        }
        self.wait_for_pending_deletes(ids)?;
        Ok(written)
    }

    fn wait_for_pending_deletes(&self, ids: &[ObjectId]) -> Result<(), StoreError> {
        let started = Instant::now();
        loop {
            let Some(list) = gc_lease::pending_deletes(&self.remote)? else { return Ok(()) };
            let Some(id) = ids.iter().find(|id| list.ids.contains(id)) else { return Ok(()) };
            if started.elapsed() > REMOVAL_WAIT {
                return Err(StoreError::Removing { id: *id, server: list.server });
            }
            std::thread::sleep(REMOVAL_CHECK_INTERVAL);
        }
    }

    /// Holds `ids` until the pin is dropped, or `seconds` have passed after the server was killed.
    pub fn pin(self: &Arc<Self>, ids: &[ObjectId], seconds: u32) -> Result<BucketPin, StoreError> {
        let table = locked(&self.table);
        let (now, half) = (self.now(), u64::from(seconds) / 2);
        let open: Vec<ObjectId> =
            ids.iter().filter(|id| !table.is_leased(now + half, id)).copied().collect();
        drop(table);
        let leasing = Arc::clone(self);
        let until = Instant::now() + Duration::from_secs(half);
        let keys = if open.is_empty() { Vec::new() } else { self.write(&open, seconds)? };
        Ok(BucketPin { leasing, keys, until })
    }

    /// The length of an object that is there for certain: it was found or stored, and is leased.
    pub fn known(&self, id: &ObjectId) -> Option<u64> {
        let is_held = locked(&self.table).is_leased(self.now(), id);
        locked(&self.sizes).get(id).copied().filter(|_| is_held)
    }

    /// Records that `id` was found or stored, of which a lease was given before.
    pub fn note(&self, id: &ObjectId, size_bytes: u64) {
        if !locked(&self.table).is_leased(self.now(), id) {
            return;
        }
        let mut sizes = locked(&self.sizes);
        if sizes.len() >= LEASES_MAX {
            sizes.clear();
        }
        sizes.insert(*id, size_bytes);
    }

    /// Records that `id` is not there.
    pub fn forget(&self, id: &ObjectId) {
        locked(&self.sizes).remove(id);
    }
}

/// Holds objects until it is dropped.
pub struct BucketPin {
    leasing: Arc<BucketLeasing>,
    keys: Vec<Path>,
    until: Instant,
}

impl crate::store::contract::Pin for BucketPin {
    fn is_valid(&self) -> bool {
        Instant::now() < self.until
    }
}

impl Drop for BucketPin {
    fn drop(&mut self) {
        // A lease that is not deleted ends by itself.
        if !self.keys.is_empty()
            && let Err(error) = self.leasing.remote.delete(&self.keys)
        {
            tracing::debug!("cannot delete a lease: {}", model::display::error_chain(&error));
        }
    }
}

impl Leasing for BucketLeasing {
    fn set_longest(&self, seconds: u32) {
        self.longest.store(seconds.min(LEASE_SECONDS_MAX), Ordering::Relaxed);
    }

    fn give(&self, ids: &[ObjectId], seconds: u32) -> Result<(), StoreError> {
        let seconds = match seconds.min(self.longest.load(Ordering::Relaxed)) {
            0 => return Ok(()),
            seconds => seconds + 1,
        };
        let now = self.now();
        let open: Vec<ObjectId> = {
            let table = locked(&self.table);
            // A lease that lasts nearly as long need not be written again.
            let nearly = now + u64::from(seconds - seconds / 8);
            let open: BTreeSet<ObjectId> =
                ids.iter().filter(|id| !table.is_leased(nearly, id)).copied().collect();
            open.into_iter().collect()
        };
        if open.is_empty() {
            return Ok(());
        }
        self.write(&open, seconds)?;
        let mut table = locked(&self.table);
        for id in &open {
            table.give(now, id, seconds.into());
        }
        Ok(())
    }

    fn note_time_passed(&self) -> Result<(), StoreError> {
        // Whoever reads leases also reads the clock.
        let mut table = locked(&self.table);
        let now = self.now();
        table.prune(now);
        locked(&self.sizes).retain(|id, _| table.is_leased(now, id));
        Ok(())
    }

    fn everything_held_for(&self) -> u64 {
        0
    }

    fn count(&self) -> usize {
        locked(&self.table).count()
    }
}

/// The leases of all servers, as far as they were read.
#[derive(Default)]
pub struct SharedLeases {
    chunks: BTreeMap<Path, (String, ReadLease)>,
    ended: Vec<Path>,
}

struct ReadLease {
    given: Clocks,
    seconds: u32,
    ids: BTreeSet<u64>,
}

impl SharedLeases {
    /// Reads those that are new.
    pub fn read(&mut self, remote: &Remote) -> Result<(), StoreError> {
        let mut there = BTreeMap::new();
        remote.list(keys::LEASES, &mut |meta| {
            there.insert(meta.key.clone(), meta);
            true
        })?;
        self.chunks.retain(|key, _| there.contains_key(key));
        self.ended.clear();
        let now = remote.now();
        for (key, meta) in there {
            let is_known = self.chunks.get(&key).is_some_and(|(etag, _)| *etag == meta.etag);
            if !is_known {
                // The lease was deleted meanwhile.
                let Some(entry) = remote.get(&key, BYTES_MAX)? else { continue };
                let chunk: LeaseChunk = serde_json::from_slice(&entry.bytes)
                    .map_err(|_| remote.unfit("a lease in it is damaged"))?;
                let given = Clocks { bucket: entry.modified, server: chunk.server_time };
                let ids = chunk.ids.iter().filter_map(|id| u64::from_str_radix(id, 16).ok());
                let held = ReadLease { given, seconds: chunk.seconds, ids: ids.collect() };
                self.chunks.insert(key.clone(), (entry.etag, held));
            }
            if let Some((_, held)) = self.chunks.get(&key)
                && !holds(held.given, held.seconds, now)
            {
                self.ended.push(key);
            }
        }
        Ok(())
    }

    /// Returns true if a lease holds `id`.
    pub fn is_leased(&self, now: Clocks, id: &ObjectId) -> bool {
        let chunks = self.chunks.values();
        let mut held = chunks.filter(|(_, held)| holds(held.given, held.seconds, now));
        held.any(|(_, held)| held.ids.contains(&short(id)))
    }

    /// The keys of leases that have ended.
    pub fn ended(&self) -> &[Path] {
        &self.ended
    }
}
