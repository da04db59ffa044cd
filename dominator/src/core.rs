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
pub mod herd;
pub mod history;
pub mod identity;
pub mod intake;
pub mod meaning;
pub mod network;
pub mod order;
pub mod pace;
pub mod pauses;
pub mod remarks;
pub mod selection;
pub mod settings;
pub mod sources;
pub mod sub;
pub mod trial;

pub use api::planning;
pub use model::image::required;
pub use model::plan::safety;
pub use model::words;
