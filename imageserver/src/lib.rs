//! The content-addressed store of images.
//!
//! Every distinct file and every distinct directory is an object, stored once under its digest; an
//! image is a small record that names the digest of a tree.
//!
//! Dependencies go from top to bottom, never back:
//!
//! | module | what it does |
//! |---|---|
//! | [`daemon`] | opens the store, starts the tasks, serves; the command line |
//! | [`interface`] | methods, pages and metrics |
//! | [`replication`] | follows a master |
//! | [`collection`] | removes objects that no image needs |
//! | [`scrub`], [`check`] | read all objects again, while the server runs or while none does |
//! | [`expiry`] | deletes images that have expired |
//! | [`store`] | objects, images, leases, holds: on a disk or in a bucket |
//! | [`core`] | all decisions, without I/O |
//!
//! # Invariants
//!
//! * Durable before visible: an image is seen when it and all it needs are on the medium.
//! * What is served was checked against its digest since it was last changed.
//! * Memory grows neither with the size of objects nor with the trees of images.
//! * Nothing is removed that an image needs or a client has leased ([`collection`]), and nothing at
//!   all while an image could not be walked or is being added.
//! * A lease is given before the server looks whether the object exists. A collection writes its
//!   own lease, then lists what it removes, then reads the leases of others.
//! * A bucket is changed only under the name of a digest, or by a conditional write.
//! * On a replica an image ends only when its master says that the image of this digest has ended.
//!   A replica takes directories only of its own line, and none that are older.

pub mod check;
pub mod collection;
pub mod core;
pub mod daemon;
pub mod expiry;
pub mod interface;
pub mod replication;
pub mod scrub;
pub mod store;
