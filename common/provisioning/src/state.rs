//! What has been provisioned, and what is under way.
//!
//! The state is written before a plugin runs ([`State::begin`]) and after it has answered
//! ([`State::end`]). So a crash leaves either a call that is made again, or a token that is asked
//! about.

use std::collections::{BTreeMap, BTreeSet};

use model::display::counted;
use model::json::KeyError;
use serde::{Deserialize, Serialize};

use crate::binding::Binding;
use crate::plan::{Call, Provision, Status};
use crate::protocol::{Answer, Outcome, Outputs, Request};
use crate::resource::{OnRemoval, Per, Resource, Resources};

/// The version of the state that this release writes, and the only one that it reads.
const VERSION: u32 = 1;

/// How often a plugin may forget the token of a call.
const FORGOTTEN_MAX: u32 = 3;

/// What has been provisioned, and what is under way.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a state")]
pub struct State {
    version: u32,
    /// The scope of keys: the name that the machine had when the state was made.
    machine: String,
    pub(crate) resources: BTreeMap<String, Record>,
    pub(crate) open: Vec<Open>,
}

/// What is known of a resource.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Record {
    /// The provisioner that was asked last, and as whom.
    pub provisioner: String,
    pub user: String,
    /// What was made.
    pub made: Option<Made>,
    /// What is under way, or has failed.
    pub attempt: Option<Attempt>,
}

/// A resource that its plugin has made.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Made {
    pub key: String,
    pub resource: Resource,
    pub outputs: Outputs,
}

/// A call whose end is not known.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Attempt {
    pub key: String,
    pub resource: Resource,
    /// True if the resource is being destroyed.
    pub destroys: bool,
    /// What the plugin has told so far.
    pub outputs: Outputs,
    /// How often the plugin forgot a token of it.
    pub forgotten: u32,
    /// True from then until it is asked again.
    pub is_forgotten: bool,
    /// Why it has failed.
    pub error: Option<String>,
}

/// Work that a plugin does by itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Open {
    pub token: String,
    pub provisioner: String,
    pub user: String,
    pub ids: BTreeSet<String>,
    /// Why nothing could be learned of it.
    pub error: Option<String>,
}

/// A resource that could not be provisioned.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Failure {
    pub id: String,
    pub provisioner: String,
    /// What the plugin said, or what is wrong with it.
    pub error: String,
}

impl Record {
    /// The resource as it was made, or else as it was asked for.
    pub(crate) fn resource(&self) -> Option<&Resource> {
        let made = self.made.as_ref().map(|made| &made.resource);
        made.or_else(|| self.attempt.as_ref().map(|attempt| &attempt.resource))
    }
}

impl State {
    /// Returns the state in which nothing has been provisioned.
    #[must_use]
    pub fn new(machine: &str) -> Self {
        Self {
            version: VERSION,
            machine: machine.to_owned(),
            resources: BTreeMap::new(),
            open: Vec::new(),
        }
    }

    /// Reads a state.
    ///
    /// # Errors
    ///
    /// [`KeyError`]: it is damaged, or of another release.
    pub fn parse(text: &str) -> Result<Self, KeyError> {
        #[derive(Deserialize)]
        struct Versioned {
            version: u32,
        }
        let of: Versioned = model::json::read_object(text)?;
        if of.version != VERSION {
            let problem = format!(
                "is {}, and this release reads {VERSION}: use the one that wrote it",
                of.version
            );
            return Err(KeyError::new("version", problem));
        }
        let state: Self = model::json::read_object(text)?;
        let named = |(id, record): (&String, &Record)| {
            let made = record.made.iter().map(|made| &made.resource);
            let mut all = made.chain(record.attempt.iter().map(|attempt| &attempt.resource));
            record.resource().is_some() && all.all(|resource| resource.id == *id)
        };
        if !state.resources.iter().all(named) {
            return Err(KeyError::new("resources", "has a resource under the id of another"));
        }
        let under_way =
            |id: &String| state.resources.get(id).is_some_and(|record| record.attempt.is_some());
        if !state.open.iter().flat_map(|open| &open.ids).all(under_way) {
            return Err(KeyError::new("open", "has a token of a resource that is not under way"));
        }
        Ok(state)
    }

    /// Returns the name of the machine that keys are made of.
    #[must_use]
    pub fn machine(&self) -> &str {
        &self.machine
    }

    /// Returns true if the resource is there, or may be.
    #[must_use]
    pub fn knows(&self, id: &str) -> bool {
        self.resources.contains_key(id)
    }

    /// Returns true if the resource was made of the inputs with this digest, and is not being
    /// changed.
    pub(crate) fn is_made_of(&self, id: &str, key: &str) -> bool {
        let record = self.resources.get(id).filter(|record| record.attempt.is_none());
        let made = record.and_then(|record| record.made.as_ref());
        made.is_some_and(|made| made.key == key)
    }

    /// Returns true if a resource that is there, or may be, needs this one.
    pub(crate) fn needs(&self, id: &str) -> bool {
        let all = self.resources.values().filter_map(Record::resource);
        all.flat_map(|resource| &resource.needs).any(|need| need == id)
    }

    /// Returns true if a plugin may work on the resource.
    pub(crate) fn is_live(&self, id: &str) -> bool {
        let attempt = self.resources.get(id).and_then(|record| record.attempt.as_ref());
        attempt.is_some_and(|attempt| attempt.error.is_none())
    }

    /// Returns true if the resource was asked for, and it is not known that this has ended well.
    pub(crate) fn is_under_way(&self, id: &str) -> bool {
        self.resources.get(id).is_some_and(|record| record.attempt.is_some())
    }

    /// Returns the outputs of a resource, and which resource that is.
    #[must_use]
    pub fn outputs(&self, id: &str) -> Option<(&Resource, &Outputs)> {
        let made = self.resources.get(id)?.made.as_ref()?;
        Some((&made.resource, &made.outputs))
    }

    /// Returns the resources that are there or may be, with their provisioners, by id.
    pub fn known(&self) -> impl Iterator<Item = (&str, &str, &Resource)> {
        let known = self.resources.iter();
        known.filter_map(|(id, record)| Some((&**id, &*record.provisioner, record.resource()?)))
    }

    /// Returns a request as people may see it: without outputs that are secret.
    #[must_use]
    pub fn without_secrets(&self, request: &Request) -> Request {
        let mut request = request.clone();
        for want in &mut request.desired {
            for (id, outputs) in &mut want.inputs {
                let plain = self.outputs(id).map(|(of, outputs)| of.plain_outputs(outputs));
                *outputs = plain.unwrap_or_default();
            }
        }
        for old in request.previous.iter_mut().chain(&mut request.unchanged) {
            old.outputs = old.resource.plain_outputs(&old.outputs);
        }
        request
    }

    /// Returns what has failed: calls that need [`State::retry`] before they are made again.
    #[must_use]
    pub fn failures(&self) -> Vec<Failure> {
        let failure = |id: &String, provisioner: &String, error: &String| Failure {
            id: id.clone(),
            provisioner: provisioner.clone(),
            error: error.clone(),
        };
        let attempts = self.resources.iter().filter_map(|(id, record)| {
            let error = record.attempt.as_ref()?.error.as_ref()?;
            Some(failure(id, &record.provisioner, error))
        });
        let open = self.open.iter().flat_map(|open| {
            let of_each =
                |error| open.ids.iter().map(move |id| failure(id, &open.provisioner, error));
            open.error.iter().flat_map(of_each).collect::<Vec<_>>()
        });
        attempts.chain(open).collect()
    }

    /// Returns the resources that a plugin still works on.
    #[must_use]
    pub fn running(&self) -> BTreeSet<String> {
        self.open.iter().flat_map(|open| open.ids.iter().cloned()).collect()
    }

    /// Returns the resources whose last call was cut short: nobody knows how far it came.
    #[must_use]
    pub fn interrupted(&self) -> BTreeSet<String> {
        let running = self.running();
        let is_cut_short = |(id, record): &(&String, &Record)| {
            let attempt = record.attempt.as_ref();
            attempt.is_some_and(|attempt| attempt.error.is_none()) && !running.contains(*id)
        };
        self.resources.iter().filter(is_cut_short).map(|(id, _)| id.clone()).collect()
    }

    /// Takes back the failures of resources that `is_gone` names: nothing waits for these.
    pub fn forgive(&mut self, is_gone: impl Fn(&str) -> bool) {
        let gone = self.resources.iter_mut().filter(|(id, _)| is_gone(id));
        for attempt in gone.filter_map(|(_, record)| record.attempt.as_mut()) {
            (attempt.error, attempt.forgotten) = (None, 0);
        }
    }

    /// Takes back all failures, so that what has failed is asked for again.
    pub fn retry(&mut self) {
        self.forgive(|_| true);
        for open in &mut self.open {
            open.error = None;
        }
    }

    /// Forgets a resource that nothing asks for. False if its plugin works on it: then nothing is
    /// changed.
    pub(crate) fn forget(&mut self, id: &str) -> bool {
        let is_of = |open: &Open| open.ids.contains(id);
        // What failed is asked about again after a retry, so others of the same work need it.
        let has_failed = |open: &Open| open.error.is_some() && open.ids.len() == 1;
        if self.open.iter().any(|open| is_of(open) && !has_failed(open)) {
            return false;
        }
        self.open.retain(|open| !is_of(open));
        self.resources.remove(id);
        true
    }

    /// Notes that a resource of the fleet is there, as another machine has made it. What this one
    /// has made itself, with the same inputs, keeps its secret outputs.
    pub(crate) fn adopt(&mut self, resource: &Resource, outputs: &Outputs, binding: &Binding) {
        let (key, mut outputs) = (resource.key(&self.machine), outputs.clone());
        if let Some(record) = self.resources.get(&resource.id) {
            if record.resource().is_some_and(|one| one.per != Per::Fleet) {
                // It is another one, of this machine, which stays as it is.
                return;
            }
            if let Some(made) = record.made.as_ref().filter(|made| made.key == key) {
                let is_secret = |name: &String| resource.sensitive.contains(name);
                let own = made.outputs.iter().filter(|(name, _)| is_secret(name));
                outputs.extend(own.map(|(name, value)| (name.clone(), value.clone())));
            }
        }
        let made = Made { key, resource: resource.clone(), outputs };
        let record = Record {
            provisioner: binding.name.clone(),
            user: binding.user.clone(),
            made: Some(made),
            attempt: None,
        };
        self.cut_off(&resource.id);
        self.resources.insert(resource.id.clone(), record);
    }

    /// Notes that what is under way for a resource is followed no more: it is asked for again, or
    /// not at all.
    pub(crate) fn cut_off(&mut self, id: &str) {
        for open in &mut self.open {
            open.ids.remove(id);
        }
        self.open.retain(|open| !open.ids.is_empty());
        self.forgive(|one| one == id);
    }

    /// Forgets a resource of the fleet that another machine takes care of.
    pub(crate) fn drop_of_fleet(&mut self, id: &str) {
        let is_of_fleet =
            |record: &Record| record.resource().is_some_and(|one| one.per == Per::Fleet);
        if self.resources.get(id).is_some_and(is_of_fleet) {
            self.cut_off(id);
            self.resources.remove(id);
        }
    }

    /// Lets a resource be destroyed that nothing asks for.
    pub(crate) fn destroy_orphan(&mut self, id: &str) {
        let Some(record) = self.resources.get_mut(id) else { return };
        let made = record.made.iter_mut().map(|made| &mut made.resource);
        let attempt = record.attempt.iter_mut().map(|attempt| &mut attempt.resource);
        made.chain(attempt).for_each(|resource| resource.on_removal = OnRemoval::Destroy);
    }

    /// Has a resource that is as asked for made again, with the same inputs.
    pub(crate) fn make_again(&mut self, id: &str) {
        let Some(record) = self.resources.get_mut(id) else { return };
        if let (Some(made), None) = (&record.made, &record.attempt) {
            record.attempt = Some(Attempt {
                key: made.key.clone(),
                resource: made.resource.clone(),
                destroys: false,
                outputs: Outputs::new(),
                forgotten: 0,
                is_forgotten: false,
                error: None,
            });
        }
    }

    /// Notes that a call is about to be made.
    pub fn begin(&mut self, call: &Call) {
        let Call::Provision(call) = call else { return };
        let wanted =
            call.request.desired.iter().map(|want| (&want.resource, want.key.clone(), false));
        let machine = self.machine.clone();
        let removed = call.removed().map(|old| (old, old.removal_key(&machine), true));
        for (resource, key, destroys) in wanted.chain(removed) {
            let record = self.resources.entry(resource.id.clone()).or_insert_with(|| Record {
                provisioner: String::new(),
                user: String::new(),
                made: None,
                attempt: None,
            });
            call.provisioner.clone_into(&mut record.provisioner);
            call.user.clone_into(&mut record.user);
            let same = record.attempt.as_ref().filter(|attempt| attempt.key == key);
            let forgotten = same.map_or(0, |attempt| attempt.forgotten);
            record.attempt = Some(Attempt {
                key,
                resource: resource.clone(),
                destroys,
                outputs: Outputs::new(),
                forgotten,
                is_forgotten: false,
                error: None,
            });
        }
    }

    /// Notes what a call has led to: an answer, or what is wrong with the plugin.
    pub fn end(&mut self, call: &Call, answer: Result<Answer, String>) {
        match call {
            Call::Provision(provision) => self.end_provision(provision, answer),
            Call::Status(status) => self.end_status(status, answer),
        }
    }

    fn end_provision(&mut self, call: &Provision, answer: Result<Answer, String>) {
        let ids = call.ids();
        let checked = answer.and_then(|answer| answer.check(&ids)).and_then(|tasks| {
            let of_plugin = self.open.iter().filter(|open| open.provisioner == call.provisioner);
            let mut tokens: BTreeSet<&String> = of_plugin.map(|open| &open.token).collect();
            for (_, outcome) in &tasks {
                match outcome {
                    Outcome::Running(token) if !tokens.insert(token) => {
                        return Err("it answered with a token of other work".to_owned());
                    }
                    Outcome::Unknown => {
                        return Err("it answered that it knows no token, and got none".to_owned());
                    }
                    _ => {}
                }
            }
            Ok(tasks)
        });
        match checked {
            Err(error) => ids.iter().for_each(|id| self.fail(id, &error)),
            Ok(tasks) => {
                for (about, outcome) in tasks {
                    self.apply(&call.provisioner, &call.user, &about, outcome);
                }
            }
        }
        ids.iter().for_each(|id| self.complete(id));
    }

    fn end_status(&mut self, call: &Status, answer: Result<Answer, String>) {
        let asked = |open: &Open| open.token == call.token && open.provisioner == call.provisioner;
        let Some(at) = self.open.iter().position(asked) else { return };
        let checked =
            answer.and_then(|answer| answer.check(&call.ids)).and_then(|mut tasks| {
                match (tasks.pop(), tasks.is_empty()) {
                    (Some((_, Outcome::Running(token))), true) if token != call.token => {
                        Err("it answered with another token than it was asked about".to_owned())
                    }
                    (Some((_, outcome)), true) => Ok(outcome),
                    _ => Err("it answered with more than one task".to_owned()),
                }
            });
        match checked {
            Err(error) => self.open[at].error = Some(error),
            Ok(Outcome::Running(_)) => self.open[at].error = None,
            Ok(outcome) => {
                let open = self.open.remove(at);
                self.apply(&open.provisioner, &open.user, &open.ids, outcome);
                open.ids.iter().for_each(|id| self.complete(id));
            }
        }
    }

    fn apply(&mut self, provisioner: &str, user: &str, ids: &BTreeSet<String>, outcome: Outcome) {
        match outcome {
            Outcome::Running(token) => {
                // What was forgotten meanwhile is followed no more.
                let known = ids.iter().filter(|id| self.is_under_way(id));
                let ids: BTreeSet<String> = known.cloned().collect();
                if !ids.is_empty() {
                    let (provisioner, user) = (provisioner.to_owned(), user.to_owned());
                    self.open.push(Open { token, provisioner, user, ids, error: None });
                }
            }
            Outcome::Success(outputs) => {
                for (id, outputs) in outputs {
                    if let Some(attempt) = self.attempt(&id) {
                        attempt.outputs.extend(outputs);
                    }
                }
            }
            Outcome::Failed(error) => ids.iter().for_each(|id| self.fail(id, &error)),
            Outcome::Unknown => {
                for id in ids {
                    let Some(attempt) = self.attempt(id) else { continue };
                    (attempt.forgotten, attempt.is_forgotten) = (attempt.forgotten + 1, true);
                    if attempt.forgotten >= FORGOTTEN_MAX {
                        let times = counted(FORGOTTEN_MAX.into(), "time");
                        self.fail(id, &format!("it forgot its token {times}"));
                    }
                }
            }
        }
    }

    fn attempt(&mut self, id: &str) -> Option<&mut Attempt> {
        self.resources.get_mut(id)?.attempt.as_mut()
    }

    fn fail(&mut self, id: &str, error: &str) {
        if let Some(attempt) = self.attempt(id) {
            attempt.error = Some(error.to_owned());
        }
    }

    /// Ends the attempt of a resource of which nothing is under way and nothing has failed.
    fn complete(&mut self, id: &str) {
        if self.open.iter().any(|open| open.ids.contains(id)) {
            return;
        }
        let Some(record) = self.resources.get_mut(id) else { return };
        let ended = |attempt: &mut Attempt| attempt.error.is_none() && !attempt.is_forgotten;
        let Some(attempt) = record.attempt.take_if(ended) else { return };
        if attempt.destroys {
            self.resources.remove(id);
        } else {
            let Attempt { key, resource, outputs, .. } = attempt;
            record.made = Some(Made { key, resource, outputs });
        }
    }

    /// Takes over what files say of resources that are as asked for, but for what is no input.
    pub fn settle(&mut self, resources: &Resources) {
        for resource in resources.iter() {
            let key = resource.key(&self.machine);
            let Some(record) = self.resources.get_mut(&resource.id) else { continue };
            if let (Some(made), None) = (&mut record.made, &record.attempt)
                && made.key == key
            {
                made.resource = resource.clone();
            }
        }
    }
}
