//! Answers calls about single machines, and about those that the machine database gives no image.

use api::Done;
use api::dominator::explain::Explain;
use api::dominator::orders::{
    FastUpdate, FastUpdateRequest, ForceDisruptiveUpdate, ForceDisruptiveUpdateRequest,
    PauseUpdates, PauseUpdatesRequest, ResumeUpdates, ResumeUpdatesRequest, SetDefaultImage,
    SetDefaultImageRequest, WatchSub,
};
use api::fault::Fault;
use rpc::server::{Caller, Router};

use super::access::{expect_may, expect_may_all};
use super::{ApiState, fault_of, finish, to_the_end};

/// Adds these methods to `router`.
pub(super) fn methods(router: Router<ApiState>) -> Router<ApiState> {
    router
        .method::<Explain, _>(async |api, _, request| {
            api.fleet.explain(&request.hostname).map_err(|error| fault_of(&error))
        })
        .method::<WatchSub, _>(async |api, _, request| {
            api.fleet.watch(request).await.map_err(|error| fault_of(&error))
        })
        .method_of_owners::<PauseUpdates, _>(
            async |ApiState { fleet, tracker }, caller, request| {
                let hosts = expect_may_all::<PauseUpdates>(&caller, &fleet, request.hosts)?;
                let who = caller.named(request.who);
                let request = PauseUpdatesRequest { hosts, who, ..request };
                to_the_end(tracker, async move { fleet.pause_updates(request).await }).await
            },
        )
        .method_of_owners::<ResumeUpdates, _>(
            async |ApiState { fleet, tracker }, caller, request| {
                let hosts = expect_may_all::<ResumeUpdates>(&caller, &fleet, request.hosts)?;
                let who = caller.named(request.who);
                let request = ResumeUpdatesRequest { hosts, who, ..request };
                to_the_end(tracker, async move { fleet.resume_updates(request).await }).await
            },
        )
        .method_of_owners::<ForceDisruptiveUpdate, _>(force_disruptive_update)
        .method_of_owners::<FastUpdate, _>(fast_update)
        .method::<SetDefaultImage, _>(async |ApiState { fleet, tracker }, caller, request| {
            let request = SetDefaultImageRequest { who: caller.named(request.who), ..request };
            to_the_end(tracker, async move { fleet.set_default_image(request).await }).await
        })
}

async fn force_disruptive_update(
    ApiState { fleet, tracker }: ApiState,
    caller: Caller,
    request: ForceDisruptiveUpdateRequest,
) -> Result<Done, Fault> {
    expect_may::<ForceDisruptiveUpdate>(&caller, &fleet, &request.hostname)?;
    let who = caller.named(request.who);
    let order =
        async move { fleet.force_disruptive(&request.hostname, &who, &request.reason).await };
    finish(tracker, order).await
}

async fn fast_update(
    ApiState { fleet, tracker }: ApiState,
    caller: Caller,
    request: FastUpdateRequest,
) -> Result<Done, Fault> {
    expect_may::<FastUpdate>(&caller, &fleet, &request.hostname)?;
    let who = caller.named(request.who);
    let order = async move { fleet.fast_update(&request.hostname, &who, &request.why).await };
    finish(tracker, order).await
}
