//! Answers those who follow the machine database.

use std::sync::Arc;
use std::time::Duration;

use api::fault::{Fault, FaultCode};
use api::mdb::{GetMdb, GetMdbReply, GetMdbRequest, MDB_WAIT_MS_MAX};
use rpc::server::Router;
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;

use crate::mdb_writer::Shared;

/// Adds the methods of `MdbServer` to `router`. Whoever waits for news is answered when `stop` is
/// cancelled.
pub fn methods(router: Router<Arc<Shared>>, stop: &CancellationToken) -> Router<Arc<Shared>> {
    let stop = stop.clone();
    router.method::<GetMdb, _>(move |shared, _, request| {
        let stop = stop.clone();
        async move { get(&shared, &stop, request).await }
    })
}

async fn get(
    shared: &Shared,
    stop: &CancellationToken,
    request: GetMdbRequest,
) -> Result<GetMdbReply, Fault> {
    let wait = Duration::from_millis(request.wait_ms.min(MDB_WAIT_MS_MAX).into());
    let deadline = Instant::now() + wait;
    let mut news = shared.published();
    let force = loop {
        let force = news.borrow_and_update().clone();
        if force.as_ref().is_some_and(|force| Some(force.version) != request.have) {
            break force;
        }
        tokio::select! {
            changed = timeout_at(deadline, news.changed()) => {
                if !matches!(changed, Ok(Ok(()))) {
                    break force;
                }
            }
            () = stop.cancelled() => break force,
        }
    };
    match force {
        Some(force) => {
            let is_news = request.have != Some(force.version);
            let machines = is_news.then(|| force.machines.values().cloned().collect());
            Ok(GetMdbReply { version: force.version, machines })
        }
        None => Err(Fault::new(FaultCode::Unavailable, not_ready(&shared.status().missing))),
    }
}

/// Why there is no machine database yet.
#[must_use]
pub fn not_ready(missing: &[String]) -> String {
    match missing {
        [] => "the machine database is not written yet".to_owned(),
        missing => {
            let names = missing.join(", ");
            format!("the file waits for sources that have given nothing yet: {names}")
        }
    }
}
