//! All that is remembered of groups, environments and rollouts, and how orders change it.
//!
//! Revision 0 of an environment stands for what the machine database says: machines have it before
//! the first rollout has come to them.

mod automatic;
mod edits;
mod freezes;
mod kept;
mod orders;

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use model::image::ImageName;
use model::mdb::Machine;
use model::tree::Time;
use serde::{Deserialize, Serialize};

use crate::content::ContentRevision;
use crate::definition::{Definition, Subject};
use crate::document::{
    Environment, Group, Kind, LockMode, Other, Revision, Rollout, RolloutState, Step, StepState,
};

pub use edits::{EditOutcome, Editor, Edits};
pub use freezes::{ALL, Freeze};
pub use kept::KeptBundle;
pub use orders::{RolloutOrder, StartOrder};

/// Machines of a machine database, by host name.
pub type SharedMachines = BTreeMap<String, Arc<Machine>>;

/// How many ended rollouts are remembered, and as many of those that follow by themselves from what
/// machines are.
pub const ENDED_MAX: usize = 200;

/// How many of the newest revisions of an environment are remembered, beside those in use.
pub const REVISIONS_MAX: usize = 20;

/// How many rollouts that have not ended one caller may have started.
pub const UNFINISHED_MAX: usize = 50;

/// How many environments there may be, and how many groups.
pub const ENVIRONMENTS_MAX: usize = 2_000;

/// How many of the revisions committed last can be named as the former one.
const FORMER_MAX: usize = 5;

/// All groups, environments and rollouts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct State {
    pub groups: BTreeMap<String, Arc<Group>>,
    pub environments: BTreeMap<String, Arc<EnvironmentState>>,
    /// By number.
    pub rollouts: BTreeMap<u64, Arc<RolloutRecord>>,
    /// By environment, or [`ALL`].
    pub freezes: BTreeMap<String, Arc<Freeze>>,
    /// The machines of active environments, as they were seen last. Not stored: after a restart it
    /// is not known which machines are new.
    pub members: BTreeMap<String, Arc<BTreeSet<String>>>,
}

/// What is remembered of an environment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EnvironmentState {
    pub revisions: BTreeMap<Revision, StoredRevision>,
    /// What its machines have, unless `moved` says otherwise.
    pub committed: Revision,
    /// The revisions that were committed before, the last one at the end.
    pub former: Vec<Revision>,
    /// The highest revision that somebody has started.
    #[serde(default)]
    pub started: Revision,
    /// When a revision came to machines first, as a number that grows with each revision of any
    /// environment that does; 0 if none has, or all were taken back.
    pub order: u64,
    pub active: bool,
    /// True if somebody has made it inactive: it was not only created so.
    #[serde(default)]
    pub deactivated: bool,
    /// While it is not active: the machines that have it; others get nothing.
    pub members: Option<BTreeSet<String>>,
    /// Machines that have another revision than the committed one.
    pub moved: BTreeMap<String, Revision>,
}

/// A revision of an environment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredRevision {
    pub definition: Definition,
    pub author: String,
    pub why: String,
    pub at: Time,
    /// With [`crate::definition::Source::Mdb`]: the image of each machine.
    #[serde(default)]
    pub images: BTreeMap<String, String>,
    /// Former bundles that stay beside its own.
    #[serde(default)]
    pub kept: Vec<KeptBundle>,
    /// With [`crate::definition::Source::Content`]: what the filegen-server has made.
    #[serde(default)]
    pub content: Option<ContentRevision>,
    /// When it came to machines first, as a number like that of the environment.
    #[serde(default)]
    pub order: u64,
}

impl StoredRevision {
    /// Returns the place of the revision among those that give a machine a bundle: of two that
    /// clash the one that came later is left out.
    pub(crate) fn place_of_bundle(&self) -> u64 {
        if self.order == 0 { u64::MAX } else { self.order }
    }

    /// True if some of its machines get this image, or these bundles.
    #[must_use]
    pub fn has_image(&self, image: &str) -> bool {
        match self.definition.source.image() {
            Some(_) => self.image_of("") == image,
            None => self.images.values().any(|own| own == image),
        }
    }

    /// Returns the image of a machine that the revision selects, or its bundles; empty if it has
    /// none.
    #[must_use]
    pub fn image_of(&self, hostname: &str) -> Cow<'_, str> {
        let Some(image) = self.definition.source.image() else {
            return Cow::Borrowed(self.images.get(hostname).map_or("", String::as_str));
        };
        if self.kept.is_empty() {
            return Cow::Borrowed(image.as_str());
        }
        let all = [image].into_iter().chain(self.kept.iter().map(|kept| &kept.image));
        ImageName::composed(all)
            .map_or_else(|_| image.as_str().into(), |all| all.to_string().into())
    }
}

/// What is remembered of a rollout.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RolloutRecord {
    pub number: u64,
    pub rollout: Rollout,
    pub why: String,
    pub created: Time,
    pub ended: Option<Time>,
    /// When each step entered its state.
    pub since: BTreeMap<String, Time>,
    /// When each step began to change machines, if it has.
    #[serde(default)]
    pub began: BTreeMap<String, Time>,
    /// Of one that follows by itself: the machines that are not healthy yet.
    #[serde(default)]
    pub waiting: BTreeSet<String>,
    /// How many there were.
    #[serde(default)]
    pub machines: u32,
}

impl RolloutRecord {
    /// True if a step makes a plan, or changes machines.
    #[must_use]
    pub fn is_under_way(&self) -> bool {
        let is_at_work =
            |step: &Step| step.state == StepState::Planning || step.state.is_on_machines();
        !self.is_ended()
            && self.rollout.kind.is_gated()
            && self.rollout.steps.iter().any(is_at_work)
    }

    /// True if nothing more happens to it.
    #[must_use]
    pub fn is_ended(&self) -> bool {
        !RolloutState::UNFINISHED.contains(&self.rollout.state)
    }
}

impl EnvironmentState {
    /// Returns the number of the newest revision.
    #[must_use]
    pub fn newest(&self) -> Revision {
        self.revisions.keys().next_back().copied().unwrap_or_default()
    }

    /// True if somebody has started this revision or a later one. The first one of
    /// [`crate::definition::Source::Mdb`] is committed without a start.
    pub(crate) fn was_started(&self, revision: Revision) -> bool {
        revision <= self.started.max(self.committed)
    }

    /// True if it adds bundles to the images of machines.
    #[must_use]
    pub fn has_bundles(&self) -> bool {
        self.subject() == Some(Subject::Bundles)
    }

    /// Returns what it is about; `None` without a revision.
    #[must_use]
    pub fn subject(&self) -> Option<Subject> {
        self.definition().map(|definition| definition.source.subject())
    }

    /// Returns the definition of the newest revision.
    #[must_use]
    pub fn definition(&self) -> Option<&Definition> {
        self.revisions.last_key_value().map(|(_, revision)| &revision.definition)
    }

    /// Returns the revision that a machine with this record has, if it is selected by it and is
    /// not one of revision 0.
    #[must_use]
    pub fn revision_on(&self, machine: &Machine) -> Option<(Revision, &StoredRevision)> {
        let number = self.number_on(&machine.hostname);
        let revision = self.revisions.get(&number)?;
        let is_selected =
            self.has(&machine.hostname) && revision.definition.select.selects(machine);
        is_selected.then_some((number, revision))
    }

    /// True unless it is not active, and the machine has joined since then.
    pub(crate) fn has(&self, hostname: &str) -> bool {
        self.members.as_ref().is_none_or(|members| members.contains(hostname))
    }

    /// Returns the number of the revision that a machine has if it is selected.
    #[must_use]
    pub fn number_on(&self, hostname: &str) -> Revision {
        self.moved.get(hostname).copied().unwrap_or(self.committed)
    }

    /// Returns the revisions that machines have or may get again: those in use, the former ones and
    /// the newest.
    pub fn kept_revisions(&self) -> impl Iterator<Item = &StoredRevision> {
        let newest = self.revisions.keys().rev().take(FORMER_MAX).copied();
        let in_use = self.moved.values().chain(&self.former).copied().chain([self.committed]);
        let kept: BTreeSet<Revision> = newest.chain(in_use).collect();
        kept.into_iter().filter_map(|revision| self.revisions.get(&revision))
    }

    /// Returns the place of the environment among those that give a machine its image: the one
    /// that came to machines first applies.
    pub(crate) fn place_of_image(&self) -> u64 {
        if self.order == 0 { u64::MAX } else { self.order }
    }

    /// Notes that a revision comes to machines, as the one with this number unless it came before.
    pub(crate) fn comes(&mut self, revision: Revision, order: u64) {
        let Some(stored) = self.revisions.get_mut(&revision) else { return };
        if stored.order == 0 {
            stored.order = order;
        }
        if self.order == 0 {
            self.order = order;
        }
    }

    /// Makes a revision the committed one, and that of all machines. One by a rollout of `kind`
    /// [`Kind::Cleanup`] takes the place of the one that it cleans up. `order` is its number if it
    /// never came to a machine.
    pub(crate) fn commit(&mut self, revision: Revision, kind: Kind, order: u64) {
        self.comes(revision, order);
        if revision == 0 {
            self.order = 0;
        }
        if kind == Kind::Cleanup {
            // What was there before is still the former one.
        } else if self.former.last() == Some(&revision) {
            self.former.pop();
        } else if revision != self.committed {
            self.former.push(self.committed);
            let surplus = self.former.len().saturating_sub(FORMER_MAX);
            self.former.drain(..surplus);
        }
        self.committed = revision;
        self.moved.clear();
        // While it is not active, it keeps the machines that it has now.
        self.members = None;
        // Others come to machines anew if they come again.
        for (number, stored) in &mut self.revisions {
            if *number != revision && !self.former.contains(number) {
                stored.order = 0;
            }
        }
    }

    /// Returns the environment as decisions see it. `desired` is the revision that a rollout
    /// brings, or the newest one.
    fn decided(&self, name: &str, desired: Revision) -> Environment {
        let revision = self.revisions.get(&desired).or(self.revisions.get(&self.newest()));
        let stored = self.revisions.get(&self.committed);
        let committed = stored.map(|stored| &stored.definition);
        let environment = Environment {
            name: name.to_owned(),
            desired,
            committed: Some(self.committed),
            active: self.active,
            committed_provides: committed.map(|one| one.provides.clone()),
            committed_requires: committed.map(|one| one.requires.clone()),
            ..Environment::default()
        };
        let Some(revision) = revision else { return environment };
        let definition = revision.definition.clone();
        // Nothing stays beside one that is not disjoint.
        let kept = stored.filter(|_| definition.disjoint).into_iter().flat_map(|one| &one.kept);
        Environment {
            kept: kept.map(KeptBundle::decided).collect(),
            group: definition.group,
            depends_on: definition.depends_on,
            author: Some(revision.author.clone()),
            provides: definition.provides,
            requires: definition.requires,
            disjoint: definition.disjoint,
            strategy: definition.strategy,
            approval: definition.approval,
            ..environment
        }
    }
}

impl State {
    /// Returns the rollouts that have not ended, the earliest first.
    pub fn unfinished(&self) -> impl Iterator<Item = &Arc<RolloutRecord>> {
        self.rollouts.values().filter(|record| !record.is_ended())
    }

    /// Returns those of them that change machines.
    pub fn unfinished_gated(&self) -> impl Iterator<Item = &Arc<RolloutRecord>> {
        self.unfinished().filter(|record| record.rollout.kind.is_gated())
    }

    /// Returns those of them that follow by themselves from what machines are.
    pub(crate) fn unfinished_automatic(&self) -> impl Iterator<Item = &Arc<RolloutRecord>> {
        self.unfinished().filter(|record| !record.rollout.kind.is_gated())
    }

    /// Returns the number of the next revision that comes to machines.
    pub(crate) fn next_order(&self) -> u64 {
        let stored = self.environments.values().flat_map(|one| one.revisions.values());
        let of_environments = self.environments.values().map(|one| one.order);
        of_environments.chain(stored.map(|stored| stored.order)).max().unwrap_or_default() + 1
    }

    /// Returns what decisions about `rollout`, or about a new one, depend on, without machines.
    #[must_use]
    pub fn document(&self, rollout: Option<&RolloutRecord>) -> crate::Document {
        let desired = |name: &str| {
            let steps = rollout.iter().flat_map(|record| &record.rollout.steps);
            let mut forward = steps
                .filter(|step| step.environment == name)
                .filter(|step| step.direction == crate::document::Direction::Forward);
            forward.find_map(|step| step.revision)
        };
        let environments = self.environments.iter();
        let environments = environments
            .map(|(name, one)| one.decided(name, desired(name).unwrap_or(one.newest())));
        let others = self
            .unfinished()
            .filter(|other| rollout.is_none_or(|record| record.number != other.number));
        let others = others.map(|record| Other {
            id: record.rollout.id.clone(),
            kind: record.rollout.kind,
            state: record.rollout.state,
            environments: record.rollout.environments(),
        });
        crate::Document {
            groups: self.groups.values().map(|group| Group::clone(group)).collect(),
            environments: environments.collect(),
            lock: LockMode::Neighbours,
            rollout: rollout.map(|record| record.rollout.clone()),
            others: others.collect(),
            ..crate::Document::default()
        }
    }

    /// Forgets the oldest ended rollouts, and revisions that nothing needs.
    pub fn forget_old(&mut self) {
        for is_gated in [true, false] {
            let is_old = |record: &&Arc<RolloutRecord>| {
                record.is_ended() && record.rollout.kind.is_gated() == is_gated
            };
            let ended = self.rollouts.values().filter(is_old);
            let ended: Vec<u64> = ended.map(|record| record.number).collect();
            for number in &ended[..ended.len().saturating_sub(ENDED_MAX)] {
                self.rollouts.remove(number);
            }
        }
        let steps = self.unfinished().flat_map(|record| &record.rollout.steps);
        let used: BTreeSet<(String, Revision)> = steps
            .flat_map(|step| {
                [step.revision, step.from]
                    .into_iter()
                    .flatten()
                    .map(|revision| (step.environment.clone(), revision))
            })
            .collect();
        for (name, environment) in &mut self.environments {
            if environment.revisions.len() <= REVISIONS_MAX {
                continue;
            }
            let surplus = environment.revisions.len() - REVISIONS_MAX;
            let is_needed = |revision: &Revision| {
                *revision == environment.committed
                    || environment.former.contains(revision)
                    || environment.moved.values().any(|moved| moved == revision)
                    || used.contains(&(name.clone(), *revision))
            };
            let old: Vec<Revision> = environment.revisions.keys().take(surplus).copied().collect();
            let old: Vec<Revision> = old.into_iter().filter(|one| !is_needed(one)).collect();
            let environment = Arc::make_mut(environment);
            old.iter().for_each(|revision| drop(environment.revisions.remove(revision)));
        }
    }
}
