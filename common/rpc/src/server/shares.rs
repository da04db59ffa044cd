//! Room that all callers of a server share, and of which nobody takes so much that nothing is left
//! for others.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::Caller;
use crate::server::connection_counts::{Source, give, take};

/// So much room, and who has how much of it.
#[derive(Debug)]
pub struct Shares {
    room: Arc<Semaphore>,
    /// The most that one has.
    each: usize,
    taken: Mutex<BTreeMap<Taker, usize>>,
}

/// A user, or whoever is at an address.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Taker {
    User(String),
    Stranger(Source),
}

/// A part of the room; given back when it is dropped.
#[derive(Debug)]
pub struct Share {
    shares: Arc<Shares>,
    /// Whose it is, and how much.
    taker: Option<(Taker, usize)>,
    _room: OwnedSemaphorePermit,
}

impl Shares {
    /// Room for `all`, of which a caller has at most `each`.
    #[must_use]
    pub fn new(all: usize, each: usize) -> Arc<Self> {
        let (room, taken) = (Arc::new(Semaphore::new(all)), Mutex::default());
        Arc::new(Self { room, each, taken })
    }

    /// Room for `count` of `caller`, if there is so much.
    #[must_use]
    pub fn take(self: &Arc<Self>, caller: &Caller, count: usize) -> Option<Share> {
        let taker = match &caller.identity.user {
            Some(user) => Taker::User(user.clone()),
            None => Taker::Stranger(Source::of(caller.address.ip())),
        };
        let permits = u32::try_from(count).ok()?;
        let room = Arc::clone(&self.room).try_acquire_many_owned(permits).ok()?;
        take(&mut model::lock::locked(&self.taken), &taker, count, self.each).ok()?;
        Some(Share { shares: Arc::clone(self), taker: Some((taker, count)), _room: room })
    }

    /// Room for one of the server itself, which waits for it.
    pub async fn own(self: &Arc<Self>) -> Share {
        let room = Arc::clone(&self.room).acquire_owned().await;
        let room = room.expect("the semaphore is never closed");
        Share { shares: Arc::clone(self), taker: None, _room: room }
    }
}

#[cfg(test)]
impl Shares {
    pub(super) fn free(&self) -> usize {
        self.room.available_permits()
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        if let Some((taker, count)) = &self.taker {
            give(&mut model::lock::locked(&self.shares.taken), taker, *count);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use api::access::Identity;

    fn caller(user: Option<&str>, address: &str) -> Caller {
        let identity = Identity { user: user.map(str::to_owned), ..Identity::default() };
        let address = address.parse().unwrap();
        Caller { address, local: address, unpacks: false, identity: Arc::new(identity) }
    }

    #[tokio::test]
    async fn nobody_takes_the_room_of_others() {
        let shares = Shares::new(6, 4);
        let alice = caller(Some("alice"), "10.0.0.1:1");
        let (bob, stranger) = (caller(Some("bob"), "10.0.0.1:1"), caller(None, "10.0.0.1:1"));
        let held = shares.take(&alice, 3).unwrap();
        // From wherever she comes.
        assert!(shares.take(&caller(Some("alice"), "10.0.0.9:1"), 2).is_none());
        let last = shares.take(&alice, 1).unwrap();
        assert!(shares.take(&alice, 1).is_none());
        let his = shares.take(&bob, 1).unwrap();
        let unknown = shares.take(&stranger, 1).unwrap();
        assert!(shares.take(&caller(None, "10.0.0.2:1"), 1).is_none(), "all is taken");
        drop((held, unknown));
        let own = shares.own().await;
        assert!(shares.take(&stranger, 3).is_some());
        drop((last, his, own));
        assert_eq!((shares.free(), shares.taken.lock().unwrap().len()), (6, 0));
    }
}
