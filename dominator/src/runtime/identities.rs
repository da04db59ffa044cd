//! The identities of all machines: passes the decisions of `core::identity` to the drivers, and
//! saves the last known identity of each machine.
//!
//! What drivers report is written behind, in batches: after a crash the machines report it again.
//! An operator's trust is on the disk before it takes effect.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use model::lock::locked;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::core::identity::{
    IdentityReport, IdentityTable, IdentityVerdict, TrustError, TrustRecord,
};
use crate::core::orders::{Order, OrderTextError};
use crate::runtime::clock::Clock;
use crate::runtime::saver::Saver;
use crate::storage::{Storage, StorageError};

/// How long changes are gathered before they are written.
const GATHER_TIME: Duration = Duration::from_secs(2);

/// The pause after a failed write.
const RETRY_PAUSE: Duration = Duration::from_secs(60);

/// Why a machine is not trusted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrustOrderError {
    #[error(transparent)]
    Text(#[from] OrderTextError),
    #[error(transparent)]
    Refused(#[from] TrustError),
    #[error("the order was not carried out, because it cannot be saved")]
    Storage {
        #[from]
        source: StorageError,
    },
}

/// Ties a driver to the table: the number of its run, and the verdicts on its machine.
#[derive(Debug)]
pub struct Registration {
    number: u64,
    verdicts: watch::Sender<IdentityVerdict>,
}

impl Registration {
    /// Returns a receiver of the last verdict and of each later one.
    pub fn verdicts(&self) -> watch::Receiver<IdentityVerdict> {
        self.verdicts.subscribe()
    }
}

#[derive(Debug)]
struct IdentityState {
    table: IdentityTable,
    verdicts: BTreeMap<Arc<str>, watch::Sender<IdentityVerdict>>,
}

impl IdentityState {
    fn send(&self, changed: Vec<(Arc<str>, IdentityVerdict)>) {
        for (name, verdict) in changed {
            if let Some(sender) = self.verdicts.get(&name) {
                sender.send_replace(verdict);
            }
        }
    }
}

#[derive(Debug)]
pub struct Identities {
    inner: Mutex<IdentityState>,
    /// Locked from the reading of an identity in memory to the end of its write, so that the latest
    /// value is the last on the disk. Taken before `inner`.
    state: Mutex<Arc<Storage>>,
    saver: Saver,
    clock: Clock,
}

impl Identities {
    /// Reads the last known identities from `state`.
    pub fn open(state: Arc<Storage>, clock: Clock) -> Result<Self, StorageError> {
        let table = IdentityTable::new(state.identities()?);
        let inner = Mutex::new(IdentityState { table, verdicts: BTreeMap::new() });
        let saver = Saver::new("the identities of machines", GATHER_TIME, RETRY_PAUSE);
        Ok(Self { inner, state: Mutex::new(state), saver, clock })
    }

    fn locked(&self) -> MutexGuard<'_, IdentityState> {
        locked(&self.inner)
    }

    /// Adds a record, or its new address.
    pub fn enter(&self, hostname: &str) -> Registration {
        let mut inner = self.locked();
        let (number, changed) = inner.table.enter(hostname);
        let verdicts = watch::Sender::new(IdentityVerdict::default());
        inner.verdicts.insert(hostname.into(), verdicts.clone());
        inner.send(changed);
        Registration { number, verdicts }
    }

    /// Removes a record.
    pub fn leave(&self, hostname: &str) {
        let mut inner = self.locked();
        inner.verdicts.remove(hostname);
        let changed = inner.table.leave(hostname);
        inner.send(changed);
        self.saver.notify();
    }

    /// Forgets the machines that have no record: all records of the database in force are entered.
    pub fn forget_unlisted(&self) {
        self.locked().table.forget_unlisted();
        self.saver.notify();
    }

    /// Takes what a state machine reports of its machine.
    pub fn take_report(&self, hostname: &str, registration: &Registration, report: IdentityReport) {
        let mut inner = self.locked();
        let changed = inner.table.take_report(hostname, registration.number, report);
        inner.send(changed);
        if inner.table.is_dirty() {
            self.saver.notify();
        }
    }

    /// True if what answers for the record may be another machine.
    #[must_use]
    pub fn has_identity_mismatch(&self, hostname: &str) -> bool {
        self.locked().table.has_identity_mismatch(hostname)
    }

    /// Takes an operator's word that what answers for a record is the machine that is meant; on an
    /// error nothing is changed. Blocks on the disk.
    pub fn trust(&self, hostname: &str, who: &str, why: &str) -> Result<(), TrustOrderError> {
        let order = Order::new("trust", who).about(hostname).why(why);
        let order = order.reasoned("the machine is to be trusted")?;
        let state = locked(&self.state);
        let identity = self.locked().table.trusted(hostname, who, why, self.clock.now().wall)?;
        let name: Arc<str> = hostname.into();
        state.save_identities(&[(Arc::clone(&name), Some(identity.clone()))], Some(&order))?;
        if let Some(TrustRecord { hostname: found, .. }) = &identity.trust {
            let machine_id = &identity.machine_id;
            tracing::warn!(who, why, host = hostname, %found, %machine_id, "is trusted");
        }
        let mut inner = self.locked();
        let changed = inner.table.take_trust(&name, identity);
        inner.send(changed);
        Ok(())
    }

    /// Writes what drivers report until `stop` is cancelled, and then once more.
    pub async fn save_behind(self: Arc<Self>, stop: CancellationToken) {
        let identities = Arc::clone(&self);
        self.saver.run(move || identities.save(), &stop).await;
    }

    fn save(&self) -> Result<(), StorageError> {
        let state = locked(&self.state);
        let dirty = self.locked().table.take_dirty();
        if dirty.is_empty() {
            return Ok(());
        }
        let result = state.save_identities(&dirty, None);
        if result.is_err() {
            self.locked().table.mark_dirty(dirty.into_iter().map(|(name, _)| name));
        }
        result
    }
}
