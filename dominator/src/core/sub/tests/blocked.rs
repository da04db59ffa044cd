//! Paths that cannot be changed: repairs go on, new images are held back.
// tidy: core

use std::sync::Arc;

use api::subd::{Activity, LastUpdate, UpdateOutcome};
use expect_test::expect;
use model::image::ImageName;
use model::plan::Occupant;

use super::super::*;
use super::script::{Script, image};
use model::image::required::RequiredImage;
use model::scope::Scope;

fn ready_image(files: &[(&str, &str)], name: &str) -> Arc<RequiredImage> {
    let ImageState::Ready(image) = image(name, files) else { panic!("the image is ready") };
    image
}

/// A machine that has the image `old`, and must have `new`.
pub(super) fn updated(old: &[(&str, &str)], new: &[(&str, &str)]) -> Script {
    let mut script = Script::new(image("new", new));
    script.reply.scope = Scope::of(&ready_image(new, "new").scan, &script.reply.exclusions);
    script.former = Some(ready_image(old, "old"));
    script.reply.last_image = Some(ImageName::new("old").unwrap());
    script
}

/// Carries out the staged update to the end; the sub then has `files`.
pub(super) fn finish(script: &mut Script, files: &[(&str, &str)], image: &str) {
    let Some(Call::Prepare(request, _)) = script.accept() else { panic!("nothing to prepare") };
    let update_id = request.update_id;
    assert_eq!(request.plan.blocked, []);
    script.reply.activity = Activity::Prepared { update_id };
    script.poll();
    script.accept();
    script.reply.activity = Activity::Idle;
    let image = ImageName::new(image).unwrap();
    script.reply.last_image = Some(image.clone());
    let last = LastUpdate::new(update_id, image, UpdateOutcome::Done);
    script.reply.last_update = Some(LastUpdate { verified_generation: Some(1), ..last });
    let refused = script.reply.scan.clone().map(|scan| scan.unreadable).unwrap_or_default();
    script.scan(files);
    script.reply.scan.as_mut().unwrap().unreadable = refused;
    script.poll();
}

#[test]
fn other_drift_is_repaired_and_the_machine_is_partly_synced() {
    let files = [("/a", "1"), ("/b", "1")];
    let mut script = Script::scanning(image("base", &files), &files);
    script.cache(&["1"]);
    script.scan(&[("/a", "x"), ("/b", "x")]);
    script.refuse_changes(&["/a"]);
    script.poll();
    finish(&mut script, &[("/a", "x"), ("/b", "1")], "base");
    // The obstacle is gone: the report lists it no more.
    script.refuse_changes(&[]);
    script.poll();
    script.check(expect![[r#"
        0   assigned connecting       not reached yet
                     -> poll for all
        0   polled   rescanning       reading the new scan
        0   polled   synced           equals base
        0   polled   preparing        staging 1 change: /b (content)
                     -> prepare 1: 1 operations
        0   accepted preparing        staging 1 change: /b (content)
        0   polled   updating         carrying out 1 change: /b (content)
                     -> commit 1
        0   accepted updating         the update was ordered
        0   polled   partly-synced    equals base, except for 1 path that cannot be chan
        0   polled   preparing        staging 1 change: /a (content)
                     -> prepare 2: 1 operations
    "#]]);
}

#[test]
fn a_machine_with_a_directory_that_is_left_alone_is_repaired_and_partly_synced() {
    let files = [("/a", "1"), ("/b", "1")];
    let mut script = Script::scanning(image("base", &files), &files);
    script.cache(&["1"]);
    script.scan(&[("/a", "x"), ("/b", "1")]);
    script.leave_alone("/b");
    script.poll();
    finish(&mut script, &files, "base");
    script.check(expect![[r#"
        0   assigned connecting       not reached yet
                     -> poll for all
        0   polled   rescanning       reading the new scan
        0   polled   synced           equals base
        0   polled   preparing        staging 1 change: /a (content)
                     -> prepare 1: 1 operations
        0   accepted preparing        staging 1 change: /a (content)
        0   polled   updating         carrying out 1 change: /a (content)
                     -> commit 1
        0   accepted updating         the update was ordered
        0   polled   partly-synced    equals base, except for 1 path that cannot be chan
    "#]]);
}

#[test]
fn a_new_image_is_held_back_until_an_operator_lets_it_go_on() {
    let mut script = updated(&[("/a", "1"), ("/b", "1")], &[("/a", "2"), ("/b", "2")]);
    script.cache(&["2"]);
    script.scan(&[("/a", "1"), ("/b", "1")]);
    script.refuse_changes(&["/a"]);
    script.poll();
    script.step("go-on", Event::Ordered(SubOrder::GoOn));
    finish(&mut script, &[("/a", "1"), ("/b", "2")], "new");
    script.check(expect![[r#"
        0   assigned connecting       not reached yet
                     -> poll for all
        0   polled   rescanning       reading the new scan
        0   polled   blocked          /a: it is busy; new is not installed without them,
                     -> is blocked for new
        0   go-on    preparing        staging 1 change: /b (content)
                     -> prepare 1: 1 operations
        0   accepted preparing        staging 1 change: /b (content)
        0   polled   updating         carrying out 1 change: /b (content)
                     -> commit 1
        0   accepted updating         the update was ordered
        0   polled   partly-synced    equals new, except for 1 path that cannot be chang
    "#]]);
}

#[test]
fn a_new_image_is_not_held_back_by_what_its_former_required_too() {
    let mut script = updated(&[("/a", "1"), ("/b", "1")], &[("/a", "1"), ("/b", "2")]);
    script.cache(&["1", "2"]);
    script.scan(&[("/a", "x"), ("/b", "1"), ("/extra", "x")]);
    script.refuse_changes(&["/a", "/extra"]);
    script.poll();
    script.check(expect![[r#"
        0   assigned connecting       not reached yet
                     -> poll for all
        0   polled   rescanning       reading the new scan
        0   polled   preparing        staging 2 changes
                     -> prepare 1: 2 operations
    "#]]);
}

#[test]
fn a_machine_that_lacks_blocked_paths_is_no_success_of_its_image_and_gets_nothing_ahead() {
    let mut script = updated(&[("/a", "1"), ("/b", "1")], &[("/a", "1"), ("/b", "2")]);
    script.planned = image("next", &[("/a", "3"), ("/b", "3")]);
    script.writes_ends = true;
    script.assign();
    script.cache(&["1", "2"]);
    script.scan(&[("/a", "x"), ("/b", "1")]);
    script.refuse_changes(&["/a"]);
    script.poll();
    finish(&mut script, &[("/a", "x"), ("/b", "2")], "new");
    script.poll();
    // The obstacle is gone, and so is the difference.
    script.refuse_changes(&[]);
    script.scan(&[("/a", "1"), ("/b", "2")]);
    script.poll();
    script.check(expect![[r#"
        0   assigned connecting       not reached yet
                     -> poll for all
        0   assigned connecting       not reached yet
        0   polled   rescanning       reading the new scan
        0   polled   preparing        staging 1 change: /b (content)
                     -> prepare 1: 1 operations
        0   accepted preparing        staging 1 change: /b (content)
        0   polled   updating         carrying out 1 change: /b (content)
                     -> commit 1
        0   accepted updating         the update was ordered
        0   polled   partly-synced    equals new, except for 1 path that cannot be chang
                     -> release: Withdrawn
        0   polled   partly-synced    equals new, except for 1 path that cannot be chang
                     -> cleanup of 2
        0   polled   synced           equals new; fetches 1 object (1 byte) of next, whi
    "#]]);
}

#[test]
fn what_no_image_can_have_is_named_although_the_machine_is_synced() {
    let files = [("/a", "1")];
    let mut script = Script::scanning(image("base", &files), &files);
    script.scan(&files);
    let sockets = ["/s", "/t"].map(|path| (path.parse().unwrap(), "it is a socket".to_owned()));
    script.reply.scan.as_mut().unwrap().unreadable = sockets.into();
    script.poll();
    assert_eq!(script.sub.detail(), "equals base; 2 paths are left alone: /s: it is a socket");
}

#[test]
fn what_was_found_in_staging_is_left_out_of_the_next_plan() {
    let files = [("/a", "1"), ("/b", "1")];
    let mut script = Script::scanning(image("base", &files), &files);
    script.cache(&["1"]);
    script.scan(&[("/a", "x"), ("/b", "x")]);
    script.poll();
    let Some(Call::Prepare(request, _)) = script.accept() else { panic!("nothing to prepare") };
    let why = UpdateOutcome::NotPrepared("/a cannot be changed: it is busy".to_owned());
    let image = ImageName::new("base").unwrap();
    script.reply.last_update = Some(LastUpdate::new(request.update_id, image, why));
    // More paths than a report lists may be refused: this one is not in it.
    script.refuse_changes(&["/a"]);
    script.reply.scan.as_mut().unwrap().unreadable.clear();
    script.poll();
    script.wait(60);
    script.check(expect![[r#"
        0   assigned connecting       not reached yet
                     -> poll for all
        0   polled   rescanning       reading the new scan
        0   polled   synced           equals base
        0   polled   preparing        staging 2 changes
                     -> prepare 1: 2 operations
        0   accepted preparing        staging 2 changes
        0   polled   update-failed    the update not prepared: /a cannot be changed: it 
        60  wake     preparing        staging 1 change: /b (content)
                     -> prepare 2: 1 operations
    "#]]);
}

#[test]
fn a_sub_of_an_earlier_release_is_blocked_by_everything() {
    let mut script = updated(&[], &[("/a", "1"), ("/b", "2")]);
    script.refused = None;
    script.cache(&["1", "2"]);
    script.scan(&[("/a", "x"), ("/b", "1")]);
    let used = ("/a".parse().unwrap(), Occupant::SwapFile);
    script.reply.scan.as_mut().unwrap().occupied = vec![used];
    script.poll();
    script.check(expect![[r#"
        0   assigned connecting       not reached yet
                     -> poll for all
        0   polled   rescanning       reading the new scan
        0   polled   blocked          /a: it is or holds an active swap file
    "#]]);
}
