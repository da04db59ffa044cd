//! Answers calls about single machines, and about those that the machine database gives no image.

use std::sync::Arc;

use api::dominator::explain::Explain;
use api::dominator::orders::{
    FastUpdate, ForceDisruptiveUpdate, PauseUpdates, PauseUpdatesRequest, ResumeUpdates,
    ResumeUpdatesRequest, SetDefaultImage, SetDefaultImageRequest, WatchSub,
};
use rpc::server::Router;
use tokio_util::task::TaskTracker;

use super::access::{expect_may, expect_may_all};
use super::{fault_of, finish, to_the_end};
use crate::runtime::fleet::Fleet;

/// Adds these methods to `router`. Orders that were begun are finished as tasks in `tracker`, even
/// if the caller goes away.
pub(super) fn methods(router: Router, fleet: &Arc<Fleet>, tracker: &TaskTracker) -> Router {
    let fleet_of = || Arc::clone(fleet);
    let (explain, watch) = (fleet_of(), fleet_of());
    let (pause, resume, force, fast) = (fleet_of(), fleet_of(), fleet_of(), fleet_of());
    let default = fleet_of();
    let (pausing, resuming, setting) = (tracker.clone(), tracker.clone(), tracker.clone());
    let (forcing, hurrying) = (tracker.clone(), tracker.clone());
    router
        .method::<Explain, _, _>(move |_, request| {
            let fleet = Arc::clone(&explain);
            async move { fleet.explain(&request.hostname).map_err(|error| fault_of(&error)) }
        })
        .method::<WatchSub, _, _>(move |_, request| {
            let fleet = Arc::clone(&watch);
            async move { fleet.watch(request).await.map_err(|error| fault_of(&error)) }
        })
        .method_of_owners::<PauseUpdates, _, _>(move |caller, request| {
            let (fleet, tracker) = (Arc::clone(&pause), pausing.clone());
            async move {
                let hosts = expect_may_all::<PauseUpdates>(&caller, &fleet, request.hosts)?;
                let who = caller.named(request.who);
                let request = PauseUpdatesRequest { hosts, who, ..request };
                to_the_end(tracker, async move { fleet.pause_updates(request).await }).await
            }
        })
        .method_of_owners::<ResumeUpdates, _, _>(move |caller, request| {
            let (fleet, tracker) = (Arc::clone(&resume), resuming.clone());
            async move {
                let hosts = expect_may_all::<ResumeUpdates>(&caller, &fleet, request.hosts)?;
                let who = caller.named(request.who);
                let request = ResumeUpdatesRequest { hosts, who, ..request };
                to_the_end(tracker, async move { fleet.resume_updates(request).await }).await
            }
        })
        .method_of_owners::<ForceDisruptiveUpdate, _, _>(move |caller, request| {
            let (fleet, tracker) = (Arc::clone(&force), forcing.clone());
            async move {
                expect_may::<ForceDisruptiveUpdate>(&caller, &fleet, &request.hostname)?;
                let who = caller.named(request.who);
                let order = async move {
                    fleet.force_disruptive(&request.hostname, &who, &request.reason).await
                };
                finish(tracker, order).await
            }
        })
        .method_of_owners::<FastUpdate, _, _>(move |caller, request| {
            let (fleet, tracker) = (Arc::clone(&fast), hurrying.clone());
            async move {
                expect_may::<FastUpdate>(&caller, &fleet, &request.hostname)?;
                let who = caller.named(request.who);
                let order =
                    async move { fleet.fast_update(&request.hostname, &who, &request.why).await };
                finish(tracker, order).await
            }
        })
        .method::<SetDefaultImage, _, _>(move |caller, request| {
            let fleet = Arc::clone(&default);
            let request = SetDefaultImageRequest { who: caller.named(request.who), ..request };
            to_the_end(setting.clone(), async move { fleet.set_default_image(request).await })
        })
}
