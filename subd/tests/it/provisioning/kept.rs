//! What becomes of resources that are there: drift, and orders about orphans.

use std::thread::sleep;
use std::time::Duration;

use api::subd::{
    GiveUpProvisioning, GiveUpProvisioningRequest, OrderResource, OrderResourceRequest,
    PlanResources, PlanResourcesReply, PlanResourcesRequest, ResourceOrder, ResourceReport,
};
use model::object::Algorithm;
use provisioning::machine::preview::{PlannedEffect, PlannedResource};
use serde_json::json;

use super::*;

const KEPT: &str = r#"{"id": "kept", "kind": "mark"}"#;

/// The reason of the orders.
const WHY: &str = "it moved";

impl Machine {
    /// Gives the machine an image with these resources.
    async fn has(&mut self, version: &str, resources: &[(&str, &str)]) {
        let staged = self.stage(version, resources).await;
        self.all(&staged).await;
        assert_eq!(self.commit(&staged).await.outcome, UpdateOutcome::Done);
    }

    async fn resource(&self, id: &str) -> Option<ResourceReport> {
        self.report().await.resources.into_iter().find(|one| one.id == id)
    }

    async fn until_resource(&self, id: &str, is_so: impl Fn(&ResourceReport) -> bool) {
        eventually_async("the state of the resource", async || {
            let found = self.resource(id).await;
            if found.as_ref().is_some_and(&is_so) { Ok(()) } else { Err(format!("{found:?}")) }
        })
        .await;
    }

    async fn order(&self, id: &str, order: ResourceOrder, why: &str) -> Result<(), FaultCode> {
        let request = OrderResourceRequest { id: id.to_owned(), order, why: why.to_owned() };
        let done = self.sub().client.call::<OrderResource>(&request).await;
        done.map(drop).map_err(|error| error.code().unwrap())
    }

    fn calls(&self, verb: &str) -> usize {
        self.lines("calls").iter().filter(|line| *line == verb).count()
    }

    fn until_calls(&self, verb: &str, count: usize) {
        eventually("the plugin is called", || {
            if self.calls(verb) >= count { Ok(()) } else { Err(format!("{:?}", self.calls(verb))) }
        });
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn drift_is_reported_and_repaired_if_the_resource_says_so() {
    let flags = [&DIRECT[..], &["--resource-check-every", "1s"]].concat();
    let mut machine = Machine::start(&flags).await;
    machine.has("1", &[("db", DB)]).await;
    machine.until_calls("plan", 1);
    assert_eq!(machine.states().await, [made("db")]);

    // By hand.
    fs::remove_dir(machine.at("srv/made/db")).unwrap();
    let is_drifted = |one: &ResourceReport| {
        one.state == ResourceState::Drifted && one.text == "make its directory"
    };
    machine.until_resource("db", is_drifted).await;
    // A plugin that cannot say it is named, and that is no drift.
    machine.set("late");
    let is_unknown = |one: &ResourceReport| {
        one.state == ResourceState::Made
            && one.drift.is_none()
            && one.text.ends_with("cannot say whether it differs: exit status: 1: no login")
    };
    machine.until_resource("db", is_unknown).await;
    machine.unset("late");
    machine.until_resource("db", is_drifted).await;
    assert_eq!(machine.lines("log"), ["made db"]);

    // Not while another image is provisioned. That says `repair`, which is no input.
    machine.set("token");
    let repair = DB.replace(r#""spec""#, r#""on_drift": "repair", "spec""#);
    let second = machine.stage("2", &[("db", &repair), ("user", USER)]).await;
    machine.provision(&second).await;
    machine.until_calls("status", 1);
    let before = machine.calls("plan");
    sleep(Duration::from_millis(2_500));
    assert_eq!(machine.calls("plan"), before);
    machine.unset("token");
    machine.until(&ProvisioningStage::Finished).await;
    assert_eq!(machine.lines("log"), ["made db", "made user"]);

    // It is made again, and lives.
    assert_eq!(machine.commit(&second).await.outcome, UpdateOutcome::Done);
    eventually("it is repaired", || match machine.lines("log") {
        log if log == ["made db", "made user", "made db"] => Ok(()),
        log => Err(format!("{log:?}")),
    });
    machine.until_resource("db", |one| one.state == ResourceState::Made).await;
    machine.until_resource("db", |one| one.drift.is_none()).await;
    assert_eq!(machine.lines("log").len(), 3);

    // What was found is known after a restart.
    fs::remove_dir(machine.at("srv/made/db")).unwrap();
    machine.set("wait");
    machine.until_calls("provision", 4);
    machine.kill();
    machine.unset("wait");
    let is_repaired = |one: &ResourceReport| {
        one.state == ResourceState::Made && one.drift.as_deref() == Some("make its directory")
    };
    machine.until_resource("db", is_repaired).await;
    assert_eq!(machine.lines("log").len(), 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn orphans_are_forgotten_and_destroyed_although_subd_is_killed() {
    let mut machine = Machine::start(&DIRECT).await;
    machine.has("1", &[("db", DB)]).await;
    machine.has("2", &[("db", DB), ("kept", KEPT)]).await;
    machine.has("3", &[("user", ALONE)]).await;
    let orphan = |id: &str| (id.to_owned(), ResourceState::Made, true);
    assert_eq!(machine.states().await, [orphan("db"), orphan("kept"), made("user")]);

    use ResourceOrder::{Destroy, Forget};
    for order in [Destroy, Forget] {
        assert_eq!(machine.order("none", order, WHY).await, Err(FaultCode::NotFound));
        assert_eq!(machine.order("user", order, WHY).await, Err(FaultCode::BadRequest));
        assert_eq!(machine.order("db", order, " ").await, Err(FaultCode::BadRequest));
    }
    assert_eq!(machine.states().await.len(), 3);

    // What is forgotten stays as it is.
    assert_eq!(machine.order("kept", Forget, WHY).await, Ok(()));
    machine.kill();
    assert_eq!(machine.states().await, [orphan("db"), made("user")]);
    assert_eq!(machine.order("kept", Forget, WHY).await, Err(FaultCode::NotFound));

    // The plugin fails first, then it works by itself, and subd is killed.
    machine.set("late");
    machine.set("token");
    let before = machine.calls("provision");
    assert_eq!(machine.order("db", Destroy, WHY).await, Ok(()));
    machine.kill();
    let leaves = |one: &ResourceReport| one.state == ResourceState::Failed && !one.is_orphan;
    machine.until_resource("db", leaves).await;
    let failed = machine.calls("provision");
    assert_eq!(machine.order("db", Destroy, WHY).await, Err(FaultCode::BadRequest));
    // That changes nothing, and so it is no reason to try again.
    sleep(Duration::from_millis(500));
    assert_eq!(machine.calls("provision"), failed);
    machine.unset("late");
    machine.kill();
    // What has failed is tried again after ten minutes, or with the next update.
    machine.has("4", &[("user", ALONE)]).await;
    machine.until_calls("status", 1);
    machine.kill();
    let asked = machine.calls("status");
    machine.until_calls("status", asked + 1);
    let provisions = machine.calls("provision");
    assert!(provisions > before);
    machine.unset("token");
    eventually_async("it is destroyed", async || match machine.states().await {
        states if states == [made("user")] => Ok(()),
        states => Err(format!("{states:?}")),
    })
    .await;
    assert_eq!(machine.calls("provision"), provisions);
    let there = |id: &str| machine.at("srv/made").join(id).exists();
    assert_eq!([there("db"), there("kept"), there("user")], [false, true, true]);
    assert_eq!(machine.lines("log").last().map(String::as_str), Some("destroyed db"));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_made_for_an_image_that_does_not_come_leaves_as_its_file_says() {
    let mut machine = Machine::start(&DIRECT).await;
    machine.has("1", &[("kept", KEPT)]).await;
    let next = machine.stage("2", &[("db", DB), ("kept", KEPT), ("user", USER)]).await;
    machine.all(&next).await;
    let give_up = async |image_digest: ObjectId| {
        let request = GiveUpProvisioningRequest { image_digest };
        machine.sub().client.call::<GiveUpProvisioning>(&request).await.unwrap();
    };
    give_up(ObjectId::Blake3([7; 32])).await;
    let made_all = [made("db"), made("kept"), made("user")];
    assert_eq!(machine.states().await, made_all);
    give_up(next.digest).await;
    eventually_async("the resource is destroyed", async || {
        let left = [("db".to_owned(), ResourceState::Made, true), made("kept")];
        let states = machine.states().await;
        if states == left { Ok(()) } else { Err(format!("{states:?}")) }
    })
    .await;
    assert_eq!(machine.report().await.provisioning, None);
    give_up(next.digest).await;
    let log = machine.lines("log");
    assert_eq!(log.last().map(String::as_str), Some("destroyed user"), "{log:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_an_image_would_do_is_told_before_it_is_there() {
    let mut machine = Machine::start(&DIRECT).await;
    let plan = async |machine: &Machine, files: serde_json::Value| {
        let plugin = Algorithm::Blake3.digest(PLUGIN.as_bytes());
        let definition = json!({"bindings": BINDINGS, "files": files, "plugins": {"mark": plugin}});
        let request =
            PlanResourcesRequest { definition: serde_json::from_value(definition).unwrap() };
        machine.sub().client.call::<PlanResources>(&request).await.unwrap()
    };
    let planned = |id: &str, effect, text: &str| PlannedResource {
        id: id.to_owned(),
        kind: "mark".to_owned(),
        effect,
        text: text.to_owned(),
    };
    let known = |resources| PlanResourcesReply { resources, unknown: None };
    let why = "dom-provisioner-mark comes with the image: the machine does not have it yet";
    let unknown = known(vec![planned("db", PlannedEffect::Unknown, why)]);
    assert_eq!(plan(&machine, json!({"db.json": DB})).await, unknown);

    machine.has("1", &[("kept", KEPT), ("user", ALONE)]).await;
    let log = machine.lines("log");
    let expected = known(vec![
        planned("db", PlannedEffect::Create, "make its directory"),
        planned("kept", PlannedEffect::Orphan, "its on_removal is keep"),
        planned("user", PlannedEffect::Delete, "make its directory"),
    ]);
    assert_eq!(plan(&machine, json!({"db.json": DB})).await, expected);
    let same = json!({"kept.json": KEPT, "user.json": ALONE});
    assert_eq!(plan(&machine, same).await, known(Vec::new()));
    let bad = plan(&machine, json!({"db.json": "{}"})).await;
    assert_eq!(bad.resources, []);
    assert!(bad.unknown.unwrap().contains("db.json"));
    machine.set("late");
    let failed =
        plan(&machine, json!({"db.json": DB, "kept.json": KEPT, "user.json": ALONE})).await;
    let why = "exit status: 1: no login";
    assert_eq!(failed, known(vec![planned("db", PlannedEffect::Unknown, why)]));
    // Nothing was changed, and nothing is under way.
    assert_eq!(
        (machine.lines("log"), machine.states().await),
        (log, vec![made("kept"), made("user")])
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn with_trusted_keys_plugins_are_not_asked_about_what_nobody_has_signed() {
    let keys = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(keys.path(), crate::signed::key().public_line().unwrap()).unwrap();
    let flags = [&DIRECT[..], &["--trusted-keys", keys.path().to_str().unwrap()]].concat();
    let machine = Machine::start(&flags).await;
    let definition = json!({"bindings": BINDINGS, "files": {"db.json": DB}, "plugins": {}});
    let request = PlanResourcesRequest { definition: serde_json::from_value(definition).unwrap() };
    let reply = machine.sub().client.call::<PlanResources>(&request).await.unwrap();
    let why =
        "the machine has trusted keys, and what its plugins would be asked about is not signed";
    assert_eq!(reply, PlanResourcesReply { unknown: Some(why.to_owned()), ..<_>::default() });
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_given_up_while_an_update_is_carried_out() {
    let flags = [&DIRECT[..], &["--health-command", "env"]].concat();
    let mut machine = Machine::start(&flags).await;
    machine.has("1", &[("kept", KEPT)]).await;
    let lasts =
        format!("while [ -e {} ]; do sleep 0.05; done", machine.at("srv/checking").display());
    let command = ["sh", "-c", &lasts].map(str::to_owned).into();
    let check = HealthCheck { command, within_seconds: 60, undo: true };
    let next = machine.stage_checked("2", &[("kept", KEPT), ("user", ALONE)], Some(check)).await;
    machine.all(&next).await;
    machine.set("checking");
    let give_up = async |machine: &Machine| {
        let request = GiveUpProvisioningRequest { image_digest: next.digest };
        machine.sub().client.call::<GiveUpProvisioning>(&request).await
    };
    let (last, ()) = tokio::join!(machine.commit(&next), async {
        eventually_async("the update is carried out", async || {
            let now = machine.sub().poll().await.activity;
            let is_so = now == api::subd::Activity::Updating { update_id: next.id };
            if is_so { Ok(()) } else { Err(format!("{now:?}")) }
        })
        .await;
        let refused = give_up(&machine).await.unwrap_err();
        assert_eq!(refused.code(), Some(FaultCode::Busy));
        machine.unset("checking");
    });
    assert_eq!(last.outcome, UpdateOutcome::Done);
    give_up(&machine).await.unwrap();
    assert_eq!(machine.states().await, [made("kept"), made("user")]);
}
