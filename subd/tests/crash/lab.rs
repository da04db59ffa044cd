//! What all tests share: the template, and the calls of an update and a recovery.

use std::process::Command;

use testing::crash_points::{Sample, Scratch, in_one_line};
use testing::strace::{Call, Class, Fault, Faults, Point, calls, points};

use crate::fixture::Template;
use crate::machine::{Machine, Restart, State, Survived};

/// All that the tests share.
pub struct Lab {
    pub scratch: Scratch,
    pub sample: Sample,
    pub template: Template,
    /// The calls of an update, in order.
    pub calls: Vec<Call>,
}

impl Lab {
    /// Makes the template, and updates one machine undisturbed.
    pub fn open() -> Self {
        let scratch = Scratch::new();
        let directory = scratch.free_path();
        std::fs::create_dir(&directory).unwrap();
        let template = Template::make(&directory);
        let sample = Sample::from_environment();
        let mut lab = Self { scratch, sample, template, calls: Vec::new() };
        let machine = lab.machine();
        let calls = trace(&machine, &machine.update(), &Faults::default());
        machine.remove();
        lab.calls = calls;
        lab
    }

    /// Makes a machine of the template.
    pub fn machine(&self) -> Machine<'_> {
        Machine::copy(&self.template, self.scratch.free_path())
    }

    /// Returns a point with `fault` for each call of the update whose class is `wanted`.
    pub fn points(&self, wanted: impl Fn(Class) -> bool, fault: Fault) -> Vec<Point> {
        points(&self.calls, wanted, fault)
    }

    /// Removes `machine`, unless the only point that is tried has failed.
    pub fn dispose<T>(&self, machine: Machine<'_>, result: &Result<T, String>) {
        if self.sample.is_one_point() && result.is_err() {
            println!("the machine is kept in {}", machine.directory().display());
        } else {
            machine.remove();
        }
    }

    /// Keeps the files if only one point was tried, else removes them.
    pub fn close(self) {
        if self.sample.is_one_point() {
            self.scratch.keep();
        }
    }

    /// Interrupts an update at `point`, restarts subd and checks the machine.
    pub fn survive(&self, point: &Point, how: Restart) -> Result<Survived, String> {
        self.survive_all(&Faults::from(point), how)
    }

    /// As [`Lab::survive`], with any faults.
    pub fn survive_all(&self, faults: &Faults, how: Restart) -> Result<Survived, String> {
        let machine = self.machine();
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
    let reported = if faults.kill() { None } else { machine.reported_state(&output)? };
    let survived = machine.restart(how)?;
    match reported {
        Some(state) if state != survived.state => {
            Err(format!("it was {state:?}, and {:?} after the restart", survived.state))
        }
        _ => Ok(survived),
    }
}

/// Runs `command` with `faults` and returns its calls. It must succeed.
pub fn trace(machine: &Machine<'_>, command: &Command, faults: &Faults) -> Vec<Call> {
    let log = machine.directory().join("strace.log");
    let output = faults.trace(command, &log).output().expect("strace can be run: install it");
    assert!(output.status.success(), "{}", in_one_line(&output));
    calls(&log, machine.directory())
}

/// Checks an undisturbed update.
pub fn arrives(lab: &Lab) -> Result<(), String> {
    let machine = lab.machine();
    let output = machine.update().output().unwrap();
    let result = (|| match machine.reported_state(&output)? {
        Some(State::New) => machine.restart(Restart::Program),
        other => Err(format!("{other:?}: {}", in_one_line(&output))),
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
