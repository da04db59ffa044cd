//! What an update would do, told before it is made: to paths, to services, and what it would fetch.
//!
//! It is made of the plan that the update would carry out, and by the decision about services that
//! subd makes ([`model::trigger::services`]), so that whoever asks first is told what will be done.

use core::fmt::Write as _;
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::planning::Planned;
use model::image::ImageName;
use model::image::required::RequiredImage;
use model::object::ObjectId;
use model::object::set::ObjectSet;
use model::path::TreePath;
use model::plan::{Action, Blocked, Difference, Plan};
use model::trigger::Triggers;
use model::trigger::services::{OWN_SERVICE, ServiceCall, ServiceCalls, service_calls};
use model::words::{counted, size};

/// How many blocked paths a [`Summary`] names.
pub const BLOCKED_NAMED: usize = 20;

/// How many operations a plan has, by what they do and by why.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Changes {
    /// Paths that are put where nothing is.
    pub create: u32,
    /// Paths that are exchanged.
    pub replace: u32,
    /// Paths whose attributes are set.
    pub change: u32,
    /// Paths that are taken away, those inside replaced directories aside.
    pub remove: u32,
    /// In what so many paths differ; one path may differ in several things.
    pub reasons: BTreeMap<Difference, u32>,
}

impl Changes {
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

    /// How many operations there are.
    #[must_use]
    pub fn count(&self) -> u64 {
        [self.create, self.replace, self.change, self.remove].into_iter().map(u64::from).sum()
    }

    /// The counts that are not zero: `create 1, remove 2`.
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

    /// The reasons: `missing 1, extra 2`.
    #[must_use]
    pub fn reasons(&self) -> String {
        listed(self.reasons.iter().map(|(reason, count)| (reason.name(), *count)))
    }
}

fn listed<'a>(counts: impl Iterator<Item = (&'a str, u32)>) -> String {
    let words: Vec<String> = counts.map(|(what, count)| format!("{what} {count}")).collect();
    words.join(", ")
}

/// What is known of the image that a machine was last updated to: what its triggers name is
/// stopped too.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Former {
    /// Its name; `None` if the machine was never updated to one.
    pub image: Option<ImageName>,
    /// Its triggers; none if they are not known.
    pub triggers: Triggers,
    /// Why they are not known, if they are not.
    pub unknown: Option<String>,
}

/// What an update would do, without each single path.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Summary {
    /// The image.
    pub image: ImageName,
    /// The image that the machine was last updated to; `None` if to none.
    pub from: Option<ImageName>,
    /// True if nothing would change.
    pub same: bool,
    /// How many paths would change, and why.
    pub changes: Changes,
    /// The first paths that are in the way: at most [`BLOCKED_NAMED`]. If there are any, the
    /// update would not be made.
    pub blocked: Vec<Blocked>,
    /// Why the update would be unsafe; if there is a reason, it would wait for an operator.
    pub dangers: Vec<String>,
    /// What would be done to services.
    pub services: ServiceCalls,
    /// Why the triggers of the former image are not known: services that only they name are not
    /// among those above.
    pub former_unknown: Option<String>,
}

impl Summary {
    /// What `planned` would do with a machine that has the image `former`. Takes time in proportion
    /// to the operations of the plan and the triggers.
    #[must_use]
    pub fn of(image: &RequiredImage, planned: &Planned, former: &Former) -> Self {
        let plan = &planned.plan;
        Self {
            image: image.name().clone(),
            from: former.image.clone(),
            same: plan.is_empty(),
            changes: Changes::of(plan),
            blocked: plan.blocked.iter().take(BLOCKED_NAMED).cloned().collect(),
            dangers: planned.dangers.clone(),
            services: services(plan, &former.triggers, &image.content.triggers),
            former_unknown: former.unknown.clone(),
        }
    }
}

/// An update that is not made, for one machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Preview {
    /// The image.
    pub image: ImageName,
    /// The image that the machine was last updated to; `None` if to none.
    pub from: Option<ImageName>,
    /// True if nothing would change.
    pub same: bool,
    /// How many paths would change, and why.
    pub changes: Changes,
    /// What would change, and what is in the way.
    pub plan: Plan,
    /// Why the update would be unsafe.
    pub dangers: Vec<String>,
    /// What would be done to services.
    pub services: ServiceCalls,
    /// Why the triggers of the former image are not known: services that only they name are not
    /// among those above.
    pub former_unknown: Option<String>,
    /// Objects that would be fetched.
    pub fetch_objects: u32,
    /// Their bytes.
    #[serde(with = "model::wide")]
    pub fetch_bytes: u64,
}

impl Preview {
    /// What `planned` would do with a machine that has `cached` objects and the image `former`.
    #[must_use]
    pub fn new(
        image: &RequiredImage,
        planned: &Planned,
        cached: &ObjectSet,
        former: &Former,
    ) -> Self {
        let Summary { image, from, same, changes, dangers, services, former_unknown, .. } =
            Summary::of(image, planned, former);
        let (fetch_objects, fetch_bytes) = Lack::of(planned).beside(planned, cached);
        let plan = Plan::clone(&planned.plan);
        Self {
            image,
            from,
            same,
            changes,
            plan,
            dangers,
            services,
            former_unknown,
            fetch_objects,
            fetch_bytes,
        }
    }

    /// The whole as lines for people.
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
        lines_of(&self.services).into_iter().for_each(&mut line);
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

/// What a machine whose cache is empty would fetch for a plan. Counted once for many machines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lack {
    objects: u32,
    bytes: u64,
}

impl Lack {
    /// All that `planned` needs.
    #[must_use]
    pub fn of(planned: &Planned) -> Self {
        planned.needs.values().fold(Self::default(), |lack, need| Self {
            objects: lack.objects.saturating_add(1),
            bytes: lack.bytes.saturating_add(need.size_bytes),
        })
    }

    /// The objects and bytes that `planned`, whose lack this is, needs beside those that are
    /// `cached`. Takes time in proportion to the smaller of the two.
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

/// What would be done to services.
fn services(plan: &Plan, old: &Triggers, new: &Triggers) -> ServiceCalls {
    let paths: Vec<&TreePath> = plan.changed_paths().collect();
    service_calls(old, new, paths.iter().copied(), OWN_SERVICE)
}

/// What is not known because the triggers of the former image are not.
fn unknown_line(from: Option<&ImageName>, why: &str) -> String {
    let from = from.map_or("its last image", ImageName::as_str);
    format!("NOT KNOWN: the triggers of {from}: {why}; services that only they name are not told")
}

/// What would be done to services, as lines.
#[must_use]
pub fn lines_of(calls: &ServiceCalls) -> Vec<String> {
    let line = |when: &str, call: &ServiceCall| {
        format!("{when} the change: {} {}", call.verb.name(), call.service)
    };
    let before = calls.before.iter().map(|call| line("before", call));
    let after = calls.after.iter().map(|call| line("after", call));
    let mut lines: Vec<String> = before.chain(after).collect();
    if calls.own {
        lines.push(format!("at the end: restart {OWN_SERVICE}"));
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
