//! The image server as a process, over real sockets.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod broken_disk;
mod bucket;
mod check;
mod collection;
mod crash;
mod directories;
mod estimate;
mod expiry;
mod fixture;
mod hostile;
mod http;
mod images;
mod interleavings;
mod memory;
mod notes;
mod objects;
mod packed;
mod power;
mod private;
mod replication;
mod replication_simulation;
mod scrub;
mod shared;
mod space;
mod suite;
