//! Scripts of claims.

use super::*;
use crate::core::budget::limits::{LocationLimit, MachineLimit};
use crate::core::budget::{Impact, UpdateClass};
use crate::core::network_budget::Urgency;
use model::tree::Time;

fn at(seconds: u64) -> Now {
    Now { elapsed: Duration::from_secs(seconds), wall: Time::default() }
}

fn settings(places: u32) -> ClaimSettings {
    let at = LocationLimit { location: None, limit: Some(MachineLimit::Count(places)) };
    ClaimSettings {
        updating: MachineLimits::new(None, &[at], None),
        high_impact: MachineLimits::default(),
        network: None,
        failures: FailureLimits { percent: 10, blocked_percent: 10, failures_min: 2 },
    }
}

fn image(name: &str) -> ImageName {
    ImageName::new(name).unwrap()
}

/// An update to another image.
fn new(name: &str) -> UpdateClaim {
    let demand = Demand {
        class: UpdateClass::Rollout,
        impact: Impact::Plain,
        location: String::new(),
        since: Duration::ZERO,
    };
    UpdateClaim { demand, new_parts: vec![image(name)] }
}

/// A repair of drift.
fn drifted() -> UpdateClaim {
    let demand = Demand { class: UpdateClass::Repair, ..new("any").demand };
    UpdateClaim { demand, new_parts: Vec::new() }
}

/// A claim table that knows the activity of all machines.
fn claim_table(places: u32) -> ClaimTable {
    let mut claims = ClaimTable::new(settings(places), Vec::new(), at(0));
    claims.set_machines(&BTreeMap::from([(String::new(), 10)]), &BTreeSet::new(), at(0));
    claims
}

fn ask(claims: &mut ClaimTable, claimant: u64, update: UpdateClaim) -> Option<ClaimAnswer> {
    claims.claim(ClaimantId(claimant), Claim::Update(update), at(100));
    claims.answer(ClaimantId(claimant), ClaimKind::Update, at(100))
}

fn fail(claims: &mut ClaimTable, claimant: u64) {
    assert!(claims.begin(ClaimantId(claimant)), "{claimant}");
    claims.release(
        ClaimantId(claimant),
        Release::Update(UpdateEnd::Failed(UpdateFailure::Health)),
        at(100),
    );
}

#[test]
fn when_updates_to_an_image_stop_nobody_begins_and_others_go_on() {
    let mut claims = claim_table(4);
    let granted = Some(ClaimAnswer::Granted);
    for claimant in [1, 2, 3] {
        assert_eq!(ask(&mut claims, claimant, new("bad")), granted);
    }
    assert!(matches!(ask(&mut claims, 4, new("bad")), Some(ClaimAnswer::Waits(_))));
    assert!(matches!(ask(&mut claims, 5, new("good")), Some(ClaimAnswer::Waits(_))));
    fail(&mut claims, 1);
    assert_eq!(claims.answer(ClaimantId(4), ClaimKind::Update, at(100)), granted);
    fail(&mut claims, 2);
    let why = "2 of 2 machines failed after the update to it (2 failed the health check), more \
               than 10 %";
    let stopped = Some(ClaimAnswer::Stopped(why.into()));
    for claimant in [3, 4] {
        assert!(!claims.begin(ClaimantId(claimant)), "{claimant}");
        assert_eq!(claims.answer(ClaimantId(claimant), ClaimKind::Update, at(100)), stopped);
    }
    assert!(claims.begin(ClaimantId(5)), "another image goes on");
    assert_eq!(claims.take_changed(), BTreeSet::from([3, 4, 5].map(ClaimantId)));
    // Repairs go on, and a repeated claim gets the same answer.
    assert_eq!(ask(&mut claims, 6, drifted()), granted);
    assert_eq!(ask(&mut claims, 3, new("bad")), stopped);
    assert_eq!(ask(&mut claims, 7, new("bad")), stopped);
    let report = claims.report();
    assert_eq!((report.under_way, report.waiting, report.stopped.len()), (2, 0, 1));

    assert!(!claims.resume(&image("good"), at(101)));
    assert!(claims.resume(&image("bad"), at(101)));
    let begun: Vec<u64> = (1..=7).filter(|&claimant| claims.begin(ClaimantId(claimant))).collect();
    assert_eq!(begun, [3, 4, 5, 6]);
    assert_eq!(claims.take_changed(), BTreeSet::from([3, 4, 7].map(ClaimantId)));
    // Counting starts from zero: one more failure is not enough.
    fail(&mut claims, 3);
    assert!(claims.begin(ClaimantId(7)));
    assert_eq!(claims.stopped_version(), 2);
}

#[test]
fn a_bad_part_stops_all_images_that_are_composed_of_it() {
    let mut claims = claim_table(4);
    let granted = Some(ClaimAnswer::Granted);
    let parts = |names: &[&str]| {
        let new_parts = names.iter().map(|name| image(name)).collect();
        UpdateClaim { new_parts, ..new("any") }
    };
    for claimant in [1, 2] {
        assert_eq!(ask(&mut claims, claimant, parts(&["bad"])), granted);
        fail(&mut claims, claimant);
    }
    let answer = ask(&mut claims, 3, parts(&["bad", "job"]));
    assert!(matches!(answer, Some(ClaimAnswer::Stopped(_))), "{answer:?}");
    assert_eq!(ask(&mut claims, 4, parts(&["job"])), granted);
}

#[test]
fn a_commit_that_was_lost_is_not_sent_again_when_updates_to_the_image_have_stopped() {
    let mut claims = claim_table(4);
    for claimant in [1, 2, 3] {
        assert_eq!(ask(&mut claims, claimant, new("bad")), Some(ClaimAnswer::Granted));
    }
    assert!(claims.begin(ClaimantId(3)));
    assert!(claims.begin(ClaimantId(3)), "lost, and sent again");
    fail(&mut claims, 1);
    fail(&mut claims, 2);
    claims.take_changed();
    assert!(!claims.begin(ClaimantId(3)));
    assert_eq!(claims.take_changed(), BTreeSet::from([ClaimantId(3)]));
    let answer = claims.answer(ClaimantId(3), ClaimKind::Update, at(100));
    assert!(matches!(answer, Some(ClaimAnswer::Stopped(_))), "{answer:?}");
    // Its place is free; an update that is under way takes it again.
    assert_eq!(claims.report().under_way, 0);
    claims.claim(ClaimantId(3), Claim::UnderWay(new("bad")), at(101));
    assert_eq!(claims.report().under_way, 1);
}

#[test]
fn repairs_that_fail_say_nothing_of_an_image() {
    let mut claims = claim_table(8);
    for claimant in 0..5 {
        ask(&mut claims, claimant, drifted());
        if claimant < 2 {
            fail(&mut claims, claimant);
        } else {
            claims.release(ClaimantId(claimant), Release::Update(UpdateEnd::Withdrawn), at(100));
        }
    }
    assert_eq!(claims.stopped(), []);
}

#[test]
fn a_dominator_that_starts_learns_first_what_is_under_way() {
    let mut claims = ClaimTable::new(settings(3), Vec::new(), at(10));
    for claimant in 1..=3 {
        claims.enroll(ClaimantId(claimant), at(10));
    }
    claims.claim(ClaimantId(1), Claim::Update(new("x")), at(11));
    claims.activity_known(ClaimantId(1), at(11));
    claims.set_machines(&BTreeMap::from([(String::new(), 3)]), &BTreeSet::new(), at(11));
    let text = "the dominator has just started, and waits for the first answers of all machines; \
                no answer yet from 2 machines";
    let answer = |claims: &ClaimTable, seconds| {
        claims.answer(ClaimantId(1), ClaimKind::Update, at(seconds)).expect("it has asked")
    };
    assert_eq!(answer(&claims, 11), ClaimAnswer::Waits(text.into()));
    claims.claim(ClaimantId(2), Claim::UnderWay(new("y")), at(12));
    claims.activity_known(ClaimantId(2), at(12));
    assert_eq!(claims.wake_at(at(12)), Some(Duration::from_secs(70)));
    // One machine never answers.
    let mut late = claims.clone();
    late.advance(at(70));
    assert_eq!(answer(&late, 70), ClaimAnswer::Granted);
    // It answers.
    claims.activity_known(ClaimantId(3), at(13));
    assert_eq!(answer(&claims, 13), ClaimAnswer::Granted);
    assert_eq!(claims.report().under_way, 2);
    // Places of updates that are under way are not granted to others.
    claims.claim(ClaimantId(3), Claim::Update(new("x")), at(14));
    assert!(!claims.begin(ClaimantId(3)));
    claims.leave(ClaimantId(2), at(15));
    assert!(claims.begin(ClaimantId(3)), "a machine that is gone uses nothing up");
}

#[test]
fn a_fetch_waits_for_the_network_and_is_ordered_once() {
    let mut claims =
        ClaimTable::new(ClaimSettings { network: Some(4_000), ..settings(1) }, Vec::new(), at(0));
    let fetch =
        |bytes| Claim::Fetch(Download { urgency: Urgency::Rollout, since: Duration::ZERO, bytes });
    claims.claim(ClaimantId(1), fetch(3_000), at(1));
    assert_eq!(claims.answer(ClaimantId(1), ClaimKind::Fetch, at(1)), Some(ClaimAnswer::Granted));
    claims.release(ClaimantId(1), Release::Fetch, at(1));
    assert_eq!(claims.answer(ClaimantId(1), ClaimKind::Fetch, at(1)), None);
    claims.claim(ClaimantId(2), fetch(1), at(1));
    assert!(matches!(
        claims.answer(ClaimantId(2), ClaimKind::Fetch, at(1)),
        Some(ClaimAnswer::Waits(_))
    ));
    assert_eq!(claims.wake_at(at(1)), Some(Duration::from_secs(2)));
    claims.advance(at(2));
    assert_eq!(claims.take_changed(), BTreeSet::from([ClaimantId(2)]));
    assert_eq!(claims.answer(ClaimantId(2), ClaimKind::Fetch, at(2)), Some(ClaimAnswer::Granted));
    // A repeated claim uses no second place.
    claims.claim(ClaimantId(2), fetch(1), at(2));
    assert_eq!(claims.answer(ClaimantId(2), ClaimKind::Fetch, at(2)), Some(ClaimAnswer::Granted));
}

#[test]
fn machines_that_are_ill_after_an_update_count_as_long_as_they_are() {
    let mut claims = claim_table(4);
    for claimant in [1, 2] {
        assert_eq!(ask(&mut claims, claimant, new("bad")), Some(ClaimAnswer::Granted));
        assert!(claims.begin(ClaimantId(claimant)), "{claimant}");
        claims.release(ClaimantId(claimant), Release::Update(UpdateEnd::Good), at(100));
    }
    // The last four had the image before.
    let told = [(1, true), (1, false), (2, true), (5, true), (6, true), (7, true), (1, true)];
    let stopped = told.map(|(claimant, is_ill)| {
        let image = image("bad");
        claims.claim(ClaimantId(claimant), Claim::Health { image, is_ill }, at(200));
        claims.stopped().into_iter().map(|stop| stop.why).collect::<Vec<_>>()
    });
    let why = "2 of 2 machines failed after the update to it (2 unhealthy later), more than 10 %";
    assert!(stopped[..6].iter().all(Vec::is_empty), "{stopped:?}");
    assert_eq!(stopped[6], [why]);
}
