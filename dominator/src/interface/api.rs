//! Answers operators' calls.

mod access;
mod events;
mod orders;
mod plan;
mod settings;

use std::sync::Arc;

use api::Done;
use api::dominator::budgets::ResumeImage;
use api::dominator::identity::Trust;
use api::dominator::machine_database::{AcceptMdb, ShowMdb};
use api::dominator::{
    ClearSafetyShutoff, DisableUpdates, EnableUpdates, GetStatus, ListSubs, ListSubsReply,
    ListSubsRequest, Retry, ShowSub,
};
use api::fault::{Fault, FaultCode};
use model::report::report;
use rpc::server::Router;
use tokio_util::task::TaskTracker;

use access::expect_may;

use crate::core::identity::TrustError;
use crate::core::mdb_admission::AcceptError;
use crate::core::pauses::PauseError;
use crate::core::selectors::{HostsError, Selection};
use crate::runtime::fleet::{Fleet, OrderError};
use crate::runtime::identities::TrustOrderError;

/// Adds the methods of `Dominator` to `router`. Orders that were begun are finished as tasks in
/// `tracker`, even if the caller goes away.
#[must_use]
pub fn methods(router: Router, fleet: &Arc<Fleet>, tracker: &TaskTracker) -> Router {
    let router = events::methods(router, fleet);
    let router = plan::methods(router, fleet);
    let router = settings::methods(router, fleet, tracker);
    let fleet_of = || Arc::clone(fleet);
    let (list, show, status) = (fleet_of(), fleet_of(), fleet_of());
    let (disable, enable) = (fleet_of(), fleet_of());
    let (clear, retry) = (fleet_of(), fleet_of());
    let (database, accept) = (fleet_of(), fleet_of());
    let (trust, trusting) = (fleet_of(), tracker.clone());
    let router = orders::methods(router, fleet, tracker);
    let accepting = tracker.clone();
    let (resume, resuming) = (fleet_of(), tracker.clone());
    let (disabling, enabling) = (tracker.clone(), tracker.clone());
    let (clearing, retrying) = (tracker.clone(), tracker.clone());
    router
        .method::<ListSubs, _, _>(move |_, request| {
            let fleet = Arc::clone(&list);
            async move { Ok(ListSubsReply { subs: fleet.list(&selection(request)?) }) }
        })
        .method::<ShowSub, _, _>(move |_, request| {
            let fleet = Arc::clone(&show);
            async move { fleet.show(&request.hostname).map_err(|error| fault_of(&error)) }
        })
        .method::<GetStatus, _, _>(move |_, ()| {
            let fleet = Arc::clone(&status);
            async move { Ok(fleet.status()) }
        })
        .method::<DisableUpdates, _, _>(move |caller, request| {
            let (fleet, who) = (Arc::clone(&disable), caller.named(request.who));
            let order = async move { fleet.disable_updates(request.reason, who).await };
            finish(disabling.clone(), order)
        })
        .method::<EnableUpdates, _, _>(move |caller, request| {
            let (fleet, who) = (Arc::clone(&enable), caller.named(request.who));
            let order = async move { fleet.enable_updates(who, request.why).await };
            finish(enabling.clone(), order)
        })
        .method_of_owners::<ClearSafetyShutoff, _, _>(move |caller, request| {
            let (fleet, tracker) = (Arc::clone(&clear), clearing.clone());
            async move {
                expect_may::<ClearSafetyShutoff>(&caller, &fleet, &request.hostname)?;
                let who = caller.named(request.who);
                let order =
                    async move { fleet.clear_safety(&request.hostname, &who, &request.why).await };
                finish(tracker, order).await
            }
        })
        .method_of_owners::<Retry, _, _>(move |caller, request| {
            let (fleet, tracker) = (Arc::clone(&retry), retrying.clone());
            async move {
                expect_may::<Retry>(&caller, &fleet, &request.hostname)?;
                let who = caller.named(request.who);
                let order = async move { fleet.retry(&request.hostname, &who, &request.why).await };
                finish(tracker, order).await
            }
        })
        .method_of_owners::<Trust, _, _>(move |caller, request| {
            let (fleet, tracker) = (Arc::clone(&trust), trusting.clone());
            async move {
                expect_may::<Trust>(&caller, &fleet, &request.hostname)?;
                let who = caller.named(request.who);
                let order = tokio::task::spawn_blocking(move || {
                    fleet.trust(&request.hostname, &who, &request.why)
                });
                let order = async move { order.await.unwrap_or(Err(OrderError::Stopping)) };
                finish(tracker, order).await
            }
        })
        .method::<ResumeImage, _, _>(move |caller, request| {
            let (fleet, who) = (Arc::clone(&resume), caller.named(request.who));
            let order = tokio::task::spawn_blocking(move || {
                fleet.resume_image(&request.image, &request.why, &who)
            });
            finish(
                resuming.clone(),
                async move { order.await.unwrap_or(Err(OrderError::Stopping)) },
            )
        })
        .method::<ShowMdb, _, _>(move |_, request| {
            let fleet = Arc::clone(&database);
            async move { fleet.mdb(request.held).map_err(|error| fault_of(&error)) }
        })
        .method::<AcceptMdb, _, _>(move |caller, request| {
            let (fleet, who) = (Arc::clone(&accept), caller.named(request.who));
            let order = tokio::task::spawn_blocking(move || {
                fleet.accept(&request.digest, &who, &request.why)
            });
            finish(
                accepting.clone(),
                async move { order.await.unwrap_or(Err(OrderError::Stopping)) },
            )
        })
}

/// Makes what is asked for ready.
///
/// # Errors
///
/// A fault that says which pattern is none.
pub fn selection(request: ListSubsRequest) -> Result<Selection, Fault> {
    Selection::new(request).map_err(|error| Fault::new(FaultCode::BadRequest, error.to_string()))
}

/// As [`to_the_end`], of an order that has no result.
async fn finish(
    tracker: TaskTracker,
    order: impl Future<Output = Result<(), OrderError>> + Send + 'static,
) -> Result<Done, Fault> {
    to_the_end(tracker, order).await.map(|()| Done {})
}

/// Carries an order out to its end, whether or not the caller waits for it.
async fn to_the_end<T: Send + 'static>(
    tracker: TaskTracker,
    order: impl Future<Output = Result<T, OrderError>> + Send + 'static,
) -> Result<T, Fault> {
    match tracker.spawn(order).await {
        Ok(Ok(result)) => Ok(result),
        Ok(Err(error)) => Err(fault_of(&error)),
        Err(error) => Err(Fault::new(FaultCode::Internal, error.to_string())),
    }
}

/// What a caller is told of an order that was not carried out.
#[must_use]
pub fn fault_of(error: &OrderError) -> Fault {
    let code = match error {
        OrderError::Unknown { .. }
        | OrderError::NothingToForce { .. }
        | OrderError::Hosts(HostsError::Nobody { .. })
        | OrderError::Pause { source: PauseError::NotPaused { .. } }
        | OrderError::NothingToClear { .. }
        | OrderError::NothingToRetry { .. }
        | OrderError::NotStopped { .. }
        | OrderError::NoCopy
        | OrderError::Accept { source: AcceptError::NothingHeld } => FaultCode::NotFound,
        OrderError::Accept { source: AcceptError::OtherHeld } => FaultCode::Stale,
        OrderError::State { .. }
        | OrderError::Read { .. }
        | OrderError::Unkept { .. }
        | OrderError::ReadCopy { .. } => FaultCode::Internal,
        OrderError::Trust(error) => match error {
            TrustOrderError::Text(_) => FaultCode::BadRequest,
            TrustOrderError::Refused(TrustError::SameSubd { .. }) => FaultCode::Held,
            TrustOrderError::Refused(_) => FaultCode::NotFound,
            TrustOrderError::State { .. } => FaultCode::Internal,
        },
        OrderError::Text(_)
        | OrderError::Hosts(_)
        | OrderError::Settings { .. }
        | OrderError::Filter { .. }
        | OrderError::Pause { .. } => FaultCode::BadRequest,
        OrderError::DefaultImage { .. } => FaultCode::Held,
        OrderError::TooManyMachines => FaultCode::TooLarge,
        OrderError::NoPlan { .. } => FaultCode::Unavailable,
        OrderError::Stopping => FaultCode::Unavailable,
    };
    Fault::new(code, report(error))
}
