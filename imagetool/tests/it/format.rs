//! The worked example of docs/IMAGE-FORMAT.md is what the code does.

use std::collections::BTreeMap;

use model::filter::Filter;
use model::image::{Content, FORMAT, ImageName, computed_rules};
use model::object::Algorithm;
use model::tree::{Tree, text};
use model::trigger::Triggers;

const DOCUMENT: &str = include_str!("../../../docs/IMAGE-FORMAT.md");

/// The blocks of the document that stand in fences with a name: "```text example-NAME".
fn examples() -> BTreeMap<&'static str, String> {
    let mut found = BTreeMap::new();
    let mut lines = DOCUMENT.lines();
    while let Some(line) = lines.next() {
        let Some(name) = line.strip_prefix("```text example-") else { continue };
        let block: String = lines
            .by_ref()
            .take_while(|line| *line != "```")
            .map(|line| format!("{line}\n"))
            .collect();
        assert!(found.insert(name, block).is_none(), "{name} is there twice");
    }
    found
}

/// Reads lines `OFFSET  HEX...  | REMARK`.
fn bytes_of(block: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    for line in block.lines() {
        let (hex, _) = line.split_once('|').unwrap();
        let mut words = hex.split_whitespace();
        let offset = usize::from_str_radix(words.next().unwrap(), 16).unwrap();
        assert_eq!(offset, bytes.len(), "{line}");
        bytes.extend(words.map(|word| u8::from_str_radix(word, 16).unwrap()));
    }
    bytes
}

fn tree() -> Tree {
    text::from_text(Algorithm::Blake3, &examples()["tree"]).unwrap()
}

#[test]
fn the_encodings_and_digests_of_the_document_hold() {
    let examples = examples();
    let tree = tree();
    let etc = tree.get(&"/etc".parse().unwrap()).unwrap();
    let model::tree::Child::Directory(etc) = etc else { panic!("/etc is a directory") };
    assert_eq!(bytes_of(&examples["etc"]), etc.encode());
    assert_eq!(bytes_of(&examples["root"]), tree.root().encode());
    let digests = format!("/etc {}\n/    {}\n", etc.digest(), tree.digest());
    assert_eq!(examples["digests"], digests);
    assert_eq!(text::to_text(&tree), examples["tree"]);
}

#[test]
fn the_image_digest_of_the_document_holds() {
    let examples = examples();
    let tree = tree();
    let content = Content {
        format: FORMAT,
        name: ImageName::new("base/example").unwrap(),
        root: tree.digest(),
        filter: Some(Filter::from_text(&examples["filter"]).unwrap()),
        triggers: Triggers::from_json(&examples["triggers"]).unwrap(),
        computed: computed_rules(&tree),
        health_check: None,
        signers: Vec::new(),
    };
    content.verify(&tree).unwrap();
    let bytes = bytes_of(&examples["image"]);
    assert_eq!(Algorithm::Blake3.digest(&bytes), content.digest());
    assert_eq!(examples["image-digest"], format!("{}\n", content.digest()));
}
