//! The limits that are sent to a sub.
// tidy: core

use api::subd::Limits;
use expect_test::expect;

use super::super::*;
use super::script::{Script, image};

fn network(percent: u8) -> Limits {
    Limits { network_percent: Some(percent), ..Limits::default() }
}

/// A synced sub whose limits an operator sets.
fn synced(percent: u8) -> Script {
    let mut script = Script::scanning(image("base", &[("/a", "1")]), &[("/a", "1")]);
    assert!(script.sub.set_limits(network(percent)));
    assert!(!script.sub.set_limits(network(percent)), "that is no news");
    script.wait(0);
    script
}

fn told(call: &Option<Call>) -> Limits {
    match call {
        Some(Call::SetConfiguration(request)) if request.scan.is_none() => request.limits.unwrap(),
        other => panic!("{other:?} tells no limits alone"),
    }
}

#[test]
fn limits_are_sent_once_regardless_of_the_ceilings_of_the_sub() {
    let mut script = synced(5);
    assert_eq!(told(&script.accept()), network(5));
    // The sub has lower ceilings, which make no difference.
    script.reply.limits.told = network(5);
    script.reply.limits.ceilings = network(3);
    script.poll();
    script.wait(3_600);
    script.poll();
    // A sub that has lost its limits gets them again at once.
    script.reply.version.instance += 1;
    script.reply.limits.told = Limits::default();
    script.poll();
    assert_eq!(told(&script.accept()), network(5));
    script.reply.limits.told = network(5);
    script.poll();
    // The limits are removed.
    assert!(script.sub.set_limits(Limits::default()));
    script.wait(0);
    assert_eq!(told(&script.accept()), Limits::default());
    script.check(expect![[r#"
        0   assigned connecting       not reached yet
                     -> poll for all
        0   polled   rescanning       reading the new scan
        0   polled   synced           equals base
        0   wake     synced           equals base
                     -> set-configuration
        0   accepted synced           equals base
        0   polled   synced           equals base
        3600 wake     synced           equals base
        3600 polled   synced           equals base
        3600 polled   rescanning       reading the new scan
                     -> set-configuration
        3600 polled   synced           equals base
        3600 accepted synced           equals base
        3600 polled   synced           equals base
        3600 wake     synced           equals base
                     -> set-configuration
        3600 accepted synced           equals base
    "#]]);
}

#[test]
fn a_sub_that_does_not_set_them_gets_them_less_and_less_often_and_is_updated_meanwhile() {
    let mut script = synced(5);
    script.refuse(FailureKind::Refused, "no such thing");
    assert_eq!(script.sub.limits_error(), Some("no such thing"));
    assert_eq!(script.sub.status(), Status::Synced);
    script.wait(9);
    script.wait(1);
    // The sub accepts the call without effect.
    script.accept();
    assert_eq!(script.sub.limits_error(), None);
    script.poll();
    script.wait(19);
    script.wait(1);
    script.accept();
    // Drift is repaired meanwhile.
    script.scan(&[("/a", "1"), ("/b", "1")]);
    script.poll();
    assert!(matches!(script.accept(), Some(Call::Prepare(..))));
    script.check(expect![[r#"
        0   assigned connecting       not reached yet
                     -> poll for all
        0   polled   rescanning       reading the new scan
        0   polled   synced           equals base
        0   wake     synced           equals base
                     -> set-configuration
        0   failed   synced           equals base
        9   wake     synced           equals base
        10  wake     synced           equals base
                     -> set-configuration
        10  accepted synced           equals base
        10  polled   synced           equals base
        29  wake     synced           equals base
        30  wake     synced           equals base
                     -> set-configuration
        30  accepted synced           equals base
        30  polled   preparing        staging 1 change: /b (extra)
                     -> prepare 1: 1 operations
        30  accepted preparing        staging 1 change: /b (extra)
    "#]]);
}

#[test]
fn limits_are_not_sent_during_an_update() {
    let mut script = Script::scanning(image("base", &[("/a", "1")]), &[]);
    script.accept();
    script.cache(&["1"]);
    script.fetched(1, None);
    script.poll();
    script.commit();
    assert!(script.sub.set_limits(network(5)));
    script.wait(0);
    assert!(script.called.is_none());
    script.ended(2, api::subd::UpdateOutcome::Done, Some(4));
    script.scan(&[("/a", "1")]);
    script.cache(&[]);
    script.poll();
    assert_eq!(told(&script.accept()), network(5));
}
