//! Removes objects that no image needs.
//!
//! An object is needed if an image names it: as a directory or a file of its tree, or as its build
//! log. The collector finds these by walking the directories of all images, each once
//! ([`crate::store::image_walk`]). An object that is not needed may still be part of an image that
//! is about to be added: a client has uploaded it, or was told that it need not upload it. Such an
//! object is leased ([`crate::core::collection::leases`]). Objects that are neither needed nor
//! leased are removed, on request or when the disk is nearly full
//! ([`crate::core::collection::disk_pressure`]), the oldest first.
//!
//! # Why no object is lost
//!
//! Images are added and leases are given between the walk and a removal. Three rules are enough.
//! [`crate::core::collection::removal`] applies them; the test `interleavings` tries all orders of
//! a few steps of each party.
//!
//! 1. A lease is given before the server looks for the object. The collector reads the leases under
//!    a lock that delays new ones, and renames the file under the same lock. So an object that a
//!    client was told of stays.
//! 2. An image is checked and made visible under a lock. Nothing is removed while the lock is held.
//! 3. Nothing is removed while there is an image that was not walked: before each batch of renames
//!    the collector also walks the images that were added since.
//!
//! A crash during a collection has only removed fewer objects. A file is first renamed into the
//! directory for temporary files and removed there without a lock, because removing a large file
//! takes long. The next start empties that directory.
//!
//! If an image cannot be walked, its needs are unknown, and nothing is removed at all.

mod collector;

pub use collector::{Collector, LastRun};
