//! Former bundles that stay because others require them, and rollouts that take them away.

use std::collections::BTreeMap;

use model::object::Algorithm;
use proptest::prelude::*;
use provisioning::version::{Range, Version};
use rollouts::document::{Choice, Kind, VoteEvent};
use rollouts::plan::plan;
use rollouts::state::{RolloutOrder, SharedMachines, StartOrder, State};
use serde_json::json;

use crate::environments::{at, bundle, edit, environment, go_on, images, mdb, said, shown, start};

/// Two machines with the bundle `l1` of `libs`, which provides version 1 of `api`, and with the
/// image `b` of `web`, which requires that.
fn with_required_bundle(disjoint: bool) -> (State, SharedMachines) {
    let mdb = mdb("web1 a, web2 a");
    let mut state = State::default();
    let mut libs = bundle("libs", &["web"], "l1");
    libs["provides"] = json!({"api": "1"});
    libs["disjoint"] = disjoint.into();
    edit(&mut state, &mdb, libs).unwrap();
    let mut web = environment("web", "b");
    web["requires"] = json!({"api": "<2"});
    web["depends_on"] = json!(["libs"]);
    edit(&mut state, &mdb, web).unwrap();
    let environments = ["libs@1", "web@1"].map(str::to_owned).into();
    state.start(&StartOrder { environments, ..StartOrder::default() }, &at(0)).unwrap();
    go_on(&mut state, &mdb, 0);
    assert_eq!(images(&state, &mdb), "web1 b + l1, web2 b + l1");
    let second = json!({"name": "libs", "source": {"bundle": "l2"}, "provides": {"api": "2"}});
    edit(&mut state, &mdb, second).unwrap();
    (state, mdb)
}

#[test]
fn a_former_bundle_stays_while_others_require_it() {
    let (mut state, mdb) = with_required_bundle(true);
    let shown_plan = |state: &State, environment: &str, revision| {
        let plan = plan(state, &mdb, environment, revision, |image| {
            Some(Algorithm::Blake3.digest(image.as_bytes()))
        });
        let class = |class: &rollouts::plan::Class| format!("{} -> {}", class.from, class.to);
        plan.classes.iter().map(class).collect::<Vec<_>>().join(", ")
    };
    assert_eq!(shown_plan(&state, "libs", 2), "l1 -> l2 + l1");
    start(&mut state, "libs@2", Kind::User).unwrap();
    go_on(&mut state, &mdb, 0);
    assert_eq!(shown(&state, 2), "succeeded: all steps are done");
    assert_eq!(images(&state, &mdb), "web1 b + l2 + l1, web2 b + l2 + l1");
    // An edit of what requires it, which nobody has started, takes nothing away.
    let next = json!({"name": "web", "source": {"image": "c"}, "requires": {"api": ">=2"}});
    edit(&mut state, &mdb, next).unwrap();
    go_on(&mut state, &mdb, 0);
    assert_eq!(images(&state, &mdb), "web1 b + l2 + l1, web2 b + l2 + l1");
    start(&mut state, "web@2", Kind::User).unwrap();
    go_on(&mut state, &mdb, 0);
    assert_eq!(shown(&state, 3), "succeeded: all steps are done");
    // Its removal is a rollout of its own.
    let cleanup = &state.rollouts[&4].rollout;
    assert_eq!((cleanup.kind, cleanup.by.as_str()), (Kind::Cleanup, "cleanup"));
    assert_eq!(shown(&state, 4), "succeeded: all steps are done");
    assert_eq!(state.environments["libs"].committed, 3);
    assert_eq!(images(&state, &mdb), "web1 c + l2, web2 c + l2");
    go_on(&mut state, &mdb, 0);
    assert_eq!(state.rollouts.len(), 4);
}

#[test]
fn a_former_bundle_that_a_rollout_brings_back_with_it_goes_by_the_next_revision_too() {
    let (mut state, mdb) = with_required_bundle(true);
    // Both come with one rollout: in between, `web` has what it requires.
    let next = json!({"name": "web", "source": {"image": "bad"}, "requires": {"api": ">=2"}});
    edit(&mut state, &mdb, next).unwrap();
    let environments = ["libs@2", "web@2"].map(str::to_owned).into();
    state.start(&StartOrder { environments, ..StartOrder::default() }, &at(0)).unwrap();
    go_on(&mut state, &mdb, 0);
    assert!(shown(&state, 2).starts_with("rolled_back: web failed"), "{}", shown(&state, 2));
    assert_eq!(images(&state, &mdb), "web1 b + l1, web2 b + l1");
    let next = json!({"name": "web", "source": {"image": "c"}});
    edit(&mut state, &mdb, next).unwrap();
    let environments = ["libs@2", "web@3"].map(str::to_owned).into();
    state.start(&StartOrder { environments, ..StartOrder::default() }, &at(0)).unwrap();
    go_on(&mut state, &mdb, 0);
    assert_eq!(images(&state, &mdb), "web1 c + l2, web2 c + l2");
    assert_eq!(state.rollouts[&4].rollout.kind, Kind::Cleanup);
}

#[test]
fn what_stays_is_decided_again_when_a_rollout_begins() {
    let (mut state, mdb) = with_required_bundle(true);
    let wide = json!({"name": "web", "source": {"image": "c"}, "requires": {"api": "<3"}});
    edit(&mut state, &mdb, wide).unwrap();
    start(&mut state, "web@2", Kind::User).unwrap();
    go_on(&mut state, &mdb, 0);
    let approval = json!({"voters": ["bob"], "min_approvals": 1});
    let third = json!({"name": "libs", "source": {"bundle": "l2"}, "approval": approval});
    edit(&mut state, &mdb, third).unwrap();
    start(&mut state, "libs@3", Kind::User).unwrap();
    go_on(&mut state, &mdb, 0);
    // The next one waits for the first.
    let next = json!({"name": "libs", "source": {"bundle": "l5"}, "provides": {"api": "5"},
        "approval": {}});
    edit(&mut state, &mdb, next).unwrap();
    start(&mut state, "libs@4", Kind::User).unwrap();
    let step = state.rollouts[&3].rollout.steps[0].clone();
    let digest = step.digest.unwrap();
    let vote = VoteEvent {
        step: step.id,
        voter: "bob".to_owned(),
        vote: Choice::Approve,
        digest,
        link_valid: true,
    };
    state.vote("r3", vote).unwrap();
    go_on(&mut state, &mdb, 0);
    assert_eq!(shown(&state, 4), "succeeded: all steps are done");
    assert_eq!(images(&state, &mdb), "web1 c + l5 + l2, web2 c + l5 + l2");
}

#[test]
fn a_bundle_that_is_required_is_not_replaced_if_it_cannot_stay() {
    let (mut state, mdb) = with_required_bundle(false);
    start(&mut state, "libs@2", Kind::User).unwrap();
    go_on(&mut state, &mdb, 0);
    assert_eq!(
        shown(&state, 2),
        "rolled_back: libs failed: web requires api <2, and libs provides 2"
    );
    assert_eq!(images(&state, &mdb), "web1 b + l1, web2 b + l1");
    // One that is not disjoint is not beside those that stayed before either.
    let (mut state, mdb) = with_required_bundle(true);
    start(&mut state, "libs@2", Kind::User).unwrap();
    go_on(&mut state, &mdb, 0);
    let third = json!({"name": "libs", "source": {"bundle": "l5"}, "disjoint": false});
    edit(&mut state, &mdb, third).unwrap();
    start(&mut state, "libs@3", Kind::User).unwrap();
    go_on(&mut state, &mdb, 0);
    let cause = "libs failed: web requires api <2, and libs provides 2";
    assert_eq!(shown(&state, 3), format!("rolled_back: {cause}"));
    assert_eq!(images(&state, &mdb), "web1 b + l2 + l1, web2 b + l2 + l1");
    let (mut state, mdb) = with_required_bundle(true);
    let second = json!({"name": "libs", "source": {"bundle": "l4"}});
    edit(&mut state, &mdb, second).unwrap();
    start(&mut state, "libs@3", Kind::User).unwrap();
    go_on(&mut state, &mdb, 0);
    let shown = shown(&state, 2);
    assert!(shown.starts_with("rolled_back: libs failed: web1 cannot have"), "{shown}");
    let images_only = json!({"name": "web", "source": {"image": "b"}, "disjoint": true});
    let message = "web.disjoint: only bundles can be disjoint";
    assert_eq!(edit(&mut state, &mdb, images_only), said(400, message));
}

#[test]
fn a_start_and_a_stop_touch_no_environment_that_only_depends_on_what_is_named() {
    let (mut state, mdb) = with_required_bundle(true);
    let next = json!({"name": "web", "source": {"image": "c"},
        "approval": {"voters": ["bob"], "min_approvals": 1}});
    edit(&mut state, &mdb, next).unwrap();
    start(&mut state, "web@2", Kind::User).unwrap();
    state.set_active("web", false).unwrap();
    start(&mut state, "libs@2", Kind::User).unwrap();
    assert_eq!(shown(&state, 2), "pending: ");
    assert!(!state.environments["web"].active);
    go_on(&mut state, &mdb, 0);
    state.set_active("web", true).unwrap();
    state.order("r2", RolloutOrder::Stop, &at(0)).unwrap();
    assert_eq!(["web", "libs"].map(|name| state.environments[name].active), [false, true]);
    // A machine that the stopped rollout has changed stays so.
    let web = std::sync::Arc::make_mut(state.environments.get_mut("web").unwrap());
    web.moved.insert("web1".to_owned(), 2);
    go_on(&mut state, &mdb, 0);
    assert_eq!(shown(&state, 3), "succeeded: all steps are done");
    assert_eq!(images(&state, &mdb), "web1 c + l2 + l1, web2 b + l2 + l1");
}

#[test]
fn a_cleanup_checks_nothing_of_what_is_there_and_gives_way() {
    let (mut state, mdb) = with_required_bundle(true);
    let approval = json!({"voters": ["bob"], "min_approvals": 1});
    let second = json!({"name": "libs", "source": {"bundle": "l2"}, "approval": approval,
        "strategy": {"requires_from": ["l1"]}});
    edit(&mut state, &mdb, second).unwrap();
    let vote = |state: &mut State, number: u64| {
        go_on(state, &mdb, 0);
        let step = state.rollouts[&number].rollout.steps[0].clone();
        let digest = step.digest.unwrap();
        let (voter, vote) = ("bob".to_owned(), Choice::Approve);
        let vote = VoteEvent { step: step.id, voter, vote, digest, link_valid: true };
        state.vote(&format!("r{number}"), vote).unwrap();
        go_on(state, &mdb, 0);
    };
    start(&mut state, "libs@3", Kind::User).unwrap();
    vote(&mut state, 2);
    assert_eq!(images(&state, &mdb), "web1 b + l2 + l1, web2 b + l2 + l1");
    let next = json!({"name": "web", "source": {"image": "c"}, "requires": {"api": ">=2"}});
    edit(&mut state, &mdb, next).unwrap();
    start(&mut state, "web@2", Kind::User).unwrap();
    go_on(&mut state, &mdb, 0);
    // The cleanup waits for votes, and people do not wait for it.
    assert_eq!(shown(&state, 4), "running: ");
    let next = json!({"name": "web", "source": {"image": "d"}});
    edit(&mut state, &mdb, next).unwrap();
    start(&mut state, "web@3", Kind::User).unwrap();
    assert_eq!(shown(&state, 4), "canceled: gives way to r5");
    go_on(&mut state, &mdb, 0);
    assert_eq!(shown(&state, 5), "succeeded: all steps are done");
    assert_eq!(images(&state, &mdb), "web1 d + l2 + l1, web2 d + l2 + l1");
    vote(&mut state, 6);
    assert_eq!(images(&state, &mdb), "web1 d + l2, web2 d + l2");
    // The former revision is not the one that was cleaned up.
    let wide = json!({"name": "web", "source": {"image": "d"}, "requires": {}});
    edit(&mut state, &mdb, wide).unwrap();
    start(&mut state, "web@4", Kind::User).unwrap();
    go_on(&mut state, &mdb, 0);
    start(&mut state, "libs", Kind::Rollback).unwrap();
    go_on(&mut state, &mdb, 0);
    assert_eq!(images(&state, &mdb), "web1 d + l1, web2 d + l1");
}

#[test]
fn what_is_not_started_takes_no_required_bundle_away() {
    let (mut state, mdb) = with_required_bundle(true);
    start(&mut state, "libs@2", Kind::User).unwrap();
    go_on(&mut state, &mdb, 0);
    let draft = json!({"name": "web", "source": {"image": "c"}, "depends_on": []});
    edit(&mut state, &mdb, draft).unwrap();
    go_on(&mut state, &mdb, 0);
    assert_eq!(images(&state, &mdb), "web1 b + l2 + l1, web2 b + l2 + l1");
    // Nor does one that was stopped half way.
    start(&mut state, "web@2", Kind::User).unwrap();
    state.order("r3", RolloutOrder::Cancel, &at(0)).unwrap();
    let mut half = state.clone();
    let third = json!({"name": "libs", "source": {"bundle": "l5"}});
    edit(&mut half, &mdb, third).unwrap();
    start(&mut half, "libs@3", Kind::User).unwrap();
    let libs = std::sync::Arc::make_mut(half.environments.get_mut("libs").unwrap());
    libs.moved.insert("web1".to_owned(), 3);
    let web = std::sync::Arc::make_mut(half.environments.get_mut("web").unwrap());
    web.committed = 0;
    let with = "web1 a + l5 + l1, web2 a + l2 + l1";
    assert_eq!(images(&half, &mdb), with);
    start(&mut half, "libs@3", Kind::User).unwrap();
    assert_eq!(images(&half, &mdb), with);
}

#[test]
fn what_goes_back_has_what_was_beside_it() {
    let (mut state, mdb) = with_required_bundle(true);
    start(&mut state, "libs@2", Kind::User).unwrap();
    go_on(&mut state, &mdb, 0);
    let third = json!({"name": "libs", "source": {"bundle": "l5"}, "provides": {"api": "3"},
        "disjoint": false});
    edit(&mut state, &mdb, third).unwrap();
    let next = json!({"name": "web", "source": {"image": "bad"}, "requires": {"api": ">=3"}});
    edit(&mut state, &mdb, next).unwrap();
    let environments = ["libs@3", "web@2"].map(str::to_owned).into();
    state.start(&StartOrder { environments, ..StartOrder::default() }, &at(0)).unwrap();
    go_on(&mut state, &mdb, 0);
    assert!(shown(&state, 3).starts_with("rolled_back: web failed"), "{}", shown(&state, 3));
    assert_eq!(images(&state, &mdb), "web1 b + l2 + l1, web2 b + l2 + l1");
}

/// Returns what the committed revision of `web` requires and `libs` does not provide, and the
/// former bundles that nothing requires.
fn required_and_kept(state: &State) -> (Vec<String>, Vec<String>) {
    let committed = |name: &str| {
        let environment = state.environments.get(name)?;
        environment.revisions.get(&environment.committed)
    };
    let (web, libs) = (committed("web"), committed("libs"));
    let requires = web.iter().flat_map(|web| &web.definition.requires);
    let ranges: Vec<_> = requires.map(|(_, range)| range).collect();
    let Some(libs) = libs else { return (Vec::new(), Vec::new()) };
    let meets = |provides: &BTreeMap<String, Version>, range: &Range| {
        provides.get("api").is_some_and(|version| range.fits(version))
    };
    let is_unmet = |range: &&&Range| {
        let all = libs.kept.iter().map(|kept| &kept.provides);
        !all.chain([&libs.definition.provides]).any(|provides| meets(provides, range))
    };
    let unmet = ranges.iter().filter(is_unmet).map(ToString::to_string).collect();
    let in_vain = libs.kept.iter().filter(|kept| {
        let own = |range: &&Range| meets(&libs.definition.provides, range);
        !ranges.iter().any(|range| meets(&kept.provides, range) && !own(range))
    });
    (unmet, in_vain.map(|kept| kept.image.to_string()).collect())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    /// Each action is an edit of `libs` or `web`, or a start of one, of both, or of what was
    /// before.
    #[test]
    fn what_is_required_stays_and_nothing_else(
        actions in prop::collection::vec((0..6_u8, 0..3_u8, any::<bool>()), 1..40)
    ) {
        let mdb = mdb("web1 a, web2 a");
        let mut state = State::default();
        for (number, (action, version, disjoint)) in actions.into_iter().enumerate() {
            let before = state.clone();
            let newest =
                |name: &str| state.environments.get(name).map_or(0, |one| one.newest());
            let [libs, web] =
                ["libs", "web"].map(|name| format!("{name}@{}", newest(name)));
            let started = match action {
                0 => {
                    let mut edited = bundle("libs", &["web"], &format!("n{number}"));
                    edited["provides"] = json!({"api": version.to_string()});
                    edited["disjoint"] = disjoint.into();
                    edit(&mut state, &mdb, edited).unwrap();
                    continue;
                }
                1 => {
                    let mut edited = environment("web", &format!("i{number}"));
                    edited["requires"] = json!({"api": format!("={version}")});
                    edited["depends_on"] = json!(["libs"]);
                    // It is refused before there is `libs`.
                    let _edited = edit(&mut state, &mdb, edited);
                    continue;
                }
                2 => start(&mut state, &libs, Kind::User),
                3 => start(&mut state, &web, Kind::User),
                4 => {
                    let environments = vec![libs, web];
                    let order = StartOrder { environments, ..StartOrder::default() };
                    state.start(&order, &at(0))
                }
                _ => start(&mut state, if disjoint { "libs" } else { "web" }, Kind::Rollback),
            };
            if started.is_err() {
                continue;
            }
            go_on(&mut state, &mdb, 0);
            prop_assert_eq!(state.unfinished().count(), 0);
            let (unmet, in_vain) = required_and_kept(&state);
            let (was_unmet, _) = required_and_kept(&before);
            prop_assert!(unmet.is_empty() || !was_unmet.is_empty(), "{unmet:?} is not there");
            // A revision that nobody has started decides itself what stays.
            let libs = state.environments.get("libs");
            let is_newest = libs.is_none_or(|libs| libs.committed == libs.newest());
            prop_assert!(in_vain.is_empty() || !is_newest, "{in_vain:?} stays in vain");
        }
    }
}
