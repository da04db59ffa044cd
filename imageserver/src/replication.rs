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
//! The master numbers its changes since its start ([`crate::core::replication::change_log`]). A
//! replica first asks for the list of all names, in pages, and then for the changes since the list
//! began. A master that was restarted has other numbers and sends its list again
//! ([`crate::core::replication::sync_cursor`]). A list is cheap: its digests show that most images
//! are unchanged. The remaining work is in a queue ([`crate::core::replication::queue`]).

pub mod directories;
pub mod fetch;
pub mod follower;
pub mod identity;
pub mod image_steps;

use std::sync::{Arc, Mutex, MutexGuard};

use api::image_server::replication::{GetReplicationReply, ReplicaReport, ServerId};
use model::lock::locked;
use model::tree::Time;
use rpc::client::Peer;

use crate::core::replication::patterns::Patterns;
use crate::core::replication::replicas::Replicas;
use follower::Follower;

/// Which master a replica follows, and which of its images.
#[derive(Clone, Debug)]
pub struct Settings {
    pub from: Peer,
    /// Patterns of which one must match, as they were written.
    pub include: Vec<String>,
    /// Patterns of which none may match, as they were written.
    pub exclude: Vec<String>,
    /// Both.
    pub patterns: Patterns,
    /// Whether images stay that have ended on the master.
    pub is_archive: bool,
}

/// The state of replication: the master and the replicas of this server.
pub struct Replication {
    id: ServerId,
    follower: Option<Arc<Follower>>,
    replicas: Mutex<Replicas>,
}

impl Replication {
    /// The place of the server with that store, which may follow a master.
    #[must_use]
    pub fn new(id: ServerId, follower: Option<Arc<Follower>>) -> Self {
        Self { id, follower, replicas: Mutex::default() }
    }

    /// The store of this server.
    #[must_use]
    pub fn id(&self) -> &ServerId {
        &self.id
    }

    /// What follows the master, if there is one.
    #[must_use]
    pub fn follower(&self) -> Option<&Arc<Follower>> {
        self.follower.as_ref()
    }

    fn replicas(&self) -> MutexGuard<'_, Replicas> {
        locked(&self.replicas)
    }

    /// Takes note that a replica at `address` has asked for changes.
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
}
