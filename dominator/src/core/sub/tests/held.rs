//! Updates that the machine itself does not allow, or must finish first.
// tidy: core

use core::time::Duration;

use api::subd::{Activity, Alarm, Paused, UpdateOutcome};
use expect_test::expect;
use model::image::ImageName;
use model::tree::Time;

use super::super::*;
use super::script::{Script, image};
use model::scope::Scope;

/// A sub that has the object of the only change, before the update is staged.
pub(super) fn ready() -> Script {
    let mut script = Script::new(image("base", &[("/a", "1")]));
    script.cache(&["1"]);
    let ImageState::Ready(image) = script.image.clone() else { panic!("the image is ready") };
    script.reply.scope = Scope::of(&image.scan, &script.reply.exclusions);
    script
}

fn paused(reason: &str) -> Option<Paused> {
    let until = Time { seconds: 1_700_000_000, nanoseconds: 0 };
    Some(Paused { until, reason: reason.to_owned() })
}

#[test]
fn a_machine_that_takes_orders_from_another_dominator_gets_none() {
    let mut script = ready();
    script.other_holder = Some("it takes orders from the dominator b".to_owned());
    script.scan(&[]);
    script.poll();
    assert_eq!(script.sub.held_by_other(), Some("it takes orders from the dominator b"));
    script.wait(59);
    script.other_holder = None;
    script.wait(1);
    assert_eq!(script.sub.held_by_other(), None);
    // Half a minute later the machine is asked again before the next order.
    let Some(Call::Prepare(request, _)) = script.accept() else { panic!("nothing to prepare") };
    script.other_holder = Some("it takes orders from the dominator c".to_owned());
    script.wait(31);
    script.reply.activity = Activity::Prepared { update_id: request.update_id };
    script.poll();
    script.check(expect![[r#"
        0   assigned connecting       not reached yet
                     -> poll for all
        0   polled   rescanning       reading the new scan
        0   polled   held             it takes orders from the dominator b
        59  wake     held             it takes orders from the dominator b
        60  wake     preparing        staging 1 change: /a (missing)
                     -> prepare 1: 1 operations
        60  accepted preparing        staging 1 change: /a (missing)
        91  wake     preparing        staging 1 change: /a (missing)
        91  polled   held             it takes orders from the dominator c
    "#]]);
}

#[test]
fn a_machine_that_does_not_allow_an_update_is_asked_again_in_a_minute() {
    let mut script = ready();
    script.scan(&[]);
    script.poll();
    script.refuse(FailureKind::Held, "the database is being moved");
    script.scan(&[("/b", "1")]);
    script.poll();
    script.wait(59);
    script.wait(1);
    let Some(Call::Prepare(request, _)) = script.accept() else { panic!("nothing to prepare") };
    script.reply.activity = Activity::Prepared { update_id: request.update_id };
    script.poll();
    script.refuse(FailureKind::Held, "the database is being moved");
    script.wait(60);
    script.check(expect![[r#"
        0   assigned connecting       not reached yet
                     -> poll for all
        0   polled   rescanning       reading the new scan
        0   polled   preparing        staging 1 change: /a (missing)
                     -> prepare 1: 1 operations
        0   failed   held             the machine refused to prepare the update: the dat
        0   polled   held             the machine refused to prepare the update: the dat
        59  wake     held             the machine refused to prepare the update: the dat
        60  wake     preparing        staging 2 changes
                     -> prepare 2: 2 operations
        60  accepted preparing        staging 2 changes
        60  polled   updating         carrying out 2 changes
                     -> commit 2
        60  failed   held             the machine refused to carry out the update: the d
        120 wake     updating         carrying out 2 changes
                     -> commit 2
    "#]]);
}

#[test]
fn nothing_is_staged_on_a_paused_machine_and_updates_continue_at_once_after_the_pause() {
    let mut script = ready();
    script.reply.paused = paused("a demonstration");
    script.scan(&[]);
    script.poll();
    assert_eq!(
        script.sub.detail(),
        "1 change: /a (missing); paused on the machine itself until 2023-11-14T22:13:20Z: a \
         demonstration"
    );
    script.reply.paused = None;
    script.poll();
    // The pause began after the update was staged.
    script.refuse(FailureKind::Held, "paused");
    script.reply.paused = paused("again");
    script.poll();
    script.reply.paused = None;
    script.poll();
    script.check(expect![[r#"
        0   assigned connecting       not reached yet
                     -> poll for all
        0   polled   rescanning       reading the new scan
        0   polled   held             1 change: /a (missing); paused on the machine itse
        0   polled   preparing        staging 1 change: /a (missing)
                     -> prepare 1: 1 operations
        0   failed   held             the machine refused to prepare the update: paused;
        0   polled   held             the machine refused to prepare the update: paused;
        0   polled   preparing        staging 1 change: /a (missing)
                     -> prepare 1: 1 operations
    "#]]);
}

#[test]
fn an_image_whose_health_check_failed_is_retried_only_by_an_order() {
    let mut script = ready();
    script.scan(&[]);
    script.poll();
    script.commit();
    script.ended(1, UpdateOutcome::Undone("exit code 1".into()), Some(4));
    script.poll();
    script.scan(&[("/drift", "2")]);
    script.poll();
    script.wait(3_600);
    assert_eq!(
        script.sub.detail(),
        "the update to base was undone, because its health check failed: exit code 1; require \
         another image, or: domtool retry web; its former image is not known, so drift is not \
         repaired"
    );
    // A restarted dominator learns it from the machine.
    let mut restarted = ready();
    restarted.scan(&[]);
    restarted.ended(1, UpdateOutcome::Undone("exit code 1".into()), Some(4));
    restarted.poll();
    assert_eq!(restarted.sub.status(), Status::HealthFailed);
    assert!(restarted.called.is_none());
    // The retry counts once.
    assert!(script.sub.retry());
    assert!(!script.sub.retry(), "there is nothing else to let go");
    script.wait(0);
    script.commit();
    script.ended(2, UpdateOutcome::Undone("exit code 2".into()), Some(5));
    script.poll();
    // An update to another image needs no retry.
    script.image = image("other", &[("/a", "1")]);
    script.assign();
    script.check(expect![[r#"
        0   assigned connecting       not reached yet
                     -> poll for all
        0   polled   rescanning       reading the new scan
        0   polled   preparing        staging 1 change: /a (missing)
                     -> prepare 1: 1 operations
        0   accepted preparing        staging 1 change: /a (missing)
        0   polled   updating         carrying out 1 change: /a (missing)
                     -> commit 1
        0   accepted updating         the update was ordered
        0   polled   updating         carrying out the update and its triggers
        0   polled   health-failed    the update to base was undone, because its health 
        0   polled   health-failed    the update to base was undone, because its health 
        3600 wake     health-failed    the update to base was undone, because its health 
        3600 wake     preparing        staging 2 changes
                     -> prepare 2: 2 operations
        3600 accepted preparing        staging 2 changes
        3600 polled   updating         carrying out 2 changes
                     -> commit 2
        3600 accepted updating         the update was ordered
        3600 polled   updating         carrying out the update and its triggers
        3600 polled   health-failed    the update to base was undone, because its health 
        3600 assigned preparing        staging 2 changes
                     -> prepare 3: 2 operations
    "#]]);
}

#[test]
fn an_update_of_another_machine_says_nothing_of_this_one() {
    let base = image("base", &[("/a", "1")]);
    let mut script = Script::new(base.clone());
    let (update_id, image) = (1, ImageName::new("base").unwrap());
    script.sub.remember_undone(UndoneUpdate { update_id, image, why: "exit code 1".into() });
    // Another machine has got its address, and has the image.
    let right = script.reply.clone();
    script.mismatch = Some("answers as web2".into());
    script.reply.version.instance += 1;
    script.ended(5, UpdateOutcome::Done, Some(4));
    script.poll();
    assert_eq!(script.sub.status(), Status::WrongMachine);
    // The right one, which was installed anew meanwhile, is not updated to that image again.
    script.mismatch = None;
    script.reply = right;
    script.reply.scope = Scope::of(&base.ready().unwrap().scan, &script.reply.exclusions);
    script.scan(&[]);
    script.poll();
    assert_eq!(script.sub.status(), Status::HealthFailed);
    assert!(script.called.is_none());
}

#[test]
fn a_machine_that_was_put_back_is_kept_at_its_former_image() {
    let (old, new) = (image("old", &[("/a", "1")]), image("base", &[("/a", "2")]));
    let why = || UpdateOutcome::Undone("exit code 1".into());
    let put_back = |script: &mut Script| {
        script.reply.scope = Scope::of(&old.ready().unwrap().scan, &script.reply.exclusions);
        script.former = old.ready().cloned();
        script.reply.last_image = Some(ImageName::new("old").unwrap());
        script.cache(&["1", "2"]);
    };
    let mut script = Script::new(new.clone());
    put_back(&mut script);
    script.scan(&[("/a", "1")]);
    script.poll();
    script.commit();
    script.ended(1, why(), Some(4));
    // What a trigger of the new image has left.
    script.scan(&[("/a", "1"), ("/cache", "2")]);
    script.poll();
    script.commit();
    let repaired = |script: &mut Script| {
        script.ended(2, UpdateOutcome::Done, Some(5));
        let last = script.reply.last_update.as_mut().unwrap();
        last.image = ImageName::new("old").unwrap();
        script.reply.last_image = Some(last.image.clone());
        script.scan(&[("/a", "1")]);
        script.poll();
    };
    repaired(&mut script);
    let detail = "the update to base was undone, because its health check failed: exit code 1; \
         require another image, or: domtool retry web; equals old";
    assert_eq!((script.sub.status(), script.sub.detail()), (Status::HealthFailed, detail));
    // A dominator that was restarted has it from its history.
    let mut restarted = Script::new(new);
    put_back(&mut restarted);
    let (update_id, image) = (1, ImageName::new("base").unwrap());
    restarted.sub.remember_undone(UndoneUpdate { update_id, image, why: "exit code 1".into() });
    repaired(&mut restarted);
    assert_eq!((restarted.sub.status(), restarted.sub.detail()), (Status::HealthFailed, detail));
    assert!(restarted.sub.can_retry());
    // Its former image fails too: nothing more is tried.
    script.accept();
    script.scan(&[("/a", "9")]);
    script.poll();
    script.commit();
    script.ended(3, why(), Some(6));
    script.reply.last_update.as_mut().unwrap().image = ImageName::new("old").unwrap();
    script.poll();
    script.check(expect![[r#"
        0   assigned connecting       not reached yet
                     -> poll for all
        0   polled   rescanning       reading the new scan
        0   polled   preparing        staging 1 change: /a (content)
                     -> prepare 1: 1 operations
        0   accepted preparing        staging 1 change: /a (content)
        0   polled   updating         carrying out 1 change: /a (content)
                     -> commit 1
        0   accepted updating         the update was ordered
        0   polled   updating         carrying out the update and its triggers
        0   polled   preparing        repairing old: staging 1 change: /cache (extra)
                     -> prepare 2: 1 operations
        0   accepted preparing        repairing old: staging 1 change: /cache (extra)
        0   polled   updating         repairing old: carrying out 1 change: /cache (extr
                     -> commit 2
        0   accepted updating         the update was ordered
        0   polled   updating         carrying out the update and its triggers
        0   polled   health-failed    the update to base was undone, because its health 
                     -> cleanup of 2
        0   accepted health-failed    the update to base was undone, because its health 
        0   polled   preparing        repairing old: staging 1 change: /a (content)
                     -> prepare 3: 1 operations
        0   accepted preparing        repairing old: staging 1 change: /a (content)
        0   polled   updating         repairing old: carrying out 1 change: /a (content)
                     -> commit 3
        0   accepted updating         the update was ordered
        0   polled   updating         carrying out the update and its triggers
        0   polled   health-failed    the update to base was undone, because its health 
    "#]]);
    assert_eq!(script.sub.status(), Status::HealthFailed);
    // The retry is for the required image.
    assert!(script.sub.retry());
    script.wait(0);
    assert_eq!(script.sub.status(), Status::Preparing);
    let Some(Call::Prepare(request, _)) = script.accept() else { panic!("nothing to prepare") };
    assert_eq!(request.image.as_str(), "base");
}

#[test]
fn an_update_that_can_neither_be_finished_nor_rolled_back_is_left_to_the_machine() {
    let mut script = ready();
    script.scan(&[]);
    script.poll();
    script.commit();
    script.ended(1, UpdateOutcome::Stuck("read-only".into()), None);
    script.reply.alarms = vec![Alarm::JournalStuck("read-only".into())];
    script.poll();
    script.wait(3_600);
    script.reply.alarms = Vec::new();
    script.ended(1, UpdateOutcome::Done, Some(3));
    script.scan(&[("/a", "1")]);
    script.poll();
    script.check(expect![[r#"
        0   assigned connecting       not reached yet
                     -> poll for all
        0   polled   rescanning       reading the new scan
        0   polled   preparing        staging 1 change: /a (missing)
                     -> prepare 1: 1 operations
        0   accepted preparing        staging 1 change: /a (missing)
        0   polled   updating         carrying out 1 change: /a (missing)
                     -> commit 1
        0   accepted updating         the update was ordered
        0   polled   updating         carrying out the update and its triggers
        0   polled   update-stuck     the update cannot be closed: read-only; subd tries
        3600 wake     update-stuck     the update cannot be closed: read-only; subd tries
        3600 polled   synced           equals base
                     -> cleanup of 1
    "#]]);
}

#[test]
fn a_machine_that_comes_up_again_is_rebooting_for_a_quarter_of_an_hour() {
    let mut script = ready();
    script.scan(&[]);
    script.poll();
    script.commit();
    script.ended(1, UpdateOutcome::Done, None);
    script.reply.last_update.as_mut().unwrap().awaits_boot = true;
    script.poll();
    let silence = |script: &mut Script, seconds: u64| {
        script.wait(seconds);
        let text = "connection refused".to_owned();
        let failure = Failure { kind: FailureKind::Unreachable, text };
        script.step("silent", Event::PollFailed(script.polled, failure));
    };
    silence(&mut script, 10);
    silence(&mut script, 900);
    script.wait(30);
    script.scan(&[("/a", "1")]);
    script.ended(1, UpdateOutcome::Done, Some(3));
    script.poll();
    script.check(expect![[r#"
        0   assigned connecting       not reached yet
                     -> poll for all
        0   polled   rescanning       reading the new scan
        0   polled   preparing        staging 1 change: /a (missing)
                     -> prepare 1: 1 operations
        0   accepted preparing        staging 1 change: /a (missing)
        0   polled   updating         carrying out 1 change: /a (missing)
                     -> commit 1
        0   accepted updating         the update was ordered
        0   polled   updating         carrying out the update and its triggers
        0   polled   rebooting        waiting for the reboot of the update
        10  wake     rebooting        waiting for the reboot of the update
        10  silent   rebooting        rebooting; no answer yet: connection refused
        910 wake     unreachable      connection refused
        910 silent   unreachable      connection refused
        940 wake     unreachable      connection refused
        940 polled   synced           equals base
                     -> cleanup of 1
    "#]]);
}

#[test]
fn a_reboot_that_could_not_be_ordered_is_a_failed_trigger() {
    let mut script = Script::scanning(image("base", &[("/a", "1")]), &[("/a", "1")]);
    script.ended(1, UpdateOutcome::Done, Some(3));
    script.reply.last_update.as_mut().unwrap().awaits_boot = true;
    script.poll();
    assert_eq!(script.sub.status(), Status::Rebooting);
    script.reply.trigger_failures = vec![api::subd::TriggerFailure {
        service: "reboot".into(),
        verb: "reboot".into(),
        output: "Access denied".into(),
    }];
    script.poll();
    assert_eq!(script.sub.status(), Status::TriggerFailed);
    assert!(script.sub.wake_at().is_none_or(|at| at > Duration::ZERO));
}

#[test]
fn calls_that_go_on_failing_at_the_machine_are_a_failure_until_one_is_accepted() {
    let mut script = Script::scanning(image("base", &[("/a", "1")]), &[]);
    for pause in [1, 2, 4, 8, 16] {
        script.refuse(FailureKind::Unavailable, "cannot be recorded: I/O error");
        script.wait(pause);
    }
    script.accept();
    script.fetched(1, None);
    script.poll();
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
        3   failed   fetching         fetching 1 object (1 byte); trying again, because:
        7   wake     fetching         fetching 1 object (1 byte)
                     -> fetch 1: 1
        7   failed   fetching         fetching 1 object (1 byte); trying again, because:
        15  wake     fetching         fetching 1 object (1 byte)
                     -> fetch 1: 1
        15  failed   fetch-failed     fetching 1 object (1 byte); trying again, because:
        31  wake     fetch-failed     fetching 1 object (1 byte); trying again, because:
                     -> fetch 1: 1
        31  accepted fetching         fetching 1 object (1 byte)
        31  polled   fetch-failed     the fetch brought no missing objects; will be trie
    "#]]);
}

#[test]
fn a_read_only_root_is_a_failure_at_once_and_no_call_is_made() {
    let mut script = Script::scanning(image("base", &[("/a", "1")]), &[("/a", "1")]);
    script.reply.alarms = vec![Alarm::ReadOnly];
    script.poll();
    script.scan(&[]);
    script.poll();
    script.reply.alarms.clear();
    script.poll();
    script.check(expect![[r#"
        0   assigned connecting       not reached yet
                     -> poll for all
        0   polled   rescanning       reading the new scan
        0   polled   synced           equals base
        0   polled   synced           equals base
        0   polled   update-failed    its root is mounted read-only: nothing can be chan
        0   polled   fetching         fetching 1 object (1 byte)
                     -> fetch 1: 1
    "#]]);
}
