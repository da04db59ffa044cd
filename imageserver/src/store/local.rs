//! A store in a directory of the local disk, which one server uses.

pub mod collecting;
pub mod directories;
pub mod image_holds;
pub mod leasing;
pub mod objects;
pub mod receiving;
pub mod records;
pub mod removal;
pub mod unsynced_objects;
pub mod verified_files;
