//! The guard: the process that watches one attempt, from its start until nothing of it is left.
//!
//! It has one thread and waits in one `poll`: for signals, the output of the task, and the times at
//! which it must stop. Every process that the task starts stays below it, because orphans become
//! its children.
//!
//! SIGTERM asks it to stop the task, and SIGHUP to read its deadlines again: when one has passed,
//! it stops the task without being asked, also when there is no subd. To stop it, it sends the stop
//! signal of the task, and after its time-out kills all. When the program ends by itself, what it
//! has left behind is stopped in the same way.
//!
//! # Invariants
//!
//! * It has the lock of the task until no descendant of it is left.
//! * It starts nothing if `attempt.json` is of another attempt, or if the end of this one is
//!   recorded.

use std::collections::BTreeSet;
use std::io::{self, PipeReader, Read};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use ::tasks::file::OutputTo;
use ::tasks::supervise::{End, Exit};
use jiff::Timestamp;
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sched::{CloneFlags, unshare};
use nix::sys::prctl::set_child_subreaper;
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{Pid, setsid};

use crate::tasks::attempt::{EndRecord, GuardRecord, Spec, TaskDirectory, TaskLock};
use crate::tasks::deadline_timers::DeadlineTimers;
use crate::tasks::log_files::LogFiles;
use crate::tasks::processes::{self, Process};
use crate::tasks::{INIT, STAGE, cgroup};

/// How long it tries to get the lock, which subd takes for moments.
const LOCK_WITHIN: Duration = Duration::from_secs(5);

/// The time between two tries of what must succeed.
pub const AGAIN_AFTER: Duration = Duration::from_millis(20);

/// How often it looks for new processes while it stops the task.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// How much output is read at once, in bytes.
const OUTPUT_BYTES: usize = 64 << 10;

/// The name that all processes of subd's program have.
const OWN_NAME: &str = "subd";

/// The program of this process, also when its file has been replaced.
pub const OWN_PROGRAM: &str = "/proc/self/exe";

/// Runs the guard of `attempt` in the directory of a task.
pub fn main(directory: &Path, attempt: &str) -> ExitCode {
    match run(&TaskDirectory(directory.to_owned()), attempt) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("subd: the guard of a task failed: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(directory: &TaskDirectory, attempt: &str) -> io::Result<()> {
    // Fails if it leads a session already, as under systemd.
    let _leads = setsid();
    let Some(lock) = take_lock(directory)? else { return Ok(()) };
    let is_over = directory.end()?.is_some_and(|record| record.attempt == attempt);
    let spec = directory.spec()?.filter(|spec| spec.attempt == attempt && !is_over);
    let Some(spec) = spec else { return Ok(()) };
    let asked = watch_signals()?;
    set_child_subreaper(true)?;
    // The kernel takes the memory of the task first.
    let _refused = std::fs::write("/proc/self/oom_score_adj", "-900");
    let pid = Pid::this().as_raw();
    let started = Process::find(pid).map_or(0, |process| process.started);
    directory.set_guard(&lock, &GuardRecord { attempt: attempt.to_owned(), pid, started })?;
    let mut watch = Watch {
        directory,
        spec: &spec,
        timers: DeadlineTimers::new()?,
        log: None,
        output: None,
        main: None,
        exit: None,
        asked: false,
        kill_at: None,
        signalled: BTreeSet::new(),
    };
    let exit = match watch.read_deadlines().and_then(|()| watch.start()) {
        Ok(()) => watch.until_all_ended(&asked)?,
        Err(error) => Exit::NotStarted(error.to_string()),
    };
    let exit = directory.failure().map_or(exit, Exit::NotStarted);
    if let Some(cgroup) = &spec.cgroup {
        let _left = cgroup::clear(cgroup);
    }
    record_end(directory, &lock, attempt, End { at: Timestamp::now(), asked: watch.asked, exit })
}

fn take_lock(directory: &TaskDirectory) -> io::Result<Option<TaskLock>> {
    let deadline = Instant::now() + LOCK_WITHIN;
    loop {
        match directory.lock()? {
            None if Instant::now() < deadline => std::thread::sleep(AGAIN_AFTER),
            lock => return Ok(lock),
        }
    }
}

/// Records the end. On a full disk subd finds that there is no record, and that nothing is left.
fn record_end(
    directory: &TaskDirectory,
    lock: &TaskLock,
    attempt: &str,
    end: End,
) -> io::Result<()> {
    directory.set_end(lock, &EndRecord { attempt: attempt.to_owned(), end })
}

/// Has the signals wait that the guard acts on.
fn watch_signals() -> io::Result<SignalFd> {
    let mut watched = SigSet::empty();
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGCHLD] {
        watched.add(signal);
    }
    watched.thread_block()?;
    Ok(SignalFd::with_flags(&watched, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?)
}

/// The attempt that is watched.
struct Watch<'a> {
    directory: &'a TaskDirectory,
    spec: &'a Spec,
    timers: DeadlineTimers,
    log: Option<LogFiles>,
    output: Option<PipeReader>,
    /// The first process.
    main: Option<Pid>,
    /// How the first process ended.
    exit: Option<Exit>,
    /// True if the guard was asked to stop it while it ran.
    asked: bool,
    /// When all is killed.
    kill_at: Option<Instant>,
    /// The processes that got the stop signal.
    signalled: BTreeSet<Process>,
}

impl Watch<'_> {
    fn start(&mut self) -> io::Result<()> {
        let spec = self.spec;
        if let Some(path) = &spec.cgroup {
            let unenforced = cgroup::make(path, &spec.limits)?;
            if !unenforced.is_empty() {
                let names = unenforced.join(", ");
                self.say(&format!("these limits are not enforced here: {names}"));
            }
        }
        let mut command = Command::new(OWN_PROGRAM);
        command.arg0(OWN_NAME).stdin(Stdio::null());
        match (self.spec.output.to, self.spec.has_journal) {
            (OutputTo::Nowhere, _) => {
                command.stdout(Stdio::null()).stderr(Stdio::null());
            }
            (OutputTo::Log, true) => {}
            (OutputTo::Log, false) => {
                let (reader, writer) = io::pipe()?;
                let flags = OFlag::from_bits_retain(fcntl(&reader, FcntlArg::F_GETFL)?);
                fcntl(&reader, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
                command.stdout(writer.try_clone()?).stderr(writer);
                self.log();
                self.output = Some(reader);
            }
        }
        if self.spec.root.is_some() {
            // The next child is the first process of a new space of process numbers.
            unshare(CloneFlags::CLONE_NEWPID)?;
            command.arg(INIT);
        } else {
            command.arg(STAGE);
        }
        let child = command.arg(&self.directory.0).spawn()?;
        self.main = i32::try_from(child.id()).ok().map(Pid::from_raw);
        Ok(())
    }

    fn log(&mut self) -> &mut LogFiles {
        let (directory, output) = (&self.directory.0, &self.spec.output);
        self.log.get_or_insert_with(|| LogFiles::open(directory, output))
    }

    /// Writes a line of the guard itself to the log of the task.
    fn say(&mut self, line: &str) {
        if self.spec.has_journal {
            eprintln!("subd: {line}");
        } else {
            self.log().write(format!("subd: {line}\n").as_bytes());
        }
    }

    /// Waits until no process of the attempt is left. Returns how the program ended.
    fn until_all_ended(&mut self, asked: &SignalFd) -> io::Result<Exit> {
        loop {
            self.wait(asked)?;
            while let Ok(Some(signal)) = asked.read_signal() {
                match i32::try_from(signal.ssi_signo).map(Signal::try_from) {
                    Ok(Ok(Signal::SIGCHLD)) => {}
                    Ok(Ok(Signal::SIGHUP)) => {
                        if let Err(error) = self.read_deadlines() {
                            self.say(&format!("cannot read when it must stop: {error}"));
                        }
                    }
                    _ => self.stop_as_asked(),
                }
            }
            if self.timers.have_passed() {
                self.stop_as_asked();
            }
            self.take_output();
            if self.reap()? {
                self.take_output();
                return Ok(self.exit.take().unwrap_or(Exit::Unwatched));
            }
            if self.exit.is_some() {
                self.begin_stop();
            }
            if self.kill_at.is_some() {
                self.send_stop_signal();
            }
            if self.kill_at.is_some_and(|at| at <= Instant::now()) {
                self.kill_all();
            }
        }
    }

    fn wait(&self, asked: &SignalFd) -> io::Result<()> {
        let timeout = match self.kill_at {
            None => PollTimeout::NONE,
            Some(at) => {
                let left = at.saturating_duration_since(Instant::now());
                let left = left.clamp(AGAIN_AFTER, LOOK_AGAIN);
                PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX)
            }
        };
        let mut events = vec![PollFd::new(asked.as_fd(), PollFlags::POLLIN)];
        events.extend(self.timers.as_fds().map(|timer| PollFd::new(timer, PollFlags::POLLIN)));
        if let Some(output) = &self.output {
            events.push(PollFd::new(output.as_fd(), PollFlags::POLLIN));
        }
        match poll(&mut events, timeout) {
            Ok(_) | Err(Errno::EINTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Writes what is there of the output to the log.
    fn take_output(&mut self) {
        let mut buffer = vec![0; OUTPUT_BYTES];
        let Some(output) = &mut self.output else { return };
        // A task that writes without end is still asked to stop.
        for _ in 0..16 {
            match output.read(&mut buffer) {
                Ok(0) => {
                    self.output = None;
                    return;
                }
                Ok(length) => {
                    if let Some(log) = &mut self.log {
                        log.write(&buffer[..length]);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(_) => {
                    self.output = None;
                    return;
                }
            }
        }
    }

    /// Takes the ends of children. True if there are no more children.
    fn reap(&mut self) -> io::Result<bool> {
        loop {
            let ended = match waitpid(None, Some(WaitPidFlag::WNOHANG)) {
                Err(Errno::ECHILD) => return Ok(true),
                Err(Errno::EINTR) => continue,
                ended => ended?,
            };
            let (pid, exit) = match ended {
                WaitStatus::StillAlive => return Ok(false),
                WaitStatus::Exited(pid, code) => (pid, Exit::Code(code)),
                WaitStatus::Signaled(pid, signal, _) => (pid, Exit::Signal(signal as i32)),
                _ => continue,
            };
            if Some(pid) == self.main {
                self.exit = Some(exit);
            }
        }
    }

    /// Reads when the task must stop. What was known before stays if that fails.
    fn read_deadlines(&mut self) -> io::Result<()> {
        self.timers.set(&self.directory.deadlines(&self.spec.attempt)?)
    }

    /// Stops the task, which has not ended by itself.
    fn stop_as_asked(&mut self) {
        self.asked |= self.exit.is_none();
        self.begin_stop();
    }

    /// Sets the time at which all is killed, if it is not set.
    fn begin_stop(&mut self) {
        let patience = match self.stop_signal() {
            Signal::SIGKILL => Duration::ZERO,
            _ => Duration::from_secs(self.spec.stop_timeout_s.into()),
        };
        self.kill_at.get_or_insert_with(|| Instant::now() + patience);
    }

    fn stop_signal(&self) -> Signal {
        Signal::try_from(self.spec.stop_signal).unwrap_or(Signal::SIGTERM)
    }

    /// Sends the stop signal to all processes that have not got it: some may have been made since
    /// the last time.
    fn send_stop_signal(&mut self) {
        let signal = self.stop_signal();
        if signal == Signal::SIGKILL {
            return;
        }
        let own = Pid::this().as_raw();
        for process in processes::descendants(own).unwrap_or_default() {
            if self.signalled.insert(process) {
                // It may have ended meanwhile. One that is stopped acts on a signal only when it is
                // continued.
                let _ended = process.signal(signal);
                let _ended = process.signal(Signal::SIGCONT);
            }
        }
    }

    fn kill_all(&self) {
        if let Some(cgroup) = &self.spec.cgroup {
            let _refused = cgroup::kill(cgroup);
        }
        let own = Pid::this().as_raw();
        for process in processes::descendants(own).unwrap_or_default() {
            // It may have ended meanwhile; what cannot be killed is tried again.
            let _ended = process.signal(Signal::SIGKILL);
        }
    }
}
