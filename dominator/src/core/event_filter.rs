//! The filters of a request for events.
// tidy: core

use api::dominator::events::{
    ChangeReason, EventKind, FILTER_BYTES_MAX, FILTERS_MAX, ListEventsRequest, PathChange,
};
use api::dominator::orders::is_pattern;
use globset::{Glob, GlobBuilder, GlobSet, GlobSetBuilder};
use model::image::composition::split;
use model::path::TreePath;
use model::tree::Time;

use crate::core::selectors::host_patterns;
use model::mdb::is_within;

/// Why a request for events is invalid.
#[derive(Debug, thiserror::Error)]
pub enum FilterError {
    #[error(
        "at most {FILTERS_MAX} values of {FILTER_BYTES_MAX} bytes may be given for each filter"
    )]
    TooMuch,
    #[error("invalid pattern")]
    Pattern {
        #[source]
        source: globset::Error,
    },
}

/// The parsed filters of a request for events.
#[derive(Clone, Debug)]
pub struct EventFilter {
    request: ListEventsRequest,
    hosts: Option<Hosts>,
    paths: Option<Paths>,
    /// Those of the request, or those that follow from it.
    kinds: Vec<EventKind>,
}

/// The requested machines.
#[derive(Clone, Debug)]
struct Hosts {
    patterns: GlobSet,
    /// The plain names among the patterns.
    names: Vec<String>,
}

impl Hosts {
    /// True if `selector`, a name or pattern of machines in an order, selects one of the requested
    /// machines. Two patterns have a machine in common only if one matches the text of the other.
    fn are_selected_by(&self, selector: &str) -> bool {
        self.patterns.is_match(selector)
            || (is_pattern(selector)
                && Glob::new(selector).is_ok_and(|glob| {
                    let glob = glob.compile_matcher();
                    self.names.iter().any(|name| glob.is_match(name))
                }))
    }
}

/// Returns the names and patterns of machines in the object of an order.
fn selectors_of<'a>(verb: &str, about: &'a str) -> Vec<&'a str> {
    match verb {
        "pause" | "resume" | "departing" => about.split_whitespace().collect(),
        verb if verb.starts_with("task-") => about.split_whitespace().collect(),
        // `host web1: cpu-percent=5` names a machine; a fleet or a tag does not.
        "set-config" => {
            let named = about.strip_prefix("host ").and_then(|rest| rest.split_once(':'));
            named.map(|(hostname, _)| hostname).into_iter().collect()
        }
        _ => vec![about],
    }
}

/// The requested paths.
#[derive(Clone, Debug)]
struct Paths {
    patterns: GlobSet,
    /// The marks of the paths; `None` if one of them is a pattern.
    marks: Option<u64>,
}

impl EventFilter {
    /// Parses the filters.
    pub fn new(request: &ListEventsRequest) -> Result<Self, FilterError> {
        let texts = [&request.hosts, &request.paths, &request.images, &request.who];
        let is_short = |texts: &Vec<String>| {
            texts.len() <= FILTERS_MAX && texts.iter().all(|text| text.len() <= FILTER_BYTES_MAX)
        };
        let is_few = request.reasons.len() <= FILTERS_MAX && request.kinds.len() <= FILTERS_MAX;
        if !texts.into_iter().all(is_short) || !is_few {
            return Err(FilterError::TooMuch);
        }
        let invalid = |source| FilterError::Pattern { source };
        let paths = paths_of(&request.paths).map_err(invalid)?;
        let names = request.hosts.iter().filter(|text| !is_pattern(text)).cloned().collect();
        let hosts = host_patterns(&request.hosts).map_err(invalid)?;
        let hosts = hosts.map(|patterns| Hosts { patterns, names });
        let kinds = match (request.kinds.is_empty(), &paths) {
            (false, _) => request.kinds.clone(),
            (true, Some(_)) => vec![EventKind::Change],
            (true, None) => vec![EventKind::Status, EventKind::Update, EventKind::Order],
        };
        Ok(Self { request: request.clone(), hosts, paths, kinds })
    }

    /// True if events of this kind are requested, and can match the other filters.
    #[must_use]
    pub fn wants_kind(&self, kind: EventKind) -> bool {
        let is_of_path = kind == EventKind::Change;
        let is_of_update = is_of_path || kind == EventKind::Update;
        self.kinds.contains(&kind)
            && (self.paths.is_none() || is_of_path)
            && ((self.request.reasons.is_empty() && self.request.images.is_empty()) || is_of_update)
            && (self.request.who.is_empty() || kind == EventKind::Order)
    }

    /// True if events between the two times may be requested.
    #[must_use]
    pub fn wants_span(&self, first: Time, last: Time) -> bool {
        self.request.since.is_none_or(|since| last >= since)
            && self.request.until.is_none_or(|until| first <= until)
    }

    /// True if events at this time about this object are requested.
    #[must_use]
    pub fn wants(&self, time: Time, about: &str) -> bool {
        self.wants_span(time, time)
            && self.hosts.as_ref().is_none_or(|hosts| hosts.patterns.is_match(about))
    }

    /// True if this order is requested by its time, and by its object or one of its machines.
    #[must_use]
    pub fn wants_order(&self, time: Time, verb: &str, about: &str) -> bool {
        self.wants_span(time, time)
            && self.hosts.as_ref().is_none_or(|hosts| {
                let selectors = selectors_of(verb, about);
                hosts.patterns.is_match(about)
                    || selectors.into_iter().any(|selector| hosts.are_selected_by(selector))
            })
    }

    /// True if updates to this image, or to one that is composed of it, are requested.
    #[must_use]
    pub fn wants_image(&self, image: &str) -> bool {
        let images = &self.request.images;
        let is_wanted = |part: &str| images.iter().any(|wanted| is_within(part, wanted));
        images.is_empty() || split(image).any(is_wanted)
    }

    /// True if orders by `who` are requested.
    #[must_use]
    pub fn wants_who(&self, who: &str) -> bool {
        self.request.who.is_empty() || self.request.who.iter().any(|wanted| wanted == who)
    }

    /// True if an update with changes for these reasons may be requested.
    #[must_use]
    pub fn wants_reasons(&self, has: impl Fn(ChangeReason) -> bool) -> bool {
        let reasons = &self.request.reasons;
        reasons.is_empty() || reasons.iter().any(|reason| has(*reason))
    }

    /// True if a list of changes with these [`path_mark`]s may contain a requested path.
    #[must_use]
    pub fn wants_marks(&self, marks: u64) -> bool {
        let wanted = self.paths.as_ref().and_then(|paths| paths.marks);
        wanted.is_none_or(|wanted| wanted & marks != 0)
    }

    /// True if this change is requested, by its reason and path.
    #[must_use]
    pub fn wants_change(&self, change: &PathChange) -> bool {
        self.wants_reasons(|reason| reason == change.reason)
            && self
                .paths
                .as_ref()
                .is_none_or(|paths| paths.patterns.is_match(change.path.to_string()))
    }
}

fn paths_of(texts: &[String]) -> Result<Option<Paths>, globset::Error> {
    if texts.is_empty() {
        return Ok(None);
    }
    let mut patterns = GlobSetBuilder::new();
    for text in texts {
        patterns.add(GlobBuilder::new(text).literal_separator(true).build()?);
    }
    Ok(Some(Paths { patterns: patterns.build()?, marks: marks_of(texts) }))
}

/// Returns the marks of plain paths; `None` if one of the texts is a pattern.
fn marks_of(texts: &[String]) -> Option<u64> {
    texts.iter().try_fold(0, |marks, text| {
        let path = TreePath::new(text).ok().filter(|_| !is_pattern(text))?;
        Some(marks | path_mark(&path))
    })
}

/// Returns the bit of a path in the marks of a list of changes, which are a Bloom filter: most
/// lists without the path need not be read.
#[must_use]
pub fn path_mark(path: &TreePath) -> u64 {
    let hash = path.as_bytes().iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    1 << (hash >> 58)
}

#[cfg(test)]
mod tests {
    use super::*;
    use api::dominator::events::PathOperation;

    fn filter(request: ListEventsRequest) -> EventFilter {
        EventFilter::new(&request).unwrap()
    }

    fn texts(texts: &[&str]) -> Vec<String> {
        texts.iter().map(|text| (*text).to_owned()).collect()
    }

    fn change(path: &str, reason: ChangeReason) -> PathChange {
        let path = TreePath::new(path).unwrap();
        let operation = PathOperation::Remove;
        PathChange { path, operation, reason, differs: Vec::new(), old: None, new: None }
    }

    #[test]
    fn kinds_follow_from_what_is_asked_for() {
        use EventKind::{Change, Order, Status, Update};
        let all = ListEventsRequest::default;
        let table: [(ListEventsRequest, &[EventKind]); 6] = [
            (all(), &[Status, Update, Order]),
            (ListEventsRequest { paths: texts(&["/a"]), ..all() }, &[Change]),
            (ListEventsRequest { reasons: vec![ChangeReason::Drift], ..all() }, &[Update]),
            (ListEventsRequest { kinds: vec![Change, Order], ..all() }, &[Change, Order]),
            (ListEventsRequest { images: texts(&["web"]), ..all() }, &[Update]),
            (ListEventsRequest { who: texts(&["ann"]), ..all() }, &[Order]),
        ];
        for (request, kinds) in table {
            let filter = filter(request.clone());
            let wanted: Vec<EventKind> =
                EventKind::ALL.into_iter().filter(|kind| filter.wants_kind(*kind)).collect();
            assert_eq!(wanted, kinds, "{request:?}");
        }
    }

    #[test]
    fn paths_match_by_component_and_plain_ones_by_marks_too() {
        let table = [
            ("/etc/passwd", "/etc/passwd", true),
            ("/etc/passwd", "/etc/passwd-", false),
            ("/etc/*", "/etc/passwd", true),
            ("/etc/*", "/etc/ssh/config", false),
            ("/etc/**", "/etc/ssh/config", true),
            ("**/config", "/etc/ssh/config", true),
        ];
        for (pattern, path, matches) in table {
            let request = ListEventsRequest { paths: texts(&[pattern]), ..Default::default() };
            let filter = filter(request);
            let change = change(path, ChangeReason::Drift);
            assert_eq!(filter.wants_change(&change), matches, "{pattern} {path}");
            assert!(!matches || filter.wants_marks(path_mark(&change.path)), "{pattern} {path}");
        }
        let request = ListEventsRequest { paths: texts(&["/etc/passwd"]), ..Default::default() };
        let others = (0..100).map(|number| TreePath::new(format!("/f{number}")).unwrap());
        let seen =
            others.filter(|path| filter(request.clone()).wants_marks(path_mark(path))).count();
        assert!(seen < 20, "{seen} of 100 other paths would be looked into");
    }

    #[test]
    fn orders_are_asked_for_by_each_machine_that_they_are_about() {
        #[rustfmt::skip]
        let table = [
            // host   verb                   about                          is asked for
            ("web1",  "retry",               "web1",                        true),
            ("web1",  "retry",               "web10",                       false),
            ("web*",  "retry",               "web1",                        true),
            ("web1",  "pause",               "web*",                        true),
            ("web1",  "pause",               "db1 web? mail",               true),
            ("web1",  "departing",           "db1 web? mail",               true),
            ("db1",   "resume",              "db1 web? mail",               true),
            ("db2",   "pause",               "db1 web? mail",               false),
            ("web*",  "pause",               "db1 web1",                    true),
            ("web*",  "pause",               "web*",                        true),
            ("w*",    "pause",               "*b1",                         false),
            ("web1",  "set-config",          "host web1: cpu-percent=5",    true),
            ("web1",  "set-config",          "host web10: cpu-percent=5",   false),
            ("web?",  "set-config",          "host web1: cpu-percent=5",    true),
            ("host",  "set-config",          "host web1: cpu-percent=5",    false),
            ("fleet", "set-config",          "fleet: cpu-percent=5",        false),
            ("web1",  "set-config",          "tag web1: cpu-percent=5",     false),
            ("web1",  "disable-updates",     "",                            false),
            ("web/7", "resume-image",        "web/7",                       true),
            // Invalid patterns are ignored.
            ("web1",  "pause",               "web[ web1",                   true),
            ("web1",  "pause",               "web[",                        false),
        ];
        for (host, verb, about, wanted) in table {
            let filter = filter(ListEventsRequest { hosts: texts(&[host]), ..Default::default() });
            let got = filter.wants_order(Time::default(), verb, about);
            assert_eq!(got, wanted, "{host}: {verb} {about}");
        }
    }

    #[test]
    fn times_hosts_images_and_reasons_must_all_match() {
        let at = |seconds| Time { seconds, nanoseconds: 0 };
        let request = ListEventsRequest {
            hosts: texts(&["web*", "mail"]),
            images: texts(&["/web/", "base/1"]),
            reasons: vec![ChangeReason::Drift],
            since: Some(at(10)),
            until: Some(at(20)),
            ..Default::default()
        };
        let filter = filter(request);
        let table =
            [(9, "web1", false), (10, "web1", true), (20, "mail", true), (21, "mail", false)];
        for (seconds, host, wanted) in table {
            assert_eq!(filter.wants(at(seconds), host), wanted, "{seconds} {host}");
        }
        assert!(!filter.wants(at(15), "mail2") && filter.wants_span(at(0), at(10)));
        assert!(!filter.wants_span(at(0), at(9)) && !filter.wants_span(at(21), at(30)));
        for (image, wanted) in [
            ("web/7", true),
            ("web", true),
            ("webs", false),
            ("base/2", false),
            ("base/2 + web/7", true),
            ("base/2 + webs", false),
        ] {
            assert_eq!(filter.wants_image(image), wanted, "{image}");
        }
        assert!(filter.wants_change(&change("/a", ChangeReason::Drift)));
        assert!(!filter.wants_change(&change("/a", ChangeReason::Image)));
        let many = ListEventsRequest { who: texts(&["x"; FILTERS_MAX + 1]), ..Default::default() };
        assert!(matches!(EventFilter::new(&many), Err(FilterError::TooMuch)));
        let bad = ListEventsRequest { hosts: texts(&["web["]), ..Default::default() };
        assert!(matches!(EventFilter::new(&bad), Err(FilterError::Pattern { .. })));
    }
}
