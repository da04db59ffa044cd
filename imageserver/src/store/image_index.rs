//! The index of images in memory: what lists and replicas show, and the log of changes.

use std::collections::BTreeMap;
use std::ops::{Bound, RangeBounds};

use api::codec::{self, Encoding};
use api::image_server::ImageSummary;
use api::image_server::replication::{Cursor, ImageChange, ImageEnd};
use model::display::error_chain;
use model::image::{Image, ImageName, Notes};
use model::object::{Algorithm, ObjectId};

use crate::core::replication::master::ChangeLog;
use crate::store::error::{Ending, StoreError};
use crate::store::record::Record;

/// The line of a tombstone that names the digest of the image.
const DIGEST: &str = "digest ";

/// The tombstone of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tombstone {
    pub ending: Ending,
    pub digest: Option<ObjectId>,
}

impl Tombstone {
    /// Reads the content of the file of a tombstone.
    pub fn read(bytes: &[u8]) -> Self {
        let text = String::from_utf8_lossy(bytes);
        let digest = text.lines().find_map(|line| line.strip_prefix(DIGEST)?.parse().ok());
        Self { ending: Ending::read(bytes), digest }
    }

    /// Returns the content of the file: `text`, and the digest of the image.
    pub fn text(text: &str, digest: Option<ObjectId>) -> String {
        match digest {
            None => text.to_owned(),
            Some(digest) => format!("{text}{DIGEST}{digest}\n"),
        }
    }
}

/// Some of the names that are or were used, sorted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChangePage {
    pub changes: Vec<ImageChange>,
    /// The position up to which these changes go.
    pub cursor: Cursor,
    /// True if there are more.
    pub more: bool,
}

/// Returns the digest of notes without the expiry, by which servers compare them.
#[must_use]
pub fn digest_of_notes(notes: &Notes) -> ObjectId {
    let notes = Notes { expires_at: None, ..notes.clone() };
    // Notes can always be encoded; if not, they equal no others and are fetched again.
    let bytes = codec::encode(Encoding::Bincode, "notes", &notes).unwrap_or_default();
    Algorithm::Blake3.digest(&bytes)
}

pub(super) struct ImageIndex {
    pub images: BTreeMap<ImageName, ImageSummary>,
    notes: BTreeMap<ImageName, ObjectId>,
    ended: BTreeMap<ImageName, Tombstone>,
    pub log: ChangeLog<ImageName>,
    pub damaged: BTreeMap<ImageName, String>,
    pub build_logs: BTreeMap<ImageName, ObjectId>,
    /// Returns how many images were added since the start.
    pub additions: u64,
}

impl ImageIndex {
    /// Returns an empty index. `instance` is random.
    pub fn new(instance: u64) -> Self {
        Self {
            images: BTreeMap::new(),
            notes: BTreeMap::new(),
            ended: BTreeMap::new(),
            log: ChangeLog::new(instance),
            damaged: BTreeMap::new(),
            build_logs: BTreeMap::new(),
            additions: 0,
        }
    }

    pub fn insert(&mut self, record: &Record) {
        let Image { content, notes } = &record.image;
        self.images.insert(content.name.clone(), record.summary());
        self.notes.insert(content.name.clone(), digest_of_notes(notes));
        match notes.build_log {
            Some(log) => self.build_logs.insert(content.name.clone(), log),
            None => self.build_logs.remove(&content.name),
        };
    }

    /// Returns true if the image was there.
    pub fn remove(&mut self, name: &ImageName) -> bool {
        self.build_logs.remove(name);
        self.notes.remove(name);
        self.images.remove(name).is_some() | self.damaged.remove(name).is_some()
    }

    /// Records that an image has ended.
    pub fn end(&mut self, name: &ImageName, tombstone: Tombstone) {
        self.remove(name);
        self.ended.insert(name.clone(), tombstone);
    }

    /// Adds an image to the list, or to the damaged ones. Returns true if it was in neither.
    pub fn insert_read(&mut self, name: &ImageName, record: Result<Record, StoreError>) -> bool {
        let is_new = !self.images.contains_key(name) && !self.damaged.contains_key(name);
        match record {
            Ok(record) => {
                self.damaged.remove(name);
                self.insert(&record);
            }
            Err(error) => {
                let why = error_chain(&error);
                tracing::error!(image = %name, error = %why, "an image cannot be used");
                self.images.remove(name);
                self.build_logs.remove(name);
                self.damaged.insert(name.clone(), why);
            }
        }
        self.additions += u64::from(is_new);
        is_new
    }

    /// Returns what replicas are told of a name; `None` if it was never used, or its record is
    /// damaged.
    pub fn change(&self, name: &ImageName) -> Option<ImageChange> {
        if let Some(summary) = self.images.get(name) {
            return Some(ImageChange::Image {
                name: name.clone(),
                digest: summary.digest,
                notes: *self.notes.get(name)?,
                expires_at: summary.expires_at,
                bytes: summary.totals.bytes,
            });
        }
        let Tombstone { ending, digest } = *self.ended.get(name)?;
        let how = match ending {
            Ending::Deleted => ImageEnd::Deleted,
            Ending::Expired => ImageEnd::Expired,
        };
        Some(ImageChange::Ended { name: name.clone(), how, digest })
    }

    /// Returns at most `limit` names that changed after `cursor`, of those for which `may` returns
    /// true; `None` if these are not known.
    pub fn changes_since(
        &self,
        may: impl Fn(&ImageName) -> bool,
        cursor: Cursor,
        limit: usize,
    ) -> Option<ChangePage> {
        let (names, cursor, more) = self.log.since(cursor, limit)?;
        // A name without an image or a tombstone was dropped here; others keep theirs.
        let names = names.iter().filter(|name| may(name));
        let changes = names.filter_map(|name| self.change(name)).collect();
        Some(ChangePage { changes, cursor, more })
    }

    /// Returns at most `limit` of all names that are or were used and sort after `after`, of those
    /// for which `may` returns true.
    pub fn all_changes(
        &self,
        may: impl Fn(&ImageName) -> bool,
        after: Option<&ImageName>,
        limit: usize,
    ) -> ChangePage {
        let start = after.map_or(Bound::Unbounded, Bound::Excluded);
        let range = || (start, Bound::<&ImageName>::Unbounded);
        // One more of each than are needed shows whether there are more.
        let mut names = first_names(&self.images, &may, range(), limit + 1);
        names.extend(first_names(&self.ended, &may, range(), limit + 1));
        names.sort_unstable();
        let more = names.len() > limit;
        names.truncate(limit);
        let changes = names.into_iter().filter_map(|name| self.change(name)).collect();
        ChangePage { changes, cursor: self.log.cursor(), more }
    }
}

fn first_names<T>(
    map: &BTreeMap<ImageName, T>,
    may: impl Fn(&ImageName) -> bool,
    range: impl RangeBounds<ImageName>,
    limit: usize,
) -> Vec<&ImageName> {
    map.range(range).map(|(name, _)| name).filter(|name| may(name)).take(limit).collect()
}

#[cfg(test)]
mod tests {
    use model::tree::Time;

    use super::*;

    #[test]
    fn notes_are_known_by_all_but_their_expiry() {
        let expires_at = Some(Time { seconds: 1, nanoseconds: 0 });
        let plain = Notes::default();
        let digest = digest_of_notes(&plain);
        assert_eq!(digest, digest_of_notes(&Notes { expires_at, ..plain.clone() }));
        let created_for = "somebody".to_owned();
        assert_ne!(digest, digest_of_notes(&Notes { created_for, ..plain }));
    }
}
