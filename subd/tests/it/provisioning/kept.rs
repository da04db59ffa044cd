//! What becomes of resources that are there: drift, and orders about orphans.

use std::thread::sleep;
use std::time::Duration;

use api::subd::{OrderResource, OrderResourceRequest, ResourceOrder, ResourceReport};

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
