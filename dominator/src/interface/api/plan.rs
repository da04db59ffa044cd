//! Answers those who ask what would be done.

use api::dominator::plan::{CheckMdb, PlanMachine, PlanMachines};
use api::fault::{Fault, FaultCode};
use model::mdb::Machines;
use rpc::server::Router;

use super::{ApiState, fault_of};

/// Adds the methods to `router`. Whoever goes away is served no further.
pub(super) fn methods(router: Router<ApiState>) -> Router<ApiState> {
    router
        .method::<PlanMachine, _>(async |api, _, request| {
            api.fleet.plan_machine(request).await.map_err(|error| fault_of(&error))
        })
        .method::<PlanMachines, _>(async |api, _, request| {
            api.fleet.plan_machines(request.machines).await.map_err(|error| fault_of(&error))
        })
        .method::<CheckMdb, _>(async |api, _, request| {
            let machines = request.machines.into_iter();
            let machines: Machines =
                machines.map(|machine| (machine.hostname.clone(), machine)).collect();
            let checking = tokio::task::spawn_blocking(move || api.fleet.check_mdb(&machines));
            checking.await.map_err(|error| Fault::new(FaultCode::Internal, error.to_string()))
        })
}
