//! Keeps orders about daemon tasks until machines have taken them.

use std::sync::Arc;
use std::time::Duration;

use api::dominator::tasks::WantedTaskOrder;
use api::subd::TaskOrder;
use tokio_util::sync::CancellationToken;

use crate::core::sub::SubOrder;
use crate::runtime::driver::Handle;
use crate::runtime::saver::Saver;
use crate::runtime::shared::Shared;
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

    /// Has a machine resume tasks that are suspended because it had left a machine database. Each
    /// comes with the number of the last order about it.
    pub async fn resume(
        self: Arc<Self>,
        handle: Arc<Handle>,
        hostname: String,
        tasks: Vec<(String, u64)>,
        shared: Arc<Shared>,
    ) {
        let resume = move || {
            let since = shared.clock.now().wall;
            self.state.task_orders.modify_behind(|orders| {
                for (task, told) in tasks {
                    let why = "the machine is in the machine database again".to_owned();
                    let (order, who) = (TaskOrder::Resume, "dominator".to_owned());
                    let order = WantedTaskOrder { task, order, why, who, since, number: 0 };
                    orders.want_back(&hostname, order, told);
                }
            });
            self.saver.notify();
            // An order that is given now must not be hidden by those that were read before.
            loop {
                let wanted = self.of(&hostname);
                handle.order(SubOrder::WantTaskOrders(wanted.clone()), &shared);
                if self.of(&hostname) == wanted {
                    return;
                }
            }
        };
        // This fails only if the thread panicked, which has been logged.
        let _resumed = tokio::task::spawn_blocking(resume).await;
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
