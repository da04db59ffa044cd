//! Answers operators' calls.

mod access;
mod events;
mod orders;
mod plan;
mod settings;

use std::sync::Arc;

use api::Done;
use api::dominator::budgets::ResumeImage;
use api::dominator::identity::{Trust, TrustRequest};
use api::dominator::machine_database::{AcceptMdb, ShowMdb};
use api::dominator::{
    ClearSafetyShutoff, ClearSafetyShutoffRequest, DisableUpdates, EnableUpdates, GetStatus,
    ListSubs, ListSubsReply, ListSubsRequest, Retry, RetryRequest, ShowSub,
};
use api::fault::{Fault, FaultCode};
use model::report::report;
use rpc::server::{Caller, Router};
use tokio_util::task::TaskTracker;

use access::expect_may;

use crate::core::identity::TrustError;
use crate::core::mdb_admission::AcceptError;
use crate::core::pauses::PauseError;
use crate::core::selectors::{HostsError, Selection};
use crate::runtime::fleet::{Fleet, OrderError};
use crate::runtime::identities::TrustOrderError;

/// What the methods work on.
#[derive(Clone)]
pub struct ApiState {
    pub fleet: Arc<Fleet>,
    /// Finishes orders that were begun, even if the caller goes away.
    pub tracker: TaskTracker,
}

/// Adds the methods of `Dominator` to `router`.
pub fn methods(router: Router<ApiState>) -> Router<ApiState> {
    let router = events::methods(router);
    let router = plan::methods(router);
    let router = settings::methods(router);
    let router = orders::methods(router);
    router
        .method::<ListSubs, _>(async |api, _, request| {
            Ok(ListSubsReply { subs: api.fleet.list(&selection(request)?) })
        })
        .method::<ShowSub, _>(async |api, _, request| {
            api.fleet.show(&request.hostname).map_err(|error| fault_of(&error))
        })
        .method::<GetStatus, _>(async |api, _, ()| Ok(api.fleet.status()))
        .method::<DisableUpdates, _>(async |ApiState { fleet, tracker }, caller, request| {
            let who = caller.named(request.who);
            finish(tracker, async move { fleet.disable_updates(request.reason, who).await }).await
        })
        .method::<EnableUpdates, _>(async |ApiState { fleet, tracker }, caller, request| {
            let who = caller.named(request.who);
            finish(tracker, async move { fleet.enable_updates(who, request.why).await }).await
        })
        .method_of_owners::<ClearSafetyShutoff, _>(clear_safety_shutoff)
        .method_of_owners::<Retry, _>(retry)
        .method_of_owners::<Trust, _>(trust)
        .method::<ResumeImage, _>(async |ApiState { fleet, tracker }, caller, request| {
            let who = caller.named(request.who);
            let order = move || fleet.resume_image(&request.image, &request.why, &who);
            finish_blocking(tracker, order).await
        })
        .method::<ShowMdb, _>(async |api, _, request| {
            api.fleet.mdb(request.held).map_err(|error| fault_of(&error))
        })
        .method::<AcceptMdb, _>(async |ApiState { fleet, tracker }, caller, request| {
            let who = caller.named(request.who);
            let order = move || fleet.accept(&request.digest, &who, &request.why);
            finish_blocking(tracker, order).await
        })
}

async fn clear_safety_shutoff(
    ApiState { fleet, tracker }: ApiState,
    caller: Caller,
    request: ClearSafetyShutoffRequest,
) -> Result<Done, Fault> {
    expect_may::<ClearSafetyShutoff>(&caller, &fleet, &request.hostname)?;
    let who = caller.named(request.who);
    let order = async move { fleet.clear_safety(&request.hostname, &who, &request.why).await };
    finish(tracker, order).await
}

async fn retry(
    ApiState { fleet, tracker }: ApiState,
    caller: Caller,
    request: RetryRequest,
) -> Result<Done, Fault> {
    expect_may::<Retry>(&caller, &fleet, &request.hostname)?;
    let who = caller.named(request.who);
    let order = async move { fleet.retry(&request.hostname, &who, &request.why).await };
    finish(tracker, order).await
}

async fn trust(
    ApiState { fleet, tracker }: ApiState,
    caller: Caller,
    request: TrustRequest,
) -> Result<Done, Fault> {
    expect_may::<Trust>(&caller, &fleet, &request.hostname)?;
    let who = caller.named(request.who);
    let order = move || fleet.trust(&request.hostname, &who, &request.why);
    finish_blocking(tracker, order).await
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

/// As [`finish`], of an order that blocks.
async fn finish_blocking(
    tracker: TaskTracker,
    order: impl FnOnce() -> Result<(), OrderError> + Send + 'static,
) -> Result<Done, Fault> {
    let order = tokio::task::spawn_blocking(order);
    finish(tracker, async move { order.await.unwrap_or(Err(OrderError::Stopping)) }).await
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
