//! Simulates a dominator and its fleet in virtual time: the real state machines and models of subs,
//! with a network that loses, repeats and delays messages.
//!
//! All events are in one queue, ordered by time and then by number, and all random numbers come
//! from one generator: a seed gives the same run every time.

mod claims;
mod computed;
mod disk;
mod troubles;
mod undone;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use api::dominator::Status;
use api::dominator::events::ChangeReason;
use api::dominator::orders::UpdatePause;
use api::subd::{Limits, PollReply, PollRequest, UpdateOutcome};
use dominator::core::changes::{OrderedUpdate, PreviousImage, changes};
use dominator::core::claims::{ClaimKind, ClaimSettings, ClaimTable};
use dominator::core::identity::{IdentityReport, IdentityTable, IdentityVerdict};
use dominator::core::sub::{
    Call, Context, Effect, Event, Failure, FailureKind, ImageState, RequestId, Sub, SubOrder,
    UndoneUpdate, View,
};
use dominator::core::timing::{Now, REDIALS_PER_SECOND};
use model::image::ImageName;
use model::image::required::RequiredImage;
use model::mdb::Machine;
use model::tree::{Time, Tree};

pub use claims::no_limits;
use claims::{NEVER, Tally};
pub use computed::SOURCE;
use computed::{Filegen, FilegenEvent};
use disk::Disk;

use crate::model::{Answer, Model, Request, Work, failure};
use testing::random::Random;
use testing::sub_model::Task;
use troubles::{Troubles, drifted};

/// The timeout of a call.
const CALL_LIMIT: Duration = Duration::from_secs(30);

/// The timeout of a poll, after the time that the sub may wait.
const POLL_SLACK: Duration = Duration::from_secs(30);

/// How often faults happen.
#[derive(Clone, Copy)]
pub struct Faults {
    /// The percentage of messages that get lost.
    pub lose: u64,
    /// The percentage of messages that arrive twice.
    pub repeat: u64,
    /// The longest delay of a message, in milliseconds.
    pub delay_max: u64,
    /// The mean time between troubles, in milliseconds.
    pub trouble_every: u64,
}

/// No faults.
pub const NONE: Faults = Faults { lose: 0, repeat: 0, delay_max: 5, trouble_every: 0 };

enum Happening {
    ToSub { host: usize, run: u64, request_id: RequestId, message: Box<Message> },
    ToDominator { host: usize, run: u64, event: Box<Event> },
    GiveUp { host: usize, run: u64, request_id: RequestId },
    PollWaited { host: usize, instance: u64, run: u64, request_id: RequestId },
    Wake { host: usize, run: u64, at: Duration },
    IdentityJudged { host: usize, run: u64, verdict: IdentityVerdict },
    Claimed { host: usize, run: u64, purpose: ClaimKind },
    Recorded { host: usize, run: u64, request_id: RequestId, ordered: Box<OrderedUpdate> },
    Grant { run: u64 },
    Work { host: usize, instance: u64, work: Work },
    StartSub { host: usize },
    StartDominator,
    ImageLoaded { run: u64 },
    Filegen { run: u64, event: Box<FilegenEvent> },
    Trouble,
}

enum Message {
    Poll(PollRequest),
    Ask(Request),
}

/// The driver of one machine.
struct Driver {
    sub: Sub,
    /// Open calls, with whether they are polls.
    open: BTreeMap<RequestId, bool>,
    wake: Option<Duration>,
    /// The registration in the identity table.
    registration: u64,
}

/// A simulated dominator with its fleet.
pub struct World {
    pub models: Vec<Model>,
    pub trace: String,
    /// False for large fleets, whose trace would fill the memory.
    pub is_traced: bool,
    pub effects: BTreeMap<&'static str, u64>,
    pub brake: Option<Arc<str>>,
    pub faults: Faults,
    pub claims: ClaimTable,
    /// Counts of updates, independent of the budgets under test.
    pub tally: Tally,
    settings: ClaimSettings,
    /// The time of the next decision about claims.
    granting: Option<Duration>,
    now: Duration,
    queue: BTreeMap<(Duration, u64), Happening>,
    sequence: u64,
    /// When the next machine that does not answer is dialled.
    next_redial: Duration,
    random: Random,
    run: u64,
    drivers: Vec<Option<Driver>>,
    machines: Vec<Arc<Machine>>,
    /// The number of machines by location.
    population: BTreeMap<String, u32>,
    images: BTreeMap<String, Arc<RequiredImage>>,
    images_loaded: bool,
    identities: IdentityTable,
    updating: BTreeSet<usize>,
    /// The limits of each sub.
    limits: Vec<Limits>,
    /// Updates that failed their health check and that an operator retries.
    retried: BTreeSet<(usize, u64)>,
    /// The last recorded update of each machine, with its outcome.
    pub ledger: BTreeMap<usize, (u64, Option<UpdateOutcome>)>,
    /// The image of the last update that was recorded; `None` for a repair.
    ordered: BTreeMap<usize, Option<ImageName>>,
    /// The updates that failed their health checks.
    undone: BTreeMap<usize, UndoneUpdate>,
    troubles: Troubles,
    filegen: Filegen,
    pub disk: Disk,
    /// The pauses that operators ordered, which survive a crash of the dominator.
    pauses: Vec<Option<Arc<UpdatePause>>>,
    /// The difference between the time of day and the time of the simulation, in seconds.
    clock_error: i64,
}

impl World {
    pub fn new(
        seed: u64,
        trees: Vec<Tree>,
        images: Vec<Arc<RequiredImage>>,
        faults: Faults,
    ) -> Self {
        let names: Vec<String> = images.iter().map(|image| image.name().to_string()).collect();
        let mut random = Random::new(seed);
        let machines = (0..trees.len())
            .map(|host| Arc::new(machine(host, &names[random.below(2) as usize])))
            .collect::<Vec<_>>();
        let mut population = BTreeMap::new();
        for machine in &machines {
            *population.entry(machine.location.clone()).or_default() += 1;
        }
        let limits = vec![Limits::default(); trees.len()];
        let mut world = Self {
            drivers: trees.iter().map(|_| None).collect(),
            models: trees.into_iter().map(Model::new).collect(),
            trace: String::new(),
            is_traced: true,
            effects: BTreeMap::new(),
            brake: None,
            faults,
            claims: ClaimTable::new(no_limits(), Vec::new(), NEVER),
            tally: Tally::default(),
            settings: no_limits(),
            granting: None,
            now: Duration::ZERO,
            queue: BTreeMap::new(),
            sequence: 0,
            next_redial: Duration::ZERO,
            random,
            run: 0,
            machines,
            population,
            images: names.into_iter().zip(images).collect(),
            images_loaded: false,
            identities: IdentityTable::default(),
            updating: BTreeSet::new(),
            limits,
            retried: BTreeSet::new(),
            ledger: BTreeMap::new(),
            ordered: BTreeMap::new(),
            undone: BTreeMap::new(),
            troubles: Troubles::default(),
            filegen: Filegen::default(),
            disk: Disk::default(),
            pauses: Vec::new(),
            clock_error: 0,
        };
        world.name_machines();
        world.pauses = vec![None; world.models.len()];
        for host in 0..world.models.len() {
            let at = Duration::from_millis(world.random.below(3_000));
            world.schedule(at, Happening::StartSub { host });
        }
        world.schedule(Duration::ZERO, Happening::StartDominator);
        if faults.trouble_every > 0 {
            world.schedule(Duration::from_secs(5), Happening::Trouble);
        }
        world
    }

    /// Runs the simulation until `until`.
    pub fn run_until(&mut self, until: Duration) {
        while let Some(entry) = self.queue.first_entry()
            && entry.key().0 <= until
        {
            let ((at, _), happening) = entry.remove_entry();
            self.now = at;
            self.happen(happening);
        }
        self.now = until;
    }

    /// Runs the simulation until all machines have converged. Returns the time; `None` if they have
    /// not by `until`.
    pub fn run_until_converged(&mut self, until: Duration) -> Option<Duration> {
        while self.now < until {
            self.run_until((self.now + Duration::from_secs(1)).min(until));
            if self.is_converged() {
                return Some(self.now);
            }
        }
        None
    }

    pub fn is_converged(&self) -> bool {
        (0..self.models.len()).all(|host| self.is_host_converged(host))
    }

    pub fn is_host_converged(&self, host: usize) -> bool {
        let image = &self.images[&self.machines[host].required_image];
        let model = &self.models[host];
        if self.status(host) != Some(Status::Synced) || model.sub.limits != self.limits[host] {
            return false;
        }
        let seen = model.seen(&image.scan).0;
        seen == self.required_tree(host, image, &seen)
    }

    pub fn status(&self, host: usize) -> Option<Status> {
        self.drivers[host].as_ref().map(|driver| driver.sub.status())
    }

    /// Describes the status of a machine, for a failed test.
    pub fn describe(&self, host: usize) -> String {
        let detail = self.drivers[host].as_ref().map(|driver| driver.sub.detail().to_owned());
        format!("host {host}: {:?} {detail:?}", self.status(host))
    }

    pub fn assign(&mut self, host: usize, image: &str) {
        self.note(host, &format!("must have {image}"));
        let machine = Machine::clone(&self.machines[host]);
        self.machines[host] = Arc::new(Machine { required_image: image.to_owned(), ..machine });
        let event = self.assignment(host);
        self.step(host, event);
    }

    /// Sets the planned image of a machine.
    pub fn plan_ahead(&mut self, host: usize, image: &str) {
        self.note(host, &format!("will get {image}"));
        let machine = Machine::clone(&self.machines[host]);
        self.machines[host] = Arc::new(Machine { planned_image: image.to_owned(), ..machine });
        let event = self.assignment(host);
        self.step(host, event);
    }

    /// Sets or clears a limit of a sub, as an operator.
    fn configure(&mut self, host: usize, network_percent: Option<u8>) {
        self.note(host, &format!("may take {network_percent:?} % of the network"));
        self.limits[host].network_percent = network_percent;
        self.step(host, Event::Ordered(SubOrder::SetLimits(self.limits[host])));
    }

    pub fn pull_brake(&mut self, brake: Option<Arc<str>>) {
        self.brake = brake;
        for host in 0..self.models.len() {
            self.step(host, Event::Brake(self.brake.clone()));
        }
    }

    /// Retries the failed update of a machine, as an operator.
    pub fn retry(&mut self, host: usize) {
        self.note_retry(host);
        self.note(host, "is tried again");
        self.step(host, Event::Ordered(SubOrder::Retry));
    }

    /// Pauses the updates of a machine for `seconds` by the time of day, or resumes them for 0, as
    /// an operator.
    pub fn pause(&mut self, host: usize, seconds: i64) {
        let since = self.time().wall;
        let until = Time { seconds: since.seconds + seconds, ..since };
        let (reason, who) = ("works".to_owned(), "ann".to_owned());
        let pause = (seconds > 0).then_some(UpdatePause { until, reason, who, since });
        self.note(host, &format!("is told to rest for {seconds} s"));
        self.pauses[host] = pause.map(Arc::new);
        self.step(host, Event::Ordered(SubOrder::Pause(self.pauses[host].clone())));
    }

    pub fn required(&self, host: usize) -> &str {
        &self.machines[host].required_image
    }

    pub fn is_paused(&self, host: usize) -> bool {
        self.pauses[host].as_ref().is_some_and(|pause| pause.holds(self.time().wall))
    }

    /// Sets the dominator's clock wrong by `seconds`.
    pub fn set_clock(&mut self, seconds: i64) {
        self.clock_error = seconds;
    }

    /// Orders a fast update, as an operator.
    pub fn hurry(&mut self, host: usize) {
        // It also retries failed updates.
        self.note_retry(host);
        self.note(host, "is hurried");
        self.step(host, Event::Ordered(SubOrder::FastUpdate));
    }

    /// Checks that the machine was polled before it gets an order.
    fn must_be_known(&self, host: usize) -> &View {
        let view = self.drivers[host].as_ref().and_then(|driver| driver.sub.view());
        view.unwrap_or_else(|| panic!("host {host} is told what to do before it is known"))
    }

    /// Checks that the last poll of the machine permits an update to `image`.
    fn must_be_allowed(&self, host: usize, image: &ImageName) {
        let view = self.must_be_known(host);
        assert!(view.report.paused.is_none(), "host {host} is paused");
        assert!(!self.is_paused(host), "host {host} is paused by an operator");
        assert!(view.stuck().is_none(), "host {host} has an update to finish");
        assert!(!view.is_rebooting(), "host {host} is rebooting");
        if let Some(undone) = self.undone.get(&host).filter(|undone| undone.image == *image) {
            let is_retried = self.retried.contains(&(host, undone.update_id));
            assert!(is_retried, "host {host}: {image} has failed its health check");
        }
    }

    /// Records an update. Checks that the recorded changes are those of the plan.
    fn on_record(&mut self, host: usize, ordered: &OrderedUpdate) {
        let image = &ordered.image;
        let former = match &ordered.former {
            Some(name) if name == image.name() => PreviousImage::Same,
            Some(name) => PreviousImage::Other(&self.images[name.as_str()].tree),
            None => PreviousImage::Unknown,
        };
        let changes = changes(ordered, former);
        for change in &changes {
            let node = |tree: &Tree| tree.get(&change.path).map(|child| child.node());
            assert_eq!(change.old, node(&ordered.tree), "host {host}: {}", change.path);
            if image.content.computed.iter().any(|rule| rule.path == change.path) {
                assert_eq!(change.reason, ChangeReason::Computed, "host {host}: {}", change.path);
                continue;
            }
            assert_eq!(change.new, node(&image.tree), "host {host}: {}", change.path);
            let is_drift = match former {
                PreviousImage::Same => true,
                PreviousImage::Other(tree) => node(tree) == node(&image.tree),
                PreviousImage::Unknown => false,
            };
            let reason = if is_drift { ChangeReason::Drift } else { ChangeReason::Image };
            assert_eq!(change.reason, reason, "host {host}: {}", change.path);
        }
        let paths: BTreeSet<_> = changes.iter().map(|change| &change.path).collect();
        let planned = &ordered.planned.plan.operations;
        assert!(planned.iter().all(|operation| paths.contains(&operation.path)));
        let known = self.ledger.remove(&host).filter(|(id, _)| *id == ordered.update_id);
        let outcome = known.and_then(|(_, outcome)| outcome);
        self.ledger.insert(host, (ordered.update_id, outcome));
        let is_repair = ordered.former.as_ref() == Some(image.name());
        self.ordered.insert(host, (!is_repair).then(|| image.name().clone()));
    }

    /// Makes a machine drift.
    pub fn drift(&mut self, host: usize) {
        let tree = drifted(&self.models[host].sub.tree, &mut self.random);
        self.note(host, "drifts");
        self.models[host].drift(tree, &mut self.random);
        self.collect(host);
    }

    fn assignment(&self, host: usize) -> Event {
        let machine = Arc::clone(&self.machines[host]);
        let look = |name: &str| match self.images.get(name) {
            Some(image) if self.images_loaded => ImageState::Ready(Arc::clone(image)),
            Some(_) => ImageState::Missing("it is being loaded".into()),
            None => ImageState::Undefined,
        };
        let (image, planned) = (look(&machine.required_image), look(&machine.planned_image));
        Event::Assigned { machine, image, planned, rollback: None }
    }

    fn schedule(&mut self, delay: Duration, happening: Happening) {
        self.sequence += 1;
        self.queue.insert((self.now + delay, self.sequence), happening);
    }

    fn note(&mut self, host: usize, text: &str) {
        if self.is_traced {
            writeln!(self.trace, "{:>9} {host:>2} {text}", self.now.as_millis()).unwrap();
        }
    }

    fn happen(&mut self, happening: Happening) {
        match happening {
            Happening::ToSub { host, run, request_id, message } => {
                self.at_sub(host, run, request_id, *message);
            }
            Happening::ToDominator { host, run, event } => {
                if run == self.run {
                    self.at_dominator(host, *event);
                }
            }
            Happening::GiveUp { host, run, request_id } => {
                let failure =
                    Failure { kind: FailureKind::Unreachable, text: "no answer in time".into() };
                if run == self.run {
                    self.fail(host, request_id, failure);
                }
            }
            Happening::PollWaited { host, instance, run, request_id } => {
                let model = &mut self.models[host];
                if model.is_up
                    && model.sub.version.instance == instance
                    && let Some((poll, reply)) = model.give_up(run, request_id)
                {
                    self.answer_poll(host, poll.run, poll.request_id, reply);
                }
            }
            Happening::Wake { host, run, at } => {
                let wanted = self.drivers[host].as_ref().and_then(|driver| driver.wake);
                if run == self.run && wanted == Some(at) {
                    self.step(host, Event::Wake);
                }
            }
            Happening::IdentityJudged { host, run, verdict } => {
                if run == self.run {
                    self.step(host, Event::IdentityJudged(verdict));
                }
            }
            Happening::Work { host, instance, work } => {
                let model = &mut self.models[host];
                if model.is_up && model.sub.version.instance == instance {
                    model.end(&work, &mut self.random);
                    if matches!(work, Work::Task(Task::Update(_))) {
                        assert!(self.updating.remove(&host), "an update ended twice");
                        if self.vanishes(host) {
                            return self.kill(host);
                        }
                    }
                    self.note(host, &format!("{work:?} is over"));
                    self.collect(host);
                    if work == Work::Boot {
                        self.models[host].boots = true;
                        self.crash(host);
                    }
                }
            }
            Happening::Claimed { host, run, purpose } => self.claimed(host, run, purpose),
            Happening::Recorded { host, run, request_id, ordered } => {
                if run == self.run {
                    self.recorded(host, request_id, &ordered);
                }
            }
            Happening::Grant { run } => self.grant(run),
            Happening::StartSub { host } => {
                if !self.models[host].is_up {
                    self.models[host].start(&mut self.random);
                    self.note(host, "starts");
                    self.collect(host);
                }
            }
            Happening::StartDominator => self.start_dominator(),
            Happening::ImageLoaded { run } => {
                if run == self.run && !self.is_server_there() {
                    self.schedule(Duration::from_secs(10), Happening::ImageLoaded { run });
                } else if run == self.run {
                    self.images_loaded = true;
                    for host in 0..self.models.len() {
                        let event = self.assignment(host);
                        self.step(host, event);
                    }
                }
            }
            Happening::Filegen { run, event } => {
                if run == self.run {
                    self.filegen_event(*event);
                }
            }
            Happening::Trouble => self.trouble(),
        }
    }

    fn start_dominator(&mut self) {
        self.run += 1;
        self.images_loaded = false;
        self.open_claims();
        self.start_asking();
        let now = self.time();
        for host in 0..self.models.len() {
            let first_id = self.random.number() & !0xffff;
            let mut sub = Sub::new(Arc::clone(&self.machines[host]), first_id, now);
            if let Some((update, _)) = self.ledger.get(&host) {
                sub.await_update_end(*update);
            }
            if let Some(undone) = self.undone.get(&host) {
                sub.remember_undone(undone.clone());
            }
            let (registration, changed) = self.identities.enter(&self.machines[host].hostname);
            self.tell(changed);
            self.drivers[host] =
                Some(Driver { sub, open: BTreeMap::new(), wake: None, registration });
            self.step(host, Event::Brake(self.brake.clone()));
            self.step(host, Event::Ordered(SubOrder::SetLimits(self.limits[host])));
            self.step(host, Event::Ordered(SubOrder::Pause(self.pauses[host].clone())));
            self.step(host, self.recorder());
            let event = self.assignment(host);
            self.step(host, event);
        }
        self.schedule(Duration::from_secs(1), Happening::ImageLoaded { run: self.run });
    }

    fn trouble(&mut self) {
        if self.faults.trouble_every == 0 {
            return;
        }
        let host = self.random.below(self.models.len() as u64) as usize;
        match self.random.below(39) {
            0..=6 => self.crash(host),
            7..=13 => self.drift(host),
            14..=16 => {
                let names: Vec<String> = self.images.keys().cloned().collect();
                let name = &names[self.random.below(names.len() as u64) as usize];
                self.assign(host, name);
            }
            17 => {
                let brake = match self.brake {
                    Some(_) => None,
                    None => Some("something is wrong".into()),
                };
                self.pull_brake(brake);
            }
            18 => {
                self.note(host, "the dominator crashes");
                self.restart_dominator();
            }
            19 => self.models[host].fails ^= true,
            20..=21 => {
                let reason = (!self.models[host].is_paused()).then_some("a demonstration");
                self.note(host, &format!("is paused: {reason:?}"));
                self.models[host].pause(reason);
                self.collect(host);
            }
            22 => {
                let required = ImageName::new(&self.machines[host].required_image).unwrap();
                let model = &mut self.models[host];
                model.sick = model.sick.take().xor(Some(required));
            }
            23 => self.models[host].sticks ^= true,
            24 => self.retry(host),
            25..=27 if self.troubles.is_timeless => {}
            25..=26 => {
                let seconds = i64::try_from(self.random.below(300)).unwrap();
                let is_paused = self.is_paused(host);
                self.pause(host, if is_paused { 0 } else { 1 + seconds });
            }
            27 => {
                let error = self.random.below(7_200);
                self.set_clock(i64::try_from(error).unwrap() - 3_600);
            }
            28 => self.hurry(host),
            29 => {
                self.note(host, "may be disturbed");
                self.step(host, Event::Ordered(SubOrder::ForceDisruptive));
            }
            30..=35 => self.more_trouble(host),
            36..=37 => {
                let percent = u8::try_from(self.random.below(5)).expect("it is small");
                self.configure(host, Some(percent).filter(|percent| *percent > 0));
            }
            _ => {
                let required = ImageName::new(&self.machines[host].required_image).unwrap();
                self.models[host].reboots = Some(required);
            }
        }
        let pause = Duration::from_millis(self.random.below(2 * self.faults.trouble_every));
        self.schedule(pause, Happening::Trouble);
    }

    pub fn crash(&mut self, host: usize) {
        self.note(host, "crashes");
        self.models[host].crash();
        self.updating.remove(&host);
        let down = Duration::from_millis(self.random.below(10_000));
        self.schedule(down, Happening::StartSub { host });
    }

    /// Returns the delays with which a message arrives: never, once or twice.
    fn deliveries(&mut self) -> Vec<Duration> {
        if self.random.chance(self.faults.lose) {
            return Vec::new();
        }
        let times = 1 + usize::from(self.random.chance(self.faults.repeat));
        (0..times)
            .map(|_| Duration::from_micros(1 + self.random.below(1_000 * self.faults.delay_max)))
            .collect()
    }

    fn at_sub(&mut self, host: usize, run: u64, request_id: RequestId, message: Message) {
        if !self.models[host].is_up || self.is_cut_off() {
            let failure =
                Failure { kind: FailureKind::Unreachable, text: "connection refused".into() };
            if run == self.run {
                self.fail(host, request_id, failure);
            }
            return;
        }
        match message {
            Message::Poll(request) => {
                let model = &mut self.models[host];
                model.poll(run, request_id, &request);
                let instance = model.sub.version.instance;
                let wait = Duration::from_millis(request.wait_ms.into());
                self.schedule(wait, Happening::PollWaited { host, instance, run, request_id });
            }
            Message::Ask(request) => {
                let is_commit = matches!(request, Request::Commit(_));
                if is_commit && self.is_cut_before_commit() {
                    return self.crash(host);
                }
                let is_tree = matches!(request, Request::ReadTree(_));
                let is_scan = matches!(request, Request::Scan);
                let answer = self.models[host].ask(request, &mut self.random);
                if is_commit && matches!(answer, Answer::Accepted) {
                    self.updating.insert(host);
                    self.must_be_within_budget();
                }
                let event = match answer {
                    Answer::Tree(tree, refused) => Event::TreeRead(request_id, tree, Some(refused)),
                    Answer::Scanned(version) => Event::Scanned(request_id, Ok(version)),
                    Answer::Failed(fault) if is_scan => {
                        Event::Scanned(request_id, Err(failure(fault)))
                    }
                    Answer::Accepted => Event::Accepted(request_id),
                    Answer::Failed(fault) if is_tree => {
                        Event::TreeFailed(request_id, failure(fault))
                    }
                    Answer::Failed(fault) => Event::CallFailed(request_id, failure(fault)),
                };
                self.answer(host, run, event);
            }
        }
        self.collect(host);
    }

    /// Takes the started work and the answers of a model.
    fn collect(&mut self, host: usize) {
        let model = &mut self.models[host];
        if !model.is_up {
            return;
        }
        let instance = model.sub.version.instance;
        let started = std::mem::take(&mut model.started);
        let answers = model.answers(false);
        for (delay, work) in started {
            self.schedule(delay, Happening::Work { host, instance, work });
        }
        for (poll, reply) in answers {
            self.answer_poll(host, poll.run, poll.request_id, reply);
        }
    }

    fn answer_poll(&mut self, host: usize, run: u64, request_id: RequestId, reply: PollReply) {
        self.answer(host, run, Event::Polled(request_id, Box::new(reply)));
    }

    fn answer(&mut self, host: usize, run: u64, event: Event) {
        let Some(event) = self.as_it_arrives(host, event) else { return };
        for delay in self.deliveries() {
            let event = Box::new(event.clone());
            self.schedule(delay, Happening::ToDominator { host, run, event });
        }
    }

    fn at_dominator(&mut self, host: usize, event: Event) {
        let Some(driver) = &mut self.drivers[host] else { return };
        let request_id = match &event {
            Event::Polled(request_id, _)
            | Event::TreeRead(request_id, ..)
            | Event::FormerRead(request_id, _)
            | Event::Planned(request_id, _)
            | Event::TreeFailed(request_id, _)
            | Event::Scanned(request_id, _)
            | Event::Accepted(request_id)
            | Event::CallFailed(request_id, _) => *request_id,
            _ => return,
        };
        // The driver ignores a second answer, because the call is closed.
        let Some(_) = driver.open.remove(&request_id) else { return };
        self.meets(host, &event);
        self.step(host, event);
    }

    fn fail(&mut self, host: usize, request_id: RequestId, failure: Failure) {
        let Some(driver) = &mut self.drivers[host] else { return };
        let Some(is_poll) = driver.open.remove(&request_id) else { return };
        if is_poll {
            self.step(host, Event::PollFailed(request_id, failure));
        } else {
            self.step(host, Event::CallFailed(request_id, failure.clone()));
            self.step(host, Event::TreeFailed(request_id, failure.clone()));
            self.step(host, Event::Scanned(request_id, Err(failure)));
        }
    }

    fn time(&self) -> Now {
        let seconds = i64::try_from(self.now.as_secs()).unwrap();
        let seconds = (self.troubles.wall)(seconds) + self.clock_error;
        Now { elapsed: self.now, wall: Time { seconds, nanoseconds: self.now.subsec_nanos() } }
    }

    fn step(&mut self, host: usize, event: Event) {
        let now = self.time();
        let jitter = self.random.below(1_000) as u16;
        let sources = ["images:6971".to_owned()];
        let context = Context { jitter, sources: &sources, stopped: &[] };
        let Some(driver) = &mut self.drivers[host] else { return };
        let effects = driver.sub.step(now, event, &context);
        let wake = driver.sub.wake_at();
        let is_new = wake != driver.wake;
        driver.wake = wake;
        if let Some(at) = wake
            && (is_new || at <= self.now)
        {
            let run = self.run;
            // A time in the past is moved forward, or the simulation would not advance.
            let at_least = at.max(self.now + Duration::from_millis(1));
            if let Some(driver) = &mut self.drivers[host] {
                driver.wake = Some(at_least);
            }
            self.schedule(at_least - self.now, Happening::Wake { host, run, at: at_least });
        }
        for effect in effects {
            self.carry_out(host, effect);
        }
    }

    fn carry_out(&mut self, host: usize, effect: Effect) {
        let (name, request_id, message, limit) = match effect {
            Effect::Poll(request_id, request) => {
                let limit = Duration::from_millis(request.wait_ms.into()) + POLL_SLACK;
                ("poll", request_id, Message::Poll(request), limit)
            }
            Effect::ReadTree(request_id, root, _) => {
                ("read-tree", request_id, Message::Ask(Request::ReadTree(root)), CALL_LIMIT)
            }
            Effect::ReadFormer(request_id, name) => {
                let former = self.images.get(name.as_str()).cloned();
                return self.answer_soon(host, request_id, Event::FormerRead(request_id, former));
            }
            Effect::Scan(request_id, _) => {
                ("scan", request_id, Message::Ask(Request::Scan), CALL_LIMIT)
            }
            Effect::Plan(request_id, job) => {
                let planned = job.run().map(Arc::new).map_err(|error| error.to_string());
                return self.answer_soon(host, request_id, Event::Planned(request_id, planned));
            }
            Effect::Call(request_id, call) => {
                self.must_be_known(host);
                self.must_be_met(host, call.name());
                if let Call::Prepare(request, _) = &call {
                    self.must_be_allowed(host, &request.image);
                    self.stages(host, request);
                }
                (call.name(), request_id, Message::Ask(Request::Call(call)), CALL_LIMIT)
            }
            Effect::OrderAnswered(_) | Effect::Task(_) | Effect::ReadLeaving(..) => return,
            Effect::WantComputed(machine, image) => return self.want_computed(&machine, &image),
            Effect::ReadResources(..) | Effect::ResourceOutputs(_) => return,
            Effect::ReportContent(round, is) => return self.report_content(host, round, is),
            Effect::Commit(request_id, ordered) => return self.record(host, request_id, ordered),
            Effect::ReportIdentity(news) => return self.hear(host, news),
            Effect::Claim(claim) => return self.claim(host, claim),
            Effect::Release(what) => return self.release(host, what),
            Effect::ActivityKnown => return self.activity_known(host),
            Effect::StatusChanged(status, detail) => {
                self.note(host, &format!("is {status}: {detail}"));
                return;
            }
            Effect::UpdateEnded(update_id, outcome, _) => {
                let known = self.ledger.get(&host).map(|(id, _)| *id);
                assert_eq!(known, Some(update_id), "host {host}: another update ended");
                self.note_undone(host, update_id, &outcome);
                self.ledger.insert(host, (update_id, Some(outcome)));
                return;
            }
        };
        self.open(host, request_id, name == "poll");
        self.send(host, name, (request_id, message), limit);
    }

    /// How long a machine that does not answer waits until it is dialled.
    fn wait_for_redial(&mut self) -> Duration {
        let next = self.next_redial.max(self.now);
        self.next_redial = next + Duration::from_secs(1) / REDIALS_PER_SECOND.get();
        next - self.now
    }

    /// Answers what the dominator does by itself.
    fn answer_soon(&mut self, host: usize, request_id: RequestId, event: Event) {
        let (run, event) = (self.run, Box::new(event));
        self.open(host, request_id, false);
        self.schedule(Duration::from_millis(2), Happening::ToDominator { host, run, event });
    }

    fn send(
        &mut self,
        host: usize,
        name: &'static str,
        (request_id, message): (RequestId, Message),
        limit: Duration,
    ) {
        let wait = match &message {
            Message::Poll(PollRequest { wait_ms: 0, .. }) => self.wait_for_redial(),
            _ => Duration::ZERO,
        };
        *self.effects.entry(name).or_default() += 1;
        self.count(name);
        if name != "poll" {
            self.note(host, name);
        }
        let run = self.run;
        self.schedule(wait + limit, Happening::GiveUp { host, run, request_id });
        let copies = self.deliveries();
        let mut message = Some(message);
        for (index, delay) in copies.iter().enumerate() {
            let copy = if index + 1 == copies.len() {
                message.take()
            } else {
                message.as_ref().map(Message::copy)
            };
            let message = Box::new(copy.expect("taken by the last copy only"));
            self.schedule(wait + *delay, Happening::ToSub { host, run, request_id, message });
        }
    }

    fn hear(&mut self, host: usize, report: IdentityReport) {
        let Some(driver) = &self.drivers[host] else { return };
        let changed =
            self.identities.take_report(&self.machines[host].hostname, driver.registration, report);
        self.tell(changed);
    }

    fn tell(&mut self, changed: Vec<(Arc<str>, IdentityVerdict)>) {
        for (name, verdict) in changed {
            let host = name.trim_start_matches("host").parse().unwrap();
            let run = self.run;
            self.schedule(Duration::ZERO, Happening::IdentityJudged { host, run, verdict });
        }
    }

    fn open(&mut self, host: usize, request_id: RequestId, is_poll: bool) {
        let driver = self.drivers[host].as_mut().expect("only a driver has effects");
        assert!(driver.open.insert(request_id, is_poll).is_none(), "a request_id is used once");
        let polls = driver.open.values().filter(|is_poll| **is_poll).count();
        // One poll; one call, one tree, one scan and two plans.
        assert!(polls <= 1 && driver.open.len() <= 6, "too much at one time: {:?}", driver.open);
    }
}

impl Message {
    fn copy(&self) -> Self {
        match self {
            Self::Poll(request) => Self::Poll(request.clone()),
            Self::Ask(request) => Self::Ask(request.clone()),
        }
    }
}

fn machine(host: usize, image: &str) -> Machine {
    Machine {
        hostname: format!("host{host}"),
        required_image: image.to_owned(),
        ..Machine::default()
    }
}
