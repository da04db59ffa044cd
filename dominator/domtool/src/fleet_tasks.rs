//! `domtool task`: shows the daemon tasks of machines, and gives orders about them.

use api::dominator::events::{EventDetails, EventKind, HistoryEvent, ListEventsRequest};
use api::dominator::tasks::{
    GetTask, GetTaskLog, GetTaskLogRequest, GetTaskReply, GetTaskRequest, ListTasks,
    ListTasksReply, ListTasksRequest, OrderTasks, OrderTasksRequest, TaskOfMachine,
    TaskOrderOutcome, WantedTaskOrder,
};
use api::dominator::{ListSubsRequest, TagFilter};
use api::subd::{Health, TaskOrder, TaskState};
use clap::{Args, Subcommand};
use daemon::EXIT_PARTLY;
use model::display::{counted, safe_lines, utc};
use rpc::client::Client;
use tool::{Format, Output};

use super::orders::{OptionalWhy, RequiredWhy};
use super::{ToolError, call, columns, events, text_of, who};

/// How long machines may take to take an order, before the command ends, in milliseconds.
const WAIT_MS: u32 = 5_000;

/// How much of a log is shown by default, in KiB.
const LOG_KIB: u32 = 16;

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// List the tasks of machines, and how they are
    #[command(after_help = "Examples:\n  \
        domtool task list\n  \
        domtool task list 'web*' logd\n  \
        domtool task list --tag tier=front --state unhealthy --state failed")]
    List(ListArguments),
    /// Show all that is known of a task of a machine
    Show(OneTask),
    /// Say why a task of a machine runs or does not, and when it will run
    #[command(after_help = "Example: domtool task explain web1 logd")]
    Explain(OneTask),
    /// Show what has happened to a task of a machine, newest last: trouble, its end, and orders
    History {
        #[command(flatten)]
        task: OneTask,
        /// Show at most this many events, the newest; 0 for all
        #[arg(long, value_name = "COUNT", default_value_t = 50)]
        limit: usize,
    },
    /// Print the end of what a task of a machine has written
    Logs {
        #[command(flatten)]
        task: OneTask,
        /// How much, in KiB: at most 1024
        #[arg(long, value_name = "KIB", default_value_t = LOG_KIB,
              value_parser = clap::value_parser!(u32).range(1..=1024))]
        last: u32,
    },
    /// Stop tasks, and keep them stopped until they are released
    ///
    /// Orders pass while updates are disabled. A machine that does not answer is told when it is
    /// back, also after a restart of the dominator. Of several orders the newest counts, whether it
    /// was given here or on the machine.
    #[command(after_help = "Examples:\n  \
        domtool task hold web1 logd --why 'disk swap'\n  \
        domtool task hold '*' logd --tag tier=front --why 'bad release'")]
    Hold(OrderWithReason),
    /// Let tasks run that are held
    Release(OrderArguments),
    /// Stop tasks and forget their runs, until they are resumed
    Suspend(OrderWithReason),
    /// Run tasks again that are suspended
    Resume(OrderArguments),
    /// Stop tasks, if they run, and start them again
    Restart(OrderArguments),
    /// Run tasks that have no run now, also outside of their hours
    Start(OrderArguments),
}

#[derive(Debug, Args)]
pub(super) struct OneTask {
    /// Name of the machine in the machine database
    #[arg(value_name = "HOST")]
    hostname: String,
    /// Name of the task
    #[arg(value_name = "NAME")]
    task: String,
}

#[derive(Debug, Args)]
pub(super) struct ListArguments {
    /// Only machines with a matching name: `*` matches any text, `?` one character
    #[arg(value_name = "HOST")]
    host: Option<String>,
    /// Only tasks with a matching name
    #[arg(value_name = "NAME")]
    task: Option<String>,
    #[command(flatten)]
    machines: MachineFilters,
    /// Only tasks in this state; may be repeated
    #[arg(long, value_name = "STATE", value_parser = parse_state)]
    state: Vec<TaskState>,
}

#[derive(Debug, Args)]
struct MachineFilters {
    /// Only machines whose required image is this one or below it; may be repeated
    #[arg(long, value_name = "IMAGE")]
    image: Vec<String>,
    /// Only machines at this location or below it; may be repeated
    #[arg(long, value_name = "LOCATION")]
    location: Vec<String>,
    /// Only machines with this tag; if repeated, machines with all of the tags
    #[arg(long, value_name = "NAME[=VALUE]")]
    tag: Vec<String>,
}

impl MachineFilters {
    fn request(&self, hosts: Vec<String>) -> ListSubsRequest {
        ListSubsRequest {
            statuses: Vec::new(),
            hosts,
            images: self.image.clone(),
            locations: self.location.clone(),
            tags: self.tag.iter().map(|tag| TagFilter::parse(tag)).collect(),
        }
    }
}

#[derive(Debug, Args)]
struct OrderedTasks {
    /// Machines with a matching name: `*` matches any text, `?` one character
    #[arg(value_name = "HOST")]
    host: String,
    /// Tasks with a matching name
    #[arg(value_name = "NAME")]
    task: String,
    #[command(flatten)]
    machines: MachineFilters,
}

#[derive(Debug, Args)]
pub(super) struct OrderArguments {
    #[command(flatten)]
    tasks: OrderedTasks,
    #[command(flatten)]
    why: OptionalWhy,
}

#[derive(Debug, Args)]
pub(super) struct OrderWithReason {
    #[command(flatten)]
    tasks: OrderedTasks,
    #[command(flatten)]
    why: RequiredWhy,
}

fn parse_state(text: &str) -> Result<TaskState, String> {
    TaskState::ALL
        .into_iter()
        .find(|state| state.name() == text)
        .ok_or_else(|| format!("the states are {}", TaskState::ALL.map(TaskState::name).join(", ")))
}

pub(super) async fn run(
    client: &Client,
    format: Format,
    command: &Command,
) -> Result<Output, ToolError> {
    let plain = |order, arguments: &OrderArguments| {
        let why = arguments.why.why.clone();
        request(order, &arguments.tasks, why)
    };
    let reasoned = |order, arguments: &OrderWithReason| {
        request(order, &arguments.tasks, arguments.why.why.clone())
    };
    let ordered = match command {
        Command::List(arguments) => return list(client, format, arguments).await,
        Command::Show(task) => {
            let reply = get(client, task).await?;
            return Ok(format.render(&reply, shown).into());
        }
        Command::Explain(task) => {
            let reply = get(client, task).await?;
            let text = |reply: &GetTaskReply| lines(&reply.explanation);
            return Ok(format.render(&reply, text).into());
        }
        Command::History { task, limit } => return history(client, format, task, *limit).await,
        Command::Logs { task, last } => {
            let OneTask { hostname, task } = task;
            let (hostname, task, bytes) = (hostname.clone(), task.clone(), last << 10);
            let request = GetTaskLogRequest { hostname, task, bytes };
            let reply = call::<GetTaskLog>(client, &request).await?;
            let text = |_: &_| String::from_utf8_lossy(&reply.text.0).into_owned();
            return Ok(format.render(&reply, text).into());
        }
        Command::Hold(arguments) => reasoned(TaskOrder::Hold, arguments),
        Command::Suspend(arguments) => reasoned(TaskOrder::Suspend, arguments),
        Command::Release(arguments) => plain(TaskOrder::Release, arguments),
        Command::Resume(arguments) => plain(TaskOrder::Resume, arguments),
        Command::Restart(arguments) => plain(TaskOrder::Restart, arguments),
        Command::Start(arguments) => plain(TaskOrder::Start, arguments),
    };
    order(client, format, &ordered).await
}

fn request(order: TaskOrder, ordered: &OrderedTasks, why: String) -> OrderTasksRequest {
    let machines = ordered.machines.request(vec![ordered.host.clone()]);
    let tasks = vec![ordered.task.clone()];
    OrderTasksRequest { machines, tasks, order, why, who: who(), wait_ms: WAIT_MS }
}

/// Gives an order. The exit code says whether some machine refuses it, or was not told yet.
async fn order(
    client: &Client,
    format: Format,
    request: &OrderTasksRequest,
) -> Result<Output, ToolError> {
    let reply = call::<OrderTasks>(client, request).await?;
    let is_taken = |outcome: &TaskOrderOutcome| *outcome == TaskOrderOutcome::Taken;
    let text = format.render(&reply, |reply| {
        let mut table = columns(&["HOST", "TASK", "ORDER"]);
        for one in &reply.tasks {
            let outcome = match &one.outcome {
                TaskOrderOutcome::Taken => "taken".to_owned(),
                TaskOrderOutcome::Wanted => {
                    "not taken yet: the machine will be told when it answers".to_owned()
                }
                TaskOrderOutcome::Refused(why) => why.clone(),
            };
            let order = format!("{}: {outcome}", request.order.name());
            table.add_row([one.hostname.clone(), one.task.clone(), order]);
        }
        text_of(&table)
    });
    let is_done = reply.tasks.iter().all(|one| is_taken(&one.outcome));
    Ok(if is_done { text.into() } else { Output { text, code: EXIT_PARTLY } })
}

async fn get(client: &Client, task: &OneTask) -> Result<GetTaskReply, ToolError> {
    let OneTask { hostname, task } = task;
    let request = GetTaskRequest { hostname: hostname.clone(), task: task.clone() };
    Ok(call::<GetTask>(client, &request).await?)
}

async fn list(
    client: &Client,
    format: Format,
    arguments: &ListArguments,
) -> Result<Output, ToolError> {
    let machines = arguments.machines.request(arguments.host.iter().cloned().collect());
    let tasks = arguments.task.iter().cloned().collect();
    let request = ListTasksRequest { machines, tasks, states: arguments.state.clone() };
    let reply = call::<ListTasks>(client, &request).await?;
    if let Some((hostname, why)) = reply.unknown.first() {
        let count = counted(reply.unknown.len() as u64, "machine");
        eprintln!("The tasks of {count} are not known, such as {hostname}: {why}");
    }
    Ok(format.render(&reply, table).into())
}

fn table(reply: &ListTasksReply) -> String {
    let mut table = columns(&["HOST", "TASK", "STATE", "STARTS", "WHY"]);
    for task in &reply.tasks {
        let report = &task.report;
        let orders =
            task.wanted.iter().map(|order| format!("not taken yet: {}", order.order.name()));
        let away = task.away.iter().map(|why| format!("as of before: {why}"));
        let why: Vec<String> =
            std::iter::once(report.detail.clone()).chain(orders).chain(away).collect();
        table.add_row([
            task.hostname.clone(),
            report.name.clone(),
            report.state.name().to_owned(),
            report.starts.to_string(),
            why.join("; "),
        ]);
    }
    text_of(&table)
}

fn shown(reply: &GetTaskReply) -> String {
    let GetTaskReply { task, seen, .. } = reply;
    let TaskOfMachine { hostname, report, wanted, away } = task;
    let mut table = columns(&[]);
    let mut row = |name: &str, value: Option<String>| {
        if let Some(value) = value {
            table.add_row([name.to_owned(), value]);
        }
    };
    row("host", Some(hostname.clone()));
    row("task", Some(report.name.clone()));
    row("state", Some(report.state.name().to_owned()));
    row("why", Some(report.detail.clone()));
    row("run", report.run.clone());
    row("started", report.started.map(utc));
    row("starts", Some(report.starts.to_string()));
    row("last end", report.last_end.clone());
    row(
        "health",
        report.health.as_ref().map(|health| match health {
            Health::Passed => "passed".to_owned(),
            Health::Failed(why) => format!("failed: {}", why.trim_end()),
        }),
    );
    row("started again", report.again_at.map(utc));
    row("not restarted if it ends", report.not_restarted.clone());
    row("next event", report.next_at.map(utc));
    for order in wanted {
        let WantedTaskOrder { order, who, why, .. } = order;
        let why = if why.is_empty() { String::new() } else { format!(": {why}") };
        row("not taken yet", Some(format!("{} by {who}{why}", order.name())));
    }
    row("last seen", seen.map(utc));
    row("does not answer", away.clone());
    text_of(&table)
}

fn lines(lines: &[String]) -> String {
    lines.iter().map(|line| format!("{}\n", safe_lines(line))).collect()
}

/// Shows the events of one task, and the orders about the machine's tasks.
async fn history(
    client: &Client,
    format: Format,
    task: &OneTask,
    limit: usize,
) -> Result<Output, ToolError> {
    let request = ListEventsRequest {
        hosts: vec![task.hostname.clone()],
        kinds: vec![EventKind::Status, EventKind::Order],
        ..ListEventsRequest::default()
    };
    let is_of_task = |event: &HistoryEvent| match &event.what {
        EventDetails::Status { status, detail } => {
            let about = detail.split_once(": ").map(|(about, _)| about);
            status.starts_with("task-") && about == Some(task.task.as_str())
        }
        EventDetails::Order { verb, .. } => verb.starts_with("task-"),
        _ => false,
    };
    events::list_matching(client, format, request, limit, is_of_task).await
}
