//! Runs commands that operators give, such as health checks, outside of subd: in a cgroup of their
//! own, with the limits and the priority of services, not with those of subd.
//!
//! Where systemd runs it starts the command; that needs the system bus. Elsewhere the command is a
//! child of subd, which has no limits and no sandbox there, and whose threads of low priority start
//! no commands.

use std::path::Path;
use std::time::{Duration, Instant};

use api::subd::Health;
use model::image::HealthCheck;

use crate::machine::command::{self, CommandEnd, CommandResult};

/// How long systemd may take after the time limit to kill the command.
const GRACE: Duration = Duration::from_secs(10);

/// The socket of the system bus.
const BUS: &str = "/run/dbus/system_bus_socket";

/// How commands are run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommandRunner {
    Child,
    /// By systemd, as units of their own, where its bus can be reached.
    Systemd,
}

impl CommandRunner {
    /// Chooses systemd where it runs. Commands for another root are not run by this machine's
    /// systemd.
    pub fn choose(manages_this_machine: bool, has_systemd: bool) -> Self {
        if manages_this_machine && has_systemd { Self::Systemd } else { Self::Child }
    }

    /// Runs the program `line[0]` with the other words as its arguments, for at most `limit`, and
    /// kills it soon after `is_unwanted` has become true. Under systemd its background processes
    /// end with it. Blocks.
    #[must_use]
    pub fn run(
        self,
        line: &[String],
        limit: Duration,
        is_unwanted: &dyn Fn() -> bool,
    ) -> CommandResult {
        self.run_as("control-group", line, limit, is_unwanted)
    }

    /// As [`CommandRunner::run`], for a command that may leave a service running.
    #[must_use]
    pub fn run_service_command(self, line: &[String], limit: Duration) -> CommandResult {
        self.run_as("process", line, limit, &|| false)
    }

    fn run_as(
        self,
        kill_mode: &str,
        line: &[String],
        limit: Duration,
        is_unwanted: &dyn Fn() -> bool,
    ) -> CommandResult {
        if self == Self::Child || !Path::new(BUS).exists() {
            return command::run_unless(line, limit, is_unwanted);
        }
        let started = Instant::now();
        let line = by_systemd(line, limit, kill_mode);
        let ended = command::run_unless(&line, limit + GRACE, is_unwanted);
        if started.elapsed() >= limit && !ended.succeeded() {
            return CommandResult { end: CommandEnd::TimedOut(limit), ..ended };
        }
        ended
    }
}

/// Returns the command that runs `line` by systemd, waits for its end, and passes on its output and
/// its exit code.
fn by_systemd(line: &[String], limit: Duration, kill_mode: &str) -> Vec<String> {
    let flags = ["systemd-run", "--quiet", "--collect", "--wait", "--pipe", "--service-type=exec"];
    let limit = format!("--property=RuntimeMaxSec={}ms", limit.as_millis().max(1));
    let kill_mode = format!("--property=KillMode={kill_mode}");
    let flags = flags.into_iter().map(str::to_owned);
    flags.chain([limit, kill_mode, "--".to_owned()]).chain(line.iter().cloned()).collect()
}

/// The pause after a failed try.
const AGAIN_AFTER: Duration = Duration::from_secs(1);

/// The longest time of a check, whatever the image says.
const WITHIN_MAX: Duration = Duration::from_secs(24 * 3_600);

/// The shortest time limit of one try.
const TRY_MIN: Duration = Duration::from_secs(1);

/// Runs the command of `check` again and again until it exits with code 0, for as long as `check`
/// says. Blocks. `stopped` waits for the given time and returns whether subd is being stopped. Then
/// the result is `None`: a check that fails now may fail because the machine is shut down.
pub fn check_health(
    check: &HealthCheck,
    command_runner: CommandRunner,
    stopped: impl Fn(Duration) -> bool,
) -> Option<Health> {
    let within = Duration::from_secs(check.within_seconds.into()).min(WITHIN_MAX);
    let started = Instant::now();
    loop {
        let left = within.saturating_sub(started.elapsed());
        let ended =
            command_runner.run(&check.command, left.max(TRY_MIN), &|| stopped(Duration::ZERO));
        if ended.succeeded() {
            return Some(Health::Passed);
        }
        if stopped(Duration::ZERO) {
            return None;
        }
        let text = ended.text();
        tracing::warn!(output = text, "the health check failed");
        let left = within.saturating_sub(started.elapsed());
        if left <= AGAIN_AFTER {
            let seconds = within.as_secs();
            return Some(Health::Failed(format!("{text}\nit did not pass within {seconds} s")));
        }
        if stopped(AGAIN_AFTER) {
            return None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn systemd_is_asked_only_for_its_own_machine() {
        assert_eq!(CommandRunner::choose(true, true), CommandRunner::Systemd);
        assert_eq!(CommandRunner::choose(true, false), CommandRunner::Child);
        assert_eq!(CommandRunner::choose(false, true), CommandRunner::Child);
        let line = ["check", "--all"].map(str::to_owned);
        assert_eq!(
            by_systemd(&line, Duration::from_secs(3), "process").join(" "),
            "systemd-run --quiet --collect --wait --pipe --service-type=exec \
             --property=RuntimeMaxSec=3000ms --property=KillMode=process -- check --all"
        );
    }
}

#[cfg(test)]
mod health_tests {
    use super::*;

    fn shell(script: &str, within_seconds: u32) -> HealthCheck {
        let command = ["sh", "-c", script].map(str::to_owned).into();
        HealthCheck { command, within_seconds, undo: true }
    }

    /// As if the time had passed.
    fn never(_: Duration) -> bool {
        false
    }

    #[test]
    fn it_is_tried_until_it_passes() {
        let place = tempfile::tempdir().unwrap();
        let file = place.path().join("tries").display().to_string();
        let script = format!("echo try >> {file}; test $(wc -l < {file}) -ge 3");
        assert_eq!(
            check_health(&shell(&script, 60), CommandRunner::Child, never),
            Some(Health::Passed)
        );
        assert_eq!(std::fs::read_to_string(&file).unwrap().lines().count(), 3);
    }

    #[test]
    fn what_it_said_last_is_told() {
        let failed = check_health(&shell("echo no; exit 4", 0), CommandRunner::Child, never);
        let text = "no\nexit status: 4\nit did not pass within 0 s".to_owned();
        assert_eq!(failed, Some(Health::Failed(text)));
        let hangs = check_health(&shell("echo slow; sleep 1000", 1), CommandRunner::Child, never);
        let text = "slow\nkilled after 1 s\nit did not pass within 1 s".to_owned();
        assert_eq!(hangs, Some(Health::Failed(text)));
    }

    #[test]
    fn a_check_that_is_interrupted_says_nothing() {
        assert_eq!(check_health(&shell("exit 1", 60), CommandRunner::Child, |_| true), None);
        let waiting = |time: Duration| !time.is_zero();
        assert_eq!(check_health(&shell("exit 1", 60), CommandRunner::Child, waiting), None);
    }
}
