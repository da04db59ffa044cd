//! The calls of a program, as strace tells them, and what is done in the place of one.
//!
//! strace counts the calls of one name and one thread, so that a call is its name and a number. In
//! the place of a call that is disturbed nothing happens but the disturbance.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::process::{Command, Output};

/// A path where nothing is: who looks there says that the change begins now.
pub const BEGIN: &str = "/nowhere/begin";

/// The same at its end.
pub const END: &str = "/nowhere/end";

/// What is done in the place of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    Kill,
    Io,
    Space,
}

impl Fault {
    fn injected(self) -> &'static str {
        match self {
            Self::Kill => "signal=KILL",
            Self::Io => "error=EIO",
            Self::Space => "error=ENOSPC",
        }
    }
}

/// A call: its name, and its number among those of that name, from 1.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    pub name: String,
    pub number: usize,
    pub kind: Kind,
}

impl fmt::Display for Call {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}:{}", self.name, self.number)
    }
}

/// What a call does to files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// It changes something, or waits for the medium.
    Change,
    /// It only looks.
    Look,
}

/// What a call of this name does; `None` if it has nothing to do with files.
fn kind(name: &str, arguments: &str) -> Option<Kind> {
    let makes = arguments.contains("O_CREAT") || arguments.contains("O_TRUNC");
    match name {
        "openat" if makes => Some(Kind::Change),
        "fsync" | "fdatasync" | "ftruncate" | "link" | "linkat" | "mkdir" | "mkdirat"
        | "rename" | "renameat" | "renameat2" | "rmdir" | "syncfs" | "unlink" | "unlinkat"
        | "write" | "pwrite64" | "writev" | "copy_file_range" => Some(Kind::Change),
        "openat" | "read" | "pread64" | "statx" | "fstat" | "newfstatat" | "fstatfs" | "statfs"
        | "lseek" | "getdents64" | "access" | "readlink" | "fadvise64" => Some(Kind::Look),
        "brk" | "close" | "fcntl" | "futex" | "getrandom" | "madvise" | "mmap" | "mprotect"
        | "mremap" | "munmap" | "rt_sigprocmask" | "sched_yield" | "clock_gettime"
        | "sched_getaffinity" => None,
        _ => panic!("nothing is known of the call {name}({arguments}: tell this file what it does"),
    }
}

/// Runs `command` undisturbed, and gives the calls that it made between the two marks.
pub fn list(command: &Command, log: &Path) -> (Output, Vec<Call>) {
    let output = run(command, log, &["-y", "-s", "0"]);
    let text = String::from_utf8_lossy(&std::fs::read(log).unwrap()).into_owned();
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    let mut calls = Vec::new();
    let mut begun = false;
    for line in text.lines() {
        let Some((name, arguments)) = line.split_once('(') else { continue };
        if name.contains(' ') {
            continue;
        }
        let count = counts.entry(name).or_default();
        *count += 1;
        match () {
            () if arguments.contains(BEGIN) => begun = true,
            () if arguments.contains(END) => return (output, calls),
            () if begun => {
                let kind = kind(name, arguments);
                let call = |kind| Call { name: name.to_owned(), number: *count, kind };
                calls.extend(kind.map(call));
            }
            () => {}
        }
    }
    panic!("the program did not come to its end: {output:?}");
}

/// Runs `command` with `fault` in the place of `call`.
///
/// # Errors
///
/// If it never came to that call.
pub fn disturb(command: &Command, log: &Path, call: &Call, fault: Fault) -> Result<Output, String> {
    let trace = format!("trace={}", call.name);
    let inject = format!("inject={}:{}:when={}", call.name, fault.injected(), call.number);
    let output = run(command, log, &["-e", &trace, "-e", &inject]);
    let text = String::from_utf8_lossy(&std::fs::read(log).unwrap()).into_owned();
    let happened = match fault {
        Fault::Kill => text.contains("killed by SIGKILL"),
        _ => text.contains("(INJECTED)"),
    };
    if happened { Ok(output) } else { Err(format!("it was not disturbed: {output:?}")) }
}

/// Runs `command` with syncs that do nothing, and say that they did.
pub fn without_syncs(command: &Command, log: &Path) -> Output {
    let syncs = "fsync,fdatasync,syncfs";
    run(command, log, &["-e", &format!("trace={syncs}"), "-e", &format!("inject={syncs}:retval=0")])
}

fn run(command: &Command, log: &Path, options: &[&str]) -> Output {
    let mut strace = Command::new("strace");
    strace.arg("-o").arg(log).args(options).arg("--").arg(command.get_program());
    strace.args(command.get_args());
    for (key, value) in command.get_envs() {
        if let Some(value) = value {
            strace.env(key, value);
        }
    }
    strace.output().expect("strace can be run: install it")
}
