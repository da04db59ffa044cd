//! Images, their trees, filters and triggers, and the machine database.

use std::sync::Arc;

use api::codec::{Encoding, decode, encode};
use model::filter::Filter;
use model::image::Image;
use model::mdb;
use model::object::Algorithm;
use model::path::TreePath;
use model::tree::encode::{self, Item};
use model::tree::{Directory, Metadata, Tree, text};
use model::trigger::{Triggers, compare_versions};

/// Decodes an image. The first byte chooses the encoding.
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

/// Reads a filter file, a zero, and a path.
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
    // The filter keeps what one of its lines keeps.
    let each = filter.lines().iter().map(|line| Filter::new([line]).expect("it was one before"));
    assert_eq!(
        keeps,
        each.take(20).any(|line| line.keeps(&path)) || filter.lines().len() > 20 && keeps
    );
}

/// Reads a trigger file.
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

/// Reads a machine database.
pub fn mdb(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let machines = match mdb::parse(text) {
        Ok(machines) => machines,
        Err(error) => {
            let told = model::display::error_chain(&error);
            assert!(told.len() < 4 * bytes.len() + 4_096, "{told}");
            return;
        }
    };
    let list: Vec<_> = machines.values().collect();
    let written = encode(Encoding::Json, "machines", &list).expect("they have an encoding");
    let written = String::from_utf8(written).expect("JSON is text");
    assert_eq!(mdb::parse(&written).expect("what was written can be read"), machines);
}

/// Decodes a directory. The first byte chooses the digest algorithm.
pub fn directory(bytes: &[u8]) {
    let Some((first, bytes)) = bytes.split_first() else { return };
    let algorithm = if first & 1 == 0 { Algorithm::Blake3 } else { Algorithm::Sha512 };
    let Ok(listing) = encode::list(algorithm, bytes) else {
        encode::references(algorithm, bytes).expect_err("what has no list names nothing");
        return;
    };
    let references = encode::references(algorithm, bytes).expect("what has a list is whole");
    let mut named = listing.entries.iter().filter_map(|(_, item)| match item {
        Item::Directory(digest) => Some(*digest),
        Item::Leaf(_) => None,
    });
    assert!(references.directories.iter().copied().eq(named.by_ref()));
    // The sub-directories may have any content: their digests cannot match.
    let empty = Metadata::new(0o755, 0, 0);
    let below = Directory::new(algorithm, empty, Vec::new()).expect("a directory may be empty");
    let below = Arc::new(below);
    let Ok(directory) = encode::decode(algorithm, bytes, |_| Some(Arc::clone(&below))) else {
        return;
    };
    assert_eq!(directory.digest(), algorithm.digest(bytes));
    if references.directories.is_empty() {
        assert_eq!(directory.encode(), bytes, "two encodings of one directory");
        assert_eq!(encode::Listing::of(&directory), listing);
        let tree = Tree::new(Arc::new(directory));
        if tree.verify().is_ok() {
            round(algorithm, &tree);
        }
    }
}

/// Reads the text of a tree.
pub fn text(bytes: &[u8]) {
    let Ok(written) = std::str::from_utf8(bytes) else { return };
    let algorithm = match written.contains("sha512:") {
        true => Algorithm::Sha512,
        false => Algorithm::Blake3,
    };
    let Ok(tree) = text::from_text(algorithm, written) else { return };
    tree.verify().expect("a tree that was built is one");
    round(algorithm, &tree);
}

/// Checks that the text of a tree gives the tree again.
fn round(algorithm: Algorithm, tree: &Tree) {
    let written = text::to_text(tree);
    let again = text::from_text(algorithm, &written);
    assert_eq!(again.map(|again| again.digest()), Ok(tree.digest()), "{written}");
}

#[cfg(test)]
mod tests {
    use model::filter::LINES_MAX;

    use super::*;
    use crate::{Allowance, within};

    /// Compiles and matches as many lines as a filter may have.
    #[test]
    fn the_largest_filters_fit_into_64_mib() {
        let realistic = |number: usize| match number % 4 {
            0 => format!("/var/lib/app{number}/.*"),
            1 => format!("/etc/app{number}.conf$"),
            2 => format!("/srv/app{number}/(?:cache|tmp)/"),
            _ => format!("/opt/app{number}/[^/]*/state"),
        };
        let prefixes = |number: usize| format!("/var/lib/app{number}/.*");
        let patterns = |number: usize| format!("/var/.*/app{number}/.*[0-9]+$");
        let allowance = Allowance { for_each: 0, fixed: 64 << 20 };
        let lines: [(&str, &dyn Fn(usize) -> String); 3] =
            [("realistic", &realistic), ("prefixes", &prefixes), ("patterns", &patterns)];
        for (name, line) in lines {
            let lines: Vec<String> = (0..LINES_MAX).map(line).collect();
            within(allowance, 0, || {
                let filter = Filter::new(&lines).unwrap();
                for number in 0..1_000 {
                    let path = format!("/var/lib/app{number}/a{number}/{name}");
                    let _ = filter.keeps(&path.parse().unwrap());
                }
            });
        }
    }
}
