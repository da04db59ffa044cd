//! Health checks: runs the command that an image names until it passes or its time is over.

use std::time::{Duration, Instant};

use api::subd::Health;
use model::image::HealthCheck;

use crate::machine::command_runner::CommandRunner;

/// How long after a try that failed the next one begins.
const AGAIN_AFTER: Duration = Duration::from_secs(1);

/// The longest that a check may take, whatever the image says.
const WITHIN_MAX: Duration = Duration::from_secs(24 * 3_600);

/// The least that one try gets, however little time is left.
const TRY_MIN: Duration = Duration::from_secs(1);

/// Runs the command of `check` again and again until it exits with code 0, for as long as `check`
/// says. Blocks. `stopped` waits for the given time and tells whether subd is being stopped; then
/// the answer is `None`: the check has not ended, and whatever fails now may fail because the
/// machine goes down.
pub fn check(
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
        tracing::warn!(output = text, "the health check does not pass");
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
        assert_eq!(check(&shell(&script, 60), CommandRunner::Child, never), Some(Health::Passed));
        assert_eq!(std::fs::read_to_string(&file).unwrap().lines().count(), 3);
    }

    #[test]
    fn what_it_said_last_is_told() {
        let failed = check(&shell("echo no; exit 4", 0), CommandRunner::Child, never);
        let text = "no\nexit status: 4\nit did not pass within 0 s".to_owned();
        assert_eq!(failed, Some(Health::Failed(text)));
        let hangs = check(&shell("echo slow; sleep 1000", 1), CommandRunner::Child, never);
        let text = "slow\nkilled after 1 s\nit did not pass within 1 s".to_owned();
        assert_eq!(hangs, Some(Health::Failed(text)));
    }

    #[test]
    fn a_check_that_is_interrupted_says_nothing() {
        assert_eq!(check(&shell("exit 1", 60), CommandRunner::Child, |_| true), None);
        let waiting = |time: Duration| !time.is_zero();
        assert_eq!(check(&shell("exit 1", 60), CommandRunner::Child, waiting), None);
    }
}
