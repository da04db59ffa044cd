//! Whether a replica takes the directories of its master, by their versions, and in what pages.
//!
//! What a replica must never do: let go of directories and their owners because the master has
//! lost its own, or has begun anew. So it takes only what goes on from what it has.
// tidy: core

use std::collections::BTreeMap;

use api::access::OwnersError;
use api::image_server::replication::directories::{
    DirectoriesTrouble, DirectoriesVersion, GetMadeDirectoriesReply, GetMadeDirectoriesRequest,
    MadeDirectory, PAGE_DIRECTORIES_MAX,
};
use model::image::ImageName;

use crate::core::directories::{DIRECTORIES_MAX, Directories, Made};

/// What there is on this server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Own {
    /// They have this version, and so many were made.
    Known(Option<DirectoriesVersion>, usize),
    /// What there is cannot be used.
    Damaged,
}

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// They are those of the master.
    Nothing,
    /// Take all of them from the master.
    Take,
    /// Leave those that are here, and tell operators.
    Keep(DirectoriesTrouble),
}

/// Decides by the version that the master tells.
#[must_use]
pub fn decide(theirs: Option<DirectoriesVersion>, own: Own) -> Decision {
    use DirectoriesTrouble::{Conflict, Damaged, NewerHere, OnlyHere};
    match (theirs, own) {
        (None, Own::Known(_, 0)) => Decision::Nothing,
        (None, Own::Known(..)) => Decision::Keep(OnlyHere),
        (_, Own::Damaged) => Decision::Keep(Damaged),
        (theirs, Own::Known(own, _)) if theirs == own => Decision::Nothing,
        (_, Own::Known(None, _)) => Decision::Take,
        (Some(theirs), Own::Known(Some(own), _)) if theirs.line == own.line => {
            // After as many changes the master is right: this server or another one that it
            // followed was the master before, and had one that was not known everywhere.
            if theirs.changes >= own.changes { Decision::Take } else { Decision::Keep(NewerHere) }
        }
        // Nothing is lost.
        (Some(_), Own::Known(_, 0)) => Decision::Take,
        (Some(_), Own::Known(..)) => Decision::Keep(Conflict),
    }
}

/// Pages that break the rules.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PageError {
    /// There is too much in it, or in all of them.
    #[error("the master tells of more than {limit} directories {within}")]
    TooMany {
        /// What is accepted.
        limit: usize,
        /// In what.
        within: &'static str,
    },
    /// A page is not sorted, or does not follow the one before.
    #[error("the master's directories are not sorted at {name}")]
    Order {
        /// Where.
        name: ImageName,
    },
    /// There should be more, after nothing.
    #[error("a page of the master's directories is empty, and not the last one")]
    Empty,
    /// Owners that nothing may have.
    #[error("the master's directory {name} has owners that are not allowed")]
    Owners {
        /// The directory.
        name: ImageName,
        /// Why not.
        #[source]
        source: OwnersError,
    },
}

/// The directories of a master, as far as they came.
#[derive(Clone, Debug, Default)]
pub struct Draft {
    version: Option<DirectoriesVersion>,
    made: BTreeMap<ImageName, Made>,
}

/// What came of a page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Ask for the next one.
    More,
    /// That was all.
    Whole(Directories),
    /// They have changed meanwhile: begin anew.
    Changed,
}

impl Draft {
    /// What to ask for next.
    #[must_use]
    pub fn request(&self) -> GetMadeDirectoriesRequest {
        GetMadeDirectoriesRequest { after: self.made.keys().next_back().cloned() }
    }

    /// Takes a page.
    ///
    /// # Errors
    ///
    /// [`PageError`].
    pub fn take(&mut self, page: GetMadeDirectoriesReply) -> Result<Step, PageError> {
        let GetMadeDirectoriesReply { version: Some(version), directories, more } = page else {
            return Ok(Step::Changed);
        };
        if *self.version.get_or_insert(version) != version {
            return Ok(Step::Changed);
        }
        let too_many = |limit, within| Err(PageError::TooMany { limit, within });
        if directories.len() > PAGE_DIRECTORIES_MAX {
            return too_many(PAGE_DIRECTORIES_MAX, "at once");
        }
        if self.made.len() + directories.len() > DIRECTORIES_MAX {
            return too_many(DIRECTORIES_MAX, "in all");
        }
        if more && directories.is_empty() {
            return Err(PageError::Empty);
        }
        for MadeDirectory { name, owners, made_on } in directories {
            if self.made.keys().next_back().is_some_and(|last| *last >= name) {
                return Err(PageError::Order { name });
            }
            if let Err(source) = owners.verify() {
                return Err(PageError::Owners { name, source });
            }
            self.made.insert(name, Made { owners, made_on });
        }
        if more {
            return Ok(Step::More);
        }
        Ok(Step::Whole(Directories::of_version(version, std::mem::take(&mut self.made))))
    }
}

#[cfg(test)]
mod tests {
    use api::access::Owners;
    use model::tree::Time;

    use super::*;

    fn version(line: u64, changes: u64, id: u64) -> DirectoriesVersion {
        DirectoriesVersion { line, changes, id }
    }

    #[test]
    fn each_case_has_its_decision() {
        use Decision::{Keep, Nothing, Take};
        use DirectoriesTrouble::{Conflict, Damaged, NewerHere, OnlyHere};
        let some = |line, changes, id| Some(version(line, changes, id));
        #[rustfmt::skip]
        let table = [
            // the master      here                           decision
            (None,             Own::Known(None, 0),           Nothing),
            (None,             Own::Known(some(1, 5, 1), 3),  Keep(OnlyHere)),
            (None,             Own::Known(some(1, 5, 1), 0),  Nothing),
            (None,             Own::Damaged,                  Keep(Damaged)),
            (some(1, 5, 1),    Own::Damaged,                  Keep(Damaged)),
            (some(1, 5, 1),    Own::Known(None, 0),           Take),
            (some(1, 5, 1),    Own::Known(some(1, 5, 1), 3),  Nothing),
            (some(1, 6, 2),    Own::Known(some(1, 5, 1), 3),  Take),
            (some(1, 5, 2),    Own::Known(some(1, 5, 1), 3),  Take),
            (some(1, 4, 2),    Own::Known(some(1, 5, 1), 3),  Keep(NewerHere)),
            (some(1, 4, 2),    Own::Known(some(1, 5, 1), 0),  Keep(NewerHere)),
            (some(2, 9, 2),    Own::Known(some(1, 5, 1), 3),  Keep(Conflict)),
            (some(2, 1, 2),    Own::Known(some(1, 5, 1), 0),  Take),
        ];
        for (theirs, own, expected) in table {
            assert_eq!(decide(theirs, own), expected, "{theirs:?} {own:?}");
        }
    }

    fn made(names: &[&str]) -> Vec<MadeDirectory> {
        let one = |text: &&str| MadeDirectory {
            name: ImageName::new(text).unwrap(),
            owners: Owners::new([*text], []),
            made_on: Time::default(),
        };
        names.iter().map(one).collect()
    }

    fn page(id: u64, names: &[&str], more: bool) -> GetMadeDirectoriesReply {
        let version = Some(version(1, 5, id));
        GetMadeDirectoriesReply { version, directories: made(names), more }
    }

    #[test]
    fn pages_of_one_version_make_a_whole() {
        let mut draft = Draft::default();
        assert_eq!(draft.request().after, None);
        assert_eq!(draft.take(page(1, &["a", "b"], true)), Ok(Step::More));
        assert_eq!(draft.request().after, Some(ImageName::new("b").unwrap()));
        let Ok(Step::Whole(whole)) = draft.take(page(1, &["c"], false)) else { panic!() };
        assert_eq!(whole.version(), Some(version(1, 5, 1)));
        assert_eq!(whole.page(None, 2), (made(&["a", "b"]), true));
        let after = ImageName::new("b").unwrap();
        assert_eq!(whole.page(Some(&after), 2), (made(&["c"]), false));

        let mut draft = Draft::default();
        draft.take(page(1, &["a"], true)).unwrap();
        assert_eq!(draft.clone().take(page(2, &["b"], false)), Ok(Step::Changed));
        let none = GetMadeDirectoriesReply { version: None, directories: vec![], more: false };
        assert_eq!(draft.take(none), Ok(Step::Changed));
    }

    #[test]
    fn pages_that_break_the_rules_are_refused() {
        let order = |text: &str| PageError::Order { name: ImageName::new(text).unwrap() };
        let many: Vec<String> =
            (0..=PAGE_DIRECTORIES_MAX).map(|number| format!("x{number:06}")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        let too_many = PageError::TooMany { limit: PAGE_DIRECTORIES_MAX, within: "at once" };
        let mut long = page(1, &["n"], false);
        long.directories[0].owners = Owners::new(["x".repeat(5_000).as_str()], []);
        let source = long.directories[0].owners.verify().unwrap_err();
        let owners = PageError::Owners { name: ImageName::new("n").unwrap(), source };
        #[rustfmt::skip]
        let table = [
            (page(1, &["z", "o"], false),  order("o")),
            (page(1, &["n", "n"], false),  order("n")),
            (page(1, &["a"], false),       order("a")),
            (page(1, &[], true),           PageError::Empty),
            (page(1, &many, false),        too_many),
            (long,                         owners),
        ];
        for (page, error) in table {
            let mut draft = Draft::default();
            draft.take(self::page(1, &["m"], true)).unwrap();
            let got = draft.take(page);
            assert_eq!(got.map_err(|error| error.to_string()), Err(error.to_string()));
        }
    }
}
