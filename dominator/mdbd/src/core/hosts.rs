//! Which machines are wanted, by patterns of host names.
// tidy: core

use regex_automata::meta::Regex;

/// The largest automaton of one pattern, in bytes.
const AUTOMATON_BYTES_MAX: usize = 4 << 20;

/// A pattern that is none.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{pattern}` is no pattern of host names: {why}")]
pub struct PatternError {
    /// The pattern.
    pub pattern: String,
    /// What is wrong with it.
    pub why: String,
}

/// Takes hosts whose whole name matches one pattern, if there is one, and not the other.
#[derive(Clone, Debug, Default)]
pub struct HostFilter {
    wanted: Option<Regex>,
    excluded: Option<Regex>,
}

impl HostFilter {
    /// A filter of these patterns; without them it takes every host.
    ///
    /// # Errors
    ///
    /// [`PatternError`].
    pub fn new(wanted: Option<&str>, excluded: Option<&str>) -> Result<Self, PatternError> {
        let wanted = wanted.map(compile).transpose()?;
        Ok(Self { wanted, excluded: excluded.map(compile).transpose()? })
    }

    /// True if a machine of that name is wanted.
    #[must_use]
    pub fn takes(&self, hostname: &str) -> bool {
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
    // On its own first: `a)|(b` would be a pattern only inside of the parentheses.
    build(pattern)?;
    build(&format!(r"\A(?:{pattern})\z"))
}

#[cfg(test)]
mod tests {
    use super::*;

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
        for (wanted, excluded, name, takes) in table {
            let filter = HostFilter::new(wanted, excluded).unwrap();
            assert_eq!(filter.takes(name), takes, "{wanted:?} {excluded:?} {name}");
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
