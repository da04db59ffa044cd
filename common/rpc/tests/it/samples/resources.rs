//! Samples of the resources of a machine.

use api::dominator::kept_files::ImageOfMachine;
use api::dominator::resources as dominator;
use api::dominator::resources::OrderResourceRequest as OrderMachineResourceRequest;
use api::subd::{
    ContinueProvisioningRequest, FleetResourceNews, FleetResourceReport, GetFleetResourcesReply,
    GetFleetResourcesRequest, GetResourcesReply, GetResourcesRequest, GiveUpProvisioningRequest,
    MadeReport, OrderResourceRequest, PermitReport, PermitResource, PlanResourcesReply,
    PlanResourcesRequest, ProvisionRequest, ProvisioningReport, ProvisioningStage, ResourceOrder,
    ResourceReport, ResourceState, ResourcesReport, SharedResource, TellFleetResourcesRequest,
};
use model::boot_time::BootTime;
use model::object::{Algorithm, ObjectId};
use provisioning::machine::preview::{PlannedEffect, PlannedResource};

fn digest(text: &str) -> ObjectId {
    Algorithm::Blake3.digest(text.as_bytes())
}

pub fn provision() -> ProvisionRequest {
    ProvisionRequest { update_id: 300 }
}

pub fn continue_provisioning() -> ContinueProvisioningRequest {
    ContinueProvisioningRequest { image_digest: digest("image"), step: 3 }
}

pub fn give_up_provisioning() -> GiveUpProvisioningRequest {
    GiveUpProvisioningRequest { image_digest: digest("image") }
}

pub fn get_resources() -> (GetResourcesRequest, GetResourcesReply) {
    let resource = ResourceReport {
        id: "foodb".to_owned(),
        kind: "postgres".to_owned(),
        provisioner: "sql".to_owned(),
        state: ResourceState::Failed,
        text: "the quota is used up".to_owned(),
        drift: Some("write /srv/page".to_owned()),
        is_orphan: true,
        needs: vec!["net0".to_owned()],
        outputs: r#"{"port":5432}"#.to_owned(),
    };
    let provisioning = ProvisioningReport {
        image: "web/1".parse().expect("it is a name"),
        image_digest: digest("image"),
        stage: ProvisioningStage::Waits { wave: 2, waves: 4 },
        step: 3,
    };
    let report = ResourcesReport {
        not_run: Some("why".to_owned()),
        provisioning: Some(provisioning),
        has_fleet: true,
        outputs: r#"{"foodb":{"port":5432}}"#.to_owned(),
        resources: vec![resource],
    };
    let request = GetResourcesRequest { have: Some(digest("former")) };
    (request, GetResourcesReply { version: digest("report"), report: Some(report) })
}

pub fn get_fleet_resources() -> (GetFleetResourcesRequest, GetFleetResourcesReply) {
    let report = FleetResourceReport {
        id: "foodb".to_owned(),
        permit: PermitReport { number: 7, until: Some(boot(9)), is_wanted: true, is_live: true },
        asked_key: Some("9d0c".to_owned()),
        is_needed: true,
        number: 6,
        maker: Some("web2".to_owned()),
        made: Some(MadeReport {
            key: Some("9d0c".to_owned()),
            version: digest("made"),
            outputs: Some(r#"{"port":5432}"#.to_owned()),
        }),
        is_unwanted: true,
    };
    let request = GetFleetResourcesRequest { outputs_of: vec!["foodb".to_owned()] };
    (request, GetFleetResourcesReply { said_at: boot(8), resources: vec![report] })
}

pub fn tell_fleet_resources() -> TellFleetResourcesRequest {
    let news = FleetResourceNews {
        id: "foodb".to_owned(),
        number: 6,
        maker: "web2".to_owned(),
        made: Some(SharedResource {
            key: Some("9d0c".to_owned()),
            outputs: r#"{"port":5432}"#.to_owned(),
        }),
        is_unwanted: true,
    };
    let permit = PermitResource { id: "foodb".to_owned(), number: 7, until: boot(9) };
    TellFleetResourcesRequest { news: vec![news], permits: vec![permit] }
}

fn boot(ms: u64) -> BootTime {
    BootTime { boot_id: "b1".to_owned(), ms }
}

pub fn order_resource() -> OrderResourceRequest {
    let why = "moved to the other server".to_owned();
    OrderResourceRequest { id: "foodb".to_owned(), order: ResourceOrder::Destroy, why }
}

pub fn order_machine_resource() -> OrderMachineResourceRequest {
    let OrderResourceRequest { id, order, why } = order_resource();
    let (hostname, who) = ("web1".to_owned(), "ann".to_owned());
    OrderMachineResourceRequest { hostname, id, order, why, who }
}

pub fn plan_resources() -> (PlanResourcesRequest, PlanResourcesReply) {
    let definition = serde_json::from_value(serde_json::json!({
        "bindings": "[[provisioner]]\n",
        "files": {"a.json": "{}"},
        "plugins": {"file": digest("plugin")},
    }));
    let request = PlanResourcesRequest { definition: definition.unwrap() };
    let resources = vec![planned_resource()];
    (request, PlanResourcesReply { resources, unknown: Some("a.json: id".to_owned()) })
}

fn planned_resource() -> PlannedResource {
    PlannedResource {
        id: "foodb".to_owned(),
        kind: "postgres".to_owned(),
        effect: PlannedEffect::Refused,
        text: "it cannot shrink".to_owned(),
    }
}

pub fn plan_resources_of_machines()
-> (dominator::PlanResourcesRequest, dominator::PlanResourcesReply) {
    let (hostname, image) = ("web-1".to_owned(), "web/2".parse().unwrap());
    let machine = ImageOfMachine { hostname: hostname.clone(), image };
    let plan = dominator::PlannedResources {
        hostname,
        image: machine.image.clone(),
        resources: vec![planned_resource()],
        unknown: Some("refused".to_owned()),
    };
    let request = dominator::PlanResourcesRequest { machines: vec![machine] };
    (request, dominator::PlanResourcesReply { machines: vec![plan] })
}
