//! The families of points at which an update is interrupted.

use std::fmt::Display;

use testing::crash_points::copy;
use testing::power_cut::{Cut, Image};
use testing::strace::{Class, Fault, Faults, Point, points};

use crate::lab::{Lab, trace};
use crate::machine::{Machine, Restart, State, Survived};

/// The size of the file-system whose power is cut.
const DISK_BYTES: u64 = 48 << 20;

/// How many interrupted updates are recovered from with faults, if all points are tried.
const RECOVERIES: usize = 12;

/// The same in a sample.
const RECOVERIES_SAMPLED: usize = 2;

impl Lab {
    /// Tries a sample of the points `all` of the family `name`.
    fn enumerate<T: Display + Sync>(
        &self,
        name: &str,
        all: Vec<T>,
        attempt: impl Fn(&T, usize) -> Result<Survived, String> + Sync,
    ) -> Result<(), String> {
        self.sample.enumerate(name, all, attempt, |survived| {
            let old = survived.iter().filter(|(one, _)| one.state == State::Old).count();
            let slowest = survived.iter().max_by_key(|(one, _)| one.recovery);
            let slowest = slowest.map_or_else(String::new, |(one, point)| {
                format!("the slowest recovery took {} ms ({point}); ", one.recovery.as_millis())
            });
            format!("{old} ended old, {} new; {slowest}", survived.len() - old)
        })
    }
}

fn changes(class: Class) -> bool {
    class == Class::Change
}

/// Kills the update at each call that changes something or has to do with processes.
pub fn kill(lab: &Lab) -> Result<(), String> {
    let wanted = |class| matches!(class, Class::Change | Class::Process);
    // It cannot be killed at the call by which it begins.
    let mut all = lab.points(wanted, Fault::Kill);
    all.retain(|point| (point.call.name.as_str(), point.call.number) != ("execve", 1));
    lab.enumerate("kill", all, |point, _| {
        lab.survive(point, Restart::Boot)?;
        lab.survive(point, Restart::Program)
    })
}

/// Makes each call that changes something fail with EIO.
pub fn io_error(lab: &Lab) -> Result<(), String> {
    let all = lab.points(changes, Fault::Io);
    lab.enumerate("EIO", all, |point, number| lab.survive(point, Restart::of(number)))
}

/// Makes each call that changes something fail with ENOSPC.
pub fn full_disk(lab: &Lab) -> Result<(), String> {
    let all = lab.points(changes, Fault::Space);
    lab.enumerate("ENOSPC", all, |point, number| lab.survive(point, Restart::of(number)))
}

/// Makes each call that looks at something fail with EIO, from the plan on: what the scan cannot
/// read is not in the plan.
pub fn io_error_of_a_look(lab: &Lab) -> Result<(), String> {
    let first = lab.calls.iter().position(|call| call.class == Class::Mark).unwrap();
    let all = points(&lab.calls[first..], |class| class == Class::Look, Fault::Io);
    lab.enumerate("EIO of a read", all, |point, number| lab.survive(point, Restart::of(number)))
}

/// Two points at which the same machine is disturbed.
struct Second {
    first: Point,
    second: Point,
}

impl std::fmt::Display for Second {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{}, then {}", self.first, self.second)
    }
}

/// Makes the sync after the last step fail, so that all steps are undone, and disturbs the rollback
/// at each of its calls.
pub fn broken_rollback(lab: &Lab) -> Result<(), String> {
    let syncs = lab.calls.iter().rposition(|call| call.name == "renameat2").unwrap();
    let mut syncs = lab.calls[..syncs].iter().filter(|call| call.name == "syncfs");
    let call = syncs.next_back().expect("the tree is synced before the update is done").clone();
    let first = Point { call, fault: Fault::Io };
    let machine = lab.machine();
    let calls = trace(&machine, &machine.update(), &Faults::from(&first));
    let state = machine.tree();
    machine.remove();
    if state != Ok(State::Old) {
        return Err(format!("{first} does not lead to a rollback: {state:?}"));
    }
    let at = calls.iter().position(|call| *call == first.call).expect("it was reached");
    let mut all = Vec::new();
    for fault in [Fault::Kill, Fault::Io, Fault::Space] {
        let seconds = points(&calls[at..], changes, fault).into_iter();
        // strace disturbs only one call of each name.
        let seconds = seconds.filter(|second| second.call.name != first.call.name);
        all.extend(seconds.map(|second| Second { first: first.clone(), second }));
    }
    lab.enumerate("broken rollback", all, |point, number| {
        lab.survive_all(&Faults::from(&point.first).and(&point.second), Restart::of(number))
    })
}

/// Kills the update at some calls, and disturbs each recovery at each of its calls.
pub fn broken_recovery(lab: &Lab) -> Result<(), String> {
    let count = lab.sample.points.map_or(RECOVERIES, |_| RECOVERIES_SAMPLED);
    let all = lab.points(changes, Fault::Kill);
    // The first half changes nothing in the tree.
    let firsts = lab.sample.spread(all[all.len() / 2..].to_vec(), count);
    let mut seconds = Vec::new();
    for first in &firsts {
        let machine = lab.machine();
        machine.break_at(&machine.update(), &first.into())?;
        let calls = trace(&machine, &machine.recovery(), &Faults::default());
        machine.remove();
        for fault in [Fault::Kill, Fault::Io, Fault::Space] {
            let second = points(&calls, changes, fault).into_iter();
            seconds.extend(second.map(|second| Second { first: first.clone(), second }));
        }
    }
    lab.enumerate("broken recovery", seconds, |point, number| {
        let machine = lab.machine();
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
    fn survive(&self, lab: &Lab, image: &Image, no_sync: bool) -> Result<Survived, String> {
        let machine = Machine::around(&lab.template, lab.scratch.free_path());
        let (file, top) = (machine.directory().join("image"), machine.directory().join("root"));
        let mut disk = image.mount_copy(file, top, self.options);
        let faults = Faults { no_sync, ..Faults::from(&self.point) };
        let result = machine.break_at(&machine.update(), &faults).and_then(|_| {
            disk.cut(self.cut);
            machine.restart(Restart::Boot)
        });
        disk.unmount();
        lab.dispose(machine, &result);
        result
    }
}

/// Makes a file-system that holds the root of the template.
fn image(lab: &Lab) -> Image {
    let root = lab.template.directory.join("root/.");
    Image::make(lab.scratch.free_path(), DISK_BYTES, |top| copy(&root, top))
}

/// Cuts the power at each call that changes something.
pub fn power_cut(lab: &Lab) -> Result<(), String> {
    let image = image(lab);
    for options in ["auto_da_alloc", "noauto_da_alloc"] {
        for cut in Cut::ALL {
            let points = lab.points(changes, Fault::Kill).into_iter();
            let all = points.map(|point| PowerCut { point, cut, options }).collect();
            let name = format!("power cut, {}, {options}", cut.name());
            lab.enumerate(&name, all, |point, _| point.survive(lab, &image, false))?;
        }
    }
    Ok(())
}

/// Turns off all syncs and cuts the power during the commit. If that did no damage, the other power
/// cuts would prove nothing.
pub fn power_cut_without_sync(lab: &Lab) -> Result<(), String> {
    let image = image(lab);
    let call = lab.calls.iter().rfind(|call| call.name == "renameat2").unwrap().clone();
    let point = Point { call, fault: Fault::Kill };
    let cut = PowerCut { point, cut: Cut::Journalled, options: "noauto_da_alloc" };
    match cut.survive(lab, &image, true) {
        Err(why) if !why.contains("not reached") => Ok(()),
        other => Err(format!("the missing syncs did no damage: {other:?}")),
    }
}
