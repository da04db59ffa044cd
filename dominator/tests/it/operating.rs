//! The handbook knows every status.

use common::api::dominator::Status;

#[test]
fn every_status_is_explained() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/OPERATING.md");
    let text = std::fs::read_to_string(path).unwrap();
    for status in Status::ALL {
        let name = format!("`{status}`");
        assert!(text.contains(&name), "docs/OPERATING.md does not explain {name}");
    }
}
