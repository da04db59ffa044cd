//! Answers calls about what happened.

use std::sync::Arc;

use api::dominator::events::{Backup, ListEvents};
use rpc::server::Router;

use super::fault_of;
use crate::runtime::fleet::Fleet;

/// Adds the methods about events and backups to `router`.
#[must_use]
pub fn methods(router: Router, fleet: &Arc<Fleet>) -> Router {
    let (list, backup) = (Arc::clone(fleet), Arc::clone(fleet));
    router
        .method::<ListEvents, _, _>(move |_, request| {
            let fleet = Arc::clone(&list);
            async move { fleet.events(request).await.map_err(|error| fault_of(&error)) }
        })
        .method::<Backup, _, _>(move |_, request| {
            let fleet = Arc::clone(&backup);
            async move { fleet.backup(request).await.map_err(|error| fault_of(&error)) }
        })
}
