//! The model: what the product manages, as plain values, and the decisions that are made of them.
//!
//! A [`tree`] is what a machine has or an image holds. A [`plan`] turns one tree into another. An
//! [`image`] is a tree with a [`filter`] and [`trigger`]s; [`signing`] protects it. The [`mdb`]
//! says
//! which machine must have which image.
//!
//! Everything here is a function of its arguments: no clock, disk, network or randomness. The crate
//! depends on neither tokio nor hyper. `docs/IMAGE-FORMAT.md` specifies the bytes.

pub mod backoff;
pub mod comments;
pub mod escape;
pub mod filter;
pub mod image;
pub mod lock;
pub mod mdb;
pub mod object;
pub mod path;
pub mod plan;
pub mod report;
pub mod scope;
pub mod signing;
pub mod tree;
pub mod trigger;
pub mod when;
pub mod wide;
pub mod words;
