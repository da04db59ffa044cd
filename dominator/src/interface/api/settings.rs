//! Answers those who configure subs, and those who look how they are configured.

use api::dominator::settings::{
    GetSubConfiguration, SetSubConfiguration, SetSubConfigurationReply, SetSubConfigurationRequest,
};
use rpc::server::Router;

use super::{ApiState, fault_of, to_the_end};

/// Adds the methods to `router`.
pub(super) fn methods(router: Router<ApiState>) -> Router<ApiState> {
    router
        .method::<SetSubConfiguration, _>(async |ApiState { fleet, tracker }, caller, request| {
            let request = SetSubConfigurationRequest { who: caller.named(request.who), ..request };
            let order = to_the_end(tracker, async move { fleet.configure(request).await });
            order.await.map(|machines| SetSubConfigurationReply { machines })
        })
        .method::<GetSubConfiguration, _>(async |api, _, request| {
            let hostname = request.hostname.as_deref();
            api.fleet.configuration(hostname).map_err(|error| fault_of(&error))
        })
}
