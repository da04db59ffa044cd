//! What other programs and people see: methods, pages and metrics.

pub mod methods;
pub mod metrics;
pub mod pages;

use std::sync::Arc;

use crate::collection::Collector;
use crate::expiry::Expiry;
use crate::replication::Replication;
use crate::scrub::Scrub;

/// What is done beside answering calls.
#[derive(Clone)]
pub struct Life {
    /// Removes objects.
    pub collector: Arc<Collector>,
    /// Lets images expire.
    pub expiry: Arc<Expiry>,
    /// Reads all that is kept again.
    pub scrub: Arc<Scrub>,
    /// Follows a master, and knows the replicas.
    pub replication: Arc<Replication>,
}
