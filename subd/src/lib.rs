//! subd, the agent on every machine: scans, fetches, updates.
//!
//! | module | what |
//! |---|---|
//! | [`root`] | the only way to the managed tree |
//! | [`scan`] | what the tree holds, for ever |
//! | [`home`], [`saved`] | subd's own directories and what it remembers |
//! | [`cache`], [`fetch`] | objects, and how they come |
//! | [`limits`], [`speed`] | what subd may take of the machine, and what it takes |
//! | [`watchdog`] | notices that the scanner stands still |
//! | [`update`], [`service`] | how the tree is changed, and services driven |
//! | [`disruption`], [`health`] | whether the machine may be disturbed, and how it is after that |
//! | [`notify`] | what systemd hears of it |
//! | [`board`] | what a poll reports, and who waits for it |
//! | [`probe`] | whether the root can be written |
//! | [`server`], [`by_hand`], [`page`] | the methods and the pages |
//! | [`daemon`] | all of it, put together |
//! | [`subtool`], [`fs2objectcache`] | what operators use by hand |

pub mod board;
pub mod by_hand;
pub mod cache;
pub mod command;
pub mod daemon;
pub mod disruption;
pub mod fetch;
pub mod health;
pub mod home;
pub mod identity;
pub mod limits;
pub mod notify;
pub mod page;
pub mod probe;
pub mod root;
pub mod saved;
pub mod scan;
pub mod server;
pub mod service;
pub mod speed;
pub mod trust;
pub mod update;
pub mod watchdog;

use api::fault::{Fault, FaultCode};

/// Runs `work`, which waits for the disk, in a thread where that delays nothing else.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Fault> + Send + 'static,
) -> Result<T, Fault> {
    let result = tokio::task::spawn_blocking(work).await;
    result.unwrap_or_else(|error| Err(Fault::new(FaultCode::Internal, error.to_string())))
}
