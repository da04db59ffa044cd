//! Which environments a rollout locks.

use std::collections::BTreeSet;

use serde::Serialize;

use crate::dependencies::Dependencies;
use crate::document::{Document, LockMode, Rollout};

/// The lock of a rollout.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Lock {
    /// What it locks.
    pub scope: BTreeSet<String>,
    /// Another rollout that has locked some of that.
    pub holder: Option<String>,
}

/// Returns the lock of `rollout`.
#[must_use]
pub fn lock(document: &Document, dependencies: &Dependencies<'_>, rollout: &Rollout) -> Lock {
    if !rollout.kind.is_gated() {
        return Lock::default();
    }
    let own = rollout.steps.iter().map(|step| step.environment.as_str());
    let scope: BTreeSet<String> = match document.lock {
        LockMode::Global => document.environments.iter().map(|one| one.name.clone()).collect(),
        LockMode::Neighbours => {
            let near = own.flat_map(|name| {
                let neighbours = dependencies.direct(name).chain(dependencies.dependants(name));
                neighbours.map(str::to_owned).chain([name.to_owned()]).collect::<Vec<_>>()
            });
            near.collect()
        }
    };
    let holder = document.others.iter().find(|other| {
        let is_in_the_way =
            document.lock == LockMode::Global || !other.environments.is_disjoint(&scope);
        other.id != rollout.id && other.kind.is_gated() && other.state.holds_lock() && is_in_the_way
    });
    Lock { holder: holder.map(|other| other.id.clone()), scope }
}
