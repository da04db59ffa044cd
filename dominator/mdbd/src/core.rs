//! What mdbd decides: functions of their arguments, without clock, disk or network.
//!
//! [`settings`] reads the tables of the sources, [`data`] what a source gave, [`hosts`] says which
//! machines are wanted, [`merge`] makes one database of several, [`render`] its text, and
//! [`merged_sources`] knows what every source has given, and when that is enough.
// tidy: core

pub mod address;
pub mod data;
pub mod hosts;
pub mod merge;
pub mod merged_sources;
pub mod render;
pub mod settings;
