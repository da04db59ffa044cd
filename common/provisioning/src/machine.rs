//! What a machine keeps of provisioning, and what it does next.
//!
//! The resources of an image that is to come are its *target*. They are provisioned wave by wave,
//! each with leave of the caller, and nothing is removed meanwhile. When the image is *active*,
//! what nothing asks for any more is removed, without leave. So it is when the update was undone:
//! then the active image is the former one, and asks for what was changed as it was.

pub mod drift;
pub mod fleet;
pub mod orphans;
pub mod preview;

use std::collections::BTreeMap;

use model::image::ImageName;
use model::object::ObjectId;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use self::drift::Checks;
use self::fleet::FleetResource;
use crate::binding::Bindings;
use crate::image::Definition;
use crate::plan::{Call, FleetRights, Next, Plan, Provision, plan_with, plan_without_removal};
use crate::resource::{Per, Resource, Resources};
use crate::state::{Failure, State};

/// What a machine keeps of provisioning.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    /// The digest of the image that was activated last.
    active_image: Option<ObjectId>,
    /// What that image asks for.
    active: Definition,
    target: Option<Target>,
    /// `None` before the first resource.
    #[serde(with = "checked_state")]
    state: Option<State>,
    /// The plugins that have made what there is, by provisioner.
    kept: BTreeMap<String, KeptPlugin>,
    /// What is known of drift.
    #[serde(default)]
    checks: Checks,
    /// The resources of the fleet, by id.
    #[serde(default)]
    fleet: BTreeMap<String, FleetResource>,
}

/// A plugin of which a copy is kept.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KeptPlugin {
    /// The name of the copy: the digest of the plugin.
    pub copy: String,
    /// How long a call may take, in seconds.
    pub timeout_s: u32,
}

/// The outputs of a resource, for programs of the machine.
#[derive(Clone, Debug, PartialEq)]
pub struct Outputs {
    /// A JSON object, with those that are secret.
    pub values: Value,
    /// The user who may read them, besides root.
    pub reader: Option<String>,
}

/// The image whose resources are provisioned.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Target {
    image: ImageName,
    image_digest: ObjectId,
    definition: Definition,
    /// How often the caller has let it go on.
    step: u32,
    /// The last wave that may begin.
    wave: usize,
    /// Why nothing can be provisioned, as the machine has found.
    refused: Option<String>,
    /// True when the image is active.
    is_over: bool,
}

/// What is to be done next.
#[derive(Clone, Debug, PartialEq)]
pub enum Todo {
    /// Nothing, before a change.
    Nothing,
    /// These calls, at the same time.
    Calls(Vec<Call>),
    /// All that the active image asks for is there: [`Machine::settle`].
    Settle,
    /// What the active image asks for has failed: [`Machine::retry`] after a while.
    RetryLater,
}

/// How far the target is. Waves count from 1.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Wave 0 is what is left of a former target.
    Running {
        wave: usize,
        waves: usize,
    },
    Waits {
        wave: usize,
        waves: usize,
    },
    /// It waits for what is made for the fleet, as the text says.
    Awaits(String),
    Finished,
    Failed(String),
}

/// The target, for reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetReport {
    pub image: ImageName,
    pub image_digest: ObjectId,
    pub step: u32,
    pub stage: Stage,
}

/// How a resource is.
#[derive(Clone, Debug, PartialEq)]
pub struct Standing {
    pub id: String,
    pub kind: String,
    pub provisioner: String,
    pub needs: Vec<String>,
    pub condition: Condition,
    /// Says why.
    pub text: String,
    /// How it differed when it was checked last.
    pub drift: Option<String>,
    pub is_orphan: bool,
    /// Without those that are secret.
    pub outputs: serde_json::Map<String, Value>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Condition {
    Waiting,
    Running,
    Made,
    Failed,
    Leaving,
    Drifted,
    /// It is of the fleet, and is as another image asks.
    Conflict,
}

/// What is asked for now.
struct Goal {
    resources: Resources,
    bindings: Bindings,
    plan: Plan,
}

impl Machine {
    /// Makes `definition` the target, if it is not. `machine` is the name of which keys are made.
    pub fn provision(
        &mut self,
        image: &ImageName,
        image_digest: ObjectId,
        definition: &Definition,
        machine: &str,
    ) {
        let is_it = |target: &&Target| {
            target.image_digest == image_digest && target.definition == *definition
        };
        if self.open_target().filter(is_it).is_some() {
            return;
        }
        let state = self.state.get_or_insert_with(|| State::new(machine));
        state.retry();
        let wave = match goal(definition, state, plan_without_removal, None) {
            Some(Goal { plan, .. }) => plan.calls.first().map_or(0, |call| call.wave),
            None => 0,
        };
        self.target = Some(Target {
            image: image.clone(),
            image_digest,
            definition: definition.clone(),
            step: 0,
            wave,
            refused: None,
            is_over: false,
        });
        self.settle_fleet();
    }

    /// Lets the target go on from `step`: begins the next wave, or retries. `None` if that image is
    /// not the target; false if it was done before, or there is nothing to do.
    pub fn go_on(&mut self, image_digest: ObjectId, step: u32) -> Option<bool> {
        let target = self.target.as_mut().filter(|target| target.image_digest == image_digest)?;
        if target.step != step || target.is_over {
            return Some(false);
        }
        let stage = self.stage()?;
        let (target, state) = (self.target.as_mut()?, self.state.as_mut()?);
        match stage {
            Stage::Waits { wave, .. } => target.wave = wave,
            Stage::Failed(_) => {
                target.refused = None;
                state.retry();
            }
            Stage::Running { .. } | Stage::Awaits(_) | Stage::Finished => return Some(false),
        }
        target.step += 1;
        Some(true)
    }

    /// Notes that the image with this digest is active, which asks for `definition`.
    pub fn activated(&mut self, image_digest: ObjectId, definition: &Definition) {
        if definition.is_empty() && self.state.is_none() {
            self.target = None;
            self.active = Definition::default();
            self.active_image = None;
            return;
        }
        // Before the first image with resources it is not known which one is active.
        let is_same = self.active_image.is_none_or(|active| active == image_digest);
        let is_repair = is_same && self.active == *definition;
        self.active_image = Some(image_digest);
        self.active.clone_from(definition);
        let is_target = self.target.as_ref().is_some_and(|one| one.image_digest == image_digest);
        match &mut self.target {
            Some(target) if is_target => target.is_over = true,
            target if !is_repair => *target = None,
            _ => {}
        }
        if let (Some(state), true) = (&mut self.state, is_target || !is_repair)
            && let Ok((resources, _)) = definition.read()
        {
            state.settle(&resources);
            state.retry();
        }
        self.settle_fleet();
    }

    /// Gives up the image with this digest: its update was undone, or it is not to come any more.
    pub fn give_up(&mut self, image_digest: ObjectId) {
        let was_target = |target: &mut Target| target.image_digest == image_digest;
        if self.target.take_if(was_target).is_some()
            && let Some(state) = &mut self.state
        {
            state.retry();
            self.settle_fleet();
        }
    }

    /// Says why the update to an image must not begin yet.
    ///
    /// # Errors
    ///
    /// What is missing.
    pub fn check_commit(
        &self,
        image_digest: ObjectId,
        definition: &Definition,
    ) -> Result<(), String> {
        let is_repair = self.active_image == Some(image_digest) && self.active == *definition;
        if definition.is_empty() || is_repair {
            return Ok(());
        }
        let none = State::new("");
        let state = self.state.as_ref().unwrap_or(&none);
        let goal = goal(definition, state, plan_without_removal, None);
        let Some(Goal { plan, resources, .. }) = goal else {
            return Err("the resource files of the image cannot be read".to_owned());
        };
        match plan.next(state) {
            Next::Finished => Ok(()),
            _ => {
                let is_ready = |id: &str| plan.unchanged.iter().any(|one| one == id);
                let late = resources.iter().map(|one| one.id.as_str()).filter(|id| !is_ready(id));
                let late: Vec<&str> = late.collect();
                let which = match late.is_empty() {
                    true => "plugins still work".to_owned(),
                    false => late.join(", "),
                };
                Err(format!("the resources of the update are not provisioned: {which}"))
            }
        }
    }

    /// Returns what is to be done next.
    #[must_use]
    pub fn next(&self) -> Todo {
        let Some(state) = &self.state else { return Todo::Nothing };
        if let Some(target) = self.open_target() {
            if target.refused.is_some() {
                return Todo::Nothing;
            }
            let rights = self.rights();
            let goal = goal(&target.definition, state, plan_without_removal, Some(&rights));
            let Some(goal) = goal else { return Todo::Nothing };
            return match goal.plan.next(state) {
                Next::Calls(calls) if wave_of(&calls).is_none_or(|wave| wave <= target.wave) => {
                    Todo::Calls(calls)
                }
                _ => Todo::Nothing,
            };
        }
        let goal = goal(&self.active, state, plan_with, Some(&self.rights()));
        let Some(goal) = goal else { return Todo::Nothing };
        match goal.plan.next(state) {
            Next::Calls(calls) => Todo::Calls(calls),
            Next::Failed => Todo::RetryLater,
            Next::Refused => Todo::Nothing,
            Next::Finished | Next::Awaits if self.settled() == *self => Todo::Nothing,
            Next::Finished | Next::Awaits => Todo::Settle,
        }
    }

    /// Takes over what the active image says of its resources that is no input.
    pub fn settle(&mut self) {
        if let (Some(state), Ok((resources, _))) = (&mut self.state, self.active.read()) {
            state.settle(&resources);
        }
    }

    fn settled(&self) -> Self {
        let mut settled = self.clone();
        settled.settle();
        settled
    }

    /// Lets what has failed be tried again.
    pub fn retry(&mut self) {
        if let Some(state) = &mut self.state {
            state.retry();
        }
    }

    /// Notes why the target cannot be provisioned.
    pub fn refuse(&mut self, why: String) {
        if let Some(target) = self.target.as_mut().filter(|target| !target.is_over) {
            target.refused = Some(why);
        }
    }

    /// Changes the state. Failures of what only a former image asked for are taken back: nothing
    /// waits for them.
    pub fn change_state(&mut self, change: impl FnOnce(&mut State)) {
        let under_way = self.drift_under_way();
        let Some(state) = &mut self.state else { return };
        change(state);
        if let Some(target) = self.target.as_ref().filter(|target| !target.is_over)
            && let Ok((resources, _)) = target.definition.read()
        {
            state.forgive(|id| resources.get(id).is_none());
        }
        self.settle_drift(&under_way);
        self.note_made();
    }

    /// Returns the calls that provision the target from here, before any was made for it.
    #[must_use]
    pub fn planned(&self) -> Vec<Provision> {
        let plan = self.open_target().and_then(|target| {
            let (state, rights) = (self.state.as_ref()?, self.rights());
            Some(goal(&target.definition, state, plan_without_removal, Some(&rights))?.plan)
        });
        plan.map(|plan| plan.calls).unwrap_or_default()
    }

    /// Returns what the active image, or the target if there is one, asks for.
    #[must_use]
    pub fn definition(&self) -> &Definition {
        self.open_target().map_or(&self.active, |target| &target.definition)
    }

    /// Returns the plugin that made what there is of a provisioner.
    #[must_use]
    pub fn kept(&self, provisioner: &str) -> Option<&KeptPlugin> {
        self.kept.get(provisioner)
    }

    /// Notes which plugin makes what there is of a provisioner from now on.
    pub fn keep(&mut self, provisioner: &str, plugin: KeptPlugin) {
        self.kept.insert(provisioner.to_owned(), plugin);
    }

    /// Returns the names of the copies of plugins that are needed.
    pub fn copies(&self) -> impl Iterator<Item = String> {
        let of_target = self.target.iter().flat_map(|target| target.definition.plugins.values());
        let of_images = self.active.plugins.values().chain(of_target).map(ObjectId::to_string);
        of_images.chain(self.kept.values().map(|plugin| plugin.copy.clone()))
    }

    /// Returns the outputs of the resources of the active image, by id.
    #[must_use]
    pub fn outputs(&self) -> BTreeMap<String, Outputs> {
        self.outputs_of(&self.active)
    }

    /// As [`Machine::outputs`], without those that are secret.
    #[must_use]
    pub fn plain_outputs(&self) -> serde_json::Map<String, Value> {
        let Ok((resources, _)) = self.active.read() else { return serde_json::Map::new() };
        let plain = |(id, outputs): (String, Outputs)| {
            let values = outputs.values.as_object()?;
            let plain = resources.get(&id)?.plain_outputs(values);
            Some((id, plain.into()))
        };
        self.outputs().into_iter().filter_map(plain).collect()
    }

    /// As [`Machine::outputs`], of an image with this definition.
    #[must_use]
    pub fn outputs_of(&self, definition: &Definition) -> BTreeMap<String, Outputs> {
        let (Some(state), Ok((resources, _))) = (&self.state, definition.read()) else {
            return BTreeMap::new();
        };
        let outputs = |one: &Resource| {
            let shared = self.shared_outputs(one).filter(|_| !self.is_own(&one.id));
            let values = shared.or(state.outputs(&one.id).map(|of| of.1))?;
            let values = values.clone().into();
            Some((one.id.clone(), Outputs { values, reader: one.reader.clone() }))
        };
        resources.iter().filter_map(outputs).collect()
    }

    /// True while the image with this digest is to come, and its resources are or were provisioned.
    #[must_use]
    pub fn awaits(&self, image_digest: ObjectId) -> bool {
        self.open_target().is_some_and(|target| target.image_digest == image_digest)
    }

    /// True while an image is to come whose resources are or were provisioned.
    #[must_use]
    pub fn has_target(&self) -> bool {
        self.open_target().is_some()
    }

    fn open_target(&self) -> Option<&Target> {
        self.target.as_ref().filter(|target| !target.is_over)
    }

    fn stage(&self) -> Option<Stage> {
        let (target, state) = (self.target.as_ref()?, self.state.as_ref()?);
        if target.is_over {
            return Some(Stage::Finished);
        }
        if let Some(why) = &target.refused {
            return Some(Stage::Failed(why.clone()));
        }
        let rights = self.rights();
        let goal = goal(&target.definition, state, plan_without_removal, Some(&rights));
        let Some(Goal { plan, resources, .. }) = goal else {
            return Some(Stage::Failed("the resource files cannot be read".to_owned()));
        };
        let waves = plan.waves.len();
        Some(match plan.next(state) {
            Next::Finished => Stage::Finished,
            Next::Awaits => {
                let of_fleet = plan.awaited.iter().filter_map(|id| resources.get(id));
                let of_fleet = of_fleet.filter(|one| one.per == Per::Fleet);
                let each = of_fleet
                    .map(|one| format!("{}: {}", one.id, self.why_awaited(&one.id, one.per).1));
                Stage::Awaits(each.collect::<Vec<_>>().join("; "))
            }
            Next::Refused => {
                let problems = plan.problems.iter().map(|one| format!("{}: {}", one.at, one.error));
                Stage::Failed(problems.collect::<Vec<_>>().join("; "))
            }
            Next::Failed => Stage::Failed(describe(&state.failures())),
            Next::Calls(calls) => match wave_of(&calls) {
                Some(wave) if wave > target.wave => Stage::Waits { wave, waves },
                Some(wave) => Stage::Running { wave, waves },
                None => {
                    let mut asked = calls.iter().flat_map(Call::ids);
                    let wave = match asked.any(|id| resources.get(&id).is_some()) {
                        true => target.wave,
                        false => 0,
                    };
                    Stage::Running { wave, waves }
                }
            },
        })
    }

    /// Returns how far the target is.
    #[must_use]
    pub fn target(&self) -> Option<TargetReport> {
        let stage = self.stage()?;
        let Target { image, image_digest, step, .. } = self.target.as_ref()?;
        Some(TargetReport { image: image.clone(), image_digest: *image_digest, step: *step, stage })
    }

    /// Returns how all resources are, by id.
    #[must_use]
    pub fn standings(&self) -> Vec<Standing> {
        let Some(state) = &self.state else { return Vec::new() };
        let rights = Some(&self.rights());
        let Some(active) = goal(&self.active, state, plan_with, rights) else {
            return Vec::new();
        };
        let target = self
            .open_target()
            .and_then(|target| goal(&target.definition, state, plan_without_removal, rights));
        let asked = target.as_ref().unwrap_or(&active);
        let mut standings: BTreeMap<String, Standing> = BTreeMap::new();
        for resource in asked.resources.iter() {
            let provisioner = asked.bindings.of_kind(&resource.kind);
            let is_made = asked.plan.unchanged.contains(&resource.id);
            let is_awaited = asked.plan.awaited.contains(&resource.id);
            let (condition, text) = match (is_made, state.knows(&resource.id)) {
                (true, _) => (Condition::Made, String::new()),
                _ if is_awaited => self.why_awaited(&resource.id, resource.per),
                (false, true) => (Condition::Waiting, "it is to be changed".to_owned()),
                (false, false) => (Condition::Waiting, "it is to be made".to_owned()),
            };
            standings.insert(
                resource.id.clone(),
                Standing {
                    id: resource.id.clone(),
                    kind: resource.kind.clone(),
                    provisioner: provisioner.map(|one| one.name.clone()).unwrap_or_default(),
                    needs: resource.needs.clone(),
                    condition,
                    text,
                    drift: None,
                    is_orphan: false,
                    outputs: plain_outputs(state, &resource.id),
                },
            );
        }
        add_others(state, &active, &mut standings);
        standings.values_mut().for_each(|standing| self.add_drift(standing));
        for id in state.running() {
            if let Some(one) = standings.get_mut(id.as_str()) {
                one.text = "its plugin works on it".to_owned();
                if one.condition != Condition::Leaving {
                    one.condition = Condition::Running;
                }
            }
        }
        for id in state.interrupted() {
            if let Some(one) = standings.get_mut(id.as_str()) {
                one.text = "its plugin runs, or was cut short".to_owned();
            }
        }
        for Failure { id, error, .. } in state.failures() {
            if let Some(one) = standings.get_mut(id.as_str()) {
                (one.condition, one.text) = (Condition::Failed, error);
            }
        }
        standings.into_values().collect()
    }
}

/// Adds the resources that are there and are not asked for.
fn add_others(state: &State, active: &Goal, standings: &mut BTreeMap<String, Standing>) {
    let orphans = &active.plan.orphans;
    for (id, provisioner, resource) in state.known() {
        if standings.contains_key(id) {
            continue;
        }
        let orphan = orphans.iter().find(|orphan| orphan.id == *id);
        let (condition, text) = match orphan {
            Some(orphan) => (Condition::Made, orphan.reason.clone()),
            None if active.resources.get(id).is_some() => {
                (Condition::Made, "of the image before the update".to_owned())
            }
            None if active.plan.left.iter().any(|left| left == id) => {
                let text = "it is of the fleet, and its dominator has to say when it may go";
                (Condition::Made, text.to_owned())
            }
            None => (Condition::Leaving, "it is to be destroyed".to_owned()),
        };
        let standing = Standing {
            id: id.to_owned(),
            kind: resource.kind.clone(),
            provisioner: provisioner.to_owned(),
            needs: resource.needs.clone(),
            condition,
            text,
            drift: None,
            is_orphan: orphan.is_some(),
            outputs: plain_outputs(state, id),
        };
        standings.insert(id.to_owned(), standing);
    }
}

fn plain_outputs(state: &State, id: &str) -> serde_json::Map<String, Value> {
    let outputs = state.outputs(id);
    outputs.map(|(of, outputs)| of.plain_outputs(outputs)).unwrap_or_default()
}

fn goal(
    definition: &Definition,
    state: &State,
    plan: fn(&Resources, &Bindings, &State, Option<&FleetRights>) -> Plan,
    rights: Option<&FleetRights>,
) -> Option<Goal> {
    let (resources, bindings) = definition.read().ok()?;
    let plan = plan(&resources, &bindings, state, rights);
    Some(Goal { resources, bindings, plan })
}

/// Returns the wave of calls; `None` if they only ask about work under way.
fn wave_of(calls: &[Call]) -> Option<usize> {
    calls.iter().find_map(|call| match call {
        Call::Provision(call) => Some(call.wave),
        Call::Status(_) => None,
    })
}

fn describe(failures: &[Failure]) -> String {
    let each = failures.iter().map(|one| format!("{}: {}: {}", one.id, one.provisioner, one.error));
    each.collect::<Vec<_>>().join("; ")
}

/// The state, which is checked when it is read.
mod checked_state {
    use serde::de::Error as _;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    use crate::state::State;

    pub fn serialize<S: Serializer>(state: &Option<State>, to: S) -> Result<S::Ok, S::Error> {
        state.serialize(to)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<State>, D::Error> {
        let value = Option::<serde_json::Value>::deserialize(from)?;
        let parse = |value: serde_json::Value| {
            State::parse(&value.to_string()).map_err(|error| D::Error::custom(error.to_string()))
        };
        value.map(parse).transpose()
    }
}
