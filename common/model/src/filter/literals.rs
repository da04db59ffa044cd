//! Lines of a filter that need no automaton, because they only compare bytes.

use regex_automata::util::syntax;
use regex_syntax::hir::literal::{Extractor, Literal};
use regex_syntax::hir::{Hir, HirKind, Look};

/// What an anchored expression matches.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Shape {
    /// Each path that starts with these bytes.
    Prefix(Vec<u8>),
    /// The path that has exactly these bytes.
    Whole(Vec<u8>),
    /// Something else.
    Other,
}

impl Shape {
    /// Returns the shape of `expression`, which starts with `\A`.
    ///
    /// # Errors
    ///
    /// What the parser found wrong.
    pub(super) fn of(expression: &str) -> Result<Self, String> {
        let hir = syntax::parse_with(expression, &super::syntax());
        let hir = hir.map_err(|error| error.to_string())?;
        Ok(Self::of_parsed(&hir))
    }

    fn of_parsed(hir: &Hir) -> Self {
        let parts = match hir.kind() {
            HirKind::Concat(parts) => parts.as_slice(),
            _ => std::slice::from_ref(hir),
        };
        let [first, parts @ ..] = parts else { return Self::Other };
        if *first.kind() != HirKind::Look(Look::Start) {
            return Self::Other;
        }
        let (bytes, rest) = match parts {
            [] => (Vec::new(), parts),
            [first, rest @ ..] => match first.kind() {
                HirKind::Literal(literal) => (literal.0.to_vec(), rest),
                _ => (Vec::new(), parts),
            },
        };
        match rest {
            [] => Self::Prefix(bytes),
            [only] if matches_anything(only) => Self::Prefix(bytes),
            [any, end] if matches_anything(any) && is_end(end) => Self::Prefix(bytes),
            [end] if is_end(end) => Self::Whole(bytes),
            _ => Self::Other,
        }
    }
}

/// True if `line` is known to match no path: whatever it matches begins with another byte than a
/// slash.
pub(super) fn matches_no_path(line: &str) -> bool {
    let Ok(hir) = syntax::parse_with(line, &super::syntax()) else { return false };
    let mut extractor = Extractor::new();
    extractor.limit_class(256).limit_total(512);
    let prefixes = extractor.extract(&hir);
    let begins_otherwise =
        |prefix: &Literal| prefix.as_bytes().first().is_some_and(|first| *first != b'/');
    prefixes.literals().is_some_and(|prefixes| prefixes.iter().all(begins_otherwise))
}

fn is_end(hir: &Hir) -> bool {
    *hir.kind() == HirKind::Look(Look::End)
}

/// True for `.*`.
fn matches_anything(hir: &Hir) -> bool {
    let HirKind::Repetition(repetition) = hir.kind() else { return false };
    repetition.min == 0
        && repetition.max.is_none()
        && *repetition.sub == Hir::dot(regex_syntax::hir::Dot::AnyByte)
}

/// A set of prefixes and whole paths.
#[derive(Debug, Default)]
pub(super) struct Literals {
    /// In order; after [`Literals::finish`] none starts with another.
    prefixes: Vec<Box<[u8]>>,
    /// In order.
    wholes: Vec<Box<[u8]>>,
}

impl Literals {
    pub(super) fn add_prefix(&mut self, bytes: Vec<u8>) {
        self.prefixes.push(bytes.into());
    }

    pub(super) fn add_whole(&mut self, bytes: Vec<u8>) {
        self.wholes.push(bytes.into());
    }

    /// Must be called before [`Literals::matches`].
    pub(super) fn finish(&mut self) {
        self.wholes.sort_unstable();
        self.prefixes.sort_unstable();
        // In this order each prefix stands before all that start with it.
        self.prefixes.dedup_by(|longer, shorter| longer.starts_with(shorter));
    }

    pub(super) fn matches(&self, path: &[u8]) -> bool {
        // Only the last of those that are not greater can be a prefix, as none starts with another.
        let after = self.prefixes.partition_point(|prefix| **prefix <= *path);
        let has_prefix = after > 0 && path.starts_with(&self.prefixes[after - 1]);
        has_prefix || self.wholes.binary_search_by(|whole| (**whole).cmp(path)).is_ok()
    }
}
