//! Daemon tasks as real processes: by each backend, and across the ends of all that watches them.
//!
//! The tasks lock a file and record whether they found it locked: then two were live at once.

mod backend;
mod booted;
mod lives;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use api::subd::{TaskReport, TaskState};
use model::path::TreePath;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use subd::machine::command_runner::CommandRunner;
use subd::root::Root;
use subd::state::persisted_state::StateDirectory;
use subd::tasks::cgroup;
use subd::tasks::records;
use subd::tasks::runner::Tasks;
use subd::tasks::supervisor::{Backend, Supervisor};
use tasks::image::{Definition, ImageTasks};
use testing::eventually;

/// The name of the task of most tests.
const JOB: &str = "job";

/// Locks the file of the machine, and says that it runs. Its descendants have the lock too.
const LOCK: &str = "exec 9>>PLACE/lock; flock -n 9 || echo $$ >> PLACE/overlaps\n\
    echo $$ >> PLACE/starts\n";

/// A machine with one task, at most.
struct Machine {
    place: tempfile::TempDir,
    backend: Backend,
}

/// subd on that machine, as far as it runs tasks.
struct Running {
    tasks: Tasks,
    _state: StateDirectory,
}

impl Machine {
    fn new(backend: Backend) -> Self {
        let place = tempfile::tempdir().unwrap();
        fs::create_dir(place.path().join("state")).unwrap();
        // A task need not run as root.
        fs::set_permissions(place.path(), fs::Permissions::from_mode(0o777)).unwrap();
        Self { place, backend }
    }

    /// The backends that can be had here without a container: direct, without and with cgroups.
    fn each(test: impl Fn(&Self)) {
        let direct = |cgroups| Backend::Direct { cgroups, root: None };
        test(&Self::new(direct(None)));
        match cgroup::own_directory() {
            Some(cgroups) => test(&Self::new(direct(Some(cgroups)))),
            None => eprintln!("skipped: cgroups cannot be made here"),
        }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.place.path().join(name)
    }

    /// subd starts.
    fn start(&self, tasks: &ImageTasks) -> Running {
        self.start_in_boot("boot 1", tasks)
    }

    fn start_in_boot(&self, boot_id: &str, tasks: &ImageTasks) -> Running {
        let program = PathBuf::from(env!("CARGO_BIN_EXE_subd"));
        let (directory, backend) = (self.at("tasks"), self.backend.clone());
        let supervisor = Supervisor::new(directory, backend, boot_id, program).unwrap();
        let root = Root::open(&self.at("state")).unwrap();
        let state = StateDirectory::lock(root.directory(&TreePath::root()).unwrap()).unwrap();
        let records = records::load(&state).unwrap();
        let supervisor = Arc::new(supervisor);
        let runner = CommandRunner::Child;
        let tasks = Tasks::start(supervisor, records, tasks.clone(), runner, || {}).unwrap();
        Running { tasks, _state: state }
    }

    /// A task that runs this script, with further fields.
    fn task(&self, fields: &str, script: &str) -> ImageTasks {
        self.named(JOB, fields, script)
    }

    fn named(&self, name: &str, fields: &str, script: &str) -> ImageTasks {
        let script = script.replace("PLACE", &self.place.path().display().to_string());
        let argv = serde_json::to_string(&["/bin/sh", "-c", &script]).unwrap();
        let comma = if fields.is_empty() { "" } else { ", " };
        let text = format!(r#"{{"name": "{name}", "argv": {argv}{comma}{fields}}}"#);
        ImageTasks([(name.to_owned(), Definition { text, programs: Vec::new() })].into())
    }

    /// What the task has written into this file, by lines.
    fn lines(&self, name: &str) -> Vec<String> {
        let text = fs::read_to_string(self.at(name)).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    /// Waits until the task was started so often, and returns its process now.
    fn started(&self, times: usize) -> Pid {
        eventually("the task starts", || {
            let starts = self.lines("starts");
            match starts.len() {
                count if count >= times => Ok(pid(starts.last().unwrap())),
                count => Err(format!("{count} starts\n{}", self.lines("tasks/job/log").join("\n"))),
            }
        })
    }

    #[track_caller]
    fn never_were_two(&self) {
        assert_eq!(self.lines("overlaps"), Vec::<String>::new());
    }
}

impl Running {
    /// Waits until the task is in this state.
    fn until(&self, state: TaskState) -> TaskReport {
        eventually("the state of the task", || {
            let reports = self.tasks.reports();
            match reports.into_iter().find(|report| report.name == JOB) {
                Some(report) if report.state == state => Ok(report),
                other => Err(format!("{other:?}")),
            }
        })
    }

    /// subd ends; its tasks go on.
    fn end(self) {
        self.tasks.end();
    }

    /// Stops all tasks, at the end of a test.
    fn stop_all(self) {
        let all = self.tasks.supervisor.known().unwrap();
        assert_eq!(self.tasks.pause(&all), []);
        self.tasks.end();
    }
}

fn pid(text: &str) -> Pid {
    Pid::from_raw(text.parse().unwrap())
}

fn is_there(pid: Pid) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"));
    stat.is_ok_and(|stat| !stat.contains(") Z "))
}

fn is_gone(pid: Pid) {
    eventually("the process ends", || if is_there(pid) { Err("it is there") } else { Ok(()) });
}

/// Returns the process that watches the task in `tasks`.
fn guard(tasks: &Path) -> Pid {
    let record = fs::read_to_string(tasks.join(JOB).join("guard.json")).unwrap();
    let record: serde_json::Value = serde_json::from_str(&record).unwrap();
    Pid::from_raw(i32::try_from(record["pid"].as_i64().unwrap()).unwrap())
}

fn kill_hard(pid: Pid) {
    kill(pid, Signal::SIGKILL).unwrap();
}
