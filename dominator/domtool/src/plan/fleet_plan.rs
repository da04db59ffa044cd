//! The plan of a fleet: the dominator's answers, summed up by pairs of former and new image.
// tidy: core

use std::collections::BTreeMap;
use std::fmt::Write as _;

use api::dominator::kept_files::ImageOfMachine;
use api::dominator::plan::{
    CheckMdbReply, MachinePlan, NoPlanReason, PlanMachinesReply, PlanOutcome,
};
use api::planning::preview::{ChangeCounts, PlanSummary};
use model::display::{counted, size};
use model::image::ImageName;
use model::trigger::services::{SUBD_SERVICE, ServiceCalls};
use serde::Serialize;

use super::kept_files::KeptByMachines;
use super::resources::ResourcesOfMachines;

/// Names at most this many machines of a group.
const NAMED: usize = 5;

/// Machines with the same property.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct Group {
    pub(super) machines: u32,
    /// Names of the first machines.
    pub(super) first: Vec<String>,
    /// The reason for the first machine.
    pub(super) why: String,
}

impl Group {
    fn add(&mut self, hostname: &str, why: &str) {
        if self.machines == 0 {
            why.clone_into(&mut self.why);
        }
        self.machines += 1;
        if self.first.len() < NAMED {
            self.first.push(hostname.to_owned());
        }
    }

    fn text(&self) -> String {
        let more = if self.machines as usize > self.first.len() { ", ..." } else { "" };
        let (count, names) = (counted(self.machines.into(), "machine"), self.first.join(", "));
        format!("{count}: {names}{more}: {}", self.why)
    }
}

/// The machines that go from one image to another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Pair {
    /// The image that they were last updated to.
    pub(super) from: Option<ImageName>,
    /// The image that they would get.
    pub(super) image: ImageName,
    pub(super) machines: u32,
    /// Machines on which nothing would change.
    pub(super) same: u32,
    /// Sum of the changes on all machines.
    pub(super) changes: ChangeCounts,
    /// Sum of the objects to fetch.
    pub(super) fetch_objects: u64,
    /// Sum of the bytes to fetch.
    pub(super) fetch_bytes: u64,
    /// Number of machines for each service call, such as `stop db`.
    pub(super) services: BTreeMap<String, u32>,
    /// Number of machines for each effect on a task, such as `stop task backup`.
    pub(super) tasks: BTreeMap<String, u32>,
    /// Machines that would reboot.
    pub(super) reboot: u32,
    /// Machines with triggers of high impact.
    pub(super) high_impact: u32,
    /// Machines whose update would wait for an operator because it is unsafe.
    pub(super) is_unsafe: Group,
    /// Machines whose update is blocked.
    pub(super) blocked: Group,
    /// Machines whose former image has unknown triggers.
    pub(super) former_unknown: Group,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct FleetPlan {
    /// Difference of the database to the one in force.
    pub(super) database: CheckMdbReply,
    /// Sums by pairs of images.
    pub(super) pairs: Vec<Pair>,
    /// Machines without a plan, by cause.
    pub(super) unknown: BTreeMap<NoPlanReason, Group>,
    /// Machines whose update would wait, by their status then.
    pub(super) waiting: BTreeMap<String, Group>,
    /// The distinct updates.
    pub(super) updates: Vec<PlanSummary>,
    /// The plan of each machine, with an index into `updates`.
    pub(super) machines: Vec<MachinePlan>,
    /// Files that the machines keep with old numbers of users and groups.
    pub(super) kept_files: KeptByMachines,
    /// What plugins would do about resources, if they were asked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) resources: Option<ResourcesOfMachines>,
}

/// Describes each service call, such as `stop db`.
fn service_calls(calls: &ServiceCalls) -> Vec<String> {
    let all = calls.before.iter().chain(&calls.after);
    let mut texts: Vec<String> =
        all.map(|call| format!("{} {}", call.verb.name(), call.service)).collect();
    if calls.own {
        texts.push(format!("restart {SUBD_SERVICE}"));
    }
    texts
}

/// Describes what happens to each task, such as `stop task backup`.
fn planned_tasks(update: &PlanSummary) -> impl Iterator<Item = String> {
    update.tasks.iter().map(|(name, effect)| effect.text(name))
}

fn arrow(from: Option<&ImageName>, image: &ImageName) -> String {
    format!("{} -> {image}", from.map_or("(no image)", ImageName::as_str))
}

impl FleetPlan {
    /// Returns a plan without machines yet.
    pub(super) fn new(database: CheckMdbReply) -> Self {
        Self { database, ..Self::default() }
    }

    /// Adds one answer of the dominator.
    pub(super) fn add(&mut self, reply: PlanMachinesReply) {
        let PlanMachinesReply { updates, machines } = reply;
        let mut numbers = Vec::with_capacity(updates.len());
        for update in updates {
            let known = self.updates.iter().position(|known| *known == update);
            numbers.push(known.unwrap_or_else(|| {
                self.updates.push(update);
                self.updates.len() - 1
            }));
        }
        for mut plan in machines {
            match &mut plan.outlook {
                PlanOutcome::Unknown { gap, why } => {
                    self.unknown.entry(*gap).or_default().add(&plan.hostname, why);
                }
                PlanOutcome::Update { update, fetch_objects, fetch_bytes } => {
                    // Skips an index out of range: that is a fault of the dominator.
                    let number = usize::try_from(*update).ok().and_then(|at| numbers.get(at));
                    let Some(&number) = number else { continue };
                    *update = u32::try_from(number).unwrap_or(u32::MAX);
                    let fetch = (*fetch_objects, *fetch_bytes);
                    let summary = self.updates[number].clone();
                    self.sum(&plan, &summary, fetch);
                }
            }
            self.machines.push(plan);
        }
    }

    fn sum(&mut self, plan: &MachinePlan, update: &PlanSummary, fetch: (u32, u64)) {
        let hostname = &plan.hostname;
        if !update.same {
            for (status, why) in &plan.waits {
                self.waiting.entry(status.to_string()).or_default().add(hostname, why);
            }
        }
        let pair = self.pair(update);
        pair.machines += 1;
        if update.same {
            pair.same += 1;
            return;
        }
        let ChangeCounts { create, replace, change, remove, reasons } = &update.changes;
        for (sum, count) in [
            (&mut pair.changes.create, create),
            (&mut pair.changes.replace, replace),
            (&mut pair.changes.change, change),
            (&mut pair.changes.remove, remove),
        ] {
            *sum = sum.saturating_add(*count);
        }
        for (reason, count) in reasons {
            let sum = pair.changes.reasons.entry(*reason).or_default();
            *sum = sum.saturating_add(*count);
        }
        pair.fetch_objects += u64::from(fetch.0);
        pair.fetch_bytes = pair.fetch_bytes.saturating_add(fetch.1);
        for call in service_calls(&update.services) {
            *pair.services.entry(call).or_default() += 1;
        }
        for task in planned_tasks(update) {
            *pair.tasks.entry(task).or_default() += 1;
        }
        pair.reboot += u32::from(update.services.reboot);
        pair.high_impact += u32::from(update.services.high_impact);
        if let Some(danger) = update.dangers.first() {
            pair.is_unsafe.add(hostname, danger);
        }
        if let Some(blocked) = update.blocked.first() {
            pair.blocked.add(hostname, &format!("{}: {}", blocked.path, blocked.why));
        }
        if let Some(why) = &update.former_unknown {
            pair.former_unknown.add(hostname, why);
        }
    }

    fn pair(&mut self, update: &PlanSummary) -> &mut Pair {
        let key = (&update.from, &update.image);
        let at = self.pairs.binary_search_by(|pair| (&pair.from, &pair.image).cmp(&key));
        let at = at.unwrap_or_else(|at| {
            let pair = Pair {
                from: update.from.clone(),
                image: update.image.clone(),
                machines: 0,
                same: 0,
                changes: ChangeCounts::default(),
                fetch_objects: 0,
                fetch_bytes: 0,
                services: BTreeMap::new(),
                tasks: BTreeMap::new(),
                reboot: 0,
                high_impact: 0,
                is_unsafe: Group::default(),
                blocked: Group::default(),
                former_unknown: Group::default(),
            };
            self.pairs.insert(at, pair);
            at
        });
        &mut self.pairs[at]
    }

    /// Returns the machines that would get another image and be changed.
    pub(super) fn changing_machines(&self) -> Vec<ImageOfMachine> {
        let changing = self.machines.iter().filter_map(|plan| {
            let PlanOutcome::Update { update, .. } = &plan.outlook else { return None };
            let update = self.updates.get(usize::try_from(*update).ok()?)?;
            let is_other = update.from.as_ref() != Some(&update.image);
            let (hostname, image) = (plan.hostname.clone(), update.image.clone());
            (is_other && !update.same).then_some(ImageOfMachine { hostname, image })
        });
        changing.collect()
    }

    /// Returns false only if it is certain that no machine would change, and none is added or
    /// removed.
    pub(super) fn is_change(&self) -> bool {
        let CheckMdbReply { added, removed, .. } = &self.database;
        !added.is_empty()
            || !removed.is_empty()
            || self.unknown.keys().any(|gap| *gap != NoPlanReason::ImageUndefined)
            || self.pairs.iter().any(|pair| pair.same < pair.machines)
    }

    /// Returns the text for people; `verbose` adds a line for every machine.
    pub(super) fn text(&self, verbose: bool) -> String {
        let mut text = String::new();
        let mut line =
            |line: String| writeln!(text, "{line}").expect("writing to a String succeeds");
        let CheckMdbReply { held, brake, added, removed, changed } = &self.database;
        if let Some(why) = held {
            line(format!("HELD: the database would wait for domtool mdb accept: {why}"));
        }
        if let Some(brake) = brake {
            line(format!("WAITS: updates of all machines are disabled: {}", brake.reason));
        }
        let count = |machines: &Vec<String>| counted(machines.len() as u64, "machine");
        line(format!(
            "database: {} added, {} removed and left as they are, {} changed",
            count(added),
            count(removed),
            count(changed)
        ));
        for (what, machines) in [("added", added), ("removed", removed)] {
            let named = if verbose { machines.len() } else { machines.len().min(NAMED) };
            let more = if machines.len() > named { ", ..." } else { "" };
            if !machines.is_empty() {
                line(format!("  {what:<12} {}{more}", machines[..named].join(", ")));
            }
        }
        for pair in &self.pairs {
            pair.lines().into_iter().for_each(&mut line);
        }
        let resources = self.resources.iter().flat_map(ResourcesOfMachines::lines);
        resources.for_each(&mut line);
        let named = (!verbose).then_some(NAMED);
        self.kept_files.lines(named).into_iter().for_each(&mut line);
        for (status, group) in &self.waiting {
            line(format!("WAITS {status}: {}", group.text()));
        }
        for (gap, group) in &self.unknown {
            line(format!("NOT KNOWN {}: {}", gap.name(), group.text()));
        }
        if verbose {
            line(String::new());
            for plan in &self.machines {
                line(self.machine_line(plan));
            }
        }
        if !self.is_change() {
            line("Nothing would change.".to_owned());
        }
        text
    }

    /// Describes the plan of one machine in one line.
    fn machine_line(&self, plan: &MachinePlan) -> String {
        let mut parts = match &plan.outlook {
            PlanOutcome::Unknown { gap, why } => vec![format!("not known: {}: {why}", gap.name())],
            PlanOutcome::Update { update, fetch_objects, fetch_bytes } => {
                let update = usize::try_from(*update).ok().and_then(|at| self.updates.get(at));
                let Some(update) = update else { return plan.hostname.clone() };
                let mut parts = vec![arrow(update.from.as_ref(), &update.image)];
                if update.same {
                    parts.push("no change".to_owned());
                } else {
                    let objects = counted((*fetch_objects).into(), "object");
                    parts.push(counted(update.changes.count(), "change"));
                    parts.push(format!("to fetch {objects}, {}", size(*fetch_bytes)));
                    parts.extend(service_calls(&update.services));
                    parts.extend(planned_tasks(update));
                    if update.services.reboot {
                        parts.push("reboot".to_owned());
                    }
                    if update.services.high_impact {
                        parts.push("high impact".to_owned());
                    }
                    parts.extend(update.dangers.iter().map(|danger| format!("UNSAFE {danger}")));
                    parts.extend(
                        update
                            .blocked
                            .first()
                            .map(|first| format!("BLOCKED {}: {}", first.path, first.why)),
                    );
                }
                parts
            }
        };
        parts.extend(plan.waits.iter().map(|(status, why)| format!("WAITS {status}: {why}")));
        format!("{}: {}", plan.hostname, parts.join("; "))
    }
}

impl Pair {
    fn lines(&self) -> Vec<String> {
        let machines = counted(self.machines.into(), "machine");
        let mut lines = vec![format!("{}: {machines}", arrow(self.from.as_ref(), &self.image))];
        let mut fact = |name: &str, value: String| lines.push(format!("  {name:<12} {value}"));
        if self.same > 0 {
            fact("no change", counted(self.same.into(), "machine"));
        }
        if self.same == self.machines {
            return lines;
        }
        if self.changes.count() > 0 {
            fact("changes", format!("{}: {}", self.changes.count(), self.changes.kinds()));
            fact("reasons", self.changes.reasons());
        }
        let objects = counted(self.fetch_objects, "object");
        fact("to fetch", format!("{objects}, {}", size(self.fetch_bytes)));
        for (name, calls) in [("services", &self.services), ("tasks", &self.tasks)] {
            for (call, count) in calls {
                fact(name, format!("{call} on {}", counted((*count).into(), "machine")));
            }
        }
        for (name, count) in [("reboot", self.reboot), ("high impact", self.high_impact)] {
            if count > 0 {
                fact(name, counted(count.into(), "machine"));
            }
        }
        for (name, group) in [("UNSAFE", &self.is_unsafe), ("BLOCKED", &self.blocked)] {
            if group.machines > 0 {
                fact(name, group.text());
            }
        }
        if self.former_unknown.machines > 0 {
            let group = self.former_unknown.text();
            fact("NOT KNOWN", format!("triggers of the former image, on {group}"));
        }
        lines
    }
}

#[cfg(test)]
mod tests;
