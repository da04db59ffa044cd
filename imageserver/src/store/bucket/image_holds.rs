//! The images that dominators use, as reported to any server of the bucket.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use model::display::error_chain;
use model::image::ImageName;
use model::lock::locked;
use object_store::path::Path;
use serde::{Deserialize, Serialize};

use super::keys;
use super::remote::Remote;
use crate::core::image_holds::{HOLDERS_MAX, Holder, TooManyError};
use crate::store::bucket::removal_rules::{Clocks, elapsed, holds};
use crate::store::contract::Holding;
use crate::store::error::StoreError;

/// The longest key, in bytes.
const BYTES_MAX: u64 = 64 << 20;

/// The content of the key of a hold.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct HoldRecord {
    holder: String,
    names: BTreeSet<ImageName>,
    seconds: u32,
    /// The time of day of the server that wrote it.
    server_time: i64,
}

/// The uses that all servers were told of.
pub struct BucketHolding {
    remote: Arc<Remote>,
    /// The holds as last read, with their tags and the bucket's dates.
    read: Mutex<BTreeMap<Path, (String, i64, HoldRecord)>>,
}

impl BucketHolding {
    pub fn new(remote: Arc<Remote>) -> Self {
        Self { remote, read: Mutex::default() }
    }

    /// Reads what is new, and forgets what has ended.
    fn refresh(&self) -> Result<(), StoreError> {
        let mut there = BTreeMap::new();
        self.remote.list(keys::HOLDS, &mut |meta| {
            there.insert(meta.key.clone(), meta);
            true
        })?;
        let mut read = locked(&self.read);
        read.retain(|key, _| there.contains_key(key));
        for (key, meta) in there {
            if read.get(&key).is_some_and(|(etag, _, _)| *etag == meta.etag) {
                continue;
            }
            let Some(entry) = self.remote.get(&key, BYTES_MAX)? else { continue };
            let hold: HoldRecord = serde_json::from_slice(&entry.bytes)
                .map_err(|_| self.remote.unfit("a key of uses in it is damaged"))?;
            read.insert(key, (entry.etag, entry.modified, hold));
        }
        Ok(())
    }

    fn write(&self, hold: &HoldRecord) -> Result<(), StoreError> {
        let bytes = serde_json::to_vec(hold).expect("names and numbers can be written");
        self.remote.put(&self.remote.key(&keys::hold(&hold.holder)), bytes)
    }
}

/// Returns when the hold was written.
fn given(modified: i64, hold: &HoldRecord) -> Clocks {
    Clocks { bucket: modified, server: hold.server_time }
}

impl Holding for BucketHolding {
    fn note(
        &self,
        holder: &str,
        names: BTreeSet<ImageName>,
        seconds: u32,
    ) -> Result<(), TooManyError> {
        let now = self.remote.now();
        let key = self.remote.key(&keys::hold(holder));
        let hold =
            HoldRecord { holder: holder.to_owned(), names, seconds, server_time: now.server };
        {
            let mut read = locked(&self.read);
            if !read.contains_key(&key) && read.len() >= HOLDERS_MAX {
                return Err(TooManyError);
            }
            read.insert(key, (String::new(), now.bucket, hold.clone()));
        }
        if let Err(error) = self.write(&hold) {
            // The hold is in force on this server, and the holder renews it before it ends.
            tracing::error!(
                "other servers do not learn which images are in use: {}",
                error_chain(&error)
            );
        }
        Ok(())
    }

    fn holders(&self, name: &ImageName) -> Result<Vec<Holder>, StoreError> {
        self.refresh()?;
        let now = self.remote.now();
        let read = locked(&self.read);
        let using = read.values().filter(|(_, modified, hold)| {
            hold.names.contains(name) && holds(given(*modified, hold), hold.seconds, now)
        });
        let mut holders: Vec<Holder> = using
            .map(|(_, modified, hold)| Holder {
                name: hold.holder.clone(),
                seconds: u64::try_from(
                    i64::from(hold.seconds) - elapsed(given(*modified, hold), now),
                )
                .unwrap_or(0),
                is_old: false,
            })
            .collect();
        holders.sort_by(|one, other| one.name.cmp(&other.name));
        Ok(holders)
    }

    fn count(&self) -> usize {
        let now = self.remote.now();
        let read = locked(&self.read);
        let held = read
            .values()
            .filter(|(_, modified, hold)| holds(given(*modified, hold), hold.seconds, now));
        held.flat_map(|(_, _, hold)| &hold.names).collect::<BTreeSet<_>>().len()
    }
}
