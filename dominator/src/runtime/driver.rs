//! Carries out what the state machine of one machine decides.
//!
//! One task for each machine owns all that goes on with it: a poll, a call, the reading of a tree
//! and a plan may be under way at the same time, and each is dropped with the task. Tasks share
//! nothing that a slow machine could hold.

mod orders;

use api::access::{Owned, Owners};
use rpc::tls::Security;
use std::future::pending;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use api::dominator::orders::DefaultImage;
use api::fault::FaultCode;
use api::subd::{
    Cleanup, Commit, CommitRequest, Fetch, OfferImage, Poll, PollRequest, Prepare, SetConfiguration,
};
use futures_util::StreamExt as _;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use model::image::ImageName;
use model::mdb::Machine;
use model::object::ObjectId;
use model::report::report;
use rpc::audit_log::AuditLog;
use rpc::client::{CallError, Client, Peer};
use tokio::sync::{Notify, watch};

use crate::core::budget;
use crate::core::changes::Ordered;
use crate::core::claims::{Claim, ClaimAnswer, ClaimKind};
use crate::core::default_image::required;
use crate::core::sources::Sources;
use crate::core::sub::{
    Call, Context, Effect, Event, Failure, FailureKind, ImageState, Sub, Ticket,
};
use crate::runtime::claim_service::ClaimService;
use crate::runtime::clock::Clock;
use crate::runtime::commit_gate::{Closed, CommitGate};
use crate::runtime::counters::Counters;
use crate::runtime::history::History;
use crate::runtime::identities::{Identities, Registration};
use crate::runtime::images::Images;
use api::planning::{PlanJob, Planned};
use rpc::trees::{ReadError, Reader};
use system::{clock::wall, random::random};

/// How much longer than it asked for the answer to a poll may take.
const POLL_SLACK: Duration = Duration::from_secs(30);

/// How long a sub may take to accept a call.
const ACCEPT_LIMIT: Duration = Duration::from_secs(30);

/// How long a sub may take to accept a plan, which may be large.
const PREPARE_LIMIT: Duration = Duration::from_secs(120);

/// What all drivers share.
#[derive(Debug)]
pub struct Shared {
    pub security: Security,
    pub clock: Clock,
    pub reader: Arc<Reader>,
    pub images: Arc<Images>,
    pub gate: CommitGate,
    pub history: History,
    pub audit: AuditLog,
    pub identities: Arc<Identities>,
    /// The image of machines whose record names none.
    pub default_image: watch::Sender<Option<Arc<DefaultImage>>>,
    pub metrics: Counters,
    pub claim_service: Arc<ClaimService>,
    /// Where subs fetch from.
    pub sources: Sources,
    /// The port of subs whose record names none.
    pub subd_port: u16,
}

impl Shared {
    /// Makes the plan for a machine, or returns one that was made for an equal machine.
    ///
    /// # Errors
    ///
    /// Why no plan can be made, in words.
    pub async fn planned(self: &Arc<Self>, job: PlanJob) -> Result<Planned, String> {
        if let Some(planned) = self.images.plans.find(&job) {
            return Ok(planned);
        }
        let shared = Arc::clone(self);
        let planned = self.reader.compute(move || {
            // Another may have made the same while this one waited for its turn.
            if let Some(planned) = shared.images.plans.find(&job) {
                return Ok(planned);
            }
            let started = std::time::Instant::now();
            let planned = job.run();
            shared.metrics.planned(started.elapsed());
            if let Ok(planned) = &planned {
                shared.images.plans.keep(&job, planned);
            }
            planned
        });
        match planned.await {
            Ok(Ok(planned)) => Ok(planned),
            Ok(Err(error)) => Err(report(&error)),
            Err(error) => Err(error.text()),
        }
    }
}

/// The handle of the driver of one machine.
#[derive(Debug)]
pub struct Handle {
    sub: Mutex<Sub>,
    /// What the state machine decided and the driver has not begun to carry out.
    effects: Mutex<Vec<Effect>>,
    machine: watch::Sender<Arc<Machine>>,
    /// Notified when the driver has something to look at besides its machine.
    nudge: Arc<Notify>,
    registration: Registration,
    /// Notified when what watchers are told has changed.
    news: Notify,
    /// The number under which the claim service knows the machine.
    claimant: budget::ClaimantId,
    claim_service: Arc<ClaimService>,
}

/// What follows from one step, beside effects.
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
    /// Who owns the machine, by the machine database.
    #[must_use]
    pub fn owned(&self) -> Owned {
        let machine = self.machine.borrow();
        let owners = Owners::new(machine.owner_groups.clone(), machine.owner_users.clone());
        Owned { what: "machine database".to_owned(), owners }
    }

    /// Creates the handle of `machine`; [`drive`] runs it.
    #[must_use]
    pub fn new(machine: Arc<Machine>, shared: &Shared) -> Arc<Self> {
        // Some random bits tell this run from others; the rest counts.
        let first_id = random() << 24;
        let mut sub = Sub::new(Arc::clone(&machine), first_id, shared.clock.now());
        if let Some(update) = shared.history.last_update(&machine.hostname) {
            sub.recall(update);
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
        self.sub.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn look<T>(&self, look: impl FnOnce(&Sub) -> T) -> T {
        look(&self.locked())
    }

    /// Returns the address of the machine, if its record has one.
    #[must_use]
    pub fn address(&self, subd_port: u16) -> Option<SocketAddr> {
        let machine = self.machine.borrow();
        Some(SocketAddr::new(machine.ip_address?, machine.subd_port.unwrap_or(subd_port)))
    }

    /// Steps the state machine. Its effects wait in `effects` for the driver.
    fn step(&self, event: Event, shared: &Shared) -> Stepped {
        let jitter = u16::try_from(random() % 1_000).unwrap_or_default();
        let sources = shared.sources.of(&self.machine.borrow().location);
        let context = Context { jitter, sources: &sources };
        let now = shared.clock.now();
        let mut sub = self.locked();
        let before = sub.watched_version();
        let mut answer = None;
        let effects = sub.step(now, event, &context).into_iter().filter(|effect| match effect {
            Effect::OrderAnswered(is_of_use) => {
                answer = Some(*is_of_use);
                false
            }
            _ => true,
        });
        // Added while the state machine is locked, so that effects keep the order of the steps.
        self.effects.lock().unwrap_or_else(PoisonError::into_inner).extend(effects);
        if sub.watched_version() != before {
            self.news.notify_waiters();
        }
        Stepped { wake: sub.wake_at(), answer }
    }

    /// Takes the effects that nobody has carried out yet.
    fn take_effects(&self) -> Vec<Effect> {
        std::mem::take(&mut *self.effects.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Where the sub of `machine` is.
#[must_use]
pub fn peer_of(machine: &Machine, subd_port: u16) -> Peer {
    let port = machine.subd_port.unwrap_or(subd_port);
    Peer { host: machine.hostname.clone(), port, address: machine.ip_address }
}

/// Drives one machine until the future is dropped. The address of the machine must not change.
pub async fn drive(handle: Arc<Handle>, shared: Arc<Shared>) {
    let mut machines = handle.machine.subscribe();
    let mut brakes = shared.gate.watch_brake();
    brakes.mark_changed();
    let mut recorder = shared.history.watch_trouble();
    if recorder.borrow().is_some() {
        recorder.mark_changed();
    }
    let mut verdicts = handle.registration.verdicts();
    let mut driver = Driver::new(handle, shared);
    let mut defaults = driver.shared.default_image.subscribe();
    let default = defaults.borrow_and_update().clone();
    driver.step(Event::DefaultImage(default));
    let mut event = driver.assigned(Arc::clone(&machines.borrow_and_update()));
    loop {
        driver.step(event);
        event = tokio::select! {
            Ok(()) = machines.changed() => {
                let machine = Arc::clone(&machines.borrow_and_update());
                driver.assigned(machine)
            }
            () = driver.image.changed() => driver.assigned(Arc::clone(&driver.machine)),
            () = driver.planned.changed() => driver.assigned(Arc::clone(&driver.machine)),
            Ok(()) = brakes.changed() => {
                let brake = brakes.borrow_and_update();
                Event::Brake(brake.as_ref().map(|brake| brake.reason.as_str().into()))
            }
            Ok(()) = recorder.changed() => {
                Event::HistoryTrouble(recorder.borrow_and_update().clone())
            }
            Ok(()) = verdicts.changed() => {
                Event::IdentityJudged(verdicts.borrow_and_update().clone())
            }
            Ok(()) = defaults.changed() => {
                let default = defaults.borrow_and_update().clone();
                driver.step(Event::DefaultImage(default));
                driver.assigned(Arc::clone(&driver.machine))
            }
            () = driver.handle.nudge.notified() => driver.nudged(),
            Some(event) = driver.running.next() => event,
            () = wake(driver.wake, driver.shared.clock) => Event::Wake,
        };
    }
}

/// Waits until the clock shows `at`; for ever if there is no such time.
async fn wake(at: Option<Duration>, clock: Clock) {
    match at {
        Some(at) => tokio::time::sleep_until(clock.moment(at).into()).await,
        None => pending().await,
    }
}

/// An image that is watched for a machine.
#[derive(Default)]
struct WatchedImage {
    name: Option<ImageName>,
    state: Option<watch::Receiver<ImageState>>,
}

impl WatchedImage {
    /// The state of the image called `name`, which is watched from now on.
    fn look(&mut self, name: Option<ImageName>, images: &Images) -> ImageState {
        // A name that was not wanted for a moment is looked for anew.
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

    /// Waits until the state changes; for ever if nothing is watched, or nobody will change it any
    /// more.
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
    image: WatchedImage,
    planned: WatchedImage,
    running: FuturesUnordered<BoxFuture<'static, Event>>,
    wake: Option<Duration>,
}

impl Driver {
    fn new(handle: Arc<Handle>, shared: Arc<Shared>) -> Self {
        let machine = Arc::clone(&handle.machine.borrow());
        Self {
            client: Client::new(peer_of(&machine, shared.subd_port), &shared.security),
            handle,
            shared,
            machine,
            image: WatchedImage::default(),
            planned: WatchedImage::default(),
            running: FuturesUnordered::new(),
            wake: None,
        }
    }

    /// Takes a new record of the machine, and subscribes to its images.
    fn assigned(&mut self, machine: Arc<Machine>) -> Event {
        self.machine = Arc::clone(&machine);
        let name = required(&machine, self.shared.default_image.borrow().as_deref());
        let image = self.image.look(name, &self.shared.images);
        let planned = self.planned.look(machine.planned(), &self.shared.images);
        Event::Assigned { machine, image, planned }
    }

    /// Reads the answers to the machine's claims, which may have changed.
    fn nudged(&mut self) -> Event {
        for purpose in [ClaimKind::Update, ClaimKind::Fetch] {
            if let Some(answer) = self.shared.claim_service.answer(self.handle.claimant, purpose) {
                self.step(Event::Claimed(purpose, answer));
            }
        }
        Event::Wake
    }

    fn step(&mut self, event: Event) {
        self.wake = self.handle.step(event, &self.shared).wake;
        for effect in self.handle.take_effects() {
            self.carry_out(effect);
        }
    }

    fn carry_out(&mut self, effect: Effect) {
        let (client, shared) = (self.client.clone(), Arc::clone(&self.shared));
        let future: BoxFuture<'static, Event> = match effect {
            Effect::Poll(ticket, request) => Box::pin(poll(client, shared, ticket, request)),
            Effect::ReadTree(ticket, root) => Box::pin(read_tree(client, shared, ticket, root)),
            Effect::Plan(ticket, job) => Box::pin(plan(shared, ticket, job)),
            Effect::Call(ticket, call) => {
                tracing::debug!(host = %self.machine.hostname, "{}", call.name());
                Box::pin(call_sub(client, ticket, call))
            }
            Effect::Commit(ticket, ordered) => {
                tracing::debug!(host = %self.machine.hostname, "commit");
                let (host, handle) = (self.machine.hostname.clone(), Arc::clone(&self.handle));
                Box::pin(async move {
                    match commit(&client, &shared, &host, &handle, ordered).await {
                        Ok(()) => Event::Accepted(ticket),
                        Err(failure) => Event::CallFailed(ticket, failure),
                    }
                })
            }
            Effect::ReportIdentity(news) => {
                let hostname = &self.machine.hostname;
                return self.shared.identities.hear(hostname, &self.handle.registration, news);
            }
            Effect::Scan(ticket, have) => Box::pin(orders::scan(client, ticket, have)),
            Effect::Claim(claim) => {
                let claimant = self.handle.claimant;
                let purpose = match &claim {
                    Claim::Update(_) => ClaimKind::Update,
                    Claim::Fetch(_) => ClaimKind::Fetch,
                    Claim::UnderWay(_) => return shared.claim_service.claim(claimant, claim),
                };
                shared.claim_service.claim(claimant, claim);
                // What is true when it is looked at, not now.
                Box::pin(async move {
                    let answer = shared.claim_service.answer(claimant, purpose);
                    answer.map_or(Event::Wake, |answer| Event::Claimed(purpose, answer))
                })
            }
            Effect::Release(what) => {
                return shared.claim_service.release(self.handle.claimant, what);
            }
            Effect::ActivityKnown => return shared.claim_service.met(self.handle.claimant),
            Effect::StatusChanged(status, detail) => {
                tracing::info!(host = %self.machine.hostname, %status, "{detail}");
                shared.history.status(&self.machine.hostname, status, &detail);
                return;
            }
            // Taken out by [`Handle::step`].
            Effect::OrderAnswered(_) => return,
            Effect::UpdateEnded(update_id, outcome) => {
                shared.history.ended(&self.machine.hostname, update_id, outcome);
                return;
            }
        };
        self.running.push(future);
    }
}

async fn poll(client: Client, shared: Arc<Shared>, ticket: Ticket, request: PollRequest) -> Event {
    let limit = Duration::from_millis(request.wait_ms.into()) + POLL_SLACK;
    match client.call_within::<Poll>(&request, limit).await {
        Ok(reply) => {
            shared.metrics.polled(true);
            Event::Polled(ticket, Box::new(reply))
        }
        Err(error) => {
            shared.metrics.polled(false);
            Event::PollFailed(ticket, failure_of(&error))
        }
    }
}

async fn read_tree(client: Client, shared: Arc<Shared>, ticket: Ticket, root: ObjectId) -> Event {
    match shared.reader.from_sub(&client, root).await {
        Ok(tree) => Event::TreeRead(ticket, tree),
        Err(error) => {
            let kind = match &error {
                ReadError::Call { source } => failure_of(source).kind,
                ReadError::Changed => FailureKind::Stale,
                _ => FailureKind::Garbage,
            };
            Event::TreeFailed(ticket, Failure { kind, text: error.text() })
        }
    }
}

async fn plan(shared: Arc<Shared>, ticket: Ticket, job: Box<PlanJob>) -> Event {
    Event::Planned(ticket, shared.planned(*job).await.map(Arc::new))
}

async fn call_sub(client: Client, ticket: Ticket, call: Call) -> Event {
    let result = match &call {
        Call::SetConfiguration(configuration) => {
            client.call_within::<SetConfiguration>(configuration, ACCEPT_LIMIT).await
        }
        Call::Fetch(request) => client.call_within::<Fetch>(request, ACCEPT_LIMIT).await,
        Call::Prepare(request) => client.call_within::<Prepare>(request, PREPARE_LIMIT).await,
        Call::Offer(request) => client.call_within::<OfferImage>(request, ACCEPT_LIMIT).await,
        Call::Cleanup(request) => client.call_within::<Cleanup>(request, ACCEPT_LIMIT).await,
    };
    match result {
        Ok(_done) => Event::Accepted(ticket),
        Err(error) => Event::CallFailed(ticket, failure_of(&error)),
    }
}

/// Puts on record what a Commit orders, and sends it.
async fn commit(
    client: &Client,
    shared: &Shared,
    host: &str,
    handle: &Handle,
    ordered: Box<Ordered>,
) -> Result<(), Failure> {
    if shared.gate.brake().is_some() {
        return Err(braked("the brake was pulled"));
    }
    if shared.claim_service.answer(handle.claimant, ClaimKind::Update) != Some(ClaimAnswer::Granted)
    {
        return Err(braked("leave was taken back"));
    }
    let update_id = ordered.update_id;
    let recorded = shared.history.order(host, ordered, &shared.images, &shared.reader).await;
    recorded.map_err(|error| Failure { kind: FailureKind::Unsent, text: error.to_string() })?;
    // Boxed, because the future of the gate contains it.
    let commit = Box::pin(async {
        // The disk takes its time: whatever was so before may be otherwise by now.
        if shared.identities.is_doubted(host) {
            return Err(braked("it may be another machine than the one that is meant"));
        }
        if !handle.look(|sub| sub.still_orders(update_id)) {
            return Err(braked("something else is wanted now"));
        }
        if !shared.claim_service.begin(handle.claimant) {
            return Err(braked("leave was taken back"));
        }
        let sent = client.call_within::<Commit>(&CommitRequest { update_id }, ACCEPT_LIMIT).await;
        sent.map(|_done| ()).map_err(|error| failure_of(&error))
    });
    let closed = match shared.gate.pass(&client.peer().host, wall(), commit).await {
        Ok(result) => return result,
        Err(closed) => closed,
    };
    // Whoever closed the gate waits for this Commit and runs next, even on this thread.
    tokio::task::yield_now().await;
    match closed {
        Closed::Pause => Err(braked("the machine was paused")),
        Closed::Brake => Err(braked("the brake was pulled")),
    }
}

fn braked(why: &str) -> Failure {
    Failure { kind: FailureKind::Braked, text: why.to_owned() }
}

/// What the state machine makes of a failed call.
fn failure_of(error: &CallError) -> Failure {
    let kind = match error {
        CallError::Connect { .. } | CallError::TimedOut { .. } | CallError::Lost { .. } => {
            FailureKind::Unreachable
        }
        CallError::Fault { source, .. } => match source.code {
            FaultCode::Busy | FaultCode::Unavailable => FailureKind::Busy,
            FaultCode::Held => FailureKind::Held,
            FaultCode::Untrusted => FailureKind::Untrusted,
            FaultCode::NoMethod => FailureKind::NoMethod,
            FaultCode::Stale => FailureKind::Stale,
            FaultCode::NotFound => FailureKind::NotFound,
            FaultCode::NoSpace => FailureKind::NoSpace,
            _ => FailureKind::Refused,
        },
        _ => FailureKind::Garbage,
    };
    Failure { kind, text: report(error) }
}

#[cfg(test)]
pub(crate) mod tests;
