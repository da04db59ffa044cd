//! Filters: which paths an image leaves to each machine.
//!
//! A line is a regular expression over path bytes, matched from the start of the path as
//! `\A(?:LINE)` with `(?s-u)`. A path is *kept* if it or a directory
//! above it matches. Note that a line is not anchored at its end: `/etc/hosts` also keeps
//! `/etc/hosts.allow`; write `/etc/hosts$` to mean the one file.

mod literals;

use std::fmt;
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::sync::Arc;

use regex_automata::hybrid::dfa::{Cache, DFA};
use regex_automata::nfa::thompson::pikevm::PikeVM;
use regex_automata::nfa::thompson::{self, NFA, WhichCaptures};
use regex_automata::util::pool::Pool;
use regex_automata::util::syntax;
use regex_automata::{Anchored, Input, MatchKind};
use serde::{Deserialize, Serialize};

use self::literals::{Literals, Shape};
use crate::JsonSchema;
use crate::path::TreePath;

/// The most memory that the compiled lines of one filter may take, in bytes.
const AUTOMATA_BYTES_MAX: usize = 16 << 20;

/// The most memory that a thread caches while it matches the automata of one filter, in bytes; more
/// only for automata that cannot do with it, in proportion to their size.
const MATCHING_BYTES_MAX: usize = 8 << 20;

/// The longest line, in bytes. So much is compiled into one automaton.
const LINE_BYTES_MAX: usize = 64 << 10;

/// How much longer a line counts that turns Unicode on: there one class has hundreds of ranges.
const UNICODE_WEIGHT: usize = 16;

/// How much of a line that is too long is shown.
const SHOWN_CHARACTERS: usize = 80;

/// The most lines of one filter.
pub const LINES_MAX: usize = 10_000;

/// A line of a filter, or a match line of a trigger, that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PatternError {
    /// The line cannot be parsed.
    #[error("line {line}: `{text}` is no regular expression: {why}")]
    Syntax {
        /// The number of the line, from 1.
        line: usize,
        text: String,
        /// The error of the parser.
        why: String,
    },
    /// The line is `!`, which inverted the whole filter in the Go Dominator.
    #[error(
        "line {line}: `!` does not invert a filter here: list the paths that machines keep, or \
         give no filter to make a sparse image, which touches only its own paths"
    )]
    Inverted {
        /// The number of the line, from 1.
        line: usize,
    },
    /// The line matches no path.
    #[error("line {line}: `{text}` matches no path: paths begin with `/`")]
    NoMatch {
        /// The number of the line, from 1.
        line: usize,
        text: String,
    },
    #[error("line {line}: there are more than {LINES_MAX} lines")]
    TooMany {
        /// The number of the first line that is too many, from 1.
        line: usize,
    },
    /// The line is too long, or the lines up to this one need too much memory.
    #[error("line {line}: `{text}` is too large, alone or with the lines before: {why}")]
    TooLarge {
        /// The number of the line, from 1.
        line: usize,
        text: String,
        /// The error of the compiler.
        why: String,
    },
}

impl PatternError {
    /// Replaces the number of the line by what `number` makes of it.
    fn renumbered(mut self, number: impl FnOnce(usize) -> usize) -> Self {
        match &mut self {
            Self::Syntax { line, .. }
            | Self::Inverted { line }
            | Self::NoMatch { line, .. }
            | Self::TooMany { line }
            | Self::TooLarge { line, .. } => *line = number(*line),
        }
        self
    }
}

/// A set of patterns over paths. Cheap to clone.
///
/// Most lines of real filters are a literal, `LITERAL.*` or `LITERAL$`: these are looked up in
/// sorted lists. The others are compiled into automata. The memory of both is limited, and so is
/// the memory of matching.
#[derive(Clone, JsonSchema)]
#[schemars(with = "Vec<String>")]
pub struct Patterns(Arc<Compiled>);

struct Compiled {
    lines: Vec<String>,
    literals: Literals,
    /// The lines that are no literals.
    automata: Vec<Automaton>,
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
            return Err(PatternError::TooMany { line: LINES_MAX + 1 });
        }
        if let Some(index) = lines.iter().position(|line| line.trim() == "!") {
            return Err(PatternError::Inverted { line: index + 1 });
        }
        let mut literals = Literals::default();
        let mut automata = Automata::default();
        for (index, line) in lines.iter().enumerate() {
            let number = index + 1;
            if weight(line) > LINE_BYTES_MAX {
                let of_unicode = LINE_BYTES_MAX / UNICODE_WEIGHT;
                let why = format!(
                    "it is longer than {LINE_BYTES_MAX} bytes, or with Unicode than {of_unicode}"
                );
                let text = line.chars().take(SHOWN_CHARACTERS).collect();
                return Err(PatternError::TooLarge { line: number, text, why });
            }
            match Shape::of(&anchored(line)) {
                Ok(Shape::Prefix(bytes)) => literals.add_prefix(bytes),
                Ok(Shape::Whole(bytes)) => literals.add_whole(bytes),
                Ok(Shape::Other) => automata.add(&lines, index)?,
                Err(why) => {
                    return Err(PatternError::Syntax { line: number, text: line.clone(), why });
                }
            }
        }
        literals.finish();
        let automata = automata.finish(&lines)?;
        Ok(Self(Arc::new(Compiled { lines, literals, automata })))
    }

    /// Refuses a line that matches no path, because paths begin with a slash. Called for new images
    /// only, so that what is stored stays readable.
    ///
    /// # Errors
    ///
    /// [`PatternError::NoMatch`]
    pub fn check_new(&self) -> Result<(), PatternError> {
        let lines = &self.0.lines;
        match lines.iter().position(|line| literals::matches_no_path(line)) {
            Some(index) => {
                Err(PatternError::NoMatch { line: index + 1, text: lines[index].clone() })
            }
            None => Ok(()),
        }
    }

    /// The lines as they were given.
    #[must_use]
    pub fn lines(&self) -> &[String] {
        &self.0.lines
    }

    /// True if there are no lines.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.lines.is_empty()
    }

    /// True if a line matches `path` itself; ancestors are not looked at.
    #[must_use]
    pub fn matches(&self, path: &TreePath) -> bool {
        let path = path.as_bytes();
        self.0.literals.matches(path)
            || self.0.automata.iter().any(|automaton| automaton.is_match(path))
    }

    /// True if a line matches `path` or a directory above it (the root excepted).
    #[must_use]
    pub fn covers(&self, path: &TreePath) -> bool {
        !self.is_empty()
            && path.ancestors().any(|ancestor| !ancestor.is_root() && self.matches(&ancestor))
    }
}

/// The whole expression for `line`.
fn anchored(line: &str) -> String {
    format!(r"\A(?:{line})")
}

/// Returns how many bytes of memory `line` may need to be parsed, in proportion to other lines.
fn weight(line: &str) -> usize {
    let mut groups = line.split("(?").skip(1);
    let is_flag = |letter: &char| letter.is_ascii_alphabetic() || *letter == '-';
    let turns_on = |group: &str| group.chars().take_while(is_flag).any(|flag| flag == 'u');
    if groups.any(turns_on) { line.len() * UNICODE_WEIGHT } else { line.len() }
}

/// How lines are parsed: over bytes, and `.` matches every byte.
fn syntax() -> syntax::Config {
    syntax::Config::new().unicode(false).utf8(false).dot_matches_new_line(true)
}

/// Compiles lines, some at a time: the parsed form of a line may need 300 times the memory of its
/// text.
struct Automata {
    done: Vec<NFA>,
    /// The indices of the lines that are compiled next, and their weight.
    next: Vec<usize>,
    next_weight: usize,
    /// How much memory further automata may take.
    bytes_left: usize,
}

impl Default for Automata {
    fn default() -> Self {
        let (done, next) = (Vec::new(), Vec::new());
        Self { done, next, next_weight: 0, bytes_left: AUTOMATA_BYTES_MAX }
    }
}

impl Automata {
    fn add(&mut self, lines: &[String], index: usize) -> Result<(), PatternError> {
        let weight = weight(&lines[index]);
        if self.next_weight + weight > LINE_BYTES_MAX {
            self.compile_next(lines)?;
        }
        self.next_weight += weight;
        self.next.push(index);
        Ok(())
    }

    fn finish(mut self, lines: &[String]) -> Result<Vec<Automaton>, PatternError> {
        self.compile_next(lines)?;
        let cache_bytes = MATCHING_BYTES_MAX / self.done.len().max(1);
        let automata = self.done.into_iter().map(|nfa| Automaton::new(nfa, cache_bytes));
        // An NFA that fits has fewer states than an automaton may have.
        let too_large =
            |why| PatternError::TooLarge { line: lines.len(), text: String::new(), why };
        automata.collect::<Result<_, String>>().map_err(too_large)
    }

    fn compile_next(&mut self, lines: &[String]) -> Result<(), PatternError> {
        self.next_weight = 0;
        let next = std::mem::take(&mut self.next);
        if next.is_empty() {
            return Ok(());
        }
        let expressions: Vec<String> = next.iter().map(|index| anchored(&lines[*index])).collect();
        let nfa = nfa_compiler(self.bytes_left).build_many(&expressions).map_err(|error| {
            let index = next[first_too_large(&expressions, self.bytes_left)];
            let why = error.to_string();
            PatternError::TooLarge { line: index + 1, text: lines[index].clone(), why }
        })?;
        self.bytes_left = self.bytes_left.saturating_sub(nfa.memory_usage());
        self.done.push(nfa);
        Ok(())
    }
}

/// Returns the index of the expression with which those before need more than `bytes_left`.
fn first_too_large(expressions: &[String], mut bytes_left: usize) -> usize {
    let mut is_too_large = |expression: &String| match nfa_compiler(bytes_left).build(expression) {
        Ok(nfa) => {
            bytes_left = bytes_left.saturating_sub(nfa.memory_usage());
            false
        }
        Err(_) => true,
    };
    expressions.iter().position(&mut is_too_large).unwrap_or(expressions.len() - 1)
}

/// Compiles without captures, because the memory of matching grows with the states times the
/// captures.
fn nfa_compiler(bytes_max: usize) -> thompson::Compiler {
    let config = thompson::Config::new()
        .utf8(false)
        .which_captures(WhichCaptures::None)
        .nfa_size_limit(Some(bytes_max));
    let mut compiler = NFA::compiler();
    compiler.configure(config).syntax(syntax());
    compiler
}

/// Lines compiled into one automaton, whose states are made while paths are matched.
struct Automaton {
    dfa: DFA,
    /// A cache for each thread that matches now.
    caches: Pool<Cache, Box<dyn Fn() -> Cache + Send + Sync + UnwindSafe + RefUnwindSafe>>,
    /// For the paths for which `dfa` gives no answer, because a line looks for boundaries of words
    /// in Unicode.
    vm: PikeVM,
}

impl Automaton {
    /// Makes an automaton whose caches each take `cache_bytes`, or as much as they need.
    fn new(nfa: NFA, cache_bytes: usize) -> Result<Self, String> {
        let vm = PikeVM::new_from_nfa(nfa.clone()).map_err(|error| error.to_string())?;
        let config = DFA::config()
            .match_kind(MatchKind::All)
            .unicode_word_boundary(true)
            .cache_capacity(cache_bytes)
            .skip_cache_capacity_check(true);
        let dfa = DFA::builder().configure(config).build_from_nfa(nfa);
        let dfa = dfa.map_err(|error| error.to_string())?;
        let of_caches = dfa.clone();
        let caches: Box<dyn Fn() -> Cache + Send + Sync + UnwindSafe + RefUnwindSafe> =
            Box::new(move || of_caches.create_cache());
        Ok(Self { dfa, caches: Pool::new(caches), vm })
    }

    fn is_match(&self, path: &[u8]) -> bool {
        let input = Input::new(path).anchored(Anchored::Yes).earliest(true);
        match self.dfa.try_search_fwd(&mut self.caches.get(), &input) {
            Ok(found) => found.is_some(),
            Err(_) => self.vm.is_match(&mut self.vm.create_cache(), input),
        }
    }
}

impl PartialEq for Patterns {
    fn eq(&self, other: &Self) -> bool {
        self.0.lines == other.0.lines
    }
}

impl Eq for Patterns {}

impl fmt::Debug for Patterns {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_list().entries(&self.0.lines).finish()
    }
}

impl Serialize for Patterns {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.lines.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Patterns {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let lines = Vec::<String>::deserialize(deserializer)?;
        Self::new(lines).map_err(serde::de::Error::custom)
    }
}

/// Which paths of a machine belong to the image at all.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
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

    /// Reads a filter file for a new image: one expression a line; empty lines and lines that start
    /// with `#` are skipped, and line numbers in errors are those of the file.
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
        let filter = Self::new(numbered.iter().map(|(_, line)| line));
        let checked = filter.and_then(|filter| filter.check_new().map(|()| filter));
        checked.map_err(|error| {
            error.renumbered(|line| numbered.get(line - 1).map_or(line, |(number, _)| *number))
        })
    }

    /// As [`Patterns::check_new`]; the number is that among the lines of the filter.
    ///
    /// # Errors
    ///
    /// [`PatternError::NoMatch`]
    pub fn check_new(&self) -> Result<(), PatternError> {
        self.0.check_new()
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
    use proptest::collection::vec;
    use proptest::prelude::*;
    use proptest::sample::select;
    use regex_automata::meta::Regex;

    use super::*;

    fn path(text: &str) -> TreePath {
        text.parse().unwrap()
    }

    #[test]
    fn lines_that_match_no_path_are_refused_in_new_images() {
        for line in ["etc/no-slash", "var/.*", "a|b", "[^/]x", "x/(a|b)$", "\\.cache"] {
            let error = Filter::new(["/etc", line]).unwrap().check_new().unwrap_err();
            assert_eq!(error, PatternError::NoMatch { line: 2, text: line.to_owned() });
        }
        for line in
            ["/etc", "", ".*", ".*/x", "(a|/b)", "x?/y", "[/x]y", "(?i)/ETC", "[^x]etc", "$"]
        {
            assert_eq!(Filter::new([line]).unwrap().check_new(), Ok(()), "{line}");
        }
    }

    /// Each of these lines is as large as is allowed; to compile them all would take minutes.
    #[test]
    fn many_large_lines_are_refused_at_once() {
        let large = "(?:/[a-z]{1,500}){1,200}".to_owned();
        assert!(Patterns::new([&large]).is_ok());
        let error = Patterns::new(std::iter::repeat_n(&large, 1_000)).unwrap_err();
        assert!(matches!(error, PatternError::TooLarge { line: 2..=20, .. }), "{error}");
        let too_large = "(?:/[a-z]{1,500}){1,20000}".to_owned();
        match Patterns::new(["/a", "/a[bc]", &too_large, "/b"]).unwrap_err() {
            PatternError::TooLarge { line, text, .. } => assert_eq!((line, text), (3, too_large)),
            error => panic!("{error}"),
        }
        let long = "/a".repeat(LINE_BYTES_MAX);
        let error = Patterns::new(["/a", &long]).unwrap_err();
        assert!(matches!(error, PatternError::TooLarge { line: 2, .. }), "{error}");
        let lines = vec!["/a"; LINES_MAX + 1];
        let error = Patterns::new(lines).unwrap_err();
        assert_eq!(error.to_string(), "line 10001: there are more than 10000 lines");
    }

    #[test]
    fn most_lines_need_no_automaton() {
        let shape = |line: &str| Shape::of(&anchored(line)).unwrap();
        let prefix = |text: &str| Shape::Prefix(text.into());
        assert_eq!(shape("/var/log"), prefix("/var/log"));
        assert_eq!(shape("/var/log/.*"), prefix("/var/log/"));
        assert_eq!(shape("/var/log/.*$"), prefix("/var/log/"));
        assert_eq!(shape(r"/etc/resolv\.conf$"), Shape::Whole("/etc/resolv.conf".into()));
        assert_eq!(shape("(?:/a)(?:/b)"), prefix("/a/b"));
        assert_eq!(shape(".*"), prefix(""));
        assert_eq!(shape(""), prefix(""));
        for other in
            ["/a|/b", "/a)|(?:/b", "/a.+", "(?-s)/a.*", "(?m)/a$", "/a(?i)b", r"/a\b", "/a*"]
        {
            assert_eq!(shape(other), Shape::Other, "{other}");
        }
    }

    #[test]
    fn ten_thousand_lines_are_looked_up() {
        let line = |number: usize| match number % 4 {
            0 => format!("/var/lib/app{number}/.*"),
            1 => format!("/etc/app{number}.conf$"),
            2 => format!("/srv/app{number}/(?:cache|tmp)/"),
            _ => format!("/opt/app{number}/[^/]*/state"),
        };
        let filter = Filter::new((0..LINES_MAX).map(line)).unwrap();
        for number in (0..LINES_MAX).step_by(997) {
            let (kept, other) = match number % 4 {
                0 => (format!("/var/lib/app{number}/x"), format!("/var/lib/app{number}")),
                1 => (format!("/etc/app{number}.conf/x"), format!("/etc/app{number}.conf2")),
                2 => (format!("/srv/app{number}/tmp/x"), format!("/srv/app{number}/temp/x")),
                _ => (format!("/opt/app{number}/x/state"), format!("/opt/app{number}/state")),
            };
            assert!(filter.keeps(&path(&kept)), "{kept}");
            assert!(!filter.keeps(&path(&other)), "{other}");
        }
    }

    proptest! {
        /// Literals are looked up; that must give what one automaton of all lines gives.
        #[test]
        fn matches_what_one_automaton_matches(
            lines in vec(vec(select(PARTS.to_vec()), 0..5), 1..6),
            paths in vec("(/[abABé\n]{1,3}){1,3}", 1..20),
        ) {
            let lines: Vec<String> = lines.iter().map(|parts| parts.concat()).collect();
            let expressions: Vec<String> = lines.iter().map(|line| anchored(line)).collect();
            // A match may end within a character: paths are bytes.
            let config = Regex::config().utf8_empty(false);
            let all = Regex::builder().configure(config).syntax(syntax()).build_many(&expressions);
            let patterns = Patterns::new(&lines);
            prop_assert_eq!(all.is_ok(), patterns.is_ok());
            let (Ok(all), Ok(patterns)) = (all, patterns) else { return Ok(()) };
            for path in &paths {
                let expected = all.is_match(Input::new(path).anchored(Anchored::Yes));
                prop_assert_eq!(
                    patterns.matches(&path.parse().unwrap()), expected, "{:?} {}", &lines, path
                );
            }
        }
    }

    /// What lines of filters are made of.
    const PARTS: [&str; 15] = [
        "/a", "/b", "/", "a", "b", ".", ".*", "$", "|", "(?i)", "(", ")", "[ab]", r"\b", r"(?u:\b)",
    ];

    #[test]
    fn keeps_what_matches_and_what_lies_below() {
        // A line that matches no path changes nothing for the others.
        let within = Patterns::new(["$", "/b."]).unwrap();
        assert!(within.matches(&path("/bé")));
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
        assert!(matches!(error, PatternError::TooLarge { line: 1, .. }), "{error}");
    }
}
