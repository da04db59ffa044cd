//! Answers those who configure subs, and those who look how they are configured.

use std::sync::Arc;

use api::dominator::settings::{
    GetSubConfiguration, SetSubConfiguration, SetSubConfigurationReply, SetSubConfigurationRequest,
};
use rpc::server::Router;
use tokio_util::task::TaskTracker;

use super::{fault_of, to_the_end};
use crate::runtime::fleet::Fleet;

/// Adds the methods to `router`.
pub(super) fn methods(router: Router, fleet: &Arc<Fleet>, tracker: &TaskTracker) -> Router {
    let (set, get) = (Arc::clone(fleet), Arc::clone(fleet));
    let tracker = tracker.clone();
    router
        .method::<SetSubConfiguration, _, _>(move |caller, request| {
            let fleet = Arc::clone(&set);
            let request = SetSubConfigurationRequest { who: caller.named(request.who), ..request };
            let order = to_the_end(tracker.clone(), async move { fleet.configure(request).await });
            async move { order.await.map(|machines| SetSubConfigurationReply { machines }) }
        })
        .method::<GetSubConfiguration, _, _>(move |_, request| {
            let fleet = Arc::clone(&get);
            async move {
                let hostname = request.hostname.as_deref();
                fleet.configuration(hostname).map_err(|error| fault_of(&error))
            }
        })
}
