//! Provisioning before the Commit.
// tidy: core

use api::dominator::orders::{StoppedImage, UpdatePause};
use api::subd::{
    Activity, ProvisioningReport, ProvisioningStage, ResourceReport, ResourceState,
    ResourcesReport, UpdateOutcome,
};
use expect_test::expect;
use model::image::ImageName;
use model::tree::Time;
use model::trigger::Triggers;

use super::super::*;
use super::script::{Script, image};
use crate::core::claims::ClaimAnswer;
use model::scope::Scope;

const TRIGGERS: &str = r#"[{"MatchLines": ["/etc/dominator/resources.d/.*"], "Service": "all",
    "Kind": "provision"}]"#;

fn with_resources(name: &str, files: &[(&str, &str)]) -> ImageState {
    let ImageState::Ready(plain) = image(name, files) else { panic!("the image is ready") };
    let mut content = plain.content.clone();
    content.triggers = serde_json::from_str::<Triggers>(TRIGGERS).unwrap();
    ImageState::Ready(Arc::new(RequiredImage::new(content, plain.tree.clone())))
}

/// A machine that has `former` and whose next image, `base`, has resources; it has all objects.
fn ready() -> Script {
    let mut script = Script::new(with_resources("base", &[("/a", "2")]));
    let ImageState::Ready(former) = image("former", &[("/a", "1")]) else { panic!() };
    script.cache(&["1", "2"]);
    script.reply.scope = Scope::of(&former.scan, &script.reply.exclusions);
    script.reply.last_image = Some(former.name().clone());
    script.former = Some(former);
    script.writes_ends = true;
    script.scan(&[("/a", "1")]);
    script.poll();
    script
}

/// The machine reports that the resources of its required image are so.
fn reports(script: &mut Script, stage: ProvisioningStage, step: u32) {
    let image = script.image.ready().unwrap();
    let (image, image_digest) = (image.name().clone(), image.digest);
    let provisioning = Some(ProvisioningReport { image, image_digest, stage, step });
    script.resources = Some(ResourcesReport { provisioning, ..ResourcesReport::default() });
}

/// A machine on which plugins work on the first of two waves.
fn provisioning() -> Script {
    let mut script = ready();
    script.accept();
    script.reply.activity = Activity::Prepared { update_id: 1 };
    script.poll();
    reports(&mut script, ProvisioningStage::Running { wave: 1, waves: 2 }, 0);
    script.accept();
    script
}

#[test]
fn the_update_is_staged_without_a_claim_and_carried_out_when_all_resources_are_there() {
    let mut script = ready();
    script.answer = ClaimAnswer::Waits("3 others are being updated".into());
    script.accept();
    script.reply.activity = Activity::Prepared { update_id: 1 };
    script.poll();
    reports(&mut script, ProvisioningStage::Running { wave: 1, waves: 2 }, 0);
    script.accept();
    script.wait(1);
    script.wait(2);
    reports(&mut script, ProvisioningStage::Waits { wave: 2, waves: 2 }, 0);
    script.poll();
    reports(&mut script, ProvisioningStage::Running { wave: 2, waves: 2 }, 1);
    script.accept();
    // The staged update expires meanwhile.
    script.ended(1, UpdateOutcome::NotPrepared("expired".into()), None);
    script.reply.last_image = script.former.as_ref().map(|former| former.name().clone());
    script.poll();
    reports(&mut script, ProvisioningStage::Finished, 1);
    script.poll();
    assert_eq!(script.sub.status(), Status::WaitingForBudget);
    script.answer = ClaimAnswer::Granted;
    script.poll();
    script.poll();
    script.commit();
    script.check(expect![[r#"
        0   assigned connecting       not reached yet
                     -> poll for all
        0   polled   preparing        staging 1 change: /a (content)
                     -> prepare 1: 1 operations
        0   accepted preparing        staging 1 change: /a (content)
                     -> provision 1
        0   polled   provisioning     asking for the resources of 1 change: /a (content)
        0   accepted provisioning     plugins work on wave 1 of 2 of its resources; equa
        1   wake     provisioning     plugins work on wave 1 of 2 of its resources; equa
        3   wake     provisioning     plugins work on wave 1 of 2 of its resources; equa
        3   polled   provisioning     wave 2 of 2 of its resources is next; equals forme
                     -> continue provisioning after step 0
        3   accepted provisioning     plugins work on wave 2 of 2 of its resources; equa
        3   polled   rescanning       repairing former: reading the new scan
        3   polled   provisioning     plugins work on wave 2 of 2 of its resources; equa
        3   polled   waiting-for-budget 1 change: /a (content); 3 others are being updated
        3   polled   waiting-for-budget 1 change: /a (content); 3 others are being updated
        3   polled   preparing        staging 1 change: /a (content)
                     -> prepare 2: 1 operations
        3   polled   preparing        staging 1 change: /a (content)
        3   accepted preparing        staging 1 change: /a (content)
                     -> commit 2
        3   polled   updating         the update was ordered
        3   accepted updating         the update was ordered
        3   polled   updating         carrying out the update and its triggers
    "#]]);
}

#[test]
fn drift_of_the_former_image_is_repaired_meanwhile_and_its_objects_stay() {
    let mut script = provisioning();
    assert_eq!(script.sub.detail(), "plugins work on wave 1 of 2 of its resources; equals former");
    script.scan(&[("/a", "1"), ("/drift", "1")]);
    script.reply.activity = Activity::Idle;
    script.poll();
    script.check(expect![[r#"
        0   assigned connecting       not reached yet
                     -> poll for all
        0   polled   preparing        staging 1 change: /a (content)
                     -> prepare 1: 1 operations
        0   accepted preparing        staging 1 change: /a (content)
                     -> provision 1
        0   polled   provisioning     asking for the resources of 1 change: /a (content)
        0   accepted provisioning     plugins work on wave 1 of 2 of its resources; equa
        0   polled   rescanning       repairing former: reading the new scan
        0   polled   preparing        repairing former: staging 1 change: /drift (extra)
                     -> prepare 2: 1 operations
    "#]]);
}

#[test]
fn a_failure_says_why_and_is_tried_again_after_growing_pauses_or_by_order() {
    let mut script = provisioning();
    let failed = || ProvisioningStage::Failed { error: "db: the quota is used up".to_owned() };
    reports(&mut script, failed(), 0);
    script.poll();
    assert_eq!(script.sub.detail(), "db: the quota is used up; will be tried again; equals former");
    assert!(script.sub.can_retry());
    let why = script.sub.explain(script.time());
    assert_eq!(why.next_at, Some(Time { seconds: 10, nanoseconds: 0 }));
    let commands: Vec<&str> = why.may.iter().map(|may| may.command.as_str()).collect();
    assert_eq!(commands, ["domtool resource list --host web", "", "domtool retry web"]);
    script.wait(9);
    script.wait(1);
    reports(&mut script, failed(), 1);
    script.accept();
    script.wait(19);
    script.step("retry", Event::Ordered(SubOrder::Retry));
    reports(&mut script, ProvisioningStage::Running { wave: 1, waves: 2 }, 2);
    script.accept();
    assert!(!script.sub.can_retry());
    // The alarm stays until they are there.
    assert_eq!(script.sub.provision_failure(), Some("db: the quota is used up"));
    reports(&mut script, ProvisioningStage::Finished, 2);
    script.poll();
    assert_eq!(script.sub.provision_failure(), None);
    script.check(expect![[r#"
        0   assigned connecting       not reached yet
                     -> poll for all
        0   polled   preparing        staging 1 change: /a (content)
                     -> prepare 1: 1 operations
        0   accepted preparing        staging 1 change: /a (content)
                     -> provision 1
        0   polled   provisioning     asking for the resources of 1 change: /a (content)
        0   accepted provisioning     plugins work on wave 1 of 2 of its resources; equa
        0   polled   provision-failed db: the quota is used up; will be tried again; equ
        9   wake     provision-failed db: the quota is used up; will be tried again; equ
        10  wake     provisioning     trying again what failed: db: the quota is used up
                     -> continue provisioning after step 0
        10  accepted provision-failed db: the quota is used up; will be tried again; equ
        29  wake     provision-failed db: the quota is used up; will be tried again; equ
        29  retry    provisioning     trying again what failed: db: the quota is used up
                     -> continue provisioning after step 1
        29  accepted provisioning     plugins work on wave 1 of 2 of its resources; equa
        29  polled   preparing        staging 1 change: /a (content)
                     -> prepare 2: 1 operations
    "#]]);
}

#[test]
fn no_wave_starts_while_something_prevents_updates() {
    type Change = fn(&mut Script);
    let table: [(&str, Status, Change, Change); 4] = [
        (
            "brake",
            Status::UpdatesDisabled,
            |script| script.step("brake", Event::Brake(Some("storm".into()))),
            |script| script.step("released", Event::Brake(None)),
        ),
        (
            "pause",
            Status::Paused,
            |script| {
                let until = Time { seconds: 1_000, nanoseconds: 0 };
                let (reason, who, since) = ("works".into(), "ann".into(), Time::default());
                let pause = Some(Arc::new(UpdatePause { until, reason, who, since }));
                script.step("pause", Event::Ordered(SubOrder::Pause(pause)));
            },
            |script| script.step("resume", Event::Ordered(SubOrder::Pause(None))),
        ),
        (
            "breaker",
            Status::ImageStopped,
            |script| {
                let image = ImageName::new("base").unwrap();
                let (why, since) = ("3 updates failed".to_owned(), Time::default());
                script.stopped = vec![StoppedImage { image, why, since }];
                script.poll();
            },
            |script| {
                script.stopped.clear();
                script.poll();
            },
        ),
        (
            "record",
            Status::UpdatesDisabled,
            |script| assign_disabled(script, true),
            |script| assign_disabled(script, false),
        ),
    ];
    for (what, status, prevent, allow) in table {
        let mut script = provisioning();
        prevent(&mut script);
        reports(&mut script, ProvisioningStage::Waits { wave: 2, waves: 2 }, 3);
        script.poll();
        assert_eq!(script.sub.status(), status, "{what}");
        assert!(script.called.is_none(), "{what}: {}", script.sub.detail());
        allow(&mut script);
        let Some(Call::ContinueProvisioning(request)) = script.accept() else { panic!("{what}") };
        assert_eq!(request.step, 3, "{what}");
    }
}

fn assign_disabled(script: &mut Script, disable_updates: bool) {
    let machine = Machine::clone(&script.sub.machine);
    let machine = Arc::new(Machine { disable_updates, ..machine });
    let (image, planned) = (script.image.clone(), ImageState::Undefined);
    script.step("assigned", Event::Assigned { machine, image, planned, rollback: None });
}

#[test]
fn a_newer_image_replaces_what_is_being_provisioned() {
    let mut script = provisioning();
    script.image = with_resources("newer", &[("/a", "3")]);
    script.assign();
    script.accept();
    script.cache(&["1", "2", "3"]);
    script.reply.activity = Activity::Idle;
    script.fetched(2, None);
    script.poll();
    script.accept();
    script.reply.activity = Activity::Prepared { update_id: 3 };
    script.poll();
    reports(&mut script, ProvisioningStage::Running { wave: 0, waves: 2 }, 0);
    script.accept();
    script.check(expect![[r#"
        0   assigned connecting       not reached yet
                     -> poll for all
        0   polled   preparing        staging 1 change: /a (content)
                     -> prepare 1: 1 operations
        0   accepted preparing        staging 1 change: /a (content)
                     -> provision 1
        0   polled   provisioning     asking for the resources of 1 change: /a (content)
        0   accepted provisioning     plugins work on wave 1 of 2 of its resources; equa
        0   assigned fetching         fetching 1 object (1 byte)
                     -> fetch 2: 1
        0   accepted fetching         fetching 1 object (1 byte)
                     -> prepare 3: 1 operations
        0   polled   preparing        staging 1 change: /a (content)
        0   accepted preparing        staging 1 change: /a (content)
                     -> provision 3
        0   polled   provisioning     asking for the resources of 1 change: /a (content)
        0   accepted provisioning     plugins still work on resources of a former image;
    "#]]);
}

#[test]
fn what_is_being_provisioned_is_given_up_when_the_former_image_is_required_again() {
    let mut script = provisioning();
    let target = script.image.ready().unwrap().digest;
    script.image = image("former", &[("/a", "1")]);
    script.assign();
    script.refuse(FailureKind::Unreachable, "connection refused");
    script.wait(10);
    let Some(Call::GiveUpProvisioning(request)) = script.accept() else { panic!("no call") };
    assert_eq!(request.image_digest, target);
    // It is said once.
    script.poll();
    assert_eq!((script.sub.status(), script.called.is_none()), (Status::Synced, true));
    script.resources = Some(ResourcesReport::default());
    script.poll();
    script.poll();
    script.check(expect![[r#"
        0   assigned connecting       not reached yet
                     -> poll for all
        0   polled   preparing        staging 1 change: /a (content)
                     -> prepare 1: 1 operations
        0   accepted preparing        staging 1 change: /a (content)
                     -> provision 1
        0   polled   provisioning     asking for the resources of 1 change: /a (content)
        0   accepted provisioning     plugins work on wave 1 of 2 of its resources; equa
        0   assigned synced           equals former
                     -> give up provisioning
        0   failed   synced           equals former
        10  wake     synced           equals former
                     -> give up provisioning
        10  accepted synced           equals former
        10  polled   synced           equals former
        10  polled   synced           equals former
        10  polled   synced           equals former
    "#]]);
}

#[test]
fn what_was_installed_is_not_given_up_when_an_image_without_resources_replaces_it() {
    let mut script = provisioning();
    let base = Arc::clone(script.image.ready().unwrap());
    script.reply.scope = Scope::of(&base.scan, &script.reply.exclusions);
    script.reply.last_image = Some(base.name().clone());
    script.reply.activity = Activity::Idle;
    script.scan(&[("/a", "2")]);
    reports(&mut script, ProvisioningStage::Finished, 1);
    script.poll();
    script.poll();
    assert_eq!(script.sub.status(), Status::Synced);
    assert!(matches!(script.accept(), Some(Call::Cleanup(_))));
    script.image = image("plain", &[("/a", "2")]);
    script.assign();
    assert!(matches!(script.accept(), Some(Call::Prepare(..))));
    // Its update has replaced what was provisioned.
    script.reply.last_image = Some(script.image.ready().unwrap().name().clone());
    script.resources = Some(ResourcesReport::default());
    script.poll();
    script.poll();
    assert_eq!((script.sub.status(), script.called.is_none()), (Status::Synced, true));
}

#[test]
fn a_restarted_dominator_goes_on_with_what_the_machine_says() {
    let stages = [
        (ProvisioningStage::Running { wave: 1, waves: 2 }, Status::Provisioning, None),
        (
            ProvisioningStage::Waits { wave: 2, waves: 2 },
            Status::Provisioning,
            Some("continue-provisioning"),
        ),
        (ProvisioningStage::Failed { error: "no".to_owned() }, Status::ProvisionFailed, None),
        (ProvisioningStage::Finished, Status::Preparing, Some("prepare")),
    ];
    for (stage, status, call) in stages {
        let mut script = Script::new(with_resources("base", &[("/a", "2")]));
        let ImageState::Ready(former) = image("former", &[("/a", "1")]) else { panic!() };
        script.cache(&["1", "2"]);
        script.reply.scope = Scope::of(&former.scan, &script.reply.exclusions);
        script.reply.last_image = Some(former.name().clone());
        script.former = Some(former);
        script.scan(&[("/a", "1")]);
        reports(&mut script, stage, 1);
        script.poll();
        let called = script.called.as_ref().and_then(|(_, call)| call.as_ref());
        let is = (script.sub.status(), called.map(Call::name));
        assert_eq!(is, (status, call), "{}", script.sub.detail());
    }
}

#[test]
fn a_machine_that_cannot_provision_stays_at_its_former_image() {
    let mut script = Script::new(with_resources("base", &[("/a", "2")]));
    script.resources = None;
    script.poll();
    let texts = |script: &Script| (script.sub.status(), script.sub.detail().to_owned());
    let why = "base has resources, which its subd does not know: require an image first that \
               brings a newer subd; its former image is not known, so drift is not repaired";
    assert_eq!(texts(&script), (Status::SubdTooOld, why.to_owned()));
    // It is asked again: another subd may have come.
    let not_run = Some("its root is not /".to_owned());
    script.resources = Some(ResourcesReport { not_run, ..ResourcesReport::default() });
    script.wait(10);
    let why = "the machine runs no plugins: its root is not /; its former image is not known, so \
               drift is not repaired";
    assert_eq!(texts(&script), (Status::ProvisionFailed, why.to_owned()));
    assert!(script.called.is_none());
}

#[test]
fn drift_of_resources_of_the_image_that_the_machine_has_is_told() {
    let report = |state: ResourceState, drift: Option<&str>| {
        let text = drift.unwrap_or_default().to_owned();
        let drift = drift.map(str::to_owned);
        let (id, kind, provisioner) = ("page".to_owned(), "file".to_owned(), "file".to_owned());
        let (is_orphan, needs, outputs) = (false, Vec::new(), "{}".to_owned());
        let resource =
            ResourceReport { id, kind, provisioner, state, text, drift, is_orphan, needs, outputs };
        Some(ResourcesReport { resources: vec![resource], ..ResourcesReport::default() })
    };
    let drifted = |script: &Script| script.sub.drifted().map(|(id, _)| id.to_owned()).next();
    let mut script = Script::new(with_resources("base", &[("/a", "2")]));
    let base = Arc::clone(script.image.ready().unwrap());
    script.cache(&["2"]);
    script.reply.scope = Scope::of(&base.scan, &script.reply.exclusions);
    script.reply.last_image = Some(base.name().clone());
    script.scan(&[("/a", "2")]);
    script.resources = report(ResourceState::Made, None);
    script.poll();
    script.poll();
    assert_eq!((script.sub.status(), drifted(&script)), (Status::Synced, None));
    script.resources = report(ResourceState::Drifted, Some("write it"));
    script.poll();
    script.poll();
    assert_eq!((script.sub.status(), drifted(&script)), (Status::Synced, Some("page".to_owned())));
    script.resources = report(ResourceState::Made, None);
    script.poll();
    assert_eq!(drifted(&script), None);
    script.resources = report(ResourceState::Drifted, Some("write it"));
    script.poll();
    // With another image nothing is asked.
    script.image = image("plain", &[("/a", "2")]);
    script.assign();
    script.poll();
    assert_eq!(drifted(&script), None);
    script.check(expect![[r#"
        0   assigned connecting       not reached yet
                     -> poll for all
        0   polled   rescanning       reading the new scan
        0   polled   synced           equals base
                     -> cleanup of 1
        0   polled   synced           equals base
        0   polled   synced           equals base
                     -> resource-drift page: write it
        0   polled   synced           equals base
        0   polled   synced           equals base
                     -> resource-drift-over page: write it
        0   polled   synced           equals base
                     -> resource-drift page: write it
        0   assigned preparing        staging no change but the name of the image and it
        0   polled   preparing        staging no change but the name of the image and it
    "#]]);
}

#[test]
fn a_machine_whose_image_has_no_resources_is_asked_for_them_once_unless_it_tells_some() {
    // One of an earlier release; one without; and one that tells some of the fleet.
    let of_fleet = ResourcesReport { has_fleet: true, ..ResourcesReport::default() };
    for (resources, asked) in
        [(None, 1), (Some(ResourcesReport::default()), 1), (Some(of_fleet), 3)]
    {
        let mut script = Script::new(image("base", &[("/a", "1")]));
        script.resources = resources;
        script.cache(&["1"]);
        script.scan(&[("/a", "1")]);
        for _ in 0..3 {
            script.poll();
            script.wait(3_600);
        }
        assert_eq!(script.resources_asked, asked, "{:?}", script.resources);
    }
}
