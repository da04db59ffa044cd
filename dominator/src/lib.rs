//! The central controller: it keeps every machine equal to its image.
//!
//! [`core`] decides; everything else carries out. [`mdbd`] is a daemon of its own, which makes the
//! machine database. `docs/ARCHITECTURE.md` has the map,
//! `docs/OPERATING.md` the words that operators see.

pub mod alarm_program;
pub mod api;
pub mod budgets;
pub mod clock;
pub mod command;
pub mod core;
pub mod daemon;
pub mod desk;
pub mod driver;
pub mod fleet;
pub mod gate;
pub mod history;
pub mod identities;
pub mod images;
pub mod mdb_file;
pub mod mdb_server;
pub mod metrics;
pub mod pages;
pub mod pauses;
pub mod plans;
pub mod reload;
pub mod state;

pub use rpc::trees;
pub use rpc::trees::store;
