//! The one place through which every Commit passes, and where the brake acts.
//!
//! # Invariant
//!
//! When [`CommitGate::pull`] has returned, no Commit is sent until [`CommitGate::release`]: those that were on
//! their way have been dropped, and later ones do not start.

use std::sync::Arc;

use api::dominator::Brake;
use tokio::sync::{RwLock, watch};

/// See the module's text.
#[derive(Debug)]
pub struct CommitGate {
    brake: watch::Sender<Option<Arc<Brake>>>,
    /// Held for reading while a Commit is on its way.
    passing: RwLock<()>,
}

impl CommitGate {
    /// A gate with the brake as it was when the dominator was stopped.
    #[must_use]
    pub fn new(brake: Option<Brake>) -> Self {
        Self { brake: watch::Sender::new(brake.map(Arc::new)), passing: RwLock::new(()) }
    }

    /// The brake, if it is on.
    #[must_use]
    pub fn brake(&self) -> Option<Arc<Brake>> {
        self.brake.borrow().clone()
    }

    /// Tells when the brake changes.
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<Option<Arc<Brake>>> {
        self.brake.subscribe()
    }

    /// Pulls the brake; when this has returned nothing passes any more.
    pub async fn pull(&self, brake: Brake) {
        // First the word, which makes those that pass let go; then wait until they have.
        self.brake.send_replace(Some(Arc::new(brake)));
        let _all_have_left = self.passing.write().await;
    }

    /// Releases the brake.
    pub fn release(&self) {
        self.brake.send_replace(None);
    }

    /// Lets `commit` run to its end, unless the brake is on or is pulled meanwhile: then it is
    /// dropped and `None` is given.
    pub async fn pass<T>(&self, commit: impl Future<Output = T>) -> Option<T> {
        let mut brake = self.brake.subscribe();
        let _passing = self.passing.read().await;
        tokio::select! {
            biased;
            _ = brake.wait_for(Option::is_some) => None,
            result = commit => Some(result),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use model::tree::Time;
    use std::sync::atomic::{AtomicBool, Ordering};

    fn brake() -> Brake {
        Brake { reason: "test".into(), who: "me".into(), since: Time::default() }
    }

    #[tokio::test]
    async fn nothing_passes_while_the_brake_is_on() {
        let gate = CommitGate::new(Some(brake()));
        assert_eq!(gate.pass(async { 1 }).await, None);
        gate.release();
        assert_eq!(gate.pass(async { 1 }).await, Some(1));
    }

    #[tokio::test]
    async fn pulling_the_brake_drops_what_is_on_its_way_before_it_returns() {
        struct Dropped(Arc<AtomicBool>);
        impl Drop for Dropped {
            fn drop(&mut self) {
                self.0.store(true, Ordering::SeqCst);
            }
        }
        let gate = Arc::new(CommitGate::new(None));
        let gone = Arc::new(AtomicBool::new(false));
        let (started, is_started) = tokio::sync::oneshot::channel();
        let passing = tokio::spawn({
            let (gate, guard) = (Arc::clone(&gate), Dropped(Arc::clone(&gone)));
            async move {
                gate.pass(async move {
                    let _guard = guard;
                    started.send(()).unwrap();
                    std::future::pending::<()>().await;
                })
                .await
            }
        });
        is_started.await.unwrap();
        gate.pull(brake()).await;
        assert!(gone.load(Ordering::SeqCst), "a Commit was still on its way");
        assert_eq!(passing.await.unwrap(), None);
    }
}
