//! `show-update`: what an update would change, and what it would do to services.
// tidy: core

use core::fmt::Write as _;
use std::collections::BTreeSet;

use common::image::ImageName;
use common::image::required::RequiredImage;
use common::object::ObjectId;
use common::path::TreePath;
use common::plan::Plan;
use common::plan::job::Planned;
use common::trigger::Triggers;
use common::words::{counted, size};
use serde::Serialize;

use crate::update::triggers::{ServiceCall, ServiceCalls, service_calls};

/// The name of subd's own service, unless the machine was told another.
const OWN_SERVICE: &str = "subd";

/// An update that is not made.
#[derive(Clone, Debug, Serialize)]
pub struct Preview {
    /// The image.
    pub image: ImageName,
    /// True if nothing would change.
    pub same: bool,
    /// What would change, and what is in the way.
    pub plan: Plan,
    /// Why the update would be unsafe.
    pub dangers: Vec<String>,
    /// What would be done to services.
    pub services: ServiceCalls,
    /// Objects that would be fetched.
    pub fetch_objects: u64,
    /// Their bytes.
    pub fetch_bytes: u64,
}

impl Preview {
    /// What `planned` would do with a machine that has `cached` objects and was last updated with
    /// the triggers `old`.
    #[must_use]
    pub fn new(
        image: &RequiredImage,
        planned: &Planned,
        cached: &[ObjectId],
        old: &Triggers,
    ) -> Self {
        let cached: BTreeSet<&ObjectId> = cached.iter().collect();
        let missing = planned.needs.iter().filter(|(id, _)| !cached.contains(id));
        let (objects, bytes) = missing.fold((0, 0_u64), |(objects, bytes), (_, need)| {
            (objects + 1, bytes.saturating_add(need.size_bytes))
        });
        Self {
            image: image.name().clone(),
            same: planned.plan.is_empty(),
            services: calls(&planned.plan, old, &image.content.triggers),
            plan: Plan::clone(&planned.plan),
            dangers: planned.dangers.clone(),
            fetch_objects: objects,
            fetch_bytes: bytes,
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
        let changes = counted(self.plan.operations.len() as u64, "change");
        let objects = counted(self.fetch_objects, "object");
        line(format!("{changes}; to fetch: {objects}, {}", size(self.fetch_bytes)));
        text
    }
}

/// What would be done to services.
fn calls(plan: &Plan, old: &Triggers, new: &Triggers) -> ServiceCalls {
    let paths: Vec<&TreePath> = plan.changed_paths().collect();
    service_calls(old, new, paths.iter().copied(), OWN_SERVICE)
}

/// What would be done to services, as lines.
fn lines_of(calls: &ServiceCalls) -> Vec<String> {
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
mod tests {
    use common::plan::{Action, Difference, Operation};

    use super::*;

    #[test]
    fn says_what_happens_to_paths_and_services() {
        let remove = |path: &str| Operation {
            path: path.parse().unwrap(),
            action: Action::Remove,
            reason: vec![Difference::Extra],
        };
        let plan = Plan { operations: vec![remove("/db/x"), remove("/boot/x")], blocked: vec![] };
        let preview = |triggers: &str| {
            let triggers = Triggers::from_json(triggers).unwrap();
            Preview {
                image: ImageName::new("test/1").unwrap(),
                same: false,
                services: calls(&plan, &Triggers::default(), &triggers),
                plan: plan.clone(),
                dangers: vec!["it would take away the only kernel (/boot/x)".to_owned()],
                fetch_objects: 1,
                fetch_bytes: 7,
            }
        };
        let restart = r#"[{"MatchLines": ["/db"], "Service": "db", "HighImpact": true},
            {"MatchLines": ["/boot"], "Service": "subd"}]"#;
        let head = "remove /db/x (extra)\nremove /boot/x (extra)\n\
                    UNSAFE it would take away the only kernel (/boot/x)\n";
        let tail = "2 changes; to fetch: 1 object, 7 bytes\n";
        let middle = "before the change: stop db\nafter the change: start db\n\
                      at the end: restart subd\n\
                      HIGH IMPACT: the machine's disruption command is asked first\n";
        assert_eq!(preview(restart).text(), format!("{head}{middle}{tail}"));
        let reboot = r#"[{"MatchLines": ["/boot"], "Service": "reboot"}]"#;
        let middle = "at the end: reboot the machine\n\
                      HIGH IMPACT: the machine's disruption command is asked first\n";
        assert_eq!(preview(reboot).text(), format!("{head}{middle}{tail}"));
        let same = Preview { same: true, ..preview("[]") };
        assert_eq!(same.text(), "The machine equals test/1.\n");
    }
}
