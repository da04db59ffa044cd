//! Decides whether a replica takes the directories of its master, and assembles their pages.
//!
//! A replica never drops directories and owners because the master has lost its own or started with
//! none. It takes only versions that continue its own.
// tidy: core

use std::collections::BTreeMap;

use api::access::OwnersError;
use api::image_server::replication::directories::{
    DirectoriesTrouble, DirectoriesVersion, GetMadeDirectoriesReply, GetMadeDirectoriesRequest,
    MadeDirectory, PAGE_DIRECTORIES_MAX,
};
use model::image::ImageName;

use crate::core::directories::{DIRECTORIES_MAX, Directories, Made};

/// The state of the local directories.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LocalState {
    /// The version, and the number of directories that were made.
    Known(Option<DirectoriesVersion>, usize),
    /// The local directories cannot be used.
    Damaged,
}

/// The decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DirectoriesDecision {
    /// The directories are those of the master.
    Nothing,
    /// Fetch all directories of the master.
    Fetch,
    /// Leave the local directories as they are, and report why.
    Blocked(DirectoriesTrouble),
}

/// Decides by the version that the master reports.
#[must_use]
pub fn decide(theirs: Option<DirectoriesVersion>, own: LocalState) -> DirectoriesDecision {
    use DirectoriesTrouble::{Conflict, Damaged, NewerHere, OnlyHere};
    match (theirs, own) {
        (None, LocalState::Known(_, 0)) => DirectoriesDecision::Nothing,
        (None, LocalState::Known(..)) => DirectoriesDecision::Blocked(OnlyHere),
        (_, LocalState::Damaged) => DirectoriesDecision::Blocked(Damaged),
        (theirs, LocalState::Known(own, _)) if theirs == own => DirectoriesDecision::Nothing,
        (_, LocalState::Known(None, _)) => DirectoriesDecision::Fetch,
        (Some(theirs), LocalState::Known(Some(own), _)) if theirs.line == own.line => {
            // With the same number of changes the master is right: this server, or another one that
            // it followed, was the master before and had a change that did not reach all servers.
            if theirs.changes >= own.changes {
                DirectoriesDecision::Fetch
            } else {
                DirectoriesDecision::Blocked(NewerHere)
            }
        }
        // No local directory is lost.
        (Some(_), LocalState::Known(_, 0)) => DirectoriesDecision::Fetch,
        (Some(_), LocalState::Known(..)) => DirectoriesDecision::Blocked(Conflict),
    }
}

/// Explains why the directories are not those of `master`.
#[must_use]
pub fn explain(trouble: DirectoriesTrouble, master: &str) -> String {
    match trouble {
        DirectoriesTrouble::OnlyHere => format!(
            "the master {master} has no directories, or cannot use what it has: those that are \
             here stay. If it has lost them, stop it and give it the file `directories` of this \
             server's data directory"
        ),
        DirectoriesTrouble::Conflict => format!(
            "the directories of the master {master} began apart from those that are here, which \
             stay. If its are right, move the file `directories` of this server's data directory \
             away, and restart this server; if these are, stop the master and give it that file"
        ),
        DirectoriesTrouble::NewerHere => format!(
            "the directories of the master {master} are older than those that are here, which \
             stay until its were changed as often. If it was restored from a backup, stop it and \
             give it the file `directories` of this server's data directory; if its are right, \
             move that file away, and restart this server"
        ),
        DirectoriesTrouble::Damaged => format!(
            "the file `directories` of this server's data directory is damaged: move it away and \
             restart this server, and they come again from the master {master}"
        ),
        DirectoriesTrouble::Failing => {
            format!("the directories cannot be had from the master {master}")
        }
    }
}

/// Why a page is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PageError {
    #[error("the master tells of more than {limit} directories {within}")]
    TooMany { limit: usize, within: &'static str },
    #[error("the master's directories are not sorted at {name}")]
    Order { name: ImageName },
    #[error("a page of the master's directories is empty, and not the last one")]
    Empty,
    #[error("the master's directory {name} has owners that are not allowed")]
    Owners {
        name: ImageName,
        #[source]
        source: OwnersError,
    },
}

/// The directories of a master, as far as they were received.
#[derive(Clone, Debug, Default)]
pub struct Draft {
    version: Option<DirectoriesVersion>,
    made: BTreeMap<ImageName, Made>,
}

/// The result of adding a page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PageOutcome {
    /// Request the next page.
    More,
    /// That was the last page.
    Whole(Directories),
    /// The directories have changed meanwhile: fetch them again.
    Changed,
}

impl Draft {
    /// Returns the next request.
    #[must_use]
    pub fn request(&self) -> GetMadeDirectoriesRequest {
        GetMadeDirectoriesRequest { after: self.made.keys().next_back().cloned() }
    }

    /// Adds a page.
    pub fn take(&mut self, page: GetMadeDirectoriesReply) -> Result<PageOutcome, PageError> {
        let GetMadeDirectoriesReply { version: Some(version), directories, more } = page else {
            return Ok(PageOutcome::Changed);
        };
        if *self.version.get_or_insert(version) != version {
            return Ok(PageOutcome::Changed);
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
            self.made.insert(name, Made { owners, made_on, ..Made::default() });
        }
        if more {
            return Ok(PageOutcome::More);
        }
        Ok(PageOutcome::Whole(Directories::with_version(version, std::mem::take(&mut self.made))))
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
        use DirectoriesDecision::{Blocked, Fetch, Nothing};
        use DirectoriesTrouble::{Conflict, Damaged, NewerHere, OnlyHere};
        let some = |line, changes, id| Some(version(line, changes, id));
        #[rustfmt::skip]
        let table = [
            // the master      here                           decision
            (None,             LocalState::Known(None, 0),           Nothing),
            (None,             LocalState::Known(some(1, 5, 1), 3),  Blocked(OnlyHere)),
            (None,             LocalState::Known(some(1, 5, 1), 0),  Nothing),
            (None,             LocalState::Damaged,                  Blocked(Damaged)),
            (some(1, 5, 1),    LocalState::Damaged,                  Blocked(Damaged)),
            (some(1, 5, 1),    LocalState::Known(None, 0),           Fetch),
            (some(1, 5, 1),    LocalState::Known(some(1, 5, 1), 3),  Nothing),
            (some(1, 6, 2),    LocalState::Known(some(1, 5, 1), 3),  Fetch),
            (some(1, 5, 2),    LocalState::Known(some(1, 5, 1), 3),  Fetch),
            (some(1, 4, 2),    LocalState::Known(some(1, 5, 1), 3),  Blocked(NewerHere)),
            (some(1, 4, 2),    LocalState::Known(some(1, 5, 1), 0),  Blocked(NewerHere)),
            (some(2, 9, 2),    LocalState::Known(some(1, 5, 1), 3),  Blocked(Conflict)),
            (some(2, 1, 2),    LocalState::Known(some(1, 5, 1), 0),  Fetch),
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
        assert_eq!(draft.take(page(1, &["a", "b"], true)), Ok(PageOutcome::More));
        assert_eq!(draft.request().after, Some(ImageName::new("b").unwrap()));
        let Ok(PageOutcome::Whole(whole)) = draft.take(page(1, &["c"], false)) else { panic!() };
        assert_eq!(whole.version(), Some(version(1, 5, 1)));
        assert_eq!(whole.page(None, 2), (made(&["a", "b"]), true));
        let after = ImageName::new("b").unwrap();
        assert_eq!(whole.page(Some(&after), 2), (made(&["c"]), false));

        let mut draft = Draft::default();
        draft.take(page(1, &["a"], true)).unwrap();
        assert_eq!(draft.clone().take(page(2, &["b"], false)), Ok(PageOutcome::Changed));
        let none = GetMadeDirectoriesReply { version: None, directories: vec![], more: false };
        assert_eq!(draft.take(none), Ok(PageOutcome::Changed));
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
