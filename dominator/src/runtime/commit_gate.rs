//! The one place through which every Commit passes. The brake closes it for all machines, a pause
//! for single ones.
//!
//! # Invariant
//!
//! When [`CommitGate::pull_brake`] has returned, or [`CommitGate::drop_commits`] after a pause, no
//! Commit is sent to the machines that the gate is closed for: Commits on their way have been
//! dropped, and later ones do not start until the brake is released or the pause ends.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

use api::dominator::Brake;
use api::dominator::orders::UpdatePause;
use model::lock::locked;
use model::tree::Time;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::storage::Storage;

/// Why a Commit was not sent, or was dropped on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Closed {
    Brake,
    Pause,
}

impl Closed {
    /// Returns why the gate is closed.
    pub fn text(self) -> &'static str {
        match self {
            Self::Brake => "the brake was pulled",
            Self::Pause => "the machine was paused",
        }
    }
}

/// A Commit on its way.
#[derive(Clone, Debug)]
struct Passing {
    cancel: CancellationToken,
    /// Closed when the Commit has ended or was dropped.
    over: watch::Receiver<()>,
}

#[derive(Debug, Default)]
struct CommitsUnderWay {
    /// By host name and number. A machine has more than one entry only while its driver is being
    /// replaced.
    passing: BTreeMap<(String, u64), Passing>,
    last: u64,
}

#[derive(Debug)]
pub struct CommitGate {
    /// Has the brake and the pauses.
    state: Arc<Storage>,
    brake_changed: watch::Sender<()>,
    commits: Mutex<CommitsUnderWay>,
}

/// Removes a Commit from the list when it has ended or was dropped.
struct CommitGuard<'a> {
    gate: &'a CommitGate,
    key: (String, u64),
    _over: watch::Sender<()>,
}

impl Drop for CommitGuard<'_> {
    fn drop(&mut self) {
        self.gate.locked().passing.remove(&self.key);
    }
}

impl CommitGate {
    pub fn new(state: Arc<Storage>) -> Self {
        Self { state, brake_changed: watch::Sender::default(), commits: Mutex::default() }
    }

    fn locked(&self) -> MutexGuard<'_, CommitsUnderWay> {
        locked(&self.commits)
    }

    /// Returns the brake, if it is on.
    pub fn brake(&self) -> Option<Arc<Brake>> {
        Option::clone(&self.state.brake.get())
    }

    /// Returns a receiver that is notified when the brake changes.
    pub fn watch_brake(&self) -> watch::Receiver<()> {
        self.brake_changed.subscribe()
    }

    /// Pulls the brake. When this has returned, no Commit is on its way to any machine.
    ///
    /// Memory is ahead of the disk here: whoever pulls the brake needs it at once, even if the disk
    /// is full.
    pub async fn pull_brake(&self, brake: Brake) {
        // The order matters: a Commit that enters before the list is read is in it, and one that
        // enters later sees the brake.
        self.state.brake.set_behind(Some(Arc::new(brake)));
        self.brake_changed.send_replace(());
        let passing = self.locked().passing.values().cloned().collect();
        drop_all(passing).await;
    }

    /// Notifies the machines that the brake is released.
    pub fn brake_released(&self) {
        self.brake_changed.send_replace(());
    }

    /// Returns the pause of a machine, even if it has ended.
    pub fn pause_of(&self, hostname: &str) -> Option<Arc<UpdatePause>> {
        self.state.pauses.get().get(hostname).cloned()
    }

    /// Returns how many machines are paused at the time `now`.
    pub fn paused_count(&self, now: Time) -> u32 {
        u32::try_from(self.state.pauses.get().count(now)).unwrap_or(u32::MAX)
    }

    /// Drops the Commits to `hostnames`. When this has returned after the machines were paused, no
    /// Commit is on its way to them.
    pub async fn drop_commits(&self, hostnames: &[String]) {
        let passing = {
            let commits = self.locked();
            let of_host = |host: &String| {
                let passing = commits.passing.range((host.clone(), 0)..=(host.clone(), u64::MAX));
                passing.map(|(_, passing)| passing.clone()).collect::<Vec<_>>()
            };
            hostnames.iter().flat_map(of_host).collect()
        };
        drop_all(passing).await;
    }

    /// Runs `commit` to its end. If the gate is closed for the machine at the time `now`, or is
    /// closed while `commit` runs, `commit` is dropped.
    pub async fn pass<T>(
        &self,
        hostname: &str,
        now: Time,
        commit: impl Future<Output = T>,
    ) -> Result<T, Closed> {
        let (cancel, _guard) = self.enter(hostname, now)?;
        tokio::select! {
            biased;
            // The brake cannot be released before this Commit has left.
            () = cancel.cancelled() => Err(match self.brake() {
                Some(_) => Closed::Brake,
                None => Closed::Pause,
            }),
            result = commit => Ok(result),
        }
    }

    fn enter(
        &self,
        hostname: &str,
        now: Time,
    ) -> Result<(CancellationToken, CommitGuard<'_>), Closed> {
        let mut commits = self.locked();
        if self.brake().is_some() {
            return Err(Closed::Brake);
        }
        if self.pause_of(hostname).is_some_and(|pause| pause.holds(now)) {
            return Err(Closed::Pause);
        }
        commits.last += 1;
        let key = (hostname.to_owned(), commits.last);
        let (sender, over) = watch::channel(());
        let cancel = CancellationToken::new();
        commits.passing.insert(key.clone(), Passing { cancel: cancel.clone(), over });
        Ok((cancel, CommitGuard { gate: self, key, _over: sender }))
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
    use crate::core::orders::Pauses;
    use std::sync::atomic::{AtomicBool, Ordering};

    fn at(seconds: i64) -> Time {
        Time { seconds, nanoseconds: 0 }
    }

    fn brake() -> Brake {
        Brake { reason: "test".into(), who: "me".into(), since: Time::default() }
    }

    struct Gate {
        gate: Arc<CommitGate>,
        _directory: tempfile::TempDir,
    }

    /// An open gate.
    fn open() -> Gate {
        let directory = tempfile::tempdir().unwrap();
        let state = Storage::open(directory.path()).unwrap();
        Gate { gate: Arc::new(CommitGate::new(Arc::new(state))), _directory: directory }
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
        let Gate { gate, _directory } = open();
        gate.state.brake.set(Some(Arc::new(brake()))).unwrap();
        assert_eq!(gate.pass("a", at(0), async { 1 }).await, Err(Closed::Brake));
        gate.state.brake.set(None).unwrap();
        assert_eq!(gate.pass("a", at(0), async { 1 }).await, Ok(1));
    }

    #[tokio::test]
    async fn pulling_the_brake_drops_what_is_on_its_way_before_it_returns() {
        let Gate { gate, _directory } = open();
        let (started, mut is_started) = tokio::sync::mpsc::channel(1);
        let (passing, gone) = begin(&gate, "a", started);
        is_started.recv().await;
        gate.pull_brake(brake()).await;
        assert!(gone.load(Ordering::SeqCst), "a Commit was still on its way");
        assert_eq!(passing.await.unwrap(), Err(Closed::Brake));
    }

    #[tokio::test]
    async fn nothing_passes_to_a_paused_machine_until_the_time_has_come() {
        let Gate { gate, _directory } = open();
        gate.state.pauses.set(paused("a")).unwrap();
        assert_eq!(gate.pass("a", at(99), async { 1 }).await, Err(Closed::Pause));
        assert_eq!(gate.pass("b", at(99), async { 1 }).await, Ok(1));
        assert_eq!(gate.pass("a", at(100), async { 1 }).await, Ok(1));
        assert_eq!((gate.paused_count(at(99)), gate.paused_count(at(100))), (1, 0));
        gate.state.pauses.set(Pauses::default()).unwrap();
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
        let Gate { gate, _directory } = open();
        let (started, mut are_started) = tokio::sync::mpsc::channel(2);
        let a = begin(&gate, "a", started.clone());
        let b = begin(&gate, "b", started);
        are_started.recv().await;
        are_started.recv().await;
        gate.state.pauses.set(paused("a")).unwrap();
        gate.drop_commits(&["a".to_owned()]).await;
        assert!(a.1.load(Ordering::SeqCst), "a Commit was still on its way");
        assert!(!b.1.load(Ordering::SeqCst), "another machine's Commit was dropped");
        assert_eq!(a.0.await.unwrap(), Err(Closed::Pause));
        assert_eq!(gate.locked().passing.len(), 1);
        b.0.abort();
        assert!(b.0.await.unwrap_err().is_cancelled());
        assert!(gate.locked().passing.is_empty());
    }
}
