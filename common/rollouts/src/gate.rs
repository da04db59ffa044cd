//! Which image each machine must have: that of the machine database, or that of an environment;
//! with the bundles of other environments.
//!
//! Only `RequiredImage` and an empty `PlannedImage` are changed; all else is as in the machine
//! database. A machine in no environment has just the record of the machine database.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use model::image::ImageName;
use model::image::composition::PARTS_MAX;
use model::mdb::Machine;

use crate::definition::Subject;
use crate::document::{Direction, Revision};
use crate::selector_index::SelectorIndex;
use crate::state::{EnvironmentState, SharedMachines, State, StoredRevision};

/// What environments say about a machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Gated {
    /// The environment that gives the machine its image, if one does.
    pub base: Option<Applied>,
    /// Those that give it a bundle, in the order in which these are composed.
    pub bundles: Vec<Applied>,
    /// Those that gate the content of its computed files.
    pub contents: Vec<Applied>,
    /// The required image; empty for none.
    pub image: String,
    /// Other environments that select the machine too, and are not applied.
    pub conflicts: Vec<String>,
}

/// An environment that applies to a machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Applied {
    pub environment: String,
    /// The revision that the machine has.
    pub revision: Revision,
    /// What it gives: an image, which may be empty, or a bundle, with former ones that stay.
    pub image: String,
    /// True if somebody has made the environment inactive.
    pub deactivated: bool,
}

/// What machines get.
#[derive(Clone, Debug)]
pub struct Effective {
    /// The machine database that is in force.
    pub records: SharedMachines,
    /// The inactive parts of the machines that have some, by host name.
    pub inactive: BTreeMap<String, InactiveParts>,
}

/// The images and bundles that a machine has only by environments which somebody has made inactive,
/// each with the name of the environment.
pub type InactiveParts = BTreeMap<ImageName, String>;

impl Gated {
    /// Returns the environments that give the machine its image and bundles.
    pub fn of_image(&self) -> impl Iterator<Item = &Applied> {
        self.base.iter().chain(&self.bundles)
    }

    /// Returns all environments that apply.
    pub fn applied(&self) -> impl Iterator<Item = &Applied> {
        self.of_image().chain(&self.contents)
    }

    /// Returns the name of an image, which may be empty, with the bundles; that of nothing and the
    /// bundles if there is no image.
    #[must_use]
    pub fn composed_with(&self, image: &str) -> String {
        let mut parts = parts_of(image);
        let bundles: Vec<ImageName> =
            self.bundles.iter().flat_map(|one| parts_of(&one.image)).collect();
        if parts.is_empty() && !bundles.is_empty() {
            parts.push(ImageName::nothing());
        }
        for bundle in bundles {
            // The machine database, or another environment, may name it too.
            if !parts.contains(&bundle) {
                parts.push(bundle);
            }
        }
        ImageName::composed(&parts).map_or_else(|_| image.to_owned(), String::from)
    }

    /// Returns the inactive parts. `of_record` is the image that the machine database names.
    fn inactive_parts(&self, of_record: &str) -> InactiveParts {
        let mut inactive = InactiveParts::new();
        for one in self.of_image().filter(|one| one.deactivated) {
            let named = parts_of(&one.image).into_iter();
            inactive.extend(named.map(|part| (part, one.environment.clone())));
        }
        if !inactive.is_empty() {
            let active = self.of_image().filter(|one| !one.deactivated).map(|one| &*one.image);
            let others = active.chain(self.base.is_none().then_some(of_record));
            for part in others.flat_map(parts_of) {
                inactive.remove(&part);
            }
        }
        inactive
    }
}

/// Returns the parts of an image; none if it has no name.
fn parts_of(image: &str) -> Vec<ImageName> {
    ImageName::new(image).iter().flat_map(ImageName::parts).collect()
}

/// Decides about machines, given what is remembered.
#[derive(Debug)]
pub struct Gate<'a> {
    in_use: SelectorIndex<'a, InUse<'a>>,
    /// Revisions that all machines are taken to have, by environment.
    ahead: BTreeMap<&'a str, Revision>,
}

/// A revision that machines may have.
#[derive(Clone, Copy, Debug)]
struct InUse<'a> {
    name: &'a String,
    environment: &'a EnvironmentState,
    number: Revision,
    stored: &'a StoredRevision,
}

impl InUse<'_> {
    fn applied(&self, hostname: &str) -> Applied {
        let (environment, revision) = (self.name.clone(), self.number);
        let image = self.stored.image_of(hostname).into_owned();
        Applied { environment, revision, image, deactivated: self.environment.deactivated }
    }
}

impl<'a> Gate<'a> {
    /// Makes it of what is remembered.
    #[must_use]
    pub fn new(state: &'a State) -> Self {
        Self::ahead(state, BTreeMap::new())
    }

    /// Makes it of what is remembered, as if these revisions, by environment, had come to all
    /// machines.
    #[must_use]
    pub fn ahead(state: &'a State, ahead: BTreeMap<&'a str, Revision>) -> Self {
        let in_use = state.environments.iter().flat_map(|(name, environment)| {
            let numbers: BTreeSet<Revision> = match ahead.get(name.as_str()) {
                Some(&number) => [number].into(),
                None => {
                    environment.moved.values().copied().chain([environment.committed]).collect()
                }
            };
            numbers.into_iter().filter_map(move |number| {
                let stored = environment.revisions.get(&number)?;
                let selector = &stored.definition.select;
                Some((selector, InUse { name, environment, number, stored }))
            })
        });
        let in_use = SelectorIndex::new(in_use.collect::<Vec<_>>());
        Self { in_use, ahead }
    }

    /// Returns what environments say about the machine with this record; `None` if the image of
    /// the machine database applies.
    #[must_use]
    pub fn gated(&self, machine: &Machine) -> Option<Gated> {
        let hostname = &machine.hostname;
        let selecting = self.selecting(machine);
        if selecting.is_empty() {
            return None;
        }
        let subject = |one: &InUse<'_>| one.stored.definition.source.subject();
        let of = |what| selecting.iter().copied().filter(move |one| subject(one) == what);
        let mut bases = Vec::from_iter(of(Subject::Images));
        let mut bundles = Vec::from_iter(of(Subject::Bundles));
        let contents = of(Subject::Content).map(|one| one.applied(hostname)).collect();
        bases.sort_by_key(|one| (one.environment.place_of_image(), one.name));
        bundles.sort_by_key(|one| (one.stored.place_of_bundle(), one.name));
        let mut bases = bases.into_iter();
        let base = bases.next().map(|one| one.applied(hostname));
        let conflicts = bases.map(|one| one.name.clone()).collect();
        let image = base.as_ref().map_or(&machine.required_image, |base| &base.image).clone();
        let gated = Gated { base, bundles: Vec::new(), contents, image, conflicts };
        Some(if bundles.is_empty() { gated } else { with_bundles(gated, &bundles, hostname) })
    }

    /// Returns the revisions that the machine has, in no order.
    fn selecting(&self, machine: &Machine) -> Vec<InUse<'a>> {
        let hostname = &machine.hostname;
        let mut selecting = self.in_use.selecting(machine);
        selecting.retain(|one| {
            let ahead = self.ahead.get(one.name.as_str()).copied();
            let number = ahead.unwrap_or_else(|| one.environment.number_on(hostname));
            // Content is gated whether an environment is active or not.
            let is_content = one.stored.definition.source.subject() == Subject::Content;
            number == one.number && (is_content || one.environment.has(hostname))
        });
        selecting
    }

    /// Returns the revisions that the machine has, as they are stored, in no order.
    pub(crate) fn revisions_of(
        &self,
        machine: &Machine,
    ) -> impl Iterator<Item = &'a StoredRevision> {
        self.selecting(machine).into_iter().map(|one| one.stored)
    }

    /// Returns the environments of which the machine has a revision, in no order.
    pub(crate) fn environments_of(&self, machine: &Machine) -> impl Iterator<Item = &'a String> {
        self.selecting(machine).into_iter().map(|one| one.name)
    }

    /// Returns the image that the machine with this record must have; empty for none.
    #[must_use]
    pub fn image_of(&self, machine: &Machine) -> String {
        self.gated(machine).map_or_else(|| machine.required_image.clone(), |gated| gated.image)
    }
}

/// Adds bundles to the image of a machine.
fn with_bundles(gated: Gated, bundles: &[InUse<'_>], hostname: &str) -> Gated {
    let of_image = ImageName::new(&gated.image).map_or(1, |image| image.parts().count());
    let mut room = PARTS_MAX - of_image;
    let (fitting, surplus): (Vec<_>, Vec<_>) = bundles.iter().partition(|one| {
        let count = 1 + one.stored.kept.len();
        let fits = count <= room;
        room -= if fits { count } else { 0 };
        fits
    });
    let conflicts = surplus.iter().map(|one: &&InUse<'_>| one.name.clone());
    let gated = Gated {
        bundles: fitting.iter().map(|one| one.applied(hostname)).collect(),
        conflicts: gated.conflicts.into_iter().chain(conflicts).collect(),
        ..gated
    };
    Gated { image: gated.composed_with(&gated.image), ..gated }
}

/// Returns what machines get, given the machine database that operators wrote.
#[must_use]
pub fn effective(state: &State, mdb: &SharedMachines) -> Effective {
    if state.environments.is_empty() {
        return Effective { records: mdb.clone(), inactive: BTreeMap::new() };
    }
    let (gate, next) = (Gate::new(state), Gate::ahead(state, pending(state)));
    let mut inactive = BTreeMap::new();
    let record = |(hostname, machine): (&String, &Arc<Machine>)| {
        let gated = gate.gated(machine);
        let parts = gated.as_ref().map(|gated| gated.inactive_parts(&machine.required_image));
        if let Some(parts) = parts.filter(|parts| !parts.is_empty()) {
            inactive.insert(hostname.clone(), parts);
        }
        let required = gated.map_or_else(|| machine.required_image.clone(), |gated| gated.image);
        (hostname.clone(), effective_record(required, &next, machine))
    };
    let records = mdb.iter().map(record).collect();
    Effective { records, inactive }
}

/// Returns the revisions that environments get.
pub(crate) fn pending(state: &State) -> BTreeMap<&str, Revision> {
    let gated = state.unfinished_gated();
    let steps = gated.flat_map(|record| &record.rollout.steps);
    let open =
        steps.filter(|step| step.direction == Direction::Forward && !step.state.is_finished());
    open.filter_map(|step| Some((step.environment.as_str(), step.revision?))).collect()
}

fn effective_record(required: String, next: &Gate<'_>, machine: &Arc<Machine>) -> Arc<Machine> {
    let planned = match machine.planned_image.as_str() {
        "" if next.ahead.is_empty() => String::new(),
        "" => Some(next.image_of(machine)).filter(|next| *next != required).unwrap_or_default(),
        planned => planned.to_owned(),
    };
    if required == machine.required_image && planned == machine.planned_image {
        return Arc::clone(machine);
    }
    Arc::new(Machine {
        required_image: required,
        planned_image: planned,
        ..Machine::clone(machine)
    })
}
