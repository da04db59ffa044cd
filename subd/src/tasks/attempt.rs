//! The files of an attempt, in the directory of its task.
//!
//! | file | what | written by |
//! |---|---|---|
//! | `lock` | locked while a process of an attempt may live | |
//! | `attempt.json` | what is started: [`Spec`] | subd, before it starts the guard |
//! | `deadlines.json` | when it must stop: [`Deadlines`] | subd, also later |
//! | `guard.json` | which process watches it: [`GuardRecord`] | the guard |
//! | `failure` | why the program could not be started | what becomes the program |
//! | `ended.json` | how it ended: [`EndRecord`] | the guard, or subd if that was killed |
//! | `log`, `log.1` ... | the output | the guard |
//!
//! All but `deadlines.json`, `guard.json` and `failure` are on the medium before anything follows
//! from them. The directory belongs to root alone.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use ::tasks::file::{Limits, Output};
use ::tasks::supervise::End;
use jiff::Timestamp;
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

const LOCK: &str = "lock";
const ATTEMPT: &str = "attempt.json";
const DEADLINES: &str = "deadlines.json";
const GUARD: &str = "guard.json";
const FAILURE: &str = "failure";
const ENDED: &str = "ended.json";

/// The largest of these files that is read, in bytes.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// The longest reason that a program could not be started, in bytes.
const FAILURE_BYTES_MAX: u64 = 1_000;

/// What is started.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spec {
    /// The name of the attempt, which is never used again. Processes of the attempt have it in
    /// their environment.
    pub attempt: String,
    pub task: String,
    pub run: String,
    /// The boot in which it is started.
    pub boot_id: String,
    pub argv: Vec<String>,
    /// The command that tells whether it is healthy.
    pub health: Vec<String>,
    pub user: String,
    pub groups: Vec<String>,
    pub environment: BTreeMap<String, String>,
    pub working_directory: String,
    pub limits: Limits,
    /// The number of the signal that asks it to stop.
    pub stop_signal: i32,
    pub stop_timeout_s: u32,
    pub output: Output,
    /// True if the output goes where that of the guard goes.
    pub has_journal: bool,
    /// The root that it runs in, with mounts and process numbers of its own.
    pub root: Option<PathBuf>,
    /// The cgroup that is made for it.
    pub cgroup: Option<PathBuf>,
}

/// When an attempt must stop. Its guard sees to that, also when there is no subd.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Deadlines {
    /// By the wall clock: the next stop event of its schedule.
    pub stop_at: Option<Timestamp>,
    /// In milliseconds of the clock of the boot: before the permit of an exclusive task ends.
    pub stop_at_boot_ms: Option<u64>,
}

#[derive(Serialize, Deserialize)]
struct DeadlinesRecord {
    attempt: String,
    deadlines: Deadlines,
}

/// Which process watches an attempt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuardRecord {
    pub attempt: String,
    pub pid: i32,
    /// When it was started, in ticks after the boot: a process number may be used again.
    pub started: u64,
}

/// How an attempt ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndRecord {
    pub attempt: String,
    pub end: End,
}

/// The directory of a task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TaskDirectory(pub PathBuf);

/// The lock of a task.
#[derive(Debug)]
pub struct TaskLock {
    _file: Flock<File>,
}

impl TaskDirectory {
    /// Makes the directory, for root alone.
    pub fn make(&self) -> io::Result<()> {
        use std::os::unix::fs::DirBuilderExt;
        match std::fs::DirBuilder::new().mode(0o700).create(&self.0) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
            Ok(()) | Err(_) => Ok(()),
        }
    }

    /// Takes the lock; `None` if another process has it.
    pub fn lock(&self) -> io::Result<Option<TaskLock>> {
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let file = file.open(self.path(LOCK))?;
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => Ok(Some(TaskLock { _file: lock })),
            Err((_, Errno::EWOULDBLOCK)) => Ok(None),
            Err((_, error)) => Err(error.into()),
        }
    }

    pub fn spec(&self) -> io::Result<Option<Spec>> {
        read_json(&self.path(ATTEMPT))
    }

    /// Records what is started next. The caller has the lock.
    pub fn set_spec(&self, _lock: &TaskLock, spec: &Spec) -> io::Result<()> {
        for former in [DEADLINES, GUARD, FAILURE] {
            remove(&self.path(former))?;
        }
        self.replace(ATTEMPT, spec, true)
    }

    /// When `attempt` must stop.
    pub fn deadlines(&self, attempt: &str) -> io::Result<Deadlines> {
        let record = read_json::<DeadlinesRecord>(&self.path(DEADLINES))?;
        let record = record.filter(|record| record.attempt == attempt);
        Ok(record.map(|record| record.deadlines).unwrap_or_default())
    }

    /// Writes when `attempt` must stop. Its guard has to be told.
    pub fn set_deadlines(&self, attempt: &str, deadlines: &Deadlines) -> io::Result<()> {
        let (attempt, deadlines) = (attempt.to_owned(), deadlines.clone());
        self.replace(DEADLINES, &DeadlinesRecord { attempt, deadlines }, false)
    }

    pub fn guard(&self) -> io::Result<Option<GuardRecord>> {
        read_json(&self.path(GUARD))
    }

    pub fn set_guard(&self, _lock: &TaskLock, guard: &GuardRecord) -> io::Result<()> {
        self.replace(GUARD, guard, false)
    }

    pub fn end(&self) -> io::Result<Option<EndRecord>> {
        read_json(&self.path(ENDED))
    }

    /// Records how the attempt ended. The caller has the lock.
    pub fn set_end(&self, _lock: &TaskLock, end: &EndRecord) -> io::Result<()> {
        self.replace(ENDED, end, true)
    }

    /// Opens the file for the reason that the program cannot be started.
    pub fn create_failure(&self) -> io::Result<File> {
        File::create(self.path(FAILURE))
    }

    /// Why the program could not be started, if that is so.
    pub fn failure(&self) -> Option<String> {
        let file = File::open(self.path(FAILURE)).ok()?;
        let mut bytes = Vec::new();
        file.take(FAILURE_BYTES_MAX).read_to_end(&mut bytes).ok()?;
        let text = String::from_utf8_lossy(&bytes).trim_end().to_owned();
        (!text.is_empty()).then_some(text)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    fn replace(&self, name: &str, value: &impl Serialize, durably: bool) -> io::Result<()> {
        let temporary = self.path(&format!("{name}.new"));
        let mut bytes = serde_json::to_vec_pretty(value)?;
        bytes.push(b'\n');
        let mut options = OpenOptions::new();
        let mut file =
            options.write(true).create(true).truncate(true).mode(0o600).open(&temporary)?;
        file.write_all(&bytes)?;
        if durably {
            file.sync_all()?;
        }
        std::fs::rename(&temporary, self.path(name))?;
        if durably { File::open(&self.0)?.sync_all() } else { Ok(()) }
    }
}

fn remove(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        Ok(()) | Err(_) => Ok(()),
    }
}

/// Reads a file; `None` if it is missing or its content is not what was written.
fn read_json<T: DeserializeOwned>(path: &Path) -> io::Result<Option<T>> {
    let file = match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file?,
    };
    let mut bytes = Vec::new();
    file.take(FILE_BYTES_MAX).read_to_end(&mut bytes)?;
    let read = serde_json::from_slice(&bytes);
    Ok(read.inspect_err(|error| tracing::error!(%error, "cannot read {}", path.display())).ok())
}
