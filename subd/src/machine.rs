//! What subd does to its machine, or asks of it, besides the tree.
//!
//! | module | what |
//! |---|---|
//! | [`services`] | stops, starts and reloads services, and reboots |
//! | [`command`] | runs a program with a time limit |
//! | [`command_runner`] | runs operators' commands in a cgroup of their own |
//! | [`health`] | runs the health check of an image |
//! | [`disruption`] | asks whether the machine may be disturbed now |
//! | [`notify`] | reports to systemd |
//! | [`probe`] | checks that the root can be written |
//! | [`identity`] | host name, machine id, boot id |

pub mod command;
pub mod command_runner;
pub mod disruption;
pub mod health;
pub mod identity;
pub mod notify;
pub mod probe;
pub mod services;
