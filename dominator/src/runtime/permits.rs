//! Gives machines the permits of exclusive tasks and of resources of the fleet, and tells them what
//! others have made. `core::permits` and `core::fleet_resources` decide.
//!
//! Each machine with such a task or resource is asked a few times in the time of a permit, whatever
//! else is done about it.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use api::dominator::permits::{ListPermitsReply, PermitHolder, TaskPermits};
use api::subd::{
    FleetResourceNews, FleetResourceReport, GetFleetResources, GetFleetResourcesRequest, GetTasks,
    PermitReport, PermitResource, PermitTask, PermitTaskRequest, TellFleetResources,
    TellFleetResourcesRequest,
};
use model::display::error_chain;
use model::lock::locked;
use rpc::client::{CallError, Client};
use tokio::sync::Notify;

use crate::core::fleet_resources::{FleetResources, Heard, has_given_numbers};
use crate::core::permits::{Holder, Permits, PermitsHeard, resource_of};
use crate::runtime::clock::Clock;
use crate::runtime::driver::Handle;
use crate::runtime::shared::Shared;
use crate::storage::Storage;

/// The longest time of a call.
const CALL_MAX: Duration = Duration::from_secs(30);

#[derive(Debug)]
struct ServiceState {
    permits: Permits,
    resources: FleetResources,
    /// By the host name of those that need permits.
    machines: BTreeMap<String, Arc<PermitNeeds>>,
}

impl ServiceState {
    /// Has machines asked at once.
    fn nudge(&self, hostnames: &BTreeSet<Arc<str>>) {
        for machine in hostnames.iter().filter_map(|hostname| self.machines.get(&**hostname)) {
            machine.nudge.notify_one();
        }
    }
}

#[derive(Debug)]
pub struct PermitService {
    clock: Clock,
    time: Duration,
    state: Arc<Storage>,
    inner: Mutex<ServiceState>,
}

/// What a machine needs permits for, as its driver knows.
#[derive(Debug, Default)]
pub struct PermitNeeds {
    tasks: AtomicBool,
    resources: AtomicBool,
    /// It is asked at once.
    nudge: Notify,
}

impl PermitNeeds {
    /// Sets whether there are exclusive tasks.
    pub fn set_tasks(&self, has_any: bool) {
        if self.tasks.swap(has_any, Ordering::Relaxed) != has_any {
            self.nudge.notify_one();
        }
    }

    /// Sets whether there are resources of the fleet, and whether there is news of them.
    pub fn set_resources(&self, has_any: bool, is_news: bool) {
        if self.resources.swap(has_any, Ordering::Relaxed) != has_any || has_any && is_news {
            self.nudge.notify_one();
        }
    }

    fn any(&self) -> bool {
        self.tasks.load(Ordering::Relaxed) || self.resources.load(Ordering::Relaxed)
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
        let floor = seconds_now(clock);
        let permits = Permits::new(given, former.unwrap_or(time), clock.elapsed(), floor);
        let (resources, machines) = (FleetResources::default(), BTreeMap::new());
        let inner = ServiceState { permits, resources, machines };
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
        inner.resources.leave(hostname);
        inner.machines.remove(hostname);
    }

    /// True if the machine may run an exclusive task, or make a resource of the fleet.
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

    /// Takes what a machine said of resources, whose image has those of `of_image`. Returns those
    /// whose outputs it must tell.
    fn take_resources(
        &self,
        hostname: &str,
        said: &[FleetResourceReport],
        of_image: &BTreeSet<String>,
    ) -> Vec<String> {
        let mut inner = self.locked();
        let now = self.clock.elapsed();
        let Heard { outputs_of, to_tell } = inner.resources.take(hostname, said, of_image, now);
        inner.nudge(&to_tell);
        outputs_of
    }

    /// Returns how a machine, which has said this, is about the permits of resources.
    fn of_resources(
        &self,
        hostname: &str,
        said: &[FleetResourceReport],
    ) -> BTreeMap<String, PermitReport> {
        let since = self.clock.elapsed().saturating_sub(self.time);
        let fenced = self.state.fences.get();
        let is_fenced = |hostname: &str| fenced.contains_key(hostname);
        self.locked().resources.permits(hostname, said, since, is_fenced)
    }

    /// Returns what a machine has to be told. While permits of an earlier start of the dominator
    /// may be left, it does not know what other machines ask for.
    fn news(
        &self,
        hostname: &str,
        said: &[FleetResourceReport],
        required: Option<BTreeSet<String>>,
    ) -> Vec<FleetResourceNews> {
        let inner = self.locked();
        let is_open = inner.permits.opens_in(self.clock.elapsed()).is_zero();
        inner.resources.news(hostname, said, required.filter(|_| is_open).as_ref())
    }

    fn nudge_next(&self, inner: &ServiceState) {
        inner.nudge(&inner.permits.next(self.clock.elapsed()));
    }

    fn locked(&self) -> MutexGuard<'_, ServiceState> {
        locked(&self.inner)
    }
}

/// Returns the seconds since 1970.
fn seconds_now(clock: Clock) -> u64 {
    u64::try_from(clock.now().wall.seconds).unwrap_or_default()
}

fn whole_seconds(time: Duration) -> u32 {
    u32::try_from(time.as_millis().div_ceil(1_000)).unwrap_or(u32::MAX)
}

/// Gives a machine permits as long as it has something that needs them, until the future is
/// dropped.
pub async fn give(handle: Arc<Handle>, client: Client, shared: Arc<Shared>) -> Infallible {
    let (host, needs) = (client.peer().host.clone(), Arc::clone(&handle.permit_needs));
    let service = &shared.permits;
    let period = service.locked().permits.period();
    loop {
        if !needs.resources.load(Ordering::Relaxed) {
            service.locked().resources.leave(&host);
        }
        if !needs.any() {
            needs.nudge.notified().await;
            continue;
        }
        service.locked().machines.insert(host.clone(), Arc::clone(&needs));
        // Boxed, so that machines without such needs do without the room.
        if let Err(error) = Box::pin(ask(&handle, &client, &shared, period.min(CALL_MAX))).await {
            tracing::debug!(%host, "no news for permits: {}", error_chain(&error));
        }
        tokio::select! {
            () = needs.nudge.notified() => {}
            () = tokio::time::sleep(period) => {}
        }
    }
}

/// What a machine says of what needs permits.
struct Said {
    permits: PermitsHeard,
    resources: Vec<FleetResourceReport>,
}

/// Asks a machine how its exclusive tasks and its resources of the fleet are, gives it the permits
/// that it gets, and tells it what others have made.
async fn ask(
    handle: &Handle,
    client: &Client,
    shared: &Shared,
    limit: Duration,
) -> Result<(), CallError> {
    let (host, service) = (&client.peer().host, &shared.permits);
    if handle.with_sub(|sub| sub.expect_right_machine().is_err()) {
        return Ok(());
    }
    let Said { permits, resources } = hear(handle, client, shared, limit).await?;
    let numbers: BTreeMap<String, u64> =
        permits.permits.iter().map(|(name, permit)| (name.clone(), permit.number)).collect();
    let mut telling = TellFleetResourcesRequest::default();
    for request in service.take(host, permits) {
        let PermitTaskRequest { task: name, number, .. } = &request;
        if numbers.get(name) != Some(number) {
            tracing::info!(%host, name, number, "it gets the permit");
        }
        if let Some(id) = resource_of(name) {
            let (id, PermitTaskRequest { number, until, .. }) = (id.to_owned(), request);
            telling.permits.push(PermitResource { id, number, until });
        } else if let Err(error) = client.call_within::<PermitTask>(&request, limit).await {
            tracing::warn!(%host, name, "it has no permit: {}", error_chain(&error));
        }
    }
    if !resources.is_empty() {
        telling.news = service.news(host, &resources, shared.images.fleet_resources());
    }
    if telling != TellFleetResourcesRequest::default() {
        client.call_within::<TellFleetResources>(&telling, limit).await?;
    }
    Ok(())
}

/// Asks a machine how its exclusive tasks and its resources of the fleet are.
async fn hear(
    handle: &Handle,
    client: &Client,
    shared: &Shared,
    limit: Duration,
) -> Result<Said, CallError> {
    let (host, service, needs) = (&client.peer().host, &shared.permits, &handle.permit_needs);
    let mut said_at = None;
    let mut permits = BTreeMap::new();
    if needs.tasks.load(Ordering::Relaxed) {
        let reply = client.call_within::<GetTasks>(&(), limit).await?;
        said_at = Some(reply.said_at);
        permits.extend(reply.tasks.into_iter().filter_map(|task| Some((task.name, task.permit?))));
    }
    let mut resources = Vec::new();
    let takes_orders = handle.with_sub(|sub| sub.held_by_other().is_none());
    if needs.resources.load(Ordering::Relaxed) && takes_orders {
        let mut request = GetFleetResourcesRequest::default();
        let image = handle.with_sub(|sub| sub.loaded_image().cloned());
        let of_image = image.and_then(|image| shared.images.fleet_resources_of(&image));
        let of_image = of_image.unwrap_or_default();
        // Once more if the outputs of some are not known.
        for _ in 0..2 {
            let reply = client.call_within::<GetFleetResources>(&request, limit).await?;
            // The permits count from the first answer.
            said_at.get_or_insert(reply.said_at);
            resources = reply.resources;
            let now = seconds_now(service.clock);
            resources.retain(|report| {
                let is_given = has_given_numbers(report, now);
                if !is_given {
                    tracing::warn!(%host, id = report.id, "it tells a number that nobody gave");
                }
                is_given
            });
            request.outputs_of = service.take_resources(host, &resources, &of_image);
            if request.outputs_of.is_empty() {
                break;
            }
        }
    }
    permits.extend(service.of_resources(host, &resources));
    let permits = PermitsHeard { said_at: said_at.unwrap_or_default(), takes_orders, permits };
    Ok(Said { permits, resources })
}
