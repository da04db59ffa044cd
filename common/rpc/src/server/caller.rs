//! Callers of a server, and limits that they share, so that no caller uses up everything.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use api::access::{Identity, IdentityKind};
use api::fault::{Fault, FaultCode};

use super::connection_counts::{Source, give, take};
use crate::tls::CallerProof;

/// The caller of a method or page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    /// The address of the caller.
    pub address: SocketAddr,
    /// The address of this server that the connection was made to.
    pub local: SocketAddr,
    /// True if the caller accepts packed content ([`crate::packing`]).
    pub unpacks: bool,
    /// The user with its kind, groups and powers.
    pub identity: Arc<Identity>,
    /// How it has shown who it is; `None` without a certificate.
    pub proof: Option<Arc<CallerProof>>,
}

impl std::fmt::Display for Caller {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.identity.in_words() {
            Some(user) => write!(formatter, "{user} ({})", self.address),
            None => write!(formatter, "{}", self.address),
        }
    }
}

impl Caller {
    /// Returns the name for records: the user, or the address.
    #[must_use]
    pub fn name(&self) -> String {
        self.identity.in_words().unwrap_or_else(|| self.address.ip().to_string())
    }

    /// Refuses machines, whatever their powers: for methods by which one could learn of others.
    ///
    /// # Errors
    ///
    /// A fault with `text`, which says what a machine may not do.
    pub fn refuse_machines(&self, text: &str) -> Result<(), Fault> {
        if self.identity.kind == IdentityKind::Machine {
            return Err(Fault::new(FaultCode::Denied, text));
        }
        Ok(())
    }

    /// Returns the user, or `claimed` without a certificate.
    #[must_use]
    pub fn name_or(&self, claimed: String) -> String {
        self.identity.in_words().unwrap_or(claimed)
    }
}

/// A limit that all callers share, with lower limits for each caller and for all strangers.
#[derive(Debug)]
pub struct CallerPermits {
    semaphore: Arc<Semaphore>,
    /// The limit for each caller.
    each: usize,
    /// The limit for all callers without a certificate; one of them gets at most half of it.
    strangers: usize,
    taken: Mutex<BTreeMap<Holder, usize>>,
}

/// Who holds permits.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Holder {
    User(String),
    /// Everybody at an address whose users are not known.
    Address(Source),
    /// All callers without a certificate.
    Strangers,
}

/// A part of the limit; returned when it is dropped.
#[derive(Debug)]
pub struct CallerPermit {
    permits: Arc<CallerPermits>,
    /// Those whose limits it counts against, and the number of permits.
    holders: Vec<Holder>,
    count: usize,
    _permit: OwnedSemaphorePermit,
}

impl CallerPermits {
    /// Returns `all` permits, of which a caller gets at most `each`, and no stranger any.
    #[must_use]
    pub fn new(all: usize, each: usize) -> Arc<Self> {
        Self::with_strangers(all, each, 0)
    }

    /// Returns `all` permits, of which a caller gets at most `each`, and all strangers together at
    /// most `strangers`.
    pub(super) fn with_strangers(all: usize, each: usize, strangers: usize) -> Arc<Self> {
        let (semaphore, taken) = (Arc::new(Semaphore::new(all)), Mutex::default());
        Arc::new(Self { semaphore, each, strangers, taken })
    }

    /// Takes `count` permits for `caller`, if they are free.
    #[must_use]
    pub fn take(self: &Arc<Self>, caller: &Caller, count: usize) -> Option<CallerPermit> {
        let holder = match caller.identity.in_words() {
            Some(user) => Holder::User(user),
            None => Holder::Address(Source::of(caller.address.ip())),
        };
        self.take_for(&[(holder, self.each)], count)
    }

    /// The same for a caller without a certificate.
    pub(super) fn take_for_stranger(
        self: &Arc<Self>,
        caller: &Caller,
        count: usize,
    ) -> Option<CallerPermit> {
        let address = Holder::Address(Source::of(caller.address.ip()));
        let holders = [(Holder::Strangers, self.strangers), (address, self.strangers / 2)];
        self.take_for(&holders, count)
    }

    /// Takes `count` permits that count against the limit of each of `holders`.
    fn take_for(
        self: &Arc<Self>,
        holders: &[(Holder, usize)],
        count: usize,
    ) -> Option<CallerPermit> {
        let permits = u32::try_from(count).ok()?;
        let semaphore = Arc::clone(&self.semaphore).try_acquire_many_owned(permits).ok()?;
        // Dropped if a limit is reached, which gives back what was taken until then.
        let (permits, holds) = (Arc::clone(self), Vec::with_capacity(holders.len()));
        let mut permit = CallerPermit { permits, holders: holds, count, _permit: semaphore };
        for (holder, limit) in holders {
            take(&mut model::lock::locked(&self.taken), holder, count, *limit).ok()?;
            permit.holders.push(holder.clone());
        }
        Some(permit)
    }

    /// Returns the most permits of one caller.
    pub(super) fn each(&self) -> usize {
        self.each
    }

    /// Waits for one permit for the server itself.
    pub async fn own(self: &Arc<Self>) -> CallerPermit {
        let semaphore = Arc::clone(&self.semaphore).acquire_owned().await;
        let semaphore = semaphore.expect("the semaphore is never closed");
        let (permits, holders) = (Arc::clone(self), Vec::new());
        CallerPermit { permits, holders, count: 1, _permit: semaphore }
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
        let mut taken = model::lock::locked(&self.permits.taken);
        for holder in &self.holders {
            give(&mut taken, holder, self.count);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn caller(user: Option<&str>, address: &str) -> Caller {
        let identity = Identity { user: user.map(str::to_owned), ..Identity::default() };
        let address = address.parse().unwrap();
        Caller {
            address,
            local: address,
            unpacks: false,
            identity: Arc::new(identity),
            proof: None,
        }
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

    #[tokio::test]
    async fn strangers_share_a_part_of_what_all_have() {
        let shares = CallerPermits::with_strangers(12, 6, 4);
        let [one, two, three] = [1, 2, 3].map(|last| caller(None, &format!("10.0.0.{last}:1")));
        let held = shares.take_for_stranger(&one, 2).unwrap();
        assert!(shares.take_for_stranger(&one, 1).is_none());
        let others = shares.take_for_stranger(&two, 2).unwrap();
        assert!(shares.take_for_stranger(&three, 1).is_none());
        drop(held);
        let last = shares.take_for_stranger(&three, 2).unwrap();
        let users =
            ["alice", "bob"].map(|user| shares.take(&caller(Some(user), "10.0.0.1:1"), 4).unwrap());
        drop(last);
        // What users hold is not left for strangers.
        let carol = shares.take(&caller(Some("carol"), "10.0.0.1:1"), 2).unwrap();
        assert!(shares.take_for_stranger(&three, 1).is_none());
        drop((others, users, carol));
        assert_eq!((shares.free(), shares.taken.lock().unwrap().len()), (12, 0));
    }
}
