//! Runs the tasks that hyper spawns, so that none outlives the connection it belongs to.

use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// Spawns tasks that end when `stop` is cancelled.
#[derive(Clone)]
pub(super) struct Tracked {
    /// Knows the tasks that run.
    pub(super) tracker: TaskTracker,
    /// Ends them.
    pub(super) stop: CancellationToken,
}

impl<F> hyper::rt::Executor<F> for Tracked
where
    F: Future + Send + 'static,
    F::Output: Send,
{
    fn execute(&self, future: F) {
        let stop = self.stop.clone();
        // hyper's futures have kilobytes, and each layer around one holds a place for it.
        let future = Box::pin(future);
        self.tracker.spawn(async move { stop.run_until_cancelled_owned(future).await.map(drop) });
    }
}
