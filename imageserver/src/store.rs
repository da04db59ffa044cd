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

pub mod bucket;
pub mod bucket_error;
pub mod content;
pub mod contract;
pub mod damaged_objects;
pub mod directories;
pub mod error;
pub mod files;
pub mod image_index;
pub mod image_trees;
pub mod images;
pub mod layout;
pub mod medium_reader;
pub mod object_counts;
pub mod packed;
pub mod private_images;
pub mod record;
pub mod upload;

pub mod local {
    //! A store in a directory of the local disk, which one server uses.

    pub mod collecting;
    pub mod leasing;
    pub mod object_files;
    pub mod objects;
    pub mod receiving;
    pub mod records;
    pub mod removal;
}

mod open;

use std::path::{Path, PathBuf};
use std::sync::{Arc, RwLock};

use contract::{Collecting, Holding, Leasing, Objects};
use directories::StoredDirectories;
use images::Images;
use nix::fcntl::Flock;
use private_images::PrivateImages;
use prometheus_client::metrics::counter::Counter;

/// An open store.
pub struct Store {
    /// Content by digest.
    pub objects: Arc<dyn Objects>,
    /// Records by name.
    pub images: Arc<Images>,
    /// Which directories were made, and who owns them.
    pub directories: StoredDirectories,
    /// The private images; `None` if there can be none.
    pub private: Option<Arc<PrivateImages>>,
    /// The images that are in use.
    pub holding: Box<dyn Holding>,
    /// Which objects are held for callers.
    pub leasing: Arc<dyn Leasing>,
    /// Removes objects that nothing needs.
    pub collecting: Box<dyn Collecting>,
    /// Shared by those who add images, from the first look at what one needs until it is visible.
    /// Held exclusively while objects are removed.
    pub adding: Arc<RwLock<()>>,
    data: PathBuf,
    _lock: Flock<std::fs::File>,
}

impl Store {
    #[must_use]
    pub fn data(&self) -> &Path {
        &self.data
    }

    /// Returns why the store is only read; `None` if it can be written.
    #[must_use]
    pub fn trouble(&self) -> Option<String> {
        let why = self.leasing.write_error()?;
        Some(format!(
            "The store cannot be written: images and objects are served, and nothing can be added, \
             deleted or collected ({why}). Look for errors of the disk in the log of the kernel; \
             when it can be written again no restart is needed."
        ))
    }
}

/// Counters since the start.
#[derive(Debug, Default)]
pub struct Counters {
    /// Objects that were stored.
    pub objects_added: Counter,
    /// Their length together, in bytes.
    pub objects_added_bytes: Counter,
    /// Objects that were sent.
    pub objects_sent: Counter,
    /// Their length together, in bytes.
    pub objects_sent_bytes: Counter,
    /// Objects that were asked for and not there.
    pub objects_absent: Counter,
    /// Objects that were lost and came from another server.
    pub objects_repaired: Counter,
    /// Images that came from the master.
    pub images_replicated: Counter,
    /// Images that ended here because they had on the master.
    pub images_replicated_ends: Counter,
    /// Images that were added.
    pub images_added: Counter,
    /// Images that were deleted.
    pub images_deleted: Counter,
}
