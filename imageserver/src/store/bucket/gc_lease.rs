//! Which server collects, and what it removes just now.

use std::time::Duration;

use model::object::ObjectId;
use model::report::report;
use serde::{Deserialize, Serialize};

use super::keys;
use super::remote::{Remote, random};
use crate::clock::reading;
use crate::store::bucket::removal_rules::{TURN_SECONDS_MAX, may_take_turn, may_withdraw};
use crate::store::error::StoreError;

/// The longest of the keys, in bytes.
const BYTES_MAX: u64 = 1 << 20;

/// What the key of the turn holds.
#[derive(Serialize, Deserialize)]
struct Written {
    /// Who has it; `None` for nobody.
    server: Option<String>,
    /// So that no two are equal.
    nonce: String,
}

/// What is removed just now.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Condemned {
    /// By whom.
    pub server: String,
    /// What; nothing if the list is not in force.
    pub ids: Vec<ObjectId>,
    /// So that no two are equal.
    nonce: String,
}

/// The turn to collect, which this server has.
pub struct Turn<'remote> {
    remote: &'remote Remote,
    etag: String,
    /// When it was last known to be ours, in seconds since the machine was started.
    renewed_at: i64,
}

/// Whether there is a turn.
pub enum Taken<'remote> {
    /// It is ours.
    Ours(Turn<'remote>),
    /// That server has it.
    Of(String),
}

fn encode(value: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(value).expect("strings can be written")
}

impl<'remote> Turn<'remote> {
    /// Takes the turn if nobody has it, or who has it has been silent for too long.
    pub fn take(remote: &'remote Remote) -> Result<Taken<'remote>, StoreError> {
        let key = remote.key(keys::TURN);
        let own = remote.server();
        let renewed_at = reading().since_boot;
        let written = Written { server: Some(own.to_owned()), nonce: random()? };
        let etag = match remote.get(&key, BYTES_MAX)? {
            None => remote.create(&key, encode(&written))?,
            Some(entry) => {
                let found: Written = serde_json::from_slice(&entry.bytes)
                    .map_err(|_| remote.unfit("the key of the turn to collect is damaged"))?;
                let silent = remote.tell_time()?.bucket.saturating_sub(entry.modified);
                if !may_take_turn(own, found.server.as_deref(), silent) {
                    return Ok(Taken::Of(found.server.unwrap_or_default()));
                }
                remote.update(&key, encode(&written), &entry.etag)?
            }
        };
        Ok(etag.map_or(Taken::Of("another server".to_owned()), |etag| {
            Taken::Ours(Self { remote, etag, renewed_at })
        }))
    }

    /// Says that this server still has the turn.
    pub fn renew(&mut self) -> Result<(), StoreError> {
        let renewed_at = reading().since_boot;
        self.write(Some(self.remote.server().to_owned()))?;
        self.renewed_at = renewed_at;
        Ok(())
    }

    fn write(&mut self, server: Option<String>) -> Result<(), StoreError> {
        let bytes = encode(&Written { server, nonce: random()? });
        let key = self.remote.key(keys::TURN);
        match self.remote.update(&key, bytes, &self.etag)? {
            Some(etag) => self.etag = etag,
            None => return Err(StoreError::TurnLost),
        }
        Ok(())
    }

    /// Refuses to go on if the turn was not renewed for so long that another may have it soon.
    pub fn expect_fresh(&self) -> Result<(), StoreError> {
        let age = reading().since_boot.saturating_sub(self.renewed_at);
        if age > TURN_SECONDS_MAX { Err(StoreError::TurnLost) } else { Ok(()) }
    }

    /// Gives the turn back.
    pub fn end(mut self) {
        if let Err(error) = self.write(None) {
            tracing::warn!("other servers collect nothing for a while: {}", report(&error));
        }
    }

    /// Writes down that `ids` are removed from now on. Gives what takes it back.
    pub fn condemn(&self, ids: Vec<ObjectId>) -> Result<Sentence<'remote>, StoreError> {
        let remote = self.remote;
        let key = remote.key(keys::CONDEMNED);
        let list = Condemned { server: remote.server().to_owned(), ids, nonce: random()? };
        let etag = match remote.get(&key, BYTES_MAX)? {
            None => remote.create(&key, encode(&list))?,
            Some(entry) => {
                let left = decode(remote, &entry.bytes)?;
                if let Some(&id) = left.ids.first() {
                    // `withdraw_old` takes it back when the time has come.
                    return Err(StoreError::Removing { id, server: left.server });
                }
                remote.update(&key, encode(&list), &entry.etag)?
            }
        };
        etag.map(|etag| Sentence { remote, etag }).ok_or(StoreError::TurnLost)
    }
}

/// A list of what is removed, which is in force.
pub struct Sentence<'remote> {
    remote: &'remote Remote,
    etag: String,
}

impl Sentence<'_> {
    /// Takes the list back: each removal was answered.
    pub fn withdraw(self) -> Result<(), StoreError> {
        withdraw(self.remote, &self.etag).map(drop)
    }
}

/// True if the list of that tag was in force until now.
fn withdraw(remote: &Remote, etag: &str) -> Result<bool, StoreError> {
    let none = Condemned { server: remote.server().to_owned(), ids: vec![], nonce: random()? };
    Ok(remote.update(&remote.key(keys::CONDEMNED), encode(&none), etag)?.is_some())
}

fn decode(remote: &Remote, bytes: &[u8]) -> Result<Condemned, StoreError> {
    serde_json::from_slice(bytes)
        .map_err(|_| remote.unfit("the list of what is being removed is damaged"))
}

/// What is being removed; `None` if nothing is.
pub fn condemned(remote: &Remote) -> Result<Option<Condemned>, StoreError> {
    let Some(entry) = remote.get(&remote.key(keys::CONDEMNED), BYTES_MAX)? else {
        return Ok(None);
    };
    Ok(Some(decode(remote, &entry.bytes)?).filter(|list| !list.ids.is_empty()))
}

/// Takes back a list that a server has left which was killed while it removed objects. Called only
/// while this server removes none itself.
pub fn withdraw_old(remote: &Remote) -> Result<(), StoreError> {
    let Some(entry) = remote.get(&remote.key(keys::CONDEMNED), BYTES_MAX)? else { return Ok(()) };
    let list = decode(remote, &entry.bytes)?;
    if list.ids.is_empty() {
        return Ok(());
    }
    let age = remote.tell_time()?.bucket.saturating_sub(entry.modified);
    if may_withdraw(remote.server(), &list.server, age) && withdraw(remote, &entry.etag)? {
        tracing::warn!(
            objects = list.ids.len(), server = %list.server,
            "a server stopped while it removed objects: what is left of them can be used again"
        );
    }
    Ok(())
}

/// How often it is looked for such a list.
pub const LOOK_INTERVAL: Duration = Duration::from_secs(60);
