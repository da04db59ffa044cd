//! Asks the health commands of tasks, each in a thread of its own.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ::tasks::Task;
use ::tasks::file::Health as HealthSpec;
use api::subd::Health;
use model::lock::locked;

use crate::machine::command_runner::CommandRunner;
use crate::tasks::STAGE;

/// The health of the live attempts, by task.
#[derive(Debug, Default)]
pub struct HealthChecks {
    known: Arc<Mutex<BTreeMap<String, Known>>>,
}

/// What is known of the health of one attempt.
#[derive(Clone, Debug)]
struct Known {
    attempt: String,
    /// What the command said last.
    health: Option<Health>,
    is_asked: bool,
    next: Instant,
}

/// What runs health commands.
#[derive(Clone, Debug)]
pub struct HealthCommand<'a> {
    pub runner: CommandRunner,
    /// subd's program.
    pub program: &'a Path,
    /// The directory of the task.
    pub directory: &'a Path,
}

impl HealthChecks {
    /// Returns the health of the live attempt `attempt` of `task`, which has been up for so long,
    /// and when to look again. `None` if the task does not say how it is found. Asks the command if
    /// it is time; `done` is called when it has answered.
    pub fn look(
        &self,
        task: &Task,
        attempt: &str,
        up: Duration,
        command: &HealthCommand<'_>,
        done: impl FnOnce() + Send + 'static,
    ) -> (Option<Health>, Option<Duration>) {
        let Some(spec) = &task.health else { return (None, None) };
        let min_up = Duration::from_secs(spec.min_up_s.into());
        let is_young = up < min_up;
        let young = || Health::Failed(format!("it has not been up for {} s", spec.min_up_s));
        if spec.argv.is_none() {
            return match is_young {
                true => (Some(young()), Some(min_up.saturating_sub(up))),
                false => (Some(Health::Passed), None),
            };
        }
        let mut all = locked(&self.known);
        let known = all.entry(task.name.clone()).or_insert_with(|| Known::of(attempt));
        if known.attempt != attempt {
            *known = Known::of(attempt);
        }
        let now = Instant::now();
        if !known.is_asked && known.next <= now {
            known.next = now + Duration::from_secs(spec.interval_s.into());
            match self.ask(task.name.clone(), attempt.to_owned(), spec, command, done) {
                Ok(()) => known.is_asked = true,
                Err(error) => {
                    tracing::error!(task = task.name, %error, "cannot ask for its health");
                }
            }
        }
        let next = (!known.is_asked).then(|| known.next.saturating_duration_since(now));
        let health = match (&known.health, is_young) {
            (Some(Health::Failed(why)), _) => Some(Health::Failed(why.clone())),
            (_, true) => Some(young()),
            (health, false) => health.clone(),
        };
        let grown = is_young.then(|| min_up.saturating_sub(up));
        (health, next.into_iter().chain(grown).min())
    }

    /// Forgets tasks that are not live.
    pub fn keep(&self, is_live: impl Fn(&str) -> bool) {
        locked(&self.known).retain(|task, _| is_live(task));
    }

    fn ask(
        &self,
        task: String,
        attempt: String,
        spec: &HealthSpec,
        command: &HealthCommand<'_>,
        done: impl FnOnce() + Send + 'static,
    ) -> io::Result<()> {
        let line = [
            command.program.display().to_string(),
            STAGE.to_owned(),
            command.directory.display().to_string(),
            "health".to_owned(),
        ];
        let (runner, limit) = (command.runner, Duration::from_secs(spec.timeout_s.into()));
        let known = Arc::clone(&self.known);
        let work = move || {
            let ended = runner.run(&line, limit, &|| false);
            let health = match ended.succeeded() {
                true => Health::Passed,
                false => Health::Failed(ended.text()),
            };
            let mut all = locked(&known);
            if let Some(known) = all.get_mut(&task).filter(|known| known.attempt == attempt) {
                if known.health.as_ref() != Some(&health)
                    && let Health::Failed(why) = &health
                {
                    tracing::warn!(task, why, "the task is not healthy");
                }
                known.health = Some(health);
                known.is_asked = false;
            }
            drop(all);
            done();
        };
        std::thread::Builder::new().name("task-health".to_owned()).spawn(work).map(drop)
    }
}

impl Known {
    fn of(attempt: &str) -> Self {
        let (health, next) = (None, Instant::now());
        Self { attempt: attempt.to_owned(), health, is_asked: false, next }
    }
}
