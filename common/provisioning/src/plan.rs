//! Decides which plugins are called next, with what.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use crate::binding::{Binding, Bindings};
use crate::order::{Cycle, Needs, order};
use crate::protocol::{Desired, Outputs, Previous, Request};
use crate::resource::{OnRemoval, Per, Resource, Resources, digest};
use crate::state::{Open, Record, State};
use crate::version::Range;

/// The name of the binding file, in problems.
const BINDINGS_FILE: &str = "provisioners.toml";

/// What is to be done, and why it cannot be.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// The ids of all resources, in the order in which they are provisioned.
    pub waves: Vec<Vec<String>>,
    /// The calls, by wave, but for [`Request::unchanged`]. Those that destroy come after the last
    /// wave, in reverse order.
    pub calls: Vec<Provision>,
    /// The resources that are as asked for.
    pub unchanged: Vec<String>,
    /// The resources that nothing asks for any more, and that stay.
    pub orphans: Vec<Orphan>,
    /// The resources that nothing asks for, and that are not to be removed yet.
    pub left: Vec<String>,
    /// The resources that wait for another machine, or for a permit, to be made for the fleet; and
    /// what needs them.
    pub awaited: BTreeSet<String>,
    /// The kinds of resources that no provisioner is bound to.
    pub unbound: Vec<String>,
    /// The kinds that more than one provisioner is bound to.
    pub bound_twice: Vec<String>,
    pub cycle: Option<Cycle>,
    /// Why nothing runs; the three above are among them.
    pub problems: Vec<Problem>,
}

/// Why nothing can be provisioned.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Problem {
    /// The file and its key.
    pub at: String,
    pub error: String,
}

/// A resource that nothing asks for any more, and that stays.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Orphan {
    pub id: String,
    pub kind: String,
    pub provisioner: String,
    pub reason: String,
}

/// A call of a plugin.
#[derive(Clone, Debug, PartialEq)]
pub enum Call {
    Provision(Provision),
    Status(Status),
}

/// A call that changes resources.
#[derive(Clone, Debug, PartialEq)]
pub struct Provision {
    /// Counts waves from 1.
    pub wave: usize,
    pub provisioner: String,
    pub user: String,
    pub request: Request,
}

/// A question about work under way.
#[derive(Clone, Debug, PartialEq)]
pub struct Status {
    pub provisioner: String,
    pub user: String,
    pub ids: BTreeSet<String>,
    pub token: String,
    pub request: Request,
}

/// Which resources of the fleet this machine may make and remove now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FleetRights {
    pub makes: BTreeSet<String>,
    pub removes: BTreeSet<String>,
}

/// What is to be done next.
#[derive(Clone, Debug, PartialEq)]
pub enum Next {
    /// Nothing: [`Plan::problems`] says why.
    Refused,
    /// Nothing, before [`Plan::awaited`] are there.
    Awaits,
    /// These calls, at the same time. Each is to be told to [`State::begin`] and [`State::end`];
    /// then a new plan is made.
    Calls(Vec<Call>),
    /// Nothing more, before [`State::retry`].
    Failed,
    /// Nothing: all is as asked for.
    Finished,
}

impl Provision {
    /// Returns the resources that the call is about.
    #[must_use]
    pub fn ids(&self) -> BTreeSet<String> {
        let wanted = self.request.desired.iter().map(|want| &want.resource.id);
        let ids = wanted.chain(self.request.previous.iter().map(|old| &old.resource.id));
        ids.cloned().collect()
    }

    /// Returns the resources that the call destroys.
    pub(crate) fn removed(&self) -> impl Iterator<Item = &Resource> {
        let is_wanted = |id: &str| self.request.desired.iter().any(|want| want.resource.id == id);
        let mut seen = BTreeSet::new();
        let removed = self.request.previous.iter().map(|old| &old.resource);
        removed.filter(move |old| !is_wanted(&old.id) && seen.insert(&old.id))
    }

    /// Returns true if the call destroys resources.
    #[must_use]
    pub fn destroys(&self) -> bool {
        self.request.desired.is_empty()
    }
}

impl Call {
    /// Returns the name of the provisioner, and who runs its plugin.
    #[must_use]
    pub fn provisioner(&self) -> (&str, &str) {
        match self {
            Self::Provision(call) => (&call.provisioner, &call.user),
            Self::Status(call) => (&call.provisioner, &call.user),
        }
    }

    /// Returns the resources that the call is about.
    #[must_use]
    pub fn ids(&self) -> BTreeSet<String> {
        match self {
            Self::Provision(call) => call.ids(),
            Self::Status(call) => call.ids.clone(),
        }
    }

    /// Returns the standard input of the plugin.
    #[must_use]
    pub fn request(&self) -> &Request {
        match self {
            Self::Provision(call) => &call.request,
            Self::Status(call) => &call.request,
        }
    }
}

/// Compares what files ask for with what there is, on a machine that makes all of it.
#[must_use]
pub fn plan(resources: &Resources, bindings: &Bindings, state: &State) -> Plan {
    plan_with(resources, bindings, state, None)
}

/// As [`plan`], with these rights; all if `None`.
#[must_use]
pub fn plan_with(
    resources: &Resources,
    bindings: &Bindings,
    state: &State,
    rights: Option<&FleetRights>,
) -> Plan {
    let mut plan = plan_without_removal(resources, bindings, state, rights);
    plan.left.clear();
    plan.remove(resources, bindings, state, rights);
    plan
}

/// As [`plan_with`], for a time when nothing is removed: what no file asks for stays as it is.
#[must_use]
pub fn plan_without_removal(
    resources: &Resources,
    bindings: &Bindings,
    state: &State,
    rights: Option<&FleetRights>,
) -> Plan {
    let needs: Needs = resources.iter().map(|one| (one.id.as_str(), &*one.needs)).collect();
    let order = order(&needs);
    let mut plan = Plan { waves: order.waves, cycle: order.cycle, ..Plan::default() };
    plan.find_problems(resources, bindings, state);
    plan.compare(resources, bindings, state, rights);
    let left = state.resources.keys().filter(|id| resources.get(id).is_none());
    plan.left = left.cloned().collect();
    plan
}

impl Plan {
    /// Returns what is to be done next: first work under way is followed to its end, then each wave
    /// is provisioned, then what is to go is destroyed. A failure ends this after the calls of the
    /// same wave.
    #[must_use]
    pub fn next(&self, state: &State) -> Next {
        if !self.problems.is_empty() {
            return Next::Refused;
        }
        let known = state.open.iter().filter(|open| open.error.is_none());
        let questions: Vec<Call> = known.map(|open| Call::Status(status(open, state))).collect();
        if !questions.is_empty() {
            return Next::Calls(questions);
        }
        if !state.failures().is_empty() {
            return Next::Failed;
        }
        let Some(first) = self.calls.first() else {
            return if self.awaited.is_empty() { Next::Finished } else { Next::Awaits };
        };
        let of_wave = self.calls.iter().filter(|call| call.wave == first.wave);
        Next::Calls(of_wave.map(|call| Call::Provision(self.complete(call, state))).collect())
    }

    /// Returns `call`, one of [`Plan::calls`], with its [`Request::unchanged`].
    #[must_use]
    pub fn complete(&self, call: &Provision, state: &State) -> Provision {
        let all = self.unchanged.iter().chain(&self.left).filter(|id| {
            state.resources.get(*id).is_some_and(|one| one.provisioner == call.provisioner)
        });
        let unchanged = all.flat_map(|id| previous(id, None, state)).collect();
        let request = Request { unchanged, ..call.request.clone() };
        Provision { request, ..call.clone() }
    }

    fn problem(&mut self, at: String, error: impl Into<String>) {
        self.problems.push(Problem { at, error: error.into() });
    }

    fn find_problems(&mut self, resources: &Resources, bindings: &Bindings, state: &State) {
        for (kind, names) in bindings.bound_twice() {
            self.bound_twice.push(kind.to_owned());
            let error = format!("the kind `{kind}` is bound to {}", names.join(" and to "));
            self.problem(format!("{BINDINGS_FILE}: provisioner"), error);
        }
        if let Some(Cycle { members, dependants }) = self.cycle.clone() {
            let mut error = format!("these need each other: {}", members.join(", "));
            if !dependants.is_empty() {
                error.push_str(&format!("; and these need them: {}", dependants.join(", ")));
            }
            let at = format!("{}: needs", members.first().map_or("", |id| resources.file(id)));
            self.problem(at, error);
        }
        for resource in resources.iter() {
            let at = |key: &str| format!("{}: {key}", resources.file(&resource.id));
            if let Some(error) = kind_problem(resource, bindings, state) {
                self.problem(at("kind"), error);
            }
            let former = state.resources.get(&resource.id).and_then(Record::resource);
            if former.is_some_and(|former| former.per != resource.per) {
                let error = "is another than that of the resource which is or may be there: give \
                             the new one another id";
                self.problem(at("per"), error);
            }
            if bindings.of_kind(&resource.kind).is_none() {
                self.unbound.push(resource.kind.clone());
            }
            for need in resource.needs.iter().filter(|need| resources.get(need).is_none()) {
                self.problem(at("needs"), format!("there is no resource `{need}`"));
            }
            for (name, range) in &resource.requires {
                if let Some(error) = requirement_problem(resource, name, range, resources) {
                    self.problem(at(&format!("requires.{name}")), error);
                }
            }
        }
        self.unbound.sort_unstable();
        self.unbound.dedup();
    }

    /// Finds the calls that provision.
    fn compare(
        &mut self,
        resources: &Resources,
        bindings: &Bindings,
        state: &State,
        rights: Option<&FleetRights>,
    ) {
        let under_way = state.running();
        let may_make = |resource: &Resource| match (resource.per, rights) {
            (Per::Fleet, Some(rights)) => rights.makes.contains(&resource.id),
            _ => true,
        };
        for (index, wave) in self.waves.iter().enumerate() {
            let mut changed: BTreeMap<&str, Vec<&Resource>> = BTreeMap::new();
            for resource in wave.iter().filter_map(|id| resources.get(id)) {
                let key = resource.key(state.machine());
                let record = state.resources.get(&resource.id);
                let attempt = record.and_then(|record| record.attempt.as_ref());
                let made = record.and_then(|record| record.made.as_ref());
                if attempt.is_none() && made.is_some_and(|made| made.key == key) {
                    self.unchanged.push(resource.id.clone());
                } else if attempt.is_some_and(|attempt| attempt.key == key)
                    && under_way.contains(&resource.id)
                {
                    // It is followed to its end.
                } else if !may_make(resource)
                    || resource.needs.iter().any(|need| self.awaited.contains(need))
                {
                    self.awaited.insert(resource.id.clone());
                } else if let Some(binding) = bindings.of_kind(&resource.kind) {
                    changed.entry(&binding.name).or_default().push(resource);
                }
            }
            for (name, resources) in changed {
                let previous = resources.iter().flat_map(|one| previous(&one.id, Some(one), state));
                let previous = previous.collect();
                let desired = resources.iter().map(|one| desired(one, state)).collect();
                let user = bindings.of_name(name).map(|binding| binding.user.clone());
                self.calls.push(Provision {
                    wave: index + 1,
                    provisioner: name.to_owned(),
                    user: user.unwrap_or_default(),
                    request: request(desired, previous, state),
                });
            }
        }
        self.unchanged.sort_unstable();
    }

    /// Finds the calls that destroy, and the orphans.
    fn remove(
        &mut self,
        resources: &Resources,
        bindings: &Bindings,
        state: &State,
        rights: Option<&FleetRights>,
    ) {
        let gone = state.resources.iter().filter(|(id, _)| resources.get(id).is_none());
        let gone =
            gone.filter_map(|(id, record)| Some((id.as_str(), (record, record.resource()?))));
        type Gone<'a> = BTreeMap<&'a str, (&'a Record, &'a Resource)>;
        let (gone, left): (Gone<'_>, Gone<'_>) =
            gone.partition(|(id, (_, resource))| match (resource.per, rights) {
                (Per::Fleet, Some(rights)) => rights.removes.contains(*id),
                _ => true,
            });
        self.left.extend(left.keys().map(|id| (*id).to_owned()));
        let needed_by = |id: &str, resource: &'_ Resource| {
            let reason = |need: &String| (need.clone(), format!("{id}, which stays, needs {need}"));
            resource.needs.iter().map(reason).collect::<Vec<_>>()
        };
        let mut kept: BTreeMap<&str, String> = BTreeMap::new();
        let stays = gone.iter().filter(|(_, (_, one))| one.on_removal == OnRemoval::Keep);
        let mut next: Vec<(String, String)> =
            stays.map(|(id, _)| ((*id).to_owned(), "its on_removal is keep".to_owned())).collect();
        next.extend(left.iter().flat_map(|(id, (_, resource))| needed_by(id, resource)));
        while let Some((id, reason)) = next.pop() {
            let Some((id, (_, resource))) = gone.get_key_value(id.as_str()) else { continue };
            if kept.insert(id, reason).is_none() {
                next.extend(needed_by(id, resource));
            }
        }
        for (id, reason) in &kept {
            let (record, resource) = gone[id];
            self.orphans.push(Orphan {
                id: (*id).to_owned(),
                kind: resource.kind.clone(),
                provisioner: record.provisioner.clone(),
                reason: reason.clone(),
            });
        }
        let destroyed = gone.iter().filter(|(id, _)| !kept.contains_key(*id));
        let needs: Needs = destroyed.map(|(id, (_, resource))| (*id, &*resource.needs)).collect();
        let order = order(&needs);
        let mut waves = order.waves;
        waves.extend(order.cycle.map(|cycle| [cycle.members, cycle.dependants].concat()));
        let under_way = state.running();
        for (index, wave) in waves.iter().rev().enumerate() {
            let mut by_name: BTreeMap<&str, Vec<Previous>> = BTreeMap::new();
            for id in wave.iter().filter(|id| !under_way.contains(*id)) {
                let name = gone[id.as_str()].0.provisioner.as_str();
                by_name.entry(name).or_default().extend(previous(id, None, state));
            }
            for (name, previous) in by_name {
                let recorded = &gone[previous[0].resource.id.as_str()].0.user;
                let user = bindings.of_name(name).map_or(recorded, |binding| &binding.user);
                self.calls.push(Provision {
                    wave: self.waves.len() + index + 1,
                    provisioner: name.to_owned(),
                    user: user.clone(),
                    request: request(Vec::new(), previous, state),
                });
            }
        }
    }
}

/// Says why a resource of that kind cannot be made.
fn kind_problem(resource: &Resource, bindings: &Bindings, state: &State) -> Option<String> {
    let kind = &resource.kind;
    let Some(binding) = bindings.of_kind(kind) else {
        return Some(format!("no provisioner is bound to the kind `{kind}`"));
    };
    let record = state.resources.get(&resource.id)?;
    let old = record.resource().filter(|old| old.kind != *kind)?;
    (record.provisioner != binding.name).then(|| {
        format!(
            "`{}` is or may be there as a `{}`, of {}: give the new resource another id",
            resource.id, old.kind, record.provisioner
        )
    })
}

/// Says why what is required is not provided: by what the resource needs, if that provides it, or
/// else by any resource.
fn requirement_problem(
    resource: &Resource,
    name: &str,
    range: &Range,
    resources: &Resources,
) -> Option<String> {
    let all = resources.iter().filter_map(|one| Some((&one.id, one.provides.get(name)?)));
    let all: Vec<_> = all.collect();
    let needed = all.iter().copied().filter(|(id, _)| resource.needs.contains(id));
    let needed: Vec<_> = needed.collect();
    let fits = match needed.is_empty() {
        true => all.iter().any(|(_, version)| range.fits(version)),
        false => needed.iter().all(|(_, version)| range.fits(version)),
    };
    let provided = if needed.is_empty() { all } else { needed };
    let provided = provided.iter().map(|(id, version)| format!("{id} provides {version}"));
    let provided: Vec<String> = provided.collect();
    (!fits).then(|| match provided.is_empty() {
        true => format!("nothing provides `{name}`"),
        false => format!("{range} is required, and {}", provided.join(", ")),
    })
}

/// Returns how many resources are created, changed and destroyed: `2 to create, 1 unchanged`.
#[must_use]
pub fn summary(plan: &Plan) -> String {
    let (mut create, mut change, mut destroy) = (0, 0, 0);
    for call in &plan.calls {
        let was = |id: &str| call.request.previous.iter().any(|old| old.resource.id == id);
        let changed = call.request.desired.iter().filter(|want| was(&want.resource.id)).count();
        change += changed;
        create += call.request.desired.len() - changed;
        destroy += call.removed().count();
    }
    let counts = [(create, "create"), (change, "change"), (destroy, "destroy")];
    let counts = counts.iter().filter(|(count, _)| *count > 0);
    let mut parts: Vec<String> = counts.map(|(count, what)| format!("{count} to {what}")).collect();
    parts.push(format!("{} unchanged", plan.unchanged.len()));
    parts.join(", ")
}

/// Returns the calls that ask what plugins would do about resources that are as asked for, by
/// provisioner.
pub(crate) fn questions(
    resources: &Resources,
    bindings: &Bindings,
    unchanged: &[String],
    state: &State,
) -> Vec<Provision> {
    let mut by_binding: BTreeMap<&str, (&Binding, Vec<&Resource>)> = BTreeMap::new();
    for resource in unchanged.iter().filter_map(|id| resources.get(id)) {
        if let Some(binding) = bindings.of_kind(&resource.kind) {
            let (_, asked) = by_binding.entry(&binding.name).or_insert((binding, Vec::new()));
            asked.push(resource);
        }
    }
    let question = |(binding, asked): (&Binding, Vec<&Resource>)| {
        let wanted = asked.iter().map(|one| desired(one, state)).collect();
        let former = asked.iter().flat_map(|one| previous(&one.id, Some(one), state)).collect();
        let others = state.resources.iter().filter(|(id, record)| {
            record.provisioner == binding.name && asked.iter().all(|one| one.id != **id)
        });
        let unchanged = others.flat_map(|(id, _)| previous(id, None, state)).collect();
        let request = Request { unchanged, ..request(wanted, former, state) };
        let (provisioner, user) = (binding.name.clone(), binding.user.clone());
        Provision { wave: 0, provisioner, user, request }
    };
    by_binding.into_values().map(question).collect()
}

fn desired(resource: &Resource, state: &State) -> Desired {
    let inputs = resource.needs.iter().filter_map(|need| {
        let (_, outputs) = state.outputs(need)?;
        Some((need.clone(), outputs.clone()))
    });
    let key = resource.key(state.machine());
    Desired { resource: resource.clone(), key, inputs: inputs.collect() }
}

/// Returns what is there of a resource: as it was made, and as it was asked for since. What is
/// asked for `again` is no former resource.
fn previous(id: &str, again: Option<&Resource>, state: &State) -> Vec<Previous> {
    let Some(record) = state.resources.get(id) else { return Vec::new() };
    let made = record.made.iter().map(|made| Previous {
        resource: made.resource.clone(),
        key: made.key.clone(),
        outputs: made.outputs.clone(),
        finished: true,
    });
    let again = again.map(|resource| resource.key(state.machine()));
    let known = record.made.is_some();
    let attempts = record.attempt.iter().filter(|attempt| match attempt.destroys {
        // What is being destroyed, and was never made, is known from this alone.
        true => !known,
        false => again.as_ref() != Some(&attempt.key),
    });
    let attempted = attempts.map(|attempt| Previous {
        resource: attempt.resource.clone(),
        key: match attempt.destroys {
            true => attempt.resource.key(state.machine()),
            false => attempt.key.clone(),
        },
        outputs: Outputs::new(),
        finished: false,
    });
    made.chain(attempted).collect()
}

fn status(open: &Open, state: &State) -> Status {
    let records = open.ids.iter().filter_map(|id| state.resources.get(id));
    let attempts: Vec<_> = records.filter_map(|record| record.attempt.as_ref()).collect();
    let wanted = attempts.iter().filter(|attempt| !attempt.destroys);
    let wanted: Vec<Desired> = wanted
        .map(|attempt| Desired { key: attempt.key.clone(), ..desired(&attempt.resource, state) })
        .collect();
    let former = attempts.iter().flat_map(|attempt| {
        let again = (!attempt.destroys).then_some(&attempt.resource);
        previous(&attempt.resource.id, again, state)
    });
    let request = request(wanted, former.collect(), state);
    Status {
        provisioner: open.provisioner.clone(),
        user: open.user.clone(),
        ids: open.ids.clone(),
        token: open.token.clone(),
        request: Request { token: Some(open.token.clone()), ..request },
    }
}

/// Makes a request; its key is that of its resource, or the digest of the keys of all.
fn request(desired: Vec<Desired>, previous: Vec<Previous>, state: &State) -> Request {
    let wanted: BTreeSet<&str> = desired.iter().map(|want| want.resource.id.as_str()).collect();
    let removed = previous.iter().filter(|old| !wanted.contains(old.resource.id.as_str()));
    let removed = removed.map(|old| old.resource.removal_key(state.machine()));
    let mut keys: BTreeSet<String> = desired.iter().map(|want| want.key.clone()).collect();
    keys.extend(removed);
    let key = match keys.len() {
        1 => keys.pop_first().unwrap_or_default(),
        _ => digest(&serde_json::json!(keys)),
    };
    Request { token: None, key, desired, previous, unchanged: Vec::new() }
}
