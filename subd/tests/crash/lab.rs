//! What all tests share: the template, and the calls that an update and a recovery make.

use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

use tempfile::TempDir;

use crate::family::{Sample, Survived};
use crate::fixture::Template;
use crate::machine::{Machine, Restart, State, said};
use crate::strace::{Call, Class, Fault, Faults, Point, calls};

/// Where memory is a file-system, so that nothing waits for a disk.
const MEMORY: &str = "/dev/shm";

/// All that the tests share.
pub struct Lab {
    place: TempDir,
    next: AtomicUsize,
    /// Which points are tried.
    pub sample: Sample,
    /// The machine before the update.
    pub template: Template,
    /// The calls of an update, in order.
    pub calls: Vec<Call>,
}

impl Lab {
    /// Makes the template, and updates one machine undisturbed.
    pub fn open() -> Self {
        let mut builder = tempfile::Builder::new();
        let place = builder.prefix("crash.").tempdir_in(MEMORY).or_else(|_| builder.tempdir());
        let place = place.unwrap();
        let directory = place.path().join("template");
        std::fs::create_dir(&directory).unwrap();
        let template = Template::make(&directory);
        let sample = Sample::from_environment();
        let next = AtomicUsize::new(0);
        let mut lab = Self { place, next, sample, template, calls: Vec::new() };
        let machine = Machine::copy(&lab.template, lab.free_path());
        lab.calls = trace(&machine, &machine.update());
        machine.remove();
        lab
    }

    /// A path where nothing is.
    pub fn free_path(&self) -> PathBuf {
        self.place.path().join(self.next.fetch_add(1, Ordering::Relaxed).to_string())
    }

    /// The points of all calls of the update that `wanted` says, with `fault`.
    pub fn points(&self, wanted: impl Fn(Class) -> bool, fault: Fault) -> Vec<Point> {
        points(&self.calls, wanted, fault)
    }

    /// Removes `machine`, unless the one point that is tried has failed on it.
    pub fn dispose<T>(&self, machine: Machine<'_>, result: &Result<T, String>) {
        if self.sample.keeps() && result.is_err() {
            println!("the machine is kept in {}", machine.directory().display());
        } else {
            machine.remove();
        }
    }

    /// Leaves everything where it is if a machine is to be kept.
    pub fn close(self) {
        if self.sample.keeps() {
            let _path = self.place.keep();
        }
    }

    /// Breaks an update at `point`, restarts subd and judges the machine.
    pub fn survive(&self, point: &Point, how: Restart) -> Result<Survived, String> {
        self.survive_all(&Faults::from(point), how)
    }

    /// As [`Lab::survive`], with any faults.
    pub fn survive_all(&self, faults: &Faults, how: Restart) -> Result<Survived, String> {
        let machine = Machine::copy(&self.template, self.free_path());
        let result = break_and_restart(&machine, faults, how);
        self.dispose(machine, &result);
        result
    }
}

fn break_and_restart(
    machine: &Machine<'_>,
    faults: &Faults,
    how: Restart,
) -> Result<Survived, String> {
    let output = machine.break_at(&machine.update(), faults)?;
    let told = if faults.kill() { None } else { machine.as_told(&output)? };
    let survived = machine.restart(how)?;
    match told {
        Some(state) if state != survived.state => {
            Err(format!("it was {state:?}, and {:?} after the restart", survived.state))
        }
        _ => Ok(survived),
    }
}

/// The points of all of `calls` that `wanted` says, with `fault`.
pub fn points(calls: &[Call], wanted: impl Fn(Class) -> bool, fault: Fault) -> Vec<Point> {
    let wanted = calls.iter().filter(|call| wanted(call.class));
    wanted.map(|call| Point { call: call.clone(), fault }).collect()
}

/// Runs `command`, which must succeed, and gives its calls.
pub fn trace(machine: &Machine<'_>, command: &Command) -> Vec<Call> {
    trace_with(machine, command, &Faults::default())
}

/// As [`trace`], under `faults`.
pub fn trace_with(machine: &Machine<'_>, command: &Command, faults: &Faults) -> Vec<Call> {
    let log = machine.directory().join("strace.log");
    let output = faults.trace(command, &log).output().expect("strace can be run: install it");
    assert!(output.status.success(), "{}", said(&output));
    calls(&log, machine.directory())
}

/// What an undisturbed update has to lead to.
pub fn arrives(lab: &Lab) -> Result<(), String> {
    let machine = Machine::copy(&lab.template, lab.free_path());
    let output = machine.update().output().unwrap();
    let result = (|| match machine.as_told(&output)? {
        Some(State::New) => machine.restart(Restart::Program),
        other => Err(format!("{other:?}: {}", said(&output))),
    })();
    lab.dispose(machine, &result);
    let count = |class| lab.calls.iter().filter(|call| call.class == class).count();
    println!(
        "a machine of {} entries gets to one of {}; the update changes something in {} calls, \
         looks at something in {}",
        lab.template.old.len(),
        lab.template.new.len(),
        count(Class::Change),
        count(Class::Look),
    );
    result.map(|_| ())
}
