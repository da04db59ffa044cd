//! Runs one command of the machine with limits: it has no input, only the end of its output is
//! kept, it has a time limit, and a process group of its own, which is killed as a whole.
//!
//! It is synchronous and starts no thread, because the executor of updates runs commands between
//! its steps and has one thread only: one `poll` waits for the output, the end of the command and
//! the time limit.
//!
//! # Invariants
//!
//! * At most [`OUTPUT_BYTES_MAX`] bytes of output are in memory.
//! * What the command leaves running in the background is not waited for.
//! * After [`run`] the command itself has ended, and its exit status was read.

use std::fmt;
use std::io::{self, PipeReader, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use rustix::process::{PidfdFlags, pidfd_open};

/// How much of the end of the output is kept, in bytes.
pub const OUTPUT_BYTES_MAX: usize = 2 << 10;

/// How often `is_unwanted` is asked.
const UNWANTED_CHECK_INTERVAL: Duration = Duration::from_millis(500);

/// The search path for programs if subd has none in its environment.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// How a command ended.
#[derive(Debug)]
pub enum CommandEnd {
    /// It exited with this code.
    Exited(i32),
    Killed(i32),
    /// It exceeded this limit and was killed with its process group.
    TimedOut(Duration),
    /// It was no longer wanted, and was killed with its process group.
    GivenUp,
    /// It could not be run or waited for.
    Broken {
        /// What could not be done.
        what: String,
        source: io::Error,
    },
}

impl fmt::Display for CommandEnd {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exited(code) => write!(formatter, "exit status: {code}"),
            Self::Killed(signal) => write!(formatter, "signal: {signal}"),
            Self::TimedOut(limit) => write!(formatter, "killed after {} s", limit.as_secs_f32()),
            Self::GivenUp => formatter.write_str("given up"),
            Self::Broken { what, source } => write!(formatter, "cannot {what}: {source}"),
        }
    }
}

/// The end and the output of a command.
#[derive(Debug)]
pub struct CommandResult {
    pub end: CommandEnd,
    /// The end of its standard output and error, mixed as they were written: at most
    /// [`OUTPUT_BYTES_MAX`] bytes before they are made text.
    pub output: String,
}

impl CommandResult {
    /// True if it exited with code 0.
    pub fn succeeded(&self) -> bool {
        matches!(self.end, CommandEnd::Exited(0))
    }

    /// The output and how it ended, for reports.
    pub fn text(&self) -> String {
        match self.output.as_str() {
            "" => self.end.to_string(),
            output => format!("{output}\n{}", self.end),
        }
    }
}

/// Runs the program `line[0]` with the other words as its arguments, for at most `limit`. Blocks.
#[must_use]
pub fn run(line: &[String], limit: Duration) -> CommandResult {
    run_unless(line, limit, &|| false)
}

/// As [`run`], but kills the command soon after `is_unwanted` has become true.
#[must_use]
pub fn run_unless(
    line: &[String],
    limit: Duration,
    is_unwanted: &dyn Fn() -> bool,
) -> CommandResult {
    let deadline = Instant::now() + limit;
    match Running::start(line) {
        Ok(mut running) => {
            let end = match running.wait(deadline, is_unwanted) {
                Ok(Some(status)) => end_of(status),
                Ok(None) => {
                    running.kill();
                    if Instant::now() < deadline {
                        CommandEnd::GivenUp
                    } else {
                        CommandEnd::TimedOut(limit)
                    }
                }
                Err(source) => {
                    running.kill();
                    CommandEnd::Broken { what: "wait for it".to_owned(), source }
                }
            };
            // The last output is in the pipe already. Other processes that hold the pipe are not
            // waited for.
            running.output.take();
            CommandResult { end, output: running.output.text() }
        }
        Err(source) => {
            let what = format!("run {}", line.first().map_or("an empty command", String::as_str));
            CommandResult { end: CommandEnd::Broken { what, source }, output: String::new() }
        }
    }
}

/// Starts a command that nobody waits for and that outlives subd. Its output is discarded.
pub fn start_detached(line: &[String]) -> io::Result<()> {
    // The shell ends at once, so that the command is not a child of subd.
    let script = r#"exec setsid -- "$@" & "#;
    let shell = ["sh", "-c", script, "sh"].map(str::to_owned);
    let line: Vec<String> = shell.into_iter().chain(line.iter().cloned()).collect();
    let status = command_of(&line)?.stdout(Stdio::null()).stderr(Stdio::null()).status()?;
    if status.success() { Ok(()) } else { Err(io::Error::other(status.to_string())) }
}

/// Returns the command with the environment that every command gets: that of the machine, not of
/// subd.
fn command_of(line: &[String]) -> io::Result<Command> {
    let (program, arguments) = line
        .split_first()
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "no program is named"))?;
    let mut command = Command::new(program);
    let path = std::env::var_os("PATH").unwrap_or_else(|| PATH.into());
    command
        .args(arguments)
        .current_dir("/")
        .env_clear()
        .env("PATH", path)
        .env("HOME", "/root")
        .env("LANG", "C.UTF-8")
        .stdin(Stdio::null())
        .process_group(0);
    Ok(command)
}

fn end_of(status: ExitStatus) -> CommandEnd {
    match (status.code(), status.signal()) {
        (Some(code), _) => CommandEnd::Exited(code),
        (None, signal) => CommandEnd::Killed(signal.unwrap_or_default()),
    }
}

/// A command that runs.
struct Running {
    child: Child,
    /// Readable when the command itself has ended.
    ended: OwnedFd,
    output: OutputTail,
}

impl Running {
    fn start(line: &[String]) -> io::Result<Self> {
        let (reader, writer) = io::pipe()?;
        let flags = OFlag::from_bits_retain(fcntl(&reader, FcntlArg::F_GETFL)?);
        fcntl(&reader, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
        let mut command = command_of(line)?;
        command.stdout(writer.try_clone()?).stderr(writer);
        let mut child = command.spawn()?;
        // `command` holds the writing ends of the pipe.
        drop(command);
        let pid = rustix::process::Pid::from_child(&child);
        match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(ended) => {
                let output = OutputTail { pipe: reader, bytes: Vec::new(), ended: false };
                Ok(Self { child, ended, output })
            }
            Err(error) => {
                kill_group(&child);
                let _status = child.wait()?;
                Err(error.into())
            }
        }
    }

    /// Reads the output until the command ends; `None` if it takes too long, or is no longer
    /// wanted.
    fn wait(
        &mut self,
        deadline: Instant,
        is_unwanted: &dyn Fn() -> bool,
    ) -> io::Result<Option<ExitStatus>> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            // In whole milliseconds, rounded up, so that it does not spin before the deadline.
            let left = (left + Duration::from_micros(999)).min(UNWANTED_CHECK_INTERVAL);
            let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
            let (ended, readable) = {
                let mut events = [
                    PollFd::new(self.ended.as_fd(), PollFlags::POLLIN),
                    PollFd::new(self.output.pipe.as_fd(), PollFlags::POLLIN),
                ];
                let watched = if self.output.ended { 1 } else { 2 };
                match poll(&mut events[..watched], timeout) {
                    Ok(_) | Err(Errno::EINTR) => {}
                    Err(error) => return Err(error.into()),
                }
                let fired = |event: &PollFd<'_>| event.any().unwrap_or(false);
                (fired(&events[0]), watched == 2 && fired(&events[1]))
            };
            if readable {
                self.output.take();
            }
            if ended {
                return self.child.wait().map(Some);
            }
            if Instant::now() >= deadline || is_unwanted() {
                return Ok(None);
            }
        }
    }

    /// Kills the process group of the command, and reads its exit status.
    fn kill(&mut self) {
        kill_group(&self.child);
        if let Err(error) = self.child.kill().and_then(|()| self.child.wait()) {
            tracing::warn!(%error, "cannot kill a command");
        }
    }
}

fn kill_group(child: &Child) {
    let Ok(group) = i32::try_from(child.id()) else { return };
    if let Err(error) = killpg(Pid::from_raw(group), Signal::SIGKILL) {
        tracing::warn!(%error, group, "cannot kill a command");
    }
}

/// The end of the output of a command.
struct OutputTail {
    pipe: PipeReader,
    bytes: Vec<u8>,
    ended: bool,
}

impl OutputTail {
    /// How much is read before the clock is read again, in bytes: a command that writes without end
    /// must not exceed its limit.
    const TAKE_BYTES_MAX: usize = 1 << 20;

    /// Reads the available output.
    fn take(&mut self) {
        let mut buffer = [0; 4_096];
        let mut taken = 0;
        while !self.ended && taken < Self::TAKE_BYTES_MAX {
            match self.pipe.read(&mut buffer) {
                Ok(0) => self.ended = true,
                Ok(length) => {
                    taken += length;
                    self.bytes.extend_from_slice(&buffer[..length]);
                    let excess = self.bytes.len().saturating_sub(OUTPUT_BYTES_MAX);
                    self.bytes.drain(..excess);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) => {
                    tracing::warn!(%error, "cannot read what a command writes");
                    self.ended = true;
                }
            }
        }
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes).trim_end().to_owned()
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    fn shell(script: &str) -> Vec<String> {
        ["sh", "-c", script].map(str::to_owned).into()
    }

    /// Waits until the process is gone or a zombie.
    fn ends(pid: &str) -> bool {
        let stat = PathBuf::from(format!("/proc/{pid}/stat"));
        let deadline = Instant::now() + Duration::from_secs(10);
        while Instant::now() < deadline {
            match std::fs::read_to_string(&stat) {
                Ok(stat) if !stat.contains(") Z ") => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                _ => return true,
            }
        }
        false
    }

    #[test]
    fn keeps_the_end_of_the_output_and_tells_how_it_ended() {
        let fine = run(&shell("echo fine"), LONG);
        assert_eq!((fine.succeeded(), fine.output.as_str()), (true, "fine"));
        let failed = run(&shell("echo out; echo err >&2; exit 3"), LONG);
        assert_eq!(failed.text(), "out\nerr\nexit status: 3");
        let noisy = run(&shell("yes | head -c 100000; exit 1"), LONG).text();
        assert_eq!(noisy.len(), OUTPUT_BYTES_MAX - 1 + "\nexit status: 1".len());
        assert_eq!(run(&shell("kill -9 $$"), LONG).text(), "signal: 9");
        let absent = run(&["/nonexistent".to_owned()], LONG).text();
        assert!(absent.starts_with("cannot run /nonexistent: "), "{absent}");
        assert!(run(&[], LONG).text().starts_with("cannot run an empty command: "));
    }

    #[test]
    fn what_hangs_is_killed_with_all_that_it_started() {
        let script = "echo before; sleep 1000 & echo $!; sleep 1000";
        let failed = run(&shell(script), Duration::from_millis(300)).text();
        let lines: Vec<&str> = failed.lines().collect();
        assert_eq!([lines[0], lines[2]], ["before", "killed after 0.3 s"]);
        assert!(ends(lines[1]));
    }

    #[test]
    fn what_never_stops_writing_is_killed_too() {
        let failed = run(&shell("yes"), Duration::from_millis(300)).text();
        assert!(failed.ends_with("y\nkilled after 0.3 s"), "{failed}");
        // Its output is closed, so there is nothing to wait for but itself.
        let silent = run(&shell("exec >&- 2>&-; sleep 1000"), Duration::from_millis(300)).text();
        assert_eq!(silent, "killed after 0.3 s");
    }

    #[test]
    fn what_nobody_waits_for_any_more_is_killed() {
        let ended = run_unless(&shell("echo said; sleep 1000"), LONG, &|| true);
        assert!(ended.text().ends_with("given up"), "{}", ended.text());
    }

    #[test]
    fn what_runs_on_in_the_background_is_not_waited_for() {
        let ended = run(&shell("sleep 1000 & echo $!"), LONG);
        assert!(ended.succeeded());
        let background = Pid::from_raw(ended.output.parse().unwrap());
        nix::sys::signal::kill(background, Signal::SIGKILL).unwrap();
    }

    #[test]
    fn has_surroundings_of_its_own() {
        let script = "pwd; cat; umask; echo ${HOME}; env | cut -d= -f1 | sort | tr '\\n' ' '";
        let ended = run(&shell(script), LONG);
        assert_eq!(ended.output, "/\n0022\n/root\nHOME LANG PATH PWD");
    }

    #[test]
    fn a_detached_command_outlives_its_starter() {
        let place = tempfile::tempdir().unwrap();
        let (go, done) = (place.path().join("go"), place.path().join("done"));
        let script = format!(
            "while ! test -e {}; do sleep 0.01; done; ps -o sid= $$ > {}",
            go.display(),
            done.display()
        );
        start_detached(&shell(&script)).unwrap();
        std::fs::write(&go, "").unwrap();
        let deadline = Instant::now() + Duration::from_secs(10);
        while !done.exists() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(done.exists());
    }
}
