//! Makes a change on a copy of a store, disturbs it, and checks the store afterwards.

use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;

use imageserver::store::Store;
use model::object::Algorithm;
use testing::crash_points::{Sample, Scratch, copy, entries, in_one_line};
use testing::strace::{Call, Class, Fault, Faults, Point, calls, points};

use crate::change::{Change, expect_whole, names};

/// The environment variable with the store's directory, for the program that changes it.
pub const DIRECTORY_VARIABLE: &str = "IMAGESERVER_CRASH_ACT";

/// The environment variable with the name of the change.
pub const CHANGE_VARIABLE: &str = "IMAGESERVER_CRASH_CHANGE";

/// What the tests of one change share.
pub struct Lab {
    pub change: &'static Change,
    pub scratch: Scratch,
    /// The store before the change.
    pub template: PathBuf,
    /// The calls of the change, in order.
    calls: Vec<Call>,
}

/// The outcome of the change, as the program prints it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Done,
    Refused,
    Killed,
}

/// What may be in the quarantine after the change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quarantine {
    Empty,
    /// Objects that no image needed, and that lost their content when the power was cut.
    Unneeded,
}

impl Lab {
    /// Prepares the store, and makes the change once undisturbed.
    pub fn open(change: &'static Change) -> Self {
        let scratch = Scratch::new();
        let template = scratch.free_path();
        change.prepare(&template);
        let mut lab = Self { change, scratch, template, calls: Vec::new() };
        let data = lab.copy();
        lab.calls = lab.trace(&data);
        check(change, &data, Outcome::Done, Quarantine::Empty).unwrap();
        let mut objects = entries(&data.join("objects/blake3")).into_iter();
        let is_packed = |path: PathBuf| path.extension().is_some();
        let has_packed = objects.any(|place| entries(&place).into_iter().any(is_packed));
        assert_eq!(has_packed, change.packed > 0);
        let count = |class| lab.points(class, Fault::Io).len();
        let (changes, looks) = (count(Class::Change), count(Class::Look));
        assert_eq!(count(Class::Process), 0, "points of processes are not tried");
        println!("{}: changes something in {changes} calls, looks in {looks}", change.name);
        lab
    }

    fn copy(&self) -> PathBuf {
        let data = self.scratch.free_path();
        copy(&self.template, &data);
        data
    }

    /// Returns the command that makes the change in `data`.
    fn program(&self, data: &Path) -> Command {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.env(DIRECTORY_VARIABLE, data).env(CHANGE_VARIABLE, self.change.name);
        command
    }

    /// Makes the change in `data` and returns its calls.
    fn trace(&self, data: &Path) -> Vec<Call> {
        let log = self.scratch.free_path();
        let mut command = Faults::default().trace(&self.program(data), &log);
        let output = command.output().expect("strace can be run: install it");
        assert_eq!(outcome(&output), Ok(Outcome::Done), "{output:?}");
        let calls = calls(&log, data);
        let mut parts = calls.split(|call| call.class == Class::Mark);
        let change = parts.nth(1).expect("the change begins with a mark").to_vec();
        assert!(parts.next().is_some(), "the change ends with a mark");
        change
    }

    /// Makes the change in `data` with `faults`.
    ///
    /// # Errors
    ///
    /// If a point was not reached.
    pub fn run(&self, data: &Path, faults: &Faults) -> Result<Output, String> {
        let log = self.scratch.free_path();
        let output = faults.inject(&self.program(data), &log).output().unwrap();
        match faults.happened(&log) {
            true => Ok(output),
            false => Err(format!("the point was not reached: {}", in_one_line(&output))),
        }
    }

    /// Returns a point with `fault` for each call of `class`.
    pub fn points(&self, class: Class, fault: Fault) -> Vec<Point> {
        points(&self.calls, |one| one == class, fault)
    }

    /// Tries a sample of `all`.
    ///
    /// # Errors
    ///
    /// The first failures.
    pub fn each<T: Display + Sync>(
        &self,
        family: &str,
        all: Vec<T>,
        attempt: impl Fn(&T) -> Result<(), String> + Sync,
    ) -> Result<(), String> {
        let name = format!("{}, {family}", self.change.name);
        let sample = Sample::from_environment();
        sample.enumerate(&name, all, |point, _| attempt(point), |_| String::new())
    }

    fn disturb_each(&self, class: Class, fault: Fault) -> Result<(), String> {
        let family = format!("{fault:?} of a {class:?}");
        self.each(&family, self.points(class, fault), |point| {
            let data = self.copy();
            let output = self.run(&data, &Faults::from(point))?;
            check(self.change, &data, outcome(&output)?, Quarantine::Empty)?;
            std::fs::remove_dir_all(data).map_err(|error| error.to_string())
        })
    }
}

/// Kills the program at each call that changes something.
pub fn kill(lab: &Lab) -> Result<(), String> {
    lab.disturb_each(Class::Change, Fault::Kill)
}

/// Makes each call that changes something fail with EIO.
pub fn io_error(lab: &Lab) -> Result<(), String> {
    lab.disturb_each(Class::Change, Fault::Io)
}

/// Makes each call that changes something fail with ENOSPC.
pub fn full_disk(lab: &Lab) -> Result<(), String> {
    lab.disturb_each(Class::Change, Fault::Space)
}

/// Makes each call that looks at something fail with EIO.
pub fn io_error_of_a_look(lab: &Lab) -> Result<(), String> {
    lab.disturb_each(Class::Look, Fault::Io)
}

/// Returns the outcome that the program printed. A refusal must have a clear reason.
pub fn outcome(output: &Output) -> Result<Outcome, String> {
    use std::os::unix::process::ExitStatusExt as _;
    let text = String::from_utf8_lossy(&output.stdout);
    if output.status.signal() == Some(9) {
        return Ok(Outcome::Killed);
    }
    match text.lines().collect::<Vec<_>>()[..] {
        ["done"] if output.status.success() => Ok(Outcome::Done),
        [line] if output.status.success() => {
            let clear = [
                "refused: cannot ",
                "refused: no space left to ",
                "refused: nothing is collected, because ",
                "refused: the collection failed: ",
            ];
            match clear.iter().any(|start| line.starts_with(start)) {
                true => Ok(Outcome::Refused),
                false => Err(format!("the reason is unclear: {line}")),
            }
        }
        _ => Err(format!("{output:?}")),
    }
}

/// Opens the store in `data` again, checks all of it, and makes the change once more.
///
/// # Errors
///
/// What is wrong.
pub fn check(
    change: &Change,
    data: &Path,
    outcome: Outcome,
    quarantine: Quarantine,
) -> Result<(), String> {
    let store = open(data)?;
    let images = names(&store);
    match outcome {
        Outcome::Done if images == change.after => {}
        Outcome::Refused if images == change.before => {}
        Outcome::Killed if images == change.before || images == change.after => {}
        _ => return Err(format!("{outcome:?}, and there are {images:?}")),
    }
    expect_whole(&store)?;
    expect_clean(data, quarantine)?;
    change.make(&store).map_err(|error| format!("the second time: {error}"))?;
    drop(store);
    let store = open(data)?;
    if names(&store) != change.after {
        return Err(format!("after the second time there are {:?}", names(&store)));
    }
    change.expect_gone(&store)?;
    expect_whole(&store)?;
    expect_clean(data, quarantine)?;
    expect_sound(&data.join("objects"))
}

fn open(data: &Path) -> Result<Arc<Store>, String> {
    Store::open(data).map(Arc::new).map_err(|error| format!("it cannot be opened: {error:?}"))
}

/// Checks that no temporary files are left.
fn expect_clean(data: &Path, quarantine: Quarantine) -> Result<(), String> {
    let empty: &[&str] = match quarantine {
        Quarantine::Empty => &["incoming", "quarantine"],
        Quarantine::Unneeded => &["incoming"],
    };
    for directory in empty {
        let left: Vec<PathBuf> = entries(&data.join(directory));
        if !left.is_empty() {
            return Err(format!("left over: {left:?}"));
        }
    }
    let known = [
        "directories",
        "images",
        "incoming",
        "leases",
        "lock",
        "objects",
        "quarantine",
        "unsynced",
    ];
    let is_known = |path: &PathBuf| known.iter().any(|name| path.ends_with(name));
    match entries(data).into_iter().find(|path| !is_known(path)) {
        None => Ok(()),
        Some(path) => Err(format!("left over: {path:?}")),
    }
}

/// Checks that each object has the digest that is its name. This shares no code with the store.
fn expect_sound(objects: &Path) -> Result<(), String> {
    for directory in entries(&objects.join("blake3")) {
        for path in entries(&directory) {
            let corrupt = || Err(format!("{} is corrupt", path.display()));
            let bytes = std::fs::read(&path).unwrap();
            let content = match path.extension() {
                None => bytes,
                Some(_) => match unpacked(&bytes) {
                    Some(content) => content,
                    None => return corrupt(),
                },
            };
            if path.file_stem().unwrap() != Algorithm::Blake3.digest(&content).hex().as_str() {
                return corrupt();
            }
        }
    }
    Ok(())
}

/// Returns the content of a packed file: behind its head are chunks of content or zstd frames.
fn unpacked(file: &[u8]) -> Option<Vec<u8>> {
    let mut rest = file.get(42..)?;
    let mut content = Vec::new();
    while let Some((head, behind)) = rest.split_first_chunk::<8>() {
        let length = |at: usize| u32::from_le_bytes(head[at..at + 4].try_into().unwrap()) as usize;
        let chunk = behind.get(..length(4))?;
        match length(0) == chunk.len() {
            true => content.extend_from_slice(chunk),
            false => content.extend(zstd::decode_all(chunk).ok()?),
        }
        rest = &behind[chunk.len()..];
    }
    rest.is_empty().then_some(content)
}
