//! What replicas follow: which images there are, which there were, and what has changed since the
//! start.

use std::collections::BTreeMap;
use std::ops::{Bound, RangeBounds};

use api::codec::{self, Encoding};
use api::image_server::replication::{Change, Cursor, Ended};
use model::image::Image;
use model::lock::locked;
use model::report::report;
use tokio::sync::watch;

use super::{ImageName, Images, Index, Notes, ObjectId, PoisonError, Record, StoreError};
use crate::core::replication::decision::Here;
use crate::store::error::Ending;

/// The line of a mark that says which image it was.
const DIGEST: &str = "digest ";

/// What is left of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Mark {
    ending: Ending,
    digest: Option<ObjectId>,
}

impl Mark {
    /// What the file of the mark says.
    pub(super) fn read(bytes: &[u8]) -> Self {
        let text = String::from_utf8_lossy(bytes);
        let digest = text.lines().find_map(|line| line.strip_prefix(DIGEST)?.parse().ok());
        Self { ending: Ending::of(bytes), digest }
    }

    /// The content of the file: `text`, and which image it was.
    pub(super) fn text(text: &str, digest: Option<ObjectId>) -> String {
        match digest {
            None => text.to_owned(),
            Some(digest) => format!("{text}{DIGEST}{digest}\n"),
        }
    }
}

/// Some of the names that are or were used, sorted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Told {
    /// What is to be known of them.
    pub changes: Vec<Change>,
    /// How far these changes go.
    pub cursor: Cursor,
    /// True if there are more.
    pub more: bool,
}

/// The digest of notes without the expiry, by which servers know that they have the same.
#[must_use]
pub fn digest_of(notes: &Notes) -> ObjectId {
    let notes = Notes { expires_at: None, ..notes.clone() };
    // Notes can always be written; if not, they equal none, and are fetched again.
    let bytes = codec::encode(Encoding::Bincode, "notes", &notes).unwrap_or_default();
    model::object::Algorithm::Blake3.digest(&bytes)
}

impl Index {
    /// What is to be known of a name; `None` if nothing is, or its record is damaged.
    fn change(&self, name: &ImageName) -> Option<Change> {
        if let Some(summary) = self.images.get(name) {
            return Some(Change::Image {
                name: name.clone(),
                digest: summary.digest,
                notes: *self.notes.get(name)?,
                expires_at: summary.expires_at,
                bytes: summary.totals.bytes,
            });
        }
        let Mark { ending, digest } = *self.ended.get(name)?;
        let how = match ending {
            Ending::Deleted => Ended::Deleted,
            Ending::Expired => Ended::Expired,
        };
        Some(Change::Ended { name: name.clone(), how, digest })
    }

    /// Takes note that an image has ended.
    pub(super) fn end(&mut self, name: &ImageName, mark: Mark) {
        self.remove(name);
        self.ended.insert(name.clone(), mark);
    }
}

impl Images {
    /// Tells whoever waits that `name` has changed. The index is as it is now.
    pub(super) fn tell(&self, index: &mut Index, name: &ImageName) {
        index.log.note(name);
        self.told.send_replace(index.log.cursor().sequence);
    }

    /// How far changes go.
    #[must_use]
    pub fn cursor(&self) -> Cursor {
        self.index.read().unwrap_or_else(PoisonError::into_inner).log.cursor()
    }

    /// Is changed whenever an image is.
    #[must_use]
    pub fn told(&self) -> watch::Receiver<u64> {
        self.told.subscribe()
    }

    /// At most `limit` names that have changed after `cursor`; `None` if these are not known.
    #[must_use]
    pub fn since(&self, cursor: Cursor, limit: usize) -> Option<Told> {
        let index = self.index.read().unwrap_or_else(PoisonError::into_inner);
        let (names, cursor, more) = index.log.since(cursor, limit)?;
        // A name of which nothing is known any more was dropped here, which is no news for others.
        let changes = names.iter().filter_map(|name| index.change(name)).collect();
        Some(Told { changes, cursor, more })
    }

    /// At most `limit` of all names that are or were used and sort after `after`.
    #[must_use]
    pub fn all(&self, after: Option<&ImageName>, limit: usize) -> Told {
        let index = self.index.read().unwrap_or_else(PoisonError::into_inner);
        let start = after.map_or(Bound::Unbounded, Bound::Excluded);
        let range = || (start, Bound::<&ImageName>::Unbounded);
        // One more of each than are needed tells whether there are more.
        let mut names: Vec<&ImageName> = some(&index.images, range(), limit + 1);
        names.extend(some(&index.ended, range(), limit + 1));
        names.sort_unstable();
        let more = names.len() > limit;
        names.truncate(limit);
        let changes = names.into_iter().filter_map(|name| index.change(name)).collect();
        Told { changes, cursor: index.log.cursor(), more }
    }

    /// The names of the images in a part of the list.
    #[must_use]
    pub fn between(&self, part: &(Bound<ImageName>, Bound<ImageName>)) -> Vec<ImageName> {
        let index = self.index.read().unwrap_or_else(PoisonError::into_inner);
        let range = (part.0.as_ref(), part.1.as_ref());
        index.images.range::<ImageName, _>(range).map(|(name, _)| name.clone()).collect()
    }

    /// What there is of a name. Whether it is in use is known elsewhere.
    #[must_use]
    pub fn here(&self, name: &ImageName, is_held: impl FnOnce() -> bool) -> Here {
        let index = self.index.read().unwrap_or_else(PoisonError::into_inner);
        if index.damaged.contains_key(name) {
            return Here::Damaged;
        }
        match index.change(name) {
            None => Here::Nothing,
            Some(Change::Ended { .. }) => Here::Ended,
            Some(Change::Image { digest, notes, expires_at, .. }) => {
                Here::Image { digest, notes, expires_at, is_held: is_held() }
            }
        }
    }

    /// The digest of the image of that name.
    #[must_use]
    pub fn digest(&self, name: &ImageName) -> Option<ObjectId> {
        let index = self.index.read().unwrap_or_else(PoisonError::into_inner);
        index.images.get(name).map(|summary| summary.digest)
    }

    /// Deletes the image of that name if it has this digest. True if it did.
    ///
    /// # Errors
    ///
    /// As [`Images::delete`].
    pub fn end(&self, name: &ImageName, digest: ObjectId, mark: &str) -> Result<bool, StoreError> {
        let _change = locked(&self.change);
        if self.digest(name) != Some(digest) {
            return Ok(false);
        }
        self.delete_locked(name, None, mark).map(|()| true)
    }

    /// Lets no image have a name that none has or had here.
    ///
    /// # Errors
    ///
    /// As [`Images::expect_new`]; otherwise what the file-system says.
    pub fn mark(
        &self,
        name: &ImageName,
        digest: Option<ObjectId>,
        mark: &str,
    ) -> Result<(), StoreError> {
        let _change = locked(&self.change);
        let text = Mark::text(mark, digest);
        self.records.reserve(name, &text)?;
        let mut index = self.write_index();
        index.end(name, Mark::read(text.as_bytes()));
        self.tell(&mut index, name);
        Ok(())
    }

    /// Takes the notes of an image from another server, if it has this digest. True if it has.
    ///
    /// # Errors
    ///
    /// As [`Images::change`].
    pub fn renote(
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

    /// Takes an image away and leaves no mark: another of that name may come.
    ///
    /// # Errors
    ///
    /// [`StoreError::NotFound`] or [`StoreError::Gone`]; otherwise what the file-system says.
    pub fn drop_copy(&self, name: &ImageName) -> Result<(), StoreError> {
        let _change = locked(&self.change);
        self.read_found(name)?;
        let is_synced = self.records.forget(name)?;
        let mut index = self.write_index();
        index.remove(name);
        self.tell(&mut index, name);
        if !is_synced {
            // It is gone; with the power it may come back, and can be dropped again.
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
    pub(super) fn changed<T>(&self, name: &ImageName, change: impl FnOnce(&mut Index) -> T) -> T {
        let mut index = self.write_index();
        let before = index.change(name);
        let done = change(&mut index);
        if index.change(name) != before {
            self.tell(&mut index, name);
        }
        done
    }

    /// What is to be known of an image that has ended so.
    pub(super) fn mark_of(&self, name: &ImageName, ending: Ending) -> Mark {
        match self.records.mark(name) {
            Ok(Some(bytes)) => Mark::read(&bytes),
            Ok(None) => Mark { ending, digest: None },
            Err(error) => {
                tracing::warn!("which image has ended is not known: {}", report(&error));
                Mark { ending, digest: None }
            }
        }
    }
}

fn some<T>(
    map: &BTreeMap<ImageName, T>,
    range: impl RangeBounds<ImageName>,
    limit: usize,
) -> Vec<&ImageName> {
    map.range(range).take(limit).map(|(name, _)| name).collect()
}

/// What lists and replicas show of a record beside its summary.
pub(super) fn notes_of(record: &Record) -> ObjectId {
    let Image { notes, .. } = &record.image;
    digest_of(notes)
}

#[cfg(test)]
mod tests {
    use model::filter::Filter;
    use model::image::{Content, FORMAT};
    use model::object::Algorithm;
    use model::tree::{Time, Tree};
    use model::trigger::Triggers;

    use super::super::super::Store;
    use super::*;

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
        };
        Record { image: Image { content, notes: Notes::default() }, totals: tree.root().totals() }
    }

    fn name(text: &str) -> ImageName {
        ImageName::new(text).unwrap()
    }

    fn told(changes: &[Change]) -> Vec<String> {
        let text = |change: &Change| match change {
            Change::Image { name, .. } => format!("{name}"),
            Change::Ended { name, how, digest } => {
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
        images.mark(&name("d"), None, "expired on the master\n").unwrap();
        let since = images.since(start, 9).unwrap();
        assert_eq!(told(&since.changes), ["b", "c", "a deleted true", "d expired false"]);
        assert_eq!((since.cursor, since.more), (images.cursor(), false));
        let first = images.since(start, 2).unwrap();
        assert_eq!((told(&first.changes), first.more), (vec!["b".into(), "c".into()], true));
        let rest = images.since(first.cursor, 2).unwrap();
        assert_eq!(told(&rest.changes), ["a deleted true", "d expired false"]);

        let digest = record("b").image.content.digest();
        assert!(!images.end(&name("b"), Algorithm::Blake3.digest(b""), "deleted\n").unwrap());
        assert!(images.end(&name("b"), digest, "expired\n").unwrap());
        assert!(!images.end(&name("b"), digest, "expired\n").unwrap());
        let all = ["a deleted true", "b expired true", "c", "d expired false"];
        assert_eq!(told(&images.all(None, 9).changes), all);
        drop(store);

        let store = Store::open(data.path()).unwrap();
        let images = &store.images;
        assert_eq!(images.since(start, 9), None);
        assert_eq!(told(&images.all(None, 9).changes), all);
        let page = images.all(None, 3);
        assert_eq!((told(&page.changes), page.more), (all.map(str::to_owned)[..3].to_vec(), true));
        let page = images.all(Some(&name("c")), 3);
        assert_eq!((told(&page.changes), page.more), (all.map(str::to_owned)[3..].to_vec(), false));

        images.drop_copy(&name("c")).unwrap();
        assert!(matches!(images.drop_copy(&name("c")), Err(StoreError::NotFound { .. })));
        assert!(matches!(images.drop_copy(&name("a")), Err(StoreError::Gone { .. })));
        images.add(&record("c")).unwrap();
        assert!(matches!(images.add(&record("a")), Err(StoreError::Gone { .. })));
        assert!(matches!(images.mark(&name("c"), None, ""), Err(StoreError::Exists { .. })));
    }

    #[test]
    fn notes_are_known_by_all_but_their_expiry() {
        let expires_at = Some(Time { seconds: 1, nanoseconds: 0 });
        let plain = Notes::default();
        assert_eq!(digest_of(&plain), digest_of(&Notes { expires_at, ..plain.clone() }));
        let created_for = "somebody".to_owned();
        assert_ne!(digest_of(&plain), digest_of(&Notes { created_for, ..plain.clone() }));
    }
}
