//! `subtool provision`: provisions a directory of resources by hand.

mod directory;
mod plugins;
mod report;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Args;
use daemon::{EXIT_DONE, EXIT_FAILED, exit, print_error};
use model::backoff::doubled;
use model::display::{counted, error_chain};
use provisioning::protocol::{Answer, PlanAnswer, Verb};
use provisioning::state::Failure;
use provisioning::{Call, Next, Plan, State};
use system::durable::DurableError;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tool::{EXIT_DIFFERENT, Format, Output, PlacedError};

use crate::progress::Progress;
use directory::{Directory, SavedState};
use plugins::{Plugin, Plugins};
use report::{Asked, Report, Shown};

/// The shortest and the longest wait between two questions about work under way.
const POLL_MIN: Duration = Duration::from_millis(50);
const POLL_MAX: Duration = Duration::from_secs(30);

/// How many plugins run at the same time.
const PLUGINS_MAX: usize = 8;

/// How long plugins may go on after a signal to stop.
const STOP_MAX: Duration = Duration::from_secs(5);

#[derive(Clone, Debug, Args)]
pub(crate) struct Arguments {
    /// The directory of the resources
    #[arg(long, value_name = "DIR")]
    local: PathBuf,
    /// Where to keep what has been provisioned; default: the directory `state` in that of the
    /// resources
    #[arg(long, value_name = "DIR")]
    state: Option<PathBuf>,
    /// A directory in which plugins are looked up first; may be repeated
    #[arg(long, value_name = "DIR")]
    plugins: Vec<PathBuf>,
    /// Print what would be done, and change nothing
    #[arg(long)]
    plan: bool,
    /// Have plugins say what they would do, too
    #[arg(long, requires = "plan")]
    ask_plugins: bool,
}

/// Why provisioning ended before its end.
enum Stop {
    Signal,
    TooLong,
    /// The state cannot be written.
    State(DurableError),
}

/// Runs the command.
pub(crate) fn run(format: Format, timeout: Duration, arguments: &Arguments) -> ExitCode {
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return exit(EXIT_FAILED, &format!("cannot start: {error}"), &[]),
    };
    let result = runtime.block_on(async {
        let directory = Directory::read(&arguments.local)?;
        let state = arguments.state.clone().unwrap_or_else(|| arguments.local.join("state"));
        let plugins = Plugins::new(&arguments.local, &arguments.plugins, &directory.bindings);
        if arguments.plan {
            let state = SavedState::peek(&state)?;
            return Ok(show(format, arguments, &directory, &plugins, &state).await);
        }
        directory.check_owners()?;
        let state = SavedState::open(&state)?;
        provision(format, timeout, &directory, &plugins, &state).await
    });
    result.unwrap_or_else(|error: PlacedError| error.exit(format))
}

/// Prints what would be done.
async fn show(
    format: Format,
    arguments: &Arguments,
    directory: &Directory,
    plugins: &Plugins,
    state: &State,
) -> ExitCode {
    let plan = directory.plan(state);
    let mut asked = Vec::new();
    if arguments.ask_plugins && plan.problems.is_empty() {
        for call in &plan.calls {
            asked.push(match directory.check_owners() {
                Ok(()) => ask_for_plan(plugins, &Call::Provision(call.clone())).await,
                Err(error) => Asked::failed(error.to_string()),
            });
        }
    }
    print_plan(format, &plan, plugins, state, asked)
}

async fn ask_for_plan(plugins: &Plugins, call: &Call) -> Asked {
    let answer = async {
        let (name, user) = call.provisioner();
        let printed = plugins.find(name, user)?.ask(Verb::Plan, call.request()).await?;
        PlanAnswer::parse(&printed).map_err(|error| error.to_string())
    };
    match answer.await {
        Ok(answer) => Asked { changes: Some(answer.changes), error: None },
        Err(error) => Asked::failed(error),
    }
}

fn print_plan(
    format: Format,
    plan: &Plan,
    plugins: &Plugins,
    state: &State,
    asked: Vec<Asked>,
) -> ExitCode {
    let shown = Shown::new(plan, plugins, state, asked);
    let code = match (plan.problems.is_empty(), shown.changes_nothing()) {
        (false, _) => EXIT_FAILED,
        (true, true) => EXIT_DONE,
        (true, false) => EXIT_DIFFERENT,
    };
    let text = format.render(&shown, Shown::text);
    let printed = Output { text, code }.print();
    for problem in &plan.problems {
        print_error(&format!("{}: {}", problem.at, problem.error), &[]);
    }
    printed
}

/// Provisions until all is as asked for, or nothing more can be done.
async fn provision(
    format: Format,
    timeout: Duration,
    directory: &Directory,
    plugins: &Plugins,
    saved: &SavedState,
) -> Result<ExitCode, PlacedError> {
    let before = directory.plan(&saved.get());
    if !before.problems.is_empty() {
        return Ok(print_plan(format, &before, plugins, &saved.get(), Vec::new()));
    }
    for call in before.calls.iter().filter(|call| !call.destroys()) {
        plugins.find(&call.provisioner, &call.user).map_err(|error| {
            PlacedError::new(format!("provisioner {}", call.provisioner), error)
        })?;
    }
    let stopped = daemon::stop_on_signals()
        .map_err(|error| PlacedError::new("signals", error.to_string()))?;
    let former = saved.get();
    let mut work = Work {
        directory,
        plugins,
        saved,
        stopped,
        deadline: Instant::now() + timeout,
        progress: Progress::default(),
        questions: 0,
    };
    let ended = work.go_on().await;
    drop(work);
    let report = Report::new(directory, &former, &saved.get());
    let mut faults: Vec<String> = report.failed.iter().map(fault).collect();
    match ended {
        Ok(()) => {}
        Err(Stop::Signal) => faults.push("stopped by a signal: run again to go on".to_owned()),
        Err(Stop::TooLong) => {
            let seconds = timeout.as_secs();
            faults.push(format!("gave up after {seconds} s: run again to go on"));
        }
        Err(Stop::State(error)) => faults.push(error_chain(&error)),
    }
    let code = if faults.is_empty() { EXIT_DONE } else { EXIT_FAILED };
    let printed = Output { text: format.render(&report, Report::text), code }.print();
    for fault in &faults {
        print_error(fault, &[]);
    }
    Ok(printed)
}

fn fault(failure: &Failure) -> String {
    let Failure { id, provisioner, error } = failure;
    format!("{id}: {}: {error}", plugins::program(provisioner))
}

/// One run of the command.
struct Work<'a> {
    directory: &'a Directory,
    plugins: &'a Plugins,
    saved: &'a SavedState,
    stopped: CancellationToken,
    deadline: Instant,
    progress: Progress,
    /// How often in succession work under way was asked about.
    questions: u32,
}

impl Work<'_> {
    async fn go_on(&mut self) -> Result<(), Stop> {
        self.change(State::retry)?;
        loop {
            let state = self.saved.get();
            let plan = self.directory.plan(&state);
            match plan.next(&state) {
                Next::Calls(calls) => self.carry_out(calls).await?,
                Next::Refused | Next::Failed => return Ok(()),
                Next::Finished => {
                    self.change(|state| state.settle(&self.directory.resources))?;
                    let count = counted(plan.unchanged.len() as u64, "resource");
                    self.progress.stage(&format!("as asked for: {count}"));
                    return Ok(());
                }
            }
        }
    }

    fn change(&self, change: impl FnOnce(&mut State)) -> Result<(), Stop> {
        self.saved.modify(change).map_err(Stop::State)
    }

    /// Makes calls at the same time, and notes each answer at once.
    async fn carry_out(&mut self, calls: Vec<Call>) -> Result<(), Stop> {
        let is_question = calls.iter().all(|call| matches!(call, Call::Status(_)));
        if is_question {
            self.wait(&calls).await?;
        } else {
            self.questions = 0;
        }
        let mut waiting = calls.into_iter();
        let mut running = JoinSet::new();
        loop {
            while running.len() < PLUGINS_MAX
                && !self.stopped.is_cancelled()
                && let Some(call) = waiting.next()
            {
                self.change(|state| state.begin(&call))?;
                self.announce(&call);
                let (name, user) = call.provisioner();
                let plugin = self.plugins.find(name, user);
                running.spawn(async move {
                    let answer = ask(plugin, &call).await;
                    (call, answer)
                });
            }
            let next = async {
                tokio::select! {
                    done = running.join_next() => Ok(done),
                    () = over(&self.stopped, self.deadline) => Err(()),
                }
            };
            match next.await {
                Ok(Some(Ok((call, answer)))) => self.change(|state| state.end(&call, answer))?,
                // Nothing else ends a task but a mistake in it.
                Ok(Some(Err(error))) => std::panic::resume_unwind(error.into_panic()),
                Ok(None) if self.stopped.is_cancelled() => return Err(Stop::Signal),
                Ok(None) => return Ok(()),
                Err(()) => return Err(self.stop(running).await),
            }
        }
    }

    /// Lets plugins end for a while, and then kills them.
    async fn stop(&self, mut running: JoinSet<(Call, Result<Answer, String>)>) -> Stop {
        let deadline = tokio::time::Instant::now() + STOP_MAX;
        while let Ok(Some(Ok((call, answer)))) =
            tokio::time::timeout_at(deadline, running.join_next()).await
        {
            if let Err(stop) = self.change(|state| state.end(&call, answer)) {
                return stop;
            }
        }
        running.shutdown().await;
        if self.stopped.is_cancelled() { Stop::Signal } else { Stop::TooLong }
    }

    /// Waits until work under way is to be asked about.
    async fn wait(&mut self, calls: &[Call]) -> Result<(), Stop> {
        self.questions = self.questions.saturating_add(1);
        let ids: Vec<String> = calls.iter().flat_map(Call::ids).collect();
        let pause = doubled(POLL_MIN, POLL_MAX, self.questions);
        if self.questions > 4 {
            self.progress.stage(&format!("waiting for {}", ids.join(", ")));
        }
        tokio::select! {
            () = tokio::time::sleep(pause) => Ok(()),
            () = over(&self.stopped, self.deadline) => match self.stopped.is_cancelled() {
                true => Err(Stop::Signal),
                false => Err(Stop::TooLong),
            },
        }
    }

    fn announce(&mut self, call: &Call) {
        let Call::Provision(provision) = call else { return };
        let verb = if provision.destroys() { "destroy" } else { "provision" };
        let ids: Vec<String> = call.ids().into_iter().collect();
        let program = plugins::program(&provision.provisioner);
        self.progress.stage(&format!("{verb} {} with {program}", ids.join(", ")));
    }
}

async fn over(stopped: &CancellationToken, deadline: Instant) {
    tokio::select! {
        () = stopped.cancelled() => {}
        () = tokio::time::sleep_until(deadline.into()) => {}
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
