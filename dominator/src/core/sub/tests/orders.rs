//! Scripts of what operators order.
// tidy: core

use api::dominator::orders::UpdatePause;
use api::subd::{Activity, Outcome, Version};
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
fn a_plan_tells_what_keeps_the_machine_from_being_updated() {
    let mut script = Script::scanning(image("base", &[("/a", "1")]), &[]);
    let would_wait = |script: &Script| script.sub.would_wait(&script.sub.machine);
    assert_eq!(would_wait(&script), []);
    script.step("pause", Event::Pause(pause(100)));
    let paused = "updates are paused until 1970-01-01T00:01:40Z by ann: works".to_owned();
    assert_eq!(would_wait(&script), [(Status::Paused, paused)]);
    script.step("resume", Event::Pause(None));
    let wrong = Some("answers as web2".into());
    script.step("wrong", Event::IdentityJudged(IdentityVerdict { number: 1, wrong }));
    assert_eq!(would_wait(&script), [(Status::WrongMachine, "answers as web2".to_owned())]);
}

#[test]
fn a_pause_lets_objects_be_fetched_and_ends_by_itself_or_by_an_order() {
    let mut script = Script::scanning(image("base", &[("/a", "1")]), &[]);
    script.step("pause", Event::Pause(pause(100)));
    script.accept();
    script.cache(&["1"]);
    script.fetched(1, None);
    script.poll();
    assert_eq!(
        script.sub.detail(),
        "1 change: /a (missing), all objects are there; updates are paused until \
         1970-01-01T00:01:40Z by ann: works"
    );
    // The clock is looked at every minute, and at the end.
    assert_eq!(script.sub.wake_at(), Some(Duration::from_secs(60)));
    script.wait(60);
    assert_eq!(script.sub.wake_at(), Some(Duration::from_secs(100)));
    script.wait(40);
    script.accept();
    script.reply.activity = Activity::Prepared { update_id: 2 };
    script.step("pause", Event::Pause(pause(200)));
    script.poll();
    // What is staged expires meanwhile.
    script.ended(2, Outcome::NotPrepared("expired".into()), None);
    script.poll();
    assert_eq!(script.sub.status(), Status::Paused);
    script.reply.last_update = None;
    script.step("resume", Event::Pause(None));
    script.accept();
    script.reply.activity = Activity::Prepared { update_id: 3 };
    script.poll();
    script.refuse(FailureKind::Braked, "the machine was paused");
    script.check(expect![[r#"
        0   assigned connecting       not reached yet
                     -> poll for all
        0   polled   fetching         is told to fetch 1 object (1 byte)
                     -> fetch 1: 1
        0   pause    paused           is told to fetch 1 object (1 byte); updates are pa
        0   accepted paused           is told to fetch 1 object (1 byte); updates are pa
        0   polled   paused           1 change: /a (missing), all objects are there; upd
        60  wake     paused           1 change: /a (missing), all objects are there; upd
        100 wake     preparing        is told to stage 1 change: /a (missing)
                     -> prepare 2: 1 operations
        100 accepted preparing        is told to stage 1 change: /a (missing)
        100 pause    paused           1 change: /a (missing), all objects are there; upd
        100 polled   paused           1 change: /a (missing), all objects are there; upd
        100 polled   paused           1 change: /a (missing), all objects are there; upd
        100 resume   preparing        is told to stage 1 change: /a (missing)
                     -> prepare 3: 1 operations
        100 accepted preparing        is told to stage 1 change: /a (missing)
        100 polled   updating         is told to carry out 1 change: /a (missing)
                     -> commit 3
        100 failed   updating         is told to carry out 1 change: /a (missing)
                     -> commit 3
    "#]]);
}

#[test]
fn a_clock_that_is_set_ends_a_pause_or_has_it_again() {
    let mut script = Script::scanning(image("base", &[("/a", "1")]), &[("/a", "0")]);
    script.step("pause", Event::Pause(pause(100)));
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
        0   polled   fetching         is told to fetch 1 object (1 byte)
                     -> fetch 1: 1
        0   pause    paused           is told to fetch 1 object (1 byte); updates are pa
        0   accepted paused           is told to fetch 1 object (1 byte); updates are pa
        0   polled   paused           1 change: /a (content), all objects are there; upd
        1   wake     preparing        is told to stage 1 change: /a (content)
                     -> prepare 2: 1 operations
        2   wake     paused           1 change: /a (content), all objects are there; upd
    "#]]);
}

#[test]
fn a_machine_that_is_in_place_shows_its_pause_and_is_not_told_of_the_image() {
    let mut script = Script::scanning(image("base", &[("/a", "1")]), &[("/a", "1")]);
    script.step("pause", Event::Pause(pause(100)));
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
        0   polled   synced           equals base
        0   pause    synced           equals base; updates are paused until 1970-01-01T0
        0   polled   synced           equals base; updates are paused until 1970-01-01T0
        100 wake     preparing        is told to stage no change but the name of the ima
                     -> prepare 1: 0 operations
    "#]]);
}

#[test]
fn what_is_forced_is_staged_anew_and_once() {
    let mut script = ready();
    assert!(!script.sub.force_disruptive(), "nothing is pending");
    script.scan(&[]);
    script.poll();
    let Some(Call::Prepare(request)) = script.accept() else { panic!() };
    assert!(!request.force_disruption);
    script.reply.activity = Activity::Prepared { update_id: 1 };
    script.poll();
    assert!(!script.sub.force_disruptive(), "it is told to carry it out");
    script.refuse(FailureKind::Held, "somebody is logged in");
    script.wait(1);
    script.step("forced", Event::Forced);
    let Some((_, Some(Call::Prepare(request)))) = &script.called else { panic!() };
    assert!(request.force_disruption);
    script.commit();
    script.ended(2, Outcome::RolledBack("no space".into()), Some(4));
    script.poll();
    script.wait(10);
    let Some((_, Some(Call::Prepare(request)))) = &script.called else { panic!() };
    assert!(!request.force_disruption, "it was forced once");
    script.check(expect![[r#"
        0   assigned connecting       not reached yet
                     -> poll for all
        0   polled   preparing        is told to stage 1 change: /a (missing)
                     -> prepare 1: 1 operations
        0   accepted preparing        is told to stage 1 change: /a (missing)
        0   polled   updating         is told to carry out 1 change: /a (missing)
                     -> commit 1
        0   failed   held             it would not carry out the update: somebody is log
        1   wake     held             it would not carry out the update: somebody is log
        1   forced   preparing        is told to stage 1 change: /a (missing)
                     -> prepare 2: 1 operations
        1   accepted preparing        is told to stage 1 change: /a (missing)
        1   polled   updating         is told to carry out 1 change: /a (missing)
                     -> commit 2
        1   accepted updating         was told to carry out the update
        1   polled   updating         carries out the update; then its triggers run
        1   polled   update-failed    the update failed, and was put back: no space; is 
        11  wake     preparing        is told to stage 1 change: /a (missing)
                     -> prepare 3: 1 operations
    "#]]);
}

#[test]
fn a_force_is_for_the_pending_plan_alone() {
    let mut script = ready();
    script.scan(&[]);
    script.poll();
    script.step("forced", Event::Forced);
    script.accept();
    script.scan(&[("/b", "2")]);
    script.poll();
    script.poll();
    let Some((_, Some(Call::Prepare(request)))) = &script.called else { panic!() };
    assert_eq!((request.plan.operations.len(), request.force_disruption), (2, false));
}

#[test]
fn a_hurried_machine_is_polled_and_scans_before_its_status_counts() {
    let mut script = Script::scanning(image("base", &[("/a", "1")]), &[("/a", "1")]);
    let first = script.sub.watched();
    assert_eq!((first.status, first.is_current), (Status::Synced, true));
    script.step("hurried", Event::Hurried);
    let asked = script.scan_asked.expect("it is to scan");
    let during = script.sub.watched();
    assert_eq!((during.status, during.is_current), (Status::Rescanning, false));
    assert!(during.version != first.version && script.sub.is_urgent());
    // A second order while it scans has it scan once more, and not twice at a time.
    script.step("hurried", Event::Hurried);
    assert_eq!(script.scan_asked, Some(asked));
    let version = script.reply.version;
    script.step("scanned", Event::Scanned(asked, Ok(version)));
    let again = script.scan_asked.expect("it is to scan once more");
    assert!(again > asked);
    // What it found is in a report that has not come yet.
    let version = Version { generation: version.generation + 1, ..version };
    script.step("scanned", Event::Scanned(again, Ok(version)));
    assert!(!script.sub.watched().is_current);
    script.scan(&[]);
    script.cache(&["1"]);
    script.poll();
    assert_eq!(script.sub.watched().status, Status::Preparing);
    assert!(script.sub.watched().is_current && script.sub.is_urgent());
    script.commit();
    script.ended(1, Outcome::Done, Some(9));
    script.scan(&[("/a", "1")]);
    script.poll();
    assert!(!script.sub.is_urgent(), "it is in place");
    let last = script.sub.watched();
    assert_eq!((last.status, last.is_current), (Status::Synced, true));
    script.check(expect![[r#"
        0   assigned connecting       not reached yet
                     -> poll for all
        0   polled   synced           equals base
        0   hurried  rescanning       scans at once, as an operator asks for it
                     -> scan
        0   hurried  rescanning       scans at once, as an operator asks for it
        0   scanned  rescanning       scans at once, as an operator asks for it
                     -> scan
        0   scanned  rescanning       scans at once, as an operator asks for it
        0   polled   preparing        is told to stage 1 change: /a (missing)
                     -> prepare 1: 1 operations
        0   accepted preparing        is told to stage 1 change: /a (missing)
        0   polled   updating         is told to carry out 1 change: /a (missing)
                     -> commit 1
        0   accepted updating         was told to carry out the update
        0   polled   updating         carries out the update; then its triggers run
        0   polled   synced           equals base
                     -> cleanup of 1
    "#]]);
}

#[test]
fn a_hurry_forgets_what_failed_and_passes_no_stop() {
    let mut script = ready();
    script.scan(&[]);
    script.poll();
    script.refuse(FailureKind::Refused, "no");
    assert_eq!(script.sub.status(), Status::UpdateFailed);
    script.step("hurried", Event::Hurried);
    let asked = script.scan_asked.expect("it is to scan");
    let old = Failure { kind: FailureKind::Refused, text: "no such method".into() };
    script.step("scanned", Event::Scanned(asked, Err(old)));
    assert_eq!(script.sub.status(), Status::Preparing);
    script.accept();
    script.step("brake", Event::Brake(Some("storm".into())));
    script.step("hurried", Event::Hurried);
    let asked = script.scan_asked.expect("it is to scan");
    assert_eq!(script.sub.status(), Status::Rescanning);
    script.step("scanned", Event::Scanned(asked, Ok(script.reply.version)));
    let end = script.sub.watched();
    assert_eq!((end.status, end.is_current), (Status::UpdatesDisabled, true));
    assert!(!script.sub.is_urgent() && script.called.is_none());
}

#[test]
fn a_machine_that_cannot_be_reached_stays_hurried() {
    let mut script = ready();
    let failure = Failure { kind: FailureKind::Unreachable, text: "reset".into() };
    script.step("silent", Event::PollFailed(script.polled, failure));
    let before = script.polled;
    script.step("hurried", Event::Hurried);
    assert!(script.polled > before, "it is polled at once");
    let during = script.sub.watched();
    assert_eq!((during.status, during.is_current), (Status::Unreachable, false));
    script.poll();
    assert!(script.scan_asked.is_some());
}

#[test]
fn a_default_image_is_shown_as_such() {
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
