//! A daemon as a process that can be started, killed and stopped.

use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// The most time that a daemon may take to stop after SIGTERM.
const STOP_MAX: Duration = Duration::from_secs(15);

/// A daemon. Stopped when dropped.
pub struct Daemon {
    name: String,
    program: PathBuf,
    arguments: Vec<OsString>,
    log: PathBuf,
    child: Option<Child>,
}

impl Daemon {
    /// Starts `program`, with `arguments`; its output is appended to the file `log`.
    ///
    /// # Errors
    ///
    /// If it cannot be started.
    pub fn start(
        name: &str,
        program: &Path,
        arguments: Vec<OsString>,
        log: PathBuf,
    ) -> anyhow::Result<Self> {
        let (name, program) = (name.to_owned(), program.to_owned());
        let mut daemon = Self { name, program, arguments, log, child: None };
        daemon.start_again()?;
        Ok(daemon)
    }

    /// Starts it again after [`Daemon::kill`] or [`Daemon::stop`].
    ///
    /// # Errors
    ///
    /// If it cannot be started.
    pub fn start_again(&mut self) -> anyhow::Result<()> {
        let mut options = std::fs::OpenOptions::new();
        let log = options
            .create(true)
            .append(true)
            .open(&self.log)
            .with_context(|| format!("cannot open {}", self.log.display()))?;
        let child = Command::new(&self.program)
            .args(&self.arguments)
            .stdin(Stdio::null())
            // Ctrl-C must reach only the parent, which then stops the daemons in order.
            .process_group(0)
            .stdout(log.try_clone().context("cannot duplicate a descriptor")?)
            .stderr(log)
            .spawn()
            .with_context(|| format!("cannot start {}", self.program.display()))?;
        self.child = Some(child);
        Ok(())
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the file with its output.
    pub fn log(&self) -> &Path {
        &self.log
    }

    /// Returns its process id while it runs.
    pub fn id(&self) -> Option<u32> {
        self.child.as_ref().map(Child::id)
    }

    /// Kills it with SIGKILL: no chance to clean up.
    ///
    /// # Errors
    ///
    /// If it was not running.
    pub fn kill(&mut self) -> anyhow::Result<()> {
        let Some(mut child) = self.child.take() else { bail!("{} is not running", self.name) };
        child.kill().with_context(|| format!("cannot kill {}", self.name))?;
        child.wait().with_context(|| format!("cannot wait for {}", self.name))?;
        Ok(())
    }

    /// Sends SIGTERM, and waits until the daemon has stopped.
    ///
    /// # Errors
    ///
    /// If it does not stop in time (it is killed then), or does not end with success.
    pub fn stop(&mut self) -> anyhow::Result<()> {
        let Some(mut child) = self.child.take() else { return Ok(()) };
        match end(&mut child).with_context(|| format!("cannot stop {}", self.name))? {
            Some(status) if status.success() => Ok(()),
            Some(status) => bail!("{} ended with {status}; see {}", self.name, self.log.display()),
            None => bail!("{} did not stop within {STOP_MAX:?} of SIGTERM", self.name),
        }
    }

    /// Fails if it has ended by itself.
    ///
    /// # Errors
    ///
    /// With its exit status and the end of its log.
    pub fn check(&mut self) -> anyhow::Result<()> {
        let Some(child) = &mut self.child else { return Ok(()) };
        if let Some(status) = child.try_wait().context("cannot wait")? {
            let log = std::fs::read_to_string(&self.log).unwrap_or_default();
            let lines: Vec<&str> = log.lines().collect();
            let end = lines[lines.len().saturating_sub(10)..].join("\n");
            bail!("{} ended with {status}:\n{end}", self.name);
        }
        Ok(())
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // The exit status is available only through `stop`.
        if let Some(Err(error)) = self.child.as_mut().map(end) {
            eprintln!("warning: cannot stop {}: {error}", self.name);
        }
    }
}

/// Ends a process with SIGTERM. If that has no effect, kills it with SIGKILL and returns no status.
fn end(child: &mut Child) -> std::io::Result<Option<ExitStatus>> {
    let start = Instant::now();
    if child.try_wait()?.is_none() {
        let id = i32::try_from(child.id()).map_err(std::io::Error::other)?;
        kill(Pid::from_raw(id), Signal::SIGTERM)?;
    }
    while start.elapsed() < STOP_MAX {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    child.kill()?;
    child.wait()?;
    Ok(None)
}
