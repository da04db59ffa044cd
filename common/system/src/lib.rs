//! What the shells ask of the operating system in one place: the time, random numbers, whether a
//! file has changed, and values that survive a restart.

pub mod clock;
pub mod durable;
pub mod file_stamp;
pub mod random;
