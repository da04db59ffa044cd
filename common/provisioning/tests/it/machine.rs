//! What a machine keeps of the images that it has and gets.

use model::image::ImageName;
use model::object::{Algorithm, ObjectId};
use provisioning::image::Definition;
use provisioning::machine::{Machine, Todo};
use serde_json::json;

fn digest(text: &str) -> ObjectId {
    Algorithm::Blake3.digest(text.as_bytes())
}

#[test]
fn drift_that_is_repaired_ends_no_provisioning() {
    let bindings = "[[provisioner]]\nname = \"mark\"\nkinds = [\"marked\"]\nuser = \"root\"\n";
    let db = r#"{"id": "db", "kind": "marked", "spec": {}, "on_removal": "destroy"}"#;
    let fields = json!({"bindings": bindings, "files": {"db.json": db}, "plugins": {}});
    let definition: Definition = serde_json::from_value(fields).unwrap();
    let none = Definition::default();
    let mut machine = Machine::default();
    machine.activated(digest("plain"), &none);
    let image = ImageName::new("test/full").unwrap();
    machine.provision(&image, digest("full"), &definition, "web1");
    let before = machine.next();
    assert!(matches!(&before, Todo::Calls(calls) if calls.len() == 1), "{before:?}");
    // The machine is kept at its image meanwhile, which has no resources.
    machine.activated(digest("plain"), &none);
    assert_eq!(machine.next(), before);
    machine.activated(digest("plain"), &none);
    assert_eq!(machine.next(), before);
    // It gets another one.
    machine.activated(digest("other"), &none);
    assert_eq!(machine.next(), Todo::Nothing);
}
