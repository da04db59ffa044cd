//! Samples of the methods about the daemon tasks of all machines.

use api::dominator::tasks::{
    GetTaskLogRequest, GetTaskReply, GetTaskRequest, ListTasksReply, ListTasksRequest,
    OrderTasksReply, OrderTasksRequest, OrderedTask, TaskOfMachine, TaskOrderOutcome,
    WantedTaskOrder,
};
use api::dominator::{ListSubsRequest, TagFilter};
use api::subd::{GetTaskLogReply, TaskOrder, TaskState};
use model::escape::ByteText;
use model::tree::Time;

use super::sub_state::task_report;

fn machines() -> ListSubsRequest {
    let tag = TagFilter { name: "tier".to_owned(), value: Some("front".to_owned()) };
    ListSubsRequest { hosts: vec!["web*".to_owned()], tags: vec![tag], ..Default::default() }
}

fn task_of_machine() -> TaskOfMachine {
    let order = WantedTaskOrder {
        task: "logd".to_owned(),
        order: TaskOrder::Hold,
        why: "disk swap".to_owned(),
        who: "ann".to_owned(),
        since: Time { seconds: 21, nanoseconds: 22 },
        number: 23,
    };
    TaskOfMachine {
        hostname: "web1".to_owned(),
        report: task_report(),
        wanted: vec![order],
        away: Some("no answer".to_owned()),
    }
}

pub fn list_tasks() -> (ListTasksRequest, ListTasksReply) {
    let (tasks, states) = (vec!["logd".to_owned()], vec![TaskState::Failed]);
    let unknown = vec![("web2".to_owned(), "why".to_owned())];
    (
        ListTasksRequest { machines: machines(), tasks, states },
        ListTasksReply { tasks: vec![task_of_machine()], unknown },
    )
}

pub fn get_task() -> (GetTaskRequest, GetTaskReply) {
    let seen = Some(Time { seconds: 24, nanoseconds: 25 });
    let explanation = vec!["it is started at once".to_owned()];
    (
        GetTaskRequest { hostname: "web1".to_owned(), task: "logd".to_owned() },
        GetTaskReply { task: task_of_machine(), seen, explanation },
    )
}

pub fn order_tasks() -> (OrderTasksRequest, OrderTasksReply) {
    let request = OrderTasksRequest {
        machines: machines(),
        tasks: vec!["logd".to_owned()],
        order: TaskOrder::Suspend,
        why: "disk swap".to_owned(),
        who: "ann".to_owned(),
        wait_ms: 26,
    };
    let outcomes = [
        TaskOrderOutcome::Taken,
        TaskOrderOutcome::Wanted,
        TaskOrderOutcome::Refused("why".to_owned()),
    ];
    let ordered = outcomes.map(|outcome| {
        let (hostname, task) = ("web1".to_owned(), "logd".to_owned());
        OrderedTask { hostname, task, outcome }
    });
    (request, OrderTasksReply { tasks: ordered.into() })
}

pub fn get_fleet_task_log() -> (GetTaskLogRequest, GetTaskLogReply) {
    let (hostname, task) = ("web1".to_owned(), "logd".to_owned());
    let reply = GetTaskLogReply { text: ByteText(b"said\n".to_vec()) };
    (GetTaskLogRequest { hostname, task, bytes: 300 }, reply)
}
