//! A copy of the template: it is updated, broken, recovered and examined.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use model::object::Algorithm;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use testing::crash_points::{copy, entries, in_one_line};
use testing::eventually;
use testing::strace::Faults;

use crate::fixture::{RUN_AFTER, RUN_BEFORE, Template, as_word};
use crate::listing::Listing;

/// The environment variable with the machine's directory, for the program that updates it.
pub const DIRECTORY_VARIABLE: &str = "CRASH_ACT";

/// A machine of one attempt.
pub struct Machine<'template> {
    template: &'template Template,
    directory: PathBuf,
}

/// Which of the two allowed states a machine has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// The one before the update.
    Old,
    /// The one after it.
    New,
}

/// What is restarted after the interruption.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Restart {
    /// subd alone.
    Program,
    /// The machine: no service runs, the tree is made whole in early boot, then the services of
    /// that tree start, and subd.
    Boot,
}

/// The result of an attempt.
#[derive(Clone, Copy, Debug)]
pub struct Survived {
    /// The state after the recovery.
    pub state: State,
    /// How long the recovery took.
    pub recovery: Duration,
}

impl Restart {
    /// Returns the two kinds in turn.
    pub fn of(number: usize) -> Self {
        if number.is_multiple_of(2) { Self::Boot } else { Self::Program }
    }
}

impl<'template> Machine<'template> {
    /// Copies the template to `directory`, which must not exist.
    pub fn copy(template: &'template Template, directory: PathBuf) -> Self {
        copy(&template.directory, &directory);
        Self { template, directory }
    }

    /// Copies all of the template but its root to `directory`, which must not exist.
    pub fn around(template: &'template Template, directory: PathBuf) -> Self {
        std::fs::create_dir(&directory).unwrap();
        std::fs::create_dir(directory.join("root")).unwrap();
        for name in ["have.txt", "want.txt", "running", "driver"] {
            copy(&template.directory.join(name), &directory.join(name));
        }
        Self { template, directory }
    }

    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Returns the command that updates the machine.
    pub fn update(&self) -> Command {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.env(DIRECTORY_VARIABLE, &self.directory);
        command
    }

    /// Returns the command that finishes or undoes an interrupted update.
    pub fn recovery(&self) -> Command {
        let mut command = self.subd();
        command.arg("--recover");
        command
    }

    fn subd(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_subd"));
        command.args(["--insecure", "--config", "/dev/null", "--listen", "127.0.0.6:0", "--root"]);
        command.arg(self.directory.join("root"));
        command.arg("--service-command").arg(service_command(&self.directory));
        command
    }

    /// Runs `command` with `faults`, and waits for its children.
    ///
    /// # Errors
    ///
    /// If a point was not reached.
    pub fn break_at(&self, command: &Command, faults: &Faults) -> Result<Output, String> {
        let log = self.directory.join("strace.log");
        let output = faults.inject(command, &log).output().unwrap();
        wait_for_children(&self.directory);
        match faults.happened(&log) {
            true => Ok(output),
            false => Err(format!("the point was not reached: {}", in_one_line(&output))),
        }
    }

    /// Returns the state that the updating program printed, or `None` if it printed that it is
    /// stuck.
    ///
    /// # Errors
    ///
    /// If the machine has another state.
    pub fn reported_state(&self, output: &Output) -> Result<Option<State>, String> {
        let text = String::from_utf8_lossy(&output.stdout);
        let outcome = text.lines().last().unwrap_or_default().split(' ').next().unwrap_or_default();
        let reported = match outcome {
            "done" => State::New,
            "rolled-back" | "not-prepared" | "not-started" => State::Old,
            "stuck" => return Ok(None),
            _ => return Err(format!("the program failed: {}", in_one_line(output))),
        };
        match self.state() {
            Ok(state) if state == reported => Ok(Some(state)),
            Ok(state) => Err(format!("it is {state:?}: {}", in_one_line(output))),
            Err(why) => Err(format!("{}: {why}", in_one_line(output))),
        }
    }

    /// Restarts subd, waits until it has recovered the update, and stops it.
    ///
    /// # Errors
    ///
    /// If the machine is neither as before the update nor as after it, or anything is left.
    pub fn restart(&self, how: Restart) -> Result<Survived, String> {
        let start = Instant::now();
        if how == Restart::Program {
            self.run_daemon()?;
            let recovery = start.elapsed();
            return Ok(Survived { state: self.state()?, recovery });
        }
        self.run_services(&[]);
        let start = Instant::now();
        let output = self.recovery().output().unwrap();
        if !output.status.success() {
            return Err(format!("the recovery failed: {}", in_one_line(&output)));
        }
        let recovery = start.elapsed();
        let recovered = self.tree()?;
        self.run_services(match recovered {
            State::Old => &RUN_BEFORE,
            State::New => &RUN_AFTER,
        });
        self.run_daemon()?;
        match self.state()? {
            state if state == recovered => Ok(Survived { state, recovery }),
            state => Err(format!("it was recovered to {recovered:?}, and became {state:?}")),
        }
    }

    /// Makes exactly these services run.
    fn run_services(&self, services: &[&str]) {
        let running = self.directory.join("running");
        std::fs::remove_dir_all(&running).unwrap();
        std::fs::create_dir(&running).unwrap();
        services.iter().for_each(|name| std::fs::create_dir(running.join(name)).unwrap());
    }

    /// Runs the daemon until nothing is left to be done.
    fn run_daemon(&self) -> Result<(), String> {
        let log = self.directory.join("subd.log");
        let log_text = || std::fs::read_to_string(&log).unwrap();
        let output = std::fs::File::create(&log).unwrap();
        let mut command = self.subd();
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(output);
        let mut daemon = Daemon(command.spawn().unwrap());
        eventually("subd has recovered", || {
            if let Some(status) = daemon.0.try_wait().unwrap() {
                return Ok(Err(format!("subd ended with {status}: {}", log_text())));
            }
            let left = self.check_clean();
            if left.is_ok() && log_text().contains("listening") {
                return Ok(Ok(()));
            }
            Err(format!("{left:?}: {}", log_text()))
        })?;
        kill(Pid::from_raw(daemon.0.id().cast_signed()), Signal::SIGTERM).unwrap();
        let status = daemon.0.wait().unwrap();
        if status.success() { self.check_clean() } else { Err(format!("{status}: {}", log_text())) }
    }

    /// Returns the state of the tree and the services.
    ///
    /// # Errors
    ///
    /// The difference to the nearer of the two states.
    pub fn state(&self) -> Result<State, String> {
        self.like(|listing, other| listing == other)
    }

    /// Returns the state of the tree alone, as [`Machine::state`].
    ///
    /// # Errors
    ///
    /// The difference to the nearer of the two states.
    pub fn tree(&self) -> Result<State, String> {
        self.like(Listing::same_tree)
    }

    fn like(&self, same: impl Fn(&Listing, &Listing) -> bool) -> Result<State, String> {
        let listing = Listing::of(&self.directory.join("root"), &self.directory.join("running"));
        let (old, new) = (&self.template.old, &self.template.new);
        match () {
            () if same(&listing, old) => Ok(State::Old),
            () if same(&listing, new) => Ok(State::New),
            () => {
                let (from_old, from_new) = (listing.difference(old), listing.difference(new));
                let names = [("old", from_old), ("new", from_new)];
                let nearest = names.into_iter().min_by_key(|(_, (count, _))| *count);
                let (name, (_, text)) = nearest.expect("there are two");
                Err(format!(
                    "the state is neither old nor new; it differs from the {name} one:\n{text}"
                ))
            }
        }
    }

    /// Checks that nothing of the update is left in subd's own directories, and that each object
    /// has the digest that is its name.
    ///
    /// # Errors
    ///
    /// The files that are left or wrong.
    pub fn check_clean(&self) -> Result<(), String> {
        let own = self.directory.join("root/.subd");
        let mut left: Vec<PathBuf> = Vec::new();
        for directory in entries(&own) {
            // The daemon may remove it meanwhile.
            let below = || if directory.is_dir() { entries(&directory) } else { Vec::new() };
            match directory.file_name().unwrap().to_str().unwrap() {
                "objects" => left.extend(below().into_iter().filter(|path| !is_object(path))),
                "state" => left.extend(below().into_iter().filter(|path| {
                    !matches!(path.file_name().unwrap().to_str(), Some("state.json" | "lock"))
                })),
                "staging" | "undo" | "journal" => left.extend(below()),
                // Space for an update on a full disk.
                "reserve" => {}
                // The audit log stays for ever.
                "audit" => left.extend(below().into_iter().filter(|path| {
                    let name = path.file_name().unwrap().to_str().unwrap();
                    !name.starts_with("audit.log")
                })),
                _ => left.push(directory),
            }
        }
        if left.is_empty() { Ok(()) } else { Err(format!("left over: {left:?}")) }
    }

    pub fn remove(self) {
        std::fs::remove_dir_all(&self.directory).unwrap();
    }
}

/// Waits until no process has `directory` in its command line: children of a killed program may
/// still run.
pub fn wait_for_children(directory: &Path) {
    let name = directory.as_os_str().as_encoded_bytes();
    let has_name = |process: PathBuf| {
        let line = std::fs::read(process.join("cmdline")).unwrap_or_default();
        line.windows(name.len()).any(|window| window == name)
    };
    eventually("the children have ended", || {
        !entries(Path::new("/proc")).into_iter().any(has_name)
    });
}

/// A daemon that does not outlive the test.
struct Daemon(Child);

impl Drop for Daemon {
    fn drop(&mut self) {
        if matches!(self.0.try_wait(), Ok(None)) {
            let _gone = self.0.kill().and_then(|()| self.0.wait());
        }
    }
}

/// Returns the service command of the machine in `directory`.
pub fn service_command(directory: &Path) -> String {
    let (driver, running) = (directory.join("driver"), directory.join("running"));
    format!("{} {}", as_word(&driver), as_word(&running))
}

fn is_object(path: &Path) -> bool {
    let name = path.file_name().unwrap().to_string_lossy();
    let content = std::fs::read(path);
    content.is_ok_and(|content| Algorithm::Blake3.digest(&content).to_string() == name)
}
