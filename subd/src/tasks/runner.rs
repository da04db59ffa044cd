//! The thread that runs tasks: it observes all of them, has [`tasks::supervise`] decide, writes the
//! records, and carries the decisions out. Then it waits until something happens.
//!
//! # Invariants
//!
//! * What is started is on record before, on the medium.
//! * A task that is not in the definitions is stopped, and then forgotten.
//! * When the thread ends, tasks run on.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ::tasks::image::{Definition, ImageTasks};
use ::tasks::supervise::{
    Attempt, OrderError, Phase, Situation, Step, TaskRecord, step, take_numbered_order, take_order,
};
use ::tasks::{Task, Template};
use api::fault::{Fault, FaultCode};
use api::subd::{Health, TaskOrder, TaskReport, TaskState, TriggerFailure};
use data_encoding::HEXLOWER;
use jiff::{Timestamp, tz};
use model::boot_time::BootTime;
use model::display::error_chain;
use model::lock::locked;
use model::permit::PermitError;
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use system::random::random_bytes;

use crate::machine::command_runner::CommandRunner;
use crate::tasks::attempt::Deadlines;
use crate::tasks::health::{HealthChecks, HealthCommand};
use crate::tasks::records::{SavedRecords, TaskRecords};
use crate::tasks::report::{Known, are_news, not_run, report, why_not_well};
use crate::tasks::supervisor::Supervisor;

/// The longest time between two looks: the clock may have been set.
const LOOK_INTERVAL: Duration = Duration::from_secs(30);

/// How soon something is looked at again that could not be done or told.
const AGAIN_AFTER: Duration = Duration::from_secs(1);

/// How long all tasks must run without an end, so that an update is healthy.
const STEADY_FOR: Duration = Duration::from_secs(1);

/// How often others are told at most: a task that dies all the time must not keep dominators busy.
const NEWS_INTERVAL: Duration = Duration::from_secs(1);

/// How soon a guard is looked for that has just been started.
const GUARD_AFTER: Duration = Duration::from_millis(20);

/// The tasks of a machine, for those that change or ask something.
#[derive(Debug)]
pub struct Tasks {
    pub supervisor: Arc<Supervisor>,
    inbox: Sender<Message>,
    waker: PipeWriter,
    reports: Arc<Mutex<Vec<TaskReport>>>,
    thread: Mutex<Option<std::thread::JoinHandle<()>>>,
}

enum Message {
    /// The tasks of the machine are these now.
    Define(ImageTasks),
    Order {
        task: String,
        order: TaskOrder,
        why: String,
        number: u64,
        reply: Sender<Result<(), Fault>>,
    },
    Permit {
        task: String,
        number: u64,
        until: BootTime,
        reply: Sender<Result<BootTime, Fault>>,
    },
    /// These, each with the reason, are not started again when they have ended by themselves.
    NotRestarted {
        tasks: BTreeMap<String, String>,
        reply: Sender<Result<(), Fault>>,
    },
    /// Something may have happened.
    Look,
    /// To be answered when the reports are of a later time than this.
    Report(Sender<()>),
    /// The thread is to end.
    End,
}

impl Tasks {
    /// Starts the thread, as [`Tasks::prepare`] says.
    pub fn start(
        supervisor: Arc<Supervisor>,
        records: SavedRecords,
        definitions: ImageTasks,
        command_runner: CommandRunner,
        tell: impl Fn() + Send + 'static,
    ) -> io::Result<Self> {
        let (tasks, runner) =
            Self::prepare(supervisor, records, definitions, command_runner, tell)?;
        let thread = std::thread::Builder::new().name("tasks".to_owned());
        *locked(&tasks.thread) = Some(thread.spawn(move || runner.run())?);
        Ok(tasks)
    }

    /// Prepares to run tasks, by [`Runner::run`]. Nothing is started before [`Tasks::release`] if
    /// the supervisor has a pause. `tell` is called when dominators are to ask how the tasks are.
    pub fn prepare(
        supervisor: Arc<Supervisor>,
        records: SavedRecords,
        definitions: ImageTasks,
        command_runner: CommandRunner,
        tell: impl Fn() + Send + 'static,
    ) -> io::Result<(Self, Runner)> {
        let (reader, waker) = io::pipe()?;
        for end in [reader.as_fd(), waker.as_fd()] {
            let flags = OFlag::from_bits_retain(fcntl(end, FcntlArg::F_GETFL)?);
            fcntl(end, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
        }
        let (inbox, messages) = channel();
        let reports = Arc::default();
        let mut runner = Runner {
            supervisor: Arc::clone(&supervisor),
            records,
            definitions: BTreeMap::new(),
            messages,
            own_inbox: inbox.clone(),
            wake: reader,
            waker: waker.try_clone()?,
            reports: Arc::clone(&reports),
            health: HealthChecks::default(),
            command_runner,
            news: News { tell: Box::new(tell), told: None, is_due: false },
        };
        runner.define(&definitions);
        let tasks = Self { supervisor, inbox, waker, reports, thread: Mutex::default() };
        Ok((tasks, runner))
    }

    /// Keeps `tasks` from being started, and stops them. Returns those that do not stop. Blocks.
    pub fn pause(&self, tasks: &BTreeSet<String>) -> Vec<TriggerFailure> {
        if tasks.is_empty() {
            return Vec::new();
        }
        self.supervisor.pause(tasks)
    }

    /// Runs `tasks`, and no others; pauses are over.
    pub fn define(&self, tasks: &ImageTasks) {
        *self.supervisor.pauses() = Default::default();
        self.send(Message::Define(tasks.clone()));
    }

    /// Ends all pauses.
    pub fn release(&self) {
        *self.supervisor.pauses() = Default::default();
        self.send(Message::Look);
    }

    /// Gives an order with this number; zero stands for the next one of this machine. Blocks until
    /// it is on the medium.
    pub fn order(&self, task: &str, order: TaskOrder, why: &str, number: u64) -> Result<(), Fault> {
        let (reply, answer) = channel();
        let (task, why) = (task.to_owned(), why.to_owned());
        self.send(Message::Order { task, order, why, number, reply });
        answer.recv().unwrap_or_else(|_| Err(stopping()))
    }

    /// Takes permit `number` for an exclusive task, which lasts until `until`. Returns the present.
    /// Blocks until it is on the medium.
    pub fn permit(&self, task: &str, number: u64, until: &BootTime) -> Result<BootTime, Fault> {
        let (reply, answer) = channel();
        let (task, until) = (task.to_owned(), until.clone());
        self.send(Message::Permit { task, number, until, reply });
        answer.recv().unwrap_or_else(|_| Err(stopping()))
    }

    /// Sets which tasks are not started again when they have ended by themselves, and why. All
    /// others are. Blocks until that is on the medium.
    pub fn set_not_restarted(&self, tasks: BTreeMap<String, String>) -> Result<(), Fault> {
        let (reply, answer) = channel();
        self.send(Message::NotRestarted { tasks, reply });
        answer.recv().unwrap_or_else(|_| Err(stopping()))
    }

    /// How the tasks are.
    pub fn reports(&self) -> Vec<TaskReport> {
        locked(&self.reports).clone()
    }

    /// Waits until all of `tasks` have run for a moment and are healthy, or have done what they
    /// should. `None` if `is_stopping` before. Blocks.
    pub fn await_health(
        &self,
        tasks: &ImageTasks,
        deadline: Instant,
        is_stopping: impl Fn() -> bool,
    ) -> Option<Health> {
        // Those of before an update say nothing.
        let (reply, answer) = channel();
        self.send(Message::Report(reply));
        answer.recv().ok()?;
        let asks = |definition: &Definition| {
            definition.read(tz::db()).is_ok_and(|(task, _)| task.health.is_some())
        };
        let asks: Vec<_> = tasks.0.iter().map(|(name, task)| (name, asks(task))).collect();
        let mut steady: Option<(Instant, Vec<u32>)> = None;
        loop {
            let reports = self.reports();
            let ill = asks.iter().find_map(|(name, asks)| {
                let report = reports.iter().find(|report| report.name == **name);
                why_not_well(name, report, *asks)
            });
            let now = Instant::now();
            steady = match ill {
                Some(_) if is_stopping() => return None,
                Some(why) if now >= deadline => return Some(Health::Failed(why)),
                Some(_) => None,
                None => {
                    let starts: Vec<u32> = reports.iter().map(|report| report.starts).collect();
                    let same = steady.filter(|(_, before)| *before == starts);
                    Some(same.unwrap_or((now, starts)))
                }
            };
            // One that is just started runs, even if it dies at once.
            if steady.as_ref().is_some_and(|(since, _)| now >= *since + STEADY_FOR) {
                return Some(Health::Passed);
            }
            std::thread::sleep(GUARD_AFTER);
        }
    }

    /// Ends the thread, and waits for that. Tasks run on. Blocks.
    pub fn end(&self) {
        self.send(Message::End);
        if let Some(thread) = locked(&self.thread).take()
            && thread.join().is_err()
        {
            tracing::error!("the thread that runs tasks has panicked");
        }
    }

    fn send(&self, message: Message) {
        // The thread ends only when it is told to.
        let _ended = self.inbox.send(message);
        wake(&self.waker);
    }
}

/// Returns the fault of a call about a task that the image does not have.
pub fn no_task(task: &str) -> Fault {
    Fault::new(FaultCode::NotFound, format!("the image of this machine has no task `{task}`"))
}

fn stopping() -> Fault {
    Fault::new(FaultCode::Unavailable, "subd is stopping")
}

fn wake(mut waker: &PipeWriter) {
    // Full means that it is awake.
    let _full = waker.write(&[0]);
}

/// A task that is defined, or why it cannot be run.
type Defined = Result<(Task, Template), String>;

/// What runs tasks.
pub struct Runner {
    supervisor: Arc<Supervisor>,
    records: SavedRecords,
    definitions: BTreeMap<String, Defined>,
    messages: Receiver<Message>,
    own_inbox: Sender<Message>,
    wake: PipeReader,
    waker: PipeWriter,
    reports: Arc<Mutex<Vec<TaskReport>>>,
    health: HealthChecks,
    command_runner: CommandRunner,
    news: News,
}

/// Tells others that the tasks are not as before.
struct News {
    tell: Box<dyn Fn() + Send>,
    told: Option<Instant>,
    is_due: bool,
}

/// What is to be done for one task.
struct Work {
    name: String,
    step: Step,
    /// The name of an attempt that is started.
    attempt: String,
}

/// What was found in one pass over all tasks.
#[derive(Default)]
struct Pass {
    /// The beginning of the names of its attempts.
    random: String,
    attempts: BTreeMap<String, Attempt>,
    work: Vec<Work>,
    /// Tasks that no image has any more, and that are not live.
    gone: Vec<String>,
    /// Tasks that must stop because no image has them any more.
    unwanted: Vec<String>,
    again: Option<Duration>,
}

impl Pass {
    fn look_again(&mut self, after: Duration) {
        self.again = Some(self.again.map_or(after, |again| again.min(after)));
    }
}

impl News {
    /// Tells others, if there is something to tell. Returns when to do that if it was done just
    /// before.
    fn tell(&mut self) -> Option<Duration> {
        if !self.is_due {
            return None;
        }
        let now = Instant::now();
        let left = self.told.and_then(|told| NEWS_INTERVAL.checked_sub(now - told));
        if let Some(left) = left.filter(|left| !left.is_zero()) {
            return Some(left);
        }
        (self.tell)();
        (self.told, self.is_due) = (Some(now), false);
        None
    }
}

impl Runner {
    /// Runs tasks until [`Tasks::end`]. Blocks.
    pub fn run(mut self) {
        loop {
            let mut waiting = Vec::new();
            while let Ok(message) = self.messages.try_recv() {
                match message {
                    Message::Define(tasks) => self.define(&tasks),
                    Message::Order { task, order, why, number, reply } => {
                        // Who has given it may be gone.
                        let _gone = reply.send(self.order(&task, (order, &why), number));
                    }
                    Message::Permit { task, number, until, reply } => {
                        let _gone = reply.send(self.permit(&task, number, &until));
                    }
                    Message::NotRestarted { tasks, reply } => {
                        let _gone = reply.send(self.set_not_restarted(&tasks));
                    }
                    Message::Look => {}
                    Message::Report(reply) => waiting.push(reply),
                    Message::End => return,
                }
            }
            let pass = self.pass();
            for reply in waiting {
                // Who has asked may be gone.
                let _gone = reply.send(());
            }
            self.wait(&pass);
        }
    }

    fn define(&mut self, tasks: &ImageTasks) {
        let read = tasks.0.iter().map(|(name, definition)| {
            let read = definition.read(tz::db()).map_err(|error| error_chain(&error));
            let defined = read.and_then(|read| match self.supervisor.no_exclusive_tasks() {
                Some(why) if read.0.exclusive => Err(why.to_owned()),
                _ => Ok(read),
            });
            if let Err(why) = &defined {
                tracing::error!(task = name, "cannot run a task: {why}");
            }
            (name.clone(), defined)
        });
        self.definitions = read.collect();
    }

    fn order(&self, task: &str, (order, why): (TaskOrder, &str), number: u64) -> Result<(), Fault> {
        let defined = self.definitions.get(task).ok_or_else(|| no_task(task))?;
        let defined = defined.as_ref().ok().map(|(task, template)| (task, template));
        let mut records = TaskRecords::clone(&self.records.get());
        let record = records.tasks.entry(task.to_owned()).or_default();
        let now = Timestamp::now();
        let taken = match number {
            0 => take_order(order, why, now, defined, record),
            number => take_numbered_order(number, (order, why), now, defined, record),
        };
        taken.map_err(|error: OrderError| {
            let code = match error {
                OrderError::Superseded { .. } => FaultCode::Stale,
                _ => FaultCode::BadRequest,
            };
            Fault::new(code, error.to_string())
        })?;
        tracing::warn!(task, order = order.name(), why, number, "an operator has ordered it");
        self.save(records).map_err(|why| Fault::new(FaultCode::Internal, why))
    }

    fn permit(&self, task: &str, number: u64, until: &BootTime) -> Result<BootTime, Fault> {
        let fault = |error: PermitError| Fault::new(FaultCode::BadRequest, error.to_string());
        let internal = |why: String| Fault::new(FaultCode::Internal, why);
        match self.definitions.get(task) {
            Some(Ok((task, _))) if task.exclusive => {}
            Some(Ok(_)) => return Err(fault(PermitError::NotExclusive)),
            Some(Err(why)) => return Err(Fault::new(FaultCode::Unavailable, why.clone())),
            None => return Err(no_task(task)),
        }
        let now = self.supervisor.boot_now();
        let mut records = TaskRecords::clone(&self.records.get());
        let permit = &mut records.tasks.entry(task.to_owned()).or_default().permit;
        let taken = permit.take(number, until, &now);
        // The number is on record, whatever is said.
        self.save(records).map_err(internal)?;
        taken.map(|()| now).map_err(fault)
    }

    fn set_not_restarted(&self, tasks: &BTreeMap<String, String>) -> Result<(), Fault> {
        let mut records = TaskRecords::clone(&self.records.get());
        for name in self.definitions.keys() {
            let record = records.tasks.entry(name.clone()).or_default();
            let why = tasks.get(name);
            if record.not_restarted.as_ref() == why {
                continue;
            }
            match why {
                Some(why) => tracing::warn!(task = name, "not started again if it ends: {why}"),
                None => tracing::info!(task = name, "started again if it ends"),
            }
            record.not_restarted = why.cloned();
        }
        self.save(records).map_err(|why| Fault::new(FaultCode::Internal, why))
    }

    /// Saves `records`, unless they are what is saved.
    fn save(&self, records: TaskRecords) -> Result<(), String> {
        if records == *self.records.get() {
            return Ok(());
        }
        self.records.set(records).map_err(|error| error_chain(&error))
    }

    /// Observes all tasks, decides about them, and acts.
    fn pass(&mut self) -> Pass {
        let (now, boot_now) = (Timestamp::now(), self.supervisor.boot_now());
        let random = HEXLOWER.encode(&random_bytes::<8>());
        let mut pass = Pass { random, ..Pass::default() };
        let mut records = TaskRecords::clone(&self.records.get());
        self.supervisor.reap();
        let known = self.supervisor.known().unwrap_or_else(|error| {
            tracing::error!(%error, "cannot look for tasks");
            BTreeSet::new()
        });
        let names: BTreeSet<String> = self
            .definitions
            .keys()
            .chain(records.tasks.keys())
            .chain(known.iter())
            .cloned()
            .collect();
        for name in names {
            match self.supervisor.observe(&name) {
                Ok(attempt) => {
                    self.decide(&name, &attempt, (now, &boot_now), &mut records, &mut pass);
                    pass.attempts.insert(name, attempt);
                }
                Err(error) => {
                    tracing::error!(task = name, %error, "cannot tell whether the task runs");
                    pass.look_again(AGAIN_AFTER);
                }
            }
        }
        for name in &pass.gone {
            records.tasks.remove(name);
        }
        match self.save(records) {
            Ok(()) => self.act(&mut pass),
            Err(why) => {
                tracing::error!("no task is started, because that cannot be recorded: {why}");
                pass.look_again(AGAIN_AFTER);
            }
        }
        self.tell(now, &boot_now, &mut pass);
        pass
    }

    fn decide(
        &self,
        name: &str,
        observed: &Attempt,
        (now, boot_now): (Timestamp, &BootTime),
        records: &mut TaskRecords,
        pass: &mut Pass,
    ) {
        let is_live = matches!(observed, Attempt::Live { .. });
        let (is_paused, all) = {
            let pauses = self.supervisor.pauses();
            (pauses.have(name), pauses.all)
        };
        match self.definitions.get(name) {
            // The image may have it, as far as is known.
            None if all => {}
            None if is_live => pass.unwanted.push(name.to_owned()),
            None => pass.gone.push(name.to_owned()),
            // What runs goes on.
            Some(Err(_)) => {}
            Some(Ok(_)) if all => {}
            Some(Ok((task, template))) => {
                let attempt = format!("{}-{}", pass.random, pass.work.len());
                let situation = Situation {
                    task,
                    template,
                    now,
                    boot_now,
                    paused: is_paused,
                    observed,
                    next_attempt: &attempt,
                };
                let record = records.tasks.entry(name.to_owned()).or_default();
                let step = step(&situation, record);
                pass.work.push(Work { name: name.to_owned(), step, attempt });
            }
        }
    }

    fn act(&self, pass: &mut Pass) {
        for name in std::mem::take(&mut pass.unwanted) {
            tracing::info!(task = name, "stopping a task that the image does not have");
            self.stop(&name, pass);
        }
        for name in std::mem::take(&mut pass.gone) {
            if let Err(error) = self.supervisor.forget(&name)
                && error.kind() != io::ErrorKind::NotFound
            {
                tracing::warn!(task = name, %error, "cannot remove what is left of a task");
            }
            pass.attempts.remove(&name);
        }
        for Work { name, step, attempt } in std::mem::take(&mut pass.work) {
            for note in &step.notes {
                tracing::info!(task = name, "{note}");
            }
            let Step { stop_at, stop_at_boot_ms, .. } = step;
            let deadlines = Deadlines { stop_at, stop_at_boot_ms };
            if let Some(Attempt::Live { attempt }) = pass.attempts.get(&name)
                && let Err(error) = self.supervisor.set_deadlines(&name, attempt, &deadlines)
            {
                tracing::error!(task = name, %error, "cannot tell its guard when it must stop");
                pass.look_again(AGAIN_AFTER);
            }
            if let Some(why) = &step.stop {
                tracing::info!(task = name, "stopping it: {why}");
                self.stop(&name, pass);
            }
            if let Some(run) = &step.start
                && let Some(Ok((task, _))) = self.definitions.get(&name)
            {
                tracing::info!(task = name, run, "starting it");
                if let Err(error) = self.supervisor.start(task, run, &attempt, &deadlines) {
                    tracing::error!(task = name, run, %error, "cannot start it");
                }
                // Finds it, or how it failed.
                pass.look_again(Duration::ZERO);
            }
            if let Some(at) = step.wake_at {
                let after = Duration::try_from(at.duration_since(Timestamp::now()));
                pass.look_again(after.unwrap_or_default());
            }
        }
    }

    fn stop(&self, name: &str, pass: &mut Pass) {
        match self.supervisor.ask_to_stop(name) {
            Ok(true) => {}
            Ok(false) => pass.look_again(GUARD_AFTER),
            Err(error) => {
                tracing::error!(task = name, %error, "cannot stop it");
                pass.look_again(AGAIN_AFTER);
            }
        }
    }

    /// Makes the reports, and asks for the health of what is live.
    fn tell(&mut self, now: Timestamp, boot_now: &BootTime, pass: &mut Pass) {
        let records = self.records.get();
        let mut reports = Vec::new();
        let empty = TaskRecord::default();
        for (name, defined) in &self.definitions {
            let record = records.tasks.get(name).unwrap_or(&empty);
            let (task, template) = match defined {
                Ok(defined) => defined,
                Err(why) => {
                    let not_restarted = record.not_restarted.clone();
                    let report = not_run(name, TaskState::Refused, why);
                    let order_number = record.order_number;
                    reports.push(TaskReport { order_number, not_restarted, ..report });
                    continue;
                }
            };
            let attempt = pass.attempts.get(name).cloned().unwrap_or(Attempt::None);
            let health = self.health_of(task, record, &attempt, now, pass);
            let next_at = task.moment(now).next.map(|event| event.time);
            let (attempt, health) = (&attempt, health.as_ref());
            let known = Known { task, template, now, boot_now, record, attempt, health, next_at };
            reports.push(report(&known));
        }
        let is_live = |name: &str| matches!(pass.attempts.get(name), Some(Attempt::Live { .. }));
        self.health.keep(is_live);
        let former = std::mem::replace(&mut *locked(&self.reports), reports.clone());
        self.news.is_due |= are_news(&former, &reports);
        if let Some(again) = self.news.tell() {
            pass.look_again(again);
        }
    }

    fn health_of(
        &self,
        task: &Task,
        record: &TaskRecord,
        attempt: &Attempt,
        now: Timestamp,
        pass: &mut Pass,
    ) -> Option<Health> {
        let Attempt::Live { attempt } = attempt else { return None };
        let started = record.runs.iter().find_map(|run| match &run.phase {
            Phase::Started { attempt: own, at } if own == attempt => Some(*at),
            _ => None,
        })?;
        let up = Duration::try_from(now.duration_since(started)).unwrap_or_default();
        let directory = self.supervisor.directory_of(&task.name);
        let command = HealthCommand {
            runner: self.command_runner,
            program: self.supervisor.program(),
            directory: &directory.0,
        };
        let (inbox, waker) = (self.own_inbox.clone(), self.waker.try_clone().ok());
        let done = move || {
            let _ended = inbox.send(Message::Look);
            if let Some(waker) = &waker {
                wake(waker);
            }
        };
        let (health, next) = self.health.look(task, attempt, up, &command, done);
        if let Some(next) = next {
            pass.look_again(next);
        }
        health
    }

    /// Waits for a message, for the end of a guard, or for the time that the pass has named.
    fn wait(&mut self, pass: &Pass) {
        let mut again = pass.again.unwrap_or(LOOK_INTERVAL).min(LOOK_INTERVAL);
        let mut guards: Vec<OwnedFd> = Vec::new();
        for (name, attempt) in &pass.attempts {
            if matches!(attempt, Attempt::Live { .. }) {
                match self.supervisor.watch(name) {
                    Some(guard) => guards.push(guard),
                    // It has just been started, or has just ended.
                    None => again = again.min(GUARD_AFTER),
                }
            }
        }
        let deadline = Instant::now() + again;
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = PollTimeout::try_from(left + Duration::from_micros(999));
        let mut events = vec![PollFd::new(self.wake.as_fd(), PollFlags::POLLIN)];
        events.extend(guards.iter().map(|guard| PollFd::new(guard.as_fd(), PollFlags::POLLIN)));
        match poll(&mut events, timeout.unwrap_or(PollTimeout::MAX)) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => {
                tracing::error!(%error, "cannot wait for tasks");
                std::thread::sleep(AGAIN_AFTER);
            }
        }
        drop(events);
        let mut buffer = [0; 64];
        while matches!(self.wake.read(&mut buffer), Ok(length) if length == buffer.len()) {}
    }
}
