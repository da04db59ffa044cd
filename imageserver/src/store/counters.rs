//! What the server has counted since its start, in all its parts.

use prometheus_client::metrics::counter::Counter;

/// Counters since the start.
#[derive(Debug, Default)]
pub struct Counters {
    /// Objects that were stored.
    pub objects_added: Counter,
    /// Their length together, in bytes.
    pub objects_added_bytes: Counter,
    /// Objects that were sent.
    pub objects_sent: Counter,
    /// Their length together, in bytes.
    pub objects_sent_bytes: Counter,
    /// Objects that were asked for and not there.
    pub objects_absent: Counter,
    /// Objects that were lost and came from another server.
    pub objects_repaired: Counter,
    /// Images that came from the master.
    pub images_replicated: Counter,
    /// Images that ended here because they had on the master.
    pub images_replicated_ends: Counter,
    /// Images that were added.
    pub images_added: Counter,
    /// Images that were deleted.
    pub images_deleted: Counter,
}
