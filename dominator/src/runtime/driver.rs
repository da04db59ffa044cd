//! Runs the state machine of one machine and carries out its effects.
//!
//! One task runs each machine. A poll, a call, the reading of a tree and a plan may be under way at
//! the same time; each is dropped with the task. Tasks share nothing that a slow machine could
//! block.

mod calls;
mod running;

use std::future::pending;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use api::access::{OwnedItem, Owners};
use futures_util::future::BoxFuture;
use model::image::ImageName;
use model::lock::locked;
use model::mdb::Machine;
use rpc::client::{Client, Peer};
use system::random::random;
use tokio::sync::{Notify, watch};

use crate::core::budget;
use crate::core::claims::{Claim, ClaimKind};
use crate::core::identity::IdentityVerdict;
use crate::core::required_image::required;
use crate::core::sub::{Context, Effect, Event, ImageState, Sub, SubOrder, TaskEffect};
use crate::core::tasks::TaskEvent;
use crate::runtime::claim_service::ClaimService;
use crate::runtime::clock::{Clock, jitter};
use crate::runtime::driver::calls::{
    call_sub, commit, plan, poll, read_leaving, read_resources, read_tree, scan, task_states,
};
use crate::runtime::driver::running::Running;
use crate::runtime::identities::Registration;
use crate::runtime::images::Images;
use crate::runtime::permits::{self, PermitNeeds};
use crate::runtime::shared::Shared;

/// The handle of the driver of one machine: what others read from it, and how they give it orders.
#[derive(Debug)]
pub struct Handle {
    sub: Mutex<Sub>,
    /// Effects of the state machine that the driver has not started to carry out.
    effects: Mutex<Vec<Effect>>,
    machine: watch::Sender<Arc<Machine>>,
    /// Notified when the driver must read its claims or its effects.
    nudge: Arc<Notify>,
    registration: Registration,
    pub permit_needs: Arc<PermitNeeds>,
    /// Notified when the state that callers wait for has changed.
    news: Notify,
    claimant: budget::ClaimantId,
    claim_service: Arc<ClaimService>,
}

/// The result of a step, beside its effects.
struct Stepped {
    /// When the driver must wake at the latest.
    wake: Option<Duration>,
    /// The answer, if the event was an order.
    answer: Option<bool>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.claim_service.leave(self.claimant);
    }
}

impl Handle {
    /// Returns who owns the machine according to the machine database.
    pub fn owned(&self) -> OwnedItem {
        let machine = self.machine.borrow();
        let owners = Owners::new(machine.owner_groups.clone(), machine.owner_users.clone());
        OwnedItem { what: "machine database".to_owned(), owners }
    }

    /// Creates the handle of `machine`; [`drive`] runs it.
    pub fn new(machine: Arc<Machine>, shared: &Shared) -> Arc<Self> {
        // Random high bits distinguish this run from others; the low bits count.
        let first_id = random() << 24;
        let mut sub = Sub::new(Arc::clone(&machine), first_id, shared.clock.now());
        if let Some(update) = shared.history.last_update(&machine.hostname) {
            sub.await_update_end(update);
        }
        if let Some(undone) = shared.history.undone(&machine.hostname) {
            sub.remember_undone(undone);
        }
        let registration = shared.identities.enter(&machine.hostname);
        let (claim_service, nudge) = (Arc::clone(&shared.claim_service), Arc::new(Notify::new()));
        let claimant = claim_service.enroll(Arc::clone(&nudge));
        Arc::new(Self {
            sub: Mutex::new(sub),
            effects: Mutex::default(),
            machine: watch::Sender::new(machine),
            nudge,
            registration,
            permit_needs: Arc::default(),
            news: Notify::new(),
            claimant,
            claim_service,
        })
    }

    /// Replaces the record of the machine.
    pub fn assign(&self, machine: Arc<Machine>) {
        self.machine.send_replace(machine);
    }

    /// Ignores poisoning: a panic in one state machine must not hide all others from the lists.
    fn locked(&self) -> MutexGuard<'_, Sub> {
        locked(&self.sub)
    }

    pub fn with_sub<T>(&self, read: impl FnOnce(&Sub) -> T) -> T {
        read(&self.locked())
    }

    /// Returns the address of the machine, if its record has one.
    pub fn address(&self, subd_port: u16) -> Option<SocketAddr> {
        let machine = self.machine.borrow();
        Some(SocketAddr::new(machine.ip_address?, machine.subd_port.unwrap_or(subd_port)))
    }

    /// Steps the state machine. Its effects wait in `effects` for the driver.
    fn step(&self, event: Event, shared: &Shared) -> Stepped {
        let sources = shared.sources.of(&self.machine.borrow().location);
        let stopped = shared.state.stopped_images.get();
        let context = Context { jitter: jitter(), sources: &sources, stopped: &stopped };
        let now = shared.clock.now();
        let mut sub = self.locked();
        let has_cache = matches!(&event, Event::Polled(_, reply) if reply.cache.is_some());
        let before = sub.watch_version();
        let mut answer = None;
        let effects = sub.step(now, event, &context).into_iter().filter(|effect| match effect {
            Effect::OrderAnswered(is_of_use) => {
                answer = Some(*is_of_use);
                false
            }
            _ => true,
        });
        let effects: Vec<Effect> = effects.collect();
        if has_cache {
            sub.share_cache(|cache| shared.caches.share(cache));
        }
        // Added while the state machine is locked, so that effects keep the order of the steps.
        locked(&self.effects).extend(effects);
        if sub.watch_version() != before {
            self.news.notify_waiters();
        }
        Stepped { wake: sub.wake_at(), answer }
    }

    /// Gives an operator's order to the state machine. Returns true if it had an effect. The driver
    /// carries out the effects.
    pub fn order(&self, order: SubOrder, shared: &Shared) -> bool {
        let answer = self.step(Event::Ordered(order), shared).answer;
        self.nudge.notify_one();
        answer.unwrap_or_default()
    }

    /// Waits until the watched state has another version than `have`.
    pub async fn news(&self, have: u64) {
        loop {
            let news = self.news.notified();
            tokio::pin!(news);
            // From here on no notification is missed.
            news.as_mut().enable();
            if self.with_sub(Sub::watch_version) != have {
                return;
            }
            news.await;
        }
    }

    /// Takes the effects that were not carried out yet.
    fn take_effects(&self) -> Vec<Effect> {
        std::mem::take(&mut *locked(&self.effects))
    }
}

/// Returns the address of the sub of `machine`.
pub fn peer_of(machine: &Machine, subd_port: u16) -> Peer {
    let port = machine.subd_port.unwrap_or(subd_port);
    Peer { host: machine.hostname.clone(), port, address: machine.ip_address }
}

/// Returns a client of the sub of `machine`.
pub fn client_of(machine: &Machine, shared: &Shared) -> Client {
    let peer = peer_of(machine, shared.subd_port);
    Client::sharing(peer, &shared.security, &shared.machine_memory)
}

/// What the driver is told from outside. It changes rarely.
struct Inputs {
    machines: watch::Receiver<Arc<Machine>>,
    image: WatchedImage,
    planned: WatchedImage,
    brakes: watch::Receiver<()>,
    recorder: watch::Receiver<Option<Arc<str>>>,
    verdicts: watch::Receiver<IdentityVerdict>,
    defaults: watch::Receiver<()>,
}

/// Which of the [`Inputs`] has changed.
enum Changed {
    /// The record of the machine, or one of its images.
    Target,
    Brake,
    Recorder,
    Verdict,
    Default,
}

impl Inputs {
    fn new(handle: &Handle, shared: &Shared) -> Self {
        let mut inputs = Self {
            machines: handle.machine.subscribe(),
            image: WatchedImage::default(),
            planned: WatchedImage::default(),
            brakes: shared.gate.watch_brake(),
            recorder: shared.history.watch_trouble(),
            verdicts: handle.registration.verdicts(),
            defaults: shared.default_image_changed.subscribe(),
        };
        inputs.brakes.mark_changed();
        if inputs.recorder.borrow().is_some() {
            inputs.recorder.mark_changed();
        }
        inputs
    }

    /// Waits until one has changed.
    async fn changed(&mut self) -> Changed {
        tokio::select! {
            Ok(()) = self.machines.changed() => Changed::Target,
            () = self.image.changed() => Changed::Target,
            () = self.planned.changed() => Changed::Target,
            Ok(()) = self.brakes.changed() => Changed::Brake,
            Ok(()) = self.recorder.changed() => Changed::Recorder,
            Ok(()) = self.verdicts.changed() => Changed::Verdict,
            Ok(()) = self.defaults.changed() => Changed::Default,
        }
    }
}

/// Drives one machine until the future is dropped. The address of the machine must not change.
pub async fn drive(handle: Arc<Handle>, shared: Arc<Shared>) {
    let mut inputs = Inputs::new(&handle, &shared);
    let mut driver = Driver::new(handle, shared);
    let (handle, client) = (Arc::clone(&driver.handle), driver.client.clone());
    let permits = permits::give(handle, client, Arc::clone(&driver.shared));
    tokio::pin!(permits);
    // First the state machine gets the default image and the record.
    let mut changed = Changed::Default;
    loop {
        let mut event = driver.changed(changed, &mut inputs);
        let input = inputs.changed();
        // It waits on while other events come: to register with all inputs anew for each event took
        // as long as the event.
        tokio::pin!(input);
        changed = loop {
            driver.step(event);
            event = tokio::select! {
                changed = &mut input => break changed,
                () = driver.handle.nudge.notified() => driver.nudged(),
                event = driver.running.next() => event,
                never = &mut permits => match never {},
                () = wake(driver.wake, driver.shared.clock) => Event::Wake,
            };
        };
    }
}

/// Waits until the clock shows `at`; forever if that is `None`.
async fn wake(at: Option<Duration>, clock: Clock) {
    match at {
        Some(at) => tokio::time::sleep_until(clock.moment(at).into()).await,
        None => pending().await,
    }
}

/// The subscription to an image of a machine.
#[derive(Default)]
struct WatchedImage {
    name: Option<ImageName>,
    state: Option<watch::Receiver<ImageState>>,
}

impl WatchedImage {
    /// Subscribes to the image `name` and returns its state.
    fn subscribe(&mut self, name: Option<ImageName>, images: &Images) -> ImageState {
        // An image that was not wanted for a moment has another sender now.
        let is_left = self.state.as_ref().is_none_or(|state| state.has_changed().is_err());
        if self.name != name || is_left {
            self.state = name.as_ref().and_then(|name| images.watch(name));
            self.name = name;
        }
        match (&self.name, &mut self.state) {
            (None, _) => ImageState::Undefined,
            (Some(_), Some(state)) => state.borrow_and_update().clone(),
            (Some(_), None) => ImageState::Missing("no machine needs this image any more".into()),
        }
    }

    /// Waits until the state changes; forever if there is no image, or nothing updates its state
    /// any more.
    async fn changed(&mut self) {
        let has_changed = match &mut self.state {
            Some(state) => state.changed().await.is_ok(),
            None => false,
        };
        if !has_changed {
            pending::<()>().await;
        }
    }
}

struct Driver {
    handle: Arc<Handle>,
    shared: Arc<Shared>,
    client: Client,
    machine: Arc<Machine>,
    running: Running<Event>,
    wake: Option<Duration>,
}

impl Driver {
    fn new(handle: Arc<Handle>, shared: Arc<Shared>) -> Self {
        let machine = Arc::clone(&handle.machine.borrow());
        Self {
            client: client_of(&machine, &shared),
            handle,
            shared,
            machine,
            running: Running::new(),
            wake: None,
        }
    }

    /// Returns the event of an input that has changed.
    fn changed(&mut self, changed: Changed, inputs: &mut Inputs) -> Event {
        match changed {
            Changed::Target => self.assigned(inputs),
            Changed::Brake => {
                let brake = self.shared.gate.brake();
                Event::Brake(brake.as_ref().map(|brake| brake.reason.as_str().into()))
            }
            Changed::Recorder => Event::HistoryFailing(inputs.recorder.borrow_and_update().clone()),
            Changed::Verdict => Event::IdentityJudged(inputs.verdicts.borrow_and_update().clone()),
            Changed::Default => {
                self.step(Event::DefaultImage(self.shared.default_image()));
                self.assigned(inputs)
            }
        }
    }

    /// Takes the record of the machine, and subscribes to its images.
    fn assigned(&mut self, inputs: &mut Inputs) -> Event {
        let machine = Arc::clone(&inputs.machines.borrow_and_update());
        self.machine = Arc::clone(&machine);
        let default = self.shared.default_image();
        let rollback = self.shared.state.rollbacks.get().of(&machine, default.as_deref()).cloned();
        let name = required(&machine, default.as_deref(), rollback.as_deref());
        let image = inputs.image.subscribe(name, &self.shared.images);
        let planned = inputs.planned.subscribe(machine.planned(), &self.shared.images);
        Event::Assigned { machine, image, planned, rollback }
    }

    /// Reads the answers to the machine's claims, and what is known of its computed files: either
    /// may have changed.
    fn nudged(&mut self) -> Event {
        for purpose in [ClaimKind::Update, ClaimKind::Fetch] {
            if let Some(answer) = self.shared.claim_service.answer(self.handle.claimant, purpose) {
                self.step(Event::Claimed(purpose, answer));
            }
        }
        Event::ComputedKnown(Box::new(self.shared.computed.known(&self.machine.hostname)))
    }

    fn step(&mut self, event: Event) {
        let is_of_tasks = matches!(event, Event::TasksTold(..));
        let is_of_resources = matches!(&event, Event::ResourcesRead(_, told) if told.is_ok());
        self.wake = self.handle.step(event, &self.shared).wake;
        if is_of_tasks {
            let has_any = self.handle.with_sub(|sub| sub.tasks_said_at().is_some());
            self.handle.permit_needs.set_tasks(has_any);
        }
        if is_of_resources {
            let (has_any, is_news) = self.handle.with_sub(Sub::has_fleet_resources);
            self.handle.permit_needs.set_resources(has_any, is_news);
        }
        for effect in self.handle.take_effects() {
            self.carry_out(effect);
        }
    }

    /// Makes a claim. The future reads the answer, if there will be one.
    fn claim(&self, claim: Claim) -> Option<BoxFuture<'static, Event>> {
        let (shared, claimant) = (Arc::clone(&self.shared), self.handle.claimant);
        let purpose = match &claim {
            Claim::Update(_) => Some(ClaimKind::Update),
            Claim::Fetch(_) => Some(ClaimKind::Fetch),
            Claim::UnderWay(_) | Claim::Blocked(_) | Claim::Health { .. } => None,
        };
        shared.claim_service.claim(claimant, claim);
        let purpose = purpose?;
        Some(Box::pin(async move {
            let answer = shared.claim_service.answer(claimant, purpose);
            answer.map_or(Event::Wake, |answer| Event::Claimed(purpose, answer))
        }))
    }

    fn carry_out_task(&mut self, client: Client, effect: TaskEffect) {
        let hostname = &self.machine.hostname;
        match effect {
            TaskEffect::Ask(request_id, request) => self.running.push(Box::pin(async move {
                let told = task_states(&client, &request).await;
                Event::TasksTold(request_id, Box::new(told))
            })),
            TaskEffect::Tell(TaskEvent { name, text }) => {
                tracing::info!(host = %hostname, event = name, "{text}");
                self.shared.history.task(hostname, name, text);
            }
            TaskEffect::Resume(tasks) => {
                let names: Vec<&str> = tasks.iter().map(|(name, _)| name.as_str()).collect();
                tracing::info!(
                    host = %hostname,
                    tasks = names.join(" "),
                    "suspended tasks are resumed: it is back"
                );
                let (orders, shared) = (Arc::clone(&self.shared.task_orders), &self.shared);
                let handle = Arc::clone(&self.handle);
                let resumed = orders.resume(handle, hostname.clone(), tasks, Arc::clone(shared));
                self.running.push(Box::pin(async move {
                    resumed.await;
                    Event::Wake
                }));
            }
            TaskEffect::OrderEnded(task, number) => {
                let orders = Arc::clone(&self.shared.task_orders);
                let ended = orders.ended(hostname.clone(), task, number);
                self.running.push(Box::pin(async move {
                    ended.await;
                    Event::Wake
                }));
            }
        }
    }

    fn carry_out(&mut self, effect: Effect) {
        let (client, shared) = (self.client.clone(), Arc::clone(&self.shared));
        let future: BoxFuture<'static, Event> =
            match effect {
                Effect::Poll(request_id, request) => {
                    let machine = Arc::clone(&self.machine);
                    Box::pin(poll(client, shared, machine, request_id, request))
                }
                Effect::ReadTree(request_id, root, former) => {
                    Box::pin(read_tree(client, shared, request_id, root, former))
                }
                Effect::ReadFormer(request_id, name) => Box::pin(async move {
                    Event::FormerRead(request_id, shared.images.former(&name).await)
                }),
                Effect::ReadLeaving(id, image, former) => {
                    Box::pin(read_leaving(shared, id, image, former))
                }
                Effect::ReadResources(id, request) => Box::pin(read_resources(client, id, request)),
                Effect::WantComputed(machine, image) => {
                    return shared.computed.want(&machine, &image, &self.handle.nudge);
                }
                Effect::Task(effect) => return self.carry_out_task(client, effect),
                Effect::ResourceOutputs(outputs) => {
                    return shared.computed.take_outputs(&self.machine.hostname, &outputs);
                }
                Effect::ReportContent(round, report) => {
                    return shared.computed.report(&self.machine.hostname, round, report);
                }
                Effect::Plan(request_id, job) => Box::pin(plan(shared, request_id, job)),
                Effect::Call(request_id, call) => {
                    tracing::debug!(host = %self.machine.hostname, "{}", call.name());
                    Box::pin(call_sub(client, shared, request_id, call))
                }
                Effect::Commit(request_id, ordered) => {
                    tracing::debug!(host = %self.machine.hostname, "commit");
                    let (host, handle) = (self.machine.hostname.clone(), Arc::clone(&self.handle));
                    Box::pin(commit(client, shared, request_id, host, handle, ordered))
                }
                Effect::ReportIdentity(news) => {
                    let (host, registration) = (&self.machine.hostname, &self.handle.registration);
                    return self.shared.identities.take_report(host, registration, news);
                }
                Effect::Scan(request_id, have) => Box::pin(scan(client, request_id, have)),
                Effect::Claim(claim) => match self.claim(claim) {
                    Some(answering) => answering,
                    None => return,
                },
                Effect::Release(what) => {
                    return shared.claim_service.release(self.handle.claimant, what);
                }
                Effect::ActivityKnown => {
                    return shared.claim_service.activity_known(self.handle.claimant);
                }
                Effect::StatusChanged(status, detail) => {
                    tracing::info!(host = %self.machine.hostname, %status, "{detail}");
                    shared.history.status(&self.machine.hostname, status, &detail);
                    return;
                }
                // Removed by [`Handle::step`].
                Effect::OrderAnswered(_) => return,
                Effect::UpdateEnded(update_id, outcome, triggers) => {
                    let host = &self.machine.hostname;
                    shared.history.ended(host, update_id, outcome, &triggers);
                    return;
                }
            };
        self.running.push(future);
    }
}

#[cfg(test)]
pub(crate) mod tests;
