//! Scripts of events, with the status and effects after each.

mod blocked;
mod claims;
mod computed;
mod explained;
mod held;
mod leaving;
mod limits_sync;
mod orders;
mod provisioning;
pub(crate) mod recorder;
mod rolled_back;
mod room;
mod script;
mod signature_offer;
mod tasks;

use std::sync::Arc;

use api::subd::{
    Activity, CacheReport, CleanupRequest, FetchFailure, FreeSpace, SubVersion, TriggerFailure,
    UpdateOutcome,
};
use expect_test::expect;
use model::mdb::Machine;
use model::object::ObjectId;
use model::scope::Scope;

use super::*;
use script::{Script, image, object, tree};

#[test]
fn the_whole_loop() {
    let mut script = Script::new(image("base", &[("/a", "1")]));
    script.poll();
    let Some(Call::SetConfiguration(configuration)) = script.accept() else { panic!() };
    script.reply.scope = Scope::of(configuration.scan.as_ref().unwrap(), &script.reply.exclusions);
    (script.reply.scanned, script.reply.scan) = (false, None);
    script.poll();
    script.reply.scanned = true;
    script.scan(&[]);
    script.poll();
    script.accept();
    script.reply.activity = Activity::Fetching { fetch_id: 1, objects: 0, bytes: 0 };
    script.poll();
    script.cache(&["1"]);
    script.fetched(1, None);
    script.poll();
    script.commit();
    script.ended(2, UpdateOutcome::Done, None);
    script.poll();
    script.scan(&[("/a", "1")]);
    script.ended(2, UpdateOutcome::Done, Some(3));
    script.poll();
    script.accept();
    script.cache(&[]);
    script.poll();
    script.check(expect![[r#"
        0   assigned connecting       not reached yet
                     -> poll for all
        0   polled   rescanning       setting the scan filter of base
        0   polled   rescanning       setting the scan filter of base
                     -> set-configuration
        0   accepted rescanning       setting the scan filter of base
        0   polled   rescanning       waiting for the first complete scan
        0   polled   fetching         fetching 1 object (1 byte)
                     -> fetch 1: 1
        0   accepted fetching         fetching 1 object (1 byte)
        0   polled   fetching         fetching; 1 object (1 byte) left
        0   polled   preparing        staging 1 change: /a (missing)
                     -> prepare 2: 1 operations
        0   accepted preparing        staging 1 change: /a (missing)
        0   polled   updating         carrying out 1 change: /a (missing)
                     -> commit 2
        0   accepted updating         the update was ordered
        0   polled   updating         carrying out the update and its triggers
        0   polled   rescanning       scanning what the update changed
        0   polled   synced           equals base
                     -> cleanup of 1
        0   accepted synced           equals base
        0   polled   synced           equals base
    "#]]);
}

#[test]
fn a_machine_that_already_has_the_tree_of_an_image_gets_an_update_without_changes() {
    let mut script = Script::scanning(image("base", &[("/a", "1")]), &[("/a", "1")]);
    script.reply.last_image = Some("former".parse().unwrap());
    script.poll();
    script.step("brake", Event::Brake(Some("storm".into())));
    script.step("released", Event::Brake(None));
    script.commit();
    script.ended(1, UpdateOutcome::Done, Some(2));
    script.poll();
    script.check(expect![[r#"
        0   assigned connecting       not reached yet
                     -> poll for all
        0   polled   rescanning       reading the new scan
        0   polled   synced           equals base
        0   polled   preparing        staging no change but the name of the image and it
                     -> prepare 1: 0 operations
        0   brake    synced           equals base
        0   released preparing        staging no change but the name of the image and it
        0   accepted preparing        staging no change but the name of the image and it
        0   polled   preparing        staging no change but the name of the image and it
                     -> prepare 2: 0 operations
        0   accepted preparing        staging no change but the name of the image and it
        0   polled   updating         carrying out the update and its triggers
        0   polled   synced           equals base
    "#]]);
}

#[test]
fn the_brake_prevents_prepare_and_commit_until_it_is_released() {
    let mut script = Script::scanning(image("base", &[("/a", "1")]), &[]);
    script.step("brake", Event::Brake(Some("storm".into())));
    script.accept();
    script.cache(&["1"]);
    script.fetched(1, None);
    script.poll();
    script.step("released", Event::Brake(None));
    script.accept();
    script.reply.activity = Activity::Preparing { update_id: 2 };
    script.poll();
    script.step("brake", Event::Brake(Some("storm".into())));
    script.reply.activity = Activity::Prepared { update_id: 2 };
    script.poll();
    script.step("released", Event::Brake(None));
    script.check(expect![[r#"
        0   assigned connecting       not reached yet
                     -> poll for all
        0   polled   rescanning       reading the new scan
        0   polled   fetching         fetching 1 object (1 byte)
                     -> fetch 1: 1
        0   brake    updates-disabled fetching 1 object (1 byte); updates of all machine
        0   accepted updates-disabled fetching 1 object (1 byte); updates of all machine
        0   polled   updates-disabled 1 change: /a (missing), all objects are there; upd
        0   released preparing        staging 1 change: /a (missing)
                     -> prepare 2: 1 operations
        0   accepted preparing        staging 1 change: /a (missing)
        0   polled   preparing        staging 1 change: /a (missing)
        0   brake    updates-disabled 1 change: /a (missing), all objects are there; upd
        0   polled   updates-disabled 1 change: /a (missing), all objects are there; upd
        0   released updating         carrying out 1 change: /a (missing)
                     -> commit 2
    "#]]);
}

#[test]
fn an_update_that_changes_nothing_is_not_repeated_for_ever() {
    let mut script = Script::scanning(image("base", &[("/a", "1")]), &[]);
    script.accept();
    script.cache(&["1"]);
    script.fetched(1, None);
    script.poll();
    script.commit();
    script.ended(2, UpdateOutcome::Done, Some(4));
    script.poll();
    script.wait(5);
    script.wait(5);
    script.commit();
    script.ended(3, UpdateOutcome::Done, Some(4));
    script.poll();
    script.wait(10);
    script.wait(10);
    script.check(expect![[r#"
        0   assigned connecting       not reached yet
                     -> poll for all
        0   polled   rescanning       reading the new scan
        0   polled   fetching         fetching 1 object (1 byte)
                     -> fetch 1: 1
        0   accepted fetching         fetching 1 object (1 byte)
        0   polled   preparing        staging 1 change: /a (missing)
                     -> prepare 2: 1 operations
        0   accepted preparing        staging 1 change: /a (missing)
        0   polled   updating         carrying out 1 change: /a (missing)
                     -> commit 2
        0   accepted updating         the update was ordered
        0   polled   updating         carrying out the update and its triggers
        0   polled   not-converging   the update was carried out, and the same changes a
        5   wake     not-converging   the update was carried out, and the same changes a
        10  wake     preparing        staging 1 change: /a (missing)
                     -> prepare 3: 1 operations
        10  accepted preparing        staging 1 change: /a (missing)
        10  polled   updating         carrying out 1 change: /a (missing)
                     -> commit 3
        10  accepted updating         the update was ordered
        10  polled   updating         carrying out the update and its triggers
        10  polled   not-converging   the update was carried out, and the same changes a
        20  wake     not-converging   the update was carried out, and the same changes a
        30  wake     preparing        staging 1 change: /a (missing)
                     -> prepare 4: 1 operations
    "#]]);
}

#[test]
fn an_update_that_fails_is_tried_again_after_a_pause_or_with_another_image() {
    let mut script = Script::scanning(image("base", &[("/a", "1")]), &[]);
    script.accept();
    script.cache(&["1", "2"]);
    script.fetched(1, None);
    script.poll();
    script.commit();
    script.ended(2, UpdateOutcome::RolledBack("no space".into()), Some(4));
    script.poll();
    script.wait(10);
    script.commit();
    script.ended(3, UpdateOutcome::Stuck("read-only".into()), Some(4));
    script.poll();
    script.image = image("other", &[("/a", "2")]);
    script.assign();
    script.check(expect![[r#"
        0   assigned connecting       not reached yet
                     -> poll for all
        0   polled   rescanning       reading the new scan
        0   polled   fetching         fetching 1 object (1 byte)
                     -> fetch 1: 1
        0   accepted fetching         fetching 1 object (1 byte)
        0   polled   preparing        staging 1 change: /a (missing)
                     -> prepare 2: 1 operations
        0   accepted preparing        staging 1 change: /a (missing)
        0   polled   updating         carrying out 1 change: /a (missing)
                     -> commit 2
        0   accepted updating         the update was ordered
        0   polled   updating         carrying out the update and its triggers
        0   polled   update-failed    the update failed, and was rolled back: no space; 
        10  wake     preparing        staging 1 change: /a (missing)
                     -> prepare 3: 1 operations
        10  accepted preparing        staging 1 change: /a (missing)
        10  polled   updating         carrying out 1 change: /a (missing)
                     -> commit 3
        10  accepted updating         the update was ordered
        10  polled   updating         carrying out the update and its triggers
        10  polled   update-stuck     the update failed, and could not be rolled back: r
        10  assigned preparing        staging 1 change: /a (missing)
                     -> prepare 4: 1 operations
    "#]]);
}

#[test]
fn calls_that_fail_are_made_again_with_the_same_id() {
    let mut script = Script::scanning(image("base", &[("/a", "1")]), &[]);
    script.refuse(FailureKind::Unreachable, "no answer");
    script.wait(1);
    script.refuse(FailureKind::Busy, "scanning");
    script.wait(2);
    script.accept();
    script.fetched(1, Some(FetchFailure::Sources("images:6971 is down".into())));
    script.poll();
    script.wait(10);
    script.refuse(FailureKind::Refused, "not allowed");
    script.wait(10);
    script.wait(10);
    script.check(expect![[r#"
        0   assigned connecting       not reached yet
                     -> poll for all
        0   polled   rescanning       reading the new scan
        0   polled   fetching         fetching 1 object (1 byte)
                     -> fetch 1: 1
        0   failed   fetching         fetching 1 object (1 byte); trying again, because:
        1   wake     fetching         fetching 1 object (1 byte)
                     -> fetch 1: 1
        1   failed   fetching         fetching 1 object (1 byte); trying again, because:
        3   wake     fetching         fetching 1 object (1 byte)
                     -> fetch 1: 1
        3   accepted fetching         fetching 1 object (1 byte)
        3   polled   fetch-failed     no source gave all objects: images:6971 is down; w
        13  wake     fetching         fetching 1 object (1 byte)
                     -> fetch 2: 1
        13  failed   fetch-failed     the machine refused to fetch: not allowed; will be
        23  wake     fetch-failed     the machine refused to fetch: not allowed; will be
        33  wake     fetching         fetching 1 object (1 byte)
                     -> fetch 3: 1
    "#]]);
}

/// For example because an earlier release of subd cannot take the filter.
#[test]
fn a_sub_that_refuses_the_settings_of_its_image_has_failed_within_a_minute() {
    let mut script = Script::new(image("base", &[("/a", "1")]));
    script.poll();
    for _ in 0..60 {
        if script.called.is_some() {
            script.refuse(FailureKind::Refused, "line 2: `/b(` is too large");
        }
        script.wait(1);
    }
    assert_eq!(script.sub.status(), Status::UpdateFailed);
    let detail =
        "setting the scan filter of base; trying again, because: line 2: `/b(` is too large";
    assert_eq!(script.sub.detail(), detail);
    // It gets them as soon as it takes them.
    script.wait(30);
    let ImageState::Ready(image) = script.image.clone() else { panic!("the image is ready") };
    let Some(Call::SetConfiguration(request)) = script.accept() else { panic!("nothing is set") };
    assert_eq!(request.scan.as_ref(), Some(&image.scan));
    script.reply.scope = Scope::of(&image.scan, &script.reply.exclusions);
    script.scan(&[]);
    script.poll();
    assert_eq!(script.sub.status(), Status::Fetching);
}

#[test]
fn a_staged_update_that_was_lost_is_staged_again() {
    let mut script = Script::scanning(image("base", &[]), &[("/a", "1")]);
    script.accept();
    script.reply.activity = Activity::Prepared { update_id: 1 };
    script.poll();
    script.refuse(FailureKind::NotFound, "nothing is staged");
    script.reply.activity = Activity::Idle;
    script.poll();
    script.wait(1);
    script.refuse(FailureKind::Stale, "the tree has changed");
    script.scan(&[("/b", "1")]);
    script.poll();
    script.wait(2);
    script.check(expect![[r#"
        0   assigned connecting       not reached yet
                     -> poll for all
        0   polled   rescanning       reading the new scan
        0   polled   preparing        staging 1 change: /a (extra)
                     -> prepare 1: 1 operations
        0   accepted preparing        staging 1 change: /a (extra)
        0   polled   updating         carrying out 1 change: /a (extra)
                     -> commit 1
        0   failed   preparing        staging 1 change: /a (extra); trying again, becaus
        0   polled   preparing        staging 1 change: /a (extra); trying again, becaus
        1   wake     preparing        staging 1 change: /a (extra)
                     -> prepare 2: 1 operations
        1   failed   preparing        staging 1 change: /a (extra); trying again, becaus
        1   polled   preparing        staging 1 change: /b (extra)
                     -> prepare 3: 1 operations
        3   wake     preparing        staging 1 change: /b (extra)
    "#]]);
}

#[test]
fn a_restarted_sub_is_another_one() {
    let mut script = Script::scanning(image("base", &[]), &[("/a", "1")]);
    script.accept();
    script.reply.activity = Activity::Prepared { update_id: 1 };
    script.poll();
    let failure = Failure { kind: FailureKind::Unreachable, text: "reset".into() };
    script.step("lost", Event::PollFailed(script.polled, failure));
    script.refuse(FailureKind::Unreachable, "reset");
    script.wait(1);
    script.reply.version = SubVersion { instance: 8, generation: 1, status: 1 };
    script.reply.activity = Activity::Idle;
    script.poll();
    script.wait(1);
    script.check(expect![[r#"
        0   assigned connecting       not reached yet
                     -> poll for all
        0   polled   rescanning       reading the new scan
        0   polled   preparing        staging 1 change: /a (extra)
                     -> prepare 1: 1 operations
        0   accepted preparing        staging 1 change: /a (extra)
        0   polled   updating         carrying out 1 change: /a (extra)
                     -> commit 1
        0   lost     unreachable      reset
        0   failed   unreachable      reset
        1   wake     unreachable      reset
        1   polled   preparing        staging 1 change: /a (extra)
                     -> prepare 2: 1 operations
        2   wake     preparing        staging 1 change: /a (extra)
    "#]]);
}

#[test]
fn an_answer_to_a_poll_that_leaves_out_what_is_needed_is_asked_for_in_full_once() {
    let mut script = Script::scanning(image("base", &[]), &[]);
    script.reply.version.instance = 9;
    script.reply.scan = None;
    script.poll();
    script.poll();
    script.wait(1);
    script.scan(&[]);
    script.poll();
    script.check(expect![[r#"
        0   assigned connecting       not reached yet
                     -> poll for all
        0   polled   rescanning       reading the new scan
        0   polled   synced           equals base
        0   polled   synced           equals base
                     -> poll for all
        0   polled   poll-failed      the answer to a poll for everything lacks the scan
        1   wake     poll-failed      the answer to a poll for everything lacks the scan
                     -> poll for all
        1   polled   synced           equals base
    "#]]);
}

#[test]
fn each_status_without_an_update_says_why() {
    let mut lines = String::new();
    let mut show = |what: &str, script: &Script| {
        let detail = script.sub.detail().replace("; ", "\n  ; ").replace(", the", "\n  , the");
        lines.push_str(&format!("{what}: {}\n  {detail}\n", script.sub.status()));
    };
    let files: Vec<(String, String)> =
        (0..150).map(|number| (format!("/f{number}"), "x".to_owned())).collect();
    let files: Vec<(&str, &str)> =
        files.iter().map(|(path, content)| (path.as_str(), content.as_str())).collect();

    let mut script = Script::scanning(image("base", &[]), &files);
    show("removes all", &script);
    script.step("cleared", Event::Ordered(SubOrder::ClearSafety));
    show("cleared", &script);
    script.called = None;
    script.scan(&files[1..]);
    script.poll();
    show("another plan", &script);

    let mut script = Script::scanning(image("base", &[("/a", "1")]), &[]);
    script.called = None;
    let machine = Machine { hostname: "web".into(), disable_updates: true, ..Machine::default() };
    let image_again = script.image.clone();
    let (machine, planned) = (Arc::new(machine), ImageState::Undefined);
    script
        .step("assigned", Event::Assigned { machine, image: image_again, planned, rollback: None });
    show("DisableUpdates", &script);

    let mut script = Script::new(image("base", &[("/a", "1")]));
    let ImageState::Ready(wanted) = script.image.clone() else { unreachable!() };
    script.reply.scope = Scope::of(&wanted.scan, &script.reply.exclusions);
    script.reply.space = FreeSpace { free_bytes: 100, free_inodes: 1_000 };
    script.scan(&[]);
    script.poll();
    show("full disk", &script);

    let mut script = Script::scanning(image("base", &[("/a", "1")]), &[("/a", "1")]);
    script.reply.trigger_failures = vec![TriggerFailure {
        service: "ssh".into(),
        verb: "start".into(),
        output: "many words\nexit status 1\n".into(),
    }];
    script.poll();
    show("failed trigger", &script);

    let mut script = Script::new(ImageState::Undefined);
    script.poll();
    show("no image", &script);
    script.image = ImageState::Missing("not uploaded".into());
    script.assign();
    show("missing image", &script);
    expect![[r#"
        removes all: unsafe-update
          it would remove 150 of 150 entries
          , the image has 0 entries
          , the machine 150
          ; if that is intended: domtool clear-safety-shutoff web
        cleared: preparing
          staging 150 changes
        another plan: unsafe-update
          it would remove 149 of 149 entries
          , the image has 0 entries
          , the machine 149
          ; if that is intended: domtool clear-safety-shutoff web
        DisableUpdates: updates-disabled
          1 change: /a (missing)
          ; the machine database says DisableUpdates
        full disk: insufficient-space
          1 object need 4.0 kB and as many inodes
          ; 100 bytes and 1000 inodes are free
        failed trigger: trigger-failed
          equals base, but start ssh failed: many words | exit status 1
          ; to run them again: domtool retry web
        no image: image-undefined
          the machine database names no image for it
        missing image: image-not-ready
          not uploaded
    "#]]
    .assert_eq(&lines);
}

#[test]
fn prefetched_objects_stay_until_no_image_is_planned() {
    let mut script = Script::scanning(image("base", &[("/a", "1")]), &[("/a", "1")]);
    script.planned = ImageState::Missing("it is being loaded".into());
    script.assign();
    script.cache(&["2", "3"]);
    script.poll();
    assert_eq!(script.sub.detail(), "equals base; the planned image: it is being loaded");
    assert!(script.called.is_none(), "{:?}", script.called);
    script.planned = image("next", &[("/a", "2")]);
    script.assign();
    assert_eq!(script.sub.detail(), "equals base; has all objects of next, which comes next");
    // Neither image needs this object any more.
    let cleanup = |content| Call::Cleanup(CleanupRequest { objects: vec![object(content)] });
    assert_eq!(script.accept(), Some(cleanup("3")));
    script.cache(&["2"]);
    script.poll();
    assert!(script.called.is_none(), "{:?}", script.called);
    script.planned = ImageState::Undefined;
    script.assign();
    assert_eq!(script.accept(), Some(cleanup("2")));
}

#[test]
fn a_failed_cleanup_is_repeated() {
    let mut script = Script::scanning(image("base", &[("/a", "1")]), &[("/a", "1")]);
    script.cache(&["2"]);
    script.poll();
    script.refuse(FailureKind::Busy, "busy");
    assert!(script.called.is_none(), "at once: {:?}", script.called);
    script.wait(1);
    let call = script.accept();
    assert_eq!(call, Some(Call::Cleanup(CleanupRequest { objects: vec![object("2")] })));
    // The plan of an update that was carried out is not pending.
    script.wait(60);
    script.poll();
    assert!(script.called.is_none(), "{:?}", script.called);
}

#[test]
fn orders_share_what_they_contain_with_the_plan() {
    let mut script = Script::scanning(image("base", &[("/a", "1")]), &[]);
    let planned = script.sub.plan.made.clone().unwrap();
    let Some(Call::Fetch(request)) = script.accept() else { panic!("nothing to fetch") };
    assert!(Arc::ptr_eq(&request.objects, &planned.objects));
    script.cache(&["1"]);
    script.fetched(request.fetch_id, None);
    script.poll();
    let planned = script.sub.plan.made.clone().unwrap();
    let Some(Call::Prepare(request, _)) = script.accept() else { panic!("nothing to prepare") };
    assert!(Arc::ptr_eq(&request.plan, &planned.plan));
}

#[test]
fn reports_beyond_measure_are_not_kept() {
    let mut script = Script::scanning(image("base", &[("/a", "1")]), &[]);
    let long = "x".repeat(5 << 20);
    script.reply.trigger_failures =
        vec![TriggerFailure { service: "web".to_owned(), verb: "start".to_owned(), output: long }];
    script.poll();
    assert_eq!(script.sub.status(), Status::PollFailed);
    assert_eq!(
        script.sub.detail(),
        "its report takes 5.2 MB without its object cache: at most 4.1 MB are taken"
    );
    script.reply.trigger_failures.clear();
    let objects = (0..(1_u64 << 20) + 1).map(|number| {
        let mut digest = [0; 32];
        digest[..8].copy_from_slice(&number.to_be_bytes());
        ObjectId::Blake3(digest)
    });
    script.reply.cache = Some(CacheReport::Full(objects.collect()));
    script.wait(60);
    script.poll();
    assert_eq!(script.sub.status(), Status::PollFailed);
    assert_eq!(script.sub.detail(), "its object cache has more than 1048576 objects");
}

#[test]
fn late_and_repeated_answers_change_nothing() {
    let mut script = Script::scanning(image("base", &[("/a", "1")]), &[]);
    let before = (script.sub.status(), script.sub.detail().to_owned());
    let failure = || Failure { kind: FailureKind::Refused, text: "late".into() };
    for event in [
        Event::Polled(RequestId(1), Box::new(script.reply.clone())),
        Event::PollFailed(RequestId(1), failure()),
        Event::TreeRead(RequestId(99), tree(&[("/z", "z")]), None),
        Event::TreeFailed(RequestId(99), failure()),
        Event::Planned(RequestId(99), Err("late".into())),
        Event::Accepted(RequestId(99)),
        Event::CallFailed(RequestId(99), failure()),
        Event::Ordered(SubOrder::ClearSafety),
        Event::Wake,
    ] {
        script.step("late", event);
        assert_eq!((script.sub.status(), script.sub.detail().to_owned()), before);
    }
    assert!(script.called.is_some(), "the call is still awaited");
}
