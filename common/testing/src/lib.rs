//! Code that tests and benchmarks of several crates share. No program that is installed depends on
//! it.

pub mod crash_points;
pub mod document;
mod eventually;
pub mod power_cut;
mod programs;
pub mod random;
pub mod strace;
pub mod sub_model;

pub use eventually::{eventually, eventually_async};
pub use programs::{exit_and_output, program};
