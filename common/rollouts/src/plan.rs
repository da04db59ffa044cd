//! What a step would change on machines, and whether it may.

use std::collections::{BTreeMap, BTreeSet};

use model::JsonSchema;
use model::display::utc;
use model::image::ImageName;
use model::json::canonical;
use model::mdb::Machine;
use model::object::{Algorithm, ObjectId};
use model::tree::Time;
use serde::{Deserialize, Serialize};

use crate::definition::Subject;
use crate::document::{Revision, Rollout, Step, StepState};
use crate::gate::{Gate, Gated, pending};
use crate::state::{SharedMachines, State, StoredRevision};
use crate::view::View;

/// How many hosts of a class are named.
const NAMED_MAX: usize = 5;

/// A change that a step makes to machines.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Class {
    /// The images; empty for none.
    pub from: String,
    pub to: String,
    pub machines: u32,
    /// Some of their host names.
    pub hosts: Vec<String>,
}

/// What a step would do.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct StepPlan {
    pub environment: String,
    pub revision: Revision,
    pub from: Revision,
    pub classes: Vec<Class>,
    /// Images whose digests are not known yet.
    pub unknown_images: BTreeSet<String>,
    /// What votes are for; empty while images are not known.
    pub digest: String,
}

impl StepPlan {
    /// True if no machine changes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.classes.is_empty()
    }
}

/// Returns what it would do to bring `revision` of `environment` to its machines. The digest
/// covers the revision, the images, and which changes there are; not the machines.
#[must_use]
pub fn plan(
    state: &State,
    mdb: &SharedMachines,
    environment: &str,
    revision: Revision,
    digest: impl Fn(&str) -> Option<ObjectId>,
) -> StepPlan {
    let mut classes: BTreeMap<(String, String), Class> = BTreeMap::new();
    let committed = state.environments.get(environment).map_or(0, |one| one.committed);
    let gate = Gate::new(state);
    for machine in mdb.values() {
        let Some((from, to)) = change(state, &gate, environment, revision, machine) else {
            continue;
        };
        if from == to {
            continue;
        }
        let class = Class { from: from.clone(), to: to.clone(), machines: 0, hosts: Vec::new() };
        let class = classes.entry((from, to)).or_insert(class);
        class.machines += 1;
        if class.hosts.len() < NAMED_MAX {
            class.hosts.push(machine.hostname.clone());
        }
    }
    let subject = state.environments.get(environment).and_then(|one| one.subject());
    let images: BTreeSet<String> = match subject {
        Some(Subject::Content) => BTreeSet::new(),
        _ => classes.keys().flat_map(|(_, to)| parts_of(to)).collect(),
    };
    let unknown: BTreeSet<String> =
        images.iter().filter(|image| digest(image).is_none()).cloned().collect();
    let digests: BTreeMap<&str, Option<String>> = images
        .iter()
        .map(|image| (image.as_str(), digest(image).map(|id| id.to_string())))
        .collect();
    let covered = serde_json::json!({
        "environment": environment,
        "revision": revision,
        "images": digests,
        "changes": classes.keys().collect::<Vec<_>>(),
    });
    let text = canonical(&covered);
    let digest = if unknown.is_empty() {
        let hex = Algorithm::Blake3.digest(text.as_bytes()).to_string();
        hex.rsplit(':').next().unwrap_or_default().chars().take(16).collect()
    } else {
        String::new()
    };
    StepPlan {
        environment: environment.to_owned(),
        revision,
        from: committed,
        classes: classes.into_values().collect(),
        unknown_images: unknown,
        digest,
    }
}

/// Returns the images that a name, which may be empty, is composed of.
pub(crate) fn parts_of(image: &str) -> Vec<String> {
    let image = ImageName::new(image).ok();
    let parts = image.iter().flat_map(ImageName::parts);
    parts.filter(|part| !part.is_nothing()).map(String::from).collect()
}

/// Returns the image of a machine now, and with `revision`; of an environment with bundles the
/// bundle, of one with content the content revision. `None` if the environment does not concern it.
pub(crate) fn change(
    state: &State,
    gate: &Gate<'_>,
    environment: &str,
    revision: Revision,
    machine: &Machine,
) -> Option<(String, String)> {
    let one = state.environments.get(environment)?;
    let new = one.revisions.get(&revision);
    let new = new.filter(|new| new.definition.select.selects(machine));
    let old = one.revision_on(machine);
    if new.is_none() && old.is_none() {
        return None;
    }
    if one.subject() == Some(Subject::Content) {
        let text = |stored: &StoredRevision| stored.content_text().unwrap_or_default();
        let old = old.map(|(_, old)| old);
        let (from, to) = (old.map(text).unwrap_or_default(), new.map(text).unwrap_or_default());
        let is_other = old.and_then(|old| old.content) != new.and_then(|new| new.content);
        let to = if from == to && is_other { format!("{to}, numbered anew") } else { to };
        return Some((from, to));
    }
    let image = |stored: &StoredRevision| stored.image_of(&machine.hostname).into_owned();
    if one.has_bundles() {
        let from = old.map(|(_, old)| image(old)).unwrap_or_default();
        return Some((from, new.map(image).unwrap_or_default()));
    }
    let now = gate.gated(machine).and_then(|gated| gated.base);
    // Another environment applies.
    let order_of = |name: &str| {
        state.environments.get(name).map(|other| (other.place_of_image(), name.to_owned()))
    };
    let is_other = now.as_ref().is_some_and(|base| {
        base.environment != environment && order_of(&base.environment) < order_of(environment)
    });
    if is_other {
        return None;
    }
    let of_mdb = || machine.required_image.clone();
    Some((now.map_or_else(of_mdb, |base| base.image), new.map_or_else(of_mdb, image)))
}

/// Refuses a step by which machines would lose a bundle that does not fit any more, or not get it.
fn check_bundles(
    (state, mdb): (&State, &SharedMachines),
    view: &impl View,
    environment: &str,
    revision: Revision,
) -> Result<(), Obstacle> {
    let gate = Gate::new(state);
    // What other rollouts are about to bring counts too.
    let mut ahead = pending(state);
    ahead.insert(environment, revision);
    let next = Gate::ahead(state, ahead);
    let concerned =
        mdb.values().filter(|one| change(state, &gate, environment, revision, one).is_some());
    let mut hosts: BTreeMap<(String, String), &String> = BTreeMap::new();
    for machine in concerned {
        let of_mdb = || Gated { image: machine.required_image.clone(), ..Gated::default() };
        let [before, after] = [&gate, &next].map(|gate| gate.gated(machine).unwrap_or_else(of_mdb));
        let has_bundles = |name: &&String| state.environments[*name].has_bundles();
        let mut lost = after.conflicts.iter().filter(has_bundles);
        if let Some(lost) = lost.find(|name| !before.conflicts.contains(name)) {
            let text = format!("{} would have too many bundles: without {lost}", machine.hostname);
            return Err(Obstacle::Refused(text));
        }
        hosts.entry((before.image, after.image)).or_insert(&machine.hostname);
    }
    for ((from, to), host) in hosts {
        // The image of a machine may be missing: that must not hold up all others.
        let (Some(before), Some(after)) = (view.left_out(&from), view.left_out(&to)) else {
            continue;
        };
        let lost = after.iter().find(|(bundle, _)| !before.contains_key(*bundle));
        if let Some((bundle, why)) = lost {
            let text = format!("{host} cannot have {bundle} in {to}: {why}");
            return Err(Obstacle::Refused(text));
        }
    }
    Ok(())
}

/// Why a plan is not carried out.
pub(crate) enum Obstacle {
    /// Not yet.
    Waits(String),
    Refused(String),
}

/// Checks that the images of a plan may be brought to its machines. What goes back was there
/// before.
pub(crate) fn check_plan(
    (state, mdb): (&State, &SharedMachines),
    view: &impl View,
    rollout: &Rollout,
    step: &Step,
    plan: &StepPlan,
    now: Time,
) -> Result<(), Obstacle> {
    let environment = state.environments.get(&step.environment);
    let revision = environment.and_then(|one| one.revisions.get(&step.revision?));
    let Some(revision) = revision.filter(|_| !rollout.goes_back(step)) else { return Ok(()) };
    if let Some(server) = revision.definition.source.content() {
        let why = revision.replaced_content(view);
        let is_known = view.newest_content(server).is_some();
        let waits = || Obstacle::Waits(format!("{server} has not told its content revision yet"));
        return match why {
            Some(why) => Err(Obstacle::Refused(why)),
            None if is_known => Ok(()),
            None => Err(waits()),
        };
    }
    let strategy = &revision.definition.strategy;
    let from = &strategy.requires_from;
    // Machines that leave the environment get what others say.
    let classes = || plan.classes.iter().filter(|class| revision.has_image(&class.to));
    let new = |class: &Class| {
        let has = parts_of(&class.from);
        parts_of(&class.to).into_iter().filter(move |image| !has.contains(image))
    };
    // The first part is the one that is followed; others stay beside it.
    let is_known = |class: &Class| {
        let has = parts_of(&class.from).into_iter().next();
        from.is_empty()
            || new(class).next().is_none()
            || has.is_none_or(|has| from.iter().any(|image| image.as_str() == has))
    };
    if let Some(class) = classes().find(|class| !is_known(class)) {
        let Class { from: has, to, hosts, .. } = class;
        let named = from.iter().map(ImageName::as_str).collect::<Vec<_>>().join(", ");
        return Err(Obstacle::Refused(format!(
            "{} has {has}, and {to} may only follow {named}: see requires_from of the strategy",
            hosts.join(", ")
        )));
    }
    let images: BTreeSet<String> = classes().flat_map(new).collect();
    for image in &images {
        let not_known = || Obstacle::Waits(not_given(BTreeSet::from([image.clone()])));
        let notes = view.notes(image).ok_or_else(not_known)?;
        if let Some(why) = notes.deprecated.filter(|_| !rollout.allow_deprecated) {
            let text = format!("{image} {why}; a start with --allow-deprecated brings it");
            return Err(Obstacle::Refused(text));
        }
        let least = i64::try_from(strategy.min_image_age_s).unwrap_or(i64::MAX);
        let seconds = notes.uploaded.seconds.saturating_add(least);
        if now.seconds < seconds && !rollout.urgent {
            let from = utc(Time { seconds, nanoseconds: 0 });
            return Err(Obstacle::Waits(format!("{image} is too new: it is taken from {from}")));
        }
    }
    match step.state {
        StepState::Planning => check_bundles((state, mdb), view, &step.environment, plan.revision),
        _ => Ok(()),
    }
}

pub(crate) fn not_given(images: BTreeSet<String>) -> String {
    let images = images.into_iter().collect::<Vec<_>>().join(", ");
    format!("the image server has not given {images} yet")
}
