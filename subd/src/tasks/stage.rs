//! Becomes the program of a task: enters its cgroup and root, takes its user, groups and limits,
//! and executes it. Only the reason of a failure comes back, in the file `failure`.
//!
//! It is a process of its own, because what happens between fork and exec in a process with threads
//! must not allocate memory.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitCode};

use nix::errno::Errno;
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::stat::{Mode, umask};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{Gid, Pid, Uid, chdir, chroot, setgid, setgroups, setuid};

use crate::tasks::attempt::{Spec, TaskDirectory};
use crate::tasks::guard::OWN_PROGRAM;
use crate::tasks::processes::ATTEMPT_VARIABLE;
use crate::tasks::{STAGE, cgroup};

/// The search path for programs.
pub const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// The devices in another root.
const DEVICES: [&str; 5] = ["null", "zero", "full", "random", "urandom"];

/// What shells exit with if a program cannot be executed.
const NOT_EXECUTED: u8 = 126;

/// Which command of a task is executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    Program,
    HealthCheck,
}

/// The first process of a task that has process numbers of its own: starts the program, waits for
/// its end and takes over the ends of orphans. All that is left is killed when it ends.
pub fn init(directory: &Path) -> ExitCode {
    // The death of the guard, which is outside, ends all.
    let started = set_pdeathsig(Signal::SIGKILL)
        .map_err(io::Error::from)
        .and_then(|()| Command::new(OWN_PROGRAM).arg0("subd").arg(STAGE).arg(directory).spawn());
    let main = match started {
        Ok(child) => i32::try_from(child.id()).ok().map(Pid::from_raw),
        Err(error) => {
            record_failure(&TaskDirectory(directory.to_owned()), &error.to_string());
            return NOT_EXECUTED.into();
        }
    };
    loop {
        let (pid, code) = match waitpid(None, None) {
            Ok(WaitStatus::Exited(pid, code)) => (pid, code),
            Ok(WaitStatus::Signaled(pid, signal, _)) => (pid, 128 + signal as i32),
            Ok(_) | Err(Errno::EINTR) => continue,
            Err(_) => return ExitCode::FAILURE,
        };
        if Some(pid) == main {
            return u8::try_from(code).unwrap_or(u8::MAX).into();
        }
    }
}

/// Executes the program, or the health check, of the attempt that `directory` describes.
pub fn become_program(directory: &Path, part: Part) -> ExitCode {
    let directory = TaskDirectory(directory.to_owned());
    // Opened here, because later it may be out of reach.
    let failure = match part {
        Part::Program => directory.create_failure().ok(),
        Part::HealthCheck => None,
    };
    let Err(text) = execute(&directory, part);
    match failure {
        Some(file) => write_failure(file, &text),
        None => eprintln!("{text}"),
    }
    NOT_EXECUTED.into()
}

fn record_failure(directory: &TaskDirectory, text: &str) {
    if let Ok(file) = directory.create_failure() {
        write_failure(file, text);
    }
}

fn write_failure(mut file: File, text: &str) {
    if let Err(error) = file.write_all(text.as_bytes()) {
        eprintln!("subd: {text} ({error})");
    }
}

fn execute(directory: &TaskDirectory, part: Part) -> Result<std::convert::Infallible, String> {
    let failed = |what: &str| {
        let what = what.to_owned();
        move |error: io::Error| format!("cannot {what}: {error}")
    };
    let of_errno = |what: &str| {
        let failed = failed(what);
        move |error: Errno| failed(error.into())
    };
    let spec = directory.spec().map_err(failed("read the attempt"))?;
    let spec = spec.ok_or("cannot read the attempt: it is gone")?;
    // The guard waits for signals; the program does not.
    SigSet::all().thread_unblock().map_err(of_errno("unblock signals"))?;
    let _refused = std::fs::write("/proc/self/oom_score_adj", "0");
    if let Some(path) = &spec.cgroup {
        cgroup::enter(path).map_err(failed("enter the cgroup"))?;
    }
    if let Some(root) = &spec.root {
        enter_root(root).map_err(failed("enter the root"))?;
    }
    let account = Account::find(Path::new("/"), &spec.user, &spec.groups)?;
    if let Some(files) = spec.limits.open_files {
        setrlimit(Resource::RLIMIT_NOFILE, files.into(), files.into())
            .map_err(of_errno("limit the open files"))?;
    }
    umask(Mode::from_bits_truncate(0o022));
    setgroups(&account.groups).map_err(of_errno("set the groups"))?;
    setgid(account.group).map_err(of_errno("set the group"))?;
    setuid(account.user).map_err(of_errno("set the user"))?;
    if part == Part::Program {
        // After the change of the user, which resets it.
        set_pdeathsig(Signal::SIGKILL).map_err(of_errno("bind it to its guard"))?;
        let guard = directory_guard(&spec, directory);
        if guard.is_some_and(|pid| pid != Pid::parent().as_raw()) {
            return Err("its guard is gone".to_owned());
        }
    }
    let place = &spec.working_directory;
    chdir(place.as_str()).map_err(of_errno(&format!("change to {place}")))?;
    let words = match part {
        Part::Program => &spec.argv,
        Part::HealthCheck => &spec.health,
    };
    let (program, arguments) = words.split_first().ok_or("no program is named")?;
    let mut command = Command::new(program);
    command
        .args(arguments)
        .env_clear()
        .env("PATH", PATH)
        .env("LANG", "C.UTF-8")
        .env("HOME", &account.home)
        .env("USER", &spec.user)
        .env("LOGNAME", &spec.user)
        .envs(&spec.environment)
        .env(ATTEMPT_VARIABLE, &spec.attempt);
    let error = command.exec();
    Err(format!("cannot execute {program}: {error}"))
}

/// Returns the process number of the guard; `None` if it is of another space of numbers, or its
/// record cannot be read any more.
fn directory_guard(spec: &Spec, directory: &TaskDirectory) -> Option<i32> {
    let is_inside = spec.root.is_some();
    let guard = if is_inside { None } else { directory.guard().ok()? };
    guard.filter(|guard| guard.attempt == spec.attempt).map(|guard| guard.pid)
}

/// Makes `root` the root of this process, with mounts of its own.
pub fn enter_root(root: &Path) -> io::Result<()> {
    const NONE: Option<&str> = None;
    unshare(CloneFlags::CLONE_NEWNS)?;
    mount(NONE, "/", NONE, MsFlags::MS_REC | MsFlags::MS_PRIVATE, NONE)?;
    make_devices(&root.join("dev"))?;
    chroot(root)?;
    chdir("/")?;
    if Path::new("/proc").is_dir() {
        let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
        mount(Some("proc"), "/proc", Some("proc"), flags, NONE)?;
    }
    Ok(())
}

/// Puts the devices that every program expects into the directory `dev` of another root, if there
/// is one. Only this process and those below it see them.
fn make_devices(dev: &Path) -> io::Result<()> {
    const NONE: Option<&str> = None;
    if !dev.symlink_metadata().is_ok_and(|metadata| metadata.is_dir()) {
        return Ok(());
    }
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC;
    mount(Some("tmpfs"), dev, Some("tmpfs"), flags, Some("mode=755,size=64k"))?;
    for name in DEVICES {
        let (from, to) = (Path::new("/dev").join(name), dev.join(name));
        File::create(&to)?;
        mount(Some(&from), &to, NONE, MsFlags::MS_BIND, NONE)?;
    }
    Ok(())
}

/// The user of a program, with its numbers.
#[derive(Debug, PartialEq, Eq)]
pub struct Account {
    pub user: Uid,
    pub group: Gid,
    pub groups: Vec<Gid>,
    pub home: String,
}

impl Account {
    /// Looks the user up in the files below `root`. Other databases are not asked.
    pub fn find(root: &Path, user: &str, further: &[String]) -> Result<Self, String> {
        let read = |path: &str| match std::fs::read_to_string(root.join(path)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(String::new()),
            text => text.map_err(|error| format!("cannot read /{path}: {error}")),
        };
        Self::of(user, further, &read("etc/passwd")?, &read("etc/group")?)
    }

    fn of(user: &str, further: &[String], passwd: &str, group: &str) -> Result<Self, String> {
        let field = |line: &str, index: usize| line.split(':').nth(index).map(str::to_owned);
        let named = |text: &str, name: &str| {
            let is_of = |line: &&str| line.split(':').next() == Some(name);
            text.lines().find(is_of).map(str::to_owned)
        };
        let line = match named(passwd, user) {
            Some(line) => line,
            // A root without accounts has root all the same.
            None if user == "root" => "root:x:0:0::/root:".to_owned(),
            None => return Err(format!("/etc/passwd has no user `{user}`")),
        };
        let number = |index| field(&line, index)?.parse::<u32>().ok();
        let (Some(uid), Some(gid)) = (number(2), number(3)) else {
            return Err(format!("/etc/passwd has no numbers of `{user}`"));
        };
        let mut groups = vec![Gid::from_raw(gid)];
        for line in group.lines() {
            let members = field(line, 3).unwrap_or_default();
            let id = field(line, 2).and_then(|id| id.parse().ok());
            if members.split(',').any(|member| member == user) {
                groups.extend(id.map(Gid::from_raw));
            }
        }
        for name in further {
            let line = named(group, name);
            let id = line.and_then(|line| field(&line, 2)?.parse().ok());
            let id = id.ok_or_else(|| format!("/etc/group has no group `{name}`"))?;
            groups.push(Gid::from_raw(id));
        }
        groups.sort_unstable_by_key(|group| group.as_raw());
        groups.dedup();
        let home = field(&line, 5).filter(|home| !home.is_empty());
        let (user, group) = (Uid::from_raw(uid), Gid::from_raw(gid));
        Ok(Self { user, group, groups, home: home.unwrap_or_else(|| "/".to_owned()) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str =
        "root:x:0:0:root:/root:/bin/sh\nlogd:x:104:110::/var/lib/logd:/bin/false\n";
    const GROUP: &str = "root:x:0:\nlogd:x:110:\nadm:x:4:syslog,logd\nssl:x:120:\n";

    #[test]
    fn the_groups_of_a_user_and_further_ones_are_found_in_files() {
        let account = Account::of("logd", &["ssl".to_owned()], PASSWD, GROUP).unwrap();
        let ids: Vec<u32> = account.groups.iter().map(|group| group.as_raw()).collect();
        assert_eq!((account.user.as_raw(), account.group.as_raw()), (104, 110));
        assert_eq!((ids, account.home.as_str()), (vec![4, 110, 120], "/var/lib/logd"));
        let of = |user, further: &[String]| Account::of(user, further, PASSWD, GROUP);
        assert_eq!(of("nobody", &[]), Err("/etc/passwd has no user `nobody`".to_owned()));
        let absent = of("logd", &["ab".to_owned()]);
        assert_eq!(absent, Err("/etc/group has no group `ab`".to_owned()));
        assert_eq!(Account::of("root", &[], "", "").unwrap().user.as_raw(), 0);
    }
}
