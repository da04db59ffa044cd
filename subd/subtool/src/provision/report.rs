//! What is printed: what would be done, and what was done.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use provisioning::order::Cycle;
use provisioning::plan::{Orphan, Problem, Provision, summary};
use provisioning::protocol::{Change, Desired, Outputs, Previous};
use provisioning::state::Failure;
use provisioning::{Plan, State};
use serde::Serialize;

use super::directory::Directory;
use super::plugins::Plugins;

/// What would be done.
#[derive(Serialize)]
pub(super) struct Shown {
    machine: String,
    waves: Vec<Vec<String>>,
    calls: Vec<ShownCall>,
    unchanged: Vec<String>,
    /// Resources that plugins still work on.
    running: BTreeSet<String>,
    orphans: Vec<Orphan>,
    unbound: Vec<String>,
    bound_twice: Vec<String>,
    cycle: Option<Cycle>,
    problems: Vec<Problem>,
    /// The first problem, as other errors are told.
    #[serde(flatten)]
    error: Option<Problem>,
    #[serde(skip)]
    summary: String,
}

/// A call that would be made.
#[derive(Serialize)]
struct ShownCall {
    wave: usize,
    provisioner: String,
    user: String,
    /// Null if it is not there.
    plugin: Option<PathBuf>,
    key: String,
    desired: Vec<Desired>,
    previous: Vec<Previous>,
    /// What the plugin says that it would do, if it was asked.
    #[serde(skip_serializing_if = "Option::is_none")]
    asked: Option<Asked>,
}

/// What a plugin says that it would do.
#[derive(Serialize)]
pub(super) struct Asked {
    pub changes: Option<Vec<Change>>,
    /// Why that is not known.
    pub error: Option<String>,
}

impl Asked {
    pub fn failed(error: String) -> Self {
        Self { changes: None, error: Some(error) }
    }
}

impl Shown {
    pub fn new(plan: &Plan, plugins: &Plugins, state: &State, asked: Vec<Asked>) -> Self {
        let mut asked = asked.into_iter();
        let call = |call: &Provision| {
            let request = state.without_secrets(&call.request);
            ShownCall {
                wave: call.wave,
                provisioner: call.provisioner.clone(),
                user: call.user.clone(),
                plugin: plugins.path(&call.provisioner),
                key: request.key,
                desired: request.desired,
                previous: request.previous,
                asked: asked.next(),
            }
        };
        Self {
            machine: state.machine().to_owned(),
            waves: plan.waves.clone(),
            calls: plan.calls.iter().map(call).collect(),
            unchanged: plan.unchanged.clone(),
            running: state.running(),
            orphans: plan.orphans.clone(),
            unbound: plan.unbound.clone(),
            bound_twice: plan.bound_twice.clone(),
            cycle: plan.cycle.clone(),
            problems: plan.problems.clone(),
            error: plan.problems.first().cloned(),
            summary: summary(plan),
        }
    }

    pub fn changes_nothing(&self) -> bool {
        self.calls.is_empty() && self.running.is_empty()
    }

    pub fn text(&self) -> String {
        let mut text = String::new();
        for call in &self.calls {
            let wanted: BTreeSet<&str> =
                call.desired.iter().map(|want| want.resource.id.as_str()).collect();
            let there: BTreeSet<&str> =
                call.previous.iter().map(|old| old.resource.id.as_str()).collect();
            for id in wanted.union(&there) {
                let verb = match (wanted.contains(id), there.contains(id)) {
                    (true, false) => "create ",
                    (true, true) => "change ",
                    _ => "destroy",
                };
                let (wave, name, user) = (call.wave, &call.provisioner, &call.user);
                text.push_str(&format!("wave {wave}  {verb}  {id}  with {name} as {user}\n"));
                text.push_str(&call.asked.as_ref().map_or_else(String::new, |said| said.text(id)));
            }
        }
        text.push_str(&lines("still running", &self.running));
        text.push_str(&orphans(&self.orphans));
        text.push_str(&self.summary);
        text.push('\n');
        text
    }
}

impl Asked {
    fn text(&self, id: &str) -> String {
        if let Some(error) = &self.error {
            return format!("        NOT KNOWN: {error}\n");
        }
        let about = self.changes.iter().flatten().filter(|change| change.id == id);
        let lines = about.map(|change| match &change.error {
            Some(error) => format!("        refused: {error}\n"),
            None => format!("        {}\n", change.text),
        });
        lines.collect()
    }
}

/// What was done.
#[derive(Serialize)]
pub(super) struct Report {
    machine: String,
    waves: Vec<Vec<String>>,
    created: Vec<String>,
    changed: Vec<String>,
    destroyed: Vec<String>,
    unchanged: Vec<String>,
    pub failed: Vec<Failure>,
    /// Resources that plugins still work on.
    running: BTreeSet<String>,
    /// Resources whose call was cut short.
    interrupted: BTreeSet<String>,
    /// Resources that wait for others.
    waiting: Vec<String>,
    orphans: Vec<Orphan>,
    /// The outputs of all resources that are there and asked for, without secret ones.
    outputs: BTreeMap<String, Outputs>,
}

impl Report {
    pub fn new(directory: &Directory, former: &State, state: &State) -> Self {
        let (before, after) = (directory.plan(former), directory.plan(state));
        let running = state.running();
        let failed = state.failures();
        let is_there = |id: &str| former.outputs(id).is_some();
        let ready = after.unchanged.iter().filter(|id| !before.unchanged.contains(id));
        let (changed, created): (Vec<_>, Vec<_>) = ready.cloned().partition(|id| is_there(id));
        let of_former = before.calls.iter().filter(|call| call.destroys());
        let destroyed = of_former.flat_map(Provision::ids).filter(|id| !state.knows(id));
        let late = after.calls.iter().flat_map(Provision::ids);
        let interrupted = state.interrupted();
        let is_known = |id: &String| {
            running.contains(id)
                || interrupted.contains(id)
                || failed.iter().any(|one| one.id == *id)
        };
        let outputs = directory.resources.iter().filter_map(|resource| {
            let (_, outputs) = state.outputs(&resource.id)?;
            Some((resource.id.clone(), resource.plain_outputs(outputs)))
        });
        Self {
            machine: state.machine().to_owned(),
            waves: after.waves.clone(),
            created,
            changed,
            destroyed: destroyed.collect(),
            unchanged: before.unchanged.clone(),
            waiting: late.filter(|id| !is_known(id)).collect(),
            failed,
            running,
            interrupted,
            orphans: after.orphans.clone(),
            outputs: outputs.collect(),
        }
    }

    pub fn text(&self) -> String {
        let failed = self.failed.iter().map(|failure| &failure.id);
        [
            lines("created", &self.created),
            lines("changed", &self.changed),
            lines("destroyed", &self.destroyed),
            lines("failed", failed),
            lines("still running", &self.running),
            lines("cut short, perhaps half made", &self.interrupted),
            lines("not started", &self.waiting),
            orphans(&self.orphans),
        ]
        .concat()
    }
}

fn lines<'a>(what: &str, ids: impl IntoIterator<Item = &'a String>) -> String {
    ids.into_iter().map(|id| format!("{what}: {id}\n")).collect()
}

fn orphans(orphans: &[Orphan]) -> String {
    orphans.iter().map(|orphan| format!("orphan: {}: {}\n", orphan.id, orphan.reason)).collect()
}
