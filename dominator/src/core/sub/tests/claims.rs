//! When a machine makes and releases claims.
// tidy: core

use api::subd::{Activity, TriggerFailure, UpdateOutcome};
use expect_test::expect;
use model::scope::Scope;

use super::super::*;
use super::script::{Script, image};
use crate::core::claims::{ClaimAnswer, ClaimKind};

/// A sub that has the object of the only change, before the claim for the update.
fn ready(answer: ClaimAnswer) -> Script {
    let mut script = Script::new(image("base", &[("/a", "1")]));
    script.cache(&["1"]);
    let ImageState::Ready(image) = script.image.clone() else { panic!("the image is ready") };
    script.reply.scope = Scope::of(&image.scan, &script.reply.exclusions);
    script.scan(&[]);
    (script.answer, script.writes_ends) = (answer, true);
    script.poll();
    script
}

fn waits() -> ClaimAnswer {
    ClaimAnswer::Waits("9 machines are under way".into())
}

fn silent(script: &mut Script, seconds: u64) {
    script.wait(seconds);
    let failure = Failure { kind: FailureKind::Unreachable, text: "no answer".to_owned() };
    script.step("silent", Event::PollFailed(script.polled, failure));
}

#[test]
fn nothing_is_staged_before_the_claim_is_granted_and_it_is_kept_to_the_end() {
    let mut script = ready(waits());
    assert_eq!(script.sub.detail(), "1 change: /a (missing); 9 machines are under way");
    script.poll();
    script.step("granted", Event::Claimed(ClaimKind::Update, ClaimAnswer::Granted));
    script.commit();
    script.ended(1, UpdateOutcome::Done, None);
    script.poll();
    script.scan(&[("/a", "1")]);
    script.ended(1, UpdateOutcome::Done, Some(3));
    script.poll();
    script.check(expect![[r#"
        0   assigned connecting       not reached yet
                     -> poll for all
        0   polled   rescanning       reading the new scan
        0   polled   waiting-for-budget 1 change: /a (missing); 9 machines are under way
        0   polled   waiting-for-budget 1 change: /a (missing); 9 machines are under way
        0   granted  preparing        staging 1 change: /a (missing)
                     -> prepare 1: 1 operations
        0   accepted preparing        staging 1 change: /a (missing)
        0   polled   updating         carrying out 1 change: /a (missing)
                     -> commit 1
        0   accepted updating         the update was ordered
        0   polled   updating         carrying out the update and its triggers
        0   polled   rescanning       scanning what the update changed
        0   polled   synced           equals base
                     -> cleanup of 1
                     -> release: Good
    "#]]);
}

#[test]
fn a_machine_that_needs_something_else_releases_its_claim() {
    let mut script = ready(waits());
    script.step("brake", Event::Brake(Some("storm".into())));
    script.step("released", Event::Brake(None));
    silent(&mut script, 1);
    script.answer = ClaimAnswer::Granted;
    script.wait(1);
    script.poll();
    // The claim was not used for a quarter of an hour.
    script.accept();
    script.reply.activity = Activity::Preparing { update_id: 1 };
    script.poll();
    script.wait(899);
    script.wait(1);
    script.check(expect![[r#"
        0   assigned connecting       not reached yet
                     -> poll for all
        0   polled   rescanning       reading the new scan
        0   polled   waiting-for-budget 1 change: /a (missing); 9 machines are under way
        0   brake    updates-disabled 1 change: /a (missing), all objects are there; upd
                     -> release: Withdrawn
        0   released waiting-for-budget 1 change: /a (missing); 9 machines are under way
        1   wake     waiting-for-budget 1 change: /a (missing); 9 machines are under way
        1   silent   unreachable      no answer
                     -> release: Withdrawn
        2   wake     unreachable      no answer
        2   polled   preparing        staging 1 change: /a (missing)
                     -> prepare 1: 1 operations
        2   accepted preparing        staging 1 change: /a (missing)
        2   polled   preparing        staging 1 change: /a (missing)
        901 wake     preparing        staging 1 change: /a (missing)
        902 wake     waiting-for-budget 1 change: /a (missing); the claim was not used in 
                     -> release: Withdrawn
    "#]]);
}

#[test]
fn a_commit_that_is_forbidden_at_the_last_moment_is_not_sent_again() {
    let mut script = ready(ClaimAnswer::Granted);
    let Some(Call::Prepare(request, _)) = script.accept() else { panic!("nothing to prepare") };
    script.reply.activity = Activity::Prepared { update_id: request.update_id };
    script.poll();
    script.answer = ClaimAnswer::Stopped("3 of 3 machines failed".into());
    script.refuse(FailureKind::Cancelled, "leave was taken back");
    assert_eq!(
        script.sub.detail(),
        "1 change: /a (missing); updates to base have stopped: 3 of 3 machines failed; another \
         image goes on, or: domtool resume-image base --why TEXT"
    );
    // The staged update expires, which is no failure.
    script.ended(1, UpdateOutcome::NotPrepared("expired".into()), None);
    script.poll();
    script.step("resumed", Event::Claimed(ClaimKind::Update, ClaimAnswer::Granted));
    script.check(expect![[r#"
        0   assigned connecting       not reached yet
                     -> poll for all
        0   polled   rescanning       reading the new scan
        0   polled   preparing        staging 1 change: /a (missing)
                     -> prepare 1: 1 operations
        0   accepted preparing        staging 1 change: /a (missing)
        0   polled   updating         carrying out 1 change: /a (missing)
                     -> commit 1
        0   failed   image-stopped    1 change: /a (missing); updates to base have stopp
                     -> release: Withdrawn
        0   polled   image-stopped    1 change: /a (missing); updates to base have stopp
        0   resumed  preparing        staging 1 change: /a (missing)
                     -> prepare 2: 1 operations
    "#]]);
}

#[test]
fn a_machine_that_vanishes_after_the_commit_is_waited_for_five_minutes() {
    let mut script = ready(ClaimAnswer::Granted);
    script.commit();
    silent(&mut script, 10);
    silent(&mut script, 289);
    silent(&mut script, 1);
    script.wait(30);
    script.poll();
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
        10  wake     updating         carrying out the update and its triggers
        10  silent   unreachable      no answer
        299 wake     unreachable      no answer
        299 silent   unreachable      no answer
        300 wake     unreachable      no answer
                     -> release: Failed(Vanished)
        300 silent   unreachable      no answer
        330 wake     unreachable      no answer
        330 polled   updating         carrying out the update and its triggers
        330 polled   synced           equals base
                     -> cleanup of 1
    "#]]);
}

#[test]
fn each_failure_is_reported_with_its_kind() {
    let failed = |outcome: UpdateOutcome, spoil: &dyn Fn(&mut Script)| {
        let mut script = ready(ClaimAnswer::Granted);
        script.commit();
        script.ended(1, outcome, Some(3));
        spoil(&mut script);
        script.poll();
        script.last_end()
    };
    let nothing = |_: &mut Script| {};
    let trigger = |script: &mut Script| {
        let failure =
            TriggerFailure { service: "web".into(), verb: "start".into(), output: "no".into() };
        script.scan(&[("/a", "1")]);
        script.reply.last_update.as_mut().unwrap().trigger_failures.push(failure);
    };
    let text = || "why".to_owned();
    let ends = [
        failed(UpdateOutcome::RolledBack(text()), &nothing),
        failed(UpdateOutcome::Stuck(text()), &nothing),
        failed(UpdateOutcome::Undone(text()), &nothing),
        failed(UpdateOutcome::Done, &nothing),
        failed(UpdateOutcome::Done, &trigger),
    ];
    let expected = [
        "Failed(Update)",
        "Failed(Stuck)",
        "Failed(Health)",
        "Failed(NotConverging)",
        "Failed(Trigger)",
    ];
    assert_eq!(ends, expected);
}

#[test]
fn what_is_under_way_when_the_dominator_starts_is_counted() {
    let mut script = Script::new(image("base", &[("/a", "1")]));
    script.writes_ends = true;
    let ImageState::Ready(image) = script.image.clone() else { panic!("the image is ready") };
    script.reply.scope = Scope::of(&image.scan, &script.reply.exclusions);
    script.reply.activity = Activity::Updating { update_id: 77 };
    script.poll();
    script.ended(77, UpdateOutcome::Done, None);
    script.poll();
    script.ended(77, UpdateOutcome::Done, Some(3));
    script.scan(&[("/a", "1")]);
    script.poll();
    script.check(expect![[r#"
        0   assigned connecting       not reached yet
                     -> poll for all
                     -> is under way
        0   polled   updating         carrying out the update and its triggers
        0   polled   rescanning       scanning what the update changed
        0   polled   synced           equals base
                     -> release: Good
    "#]]);
}

#[test]
fn a_machine_whose_reboot_is_due_is_counted_once_also_if_something_else_was_not_staged() {
    let mut script = Script::new(image("base", &[("/a", "1")]));
    script.writes_ends = true;
    // The machine was updated by hand; then an update that was staged by hand expired.
    script.ended(9, UpdateOutcome::NotPrepared("expired".into()), None);
    script.reply.last_update.as_mut().unwrap().awaits_boot = true;
    script.poll();
    script.poll();
    script.poll();
    script.wait(3_600);
    script.poll();
    script.check(expect![[r#"
        0   assigned connecting       not reached yet
                     -> poll for all
                     -> is under way
        0   polled   rebooting        waiting for the reboot of the update
        0   polled   rebooting        waiting for the reboot of the update
        0   polled   rebooting        waiting for the reboot of the update
        3600 wake     rebooting        waiting for the reboot of the update
                     -> release: Failed(Overdue)
        3600 polled   rebooting        waiting for the reboot of the update
    "#]]);
}
