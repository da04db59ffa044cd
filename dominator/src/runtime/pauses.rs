//! The place through which a Commit to a machine passes when an operator may have paused it. What
//! [`crate::runtime::commit_gate`] is to the whole fleet, this is to one machine.
//!
//! # Invariant
//!
//! When [`PauseGate::close`] has returned, no Commit is sent to the machines it was told of until
//! their pauses end: those on their way have been dropped, and later ones do not start.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use api::dominator::orders::UpdatePause;
use model::tree::Time;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::core::pauses::Pauses;

/// A Commit on its way.
#[derive(Clone, Debug)]
struct Passing {
    cancel: CancellationToken,
    /// Closed when it is over.
    over: watch::Receiver<()>,
}

#[derive(Debug, Default)]
struct Inner {
    pauses: Pauses,
    /// By machine and number: there is at most one of each machine, but for the moment in which
    /// it is looked after anew.
    passing: BTreeMap<(String, u64), Passing>,
    last: u64,
}

/// See the module's text.
#[derive(Debug, Default)]
pub struct PauseGate {
    inner: Mutex<Inner>,
}

/// Takes a Commit out of the list when it is over, however it ends.
struct Leave<'a> {
    gate: &'a PauseGate,
    key: (String, u64),
    _over: watch::Sender<()>,
}

impl Drop for Leave<'_> {
    fn drop(&mut self) {
        self.gate.locked().passing.remove(&self.key);
    }
}

impl PauseGate {
    /// A gate with the pauses that there were when the dominator was stopped.
    #[must_use]
    pub fn new(pauses: Pauses) -> Self {
        Self { inner: Mutex::new(Inner { pauses, ..Inner::default() }) }
    }

    fn locked(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The pauses.
    #[must_use]
    pub fn pauses(&self) -> Pauses {
        self.locked().pauses.clone()
    }

    /// The pause of a machine, over or not.
    #[must_use]
    pub fn of(&self, hostname: &str) -> Option<Arc<UpdatePause>> {
        self.locked().pauses.of(hostname).cloned()
    }

    /// How many machines are paused now.
    #[must_use]
    pub fn count(&self, now: Time) -> u32 {
        u32::try_from(self.locked().pauses.count(now)).unwrap_or(u32::MAX)
    }

    /// Puts other pauses in the place of those that were.
    pub fn open(&self, pauses: Pauses) {
        self.locked().pauses = pauses;
    }

    /// Puts other pauses in the place of those that were; when this has returned, nothing passes to
    /// the machines of `hostnames` any more, if they are paused by them.
    pub async fn close(&self, pauses: Pauses, hostnames: &[String]) {
        let passing: Vec<Passing> = {
            let mut inner = self.locked();
            inner.pauses = pauses;
            let of = |host: &String| {
                let passing = inner.passing.range((host.clone(), 0)..=(host.clone(), u64::MAX));
                passing.map(|(_, passing)| passing.clone()).collect::<Vec<_>>()
            };
            hostnames.iter().flat_map(of).collect()
        };
        for one in &passing {
            one.cancel.cancel();
        }
        for mut one in passing {
            // Nothing is ever sent: it ends when the sender is dropped.
            let _over = one.over.changed().await;
        }
    }

    /// Lets `commit` run to its end, unless the machine is paused at this time of day or is
    /// paused meanwhile: then it is dropped and `None` is given.
    pub async fn pass<T>(
        &self,
        hostname: &str,
        now: Time,
        commit: impl Future<Output = T>,
    ) -> Option<T> {
        let (cancel, _leave) = self.enter(hostname, now)?;
        tokio::select! {
            biased;
            () = cancel.cancelled() => None,
            result = commit => Some(result),
        }
    }

    fn enter(&self, hostname: &str, now: Time) -> Option<(CancellationToken, Leave<'_>)> {
        let mut inner = self.locked();
        if inner.pauses.of(hostname).is_some_and(|pause| pause.holds(now)) {
            return None;
        }
        inner.last += 1;
        let key = (hostname.to_owned(), inner.last);
        let (sender, over) = watch::channel(());
        let cancel = CancellationToken::new();
        inner.passing.insert(key.clone(), Passing { cancel: cancel.clone(), over });
        Some((cancel, Leave { gate: self, key, _over: sender }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};

    fn at(seconds: i64) -> Time {
        Time { seconds, nanoseconds: 0 }
    }

    fn paused(hostname: &str) -> Pauses {
        let (reason, who) = ("test".to_owned(), "me".to_owned());
        let pause = UpdatePause { until: at(100), reason, who, since: at(0) };
        let mut pauses = Pauses::default();
        pauses.pause(vec![hostname.to_owned()], &Arc::new(pause));
        pauses
    }

    #[tokio::test]
    async fn nothing_passes_to_a_paused_machine_until_the_time_has_come() {
        let gate = PauseGate::new(paused("a"));
        assert_eq!(gate.pass("a", at(99), async { 1 }).await, None);
        assert_eq!(gate.pass("b", at(99), async { 1 }).await, Some(1));
        assert_eq!(gate.pass("a", at(100), async { 1 }).await, Some(1));
        assert_eq!((gate.count(at(99)), gate.count(at(100))), (1, 0));
        gate.open(Pauses::default());
        assert_eq!(gate.pass("a", at(99), async { 1 }).await, Some(1));
        assert!(gate.locked().passing.is_empty());
    }

    #[tokio::test]
    async fn a_pause_drops_what_is_on_its_way_to_its_machine_alone_before_it_returns() {
        struct Dropped(Arc<AtomicBool>);
        impl Drop for Dropped {
            fn drop(&mut self) {
                self.0.store(true, Ordering::SeqCst);
            }
        }
        let gate = Arc::new(PauseGate::default());
        let (started, mut are_started) = tokio::sync::mpsc::channel(2);
        let begin = |hostname: &'static str| {
            let gone = Arc::new(AtomicBool::new(false));
            let (gate, guard) = (Arc::clone(&gate), Dropped(Arc::clone(&gone)));
            let started = started.clone();
            let commit = async move {
                let _guard = guard;
                started.send(()).await.unwrap();
                std::future::pending::<()>().await;
            };
            (tokio::spawn(async move { gate.pass(hostname, at(1), commit).await }), gone)
        };
        let (a, b) = (begin("a"), begin("b"));
        are_started.recv().await;
        are_started.recv().await;
        gate.close(paused("a"), &["a".to_owned()]).await;
        assert!(a.1.load(Ordering::SeqCst), "a Commit was still on its way");
        assert!(!b.1.load(Ordering::SeqCst), "another machine's Commit was dropped");
        assert_eq!(a.0.await.unwrap(), None);
        assert_eq!(gate.locked().passing.len(), 1);
        b.0.abort();
        assert!(b.0.await.unwrap_err().is_cancelled());
        assert!(gate.locked().passing.is_empty());
    }
}
