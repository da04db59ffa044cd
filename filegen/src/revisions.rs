//! The numbers of the content revisions, and the orders about them, kept in one file.
//!
//! A content revision is all that decides the content of files: the versions of all generators.
//! Another set of versions has a higher number, which says to dominators what changed together.

use std::collections::BTreeMap;
use std::path::Path;

use api::file_generator::RevisionOrder;
use model::display::{error_chain, safe_text};
use model::object::ObjectId;
use model::path::TreePath;
use serde::{Deserialize, Serialize};
use system::durable::{Durable, DurableError, FileMedium, Json};
use system::random::random;

/// The name of the file in the state directory. Only its owner can read it, because a short secret
/// can be guessed from the version of its generator.
const FILE: &str = "revisions.json";

/// The largest file that is read, in bytes.
const BYTES_MAX: u64 = 64 << 20;

/// The most orders that are kept: those about the newest revisions.
const ORDERS_MAX: usize = 100;

/// The longest reason that is kept, in bytes.
const WHY_BYTES_MAX: usize = 1_000;

/// What is kept.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kept {
    /// A random number that is made with the file: if it is lost, numbers begin anew.
    pub numbering: u64,
    /// The number of the revision in force.
    pub revision: u64,
    /// By path, the version of the generator, and the revision since which it has it.
    pub generators: BTreeMap<TreePath, (ObjectId, u64)>,
    /// The last order about each revision that had one.
    pub orders: BTreeMap<u64, RevisionOrder>,
    /// The number of the last order.
    last_order: u64,
}

impl Kept {
    /// Takes the versions of the generators in force.
    fn number(&mut self, versions: &BTreeMap<TreePath, ObjectId>) {
        let next = self.revision + 1;
        let numbered = versions.iter().map(|(path, version)| {
            let known = self.generators.get(path).filter(|(known, _)| known == version);
            (path.clone(), known.copied().unwrap_or((*version, next)))
        });
        let numbered: BTreeMap<_, _> = numbered.collect();
        if numbered != self.generators {
            (self.generators, self.revision) = (numbered, next);
        }
    }

    /// Takes an order; returns its number.
    fn order(&mut self, revision: u64, stopped: Option<&str>) -> u64 {
        self.last_order += 1;
        let stopped = stopped.map(|why| safe_text(why, WHY_BYTES_MAX));
        let order = RevisionOrder { revision, number: self.last_order, stopped };
        self.orders.insert(revision, order);
        while self.orders.len() > ORDERS_MAX {
            self.orders.pop_first();
        }
        self.last_order
    }
}

/// The revisions of a server.
#[derive(Debug)]
pub struct Revisions(Durable<Kept, FileMedium>);

impl Revisions {
    /// Opens what is kept in `directory`. If it cannot be read, numbers begin anew, which
    /// dominators see.
    #[must_use]
    pub fn open(directory: &Path) -> Self {
        let path = directory.join(FILE);
        let medium = || FileMedium::new(&path, BYTES_MAX);
        let kept = Durable::load(medium()).unwrap_or_else(|error| {
            let error = error_chain(&error);
            tracing::error!("the numbers of content revisions begin anew: {error}");
            None
        });
        let new = || Durable::new(medium(), Json, Kept { numbering: random(), ..Kept::default() });
        Self(kept.unwrap_or_else(new))
    }

    /// Takes the versions of the generators that are to be in force. Blocks.
    ///
    /// # Errors
    ///
    /// If their number cannot be kept: then they must not be in force.
    pub fn number(&self, versions: &BTreeMap<TreePath, ObjectId>) -> Result<(), DurableError> {
        self.0.modify(|kept| kept.number(versions))
    }

    /// Takes an order about a revision; returns its number. Blocks.
    ///
    /// # Errors
    ///
    /// If it cannot be kept.
    pub fn order(&self, revision: u64, stopped: Option<&str>) -> Result<u64, DurableError> {
        self.0.modify(|kept| kept.order(revision, stopped))
    }

    /// Returns what is kept.
    #[must_use]
    pub fn kept(&self) -> std::sync::Arc<Kept> {
        self.0.get()
    }
}

#[cfg(test)]
mod tests {
    use model::object::Algorithm;

    use super::*;

    fn versions(all: &[(&str, &str)]) -> BTreeMap<TreePath, ObjectId> {
        let one = |(path, version): &(&str, &str)| {
            (path.parse().unwrap(), Algorithm::Blake3.digest(version.as_bytes()))
        };
        all.iter().map(one).collect()
    }

    fn revisions(of: &Revisions) -> (u64, Vec<u64>) {
        let kept = of.kept();
        (kept.revision, kept.generators.values().map(|(_, revision)| *revision).collect())
    }

    #[test]
    fn another_set_of_versions_has_the_next_number_also_after_a_restart() {
        let directory = tempfile::tempdir().unwrap();
        let opened = Revisions::open(directory.path());
        opened.number(&BTreeMap::new()).unwrap();
        opened.number(&versions(&[("/a", "1"), ("/b", "1")])).unwrap();
        let numbering = opened.kept().numbering;
        let table = [
            (&[("/a", "1"), ("/b", "1")][..], (1, vec![1, 1])),
            (&[("/a", "1"), ("/b", "1")][..], (1, vec![1, 1])),
            (&[("/a", "2"), ("/b", "1")][..], (2, vec![2, 1])),
            // What was before is a new revision too.
            (&[("/a", "1"), ("/b", "1")][..], (3, vec![3, 1])),
            (&[("/b", "1")][..], (4, vec![1])),
        ];
        for (all, expected) in table {
            let opened = Revisions::open(directory.path());
            opened.number(&versions(all)).unwrap();
            assert_eq!((revisions(&opened), opened.kept().numbering), (expected, numbering));
        }
        // The first one was opened before all this; the file is damaged.
        std::fs::write(directory.path().join(FILE), "{").unwrap();
        let opened = Revisions::open(directory.path());
        opened.number(&versions(&[("/b", "1")])).unwrap();
        assert_eq!(revisions(&opened), (1, vec![1]));
        assert_ne!(opened.kept().numbering, numbering);
    }

    #[test]
    fn the_last_order_about_a_revision_is_kept() {
        let directory = tempfile::tempdir().unwrap();
        let opened = Revisions::open(directory.path());
        assert_eq!(opened.order(7, Some("it is bad")).unwrap(), 1);
        assert_eq!(opened.order(8, Some("it is too")).unwrap(), 2);
        assert_eq!(opened.order(7, None).unwrap(), 3);
        let orders: Vec<RevisionOrder> =
            Revisions::open(directory.path()).kept().orders.values().cloned().collect();
        let resumed = RevisionOrder { revision: 7, number: 3, stopped: None };
        let stopped = RevisionOrder { revision: 8, number: 2, stopped: Some("it is too".into()) };
        assert_eq!(orders, [resumed, stopped]);
    }
}
