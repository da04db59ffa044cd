//! Preview of an update: what it would do to paths and services, and what it would fetch.
//!
//! It uses the plan that the update would carry out, and the same decision about services as subd
//! ([`model::trigger::services`]).

use core::fmt::Write as _;
use std::collections::BTreeMap;

use model::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::planning::Planned;
use model::display::{counted, size};
use model::image::ImageName;
use model::image::required::RequiredImage;
use model::object::{ObjectId, ObjectSet};
use model::path::TreePath;
use model::plan::{Action, Blocked, Difference, Plan};
use model::trigger::Triggers;
use model::trigger::services::{SUBD_SERVICE, ServiceCall, ServiceCalls, service_calls};
use tasks::planned::{PlannedTask, planned_tasks};

/// How many blocked paths a [`PlanSummary`] names.
pub const BLOCKED_NAMED: usize = 20;

/// How many operations a plan has, by kind and by reason.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ChangeCounts {
    /// Paths that are created.
    pub create: u32,
    /// Paths that are replaced.
    pub replace: u32,
    /// Paths whose attributes are set.
    pub change: u32,
    /// Paths that are removed, not counting those inside replaced directories.
    pub remove: u32,
    /// How many paths differ in what; one path may have several differences.
    pub reasons: BTreeMap<Difference, u32>,
}

impl ChangeCounts {
    /// Counts the operations of `plan`.
    #[must_use]
    pub fn of(plan: &Plan) -> Self {
        let mut changes = Self::default();
        for operation in &plan.operations {
            let count = match operation.action {
                Action::Create(_) => &mut changes.create,
                Action::Replace { .. } => &mut changes.replace,
                Action::Change(_) => &mut changes.change,
                Action::Remove => &mut changes.remove,
            };
            *count += 1;
            for reason in &operation.reason {
                *changes.reasons.entry(*reason).or_default() += 1;
            }
        }
        changes
    }

    /// Returns how many operations there are.
    #[must_use]
    pub fn count(&self) -> u64 {
        [self.create, self.replace, self.change, self.remove].into_iter().map(u64::from).sum()
    }

    /// Formats the counts that are not zero: `create 1, remove 2`.
    #[must_use]
    pub fn kinds(&self) -> String {
        let kinds = [
            ("create", self.create),
            ("replace", self.replace),
            ("change", self.change),
            ("remove", self.remove),
        ];
        listed(kinds.into_iter().filter(|(_, count)| *count > 0))
    }

    /// Formats the reasons: `missing 1, extra 2`.
    #[must_use]
    pub fn reasons(&self) -> String {
        listed(self.reasons.iter().map(|(reason, count)| (reason.name(), *count)))
    }
}

fn listed<'a>(counts: impl Iterator<Item = (&'a str, u32)>) -> String {
    let words: Vec<String> = counts.map(|(what, count)| format!("{what} {count}")).collect();
    words.join(", ")
}

/// The image that a machine was last updated to. Services that its triggers name are stopped too.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FormerImage {
    /// The name; `None` if the machine was never updated.
    pub image: Option<ImageName>,
    /// The triggers; none if they are not known.
    pub triggers: Triggers,
    /// Why the triggers are not known, if so.
    pub unknown: Option<String>,
}

/// What an update would do, without single paths.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PlanSummary {
    pub image: ImageName,
    /// The former image; `None` if the machine was never updated.
    pub from: Option<ImageName>,
    /// True if nothing would change.
    pub same: bool,
    /// How many paths would change, and why.
    pub changes: ChangeCounts,
    /// The first blocked paths: at most [`BLOCKED_NAMED`]. A repair leaves them out; they may hold
    /// a new image back.
    pub blocked: Vec<Blocked>,
    /// Why the update would be unsafe. If there is a reason, it would wait for an operator.
    pub dangers: Vec<String>,
    /// What would be done to services.
    pub services: ServiceCalls,
    /// The daemon tasks that would be started or stopped, by name.
    pub tasks: BTreeMap<String, PlannedTask>,
    /// Why the triggers of the former image are not known. Services and tasks that only they name
    /// are then missing.
    pub former_unknown: Option<String>,
}

impl PlanSummary {
    /// Summarizes what `planned` would do to a machine that has the image `former`. Takes time in
    /// proportion to the operations of the plan and the triggers.
    #[must_use]
    pub fn of(image: &RequiredImage, planned: &Planned, former: &FormerImage) -> Self {
        let plan = &planned.plan;
        let changed: Vec<&TreePath> = plan.changed_paths().collect();
        let changed = changed.iter().copied();
        let (old, new) = (&former.triggers, &image.content.triggers);
        let is_repair = former.image.as_ref() == Some(image.name());
        Self {
            image: image.name().clone(),
            from: former.image.clone(),
            same: plan.is_empty(),
            changes: ChangeCounts::of(plan),
            blocked: plan.blocked.iter().take(BLOCKED_NAMED).cloned().collect(),
            dangers: planned.dangers.clone(),
            services: service_calls(old, new, changed.clone(), SUBD_SERVICE),
            // What is not known to be new may run already.
            tasks: planned_tasks(
                if former.unknown.is_some() { new } else { old },
                new,
                changed,
                is_repair,
            ),
            former_unknown: former.unknown.clone(),
        }
    }
}

/// What an update of one machine would do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Preview {
    pub image: ImageName,
    /// The former image; `None` if the machine was never updated.
    pub from: Option<ImageName>,
    /// True if nothing would change.
    pub same: bool,
    /// How many paths would change, and why.
    pub changes: ChangeCounts,
    /// The operations and blocked paths.
    pub plan: Plan,
    /// Why the update would be unsafe.
    pub dangers: Vec<String>,
    /// What would be done to services.
    pub services: ServiceCalls,
    /// The daemon tasks that would be started or stopped, by name.
    pub tasks: BTreeMap<String, PlannedTask>,
    /// Why the triggers of the former image are not known. Services and tasks that only they name
    /// are then missing.
    pub former_unknown: Option<String>,
    /// Objects that would be fetched.
    pub fetch_objects: u32,
    #[serde(with = "model::json::LargeNumber")]
    pub fetch_bytes: u64,
}

impl Preview {
    /// Previews `planned` for a machine that has `cached` objects and the image `former`.
    #[must_use]
    pub fn new(
        image: &RequiredImage,
        planned: &Planned,
        cached: &ObjectSet,
        former: &FormerImage,
    ) -> Self {
        let PlanSummary {
            image,
            from,
            same,
            changes,
            dangers,
            services,
            tasks,
            former_unknown,
            ..
        } = PlanSummary::of(image, planned, former);
        let (fetch_objects, fetch_bytes) = FetchTotals::of(planned).beside(planned, cached);
        let plan = Plan::clone(&planned.plan);
        Self {
            image,
            from,
            same,
            changes,
            plan,
            dangers,
            services,
            tasks,
            former_unknown,
            fetch_objects,
            fetch_bytes,
        }
    }

    /// Formats the preview for people, one line for each operation.
    #[must_use]
    pub fn text(&self) -> String {
        if self.same {
            return format!("The machine equals {}.\n", self.image);
        }
        let mut text = String::new();
        let mut line = |line: String| writeln!(text, "{line}").expect("a String takes all");
        for operation in &self.plan.operations {
            line(operation.to_string());
        }
        for blocked in &self.plan.blocked {
            line(format!("BLOCKED {}: {}", blocked.path, blocked.why));
        }
        for danger in &self.dangers {
            line(format!("UNSAFE {danger}"));
        }
        service_lines(&self.services).into_iter().for_each(&mut line);
        self.tasks.iter().for_each(|(name, effect)| line(effect.text(name)));
        if let Some(why) = &self.former_unknown {
            line(unknown_line(self.from.as_ref(), why));
        }
        let objects = counted(self.fetch_objects.into(), "object");
        let changes = counted(self.changes.count(), "change");
        if self.changes.count() > 0 {
            line(format!("{changes}: {}", self.changes.kinds()));
            line(format!("reasons: {}", self.changes.reasons()));
        }
        line(format!("to fetch: {objects}, {}", size(self.fetch_bytes)));
        text
    }
}

/// What a machine with an empty cache would fetch for a plan. Computed once for many machines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FetchTotals {
    objects: u32,
    bytes: u64,
}

impl FetchTotals {
    /// Counts all objects that `planned` needs.
    #[must_use]
    pub fn of(planned: &Planned) -> Self {
        planned.needs.values().fold(Self::default(), |lack, need| Self {
            objects: lack.objects.saturating_add(1),
            bytes: lack.bytes.saturating_add(need.size_bytes),
        })
    }

    /// Returns the objects and bytes that `planned` needs and `cached` lacks; `self` must be the
    /// totals of `planned`. Takes time in proportion to the smaller of the two.
    #[must_use]
    pub fn beside(self, planned: &Planned, cached: &ObjectSet) -> (u32, u64) {
        let needs = &planned.needs;
        let there = |id: ObjectId| needs.get(&id).filter(|_| cached.contains(&id));
        let less = |lack: Self, bytes: u64| Self {
            objects: lack.objects.saturating_sub(1),
            bytes: lack.bytes.saturating_sub(bytes),
        };
        let smaller: &mut dyn Iterator<Item = ObjectId> = if cached.len() < needs.len() {
            &mut cached.iter()
        } else {
            &mut needs.keys().copied()
        };
        let lack = smaller.filter_map(there).fold(self, |lack, need| less(lack, need.size_bytes));
        (lack.objects, lack.bytes)
    }
}

/// Warns that the triggers of the former image are not known.
fn unknown_line(from: Option<&ImageName>, why: &str) -> String {
    let from = from.map_or("its last image", ImageName::as_str);
    format!("NOT KNOWN: the triggers of {from}: {why}; what only they name is not told")
}

/// Formats what would be done to services, as lines.
#[must_use]
pub fn service_lines(calls: &ServiceCalls) -> Vec<String> {
    let line = |when: &str, call: &ServiceCall| {
        format!("{when} the change: {} {}", call.verb.name(), call.service)
    };
    let before = calls.before.iter().map(|call| line("before", call));
    let after = calls.after.iter().map(|call| line("after", call));
    let mut lines: Vec<String> = before.chain(after).collect();
    if calls.own {
        lines.push(format!("at the end: restart {SUBD_SERVICE}"));
    }
    if calls.reboot {
        lines.push("at the end: reboot the machine".to_owned());
    }
    if calls.high_impact {
        lines.push("HIGH IMPACT: the machine's disruption command is asked first".to_owned());
    }
    lines
}

#[cfg(test)]
mod tests;
