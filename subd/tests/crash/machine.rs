//! A copy of the template that an update is made on, broken, recovered and looked at.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use model::object::Algorithm;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::family::Survived;
use crate::fixture::{RUN_AFTER, RUN_BEFORE, Template, as_word};
use crate::listing::{Listing, entries};
use crate::strace::Faults;

/// How long the processes of a killed program may go on.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// How long to wait before looking again.
pub const LOOK_AGAIN: Duration = Duration::from_millis(2);

/// Names the machine to the program that updates it.
pub const ACT: &str = "CRASH_ACT";

/// A machine.
pub struct Machine<'template> {
    template: &'template Template,
    directory: PathBuf,
}

/// What a machine looks like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// As before the update.
    Old,
    /// As after it.
    New,
}

/// What is started again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Restart {
    /// subd alone.
    Program,
    /// The machine: no service runs, the tree is made whole in early boot, then the services of
    /// that tree start, and subd.
    Boot,
}

impl Restart {
    /// Both, in turn.
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

    /// Where it is.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The program that updates it.
    pub fn update(&self) -> Command {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.env(ACT, &self.directory);
        command
    }

    /// The program that makes its tree whole.
    pub fn recovery(&self) -> Command {
        let mut command = self.subd();
        command.arg("--recover");
        command
    }

    fn subd(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_subd"));
        command.args(["--insecure", "--config", "/dev/null", "--listen", "127.0.0.6:0", "--root"]);
        command.arg(self.directory.join("root"));
        command.arg("--service-command").arg(self.service_command());
        command
    }

    /// What drives its services.
    pub fn service_command(&self) -> String {
        service_command(&self.directory)
    }

    /// Runs `command` under `faults`, and all that it started.
    ///
    /// # Errors
    ///
    /// If a point was not reached.
    pub fn break_at(&self, command: &Command, faults: &Faults) -> Result<Output, String> {
        let log = self.directory.join("strace.log");
        let output = faults.inject(command, &log).output().unwrap();
        self.wait_for_children();
        match faults.happened(&log) {
            true => Ok(output),
            false => Err(format!("the point was not reached: {}", said(&output))),
        }
    }

    /// Waits until no process names the machine any more: of what a killed program has started.
    fn wait_for_children(&self) {
        let start = Instant::now();
        let name = self.directory.as_os_str().as_encoded_bytes();
        let names_it = |process: PathBuf| {
            let line = std::fs::read(process.join("cmdline")).unwrap_or_default();
            line.windows(name.len()).any(|window| window == name)
        };
        while entries(Path::new("/proc")).into_iter().any(names_it) {
            assert!(start.elapsed() < PATIENCE, "a service command does not end");
            std::thread::yield_now();
        }
    }

    /// What the program that updates it says that the machine looks like, if it does. A machine
    /// that looks otherwise is an error.
    ///
    /// # Errors
    ///
    /// What is wrong.
    pub fn as_told(&self, output: &Output) -> Result<Option<State>, String> {
        let text = String::from_utf8_lossy(&output.stdout);
        let word = text.lines().last().unwrap_or_default().split(' ').next().unwrap_or_default();
        let told = match word {
            "done" => State::New,
            "rolled-back" | "not-prepared" | "not-started" => State::Old,
            "stuck" => return Ok(None),
            _ => return Err(format!("the program failed: {}", said(output))),
        };
        match self.state() {
            Ok(state) if state == told => Ok(Some(told)),
            Ok(state) => Err(format!("it is {state:?}: {}", said(output))),
            Err(why) => Err(format!("{}: {why}", said(output))),
        }
    }

    /// Starts subd again, until everything is done, and stops it.
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
            return Err(format!("the recovery failed: {}", said(&output)));
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

    /// Lets exactly these services run.
    fn run_services(&self, services: &[&str]) {
        let running = self.directory.join("running");
        std::fs::remove_dir_all(&running).unwrap();
        std::fs::create_dir(&running).unwrap();
        services.iter().for_each(|name| std::fs::create_dir(running.join(name)).unwrap());
    }

    /// Runs the daemon until nothing is left to be done.
    fn run_daemon(&self) -> Result<(), String> {
        let log = self.directory.join("subd.log");
        let said = || std::fs::read_to_string(&log).unwrap();
        let output = std::fs::File::create(&log).unwrap();
        let mut command = self.subd();
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(output);
        let mut daemon = Daemon(command.spawn().unwrap());
        let start = Instant::now();
        loop {
            if let Some(status) = daemon.0.try_wait().unwrap() {
                return Err(format!("subd ended with {status}: {}", said()));
            }
            let left = self.is_tidy();
            if left.is_ok() && said().contains("listening") {
                break;
            }
            if start.elapsed() > PATIENCE {
                return Err(format!("subd does not get it done: {left:?}: {}", said()));
            }
            // Others tell nobody that they are done; this is no synchronisation of the daemon.
            std::thread::sleep(LOOK_AGAIN);
        }
        kill(Pid::from_raw(daemon.0.id().cast_signed()), Signal::SIGTERM).unwrap();
        let status = daemon.0.wait().unwrap();
        if status.success() { self.is_tidy() } else { Err(format!("{status}: {}", said())) }
    }

    /// What the machine looks like.
    ///
    /// # Errors
    ///
    /// In what it differs from both the old and the new one.
    pub fn state(&self) -> Result<State, String> {
        self.like(|listing, other| listing == other)
    }

    /// As [`Machine::state`], without its services.
    ///
    /// # Errors
    ///
    /// As [`Machine::state`].
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
                Err(format!("it is mixed; it differs from the {name} one:\n{text}"))
            }
        }
    }

    /// Checks that nothing of the update is left in subd's own directories, and that all objects
    /// are what their names say.
    ///
    /// # Errors
    ///
    /// What is left, or wrong.
    pub fn is_tidy(&self) -> Result<(), String> {
        let own = self.directory.join("root/.subd");
        let mut left: Vec<PathBuf> = Vec::new();
        for directory in entries(&own) {
            // A daemon may be at work: what is gone is not left.
            let below = || if directory.is_dir() { entries(&directory) } else { Vec::new() };
            match directory.file_name().unwrap().to_str().unwrap() {
                "objects" => left.extend(below().into_iter().filter(|path| !is_object(path))),
                "state" => left.extend(below().into_iter().filter(|path| {
                    !matches!(path.file_name().unwrap().to_str(), Some("state.json" | "lock"))
                })),
                "staging" | "undo" | "journal" => left.extend(below()),
                // What was done is told for ever.
                "audit" => left.extend(below().into_iter().filter(|path| {
                    let name = path.file_name().unwrap().to_str().unwrap();
                    !name.starts_with("audit.log")
                })),
                _ => left.push(directory),
            }
        }
        if left.is_empty() { Ok(()) } else { Err(format!("this is left: {left:?}")) }
    }

    /// Removes the machine.
    pub fn remove(self) {
        std::fs::remove_dir_all(&self.directory).unwrap();
    }
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

/// What drives the services of the machine in `directory`.
pub fn service_command(directory: &Path) -> String {
    let (driver, running) = (directory.join("driver"), directory.join("running"));
    format!("{} {}", as_word(&driver), as_word(&running))
}

fn is_object(path: &Path) -> bool {
    let name = path.file_name().unwrap().to_string_lossy();
    let content = std::fs::read(path);
    content.is_ok_and(|content| Algorithm::Blake3.digest(&content).to_string() == name)
}

fn copy(from: &Path, to: &Path) {
    let done = Command::new("cp").arg("-a").arg(from).arg(to).status().unwrap();
    assert!(done.success(), "cp");
}

/// What a program said, in one line.
pub fn said(output: &Output) -> String {
    let (out, error) = (&output.stdout, &output.stderr);
    let (out, error) = (String::from_utf8_lossy(out), String::from_utf8_lossy(error));
    format!("{}: {} {}", output.status, out.trim(), error.trim())
}
