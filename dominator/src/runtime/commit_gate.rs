//! The one place through which every Commit passes. The brake closes it for all machines, a pause
//! for single ones.
//!
//! # Invariant
//!
//! When [`CommitGate::pull_brake`] or [`CommitGate::pause`] has returned, no Commit is sent to the
//! machines that it is closed for: Commits on their way have been dropped, and later ones do not
//! start until the brake is released, or until the pause ends.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use api::dominator::Brake;
use api::dominator::orders::UpdatePause;
use model::tree::Time;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::core::pauses::Pauses;

/// Why a Commit was not sent, or was dropped on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Closed {
    Brake,
    Pause,
}

/// A Commit on its way.
#[derive(Clone, Debug)]
struct Passing {
    cancel: CancellationToken,
    /// Closed when the Commit has ended or was dropped.
    over: watch::Receiver<()>,
}

#[derive(Debug, Default)]
struct Inner {
    pauses: Pauses,
    /// By host name and number. A machine has more than one entry only while its driver is being
    /// replaced.
    passing: BTreeMap<(String, u64), Passing>,
    last: u64,
}

#[derive(Debug)]
pub struct CommitGate {
    brake: watch::Sender<Option<Arc<Brake>>>,
    inner: Mutex<Inner>,
}

/// Removes a Commit from the list when it has ended or was dropped.
struct Leave<'a> {
    gate: &'a CommitGate,
    key: (String, u64),
    _over: watch::Sender<()>,
}

impl Drop for Leave<'_> {
    fn drop(&mut self) {
        self.gate.locked().passing.remove(&self.key);
    }
}

impl CommitGate {
    /// Creates a gate with the brake and the pauses that were in force before a restart.
    #[must_use]
    pub fn new(brake: Option<Brake>, pauses: Pauses) -> Self {
        let inner = Inner { pauses, ..Inner::default() };
        Self { brake: watch::Sender::new(brake.map(Arc::new)), inner: Mutex::new(inner) }
    }

    fn locked(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the brake, if it is on.
    #[must_use]
    pub fn brake(&self) -> Option<Arc<Brake>> {
        self.brake.borrow().clone()
    }

    /// Returns a receiver that is told when the brake changes.
    #[must_use]
    pub fn watch_brake(&self) -> watch::Receiver<Option<Arc<Brake>>> {
        self.brake.subscribe()
    }

    /// Pulls the brake. When this has returned, no Commit is on its way to any machine.
    pub async fn pull_brake(&self, brake: Brake) {
        // The order matters: a Commit that enters before the list is read is in it, and one that
        // enters later sees the brake.
        self.brake.send_replace(Some(Arc::new(brake)));
        let passing = self.locked().passing.values().cloned().collect();
        drop_all(passing).await;
    }

    pub fn release_brake(&self) {
        self.brake.send_replace(None);
    }

    #[must_use]
    pub fn pauses(&self) -> Pauses {
        self.locked().pauses.clone()
    }

    /// Returns the pause of a machine, even if it has ended.
    #[must_use]
    pub fn pause_of(&self, hostname: &str) -> Option<Arc<UpdatePause>> {
        self.locked().pauses.of(hostname).cloned()
    }

    /// Returns how many machines are paused at the time `now`.
    #[must_use]
    pub fn paused_count(&self, now: Time) -> u32 {
        u32::try_from(self.locked().pauses.count(now)).unwrap_or(u32::MAX)
    }

    /// Replaces the pauses, without waiting for Commits on their way.
    pub fn set_pauses(&self, pauses: Pauses) {
        self.locked().pauses = pauses;
    }

    /// Replaces the pauses. When this has returned, no Commit is on its way to `hostnames`.
    pub async fn pause(&self, pauses: Pauses, hostnames: &[String]) {
        let passing = {
            let mut inner = self.locked();
            inner.pauses = pauses;
            let of = |host: &String| {
                let passing = inner.passing.range((host.clone(), 0)..=(host.clone(), u64::MAX));
                passing.map(|(_, passing)| passing.clone()).collect::<Vec<_>>()
            };
            hostnames.iter().flat_map(of).collect()
        };
        drop_all(passing).await;
    }

    /// Runs `commit` to its end. If the gate is closed for the machine at the time `now`, or is
    /// closed while `commit` runs, `commit` is dropped.
    ///
    /// # Errors
    ///
    /// [`Closed`] says what closed the gate.
    pub async fn pass<T>(
        &self,
        hostname: &str,
        now: Time,
        commit: impl Future<Output = T>,
    ) -> Result<T, Closed> {
        let (cancel, _leave) = self.enter(hostname, now)?;
        tokio::select! {
            biased;
            // The brake cannot be released before this Commit has left.
            () = cancel.cancelled() => Err(match self.brake.borrow().is_some() {
                true => Closed::Brake,
                false => Closed::Pause,
            }),
            result = commit => Ok(result),
        }
    }

    fn enter(&self, hostname: &str, now: Time) -> Result<(CancellationToken, Leave<'_>), Closed> {
        let mut inner = self.locked();
        if self.brake.borrow().is_some() {
            return Err(Closed::Brake);
        }
        if inner.pauses.of(hostname).is_some_and(|pause| pause.holds(now)) {
            return Err(Closed::Pause);
        }
        inner.last += 1;
        let key = (hostname.to_owned(), inner.last);
        let (sender, over) = watch::channel(());
        let cancel = CancellationToken::new();
        inner.passing.insert(key.clone(), Passing { cancel: cancel.clone(), over });
        Ok((cancel, Leave { gate: self, key, _over: sender }))
    }
}

/// Cancels these Commits and waits until all of them have been dropped.
async fn drop_all(passing: Vec<Passing>) {
    for one in &passing {
        one.cancel.cancel();
    }
    for mut one in passing {
        // Nothing is ever sent: the wait ends when the sender is dropped.
        let _over = one.over.changed().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};

    fn at(seconds: i64) -> Time {
        Time { seconds, nanoseconds: 0 }
    }

    fn brake() -> Brake {
        Brake { reason: "test".into(), who: "me".into(), since: Time::default() }
    }

    fn open() -> CommitGate {
        CommitGate::new(None, Pauses::default())
    }

    fn paused(hostname: &str) -> Pauses {
        let (reason, who) = ("test".to_owned(), "me".to_owned());
        let pause = UpdatePause { until: at(100), reason, who, since: at(0) };
        let mut pauses = Pauses::default();
        pauses.pause(vec![hostname.to_owned()], &Arc::new(pause));
        pauses
    }

    #[tokio::test]
    async fn nothing_passes_while_the_brake_is_on() {
        let gate = CommitGate::new(Some(brake()), Pauses::default());
        assert_eq!(gate.pass("a", at(0), async { 1 }).await, Err(Closed::Brake));
        gate.release_brake();
        assert_eq!(gate.pass("a", at(0), async { 1 }).await, Ok(1));
    }

    #[tokio::test]
    async fn pulling_the_brake_drops_what_is_on_its_way_before_it_returns() {
        let gate = Arc::new(open());
        let (started, mut is_started) = tokio::sync::mpsc::channel(1);
        let (passing, gone) = begin(&gate, "a", started);
        is_started.recv().await;
        gate.pull_brake(brake()).await;
        assert!(gone.load(Ordering::SeqCst), "a Commit was still on its way");
        assert_eq!(passing.await.unwrap(), Err(Closed::Brake));
    }

    #[tokio::test]
    async fn nothing_passes_to_a_paused_machine_until_the_time_has_come() {
        let gate = CommitGate::new(None, paused("a"));
        assert_eq!(gate.pass("a", at(99), async { 1 }).await, Err(Closed::Pause));
        assert_eq!(gate.pass("b", at(99), async { 1 }).await, Ok(1));
        assert_eq!(gate.pass("a", at(100), async { 1 }).await, Ok(1));
        assert_eq!((gate.paused_count(at(99)), gate.paused_count(at(100))), (1, 0));
        gate.set_pauses(Pauses::default());
        assert_eq!(gate.pass("a", at(99), async { 1 }).await, Ok(1));
        assert!(gate.locked().passing.is_empty());
    }

    struct Dropped(Arc<AtomicBool>);
    impl Drop for Dropped {
        fn drop(&mut self) {
            self.0.store(true, Ordering::SeqCst);
        }
    }

    type Begun = (tokio::task::JoinHandle<Result<(), Closed>>, Arc<AtomicBool>);

    /// Sends a Commit that never ends; gives it, and whether it was dropped.
    fn begin(
        gate: &Arc<CommitGate>,
        hostname: &'static str,
        started: tokio::sync::mpsc::Sender<()>,
    ) -> Begun {
        let gone = Arc::new(AtomicBool::new(false));
        let (gate, guard) = (Arc::clone(gate), Dropped(Arc::clone(&gone)));
        let commit = async move {
            let _guard = guard;
            started.send(()).await.unwrap();
            std::future::pending::<()>().await;
        };
        (tokio::spawn(async move { gate.pass(hostname, at(1), commit).await }), gone)
    }

    #[tokio::test]
    async fn a_pause_drops_what_is_on_its_way_to_its_machine_alone_before_it_returns() {
        let gate = Arc::new(open());
        let (started, mut are_started) = tokio::sync::mpsc::channel(2);
        let a = begin(&gate, "a", started.clone());
        let b = begin(&gate, "b", started);
        are_started.recv().await;
        are_started.recv().await;
        gate.pause(paused("a"), &["a".to_owned()]).await;
        assert!(a.1.load(Ordering::SeqCst), "a Commit was still on its way");
        assert!(!b.1.load(Ordering::SeqCst), "another machine's Commit was dropped");
        assert_eq!(a.0.await.unwrap(), Err(Closed::Pause));
        assert_eq!(gate.locked().passing.len(), 1);
        b.0.abort();
        assert!(b.0.await.unwrap_err().is_cancelled());
        assert!(gate.locked().passing.is_empty());
    }
}
