//! The store: objects by digest and images by name.
//!
//! [`contract`] has the traits that every kind of store implements, with the errors in [`error`]
//! below it. [`local`] implements them in a directory of the disk, [`bucket`] in an S3-compatible
//! bucket. The rest of the server uses only the traits. `open` is the one place that puts the parts
//! together. A server holds a lock on its data directory for as long as it runs.
//!
//! # Invariants
//!
//! * Content is hashed before it gets the name of an object. Damage by a crash or a failing disk is
//!   found before the object is served.
//! * When an image is visible, all objects that it needs are on the medium.
//! * The name of a deleted image is never used again.

pub mod admission;
pub mod bucket;
pub mod bucket_error;
pub mod comparing;
pub mod content;
pub mod contract;
pub mod counters;
pub mod damaged_objects;
pub mod directories;
pub mod error;
pub mod files;
pub mod image_walk;
pub mod images;
pub mod layout;
pub mod local;
pub mod medium_reader;
pub mod object_counts;
pub mod packed;
pub mod record;
pub mod upload;

mod open;

use std::path::{Path, PathBuf};
use std::sync::{Arc, RwLock};

use nix::fcntl::Flock;

use contract::{Collecting, Holding, Leasing, Objects};
use directories::KeptDirectories;
use images::Images;

/// An open store.
pub struct Store {
    /// Content by digest.
    pub objects: Arc<dyn Objects>,
    /// Records by name.
    pub images: Arc<Images>,
    /// Which directories were made, and who owns them.
    pub directories: KeptDirectories,
    /// Which images are in use.
    pub holding: Box<dyn Holding>,
    /// Which objects are held for callers.
    pub leasing: Arc<dyn Leasing>,
    /// Removes objects that nothing needs.
    pub collecting: Box<dyn Collecting>,
    /// Shared by those who add images, from the first look at what one needs until it is visible.
    /// Who has it alone may remove objects.
    pub adding: Arc<RwLock<()>>,
    data: PathBuf,
    _lock: Flock<std::fs::File>,
}

impl Store {
    #[must_use]
    pub fn data(&self) -> &Path {
        &self.data
    }
}
