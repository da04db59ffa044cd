//! Tells a dominator of the resources of the fleet, and takes permits for them and what other
//! machines have made.

use api::fault::{Fault, FaultCode};
use api::subd::{
    FleetResourceReport, GetFleetResourcesReply, GetFleetResourcesRequest,
    TellFleetResourcesRequest,
};
use provisioning::machine::fleet::{FleetNews, FleetStanding};

use crate::provisioning::provisioner::{Provisioner, internal};

impl Provisioner {
    /// Returns how the resources of the fleet are.
    pub fn fleet(&self, request: &GetFleetResourcesRequest) -> GetFleetResourcesReply {
        let said_at = self.boot_now();
        let standings = self.machine(|machine| machine.fleet());
        let report = |standing: FleetStanding| {
            let with_outputs = request.outputs_of.contains(&standing.id);
            FleetResourceReport::new(standing, with_outputs)
        };
        GetFleetResourcesReply { said_at, resources: standings.into_iter().map(report).collect() }
    }

    /// Takes what others have made, and permits. Blocks.
    ///
    /// # Errors
    ///
    /// What cannot be read or recorded.
    pub fn take_fleet(&self, request: TellFleetResourcesRequest) -> Result<(), Fault> {
        let now = self.boot_now();
        let had_permits = self.machine(|machine| machine.has_permits());
        let (mut taken, is_news) = (Ok(()), !request.news.is_empty() || !had_permits);
        let saved = self.save(|machine| {
            for news in request.news {
                // One that is bad does not keep others back.
                let took = FleetNews::try_from(news).and_then(|news| machine.take_news(news));
                taken = taken.clone().and(took);
            }
            for permit in &request.permits {
                let took = machine.take_permit(&permit.id, permit.number, &permit.until, &now);
                if let Err(error) = took {
                    tracing::info!(resource = permit.id, "a permit is not taken: {error}");
                }
            }
        });
        self.changed.notify_one();
        // A permit that is prolonged is no news.
        if is_news {
            (self.surroundings.tell)();
        }
        saved.map_err(|error| internal(&error))?;
        if !self.machine(|machine| machine.has_target()) {
            self.write_outputs();
        }
        taken.map_err(|why: String| Fault::new(FaultCode::BadRequest, why))
    }
}
