//! Tests of signatures: which count, and how they change.

#![allow(clippy::unwrap_used, reason = "what these functions unwrap fails the test")]

use certs::signing_key::SigningKey;
use model::image::ImageName;
use model::object::{Algorithm, ObjectId};
use model::signing::endorsement::*;
use model::signing::signature::{SignatureError, SignaturesError, changed};
use model::signing::{Signature, Statement, TrustedKeys};

/// Made by `ssh-keygen -t ed25519 -N ''`; nobody uses them.
const KEYS: [&str; 3] =
    [include_str!("keys/alice"), include_str!("keys/bob"), include_str!("keys/mallory")];

fn key(index: usize) -> SigningKey {
    SigningKey::read(KEYS[index], None).unwrap()
}

fn name(text: &str) -> ImageName {
    text.parse().unwrap()
}

fn digest(text: &str) -> ObjectId {
    Algorithm::Blake3.digest(text.as_bytes())
}

fn sign(who: usize, image: &str, signed: u64, expires: Option<u64>) -> Signature {
    let statement = Statement { image: name(image), digest: digest(image), signed, expires };
    key(who).sign(&statement).unwrap()
}

fn trusted(lines: &[(usize, &str)], needed: u32) -> TrustedKeys {
    let line =
        |(who, option): &(usize, &str)| option.to_string() + &key(*who).public_line().unwrap();
    let text: Vec<String> = lines.iter().map(line).collect();
    TrustedKeys::read(&text.join("\n"), needed).unwrap()
}

/// Signatures, and how new the image is, or how many count and why the others do not.
type Row = (&'static str, Vec<Signature>, Result<u64, (u32, String)>);

#[test]
fn only_enough_different_trusted_keys_count() {
    let both = trusted(&[(0, ""), (1, "images=\"web/,base\" ")], 2);
    let fine = |who, signed| sign(who, "web/8", signed, None);
    let (alice, bob, mallory) = (fine(0, 100), fine(1, 90), fine(2, 100));
    let (of_alice, of_bob, of_mallory) =
        (key(0).fingerprint(), key(1).fingerprint(), key(2).fingerprint());
    let forged = Signature { statement: bob.statement.clone(), ..alice.clone() };
    let short = |found, remarks: &[&str]| Err((found, remarks.join("; ")));
    let table: [Row; 11] = [
        ("both", vec![alice.clone(), bob.clone()], Ok(90)),
        ("none", vec![], short(0, &[])),
        ("one", vec![alice.clone()], short(1, &[])),
        ("one twice", vec![alice.clone(), fine(0, 101)], short(1, &[])),
        (
            "one by a stranger",
            vec![alice.clone(), mallory],
            short(1, &[&format!("{of_mallory} is not trusted")]),
        ),
        (
            "one that was not signed",
            vec![alice.clone(), forged],
            short(1, &[&format!("the key {of_alice} did not sign this statement")]),
        ),
        (
            "one of another image",
            vec![alice.clone(), sign(1, "web/7", 100, None)],
            short(
                1,
                &[&format!("it is about the image web/7 with the digest {}", digest("web/7"))],
            ),
        ),
        (
            "one that has expired",
            vec![alice.clone(), sign(1, "web/8", 10, Some(150))],
            short(1, &[&format!("what {of_bob} has signed expired at 1970-01-01T00:02:30Z")]),
        ),
        ("one that expires later", vec![alice.clone(), sign(1, "web/8", 10, Some(151))], Ok(10)),
        (
            "one of the future",
            vec![alice.clone(), sign(1, "web/8", 151 + CLOCK_SKEW_SECONDS_MAX, None)],
            short(
                1,
                &[&format!(
                    "{of_bob} seems to have signed at 1970-01-02T00:02:31Z, and the clock of the \
                     machine shows 1970-01-01T00:02:30Z"
                )],
            ),
        ),
        ("several by each", vec![alice, bob, fine(0, 130), fine(1, 120)], Ok(120)),
    ];
    let policy = Policy { keys: &both, needed: 2, now: 150, passed: 0, even_expired: false };
    let judge = |image: &str, signatures: &[Signature], policy: &Policy<'_>| {
        let result = endorse(&name(image), &digest(image), signatures, policy);
        result.map(|endorsed| endorsed.signed).map_err(|no| (no.found, no.remarks.join("; ")))
    };
    for (what, signatures, expected) in table {
        assert_eq!(judge("web/8", &signatures, &policy), expected, "{what}");
    }
    let two = |image: &str| [sign(0, image, 1, None), sign(1, image, 1, None)];
    let elsewhere = format!("{of_bob} is trusted for other images only");
    for (image, expected) in [
        ("base", Ok(1)),
        ("web/a/b", Ok(1)),
        ("base/1", Err((1, elsewhere.clone()))),
        ("website", Err((1, elsewhere))),
    ] {
        assert_eq!(judge(image, &two(image), &policy), expected, "{image}");
    }
    // What is known to have passed counts, whatever the clock says; and a machine that has the
    // image already keeps it.
    let old = [sign(0, "web/8", 10, Some(50)), sign(1, "web/8", 10, Some(50))];
    let slow = Policy { now: 20, ..policy };
    assert_eq!(judge("web/8", &old, &slow), Ok(10));
    assert!(judge("web/8", &old, &Policy { passed: 50, ..slow }).is_err());
    assert_eq!(judge("web/8", &old, &Policy { even_expired: true, ..policy }), Ok(10));
}

#[test]
fn each_key_has_one_signature_on_an_image() {
    let image = (&name("web/8"), &digest("web/8"));
    let at = |who, signed| sign(who, "web/8", signed, None);
    let change = |have: &[Signature], add: &[Signature], remove: &[String]| {
        changed(have, add, remove, image)
    };
    let one = change(&[], &[at(0, 10)], &[]).unwrap();
    let two = change(&one, &[at(1, 10), at(0, 11)], &[]).unwrap();
    assert_eq!(two, [at(0, 11), at(1, 10)]);
    let key_of = |who| key(who).fingerprint();
    assert_eq!(change(&two, &[], &[key_of(0)]).unwrap(), [at(1, 10)]);
    let older = SignaturesError::Older { key: key_of(0) };
    assert_eq!(change(&two, &[at(0, 10)], &[]), Err(older));
    let absent = SignaturesError::NotThere { key: key_of(2) };
    assert_eq!(change(&two, &[], &[key_of(2)]), Err(absent));
    let other = sign(0, "web/7", 1, None);
    let source = SignatureError::OtherImage { image: name("web/7"), digest: digest("web/7") };
    let bad = SignaturesError::Bad { number: 2, source };
    assert_eq!(change(&[], &[at(1, 1), other], &[]), Err(bad));
    let many = vec![at(0, 1); 17];
    assert_eq!(change(&[], &many, &[]), Err(SignaturesError::TooMany));
}

#[test]
fn other_formats_are_refused_in_words() {
    let good = sign(0, "web/8", 1, None);
    let broken = |signature: String| Signature { signature, ..good.clone() }.check().unwrap_err();
    assert!(matches!(broken("x".to_owned()), SignatureError::Format { .. }));
    assert_eq!(broken("x".repeat(2_049)), SignatureError::TooLong { length: 2_049 });
    let elsewhere = include_str!("keys/other-namespace.sig").to_owned();
    assert_eq!(
        broken(elsewhere),
        SignatureError::Namespace { namespace: "file".to_owned(), wanted: "dominator-image-v1" }
    );
    let ecdsa = include_str!("keys/ecdsa.sig").to_owned();
    assert_eq!(broken(ecdsa), SignatureError::Kind { kind: "ecdsa-sha2-nistp256".to_owned() });
    // Every byte of the statement matters.
    for index in 0..good.statement.len() {
        let mut bytes = good.statement.clone().into_bytes();
        bytes[index] ^= 1;
        let statement = String::from_utf8(bytes).unwrap();
        let changed = Signature { statement, ..good.clone() };
        assert!(changed.check().is_err(), "byte {index}");
    }
}

#[test]
fn keys_are_read_or_the_line_is_named() {
    let line = key(0).public_line().unwrap();
    let no = |text: &str| TrustedKeys::read(text, 1).unwrap_err().to_string();
    assert_eq!(no(""), "1 keys must sign, but only 0 are trusted");
    assert_eq!(no(&format!("# x\n\n{line}\n{line}")), "line 4: the key is named twice");
    let options = [
        ("images=/web/ ", "line 1: `/web/` begins with a slash: names of images do not"),
        ("images=\"web", "line 1: after images=\"NAME,DIRECTORY/\" comes a key"),
        ("images=a//b ", "line 1: `a//b` is no image name: the component `` is empty"),
    ];
    for (option, error) in options {
        assert_eq!(no(&format!("{option}{line}")), error);
    }
    assert!(no("ssh-ed25519 AAAA").starts_with("line 1: it is no ed25519 key as `ssh-keygen`"));
    assert_eq!(
        no(include_str!("keys/ecdsa.pub")),
        "line 1: a key of the kind ecdsa-sha2-nistp256: only ssh-ed25519 counts"
    );
    let two = TrustedKeys::read(&line, 2).unwrap_err();
    assert_eq!(two.to_string(), "2 keys must sign, but only 1 are trusted");
    let closed = include_str!("keys/closed");
    assert_eq!(
        SigningKey::read(closed, None).unwrap_err().to_string(),
        "the key is encrypted and needs a passphrase"
    );
    assert!(SigningKey::read(closed, Some("wrong")).is_err());
    assert!(SigningKey::read(closed, Some("open sesame")).is_ok());
}
