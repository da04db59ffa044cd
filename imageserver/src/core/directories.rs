//! The directories of images: which were made, and who owns them.
//!
//! A directory exists if it was made, or if it contains an image or a directory that was made. One
//! that was never made belongs to the owners of the nearest directory above it that was made.
//! Owners of a directory own everything below it ([`api::access`]).
//!
//! # Invariants
//!
//! * A directory that was made has the owners that its maker gave it, or else those that the
//!   directory above had then.
//! * Only an empty directory is removed.
//! * Two states with the same version are equal, on any two servers.
// tidy: core

pub mod readers;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

use api::access::{OwnedItem, Owners, OwnersError};
use api::image_server::directories::{DirectorySummary, MakeDirectoryReply};
use api::image_server::replication::directories::{DirectoriesVersion, MadeDirectory};
use model::display::counted;
use model::image::{ImageName, NewImageNameError};
use model::tree::Time;
use serde::{Deserialize, Serialize};

/// The most directories that can be made.
pub const DIRECTORIES_MAX: usize = 200_000;

/// The record of a directory that was made.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Made {
    pub owners: Owners,
    pub made_on: Time,
    /// The machines that may read the private images below it ([`readers`]).
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub machines: BTreeSet<String>,
}

/// The directories that were made.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Directories {
    /// `None` if none was ever made.
    version: Option<DirectoriesVersion>,
    made: BTreeMap<ImageName, Made>,
}

/// Why directories are not changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DirectoryError {
    #[error("directory {name} exists already")]
    Exists { name: ImageName },
    #[error("there is no directory {name}")]
    NotFound { name: ImageName },
    #[error("there is no directory {above} to make {name} in: make that first, or ask for both")]
    NoParent { name: ImageName, above: ImageName },
    #[error("directory {name} is not empty: it has {}", held(*.images, *.directories))]
    NotEmpty { name: ImageName, images: u64, directories: u64 },
    #[error("directory {name} cannot have these owners")]
    Owners {
        name: ImageName,
        #[source]
        source: OwnersError,
    },
    #[error("no new image can be in a directory of this name")]
    Name(#[from] NewImageNameError),
    #[error("there are {DIRECTORIES_MAX} directories, and there cannot be more")]
    TooMany,
    #[error(transparent)]
    Readers(#[from] readers::ReadersError),
    #[error(
        "there is no directory {directory}, and this server takes images only into directories \
         that were made: `imagetool mkdir -p {directory}`"
    )]
    NotMade { directory: ImageName },
}

fn held(images: u64, directories: u64) -> String {
    match (images, directories) {
        (0, 1) => "1 directory below it".to_owned(),
        (0, _) => format!("{directories} directories below it"),
        (_, 0) => format!("{} in it or below", counted(images, "image")),
        (_, 1) => format!("{}, and 1 directory below it", counted(images, "image")),
        _ => format!("{}, and {directories} directories below it", counted(images, "image")),
    }
}

/// The directories that `name`, an image or a directory, is in: the nearest first.
#[must_use]
pub fn above(name: &ImageName) -> Vec<ImageName> {
    let mut all = Vec::new();
    let mut at = name.directory().map(str::to_owned);
    while let Some(text) = at {
        let directory = ImageName::new(&text).expect("a name less its end is a name");
        at = directory.directory().map(str::to_owned);
        all.push(directory);
    }
    all
}

/// Returns true if `name` is below `directory`.
#[must_use]
pub fn is_below(name: &ImageName, directory: &ImageName) -> bool {
    let rest = name.as_str().strip_prefix(directory.as_str());
    rest.is_some_and(|rest| rest.starts_with('/'))
}

impl Directories {
    /// Returns the directories of another server, with their version.
    #[must_use]
    pub fn with_version(version: DirectoriesVersion, made: BTreeMap<ImageName, Made>) -> Self {
        Self { version: Some(version), made }
    }

    /// Returns the version; `None` if no directory was ever made.
    #[must_use]
    pub fn version(&self) -> Option<DirectoriesVersion> {
        self.version
    }

    /// Records that they were changed. `line` and `id` are random.
    pub fn note_change(&mut self, line: u64, id: u64) {
        let first = DirectoriesVersion { line, changes: 0, id };
        let DirectoriesVersion { line, changes, .. } = self.version.unwrap_or(first);
        self.version = Some(DirectoriesVersion { line, changes: changes.saturating_add(1), id });
    }

    /// Returns the first `limit` directories that sort after `after`; true if there are more.
    #[must_use]
    pub fn page(&self, after: Option<&ImageName>, limit: usize) -> (Vec<MadeDirectory>, bool) {
        let start = after.map_or(Bound::Unbounded, Bound::Excluded);
        let mut rest = self.made.range::<ImageName, _>((start, Bound::Unbounded));
        let told = |(name, made): (&ImageName, &Made)| {
            let Made { owners, made_on, .. } = made.clone();
            MadeDirectory { name: name.clone(), owners, made_on }
        };
        let page = rest.by_ref().take(limit).map(told).collect();
        (page, rest.next().is_some())
    }

    /// How many directories were made.
    #[must_use]
    pub fn count(&self) -> usize {
        self.made.len()
    }

    /// Returns the record of the directory `name`, if it was made.
    #[must_use]
    pub fn get(&self, name: &ImageName) -> Option<&Made> {
        self.made.get(name)
    }

    /// Returns the directories that were made below `name`, sorted by name.
    fn below<'all>(&'all self, name: &'all ImageName) -> impl Iterator<Item = &'all ImageName> {
        let (start, end) = (Bound::Excluded(name), Bound::Unbounded);
        // Names with the same prefix that are not below, such as `a-b`, sort among them.
        self.made
            .range::<ImageName, _>((start, end))
            .map(|(other, _)| other)
            .take_while(|other| other.as_str().starts_with(name.as_str()))
            .filter(|other| is_below(other, name))
    }

    /// Returns true if the directory `name` exists. `has_images` returns true if an image is below
    /// a directory.
    #[must_use]
    pub fn is_there(&self, name: &ImageName, has_images: impl Fn(&ImageName) -> bool) -> bool {
        self.made.contains_key(name) || self.below(name).next().is_some() || has_images(name)
    }

    /// The directories that `name` is in and that were made, with their owners: the nearest first.
    #[must_use]
    pub fn owned_above(&self, name: &ImageName) -> Vec<OwnedItem> {
        above(name).into_iter().filter_map(|directory| self.owned(&directory)).collect()
    }

    /// Returns the directory `name` with its owners, if it was made.
    #[must_use]
    pub fn owned(&self, name: &ImageName) -> Option<OwnedItem> {
        let Made { owners, .. } = self.made.get(name)?;
        Some(OwnedItem { what: format!("directory {name}"), owners: owners.clone() })
    }

    /// Returns the directories to make so that `name` is made: the outermost first.
    pub fn to_make(
        &self,
        name: &ImageName,
        parents: bool,
        has_images: impl Fn(&ImageName) -> bool,
    ) -> Result<Vec<ImageName>, DirectoryError> {
        if self.made.contains_key(name) {
            let exists = || DirectoryError::Exists { name: name.clone() };
            return if parents { Ok(Vec::new()) } else { Err(exists()) };
        }
        // It is in the name of each image below.
        name.check_new()?;
        let is_there = |one: &ImageName| self.is_there(one, &has_images);
        let mut missing = vec![name.clone()];
        for directory in above(name) {
            if is_there(&directory) {
                break;
            }
            if !parents {
                return Err(DirectoryError::NoParent { name: name.clone(), above: directory });
            }
            missing.push(directory);
        }
        missing.reverse();
        Ok(missing)
    }

    /// Makes `names`, the outermost first, as returned by [`Self::to_make`]. The last gets
    /// `owners`; without owners a directory gets those of the nearest one above it.
    pub fn make(
        &mut self,
        name: &ImageName,
        names: Vec<ImageName>,
        owners: Option<Owners>,
        now: Time,
    ) -> Result<MakeDirectoryReply, DirectoryError> {
        for one in &names {
            let given = owners.clone().filter(|_| one == name);
            if let Some(owners) = &given {
                verify(one, owners)?;
            }
            if self.made.len() >= DIRECTORIES_MAX {
                return Err(DirectoryError::TooMany);
            }
            let owners = given.unwrap_or_else(|| self.owners_of(one));
            self.made.insert(one.clone(), Made { owners, made_on: now, ..Made::default() });
        }
        Ok(MakeDirectoryReply { made: names, owners: self.owners_of(name) })
    }

    /// Returns the owners of `name`, or of the nearest directory above it that was made.
    #[must_use]
    pub fn owners_of(&self, name: &ImageName) -> Owners {
        let own = self.made.get(name);
        let nearest = || above(name).into_iter().find_map(|directory| self.made.get(&directory));
        own.or_else(nearest).map(|made| made.owners.clone()).unwrap_or_default()
    }

    /// Changes the owners of `name`. A directory that exists only by its content is made.
    pub fn give(
        &mut self,
        name: &ImageName,
        owners: Owners,
        now: Time,
        has_images: impl Fn(&ImageName) -> bool,
    ) -> Result<(), DirectoryError> {
        verify(name, &owners)?;
        if let Some(made) = self.made.get_mut(name) {
            made.owners = owners;
            return Ok(());
        }
        if !self.is_there(name, has_images) {
            return Err(DirectoryError::NotFound { name: name.clone() });
        }
        self.make(name, vec![name.clone()], Some(owners), now).map(drop)
    }

    /// Removes `name`, below which there are so many images.
    pub fn remove(&mut self, name: &ImageName, images: u64) -> Result<(), DirectoryError> {
        let directories = self.below(name).count() as u64;
        if images > 0 || directories > 0 {
            return Err(DirectoryError::NotEmpty { name: name.clone(), images, directories });
        }
        match self.made.remove(name) {
            Some(_) => Ok(()),
            None => Err(DirectoryError::NotFound { name: name.clone() }),
        }
    }

    /// Refuses a new image in a directory that was never made.
    pub fn expect_made(&self, image: &ImageName) -> Result<(), DirectoryError> {
        match above(image).into_iter().next() {
            Some(directory) if !self.made.contains_key(&directory) => {
                Err(DirectoryError::NotMade { directory })
            }
            _ => Ok(()),
        }
    }

    /// Lists the directories that were made and for which `may` returns true, those of `images`,
    /// and those above: the first `limit` after `after`, in and below `below`, sorted by component.
    /// The flag is true if there are more.
    #[must_use]
    pub fn list(
        &self,
        may: impl Fn(&ImageName) -> bool,
        images: &Sums,
        (below, after): (Option<&ImageName>, Option<&ImageName>),
        limit: usize,
    ) -> (Vec<DirectorySummary>, bool) {
        let mut names: BTreeSet<ByComponent> = BTreeSet::new();
        let mut insert = |name: &ImageName| {
            let is_wanted = below.is_none_or(|below| name == below || is_below(name, below));
            let name = ByComponent(name.clone());
            if is_wanted && after.is_none_or(|after| name > ByComponent(after.clone())) {
                names.insert(name);
            }
        };
        for name in self.made.keys().filter(|name| may(name)) {
            insert(name);
            above(name).iter().for_each(&mut insert);
        }
        images.0.keys().for_each(insert);
        let more = names.len() > limit;
        let summary = |ByComponent(name): ByComponent| {
            let sum = images.0.get(&name).copied().unwrap_or_default();
            DirectorySummary {
                made_on: self.made.get(&name).map(|made| made.made_on),
                owners: self.owners_of(&name),
                images: sum.images,
                images_below: sum.images_below,
                bytes_below: sum.bytes_below,
                name,
            }
        };
        (names.into_iter().take(limit).map(summary).collect(), more)
    }
}

fn verify(name: &ImageName, owners: &Owners) -> Result<(), DirectoryError> {
    let refuse = |source| DirectoryError::Owners { name: name.clone(), source };
    owners.verify().map_err(refuse)
}

/// A name that sorts so that what is below a directory follows it.
#[derive(PartialEq, Eq)]
struct ByComponent(ImageName);

impl Ord for ByComponent {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.components().cmp(other.0.components())
    }
}

impl PartialOrd for ByComponent {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

/// Sums over images by directory.
#[derive(Clone, Debug, Default)]
pub struct Sums(BTreeMap<ImageName, DirectorySum>);

#[derive(Clone, Copy, Debug, Default)]
struct DirectorySum {
    images: u64,
    images_below: u64,
    bytes_below: u64,
}

impl Sums {
    /// Counts an image whose files have so many bytes.
    pub fn count(&mut self, image: &ImageName, bytes: u64) {
        for (level, directory) in above(image).into_iter().enumerate() {
            let sum = self.0.entry(directory).or_default();
            sum.images += u64::from(level == 0);
            sum.images_below += 1;
            sum.bytes_below = sum.bytes_below.saturating_add(bytes);
        }
    }
}

#[cfg(test)]
mod tests;
