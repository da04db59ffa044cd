//! Removes objects that nothing needs: which these are, and when.
//!
//! An object is needed if an image names it: as a directory or a file of its tree, or as its build
//! log. To know that, the directories of all images are walked, each once ([`walk`], [`marks`]). An
//! object that is not needed may still be on its way into an image: somebody has uploaded it, or
//! was told that it is there and need not be uploaded. Such an object is leased ([`leases`]).
//! What is neither is removed, on request or when the disk is nearly full ([`pressure`]), those
//! first that were stored first ([`oldest`]).
//!
//! # Why no object is lost
//!
//! Between the walk and a removal, images are added and leases are given. Three rules are enough;
//! [`decision`] holds them, and its tests try all orders of a few steps of each party.
//!
//! 1. A lease is given before it is looked whether the object is there. It is asked for while a
//!    lock keeps new ones away, under which the file is also renamed. So an object that a caller
//!    was told of stays.
//! 2. An image is looked through and made visible in one piece, during which nothing is removed.
//! 3. Nothing is removed while there is an image that was not walked: each time before a few files
//!    are renamed, images that were added meanwhile are walked too.
//!
//! What crashes in the middle has removed less. A file is first renamed into the directory of what
//! is being written, which is emptied at the next start, and removed there: that takes long for a
//! large one, and no lock is held meanwhile.
//!
//! If an image cannot be walked, nobody knows what it needs, and nothing is removed at all.

mod collector;

pub use collector::{Collector, LastRun};
