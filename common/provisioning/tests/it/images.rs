//! What an image says of provisioning.

use expect_test::expect_file;
use model::display::error_chain;
use model::object::{Algorithm, ObjectId};
use model::tree::Tree;
use model::tree::text::from_text;
use model::trigger::Triggers;
use provisioning::image::{ImageError, definition};

/// Why something is refused.
#[derive(Debug)]
struct Refused(String);

impl From<ImageError> for Refused {
    fn from(error: ImageError) -> Self {
        Self(error_chain(&error))
    }
}

/// The files of an image: their kind, path and content.
type Files<'a> = Vec<(&'a str, &'a str, &'a str)>;

fn object(content: &str) -> ObjectId {
    Algorithm::Blake3.digest(content.as_bytes())
}

fn tree(files: &Files) -> Tree {
    let mut text = String::new();
    for directory in [
        "/etc",
        "/etc/dominator",
        "/etc/dominator/resources.d",
        "/usr",
        "/usr/lib",
        "/usr/lib/dominator",
    ] {
        text += &format!("d 755 0:0 {directory}\n");
    }
    for (kind, path, content) in files {
        text += &match *kind {
            "file" => {
                let size = content.len();
                format!("f 644 0:0 0.000000000 {size} {} {path}\n", object(content))
            }
            "program" => {
                let size = content.len();
                format!("f 755 0:0 0.000000000 {size} {} {path}\n", object(content))
            }
            "computed" => format!("g 644 0:0 files:6972 {path}\n"),
            "link" => format!("l 0:0 {path} -> /x\n"),
            kind => panic!("{kind}"),
        };
    }
    from_text(Algorithm::Blake3, &text).unwrap()
}

/// Says what the image asks for, or why it is refused.
fn said(trigger: &str, files: &Files) -> String {
    let triggers = Triggers::from_json(trigger).unwrap();
    let read = |file: &provisioning::image::ImageFile| {
        let content = files.iter().map(|(_, _, content)| content);
        let found = content.into_iter().find(|content| object(content) == file.object);
        Ok::<_, Refused>(found.unwrap().as_bytes().to_vec())
    };
    match definition(&triggers, &tree(files), read) {
        Ok(None) => "nothing\n".to_owned(),
        Ok(Some(found)) => {
            let (resources, _) = found.read().unwrap();
            let ids: Vec<&str> = resources.iter().map(|one| one.id.as_str()).collect();
            let plugins: Vec<&String> = found.plugins.keys().collect();
            format!("{ids:?}, with plugins {plugins:?}\n")
        }
        Err(Refused(why)) => format!("{why}\n"),
    }
}

const TRIGGER: &str = r#"[{"MatchLines": ["/etc/dominator/resources\\.d/.*"],
    "Service": "resources", "Kind": "provision"}]"#;
const RELOADS: &str = r#"[{"MatchLines": ["/etc/dominator/resources\\.d/.*"],
    "Service": "resources", "Kind": "provision", "DoReload": true}]"#;

const BINDINGS: (&str, &str, &str) = (
    "file",
    "/etc/dominator/provisioners.toml",
    "[[provisioner]]\nname = \"mark\"\nkinds = [\"marked\"]\nuser = \"root\"\n",
);
const TWICE: (&str, &str, &str) = (
    "file",
    "/etc/dominator/provisioners.toml",
    "[[provisioner]]\nname = \"mark\"\nkinds = [\"marked\"]\nuser = \"root\"\n\
     [[provisioner]]\nname = \"make\"\nkinds = [\"marked\"]\nuser = \"root\"\n",
);

const DB: &str = "/etc/dominator/resources.d/db.json";
const NET: &str = "/etc/dominator/resources.d/net.json";
const PLUGIN: &str = "/usr/lib/dominator/dom-provisioner-mark";

#[test]
fn an_image_is_refused_whose_resources_could_not_be_made() {
    let db = ("file", DB, r#"{"id": "db", "kind": "marked"}"#);
    let of_db = |content| ("file", DB, content);
    let table: &[(&str, Files)] = &[
        (TRIGGER, vec![BINDINGS, db]),
        (TRIGGER, vec![BINDINGS, db, ("program", PLUGIN, "#!/bin/sh\n")]),
        ("[]", vec![]),
        ("[]", vec![BINDINGS, ("file", "/etc/dominator/resources.d/README", "x")]),
        (TRIGGER, vec![BINDINGS]),
        ("[]", vec![BINDINGS, db]),
        (RELOADS, vec![BINDINGS, db]),
        (TRIGGER, vec![db]),
        (TRIGGER, vec![of_db(r#"{"id": "net", "kind": "marked"}"#)]),
        (TRIGGER, vec![TWICE, db]),
        (TRIGGER, vec![BINDINGS, of_db(r#"{"id": "db", "kind": "unknown"}"#)]),
        (TRIGGER, vec![BINDINGS, of_db("{\"id\": \"db\",\n\"kynd\": \"marked\"}")]),
        (TRIGGER, vec![BINDINGS, of_db(r#"{"id": "db", "kind": "marked", "per": "fleet"}"#)]),
        (
            TRIGGER,
            vec![
                BINDINGS,
                of_db(r#"{"id": "db", "kind": "marked", "per": "fleet", "needs": ["net"]}"#),
                ("file", NET, r#"{"id": "net", "kind": "marked"}"#),
            ],
        ),
        (TRIGGER, vec![BINDINGS, of_db(r#"{"id": "db", "kind": "marked", "needs": ["net"]}"#)]),
        (
            TRIGGER,
            vec![
                BINDINGS,
                of_db(r#"{"id": "db", "kind": "marked", "needs": ["net"]}"#),
                ("file", NET, r#"{"id": "net", "kind": "marked", "needs": ["db"]}"#),
            ],
        ),
        (TRIGGER, vec![BINDINGS, ("computed", DB, "")]),
        (TRIGGER, vec![BINDINGS, ("link", DB, "")]),
        (TRIGGER, vec![BINDINGS, db, ("file", PLUGIN, "#!/bin/sh\n")]),
        (TRIGGER, vec![BINDINGS, db, ("program", PLUGIN, "no program")]),
        (TRIGGER, vec![BINDINGS, db, ("link", PLUGIN, "")]),
    ];
    let said: String = table.iter().map(|(trigger, files)| said(trigger, files)).collect();
    expect_file!["refused_images.txt"].assert_eq(&said);
}
