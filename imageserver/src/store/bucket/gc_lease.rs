//! The lease of the collector in a bucket, and the list of objects that it is removing.

use std::time::Duration;

use model::display::error_chain;
use model::object::ObjectId;
use serde::{Deserialize, Serialize};
use system::trusted_clock::ClockReading;

use super::keys;
use super::remote::{Remote, nonce};
use crate::store::bucket::removal_rules::{GC_LEASE_SECONDS_MAX, may_take_gc_lease, may_withdraw};
use crate::store::error::StoreError;

/// The longest of the keys, in bytes.
const BYTES_MAX: u64 = 1 << 20;

/// The content of the key of the lease.
#[derive(Serialize, Deserialize)]
struct LeaseRecord {
    /// The server that has it, if any.
    server: Option<String>,
    /// Random, so that no two records are equal.
    nonce: String,
}

/// The objects that a collector is removing.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct PendingDeletes {
    /// The server that removes them.
    pub server: String,
    /// Empty if no removal is running.
    pub ids: Vec<ObjectId>,
    /// Random, so that no two records are equal.
    nonce: String,
}

/// The lease of the collector, held by this server.
pub struct GcLease<'remote> {
    remote: &'remote Remote,
    etag: String,
    /// When the lease was last renewed, in seconds since the machine was started.
    renewed_at: i64,
}

/// The result of an attempt to take the lease.
pub enum GcLeaseState<'remote> {
    /// This server has the lease.
    Ours(GcLease<'remote>),
    /// That other server has the lease.
    Of(String),
}

fn encode(value: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(value).expect("strings can be written")
}

impl<'remote> GcLease<'remote> {
    /// Takes the lease if no server has it, or if its server was silent for too long.
    pub fn take(remote: &'remote Remote) -> Result<GcLeaseState<'remote>, StoreError> {
        let key = remote.key(keys::GC_LEASE);
        let own = remote.server();
        let renewed_at = ClockReading::now().since_boot;
        let written = LeaseRecord { server: Some(own.to_owned()), nonce: nonce() };
        let etag = match remote.get(&key, BYTES_MAX)? {
            None => remote.create(&key, encode(&written))?,
            Some(entry) => {
                let found: LeaseRecord = serde_json::from_slice(&entry.bytes).map_err(|_| {
                    remote.unfit("the key of the lease of the collector is damaged")
                })?;
                let silent = remote.tell_time()?.bucket.saturating_sub(entry.modified);
                if !may_take_gc_lease(own, found.server.as_deref(), silent) {
                    return Ok(GcLeaseState::Of(found.server.unwrap_or_default()));
                }
                remote.update(&key, encode(&written), &entry.etag)?
            }
        };
        Ok(etag.map_or(GcLeaseState::Of("another server".to_owned()), |etag| {
            GcLeaseState::Ours(Self { remote, etag, renewed_at })
        }))
    }

    /// Renews the lease.
    pub fn renew(&mut self) -> Result<(), StoreError> {
        let renewed_at = ClockReading::now().since_boot;
        self.write(Some(self.remote.server().to_owned()))?;
        self.renewed_at = renewed_at;
        Ok(())
    }

    fn write(&mut self, server: Option<String>) -> Result<(), StoreError> {
        let bytes = encode(&LeaseRecord { server, nonce: nonce() });
        let key = self.remote.key(keys::GC_LEASE);
        match self.remote.update(&key, bytes, &self.etag)? {
            Some(etag) => self.etag = etag,
            None => return Err(StoreError::GcLeaseLost),
        }
        Ok(())
    }

    /// Fails if the lease was not renewed for so long that another server may take it soon.
    pub fn expect_fresh(&self) -> Result<(), StoreError> {
        let age = ClockReading::now().since_boot.saturating_sub(self.renewed_at);
        if age > GC_LEASE_SECONDS_MAX { Err(StoreError::GcLeaseLost) } else { Ok(()) }
    }

    /// Releases the lease.
    pub fn end(mut self) {
        if let Err(error) = self.write(None) {
            tracing::warn!(
                "cannot give the lease of the collector back; it ends later: {}",
                error_chain(&error)
            );
        }
    }

    /// Writes the list of pending deletes before `ids` are removed.
    pub fn announce_deletes(
        &self,
        ids: Vec<ObjectId>,
    ) -> Result<ActiveDeletes<'remote>, StoreError> {
        let remote = self.remote;
        let key = remote.key(keys::PENDING_DELETES);
        let list = PendingDeletes { server: remote.server().to_owned(), ids, nonce: nonce() };
        let etag = match remote.get(&key, BYTES_MAX)? {
            None => remote.create(&key, encode(&list))?,
            Some(entry) => {
                let left = decode(remote, &entry.bytes)?;
                if let Some(&id) = left.ids.first() {
                    // `withdraw_old` clears the list later.
                    return Err(StoreError::Removing { id, server: left.server });
                }
                remote.update(&key, encode(&list), &entry.etag)?
            }
        };
        etag.map(|etag| ActiveDeletes { remote, etag }).ok_or(StoreError::GcLeaseLost)
    }
}

/// A list of pending deletes that this server has written.
pub struct ActiveDeletes<'remote> {
    remote: &'remote Remote,
    etag: String,
}

impl ActiveDeletes<'_> {
    /// Clears the list, after each removal was answered.
    pub fn withdraw(self) -> Result<(), StoreError> {
        withdraw(self.remote, &self.etag).map(drop)
    }
}

/// Clears the list with that tag. Returns false if it was changed.
fn withdraw(remote: &Remote, etag: &str) -> Result<bool, StoreError> {
    let none = PendingDeletes { server: remote.server().to_owned(), ids: vec![], nonce: nonce() };
    Ok(remote.update(&remote.key(keys::PENDING_DELETES), encode(&none), etag)?.is_some())
}

fn decode(remote: &Remote, bytes: &[u8]) -> Result<PendingDeletes, StoreError> {
    serde_json::from_slice(bytes)
        .map_err(|_| remote.unfit("the list of pending deletes is damaged"))
}

/// Returns the pending deletes; `None` if nothing waits to be deleted.
pub fn pending_deletes(remote: &Remote) -> Result<Option<PendingDeletes>, StoreError> {
    let Some(entry) = remote.get(&remote.key(keys::PENDING_DELETES), BYTES_MAX)? else {
        return Ok(None);
    };
    Ok(Some(decode(remote, &entry.bytes)?).filter(|list| !list.ids.is_empty()))
}

/// Clears a list that a server left when it was killed. Called only while this server removes no
/// objects itself.
pub fn withdraw_old(remote: &Remote) -> Result<(), StoreError> {
    let Some(entry) = remote.get(&remote.key(keys::PENDING_DELETES), BYTES_MAX)? else {
        return Ok(());
    };
    let list = decode(remote, &entry.bytes)?;
    if list.ids.is_empty() {
        return Ok(());
    }
    let age = remote.tell_time()?.bucket.saturating_sub(entry.modified);
    if may_withdraw(remote.server(), &list.server, age) && withdraw(remote, &entry.etag)? {
        tracing::warn!(
            objects = list.ids.len(), server = %list.server,
            "a server stopped while it removed objects: cleared its list of pending deletes"
        );
    }
    Ok(())
}

/// How often a server looks for an abandoned list.
pub const ABANDONED_CHECK_INTERVAL: Duration = Duration::from_secs(60);
