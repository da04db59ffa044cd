//! Merges the data of all sources into one machine database.
//!
//! # Invariants
//!
//! * The last valid data of a source stay in force until it delivers other valid data.
//! * There is no result before every source has delivered data: a missing source is not a source
//!   without machines.
// tidy: core

use std::collections::BTreeSet;

use model::display::error_chain;
use model::mdb::{Machine, Machines, parse};
use model::object::{Algorithm, ObjectId};
use model::tree::Time;

use regex_automata::meta::Regex;

use super::formats::{DataError, Format, check_fields, read, render};

/// How the data of one source are read.
#[derive(Clone, Debug)]
pub struct Rules {
    /// Name of the source.
    pub name: String,
    pub format: Format,
    pub filter: HostFilter,
    /// The fields that it may set; all if `None`.
    pub fields: Option<BTreeSet<String>>,
}

/// Valid data of a source.
#[derive(Clone, Debug)]
struct Accepted {
    /// Digest of the data as delivered.
    digest: ObjectId,
    /// The machines that pass the filter of the source.
    machines: Machines,
    /// What is said of misspelt keys.
    misspelt_keys: Option<String>,
    changed: Time,
}

#[derive(Clone, Debug)]
struct Source {
    rules: Rules,
    accepted: Option<Accepted>,
    succeeded: Option<Time>,
    trouble: Option<Trouble>,
}

/// A failure of a source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trouble {
    /// Time of the first failure in a row.
    pub since: Time,
    /// The last error.
    pub why: String,
}

/// The state of a source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceReport {
    pub name: String,
    /// Number of its machines in force; `None` if it has delivered no data yet.
    pub machines: Option<usize>,
    /// Time of the last successful reading since the start.
    pub succeeded: Option<Time>,
    /// Time when the data in force were delivered first.
    pub changed: Option<Time>,
    /// What is said of misspelt keys of its data in force.
    pub misspelt_keys: Option<String>,
    pub trouble: Option<Trouble>,
}

/// All sources with their data.
#[derive(Clone, Debug)]
pub struct MergedSources {
    sources: Vec<Source>,
    filter: HostFilter,
}

impl MergedSources {
    /// Returns sources without data; `filter` applies to the result.
    #[must_use]
    pub fn new(sources: Vec<Rules>, filter: HostFilter) -> Self {
        let source = |rules| Source { rules, accepted: None, succeeded: None, trouble: None };
        Self { sources: sources.into_iter().map(source).collect(), filter }
    }

    /// Restores the data that source number `index`, from 0, delivered in a former run.
    ///
    /// # Errors
    ///
    /// [`DataError`] if the data are invalid by the current rules; they are then ignored.
    pub fn restore(&mut self, index: usize, bytes: &[u8], changed: Time) -> Result<(), DataError> {
        let source = &mut self.sources[index];
        source.accepted = Some(read_data(&source.rules, bytes, changed)?);
        Ok(())
    }

    /// Accepts new data of source number `index`, from 0; returns true if they differ from the data
    /// in force. Invalid data count as a failure of the source.
    pub fn accept(&mut self, index: usize, bytes: &[u8], now: Time) -> bool {
        let source = &mut self.sources[index];
        let digest = Algorithm::Blake3.digest(bytes);
        let is_known = source.accepted.as_ref().is_some_and(|accepted| accepted.digest == digest);
        if !is_known {
            match read_data(&source.rules, bytes, now) {
                Ok(accepted) => source.accepted = Some(accepted),
                Err(error) => {
                    self.fail(index, error_chain(&error), now);
                    return false;
                }
            }
        }
        source.succeeded = Some(now);
        source.trouble = None;
        !is_known
    }

    /// Records a failure of source number `index`, from 0.
    pub fn fail(&mut self, index: usize, why: String, now: Time) {
        let source = &mut self.sources[index];
        let since = source.trouble.as_ref().map_or(now, |trouble| trouble.since);
        source.trouble = Some(Trouble { since, why });
    }

    /// Returns the names of the sources that have delivered no data yet.
    #[must_use]
    pub fn missing(&self) -> Vec<String> {
        let missing = self.sources.iter().filter(|source| source.accepted.is_none());
        missing.map(|source| source.rules.name.clone()).collect()
    }

    /// Returns the machines of all sources; `None` while a source has delivered no data.
    #[must_use]
    pub fn merged(&self) -> Option<Machines> {
        let machines: Option<Vec<&Machines>> = self
            .sources
            .iter()
            .map(|source| source.accepted.as_ref().map(|accepted| &accepted.machines))
            .collect();
        Some(merge(machines?, &self.filter))
    }

    /// Returns the state of each source, in their order.
    #[must_use]
    pub fn reports(&self) -> Vec<SourceReport> {
        let report = |source: &Source| {
            let accepted = source.accepted.as_ref();
            SourceReport {
                name: source.rules.name.clone(),
                machines: accepted.map(|accepted| accepted.machines.len()),
                succeeded: source.succeeded,
                changed: accepted.map(|accepted| accepted.changed),
                misspelt_keys: accepted.and_then(|accepted| accepted.misspelt_keys.clone()),
                trouble: source.trouble.clone(),
            }
        };
        self.sources.iter().map(report).collect()
    }
}

fn read_data(rules: &Rules, bytes: &[u8], changed: Time) -> Result<Accepted, DataError> {
    let (mut machines, misspelt_keys) = read(rules.format, bytes)?;
    machines.retain(|hostname, _| rules.filter.accepts(hostname));
    if let Some(fields) = &rules.fields {
        check_fields(&machines, fields)?;
    }
    Ok(Accepted { digest: Algorithm::Blake3.digest(bytes), machines, misspelt_keys, changed })
}

/// What is done with the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// It is up to date.
    Keep,
    /// It is replaced with this text.
    Write(String),
    /// It would lose all machines, and stays as it is.
    Hold,
}

/// Decides about a file with the content `present`, or an absent one, when it should have
/// `machines`.
#[must_use]
pub fn decide(machines: &Machines, present: Option<&[u8]>) -> Decision {
    let text = render(machines);
    match present {
        Some(present) if present == text.as_bytes() => Decision::Keep,
        Some(present) if machines.is_empty() && may_hold_machines(present) => Decision::Hold,
        _ => Decision::Write(text),
    }
}

/// Returns false only if a file certainly has no machine.
fn may_hold_machines(bytes: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(bytes) else { return true };
    !text.trim().is_empty() && parse(text).map_or(true, |machines| !machines.is_empty())
}

/// Merges the machines of all sources that `filter` accepts; if sources contradict each other, the
/// later one counts.
fn merge<'a>(sources: impl IntoIterator<Item = &'a Machines>, filter: &HostFilter) -> Machines {
    let mut merged = Machines::new();
    for machine in sources.into_iter().flat_map(Machines::values) {
        if !filter.accepts(&machine.hostname) {
            continue;
        }
        match merged.get_mut(&machine.hostname) {
            Some(known) => overlay(known, machine),
            None => {
                merged.insert(machine.hostname.clone(), machine.clone());
            }
        }
    }
    merged
}

/// Overlays `known` with the fields of `later` that are set. `disable_updates` of any source
/// counts: an update that waits is the smaller mistake.
fn overlay(known: &mut Machine, later: &Machine) {
    // Destructured so that no field is forgotten.
    let Machine {
        hostname: _,
        ip_address,
        subd_port,
        required_image,
        planned_image,
        disable_updates,
        owner_groups,
        owner_users,
        location,
        tags,
    } = later;
    known.ip_address = ip_address.or(known.ip_address);
    known.subd_port = subd_port.or(known.subd_port);
    known.disable_updates |= disable_updates;
    for (text, later) in [
        (&mut known.required_image, required_image),
        (&mut known.planned_image, planned_image),
        (&mut known.location, location),
    ] {
        if !later.is_empty() {
            text.clone_from(later);
        }
    }
    for (list, later) in
        [(&mut known.owner_groups, owner_groups), (&mut known.owner_users, owner_users)]
    {
        if !later.is_empty() {
            list.clone_from(later);
        }
    }
    known.tags.extend(tags.iter().map(|(key, value)| (key.clone(), value.clone())));
}

/// Largest automaton of one pattern, in bytes.
const AUTOMATON_BYTES_MAX: usize = 4 << 20;

/// An invalid pattern of host names.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{pattern}` is not a pattern of host names: {why}")]
pub struct PatternError {
    pub pattern: String,
    pub why: String,
}

/// Selects hosts by patterns that match the whole name.
#[derive(Clone, Debug, Default)]
pub struct HostFilter {
    wanted: Option<Regex>,
    excluded: Option<Regex>,
}

impl HostFilter {
    /// Compiles a filter; without patterns it accepts every host.
    ///
    /// # Errors
    ///
    /// [`PatternError`] for an invalid pattern.
    pub fn new(wanted: Option<&str>, excluded: Option<&str>) -> Result<Self, PatternError> {
        let wanted = wanted.map(compile).transpose()?;
        Ok(Self { wanted, excluded: excluded.map(compile).transpose()? })
    }

    /// Returns true if the filter accepts a machine of that name.
    #[must_use]
    pub fn accepts(&self, hostname: &str) -> bool {
        self.wanted.as_ref().is_none_or(|wanted| wanted.is_match(hostname))
            && !self.excluded.as_ref().is_some_and(|excluded| excluded.is_match(hostname))
    }
}

fn compile(pattern: &str) -> Result<Regex, PatternError> {
    let build = |text: &str| {
        let config = Regex::config().nfa_size_limit(Some(AUTOMATON_BYTES_MAX));
        Regex::builder().configure(config).build(text).map_err(|error| PatternError {
            pattern: pattern.to_owned(),
            why: match error.syntax_error() {
                Some(syntax) => syntax.to_string(),
                None => error.to_string(),
            },
        })
    };
    // Alone first: `a)|(b` is a pattern only inside the parentheses.
    build(pattern)?;
    build(&format!(r"\A(?:{pattern})\z"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::formats::FIELDS;

    fn at(seconds: i64) -> Time {
        Time { seconds, nanoseconds: 0 }
    }

    fn merged() -> MergedSources {
        let rules = |name: &str, format, excluded| Rules {
            name: name.to_owned(),
            format,
            filter: HostFilter::new(None, excluded).unwrap(),
            fields: None,
        };
        let sources =
            vec![rules("file", Format::Json, None), rules("list", Format::Hosts, Some("old.*"))];
        MergedSources::new(sources, HostFilter::new(None, Some(".*-test")).unwrap())
    }

    fn hosts(merged: &MergedSources) -> Option<String> {
        let machines = merged.merged()?;
        let hosts = machines.values().map(|machine| {
            format!("{} {}", machine.hostname, machine.required_image).trim().to_owned()
        });
        Some(hosts.collect::<Vec<String>>().join(", "))
    }

    #[test]
    fn there_is_no_result_before_every_source_has_given_something() {
        let mut merged = merged();
        assert_eq!(merged.missing(), ["file", "list"]);
        assert!(merged.accept(0, br#"[{"Hostname": "a", "RequiredImage": "x"}]"#, at(1)));
        assert_eq!((merged.missing(), hosts(&merged)), (vec!["list".to_owned()], None));
        merged.fail(1, "no".to_owned(), at(2));
        assert_eq!(hosts(&merged), None);
        assert!(!merged.accept(1, b"a b c d", at(3)));
        assert_eq!(hosts(&merged), None);
        assert!(merged.accept(1, b"a y\nold1\nb\nb-test", at(4)));
        assert_eq!((merged.missing(), hosts(&merged)), (vec![], Some("a y, b".to_owned())));
    }

    #[test]
    fn a_source_sets_only_its_fields() {
        let fields = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
        let rules = |fields| Rules {
            name: "planner".to_owned(),
            format: Format::Json,
            filter: HostFilter::new(Some("web.*"), None).unwrap(),
            fields: Some(fields),
        };
        let planned = br#"[{"Hostname": "web1", "PlannedImage": "x"}]"#;
        let required = br#"[{"Hostname": "web1", "PlannedImage": "x", "RequiredImage": "x"}]"#;
        let other_host = br#"[{"Hostname": "db1", "RequiredImage": "x"}, {"Hostname": "web1"}]"#;
        let why = |allowed, field| {
            Err(format!("the record of web1 sets {field}, and this source may set only {allowed}"))
        };
        #[rustfmt::skip]
        let table = [
            (vec!["PlannedImage"],  &planned[..], Ok(1)),
            (vec!["Location", "Tags"], planned,   why("Location, Tags", "PlannedImage")),
            (vec!["PlannedImage"],  required,     why("PlannedImage", "RequiredImage")),
            (vec![],                planned,      why("Hostname", "PlannedImage")),
            (vec![],                other_host,   Ok(1)),
            (FIELDS.to_vec(),       required,     Ok(1)),
        ];
        for (names, data, want) in table {
            let got = read_data(&rules(fields(&names)), data, at(1));
            let got = got.map(|data| data.machines.len()).map_err(|error| error.to_string());
            assert_eq!(got, want, "{names:?}");
        }
    }

    #[test]
    fn what_was_in_order_stays_in_force() {
        let mut merged = merged();
        merged.restore(0, b"[]", at(1)).unwrap();
        assert!(merged.restore(1, b"a b c d", at(2)).is_err());
        assert_eq!(merged.missing(), ["list"]);
        merged.restore(1, b"a x", at(2)).unwrap();
        let in_force = Some("a x".to_owned());
        assert_eq!(hosts(&merged), in_force);
        merged.fail(1, "first".to_owned(), at(3));
        assert!(!merged.accept(1, b"a y\na z", at(4)));
        assert_eq!(hosts(&merged), in_force);
        let report = merged.reports().remove(1);
        let trouble = report.trouble.unwrap();
        assert_eq!(trouble.since, at(3));
        assert!(trouble.why.contains("host name a was given already"), "{}", trouble.why);
        assert_eq!((report.machines, report.succeeded), (Some(1), None));
        assert_eq!(report.changed, Some(at(2)));

        assert!(!merged.accept(1, b"a x", at(5)), "the same as before");
        let report = merged.reports().remove(1);
        assert_eq!((report.trouble, report.succeeded), (None, Some(at(5))));
        assert_eq!(report.changed, Some(at(2)));
        assert!(merged.accept(1, b"a z", at(6)));
        assert_eq!(merged.reports()[1].changed, Some(at(6)));
        assert_eq!(hosts(&merged), Some("a z".to_owned()));
    }

    #[test]
    fn a_file_is_written_when_it_differs_and_never_emptied() {
        let none = Machines::new();
        let one = parse(r#"[{"Hostname": "a"}]"#).unwrap();
        let text = render(&one);
        let write = |text: &str| Decision::Write(text.to_owned());
        #[rustfmt::skip]
        let table: [(&Machines, Option<&[u8]>, Decision); 10] = [
            (&one,  None,                      write(&text)),
            (&one,  Some(text.as_bytes()),     Decision::Keep),
            (&one,  Some(b"[]\n"),             write(&text)),
            (&one,  Some(b"nonsense"),         write(&text)),
            (&none, None,                      write("[]\n")),
            (&none, Some(b"[]\n"),             Decision::Keep),
            (&none, Some(b""),                 write("[]\n")),
            (&none, Some(b"# none\n[ ]"),      write("[]\n")),
            (&none, Some(text.as_bytes()),     Decision::Hold),
            (&none, Some(b"nonsense"),         Decision::Hold),
        ];
        for (machines, present, decision) in table {
            assert_eq!(decide(machines, present), decision, "{machines:?} {present:?}");
        }
    }

    #[track_caller]
    fn check_merge(sources: &[&str], filter: &HostFilter, expected: &str) {
        let sources: Vec<Machines> = sources.iter().map(|text| parse(text).unwrap()).collect();
        assert_eq!(merge(&sources, filter), parse(expected).unwrap());
    }

    #[test]
    fn later_fields_win_and_empty_ones_say_nothing() {
        let all = HostFilter::default();
        let first = r#"[{"Hostname": "a", "RequiredImage": "x/1", "IpAddress": "10.0.0.1",
            "SubdPort": 7, "OwnerGroups": ["g", "h"], "Location": "nyc",
            "Tags": {"r": "1", "s": "2"}}]"#;
        check_merge(&[], &all, "[]");
        check_merge(&[first, "[]", r#"[{"Hostname": "a"}]"#], &all, first);
        check_merge(&[r#"[{"Hostname": "a"}]"#, first], &all, first);
        let second = r#"[{"Hostname": "a", "RequiredImage": "x/2", "PlannedImage": "x/3",
            "IpAddress": "::1", "SubdPort": 8, "OwnerGroups": ["i"], "OwnerUsers": ["u"],
            "Location": "ams", "Tags": {"s": "3", "t": ""}}, {"Hostname": "b"}]"#;
        let both = r#"[{"Hostname": "a", "RequiredImage": "x/2", "PlannedImage": "x/3",
            "IpAddress": "::1", "SubdPort": 8, "OwnerGroups": ["i"], "OwnerUsers": ["u"],
            "Location": "ams", "Tags": {"r": "1", "s": "3", "t": ""}}, {"Hostname": "b"}]"#;
        check_merge(&[first, second], &all, both);
    }

    #[test]
    fn any_source_can_hold_a_machine_back() {
        let yes = r#"[{"Hostname": "a", "DisableUpdates": true}]"#;
        let no = r#"[{"Hostname": "a"}]"#;
        for sources in [[yes, no], [no, yes], [yes, yes]] {
            check_merge(&sources, &HostFilter::default(), yes);
        }
    }

    #[test]
    fn the_result_is_filtered() {
        let filter = HostFilter::new(Some("web.*"), Some("web9")).unwrap();
        let machines = r#"[{"Hostname": "web1"}, {"Hostname": "db1"}, {"Hostname": "web9"}]"#;
        check_merge(&[machines], &filter, r#"[{"Hostname": "web1"}]"#);
    }

    #[test]
    fn names_match_as_a_whole() {
        #[rustfmt::skip]
        let table = [
            (None,              None,           "web1",  true),
            (Some("web1"),      None,           "web1",  true),
            (Some("web1"),      None,           "web10", false),
            (Some("web"),       None,           "web1",  false),
            (Some("web.*"),     None,           "web1",  true),
            (Some("web|db"),    None,           "db",    true),
            (Some("web|db"),    None,           "dba",   false),
            (Some("web.*"),     Some(".*-old"), "web-old", false),
            (None,              Some("db.*"),   "db1",   false),
            (None,              Some("db.*"),   "web1",  true),
            (Some(""),          None,           "web1",  false),
        ];
        for (wanted, excluded, name, accepts) in table {
            let filter = HostFilter::new(wanted, excluded).unwrap();
            assert_eq!(filter.accepts(name), accepts, "{wanted:?} {excluded:?} {name}");
        }
    }

    #[test]
    fn what_is_no_pattern_is_refused() {
        for pattern in ["(", "a)|(b", "[", "x{1000}{1000}"] {
            let error = HostFilter::new(None, Some(pattern)).unwrap_err();
            assert_eq!(error.pattern, pattern);
        }
    }
}
