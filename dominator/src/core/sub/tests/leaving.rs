//! Bundles that leave a machine without a base.
// tidy: core

use expect_test::expect;
use model::image::ImageName;
use model::image::composition::{compose, nothing};
use model::scope::Scope;

use super::super::*;
use super::script::{Script, image};

/// An image of bundles alone, each with a file of its name.
fn bundles(names: &[&str]) -> Arc<RequiredImage> {
    let bundle = |name: &&str| {
        let ImageState::Ready(image) = image(name, &[(&format!("/{name}"), "1")]) else {
            panic!("it is ready");
        };
        let content = model::image::Content { filter: None, ..image.content.clone() };
        Arc::new(RequiredImage::new(content, image.tree.clone()))
    };
    let parts = [nothing()].into_iter().chain(names.iter().map(bundle));
    Arc::new(compose(parts.collect()).unwrap())
}

/// A machine that has these bundles.
fn having(names: &[&str], required: ImageState) -> Script {
    let former = bundles(names);
    let mut script = Script::new(required);
    script.reply.last_image = Some(former.name().clone());
    script.reply.scope = Scope::of(&former.scan, &script.reply.exclusions);
    script.former = Some(former);
    let files: Vec<String> = names.iter().map(|name| format!("/{name}")).collect();
    script.scan(&files.iter().map(|file| (file.as_str(), "1")).collect::<Vec<_>>());
    script
}

#[test]
fn the_files_of_a_bundle_that_leaves_are_removed() {
    let mut script = having(&["a", "b"], ImageState::Ready(bundles(&["b"])));
    script.poll();
    script.accept();
    let Some(Call::Prepare(request, _)) = script.accept() else { panic!("nothing to prepare") };
    let removed: Vec<String> = request.plan.changed_paths().map(ToString::to_string).collect();
    assert_eq!((request.image.as_str(), removed), ("(nothing) + b", vec!["/a".to_owned()]));
    script.check(expect![[r#"
        0   assigned connecting       not reached yet
                     -> poll for all
        0   polled   image-not-ready  reading a, whose files go
        0   polled   preparing        sending the signatures of a
                     -> offer with 0 signatures
        0   accepted preparing        staging 1 change: /a (extra)
                     -> prepare 1: 1 operations
        0   accepted preparing        staging 1 change: /a (extra)
    "#]]);
}

#[test]
fn the_last_bundle_leaves_when_no_image_is_required() {
    let mut script = having(&["a", "b"], ImageState::Undefined);
    script.poll();
    (0..2).for_each(|_| drop(script.accept()));
    let Some(Call::Prepare(request, _)) = script.accept() else { panic!("nothing to prepare") };
    assert_eq!((request.image.as_str(), request.plan.operations.len()), ("(nothing)", 2));
    script.reply.last_image = Some(ImageName::nothing());
    script.poll();
    script.check(expect![[r#"
        0   assigned connecting       not reached yet
                     -> poll for all
        0   polled   image-not-ready  reading a, b, whose files go
        0   polled   preparing        sending the signatures of a
                     -> offer with 0 signatures
        0   accepted preparing        sending the signatures of b
                     -> offer with 0 signatures
        0   accepted preparing        staging 2 changes
                     -> prepare 1: 2 operations
        0   accepted preparing        staging 2 changes
        0   polled   image-undefined  the machine database names no image for it
    "#]]);
}

#[test]
fn a_machine_waits_while_the_image_server_does_not_give_what_leaves() {
    let mut script = having(&["a", "b"], ImageState::Ready(bundles(&["b"])));
    let former = script.former.take();
    script.poll();
    script.wait(5);
    script.former = former;
    script.wait(60);
    script.check(expect![[r#"
        0   assigned connecting       not reached yet
                     -> poll for all
        0   polled   image-not-ready  reading a, whose files go
        0   polled   image-not-ready  the files of a go with the next update: it does no
        5   wake     image-not-ready  the files of a go with the next update: it does no
        65  wake     preparing        sending the signatures of a
                     -> offer with 0 signatures
    "#]]);
}
