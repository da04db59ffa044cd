//! Images, what they say of machines, and which machine has which.

use api::codec::{Encoding, decode, encode};
use model::filter::Filter;
use model::image::Image;
use model::mdb;
use model::path::TreePath;
use model::tree::Tree;
use model::trigger::{Triggers, compare_versions};

/// An image, as it travels: the first byte says in which encoding.
pub fn image(bytes: &[u8]) {
    let Some((first, bytes)) = bytes.split_first() else { return };
    let encoding = if first & 1 == 0 { Encoding::Bincode } else { Encoding::Json };
    let Ok(image) = decode::<Image>(encoding, "image", bytes, 1 << 20) else { return };
    let digest = image.content.digest();
    for encoding in [Encoding::Bincode, Encoding::Json] {
        let written = encode(encoding, "image", &image).expect("an image has an encoding");
        let again: Image =
            decode(encoding, "image", &written, 1 << 24).expect("what was written can be read");
        assert_eq!(again.content.digest(), digest);
    }
    let tree = Tree::empty(image.content.algorithm());
    let _wrong = image.content.verify(&tree);
    let _settings = image.content.scan_settings(&tree);
}

/// The file of a filter, a zero, and a path.
pub fn filter(bytes: &[u8]) {
    let mut parts = bytes.splitn(2, |byte| *byte == 0);
    let Some(Ok(text)) = parts.next().map(std::str::from_utf8) else { return };
    let Ok(filter) = Filter::from_text(text) else { return };
    let path = TreePath::new(parts.next().unwrap_or(b"/etc/hosts"));
    let Ok(path) = path else { return };
    let keeps = filter.keeps(&path);
    if let Some(parent) = path.parent() {
        let above = filter.keeps(&parent);
        assert_eq!(keeps, above || filter.keeps_below_unkept(&path));
    }
    // All lines together mean what each of them does.
    let each = filter.lines().iter().map(|line| Filter::new([line]).expect("it was one before"));
    assert_eq!(
        keeps,
        each.take(20).any(|line| line.keeps(&path)) || filter.lines().len() > 20 && keeps
    );
}

/// The file of triggers.
pub fn trigger(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let Ok(triggers) = Triggers::from_json(text) else { return };
    let written = encode(Encoding::Json, "triggers", &triggers).expect("they have an encoding");
    let written = String::from_utf8(written).expect("JSON is text");
    assert_eq!(Triggers::from_json(&written).expect("what was written can be read"), triggers);
    let paths = ["/etc/hosts", "/usr/bin/a b"].map(|path| TreePath::new(path).expect("a path"));
    let fired = triggers.fired(paths.iter());
    assert!(fired.len() <= triggers.0.len());
    for two in fired.windows(2) {
        assert!(compare_versions(two[0].order(), two[1].order()).is_le());
        let back = compare_versions(two[1].order(), two[0].order());
        assert_eq!(back.reverse(), compare_versions(two[0].order(), two[1].order()));
    }
}

/// The machine database.
pub fn mdb(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let machines = match mdb::parse(text) {
        Ok(machines) => machines,
        Err(error) => {
            let told = model::report::report(&error);
            assert!(told.len() < 4 * bytes.len() + 4_096, "{told}");
            return;
        }
    };
    let list: Vec<_> = machines.values().collect();
    let written = encode(Encoding::Json, "machines", &list).expect("they have an encoding");
    let written = String::from_utf8(written).expect("JSON is text");
    assert_eq!(mdb::parse(&written).expect("what was written can be read"), machines);
}
