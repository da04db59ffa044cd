//! subd, the agent on every machine: scans, fetches, updates.
//!
//! | module | what |
//! |---|---|
//! | [`daemon`] | flags, start and stop |
//! | [`interface`] | RPC methods, pages and metrics |
//! | [`update`] | stages updates, carries them out, finishes or undoes them after a crash |
//! | [`fetch`] | gets objects from object servers |
//! | [`scan`] | keeps an up-to-date tree of the root |
//! | [`cache`] | the objects that are ready for an update |
//! | [`trust`] | decides whether an image is signed as this machine requires |
//! | [`tasks`](mod@tasks) | runs the daemon tasks of the image |
//! | [`machine`] | services, health, reboots, disruption, identity, systemd |
//! | [`limits`] | limits what subd uses of the machine, and measures it |
//! | [`state`] | what polls report, and what survives a restart |
//! | [`root`] | the only way to the managed tree |
//!
//! A module uses only modules below it in this table.
//!
//! # Invariants
//!
//! * No path below the root is given to the kernel as a path from `/`: [`root`] opens directories
//!   one below the other.
//! * While the tree may be mixed there is a journal on the medium ([`update`]). One thread, the
//!   executor, carries it out, also after a crash.
//! * On a machine with trusted keys nothing is staged that [`trust`] has not verified against the
//!   same scan. No call over the network changes keys, threshold or record.

pub mod cache;
pub mod daemon;
pub mod fetch;
pub mod interface;
pub mod limits;
pub mod machine;
pub mod provisioning;
pub mod root;
pub mod scan;
pub mod state;
pub mod tasks;
pub mod trust;
pub mod update;

use api::fault::{Fault, FaultCode};

/// Runs `work`, which waits for the disk, in a blocking thread.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Fault> + Send + 'static,
) -> Result<T, Fault> {
    let result = tokio::task::spawn_blocking(work).await;
    result.unwrap_or_else(|error| Err(Fault::new(FaultCode::Internal, error.to_string())))
}
