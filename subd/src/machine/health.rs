//! Runs the health checks of images.

use std::time::{Duration, Instant};

use api::subd::Health;
use model::image::HealthCheck;

use crate::machine::command::CommandEnd;
use crate::machine::command_runner::CommandRunner;

/// The pause after a failed try.
const AGAIN_AFTER: Duration = Duration::from_secs(1);

/// The longest time of a check, whatever the image says.
const WITHIN_MAX: Duration = Duration::from_secs(24 * 3_600);

/// The shortest time limit of one try.
const TRY_MIN: Duration = Duration::from_secs(1);

/// Runs health checks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HealthChecker {
    /// The words before those of a check.
    command: Vec<String>,
    command_runner: CommandRunner,
}

impl HealthChecker {
    /// Returns what runs health checks: this machine, or `command`, an operator's command that
    /// gets the words of the check as arguments. `None` without one for another root than `/`,
    /// because a check says nothing of a root that this machine does not run.
    pub fn choose(
        command: Option<&str>,
        manages_this_machine: bool,
        command_runner: CommandRunner,
    ) -> Option<Self> {
        let command: Vec<String> =
            command.unwrap_or_default().split_whitespace().map(str::to_owned).collect();
        let is_run = manages_this_machine || !command.is_empty();
        is_run.then_some(Self { command, command_runner })
    }

    /// Runs `check` again and again until it exits with code 0, for as long as it says. Blocks.
    /// `stopped` waits for the given time and returns whether subd is being stopped. Then the
    /// result is `None`: a check that fails now may fail because the machine is shut down.
    ///
    /// A failure has the words of the last try that ended by itself: one that was cut short says
    /// less.
    pub fn check(&self, check: &HealthCheck, stopped: impl Fn(Duration) -> bool) -> Option<Health> {
        let line = [&self.command[..], &check.command].concat();
        let within = Duration::from_secs(check.within_seconds.into()).min(WITHIN_MAX);
        let started = Instant::now();
        let mut said = String::new();
        loop {
            let left = within.saturating_sub(started.elapsed());
            let ended =
                self.command_runner.run(&line, left.max(TRY_MIN), &|| stopped(Duration::ZERO));
            if ended.succeeded() {
                return Some(Health::Passed);
            }
            if stopped(Duration::ZERO) {
                return None;
            }
            let text = ended.text();
            tracing::warn!(output = text, "the health check failed");
            if said.is_empty() || !matches!(ended.end, CommandEnd::TimedOut(_)) {
                said = text;
            }
            let left = within.saturating_sub(started.elapsed());
            if left <= AGAIN_AFTER {
                let seconds = within.as_secs();
                return Some(Health::Failed(format!("{said}\nit did not pass within {seconds} s")));
            }
            if stopped(AGAIN_AFTER) {
                return None;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, within_seconds: u32) -> HealthCheck {
        let command = ["sh", "-c", script].map(str::to_owned).into();
        HealthCheck { command, within_seconds, undo: true }
    }

    fn run(check: &HealthCheck, stopped: impl Fn(Duration) -> bool) -> Option<Health> {
        let here = HealthChecker::choose(None, true, CommandRunner::Child).unwrap();
        here.check(check, stopped)
    }

    #[test]
    fn nothing_is_run_for_another_root_unless_an_operator_says_how() {
        let choose = |command| HealthChecker::choose(command, false, CommandRunner::Child);
        assert_eq!((choose(None), choose(Some(" "))), (None, None));
        let by_command = choose(Some("env sh -c")).unwrap();
        let check =
            HealthCheck { command: vec!["exit 7".to_owned()], within_seconds: 0, undo: true };
        let why = "exit status: 7\nit did not pass within 0 s".to_owned();
        assert_eq!(by_command.check(&check, never), Some(Health::Failed(why)));
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
        assert_eq!(run(&shell(&script, 60), never), Some(Health::Passed));
        assert_eq!(std::fs::read_to_string(&file).unwrap().lines().count(), 3);
    }

    #[test]
    fn what_it_said_last_is_told() {
        let failed = run(&shell("echo no; exit 4", 0), never);
        let text = "no\nexit status: 4\nit did not pass within 0 s".to_owned();
        assert_eq!(failed, Some(Health::Failed(text)));
        let hangs = run(&shell("echo slow; sleep 1000", 1), never);
        let text = "slow\nkilled after 1 s\nit did not pass within 1 s".to_owned();
        assert_eq!(hangs, Some(Health::Failed(text)));
        let place = tempfile::tempdir().unwrap();
        let file = place.path().join("tried").display().to_string();
        let script = format!("test -e {file} && sleep 1000; touch {file}; echo no; exit 4");
        let text = "no\nexit status: 4\nit did not pass within 2 s".to_owned();
        assert_eq!(run(&shell(&script, 2), never), Some(Health::Failed(text)));
    }

    #[test]
    fn a_check_that_is_interrupted_says_nothing() {
        assert_eq!(run(&shell("exit 1", 60), |_| true), None);
        let waiting = |time: Duration| !time.is_zero();
        assert_eq!(run(&shell("exit 1", 60), waiting), None);
    }
}
