//! Takes objects away that nothing needs. Which these are is for [`crate::collection`] to say.

use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;

use model::object::ObjectId;

use super::objects::{LocalObjects, Located};
use crate::core::collection::disk_pressure::Space;
use crate::core::collection::oldest_objects::Candidate;
use crate::store::object_counts::{Change, directories};
use crate::store::{
    error::{StoreError, failed},
    layout,
};

/// The unit of [`MetadataExt::blocks`], in bytes.
const BLOCK_BYTES: u64 = 512;

/// An object that is no longer there, but still takes space.
#[derive(Debug)]
#[must_use = "it takes space until it is removed"]
pub struct Taken {
    paths: Vec<PathBuf>,
    bytes: u64,
}

impl Taken {
    /// The space that it takes, in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Frees the space.
    ///
    /// # Errors
    ///
    /// What the file-system says; then the space is freed at the next start.
    pub fn remove(self) -> Result<(), StoreError> {
        let remove = |path| fs_err::remove_file(path);
        let removed = self.paths.into_iter().try_for_each(remove);
        removed.map_err(failed("remove an object that nothing needs"))
    }
}

impl LocalObjects {
    /// Takes `id` away: it is no longer there. `None` if it was not.
    ///
    /// # Errors
    ///
    /// What the file-system says.
    pub fn take_away(&self, id: &ObjectId) -> Result<Option<Taken>, StoreError> {
        let mut taken = None;
        self.tally.note(id, || {
            let before = self.locate(id)?.and_then(|located| located.length(id));
            for form in layout::FORMS {
                let Some(Located { path, metadata, .. }) = self.locate_as(id, form)? else {
                    continue;
                };
                let aside = self.temporary();
                fs_err::rename(&path, &aside).map_err(failed(format!("remove object {id}")))?;
                self.verified.forget(id, &metadata);
                let Taken { paths, bytes } =
                    taken.get_or_insert_with(|| Taken { paths: Vec::new(), bytes: 0 });
                paths.push(aside);
                *bytes += metadata.blocks() * BLOCK_BYTES;
            }
            if taken.is_some() {
                // What is wrong with it is of no matter any more.
                self.wounds().heal(id);
            }
            Ok(Change { before, after: None })
        })?;
        Ok(taken)
    }

    /// Gives each object that is `wanted` to `take`, in no order that means anything. False if it
    /// ended early because `go_on` said so.
    ///
    /// # Errors
    ///
    /// What the file-system says.
    pub fn visit(
        &self,
        go_on: impl Fn() -> bool,
        wanted: impl Fn(&ObjectId) -> bool,
        mut take: impl FnMut(Candidate),
    ) -> Result<bool, StoreError> {
        for (algorithm, directory) in directories() {
            let listed = walkdir::WalkDir::new(self.root.join(directory)).min_depth(1).max_depth(1);
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
                // It may have been put aside meanwhile.
                let Ok(metadata) = entry.metadata() else { continue };
                let nanoseconds = i128::from(metadata.mtime_nsec());
                let stored = i128::from(metadata.mtime()) * 1_000_000_000 + nanoseconds;
                take(Candidate { stored, id, bytes: metadata.blocks() * BLOCK_BYTES });
            }
        }
        Ok(true)
    }

    /// The space of the file-system.
    ///
    /// # Errors
    ///
    /// What the file-system says.
    pub fn space(&self) -> Result<Space, StoreError> {
        let status = self.status()?;
        let unit = status.fragment_size();
        Ok(Space {
            used: status.blocks().saturating_sub(status.blocks_free()).saturating_mul(unit),
            free: status.blocks_available().saturating_mul(unit),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use api::object_stream::Form;
    use model::object::Algorithm;

    use super::super::objects::LocalObjects;
    use crate::store::layout;
    use crate::store::object_counts::Holdings;

    #[test]
    fn what_is_taken_away_is_counted_no_more_and_can_come_again() {
        let data = tempfile::tempdir().unwrap();
        std::fs::create_dir(data.path().join(layout::INCOMING)).unwrap();
        let objects = LocalObjects::open(data.path()).unwrap();
        let put = |content: &[u8]| {
            let id = Algorithm::Blake3.digest(content);
            let mut receiving = objects.receive(id, content.len() as u64).unwrap();
            receiving.write(content).unwrap();
            receiving.finish().unwrap();
            id
        };
        objects.count(|| false);
        // Large enough to be remembered when it was verified.
        let large = vec![7; 300 << 10];
        let (one, two) = (put(&large), put(b"two"));
        assert!(objects.open_verified(&one).unwrap().is_some());
        let held = |objects, bytes| Holdings { objects, bytes, complete: true };
        assert_eq!(objects.holdings(), held(2, 3 + (300 << 10)));

        let metadata = std::fs::metadata(objects.path(&one, Form::Plain)).unwrap();
        assert!(objects.verified.knows(&one, &metadata));
        let taken = objects.take_away(&one).unwrap().unwrap();
        assert!(taken.bytes() >= 300 << 10);
        assert!(!objects.verified.knows(&one, &metadata));
        assert_eq!(objects.size_bytes(&one).unwrap(), None);
        assert!(objects.take_away(&one).unwrap().is_none());
        assert_eq!(objects.holdings(), held(1, 3));
        put(&large);
        taken.remove().unwrap();
        assert_eq!(objects.holdings(), held(2, 3 + (300 << 10)));
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
