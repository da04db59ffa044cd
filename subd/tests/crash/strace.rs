//! Programs under strace: which calls they make, and how one call is made to fail.
//!
//! strace counts the calls of each thread for itself, so what is counted has one thread. A call is
//! named by its name and its number among the calls of that name, as `when=` takes it. What a
//! signal or an error is injected into does not happen: the kernel is told to make another call,
//! or none.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::process::Command;

/// What a call is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// It changes the file-system, or waits for the medium.
    Change,
    /// It looks at the file-system.
    Look,
    /// It makes a process or waits for one.
    Process,
    /// None of these.
    Harmless,
    /// The look by which a program says that its work begins now, at [`MARK`].
    Mark,
}

/// A path where nothing is.
pub const MARK: &str = "/nowhere/begin";

const CHANGES: &str = "
    chmod chown copy_file_range creat fallocate fchmod fchmodat fchmodat2 fchown fchownat
    fdatasync fremovexattr fsetxattr fsync ftruncate lchown link linkat lremovexattr lsetxattr
    mkdir mkdirat mknod mknodat mount move_mount removexattr removexattrat rename renameat
    renameat2 rmdir setxattr setxattrat symlink symlinkat sync sync_file_range syncfs truncate
    umount2 unlink unlinkat utimensat
";

/// Those that change something if the file is one of the machine.
const WRITES: &str = "
    pwrite64 pwritev pwritev2 sendfile splice write writev
";

/// Those that change something if they may make or empty a file.
const OPENS: [&str; 3] = ["open", "openat", "openat2"];

const LOOKS: &str = "
    access faccessat faccessat2 fgetxattr flistxattr fstat fstatfs getdents64 getxattr
    lgetxattr listxattr llistxattr lseek lstat newfstatat open_tree pread64 read readlink
    readlinkat readv stat statfs statx fadvise64
";

const PROCESSES: &str = "
    clone clone3 execve fork vfork wait4 waitid
";

const HARMLESS: &str = "
    arch_prctl brk capget clock_gettime clock_nanosleep close close_range dup dup2 dup3
    epoll_create1 epoll_ctl epoll_wait eventfd2 exit exit_group fcntl flock futex getcwd getegid
    geteuid getgid getpid getpriority getrandom getrlimit getrusage getsockopt gettid getuid
    ioprio_set kill landlock_create_ruleset madvise mmap mprotect mremap munmap nanosleep
    pidfd_open pidfd_send_signal pipe2 poll ppoll prctl prlimit64 pselect6 recvfrom recvmsg
    restart_syscall rseq rt_sigaction rt_sigprocmask rt_sigreturn sched_getaffinity
    sched_yield sendmsg set_robust_list set_tid_address setpriority sigaltstack socketpair
    sysinfo tgkill umask uname
";

/// Those that wait for the medium.
const SYNCS: [&str; 3] = ["fdatasync", "fsync", "syncfs"];

/// Those that the service command makes too, so that its processes must not be traced with.
const SHARED: &str = "
    clone clone3 execve fork ioctl openat read vfork wait4 waitid write fstat
";

/// One call of a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// Its name.
    pub name: String,
    /// Its number among the calls of that name, from 1.
    pub number: usize,
    /// What it is.
    pub class: Class,
}

impl fmt::Display for Call {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}:{}", self.name, self.number)
    }
}

/// What is done to a program instead of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// It is killed.
    Kill,
    /// The call fails with EIO.
    Io,
    /// The call fails with ENOSPC.
    Space,
}

impl Fault {
    /// The word for it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Kill => "kill",
            Self::Io => "eio",
            Self::Space => "enospc",
        }
    }
}

/// A call and what happens instead of it.
#[derive(Clone, Debug)]
pub struct Point {
    /// The call.
    pub call: Call,
    /// What happens.
    pub fault: Fault,
}

impl fmt::Display for Point {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}:{}", self.fault.name(), self.call)
    }
}

/// What is done to a program.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    /// The points at which it is disturbed, each of another name.
    pub points: Vec<Point>,
    /// True to let all calls that wait for the medium do nothing, and say that they did.
    pub no_sync: bool,
}

impl From<&Point> for Faults {
    fn from(point: &Point) -> Self {
        Self { points: vec![point.clone()], no_sync: false }
    }
}

impl Faults {
    /// The same, and `point`.
    pub fn and(mut self, point: &Point) -> Self {
        self.points.push(point.clone());
        self
    }

    /// True if the program is killed.
    pub fn kill(&self) -> bool {
        self.points.iter().any(|point| point.fault == Fault::Kill)
    }

    /// What `command` is run by, so that this happens and all its calls are written to `log`.
    pub fn trace(&self, command: &Command, log: &Path) -> Command {
        let mut strace = Command::new("strace");
        strace.args(["-y", "-s", "0", "-o"]).arg(log);
        for injection in self.injections() {
            strace.arg("-e").arg(injection);
        }
        run_by(strace, command)
    }

    /// What `command` is run by, so that this happens; that it did is then in `log`.
    pub fn inject(&self, command: &Command, log: &Path) -> Command {
        let mut strace = Command::new("strace");
        strace.arg("-o").arg(log);
        let shared = |point: &Point| is_in(&point.call.name, SHARED);
        // With children, because strace is far faster then: it stops at no other call. It also
        // ends only when they have. Signals it cannot inject so.
        if !self.kill() && !self.points.iter().any(shared) {
            strace.args(["-f", "--seccomp-bpf"]);
        }
        let mut names: Vec<&str> = self.points.iter().map(|point| &*point.call.name).collect();
        if self.no_sync {
            names.extend(SYNCS);
        }
        strace.arg("-e").arg(format!("trace={}", names.join(",")));
        for injection in self.injections() {
            strace.arg("-e").arg(injection);
        }
        run_by(strace, command)
    }

    fn injections(&self) -> Vec<String> {
        let injection = |point: &Point| {
            let Call { name, number, .. } = &point.call;
            let what = match point.fault {
                Fault::Kill => "signal=KILL",
                Fault::Io => "error=EIO",
                Fault::Space => "error=ENOSPC",
            };
            format!("inject={name}:{what}:when={number}")
        };
        let mut injections: Vec<String> = self.points.iter().map(injection).collect();
        if self.no_sync {
            injections.push(format!("inject={}:retval=0", SYNCS.join(",")));
        }
        injections
    }

    /// True if `log` says that all of it happened.
    pub fn happened(&self, log: &Path) -> bool {
        let text = std::fs::read(log).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let errors = self.points.iter().filter(|point| point.fault != Fault::Kill).count();
        text.matches("(INJECTED)").count() >= errors
            && text.contains("killed by SIGKILL") == self.kill()
    }
}

fn run_by(mut strace: Command, command: &Command) -> Command {
    strace.arg("--").arg(command.get_program()).args(command.get_args());
    for (key, value) in command.get_envs() {
        match value {
            Some(value) => strace.env(key, value),
            None => strace.env_remove(key),
        };
    }
    strace
}

/// The calls in `log`, as [`Faults::trace`] writes it; `machine` is where the program may change
/// files.
///
/// # Panics
///
/// If there is a call of which is not known what it does: then this file has to be told.
pub fn calls(log: &Path, machine: &Path) -> Vec<Call> {
    let text = std::fs::read(log).unwrap();
    let text = String::from_utf8_lossy(&text);
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    let mut calls = Vec::new();
    for line in text.lines() {
        let Some((name, rest)) = line.split_once('(') else { continue };
        if name.contains(' ') {
            continue;
        }
        let count = counts.entry(name).or_default();
        *count += 1;
        let class = class(name, rest, &machine.to_string_lossy());
        calls.push(Call { name: name.to_owned(), number: *count, class });
    }
    calls
}

fn is_in(name: &str, list: &str) -> bool {
    list.split_whitespace().any(|listed| listed == name)
}

fn class(name: &str, rest: &str, machine: &str) -> Class {
    let has = |flags: &[&str]| flags.iter().any(|flag| rest.contains(flag));
    match name {
        _ if rest.contains(MARK) => Class::Mark,
        _ if is_in(name, CHANGES) => Class::Change,
        _ if OPENS.contains(&name) && has(&["O_CREAT", "O_TRUNC", "O_TMPFILE"]) => Class::Change,
        // What a command is given to read.
        _ if OPENS.contains(&name) && has(&["\"/dev/null\""]) => Class::Harmless,
        _ if OPENS.contains(&name) => Class::Look,
        _ if is_in(name, WRITES) => match rest.split_once('>') {
            // What is reached through subd's own mount is named from the top of that.
            Some((file, _)) if file.contains(machine) || file.contains("</.subd/") => Class::Change,
            _ => Class::Harmless,
        },
        "ioctl" if has(&["FICLONE", "SETFLAGS", "FSSETXATTR"]) => Class::Change,
        "ioctl" => Class::Look,
        _ if is_in(name, LOOKS) => Class::Look,
        _ if is_in(name, PROCESSES) => Class::Process,
        _ if is_in(name, HARMLESS) => Class::Harmless,
        _ => panic!("nothing is known of the call {name}({rest}: tell this file what it does"),
    }
}
