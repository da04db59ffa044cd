//! The decisions of the server, as functions of their arguments: no clock, disk or network.
// tidy: core

pub mod check_findings;
pub mod clock_trust;
pub mod collection;
pub mod directories;
pub mod image_expiry;
pub mod image_holds;
pub mod missing_objects;
pub mod replication;
pub mod scrub_progress;
pub mod scrub_repairs;
