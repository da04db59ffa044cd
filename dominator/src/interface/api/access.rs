//! Who may give orders for machines: who has the power, and who owns them by the machine database.

use api::access::{DeniedError, Owned, judge};
use api::{
    fault::{Fault, FaultCode},
    method::Method,
};
use rpc::server::Caller;

use crate::runtime::fleet::Fleet;

/// Refuses callers who may not call `M` for the machine `hostname`.
pub(super) fn expect_may<M: Method>(
    caller: &Caller,
    fleet: &Fleet,
    hostname: &str,
) -> Result<(), Fault> {
    // Who has the power hears later that there is no such machine; others learn nothing.
    let owned = fleet.owned_machine(hostname).into_iter().collect::<Vec<_>>();
    may::<M>(caller, hostname, &owned)
}

/// As [`expect_may`], for each of the machines that `hosts` mean, names or patterns. Gives what the
/// order is to be given for: these for callers with the power, and else each machine by its name,
/// so that the order is for no other machine.
pub(super) fn expect_may_all<M: Method>(
    caller: &Caller,
    fleet: &Fleet,
    hosts: Vec<String>,
) -> Result<Vec<String>, Fault> {
    if judge(M::NAME, M::ACCESS, &caller.identity, "", &[]).is_ok() {
        return Ok(hosts);
    }
    // What means no machine is nobody's.
    let Ok(machines) = fleet.owned_machines(&hosts) else {
        return may::<M>(caller, &hosts.join(", "), &[]).map(|()| hosts);
    };
    for (hostname, owned) in &machines {
        may::<M>(caller, hostname, std::slice::from_ref(owned))?;
    }
    Ok(machines.into_iter().map(|(hostname, _)| hostname).collect())
}

fn may<M: Method>(caller: &Caller, hostname: &str, owned: &[Owned]) -> Result<(), Fault> {
    judge(M::NAME, M::ACCESS, &caller.identity, &format!("machine {hostname}"), owned)
        .map_err(|error: DeniedError| Fault::new(FaultCode::Denied, error.to_string()))
}
