//! Counts the objects of the store, while those of former runs are still being counted.
//!
//! A walk counts one directory after the other, beside uploads. The walk counts changes in
//! directories that it has not reached. Changes in directories that it has finished are added. In
//! the directory that it is reading, the last state of each changed object counts, whether the walk
//! saw it or not. File times do not tell which objects are new, because a clock may be set back.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use model::lock::locked;
use model::object::ObjectId;

use super::layout;
use crate::store::error::StoreError;

/// How many objects the store holds, and the length of their files together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ObjectCounts {
    pub objects: u64,
    /// The length of their files together in bytes, packed ones as stored.
    pub bytes: u64,
    /// False until those of former runs have been counted too.
    pub complete: bool,
}

/// A change of an object: the length of its file in bytes before and after, `None` where it was
/// missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Change {
    pub before: Option<u64>,
    pub after: Option<u64>,
}

/// The state of the walk in one directory.
enum Walk {
    Ahead,
    /// The objects that changed since the walk of this directory began, by file name.
    Under(HashMap<String, Option<u64>>),
    Done,
}

/// Counts the objects of a store.
pub(super) struct ObjectCounter {
    /// In the order of [`directories`].
    walks: Vec<Mutex<Walk>>,
    total: Mutex<(u64, u64)>,
    complete: AtomicBool,
}

/// Returns the directories of objects with their algorithms.
pub(super) fn directories() -> impl Iterator<Item = (model::object::Algorithm, std::path::PathBuf)>
{
    layout::ALGORITHMS.into_iter().flat_map(|algorithm| {
        layout::fan_out(algorithm).map(move |directory| (algorithm, directory))
    })
}

impl ObjectCounter {
    pub fn new() -> Self {
        Self {
            walks: directories().map(|_| Mutex::new(Walk::Ahead)).collect(),
            total: Mutex::default(),
            complete: AtomicBool::new(false),
        }
    }

    /// Makes `change` to the file of `id` and counts it. Changes in one directory are made one
    /// after the other.
    pub fn note(
        &self,
        id: &ObjectId,
        change: impl FnOnce() -> Result<Change, StoreError>,
    ) -> Result<(), StoreError> {
        let mut walk = locked(&self.walks[directory_index(id)]);
        let change = change()?;
        match &mut *walk {
            Walk::Ahead => (),
            Walk::Under(changed) => {
                changed.insert(id.hex(), change.after);
            }
            Walk::Done => self.add(change),
        }
        Ok(())
    }

    /// Counts what lies in the directory `objects`, until `stop` says so.
    pub fn count(&self, objects: &Path, stop: impl Fn() -> bool) {
        for ((algorithm, directory), walk) in directories().zip(&self.walks) {
            *locked(walk) = Walk::Under(HashMap::new());
            let empty = algorithm.digest(&[]).hex();
            let mut found = HashMap::new();
            for entry in walkdir::WalkDir::new(objects.join(directory)).min_depth(1).max_depth(1) {
                if stop() {
                    return;
                }
                let Ok(entry) = entry else { continue };
                let Ok(metadata) = entry.metadata() else { continue };
                let name = entry.file_name().to_string_lossy();
                let name = layout::form_of(&name).0.to_owned();
                // A crash of the machine leaves files that were just made empty.
                if metadata.len() > 0 || name == empty {
                    found.insert(name, Some(metadata.len()));
                }
            }
            let mut walk = locked(walk);
            if let Walk::Under(changed) = std::mem::replace(&mut *walk, Walk::Done) {
                found.extend(changed);
            }
            for after in found.into_values() {
                self.add(Change { before: None, after });
            }
        }
        self.complete.store(true, Ordering::Release);
    }

    pub fn object_counts(&self) -> ObjectCounts {
        // Read first: what was counted before it became true is in the total.
        let complete = self.complete.load(Ordering::Acquire);
        let (objects, bytes) = *locked(&self.total);
        ObjectCounts { objects, bytes, complete }
    }

    fn add(&self, Change { before, after }: Change) {
        let mut total = locked(&self.total);
        let (objects, bytes) = &mut *total;
        // Files may have been removed or truncated by hand: saturates at zero.
        *objects = (*objects + u64::from(after.is_some())).saturating_sub(before.is_some().into());
        *bytes = (*bytes + after.unwrap_or(0)).saturating_sub(before.unwrap_or(0));
    }
}

/// The place of the directory of `id` among [`directories`].
fn directory_index(id: &ObjectId) -> usize {
    let algorithm = layout::ALGORITHMS.iter().position(|algorithm| *algorithm == id.algorithm());
    let before = algorithm.expect("every algorithm has a directory") * 256;
    before + usize::from(id.digest()[0])
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use model::object::Algorithm;

    use super::*;

    const CAME: Change = Change { before: None, after: Some(7) };
    const WENT: Change = Change { before: Some(7), after: None };

    fn held(objects: u64, bytes: u64, complete: bool) -> ObjectCounts {
        ObjectCounts { objects, bytes, complete }
    }

    fn store(contents: &[&[u8]]) -> (tempfile::TempDir, PathBuf) {
        let objects = tempfile::tempdir().unwrap();
        for (_, directory) in directories() {
            std::fs::create_dir_all(objects.path().join(directory)).unwrap();
        }
        for content in contents {
            let id = Algorithm::Blake3.digest(content);
            std::fs::write(objects.path().join(layout::object_path(&id)), content).unwrap();
        }
        let path = objects.path().to_owned();
        (objects, path)
    }

    #[test]
    fn each_object_has_the_place_of_its_directory() {
        let places: Vec<_> = directories().map(|(_, directory)| directory).collect();
        for algorithm in layout::ALGORITHMS {
            for content in 0..2_000_u32 {
                let id = algorithm.digest(&content.to_le_bytes());
                assert_eq!(
                    layout::object_path(&id).parent().unwrap(),
                    places[directory_index(&id)]
                );
            }
        }
    }

    #[test]
    fn what_changes_before_at_and_after_the_walk_is_counted_once() {
        let (_kept, objects) = store(&[b"", b"one", b"three", b"1234567"]);
        let changing = Algorithm::Blake3.digest(b"1234567");
        let cut = Algorithm::Blake3.digest(b"was cut by a crash");
        std::fs::write(objects.join(layout::object_path(&cut)), b"").unwrap();

        // It comes again before it is walked, goes, comes and goes while its directory is walked.
        let counter = ObjectCounter::new();
        counter.note(&changing, || Ok(CAME)).unwrap();
        assert_eq!(counter.object_counts(), held(0, 0, false));
        let directory = directory_index(&changing);
        let looks = std::cell::Cell::new(0);
        counter.count(&objects, || {
            if matches!(&*locked(&counter.walks[directory]), Walk::Under(_)) {
                looks.set(looks.get() + 1);
                for change in [WENT, CAME, WENT] {
                    counter.note(&changing, || Ok(change)).unwrap();
                }
            }
            false
        });
        assert_eq!((counter.object_counts(), looks.get()), (held(3, 8, true), 1));

        counter.note(&changing, || Ok(CAME)).unwrap();
        assert_eq!(counter.object_counts(), held(4, 15, true));
        counter.note(&cut, || Ok(Change { before: None, after: Some(18) })).unwrap();
        counter.note(&changing, || Ok(WENT)).unwrap();
        assert_eq!(counter.object_counts(), held(4, 26, true));
    }

    #[test]
    fn a_failed_change_and_a_walk_that_was_stopped_count_nothing() {
        let (_kept, objects) = store(&[b"one"]);
        let counter = ObjectCounter::new();
        counter.count(&objects, || true);
        assert_eq!(counter.object_counts(), held(0, 0, false));
        counter.count(&objects, || false);
        let id = Algorithm::Blake3.digest(b"two");
        let failed = counter.note(&id, || Err(StoreError::Unsynced));
        assert!(matches!(failed, Err(StoreError::Unsynced)), "{failed:?}");
        assert_eq!(counter.object_counts(), held(1, 3, true));
    }
}
