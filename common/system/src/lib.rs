//! Access to the operating system: the time, random numbers, changes of files, and values that
//! survive a restart.

pub mod clock;
pub mod durable;
pub mod file_stamp;
pub mod random;
pub mod trusted_clock;
