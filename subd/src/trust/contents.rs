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
use model::plan::RefusedChanges;
use model::signing::openssh::PublicKey;
use model::signing::{ContentSigner, ContentsStatement, Signature};
use model::tree::Tree;
use serde::{Deserialize, Serialize};

use super::verification::{Refusal, time_text};

/// How much later than by the machine's clock contents may have been signed, in seconds.
const AHEAD_MAX: u64 = 300;

/// The most paths that are remembered.
const PATHS_MAX: usize = 4_000;

/// Content that was accepted for a computed file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AcceptedContent {
    pub object: ObjectId,
    /// When it was signed, in seconds after 1970-01-01 UTC.
    pub issued: u64,
    /// The key that signed it, as an image names it.
    pub key: String,
    /// The name of the machine for which it was signed.
    pub machine: String,
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
    /// The tree as it is.
    pub have: &'a Tree,
    /// Changes that have failed on this machine.
    pub refused: &'a RefusedChanges,
}

impl ContentsPolicy<'_> {
    fn is_named(&self, machine: &str) -> bool {
        self.names.iter().any(|name| name.eq_ignore_ascii_case(machine))
    }
}

/// True if a name can be that of one machine alone. Addresses do not count: a certificate may have
/// one that was in a record of the machine.
pub fn is_own_name(name: &str) -> bool {
    let first = name.split('.').next().unwrap_or_default().to_ascii_lowercase();
    name.parse::<IpAddr>().is_err()
        && !["", "localhost", "ip6-localhost", "ip6-loopback"].contains(&first.as_str())
}

/// Checks the computed files of `after`, which has those of `image`. Content that was accepted last
/// needs no signature again, nor does a file that stays as it is because it cannot be changed.
/// Returns what is newly accepted.
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
    let mut accepted = AcceptedContents::new();
    let parts = || image.used_parts().filter(|part| !part.content.signers.is_empty());
    if parts().next().is_none() {
        return Ok(accepted);
    }
    let checked: Vec<_> = signatures.iter().map(Signature::check_contents).collect();
    // The keys of each part sign the files of that part.
    let rules = parts().flat_map(|part| part.content.computed.iter().map(move |rule| (part, rule)));
    for (image, rule) in rules {
        // What the machine excludes is not in the tree.
        let Some(file) = after.file(&rule.path) else { continue };
        let object = file.object.id();
        let before = policy.before.and_then(|before| before.get(&rule.path));
        let is_as_accepted = |before: &AcceptedContent| {
            before.object == object
                && policy.is_named(&before.machine)
                && signer(image, &rule.path, |signer| signer.key == before.key).is_some()
        };
        let is_stuck =
            policy.refused.has(&rule.path) && policy.have.file(&rule.path).as_ref() == Some(&file);
        if before.is_some_and(is_as_accepted) || is_stuck {
            continue;
        }
        let mut why = Vec::new();
        let mut newest: Option<AcceptedContent> = None;
        for one in &checked {
            let judged = match one {
                Ok((statement, key)) => {
                    judge(image, (rule, object), statement, key, before, policy)
                }
                Err(error) => Err(Some(error_chain(error))),
            };
            match judged {
                Ok(content)
                    if newest.as_ref().is_none_or(|other| other.issued < content.issued) =>
                {
                    newest = Some(content);
                }
                Ok(_) => {}
                Err(reason) => why.extend(reason),
            }
        }
        let Some(content) = newest else {
            if why.is_empty() {
                why.push("no signature of this content was given".to_owned());
            }
            why.dedup();
            return Err(Refusal::Content { path: rule.path.clone(), why: why.join("; ") });
        };
        accepted.insert(rule.path.clone(), content);
    }
    Ok(accepted)
}

/// Returns the key of `image` that may sign the content of `path` and is the wanted one.
fn signer(
    image: &RequiredImage,
    path: &TreePath,
    is_wanted: impl Fn(&ContentSigner) -> bool,
) -> Option<String> {
    let mut signers = image.content.signers.iter();
    let found = signers.find(|signer| is_wanted(signer) && signer.may_sign(path));
    found.map(|signer| signer.key.clone())
}

/// Returns the content as it is accepted. The error says why the statement does not count; `None`
/// if it is about other content.
fn judge(
    image: &RequiredImage,
    (rule, object): (&ComputedRule, ObjectId),
    statement: &ContentsStatement,
    key: &PublicKey,
    before: Option<&AcceptedContent>,
    policy: &ContentsPolicy<'_>,
) -> Result<AcceptedContent, Option<String>> {
    let ContentsStatement { machine, issued, expires, files } = statement;
    let found = files.binary_search_by(|(path, _)| path.cmp(&rule.path));
    if !found.is_ok_and(|index| files[index].1 == object) {
        return Err(None);
    }
    let has_signed = |signer: &ContentSigner| signer.public_key().is_ok_and(|known| known == *key);
    let signed_by = signer(image, &rule.path, has_signed);
    let why = if signed_by.is_none() {
        format!("the key {} may not sign it", key.fingerprint())
    } else if !policy.is_named(machine) {
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
        let (key, machine) = (signed_by.unwrap_or_default(), machine.clone());
        return Ok(AcceptedContent { object, issued: *issued, key, machine });
    };
    Err(Some(why))
}

/// Adds what is newly accepted to what was accepted before. If that is too much, forgets the
/// content of other paths that was signed first.
pub fn merge(before: &mut AcceptedContents, new: &AcceptedContents) {
    before.extend(new.iter().map(|(path, content)| (path.clone(), content.clone())));
    let surplus = before.len().saturating_sub(PATHS_MAX);
    let others = before.iter().filter(|(path, _)| !new.contains_key(*path));
    let mut others: Vec<(u64, TreePath)> =
        others.map(|(path, content)| (content.issued, path.clone())).collect();
    others.sort();
    for (_, path) in others.into_iter().take(surplus) {
        before.remove(&path);
    }
}

#[cfg(test)]
mod tests {
    use certs::signing_key::SigningKey;
    use model::image::{Content, computed_rules};
    use model::object::Algorithm;
    use model::plan::{RefusedChange, RefusedKind};
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

    fn line(who: usize) -> String {
        let signer = ContentSigner::read_list(&key(who).public_line().unwrap());
        signer.unwrap().remove(0).key
    }

    fn content(byte: u8, issued: u64) -> AcceptedContent {
        let machine = "web1.example".to_owned();
        AcceptedContent { object: object(byte), issued, key: line(0), machine }
    }

    fn known(contents: [AcceptedContent; 2]) -> AcceptedContents {
        FILES.iter().map(|file| path(file)).zip(contents).collect()
    }

    fn verify(
        signatures: &[Signature],
        after: [u8; 2],
        before: Option<&AcceptedContents>,
    ) -> Result<AcceptedContents, Refusal> {
        verify_where(signatures, after, before, &RefusedChanges::default())
    }

    /// The machine has the content 7 of both files.
    fn verify_where(
        signatures: &[Signature],
        after: [u8; 2],
        before: Option<&AcceptedContents>,
        refused: &RefusedChanges,
    ) -> Result<AcceptedContents, Refusal> {
        let names = ["web1.example".to_owned(), "www.example".to_owned()];
        let have = tree([7, 7]);
        let policy = ContentsPolicy { names: &names, now: NOW, before, have: &have, refused };
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
        let named = |content: AcceptedContent| {
            let machine = "WEB1.example".to_owned();
            AcceptedContent { machine, ..content }
        };
        let want = known([1, 1].map(|byte| named(content(byte, 950))));
        assert_eq!(try_new(std::slice::from_ref(&good)), Ok(want));
        // The newest signature counts; each key signs what it may.
        let newer = sign(1, "www.example", 960, &BOTH[1..]);
        let other =
            AcceptedContent { key: line(1), machine: "www.example".to_owned(), ..content(1, 960) };
        assert_eq!(try_new(&[newer, good.clone()]), Ok(known([named(content(1, 950)), other])));
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
                "it was signed for web2.example, and this machine is web1.example, www.example"
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
            ("web1.localhost", true),
            ("LocalHost", false),
            ("localhost.localdomain", false),
            ("localhost.", false),
            ("ip6-localhost", false),
            ("10.0.0.1", false),
            ("::1", false),
            ("", false),
        ] {
            assert_eq!(is_own_name(name), is_own, "{name}");
        }
        let (have, refusals) = (tree([0, 0]), RefusedChanges::default());
        let policy =
            ContentsPolicy { names: &[], now: NOW, before: None, have: &have, refused: &refusals };
        let signature = sign(0, "localhost", 950, &BOTH);
        let why = "it was signed for localhost, and this machine has no name of its own";
        let judged = verify_contents(&image(), &[signature], &tree([1, 1]), &policy);
        assert_eq!(judged, refused(FILES[0], why));
    }

    #[test]
    fn content_is_not_replaced_by_what_was_signed_before_it() {
        let before = known([content(1, 950), content(1, 960)]);
        // What was accepted needs no signature again, also if the file has changed meanwhile.
        assert_eq!(verify(&[], [1, 1], Some(&before)), Ok(AcceptedContents::new()));
        // Other content does: an image without signers may have brought it.
        let none = "no signature of this content was given";
        assert_eq!(verify(&[], [2, 1], Some(&before)), refused(FILES[0], none));
        // So does what was signed by a key that may not sign it any more, or for another machine:
        // the disk may be a copy.
        let key = "ssh-ed25519 another".to_owned();
        let by_other = known([AcceptedContent { key, ..content(1, 950) }, content(1, 960)]);
        assert_eq!(verify(&[], [1, 1], Some(&by_other)), refused(FILES[0], none));
        let machine = "web2.example".to_owned();
        let of_other = known([content(1, 950), AcceptedContent { machine, ..content(1, 960) }]);
        assert_eq!(verify(&[], [1, 1], Some(&of_other)), refused(FILES[1], none));
        // A file that cannot be changed stays as it is, and nothing else.
        let stuck = RefusedChange {
            path: path(FILES[0]),
            kind: RefusedKind::Any,
            why: "rename: Operation not permitted".to_owned(),
        };
        let stuck: RefusedChanges = [stuck].into_iter().collect();
        let stays = verify_where(&[], [7, 1], Some(&before), &stuck);
        assert_eq!(stays, Ok(AcceptedContents::new()));
        let becomes = verify_where(&[], [2, 1], Some(&before), &stuck);
        assert_eq!(becomes, refused(FILES[0], none));
        let update = |issued| {
            let signature = sign(0, "web1.example", issued, &[(FILES[0], 2)]);
            verify(&[signature], [2, 1], Some(&before))
        };
        assert_eq!(update(950), Ok(AcceptedContents::from([(path(FILES[0]), content(2, 950))])));
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
        let old = |number: u64| (path(&format!("/old/{number}")), content(1, 10 + number));
        let mut accepted: AcceptedContents = (0..PATHS_MAX as u64).map(old).collect();
        merge(&mut accepted, &AcceptedContents::from([(path(FILES[0]), content(1, 1))]));
        assert_eq!(accepted.len(), PATHS_MAX);
        assert!(accepted.contains_key(&path(FILES[0])));
        assert!(!accepted.contains_key(&path("/old/0")));
        merge(&mut accepted, &AcceptedContents::new());
        assert_eq!(accepted.len(), PATHS_MAX);
    }
}
