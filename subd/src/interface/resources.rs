//! Methods about the resources of the machine.

use std::sync::Arc;

use api::Done;
use api::fault::{Fault, FaultCode};
use api::subd::{
    ContinueProvisioning, ContinueProvisioningRequest, GetFleetResources, GetFleetResourcesReply,
    GetResources, GetResourcesReply, GiveUpProvisioning, GiveUpProvisioningRequest, OrderResource,
    OrderResourceRequest, PlanResources, PlanResourcesReply, Provision, RESOURCE_WHY_BYTES_MAX,
    ResourcesReport, TellFleetResources,
};
use model::object::Algorithm;
use rpc::server::Router;

use crate::blocking;
use crate::interface::Service;
use crate::interface::operator::refuse_if_paused;
use crate::provisioning::provisioner::{NOT_HERE, Provisioner};

/// Adds the methods of this module to `router`.
pub fn add_methods(router: Router<Arc<Service>>) -> Router<Arc<Service>> {
    router
        .method::<Provision, _>(async |service, _, request| {
            refuse_if_paused(&service.report_state)?;
            blocking(move || service.updater.provision(request.update_id).map(|()| Done {})).await
        })
        .method::<ContinueProvisioning, _>(async |service, _, request| {
            refuse_if_paused(&service.report_state)?;
            blocking(move || service.continue_provisioning(&request).map(|()| Done {})).await
        })
        .method::<GiveUpProvisioning, _>(async |service, _, request| {
            refuse_if_paused(&service.report_state)?;
            let GiveUpProvisioningRequest { image_digest } = request;
            blocking(move || service.updater.give_up_resources(image_digest).map(|()| Done {}))
                .await
        })
        .method::<PlanResources, _>(async |service, _, request| {
            match &service.updater.provisioner {
                Some(provisioner) => provisioner.preview(&request.definition).await,
                None => {
                    let unknown = Some(NOT_HERE.to_owned());
                    Ok(PlanResourcesReply { unknown, ..<_>::default() })
                }
            }
        })
        .method::<OrderResource, _>(async |service, _, request| {
            blocking(move || service.order_resource(&request).map(|()| Done {})).await
        })
        .method::<GetFleetResources, _>(async |service, _, request| {
            blocking(move || match &service.updater.provisioner {
                Some(provisioner) => Ok(provisioner.fleet(&request)),
                None => Ok(GetFleetResourcesReply::default()),
            })
            .await
        })
        .method::<TellFleetResources, _>(async |service, _, request| {
            blocking(move || service.provisioner()?.take_fleet(request).map(|()| Done {})).await
        })
        .method::<GetResources, _>(async |service, _, request| {
            blocking(move || {
                let report = service.resources();
                let json = serde_json::to_vec(&report);
                let json = json.map_err(|error| {
                    Fault::new(FaultCode::Internal, format!("cannot report: {error}"))
                })?;
                let version = Algorithm::Blake3.digest(&json);
                let report = (request.have != Some(version)).then_some(report);
                Ok(GetResourcesReply { version, report })
            })
            .await
        })
}

impl Service {
    /// How the resources of the machine are.
    pub fn resources(&self) -> ResourcesReport {
        match &self.updater.provisioner {
            Some(provisioner) => provisioner.report(),
            None => ResourcesReport { not_run: Some(NOT_HERE.to_owned()), ..<_>::default() },
        }
    }

    fn continue_provisioning(&self, request: &ContinueProvisioningRequest) -> Result<(), Fault> {
        self.provisioner()?.go_on(request)
    }

    fn order_resource(&self, request: &OrderResourceRequest) -> Result<(), Fault> {
        let bad = |text: String| Err(Fault::new(FaultCode::BadRequest, text));
        if request.why.len() > RESOURCE_WHY_BYTES_MAX {
            return bad(format!("the reason has at most {RESOURCE_WHY_BYTES_MAX} bytes"));
        }
        if request.why.trim().is_empty() {
            return bad(format!("to {} a resource needs a reason", request.order.name()));
        }
        self.provisioner()?.order_orphan(request)
    }

    fn provisioner(&self) -> Result<&Provisioner, Fault> {
        let unavailable = || Fault::new(FaultCode::Unavailable, NOT_HERE);
        self.updater.provisioner.as_deref().ok_or_else(unavailable)
    }
}
