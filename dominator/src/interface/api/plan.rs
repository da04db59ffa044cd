//! Answers those who ask what would be done.

use std::sync::Arc;

use api::dominator::plan::{CheckMdb, PlanMachine, PlanMachines};
use api::fault::{Fault, FaultCode};
use model::mdb::Machines;
use rpc::server::Router;

use super::fault_of;
use crate::runtime::fleet::Fleet;

/// Adds the methods to `router`. Whoever goes away is served no further.
pub(super) fn methods(router: Router, fleet: &Arc<Fleet>) -> Router {
    let fleet_of = || Arc::clone(fleet);
    let (one, many, check) = (fleet_of(), fleet_of(), fleet_of());
    router
        .method::<PlanMachine, _, _>(move |_, request| {
            let fleet = Arc::clone(&one);
            async move { fleet.plan_machine(request).await.map_err(|error| fault_of(&error)) }
        })
        .method::<PlanMachines, _, _>(move |_, request| {
            let fleet = Arc::clone(&many);
            async move {
                fleet.plan_machines(request.machines).await.map_err(|error| fault_of(&error))
            }
        })
        .method::<CheckMdb, _, _>(move |_, request| {
            let fleet = Arc::clone(&check);
            async move {
                let machines = request.machines.into_iter();
                let machines: Machines =
                    machines.map(|machine| (machine.hostname.clone(), machine)).collect();
                let checking = tokio::task::spawn_blocking(move || fleet.check_mdb(&machines));
                checking.await.map_err(|error| Fault::new(FaultCode::Internal, error.to_string()))
            }
        })
}
