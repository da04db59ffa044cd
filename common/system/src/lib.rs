//! What the shells ask of the operating system in one place: the time, random numbers, and whether a
//! file has changed.

pub mod clock;
pub mod file_stamp;
pub mod random;
