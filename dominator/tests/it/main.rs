//! The state machines against a simulated fleet, and the real dominator as a process.

#![expect(clippy::unwrap_used, reason = "what these functions unwrap fails the test")]

mod alarms;
mod bad_neighbours;
mod brake;
mod budgets;
mod command_line;
mod content_changes;
mod events;
mod fake;
mod faults;
mod fleet_resources;
mod liars;
mod loop_over_the_wire;
mod lying_filegen;
mod machine_database;
mod many;
mod mdbd;
mod model;
mod operating;
mod operators;
mod orders;
mod permits;
mod plan;
mod reload;
mod rollout_crashes;
mod rollouts;
mod settings;
mod simulation;
mod stage;
mod web;
mod world;
mod wrong_machine;
