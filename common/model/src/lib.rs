//! The model: trees, images and machines as plain values, and the decisions about them.
//!
//! A [`tree`] is the file-system of a machine or an image. A [`plan`] turns one tree into another.
//! An [`image`] is a tree with a [`filter`] and [`trigger`]s; [`signing`] protects it. The [`mdb`]
//! states which machine must have which image.
//!
//! Everything here is a function of its arguments: no clock, disk, network or randomness. The crate
//! depends on neither tokio nor hyper. `docs/IMAGE-FORMAT.md` specifies the bytes.

pub mod accounts;
pub mod backoff;
pub mod boot_time;
pub mod display;
pub mod escape;
pub mod filter;
pub mod image;
pub mod json;
pub mod lock;
pub mod machine_specific;
pub mod mdb;
pub mod names;
pub mod object;
pub mod path;
pub mod permit;
pub mod plan;
pub mod scope;
pub mod signing;
pub mod task_order;
pub mod time_parse;
pub mod tree;
pub mod trigger;
pub mod unknown_keys;

/// Describes a type for `docs/openapi.json`.
#[cfg(not(feature = "schema"))]
pub use no_schema::JsonSchema;
#[cfg(feature = "schema")]
pub use schemars::JsonSchema;
