//! Takes objects out and removes them. The collector decides which ([`super::collecting`]).

use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;

use model::object::ObjectId;

use super::object_files::Located;
use super::objects::LocalObjects;
use crate::core::collection::removal::Candidate;
use crate::store::error::{StoreError, failed};
use crate::store::layout;
use crate::store::object_counts::{Change, directories};

/// The unit of [`MetadataExt::blocks`], in bytes.
const BLOCK_BYTES: u64 = 512;

/// An object that is no longer there, but still takes space.
#[derive(Debug)]
#[must_use = "it takes space until it is removed"]
pub struct RemovedObject {
    paths: Vec<PathBuf>,
    bytes: u64,
}

impl RemovedObject {
    /// The space that it takes, in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Frees the space.
    ///
    /// # Errors
    ///
    /// On failure the space is freed at the next start.
    pub fn remove(self) -> Result<(), StoreError> {
        let remove = |path| fs_err::remove_file(path);
        let removed = self.paths.into_iter().try_for_each(remove);
        removed.map_err(failed("remove an object that nothing needs"))
    }
}

impl LocalObjects {
    /// Renames the files of `id` to temporary files. Returns `None` if no
    /// file of it is there.
    pub fn take_out(&self, id: &ObjectId) -> Result<Option<RemovedObject>, StoreError> {
        let mut taken = None;
        self.files.counter.note(id, || {
            let before = self.files.locate(id)?.and_then(|located| located.length(id));
            for form in layout::FORMS {
                let Some(Located { path, metadata, .. }) = self.files.locate_as(id, form)? else {
                    continue;
                };
                let target = self.files.temporary();
                fs_err::rename(&path, &target).map_err(failed(format!("remove object {id}")))?;
                self.verified.forget(id, &metadata);
                let RemovedObject { paths, bytes } =
                    taken.get_or_insert_with(|| RemovedObject { paths: Vec::new(), bytes: 0 });
                paths.push(target);
                *bytes += metadata.blocks() * BLOCK_BYTES;
            }
            if taken.is_some() {
                // A removed object need not be repaired.
                self.files.damaged_objects.mark_repaired(id);
            }
            Ok(Change { before, after: None })
        })?;
        Ok(taken)
    }

    /// Calls `take` with each object for which `wanted` returns true, in any order. Returns false
    /// if it ended early because `go_on` returned false.
    pub fn visit(
        &self,
        go_on: impl Fn() -> bool,
        wanted: impl Fn(&ObjectId) -> bool,
        mut take: impl FnMut(Candidate),
    ) -> Result<bool, StoreError> {
        for (algorithm, directory) in directories() {
            let listed =
                walkdir::WalkDir::new(self.files.root.join(directory)).min_depth(1).max_depth(1);
            for entry in listed {
                if !go_on() {
                    return Ok(false);
                }
                let entry = entry.map_err(|error| failed("list the objects")(error.into()))?;
                let name = entry.file_name().to_string_lossy();
                let text = format!("{algorithm}:{}", layout::form_of(&name).0);
                let Ok(id) = text.parse::<ObjectId>() else { continue };
                if !wanted(&id) {
                    continue;
                }
                // The object may have been quarantined meanwhile.
                let Ok(metadata) = entry.metadata() else { continue };
                let nanoseconds = i128::from(metadata.mtime_nsec());
                let stored = i128::from(metadata.mtime()) * 1_000_000_000 + nanoseconds;
                take(Candidate { stored, id, bytes: metadata.blocks() * BLOCK_BYTES });
            }
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use api::object_stream::ContentForm;
    use model::object::Algorithm;

    use super::super::objects::LocalObjects;
    use crate::store::contract::Objects as _;
    use crate::store::layout;
    use crate::store::object_counts::ObjectCounts;

    #[test]
    fn what_is_taken_away_is_counted_no_more_and_can_come_again() {
        let data = tempfile::tempdir().unwrap();
        std::fs::create_dir(data.path().join(layout::INCOMING)).unwrap();
        let objects = LocalObjects::open(data.path(), 0).unwrap();
        let put = |content: &[u8]| {
            let id = Algorithm::Blake3.digest(content);
            let mut receiving = objects.receive(id, content.len() as u64).unwrap();
            receiving.write(content).unwrap();
            receiving.finish().unwrap().wait().unwrap();
            id
        };
        objects.count(&|| false);
        // Large enough to be remembered when it was verified.
        let large = vec![7; 300 << 10];
        let (one, two) = (put(&large), put(b"two"));
        assert!(objects.open_verified(&one).unwrap().is_some());
        let held = |objects, bytes| ObjectCounts { objects, bytes, complete: true };
        assert_eq!(objects.object_counts(), held(2, 3 + (300 << 10)));

        let metadata = std::fs::metadata(objects.files.path(&one, ContentForm::Plain)).unwrap();
        assert!(objects.verified.knows(&one, &metadata));
        let taken = objects.take_out(&one).unwrap().unwrap();
        assert!(taken.bytes() >= 300 << 10);
        assert!(!objects.verified.knows(&one, &metadata));
        assert_eq!(objects.size_bytes(&one).unwrap(), None);
        assert!(objects.take_out(&one).unwrap().is_none());
        assert_eq!(objects.object_counts(), held(1, 3));
        put(&large);
        taken.remove().unwrap();
        assert_eq!(objects.object_counts(), held(2, 3 + (300 << 10)));
        assert!(objects.open_verified(&one).unwrap().is_some());
        let incoming = std::fs::read_dir(data.path().join(layout::INCOMING)).unwrap();
        assert_eq!(incoming.count(), 0);

        let mut seen = BTreeSet::new();
        let all = objects.visit(
            || true,
            |_| true,
            |candidate| {
                seen.insert(candidate.id);
            },
        );
        assert!(all.unwrap());
        assert_eq!(seen, BTreeSet::from([one, two]));
        assert!(!objects.visit(|| false, |_| true, |_| ()).unwrap());
    }
}
