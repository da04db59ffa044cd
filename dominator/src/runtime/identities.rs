//! The identities of all machines: passes the decisions of `core::identity` to the drivers, and
//! saves what each machine was last known by.
//!
//! What drivers report is written behind, in batches: after a crash the machines report it again.
//! An operator's trust is on the disk before it takes effect.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use model::report::report;
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;

use crate::core::identity::{IdentityReport, IdentityTable, IdentityVerdict, Trust, TrustError};
use crate::core::order::{Order, OrderTextError};
use crate::storage::{State, StateError};
use system::clock::wall;

/// How long changes are gathered before they are written.
const GATHERING: Duration = Duration::from_secs(2);

/// How long changes are gathered after they could not be written.
const RECOVERING: Duration = Duration::from_secs(60);

/// Why a machine is not trusted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrustOrderError {
    #[error(transparent)]
    Text(#[from] OrderTextError),
    #[error(transparent)]
    Refused(#[from] TrustError),
    #[error("the order was not carried out, because it cannot be kept")]
    State {
        #[source]
        source: StateError,
    },
}

/// What a driver has of the roster: the verdicts on its machine, and where its news belong.
#[derive(Debug)]
pub struct Registration {
    number: u64,
    verdicts: watch::Sender<IdentityVerdict>,
}

impl Registration {
    /// The last verdict, and each that comes.
    #[must_use]
    pub fn verdicts(&self) -> watch::Receiver<IdentityVerdict> {
        self.verdicts.subscribe()
    }
}

#[derive(Debug)]
struct Inner {
    roster: IdentityTable,
    verdicts: BTreeMap<Arc<str>, watch::Sender<IdentityVerdict>>,
}

impl Inner {
    fn tell(&self, changed: Vec<(Arc<str>, IdentityVerdict)>) {
        for (name, verdict) in changed {
            if let Some(sender) = self.verdicts.get(&name) {
                sender.send_replace(verdict);
            }
        }
    }
}

#[derive(Debug)]
pub struct Identities {
    inner: Mutex<Inner>,
    state: Arc<State>,
    /// Held while something is kept, so that the later word is the last on the disk.
    keeping: Mutex<()>,
    dirty: Notify,
}

impl Identities {
    /// Reads from `state` by what machines were last known.
    ///
    /// # Errors
    ///
    /// [`StateError`].
    pub fn open(state: Arc<State>) -> Result<Self, StateError> {
        let roster = IdentityTable::new(state.identities()?);
        let inner = Mutex::new(Inner { roster, verdicts: BTreeMap::new() });
        Ok(Self { inner, state, keeping: Mutex::default(), dirty: Notify::new() })
    }

    fn locked(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a record, or its new address.
    #[must_use]
    pub fn enter(&self, hostname: &str) -> Registration {
        let mut inner = self.locked();
        let (number, changed) = inner.roster.enter(hostname);
        let verdicts = watch::Sender::new(IdentityVerdict::default());
        inner.verdicts.insert(hostname.into(), verdicts.clone());
        inner.tell(changed);
        Registration { number, verdicts }
    }

    /// Removes a record.
    pub fn leave(&self, hostname: &str) {
        let mut inner = self.locked();
        inner.verdicts.remove(hostname);
        let changed = inner.roster.leave(hostname);
        inner.tell(changed);
        self.dirty.notify_one();
    }

    /// All records of the database in force are known by now.
    pub fn forget_the_others(&self) {
        self.locked().roster.forget_the_others();
        self.dirty.notify_one();
    }

    /// Takes what a state machine reports of its machine.
    pub fn hear(&self, hostname: &str, registration: &Registration, report: IdentityReport) {
        let mut inner = self.locked();
        let changed = inner.roster.take_report(hostname, registration.number, report);
        inner.tell(changed);
        if inner.roster.is_dirty() {
            self.dirty.notify_one();
        }
    }

    /// True if what answers for the record may be another machine.
    #[must_use]
    pub fn is_doubted(&self, hostname: &str) -> bool {
        self.locked().roster.is_doubted(hostname)
    }

    /// Takes an operator's word that what answers for a record is the machine that is meant. Must
    /// not be called by a task: it waits for the disk.
    ///
    /// # Errors
    ///
    /// [`TrustOrderError`]; nothing is changed then.
    pub fn trust(&self, hostname: &str, who: &str, why: &str) -> Result<(), TrustOrderError> {
        let order = Order::of("trust", who).about(hostname).why(why);
        let order = order.reasoned("the machine is to be trusted")?;
        let _keeping = self.keeping.lock().unwrap_or_else(PoisonError::into_inner);
        let known = self.locked().roster.trusted(hostname, who, why, wall())?;
        let name: Arc<str> = hostname.into();
        self.state
            .keep_identities(&[(Arc::clone(&name), Some(known.clone()))], Some(&order))
            .map_err(|source| TrustOrderError::State { source })?;
        if let Some(Trust { hostname: found, .. }) = &known.trust {
            let machine_id = &known.machine_id;
            tracing::warn!(who, why, host = hostname, %found, %machine_id, "is trusted");
        }
        let mut inner = self.locked();
        let changed = inner.roster.take_trust(&name, known);
        inner.tell(changed);
        Ok(())
    }

    /// Writes what drivers report until `stop` is cancelled, and then once more.
    pub async fn keep(self: Arc<Self>, stop: CancellationToken) {
        let mut pause = GATHERING;
        loop {
            let is_last = stop.run_until_cancelled(self.dirty.notified()).await.is_none()
                || stop.run_until_cancelled(tokio::time::sleep(pause)).await.is_none();
            let keeper = Arc::clone(&self);
            let kept = tokio::task::spawn_blocking(move || keeper.keep_now()).await;
            pause = GATHERING;
            if let Ok(Err(error)) = kept {
                pause = RECOVERING;
                let error = report(&error);
                tracing::error!("cannot save the identities of machines: {error}");
                self.dirty.notify_one();
            }
            if is_last {
                return;
            }
        }
    }

    fn keep_now(&self) -> Result<(), StateError> {
        let _keeping = self.keeping.lock().unwrap_or_else(PoisonError::into_inner);
        let dirty = self.locked().roster.take_dirty();
        if dirty.is_empty() {
            return Ok(());
        }
        let result = self.state.keep_identities(&dirty, None);
        if result.is_err() {
            self.locked().roster.dirty_again(dirty.into_iter().map(|(name, _)| name));
        }
        result
    }
}
