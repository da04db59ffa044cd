//! What other programs and people see: methods, pages and metrics.

pub mod methods;
pub mod metrics;
pub mod pages;

use std::sync::Arc;

use crate::collection::Collector;
use crate::expiry::Expiry;
use crate::replication::Replication;
use crate::scrub::Scrub;

/// The background tasks of the server.
#[derive(Clone)]
pub struct BackgroundTasks {
    pub collector: Arc<Collector>,
    pub expiry: Arc<Expiry>,
    pub scrub: Arc<Scrub>,
    pub replication: Arc<Replication>,
}
