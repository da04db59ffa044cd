//! Converts names, ids and servers to keys of a bucket and back.
// tidy: core

use std::fmt::Write as _;

use model::image::ImageName;
use model::object::ObjectId;

use crate::store::layout;

/// The key with the format of the bucket.
pub const FORMAT: &str = "format";
/// The prefix of the records of images.
pub const IMAGES: &str = "images";
/// Which directories were made.
pub const DIRECTORIES: &str = "directories";
/// The key that is rewritten after each change of an image.
pub const CHANGED: &str = "changed";
/// The prefix of all objects.
pub const OBJECTS: &str = "objects";
/// The prefix of all leases.
pub const LEASES: &str = "leases";
/// The prefix of all holds.
pub const HOLDS: &str = "holds";
/// Which server collects.
pub const GC_LEASE: &str = "collector/turn";
/// The objects that a collector is removing.
pub const PENDING_DELETES: &str = "collector/condemned";
/// The key with the objects that no image needs.
pub const UNNEEDED: &str = "collector/unneeded";

/// The longest key of an image, below the prefix, in bytes: a bucket takes 1,024 in all.
pub const IMAGE_KEY_BYTES_MAX: usize = 900;

/// Returns the key of an object.
#[must_use]
pub fn object(id: &ObjectId) -> String {
    format!("{OBJECTS}/{}", layout::object_path(id).display())
}

/// The object whose key ends like that, below [`OBJECTS`].
#[must_use]
pub fn object_at(below: &str) -> Option<ObjectId> {
    layout::object_at(std::path::Path::new(below))
}

/// Returns the key of an image; `None` if it is too long for a bucket.
///
/// All but letters, digits, `.`, `_` and `-` is written as `=` and two hexadecimal digits, so that
/// all images are in one directory and no bucket normalizes a name.
#[must_use]
pub fn image(name: &ImageName) -> Option<String> {
    let mut key = format!("{IMAGES}/");
    for byte in name.as_str().bytes() {
        if byte.is_ascii_alphanumeric() || b"._-".contains(&byte) {
            key.push(char::from(byte));
        } else {
            write!(key, "={byte:02X}").expect("a string takes all that is written");
        }
    }
    // Some buckets treat a last component of dots specially.
    if key.ends_with('.') {
        key.pop();
        key.push_str("=2E");
    }
    (key.len() <= IMAGE_KEY_BYTES_MAX).then_some(key)
}

/// The image whose key ends like that, below [`IMAGES`].
#[must_use]
pub fn image_at(below: &str) -> Option<ImageName> {
    let mut bytes = Vec::with_capacity(below.len());
    let mut rest = below.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        rest = after;
        if *first == b'=' {
            let (hex, after) = rest.split_at_checked(2)?;
            bytes.push(u8::from_str_radix(std::str::from_utf8(hex).ok()?, 16).ok()?);
            rest = after;
        } else {
            bytes.push(*first);
        }
    }
    let name = ImageName::new(std::str::from_utf8(&bytes).ok()?).ok()?;
    (image(&name)? == format!("{IMAGES}/{below}")).then_some(name)
}

/// Returns a key for leases of a server.
#[must_use]
pub fn lease(server: &str, start: &str, number: u64) -> String {
    format!("{LEASES}/{server}/{start}-{number}")
}

/// Returns the key of the hold of `holder`.
#[must_use]
pub fn hold(holder: &str) -> String {
    let digest = model::object::Algorithm::Blake3.digest(holder.as_bytes());
    format!("{HOLDS}/{}", &digest.hex()[..32])
}

/// Returns the key with which a server reads the bucket's clock.
#[must_use]
pub fn clock(server: &str) -> String {
    format!("servers/{server}")
}

/// Returns the key with which a server tests conditional writes.
#[must_use]
pub fn probe(server: &str) -> String {
    format!("probe/{server}")
}

/// Returns the key of a corrupt object in the quarantine.
#[must_use]
pub fn quarantine(id: &ObjectId, nonce: &str) -> String {
    format!("quarantine/{}-{}-{nonce}", id.algorithm(), id.hex())
}

/// Returns true if `text` may be the name of a server.
#[must_use]
pub fn is_server(text: &str) -> bool {
    (8..=64).contains(&text.len())
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
}

#[cfg(test)]
mod tests {
    use model::object::Algorithm;

    use super::*;

    #[test]
    fn names_become_keys_and_come_back() {
        #[rustfmt::skip]
        let table = [
            ("a",              "images/a"),
            ("a/b",            "images/a=2Fb"),
            ("a=2Fb",          "images/a=3D2Fb"),
            ("gr\u{fc}n/%2f x", "images/gr=C3=BCn=2F=252f=20x"),
            ("x/...",          "images/x=2F..=2E"),
            ("web-1_2.3",      "images/web-1_2.3"),
        ];
        for (text, key) in table {
            let name = ImageName::new(text).unwrap();
            assert_eq!(image(&name).as_deref(), Some(key));
            assert_eq!(image_at(key.strip_prefix("images/").unwrap()), Some(name));
        }
        for below in ["", "a=", "a=2", "a=zz", "a=61", "a/b", "=FF", "a=2Fb/"] {
            assert_eq!(image_at(below), None, "{below}");
        }
        let long = ImageName::new(&vec!["x"; 400].join("/")).unwrap();
        assert_eq!(image(&long), None);
    }

    #[test]
    fn objects_come_back_from_their_keys() {
        let id = Algorithm::Blake3.digest(b"content");
        let key = object(&id);
        assert_eq!(object_at(key.strip_prefix("objects/").unwrap()), Some(id));
        assert_eq!(object_at("blake3/00/00"), None);
        assert_eq!(hold("a").len(), 38);
    }
}
