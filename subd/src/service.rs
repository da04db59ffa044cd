//! Drives the services of the machine: stop, start, reload, reboot.
//!
//! What is run for a call is decided by [`ServiceDriver::command_line`]; all else here is how a
//! child process is run so that it can do no harm: nothing to read, its output kept to a small
//! tail, a time limit, and a process group of its own, which is killed as a whole.

use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use common::api::subd::TriggerFailure;
use common::trigger::REBOOT;
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe;
use tokio::process::{Child, Command};
use tokio::time::{Instant, timeout, timeout_at};

use crate::update::triggers::{ServiceCall, Verb};

/// How long one command may take.
pub const TIME_MAX: Duration = Duration::from_secs(60);

/// How much of the end of a command's output is kept, in bytes.
pub const OUTPUT_BYTES_MAX: usize = 2 << 10;

/// How long output is awaited after the command itself has ended: what it started may hold the
/// pipe open for ever.
const DRAIN_MAX: Duration = Duration::from_millis(100);

/// How services are driven.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServiceDriver {
    /// These words, followed by the service and the verb.
    Command(Vec<String>),
    /// `systemctl VERB SERVICE`.
    Systemd,
    /// `service SERVICE VERB`.
    SystemV,
    /// Not at all: the root is not that of the running machine.
    Nothing,
}

impl ServiceDriver {
    /// Chooses: the given command, split at white space, if there is one; nothing if the managed
    /// root is not `/`, because the services of this machine are not those of that root; systemd
    /// where it runs; `service` elsewhere.
    #[must_use]
    pub fn choose(command: Option<&str>, manages_this_machine: bool, has_systemd: bool) -> Self {
        let words: Vec<String> =
            command.unwrap_or_default().split_whitespace().map(str::to_owned).collect();
        match (words.is_empty(), manages_this_machine, has_systemd) {
            (false, _, _) => Self::Command(words),
            (true, false, _) => Self::Nothing,
            (true, true, true) => Self::Systemd,
            (true, true, false) => Self::SystemV,
        }
    }

    /// The program and its arguments for `call`; `None` if nothing is to be run.
    #[must_use]
    pub fn command_line(&self, call: &ServiceCall) -> Option<Vec<String>> {
        let words = |words: &[&str]| Some(words.iter().map(|word| (*word).to_owned()).collect());
        let verb = call.verb.name();
        match self {
            Self::Command(command) => {
                let mut line = command.clone();
                line.extend([call.service.clone(), verb.to_owned()]);
                Some(line)
            }
            Self::Systemd if call.verb == Verb::Reboot => words(&["systemctl", "reboot"]),
            Self::Systemd => words(&["systemctl", verb, &call.service]),
            Self::SystemV if call.verb == Verb::Reboot => words(&["reboot"]),
            Self::SystemV => words(&["service", &call.service, verb]),
            Self::Nothing => None,
        }
    }

    /// Carries out `calls` in order, and gives those that failed. A failure does not keep the
    /// others from being carried out.
    pub async fn run_all(&self, calls: &[ServiceCall], limit: Duration) -> Vec<TriggerFailure> {
        let mut failures = Vec::new();
        for call in calls {
            failures.extend(self.run(call, limit).await);
        }
        failures
    }

    /// Reboots the machine.
    pub async fn reboot(&self, limit: Duration) -> Option<TriggerFailure> {
        self.run(&ServiceCall { service: REBOOT.to_owned(), verb: Verb::Reboot }, limit).await
    }

    async fn run(&self, call: &ServiceCall, limit: Duration) -> Option<TriggerFailure> {
        let (service, verb) = (call.service.clone(), call.verb.name().to_owned());
        let Some(line) = self.command_line(call) else {
            tracing::warn!(service, verb, "no service is driven: the root is not this machine's");
            return None;
        };
        tracing::info!(service, verb, command = line.join(" "), "running a trigger");
        match run_command(&line, limit).await {
            Ok(()) => None,
            Err(output) => {
                tracing::error!(service, verb, output, "the trigger failed");
                Some(TriggerFailure { service, verb, output })
            }
        }
    }
}

/// Runs a command; the error is the end of its output and what went wrong.
async fn run_command(line: &[String], limit: Duration) -> Result<(), String> {
    let (program, arguments) = line.split_first().ok_or("the service command is empty")?;
    let broken = |error: std::io::Error| format!("cannot run {program}: {error}");
    let (reader, writer) = std::io::pipe().map_err(broken)?;
    let mut child = Command::new(program)
        .args(arguments)
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(writer.try_clone().map_err(broken)?)
        .stderr(writer)
        .process_group(0)
        .kill_on_drop(true)
        .spawn()
        .map_err(broken)?;
    let mut output = Tail::new(pipe::Receiver::from_owned_fd(reader.into()).map_err(broken)?);
    let status = wait(&mut child, &mut output, limit).await;
    // Nothing waits for whatever else may hold the pipe.
    let _elapsed = timeout(DRAIN_MAX, output.read_to_end()).await;
    match status {
        Some(Ok(status)) if status.success() => Ok(()),
        Some(Ok(status)) => Err(output.with(&status.to_string())),
        Some(Err(error)) => Err(output.with(&format!("cannot wait for it: {error}"))),
        None => {
            kill(&mut child).await;
            Err(output.with(&format!("killed after {} s", limit.as_secs_f32())))
        }
    }
}

/// Waits for the end of the command while its output is read; `None` if it takes too long.
async fn wait(
    child: &mut Child,
    output: &mut Tail,
    limit: Duration,
) -> Option<std::io::Result<ExitStatus>> {
    let deadline = Instant::now() + limit;
    let waiting = async {
        loop {
            tokio::select! {
                status = child.wait() => return status,
                () = output.read(), if !output.ended => {}
            }
        }
    };
    timeout_at(deadline, waiting).await.ok()
}

/// Kills the process group of the command, and buries the command.
async fn kill(child: &mut Child) {
    let group = child.id().and_then(|id| i32::try_from(id).ok());
    if let Some(group) = group
        && let Err(error) = killpg(Pid::from_raw(group), Signal::SIGKILL)
    {
        tracing::warn!(%error, group, "cannot kill the trigger");
    }
    if let Err(error) = child.kill().await {
        tracing::warn!(%error, "cannot kill the trigger");
    }
}

/// The end of what a command wrote.
struct Tail {
    pipe: pipe::Receiver,
    bytes: Vec<u8>,
    ended: bool,
}

impl Tail {
    fn new(pipe: pipe::Receiver) -> Self {
        Self { pipe, bytes: Vec::new(), ended: false }
    }

    async fn read(&mut self) {
        let mut buffer = [0; 1_024];
        match self.pipe.read(&mut buffer).await {
            Ok(0) | Err(_) => self.ended = true,
            Ok(length) => {
                self.bytes.extend_from_slice(&buffer[..length]);
                let excess = self.bytes.len().saturating_sub(OUTPUT_BYTES_MAX);
                self.bytes.drain(..excess);
            }
        }
    }

    async fn read_to_end(&mut self) {
        while !self.ended {
            self.read().await;
        }
    }

    fn with(&self, what: &str) -> String {
        let text = String::from_utf8_lossy(&self.bytes);
        match text.trim_end() {
            "" => what.to_owned(),
            text => format!("{text}\n{what}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(service: &str, verb: Verb) -> ServiceCall {
        ServiceCall { service: service.to_owned(), verb }
    }

    #[test]
    fn each_driver_has_its_command_line() {
        let given = ServiceDriver::choose(Some(" sh /x  -v "), false, false);
        let table = [
            (&given, Verb::Stop, "sh /x -v ssh stop"),
            (&ServiceDriver::Systemd, Verb::Reload, "systemctl reload ssh"),
            (&ServiceDriver::Systemd, Verb::Reboot, "systemctl reboot"),
            (&ServiceDriver::SystemV, Verb::Start, "service ssh start"),
            (&ServiceDriver::SystemV, Verb::Reboot, "reboot"),
        ];
        for (driver, verb, line) in table {
            assert_eq!(driver.command_line(&call("ssh", verb)).unwrap().join(" "), line);
        }
        let nothing = ServiceDriver::choose(None, false, true);
        assert_eq!(nothing.command_line(&call("ssh", Verb::Stop)), None);
        assert_eq!(ServiceDriver::choose(None, true, true), ServiceDriver::Systemd);
        assert_eq!(ServiceDriver::choose(Some(" "), true, false), ServiceDriver::SystemV);
    }

    fn shell(script: &str) -> Vec<String> {
        ["sh", "-c", script].map(str::to_owned).into()
    }

    #[tokio::test]
    async fn keeps_the_end_of_the_output_of_what_fails() {
        let long = Duration::from_secs(60);
        assert_eq!(run_command(&shell("echo fine"), long).await, Ok(()));
        let failed = run_command(&shell("echo out; echo err >&2; exit 3"), long).await;
        assert_eq!(failed, Err("out\nerr\nexit status: 3".to_owned()));
        let noisy = run_command(&shell("yes | head -c 100000; exit 1"), long).await.unwrap_err();
        assert_eq!(noisy.len(), OUTPUT_BYTES_MAX - 1 + "\nexit status: 1".len());
        let absent = run_command(&["/nonexistent".to_owned()], long).await.unwrap_err();
        assert!(absent.starts_with("cannot run /nonexistent: "), "{absent}");
    }

    #[tokio::test]
    async fn what_hangs_is_killed_with_all_that_it_started() {
        let script = "echo before; sleep 1000 & echo $!; sleep 1000";
        let failed = run_command(&shell(script), Duration::from_millis(300)).await.unwrap_err();
        let lines: Vec<&str> = failed.lines().collect();
        assert_eq!([lines[0], lines[2]], ["before", "killed after 0.3 s"]);
        let child = std::path::PathBuf::from(format!("/proc/{}/stat", lines[1]));
        let ended = || match std::fs::read_to_string(&child) {
            Ok(stat) => stat.contains(") Z "),
            Err(_) => true,
        };
        assert!(
            ended() || {
                tokio::time::sleep(Duration::from_millis(200)).await;
                ended()
            }
        );
    }

    #[tokio::test]
    async fn what_runs_on_in_the_background_is_not_waited_for() {
        let started = Instant::now();
        let script = shell("(exec sleep 5) & exit 0");
        assert_eq!(run_command(&script, Duration::from_secs(60)).await, Ok(()));
        assert!(started.elapsed() < Duration::from_secs(4));
    }
}
