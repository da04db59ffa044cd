//! The operators' command line for images: makes images from archives, directories and machines,
//! lists, shows, fetches and deletes them.
//!
//! [`verb`] has the verbs of the command line. [`image_source`] reads the sources of images:
//! archives, directories, OCI images, machines. [`transfer`] uploads and downloads objects. File
//! contents are never held in memory. No input is trusted, neither archives nor servers.
//!
//! [`image_checks`] decides which new images are refused or warned about, [`service_needs`] what
//! they would take from services. `model::image` refuses images that no machine could equal, also
//! in the imageserver.

pub mod archive;
pub mod command;
pub mod compare;
pub mod directory_cache;
pub mod image_checks;
pub mod image_source;
pub mod input_files;
pub mod output;
pub mod packages;
pub mod service_needs;
pub mod transfer;
pub mod verb;
