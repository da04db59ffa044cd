//! A whole fleet on one machine: the demo, the benchmarks and the end-to-end tests.
//!
//! This is the one crate that sees all daemons at once. It starts the real ones, as processes of
//! their own, on addresses of 127.0.0.0/8; what it knows of them it knows as an operator does,
//! through their commands, their wire and their files. Whether a machine is as it should be it
//! finds out by looking at the machine's tree ([`compare`]), never by asking the dominator.

pub mod bench;
pub mod certificates;
pub mod compare;
pub mod demo;
pub mod drift;
pub mod fleet;
pub mod listing;
pub mod material;
pub mod process;
pub mod programs;
pub mod simulated;
pub mod simulator;
pub mod table;
