//! A disk that is too full for the objects of an update: what no image has is removed first.
// tidy: core

use std::sync::Arc;

use api::subd::{FreeSpace, LastUpdate, UpdateOutcome};
use model::filter::Filter;
use model::image::ImageName;
use model::image::required::RequiredImage;

use super::super::*;
use super::blocked::{finish, updated};
use super::script::{Script, image};

const OLD: [(&str, &str); 2] = [("/a", "1"), ("/gone", "g")];
const NEW: [(&str, &str); 2] = [("/a", "2"), ("/b", "b")];
const FULL: [(&str, &str); 4] = [("/a", "1"), ("/gone", "g"), ("/log", "x"), ("/log2", "x")];

fn full(mut script: Script, free_bytes: u64) -> Script {
    script.reply.space = FreeSpace { free_bytes, free_inodes: 10 };
    script.scan(&FULL);
    script
}

/// The paths of the update that is staged, and its image.
fn staged(call: Option<Call>) -> (String, Vec<String>) {
    let Some(Call::Prepare(request, _)) = call else { panic!("nothing to prepare: {call:?}") };
    let paths = request.plan.operations.iter().map(ToString::to_string);
    (request.image.to_string(), paths.collect())
}

#[test]
fn what_neither_image_has_is_removed_before_the_objects_are_fetched() {
    let mut script = full(updated(&OLD, &NEW), 100);
    script.poll();
    let removals = ["remove /log2 (extra)", "remove /log (extra)"].map(str::to_owned);
    let call = script.called.as_ref().and_then(|(_, call)| call.clone());
    assert_eq!(staged(call), ("old".to_owned(), removals.to_vec()));
    assert_eq!(script.sub.detail(), "making room: staging 2 changes");
    finish(&mut script, &OLD, "old");
    // The space is free when the machine has deleted what it kept for an undo.
    assert_eq!(script.sub.status(), Status::InsufficientSpace);
    assert!(script.called.is_none());
    script.reply.space.free_bytes = 8_292;
    script.poll();
    assert_eq!(script.sub.status(), Status::Fetching);
    assert!(matches!(script.accept(), Some(Call::Fetch(_))));
}

#[test]
fn a_repair_makes_room_for_itself() {
    let ImageState::Ready(new) = image("new", &NEW) else { panic!("the image is ready") };
    let mut script = updated(&OLD, &NEW);
    script.reply.last_image = Some(new.name().clone());
    let mut script = full(script, 4_096);
    script.poll();
    let removals = ["/log2", "/log", "/gone"].map(|path| format!("remove {path} (extra)")).to_vec();
    assert_eq!(staged(script.accept()), ("new".to_owned(), removals));
}

/// What is removed comes again each time.
#[test]
fn room_that_is_filled_again_at_once_is_not_made_for_ever() {
    let mut script = full(updated(&OLD, &NEW), 0);
    script.poll();
    finish(&mut script, &FULL, "old");
    assert_eq!(script.sub.status(), Status::NotConverging);
    assert!(script.sub.detail().contains("/log2 (extra), /log (extra)"), "{}", script.sub.detail());
    assert!(script.called.is_none());
}

#[test]
fn nothing_is_removed_first_if_it_is_not_known_to_be_no_images_or_frees_too_little() {
    let ready = |name: &str, files: &[(&str, &str)]| {
        let ImageState::Ready(image) = image(name, files) else { panic!("the image is ready") };
        image
    };
    let other_filter = || {
        let old = ready("old", &OLD);
        let mut content = old.content.clone();
        content.filter = Some(Filter::new(["/kept", "/log"]).unwrap());
        Arc::new(RequiredImage::new(content, old.tree.clone()))
    };
    let undone = || {
        let name = ImageName::new("old").unwrap();
        Some(LastUpdate::new(9, name, UpdateOutcome::Undone("it is ill".into())))
    };
    let with = |change: &dyn Fn(&mut Script)| {
        let mut script = full(updated(&OLD, &NEW), 0);
        change(&mut script);
        script.poll();
        assert!(script.called.is_none());
        script.sub.status()
    };
    let cases: [&dyn Fn(&mut Script); 7] = [
        &|script| script.former = None,
        &|script| script.former = Some(ready("old", &FULL)),
        &|script| script.former = Some(other_filter()),
        &|script| script.reply.last_image = None,
        &|script| script.reply.last_update = undone(),
        &|script| script.scan(&[("/a", "1"), ("/log", "x")]),
        &|script| {
            let scan = script.reply.scan.as_mut().unwrap();
            scan.externally_linked = vec!["/log".parse().unwrap()];
        },
    ];
    for (number, change) in cases.into_iter().enumerate() {
        assert_eq!(with(change), Status::InsufficientSpace, "{number}");
    }
}
