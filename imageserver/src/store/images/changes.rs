//! What replicas follow, and the changes that a replica makes: names, tombstones and notes.

use std::ops::Bound;

use api::image_server::replication::{Cursor, ImageChange};
use model::display::error_chain;
use model::image::{ImageName, Notes};
use model::lock::locked;
use model::object::ObjectId;
use tokio::sync::watch;

use super::Images;
use crate::core::replication::decision::LocalImage;
use crate::store::error::{Ending, StoreError};
use crate::store::image_index::{ChangePage, ImageIndex, Tombstone};

impl Images {
    /// Notifies the waiters that `name` has changed, after the index was changed.
    pub(super) fn publish(&self, index: &mut ImageIndex, name: &ImageName) {
        index.log.note(name);
        self.sequence.send_replace(index.log.cursor().sequence);
    }

    /// Returns the position of the last change.
    #[must_use]
    pub fn cursor(&self) -> Cursor {
        self.read_index().log.cursor()
    }

    /// Returns a receiver that changes whenever an image does.
    #[must_use]
    pub fn subscribe(&self) -> watch::Receiver<u64> {
        self.sequence.subscribe()
    }

    /// Returns at most `limit` names that changed after `cursor`, of those for which `may` returns
    /// true; `None` if these are not known.
    #[must_use]
    pub fn changes_since(
        &self,
        may: impl Fn(&ImageName) -> bool,
        cursor: Cursor,
        limit: usize,
    ) -> Option<ChangePage> {
        self.read_index().changes_since(may, cursor, limit)
    }

    /// Returns at most `limit` of all names that are or were used and sort after `after`, of those
    /// for which `may` returns true.
    #[must_use]
    pub fn all_changes(
        &self,
        may: impl Fn(&ImageName) -> bool,
        after: Option<&ImageName>,
        limit: usize,
    ) -> ChangePage {
        self.read_index().all_changes(may, after, limit)
    }

    /// The names of the images in a part of the list.
    #[must_use]
    pub fn between(&self, part: &(Bound<ImageName>, Bound<ImageName>)) -> Vec<ImageName> {
        let index = self.read_index();
        let range = (part.0.as_ref(), part.1.as_ref());
        index.images.range::<ImageName, _>(range).map(|(name, _)| name.clone()).collect()
    }

    /// Returns the local state of a name. `is_held` says whether the image is in use.
    #[must_use]
    pub fn local_image(&self, name: &ImageName, is_held: impl FnOnce() -> bool) -> LocalImage {
        let index = self.read_index();
        if index.damaged.contains_key(name) {
            return LocalImage::Damaged;
        }
        match index.change(name) {
            None => LocalImage::Nothing,
            Some(ImageChange::Ended { .. }) => LocalImage::Ended,
            Some(ImageChange::Image { digest, notes, expires_at, .. }) => {
                LocalImage::Image { digest, notes, expires_at, is_held: is_held() }
            }
        }
    }

    /// The digest of the image of that name.
    #[must_use]
    pub fn digest(&self, name: &ImageName) -> Option<ObjectId> {
        let index = self.read_index();
        index.images.get(name).map(|summary| summary.digest)
    }

    /// Deletes the image of that name if it has this digest. True if it did.
    pub fn end(&self, name: &ImageName, digest: ObjectId, mark: &str) -> Result<bool, StoreError> {
        let _change = locked(&self.change);
        if self.digest(name) != Some(digest) {
            return Ok(false);
        }
        self.delete_locked(name, None, mark).map(|()| true)
    }

    /// Reserves an unused name for ever, with a tombstone.
    pub fn add_tombstone(
        &self,
        name: &ImageName,
        digest: Option<ObjectId>,
        mark: &str,
    ) -> Result<(), StoreError> {
        let _change = locked(&self.change);
        let text = Tombstone::text(mark, digest);
        self.records.add_tombstone(name, &text)?;
        let mut index = self.write_index();
        index.end(name, Tombstone::read(text.as_bytes()));
        self.publish(&mut index, name);
        Ok(())
    }

    /// Replaces the notes of an image if it has this digest. Returns true if it has.
    pub fn replace_notes(
        &self,
        name: &ImageName,
        digest: ObjectId,
        notes: &Notes,
    ) -> Result<bool, StoreError> {
        if self.digest(name) != Some(digest) {
            return Ok(false);
        }
        self.change::<StoreError>(name, |here| {
            here.clone_from(notes);
            Ok(())
        })?;
        Ok(true)
    }

    /// Removes an image without a tombstone, so that its name can be used again.
    pub fn drop_copy(&self, name: &ImageName) -> Result<(), StoreError> {
        let _change = locked(&self.change);
        self.read_found(name)?;
        let is_synced = self.records.remove(name)?;
        let mut index = self.write_index();
        index.remove(name);
        self.publish(&mut index, name);
        if !is_synced {
            // After a power failure the record may come back; then it can be dropped again.
            tracing::warn!(image = %name, "the copy may come back after a power failure");
        }
        Ok(())
    }

    /// Refuses a name under which there is no record, whatever is in it.
    fn read_found(&self, name: &ImageName) -> Result<(), StoreError> {
        match self.read(name) {
            Ok(_) | Err(StoreError::Damaged { .. }) => Ok(()),
            Err(other) => Err(other),
        }
    }

    /// Changes what is in the list of `name`, and tells it if that makes a difference.
    pub(super) fn changed<T>(
        &self,
        name: &ImageName,
        change: impl FnOnce(&mut ImageIndex) -> T,
    ) -> T {
        let mut index = self.write_index();
        let before = index.change(name);
        let done = change(&mut index);
        if index.change(name) != before {
            self.publish(&mut index, name);
        }
        done
    }

    /// Returns the tombstone of an image that has ended.
    pub(super) fn tombstone_of(&self, name: &ImageName, ending: Ending) -> Tombstone {
        match self.records.tombstone(name) {
            Ok(Some(bytes)) => Tombstone::read(&bytes),
            Ok(None) => Tombstone { ending, digest: None },
            Err(error) => {
                tracing::warn!("cannot read which image has ended: {}", error_chain(&error));
                Tombstone { ending, digest: None }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use model::filter::Filter;
    use model::image::{Content, FORMAT, Image};
    use model::object::Algorithm;
    use model::tree::Tree;
    use model::trigger::Triggers;

    use super::*;
    use crate::store::Store;
    use crate::store::record::Record;

    fn record(image: &str) -> Record {
        let tree = Tree::empty(Algorithm::Blake3);
        let content = Content {
            format: FORMAT,
            name: name(image),
            root: tree.digest(),
            filter: Some(Filter::new::<&str>([]).unwrap()),
            triggers: Triggers::default(),
            computed: Vec::new(),
            health_check: None,
            signers: Vec::new(),
        };
        Record { image: Image { content, notes: Notes::default() }, totals: tree.root().totals() }
    }

    fn name(text: &str) -> ImageName {
        ImageName::new(text).unwrap()
    }

    fn sequence(changes: &[ImageChange]) -> Vec<String> {
        let text = |change: &ImageChange| match change {
            ImageChange::Image { name, .. } => format!("{name}"),
            ImageChange::Ended { name, how, digest } => {
                format!("{name} {} {}", how.word(), digest.is_some())
            }
        };
        changes.iter().map(text).collect()
    }

    #[test]
    fn all_names_are_told_in_pages_and_changes_in_order_also_after_a_restart() {
        let data = tempfile::tempdir().unwrap();
        let store = Store::open(data.path()).unwrap();
        let images = &store.images;
        let start = images.cursor();
        for image in ["b", "a", "c"] {
            images.add(&record(image)).unwrap();
        }
        images.delete(&name("a"), "deleted by a test\n").unwrap();
        images.add_tombstone(&name("d"), None, "expired on the master\n").unwrap();
        let since = images.changes_since(|_| true, start, 9).unwrap();
        assert_eq!(sequence(&since.changes), ["b", "c", "a deleted true", "d expired false"]);
        assert_eq!((since.cursor, since.more), (images.cursor(), false));
        let first = images.changes_since(|_| true, start, 2).unwrap();
        assert_eq!((sequence(&first.changes), first.more), (vec!["b".into(), "c".into()], true));
        let rest = images.changes_since(|_| true, first.cursor, 2).unwrap();
        assert_eq!(sequence(&rest.changes), ["a deleted true", "d expired false"]);

        let digest = record("b").image.content.digest();
        assert!(!images.end(&name("b"), Algorithm::Blake3.digest(b""), "deleted\n").unwrap());
        assert!(images.end(&name("b"), digest, "expired\n").unwrap());
        assert!(!images.end(&name("b"), digest, "expired\n").unwrap());
        let all = ["a deleted true", "b expired true", "c", "d expired false"];
        assert_eq!(sequence(&images.all_changes(|_| true, None, 9).changes), all);
        drop(store);

        let store = Store::open(data.path()).unwrap();
        let images = &store.images;
        assert_eq!(images.changes_since(|_| true, start, 9), None);
        assert_eq!(sequence(&images.all_changes(|_| true, None, 9).changes), all);
        let page = images.all_changes(|_| true, None, 3);
        assert_eq!(
            (sequence(&page.changes), page.more),
            (all.map(str::to_owned)[..3].to_vec(), true)
        );
        let page = images.all_changes(|_| true, Some(&name("c")), 3);
        assert_eq!(
            (sequence(&page.changes), page.more),
            (all.map(str::to_owned)[3..].to_vec(), false)
        );

        images.drop_copy(&name("c")).unwrap();
        assert!(matches!(images.drop_copy(&name("c")), Err(StoreError::NotFound { .. })));
        assert!(matches!(images.drop_copy(&name("a")), Err(StoreError::Gone { .. })));
        images.add(&record("c")).unwrap();
        assert!(matches!(images.add(&record("a")), Err(StoreError::Gone { .. })));
        assert!(matches!(
            images.add_tombstone(&name("c"), None, ""),
            Err(StoreError::Exists { .. })
        ));
    }
}
