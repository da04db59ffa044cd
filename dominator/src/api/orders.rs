//! Answers calls about single machines, and about those that the machine database gives no image.

use std::sync::Arc;

use common::api::Done;
use common::api::dominator::explain::Explain;
use common::api::dominator::orders::{
    FastUpdate, ForceDisruptiveUpdate, PauseUpdates, ResumeUpdates, SetDefaultImage, WatchSub,
};
use common::wire::server::Router;
use common::wire::{Fault, FaultCode};
use tokio_util::task::TaskTracker;

use super::fault_of;
use crate::fleet::{Fleet, OrderError};

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
            finish(pausing.clone(), async move { fleet.pause_updates(request).await })
        })
        .method::<ResumeUpdates, _, _>(move |_, request| {
            let fleet = Arc::clone(&resume);
            finish(resuming.clone(), async move { fleet.resume_updates(request).await })
        })
        .method::<ForceDisruptiveUpdate, _, _>(move |_, request| {
            let fleet = Arc::clone(&force);
            let order = async move {
                fleet.force_disruptive(&request.hostname, &request.who, &request.reason).await?;
                Ok(Done {})
            };
            finish(forcing.clone(), order)
        })
        .method::<FastUpdate, _, _>(move |_, request| {
            let fleet = Arc::clone(&fast);
            let order = async move {
                fleet.fast_update(&request.hostname, &request.who, &request.why).await?;
                Ok(Done {})
            };
            finish(hurrying.clone(), order)
        })
        .method::<SetDefaultImage, _, _>(move |_, request| {
            let fleet = Arc::clone(&default);
            finish(setting.clone(), async move { fleet.set_default_image(request).await })
        })
}

/// Carries an order out to its end, whether or not the caller waits for it.
async fn finish<T: Send + 'static>(
    tracker: TaskTracker,
    order: impl Future<Output = Result<T, OrderError>> + Send + 'static,
) -> Result<T, Fault> {
    match tracker.spawn(order).await {
        Ok(result) => result.map_err(|error| fault_of(&error)),
        Err(error) => Err(Fault::new(FaultCode::Internal, error.to_string())),
    }
}
