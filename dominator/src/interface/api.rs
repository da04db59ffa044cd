//! Answers operators' calls.

mod orders;

use std::sync::Arc;

use api::dominator::departing::ListDeparting;
use api::dominator::events::{Backup, ListEvents};
use api::dominator::explain::Explain;
use api::dominator::kept_files::CountKeptFiles;
use api::dominator::mdb::ShowMdb;
use api::dominator::orders::WatchSub;
use api::dominator::permits::ListPermits;
use api::dominator::plan::{CheckMdb, PlanMachine, PlanMachines};
use api::dominator::resources::{GetResources, PlanResources};
use api::dominator::rollback::ListLastingOrders;
use api::dominator::rollouts::{ListEnvironments, ListRollouts, PlanRollout};
use api::dominator::settings::{GetSubConfiguration, GetSubLimits};
use api::dominator::tasks::{GetTask, ListTasks};
use api::dominator::{GetStatus, ListSubs, ListSubsReply, ListSubsRequest, ShowSub};
use api::fault::{Fault, FaultCode};
use model::display::error_chain;
use model::mdb::Machines;
use rpc::server::Router;
use tokio_util::task::TaskTracker;

use crate::core::identity::TrustError;
use crate::core::mdb_admission::AcceptError;
use crate::core::orders::PauseError;
use crate::core::rollback::RollbackError;
use crate::core::selectors::{HostsError, Selection};
use crate::runtime::fleet::{Fleet, OrderError};
use crate::runtime::identities::TrustOrderError;

/// The state of the method handlers.
#[derive(Clone)]
pub struct ApiState {
    pub fleet: Arc<Fleet>,
    /// Finishes orders that were begun, even if the caller goes away.
    pub tracker: TaskTracker,
}

/// Adds the methods of `Dominator` to `router`.
pub fn methods(router: Router<ApiState>) -> Router<ApiState> {
    planning_methods(orders::rollout_methods(orders::methods(router)))
        .method::<ListSubs, _>(async |api, _, request| {
            Ok(ListSubsReply { subs: api.fleet.list(&selection(request)?) })
        })
        .method::<ShowSub, _>(async |api, _, request| {
            api.fleet.show(&request.hostname).map_err(|error| fault_of(&error))
        })
        .method::<GetStatus, _>(async |api, _, ()| Ok(api.fleet.status()))
        .method::<ListLastingOrders, _>(async |api, _, ()| Ok(api.fleet.lasting_orders()))
        .method::<ListPermits, _>(async |api, _, ()| Ok(api.fleet.shared().permits.report()))
        .method::<ListDeparting, _>(async |api, _, ()| Ok(api.fleet.departing()))
        .method::<ShowMdb, _>(async |api, _, request| {
            api.fleet.mdb(request.held).map_err(|error| fault_of(&error))
        })
        .method::<Explain, _>(async |api, _, request| {
            api.fleet.explain(&request.hostname).map_err(|error| fault_of(&error))
        })
        .method::<WatchSub, _>(async |api, _, request| {
            api.fleet.watch(request).await.map_err(|error| fault_of(&error))
        })
        .method::<ListEvents, _>(async |api, _, request| {
            api.fleet.events(request).await.map_err(|error| fault_of(&error))
        })
        .method::<Backup, _>(async |api, _, request| {
            api.fleet.backup(request).await.map_err(|error| fault_of(&error))
        })
        .method::<GetSubLimits, _>(async |api, _, request| {
            api.fleet.limits_in_force(request).await.map_err(|error| fault_of(&error))
        })
        .method::<GetSubConfiguration, _>(async |api, _, request| {
            let hostname = request.hostname.as_deref();
            api.fleet.configuration(hostname).map_err(|error| fault_of(&error))
        })
        .method::<GetResources, _>(async |api, caller, request| {
            // Each could make all others answer.
            caller.refuse_machines("a machine may not have other machines asked")?;
            Ok(api.fleet.resources(&selection(request)?).await)
        })
        .method::<ListEnvironments, _>(async |api, _, request| Ok(api.fleet.environments(&request)))
        .method::<ListRollouts, _>(async |api, _, request| Ok(api.fleet.rollouts(&request)))
        .method::<PlanRollout, _>(async |api, _, request| {
            api.fleet.plan_rollout(request).map_err(|error| fault_of(&error))
        })
        .method::<ListTasks, _>(async |api, _, request| {
            api.fleet.tasks(request).map_err(|error| fault_of(&error))
        })
        .method::<GetTask, _>(async |api, _, request| {
            api.fleet.task(&request).map_err(|error| fault_of(&error))
        })
        .method::<CheckMdb, _>(async |api, _, request| {
            let machines = request.machines.into_iter();
            let machines: Machines =
                machines.map(|machine| (machine.hostname.clone(), machine)).collect();
            let checking = tokio::task::spawn_blocking(move || api.fleet.check_mdb(&machines));
            checking.await.map_err(|error| Fault::new(FaultCode::Internal, error.to_string()))
        })
}

/// Adds the methods that say what would be done to machines.
fn planning_methods(router: Router<ApiState>) -> Router<ApiState> {
    router
        .method::<PlanMachine, _>(async |api, _, request| {
            api.fleet.plan_machine(request).await.map_err(|error| fault_of(&error))
        })
        .method::<PlanMachines, _>(async |api, _, request| {
            api.fleet.plan_machines(request.machines).await.map_err(|error| fault_of(&error))
        })
        .method::<CountKeptFiles, _>(async |api, caller, request| {
            // Each could make all others read their disks, and learn which files they keep.
            caller.refuse_machines("a machine may not have files of other machines counted")?;
            api.fleet.count_kept_files(request).await.map_err(|error| fault_of(&error))
        })
        .method::<PlanResources, _>(async |api, _, request| {
            api.fleet.plan_resources(request).await.map_err(|error| fault_of(&error))
        })
}

/// Compiles the patterns of a request. The fault says which one is invalid.
pub fn selection(request: ListSubsRequest) -> Result<Selection, Fault> {
    Selection::new(request).map_err(|error| Fault::new(FaultCode::BadRequest, error.to_string()))
}

/// Returns the fault of an order that was not carried out.
pub fn fault_of(error: &OrderError) -> Fault {
    let code = match error {
        OrderError::Unknown { .. }
        | OrderError::NoEffect { .. }
        | OrderError::Hosts(HostsError::NoMatch { .. })
        | OrderError::Pause { source: PauseError::NotPaused { .. } }
        | OrderError::Rollback {
            source:
                RollbackError::NotRequired { .. }
                | RollbackError::Unknown { .. }
                | RollbackError::Gone { .. }
                | RollbackError::NotRolledBack { .. },
        }
        | OrderError::NotStopped { .. }
        | OrderError::NotFenced { .. }
        | OrderError::Content(_)
        | OrderError::NotChanged { .. }
        | OrderError::NoTask { .. }
        | OrderError::NotDeparting { .. }
        | OrderError::NoCopy
        | OrderError::Accept { source: AcceptError::NothingHeld } => FaultCode::NotFound,
        OrderError::Accept { source: AcceptError::OtherHeld }
        | OrderError::Rollback { source: RollbackError::Changed { .. } } => FaultCode::Stale,
        OrderError::Storage { .. }
        | OrderError::Read { .. }
        | OrderError::Unsaved { .. }
        | OrderError::ReadCopy { .. } => FaultCode::Internal,
        OrderError::Trust(error) => match error {
            TrustOrderError::Text(_) => FaultCode::BadRequest,
            TrustOrderError::Refused(TrustError::SameSubd { .. }) => FaultCode::Held,
            TrustOrderError::Refused(_) => FaultCode::NotFound,
            TrustOrderError::Storage { .. } => FaultCode::Internal,
        },
        OrderError::Rollout { said } => match said.code {
            403 => FaultCode::Denied,
            404 => FaultCode::NotFound,
            409 => FaultCode::Stale,
            410 => FaultCode::Gone,
            _ => FaultCode::BadRequest,
        },
        OrderError::Text(_)
        | OrderError::Hosts(_)
        | OrderError::Settings { .. }
        | OrderError::Filter { .. }
        | OrderError::TaskPattern { .. }
        | OrderError::NoSelection
        | OrderError::Pause { .. } => FaultCode::BadRequest,
        OrderError::DefaultImage { .. } => FaultCode::Held,
        OrderError::Resource { source, .. } => source.code().unwrap_or(FaultCode::Unavailable),
        OrderError::TooManyMachines | OrderError::TooManyCounting | OrderError::TooManyPlanning => {
            FaultCode::TooLarge
        }
        OrderError::NoPlan { is_scanning: true, .. } => FaultCode::Busy,
        OrderError::NoPlan { .. }
        | OrderError::NoLimits { .. }
        | OrderError::NoTasks { .. }
        | OrderError::Away { .. }
        | OrderError::NoTaskLog { .. } => FaultCode::Unavailable,
        OrderError::Stopping => FaultCode::Unavailable,
    };
    Fault::new(code, error_chain(error))
}
