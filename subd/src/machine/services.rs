//! The service manager: stops, starts and reloads services, reboots the machine, and reports to
//! systemd that subd is ready, alive or stopping.
//!
//! [`ServiceDriver::command_line`] decides which program is run for a call. [`command`] runs it, or
//! [`crate::machine::command_runner`] if an operator gave the command. All of it blocks, and starts
//! no thread. Without `NOTIFY_SOCKET` in the environment nothing is reported.

use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use api::subd::TriggerFailure;
use model::tree::Time;
use model::trigger::REBOOT;
use model::trigger::services::{ServiceCall, ServiceVerb};
use sd_notify::NotifyState;
use system::clock::wall;
use tokio_util::sync::CancellationToken;

use crate::machine::command::{self, CommandEnd};
use crate::machine::command_runner::CommandRunner;

/// The exit code of systemctl and init scripts for an unknown service.
const NOT_INSTALLED: i32 = 5;

/// How many lines of the journal a failure of a service has.
const JOURNAL_LINES: &str = "10";

/// How long reading the journal may take.
const JOURNAL_TIME_MAX: Duration = Duration::from_secs(10);

/// The transient unit of systemd that forces a reboot.
const FORCED_REBOOT: &str = "subd-forced-reboot.service";

/// The directory of init scripts.
const INIT_SCRIPTS: &str = "/etc/init.d";

/// The way in which services are controlled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServiceDriver {
    /// These words, followed by the service and the verb.
    Command(Vec<String>, CommandRunner),
    /// `systemctl VERB SERVICE`.
    Systemd,
    /// `service SERVICE VERB`.
    SystemV,
    /// Not at all: the root is not that of this machine.
    Nothing,
}

impl ServiceDriver {
    /// Chooses: the given command, split at white space, if there is one; nothing if the managed
    /// root is not `/`, because the services of this machine are not those of that root; systemd
    /// where it runs; `service` elsewhere.
    pub fn choose(command: Option<&str>, manages_this_machine: bool, has_systemd: bool) -> Self {
        let given: Vec<String> =
            command.unwrap_or_default().split_whitespace().map(str::to_owned).collect();
        let command_runner = CommandRunner::choose(manages_this_machine, has_systemd);
        match (given.is_empty(), manages_this_machine, has_systemd) {
            (false, _, _) => Self::Command(given, command_runner),
            (true, false, _) => Self::Nothing,
            (true, true, true) => Self::Systemd,
            (true, true, false) => Self::SystemV,
        }
    }

    /// Returns the program and its arguments for `call`; `None` if nothing is run.
    pub fn command_line(&self, call: &ServiceCall) -> Option<Vec<String>> {
        let line = |words: &[&str]| Some(words.iter().map(|word| (*word).to_owned()).collect());
        let verb = call.verb.name();
        match self {
            Self::Command(command, _) => {
                let mut line = command.clone();
                line.extend([call.service.clone(), verb.to_owned()]);
                Some(line)
            }
            Self::Systemd if call.verb == ServiceVerb::Reboot => line(&["systemctl", "reboot"]),
            // Otherwise it would wait for its own end.
            Self::Systemd if call.verb == ServiceVerb::Restart => {
                line(&["systemctl", "restart", "--no-block", &call.service])
            }
            Self::Systemd => line(&["systemctl", verb, &call.service]),
            Self::SystemV if call.verb == ServiceVerb::Reboot => line(&["reboot"]),
            Self::SystemV => line(&["service", &call.service, verb]),
            Self::Nothing => None,
        }
    }

    /// Carries out all `calls` in order, also after a failure. Returns those that failed.
    pub fn run_all(&self, calls: &[ServiceCall], limit: Duration) -> Vec<TriggerFailure> {
        let mut failures = Vec::new();
        if calls.iter().any(|call| call.verb != ServiceVerb::Stop) {
            self.reread_units(limit);
        }
        for call in calls {
            failures.extend(self.run(call, limit));
        }
        failures
    }

    /// Asks the system to reboot the machine. Does not wait for it. If the machine is still up
    /// after `force_after`, systemd forces the reboot.
    pub fn reboot(&self, limit: Duration, force_after: Duration) -> Option<TriggerFailure> {
        let is_systemd = *self == Self::Systemd;
        if is_systemd {
            // No part of the shutdown ends this unit, and it does not need subd.
            let script = format!("sleep {}; exec systemctl reboot --force", force_after.as_secs());
            let unit = format!("--unit={FORCED_REBOOT}");
            let options = ["--quiet", "--collect", "--property=DefaultDependencies=no"];
            let line = ["systemd-run", &unit].into_iter().chain(options);
            let line = line.chain(["--", "/bin/sh", "-c", &script]).map(str::to_owned);
            let ended = command::run(&line.collect::<Vec<_>>(), limit);
            if !ended.succeeded() {
                // It is there already if the reboot is requested again.
                tracing::warn!(output = ended.text(), "a shutdown that hangs is not forced");
            }
        }
        let failure = self.run(&ServiceCall::new(REBOOT, ServiceVerb::Reboot), limit);
        if is_systemd && failure.is_some() {
            let line = ["systemctl", "stop", FORCED_REBOOT].map(str::to_owned);
            let _ended = command::run(&line, limit);
        }
        failure
    }

    /// Restarts subd's own service, called `service`, which stops this process. Does not wait for
    /// that.
    pub fn restart_own(&self, service: &str, limit: Duration) -> Option<TriggerFailure> {
        let call = ServiceCall::new(service, ServiceVerb::Restart);
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

    /// Has systemd read its units again, which an update may have changed.
    fn reread_units(&self, limit: Duration) {
        if *self == Self::Systemd {
            let line = ["systemctl", "daemon-reload"].map(str::to_owned);
            let ended = command::run(&line, limit);
            if !ended.succeeded() {
                tracing::error!(output = ended.text(), "systemd cannot reload its units");
            }
        }
    }

    fn run(&self, call: &ServiceCall, limit: Duration) -> Option<TriggerFailure> {
        let (service, verb) = (&call.service, call.verb.name());
        let Some(line) = self.command_line(call) else {
            tracing::warn!(
                service,
                verb,
                "no service command is run: the root is not that of this machine"
            );
            return None;
        };
        tracing::info!(service, verb, command = line.join(" "), "running a trigger");
        let began = wall();
        let ended = match self {
            Self::Command(_, command_runner) => command_runner.run_service_command(&line, limit),
            Self::Systemd | Self::SystemV | Self::Nothing => command::run(&line, limit),
        };
        if ended.succeeded() {
            return None;
        }
        let output = ended.text();
        if call.verb == ServiceVerb::Stop && self.knows_no(service, &ended.end) {
            tracing::info!(service, output, "there is no such service to stop");
            return None;
        }
        if call.may_fail {
            tracing::info!(service, verb, output, "the trigger failed; the service may not exist");
            return None;
        }
        let output = match self.journal_of(call, began) {
            Some(journal) => format!("{output}\n{journal}"),
            None => output,
        };
        Some(failure(call, output))
    }

    /// Returns the last lines that systemd has in its journal of the service since `began`.
    fn journal_of(&self, call: &ServiceCall, began: Time) -> Option<String> {
        if *self != Self::Systemd || call.verb == ServiceVerb::Reboot {
            return None;
        }
        let (since, unit) =
            (format!("--since=@{}", began.seconds), format!("--unit={}", call.service));
        let options = ["--no-pager", "--quiet", "--output=cat", "--lines", JOURNAL_LINES];
        let line = ["journalctl", &unit, &since].into_iter().chain(options).map(str::to_owned);
        let ended = command::run(&line.collect::<Vec<_>>(), JOURNAL_TIME_MAX);
        let lines = ended.output.trim_end();
        (ended.succeeded() && !lines.is_empty()).then(|| lines.to_owned())
    }

    /// True if a command for `service` failed because there is no such service.
    fn knows_no(&self, service: &str, end: &CommandEnd) -> bool {
        let says_so = matches!(end, CommandEnd::Exited(NOT_INSTALLED));
        match self {
            Self::Systemd => says_so,
            // The exit code of `service` for an unknown service is one that scripts use for other
            // failures.
            Self::SystemV => says_so || !has_init_script(service),
            Self::Command(..) | Self::Nothing => false,
        }
    }
}

/// True if `service` finds an executable script.
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

/// Reports that subd answers calls.
pub fn report_ready() {
    notify(&[NotifyState::Ready]);
}

/// Reports that subd is about to stop.
pub fn report_stopping() {
    notify(&[NotifyState::Stopping]);
}

/// Reports that subd is alive, twice per watchdog interval of systemd, until `stop` is cancelled.
/// It runs in a task like those that answer calls, so it stops when they hang.
pub async fn report_alive(stop: CancellationToken) {
    let Some(interval) = sd_notify::watchdog_enabled().filter(|interval| !interval.is_zero())
    else {
        return;
    };
    let mut ticks = tokio::time::interval((interval / 2).max(Duration::from_millis(1)));
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            _ = ticks.tick() => notify(&[NotifyState::Watchdog]),
        }
    }
}

fn notify(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::warn!(%error, "cannot notify systemd");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_driver_has_its_command_line() {
        let given = ServiceDriver::choose(Some(" sh /x  -v "), false, false);
        let table = [
            (&given, ServiceVerb::Stop, "sh /x -v ssh stop"),
            (&ServiceDriver::Systemd, ServiceVerb::Reload, "systemctl reload ssh"),
            (&ServiceDriver::Systemd, ServiceVerb::Reboot, "systemctl reboot"),
            (&ServiceDriver::Systemd, ServiceVerb::Restart, "systemctl restart --no-block ssh"),
            (&ServiceDriver::SystemV, ServiceVerb::Restart, "service ssh restart"),
            (&ServiceDriver::SystemV, ServiceVerb::Start, "service ssh start"),
            (&ServiceDriver::SystemV, ServiceVerb::Reboot, "reboot"),
        ];
        for (driver, verb, line) in table {
            assert_eq!(
                driver.command_line(&ServiceCall::new("ssh", verb)).unwrap().join(" "),
                line
            );
        }
        let nothing = ServiceDriver::choose(None, false, true);
        assert_eq!(nothing.command_line(&ServiceCall::new("ssh", ServiceVerb::Stop)), None);
        assert_eq!(ServiceDriver::choose(None, true, true), ServiceDriver::Systemd);
        assert_eq!(ServiceDriver::choose(Some(" "), true, false), ServiceDriver::SystemV);
    }

    #[test]
    fn a_failure_keeps_nothing_else_from_being_done() {
        let script = "echo $1 $2; test $1 != bad";
        let words = ["sh", "-c", script, "sh"].map(str::to_owned).into();
        let driver = ServiceDriver::Command(words, CommandRunner::Child);
        let absent = ServiceCall { may_fail: true, ..ServiceCall::new("bad", ServiceVerb::Start) };
        let calls = [
            ServiceCall::new("bad", ServiceVerb::Stop),
            absent,
            ServiceCall::new("good", ServiceVerb::Start),
        ];
        let failed = TriggerFailure {
            service: "bad".to_owned(),
            verb: "stop".to_owned(),
            output: "bad stop\nexit status: 1".to_owned(),
        };
        let time_max = Duration::from_secs(60);
        assert_eq!(driver.run_all(&calls, time_max), [failed]);
        assert_eq!(driver.reboot(time_max, time_max), None);
    }
}
