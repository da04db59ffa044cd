//! The store: a directory that holds objects by digest and images by name.
//!
//! [`objects`] keeps content, [`images`] keeps records; [`layout`] says where. One server at a
//! time has a data directory: it holds a lock for as long as it lives. What the rest of the server
//! knows of all that is in [`contract`], so that a store may lie on something else than a disk.
//!
//! # Invariants
//!
//! * A file under an object's name has passed through its digest. What a crash or a failing disk
//!   makes of it later is found before it is served.
//! * When an image is visible, all that it needs is on the medium.
//! * A name that was deleted is never used again.

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
    /// The data directory.
    #[must_use]
    pub fn data(&self) -> &Path {
        &self.data
    }
}
