//! The decisions of the server, as functions of their arguments: no clock, disk or network.
// tidy: core

pub mod check_findings;
pub mod directories;
pub mod image_expiry;
pub mod image_holds;
pub mod missing_objects;
pub mod private_images;
pub mod scrub;

pub mod collection {
    //! Decides which objects may be removed, and when.
    //!
    //! An object is needed if an image names it: as a directory or a file of its tree, or as its
    //! build log. An object that is not needed may still be part of an image that is about to be
    //! added: a client has uploaded it, or was told that it need not upload it. Such an object is
    //! leased. Objects that are neither needed nor leased are removed, the oldest first.

    pub mod disk_pressure;
    pub mod leases;
    pub mod removal;
}

pub mod replication {
    //! Decides what a replica does about the changes of its master, and what a master keeps for
    //! its replicas.

    pub mod decision;
    pub mod directories;
    pub mod master;
    pub mod queue;
    pub mod sync_cursor;
}
