//! The daemon tasks of all machines: lists them, and gives orders about them.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use api::dominator::tasks::{
    GetTaskLogRequest, GetTaskReply, GetTaskRequest, ListTasksReply, ListTasksRequest,
    ORDER_WAIT_MS_MAX, OrderTasksReply, OrderTasksRequest, OrderedTask, TaskOfMachine,
    TaskOrderOutcome, WantedTaskOrder,
};
use api::dominator::{ListSubsRequest, SubSummary};
use api::subd::{GetTaskLog, GetTaskLogReply, TaskOrder, TaskReport, TaskState};
use globset::GlobSet;
use model::display::{counted, error_chain};
use tokio::time::Instant;

use super::orders::named;
use super::{Fleet, FleetState, OrderError};
use crate::core::orders::Order;
use crate::core::permits::permit_text;
use crate::core::selectors::{Selection, host_patterns};
use crate::core::sub::{Sub, SubOrder};
use crate::core::task_orders::TaskOrders;
use crate::core::tasks::{Known, TaskCounts, explain};
use crate::runtime::driver::{Handle, client_of};
use crate::storage::with_order;

/// How long a machine may take to return a log.
const LOG_LIMIT: Duration = Duration::from_secs(20);

/// How often it is looked whether machines have taken an order.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// Which tasks of which machines are meant.
struct TaskSelection {
    machines: Selection,
    tasks: Option<GlobSet>,
}

impl TaskSelection {
    fn new(machines: ListSubsRequest, tasks: &[String]) -> Result<Self, OrderError> {
        let pattern = |source| OrderError::TaskPattern { source };
        let machines = Selection::new(machines).map_err(pattern)?;
        Ok(Self { machines, tasks: host_patterns(tasks).map_err(pattern)? })
    }

    fn wants(&self, task: &str) -> bool {
        self.tasks.as_ref().is_none_or(|tasks| tasks.is_match(task))
    }

    /// Calls `each` with the machines that are meant.
    fn each(&self, inner: &FleetState, mut each: impl FnMut(&str, &Handle, &Sub)) {
        for (hostname, watched) in &inner.watched {
            watched.handle.with_sub(|sub| {
                let required = sub.required();
                let required = required.as_ref().map(model::image::ImageName::as_str);
                if self.machines.wants(&watched.machine, required, sub.status()) {
                    each(hostname, &watched.handle, sub);
                }
            });
        }
    }
}

/// An order that was recorded.
struct Recorded {
    hostname: String,
    task: String,
    number: u64,
}

impl Fleet {
    /// Lists tasks, by host name and task.
    pub fn tasks(&self, request: ListTasksRequest) -> Result<ListTasksReply, OrderError> {
        let ListTasksRequest { machines, tasks, states } = request;
        let selection = TaskSelection::new(machines, &tasks)?;
        let mut reply = ListTasksReply::default();
        selection.each(&self.locked(), |hostname, _, sub| match sub.tasks() {
            Ok(known) => {
                let wanted = known.tasks.into_iter().filter(|report| {
                    selection.wants(&report.name)
                        && (states.is_empty() || states.contains(&report.state))
                });
                reply.tasks.extend(wanted.map(|report| task_of(hostname, sub, report)));
            }
            Err(why) => reply.unknown.push((hostname.to_owned(), why)),
        });
        Ok(reply)
    }

    /// Counts the tasks of all machines in each state.
    pub fn task_counts(&self) -> TaskCounts {
        let mut counts = TaskCounts::new();
        let inner = self.locked();
        for watched in inner.watched.values() {
            let known = watched.handle.with_sub(Sub::tasks).unwrap_or_default();
            for report in known.tasks {
                *counts.entry(report.state).or_default() += 1;
            }
        }
        counts
    }

    /// Returns all that is known of a task of a machine.
    pub fn task(&self, request: &GetTaskRequest) -> Result<GetTaskReply, OrderError> {
        let GetTaskRequest { hostname, task } = request;
        let now = self.shared.clock.now().wall;
        let handle = self.handle(hostname)?;
        handle.with_sub(|sub| {
            let unknown = |why| OrderError::NoTasks { hostname: hostname.clone(), why };
            let known = sub.tasks().map_err(unknown)?;
            let report = known.tasks.into_iter().find(|report| report.name == *task);
            let report = report.ok_or_else(|| OrderError::NoTask { task: task.clone() })?;
            let SubSummary { last_seen: seen, .. } = sub.summary(None);
            let task = task_of(hostname, sub, report);
            let known = Known {
                hostname,
                report: &task.report,
                wanted: &task.wanted,
                refused: sub.refused_task_order(&task.report.name),
                away: task.away.as_deref(),
                seen,
                now,
            };
            let mut explanation = explain(&known);
            if task.report.permit.is_some() {
                explanation.push(self.permit_text(&task.report.name));
            }
            Ok(GetTaskReply { task, seen, explanation })
        })
    }

    /// Says which machine has the permit of an exclusive task.
    pub fn permit_text(&self, task: &str) -> String {
        let reply = self.shared.permits.report();
        let mut tasks = reply.tasks.into_iter();
        let holders = tasks.find(|one| one.task == task).map(|one| one.holders);
        permit_text(&holders.unwrap_or_default(), reply.opens_in_s)
    }

    /// Gives an order about tasks. It is recorded and saved before machines are told. On an error
    /// no machine is told.
    pub async fn order_tasks(
        self: &Arc<Self>,
        request: OrderTasksRequest,
    ) -> Result<OrderTasksReply, OrderError> {
        let OrderTasksRequest { machines, tasks, order, why, who, wait_ms } = request;
        if tasks.is_empty() || machines == ListSubsRequest::default() {
            return Err(OrderError::NoSelection);
        }
        let record = Order::new(verb_of(order), &who).about(named(&machines.hosts)).why(&why);
        let record = record.what(format!("task {}", named(&tasks)));
        let record = match order.needs_reason() {
            true => record.reasoned("the task is to be stopped")?,
            false => record.checked()?,
        };
        let selection = TaskSelection::new(machines, &tasks)?;
        let since = self.shared.clock.now().wall;
        let (by, reason) = (who.clone(), why.clone());
        let save = move |fleet: &Self| {
            let change = |orders: &mut TaskOrders| {
                let (mut recorded, mut outcomes) = (Vec::new(), Vec::new());
                selection.each(&fleet.locked(), |hostname, _, sub| {
                    let mut refuse = |task: String, why: String| {
                        let (hostname, outcome) =
                            (hostname.to_owned(), TaskOrderOutcome::Refused(why));
                        outcomes.push(OrderedTask { hostname, task, outcome });
                    };
                    let known = match sub.tasks() {
                        Ok(known) => known.tasks,
                        Err(why) => {
                            return refuse(tasks.join(" "), format!("tasks are not known: {why}"));
                        }
                    };
                    for report in known.iter().filter(|report| selection.wants(&report.name)) {
                        if let Some(why) = why_not(order, report, sub) {
                            refuse(report.name.clone(), why);
                            continue;
                        }
                        let (task, why, who) = (report.name.clone(), reason.clone(), by.clone());
                        let new = WantedTaskOrder { task, order, why, who, since, number: 0 };
                        let number = orders.want(hostname, new, report.order_number);
                        let (hostname, task) = (hostname.to_owned(), report.name.clone());
                        recorded.push(Recorded { hostname, task, number });
                    }
                });
                match recorded.is_empty() && outcomes.is_empty() {
                    true => Err(OrderError::NoTask { task: tasks.join(" ") }),
                    false => Ok((recorded, outcomes)),
                }
            };
            fleet.state().task_orders.modify_through(change, with_order(&record))
        };
        let (recorded, mut outcomes) = self.on_thread(save).await?;
        let verb = order.name();
        let count = counted(recorded.len() as u64, "task");
        tracing::warn!(%who, %why, "operators {verb} {count}");
        self.send_task_orders(&recorded);
        let wait = Duration::from_millis(wait_ms.min(ORDER_WAIT_MS_MAX).into());
        outcomes.extend(self.await_orders(&recorded, Instant::now() + wait).await);
        outcomes
            .sort_by(|one, other| (&one.hostname, &one.task).cmp(&(&other.hostname, &other.task)));
        Ok(OrderTasksReply { tasks: outcomes })
    }

    /// Tells the drivers of machines which orders are wanted now.
    fn send_task_orders(&self, recorded: &[Recorded]) {
        let hostnames: BTreeSet<&String> = recorded.iter().map(|one| &one.hostname).collect();
        // Read while `inner` is locked: of two calls the later one has the later orders.
        let inner = self.locked();
        for hostname in hostnames {
            if let Some(watched) = inner.watched.get(hostname) {
                let orders = SubOrder::WantTaskOrders(self.shared.task_orders.of(hostname));
                watched.handle.order(orders, &self.shared);
            }
        }
    }

    /// Waits until machines have taken these orders, or until `deadline`. Returns what became of
    /// them.
    async fn await_orders(&self, recorded: &[Recorded], deadline: Instant) -> Vec<OrderedTask> {
        loop {
            let outcomes: Vec<OrderedTask> =
                recorded.iter().filter_map(|one| self.outcome_of(one)).collect();
            let is_done = |one: &OrderedTask| one.outcome != TaskOrderOutcome::Wanted;
            if outcomes.iter().all(is_done) || Instant::now() >= deadline {
                return outcomes;
            }
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
    }

    /// Returns what became of an order; `None` if the machine is gone.
    fn outcome_of(&self, recorded: &Recorded) -> Option<OrderedTask> {
        let Recorded { hostname, task, number } = recorded;
        let outcome = self.handle(hostname).ok()?.with_sub(|sub| {
            let is_of = |order: &WantedTaskOrder| order.task == *task && order.number == *number;
            match sub.refused_task_order(task) {
                _ if sub.wanted_task_orders().iter().any(is_of) => TaskOrderOutcome::Wanted,
                Some(why) => TaskOrderOutcome::Refused(why.to_owned()),
                None => TaskOrderOutcome::Taken,
            }
        });
        Some(OrderedTask { hostname: hostname.clone(), task: task.clone(), outcome })
    }

    /// Forgets the orders about tasks of machines that left the machine database. Blocks on the
    /// disk.
    pub(super) fn forget_task_orders(&self) {
        let forget = |orders: &mut TaskOrders| orders.forget_unknown(&self.locked().watched);
        if let Err(error) = self.state().task_orders.modify(forget) {
            // The next change of the machine database tries it again.
            tracing::error!("cannot forget orders about tasks: {}", error_chain(&error));
        }
    }

    /// Asks a machine for the end of what a task has written.
    pub async fn task_log(
        &self,
        request: GetTaskLogRequest,
    ) -> Result<GetTaskLogReply, OrderError> {
        let GetTaskLogRequest { hostname, task, bytes } = request;
        let (handle, machine) = self.find(&hostname)?;
        let reply = match handle.with_sub(Sub::expect_right_machine) {
            Ok(()) => {
                let client = client_of(&machine, &self.shared);
                let request = api::subd::GetTaskLogRequest { task, bytes };
                let reply = client.call_within::<GetTaskLog>(&request, LOG_LIMIT).await;
                reply.map_err(|error| error_chain(&error))
            }
            Err(why) => Err(why),
        };
        reply.map_err(|why| OrderError::NoTaskLog { hostname, why })
    }
}

fn task_of(hostname: &str, sub: &Sub, report: TaskReport) -> TaskOfMachine {
    let wanted = sub.wanted_task_orders().iter().filter(|order| order.task == report.name);
    TaskOfMachine {
        hostname: hostname.to_owned(),
        wanted: wanted.cloned().collect(),
        away: sub.expect_right_machine().err(),
        report,
    }
}

/// Returns why an order about a task is not given.
fn why_not(order: TaskOrder, report: &TaskReport, sub: &Sub) -> Option<String> {
    if report.state == TaskState::NotRun {
        return Some(report.detail.clone());
    }
    // They are meant for now.
    let is_for_now = matches!(order, TaskOrder::Restart | TaskOrder::Start);
    let away = sub.expect_right_machine().err().filter(|_| is_for_now)?;
    Some(format!("the machine does not answer: {away}"))
}

/// The name of the order in the history.
fn verb_of(order: TaskOrder) -> &'static str {
    match order {
        TaskOrder::Hold => "task-hold",
        TaskOrder::Release => "task-release",
        TaskOrder::Suspend => "task-suspend",
        TaskOrder::Resume => "task-resume",
        TaskOrder::Restart => "task-restart",
        TaskOrder::Start => "task-start",
    }
}
