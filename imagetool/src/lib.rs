//! The operator's image CLI: makes images from archives and directories, lists, shows, fetches and
//! deletes them.
//!
//! [`verb`] has the verbs of the command line. [`image_source`] reads what an image is made of:
//! archives, directories, OCI images, machines. [`transfer`] uploads and downloads objects.
//! File contents are never held in memory. Nothing that is read, from an archive or from a
//! server, is trusted.
//!
//! [`image_checks`] decides which new images are refused or warned about. `model::image` refuses
//! those that
//! no machine could equal, in the imageserver too.

pub mod archive;
pub mod command;
pub mod compare;
pub mod directory_cache;
pub mod image_checks;
pub mod image_source;
pub mod input_files;
pub mod output;
pub mod packages;
pub mod transfer;
pub mod verb;
