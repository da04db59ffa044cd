//! Which versions environments require of each other.

use std::collections::BTreeMap;

use provisioning::version::{Range, Version};
use serde::Serialize;

use crate::dependencies::Dependencies;
use crate::document::{Document, Environment, Kind, Revision, Rollout, RolloutState};

/// One thing that an environment requires of another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Edge {
    pub from: String,
    pub to: String,
    pub name: String,
    pub requires: Range,
    pub provides: Option<Version>,
    /// True if it is met when the rollout has ended.
    pub holds: bool,
    /// True if it is met by an old revision that stays beside the new one.
    pub by_kept: bool,
}

/// An old revision that nothing requires any more.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Cleanup {
    pub environment: String,
    pub revision: Revision,
    /// Rollouts that are queued and may still need it: it comes after them.
    pub after: Vec<String>,
}

/// Returns what active environments require, and whether it is met when `rollout` has ended.
#[must_use]
pub fn edges(
    document: &Document,
    dependencies: &Dependencies<'_>,
    rollout: Option<&Rollout>,
) -> Vec<Edge> {
    let mut edges = Vec::new();
    for dependant in document.environments.iter().filter(|one| one.active) {
        let requires = after(rollout, dependant).requires();
        for to in dependencies.direct(&dependant.name) {
            let Some(provider) = document.environment(to) else { continue };
            let view = after(rollout, provider);
            for (name, range) in requires {
                let provided = view.provides().get(name);
                let by_kept = view
                    .kept()
                    .any(|version| version.get(name).is_some_and(|version| range.fits(version)));
                let fits = provided.is_some_and(|version| range.fits(version));
                if provided.is_none() && !by_kept {
                    // Another of its dependencies may provide it.
                    continue;
                }
                edges.push(Edge {
                    from: dependant.name.clone(),
                    to: to.to_owned(),
                    name: name.clone(),
                    requires: range.clone(),
                    provides: provided.cloned(),
                    holds: fits || by_kept,
                    by_kept: by_kept && !fits,
                });
            }
        }
        edges.extend(missing(dependant, requires, &edges));
    }
    edges
}

/// Returns an edge to nothing for each thing that no dependency provides.
fn missing(
    dependant: &Environment,
    requires: &BTreeMap<String, Range>,
    edges: &[Edge],
) -> Vec<Edge> {
    let is_there =
        |name: &String| edges.iter().any(|edge| edge.from == dependant.name && edge.name == *name);
    let missing = requires.iter().filter(|(name, _)| !is_there(name));
    let edge = |(name, range): (&String, &Range)| Edge {
        from: dependant.name.clone(),
        to: String::new(),
        name: name.clone(),
        requires: range.clone(),
        provides: None,
        holds: false,
        by_kept: false,
    };
    missing.map(edge).collect()
}

/// Returns the old revisions that no active environment requires any more.
#[must_use]
pub fn cleanups(document: &Document, edges: &[Edge]) -> Vec<Cleanup> {
    let mut cleanups = Vec::new();
    for environment in &document.environments {
        let is_needed = edges.iter().any(|edge| edge.to == environment.name && edge.by_kept);
        if is_needed {
            continue;
        }
        let waiting = document.others.iter().filter(|other| {
            other.state == RolloutState::Pending
                && other.kind != Kind::Cleanup
                && other.environments.contains(&environment.name)
        });
        let after: Vec<String> = waiting.map(|other| other.id.clone()).collect();
        cleanups.extend(environment.kept.iter().map(|kept| Cleanup {
            environment: environment.name.clone(),
            revision: kept.revision,
            after: after.clone(),
        }));
    }
    cleanups
}

/// Says which edge a new revision of `environment` breaks.
#[must_use]
pub fn broken(edges: &[Edge], environment: &str) -> Option<String> {
    let concerns = |edge: &&Edge| edge.to == environment || edge.from == environment;
    let edge = edges.iter().find(|edge| !edge.holds && concerns(edge))?;
    let Edge { from, to, name, requires, provides, .. } = edge;
    Some(match provides {
        Some(version) => format!("{from} requires {name} {requires}, and {to} provides {version}"),
        None => format!("{from} requires {name} {requires}, and nothing that it depends on has it"),
    })
}

/// An environment as it is when a rollout has ended.
struct View<'a> {
    environment: &'a Environment,
    is_new: bool,
}

fn after<'a>(rollout: Option<&Rollout>, environment: &'a Environment) -> View<'a> {
    let steps = rollout.into_iter().flat_map(|rollout| &rollout.steps);
    let is_new = steps
        .filter(|step| step.environment == environment.name)
        .any(|step| step.revision == Some(environment.desired))
        || environment.committed == Some(environment.desired);
    View { environment, is_new }
}

impl<'a> View<'a> {
    fn provides(&self) -> &'a BTreeMap<String, Version> {
        let former = self.environment.committed_provides.as_ref().filter(|_| !self.is_new);
        former.unwrap_or(&self.environment.provides)
    }

    fn requires(&self) -> &'a BTreeMap<String, Range> {
        let former = self.environment.committed_requires.as_ref().filter(|_| !self.is_new);
        former.unwrap_or(&self.environment.requires)
    }

    /// What revisions beside it provide. A former one stays only if it shares nothing with it.
    fn kept(&self) -> impl Iterator<Item = &'a BTreeMap<String, Version>> {
        let former = self.environment.committed_provides.as_ref();
        let former = former.filter(|_| self.is_new && self.environment.disjoint);
        self.environment.kept.iter().map(|kept| &kept.provides).chain(former)
    }
}
