//! Which machine may run an exclusive task, or make a resource of the fleet: the one with the
//! permit, which ends by itself. What is said here of tasks holds for resources too.
//!
//! Nothing of this is stored. A permit is counted from a moment that the machine itself has named,
//! by the clock of its boot. The answer that named it was received later than it was said, so that
//! the permit has ended when its time has passed since the receipt. After a start of the dominator
//! that is true of all former permits in the same way.
//!
//! # Invariants
//!
//! * A machine gets a permit, or a longer one, only if no other may still run the task. A machine
//!   may do so until its permit must have ended, or until it says that it has given it up.
//! * What a machine says makes its permit shorter only if no permit that was sent to it can be
//!   taken any more: it has heard of the last number and has none.
//! * A machine has heard of no number above those that it was sent. Numbers grow with each machine
//!   that gets the permit, and, as far as clocks are right, with each start of the dominator: a
//!   machine may have got a number that no machine tells which answers.
// tidy: core

use core::time::Duration;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use api::dominator::permits::PermitHolder;
use api::subd::{PermitReport, PermitTaskRequest};
use model::boot_time::BootTime;
use model::object::Algorithm;

/// By which part of a time two clocks may differ: 5 %.
const CLOCK_ERROR_PART: u32 = 20;

/// How many times a machine is asked, and its permit prolonged, in the time of a permit.
const ASKED_PER_PERMIT: u32 = 5;

/// What the names of the permits of resources begin with. No name of a task has a blank.
const RESOURCE: &str = "resource ";

/// Returns the name of the permit for a resource.
#[must_use]
pub fn resource_permit(id: &str) -> String {
    format!("{RESOURCE}{id}")
}

/// Returns the id of the resource whose permit has that name; `None` if it is that of a task.
#[must_use]
pub fn resource_of(permit: &str) -> Option<&str> {
    permit.strip_prefix(RESOURCE)
}

/// What a machine says of its exclusive tasks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PermitsHeard {
    /// When it was said.
    pub said_at: BootTime,
    /// True if the machine takes orders from this dominator.
    pub takes_orders: bool,
    /// By task.
    pub permits: BTreeMap<String, PermitReport>,
}

/// A machine that runs a task, or may do so.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    pub hostname: Arc<str>,
    pub number: u64,
    /// When nothing of the task is left on it, if the permit is not prolonged.
    pub ends_in: Duration,
    /// It runs the task, as it said last.
    pub is_live: bool,
}

/// The permits of all exclusive tasks.
#[derive(Debug)]
pub struct Permits {
    time: Duration,
    /// From here on no permit of an earlier start of the dominator is left.
    open_at: Duration,
    /// Numbers are above this.
    floor: u64,
    fenced: BTreeSet<Arc<str>>,
    tasks: BTreeMap<String, TaskPermits>,
}

/// The place of a machine among those that may get the permit of a task, and its host name.
type Place = (u64, Arc<str>);

#[derive(Debug, Default)]
struct TaskPermits {
    /// The highest number that was given or heard of.
    highest: u64,
    /// A machine has the permit since an earlier start of the dominator, so no other has one.
    is_adopted: bool,
    machines: BTreeMap<Place, MachinePermit>,
    /// The machines that may run the task, and some that may not any more.
    holding: BTreeSet<Place>,
}

/// A machine with an exclusive task.
#[derive(Debug, Default)]
struct MachinePermit {
    /// The highest number that it was sent or has heard of.
    number: u64,
    /// The end of the permit that it was sent last.
    until: BootTime,
    /// When no permit of it is left.
    ends_at: Duration,
    /// What it said last; `None` if it does not have the task, or is in the database no more.
    heard: Option<Heard>,
}

#[derive(Debug)]
struct Heard {
    received_at: Duration,
    said_at: BootTime,
    permit: PermitReport,
    is_candidate: bool,
}

impl Heard {
    /// Returns how long the permit lasts from when that was said.
    fn left(&self) -> Option<Duration> {
        let left_ms = self.permit.until.as_ref()?.ms_since(&self.said_at)?;
        (left_ms > 0).then_some(Duration::from_millis(left_ms))
    }

    /// True if a process of the task is left over from a permit that has ended.
    fn is_left_over(&self) -> bool {
        self.permit.is_live && self.left().is_none()
    }
}

impl Permits {
    /// Starts without permits. `time` is that of a permit, `former_time` the longest that an
    /// earlier start of the dominator may have given. `floor` is higher than in earlier starts: the
    /// seconds since 1970.
    #[must_use]
    pub fn new(time: Duration, former_time: Duration, now: Duration, floor: u64) -> Self {
        let open_at = now.saturating_add(with_clock_error(time.max(former_time)));
        Self { time, open_at, floor, fenced: BTreeSet::new(), tasks: BTreeMap::new() }
    }

    /// Returns how often a machine with an exclusive task is asked.
    #[must_use]
    pub fn period(&self) -> Duration {
        self.time / ASKED_PER_PERMIT
    }

    /// Returns how long nothing is given because an earlier start of the dominator may have done
    /// so; zero when that is over.
    #[must_use]
    pub fn opens_in(&self, now: Duration) -> Duration {
        self.open_at.saturating_sub(now)
    }

    /// Takes what `hostname` said, which was received now. Returns true if it has given up a
    /// permit.
    pub fn take(&mut self, hostname: &str, said: PermitsHeard, now: Duration) -> bool {
        let PermitsHeard { said_at, takes_orders, mut permits } = said;
        let is_fenced = self.fenced.contains(hostname);
        for name in permits.keys() {
            if !self.tasks.contains_key(name) {
                let task = TaskPermits { highest: self.floor, ..TaskPermits::default() };
                self.tasks.insert(name.clone(), task);
            }
        }
        let mut has_given_up = false;
        for (name, task) in &mut self.tasks {
            let place = place(name, hostname);
            let Some(permit) = permits.remove(name) else {
                task.forget(&place, now);
                continue;
            };
            let is_candidate = takes_orders && permit.is_wanted;
            let said_at = said_at.clone();
            let heard = Heard { received_at: now, said_at, permit, is_candidate };
            has_given_up |= task.take(place, heard, is_fenced);
        }
        self.tasks.retain(|_, task| !task.machines.is_empty());
        has_given_up
    }

    /// Takes that a machine is in the database no more. Others get its permits when they must have
    /// ended.
    pub fn leave(&mut self, hostname: &str, now: Duration) {
        self.tasks.iter_mut().for_each(|(name, task)| task.forget(&place(name, hostname), now));
        self.tasks.retain(|_, task| !task.machines.is_empty());
    }

    /// Sets the machines that are off, as operators say: others get their permits at once, and they
    /// get none.
    pub fn set_fenced(&mut self, fenced: BTreeSet<Arc<str>>) {
        for hostname in fenced.difference(&self.fenced) {
            for (name, task) in &mut self.tasks {
                task.machines.remove(&place(name, hostname));
            }
        }
        self.fenced = fenced;
    }

    /// Returns the permits that `hostname` gets now, and counts them as sent.
    pub fn give(&mut self, hostname: &str, now: Duration) -> Vec<PermitTaskRequest> {
        let mut given = Vec::new();
        let is_open = now >= self.open_at;
        for (name, task) in &mut self.tasks {
            if is_open || task.is_adopted {
                let place = place(name, hostname);
                let permit = task.give(&place, &self.fenced, self.time, now);
                given.extend(permit.map(|(number, until)| PermitTaskRequest {
                    task: name.clone(),
                    number,
                    until,
                }));
            }
        }
        given
    }

    /// Returns the machines that would get a permit now.
    #[must_use]
    pub fn next(&self, now: Duration) -> BTreeSet<Arc<str>> {
        let is_open = now >= self.open_at;
        let tasks = self.tasks.values().filter(|task| is_open || task.is_adopted);
        let free = tasks.filter(|task| task.holders(&self.fenced, now).next().is_none());
        free.filter_map(|task| Some(task.first(&self.fenced, self.time, now)?.1.clone())).collect()
    }

    /// Returns the machines that run each task or may do so. More than one should never be: no
    /// permit is given then, until one is left. A fenced machine counts if it answers and runs the
    /// task.
    #[must_use]
    pub fn holders(&self, now: Duration) -> BTreeMap<&str, Vec<Holder>> {
        let holders = |task: &TaskPermits| {
            let running = task.holding.iter().filter_map(|place| {
                let machine = task.machines.get(place)?;
                let is_live = machine.heard.as_ref().is_some_and(|heard| heard.permit.is_live);
                let is_fenced = self.fenced.contains(&place.1);
                let counts = if is_fenced { is_live } else { machine.may_run(now) };
                counts.then(|| Holder {
                    hostname: Arc::clone(&place.1),
                    number: machine.number,
                    ends_in: machine.ends_at.saturating_sub(now),
                    is_live,
                })
            });
            running.collect()
        };
        self.tasks.iter().map(|(name, task)| (name.as_str(), holders(task))).collect()
    }
}

impl TaskPermits {
    /// Takes what a machine said. Returns true if it has given up the permit.
    fn take(&mut self, place: Place, heard: Heard, is_fenced: bool) -> bool {
        let machine = self.machines.entry(place.clone()).or_default();
        let was_holder = machine.ends_at > heard.received_at;
        let PermitReport { number, until, is_live, .. } = &heard.permit;
        self.highest = self.highest.max(*number);
        if let Some(left) = heard.left() {
            let ends_at = heard.received_at.saturating_add(with_clock_error(left));
            machine.ends_at = machine.ends_at.max(ends_at);
            self.is_adopted |= !is_fenced;
        } else if *number >= machine.number && until.is_none() && !is_live {
            machine.ends_at = Duration::ZERO;
        }
        machine.number = machine.number.max(*number);
        if machine.may_run(heard.received_at) || heard.is_left_over() {
            self.holding.insert(place);
        }
        let has_given_up = was_holder && machine.ends_at.is_zero();
        machine.heard = Some(heard);
        has_given_up
    }

    /// Takes that a machine does not have the task. Its permit may last.
    fn forget(&mut self, place: &Place, now: Duration) {
        let Some(machine) = self.machines.get_mut(place) else { return };
        machine.heard = None;
        if !machine.may_run(now) {
            self.machines.remove(place);
        }
    }

    fn give(
        &mut self,
        place: &Place,
        fenced: &BTreeSet<Arc<str>>,
        time: Duration,
        now: Duration,
    ) -> Option<(u64, BootTime)> {
        self.clear(now);
        if fenced.contains(&place.1) || self.holders(fenced, now).any(|other| other != place) {
            return None;
        }
        let is_first = self.first(fenced, time, now) == Some(place);
        let machine = self.machines.get_mut(place)?;
        let is_holder = machine.ends_at > now;
        let heard = machine.heard.as_ref().filter(|heard| heard.is_of_use(time, now))?;
        if is_holder && machine.number > heard.permit.number {
            // It is not prolonged until it is known to have come: the machine may not take it.
            return Some((machine.number, machine.until.clone()));
        }
        let number = match heard.left() {
            Some(_) if is_holder => machine.number,
            _ if is_holder || is_first => self.highest.checked_add(1)?,
            _ => return None,
        };
        let ends_at = heard.received_at.saturating_add(with_clock_error(time));
        let time_ms = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        machine.until = heard.said_at.after_ms(time_ms);
        machine.ends_at = machine.ends_at.max(ends_at);
        machine.number = number;
        self.highest = self.highest.max(number);
        self.holding.insert(place.clone());
        Some((number, machine.until.clone()))
    }

    /// Forgets machines that run the task no more.
    fn clear(&mut self, now: Duration) {
        let machines = &mut self.machines;
        self.holding.retain(|place| {
            let Some(machine) = machines.get(place) else { return false };
            let may_run = machine.may_run(now);
            if !may_run && machine.heard.is_none() {
                machines.remove(place);
            }
            may_run
        });
    }

    fn holders(&self, fenced: &BTreeSet<Arc<str>>, now: Duration) -> impl Iterator<Item = &Place> {
        self.holding.iter().filter(move |place| {
            let may_run = self.machines.get(*place).is_some_and(|machine| machine.may_run(now));
            may_run && !fenced.contains(&place.1)
        })
    }

    /// Returns the machine that gets the permit if nobody has it. One that did not take what it was
    /// sent comes last.
    fn first(&self, fenced: &BTreeSet<Arc<str>>, time: Duration, now: Duration) -> Option<&Place> {
        let mut last = None;
        for (place, machine) in &self.machines {
            let heard = machine.heard.as_ref().filter(|heard| heard.is_of_use(time, now));
            let Some(heard) = heard.filter(|_| !fenced.contains(&place.1)) else { continue };
            if machine.number <= heard.permit.number {
                return Some(place);
            }
            last = last.or(Some(place));
        }
        last
    }
}

impl MachinePermit {
    fn may_run(&self, now: Duration) -> bool {
        self.ends_at > now || self.heard.as_ref().is_some_and(Heard::is_left_over)
    }
}

impl Heard {
    /// True if the machine wants the permit, and a permit that counts from here lasts a while.
    fn is_of_use(&self, time: Duration, now: Duration) -> bool {
        self.is_candidate && now.saturating_sub(self.received_at) < time / 2
    }
}

/// Says that the machines may do what the permit of that name is for, if there is more than one.
#[must_use]
pub fn conflict_text(task: &str, holders: &[PermitHolder]) -> Option<String> {
    let names: Vec<&str> = holders.iter().map(|holder| holder.hostname.as_str()).collect();
    let what = match resource_of(task) {
        Some(id) => format!("the resource {id} of the fleet may be made by"),
        None => format!("the exclusive task {task} may run on"),
    };
    (names.len() > 1).then(|| {
        format!(
            "{what} {}: no machine gets a permit for it until the others have none; stop it there, \
             or turn the machine off and say so: domtool fence HOST",
            names.join(" and ")
        )
    })
}

/// Says which machine has the permit of an exclusive task.
#[must_use]
pub fn permit_text(holders: &[PermitHolder], opens_in_s: u32) -> String {
    match holders {
        [] if opens_in_s > 0 => format!(
            "no machine has the permit: the dominator has just started, and gives it within \
             {opens_in_s} s, when a former one must have ended"
        ),
        [] => "no machine has the permit".to_owned(),
        [PermitHolder { hostname, number, ends_in_s, .. }] => format!(
            "{hostname} has the permit, number {number}; another machine may get it in {ends_in_s} \
             s if it is not prolonged"
        ),
        _ => {
            holders.iter().map(|holder| holder.hostname.as_str()).collect::<Vec<_>>().join(" and ")
                + " may run it, which is a conflict: see the alarms"
        }
    }
}

/// Returns the longest that a time of another clock may be by one's own.
fn with_clock_error(time: Duration) -> Duration {
    time.saturating_add(time / CLOCK_ERROR_PART)
}

/// The same machine comes first whenever the task has to move; of several tasks not always the
/// same.
fn place(task: &str, hostname: &str) -> Place {
    let id = Algorithm::Blake3.digest(format!("{task}\0{hostname}").as_bytes());
    let first = id.digest().first_chunk::<8>();
    (first.map_or(0, |bytes| u64::from_be_bytes(*bytes)), hostname.into())
}

#[cfg(test)]
mod tests;
