//! Selects machines by names and patterns of hosts, images, locations, tags and statuses.
// tidy: core

use std::collections::{BTreeMap, BTreeSet};

use api::dominator::orders::PATTERNS_MAX;
use api::dominator::{ListSubsRequest, Status};
use globset::{Glob, GlobSet, GlobSetBuilder};
use model::image::composition::split;
use model::mdb::{Machine, is_within};

/// Parses patterns of host names. Returns `None` for an empty list.
pub fn host_patterns(patterns: &[String]) -> Result<Option<GlobSet>, globset::Error> {
    if patterns.is_empty() {
        return Ok(None);
    }
    let mut globs = GlobSetBuilder::new();
    for pattern in patterns {
        globs.add(Glob::new(pattern)?);
    }
    globs.build().map(Some)
}

/// Why names and patterns select no machines.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HostsError {
    #[error("name 1 to {PATTERNS_MAX} machines or patterns")]
    Count,
    #[error("invalid pattern of host names `{pattern}`: {why}")]
    Pattern { pattern: String, why: String },
    #[error("no machine of the machine database is called {pattern}")]
    NoMatch { pattern: String },
}

/// Returns the machines of `known`, sorted, that `hosts` select. A text that is the name of a
/// machine is not used as a pattern. Fails if one of `hosts` is invalid or selects no machine.
pub fn select_hosts<V>(
    hosts: &[String],
    known: &BTreeMap<String, V>,
) -> Result<Vec<String>, HostsError> {
    if hosts.is_empty() || hosts.len() > PATTERNS_MAX {
        return Err(HostsError::Count);
    }
    let mut chosen = BTreeSet::new();
    for pattern in hosts {
        if known.contains_key(pattern) {
            chosen.insert(pattern.clone());
            continue;
        }
        let glob = Glob::new(pattern).map_err(|error| HostsError::Pattern {
            pattern: pattern.clone(),
            why: error.kind().to_string(),
        })?;
        let glob = glob.compile_matcher();
        let mut matching =
            known.keys().filter(|hostname| glob.is_match(hostname.as_str())).peekable();
        if matching.peek().is_none() {
            return Err(HostsError::NoMatch { pattern: pattern.clone() });
        }
        chosen.extend(matching.cloned());
    }
    Ok(chosen.into_iter().collect())
}

/// The parsed filters of a request for machines.
#[derive(Clone, Debug)]
pub struct Selection {
    request: ListSubsRequest,
    hosts: Option<GlobSet>,
}

impl Selection {
    /// Parses the filters. Fails if a pattern of host names is invalid.
    pub fn new(request: ListSubsRequest) -> Result<Self, globset::Error> {
        let hosts = host_patterns(&request.hosts)?;
        Ok(Self { request, hosts })
    }

    /// True if a machine with this status, which must have the image `required`, is selected.
    #[must_use]
    pub fn wants(&self, machine: &Machine, required: Option<&str>, status: Status) -> bool {
        let image = required.unwrap_or(&machine.required_image);
        let within = |wanted: &[String], path: &str| {
            wanted.is_empty() || wanted.iter().any(|wanted| is_within(path, wanted))
        };
        let ListSubsRequest { statuses, images, locations, tags, .. } = &self.request;
        (statuses.is_empty() || statuses.contains(&status))
            && self.hosts.as_ref().is_none_or(|hosts| hosts.is_match(&machine.hostname))
            && split(image).any(|part| within(images, part))
            && within(locations, &machine.location)
            && tags.iter().all(|tag| tag.is_of(machine))
    }
}

#[cfg(test)]
mod tests {
    use api::dominator::TagFilter;

    use super::*;

    fn texts(texts: &[&str]) -> Vec<String> {
        texts.iter().map(|text| (*text).to_owned()).collect()
    }

    #[test]
    fn names_come_before_patterns_and_each_must_mean_a_machine() {
        let known = texts(&["db1", "web*", "web1", "web2"]);
        let known: BTreeMap<String, ()> = known.into_iter().map(|host| (host, ())).collect();
        let hosts = |hosts: &[&str]| select_hosts(&texts(hosts), &known);
        let nobody = |pattern: &str| Err(HostsError::NoMatch { pattern: pattern.to_owned() });
        let chosen = |hosts: &[&str]| Ok(texts(hosts));
        assert_eq!(hosts(&["web1"]), chosen(&["web1"]));
        assert_eq!(hosts(&["web?", "web1", "db1"]), chosen(&["db1", "web*", "web1", "web2"]));
        // It is the name of a machine.
        assert_eq!(hosts(&["web*"]), chosen(&["web*"]));
        assert_eq!(hosts(&["web1", "mail"]), nobody("mail"));
        assert_eq!(hosts(&["mail*"]), nobody("mail*"));
        assert_eq!(hosts(&[]), Err(HostsError::Count));
        assert!(matches!(hosts(&["web["]), Err(HostsError::Pattern { .. })));
    }

    #[test]
    fn no_patterns_are_none_and_each_of_several_is_enough() {
        assert!(host_patterns(&[]).unwrap().is_none());
        assert!(host_patterns(&texts(&["web["])).is_err());
        let patterns = host_patterns(&texts(&["web?", "db[12]", "{mail,dns}"])).unwrap();
        let patterns = patterns.unwrap();
        let table =
            [("web1", true), ("web10", false), ("db2", true), ("db3", false), ("dns", true)];
        for (hostname, expected) in table {
            assert_eq!(patterns.is_match(hostname), expected, "{hostname}");
        }
    }

    #[test]
    fn paths_end_at_slashes() {
        let table = [
            ("nyc", "nyc", true),
            ("nyc/r1", "nyc", true),
            ("/nyc/r1/", "/nyc/", true),
            ("nyc2", "nyc", false),
            ("", "nyc", false),
            ("nyc", "", false),
            ("", "", false),
            ("", "/", false),
        ];
        for (path, wanted, expected) in table {
            assert_eq!(is_within(path, wanted), expected, "{path} in {wanted}");
        }
    }

    #[test]
    fn machines_are_chosen_by_all_that_is_asked_for() {
        let text = r#"[
            {"Hostname": "web1", "RequiredImage": "web/7", "Location": "nyc/r1",
             "Tags": {"tier": "front"}},
            {"Hostname": "web2", "RequiredImage": "/web/8", "Location": "nyc/r2"},
            {"Hostname": "mail", "RequiredImage": "mail/1", "Location": "sfo",
             "Tags": {"tier": "back", "old": ""}},
            {"Hostname": "spare"}]"#;
        let machines = model::mdb::parse(text).unwrap();
        let chosen = |request: ListSubsRequest| -> Vec<String> {
            let selection = Selection::new(request).unwrap();
            let status = |machine: &Machine| match machine.required() {
                Some(_) => Status::Synced,
                None => Status::ImageUndefined,
            };
            let is_chosen = |machine: &&Machine| {
                let required = machine.required().map_or("rescue".to_owned(), String::from);
                selection.wants(machine, Some(&required), status(machine))
            };
            let chosen = machines.values().filter(is_chosen);
            chosen.map(|machine| machine.hostname.clone()).collect()
        };
        let texts = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect();
        let all = ListSubsRequest::default;
        let tag = |name: &str, value: Option<&str>| TagFilter {
            name: name.to_owned(),
            value: value.map(str::to_owned),
        };
        let table: [(ListSubsRequest, &[&str]); 13] = [
            (all(), &["mail", "spare", "web1", "web2"]),
            (ListSubsRequest { statuses: vec![Status::ImageUndefined], ..all() }, &["spare"]),
            (ListSubsRequest { hosts: texts(&["web*"]), ..all() }, &["web1", "web2"]),
            (
                ListSubsRequest { hosts: texts(&["web?", "mail"]), ..all() },
                &["mail", "web1", "web2"],
            ),
            (ListSubsRequest { hosts: texts(&["we"]), ..all() }, &[]),
            (ListSubsRequest { images: texts(&["web"]), ..all() }, &["web1", "web2"]),
            (ListSubsRequest { images: texts(&["/web/8"]), ..all() }, &["web2"]),
            (ListSubsRequest { images: texts(&["rescue"]), ..all() }, &["spare"]),
            (ListSubsRequest { images: texts(&["we", ""]), ..all() }, &[]),
            (
                ListSubsRequest { locations: texts(&["nyc", "sfo/"]), ..all() },
                &["mail", "web1", "web2"],
            ),
            (ListSubsRequest { tags: vec![tag("tier", None)], ..all() }, &["mail", "web1"]),
            (
                ListSubsRequest {
                    tags: vec![tag("tier", Some("back")), tag("old", None)],
                    ..all()
                },
                &["mail"],
            ),
            (
                ListSubsRequest { hosts: texts(&["web*"]), locations: texts(&["nyc/r2"]), ..all() },
                &["web2"],
            ),
        ];
        for (request, expected) in table {
            assert_eq!(chosen(request.clone()), expected, "{request:?}");
        }
        assert!(Selection::new(ListSubsRequest { hosts: texts(&["web["]), ..all() }).is_err());
    }
}
