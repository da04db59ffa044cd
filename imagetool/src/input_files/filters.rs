//! Filter files: merging several, and counting what a filter keeps of a directory.
// tidy: core

use model::filter::{Filter, PatternError, Patterns};
use model::path::TreePath;
use serde::Serialize;

/// Merges filters: the result keeps a path exactly if one of them does. Lines are sorted and
/// unique, so that equal sets of lines give equal filters. Comments are dropped, because the lines
/// below them move.
///
/// # Errors
///
/// [`PatternError`] if the lines are too many together.
pub fn merge(filters: &[Filter]) -> Result<Filter, PatternError> {
    let mut lines: Vec<&String> = filters.iter().flat_map(Filter::lines).collect();
    lines.sort();
    lines.dedup();
    Filter::new(lines)
}

/// Returns the text of a filter file.
pub fn to_text(filter: &Filter) -> String {
    filter.lines().iter().map(|line| format!("{line}\n")).collect()
}

/// The entries of a tree that one line of a filter keeps.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FilterLineUse {
    pub line: String,
    /// Matched paths, without those below another matched path.
    pub paths: u64,
    /// All kept entries: the matched paths and everything below them.
    pub entries: u64,
    /// Total length of the kept files, in bytes.
    #[serde(with = "model::json::LargeNumber")]
    pub bytes: u64,
}

/// A kept path whose directory is not kept.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Kept {
    pub path: TreePath,
    /// The entry itself and the entries below it.
    pub entries: u64,
    /// Total length of the kept files, in bytes.
    #[serde(with = "model::json::LargeNumber")]
    pub bytes: u64,
    /// Numbers, from 1, of the lines that match the path itself.
    pub lines: Vec<usize>,
}

/// The entries of a tree that a filter keeps.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FilterUse {
    /// Counts by line, in the order of the filter. An entry that several lines keep counts for
    /// each.
    pub lines: Vec<FilterLineUse>,
    /// Counts by path.
    pub kept: Vec<Kept>,
    /// All entries of the tree without the root.
    pub entries: u64,
    /// Entries that are kept.
    pub kept_entries: u64,
    /// Total length of the kept files, in bytes.
    #[serde(with = "model::json::LargeNumber")]
    pub kept_bytes: u64,
}

/// Counts the entries of a tree that a filter keeps.
#[derive(Debug)]
pub struct Counter {
    filter: FilterUse,
    /// For each line its pattern, and the last path that it matched: everything below is kept too.
    patterns: Vec<(Patterns, Option<TreePath>)>,
}

impl Counter {
    /// Returns a counter without entries.
    pub fn new(filter: &Filter) -> Result<Self, PatternError> {
        let lines = filter.lines().iter();
        let pattern = |line: &String| Ok((Patterns::new([line])?, None));
        let patterns = lines.clone().map(pattern).collect::<Result<_, PatternError>>()?;
        let unused =
            |line: &String| FilterLineUse { line: line.clone(), paths: 0, entries: 0, bytes: 0 };
        let lines = lines.map(unused).collect();
        let filter =
            FilterUse { lines, kept: Vec::new(), entries: 0, kept_entries: 0, kept_bytes: 0 };
        Ok(Self { filter, patterns })
    }

    /// Counts the entry at `path`. The entries of a directory must follow it directly; for a file
    /// with several names, `bytes` must be given once.
    pub fn add(&mut self, path: &TreePath, bytes: u64) {
        if path.is_root() {
            return;
        }
        self.filter.entries += 1;
        let mut matching = Vec::new();
        let mut is_kept = false;
        for (index, (pattern, covered)) in self.patterns.iter_mut().enumerate() {
            let line = &mut self.filter.lines[index];
            if !covered.as_ref().is_some_and(|above| path.starts_with(above)) {
                if !pattern.matches(path) {
                    continue;
                }
                *covered = Some(path.clone());
                line.paths += 1;
                matching.push(index + 1);
            }
            is_kept = true;
            line.entries += 1;
            line.bytes = line.bytes.saturating_add(bytes);
        }
        if !is_kept {
            return;
        }
        self.filter.kept_entries += 1;
        self.filter.kept_bytes = self.filter.kept_bytes.saturating_add(bytes);
        match self.filter.kept.last_mut().filter(|last| path.starts_with(&last.path)) {
            Some(above) => {
                above.entries += 1;
                above.bytes = above.bytes.saturating_add(bytes);
            }
            None => {
                let path = path.clone();
                self.filter.kept.push(Kept { path, entries: 1, bytes, lines: matching });
            }
        }
    }

    /// Returns the counts.
    pub fn finish(self) -> FilterUse {
        self.filter
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merged_filters_are_sorted_and_keep_what_one_of_them_keeps() {
        let read = |text: &str| Filter::from_text(text).unwrap();
        let (one, other) = (read("# ours\n/tmp/.*\n/home/.*\n"), read("/var/log/.*\n/tmp/.*\n"));
        let merged = merge(&[one.clone(), other.clone()]).unwrap();
        assert_eq!(to_text(&merged), "/home/.*\n/tmp/.*\n/var/log/.*\n");
        assert_eq!(merge(&[other, one]).unwrap(), merged);
        assert_eq!(merge(std::slice::from_ref(&merged)).unwrap(), merged);
        assert_eq!(to_text(&merge(&[]).unwrap()), "");
    }

    #[test]
    fn what_each_line_keeps_is_counted() {
        let filter = Filter::new(["/log", "/log/a", "/none", "/x$"]).unwrap();
        let mut counter = Counter::new(&filter).unwrap();
        let entries = [
            ("/", 0),
            ("/etc", 0),
            ("/log", 0),
            ("/log/a", 5),
            ("/log/b", 7),
            ("/x", 1),
            ("/xy", 9),
        ];
        for (path, bytes) in entries {
            counter.add(&path.parse().unwrap(), bytes);
        }
        let seen = counter.finish();
        let of_line =
            |line: &FilterLineUse| (line.line.clone(), line.paths, line.entries, line.bytes);
        let lines: Vec<_> = seen.lines.iter().map(of_line).collect();
        let want = [("/log", 1, 3, 12), ("/log/a", 1, 1, 5), ("/none", 0, 0, 0), ("/x$", 1, 1, 1)];
        assert_eq!(lines, want.map(|(line, a, b, c)| (line.to_owned(), a, b, c)));
        let of_kept =
            |kept: &Kept| (kept.path.to_string(), kept.entries, kept.bytes, kept.lines.clone());
        let kept: Vec<_> = seen.kept.iter().map(of_kept).collect();
        let want = [("/log".to_owned(), 3, 12, vec![1]), ("/x".to_owned(), 1, 1, vec![4])];
        assert_eq!(kept, want);
        assert_eq!((seen.entries, seen.kept_entries, seen.kept_bytes), (6, 4, 13));
    }
}
