//! Environments and rollouts over the wire: votes, batches, a bad revision, and a dominator that is
//! killed meanwhile.

use api::dominator::Status;
use api::dominator::explain::{Explain, ExplainRequest, ImageSource};
use api::dominator::rollouts::{
    EditEnvironments, EditEnvironmentsRequest, EnvironmentOrder, ListEnvironments,
    ListEnvironmentsRequest, ListRollouts, ListRolloutsRequest, OrderEnvironment,
    OrderEnvironmentRequest, OrderRollout, OrderRolloutRequest, RolloutInfo, RolloutVerb,
    StartRollout, StartRolloutRequest, VoteOnStep, VoteOnStepRequest,
};
use api::fault::FaultCode;
use api::method::Method;
use rollouts::definition::EnvironmentEdit;
use rollouts::document::{Choice, RolloutState, StepState};
use testing::eventually_async;

use crate::fake::{FakeSub, file, tree};
use crate::stage::Stage;

pub struct Fleet {
    pub stage: Stage,
    records: Vec<String>,
    subs: Vec<FakeSub>,
}

const HOSTS: [&str; 4] = ["web1", "web2", "web3", "web4"];

impl Fleet {
    /// Four machines that have the image `v1`.
    pub async fn new() -> Self {
        let mut stage = Stage::new("[]").await;
        for image in ["v1", "v2", "v3"] {
            let text: String =
                (0..200).map(|number| file(&format!("/f{number:03}"), image)).collect();
            stage.images.add(image, &tree(&text), Some(&[]));
        }
        // It would remove too much.
        stage.images.add("bad", &tree(&file("/f000", "bad")), Some(&[]));
        let (mut subs, mut records) = (Vec::new(), Vec::new());
        for host in HOSTS {
            let sub = FakeSub::new(tree(""));
            records.push(stage.sub(host, &sub).await);
            subs.push(sub);
        }
        let fleet = Self { stage, records, subs };
        fleet.require("v1");
        fleet.wait_for(&["v1"; 4]).await;
        fleet
    }

    /// Has the machine database require an image of all, and plan the same.
    fn require(&self, image: &str) {
        let keys = format!("\"RequiredImage\": \"{image}\", \"PlannedImage\": \"{image}\"");
        let record = |record| format!("{{{record}, {keys}}}");
        let records: Vec<String> = self.records.iter().map(record).collect();
        self.stage.write_mdb(&format!("[{}]", records.join(",")));
    }

    pub async fn wait_for(&self, images: &[&str; 4]) {
        for (host, image) in HOSTS.iter().zip(images) {
            self.stage.wait(host, Status::Synced, image).await;
        }
        assert_eq!(self.subs.len(), 4);
    }

    async fn call<M: Method>(&self, request: &M::Request) -> Result<M::Reply, FaultCode> {
        self.stage.client.call::<M>(request).await.map_err(|error| error.code().unwrap())
    }

    async fn edit(&self, edit: &str) -> Result<Vec<Option<u64>>, FaultCode> {
        let edit: EnvironmentEdit = serde_json::from_str(edit).unwrap();
        let request = EditEnvironmentsRequest {
            groups: Vec::new(),
            environments: vec![edit],
            whole: false,
            dry_run: false,
            why: String::new(),
            who: "ann".to_owned(),
        };
        let reply = self.call::<EditEnvironments>(&request).await?;
        Ok(reply.outcomes.into_iter().map(|outcome| outcome.revision).collect())
    }

    async fn start(&self, what: &str) -> Result<String, FaultCode> {
        let request = StartRolloutRequest {
            environments: vec![what.to_owned()],
            why: "a new release".to_owned(),
            who: "ann".to_owned(),
            ..StartRolloutRequest::default()
        };
        Ok(self.call::<StartRollout>(&request).await?.id)
    }

    async fn vote(&self, id: &str, who: &str, digest: &str) -> Result<(), FaultCode> {
        let request = VoteOnStepRequest {
            rollout: id.to_owned(),
            step: "web".to_owned(),
            vote: Choice::Approve,
            digest: digest.to_owned(),
            once: false,
            why: String::new(),
            who: who.to_owned(),
        };
        self.call::<VoteOnStep>(&request).await.map(drop)
    }

    async fn show(&self, id: &str) -> RolloutInfo {
        let request = ListRolloutsRequest { ids: vec![id.to_owned()], ..Default::default() };
        self.call::<ListRollouts>(&request).await.unwrap().rollouts.remove(0)
    }

    async fn wait_for_step(&self, id: &str, state: StepState) -> RolloutInfo {
        eventually_async(&format!("the step of {id} is {state:?}"), async || {
            let info = self.show(id).await;
            if info.rollout.steps[0].state == state { Ok(info) } else { Err(info) }
        })
        .await
    }

    async fn wait_for_end(&self, id: &str, state: RolloutState) -> RolloutInfo {
        eventually_async(&format!("{id} is {state:?}"), async || {
            let info = self.show(id).await;
            if info.rollout.state == state { Ok(info) } else { Err(info) }
        })
        .await
    }

    async fn images(&self) -> Vec<String> {
        self.stage.list().await.into_iter().map(|sub| sub.required_image).collect()
    }

    async fn source(&self, host: &str) -> ImageSource {
        let request = ExplainRequest { hostname: host.to_owned() };
        self.call::<Explain>(&request).await.unwrap().must_have.source
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_revision_comes_to_machines_after_votes_and_a_bad_one_goes_back() {
    let mut fleet = Fleet::new().await;
    let created = fleet
        .edit(
            r#"{"name": "web", "base": 0, "select": {"hosts": ["web*"]}, "source": {"image": "v2"},
                "strategy": {"min_healthy_percent": 50},
                "approval": {"voters": ["ann", "bob"], "min_approvals": 1}}"#,
        )
        .await;
    assert_eq!(created, Ok(vec![Some(1)]));
    // An edit changes no machine, and one from an older revision is refused.
    assert_eq!(
        fleet.edit(r#"{"name": "web", "base": 0, "source": {"image": "v3"}}"#).await,
        Err(FaultCode::Stale)
    );
    assert_eq!(fleet.images().await, ["v1"; 4]);

    let id = fleet.start("web@1").await.unwrap();
    let info = fleet.wait_for_step(&id, StepState::AwaitingApproval).await;
    let digest = info.plans[0].digest.clone();
    let class = &info.plans[0].classes[0];
    assert_eq!((class.from.as_str(), class.to.as_str(), class.machines), ("v1", "v2", 4));
    assert_eq!(fleet.vote(&id, "bob", "0000").await, Err(FaultCode::Stale));
    assert_eq!(fleet.vote(&id, "eve", &digest).await, Err(FaultCode::Denied));
    // Its author alone does not suffice.
    assert_eq!(fleet.vote(&id, "ann", &digest).await, Ok(()));
    // It survives a kill, with its vote. From now on a command is told.
    fleet.stage.kill();
    let directory = fleet.stage.directory.path().to_owned();
    std::fs::write(directory.join("tell"), "cat >>\"$1/told\"\n").unwrap();
    let mut command = fleet.stage.command();
    let line = format!("/bin/sh {0}/tell {0}", directory.display());
    command.arg("--rollout-command").arg(line);
    fleet.stage.start_as(command).await;
    let info = fleet.wait_for_step(&id, StepState::AwaitingApproval).await;
    assert_eq!(info.rollout.steps[0].votes.len(), 1);
    assert_eq!(fleet.images().await, ["v1"; 4]);
    assert_eq!(fleet.vote(&id, "bob", &digest).await, Ok(()));
    fleet.wait_for_end(&id, RolloutState::Succeeded).await;
    fleet.wait_for(&["v2"; 4]).await;
    assert_eq!(fleet.vote(&id, "bob", &digest).await, Err(FaultCode::Gone));
    let told = eventually_async("the end is told", async || {
        let text = std::fs::read_to_string(directory.join("told")).unwrap_or_default();
        let lines = text.lines().map(|line| serde_json::from_str(line).unwrap());
        let told: Vec<serde_json::Value> = lines.collect();
        let state = told.last().map(|last| last["rollouts"][0]["state"] == "succeeded");
        if state == Some(true) { Ok(told) } else { Err(told) }
    })
    .await;
    let step = &told[0]["rollouts"][0]["steps"][0];
    assert_eq!((&step["state"], &step["digest"]), (&"awaiting_approval".into(), &digest.into()));
    assert_eq!(step["voters"], serde_json::json!(["ann", "bob"]));

    // The environment applies, whatever the machine database says.
    fleet.require("v3");
    let request = OrderEnvironmentRequest {
        name: "web".to_owned(),
        order: EnvironmentOrder::Delete { force: false },
        why: String::new(),
        who: String::new(),
    };
    eventually_async("the record says v3", async || match fleet.source("web1").await {
        ImageSource::Environment(environment) if environment.record == "v3" => Ok(environment),
        other => Err(other),
    })
    .await;
    assert_eq!(fleet.call::<OrderEnvironment>(&request).await, Err(FaultCode::Stale));
    assert_eq!(fleet.images().await, ["v2"; 4]);

    // A bad revision: the canary fails, and goes back.
    let updated = fleet.edit(r#"{"name": "web", "base": 1, "source": {"image": "bad"}}"#).await;
    assert_eq!(updated, Ok(vec![Some(2)]));
    assert_eq!(fleet.start("web@1").await, Err(FaultCode::Stale));
    let id = fleet.start("web@2").await.unwrap();
    let info = fleet.wait_for_step(&id, StepState::AwaitingApproval).await;
    assert_eq!(fleet.vote(&id, "bob", &info.plans[0].digest).await, Ok(()));
    let info = fleet.wait_for_end(&id, RolloutState::RolledBack).await;
    let cause = "web failed: a canary has failed: web1";
    assert_eq!(info.rollout.cause, cause);
    fleet.wait_for(&["v2"; 4]).await;
    let request = ListEnvironmentsRequest::default();
    let environments = fleet.call::<ListEnvironments>(&request).await.unwrap().environments;
    let web = &environments[0];
    assert_eq!((web.committed, web.newest, web.machines, web.healthy, web.moved), (1, 2, 4, 4, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn edits_of_the_machine_database_wait_for_a_start_and_a_stop_leaves_machines_as_they_are() {
    let mut fleet = Fleet::new().await;
    let edit = r#"{"name": "web", "select": {"hosts": ["web*"]}, "source": {"mdb": true},
                   "strategy": {"min_healthy_percent": 75, "soak_s": 3600}}"#;
    assert_eq!(fleet.edit(edit).await, Ok(vec![Some(1)]));
    fleet.require("v2");
    let request = ListEnvironmentsRequest::default();
    eventually_async("the edit is a revision", async || {
        let environment =
            fleet.call::<ListEnvironments>(&request).await.unwrap().environments.remove(0);
        let numbers = (environment.committed, environment.newest);
        if numbers == (1, 2) { Ok(()) } else { Err(numbers) }
    })
    .await;
    assert_eq!(fleet.images().await, ["v1"; 4]);
    let id = fleet.start("web@2").await.unwrap();
    // The canary is changed, and soaks for an hour.
    fleet.stage.wait("web1", Status::Synced, "v2").await;
    fleet.wait_for_step(&id, StepState::Applying).await;
    fleet.stage.kill();
    fleet.stage.start().await;
    fleet.wait_for(&["v2", "v1", "v1", "v1"]).await;
    let request = OrderRolloutRequest {
        id: id.clone(),
        order: RolloutVerb::Stop,
        why: "the database is slow".to_owned(),
        who: "ann".to_owned(),
    };
    assert!(fleet.call::<OrderRollout>(&request).await.is_ok());
    fleet.wait_for_end(&id, RolloutState::Stopped).await;
    fleet.stage.kill();
    fleet.stage.start().await;
    fleet.wait_for(&["v2", "v1", "v1", "v1"]).await;
    // A start goes on from there.
    let edit = r#"{"name": "web", "source": {"mdb": true}, "strategy": {"soak_s": 0}}"#;
    assert_eq!(fleet.edit(edit).await, Ok(vec![Some(3)]));
    let id = fleet.start("web@3").await.unwrap();
    fleet.wait_for_end(&id, RolloutState::Succeeded).await;
    fleet.wait_for(&["v2"; 4]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_step_goes_on_as_the_analysis_says_and_brings_no_deprecated_image() {
    let mut fleet = Fleet::new().await;
    let directory = fleet.stage.directory.path().to_owned();
    let say = |text: &str| std::fs::write(directory.join("advice"), text).unwrap();
    std::fs::write(directory.join("analyse"), "cat >>\"$1/asked\"; cat \"$1/advice\"\n").unwrap();
    fleet.stage.kill();
    let mut command = fleet.stage.command();
    let line = format!("/bin/sh {0}/analyse {0}", directory.display());
    command.arg("--analysis-command").arg(line);
    fleet.stage.start_as(command).await;
    fleet.wait_for(&["v1"; 4]).await;
    let edit = r#"{"name": "web", "select": {"hosts": ["web*"]}, "source": {"image": "v2"},
                   "strategy": {"min_healthy_percent": 50, "analysis": {"limit": "2 %"}}}"#;
    assert_eq!(fleet.edit(edit).await, Ok(vec![Some(1)]));
    say(r#"{"advice": "go"}"#);
    let id = fleet.start("web@1").await.unwrap();
    fleet.wait_for_end(&id, RolloutState::Succeeded).await;
    fleet.wait_for(&["v2"; 4]).await;
    let text = std::fs::read_to_string(directory.join("asked")).unwrap();
    let first: serde_json::Value = serde_json::from_str(text.lines().next().unwrap()).unwrap();
    let expected = serde_json::json!({"rollout": id, "step": "web", "environment": "web",
        "revision": 1, "hosts": ["web1"], "analysis": {"limit": "2 %"}});
    assert_eq!(first, expected);

    say(r#"{"advice": "wait", "why": "too few requests"}"#);
    assert_eq!(
        fleet.edit(r#"{"name": "web", "source": {"image": "v3"}}"#).await,
        Ok(vec![Some(2)])
    );
    let id = fleet.start("web@2").await.unwrap();
    eventually_async("it waits for the analysis", async || {
        let reason = fleet.show(&id).await.batches.first().map(|batch| batch.reason.clone());
        let wanted = "the analysis says wait: too few requests";
        if reason.as_deref() == Some(wanted) { Ok(()) } else { Err(reason) }
    })
    .await;
    fleet.wait_for(&["v3", "v2", "v2", "v2"]).await;
    say(r#"{"advice": "roll_back", "why": "2 % errors"}"#);
    let info = fleet.wait_for_end(&id, RolloutState::RolledBack).await;
    assert_eq!(info.rollout.cause, "web failed: the analysis says roll back: 2 % errors");
    fleet.wait_for(&["v2"; 4]).await;

    fleet.stage.images.deprecate("v3", "it leaks");
    let id = fleet.start("web@2").await.unwrap();
    let info = fleet.wait_for_end(&id, RolloutState::RolledBack).await;
    let cause = "web failed: v3 is deprecated: it leaks; a start with --allow-deprecated brings it";
    assert_eq!(info.rollout.cause, cause);
}
