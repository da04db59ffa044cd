//! Runs the plugins of provisioning, for machines and for `subtool provision`.
//!
//! A plugin has a limit of time and of output, and a process group of its own, which is killed with
//! it. It gets its request on standard input, and nothing of what it may need to log in: that is in
//! files of its user.

use std::time::Duration;

use model::backoff::doubled;
use provisioning::binding::PLUGIN_PREFIX;
use provisioning::protocol::{ANSWER_BYTES_MAX, Answer, Request, Verb};
use provisioning::{Call, State};
use tokio::process::Command;
use tokio::task::JoinSet;

use crate::program::{CommandError, output_of};

/// How many plugins run at the same time.
const PLUGINS_MAX: usize = 8;

/// How long plugins may go on after a signal to stop.
const STOP_MAX: Duration = Duration::from_secs(5);

/// The shortest and the longest wait between two questions about work under way.
const POLL_MIN: Duration = Duration::from_millis(50);
const POLL_MAX: Duration = Duration::from_secs(30);

/// The search path of plugins.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// A plugin that can be run once.
#[derive(Debug)]
pub struct Plugin {
    command: Command,
    timeout: Duration,
}

/// Where plugins are run, and their answers are kept.
pub trait Host {
    /// Why the state cannot be kept.
    type Error;

    /// Changes the state, and returns when that is on the medium.
    ///
    /// # Errors
    ///
    /// It cannot be written.
    fn change(&self, change: impl FnOnce(&mut State)) -> Result<(), Self::Error>;

    /// Finds the plugin of a call, which is about to be made.
    ///
    /// # Errors
    ///
    /// Why it cannot be run: the call fails.
    fn plugin(&self, call: &Call) -> Result<Plugin, String>;

    /// True if nothing more may be started.
    fn is_over(&self) -> bool;

    /// Waits until nothing more may be started.
    fn over(&self) -> impl Future<Output = ()>;

    /// Tells that calls wait for their next question for the `times`-th time in succession.
    fn wait(&self, _calls: &[Call], _times: u32) {}

    /// Tells of a call that is about to be made.
    fn announce(&self, _call: &Call) {}
}

/// How the calls ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    Answered,
    /// Nothing more may be started.
    Over,
}

/// Makes calls.
#[derive(Debug)]
pub struct Caller<H> {
    pub host: H,
    /// How often in succession work under way was asked about.
    questions: u32,
}

/// Returns the name of a provisioner's plugin.
#[must_use]
pub fn program(provisioner: &str) -> String {
    format!("{PLUGIN_PREFIX}{provisioner}")
}

impl Plugin {
    /// Takes the command without its last argument, as the user whom the caller has set.
    #[must_use]
    pub fn new(command: Command, timeout: Duration) -> Self {
        let mut command = command;
        command.env_clear().env("PATH", PATH);
        Self { command, timeout }
    }

    /// Names its user in the environment.
    #[must_use]
    pub fn with_user(mut self, name: &str, home: &std::path::Path) -> Self {
        self.command.env("HOME", home).env("USER", name).env("LOGNAME", name);
        self
    }

    /// Runs the plugin, and returns what it prints.
    ///
    /// # Errors
    ///
    /// Says what is wrong with it.
    pub async fn ask(mut self, verb: Verb, request: &Request) -> Result<Vec<u8>, String> {
        let input = serde_json::to_vec(request).map_err(|error| error.to_string())?;
        self.command.arg(verb.name());
        let answer = output_of(self.command, &input, ANSWER_BYTES_MAX);
        match tokio::time::timeout(self.timeout, answer).await {
            Ok(Ok(printed)) => Ok(printed),
            Ok(Err(error)) => Err(said(error)),
            Err(_) => {
                let (seconds, verb) = (self.timeout.as_secs(), verb.name());
                Err(format!("has not answered `{verb}` within {seconds} s, and was killed"))
            }
        }
    }
}

impl<H: Host> Caller<H> {
    /// Starts with nothing under way.
    pub fn new(host: H) -> Self {
        Self { host, questions: 0 }
    }

    /// Makes calls at the same time, and notes each answer at once. Waits before it asks again
    /// about work under way.
    ///
    /// # Errors
    ///
    /// The state cannot be written. Plugins that run are killed.
    pub async fn carry_out(&mut self, calls: Vec<Call>) -> Result<Ended, H::Error> {
        if calls.iter().all(|call| matches!(call, Call::Status(_))) {
            self.questions = self.questions.saturating_add(1);
            self.host.wait(&calls, self.questions);
            tokio::select! {
                () = tokio::time::sleep(doubled(POLL_MIN, POLL_MAX, self.questions)) => {}
                () = self.host.over() => return Ok(Ended::Over),
            }
        } else {
            self.questions = 0;
        }
        let mut waiting = calls.into_iter();
        let mut running = JoinSet::new();
        loop {
            while running.len() < PLUGINS_MAX
                && !self.host.is_over()
                && let Some(call) = waiting.next()
            {
                self.host.change(|state| state.begin(&call))?;
                self.host.announce(&call);
                let plugin = self.host.plugin(&call);
                running.spawn(async move {
                    let answer = ask(plugin, &call).await;
                    (call, answer)
                });
            }
            let next = tokio::select! {
                done = running.join_next() => done,
                () = self.host.over() => return self.stop(running).await,
            };
            match next {
                Some(Ok((call, answer))) => self.host.change(|state| state.end(&call, answer))?,
                // Nothing else ends a task but a mistake in it.
                Some(Err(error)) => std::panic::resume_unwind(error.into_panic()),
                None if self.host.is_over() => return Ok(Ended::Over),
                None => return Ok(Ended::Answered),
            }
        }
    }

    /// Lets plugins end for a while, and then kills them.
    async fn stop(
        &self,
        mut running: JoinSet<(Call, Result<Answer, String>)>,
    ) -> Result<Ended, H::Error> {
        let deadline = tokio::time::Instant::now() + STOP_MAX;
        while let Ok(Some(Ok((call, answer)))) =
            tokio::time::timeout_at(deadline, running.join_next()).await
        {
            self.host.change(|state| state.end(&call, answer))?;
        }
        running.shutdown().await;
        Ok(Ended::Over)
    }
}

async fn ask(plugin: Result<Plugin, String>, call: &Call) -> Result<Answer, String> {
    let verb = match call {
        Call::Provision(_) => Verb::Provision,
        Call::Status(_) => Verb::Status,
    };
    let printed = plugin?.ask(verb, call.request()).await?;
    Answer::parse(&printed).map_err(|error| error.to_string())
}

/// Says what is wrong, without the path: who reads it knows the plugin.
fn said(error: CommandError) -> String {
    match error {
        CommandError::Start { program, source } => format!("cannot be run as {program}: {source}"),
        CommandError::TooLarge { limit, .. } => format!("prints more than {limit} bytes"),
        CommandError::Failed { status, stderr_line, .. } if stderr_line.is_empty() => {
            format!("{status}")
        }
        CommandError::Failed { status, stderr_line, .. } => format!("{status}: {stderr_line}"),
        error => model::display::error_chain(&error),
    }
}
