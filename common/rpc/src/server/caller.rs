//! Callers of a server, and limits that they share, so that no caller uses up everything.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use api::access::Identity;

use super::connection_counts::{Source, give, take};

/// The caller of a method or page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    /// The address of the caller.
    pub address: SocketAddr,
    /// The address of this server that the connection was made to.
    pub local: SocketAddr,
    /// True if the caller accepts packed content ([`crate::packing`]).
    pub unpacks: bool,
    /// The user, groups and powers.
    pub identity: Arc<Identity>,
}

impl std::fmt::Display for Caller {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.identity.user {
            Some(user) => write!(formatter, "{user} ({})", self.address),
            None => write!(formatter, "{}", self.address),
        }
    }
}

impl Caller {
    /// Returns the name for records: the user, or the address.
    #[must_use]
    pub fn name(&self) -> String {
        self.identity.user.clone().unwrap_or_else(|| self.address.ip().to_string())
    }

    /// Returns the user, or `claimed` without a certificate.
    #[must_use]
    pub fn name_or(&self, claimed: String) -> String {
        self.identity.user.clone().unwrap_or(claimed)
    }
}

/// A limit that all callers share, with a lower limit for each caller.
#[derive(Debug)]
pub struct CallerPermits {
    semaphore: Arc<Semaphore>,
    /// The limit for each caller.
    each: usize,
    taken: Mutex<BTreeMap<Holder, usize>>,
}

/// A user, or a caller without a certificate at an address.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Holder {
    User(String),
    Stranger(Source),
}

/// A part of the limit; returned when it is dropped.
#[derive(Debug)]
pub struct CallerPermit {
    permits: Arc<CallerPermits>,
    /// The holder, and the number of permits.
    holder: Option<(Holder, usize)>,
    _permit: OwnedSemaphorePermit,
}

impl CallerPermits {
    /// Returns `all` permits, of which a caller gets at most `each`.
    #[must_use]
    pub fn new(all: usize, each: usize) -> Arc<Self> {
        let (semaphore, taken) = (Arc::new(Semaphore::new(all)), Mutex::default());
        Arc::new(Self { semaphore, each, taken })
    }

    /// Takes `count` permits for `caller`, if they are free.
    #[must_use]
    pub fn take(self: &Arc<Self>, caller: &Caller, count: usize) -> Option<CallerPermit> {
        let holder = match &caller.identity.user {
            Some(user) => Holder::User(user.clone()),
            None => Holder::Stranger(Source::of(caller.address.ip())),
        };
        let permits = u32::try_from(count).ok()?;
        let semaphore = Arc::clone(&self.semaphore).try_acquire_many_owned(permits).ok()?;
        take(&mut model::lock::locked(&self.taken), &holder, count, self.each).ok()?;
        Some(CallerPermit {
            permits: Arc::clone(self),
            holder: Some((holder, count)),
            _permit: semaphore,
        })
    }

    /// Waits for one permit for the server itself.
    pub async fn own(self: &Arc<Self>) -> CallerPermit {
        let semaphore = Arc::clone(&self.semaphore).acquire_owned().await;
        let semaphore = semaphore.expect("the semaphore is never closed");
        CallerPermit { permits: Arc::clone(self), holder: None, _permit: semaphore }
    }
}

#[cfg(test)]
impl CallerPermits {
    pub(super) fn free(&self) -> usize {
        self.semaphore.available_permits()
    }
}

impl Drop for CallerPermit {
    fn drop(&mut self) {
        if let Some((holder, count)) = &self.holder {
            give(&mut model::lock::locked(&self.permits.taken), holder, *count);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn caller(user: Option<&str>, address: &str) -> Caller {
        let identity = Identity { user: user.map(str::to_owned), ..Identity::default() };
        let address = address.parse().unwrap();
        Caller { address, local: address, unpacks: false, identity: Arc::new(identity) }
    }

    #[tokio::test]
    async fn nobody_takes_the_room_of_others() {
        let shares = CallerPermits::new(6, 4);
        let alice = caller(Some("alice"), "10.0.0.1:1");
        let (bob, stranger) = (caller(Some("bob"), "10.0.0.1:1"), caller(None, "10.0.0.1:1"));
        let held = shares.take(&alice, 3).unwrap();
        // The limit of a user is independent of the address.
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
