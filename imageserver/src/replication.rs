//! Follows a master: a replica has all images of its master, and forwards changes to it.
//!
//! # Why no image is lost
//!
//! * A replica ends an image only if the master says that the image with this digest has ended
//!   ([`crate::core::replication::decision`]). An image that the master does not list stays, so a
//!   master that is empty or has lost its disk does no harm.
//! * A replica never replaces an image by another one of the same name; it reports the conflict.
//! * A replica does not expire images by its own clock; an archive expires none at all.
//! * An image in use stays until it is no longer in use.
//! * An image becomes visible when all objects that it needs are stored, verified and on the medium
//!   ([`image_steps`]), as after an upload. The fetched objects are leased.
//! * Directories and owners are taken as a whole, and only if their version continues the local one
//!   ([`crate::core::replication::directories`]).
//!
//! # How a replica follows
//!
//! The master numbers its changes since its start ([`crate::core::replication::master`]). A
//! replica first asks for the list of all names, in pages, and then for the changes since the list
//! began. A master that was restarted has other numbers and sends its list again
//! ([`crate::core::replication::sync_cursor`]). A list is cheap: its digests show that most images
//! are unchanged. The remaining work is in a queue ([`crate::core::replication::queue`]).

pub mod directories;
pub mod fetch;
pub mod follower;
pub mod image_steps;

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};

use api::image_server::replication::{GetReplicationReply, ReplicaReport, ServerId};
use follower::Follower;
use model::display::error_chain;
use model::lock::locked;
use model::tree::Time;
use system::random::random;

use crate::core::replication::master::Replicas;
use crate::store::error::StoreError;
use crate::store::private_images::Reader;
use crate::store::{files, layout};

/// The state of replication: the master and the replicas of this server.
pub struct Replication {
    id: ServerId,
    follower: Option<Arc<Follower>>,
    replicas: Mutex<Replicas>,
}

impl Replication {
    /// Returns the replication of the server with that store.
    #[must_use]
    pub fn new(id: ServerId, follower: Option<Arc<Follower>>) -> Self {
        Self { id, follower, replicas: Mutex::default() }
    }

    /// Returns the id of the store.
    #[must_use]
    pub fn id(&self) -> &ServerId {
        &self.id
    }

    /// Returns the follower of the master, if there is one.
    #[must_use]
    pub fn follower(&self) -> Option<&Arc<Follower>> {
        self.follower.as_ref()
    }

    fn replicas(&self) -> MutexGuard<'_, Replicas> {
        locked(&self.replicas)
    }

    /// Records that a replica at `address` has asked for changes.
    pub fn note_replica(&self, now: Time, address: String, report: &ReplicaReport) {
        self.replicas().note(now, address, report);
    }

    /// Returns the state of the master and of all replicas.
    #[must_use]
    pub fn report(&self, now: Time) -> GetReplicationReply {
        GetReplicationReply {
            server: self.id.clone(),
            master: self.follower.as_ref().map(|follower| follower.report()),
            replicas: self.replicas().list(now),
        }
    }

    /// Returns the same without the names of images that `reader` may not read.
    #[must_use]
    pub fn report_for(&self, reader: &Reader, now: Time) -> GetReplicationReply {
        let mut report = self.report(now);
        if let Some(master) = &mut report.master {
            master.troubles.retain(|troubled| reader.may_read_image(&troubled.name));
            master.only_here.retain(|name| reader.may_read_image(name));
        }
        report
    }
}

/// An archive would become a plain replica.
#[derive(Debug, thiserror::Error)]
#[error(
    "the data directory `{data}` is that of an archive, which keeps images that have ended on the \
     master: without --replicate-archive they would be deleted. Give that flag, or delete the file \
     `{data}/{}` if they may go",
    layout::ARCHIVE
)]
pub struct ArchiveError {
    data: String,
}

/// Reads the id of the store in `data`, or creates it.
#[must_use]
pub fn server_id(data: &Path) -> ServerId {
    match files::read::<ServerId>(data, layout::SERVER_ID) {
        Ok(Some(id)) => return id,
        Ok(None) => {}
        Err(error) => tracing::warn!(
            "cannot read the id of the store, creating a new one: {}",
            error_chain(&error)
        ),
    }
    let id = ServerId::from(u128::from(random()) << 64 | u128::from(random()));
    if let Err(error) = files::write(data, layout::SERVER_ID, &id) {
        let why = error_chain(&error);
        tracing::error!("the store has another id after the next start: {why}");
    }
    id
}

/// Marks an archive, and refuses to run one as a plain replica.
pub fn check_archive(
    data: &Path,
    is_archive: bool,
) -> Result<Result<(), ArchiveError>, StoreError> {
    match (is_archive, data.join(layout::ARCHIVE).exists()) {
        (true, false) => files::write(data, layout::ARCHIVE, &true).map(Ok),
        (false, true) => Ok(Err(ArchiveError { data: data.display().to_string() })),
        _ => Ok(Ok(())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Store;

    #[test]
    fn a_store_keeps_its_id_and_an_archive_stays_one() {
        let data = tempfile::tempdir().unwrap();
        let _store = Store::open(data.path()).unwrap();
        let id = server_id(data.path());
        assert_eq!(server_id(data.path()), id);
        std::fs::write(data.path().join(layout::SERVER_ID), "x").unwrap();
        let other = server_id(data.path());
        assert_ne!(other, id);
        assert_eq!(server_id(data.path()), other);

        check_archive(data.path(), false).unwrap().unwrap();
        check_archive(data.path(), true).unwrap().unwrap();
        check_archive(data.path(), true).unwrap().unwrap();
        assert!(check_archive(data.path(), false).unwrap().is_err());
    }
}
