//! `subtool provision`: provisions a directory of resources by hand.

mod directory;
mod plugins;
mod report;

use std::cell::RefCell;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Args;
use daemon::plugins::{Caller, Ended, Host, Plugin, program};
use daemon::{EXIT_DONE, EXIT_FAILED, exit, print_error};
use model::display::{counted, error_chain};
use provisioning::protocol::{PlanAnswer, Verb};
use provisioning::state::Failure;
use provisioning::{Call, Next, Plan, State};
use system::durable::DurableError;
use tokio_util::sync::CancellationToken;
use tool::{EXIT_DIFFERENT, Format, Output, PlacedError};

use crate::progress::Progress;
use directory::{Directory, SavedState};
use plugins::Plugins;
use report::{Asked, Report, Shown};

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
                Ok(()) => ask_for_plan(plugins, &Call::Provision(plan.complete(call, state))).await,
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
    let deadline = Instant::now() + timeout;
    let progress = RefCell::default();
    let ended = go_on(Work { directory, plugins, saved, stopped, deadline, progress }).await;
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
    format!("{id}: {}: {error}", program(provisioner))
}

/// One run of the command.
struct Work<'a> {
    directory: &'a Directory,
    plugins: &'a Plugins,
    saved: &'a SavedState,
    stopped: CancellationToken,
    deadline: Instant,
    progress: RefCell<Progress>,
}

async fn go_on(work: Work<'_>) -> Result<(), Stop> {
    let mut caller = Caller::new(work);
    caller.host.change(State::retry)?;
    loop {
        let work = &caller.host;
        let state = work.saved.get();
        let plan = work.directory.plan(&state);
        match plan.next(&state) {
            Next::Calls(calls) => match caller.carry_out(calls).await? {
                Ended::Answered => {}
                Ended::Over if caller.host.stopped.is_cancelled() => return Err(Stop::Signal),
                Ended::Over => return Err(Stop::TooLong),
            },
            Next::Refused | Next::Failed | Next::Awaits => return Ok(()),
            Next::Finished => {
                work.change(|state| state.settle(&work.directory.resources))?;
                let count = counted(plan.unchanged.len() as u64, "resource");
                work.tell(&format!("as asked for: {count}"));
                return Ok(());
            }
        }
    }
}

impl Work<'_> {
    fn tell(&self, text: &str) {
        self.progress.borrow_mut().stage(text);
    }
}

impl Host for Work<'_> {
    type Error = Stop;

    fn change(&self, change: impl FnOnce(&mut State)) -> Result<(), Stop> {
        self.saved.modify(change).map_err(Stop::State)
    }

    fn plugin(&self, call: &Call) -> Result<Plugin, String> {
        let (name, user) = call.provisioner();
        self.plugins.find(name, user)
    }

    fn is_over(&self) -> bool {
        self.stopped.is_cancelled() || Instant::now() >= self.deadline
    }

    async fn over(&self) {
        tokio::select! {
            () = self.stopped.cancelled() => {}
            () = tokio::time::sleep_until(self.deadline.into()) => {}
        }
    }

    fn wait(&self, calls: &[Call], times: u32) {
        if times > 4 {
            let ids: Vec<String> = calls.iter().flat_map(Call::ids).collect();
            self.tell(&format!("waiting for {}", ids.join(", ")));
        }
    }

    fn announce(&self, call: &Call) {
        let Call::Provision(provision) = call else { return };
        let verb = if provision.destroys() { "destroy" } else { "provision" };
        let ids: Vec<String> = call.ids().into_iter().collect();
        let program = program(&provision.provisioner);
        self.tell(&format!("{verb} {} with {program}", ids.join(", ")));
    }
}
