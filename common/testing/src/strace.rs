//! Runs programs under strace: lists the system calls they make, and makes one call fail.
//!
//! strace counts calls per thread, so the program must have one thread. A call is identified by its
//! name and its number among the calls of that name, as `when=` takes it. A call into which a
//! signal or an error is injected is not carried out.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::process::Command;

/// What a call does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Changes the file-system, or waits for the medium.
    Change,
    /// Reads from the file-system.
    Look,
    /// Makes a process or waits for one.
    Process,
    /// None of these.
    Harmless,
    /// The program looks at [`MARK`], to mark the begin or the end of its work in the trace.
    Mark,
}

/// A path that does not exist.
pub const MARK: &str = "/nowhere/mark";

const CHANGES: &str = "
    chmod chown copy_file_range creat fallocate fchmod fchmodat fchmodat2 fchown fchownat
    fdatasync fremovexattr fsetxattr fsync ftruncate lchown link linkat lremovexattr lsetxattr
    mkdir mkdirat mknod mknodat mount move_mount removexattr removexattrat rename renameat
    renameat2 rmdir setxattr setxattrat symlink symlinkat sync sync_file_range syncfs truncate
    umount2 unlink unlinkat utimensat
";

/// Calls that change something if the file is below the examined directory.
const WRITES: &str = "
    pwrite64 pwritev pwritev2 sendfile splice write writev
";

/// Calls that change something if their flags create or empty a file.
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

/// Calls that wait for the medium.
const SYNCS: [&str; 3] = ["fdatasync", "fsync", "syncfs"];

/// Calls that child processes make too. If one of these is disturbed, children must not be traced.
const SHARED: &str = "
    clone clone3 execve fork ioctl openat read vfork wait4 waitid write fstat
";

/// One call of a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    pub name: String,
    /// The number among the calls of that name, from 1.
    pub number: usize,
    pub class: Class,
}

impl fmt::Display for Call {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}:{}", self.name, self.number)
    }
}

/// What happens instead of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The program is killed.
    Kill,
    /// The call fails with EIO.
    Io,
    /// The call fails with ENOSPC.
    Space,
}

impl Fault {
    fn name(self) -> &'static str {
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
    pub call: Call,
    pub fault: Fault,
}

impl fmt::Display for Point {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}:{}", self.fault.name(), self.call)
    }
}

/// Returns a point with `fault` for each of `calls` whose class is `wanted`.
#[must_use]
pub fn points(calls: &[Call], wanted: impl Fn(Class) -> bool, fault: Fault) -> Vec<Point> {
    let wanted = calls.iter().filter(|call| wanted(call.class));
    wanted.map(|call| Point { call: call.clone(), fault }).collect()
}

/// All disturbances of one run of a program.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    /// The points at which it is disturbed. Their calls have different names.
    pub points: Vec<Point>,
    /// True to turn all calls that wait for the medium into successes without effect.
    pub no_sync: bool,
    /// True if the program leaves children that run on: they are neither disturbed nor waited for.
    pub leaves_children: bool,
}

impl From<&Point> for Faults {
    fn from(point: &Point) -> Self {
        Self { points: vec![point.clone()], ..Self::default() }
    }
}

impl Faults {
    /// Returns `self` with `point` added.
    #[must_use]
    pub fn and(mut self, point: &Point) -> Self {
        self.points.push(point.clone());
        self
    }

    /// Returns true if the program is killed.
    #[must_use]
    pub fn kill(&self) -> bool {
        self.points.iter().any(|point| point.fault == Fault::Kill)
    }

    /// Returns `command` under strace, with these faults. All its calls are written to `log`.
    #[must_use]
    pub fn trace(&self, command: &Command, log: &Path) -> Command {
        let mut strace = Command::new("strace");
        strace.args(["-y", "-s", "0", "-o"]).arg(log);
        for injection in self.injections() {
            strace.arg("-e").arg(injection);
        }
        run_by(strace, command)
    }

    /// Returns `command` under strace, with these faults. Only the calls of the faults' names are
    /// written to `log`.
    #[must_use]
    pub fn inject(&self, command: &Command, log: &Path) -> Command {
        let mut strace = Command::new("strace");
        strace.arg("-o").arg(log);
        let shared = |point: &Point| is_in(&point.call.name, SHARED);
        // With children, because strace is far faster then: it stops at no other call. It also
        // ends only when they have ended. It cannot inject signals this way.
        if !self.leaves_children && !self.kill() && !self.points.iter().any(shared) {
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

    /// Returns true if `log` shows that each of these faults happened.
    #[must_use]
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

/// Returns the calls in `log`, as [`Faults::trace`] writes it. `directory` is where the program may
/// change files.
///
/// # Panics
///
/// If a call is in none of the lists of this module: add it to one.
#[must_use]
pub fn calls(log: &Path, directory: &Path) -> Vec<Call> {
    let text = fs_err::read(log).expect("strace wrote a log");
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
        let class = class(name, rest, &directory.to_string_lossy());
        calls.push(Call { name: name.to_owned(), number: *count, class });
    }
    calls
}

fn is_in(name: &str, list: &str) -> bool {
    list.split_whitespace().any(|listed| listed == name)
}

fn class(name: &str, rest: &str, directory: &str) -> Class {
    let has = |flags: &[&str]| flags.iter().any(|flag| rest.contains(flag));
    match name {
        _ if rest.contains(MARK) => Class::Mark,
        _ if is_in(name, CHANGES) => Class::Change,
        _ if OPENS.contains(&name) && has(&["O_CREAT", "O_TRUNC", "O_TMPFILE"]) => Class::Change,
        // The standard input of a command.
        _ if OPENS.contains(&name) && has(&["\"/dev/null\""]) => Class::Harmless,
        _ if OPENS.contains(&name) => Class::Look,
        _ if is_in(name, WRITES) => match rest.split_once('>') {
            // Paths that subd reaches through its own mount start at the top of that mount.
            Some((file, _)) if file.contains(directory) || file.contains("</.subd/") => {
                Class::Change
            }
            _ => Class::Harmless,
        },
        "ioctl" if has(&["FICLONE", "SETFLAGS", "FSSETXATTR"]) => Class::Change,
        "ioctl" => Class::Look,
        _ if is_in(name, LOOKS) => Class::Look,
        _ if is_in(name, PROCESSES) => Class::Process,
        _ if is_in(name, HARMLESS) => Class::Harmless,
        _ => panic!("the call {name}({rest} is in no list of {}: add it to one", file!()),
    }
}
