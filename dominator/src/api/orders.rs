//! Answers calls about single machines, and about those that the machine database gives no image.

use std::sync::Arc;

use common::api::dominator::explain::Explain;
use common::api::dominator::orders::{
    FastUpdate, ForceDisruptiveUpdate, PauseUpdates, ResumeUpdates, SetDefaultImage, WatchSub,
};
use common::wire::server::Router;
use tokio_util::task::TaskTracker;

use super::{fault_of, finish, to_the_end};
use crate::fleet::Fleet;

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
        .method::<PauseUpdates, _, _>(move |_, request| {
            let fleet = Arc::clone(&pause);
            to_the_end(pausing.clone(), async move { fleet.pause_updates(request).await })
        })
        .method::<ResumeUpdates, _, _>(move |_, request| {
            let fleet = Arc::clone(&resume);
            to_the_end(resuming.clone(), async move { fleet.resume_updates(request).await })
        })
        .method::<ForceDisruptiveUpdate, _, _>(move |_, request| {
            let fleet = Arc::clone(&force);
            let order = async move {
                fleet.force_disruptive(&request.hostname, &request.who, &request.reason).await
            };
            finish(forcing.clone(), order)
        })
        .method::<FastUpdate, _, _>(move |_, request| {
            let fleet = Arc::clone(&fast);
            let order = async move {
                fleet.fast_update(&request.hostname, &request.who, &request.why).await
            };
            finish(hurrying.clone(), order)
        })
        .method::<SetDefaultImage, _, _>(move |_, request| {
            let fleet = Arc::clone(&default);
            to_the_end(setting.clone(), async move { fleet.set_default_image(request).await })
        })
}
