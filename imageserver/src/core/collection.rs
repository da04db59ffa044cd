//! Which objects may be removed, and when.
//!
//! An object is needed if an image names it: as a directory or a file of its tree, or as its build
//! log. An object that is not needed may still be part of an image that is about to be added:
//! a client has uploaded it, or was told that it need not upload it. Such an object is leased.
//! Objects that are neither needed nor leased are removed, the oldest first.
// tidy: core

pub mod disk_pressure;
pub mod leases;
pub mod needed_objects;
pub mod oldest_objects;
pub mod removal;
