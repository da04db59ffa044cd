//! What plugins would do about the resources of the machines of a plan.

use std::collections::BTreeMap;

use api::dominator::kept_files::ImageOfMachine;
use api::dominator::resources::{
    PLANNING_MAX, PlanResources, PlanResourcesRequest, PlannedResources,
};
use model::display::counted;
use provisioning::machine::preview::PlannedResource;
use rpc::client::Client;
use serde::Serialize;

use super::ask_machines;

/// What plugins would do, on the machines of a plan.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct ResourcesOfMachines {
    /// Machines for which something would be done, or of which that is not known.
    pub(super) machines: Vec<PlannedResources>,
    /// Why nothing is known of further machines.
    pub(super) unknown: Option<String>,
}

impl ResourcesOfMachines {
    /// Formats it for people: equal plans of resources in one line.
    pub(super) fn lines(&self) -> Vec<String> {
        let mut counts: BTreeMap<(&PlannedResource, &str), u64> = BTreeMap::new();
        for machine in &self.machines {
            for resource in &machine.resources {
                *counts.entry((resource, machine.image.as_str())).or_default() += 1;
            }
        }
        let resource = |((one, image), count): (&(&PlannedResource, &str), &u64)| {
            let PlannedResource { id, kind, effect, text } = one;
            let text = if text.is_empty() { String::new() } else { format!(": {text}") };
            let (effect, machines) = (effect.name(), counted(*count, "machine"));
            format!("resources of {image}: {effect} {id} ({kind}) on {machines}{text}")
        };
        let mut lines: Vec<String> = counts.iter().map(resource).collect();
        let unknown = self.machines.iter().filter_map(|machine| {
            let why = machine.unknown.as_ref()?;
            Some(format!("NOT KNOWN: the resources of {}: {why}", machine.hostname))
        });
        lines.extend(unknown);
        let others = self.unknown.as_ref();
        lines.extend(others.map(|why| format!("NOT KNOWN: what would become of resources: {why}")));
        lines
    }
}

/// Has the dominator ask `machines`.
pub(super) async fn ask(client: &Client, machines: &[ImageOfMachine]) -> ResourcesOfMachines {
    let mut found = ResourcesOfMachines::default();
    found.unknown = ask_machines::<PlanResources>(
        client,
        machines.chunks(PLANNING_MAX),
        "plugins of machines are asked",
        |machines| PlanResourcesRequest { machines },
        |reply| found.machines.extend(reply.machines),
    )
    .await;
    found
}

#[cfg(test)]
mod tests {
    use provisioning::machine::preview::PlannedEffect;

    use super::*;

    #[test]
    fn equal_plans_are_told_once_and_what_is_not_known_by_machine() {
        let resource = |id: &str, effect, text: &str| PlannedResource {
            id: id.to_owned(),
            kind: "sql".to_owned(),
            effect,
            text: text.to_owned(),
        };
        let machine = |hostname: &str, resources, unknown: Option<&str>| PlannedResources {
            hostname: hostname.to_owned(),
            image: "web/2".parse().unwrap(),
            resources,
            unknown: unknown.map(str::to_owned),
        };
        let make = || resource("db", PlannedEffect::Create, "10 GiB");
        let plan = ResourcesOfMachines {
            machines: vec![
                machine("a", vec![make(), resource("old", PlannedEffect::Delete, "")], None),
                machine("b", vec![make()], None),
                machine("c", Vec::new(), Some("its root is not /")),
            ],
            unknown: Some("refused".to_owned()),
        };
        let expected = [
            "resources of web/2: create db (sql) on 2 machines: 10 GiB",
            "resources of web/2: delete old (sql) on 1 machine",
            "NOT KNOWN: the resources of c: its root is not /",
            "NOT KNOWN: what would become of resources: refused",
        ];
        assert_eq!(plan.lines(), expected);
    }
}
