//! Objects between this program and the image server: uploads, downloads, and trees that are
//! restored in a directory.

pub mod contents;
pub mod directories;
pub mod download;
pub mod object_sequence;
pub mod restore;
pub mod upload;
