//! `ImageServer.Collect`: removing objects on request.

use std::sync::Arc;

use api::fault::{Fault, FaultCode};
use api::image_server::collection::{CollectReply, CollectRequest};
use model::report::report;
use rpc::server::Caller;

use super::Service;
use crate::store::error::CollectError;
use crate::store::error::{fault_of_store, joined};

impl Service {
    /// Goes on even if the caller goes away.
    pub(super) async fn collect(
        self,
        caller: Caller,
        request: CollectRequest,
    ) -> Result<CollectReply, Fault> {
        tracing::info!(by = %caller, dry_run = request.dry_run, "collects objects");
        let (collector, stop) = (Arc::clone(&self.collector), self.stop.clone());
        let work = move || collector.collect(request, || stop.is_cancelled());
        let done = joined(self.tasks.spawn_blocking(work).await)?;
        done.map_err(|error| fault_of_collection(&error))
    }
}

fn fault_of_collection(error: &CollectError) -> Fault {
    let code = match error {
        CollectError::Store { source } => return fault_of_store(source),
        CollectError::Busy | CollectError::Elsewhere { .. } => FaultCode::Busy,
        CollectError::Held { .. } => FaultCode::Held,
        CollectError::Stopped => FaultCode::Unavailable,
        CollectError::Damaged { .. } | CollectError::Walk { .. } => FaultCode::Internal,
    };
    Fault::new(code, report(error))
}
