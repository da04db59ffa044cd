//! Former bundles that stay beside a newer one of their environment, because other environments
//! require what they provide; and rollouts that take them away.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use model::image::ImageName;
use model::tree::Time;
use provisioning::version::{Range, Version};
use serde::{Deserialize, Serialize};

use super::{Editor, RolloutRecord, StartOrder, State, StoredRevision};
use crate::dependencies::Dependencies;
use crate::document::{Kept, Kind, Revision, Rollout, RolloutState};
use crate::gate::pending;
use crate::lock::lock;
use crate::steps::Said;

/// The author of revisions that take former bundles away.
const CLEANUP_AUTHOR: &str = "cleanup";

/// How the cause of a cleanup begins that was withdrawn.
const GIVES_WAY: &str = "gives way to";

/// A former bundle that stays.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptBundle {
    /// The revision that had it.
    pub revision: Revision,
    pub image: ImageName,
    pub provides: BTreeMap<String, Version>,
}

impl KeptBundle {
    fn of(revision: Revision, stored: &StoredRevision) -> Option<Self> {
        let definition = &stored.definition;
        let image = definition.source.image()?.clone();
        Some(Self { revision, image, provides: definition.provides.clone() })
    }

    /// Returns the bundle as decisions see it.
    pub(super) fn decided(&self) -> Kept {
        Kept { revision: self.revision, provides: self.provides.clone() }
    }
}

fn meets(provides: &BTreeMap<String, Version>, name: &str, range: &Range) -> bool {
    provides.get(name).is_some_and(|version| range.fits(version))
}

impl State {
    /// Notes which former bundles stay beside a revision that machines are to get. Machines that
    /// have it already lose nothing by that.
    pub(crate) fn note_kept(&mut self, name: &str, revision: Revision) {
        let mut kept = self.kept_beside(name, revision);
        let Some(environment) = self.environments.get_mut(name) else { return };
        let Some(stored) = environment.revisions.get(&revision) else { return };
        let is_moved = environment.moved.values().any(|number| *number == revision);
        if is_moved || environment.committed == revision {
            let is_new = |one: &&KeptBundle| !kept.contains(one);
            kept.extend(stored.kept.iter().filter(is_new).cloned().collect::<Vec<_>>());
        }
        if stored.kept != kept
            && let Some(stored) = Arc::make_mut(environment).revisions.get_mut(&revision)
        {
            stored.kept = kept;
        }
    }

    /// Returns the former bundles that stay beside a revision: those that meet what environments
    /// require, or are about to, where the revision does not.
    fn kept_beside(&self, name: &str, revision: Revision) -> Vec<KeptBundle> {
        let Some(environment) = self.environments.get(name) else { return Vec::new() };
        let Some(stored) = environment.revisions.get(&revision) else { return Vec::new() };
        if !stored.definition.disjoint {
            return Vec::new();
        }
        let committed = environment.revisions.get(&environment.committed);
        // What goes back has first what was beside it before.
        let own = Some(stored).filter(|_| revision < environment.committed);
        let former = committed.and_then(|one| KeptBundle::of(environment.committed, one));
        let kept_of = |one: &StoredRevision| one.kept.clone();
        let candidates = own.map(kept_of).into_iter().flatten().chain(former);
        let candidates = candidates.chain(committed.map(kept_of).into_iter().flatten());
        let is_other = |one: &KeptBundle| Some(&one.image) != stored.definition.source.image();
        let candidates: Vec<KeptBundle> = candidates.filter(is_other).collect();
        let mut kept: Vec<KeptBundle> = Vec::new();
        for (required, range) in self.required_of(name) {
            let met = |provides| meets(provides, required, range);
            if met(&stored.definition.provides) || kept.iter().any(|one| met(&one.provides)) {
                continue;
            }
            kept.extend(candidates.iter().find(|one| met(&one.provides)).cloned());
        }
        kept
    }

    /// Returns the revisions that depend on `name`, by environment: those that machines have, also
    /// of an environment that is not active, and those that they get.
    fn dependants_of(&self, name: &str) -> Vec<(&String, &StoredRevision)> {
        let coming = pending(self);
        let group_of = |name: &str| self.environments.get(name)?.definition()?.group.as_ref();
        let own_group = group_of(name);
        let depends = |stored: &&StoredRevision| {
            let definition = &stored.definition;
            let group = definition.group.as_ref().and_then(|group| self.groups.get(group));
            let before = group.into_iter().flat_map(|group| &group.depends_on);
            definition.depends_on.iter().any(|other| other == name)
                || before.into_iter().any(|group| Some(group) == own_group)
        };
        let mut dependants = Vec::new();
        for (other, one) in self.environments.iter().filter(|(other, _)| *other != name) {
            let in_use = one.moved.values().chain([&one.committed]);
            let numbers: BTreeSet<&Revision> = in_use.chain(coming.get(other.as_str())).collect();
            let stored = numbers.into_iter().filter_map(|number| one.revisions.get(number));
            dependants.extend(stored.filter(depends).map(|stored| (other, stored)));
        }
        dependants
    }

    /// Returns what revisions require of `name`.
    fn required_of(&self, name: &str) -> Vec<(&String, &Range)> {
        let dependants = self.dependants_of(name).into_iter();
        dependants.flat_map(|(_, stored)| &stored.definition.requires).collect()
    }

    /// Starts rollouts that take away former bundles which nothing requires any more. They come
    /// after those that may still need them. Returns what happened, for events: the id of the
    /// rollout, or the environment if none can be started, and a sentence.
    pub(crate) fn start_cleanups(&mut self, now: Time) -> Vec<(String, String)> {
        let keeping = self.environments.iter().filter(|(_, one)| {
            let stored = one.revisions.get(&one.committed);
            one.active && stored.is_some_and(|stored| !stored.kept.is_empty())
        });
        let names: Vec<String> = keeping.map(|(name, _)| name.clone()).collect();
        let mut events = Vec::new();
        for name in names {
            if !self.may_clean_up(&name) || !self.has_kept_in_vain(&name) {
                continue;
            }
            match self.started_cleanup(&name, now) {
                Ok((next, id)) => {
                    *self = next;
                    events.push((id, format!("nothing requires former bundles of {name}")));
                }
                Err(said) => {
                    let why = format!("its former bundles cannot be taken away: {}", said.message);
                    events.push((name, why));
                }
            }
        }
        events
    }

    /// Returns the state with a new revision that has no former bundles in vain, and with a rollout
    /// of it, whose id is the second value.
    fn started_cleanup(&self, name: &str, now: Time) -> Result<(Self, String), Said> {
        let mut next = self.clone();
        let missing = || Said::new(404, format!("there is no environment {name}"));
        let environment = Arc::make_mut(next.environments.get_mut(name).ok_or_else(missing)?);
        let stored = environment.revisions.get(&environment.committed).ok_or_else(missing)?;
        let why = "nothing requires what former bundles provide".to_owned();
        let author = CLEANUP_AUTHOR.to_owned();
        let stored = StoredRevision { author, why: why.clone(), at: now, ..stored.clone() };
        // One that was withdrawn is taken again.
        let number = match environment.newest() {
            newest if newest == environment.committed => newest + 1,
            newest => newest,
        };
        environment.revisions.insert(number, stored);
        let environments = vec![format!("{name}@{number}")];
        let order = StartOrder { environments, kind: Kind::Cleanup, ..StartOrder::default() };
        let editor = Editor { who: CLEANUP_AUTHOR.to_owned(), why, now };
        let number = next.start(&order, &editor)?;
        Ok((next, format!("r{number}")))
    }

    /// True if the newest revision is the committed one, or one of a cleanup that was withdrawn.
    /// Any other one decides itself what stays when it is started, and a cleanup that has ended in
    /// another way is not repeated.
    fn may_clean_up(&self, name: &str) -> bool {
        let Some(environment) = self.environments.get(name) else { return false };
        let newest = environment.newest();
        if newest == environment.committed {
            return true;
        }
        let is_of_it = |record: &&Arc<RolloutRecord>| {
            let mut steps = record.rollout.steps.iter();
            steps.any(|step| step.environment == name && step.revision == Some(newest))
        };
        let mut records = self.rollouts.values().filter(is_of_it).peekable();
        records.peek().is_some()
            && records.all(|record| {
                let Rollout { kind, state, cause, .. } = &record.rollout;
                *kind == Kind::Cleanup
                    && *state == RolloutState::Canceled
                    && cause.starts_with(GIVES_WAY)
            })
    }

    /// True if a former bundle of the committed revision can go, and no rollout is under way that
    /// may need it.
    fn has_kept_in_vain(&self, name: &str) -> bool {
        let Some(environment) = self.environments.get(name) else { return false };
        let Some(stored) = environment.revisions.get(&environment.committed) else { return false };
        let dependants = self.dependants_of(name);
        let concerns = |other: &String| {
            other == name || dependants.iter().any(|(dependant, _)| *dependant == other)
        };
        let mut changed = self.unfinished().flat_map(|record| record.rollout.changing());
        if changed.any(|other| concerns(&other)) {
            return false;
        }
        let needed = self.kept_beside(name, environment.committed);
        stored.kept.iter().any(|kept| !needed.contains(kept))
    }

    /// Ends cleanups that have changed nothing yet and would hold up `rollout`: they come again
    /// later. Those of the environments that are `named` are left as they are.
    pub(super) fn withdraw_cleanups(
        &mut self,
        rollout: &Rollout,
        named: &BTreeSet<&str>,
        now: Time,
    ) {
        let cleanups = self.unfinished().filter(|record| {
            let steps = &record.rollout.steps;
            record.rollout.kind == Kind::Cleanup
                && !steps.iter().any(|step| step.applied || named.contains(&*step.environment))
        });
        let cleanups: Vec<Arc<RolloutRecord>> = cleanups.cloned().collect();
        if cleanups.is_empty() {
            return;
        }
        let document = self.document(None);
        let scope = lock(&document, &Dependencies::of(&document), rollout).scope;
        for record in cleanups.iter().filter(|one| !one.rollout.changing().is_disjoint(&scope)) {
            let cause = format!("{GIVES_WAY} {}", rollout.id);
            self.end(record, RolloutState::Canceled, cause, now);
        }
    }
}
