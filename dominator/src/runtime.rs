//! Carries out what [`crate::core`] decides.
//!
//! [`fleet`] owns the machines and takes orders; [`driver`] runs the state machine of one machine.
//! The other modules are what drivers share.

pub mod alarm_program;
pub mod claim_service;
pub mod clock;
pub mod commit_gate;
pub mod counters;
pub mod driver;
pub mod fleet;
pub mod history;
pub mod identities;
pub mod images;
pub mod plan_cache;
