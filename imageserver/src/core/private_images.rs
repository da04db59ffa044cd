//! Decides who may read private images, and which objects only private images have.
//!
//! An image is private if it is below a private directory. It may be read by the owners of its
//! directory and of those above, by the machines in their access lists, and by callers with the
//! power [`GetPrivateDirectories`]. An object may be read by everybody if an image that is not
//! private has it; otherwise by those who may read an image that has it. An object that no image
//! has may be read only with the power.
//!
//! # Invariants
//!
//! * Whatever a caller may not read looks as if it were not there.
//! * Nobody can add an image with an object that they may not read, unless they have sent its
//!   content: otherwise the digest alone would be enough to publish it.
// tidy: core

use std::collections::{BTreeMap, BTreeSet};

use api::access::{Access, Identity, IdentityKind, authorize};
use api::image_server::private::GetPrivateDirectories;
use api::method::Method as _;
use model::image::ImageName;
use model::object::{Algorithm, ObjectId};

use crate::core::directories::{Directories, above};

/// The directories whose images are private.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PrivateDirectories(BTreeSet<ImageName>);

impl PrivateDirectories {
    #[must_use]
    pub fn new(names: impl IntoIterator<Item = ImageName>) -> Self {
        Self(names.into_iter().collect())
    }

    /// Returns the directories, sorted by name.
    pub fn names(&self) -> impl Iterator<Item = &ImageName> {
        self.0.iter()
    }

    /// Returns true if `directory` or one above it is private.
    #[must_use]
    pub fn have(&self, directory: &ImageName) -> bool {
        self.0.contains(directory) || above(directory).iter().any(|one| self.0.contains(one))
    }

    /// Returns the directory of a private image, by which it is judged; `None` if the image is not
    /// private.
    #[must_use]
    pub fn directory_of(&self, image: &ImageName) -> Option<ImageName> {
        above(image).into_iter().next().filter(|directory| self.have(directory))
    }
}

/// Returns true if `identity` may read all private images.
#[must_use]
pub fn may_read_all(identity: &Identity) -> bool {
    authorize(GetPrivateDirectories::NAME, Access::Power, identity, "", &[]).is_ok()
}

/// Returns true if `identity` may read the private images in `directory`.
///
/// An authority with a zone vouches for readers only if its zone has [`GetPrivateDirectories`].
#[must_use]
pub fn may_read(directories: &Directories, identity: &Identity, directory: &ImageName) -> bool {
    let mut owned = directories.owned_above(directory);
    owned.extend(directories.owned(directory));
    let is_vouched_for =
        identity.zone.as_ref().is_none_or(|zone| zone.has(GetPrivateDirectories::NAME));
    let machine = identity.user.as_ref().filter(|_| may_be_machine(identity.kind));
    let (method, access) = (GetPrivateDirectories::NAME, Access::PowerOrOwner);
    authorize(method, access, identity, "", &owned).is_ok()
        || is_vouched_for && machine.is_some_and(|name| directories.has_reader(directory, name))
}

/// Returns true if a holder of this kind may be in an access list. In this release one whose
/// certificate does not say what it is may be, too.
fn may_be_machine(kind: IdentityKind) -> bool {
    matches!(kind, IdentityKind::Machine | IdentityKind::Unstated)
}

/// The bytes of a digest that are remembered. With fewer, somebody could make an object that is
/// taken for one of many private ones.
const DIGEST_BYTES: usize = 16;

fn short(id: &ObjectId) -> u128 {
    u128::from_le_bytes(*id.digest().first_chunk::<DIGEST_BYTES>().expect("it has 32 at least"))
}

/// A set of objects. Takes about 24 bytes for each.
///
/// A directory may be the content of a file too. If the file stood for the directory, what is in
/// it would not be found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ObjectSet {
    files: BTreeSet<u128>,
    directories: BTreeSet<u128>,
}

impl ObjectSet {
    /// Adds the content of a file, or a build log.
    pub fn insert_file(&mut self, id: &ObjectId) {
        self.files.insert(short(id));
    }

    /// Adds a directory. Returns true if it is new.
    pub fn insert_directory(&mut self, id: &ObjectId) -> bool {
        self.directories.insert(short(id))
    }

    #[must_use]
    pub fn contains(&self, id: &ObjectId) -> bool {
        self.files.contains(&short(id)) || self.has_directory(id)
    }

    #[must_use]
    pub fn has_directory(&self, id: &ObjectId) -> bool {
        self.directories.contains(&short(id))
    }

    fn append(&mut self, mut other: Self) {
        self.files.append(&mut other.files);
        self.directories.append(&mut other.directories);
    }

    fn count(&self) -> usize {
        self.files.len() + self.directories.len()
    }
}

/// The objects of all images: of those that are not private, and of the private ones by directory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ObjectIndex {
    public: ObjectSet,
    private: BTreeMap<ImageName, ObjectSet>,
}

impl ObjectIndex {
    /// Returns the objects of the private images in `directory`, or of those that are not private.
    #[must_use]
    pub fn of(&self, directory: Option<&ImageName>) -> Option<&ObjectSet> {
        match directory {
            None => Some(&self.public),
            Some(directory) => self.private.get(directory),
        }
    }

    /// Returns the objects of the private images in `directory`, or of those that are not private.
    pub fn of_mut(&mut self, directory: Option<&ImageName>) -> &mut ObjectSet {
        let Some(directory) = directory else { return &mut self.public };
        if !self.private.contains_key(directory) {
            self.private.insert(directory.clone(), ObjectSet::default());
        }
        self.private.get_mut(directory).expect("it was inserted")
    }

    /// Adds objects of an image in the private `directory`, or of one that is not private.
    pub fn add(&mut self, directory: Option<&ImageName>, objects: ObjectSet) {
        self.of_mut(directory).append(objects);
    }

    /// Returns what a caller may read who may read the private images in a directory if `may`
    /// returns true.
    pub fn readable(&self, may: impl Fn(&ImageName) -> bool) -> ReadableObjects<'_> {
        let private = self.private.iter().filter(|(directory, _)| may(directory));
        ReadableObjects { public: &self.public, private: private.map(|(_, all)| all).collect() }
    }

    /// Returns how many objects images have that are not private, and how many the private ones
    /// have, those of each directory counted.
    #[must_use]
    pub fn counts(&self) -> [usize; 2] {
        [self.public.count(), self.private.values().map(ObjectSet::count).sum()]
    }
}

/// The objects that one caller may read.
#[derive(Clone, Debug)]
pub struct ReadableObjects<'index> {
    public: &'index ObjectSet,
    private: Vec<&'index ObjectSet>,
}

impl ReadableObjects<'_> {
    #[must_use]
    pub fn contain(&self, id: &ObjectId) -> bool {
        self.public.contains(id) || self.private.iter().any(|objects| objects.contains(id))
    }
}

/// The objects that callers have sent lately although they may not read them.
#[derive(Clone, Debug, Default)]
pub struct SentObjects {
    /// The end of each by a digest of caller and object.
    ends: BTreeMap<u128, u64>,
    /// Ended ones are forgotten when there are so many.
    prune_at: usize,
}

/// The least number of sent objects before ended ones are forgotten.
const PRUNE_MIN: usize = 4_096;

impl SentObjects {
    fn key(user: &str, id: &ObjectId) -> u128 {
        short(&Algorithm::Blake3.digest(format!("{id} {user}").as_bytes()))
    }

    /// Records that `user` has sent an object, until `end`.
    pub fn note(&mut self, user: &str, id: &ObjectId, now: u64, end: u64) {
        if self.ends.len() >= self.prune_at {
            self.ends.retain(|_, end| *end > now);
            self.prune_at = PRUNE_MIN.max(2 * self.ends.len());
        }
        self.ends.insert(Self::key(user, id), end);
    }

    /// Returns true if `user` has sent the object.
    #[must_use]
    pub fn have(&self, user: &str, id: &ObjectId, now: u64) -> bool {
        self.ends.get(&Self::key(user, id)).is_some_and(|end| *end > now)
    }
}

#[cfg(test)]
mod tests;
