//! Decides which paths a scan looks at.
// tidy: core

use std::sync::Arc;

use model::filter::Patterns;
use model::path::TreePath;
use model::scope::{Coverage, SUBD_DIRECTORY, ScanSettings};

/// What a scan does with a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look {
    /// Records it, and enters it if it is a directory.
    Record,
    /// Leaves it alone: it is content that its directory must be kept for.
    Keep,
    /// Leaves it alone, and says nothing about it: it is subd's own.
    Ignore,
}

/// What a scan under some settings sees.
#[derive(Clone, Debug)]
pub struct Sight {
    settings: Arc<ScanSettings>,
    exclusions: Patterns,
    own: TreePath,
}

impl Sight {
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
    pub fn look(&self, path: &TreePath) -> Look {
        if *path == self.own {
            return Look::Ignore;
        }
        let kept = self.exclusions.matches(path)
            || match &self.settings.coverage {
                Coverage::Full(filter) => filter.keeps_below_unkept(path),
                Coverage::Paths(paths) => !paths.contains(path),
            };
        if kept { Look::Keep } else { Look::Record }
    }
}

#[cfg(test)]
mod tests {
    use model::filter::Filter;

    use super::*;

    fn look(coverage: Coverage, exclusions: &[&str], path: &str) -> Look {
        let settings = Arc::new(ScanSettings { coverage, ..ScanSettings::default() });
        let exclusions = Patterns::new(exclusions).unwrap();
        Sight::new(settings, exclusions).look(&path.parse().unwrap())
    }

    #[test]
    fn sees_what_is_covered() {
        let full = Coverage::Full(Filter::new(["/var/log/.*", "/home"]).unwrap());
        let listed = ["/", "/etc", "/etc/motd"].map(|path| path.parse().unwrap());
        let sparse = Coverage::Paths(listed.into());
        #[rustfmt::skip]
        let table = [
            (&full, "/etc", Look::Record), (&full, "/var/log", Look::Record),
            (&full, "/var/log/x", Look::Keep), (&full, "/home", Look::Keep),
            (&full, "/etc/local", Look::Keep), (&full, "/.subd", Look::Ignore),
            (&full, "/a/.subd", Look::Record), (&sparse, "/etc", Look::Record),
            (&sparse, "/etc/motd", Look::Record), (&sparse, "/etc/passwd", Look::Keep),
            (&sparse, "/usr", Look::Keep), (&sparse, "/.subd", Look::Ignore),
        ];
        for (coverage, path, expected) in table {
            assert_eq!(look(coverage.clone(), &["/etc/local"], path), expected, "{path}");
        }
    }
}
