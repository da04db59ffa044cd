//! Filters: which paths an image leaves to each machine.
//!
//! A line is a regular expression over path bytes, matched from the start of the path as
//! `\A(?:LINE)` with `(?s-u)`; all lines are one automaton. A path is *kept* if it or a directory
//! above it matches. Note that a line is not anchored at its end: `/etc/hosts` also keeps
//! `/etc/hosts.allow`; write `/etc/hosts$` to mean the one file.

use std::fmt;
use std::sync::Arc;

use regex_automata::meta::Regex;
use regex_automata::util::syntax;
use regex_automata::{Anchored, Input, MatchKind};
use serde::{Deserialize, Serialize};

use crate::path::TreePath;

/// The most memory that one compiled set of patterns may take, in bytes.
const AUTOMATON_BYTES_MAX: usize = 32 << 20;

/// The most lines of one filter.
pub const LINES_MAX: usize = 10_000;

/// A line of a filter, or a match line of a trigger, that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PatternError {
    /// A line is no regular expression.
    #[error("line {line}: `{text}` is no regular expression: {why}")]
    Syntax {
        /// The number of the line, from 1.
        line: usize,
        /// The line.
        text: String,
        /// What the parser said.
        why: String,
    },
    /// A line is `!`, which inverted the whole filter in the Go Dominator.
    #[error(
        "line {line}: `!` does not invert a filter here: list the paths that machines keep, or \
         give no filter to make a sparse image, which touches only its own paths"
    )]
    Inverted {
        /// The number of the line, from 1.
        line: usize,
    },
    /// The lines together need too large an automaton, or are too many.
    #[error("the lines are too many or too complex: {why}")]
    TooLarge {
        /// What the compiler said.
        why: String,
    },
}

/// A set of patterns over paths, compiled into one automaton. Cheap to clone.
#[derive(Clone)]
pub struct Patterns {
    lines: Arc<[String]>,
    automaton: Option<Arc<Regex>>,
}

impl Patterns {
    /// Compiles `lines`, each anchored at the start of the path and not at its end.
    ///
    /// # Errors
    ///
    /// [`PatternError`] names the line, counted from 1.
    pub fn new<S: AsRef<str>>(lines: impl IntoIterator<Item = S>) -> Result<Self, PatternError> {
        let lines: Vec<String> = lines.into_iter().map(|line| line.as_ref().to_owned()).collect();
        if lines.len() > LINES_MAX {
            return Err(PatternError::TooLarge { why: format!("more than {LINES_MAX} lines") });
        }
        if let Some(index) = lines.iter().position(|line| line.trim() == "!") {
            return Err(PatternError::Inverted { line: index + 1 });
        }
        let automaton = match compile(&lines) {
            _ if lines.is_empty() => None,
            Ok(automaton) => Some(Arc::new(automaton)),
            Err(refusal) => return Err(fault_of(&lines, refusal)),
        };
        Ok(Self { lines: lines.into(), automaton })
    }

    /// The lines as they were given.
    #[must_use]
    pub fn lines(&self) -> &[String] {
        &self.lines
    }

    /// True if there are no lines.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.lines.is_empty()
    }

    /// True if a line matches `path` itself; ancestors are not looked at.
    #[must_use]
    pub fn matches(&self, path: &TreePath) -> bool {
        self.automaton.as_ref().is_some_and(|automaton| {
            automaton.is_match(Input::new(path.as_bytes()).anchored(Anchored::Yes).earliest(true))
        })
    }

    /// True if a line matches `path` or a directory above it (the root excepted).
    #[must_use]
    pub fn covers(&self, path: &TreePath) -> bool {
        self.automaton.is_some()
            && path.ancestors().any(|ancestor| !ancestor.is_root() && self.matches(&ancestor))
    }
}

/// Why there is no automaton.
struct Refusal {
    /// Which line is at fault, from 0, if it is one alone.
    line: Option<usize>,
    why: String,
}

/// The error for `lines`, which give no automaton. If they are too large together, each is compiled
/// alone to see whether it is one, but no more of them than would fit into a few automata: whoever
/// sends many large lines gains no time by it.
fn fault_of(lines: &[String], refusal: Refusal) -> PatternError {
    let of_line = |index: usize, why| {
        let text = lines[index].clone();
        PatternError::Syntax { line: index + 1, text, why }
    };
    if let Some(index) = refusal.line {
        return of_line(index, refusal.why);
    }
    let mut bytes = 0;
    for (index, line) in lines.iter().enumerate() {
        match compile(std::slice::from_ref(line)) {
            Ok(automaton) => bytes += automaton.memory_usage(),
            Err(refusal) => return of_line(index, refusal.why),
        }
        if bytes > 4 * AUTOMATON_BYTES_MAX {
            break;
        }
    }
    PatternError::TooLarge { why: refusal.why }
}

fn compile(lines: &[String]) -> Result<Regex, Refusal> {
    let patterns: Vec<String> = lines.iter().map(|line| format!(r"\A(?:{line})")).collect();
    Regex::builder()
        .configure(
            Regex::config()
                .match_kind(MatchKind::All)
                .utf8_empty(false)
                .nfa_size_limit(Some(AUTOMATON_BYTES_MAX))
                .onepass_size_limit(Some(AUTOMATON_BYTES_MAX)),
        )
        .syntax(syntax::Config::new().unicode(false).utf8(false).dot_matches_new_line(true))
        .build_many(&patterns)
        .map_err(|error| match error.syntax_error() {
            Some(syntax) => {
                let line = error.pattern().map(|pattern| pattern.as_usize());
                Refusal { line, why: syntax.to_string() }
            }
            None => Refusal { line: None, why: error.to_string() },
        })
}

impl PartialEq for Patterns {
    fn eq(&self, other: &Self) -> bool {
        self.lines == other.lines
    }
}

impl Eq for Patterns {}

impl fmt::Debug for Patterns {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_list().entries(self.lines.iter()).finish()
    }
}

impl Serialize for Patterns {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.lines.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Patterns {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let lines = Vec::<String>::deserialize(deserializer)?;
        Self::new(lines).map_err(serde::de::Error::custom)
    }
}

/// Which paths of a machine belong to the image at all. See the module's text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Filter(Patterns);

impl Filter {
    /// Compiles a filter from its lines. No lines: the image covers everything.
    ///
    /// # Errors
    ///
    /// [`PatternError`] names the line.
    pub fn new<S: AsRef<str>>(lines: impl IntoIterator<Item = S>) -> Result<Self, PatternError> {
        Patterns::new(lines).map(Self)
    }

    /// Reads a filter file: one expression a line; empty lines and lines that start with `#` are
    /// skipped, and line numbers in errors are those of the file.
    ///
    /// # Errors
    ///
    /// [`PatternError`] names the line.
    pub fn from_text(text: &str) -> Result<Self, PatternError> {
        let numbered: Vec<(usize, &str)> = text
            .lines()
            .enumerate()
            .map(|(index, line)| (index + 1, line))
            .filter(|(_, line)| !line.trim().is_empty() && !line.starts_with('#'))
            .collect();
        Self::new(numbered.iter().map(|(_, line)| line)).map_err(|error| {
            let of_file = |line: usize| numbered.get(line - 1).map_or(line, |(number, _)| *number);
            match error {
                PatternError::Syntax { line, text, why } => {
                    PatternError::Syntax { line: of_file(line), text, why }
                }
                PatternError::Inverted { line } => PatternError::Inverted { line: of_file(line) },
                other @ PatternError::TooLarge { .. } => other,
            }
        })
    }

    /// The lines.
    #[must_use]
    pub fn lines(&self) -> &[String] {
        self.0.lines()
    }

    /// True if `path` or a directory above it matches: the machine keeps it.
    #[must_use]
    pub fn keeps(&self, path: &TreePath) -> bool {
        self.0.covers(path)
    }

    /// As [`Filter::keeps`] for a path whose parent is known not to be kept: one match instead of
    /// one for each level.
    #[must_use]
    pub fn keeps_below_unkept(&self, path: &TreePath) -> bool {
        self.0.matches(path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(text: &str) -> TreePath {
        text.parse().unwrap()
    }

    /// Each of these lines is as large as is allowed; to compile them all would take minutes.
    #[test]
    fn many_large_lines_are_refused_at_once() {
        let large = "(?:/[a-z]{1,500}){1,200}".to_owned();
        assert!(Patterns::new([&large]).is_ok());
        let error = Patterns::new(std::iter::repeat_n(&large, 1_000)).unwrap_err();
        assert!(matches!(error, PatternError::TooLarge { .. }), "{error}");
        let too_large = "(?:/[a-z]{1,500}){1,20000}".to_owned();
        match Patterns::new(["/a", &too_large, "/b"]).unwrap_err() {
            PatternError::Syntax { line, .. } => assert_eq!(line, 2),
            error => panic!("{error}"),
        }
    }

    #[test]
    fn keeps_what_matches_and_what_lies_below() {
        let filter = Filter::new(["/var/log/.*", "/etc/fstab$", "/home", "/a|b", "/new.line"]);
        let filter = filter.unwrap();
        #[rustfmt::skip]
        let table = [
            ("/var/log", false), ("/var/log/syslog", true), ("/var/log/a/b", true),
            ("/etc/fstab", true), ("/etc/fstab.bak", false), ("/etc/fstab/x", true),
            ("/home", true), ("/home/u", true), ("/homes", true),
            ("/a", true), ("/x/b", false), ("/", false), ("/new\nline", true),
        ];
        for (text, kept) in table {
            assert_eq!(filter.keeps(&path(text)), kept, "{text:?}");
        }
    }

    #[test]
    fn matches_bytes_that_are_not_text() {
        let filter = Filter::new([r"/odd/\xff.$"]).unwrap();
        assert!(filter.keeps(&TreePath::new(b"/odd/\xff\xfe").unwrap()));
        assert!(!filter.keeps(&path("/odd/x")));
    }

    #[test]
    fn an_empty_filter_keeps_nothing() {
        let filter = Filter::from_text("# nothing\n\n").unwrap();
        assert!(filter.lines().is_empty());
        assert!(!filter.keeps(&path("/etc")));
    }

    #[test]
    fn names_the_bad_line_of_the_file() {
        let error = Filter::from_text("# comment\n/ok\n/bad(\n").unwrap_err();
        assert!(error.to_string().starts_with("line 3: `/bad(` is no regular expression:"));
        let error = Filter::from_text("# comment\n!\n").unwrap_err();
        assert_eq!(error, PatternError::Inverted { line: 2 });
        let error = Filter::new(["/x{1000}{1000}{1000}"]).unwrap_err();
        assert!(matches!(error, PatternError::Syntax { line: 1, .. }), "{error}");
    }
}
