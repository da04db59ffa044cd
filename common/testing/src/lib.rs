//! Code that tests of several crates share. No program depends on it.

#![allow(clippy::unwrap_used, reason = "what these functions unwrap fails the test")]

mod eventually;
mod programs;

pub use eventually::{eventually, eventually_async};
pub use programs::{program, said};
