//! The processes of an attempt: the descendants of its guard, and those with its name in their
//! environment.

use std::collections::{BTreeMap, BTreeSet};
use std::io;

use nix::sys::signal::Signal;
use rustix::process::{Pid, PidfdFlags, pidfd_open, pidfd_send_signal};

/// The variable that has the name of the attempt.
pub const ATTEMPT_VARIABLE: &str = "SUBD_TASK_ATTEMPT";

/// A process, which another with the same number later is not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Process {
    pub pid: i32,
    /// When it was started, in ticks after the boot.
    pub started: u64,
}

/// A process, its parent, and whether it has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Status {
    process: Process,
    parent: i32,
    is_zombie: bool,
}

/// Reads `/proc/PID/stat`.
fn status(pid: i32, stat: &str) -> Option<Status> {
    // The name, in parentheses, may hold anything.
    let (_, fields) = stat.rsplit_once(") ")?;
    let fields: Vec<&str> = fields.split(' ').collect();
    Some(Status {
        process: Process { pid, started: fields.get(19)?.parse().ok()? },
        parent: fields.get(1)?.parse().ok()?,
        is_zombie: matches!(*fields.first()?, "Z" | "X"),
    })
}

impl Process {
    /// Returns the process with that number, if there is one.
    #[must_use]
    pub fn find(pid: i32) -> Option<Self> {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        Some(status(pid, &stat)?.process)
    }

    /// Opens it; `None` if it has ended.
    pub fn open(self) -> io::Result<Option<std::os::fd::OwnedFd>> {
        let Some(pid) = Pid::from_raw(self.pid) else { return Ok(None) };
        let descriptor = match pidfd_open(pid, PidfdFlags::empty()) {
            Err(rustix::io::Errno::SRCH) => return Ok(None),
            descriptor => descriptor?,
        };
        // Looked at after it was opened: so it is this one that is open.
        Ok(Self::find(self.pid).filter(|found| *found == self).map(|_| descriptor))
    }

    /// Sends `signal`, unless it has ended.
    pub fn signal(self, signal: Signal) -> io::Result<()> {
        let Some(descriptor) = self.open()? else { return Ok(()) };
        let signal = rustix::process::Signal::from_named_raw(signal as i32);
        let Some(signal) = signal else { return Ok(()) };
        match pidfd_send_signal(&descriptor, signal) {
            Err(rustix::io::Errno::SRCH) => Ok(()),
            other => Ok(other?),
        }
    }
}

fn all() -> io::Result<Vec<Status>> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir("/proc")? {
        let name = entry?.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse().ok()) else { continue };
        // It may have ended meanwhile.
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"));
        all.extend(stat.ok().and_then(|stat| status(pid, &stat)));
    }
    Ok(all)
}

/// Returns the live processes below `ancestor`.
pub fn descendants(ancestor: i32) -> io::Result<BTreeSet<Process>> {
    Ok(below(ancestor, &all()?))
}

fn below(ancestor: i32, all: &[Status]) -> BTreeSet<Process> {
    let mut children: BTreeMap<i32, Vec<&Status>> = BTreeMap::new();
    for status in all {
        children.entry(status.parent).or_default().push(status);
    }
    let (mut found, mut waiting) = (BTreeSet::new(), vec![ancestor]);
    while let Some(parent) = waiting.pop() {
        for status in children.remove(&parent).unwrap_or_default() {
            waiting.push(status.process.pid);
            if !status.is_zombie {
                found.insert(status.process);
            }
        }
    }
    found
}

/// Returns the live processes that have the name of `attempt` in their environment.
pub fn of_attempt(attempt: &str) -> io::Result<BTreeSet<Process>> {
    let wanted = format!("{ATTEMPT_VARIABLE}={attempt}");
    let is_of_attempt = |status: &Status| {
        let environment = std::fs::read(format!("/proc/{}/environ", status.process.pid));
        !status.is_zombie
            && environment.is_ok_and(|environment| {
                environment.split(|byte| *byte == 0).any(|one| one == wanted.as_bytes())
            })
    };
    Ok(all()?.into_iter().filter(is_of_attempt).map(|status| status.process).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_parentheses_hides_nothing() {
        let after = "S 7 9 9 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 12345 1000";
        let found = status(8, &format!("8 (a) b) ) {after}")).unwrap();
        let process = Process { pid: 8, started: 12_345 };
        assert_eq!(found, Status { process, parent: 7, is_zombie: false });
        assert_eq!(status(8, "8 (a) S"), None);
    }

    #[test]
    fn children_of_children_belong_to_it() {
        let status = |pid, parent, is_zombie| Status {
            process: Process { pid, started: 1 },
            parent,
            is_zombie,
        };
        let all = [
            status(1, 0, false),
            status(2, 1, false),
            status(3, 2, true),
            status(4, 3, false),
            status(5, 1, false),
        ];
        let pids: Vec<i32> = below(2, &all).iter().map(|process| process.pid).collect();
        assert_eq!(pids, [4]);
    }

    #[test]
    fn only_the_same_process_is_opened() {
        let own = Process::find(std::process::id().try_into().unwrap()).unwrap();
        assert!(own.open().unwrap().is_some());
        let other = Process { started: own.started + 1, ..own };
        assert!(other.open().unwrap().is_none());
    }
}
