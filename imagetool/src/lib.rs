//! The operator's image CLI: makes images from archives and directories, lists, shows, gets and
//! deletes them.
//!
//! [`archive`] and [`directory`] read what an image is made of, [`upload`] sends what the image
//! server lacks, [`download`] and [`restore`] are the way back. [`verb`] has one module for each
//! verb of the command line. Contents are never held in memory, and nothing that is read, from
//! an archive or from a server, is trusted.

pub mod admission;
pub mod archive;
pub mod command;
pub mod compare;
pub mod computed;
pub mod content;
pub mod directory;
pub mod download;
pub mod entry;
pub mod estimate;
pub mod failure;
pub mod filters;
pub mod health;
pub mod inventory;
pub mod listings;
pub mod oci;
pub mod output;
pub mod packages;
pub mod progress;
pub mod restore;
pub mod source;
pub mod sub;
pub mod triggers;
pub mod upload;
pub mod verb;
