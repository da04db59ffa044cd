//! What callers were promised, by this server and by the others.
//!
//! A lease is a key of its own, which holds until the bucket's clock and that of whoever looks have
//! gone on for as long as it says. Its server remembers it, so that it need not write it again. It
//! gives it to nobody before it has looked what is being removed ([`crate::store::bucket::gc_lease`]): whoever removes
//! writes first what, and looks at the leases then. So one of both sees the other.

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
use super::remote::{Remote, random};
use crate::core::collection::leases::{LEASES_MAX, Leases, short};
use crate::store::bucket::gc_lease;
use crate::store::bucket::removal_rules::{Clocks, holds};
use crate::store::contract::Leasing;
use crate::store::error::StoreError;

/// For how long it is waited until an object is removed, before it can be stored again.
const REMOVAL_WAIT: Duration = Duration::from_secs(30);

/// How often it is looked whether it is.
const REMOVAL_LOOK: Duration = Duration::from_millis(200);

/// The longest key of leases, in bytes.
const BYTES_MAX: u64 = 64 << 20;

/// The most objects in one such key.
const IDS_MAX: usize = 100_000;

/// By which part a lease is longer in the bucket than its server believes: clocks do not run alike.
const SLACK_PART: u32 = 24;

/// What a key of leases holds.
#[derive(Serialize, Deserialize)]
struct Chunk {
    seconds: u32,
    /// The time of day of the server that wrote it.
    server_time: i64,
    /// As [`short`] gives them, in hexadecimal.
    ids: Vec<String>,
}

/// The leases of this server.
pub struct BucketLeasing {
    remote: Arc<Remote>,
    started: Instant,
    /// Tells this run of the server from others.
    run: String,
    next: AtomicU64,
    longest: AtomicU32,
    table: Mutex<Leases>,
    /// How long those are that were found or stored here while they were leased.
    sizes: Mutex<HashMap<ObjectId, u64>>,
}

impl BucketLeasing {
    pub fn new(remote: Arc<Remote>) -> Self {
        let run = random().unwrap_or_else(|_| format!("{:?}", Instant::now()));
        Self {
            remote,
            started: Instant::now(),
            run: run.chars().filter(char::is_ascii_alphanumeric).take(8).collect(),
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
            let chunk = Chunk {
                seconds: seconds.saturating_add(seconds.div_ceil(SLACK_PART)),
                server_time: self.remote.now().server,
                ids: ids.iter().map(|id| format!("{:016x}", short(id))).collect(),
            };
            let bytes = serde_json::to_vec(&chunk).expect("numbers and strings can be written");
            self.remote.put(&key, bytes)?;
            written.push(key);
        }
        self.expect_not_condemned(ids)?;
        Ok(written)
    }

    fn expect_not_condemned(&self, ids: &[ObjectId]) -> Result<(), StoreError> {
        let begun = Instant::now();
        loop {
            let Some(list) = gc_lease::condemned(&self.remote)? else { return Ok(()) };
            let Some(id) = ids.iter().find(|id| list.ids.contains(id)) else { return Ok(()) };
            if begun.elapsed() > REMOVAL_WAIT {
                return Err(StoreError::Removing { id: *id, server: list.server });
            }
            std::thread::sleep(REMOVAL_LOOK);
        }
    }

    /// Holds `ids` until the pin is dropped, or the server was killed and `seconds` are over.
    pub fn pin(self: &Arc<Self>, ids: &[ObjectId], seconds: u32) -> Result<Pin, StoreError> {
        let table = locked(&self.table);
        let (now, half) = (self.now(), u64::from(seconds) / 2);
        let open: Vec<ObjectId> =
            ids.iter().filter(|id| !table.hold(now + half, id)).copied().collect();
        drop(table);
        let leasing = Arc::clone(self);
        let until = Instant::now() + Duration::from_secs(half);
        let keys = if open.is_empty() { Vec::new() } else { self.write(&open, seconds)? };
        Ok(Pin { leasing, keys, until })
    }

    /// The length of an object that is there for certain: it was found or stored, and is leased.
    pub fn known(&self, id: &ObjectId) -> Option<u64> {
        let is_held = locked(&self.table).hold(self.now(), id);
        locked(&self.sizes).get(id).copied().filter(|_| is_held)
    }

    /// Takes note that `id` was found or stored, of which a lease was given before.
    pub fn note(&self, id: &ObjectId, size_bytes: u64) {
        if !locked(&self.table).hold(self.now(), id) {
            return;
        }
        let mut sizes = locked(&self.sizes);
        if sizes.len() >= LEASES_MAX {
            sizes.clear();
        }
        sizes.insert(*id, size_bytes);
    }

    /// Takes note that `id` is not there.
    pub fn forget(&self, id: &ObjectId) {
        locked(&self.sizes).remove(id);
    }
}

/// Holds objects until it is dropped.
pub struct Pin {
    leasing: Arc<BucketLeasing>,
    keys: Vec<Path>,
    until: Instant,
}

impl crate::store::contract::Pin for Pin {
    fn holds(&self) -> bool {
        Instant::now() < self.until
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        // One that stays ends by itself.
        if !self.keys.is_empty()
            && let Err(error) = self.leasing.remote.delete(&self.keys)
        {
            tracing::debug!("a lease is left: {}", model::report::report(&error));
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
            // What holds for nearly as long need not be written again.
            let nearly = now + u64::from(seconds - seconds / 8);
            let open: BTreeSet<ObjectId> =
                ids.iter().filter(|id| !table.hold(nearly, id)).copied().collect();
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

    fn count_down(&self) -> Result<(), StoreError> {
        // Who looks at leases also looks at the clock.
        let mut table = locked(&self.table);
        let now = self.now();
        table.prune(now);
        locked(&self.sizes).retain(|id, _| table.hold(now, id));
        Ok(())
    }

    fn everything_for(&self) -> u64 {
        0
    }

    fn count(&self) -> usize {
        locked(&self.table).count()
    }
}

/// The leases of all servers, as far as they were read.
#[derive(Default)]
pub struct AllLeases {
    chunks: BTreeMap<Path, (String, Held)>,
    ended: Vec<Path>,
}

struct Held {
    given: Clocks,
    seconds: u32,
    ids: BTreeSet<u64>,
}

impl AllLeases {
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
                // It was taken back meanwhile.
                let Some(entry) = remote.get(&key, BYTES_MAX)? else { continue };
                let chunk: Chunk = serde_json::from_slice(&entry.bytes)
                    .map_err(|_| remote.unfit("a lease in it is damaged"))?;
                let given = Clocks { bucket: entry.modified, server: chunk.server_time };
                let ids = chunk.ids.iter().filter_map(|id| u64::from_str_radix(id, 16).ok());
                let held = Held { given, seconds: chunk.seconds, ids: ids.collect() };
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

    /// True if a lease holds `id`.
    pub fn hold(&self, now: Clocks, id: &ObjectId) -> bool {
        let chunks = self.chunks.values();
        let mut held = chunks.filter(|(_, held)| holds(held.given, held.seconds, now));
        held.any(|(_, held)| held.ids.contains(&short(id)))
    }

    /// The keys of leases that have ended.
    pub fn ended(&self) -> &[Path] {
        &self.ended
    }
}
