//! Methods about the daemon tasks of the machine.

use std::process::Command;
use std::sync::Arc;

use api::Done;
use api::codec::{Encoding, encode};
use api::fault::{Fault, FaultCode};
use api::subd::{
    GetTaskLog, GetTaskLogReply, GetTaskLogRequest, GetTaskStates, GetTaskStatesReply,
    GetTaskStatesRequest, GetTasks, GetTasksReply, OrderTask, OrderTaskRequest, PermitTask,
    PermitTaskReply, PermitTaskRequest, SetNotRestarted, SetNotRestartedRequest,
    TASK_LOG_BYTES_MAX, TASK_WHY_BYTES_MAX, TaskReport, TaskState, TaskStates, TasksVersion,
};
use model::boot_time::BootTime;
use model::escape::ByteText;
use model::object::Algorithm;
use rpc::server::Router;

use crate::blocking;
use crate::interface::Service;
use crate::tasks::log_files;
use crate::tasks::report::not_run;
use crate::tasks::runner::{Tasks, no_task};
use crate::tasks::supervisor::{Backend, unit_of};

/// How many bytes a line of a journal has, roughly: a journal is asked for lines.
const LINE_BYTES: u32 = 80;

/// Adds the methods of this module to `router`.
pub fn add_methods(router: Router<Arc<Service>>) -> Router<Arc<Service>> {
    router
        .method::<GetTasks, _>(async |service, _, ()| Ok(service.tasks()))
        .method::<GetTaskStates, _>(async |service, _, request| service.task_states(request))
        .method::<OrderTask, _>(async |service, _, request| {
            blocking(move || service.order_task(&request)).await
        })
        .method::<PermitTask, _>(async |service, _, request| {
            blocking(move || service.permit_task(&request)).await
        })
        .method::<SetNotRestarted, _>(async |service, _, request| {
            blocking(move || service.set_not_restarted(request)).await
        })
        .method::<GetTaskLog, _>(async |service, _, request| {
            blocking(move || service.task_log(&request)).await
        })
}

impl Service {
    /// How the tasks of the machine are.
    pub fn tasks(&self) -> GetTasksReply {
        match (&self.updater.daemon_tasks, &self.tasks_not_run) {
            (Some(running), _) => GetTasksReply {
                supervisor: Some(running.supervisor.backend().name().to_owned()),
                not_run: None,
                tasks: running.reports(),
                said_at: running.supervisor.boot_now(),
            },
            (None, why) => {
                let why = why.clone().unwrap_or_default();
                let defined = |name: &String| not_run(name, TaskState::NotRun, &why);
                let tasks: Vec<TaskReport> = self
                    .report_state
                    .read(|state| state.persisted.tasks.0.keys().map(defined).collect());
                GetTasksReply {
                    supervisor: None,
                    not_run: Some(why),
                    tasks,
                    said_at: BootTime::default(),
                }
            }
        }
    }

    fn task_states(&self, request: GetTaskStatesRequest) -> Result<GetTaskStatesReply, Fault> {
        let GetTasksReply { not_run, tasks, said_at, .. } = self.tasks();
        let image_health = self.report_state.read(|state| {
            let known = state.image_health.as_ref();
            let known =
                known.filter(|(image, _)| Some(image) == state.persisted.last_image.as_ref());
            known.map(|(_, health)| health.clone())
        });
        let states = TaskStates { not_run, tasks, image_health };
        let version = version_of(&states)?;
        let states = (request.have != Some(version)).then_some(states);
        Ok(GetTaskStatesReply { version, said_at, states })
    }

    fn running(&self) -> Result<&Tasks, Fault> {
        let why = || self.tasks_not_run.clone().unwrap_or_default();
        self.updater.daemon_tasks.as_deref().ok_or_else(|| {
            let text = format!("this machine runs no tasks: {}", why());
            Fault::new(FaultCode::Unavailable, text)
        })
    }

    fn order_task(&self, request: &OrderTaskRequest) -> Result<Done, Fault> {
        let OrderTaskRequest { task, order, why, number } = request;
        expect_short(why)?;
        if order.needs_reason() && why.trim().is_empty() {
            let text = format!("to {} a task needs a reason", order.name());
            return Err(Fault::new(FaultCode::BadRequest, text));
        }
        self.running()?.order(task, *order, why, *number).map(|()| Done {})
    }

    fn permit_task(&self, request: &PermitTaskRequest) -> Result<PermitTaskReply, Fault> {
        let PermitTaskRequest { task, number, until } = request;
        let said_at = self.running()?.permit(task, *number, until)?;
        Ok(PermitTaskReply { said_at })
    }

    fn set_not_restarted(&self, request: SetNotRestartedRequest) -> Result<Done, Fault> {
        request.tasks.values().try_for_each(|why| expect_short(why))?;
        self.running()?.set_not_restarted(request.tasks).map(|()| Done {})
    }

    /// Returns the end of the log of a task. Blocks.
    fn task_log(&self, request: &GetTaskLogRequest) -> Result<GetTaskLogReply, Fault> {
        let running = self.running()?;
        let task = &request.task;
        // The name becomes part of a path, and of a command.
        if !running.reports().iter().any(|report| report.name == *task) {
            return Err(no_task(task));
        }
        let bytes = request.bytes.min(TASK_LOG_BYTES_MAX);
        let internal = |text: String| Fault::new(FaultCode::Internal, text);
        let text = match running.supervisor.backend() {
            Backend::Direct { .. } => {
                let directory = running.supervisor.directory_of(task);
                log_files::tail(&directory.0, bytes.into())
                    .map_err(|error| internal(format!("cannot read the log: {error}")))?
            }
            Backend::Systemd => {
                let mut journal = Command::new("journalctl");
                journal
                    .arg(format!("--unit={}", unit_of(task)))
                    .arg(format!("--lines={}", bytes / LINE_BYTES + 1))
                    .args(["--no-pager", "--quiet", "--output=cat"]);
                let read = journal.output().map_err(|error| error.to_string());
                let mut text = match read {
                    Ok(read) if read.status.success() => read.stdout,
                    Ok(read) => return Err(internal(format!("journalctl: {}", read.status))),
                    Err(error) => return Err(internal(format!("journalctl: {error}"))),
                };
                let excess = text.len().saturating_sub(bytes.try_into().unwrap_or(usize::MAX));
                text.drain(..excess);
                text
            }
        };
        Ok(GetTaskLogReply { text: ByteText(text) })
    }
}

fn expect_short(why: &str) -> Result<(), Fault> {
    if why.len() <= TASK_WHY_BYTES_MAX {
        return Ok(());
    }
    let text = format!("the reason has at most {TASK_WHY_BYTES_MAX} bytes");
    Err(Fault::new(FaultCode::BadRequest, text))
}

/// Returns the version of `states`: the beginning of a digest.
fn version_of(states: &TaskStates) -> Result<TasksVersion, Fault> {
    let encoded = encode(Encoding::Bincode, "task states", states);
    let encoded = encoded.map_err(|error| Fault::new(FaultCode::Internal, error.to_string()))?;
    let digest = Algorithm::Blake3.digest(&encoded);
    let start = digest.digest().first_chunk().copied().unwrap_or_default();
    Ok(TasksVersion(u64::from_le_bytes(start)))
}
