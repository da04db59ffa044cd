//! End to end: real daemons as processes, real trees on disk, real kills.
#![expect(clippy::unwrap_used, reason = "a test that fails panics")]

mod access;
mod ahead;
mod audit;
mod bad_input;
mod blocked;
mod computed;
mod contracts;
mod converges;
mod disks;
mod documents;
mod events;
mod exclusive;
mod faults;
mod first_machine;
mod fleet_tasks;
mod former;
mod image_life;
mod image_server;
mod kills;
mod liar;
mod orders;
mod own_certificates;
mod plan;
mod private;
mod rollback;
mod signed;
mod simulated;
mod snapshot;
mod state;
mod stopped;
mod subtool;
mod tasks;
mod trees;
mod two_dominators;
mod wire;
