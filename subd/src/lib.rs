//! subd, the agent on every machine: scans, fetches, updates.
//!
//! | module | what |
//! |---|---|
//! | [`root`] | the only way to the managed tree |
//! | [`scan`] | what the tree holds, for ever |
//! | [`home`], [`saved`] | subd's own directories and what it remembers |
//! | [`cache`], [`fetch`] | objects, and how they come |
//! | [`update`], [`service`] | how the tree is changed, and services driven |
//! | [`board`] | what a poll reports, and who waits for it |
//! | [`server`], [`page`] | the methods and the pages |
//! | [`daemon`] | all of it, put together |

pub mod board;
pub mod cache;
pub mod command;
pub mod daemon;
pub mod fetch;
pub mod home;
pub mod identity;
pub mod page;
pub mod root;
pub mod saved;
pub mod scan;
pub mod server;
pub mod service;
pub mod update;
