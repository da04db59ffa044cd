//! A whole fleet on one machine: the demo, the benchmarks and the end-to-end tests.
//!
//! This is the only crate that depends on all daemons. It starts the real ones as processes, on
//! addresses of 127.0.0.0/8, and uses them like an operator: through their commands, their RPC and
//! their files. Whether a machine is correct is determined by comparing its tree ([`compare`]),
//! never by asking the dominator.

pub mod bench;
pub mod compare;
pub mod demo;
pub mod fleet;
pub mod programs;
pub mod simulated_fleet;
pub mod simulator;
pub mod source_trees;
