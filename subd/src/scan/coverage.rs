//! Decides which paths a scan looks at.
// tidy: core

use std::sync::Arc;

use model::filter::Patterns;
use model::path::TreePath;
use model::scope::{Coverage, SUBD_DIRECTORY, ScanSettings};

/// What a scan does with a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathAction {
    /// Records it, and enters it if it is a directory.
    Record,
    /// Leaves it alone: it is content that its directory must be kept for.
    Keep,
    /// Leaves it alone, and says nothing about it: it is subd's own.
    Ignore,
}

/// What a scan under some settings sees.
#[derive(Clone, Debug)]
pub struct PathCoverage {
    settings: Arc<ScanSettings>,
    exclusions: Patterns,
    own: TreePath,
}

impl PathCoverage {
    /// Sees what `settings` cover, less the local `exclusions`.
    #[must_use]
    pub fn new(settings: Arc<ScanSettings>, exclusions: Patterns) -> Self {
        let own = TreePath::new(SUBD_DIRECTORY).expect("the constant is a path");
        Self { settings, exclusions, own }
    }

    /// The settings.
    #[must_use]
    pub fn settings(&self) -> &ScanSettings {
        &self.settings
    }

    /// Decides on `path`, whose parent is to be recorded.
    #[must_use]
    pub fn look(&self, path: &TreePath) -> PathAction {
        if *path == self.own {
            return PathAction::Ignore;
        }
        let kept = self.exclusions.matches(path)
            || match &self.settings.coverage {
                Coverage::Full(filter) => filter.keeps_below_unkept(path),
                Coverage::Paths(paths) => !paths.contains(path),
            };
        if kept { PathAction::Keep } else { PathAction::Record }
    }
}

#[cfg(test)]
mod tests {
    use model::filter::Filter;

    use super::*;

    fn look(coverage: Coverage, exclusions: &[&str], path: &str) -> PathAction {
        let settings = Arc::new(ScanSettings { coverage, ..ScanSettings::default() });
        let exclusions = Patterns::new(exclusions).unwrap();
        PathCoverage::new(settings, exclusions).look(&path.parse().unwrap())
    }

    #[test]
    fn sees_what_is_covered() {
        let full = Coverage::Full(Filter::new(["/var/log/.*", "/home"]).unwrap());
        let listed = ["/", "/etc", "/etc/motd"].map(|path| path.parse().unwrap());
        let sparse = Coverage::Paths(listed.into());
        #[rustfmt::skip]
        let table = [
            (&full, "/etc", PathAction::Record), (&full, "/var/log", PathAction::Record),
            (&full, "/var/log/x", PathAction::Keep), (&full, "/home", PathAction::Keep),
            (&full, "/etc/local", PathAction::Keep), (&full, "/.subd", PathAction::Ignore),
            (&full, "/a/.subd", PathAction::Record), (&sparse, "/etc", PathAction::Record),
            (&sparse, "/etc/motd", PathAction::Record), (&sparse, "/etc/passwd", PathAction::Keep),
            (&sparse, "/usr", PathAction::Keep), (&sparse, "/.subd", PathAction::Ignore),
        ];
        for (coverage, path, expected) in table {
            assert_eq!(look(coverage.clone(), &["/etc/local"], path), expected, "{path}");
        }
    }
}
