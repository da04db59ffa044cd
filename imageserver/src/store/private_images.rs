//! Knows which objects only private images have, and what a caller may read.
//!
//! Memory holds the objects of all images ([`ObjectIndex`]), if any directory is private. They are
//! read from the trees when the server starts. A new image is added to them before it is visible.
//! When an image has ended, all trees are read again: until then its objects are for those who
//! could read them before.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Instant;

use api::access::Identity;
use api::object_server::LEASE_SECONDS_MAX;
use model::display::{counted, error_chain};
use model::image::ImageName;
use model::lock::locked;
use model::object::ObjectId;
use tokio::sync::Notify;

use super::Store;
use super::contract::Objects;
use super::error::{StoreError, WalkError, failed};
use super::image_trees::{ImageRoots, WalkedObjects, walk};
use super::images::Images;
use super::record::Record;
use crate::core::directories::Directories;
use crate::core::private_images::{
    ObjectIndex, ObjectSet, PrivateDirectories, SentObjects, may_read, may_read_all,
};

/// The private images of a store.
pub struct PrivateImages {
    directories: PrivateDirectories,
    state: RwLock<IndexState>,
    sent: Mutex<SentObjects>,
    started: Instant,
    /// Notified when an image was not added after all.
    changed: Notify,
}

/// What is known of the objects of images.
#[derive(Default)]
struct IndexState {
    index: ObjectIndex,
    /// The images in the index.
    images: BTreeMap<ImageName, ImageRoots>,
    /// The images that are about to become visible; they are in the index.
    adding: BTreeSet<ImageName>,
    /// The images that were added since a reading of all trees began, while it goes on.
    meanwhile: Option<Vec<ImageRoots>>,
    /// True if a tree could not be read, so that objects are missing in the index.
    is_incomplete: bool,
}

/// The result of a check of the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IndexCheck {
    /// The index is that of the images.
    Exact,
    /// All trees were read again.
    Rebuilt,
    /// All trees were read again, as far as that was possible.
    Incomplete,
    /// The server stops.
    Stopped,
}

impl PrivateImages {
    /// Reads the trees of all images. An image that cannot be read is logged, and its objects are
    /// given to nobody without the power.
    #[must_use]
    pub fn open(names: Vec<ImageName>, objects: &dyn Objects, images: &Images) -> Self {
        let private = Self {
            directories: PrivateDirectories::new(names),
            state: RwLock::default(),
            sent: Mutex::default(),
            started: Instant::now(),
            changed: Notify::new(),
        };
        private.rebuild(objects, images, &|| false);
        let [public, of_private] = private.read_state().index.counts();
        tracing::info!(
            images = images.count(),
            objects = public,
            of_private_images = of_private,
            "read which objects only private images have"
        );
        private
    }

    /// The directories whose images are private.
    #[must_use]
    pub fn directories(&self) -> &PrivateDirectories {
        &self.directories
    }

    fn read_state(&self) -> RwLockReadGuard<'_, IndexState> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write_state(&self) -> RwLockWriteGuard<'_, IndexState> {
        self.state.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns true if a tree could not be read, so that its objects are given to nobody without
    /// the power.
    #[must_use]
    pub fn is_incomplete(&self) -> bool {
        self.read_state().is_incomplete
    }

    /// Resolves when the index may have to be checked although no image has changed.
    pub async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Returns true if somebody may read the object for whom `may` returns true for the directories
    /// whose private images they may read.
    #[must_use]
    pub fn is_readable(&self, id: &ObjectId, may: impl Fn(&ImageName) -> bool) -> bool {
        self.read_state().index.readable(may).contain(id)
    }

    /// Adds an image to the index that is about to become visible.
    fn begin_to_add(&self, objects: &dyn Objects, roots: ImageRoots) -> Result<(), WalkError> {
        let mut state = self.write_state();
        state.adding.insert(roots.image.clone());
        state.images.insert(roots.image.clone(), roots.clone());
        if let Some(meanwhile) = &mut state.meanwhile {
            meanwhile.push(roots.clone());
        }
        // From here on a reading of all trees includes this one.
        drop(state);
        let directory = self.directories.directory_of(&roots.image);
        let (of, new) = (directory.as_ref(), ObjectSet::default());
        let mut found = NewObjects { private: self, directory: of, new };
        walk(objects, &mut found, &[roots], || false)?;
        let new = found.new;
        self.write_state().index.add(directory.as_ref(), new);
        Ok(())
    }

    fn end_of_adding(&self, image: &ImageName, is_added: bool) {
        self.write_state().adding.remove(image);
        if !is_added {
            self.changed.notify_one();
        }
    }

    /// Reads all trees again if images have ended since they were read, or if some could not be.
    pub fn check(
        &self,
        objects: &dyn Objects,
        images: &Images,
        stop: &dyn Fn() -> bool,
    ) -> IndexCheck {
        let is_exact = {
            let state = self.read_state();
            let now = by_name(images.roots().1);
            let others = |all: &BTreeMap<ImageName, ImageRoots>| -> Vec<ImageRoots> {
                let known = all.values().filter(|one| !state.adding.contains(&one.image));
                known.cloned().collect()
            };
            !state.is_incomplete && others(&state.images) == others(&now)
        };
        if is_exact {
            return IndexCheck::Exact;
        }
        if !self.rebuild(objects, images, stop) {
            return IndexCheck::Stopped;
        }
        match self.read_state().is_incomplete {
            true => IndexCheck::Incomplete,
            false => IndexCheck::Rebuilt,
        }
    }

    /// Makes a new index of all images. Returns false if `stop` returned true before the end.
    fn rebuild(&self, objects: &dyn Objects, images: &Images, stop: &dyn Fn() -> bool) -> bool {
        let mut next = IndexState::default();
        let mut rest = {
            let mut state = self.write_state();
            state.meanwhile = Some(Vec::new());
            let adding = state.adding.iter().filter_map(|name| state.images.get(name)).cloned();
            let mut all = by_name(adding.collect());
            // Whatever becomes visible after this is in `meanwhile`.
            all.extend(by_name(images.roots().1));
            all
        };
        loop {
            for (name, roots) in std::mem::take(&mut rest) {
                let directory = self.directories.directory_of(&name);
                let known = next.index.of_mut(directory.as_ref());
                match walk(objects, known, std::slice::from_ref(&roots), stop) {
                    Ok(true) => {}
                    Ok(false) => return false,
                    Err(error) => {
                        next.is_incomplete = true;
                        tracing::error!(
                            "objects of an image are given to nobody without the power {}: {}",
                            "ImageServer.GetPrivateDirectories",
                            error_chain(&error)
                        );
                    }
                }
                next.images.insert(name, roots);
            }
            let mut state = self.write_state();
            rest = by_name(state.meanwhile.replace(Vec::new()).unwrap_or_default());
            rest.retain(|name, roots| next.images.get(name) != Some(roots));
            if rest.is_empty() {
                next.adding = std::mem::take(&mut state.adding);
                // `meanwhile` is `None` again.
                *state = next;
                return true;
            }
        }
    }
}

fn by_name(roots: Vec<ImageRoots>) -> BTreeMap<ImageName, ImageRoots> {
    roots.into_iter().map(|one| (one.image.clone(), one)).collect()
}

/// Collects the objects of a new image that the index does not have.
struct NewObjects<'index> {
    private: &'index PrivateImages,
    directory: Option<&'index ImageName>,
    new: ObjectSet,
}

impl WalkedObjects for NewObjects<'_> {
    fn add(&mut self, id: &ObjectId) {
        self.new.insert_file(id);
    }

    fn add_directory(&mut self, id: &ObjectId) -> bool {
        let state = self.private.read_state();
        let is_known = state.index.of(self.directory).is_some_and(|all| all.has_directory(id));
        !is_known && self.new.insert_directory(id)
    }
}

impl WalkedObjects for ObjectSet {
    fn add(&mut self, id: &ObjectId) {
        self.insert_file(id);
    }

    fn add_directory(&mut self, id: &ObjectId) -> bool {
        self.insert_directory(id)
    }
}

impl Store {
    /// Makes the images below these directories private. Reads the trees of all images.
    pub fn keep_private(&mut self, names: Vec<ImageName>) {
        let private = PrivateImages::open(names, &*self.objects, &self.images);
        self.private = Some(Arc::new(private));
    }

    /// Returns what a caller may read.
    #[must_use]
    pub fn reader(&self, identity: &Arc<Identity>) -> Reader {
        match &self.private {
            Some(private) if !may_read_all(identity) => {
                let (directories, identity) = (self.directories.now(), Arc::clone(identity));
                let (private, known) = (Arc::clone(private), Mutex::default());
                let reader = RestrictedReader { private, directories, identity, known };
                Reader::Restricted(Arc::new(reader))
            }
            _ => Reader::Everything,
        }
    }

    /// Makes an image durable, then visible. All that it needs is durable already.
    pub fn add_image(&self, record: &Record) -> Result<(), StoreError> {
        let Some(private) = &self.private else { return self.images.add(record) };
        let image = record.image.content.name.clone();
        let (root, build_log) = (record.image.content.root, record.image.notes.build_log);
        let roots = ImageRoots { image: image.clone(), root, build_log };
        let indexed = private.begin_to_add(&*self.objects, roots).map_err(|error| {
            failed(format!("read the tree of image {image}"))(std::io::Error::other(error))
        });
        let added = indexed.and_then(|()| self.images.add(record));
        private.end_of_adding(&image, added.is_ok());
        added
    }
}

/// What a caller may read. A clone shares everything.
#[derive(Clone)]
pub enum Reader {
    /// No image is private, or the caller may read all.
    Everything,
    Restricted(Arc<RestrictedReader>),
}

/// A caller who may read some private images, or none.
pub struct RestrictedReader {
    private: Arc<PrivateImages>,
    directories: Arc<Directories>,
    identity: Arc<Identity>,
    /// Which private directories were decided about.
    known: Mutex<BTreeMap<ImageName, bool>>,
}

impl RestrictedReader {
    fn may_read(&self, directory: &ImageName) -> bool {
        let mut known = locked(&self.known);
        if let Some(may) = known.get(directory) {
            return *may;
        }
        let may = may_read(&self.directories, &self.identity, directory);
        known.insert(directory.clone(), may);
        may
    }

    /// Returns those of `ids` for which `is_excepted` returns false and that may not be read.
    fn unreadable(
        &self,
        ids: &[ObjectId],
        is_excepted: impl Fn(&ObjectId) -> bool,
    ) -> Vec<ObjectId> {
        let state = self.private.read_state();
        let readable = state.index.readable(|directory| self.may_read(directory));
        let hidden = ids.iter().filter(|id| !readable.contain(id) && !is_excepted(id));
        hidden.copied().collect()
    }
}

impl Reader {
    /// Returns true if the caller may read an image of that name.
    #[must_use]
    pub fn may_read_image(&self, image: &ImageName) -> bool {
        let Self::Restricted(reader) = self else { return true };
        let directory = reader.private.directories.directory_of(image);
        directory.is_none_or(|directory| reader.may_read(&directory))
    }

    /// Returns true if the caller may read the images in `directory`.
    #[must_use]
    pub fn may_read_directory(&self, directory: &ImageName) -> bool {
        let Self::Restricted(reader) = self else { return true };
        !reader.private.directories.have(directory) || reader.may_read(directory)
    }

    /// Returns true if the caller may follow the image of that name as a replica.
    #[must_use]
    pub fn may_follow(&self, image: &ImageName) -> bool {
        let Self::Restricted(reader) = self else { return true };
        reader.private.directories.directory_of(image).is_none()
    }

    /// Refuses objects that the caller may not read.
    pub fn expect_readable(&self, ids: &[ObjectId]) -> Result<(), UnreadableError> {
        let Self::Restricted(reader) = self else { return Ok(()) };
        let hidden = reader.unreadable(ids, |_| false);
        let Some(&id) = hidden.first() else { return Ok(()) };
        let user = reader.identity.in_words();
        let (more, of) = (hidden.len() - 1, counted(ids.len() as u64, "object"));
        Err(UnreadableError { id, user, more, of })
    }

    /// Returns those of `ids` that the caller may not use in an image: they may not read them, and
    /// have not sent them lately.
    #[must_use]
    pub fn unusable(&self, ids: &[ObjectId]) -> Vec<ObjectId> {
        let Self::Restricted(reader) = self else { return Vec::new() };
        let private = &reader.private;
        let (sent, now) = (locked(&private.sent), private.started.elapsed().as_secs());
        let user = reader.identity.in_words().unwrap_or_default();
        reader.unreadable(ids, |id| sent.have(&user, id, now))
    }

    /// Returns those of `ids` that the caller has to send before they can be in an image, in order.
    pub fn missing(
        &self,
        objects: &dyn Objects,
        ids: &[ObjectId],
    ) -> Result<Vec<ObjectId>, StoreError> {
        let missing = objects.missing(ids)?;
        let unusable = self.unusable(ids);
        if unusable.is_empty() {
            return Ok(missing);
        }
        let all: BTreeSet<ObjectId> = missing.into_iter().chain(unusable).collect();
        Ok(ids.iter().filter(|id| all.contains(id)).copied().collect())
    }

    /// Records that the caller has sent the content of an object. Returns true if they could not
    /// use it before.
    pub fn note_sent(&self, id: &ObjectId) -> bool {
        let Self::Restricted(reader) = self else { return false };
        if self.unusable(&[*id]).is_empty() {
            return false;
        }
        let now = reader.private.started.elapsed().as_secs();
        let user = reader.identity.in_words().unwrap_or_default();
        locked(&reader.private.sent).note(&user, id, now, now + u64::from(LEASE_SECONDS_MAX));
        true
    }
}

/// The caller may not read objects, be they there or not.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "object {id}{} of {of} asked for is in no image that {} may read: if it is one of a private \
     image, its directory must name the machine (`imagetool readers`)",
    others(*.more), .user.as_deref().unwrap_or("a caller without a certificate")
)]
pub struct UnreadableError {
    /// The first of them.
    pub id: ObjectId,
    user: Option<String>,
    more: usize,
    of: String,
}

fn others(more: usize) -> String {
    if more == 0 { String::new() } else { format!(" (and {more} more)") }
}
