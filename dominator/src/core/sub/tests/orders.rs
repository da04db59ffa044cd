//! Orders of operators.
// tidy: core

use api::dominator::orders::UpdatePause;
use api::subd::{Activity, SubVersion, TriggerFailure, UpdateOutcome};
use expect_test::expect;
use model::tree::Time;

use super::super::*;
use super::held::ready;
use super::script::{Script, image};
use crate::core::identity::IdentityVerdict;

fn pause(until: i64) -> Option<Arc<UpdatePause>> {
    let at = |seconds| Time { seconds, nanoseconds: 0 };
    let (reason, who) = ("works".to_owned(), "ann".to_owned());
    Some(Arc::new(UpdatePause { until: at(until), reason, who, since: at(0) }))
}

#[test]
fn obstacles_to_an_update_are_listed() {
    let mut script = Script::scanning(image("base", &[("/a", "1")]), &[]);
    let update_obstacles = |script: &Script| {
        script.sub.update_obstacles(&script.sub.machine, script.sub.required().as_ref())
    };
    assert_eq!(update_obstacles(&script), []);
    script.step("pause", Event::Ordered(SubOrder::Pause(pause(100))));
    let paused = "updates are paused until 1970-01-01T00:01:40Z by ann: works".to_owned();
    assert_eq!(update_obstacles(&script), [(Status::Paused, paused)]);
    script.step("resume", Event::Ordered(SubOrder::Pause(None)));
    let mismatch = Some("answers as web2".into());
    script.step("wrong", Event::IdentityJudged(IdentityVerdict { number: 1, mismatch }));
    assert_eq!(update_obstacles(&script), [(Status::WrongMachine, "answers as web2".to_owned())]);
}

#[test]
fn a_pause_lets_objects_be_fetched_and_ends_by_itself_or_by_an_order() {
    let mut script = Script::scanning(image("base", &[("/a", "1")]), &[]);
    script.step("pause", Event::Ordered(SubOrder::Pause(pause(100))));
    script.accept();
    script.cache(&["1"]);
    script.fetched(1, None);
    script.poll();
    assert_eq!(
        script.sub.detail(),
        "1 change: /a (missing), all objects are there; updates are paused until \
         1970-01-01T00:01:40Z by ann: works"
    );
    // The clock is read every minute, and at the end of the pause.
    assert_eq!(script.sub.wake_at(), Some(Duration::from_secs(60)));
    script.wait(60);
    assert_eq!(script.sub.wake_at(), Some(Duration::from_secs(100)));
    script.wait(40);
    script.accept();
    script.reply.activity = Activity::Prepared { update_id: 2 };
    script.step("pause", Event::Ordered(SubOrder::Pause(pause(200))));
    script.poll();
    // The staged update expires meanwhile.
    script.ended(2, UpdateOutcome::NotPrepared("expired".into()), None);
    script.poll();
    assert_eq!(script.sub.status(), Status::Paused);
    script.reply.last_update = None;
    script.step("resume", Event::Ordered(SubOrder::Pause(None)));
    script.accept();
    script.reply.activity = Activity::Prepared { update_id: 3 };
    script.poll();
    script.refuse(FailureKind::Cancelled, "the machine was paused");
    script.check(expect![[r#"
        0   assigned connecting       not reached yet
                     -> poll for all
        0   polled   rescanning       reading the new scan
        0   polled   fetching         fetching 1 object (1 byte)
                     -> fetch 1: 1
        0   pause    paused           fetching 1 object (1 byte); updates are paused unt
        0   accepted paused           fetching 1 object (1 byte); updates are paused unt
        0   polled   paused           1 change: /a (missing), all objects are there; upd
        60  wake     paused           1 change: /a (missing), all objects are there; upd
        100 wake     preparing        staging 1 change: /a (missing)
                     -> prepare 2: 1 operations
        100 accepted preparing        staging 1 change: /a (missing)
        100 pause    paused           1 change: /a (missing), all objects are there; upd
        100 polled   paused           1 change: /a (missing), all objects are there; upd
        100 polled   paused           1 change: /a (missing), all objects are there; upd
        100 resume   preparing        staging 1 change: /a (missing)
                     -> prepare 3: 1 operations
        100 accepted preparing        staging 1 change: /a (missing)
        100 polled   updating         carrying out 1 change: /a (missing)
                     -> commit 3
        100 failed   updating         carrying out 1 change: /a (missing)
                     -> commit 3
    "#]]);
}

#[test]
fn setting_the_clock_ends_or_restores_a_pause() {
    let mut script = Script::scanning(image("base", &[("/a", "1")]), &[("/a", "0")]);
    script.step("pause", Event::Ordered(SubOrder::Pause(pause(100))));
    script.accept();
    script.cache(&["1"]);
    script.fetched(1, None);
    script.poll();
    script.clock_error = 99;
    script.wait(1);
    script.clock_error = 0;
    script.wait(1);
    script.check(expect![[r#"
        0   assigned connecting       not reached yet
                     -> poll for all
        0   polled   rescanning       reading the new scan
        0   polled   fetching         fetching 1 object (1 byte)
                     -> fetch 1: 1
        0   pause    paused           fetching 1 object (1 byte); updates are paused unt
        0   accepted paused           fetching 1 object (1 byte); updates are paused unt
        0   polled   paused           1 change: /a (content), all objects are there; upd
        1   wake     preparing        staging 1 change: /a (content)
                     -> prepare 2: 1 operations
        2   wake     paused           1 change: /a (content), all objects are there; upd
    "#]]);
}

#[test]
fn a_synced_machine_shows_its_pause_and_gets_no_update_without_changes() {
    let mut script = Script::scanning(image("base", &[("/a", "1")]), &[("/a", "1")]);
    script.step("pause", Event::Ordered(SubOrder::Pause(pause(100))));
    script.reply.last_image = Some("former".parse().unwrap());
    script.poll();
    assert_eq!(
        script.sub.detail(),
        "equals base; updates are paused until 1970-01-01T00:01:40Z by ann: works"
    );
    script.wait(100);
    script.check(expect![[r#"
        0   assigned connecting       not reached yet
                     -> poll for all
        0   polled   rescanning       reading the new scan
        0   polled   synced           equals base
        0   pause    synced           equals base; updates are paused until 1970-01-01T0
        0   polled   synced           equals base; updates are paused until 1970-01-01T0
        100 wake     preparing        staging no change but the name of the image and it
                     -> prepare 1: 0 operations
    "#]]);
}

#[test]
fn a_forced_plan_is_staged_again_once() {
    let mut script = ready();
    assert!(!script.sub.force_disruptive(), "nothing is pending");
    script.scan(&[]);
    script.poll();
    let Some(Call::Prepare(request, _)) = script.accept() else { panic!() };
    assert!(!request.force_disruption);
    script.reply.activity = Activity::Prepared { update_id: 1 };
    script.poll();
    assert!(!script.sub.force_disruptive(), "it is told to carry it out");
    script.refuse(FailureKind::Held, "somebody is logged in");
    script.wait(1);
    script.step("forced", Event::Ordered(SubOrder::ForceDisruptive));
    let Some((_, Some(Call::Prepare(request, _)))) = &script.called else { panic!() };
    assert!(request.force_disruption);
    script.commit();
    script.ended(2, UpdateOutcome::RolledBack("no space".into()), Some(4));
    script.poll();
    script.wait(10);
    let Some((_, Some(Call::Prepare(request, _)))) = &script.called else { panic!() };
    assert!(!request.force_disruption, "it was forced once");
    script.check(expect![[r#"
        0   assigned connecting       not reached yet
                     -> poll for all
        0   polled   rescanning       reading the new scan
        0   polled   preparing        staging 1 change: /a (missing)
                     -> prepare 1: 1 operations
        0   accepted preparing        staging 1 change: /a (missing)
        0   polled   updating         carrying out 1 change: /a (missing)
                     -> commit 1
        0   failed   held             the machine refused to carry out the update: someb
        1   wake     held             the machine refused to carry out the update: someb
        1   forced   preparing        staging 1 change: /a (missing)
                     -> prepare 2: 1 operations
        1   accepted preparing        staging 1 change: /a (missing)
        1   polled   updating         carrying out 1 change: /a (missing)
                     -> commit 2
        1   accepted updating         the update was ordered
        1   polled   updating         carrying out the update and its triggers
        1   polled   update-failed    the update failed, and was rolled back: no space; 
        11  wake     preparing        staging 1 change: /a (missing)
                     -> prepare 3: 1 operations
    "#]]);
}

#[test]
fn only_the_pending_plan_is_forced() {
    let mut script = ready();
    script.scan(&[]);
    script.poll();
    script.step("forced", Event::Ordered(SubOrder::ForceDisruptive));
    script.accept();
    script.scan(&[("/b", "2")]);
    script.poll();
    script.poll();
    let Some((_, Some(Call::Prepare(request, _)))) = &script.called else { panic!() };
    assert_eq!((request.plan.operations.len(), request.force_disruption), (2, false));
}

#[test]
fn a_fast_update_polls_and_scans_before_the_status_is_current() {
    let mut script = Script::scanning(image("base", &[("/a", "1")]), &[("/a", "1")]);
    let first = script.sub.watch_reply();
    assert_eq!((first.status, first.is_current), (Status::Synced, true));
    script.step("hurried", Event::Ordered(SubOrder::FastUpdate));
    let asked = script.scan_asked.expect("it is to scan");
    let during = script.sub.watch_reply();
    assert_eq!((during.status, during.is_current), (Status::Rescanning, false));
    assert!(during.version != first.version && script.sub.is_urgent());
    // A second order during the scan causes another scan after it.
    script.step("hurried", Event::Ordered(SubOrder::FastUpdate));
    assert_eq!(script.scan_asked, Some(asked));
    let version = script.reply.version;
    script.step("scanned", Event::Scanned(asked, Ok(version)));
    let again = script.scan_asked.expect("it is to scan once more");
    assert!(again > asked);
    // The report with the result has not arrived yet.
    let version = SubVersion { generation: version.generation + 1, ..version };
    script.step("scanned", Event::Scanned(again, Ok(version)));
    assert!(!script.sub.watch_reply().is_current);
    script.scan(&[]);
    script.cache(&["1"]);
    script.poll();
    assert_eq!(script.sub.watch_reply().status, Status::Preparing);
    assert!(script.sub.watch_reply().is_current && script.sub.is_urgent());
    script.commit();
    script.ended(1, UpdateOutcome::Done, Some(9));
    script.scan(&[("/a", "1")]);
    script.poll();
    assert!(!script.sub.is_urgent(), "it is in place");
    let last = script.sub.watch_reply();
    assert_eq!((last.status, last.is_current), (Status::Synced, true));
    script.check(expect![[r#"
        0   assigned connecting       not reached yet
                     -> poll for all
        0   polled   rescanning       reading the new scan
        0   polled   synced           equals base
        0   hurried  rescanning       scanning at once, as an operator ordered
                     -> scan
        0   hurried  rescanning       scanning at once, as an operator ordered
        0   scanned  rescanning       scanning at once, as an operator ordered
                     -> scan
        0   scanned  rescanning       scanning at once, as an operator ordered
        0   polled   preparing        staging 1 change: /a (missing)
                     -> prepare 1: 1 operations
        0   accepted preparing        staging 1 change: /a (missing)
        0   polled   updating         carrying out 1 change: /a (missing)
                     -> commit 1
        0   accepted updating         the update was ordered
        0   polled   updating         carrying out the update and its triggers
        0   polled   synced           equals base
                     -> cleanup of 1
    "#]]);
}

#[test]
fn a_fast_update_retries_what_failed_but_overrides_no_stop() {
    let mut script = ready();
    script.scan(&[]);
    script.poll();
    script.refuse(FailureKind::Refused, "no");
    assert_eq!(script.sub.status(), Status::UpdateFailed);
    script.step("hurried", Event::Ordered(SubOrder::FastUpdate));
    let asked = script.scan_asked.expect("it is to scan");
    let old = Failure { kind: FailureKind::Refused, text: "no such method".into() };
    script.step("scanned", Event::Scanned(asked, Err(old)));
    assert_eq!(script.sub.status(), Status::Preparing);
    script.accept();
    script.step("brake", Event::Brake(Some("storm".into())));
    script.step("hurried", Event::Ordered(SubOrder::FastUpdate));
    let asked = script.scan_asked.expect("it is to scan");
    assert_eq!(script.sub.status(), Status::Rescanning);
    script.step("scanned", Event::Scanned(asked, Ok(script.reply.version)));
    let end = script.sub.watch_reply();
    assert_eq!((end.status, end.is_current), (Status::UpdatesDisabled, true));
    assert!(!script.sub.is_urgent() && script.called.is_none());
}

#[test]
fn a_fast_update_of_an_unreachable_machine_stays_in_force() {
    let mut script = ready();
    let failure = Failure { kind: FailureKind::Unreachable, text: "reset".into() };
    script.step("silent", Event::PollFailed(script.polled, failure));
    let before = script.polled;
    script.step("hurried", Event::Ordered(SubOrder::FastUpdate));
    assert!(script.polled > before, "it is polled at once");
    let during = script.sub.watch_reply();
    assert_eq!((during.status, during.is_current), (Status::Unreachable, false));
    script.poll();
    assert!(script.scan_asked.is_some());
}

#[test]
fn a_machine_that_is_back_is_known_within_five_seconds_or_at_once_by_order() {
    let mut script = ready();
    assert_eq!(script.poll_wait_ms, 60_000);
    let failure = Failure { kind: FailureKind::Unreachable, text: "reset".into() };
    for seconds in [1, 2, 3, 3] {
        let before = script.polled;
        script.step("silent", Event::PollFailed(before, failure.clone()));
        script.wait(seconds - 1);
        assert_eq!(script.polled, before, "not yet");
        script.wait(1);
        assert!(script.polled > before, "it is polled after {seconds} s");
        assert_eq!(script.poll_wait_ms, 0, "the answer does not wait for news");
    }
    let before = script.polled;
    script.step("silent", Event::PollFailed(before, failure));
    assert!(script.sub.can_retry());
    script.step("retried", Event::Ordered(SubOrder::Retry));
    assert!(script.polled > before, "it is polled at once");
    script.poll();
    script.wait(1);
    assert_eq!(script.poll_wait_ms, 60_000);
}

#[test]
fn the_explanation_names_a_default_image() {
    use api::dominator::explain::ImageSource;
    use api::dominator::orders::DefaultImage;
    let mut script = Script::new(ImageState::Undefined);
    script.poll();
    let nobody = script.sub.explain(script.time()).must_have;
    assert_eq!((nobody.image.as_str(), nobody.source), ("", ImageSource::Nobody));
    let (image_name, who) = ("base".parse().unwrap(), "ann".to_owned());
    let default = DefaultImage { image: image_name, who, since: Time::default() };
    script.step("default", Event::DefaultImage(Some(Arc::new(default.clone()))));
    script.image = image("base", &[]);
    script.assign();
    let by_default = script.sub.explain(script.time()).must_have;
    assert_eq!(by_default.source, ImageSource::Default(default));
    assert_eq!((by_default.image.as_str(), by_default.missing), ("base", None));
    assert_eq!(script.sub.summary(None).required_image, "base");
}

#[test]
fn triggers_that_failed_are_run_again_by_an_order() {
    let mut script = Script::scanning(image("base", &[("/a", "1")]), &[("/a", "1")]);
    assert!(!script.sub.can_retry());
    let (service, verb) = ("web".to_owned(), "start".to_owned());
    let output = "Job for web failed\n\nexit status: 1\nmain: no such file\n".to_owned();
    script.reply.trigger_failures = vec![TriggerFailure { service, verb, output }];
    script.poll();
    assert_eq!(
        script.sub.detail(),
        "equals base, but start web failed: Job for web failed | exit status: 1 | main: no such \
         file; to run them again: domtool retry web"
    );
    assert!(script.sub.can_retry());
    script.step("brake", Event::Brake(Some("works".into())));
    script.step("retry", Event::Ordered(SubOrder::Retry));
    assert!(script.sub.detail().ends_with("; they are run again when updates are not held back"));
    script.step("release", Event::Brake(None));
    script.refuse(FailureKind::Busy, "an update is staged");
    assert!(script.sub.detail().ends_with("; they cannot be run again: an update is staged"));
    script.wait(1);
    assert!(script.sub.detail().ends_with("; running them again"));
    script.accept();
    script.reply.activity = Activity::Updating { update_id: 0 };
    script.poll();
    script.reply.activity = Activity::Idle;
    script.reply.trigger_failures.clear();
    script.poll();
    script.check(expect![[r#"
        0   assigned connecting       not reached yet
                     -> poll for all
        0   polled   rescanning       reading the new scan
        0   polled   synced           equals base
        0   polled   trigger-failed   equals base, but start web failed: Job for web fai
        0   brake    trigger-failed   equals base, but start web failed: Job for web fai
        0   retry    trigger-failed   equals base, but start web failed: Job for web fai
        0   release  trigger-failed   equals base, but start web failed: Job for web fai
                     -> run triggers again
        0   failed   trigger-failed   equals base, but start web failed: Job for web fai
        1   wake     trigger-failed   equals base, but start web failed: Job for web fai
                     -> run triggers again
        1   accepted trigger-failed   equals base, but start web failed: Job for web fai
        1   polled   updating         carrying out the update and its triggers
                     -> is under way
        1   polled   synced           equals base
    "#]]);
}
