//! The signatures of an image are sent to the sub; it may refuse them.
// tidy: core

use std::sync::Arc;

use expect_test::expect;
use model::signing::Signature;

use super::super::*;
use super::held::ready;
use super::script::Script;
use model::image::required::RequiredImage;

/// Gives the image this number of invalid signatures.
fn sign(script: &mut Script, count: usize) {
    let ImageState::Ready(image) = script.image.clone() else { panic!("the image is ready") };
    let signature = Signature { statement: "statement".to_owned(), signature: "by".to_owned() };
    let signed = RequiredImage::clone(&image).with_signatures(vec![signature; count]);
    script.image = ImageState::Ready(Arc::new(signed));
    script.assign();
}

#[test]
fn signatures_are_sent_once_before_the_update_and_again_when_they_change() {
    let mut script = ready();
    sign(&mut script, 1);
    script.scan(&[]);
    script.poll();
    script.refuse(FailureKind::Untrusted, "1 of 2");
    sign(&mut script, 2);
    assert!(matches!(script.accept(), Some(Call::Offer(_))));
    script.refuse(FailureKind::Untrusted, "it is older");
    script.wait(60);
    script.refuse(FailureKind::NoMethod, "an old release");
    script.accept();
    script.check(expect![[r#"
        0   assigned connecting       not reached yet
                     -> poll for all
        0   assigned connecting       not reached yet
        0   polled   rescanning       reading the new scan
        0   polled   preparing        sending the signatures of base
                     -> offer with 1 signatures
        0   failed   signature-refused the machine refused to check the signatures: 1 of 
        0   assigned preparing        sending the signatures of base
                     -> offer with 2 signatures
        0   accepted preparing        staging 1 change: /a (missing)
                     -> prepare 1: 1 operations
        0   failed   signature-refused the machine refused to prepare the update: it is o
        60  wake     preparing        sending the signatures of base
                     -> offer with 2 signatures
        60  failed   preparing        staging 1 change: /a (missing)
                     -> prepare 2: 1 operations
        60  accepted preparing        staging 1 change: /a (missing)
    "#]]);
}
