//! Becomes a plugin: enters its root, takes its user, and executes it.
//!
//! The plugin is opened before that, because its user cannot reach it. It is executed by its
//! descriptor, which is the only one that it inherits.

use std::convert::Infallible;
use std::fs::File;
use std::io::ErrorKind;
use std::os::fd::AsRawFd as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::Duration;

use model::display::error_chain;
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::sched::{CloneFlags, unshare};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::Signal;
use nix::unistd::{Pid, chdir, getpid, getppid, setgid, setgroups, setuid};
use system::clock::since_boot;

use crate::provisioning::STAGE;
use crate::tasks::guard::OWN_PROGRAM;
use crate::tasks::stage::{Account, PATH, enter_root};

/// How often it is looked whether a plugin with an end has ended. The time that a machine sleeps
/// counts, so nothing is waited for that would not notice it.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);

/// What shells exit with if a program cannot be executed.
const NOT_EXECUTED: u8 = 126;

/// Starts what becomes the plugin, with process numbers of its own: when the plugin ends, so does
/// all that it has started. With `ends_at_ms` all of it is killed then, or when subd ends.
pub fn init(ends_at_ms: &str, words: &[&str]) -> ExitCode {
    let ends_at = ends_at_ms.parse().map_or(Duration::MAX, Duration::from_millis);
    let run = || {
        let subd = getppid();
        unshare(CloneFlags::CLONE_NEWPID)?;
        let mut child = Command::new(OWN_PROGRAM).arg0("subd").arg(STAGE).args(words).spawn()?;
        if ends_at == Duration::MAX {
            return child.wait();
        }
        loop {
            if let Some(status) = child.try_wait()? {
                return Ok(status);
            }
            let left = ends_at.saturating_sub(since_boot());
            if left.is_zero() || getppid() != subd {
                child.kill()?;
                return child.wait();
            }
            std::thread::sleep(left.min(LOOK_INTERVAL));
        }
    };
    match run() {
        Ok(status) => {
            let code = status.code().and_then(|code| u8::try_from(code).ok());
            ExitCode::from(code.unwrap_or(u8::MAX))
        }
        Err(error) => {
            eprintln!("cannot start the plugin: {error}");
            NOT_EXECUTED.into()
        }
    }
}

/// Executes the plugin as `user` in `root`.
pub fn become_plugin(root: &Path, user: &str, plugin: &Path, verb: &str) -> ExitCode {
    let Err(text) = execute(root, user, plugin, verb);
    eprintln!("{text}");
    NOT_EXECUTED.into()
}

fn execute(root: &Path, user: &str, plugin: &Path, verb: &str) -> Result<Infallible, String> {
    fn failed<E: std::error::Error>(what: &str) -> impl Fn(E) -> String {
        let what = what.to_owned();
        move |error| format!("cannot {what}: {}", error_chain(&error))
    }
    let file = File::open(plugin).map_err(failed("open the plugin"))?;
    fcntl(&file, FcntlArg::F_SETFD(FdFlag::empty())).map_err(failed("pass the plugin on"))?;
    if root != Path::new("/") {
        enter_root(root).map_err(failed("enter the root"))?;
    }
    let account = Account::find(Path::new("/"), user, &[])?;
    setgroups(&[account.group]).map_err(failed("set the groups"))?;
    setgid(account.group).map_err(failed("set the group"))?;
    setuid(account.user).map_err(failed("set the user"))?;
    if getpid() == Pid::from_raw(1) {
        // If [`init`] is killed, this is too, and the kernel then kills all that it has started.
        set_pdeathsig(Signal::SIGKILL).map_err(failed("end with its parent"))?;
    }
    chdir("/").map_err(failed("change to /"))?;
    let error = Command::new(format!("/proc/self/fd/{}", file.as_raw_fd()))
        .arg(verb)
        .env_clear()
        .env("PATH", PATH)
        .env("HOME", &account.home)
        .env("USER", user)
        .env("LOGNAME", user)
        .exec();
    let hint = match error.kind() {
        ErrorKind::NotFound => ": what runs it, or /proc, is not in the root",
        _ => "",
    };
    Err(format!("cannot execute the plugin: {error}{hint}"))
}
