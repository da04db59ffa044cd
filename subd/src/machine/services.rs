//! Stops, starts and reloads the services of the machine, and reboots it.
//!
//! [`ServiceDriver::command_line`] decides which program is run for a call. [`command`] runs it, or
//! [`super::command_runner`] if an operator gave the command. All of it blocks, and starts no
//! thread.

use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use api::subd::TriggerFailure;
use model::trigger::REBOOT;
use model::trigger::services::{ServiceCall, Verb};

use crate::machine::command::{self, CommandEnd};
use crate::machine::command_runner::CommandRunner;

/// How long one command may take.
pub const TIME_MAX: Duration = Duration::from_secs(60);

/// What systemctl and init scripts exit with when there is no such service.
const NOT_INSTALLED: i32 = 5;

/// Where init scripts are.
const INIT_SCRIPTS: &str = "/etc/init.d";

/// How services are driven.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServiceDriver {
    /// These words, followed by the service and the verb.
    Command(Vec<String>, CommandRunner),
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
    pub fn choose(command: Option<&str>, manages_this_machine: bool, has_systemd: bool) -> Self {
        let words: Vec<String> =
            command.unwrap_or_default().split_whitespace().map(str::to_owned).collect();
        let command_runner = CommandRunner::choose(manages_this_machine, has_systemd);
        match (words.is_empty(), manages_this_machine, has_systemd) {
            (false, _, _) => Self::Command(words, command_runner),
            (true, false, _) => Self::Nothing,
            (true, true, true) => Self::Systemd,
            (true, true, false) => Self::SystemV,
        }
    }

    /// The program and its arguments for `call`; `None` if nothing is to be run.
    pub fn command_line(&self, call: &ServiceCall) -> Option<Vec<String>> {
        let words = |words: &[&str]| Some(words.iter().map(|word| (*word).to_owned()).collect());
        let verb = call.verb.name();
        match self {
            Self::Command(command, _) => {
                let mut line = command.clone();
                line.extend([call.service.clone(), verb.to_owned()]);
                Some(line)
            }
            Self::Systemd if call.verb == Verb::Reboot => words(&["systemctl", "reboot"]),
            // It would wait for its own end.
            Self::Systemd if call.verb == Verb::Restart => {
                words(&["systemctl", "restart", "--no-block", &call.service])
            }
            Self::Systemd => words(&["systemctl", verb, &call.service]),
            Self::SystemV if call.verb == Verb::Reboot => words(&["reboot"]),
            Self::SystemV => words(&["service", &call.service, verb]),
            Self::Nothing => None,
        }
    }

    /// Carries out `calls` in order, and gives those that failed. A failure does not keep the
    /// others from being carried out.
    pub fn run_all(&self, calls: &[ServiceCall], limit: Duration) -> Vec<TriggerFailure> {
        let mut failures = Vec::new();
        if calls.iter().any(|call| call.verb != Verb::Stop) {
            self.reread_units(limit);
        }
        for call in calls {
            failures.extend(self.run(call, limit));
        }
        failures
    }

    /// Asks the system to reboot the machine; that it has gone down is another matter.
    pub fn reboot(&self, limit: Duration) -> Option<TriggerFailure> {
        self.run(&ServiceCall::new(REBOOT, Verb::Reboot), limit)
    }

    /// Has subd's own service, called `service`, restarted: this process is told to stop then. It
    /// is not waited for.
    pub fn restart_own(&self, service: &str, limit: Duration) -> Option<TriggerFailure> {
        let call = ServiceCall::new(service, Verb::Restart);
        self.reread_units(limit);
        match self {
            Self::Systemd | Self::Nothing => self.run(&call, limit),
            Self::Command(..) | Self::SystemV => {
                let line = self.command_line(&call)?;
                tracing::info!(service, command = line.join(" "), "restarting subd");
                command::start_detached(&line).err().map(|error| {
                    let output = format!("cannot run it: {error}");
                    failure(&call, output)
                })
            }
        }
    }

    /// Lets systemd see what an update changed of its units, without which it would start what
    /// they said before.
    fn reread_units(&self, limit: Duration) {
        if *self == Self::Systemd {
            let line = ["systemctl", "daemon-reload"].map(str::to_owned);
            let ended = command::run(&line, limit);
            if !ended.succeeded() {
                tracing::error!(output = ended.text(), "systemd does not read its units again");
            }
        }
    }

    fn run(&self, call: &ServiceCall, limit: Duration) -> Option<TriggerFailure> {
        let (service, verb) = (&call.service, call.verb.name());
        let Some(line) = self.command_line(call) else {
            tracing::warn!(service, verb, "no service is driven: the root is not this machine's");
            return None;
        };
        tracing::info!(service, verb, command = line.join(" "), "running a trigger");
        let ended = match self {
            Self::Command(_, command_runner) => command_runner.run_service_command(&line, limit),
            Self::Systemd | Self::SystemV | Self::Nothing => command::run(&line, limit),
        };
        if ended.succeeded() {
            return None;
        }
        let output = ended.text();
        if call.verb == Verb::Stop && self.knows_no(service, &ended.end) {
            tracing::info!(service, output, "there is no such service to stop");
            return None;
        }
        if call.may_fail {
            tracing::info!(service, verb, output, "that failed; the service may not be there");
            return None;
        }
        Some(failure(call, output))
    }

    /// True if a command for `service` that failed and ended so did because there is no such
    /// service.
    fn knows_no(&self, service: &str, end: &CommandEnd) -> bool {
        let says_so = matches!(end, CommandEnd::Exited(NOT_INSTALLED));
        match self {
            Self::Systemd => says_so,
            // What `service` itself exits with then is what scripts exit with for other reasons.
            Self::SystemV => says_so || !has_init_script(service),
            Self::Command(..) | Self::Nothing => false,
        }
    }
}

/// True if `service` finds a script to run; one that may not be executed is none to it.
fn has_init_script(service: &str) -> bool {
    match fs_err::metadata(Path::new(INIT_SCRIPTS).join(service)) {
        Ok(script) => script.mode() & 0o111 != 0,
        Err(error) => error.kind() != ErrorKind::NotFound,
    }
}

fn failure(call: &ServiceCall, output: String) -> TriggerFailure {
    let (service, verb) = (call.service.clone(), call.verb.name().to_owned());
    tracing::error!(service, verb, output, "the trigger failed");
    TriggerFailure { service, verb, output }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_driver_has_its_command_line() {
        let given = ServiceDriver::choose(Some(" sh /x  -v "), false, false);
        let table = [
            (&given, Verb::Stop, "sh /x -v ssh stop"),
            (&ServiceDriver::Systemd, Verb::Reload, "systemctl reload ssh"),
            (&ServiceDriver::Systemd, Verb::Reboot, "systemctl reboot"),
            (&ServiceDriver::Systemd, Verb::Restart, "systemctl restart --no-block ssh"),
            (&ServiceDriver::SystemV, Verb::Restart, "service ssh restart"),
            (&ServiceDriver::SystemV, Verb::Start, "service ssh start"),
            (&ServiceDriver::SystemV, Verb::Reboot, "reboot"),
        ];
        for (driver, verb, line) in table {
            assert_eq!(
                driver.command_line(&ServiceCall::new("ssh", verb)).unwrap().join(" "),
                line
            );
        }
        let nothing = ServiceDriver::choose(None, false, true);
        assert_eq!(nothing.command_line(&ServiceCall::new("ssh", Verb::Stop)), None);
        assert_eq!(ServiceDriver::choose(None, true, true), ServiceDriver::Systemd);
        assert_eq!(ServiceDriver::choose(Some(" "), true, false), ServiceDriver::SystemV);
    }

    #[test]
    fn a_failure_keeps_nothing_else_from_being_done() {
        let script = "echo $1 $2; test $1 != bad";
        let words = ["sh", "-c", script, "sh"].map(str::to_owned).into();
        let driver = ServiceDriver::Command(words, CommandRunner::Child);
        let absent = ServiceCall { may_fail: true, ..ServiceCall::new("bad", Verb::Start) };
        let calls =
            [ServiceCall::new("bad", Verb::Stop), absent, ServiceCall::new("good", Verb::Start)];
        let failed = TriggerFailure {
            service: "bad".to_owned(),
            verb: "stop".to_owned(),
            output: "bad stop\nexit status: 1".to_owned(),
        };
        assert_eq!(driver.run_all(&calls, TIME_MAX), [failed]);
        assert_eq!(driver.reboot(TIME_MAX), None);
    }
}
