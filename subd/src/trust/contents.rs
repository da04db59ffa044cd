//! Decides whether the content of computed files is what their signers have signed for this
//! machine, and not older than what the machine has.
// tidy: core

use core::net::IpAddr;
use std::collections::BTreeMap;

use model::display::error_chain;
use model::image::ComputedRule;
use model::image::required::RequiredImage;
use model::object::ObjectId;
use model::path::TreePath;
use model::signing::openssh::PublicKey;
use model::signing::{ContentsStatement, Signature};
use model::tree::Tree;
use serde::{Deserialize, Serialize};

use super::verification::{Refusal, time_text};

/// How much later than by the machine's clock contents may have been signed, in seconds.
const AHEAD_MAX: u64 = 300;

/// The most paths that are remembered.
const PATHS_MAX: usize = 4_000;

/// Content that was accepted for a computed file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AcceptedContent {
    pub object: ObjectId,
    /// When it was signed, in seconds after 1970-01-01 UTC.
    pub issued: u64,
}

/// By path, for each path that ever had signed content.
pub type AcceptedContents = BTreeMap<TreePath, AcceptedContent>;

/// What is known of a machine that gets contents.
#[derive(Clone, Copy, Debug)]
pub struct ContentsPolicy<'a> {
    /// The names of the machine.
    pub names: &'a [String],
    /// The machine's clock, in seconds after 1970-01-01 UTC.
    pub now: u64,
    /// What was accepted before.
    pub before: Option<&'a AcceptedContents>,
}

/// True if a name cannot be that of every machine.
pub fn is_own_name(name: &str) -> bool {
    let address: Option<IpAddr> = name.parse().ok();
    !name.is_empty()
        && !name.eq_ignore_ascii_case("localhost")
        && !address.is_some_and(|address| address.is_loopback())
}

/// Checks the computed files of `after`, which has those of `image`. Content that was accepted last
/// needs no signature again. Returns what is remembered when the machine has the files.
///
/// # Errors
///
/// [`Refusal::Content`] names the first file whose content is not signed as it must be.
pub fn verify_contents(
    image: &RequiredImage,
    signatures: &[Signature],
    after: &Tree,
    policy: &ContentsPolicy<'_>,
) -> Result<AcceptedContents, Refusal> {
    let mut accepted = policy.before.cloned().unwrap_or_default();
    if image.content.signers.is_empty() {
        return Ok(accepted);
    }
    let checked: Vec<_> = signatures.iter().map(Signature::check_contents).collect();
    // What the machine excludes is not in the tree.
    let files =
        image.content.computed.iter().filter_map(|rule| Some((rule, after.file(&rule.path)?)));
    for (rule, file) in files {
        let object = file.object.id();
        let before = accepted.get(&rule.path).copied();
        if before.is_some_and(|before| before.object == object) {
            continue;
        }
        let mut why = Vec::new();
        let mut issued = None;
        for one in &checked {
            let judged = match one {
                Ok((statement, key)) => judge(image, rule, object, statement, key, before, policy),
                Err(error) => Err(Some(error_chain(error))),
            };
            match judged {
                Ok(at) => issued = issued.max(Some(at)),
                Err(reason) => why.extend(reason),
            }
        }
        let Some(issued) = issued else {
            if why.is_empty() {
                why.push("no signature of this content was given".to_owned());
            }
            why.dedup();
            return Err(Refusal::Content { path: rule.path.clone(), why: why.join("; ") });
        };
        accepted.insert(rule.path.clone(), AcceptedContent { object, issued });
    }
    forget_oldest(&mut accepted, image);
    Ok(accepted)
}

/// Returns when the content was signed. The error says why the statement does not count; `None` if
/// it is about other content.
fn judge(
    image: &RequiredImage,
    rule: &ComputedRule,
    object: ObjectId,
    statement: &ContentsStatement,
    key: &PublicKey,
    before: Option<AcceptedContent>,
    policy: &ContentsPolicy<'_>,
) -> Result<u64, Option<String>> {
    let ContentsStatement { machine, issued, expires, files } = statement;
    let found = files.binary_search_by(|(path, _)| path.cmp(&rule.path));
    if !found.is_ok_and(|index| files[index].1 == object) {
        return Err(None);
    }
    let is_key = |text: &str| policy.names.iter().any(|name| name.eq_ignore_ascii_case(text));
    let may_sign = image.content.signers.iter().any(|signer| {
        signer.may_sign(&rule.path) && signer.public_key().is_ok_and(|known| known == *key)
    });
    let why = if !may_sign {
        format!("the key {} may not sign it", key.fingerprint())
    } else if !is_key(machine) {
        let names = match policy.names {
            [] => "has no name of its own".to_owned(),
            names => format!("is {}", names.join(", ")),
        };
        format!("it was signed for {machine}, and this machine {names}")
    } else if *issued > policy.now.saturating_add(AHEAD_MAX) {
        format!("it was signed at {}, which is ahead of this machine's clock", time_text(*issued))
    } else if *expires <= policy.now {
        format!("its signature has expired at {}", time_text(*expires))
    } else if let Some(before) = before.filter(|before| *issued < before.issued) {
        format!(
            "it was signed at {}, and the machine has content that was signed at {}",
            time_text(*issued),
            time_text(before.issued)
        )
    } else {
        return Ok(*issued);
    };
    Err(Some(why))
}

/// Forgets the content that was signed first of paths that the image does not have, if there are
/// too many.
fn forget_oldest(accepted: &mut AcceptedContents, image: &RequiredImage) {
    let surplus = accepted.len().saturating_sub(PATHS_MAX);
    if surplus == 0 {
        return;
    }
    let is_of_image =
        |path: &TreePath| image.content.computed.iter().any(|rule| rule.path == *path);
    let mut others: Vec<(u64, TreePath)> = accepted
        .iter()
        .filter(|(path, _)| !is_of_image(path))
        .map(|(path, content)| (content.issued, path.clone()))
        .collect();
    others.sort();
    for (_, path) in others.into_iter().take(surplus) {
        accepted.remove(&path);
    }
}

#[cfg(test)]
mod tests {
    use certs::signing_key::SigningKey;
    use model::image::{Content, computed_rules};
    use model::object::Algorithm;
    use model::signing::ContentSigner;
    use model::tree::text::from_text;

    use super::*;

    /// Made by `ssh-keygen`; nobody uses them.
    const KEYS: [&str; 2] = [
        include_str!("../../../common/certs/tests/keys/alice"),
        include_str!("../../../common/certs/tests/keys/bob"),
    ];

    const NOW: u64 = 1_000;

    const FILES: [&str; 2] = ["/etc/computed", "/etc/other"];

    fn path(text: &str) -> TreePath {
        text.parse().unwrap()
    }

    fn object(byte: u8) -> ObjectId {
        ObjectId::Blake3([byte; 32])
    }

    fn key(who: usize) -> SigningKey {
        SigningKey::read(KEYS[who], None).unwrap()
    }

    /// A tree whose files have this content; none if it is 0.
    fn tree(contents: [u8; 2]) -> Tree {
        let mut text = "d 755 0:0 /etc\n".to_owned();
        for (path, content) in FILES.iter().zip(contents).filter(|(_, content)| *content > 0) {
            text += &format!("f 640 0:0 1.000000000 3 {} {path}\n", object(content));
        }
        from_text(Algorithm::Blake3, &text).unwrap()
    }

    /// An image in which one key may sign both files, and another the second one.
    fn image() -> RequiredImage {
        let lines = "d 755 0:0 /etc\ng 640 0:0 f:1 /etc/computed\ng 640 0:0 f:1 /etc/other\n";
        let tree = from_text(Algorithm::Blake3, lines).unwrap();
        let [alice, bob] = [0, 1].map(|who| key(who).public_line().unwrap());
        let signers = ContentSigner::read_list(&format!("{alice}\npaths=\"/etc/other\" {bob}"));
        let content = Content {
            format: 2,
            name: "web/8".parse().unwrap(),
            root: tree.digest(),
            filter: None,
            triggers: Default::default(),
            computed: computed_rules(&tree),
            health_check: None,
            signers: signers.unwrap(),
        };
        content.verify(&tree).unwrap();
        RequiredImage::new(content, tree)
    }

    fn sign(who: usize, machine: &str, issued: u64, files: &[(&str, u8)]) -> Signature {
        let files = files.iter().map(|(file, content)| (path(file), object(*content))).collect();
        let (machine, expires) = (machine.to_owned(), issued + 100);
        key(who).sign_contents(&ContentsStatement { machine, issued, expires, files }).unwrap()
    }

    fn known(contents: [(u8, u64); 2]) -> AcceptedContents {
        let content = |(byte, issued)| AcceptedContent { object: object(byte), issued };
        FILES.iter().map(|file| path(file)).zip(contents.map(content)).collect()
    }

    fn verify(
        signatures: &[Signature],
        after: [u8; 2],
        before: Option<&AcceptedContents>,
    ) -> Result<AcceptedContents, Refusal> {
        let names = ["web1.example".to_owned(), "10.0.0.1".to_owned()];
        let policy = ContentsPolicy { names: &names, now: NOW, before };
        verify_contents(&image(), signatures, &tree(after), &policy)
    }

    fn refused(file: &str, why: &str) -> Result<AcceptedContents, Refusal> {
        Err(Refusal::Content { path: path(file), why: why.to_owned() })
    }

    const BOTH: [(&str, u8); 2] = [(FILES[0], 1), (FILES[1], 1)];

    #[test]
    fn content_is_signed_for_this_machine_and_path() {
        let try_new = |signatures: &[Signature]| verify(signatures, [1, 1], None);
        let good = sign(0, "WEB1.example", 950, &BOTH);
        assert_eq!(try_new(std::slice::from_ref(&good)), Ok(known([(1, 950), (1, 950)])));
        // The newest signature counts; each key signs what it may.
        let newer = sign(1, "10.0.0.1", 960, &BOTH[1..]);
        assert_eq!(try_new(&[newer, good.clone()]), Ok(known([(1, 950), (1, 960)])));
        // What the machine excludes is not in the tree.
        assert_eq!(verify(&[], [0, 0], None), Ok(AcceptedContents::new()));
        let statement = good.statement.replace("950", "951");
        let changed = Signature { statement, ..good };
        let none = "no signature of this content was given";
        let [alice, bob] = [0, 1].map(|who| key(who).fingerprint());
        let table = [
            (vec![], FILES[0], none.to_owned()),
            (vec![sign(0, "web1.example", 950, &BOTH[..1])], FILES[1], none.to_owned()),
            (
                vec![sign(0, "web1.example", 950, &[(FILES[0], 2), (FILES[1], 1)])],
                FILES[0],
                none.to_owned(),
            ),
            (
                vec![sign(1, "web1.example", 950, &BOTH)],
                FILES[0],
                format!("the key {bob} may not sign it"),
            ),
            (
                vec![sign(0, "web2.example", 950, &BOTH)],
                FILES[0],
                "it was signed for web2.example, and this machine is web1.example, 10.0.0.1"
                    .to_owned(),
            ),
            (
                vec![sign(0, "web1.example", NOW + 301, &BOTH)],
                FILES[0],
                "it was signed at 1970-01-01T00:21:41Z, which is ahead of this machine's clock"
                    .to_owned(),
            ),
            (
                vec![sign(0, "web1.example", 900, &BOTH)],
                FILES[0],
                "its signature has expired at 1970-01-01T00:16:40Z".to_owned(),
            ),
            (vec![changed], FILES[0], format!("the key {alice} did not sign this statement")),
        ];
        for (signatures, file, why) in table {
            assert_eq!(try_new(&signatures), refused(file, &why));
        }
    }

    #[test]
    fn names_that_all_machines_have_do_not_count() {
        for (name, is_own) in [
            ("web1", true),
            ("10.0.0.1", true),
            ("localhost.example", true),
            ("LocalHost", false),
            ("127.3.0.1", false),
            ("::1", false),
            ("", false),
        ] {
            assert_eq!(is_own_name(name), is_own, "{name}");
        }
        let signature = sign(0, "localhost", 950, &BOTH);
        let policy = ContentsPolicy { names: &[], now: NOW, before: None };
        let why = "it was signed for localhost, and this machine has no name of its own";
        let judged = verify_contents(&image(), &[signature], &tree([1, 1]), &policy);
        assert_eq!(judged, refused(FILES[0], why));
    }

    #[test]
    fn content_is_not_replaced_by_what_was_signed_before_it() {
        let before = known([(1, 950), (1, 960)]);
        // What was accepted needs no signature again, also if the file has changed meanwhile.
        assert_eq!(verify(&[], [1, 1], Some(&before)), Ok(before.clone()));
        // Other content does: an image without signers may have brought it.
        let none = "no signature of this content was given";
        assert_eq!(verify(&[], [2, 1], Some(&before)), refused(FILES[0], none));
        let update = |issued| {
            let signature = sign(0, "web1.example", issued, &[(FILES[0], 2)]);
            verify(&[signature], [2, 1], Some(&before))
        };
        assert_eq!(update(950), Ok(known([(2, 950), (1, 960)])));
        assert_eq!(
            update(949),
            refused(
                FILES[0],
                "it was signed at 1970-01-01T00:15:49Z, and the machine has content that was \
                 signed at 1970-01-01T00:15:50Z"
            )
        );
    }

    #[test]
    fn what_was_accepted_is_remembered_of_the_newest_paths() {
        let content = |issued| AcceptedContent { object: object(1), issued };
        let old = |number: u64| (path(&format!("/old/{number}")), content(10 + number));
        let mut accepted: AcceptedContents = (0..PATHS_MAX as u64).map(old).collect();
        accepted.insert(path(FILES[0]), content(1));
        forget_oldest(&mut accepted, &image());
        assert_eq!(accepted.len(), PATHS_MAX);
        assert!(accepted.contains_key(&path(FILES[0])));
        assert!(!accepted.contains_key(&path("/old/0")));
    }
}
