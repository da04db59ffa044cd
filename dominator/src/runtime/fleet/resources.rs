//! Asks machines for their resources, and gives orders about them. Callers who ask are served one
//! at a time.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use api::dominator::kept_files::ImageOfMachine;
use api::dominator::resources::{
    GetResourcesReply, MachineResources, OrderResourceRequest, PLANNING_MAX, PlanResourcesReply,
    PlanResourcesRequest, PlannedResources,
};
use api::fault::FaultCode;
use api::subd::{
    GetResources, GetResourcesRequest, OrderResource, PlanResources, ResourceOrder, ResourcesReport,
};
use futures_util::StreamExt as _;
use futures_util::future::join_all;
use futures_util::stream;
use model::display::error_chain;
use model::image::ImageName;
use provisioning::image::Definition;

use super::{Fleet, OrderError};
use crate::core::orders::Order;
use crate::core::selectors::Selection;
use crate::core::sub::Sub;
use crate::runtime::driver::client_of;

/// How long a machine may take to answer.
const CALL_LIMIT: Duration = Duration::from_secs(5);

/// How long the plugins of a machine may take to say what they would do.
const PLAN_LIMIT: Duration = Duration::from_secs(300);

/// How many machines are asked at the same time.
const ASKED_MAX: usize = 64;

impl Fleet {
    /// Asks the machines of `selection` for their resources. Those without any are left out. Of
    /// machines that have left the machine database it has what they have told last, as orphans.
    pub async fn resources(&self, selection: &Selection) -> GetResourcesReply {
        let _turn = self.counting.lock().await;
        let hostnames = self.list(selection).into_iter().map(|sub| sub.hostname);
        let asked = hostnames.map(async |hostname| {
            let (report, unknown) = match self.resources_of(&hostname).await {
                Ok(report) => (Some(report?), None),
                Err(why) => (None, Some(why)),
            };
            Some(MachineResources { hostname, report, unknown })
        });
        let answers = stream::iter(asked).buffered(ASKED_MAX);
        let mut machines: Vec<_> = answers.filter_map(async |answer| answer).collect().await;
        machines.extend(self.departed_resources(selection));
        machines.sort_by(|one, other| one.hostname.cmp(&other.hostname));
        GetResourcesReply { machines }
    }

    /// Returns the resources of a machine; `None` if it has none. The error says why that is not
    /// known.
    async fn resources_of(&self, hostname: &str) -> Result<Option<ResourcesReport>, String> {
        let (handle, machine) = self.find(hostname).map_err(|error| error.to_string())?;
        handle.with_sub(|sub| sub.expect_right_machine())?;
        let client = client_of(&machine, &self.shared);
        let request = GetResourcesRequest::default();
        match client.call_within::<GetResources>(&request, CALL_LIMIT).await {
            Ok(reply) => Ok(reply
                .report
                .filter(|report| !report.resources.is_empty() || report.provisioning.is_some())),
            Err(error) if error.code() == Some(FaultCode::NoMethod) => Ok(None),
            Err(error) => Err(error_chain(&error)),
        }
    }

    /// Asks machines what would be done about their resources for other images.
    pub async fn plan_resources(
        &self,
        asked: PlanResourcesRequest,
    ) -> Result<PlanResourcesReply, OrderError> {
        if asked.machines.len() > PLANNING_MAX {
            return Err(OrderError::TooManyPlanning);
        }
        let _turn = self.planning_resources.lock().await;
        let mut definitions: BTreeMap<ImageName, Result<Definition, String>> = BTreeMap::new();
        for ImageOfMachine { image, .. } in &asked.machines {
            if !definitions.contains_key(image) {
                definitions.insert(image.clone(), self.definition(image).await);
            }
        }
        let plans = asked.machines.into_iter().map(async |ImageOfMachine { hostname, image }| {
            let plan = match &definitions[&image] {
                Ok(definition) => self.plan_of(&hostname, definition).await,
                Err(why) => Err(why.clone()),
            };
            let api::subd::PlanResourcesReply { resources, unknown } = plan.unwrap_or_else(|why| {
                api::subd::PlanResourcesReply { unknown: Some(why), ..<_>::default() }
            });
            PlannedResources { hostname, image, resources, unknown }
        });
        let mut machines = join_all(plans).await;
        machines.retain(|plan| !plan.resources.is_empty() || plan.unknown.is_some());
        Ok(PlanResourcesReply { machines })
    }

    async fn definition(&self, image: &ImageName) -> Result<Definition, String> {
        let image = self.shared.images.look_up(image).await?;
        self.shared.images.definition(&image).await
    }

    /// Asks a machine what would be done for an image with `definition`.
    async fn plan_of(
        &self,
        hostname: &str,
        definition: &Definition,
    ) -> Result<api::subd::PlanResourcesReply, String> {
        let (handle, machine) = self.find(hostname).map_err(|error| error.to_string())?;
        handle.with_sub(|sub| sub.expect_right_machine())?;
        let client = client_of(&machine, &self.shared);
        let request = api::subd::PlanResourcesRequest { definition: definition.clone() };
        match client.call_within::<PlanResources>(&request, PLAN_LIMIT).await {
            Ok(reply) => Ok(reply),
            // Its subd is too old to have made resources, and the image asks for none.
            Err(error) if error.code() == Some(FaultCode::NoMethod) && definition.is_empty() => {
                Ok(api::subd::PlanResourcesReply::default())
            }
            Err(error) => Err(error_chain(&error)),
        }
    }

    /// Has a machine forget or destroy an orphan. It is recorded before the machine is told, which
    /// may refuse it.
    pub async fn order_resource(
        self: &Arc<Self>,
        request: OrderResourceRequest,
    ) -> Result<(), OrderError> {
        let OrderResourceRequest { hostname, id, order, why, who } = request;
        let (handle, machine) = self.find(&hostname)?;
        let record = Order::new(verb_of(order), &who).about(&hostname).why(&why);
        let record = record.what(format!("resource {id}"));
        let record = record.reasoned("the resource is to be forgotten or destroyed")?;
        let refusal = handle.with_sub(|sub: &Sub| match sub.held_by_other() {
            Some(other) => Err(other.to_owned()),
            None => sub.expect_right_machine(),
        });
        if let Err(why) = refusal {
            return Err(OrderError::Away { hostname, why });
        }
        self.audit(record).await?;
        tracing::warn!(%who, %why, host = hostname, resource = id, "{} is ordered", verb_of(order));
        let client = client_of(&machine, &self.shared);
        let request = api::subd::OrderResourceRequest { id, order, why };
        let done = client.call_within::<OrderResource>(&request, CALL_LIMIT).await;
        done.map(drop).map_err(|source| OrderError::Resource { hostname, order, source })
    }
}

/// The name of the order in the history.
fn verb_of(order: ResourceOrder) -> &'static str {
    match order {
        ResourceOrder::Forget => "resource-forget",
        ResourceOrder::Destroy => "resource-destroy",
    }
}
