//! Which environments come after which.

use std::collections::{BTreeMap, BTreeSet};

use model::json::KeyError;
use provisioning::order::order;

use crate::document::{Document, Scan};

/// The environments that each environment depends on directly: those that it names, and those of
/// the groups that its group names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dependencies<'a> {
    direct: BTreeMap<&'a str, BTreeSet<&'a str>>,
}

impl<'a> Dependencies<'a> {
    /// Returns those of all environments.
    #[must_use]
    pub fn of(document: &'a Document) -> Self {
        let of_group = |group: &str| {
            let environments = document.environments.iter();
            let members = environments.filter(move |one| one.group.as_deref() == Some(group));
            members.map(|one| one.name.as_str()).collect::<Vec<_>>()
        };
        let mut direct = BTreeMap::new();
        for environment in &document.environments {
            let mut needed: BTreeSet<&str> =
                environment.depends_on.iter().map(String::as_str).collect();
            let groups = document.groups.iter();
            let group = groups.filter(|group| Some(&group.name) == environment.group.as_ref());
            let before = group.flat_map(|group| &group.depends_on);
            needed.extend(before.flat_map(|group| of_group(group)));
            direct.insert(environment.name.as_str(), needed);
        }
        Self { direct }
    }

    /// Returns what `name` depends on directly.
    pub fn direct(&self, name: &str) -> impl Iterator<Item = &'a str> {
        self.direct.get(name).into_iter().flatten().copied()
    }

    /// Returns what depends on `name` directly.
    pub fn dependants(&self, name: &str) -> impl Iterator<Item = &'a str> {
        self.direct.iter().filter(move |(_, needed)| needed.contains(name)).map(|(name, _)| *name)
    }

    /// Returns `names` and all that depend on them, also through others.
    #[must_use]
    pub fn with_dependants(&self, names: BTreeSet<&'a str>) -> BTreeSet<&'a str> {
        let mut all = names.clone();
        let mut next: Vec<&str> = names.into_iter().collect();
        while let Some(name) = next.pop() {
            next.extend(self.dependants(name).filter(|dependant| all.insert(dependant)));
        }
        all
    }

    /// Returns which of `among` each of `among` depends on, through environments that are not in
    /// `among` too.
    #[must_use]
    pub fn reduced(&self, among: &BTreeSet<&'a str>) -> BTreeMap<&'a str, BTreeSet<&'a str>> {
        let mut reduced = BTreeMap::new();
        for name in among {
            let (mut found, mut seen) = (BTreeSet::new(), BTreeSet::new());
            let mut next: Vec<&str> = self.direct(name).collect();
            while let Some(needed) = next.pop() {
                if among.contains(needed) {
                    found.insert(needed);
                } else if seen.insert(needed) {
                    next.extend(self.direct(needed));
                }
            }
            reduced.insert(*name, found);
        }
        reduced
    }

    /// Returns what each depends on.
    #[must_use]
    pub fn needs(&self) -> BTreeMap<String, Vec<String>> {
        let owned = |needed: &BTreeSet<&str>| needed.iter().map(|&name| name.to_owned()).collect();
        self.direct.iter().map(|(name, needed)| ((*name).to_owned(), owned(needed))).collect()
    }
}

/// Returns an error that names the members if some depend on themselves through others.
pub(crate) fn cycle_of(at: &str, needs: &BTreeMap<String, Vec<String>>) -> Result<(), KeyError> {
    let needs = needs.iter().map(|(name, needed)| (name.as_str(), needed.as_slice()));
    match order(&needs.collect()).cycle {
        Some(cycle) => {
            let members = cycle.members.join(", ");
            Err(KeyError::new(at, format!("these depend on each other: {members}")))
        }
        None => Ok(()),
    }
}

/// Returns the environments that a rollout takes, if `changed` change.
#[must_use]
pub fn scanned<'a>(
    document: &'a Document,
    dependencies: &Dependencies<'a>,
    scan: Scan,
    changed: BTreeSet<&'a str>,
) -> BTreeSet<&'a str> {
    match scan {
        Scan::Graph => dependencies.with_dependants(changed),
        Scan::Plan => {
            let candidates = dependencies.with_dependants(changed);
            let differs = |name: &&str| {
                document.environment(name).is_some_and(|environment| {
                    let revisions_differ = environment.committed != Some(environment.desired);
                    environment.plan_differs.unwrap_or(revisions_differ)
                })
            };
            candidates.into_iter().filter(differs).collect()
        }
    }
}
