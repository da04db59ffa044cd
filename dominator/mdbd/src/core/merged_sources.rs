//! What every source has given, and what follows from all of it.
//!
//! # Invariants
//!
//! * What a source gave last, and was in order, stays in force until it gives something else that
//!   is in order.
//! * There is no result before every source has given something: a source that is missing is not a
//!   source without machines.
// tidy: core

use model::mdb::{Machines, parse};
use model::object::{Algorithm, ObjectId};
use model::report::report;
use model::tree::Time;

use super::data::{DataError, Format, read};
use super::hosts::HostFilter;
use super::merge::merge;
use super::render::render;

/// What is made of the data of one source.
#[derive(Clone, Debug)]
pub struct Rules {
    /// Its name.
    pub name: String,
    /// How it writes machines.
    pub format: Format,
    /// Which of them are wanted.
    pub filter: HostFilter,
}

/// What is in force of a source.
#[derive(Clone, Debug)]
struct Given {
    /// Of the data as they came.
    digest: ObjectId,
    /// Those that are wanted.
    machines: Machines,
    changed: Time,
}

#[derive(Clone, Debug)]
struct Source {
    rules: Rules,
    given: Option<Given>,
    succeeded: Option<Time>,
    trouble: Option<Trouble>,
}

/// Why a source does not give what is to be in force.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trouble {
    /// When that began.
    pub since: Time,
    /// What happened last.
    pub why: String,
}

/// How a source is doing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceReport {
    /// Its name.
    pub name: String,
    /// How many machines it has in force; `None` if it has given nothing yet.
    pub machines: Option<usize>,
    /// When it was last read and was in order, since the start.
    pub succeeded: Option<Time>,
    /// When what is in force came.
    pub changed: Option<Time>,
    /// What is wrong with it.
    pub trouble: Option<Trouble>,
}

/// See the module's text.
#[derive(Clone, Debug)]
pub struct MergedSources {
    sources: Vec<Source>,
    filter: HostFilter,
}

impl MergedSources {
    /// A merged of sources that have given nothing yet; `filter` says which machines of the result
    /// are wanted.
    #[must_use]
    pub fn new(sources: Vec<Rules>, filter: HostFilter) -> Self {
        let source = |rules| Source { rules, given: None, succeeded: None, trouble: None };
        Self { sources: sources.into_iter().map(source).collect(), filter }
    }

    /// Takes what source number `index`, from 0, gave at the time `changed`, in a former run.
    ///
    /// # Errors
    ///
    /// [`DataError`] if it is not in order by the rules of today; nothing is changed then.
    pub fn recall(&mut self, index: usize, bytes: &[u8], changed: Time) -> Result<(), DataError> {
        let source = &mut self.sources[index];
        source.given = Some(given(&source.rules, bytes, changed)?);
        Ok(())
    }

    /// Takes what source number `index`, from 0, gave; true if it is other than what it gave
    /// before. What is not in order is not taken, and is the trouble of the source.
    pub fn take(&mut self, index: usize, bytes: &[u8], now: Time) -> bool {
        let source = &mut self.sources[index];
        let digest = Algorithm::Blake3.digest(bytes);
        let is_known = source.given.as_ref().is_some_and(|given| given.digest == digest);
        if !is_known {
            match given(&source.rules, bytes, now) {
                Ok(given) => source.given = Some(given),
                Err(error) => {
                    self.fail(index, report(&error), now);
                    return false;
                }
            }
        }
        source.succeeded = Some(now);
        source.trouble = None;
        !is_known
    }

    /// Notes that source number `index`, from 0, gave nothing.
    pub fn fail(&mut self, index: usize, why: String, now: Time) {
        let source = &mut self.sources[index];
        let since = source.trouble.as_ref().map_or(now, |trouble| trouble.since);
        source.trouble = Some(Trouble { since, why });
    }

    /// The names of the sources that have given nothing yet.
    #[must_use]
    pub fn missing(&self) -> Vec<String> {
        let missing = self.sources.iter().filter(|source| source.given.is_none());
        missing.map(|source| source.rules.name.clone()).collect()
    }

    /// The machines of all sources; `None` as long as one has given nothing.
    #[must_use]
    pub fn merged(&self) -> Option<Machines> {
        let given: Option<Vec<&Machines>> = self
            .sources
            .iter()
            .map(|source| source.given.as_ref().map(|given| &given.machines))
            .collect();
        Some(merge(given?, &self.filter))
    }

    /// How the sources are doing, in their order.
    #[must_use]
    pub fn reports(&self) -> Vec<SourceReport> {
        let report = |source: &Source| SourceReport {
            name: source.rules.name.clone(),
            machines: source.given.as_ref().map(|given| given.machines.len()),
            succeeded: source.succeeded,
            changed: source.given.as_ref().map(|given| given.changed),
            trouble: source.trouble.clone(),
        };
        self.sources.iter().map(report).collect()
    }
}

fn given(rules: &Rules, bytes: &[u8], changed: Time) -> Result<Given, DataError> {
    let mut machines = read(rules.format, bytes)?;
    machines.retain(|hostname, _| rules.filter.takes(hostname));
    Ok(Given { digest: Algorithm::Blake3.digest(bytes), machines, changed })
}

/// What to do with the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// It says what it should.
    Keep,
    /// It must get this text.
    Write(String),
    /// It would lose all of its machines, and stays as it is.
    Hold,
}

/// What to do with a file that holds `present`, or that is not there, when `machines` are wanted.
#[must_use]
pub fn decide(machines: &Machines, present: Option<&[u8]>) -> Decision {
    let text = render(machines);
    match present {
        Some(present) if present == text.as_bytes() => Decision::Keep,
        Some(present) if machines.is_empty() && may_hold_machines(present) => Decision::Hold,
        _ => Decision::Write(text),
    }
}

/// True unless it is certain that there is no machine in a file.
fn may_hold_machines(bytes: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(bytes) else { return true };
    !text.trim().is_empty() && parse(text).map_or(true, |machines| !machines.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: i64) -> Time {
        Time { seconds, nanoseconds: 0 }
    }

    fn merged() -> MergedSources {
        let rules = |name: &str, format, excluded| Rules {
            name: name.to_owned(),
            format,
            filter: HostFilter::new(None, excluded).unwrap(),
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
        assert!(merged.take(0, br#"[{"Hostname": "a", "RequiredImage": "x"}]"#, at(1)));
        assert_eq!((merged.missing(), hosts(&merged)), (vec!["list".to_owned()], None));
        merged.fail(1, "no".to_owned(), at(2));
        assert_eq!(hosts(&merged), None);
        assert!(!merged.take(1, b"a b c d", at(3)));
        assert_eq!(hosts(&merged), None);
        assert!(merged.take(1, b"a y\nold1\nb\nb-test", at(4)));
        assert_eq!((merged.missing(), hosts(&merged)), (vec![], Some("a y, b".to_owned())));
    }

    #[test]
    fn what_was_in_order_stays_in_force() {
        let mut merged = merged();
        merged.recall(0, b"[]", at(1)).unwrap();
        assert!(merged.recall(1, b"a b c d", at(2)).is_err());
        assert_eq!(merged.missing(), ["list"]);
        merged.recall(1, b"a x", at(2)).unwrap();
        let force = Some("a x".to_owned());
        assert_eq!(hosts(&merged), force);
        merged.fail(1, "first".to_owned(), at(3));
        assert!(!merged.take(1, b"a y\na z", at(4)));
        assert_eq!(hosts(&merged), force);
        let report = merged.reports().remove(1);
        let trouble = report.trouble.unwrap();
        assert_eq!(trouble.since, at(3));
        assert!(trouble.why.contains("host name a was given already"), "{}", trouble.why);
        assert_eq!((report.machines, report.succeeded), (Some(1), None));
        assert_eq!(report.changed, Some(at(2)));

        assert!(!merged.take(1, b"a x", at(5)), "the same as before");
        let report = merged.reports().remove(1);
        assert_eq!((report.trouble, report.succeeded), (None, Some(at(5))));
        assert_eq!(report.changed, Some(at(2)));
        assert!(merged.take(1, b"a z", at(6)));
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
}
