//! `subtool task`: the daemon tasks of a machine.

use api::subd::{
    GetTaskLog, GetTaskLogRequest, GetTasks, GetTasksReply, OrderTask, OrderTaskRequest, TaskOrder,
    TaskReport,
};
use clap::Subcommand;
use model::display::utc;
use tool::{Format, Output};

use super::error::ToolError;
use super::machine::Machine;
use super::rows::{Rows, health_text};

/// How much of a log is shown by default, in KiB.
const LOG_KIB: u32 = 16;

/// What is asked of tasks.
#[derive(Debug, Subcommand)]
pub enum TaskCommand {
    /// List the tasks, and how they are
    List,
    /// Show all that is known of a task
    Show {
        /// The task
        task: String,
    },
    /// Run a task that has no run now, also outside of its hours
    ///
    /// It is stopped at the next stop time of its schedule, as every run is.
    Start {
        /// The task
        task: String,
    },
    /// Stop a task, if it runs, and start it again
    Restart {
        /// The task
        task: String,
    },
    /// Stop a task, and keep it stopped until it is released, also over reboots
    Hold {
        /// The task
        task: String,
        /// Why, for all who see the task
        #[arg(long, value_name = "TEXT")]
        why: String,
    },
    /// Let a task run that is held
    Release {
        /// The task
        task: String,
    },
    /// Stop a task and forget its runs, until it is resumed, also over reboots
    Suspend {
        /// The task
        task: String,
        /// Why, for all who see the task
        #[arg(long, value_name = "TEXT")]
        why: String,
    },
    /// Run a task again that is suspended
    Resume {
        /// The task
        task: String,
    },
    /// Print the end of what a task has written
    ///
    /// It comes from the journal of the machine, or from log files if it has no journal.
    Logs {
        /// The task
        task: String,
        /// How much, in KiB: at most 1024
        #[arg(long, value_name = "KIB", default_value_t = LOG_KIB,
              value_parser = clap::value_parser!(u32).range(1..=1024))]
        last: u32,
    },
}

/// Carries the command out.
pub(super) async fn run(
    machine: &Machine,
    format: Format,
    command: &TaskCommand,
) -> Result<Output, ToolError> {
    let order = match command {
        TaskCommand::List => {
            let reply = machine.call::<GetTasks>(&()).await?;
            if let Some(why) = &reply.not_run {
                eprintln!("note: this machine runs no tasks: {why}");
            }
            return Ok(format.render(&reply, list).into());
        }
        TaskCommand::Show { task } => {
            let reply = machine.call::<GetTasks>(&()).await?;
            let found = reply.tasks.into_iter().find(|report| report.name == *task);
            let report = found.ok_or_else(|| ToolError::NoTask { task: task.clone() })?;
            return Ok(format.render(&report, |report| super::run::table(rows(report))).into());
        }
        TaskCommand::Logs { task, last } => {
            let request = GetTaskLogRequest { task: task.clone(), bytes: last << 10 };
            let reply = machine.call::<GetTaskLog>(&request).await?;
            let text = |_: &_| String::from_utf8_lossy(&reply.text.0).into_owned();
            return Ok(format.render(&reply, text).into());
        }
        TaskCommand::Start { task } => (task, TaskOrder::Start, ""),
        TaskCommand::Restart { task } => (task, TaskOrder::Restart, ""),
        TaskCommand::Hold { task, why } => (task, TaskOrder::Hold, why.as_str()),
        TaskCommand::Release { task } => (task, TaskOrder::Release, ""),
        TaskCommand::Suspend { task, why } => (task, TaskOrder::Suspend, why.as_str()),
        TaskCommand::Resume { task } => (task, TaskOrder::Resume, ""),
    };
    let (task, order, why) = order;
    let (task, why) = (task.clone(), why.to_owned());
    let done = machine.call::<OrderTask>(&OrderTaskRequest { task, order, why, number: 0 }).await?;
    Ok(format.render(&done, |_| String::new()).into())
}

fn list(reply: &GetTasksReply) -> String {
    let titles = ["TASK", "STATE", "STARTS", "WHY"].map(str::to_owned);
    let line = |task: &TaskReport| {
        [
            task.name.clone(),
            task.state.name().to_owned(),
            task.starts.to_string(),
            task.detail.clone(),
        ]
    };
    let lines: Vec<[String; 4]> =
        std::iter::once(titles).chain(reply.tasks.iter().map(line)).collect();
    let width = |column: usize| {
        lines.iter().map(|line| line[column].chars().count()).max().unwrap_or_default()
    };
    let (first, second, third) = (width(0), width(1), width(2));
    let text = lines.iter().map(|[task, state, starts, why]| {
        format!("{task:first$}  {state:second$}  {starts:>third$}  {why}\n")
    });
    text.collect()
}

fn rows(task: &TaskReport) -> Rows {
    let mut rows = vec![
        ("task", task.name.clone()),
        ("state", task.state.name().to_owned()),
        ("why", task.detail.clone()),
    ];
    let mut row = |name, value: Option<String>| rows.extend(value.map(|value| (name, value)));
    row("run", task.run.clone());
    row("started", task.started.map(utc));
    row("starts", Some(task.starts.to_string()));
    row("last end", task.last_end.clone());
    row("health", task.health.as_ref().map(health_text));
    row("started again", task.again_at.map(utc));
    row("not restarted if it ends", task.not_restarted.clone());
    row("next event", task.next_at.map(utc));
    rows
}
