//! Keeps orders about daemon tasks until machines have taken them.

use std::sync::Arc;
use std::time::Duration;

use api::dominator::tasks::WantedTaskOrder;
use tokio_util::sync::CancellationToken;

use crate::runtime::saver::Saver;
use crate::storage::Storage;

/// How long ended orders are gathered, to share a write.
const GATHER_TIME: Duration = Duration::from_secs(1);

/// The pause after a failed write.
const RETRY_PAUSE: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub struct TaskOrderService {
    state: Arc<Storage>,
    saver: Saver,
}

impl TaskOrderService {
    pub fn new(state: Arc<Storage>) -> Self {
        Self { state, saver: Saver::new("the orders about tasks", GATHER_TIME, RETRY_PAUSE) }
    }

    /// Saves that orders have ended, until `stop` is cancelled.
    pub async fn run(self: Arc<Self>, stop: CancellationToken) {
        let state = Arc::clone(&self.state);
        self.saver.run(move || state.task_orders.save(), &stop).await;
    }

    /// Returns the orders for a machine.
    pub fn of(&self, hostname: &str) -> Vec<WantedTaskOrder> {
        self.state.task_orders.get().of(hostname).to_vec()
    }

    /// Forgets the orders about a task of a machine up to `number`. If this is lost in a crash, the
    /// machine tells that it has heard of the number, or refuses the order again.
    pub async fn ended(self: Arc<Self>, hostname: String, task: String, number: u64) {
        let service = Arc::clone(&self);
        let forget = move || {
            let orders = &service.state.task_orders;
            orders.modify_behind(|orders| orders.forget(&hostname, &task, number));
        };
        // This fails only if the thread panicked, which has been logged.
        let _forgotten = tokio::task::spawn_blocking(forget).await;
        self.saver.notify();
    }
}
