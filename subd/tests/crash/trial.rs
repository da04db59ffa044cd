//! The families of points that are tried.

use crate::family::Survived;
use crate::lab::{Lab, points, trace, trace_with};
use crate::machine::{Machine, Restart, State};
use crate::power::{Cut, Image};
use crate::strace::{Class, Fault, Faults, Point};

type Verdict = Result<Survived, String>;

/// How many updates are killed to be recovered from under faults, if all points are tried.
const RECOVERIES: usize = 12;

/// The same in a sample.
const RECOVERIES_SAMPLED: usize = 2;

fn changes(class: Class) -> bool {
    class == Class::Change
}

/// Kills the update at each call that changes something or has to do with processes.
pub fn kill(lab: &Lab) -> Result<(), String> {
    let wanted = |class| matches!(class, Class::Change | Class::Process);
    // It cannot be killed at the call by which it begins.
    let mut all = lab.points(wanted, Fault::Kill);
    all.retain(|point| (point.call.name.as_str(), point.call.number) != ("execve", 1));
    lab.sample.enumerate("kill", all, |point, _| {
        lab.survive(point, Restart::Boot)?;
        lab.survive(point, Restart::Program)
    })
}

/// Lets each call that changes something fail with EIO.
pub fn io_error(lab: &Lab) -> Result<(), String> {
    let all = lab.points(changes, Fault::Io);
    lab.sample.enumerate("EIO", all, |point, number| lab.survive(point, Restart::of(number)))
}

/// Lets each call that changes something fail with ENOSPC.
pub fn full_disk(lab: &Lab) -> Result<(), String> {
    let all = lab.points(changes, Fault::Space);
    lab.sample.enumerate("ENOSPC", all, |point, number| lab.survive(point, Restart::of(number)))
}

/// Lets each call that looks at something fail with EIO, from the plan on: what the scan cannot
/// read is not in the plan.
pub fn io_error_of_a_look(lab: &Lab) -> Result<(), String> {
    let first = lab.calls.iter().position(|call| call.class == Class::Mark).unwrap();
    let all = points(&lab.calls[first..], |class| class == Class::Look, Fault::Io);
    lab.sample
        .enumerate("EIO of a look", all, |point, number| lab.survive(point, Restart::of(number)))
}

/// Two points, one after the other.
struct Second {
    first: Point,
    second: Point,
}

impl std::fmt::Display for Second {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{}, then {}", self.first, self.second)
    }
}

/// Lets the sync after the last step fail, so that all steps are undone, and breaks that at each
/// of its calls.
pub fn broken_rollback(lab: &Lab) -> Result<(), String> {
    let syncs = lab.calls.iter().rposition(|call| call.name == "renameat2").unwrap();
    let mut syncs = lab.calls[..syncs].iter().filter(|call| call.name == "syncfs");
    let call = syncs.next_back().expect("the tree is synced before the update is done").clone();
    let first = Point { call, fault: Fault::Io };
    let machine = Machine::copy(&lab.template, lab.free_path());
    let calls = trace_with(&machine, &machine.update(), &Faults::from(&first));
    let state = machine.tree();
    machine.remove();
    if state != Ok(State::Old) {
        return Err(format!("{first} does not lead to a rollback: {state:?}"));
    }
    let at = calls.iter().position(|call| *call == first.call).expect("it was reached");
    let mut all = Vec::new();
    for fault in [Fault::Kill, Fault::Io, Fault::Space] {
        let seconds = points(&calls[at..], changes, fault).into_iter();
        // Of one name only one call can be disturbed.
        let seconds = seconds.filter(|second| second.call.name != first.call.name);
        all.extend(seconds.map(|second| Second { first: first.clone(), second }));
    }
    lab.sample.enumerate("broken rollback", all, |point, number| {
        lab.survive_all(&Faults::from(&point.first).and(&point.second), Restart::of(number))
    })
}

/// Kills the update at some calls, and breaks each recovery from that at each of its calls.
pub fn broken_recovery(lab: &Lab) -> Result<(), String> {
    let count = lab.sample.points.map_or(RECOVERIES, |_| RECOVERIES_SAMPLED);
    let all = lab.points(changes, Fault::Kill);
    // What comes before is the same: nothing was begun.
    let firsts = lab.sample.spread(all[all.len() / 2..].to_vec(), count);
    let mut seconds = Vec::new();
    for first in &firsts {
        let machine = Machine::copy(&lab.template, lab.free_path());
        machine.break_at(&machine.update(), &first.into())?;
        let calls = trace(&machine, &machine.recovery());
        machine.remove();
        for fault in [Fault::Kill, Fault::Io, Fault::Space] {
            let second = points(&calls, changes, fault).into_iter();
            seconds.extend(second.map(|second| Second { first: first.clone(), second }));
        }
    }
    lab.sample.enumerate("broken recovery", seconds, |point, number| {
        let machine = Machine::copy(&lab.template, lab.free_path());
        let result = (|| {
            machine.break_at(&machine.update(), &(&point.first).into())?;
            machine.break_at(&machine.recovery(), &(&point.second).into())?;
            machine.restart(Restart::of(number))
        })();
        lab.dispose(machine, &result);
        result
    })
}

/// A call at which the power is cut.
struct PowerCut {
    point: Point,
    cut: Cut,
    options: &'static str,
}

impl std::fmt::Display for PowerCut {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{}:{}:{}", self.cut.name(), self.options, self.point.call)
    }
}

impl PowerCut {
    fn survive(&self, lab: &Lab, image: &Image, no_sync: bool) -> Verdict {
        let machine = Machine::around(&lab.template, lab.free_path());
        let mut disk = image.copy(&machine, self.options);
        let faults = Faults { no_sync, ..Faults::from(&self.point) };
        let result = machine.break_at(&machine.update(), &faults).and_then(|_| {
            disk.cut(self.cut);
            machine.restart(Restart::Boot)
        });
        disk.remove();
        lab.dispose(machine, &result);
        result
    }
}

/// Cuts the power at each call that changes something.
pub fn power_cut(lab: &Lab) -> Result<(), String> {
    let image = Image::make(&lab.template, lab.free_path());
    for options in ["auto_da_alloc", "noauto_da_alloc"] {
        for cut in [Cut::Hard, Cut::Journalled] {
            let points = lab.points(changes, Fault::Kill).into_iter();
            let all = points.map(|point| PowerCut { point, cut, options }).collect();
            let name = format!("power cut, {}, {options}", cut.name());
            lab.sample.enumerate(&name, all, |point, _| point.survive(lab, &image, false))?;
        }
    }
    Ok(())
}

/// Lets nothing be synced, and cuts the power where it hurts: if that were not seen, the other
/// power cuts would prove nothing.
pub fn power_cut_without_sync(lab: &Lab) -> Result<(), String> {
    let image = Image::make(&lab.template, lab.free_path());
    let call = lab.calls.iter().rfind(|call| call.name == "renameat2").unwrap().clone();
    let point = Point { call, fault: Fault::Kill };
    let cut = PowerCut { point, cut: Cut::Journalled, options: "noauto_da_alloc" };
    match cut.survive(lab, &image, true) {
        Err(why) if !why.contains("not reached") => Ok(()),
        other => Err(format!("that nothing was synced was not seen: {other:?}")),
    }
}
