//! Rollbacks to the former image.
// tidy: core

use api::dominator::explain::ImageSource;
use api::dominator::orders::DefaultImage;
use api::dominator::rollback::Rollback;
use api::dominator::text::explanation_text;
use model::image::ImageName;
use model::tree::Time;

use super::super::*;
use super::script::{Script, image};
use crate::core::identity::IdentityVerdict;

fn name(text: &str) -> ImageName {
    ImageName::new(text).unwrap()
}

fn rollback(from: &str, image: &str) -> Option<Arc<Rollback>> {
    let (who, why) = ("ann".to_owned(), "it crashes".to_owned());
    let (from, image) = (name(from), name(image));
    Some(Arc::new(Rollback { from, image, who, why, since: Time::default() }))
}

/// The record requires this image, and the machine has this rollback.
fn require(script: &mut Script, required: &str, rollback: Option<Arc<Rollback>>) {
    let machine = Machine { required_image: required.into(), ..(*script.sub.machine).clone() };
    let (machine, image) = (Arc::new(machine), script.image.clone());
    let planned = ImageState::Undefined;
    script.step("assigned", Event::Assigned { machine, image, planned, rollback });
}

#[test]
fn a_machine_gets_its_former_image_until_its_record_requires_another() {
    let mut script = Script::scanning(image("web/2", &[("/a", "2")]), &[("/a", "2")]);
    script.reply.last_image = Some(name("web/2"));
    script.poll();
    require(&mut script, "web/2", None);
    assert_eq!(script.sub.status(), Status::Synced);

    script.image = image("web/1", &[("/a", "1")]);
    require(&mut script, "web/2", rollback("web/2", "web/1"));
    assert_eq!(script.sub.required(), Some(name("web/1")));
    assert_eq!(script.sub.status(), Status::Fetching);
    script.accept();
    script.scan(&[("/a", "1")]);
    script.reply.last_image = Some(name("web/1"));
    script.poll();
    let detail = "equals web/1; rolled back from web/2 by ann: it crashes";
    assert_eq!((script.sub.status(), script.sub.detail()), (Status::Synced, detail));
    let explanation = script.sub.explain(script.time());
    assert!(matches!(explanation.must_have.source, ImageSource::Rollback(_)));
    let text = explanation_text(&explanation, Time::default());
    let remedy = "ends the rollback: the machine gets web/2 again";
    for line in ["web/1, rolled back from web/2 by ann: it crashes; ", remedy] {
        assert!(text.contains(line), "{text}");
    }

    // Another image is required: the rollback is over, though it was not taken back.
    for required in ["web/3", "web/1"] {
        script.image = image(required, &[("/a", "1")]);
        require(&mut script, required, rollback("web/2", "web/1"));
        assert_eq!(script.sub.required(), Some(name(required)));
        assert_eq!(script.sub.rollback(), None);
    }
}

#[test]
fn another_machine_does_not_tell_the_former_image() {
    let mut script = Script::scanning(image("web/2", &[]), &[]);
    script.reply.last_image = Some(name("web/1"));
    script.poll();
    assert_eq!(script.sub.verified_image(), Some(name("web/1")));
    let mismatch = Some("answers as web2".into());
    script.step("wrong", Event::IdentityJudged(IdentityVerdict { number: 1, mismatch }));
    assert_eq!(script.sub.verified_image(), None);
}

#[test]
fn a_machine_without_an_image_is_rolled_back_from_the_default_one() {
    let mut script = Script::scanning(image("web/2", &[]), &[]);
    let default = |image: &str| {
        let (image, who) = (name(image), "ann".to_owned());
        Event::DefaultImage(Some(Arc::new(DefaultImage { image, who, since: Time::default() })))
    };
    script.step("default", default("web/2"));
    require(&mut script, "", rollback("web/2", "web/1"));
    assert_eq!(script.sub.required(), Some(name("web/1")));
    let source = script.sub.explain(script.time()).must_have.source;
    assert!(matches!(source, ImageSource::Rollback(_)), "{source:?}");
    script.step("default", default("web/3"));
    assert_eq!(script.sub.required(), Some(name("web/3")));
}
