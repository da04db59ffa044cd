//! Runs commands that operators and images give outside of subd: in a cgroup of their own, with the
//! limits and the priority of services, not with those of subd.
//!
//! Where systemd runs it starts the command; that needs the system bus. Elsewhere the command is a
//! child of subd, which has no limits and no sandbox there, and whose threads of low priority start
//! no commands.

use std::path::Path;
use std::time::{Duration, Instant};

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
