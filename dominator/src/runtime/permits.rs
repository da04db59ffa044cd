//! Gives machines the permits of exclusive tasks. `core::permits` decides.
//!
//! Each machine with such a task is asked a few times in the time of a permit, whatever else is
//! done about it.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use api::dominator::permits::{ListPermitsReply, PermitHolder, TaskPermits};
use api::subd::{GetTasks, GetTasksReply, PermitTask, PermitTaskRequest};
use model::display::error_chain;
use model::lock::locked;
use rpc::client::Client;
use tokio::sync::Notify;

use crate::core::permits::{Holder, Permits, PermitsHeard};
use crate::runtime::clock::Clock;
use crate::runtime::driver::Handle;
use crate::runtime::shared::Shared;
use crate::storage::Storage;

/// The longest time of a call.
const CALL_MAX: Duration = Duration::from_secs(30);

#[derive(Debug)]
struct ServiceState {
    permits: Permits,
    /// By the host name of those with exclusive tasks.
    machines: BTreeMap<String, Arc<ExclusiveTasks>>,
}

#[derive(Debug)]
pub struct PermitService {
    clock: Clock,
    time: Duration,
    state: Arc<Storage>,
    inner: Mutex<ServiceState>,
}

/// Whether a machine has exclusive tasks, as its driver knows.
#[derive(Debug, Default)]
pub struct ExclusiveTasks {
    has_any: AtomicBool,
    /// It is asked at once.
    nudge: Notify,
}

impl ExclusiveTasks {
    /// Sets whether there are any.
    pub fn set(&self, has_any: bool) {
        if self.has_any.swap(has_any, Ordering::Relaxed) != has_any {
            self.nudge.notify_one();
        }
    }
}

impl PermitService {
    /// Starts without permits, which last for `time`. Blocks on the disk.
    pub fn open(time: Duration, state: Arc<Storage>, clock: Clock) -> Self {
        let former = state.permit_seconds.get().map(Duration::from_secs);
        let mut given = time;
        // A later start has to know how long a permit may last.
        if former.is_none_or(|former| former < time)
            && let Err(error) = state.permit_seconds.set(Some(time.as_secs()))
        {
            tracing::error!("the time of permits cannot be saved: {}", error_chain(&error));
            given = former.unwrap_or(time);
        }
        let permits = Permits::new(given, former.unwrap_or(time), clock.elapsed());
        let inner = ServiceState { permits, machines: BTreeMap::new() };
        let service = Self { clock, time: given, state, inner: Mutex::new(inner) };
        service.take_fences();
        service
    }

    /// Saves the time of permits when those of a longer time must have ended.
    pub async fn save_time(self: Arc<Self>) {
        let opens_in = self.locked().permits.opens_in(self.clock.elapsed());
        tokio::time::sleep(opens_in).await;
        let save = move || self.state.permit_seconds.set(Some(self.time.as_secs()));
        if let Ok(Err(error)) = tokio::task::spawn_blocking(save).await {
            tracing::error!("the time of permits cannot be saved: {}", error_chain(&error));
        }
    }

    /// Takes which machines are fenced from the state.
    pub fn take_fences(&self) {
        let mut inner = self.locked();
        let fenced = self.state.fences.get();
        inner.permits.set_fenced(fenced.keys().map(|hostname| hostname.as_str().into()).collect());
        self.nudge_next(&inner);
    }

    /// Takes that a machine is in the machine database no more.
    pub fn leave(&self, hostname: &str) {
        let mut inner = self.locked();
        inner.permits.leave(hostname, self.clock.elapsed());
        inner.machines.remove(hostname);
    }

    /// True if the machine may run an exclusive task.
    pub fn is_holder(&self, hostname: &str) -> bool {
        let inner = self.locked();
        let holders = inner.permits.holders(self.clock.elapsed());
        holders.values().flatten().any(|holder| &*holder.hostname == hostname)
    }

    /// Returns what operators are shown.
    pub fn report(&self) -> ListPermitsReply {
        let (inner, now) = (self.locked(), self.clock.elapsed());
        let holder = |holder: Holder| PermitHolder {
            hostname: holder.hostname.to_string(),
            number: holder.number,
            ends_in_s: whole_seconds(holder.ends_in),
            is_live: holder.is_live,
        };
        let tasks = inner.permits.holders(now).into_iter().map(|(task, holders)| TaskPermits {
            task: task.to_owned(),
            holders: holders.into_iter().map(holder).collect(),
        });
        ListPermitsReply {
            opens_in_s: whole_seconds(inner.permits.opens_in(now)),
            tasks: tasks.collect(),
            fenced: self.state.fences.get().values().cloned().collect(),
        }
    }

    /// Takes what a machine said. Returns the permits that it gets.
    fn take(&self, hostname: &str, said: PermitsHeard) -> Vec<PermitTaskRequest> {
        let (mut inner, now) = (self.locked(), self.clock.elapsed());
        let has_given_up = inner.permits.take(hostname, said, now);
        let given = inner.permits.give(hostname, now);
        if has_given_up {
            self.nudge_next(&inner);
        }
        given
    }

    fn nudge_next(&self, inner: &ServiceState) {
        let next: BTreeSet<Arc<str>> = inner.permits.next(self.clock.elapsed());
        for machine in next.iter().filter_map(|hostname| inner.machines.get(&**hostname)) {
            machine.nudge.notify_one();
        }
    }

    fn locked(&self) -> MutexGuard<'_, ServiceState> {
        locked(&self.inner)
    }
}

fn whole_seconds(time: Duration) -> u32 {
    u32::try_from(time.as_millis().div_ceil(1_000)).unwrap_or(u32::MAX)
}

/// Gives a machine permits as long as it has exclusive tasks, until the future is dropped.
pub async fn give(handle: Arc<Handle>, client: Client, shared: Arc<Shared>) -> Infallible {
    let (host, tasks) = (client.peer().host.clone(), Arc::clone(&handle.exclusive_tasks));
    let service = &shared.permits;
    let period = service.locked().permits.period();
    loop {
        if !tasks.has_any.load(Ordering::Relaxed) {
            tasks.nudge.notified().await;
            continue;
        }
        service.locked().machines.insert(host.clone(), Arc::clone(&tasks));
        // Boxed, so that machines without such tasks do without the room.
        Box::pin(ask(&handle, &client, service, period.min(CALL_MAX))).await;
        tokio::select! {
            () = tasks.nudge.notified() => {}
            () = tokio::time::sleep(period) => {}
        }
    }
}

/// Asks a machine how its exclusive tasks are, and gives it the permits that it gets.
async fn ask(handle: &Handle, client: &Client, service: &PermitService, limit: Duration) {
    let host = &client.peer().host;
    if handle.with_sub(|sub| sub.expect_right_machine().is_err()) {
        return;
    }
    let reply = match client.call_within::<GetTasks>(&(), limit).await {
        Ok(reply) => reply,
        Err(error) => return tracing::debug!(%host, "no news of tasks: {}", error_chain(&error)),
    };
    let takes_orders = handle.with_sub(|sub| sub.held_by_other().is_none());
    let said = said(reply, takes_orders);
    let numbers: BTreeMap<String, u64> =
        said.permits.iter().map(|(task, permit)| (task.clone(), permit.number)).collect();
    for request in service.take(host, said) {
        let PermitTaskRequest { task, number, .. } = &request;
        match client.call_within::<PermitTask>(&request, limit).await {
            Ok(_said_at) if numbers.get(task) == Some(number) => {}
            Ok(_said_at) => tracing::info!(%host, task, number, "it may run the exclusive task"),
            Err(error) => {
                tracing::warn!(%host, task, number, "it has no permit: {}", error_chain(&error));
            }
        }
    }
}

fn said(reply: GetTasksReply, takes_orders: bool) -> PermitsHeard {
    let tasks = reply.tasks.into_iter();
    let permits = tasks.filter_map(|task| Some((task.name, task.permit?))).collect();
    PermitsHeard { said_at: reply.said_at, takes_orders, permits }
}
