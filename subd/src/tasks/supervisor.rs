//! Starts, observes and stops attempts.
//!
//! All of it is on the medium and in the kernel: a [`Supervisor`] has no memory of attempts, so a
//! later one, or one of another process, finds what this one has started.
//!
//! | backend | the guard is | limits and cgroup | output |
//! |---|---|---|---|
//! | systemd | the transient unit `subd-task-NAME.service` | of the unit | the journal |
//! | direct | a child of subd, in its own session | that the guard makes, if it can | log files |

use std::collections::BTreeSet;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use ::tasks::file::{StopSignal, Task};
use ::tasks::supervise::{Attempt, End, Exit};
use api::subd::TriggerFailure;
use jiff::Timestamp;
use model::boot_time::BootTime;
use model::lock::locked;
use nix::sys::signal::Signal;
use system::clock::boot_now;

use crate::machine::command;
use crate::tasks::attempt::{Deadlines, EndRecord, GuardRecord, Spec, TaskDirectory};
use crate::tasks::guard::AGAIN_AFTER;
use crate::tasks::processes::{self, Process};
use crate::tasks::{GUARD, cgroup};

/// How long a guard may take to be there.
const START_WITHIN: Duration = Duration::from_secs(10);

/// How long systemd may take for a command.
const COMMAND_TIME_MAX: Duration = Duration::from_secs(30);

/// How much longer than its time-out a task may take to be gone.
const STOP_GRACE: Duration = Duration::from_secs(15);

/// The time between two looks at something that is about to happen.
const LOOK_AGAIN: Duration = Duration::from_millis(2);

/// The verb of a task that does not stop, in the report of an update. It is not run again as that
/// of a service is.
const STOP_TASK: &str = "stop-task";

/// What starts guards.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Backend {
    Direct {
        /// Where cgroups are made; `None` where they cannot be.
        cgroups: Option<PathBuf>,
        /// What tasks see as `/`, if it is not that of subd.
        root: Option<PathBuf>,
    },
    Systemd,
}

/// The command-line value that chooses the backend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum SupervisorChoice {
    /// systemd where it runs, else direct; nothing if the root is not /
    #[default]
    Auto,
    /// Transient units of systemd
    Systemd,
    /// Children of subd, in a root of their own if the root is not /
    Direct,
}

/// The tasks that an update keeps from being started.
#[derive(Debug, Default)]
pub struct Pauses {
    /// True until it is known whether an update was interrupted, and after that while one that was
    /// is continued.
    pub all: bool,
    pub tasks: BTreeSet<String>,
}

impl Pauses {
    /// True if `task` is not started now.
    #[must_use]
    pub fn have(&self, task: &str) -> bool {
        self.all || self.tasks.contains(task)
    }
}

/// Starts, observes and stops attempts, below one directory.
#[derive(Debug)]
pub struct Supervisor {
    directory: PathBuf,
    backend: Backend,
    boot_id: String,
    /// The path of subd's program, which guards run.
    program: PathBuf,
    /// Held while something is started, so that nothing starts after a pause has begun.
    pauses: Mutex<Pauses>,
    /// Held while the lock of a task is taken for a moment.
    looking: Mutex<()>,
    /// The guards that are children of this process.
    children: Mutex<Vec<Child>>,
}

impl Backend {
    /// Returns the backend, or why tasks are not run.
    pub fn choose(
        choice: SupervisorChoice,
        root: &Path,
        manages_this_machine: bool,
        has_systemd: bool,
    ) -> Result<Self, &'static str> {
        let direct = |root: Option<&Path>| Self::Direct {
            cgroups: cgroup::own_directory(),
            root: root.map(Path::to_owned),
        };
        match (choice, manages_this_machine, has_systemd) {
            (SupervisorChoice::Direct, true, _) => Ok(direct(None)),
            (SupervisorChoice::Direct, false, _) => Ok(direct(Some(root))),
            (_, false, _) => Err("the root is not /: --supervisor direct runs tasks in that root"),
            (SupervisorChoice::Systemd, true, false) => Err("systemd does not run here"),
            (SupervisorChoice::Auto | SupervisorChoice::Systemd, true, true) => Ok(Self::Systemd),
            (SupervisorChoice::Auto, true, false) => Ok(direct(None)),
        }
    }

    /// The name of the backend.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Direct { .. } => "direct",
            Self::Systemd => "systemd",
        }
    }
}

impl Supervisor {
    /// Uses `directory`, which is subd's own. `program` is the path of subd's
    /// program.
    pub fn new(
        directory: PathBuf,
        backend: Backend,
        boot_id: &str,
        program: PathBuf,
    ) -> io::Result<Self> {
        TaskDirectory(directory.clone()).make()?;
        Ok(Self {
            directory,
            backend,
            boot_id: boot_id.to_owned(),
            program,
            pauses: Mutex::default(),
            looking: Mutex::default(),
            children: Mutex::default(),
        })
    }

    /// The path of subd's program.
    #[must_use]
    pub fn program(&self) -> &Path {
        &self.program
    }

    /// The backend.
    #[must_use]
    pub fn backend(&self) -> &Backend {
        &self.backend
    }

    /// Returns the time since the boot of the machine.
    #[must_use]
    pub fn boot_now(&self) -> BootTime {
        boot_now(&self.boot_id)
    }

    /// Says why exclusive tasks cannot be run; `None` if they can.
    #[must_use]
    pub fn no_exclusive_tasks(&self) -> Option<&'static str> {
        let Backend::Direct { cgroups: None, .. } = &self.backend else { return None };
        Some("an exclusive task needs systemd, or a cgroup (version 2) that subd can change")
    }

    /// The tasks that are not started now.
    pub fn pauses(&self) -> std::sync::MutexGuard<'_, Pauses> {
        locked(&self.pauses)
    }

    /// Returns the directory of `task`.
    #[must_use]
    pub fn directory_of(&self, task: &str) -> TaskDirectory {
        TaskDirectory(self.directory.join(task))
    }

    /// Returns the names of all tasks that have a directory.
    pub fn known(&self) -> io::Result<BTreeSet<String>> {
        let mut names = BTreeSet::new();
        for entry in std::fs::read_dir(&self.directory)? {
            names.extend(entry?.file_name().into_string().ok());
        }
        Ok(names)
    }

    /// Removes the directory of a task of which nothing is live.
    pub fn forget(&self, task: &str) -> io::Result<()> {
        let directory = self.directory_of(task);
        let _looking = locked(&self.looking);
        match directory.lock()? {
            None => Ok(()),
            // A guard that waits for the lock finds no attempt.
            Some(_lock) => std::fs::remove_dir_all(&directory.0),
        }
    }

    /// Returns what is known of the attempt of `task` that was started last. If its guard was
    /// killed, what is left of it is killed first.
    pub fn observe(&self, task: &str) -> io::Result<Attempt> {
        let directory = self.directory_of(task);
        if !directory.0.exists() {
            return Ok(Attempt::None);
        }
        let _looking = locked(&self.looking);
        let lock = directory.lock()?;
        let spec = directory.spec()?;
        let Some(lock) = lock else {
            let attempt = spec.map(|spec| spec.attempt).unwrap_or_default();
            return Ok(Attempt::Live { attempt });
        };
        let Some(spec) = spec else { return Ok(Attempt::None) };
        let attempt = spec.attempt.clone();
        if let Some(record) = directory.end()?.filter(|record| record.attempt == attempt) {
            return Ok(Attempt::Ended { attempt, end: record.end });
        }
        let is_of_this_boot = spec.boot_id == self.boot_id;
        let guard = directory.guard()?.filter(|guard| guard.attempt == attempt);
        if is_of_this_boot && guard.is_none() {
            // subd was killed before it could start it. A guard that comes late finds the end.
            let exit = Exit::NotStarted("subd was stopped".to_owned());
            let end = End { at: Timestamp::now(), asked: false, exit };
            directory.set_end(&lock, &EndRecord { attempt, end })?;
            return Ok(Attempt::None);
        }
        let exit = if !is_of_this_boot {
            Exit::Rebooted
        } else if self.clear(&spec)? {
            Exit::Unwatched
        } else {
            return Ok(Attempt::Live { attempt });
        };
        let end = End { at: Timestamp::now(), asked: false, exit };
        let record = EndRecord { attempt: attempt.clone(), end: end.clone() };
        directory.set_end(&lock, &record)?;
        Ok(Attempt::Ended { attempt, end })
    }

    /// Kills what an attempt without a guard has left. False if something does not end.
    fn clear(&self, spec: &Spec) -> io::Result<bool> {
        let is_empty = spec.cgroup.as_deref().map_or(Ok(true), cgroup::clear)?;
        let deadline = Instant::now() + Duration::from_secs(5);
        loop {
            let left = processes::of_attempt(&spec.attempt)?;
            if left.is_empty() {
                return Ok(is_empty);
            }
            for process in left {
                tracing::warn!(
                    pid = process.pid,
                    task = spec.task,
                    "killing what a guard has left"
                );
                process.signal(Signal::SIGKILL)?;
            }
            if Instant::now() >= deadline {
                return Ok(false);
            }
            std::thread::sleep(AGAIN_AFTER);
        }
    }

    /// Returns what becomes readable when the guard of the live attempt of `task` ends; `None` if
    /// it cannot be told yet.
    pub fn watch(&self, task: &str) -> Option<OwnedFd> {
        self.guard(task).ok().flatten()?.open().ok().flatten()
    }

    fn guard(&self, task: &str) -> io::Result<Option<Process>> {
        let record = self.directory_of(task).guard()?;
        Ok(record.map(|GuardRecord { pid, started, .. }| Process { pid, started }))
    }

    /// Asks the guard of the live attempt of `task` to stop it. False if the guard is not there
    /// yet.
    pub fn ask_to_stop(&self, task: &str) -> io::Result<bool> {
        let Some(guard) = self.guard(task)? else { return Ok(false) };
        guard.signal(Signal::SIGTERM).map(|()| true)
    }

    /// Has the guard of the live `attempt` of `task` stop it at `deadlines`.
    pub fn set_deadlines(
        &self,
        task: &str,
        attempt: &str,
        deadlines: &Deadlines,
    ) -> io::Result<()> {
        let directory = self.directory_of(task);
        if directory.deadlines(attempt)? == *deadlines {
            return Ok(());
        }
        directory.set_deadlines(attempt, deadlines)?;
        // A guard that is not there yet reads them when it is.
        self.guard(task)?.map_or(Ok(()), |guard| guard.signal(Signal::SIGHUP))
    }

    /// Starts `run` of a task as `attempt`, unless a pause has begun. That is on record when this
    /// is called. Waits until its guard is there.
    pub fn start(
        &self,
        task: &Task,
        run: &str,
        attempt: &str,
        deadlines: &Deadlines,
    ) -> io::Result<()> {
        let directory = self.directory_of(&task.name);
        let spec = self.spec(task, run, attempt);
        let pauses = self.pauses();
        if pauses.have(&task.name) {
            return Ok(());
        }
        directory.make()?;
        {
            let _looking = locked(&self.looking);
            let Some(lock) = directory.lock()? else {
                return Err(io::Error::other("another attempt is live"));
            };
            directory.set_spec(&lock, &spec)?;
            if *deadlines != Deadlines::default() {
                directory.set_deadlines(attempt, deadlines)?;
            }
        }
        let launched = self.launch(&directory, &spec);
        drop(pauses);
        match launched.and_then(|()| self.await_guard(&directory, attempt)) {
            Ok(()) => Ok(()),
            Err(error) => self.give_up(&directory, attempt, &error),
        }
    }

    fn spec(&self, task: &Task, run: &str, attempt: &str) -> Spec {
        let (cgroup, root) = match &self.backend {
            Backend::Direct { cgroups, root } => {
                let name = format!("subd-task.{}.{attempt}", task.name);
                (cgroups.as_ref().map(|directory| directory.join(name)), root.clone())
            }
            Backend::Systemd => (None, None),
        };
        let health = task.health.as_ref().and_then(|health| health.argv.clone());
        Spec {
            attempt: attempt.to_owned(),
            task: task.name.clone(),
            run: run.to_owned(),
            boot_id: self.boot_id.clone(),
            argv: task.argv.clone(),
            health: health.unwrap_or_default(),
            user: task.user.clone(),
            groups: task.groups.clone(),
            environment: task.environment.clone(),
            working_directory: task.working_directory.clone(),
            limits: task.limits.clone(),
            stop_signal: number_of(task.stop_signal),
            stop_timeout_s: task.stop_timeout_s,
            output: task.output.clone(),
            has_journal: self.backend == Backend::Systemd,
            root,
            cgroup,
        }
    }

    fn launch(&self, directory: &TaskDirectory, spec: &Spec) -> io::Result<()> {
        match &self.backend {
            Backend::Direct { .. } => {
                let mut command = Command::new(&self.program);
                command
                    .arg0("subd")
                    .arg(GUARD)
                    .arg(&directory.0)
                    .arg(&spec.attempt)
                    .env_clear()
                    .current_dir("/")
                    .stdin(Stdio::null())
                    .stdout(Stdio::null())
                    .stderr(Stdio::null());
                locked(&self.children).push(command.spawn()?);
                Ok(())
            }
            Backend::Systemd => {
                let line = systemd_line(&self.program, directory, spec);
                let ended = command::run(&line, COMMAND_TIME_MAX);
                if ended.succeeded() { Ok(()) } else { Err(io::Error::other(ended.text())) }
            }
        }
    }

    /// Waits until the guard has the lock, or has ended.
    fn await_guard(&self, directory: &TaskDirectory, attempt: &str) -> io::Result<()> {
        let deadline = Instant::now() + START_WITHIN;
        loop {
            let is_there = directory.guard()?.is_some_and(|guard| guard.attempt == attempt);
            if is_there || directory.end()?.is_some_and(|end| end.attempt == attempt) {
                return Ok(());
            }
            if Instant::now() >= deadline {
                return Err(io::Error::other("the process that watches it does not start"));
            }
            std::thread::sleep(LOOK_AGAIN);
        }
    }

    /// Records that an attempt was not started, so that its guard does not start it later.
    fn give_up(&self, directory: &TaskDirectory, attempt: &str, why: &io::Error) -> io::Result<()> {
        let _looking = locked(&self.looking);
        // With the lock it is there after all.
        let Some(lock) = directory.lock()? else { return Ok(()) };
        let exit = Exit::NotStarted(why.to_string());
        let end = End { at: Timestamp::now(), asked: false, exit };
        directory.set_end(&lock, &EndRecord { attempt: attempt.to_owned(), end })
    }

    /// Keeps `tasks` from being started, and stops them. Returns those that do not stop. Blocks for
    /// as long as their time-outs say.
    pub fn pause(&self, tasks: &BTreeSet<String>) -> Vec<TriggerFailure> {
        self.pauses().tasks.extend(tasks.iter().cloned());
        let began = Instant::now();
        let mut left: BTreeSet<&String> = tasks.iter().collect();
        let mut failures = Vec::new();
        let mut asked = BTreeSet::new();
        loop {
            self.reap();
            left.retain(|task| match self.stop_once(task, began, &mut asked) {
                Ok(is_live) => is_live,
                Err(why) => {
                    tracing::error!(task, why, "the task does not stop");
                    failures.push(TriggerFailure {
                        service: (*task).clone(),
                        verb: STOP_TASK.to_owned(),
                        output: why,
                    });
                    false
                }
            });
            if left.is_empty() {
                return failures;
            }
            std::thread::sleep(AGAIN_AFTER);
        }
    }

    /// Asks `task` to stop if that was not done. Returns whether it is still live; the error is why
    /// that is not waited for any more.
    fn stop_once(
        &self,
        task: &String,
        began: Instant,
        asked: &mut BTreeSet<String>,
    ) -> Result<bool, String> {
        let observed = self.observe(task).map_err(|error| error.to_string())?;
        let Attempt::Live { .. } = observed else { return Ok(false) };
        let fail = |error: io::Error| error.to_string();
        if !asked.contains(task) && self.ask_to_stop(task).map_err(fail)? {
            tracing::info!(task, "stopping a task for the update");
            asked.insert(task.clone());
        }
        let spec = self.directory_of(task).spec().map_err(fail)?;
        let patience = Duration::from_secs(spec.map_or(0, |spec| spec.stop_timeout_s).into());
        if began.elapsed() > patience + STOP_GRACE {
            return Err(format!("it is still there after {} s", began.elapsed().as_secs()));
        }
        Ok(true)
    }

    /// Takes the ends of guards that are children of this process, of all tasks in one call.
    pub fn reap(&self) {
        locked(&self.children).retain_mut(|child| matches!(child.try_wait(), Ok(None)));
    }
}

fn number_of(signal: StopSignal) -> i32 {
    let signal = match signal {
        StopSignal::Term => Signal::SIGTERM,
        StopSignal::Int => Signal::SIGINT,
        StopSignal::Quit => Signal::SIGQUIT,
        StopSignal::Hup => Signal::SIGHUP,
        StopSignal::Usr1 => Signal::SIGUSR1,
        StopSignal::Usr2 => Signal::SIGUSR2,
        StopSignal::Kill => Signal::SIGKILL,
    };
    signal as i32
}

/// Returns the name of the unit of `task`. systemd has one unit of a name.
#[must_use]
pub fn unit_of(task: &str) -> String {
    format!("subd-task-{task}.service")
}

/// Returns the command that starts the guard as a unit. If the guard is killed, systemd kills all
/// that is left.
fn systemd_line(program: &Path, directory: &TaskDirectory, spec: &Spec) -> Vec<String> {
    let mut line: Vec<String> = [
        "systemd-run",
        "--quiet",
        "--collect",
        "--service-type=exec",
        "--property=KillMode=mixed",
        "--property=OOMPolicy=continue",
    ]
    .map(str::to_owned)
    .into();
    line.push(format!("--unit={}", unit_of(&spec.task)));
    line.push(format!("--description=Task {} of the image of this machine", spec.task));
    let mut property = |name: &str, value: String| line.push(format!("--property={name}={value}"));
    let stop_s = u64::from(spec.stop_timeout_s) + STOP_GRACE.as_secs();
    property("TimeoutStopSec", format!("{stop_s}s"));
    let limits = &spec.limits;
    if let Some(mib) = limits.memory_mib {
        property("MemoryMax", format!("{mib}M"));
    }
    if let Some(percent) = limits.cpu_percent {
        property("CPUQuota", format!("{percent}%"));
    }
    if let Some(count) = limits.processes {
        // The guard is one of them.
        property("TasksMax", (u64::from(count) + 1).to_string());
    }
    line.push("--".to_owned());
    line.push(program.display().to_string());
    line.push(GUARD.to_owned());
    line.push(directory.0.display().to_string());
    line.push(spec.attempt.clone());
    line
}
