//! The model and the wire: everything that two daemons must agree on.
//!
//! [`tree`], [`plan`], [`filter`], [`trigger`], [`image`] and [`mdb`] are the model. They are
//! cores: functions of their arguments, with no clock, disk, network or randomness. [`api`]
//! defines every method that one daemon offers to another. [`wire`] carries calls over HTTP.
//! [`trees`] reads trees
//! and images over it. [`signing`] says which images are signed, and by whom.
//! [`daemon`] is what all daemons do alike: they log, listen, serve pages and stop on SIGTERM.
//!
//! `docs/ARCHITECTURE.md` has the glossary; `docs/PROTOCOL.md` and `docs/IMAGE-FORMAT.md`
//! specify the bytes.

pub mod api;
pub mod audit;
pub mod certificate;
pub mod comments;
pub mod daemon;
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
pub mod tool;
pub mod tree;
pub mod trees;
pub mod trigger;
pub mod when;
pub mod wide;
pub mod wire;
pub mod words;
