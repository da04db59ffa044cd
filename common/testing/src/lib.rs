//! What tests of several crates share. No program depends on it.

#![allow(clippy::unwrap_used, reason = "what these functions unwrap fails the test")]

mod eventually;
mod programs;

pub use eventually::eventually;
pub use programs::{program, said};
