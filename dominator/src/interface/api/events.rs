//! Answers calls about what happened.

use api::dominator::events::{Backup, ListEvents};
use rpc::server::Router;

use super::{ApiState, fault_of};

/// Adds the methods about events and backups to `router`.
pub(super) fn methods(router: Router<ApiState>) -> Router<ApiState> {
    router
        .method::<ListEvents, _>(async |api, _, request| {
            api.fleet.events(request).await.map_err(|error| fault_of(&error))
        })
        .method::<Backup, _>(async |api, _, request| {
            api.fleet.backup(request).await.map_err(|error| fault_of(&error))
        })
}
