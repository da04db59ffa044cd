//! Former bundles that stay beside a newer one of their environment, because other environments
//! require what they provide; and rollouts that take them away.

use std::collections::BTreeMap;
use std::sync::Arc;

use model::image::ImageName;
use model::tree::Time;
use provisioning::version::{Range, Version};
use serde::{Deserialize, Serialize};

use super::{Editor, EnvironmentState, StartOrder, State, StoredRevision};
use crate::dependencies::Dependencies;
use crate::document::{Kept, Kind, Revision, Scan};
use crate::gate::pending;

/// The author of revisions that take former bundles away.
pub const CLEANUP_AUTHOR: &str = "cleanup";

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
    /// Notes which former bundles stay beside a revision that no machine has yet.
    pub(crate) fn note_kept(&mut self, name: &str, revision: Revision) {
        let kept = self.kept_beside(name, revision);
        let Some(environment) = self.environments.get_mut(name) else { return };
        if environment.revisions.get(&revision).is_some_and(|stored| stored.kept != kept)
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
        let former = committed.and_then(|one| KeptBundle::of(environment.committed, one));
        let before = committed.into_iter().flat_map(|one| one.kept.iter().cloned());
        let is_other = |one: &KeptBundle| Some(&one.image) != stored.definition.source.image();
        let candidates: Vec<KeptBundle> =
            former.into_iter().chain(before).filter(is_other).collect();
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

    /// Returns what environments that depend on `name` require: in the revisions that their
    /// machines have, also of one that is not active, and in those that they get.
    fn required_of(&self, name: &str) -> Vec<(&String, &Range)> {
        let document = self.document(None);
        let dependencies = Dependencies::of(&document);
        let coming = pending(self);
        let mut required = Vec::new();
        for dependant in dependencies.dependants(name) {
            let Some((dependant, one)) = self.environments.get_key_value(dependant) else {
                continue;
            };
            let in_use = one.moved.values().chain([&one.committed]);
            for number in in_use.chain(coming.get(dependant.as_str())) {
                let stored = one.revisions.get(number);
                required.extend(stored.into_iter().flat_map(|one| &one.definition.requires));
            }
        }
        required
    }

    /// Starts rollouts that take away former bundles which nothing requires any more. They come
    /// after those that may still need them.
    pub(crate) fn start_cleanups(&mut self, now: Time) {
        let names: Vec<String> = self.environments.keys().cloned().collect();
        for name in &names {
            if !self.has_kept_in_vain(name) {
                continue;
            }
            let mut next = self.clone();
            let Some(environment) = next.environments.get_mut(name) else { continue };
            let environment = Arc::make_mut(environment);
            let Some(stored) = environment.revisions.get(&environment.committed) else { continue };
            let why = "nothing requires what former bundles provide".to_owned();
            let author = CLEANUP_AUTHOR.to_owned();
            let stored = StoredRevision { author, why: why.clone(), at: now, ..stored.clone() };
            let number = environment.newest() + 1;
            environment.revisions.insert(number, stored);
            let environments = vec![format!("{name}@{number}")];
            let (kind, scan) = (Kind::Cleanup, Scan::Plan);
            let order = StartOrder { environments, kind, scan, ..StartOrder::default() };
            let editor = Editor { who: CLEANUP_AUTHOR.to_owned(), why, now };
            if next.start(&order, &editor).is_ok() {
                *self = next;
            }
        }
    }

    /// True if a former bundle can go. A revision that nobody has started yet is to decide itself
    /// what stays beside it.
    fn has_kept_in_vain(&self, name: &str) -> bool {
        let Some(environment) = self.environments.get(name) else { return false };
        let EnvironmentState { committed, active, .. } = **environment;
        let Some(stored) = environment.revisions.get(&committed) else { return false };
        if stored.kept.is_empty() || !active || environment.newest() != committed {
            return false;
        }
        let document = self.document(None);
        let dependencies = Dependencies::of(&document);
        let concerned = |other: &str| {
            other == name || dependencies.dependants(name).any(|dependant| dependant == other)
        };
        let mut changed = self.unfinished().flat_map(|record| record.rollout.environments());
        !changed.any(|other| concerned(&other)) && self.kept_beside(name, committed) != stored.kept
    }
}
