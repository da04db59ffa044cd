//! Methods that give orders: checks who may give them for which machines, and carries them out to
//! the end even if the caller goes away.

use api::Done;
use api::access::{DeniedError, OwnedItem, authorize};
use api::dominator::content::{
    ListContentChanges, ListContentChangesReply, OrderContentChange, OrderContentChangeRequest,
};
use api::dominator::departing::{OrderDeparting, OrderDepartingRequest};
use api::dominator::events::AcceptClock;
use api::dominator::mdb::AcceptMdb;
use api::dominator::orders::{
    AcceptImage, FastUpdate, ForceDisruptiveUpdate, GoOn, PauseUpdates, PauseUpdatesRequest,
    ResumeImage, ResumeUpdates, ResumeUpdatesRequest, SetDefaultImage, SetDefaultImageRequest,
    Trust,
};
use api::dominator::permits::{FenceMachine, FenceMachineRequest};
use api::dominator::resources::{OrderResource, OrderResourceRequest};
use api::dominator::rollback::{EndRollback, EndRollbackRequest, RollBack, RollBackRequest};
use api::dominator::rollouts::{
    EditEnvironments, EditEnvironmentsRequest, OrderEnvironment, OrderEnvironmentRequest,
    OrderRollout, OrderRolloutRequest, StartRollout, StartRolloutRequest, VoteOnStep,
    VoteOnStepRequest,
};
use api::dominator::settings::{
    SetSubConfiguration, SetSubConfigurationReply, SetSubConfigurationRequest,
};
use api::dominator::tasks::{GetTaskLog, OrderTasks, OrderTasksRequest};
use api::dominator::{ClearSafetyShutoff, DisableUpdates, EnableUpdates, Retry};
use api::fault::{Fault, FaultCode};
use api::method::Method;
use rpc::server::{Caller, Router};
use tokio_util::task::TaskTracker;

use super::{ApiState, fault_of};
use crate::runtime::fleet::{Fleet, OrderError};

/// Adds the methods that give orders to `router`.
// tidy: table
pub(super) fn methods(router: Router<ApiState>) -> Router<ApiState> {
    router
        .method::<DisableUpdates, _>(async |ApiState { fleet, tracker }, caller, request| {
            let who = caller.name_or(request.who);
            finish(tracker, async move { fleet.disable_updates(request.reason, who).await }).await
        })
        .method::<EnableUpdates, _>(async |ApiState { fleet, tracker }, caller, request| {
            let who = caller.name_or(request.who);
            finish(tracker, async move { fleet.enable_updates(who, request.why).await }).await
        })
        .method_of_owners::<ClearSafetyShutoff, _>(
            async |ApiState { fleet, tracker }, caller, request| {
                expect_may::<ClearSafetyShutoff>(&caller, &fleet, &request.hostname)?;
                let who = caller.name_or(request.who);
                let order =
                    async move { fleet.clear_safety(&request.hostname, &who, &request.why).await };
                finish(tracker, order).await
            },
        )
        .method_of_owners::<Retry, _>(async |ApiState { fleet, tracker }, caller, request| {
            expect_may::<Retry>(&caller, &fleet, &request.hostname)?;
            let who = caller.name_or(request.who);
            let order = async move { fleet.retry(&request.hostname, &who, &request.why).await };
            finish(tracker, order).await
        })
        .method_of_owners::<Trust, _>(async |ApiState { fleet, tracker }, caller, request| {
            expect_may::<Trust>(&caller, &fleet, &request.hostname)?;
            let who = caller.name_or(request.who);
            let order = move || fleet.trust(&request.hostname, &who, &request.why);
            finish_blocking(tracker, order).await
        })
        .method_of_owners::<GoOn, _>(async |ApiState { fleet, tracker }, caller, request| {
            expect_may::<GoOn>(&caller, &fleet, &request.hostname)?;
            let who = caller.name_or(request.who);
            let order = async move { fleet.go_on(&request.hostname, &who, &request.why).await };
            finish(tracker, order).await
        })
        .method_of_owners::<FenceMachine, _>(
            async |ApiState { fleet, tracker }, caller, request| {
                expect_may::<FenceMachine>(&caller, &fleet, &request.hostname)?;
                let request = FenceMachineRequest { who: caller.name_or(request.who), ..request };
                finish(tracker, async move { fleet.fence(request).await }).await
            },
        )
        .method::<OrderDeparting, _>(async |ApiState { fleet, tracker }, caller, request| {
            let request = OrderDepartingRequest { who: caller.name_or(request.who), ..request };
            finish(tracker, async move { fleet.order_departing(request).await }).await
        })
        .method::<AcceptImage, _>(async |ApiState { fleet, tracker }, caller, request| {
            let who = caller.name_or(request.who);
            let order = move || fleet.accept_image(&request.image, &who, &request.why);
            finish_blocking(tracker, order).await
        })
        .method::<ResumeImage, _>(async |ApiState { fleet, tracker }, caller, request| {
            let who = caller.name_or(request.who);
            let order = move || fleet.resume_image(&request.image, &request.why, &who);
            finish_blocking(tracker, order).await
        })
        .method::<ListContentChanges, _>(async |ApiState { fleet, .. }, _caller, request| {
            let changes = fleet.shared().computed.changes(&request.source);
            Ok(ListContentChangesReply { changes })
        })
        .method::<OrderContentChange, _>(async |ApiState { fleet, tracker }, caller, request| {
            let request = OrderContentChangeRequest { who: caller.name_or(request.who), ..request };
            finish(tracker, async move { fleet.order_content(request).await }).await
        })
        .method::<AcceptClock, _>(async |ApiState { fleet, tracker }, caller, request| {
            let who = caller.name_or(request.who);
            to_the_end(tracker, async move { fleet.accept_clock(&who, &request.why).await }).await
        })
        .method::<AcceptMdb, _>(async |ApiState { fleet, tracker }, caller, request| {
            let who = caller.name_or(request.who);
            let order = move || fleet.accept(&request.digest, &who, &request.why);
            finish_blocking(tracker, order).await
        })
        .method::<SetSubConfiguration, _>(async |ApiState { fleet, tracker }, caller, request| {
            let request =
                SetSubConfigurationRequest { who: caller.name_or(request.who), ..request };
            let order = to_the_end(tracker, async move { fleet.configure(request).await });
            order.await.map(|machines| SetSubConfigurationReply { machines })
        })
        .method_of_owners::<PauseUpdates, _>(
            async |ApiState { fleet, tracker }, caller, request| {
                let hosts = expect_may_all::<PauseUpdates>(&caller, &fleet, request.hosts)?;
                let who = caller.name_or(request.who);
                let request = PauseUpdatesRequest { hosts, who, ..request };
                to_the_end(tracker, async move { fleet.pause_updates(request).await }).await
            },
        )
        .method_of_owners::<ResumeUpdates, _>(
            async |ApiState { fleet, tracker }, caller, request| {
                let hosts = expect_may_all::<ResumeUpdates>(&caller, &fleet, request.hosts)?;
                let who = caller.name_or(request.who);
                let request = ResumeUpdatesRequest { hosts, who, ..request };
                to_the_end(tracker, async move { fleet.resume_updates(request).await }).await
            },
        )
        .method_of_owners::<RollBack, _>(async |ApiState { fleet, tracker }, caller, request| {
            let hosts = expect_may_all::<RollBack>(&caller, &fleet, request.hosts)?;
            let who = caller.name_or(request.who);
            let request = RollBackRequest { hosts, who, ..request };
            to_the_end(tracker, async move { fleet.roll_back(request).await }).await
        })
        .method_of_owners::<EndRollback, _>(async |ApiState { fleet, tracker }, caller, request| {
            let hosts = expect_may_all::<EndRollback>(&caller, &fleet, request.hosts)?;
            let who = caller.name_or(request.who);
            let request = EndRollbackRequest { hosts, who, ..request };
            to_the_end(tracker, async move { fleet.end_rollback(request).await }).await
        })
        .method_of_owners::<OrderTasks, _>(async |ApiState { fleet, tracker }, caller, request| {
            let (mut machines, who) = (request.machines, caller.name_or(request.who));
            machines.hosts = expect_may_all::<OrderTasks>(&caller, &fleet, machines.hosts)?;
            let request = OrderTasksRequest { machines, who, ..request };
            to_the_end(tracker, async move { fleet.order_tasks(request).await }).await
        })
        .method_of_owners::<OrderResource, _>(
            async |ApiState { fleet, tracker }, caller, request| {
                expect_may::<OrderResource>(&caller, &fleet, &request.hostname)?;
                let request = OrderResourceRequest { who: caller.name_or(request.who), ..request };
                finish(tracker, async move { fleet.order_resource(request).await }).await
            },
        )
        .method_of_owners::<GetTaskLog, _>(async |ApiState { fleet, .. }, caller, request| {
            expect_may::<GetTaskLog>(&caller, &fleet, &request.hostname)?;
            fleet.task_log(request).await.map_err(|error| fault_of(&error))
        })
        .method_of_owners::<ForceDisruptiveUpdate, _>(
            async |ApiState { fleet, tracker }, caller, request| {
                expect_may::<ForceDisruptiveUpdate>(&caller, &fleet, &request.hostname)?;
                let who = caller.name_or(request.who);
                let order = async move {
                    fleet.force_disruptive(&request.hostname, &who, &request.reason).await
                };
                finish(tracker, order).await
            },
        )
        .method_of_owners::<FastUpdate, _>(async |ApiState { fleet, tracker }, caller, request| {
            expect_may::<FastUpdate>(&caller, &fleet, &request.hostname)?;
            let who = caller.name_or(request.who);
            let order =
                async move { fleet.fast_update(&request.hostname, &who, &request.why).await };
            finish(tracker, order).await
        })
        .method::<SetDefaultImage, _>(async |ApiState { fleet, tracker }, caller, request| {
            let request = SetDefaultImageRequest { who: caller.name_or(request.who), ..request };
            to_the_end(tracker, async move { fleet.set_default_image(request).await }).await
        })
}

/// Adds the orders about environments and rollouts.
pub(super) fn rollout_methods(router: Router<ApiState>) -> Router<ApiState> {
    router
        .method_of_owners::<EditEnvironments, _>(
            async |ApiState { fleet, tracker }, caller, request| {
                let request =
                    EditEnvironmentsRequest { who: caller.name_or(request.who), ..request };
                let order = async move { fleet.edit_environments(request, caller.identity).await };
                to_the_end(tracker, order).await
            },
        )
        .method_of_owners::<OrderEnvironment, _>(
            async |ApiState { fleet, tracker }, caller, request| {
                let request =
                    OrderEnvironmentRequest { who: caller.name_or(request.who), ..request };
                let order = async move { fleet.order_environment(request, caller.identity).await };
                to_the_end(tracker, order).await
            },
        )
        .method_of_owners::<StartRollout, _>(
            async |ApiState { fleet, tracker }, caller, request| {
                let request = StartRolloutRequest { who: caller.name_or(request.who), ..request };
                let order = async move { fleet.start_rollout(request, caller.identity).await };
                to_the_end(tracker, order).await
            },
        )
        .method_of_owners::<OrderRollout, _>(
            async |ApiState { fleet, tracker }, caller, request| {
                let request = OrderRolloutRequest { who: caller.name_or(request.who), ..request };
                let order = async move { fleet.order_rollout(request, caller.identity).await };
                to_the_end(tracker, order).await
            },
        )
        .method::<VoteOnStep, _>(async |ApiState { fleet, tracker }, caller, request| {
            let request = VoteOnStepRequest { who: caller.name_or(request.who), ..request };
            to_the_end(tracker, async move { fleet.vote(request).await }).await
        })
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

/// Refuses callers who may not call `M` for the machine `hostname`.
fn expect_may<M: Method>(caller: &Caller, fleet: &Fleet, hostname: &str) -> Result<(), Fault> {
    // A caller with the power gets the error that there is no such machine later; others learn
    // nothing.
    let owned = fleet.owned_machine(hostname).into_iter().collect::<Vec<_>>();
    may::<M>(caller, hostname, &owned)
}

/// As [`expect_may`], for each of the machines that `hosts`, names or patterns, mean. Returns the
/// machines of the order: `hosts` for callers with the power, else the name of each machine, so
/// that the order is for no other machine.
fn expect_may_all<M: Method>(
    caller: &Caller,
    fleet: &Fleet,
    hosts: Vec<String>,
) -> Result<Vec<String>, Fault> {
    if authorize(M::NAME, M::ACCESS, &caller.identity, "", &[]).is_ok() {
        return Ok(hosts);
    }
    // A name without a machine has no owner.
    let Ok(machines) = fleet.owned_machines(&hosts) else {
        return may::<M>(caller, &hosts.join(", "), &[]).map(|()| hosts);
    };
    for (hostname, owned) in &machines {
        may::<M>(caller, hostname, std::slice::from_ref(owned))?;
    }
    Ok(machines.into_iter().map(|(hostname, _)| hostname).collect())
}

fn may<M: Method>(caller: &Caller, hostname: &str, owned: &[OwnedItem]) -> Result<(), Fault> {
    authorize(M::NAME, M::ACCESS, &caller.identity, &format!("machine {hostname}"), owned)
        .map_err(|error: DeniedError| Fault::new(FaultCode::Denied, error.to_string()))
}
