//! The page of daemon tasks.

use std::collections::{BTreeMap, BTreeSet};

use api::dominator::permits::Fence;
use api::dominator::tasks::{ListTasksRequest, TaskOfMachine};
use api::dominator::{ListSubsRequest, TagFilter};
use api::fault::{Fault, FaultCode};
use api::subd::{TaskReport, TaskState};
use askama::Template;
use model::display::{counted, utc};
use rpc::page_frame::path_escape;
use rpc::server::Query;

use super::ROWS_MAX;
use crate::core::tasks::{TaskCounts, counts_text, waits_for_permit};
use crate::interface::api::fault_of;
use crate::runtime::fleet::{Fleet, OrderError};

/// How many tasks there are, and those that are asked for, or that do not run as they should.
#[derive(Template)]
#[template(path = "tasks.html")]
pub(super) struct TasksPage {
    /// Names and counts.
    by_task: Vec<(String, String)>,
    counts: String,
    /// How many machines have tasks that are not known, and why it is so of one of them.
    unknown: Option<String>,
    fenced: Vec<String>,
    heading: &'static str,
    rows: Vec<TaskRow>,
    /// How many more there are.
    hidden: usize,
}

/// A task of a machine.
pub(super) struct TaskRow {
    pub(super) host: String,
    pub(super) task: String,
    pub(super) state: &'static str,
    pub(super) class: &'static str,
    pub(super) starts: u32,
    pub(super) detail: String,
}

impl TaskRow {
    fn of(task: TaskOfMachine) -> Self {
        let orders = task.wanted.iter();
        let orders = orders.map(|order| format!("; not taken yet: {}", order.order.name()));
        let away = task.away.iter().map(|why| format!("; as of before: {why}"));
        let more: String = orders.chain(away).collect();
        Self {
            class: class_of(&task.report),
            host: task.hostname,
            task: task.report.name,
            state: task.report.state.name(),
            starts: task.report.starts,
            detail: task.report.detail + &more,
        }
    }
}

/// Returns the tasks of a machine, or why they are not known.
pub(super) fn tasks_of(fleet: &Fleet, host: &str) -> Result<Vec<TaskRow>, String> {
    let machines = ListSubsRequest { hosts: vec![host.to_owned()], ..ListSubsRequest::default() };
    let request = ListTasksRequest { machines, ..ListTasksRequest::default() };
    let mut reply = fleet.tasks(request).map_err(|error| error.to_string())?;
    match reply.unknown.pop() {
        Some((_, why)) => Err(why),
        None => Ok(reply.tasks.into_iter().map(TaskRow::of).collect()),
    }
}

impl TasksPage {
    pub(super) fn find(fleet: &Fleet, query: &Query) -> Result<Self, Fault> {
        let state_of = |name: String| {
            let known = TaskState::ALL.into_iter().find(|state| state.name() == name);
            let unknown =
                || Fault::new(FaultCode::BadRequest, format!("there is no state `{name}`"));
            known.ok_or_else(unknown)
        };
        let states = query.all("state").into_iter().map(state_of).collect::<Result<_, _>>()?;
        let machines = ListSubsRequest {
            statuses: Vec::new(),
            hosts: query.all("host"),
            images: query.all("image"),
            locations: query.all("location"),
            tags: query.all("tag").iter().map(|tag| TagFilter::parse(tag)).collect(),
        };
        let request = ListTasksRequest { machines, tasks: query.all("task"), states };
        let is_all = request == ListTasksRequest::default();
        Self::of(fleet, request, is_all).map_err(|error| fault_of(&error))
    }

    fn of(fleet: &Fleet, request: ListTasksRequest, is_all: bool) -> Result<Self, OrderError> {
        let mut reply = fleet.tasks(request)?;
        let mut all = TaskCounts::new();
        let mut by_task: BTreeMap<String, TaskCounts> = BTreeMap::new();
        let mut exclusive = BTreeSet::new();
        for task in &reply.tasks {
            let state = task.report.state;
            let counts = by_task.entry(task.report.name.clone()).or_default();
            *counts.entry(state).or_default() += 1;
            *all.entry(state).or_default() += 1;
            if task.report.permit.is_some() {
                exclusive.insert(task.report.name.clone());
            }
        }
        let fenced = fleet.shared().permits.report().fenced.into_iter();
        let fenced = fenced.map(|Fence { hostname, who, why, since }| {
            format!("{hostname} is fenced by {who} since {}: {why}", utc(since))
        });
        let unknown = reply.unknown.first().map(|(host, why)| {
            let count = counted(reply.unknown.len() as u64, "machine");
            format!("The tasks of {count} are not known, such as {host}: {why}")
        });
        if is_all {
            reply.tasks.retain(|task| class_of(&task.report) != GOOD);
        }
        let hidden = reply.tasks.len().saturating_sub(ROWS_MAX);
        let rows = reply.tasks.into_iter().take(ROWS_MAX).map(TaskRow::of).collect();
        let counted = |(name, counts): (String, TaskCounts)| {
            let permit = exclusive.contains(&name).then(|| fleet.permit_text(&name));
            let counts = permit
                .into_iter()
                .fold(counts_text(&counts), |counts, permit| format!("{counts}; {permit}"));
            (name, counts)
        };
        Ok(Self {
            by_task: by_task.into_iter().map(counted).collect(),
            counts: counts_text(&all),
            unknown,
            fenced: fenced.collect(),
            heading: if is_all { "Not running" } else { "Tasks" },
            rows,
            hidden,
        })
    }
}

/// The style class of tasks that are as they should be.
const GOOD: &str = "good";

/// Returns the style class of a task: its colour.
fn class_of(report: &TaskReport) -> &'static str {
    match report.state {
        _ if waits_for_permit(report) => GOOD,
        TaskState::Running | TaskState::Succeeded => GOOD,
        TaskState::Starting | TaskState::Stopping => "busy",
        TaskState::Idle | TaskState::NotRun => "quiet",
        TaskState::Refused
        | TaskState::Suspended
        | TaskState::Held
        | TaskState::Unhealthy
        | TaskState::Waiting
        | TaskState::NotRestarted
        | TaskState::Failed => "bad",
    }
}
