//! What the dominator decides: functions of their arguments, without clock, disk or network.
//!
//! The shell (`crate::runtime::driver`, `crate::herd` and their neighbours) and the simulation of
//! `tests/it` are two interpreters of the same effects.
// tidy: core

pub mod alarms;
pub mod budget;
pub mod changes;
pub mod claims;
pub mod default_image;
pub mod event_filter;
pub mod identity;
pub mod image_breaker;
pub mod mdb_admission;
pub mod mdb_diff;
pub mod network_budget;
pub mod order;
pub mod pauses;
pub mod selectors;
pub mod settings;
pub mod sources;
pub mod status_history;
pub mod sub;
pub mod timing;
pub mod warnings;
