//! Compares what belongs to two images beside their trees.
// tidy: core

use std::collections::BTreeMap;

use model::image::{ComputedRule, HealthCheck, Image, Package};
use model::signing::ContentSigner;
use model::trigger::Trigger;
use serde::Serialize;

use super::{Ignore, IgnoredPart};
use crate::input_files::{health_check_text, signer_text, triggers};
use crate::packages::printable;

/// What two lists differ in.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ListChange<T> {
    /// What only the first list has, in its order.
    pub removed: Vec<T>,
    /// What only the second list has, in its order.
    pub added: Vec<T>,
}

/// Two values that differ.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ValueChange<T> {
    /// Of the first image.
    pub before: T,
    /// Of the second image.
    pub after: T,
}

/// A package that both images have in different versions.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PackageChange {
    pub name: String,
    /// The version in the first image.
    pub before: String,
    /// The version in the second image.
    pub after: String,
}

/// What two lists of packages differ in.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PackageChanges {
    /// What only the first image has.
    pub removed: Vec<Package>,
    /// What only the second image has.
    pub added: Vec<Package>,
    /// What has another version.
    pub changed: Vec<PackageChange>,
}

/// What differs beside the trees; `None` where nothing does, or it is ignored.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct MetadataChanges {
    /// One of the two is sparse: whether the first is, and the second.
    pub sparse: Option<ValueChange<bool>>,
    /// Lines of the filters. Their order has no meaning, and is not compared.
    pub filter: Option<ListChange<String>>,
    /// Triggers. Their order in the file has no meaning either.
    pub triggers: Option<ListChange<Trigger>>,
    /// Computed files.
    pub computed: Option<ListChange<ComputedRule>>,
    /// The keys that sign the content of computed files.
    pub signers: Option<ListChange<ContentSigner>>,
    /// Health checks.
    pub health_check: Option<ValueChange<Option<HealthCheck>>>,
    /// PackageChanges.
    pub packages: Option<PackageChanges>,
}

impl MetadataChanges {
    /// Compares `before` with `after`.
    pub fn of(before: &Image, after: &Image, ignore: &Ignore) -> Self {
        let mut changes = Self::default();
        let compares = |one: IgnoredPart| !ignore.contains(&one);
        let (old, new) = (&before.content, &after.content);
        if compares(IgnoredPart::Filter) {
            changes.sparse = values(old.is_sparse(), new.is_sparse());
            let (old, new) = (old.filter.as_ref(), new.filter.as_ref());
            let none: &[String] = &[];
            let old = old.map_or(none, |filter| filter.lines());
            changes.filter = lists(old, new.map_or(none, |filter| filter.lines()));
        }
        if compares(IgnoredPart::Triggers) {
            changes.triggers = lists(&old.triggers.0, &new.triggers.0);
        }
        if compares(IgnoredPart::Computed) {
            changes.computed = lists(&old.computed, &new.computed);
            changes.signers = lists(&old.signers, &new.signers);
        }
        if compares(IgnoredPart::Health) {
            changes.health_check = values(old.health_check.clone(), new.health_check.clone());
        }
        if compares(IgnoredPart::Packages) {
            changes.packages = packages(&before.notes.packages, &after.notes.packages);
        }
        changes
    }

    /// Returns true if nothing differs.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Returns the names of the differing parts.
    pub fn sections(&self) -> Vec<&'static str> {
        let all = [
            (self.sparse.is_some() || self.filter.is_some(), "filter"),
            (self.triggers.is_some(), "triggers"),
            (self.computed.is_some() || self.signers.is_some(), "computed files"),
            (self.health_check.is_some(), "health check"),
            (self.packages.is_some(), "packages"),
        ];
        all.into_iter().filter(|(differs, _)| *differs).map(|(_, name)| name).collect()
    }

    /// Describes all differences, one per line.
    pub fn lines(&self) -> Vec<String> {
        let mut lines = Vec::new();
        if let Some(sparse) = &self.sparse {
            let filter_word = |sparse| if sparse { "none (sparse)" } else { "a filter" };
            lines.push(format!(
                "filter: {} to {}",
                filter_word(sparse.before),
                filter_word(sparse.after)
            ));
        }
        push_list_lines(&mut lines, "filter", self.filter.as_ref(), Clone::clone);
        push_list_lines(&mut lines, "trigger", self.triggers.as_ref(), triggers::trigger_text);
        let rule = |rule: &ComputedRule| format!("{} by {}", rule.path, rule.source);
        push_list_lines(&mut lines, "computed file", self.computed.as_ref(), rule);
        push_list_lines(&mut lines, "signer", self.signers.as_ref(), signer_text);
        if let Some(check) = &self.health_check {
            let words = |check: &Option<HealthCheck>| {
                check.as_ref().map_or_else(|| "none".to_owned(), health_check_text)
            };
            let (before, after) = (words(&check.before), words(&check.after));
            lines.push(format!("health check: {before} to {after}"));
        }
        if let Some(packages) = &self.packages {
            let line = |kind, one: &Package| {
                format!("package {kind}: {} {}", printable(&one.name), printable(&one.version))
            };
            lines.extend(packages.removed.iter().map(|one| line("removed", one)));
            lines.extend(packages.added.iter().map(|one| line("added", one)));
            lines.extend(packages.changed.iter().map(|PackageChange { name, before, after }| {
                let [name, before, after] = [name, before, after].map(|text| printable(text));
                format!("package changed: {name} {before} to {after}")
            }));
        }
        lines
    }
}

fn push_list_lines<T>(
    lines: &mut Vec<String>,
    what: &str,
    lists: Option<&ListChange<T>>,
    text: impl Fn(&T) -> String,
) {
    let Some(ListChange { removed, added }) = lists else { return };
    lines.extend(removed.iter().map(|one| format!("{what} removed: {}", text(one))));
    lines.extend(added.iter().map(|one| format!("{what} added: {}", text(one))));
}

fn values<T: PartialEq>(before: T, after: T) -> Option<ValueChange<T>> {
    (before != after).then_some(ValueChange { before, after })
}

fn lists<T: Clone + PartialEq>(before: &[T], after: &[T]) -> Option<ListChange<T>> {
    let without = |these: &[T], those: &[T]| -> Vec<T> {
        these.iter().filter(|one| !those.contains(one)).cloned().collect()
    };
    let lists = ListChange { removed: without(before, after), added: without(after, before) };
    (!lists.removed.is_empty() || !lists.added.is_empty()).then_some(lists)
}

/// Compares packages by name and version, without their sizes. A package that is removed in one
/// version and added in another has changed.
fn packages(before: &[Package], after: &[Package]) -> Option<PackageChanges> {
    let by_key = |packages: &[Package]| -> BTreeMap<(String, String), Package> {
        let key = |one: &Package| (one.name.clone(), one.version.clone());
        packages.iter().map(|one| (key(one), one.clone())).collect()
    };
    let (before, after) = (by_key(before), by_key(after));
    let mut added: Vec<Package> = Vec::new();
    for (key, package) in &after {
        if !before.contains_key(key) {
            added.push(package.clone());
        }
    }
    let mut packages =
        PackageChanges { removed: Vec::new(), added: Vec::new(), changed: Vec::new() };
    for (key, package) in before {
        if after.contains_key(&key) {
            continue;
        }
        match added.iter().position(|one| one.name == package.name) {
            None => packages.removed.push(package),
            Some(at) => packages.changed.push(PackageChange {
                name: package.name,
                before: package.version,
                after: added.remove(at).version,
            }),
        }
    }
    packages.added = added;
    let same = packages.removed.is_empty() && packages.added.is_empty();
    (!same || !packages.changed.is_empty()).then_some(packages)
}

#[cfg(test)]
mod tests {
    use model::filter::Filter;
    use model::image::{Content, FORMAT, ImageName, Notes};
    use model::object::Algorithm;
    use model::trigger::Triggers;

    use super::*;

    fn image(filter: Option<&[&str]>, triggers: &str, packages: &[(&str, &str)]) -> Image {
        let package = |(name, version): &(&str, &str)| Package {
            name: (*name).to_owned(),
            version: (*version).to_owned(),
            size_bytes: 7,
        };
        let content = Content {
            format: FORMAT,
            name: ImageName::new("any").unwrap(),
            root: Algorithm::Blake3.digest(b""),
            filter: filter.map(|lines| Filter::new(lines).unwrap()),
            triggers: Triggers::from_json(triggers).unwrap(),
            computed: Vec::new(),
            health_check: None,
            signers: Vec::new(),
        };
        let packages = packages.iter().map(package).collect();
        Image { content, notes: Notes { packages, ..Notes::default() } }
    }

    #[test]
    fn all_that_belongs_to_an_image_is_compared() {
        let ssh = r#"[{"MatchLines": ["/etc/ssh"], "Service": "ssh"}]"#;
        let reload = r#"[{"MatchLines": ["/etc/ssh"], "Service": "ssh", "DoReload": true}]"#;
        let before = [("bash", "5.1"), ("gone", "1"), ("same", "1"), ("two", "1"), ("two", "2")];
        let mut old = image(Some(&["/a", "/b"]), ssh, &before);
        let after = [("bash", "5.2"), ("new", "1"), ("same", "1"), ("two", "2"), ("two", "3")];
        let mut new = image(Some(&["/c", "/b"]), reload, &after);
        let source = "files:6972".to_owned();
        old.content.computed = vec![ComputedRule { path: "/x".parse().unwrap(), source }];
        new.content.health_check = Some(HealthCheck {
            command: vec!["/bin/true".to_owned()],
            within_seconds: 9,
            undo: false,
        });
        let changes = MetadataChanges::of(&old, &new, &Ignore::new());
        let lines = changes.lines();
        assert_eq!(
            lines,
            [
                "filter removed: /a",
                "filter added: /c",
                "trigger removed: ssh (restart): /etc/ssh",
                "trigger added: ssh (reload): /etc/ssh",
                "computed file removed: /x by files:6972",
                "health check: none to /bin/true, within 9 s, else reported",
                "package removed: gone 1",
                "package added: new 1",
                "package changed: bash 5.1 to 5.2",
                "package changed: two 1 to 3",
            ]
        );
        use IgnoredPart::{Computed, Filter, Health, Packages, Triggers};
        let most = [Computed, Health, Packages, Triggers].into_iter().collect();
        assert_eq!(MetadataChanges::of(&old, &new, &most).sections(), ["filter"]);
        let all = [Computed, Filter, Health, Packages, Triggers].into_iter().collect();
        assert!(MetadataChanges::of(&old, &new, &all).is_empty());
    }

    #[test]
    fn the_order_of_lines_means_nothing_and_sparse_is_no_filter() {
        let (one, two) =
            (image(Some(&["/a", "/b"]), "[]", &[]), image(Some(&["/b", "/a"]), "[]", &[]));
        assert!(MetadataChanges::of(&one, &two, &Ignore::new()).is_empty());
        let (sparse, empty) = (image(None, "[]", &[]), image(Some(&[]), "[]", &[]));
        let lines = MetadataChanges::of(&sparse, &empty, &Ignore::new()).lines();
        assert_eq!(lines, ["filter: none (sparse) to a filter"]);
    }
}
