//! Replication: a server that follows a master has all images that the master has, and sends on to
//! it what it is asked to change.
//!
//! # Why no image is lost
//!
//! * An image ends on a replica only by the word of the master that this very image has ended, by
//!   its digest ([`decision`]). What a list does not name stays, so that an empty master, or one
//!   that has lost its disk, costs nothing.
//! * An image never takes the place of another of its name: that is told, and nothing is done.
//! * A replica lets no image expire by its own clock; an archive lets none expire at all.
//! * An image in use stays until it is not.
//! * An image is visible when all that it needs is here, was hashed, and is on the medium
//!   ([`arrival`]): the same steps as for one that is uploaded. What comes for it is leased.
//! * Directories and their owners are taken as a whole, and only if they go on from those that are
//!   here ([`directories`]): a master that has lost its own, or began anew, takes none away.
//!
//! # How a replica follows
//!
//! The master numbers its changes since its start ([`log`]). A replica asks for the list of all
//! names first, in pages, and then for what has changed since the list began; a master that was
//! started again has other numbers, and tells its list again ([`course`]). A list costs little: the
//! digests in it tell that nothing is to be done. What is to be done is in a [`queue`].

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
use crate::core::replication::replicas::Roster;
use follower::Follower;

/// Whom a replica follows, and in what.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The master.
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

/// The part of a server in replication: its place in the tree.
pub struct Replication {
    id: ServerId,
    follower: Option<Arc<Follower>>,
    roster: Mutex<Roster>,
}

impl Replication {
    /// The place of the server with that store, which may follow a master.
    #[must_use]
    pub fn new(id: ServerId, follower: Option<Arc<Follower>>) -> Self {
        Self { id, follower, roster: Mutex::default() }
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

    fn roster(&self) -> MutexGuard<'_, Roster> {
        locked(&self.roster)
    }

    /// Takes note that a replica at `address` has asked for changes.
    pub fn note_replica(&self, now: Time, address: String, report: &ReplicaReport) {
        self.roster().note(now, address, report);
    }

    /// How all stands.
    #[must_use]
    pub fn report(&self, now: Time) -> GetReplicationReply {
        GetReplicationReply {
            server: self.id.clone(),
            master: self.follower.as_ref().map(|follower| follower.report()),
            replicas: self.roster().list(now),
        }
    }
}
