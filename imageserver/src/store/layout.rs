//! Where things are in the data directory: names and ids as paths, and back.
//!
//! ```text
//! DATA/lock                                 held by the running server
//! DATA/leases                               for how long leases may last, in seconds
//! DATA/holds                                which images were in use, by whom
//! DATA/clock                                what the clock showed when it was believed
//! DATA/objects/<algorithm>/<2 hex>/<hex>    objects, files and directories alike
//! DATA/objects/<algorithm>/<2 hex>/<hex>.packed  the same, packed
//! DATA/images/<component>.d/.../<last>.image    one record for each image
//! DATA/images/<component>.d/.../<last>.deleted  the name was used, and never is again
//! DATA/directories                          which directories were made, and their owners
//! DATA/incoming/                            what is being written; emptied at start
//! DATA/unsynced                             objects may not be on the medium; empty
//! DATA/scrub                                how far reading all objects is
//! DATA/quarantine/                          objects that were found corrupt
//! DATA/audit/                               who changed what
//! DATA/server-id                            which store this is, for servers that replicate
//! DATA/archive                              it keeps images that have ended on its master
//! ```
//!
//! A server whose store is a bucket keeps its cache so: without leases, holds, and images, and with
//! a file `server`, which says what the server is called in the bucket.
//!
//! A component of an image name is a safe file name as it is: it is neither empty nor `.` nor
//! `..`, holds no slash and no control character, and is short. The suffix says what the file is,
//! so an image `a` and an image `a/b` never meet, and neither do `a` and `a.image/b`.
// tidy: core

use std::path::{Path, PathBuf};

use api::object_stream::Form;
use model::image::ImageName;
use model::object::{Algorithm, ObjectId};

/// The file that the running server has locked.
pub const LOCK: &str = "lock";
/// The file that says how long leases may last.
pub const LEASES: &str = "leases";
/// The file that says which images were in use.
pub const HOLDS: &str = "holds";
/// The file that says what the clock showed when it was believed.
pub const CLOCK: &str = "clock";
/// The directory of objects.
pub const OBJECTS: &str = "objects";
/// The directory of image records.
pub const IMAGES: &str = "images";
/// The file that says which directories were made.
pub const DIRECTORIES: &str = "directories";
/// The directory of what is being written.
pub const INCOMING: &str = "incoming";
/// The file that is there while objects may have been stored that are not on the medium.
pub const UNSYNCED: &str = "unsynced";
/// The file that says how far reading all objects is.
pub const SCRUB: &str = "scrub";
/// The file that says what a server is called that shares a bucket.
pub const SERVER: &str = "server";
/// The directory of objects that were found corrupt.
pub const QUARANTINE: &str = "quarantine";

/// The file that says which store this is.
pub const SERVER_ID: &str = "server-id";
/// The file that is there if the store keeps what has ended on its master.
pub const ARCHIVE: &str = "archive";
/// The directory of the audit log.
pub const AUDIT: &str = "audit";

/// What may be at the top of the data directory; a file-system of its own has the last one.
pub const TOP: [&str; 15] = [
    LOCK,
    LEASES,
    HOLDS,
    CLOCK,
    OBJECTS,
    IMAGES,
    DIRECTORIES,
    INCOMING,
    UNSYNCED,
    SCRUB,
    QUARANTINE,
    SERVER_ID,
    ARCHIVE,
    AUDIT,
    "lost+found",
];

/// Every algorithm that has a directory of objects.
pub const ALGORITHMS: [Algorithm; 2] = [Algorithm::Blake3, Algorithm::Sha512];

const DIRECTORY_SUFFIX: &str = ".d";
const IMAGE_SUFFIX: &str = ".image";
const DELETED_SUFFIX: &str = ".deleted";
const PACKED_SUFFIX: &str = ".packed";

/// In what forms an object may be stored: the first one is looked for first.
pub const FORMS: [Form; 2] = [Form::Plain, Form::Packed];

/// The path of an object below the directory of objects.
#[must_use]
pub fn object_path(id: &ObjectId) -> PathBuf {
    let hex = id.hex();
    let mut path = String::with_capacity(hex.len() + 16);
    path.push_str(id.algorithm().name());
    path.push('/');
    path.push_str(&hex[..2]);
    path.push('/');
    path.push_str(&hex);
    PathBuf::from(path)
}

/// The fan-out directories of an algorithm, below the directory of objects.
pub fn fan_out(algorithm: Algorithm) -> impl Iterator<Item = PathBuf> {
    (0..=u8::MAX).map(move |byte| PathBuf::from(format!("{algorithm}/{byte:02x}")))
}

/// The object that lies at `path` below the directory of objects, if one may.
#[must_use]
pub fn object_at(path: &Path) -> Option<ObjectId> {
    let mut components = path.components();
    let algorithm = components.next()?.as_os_str().to_str()?;
    let hex = components.next_back()?.as_os_str().to_str()?;
    let id: ObjectId = format!("{algorithm}:{hex}").parse().ok()?;
    (object_path(&id) == path).then_some(id)
}

/// The path of an object in that form below the directory of objects.
#[must_use]
pub fn stored_path(id: &ObjectId, form: Form) -> PathBuf {
    let mut path = object_path(id).into_os_string();
    path.push(form_suffix(form));
    PathBuf::from(path)
}

/// The object that lies at `path` below the directory of objects, and its form, if one may.
#[must_use]
pub fn stored_at(path: &Path) -> Option<(ObjectId, Form)> {
    let (plain, form) = form_of(path.to_str()?);
    object_at(Path::new(plain)).map(|id| (id, form))
}

/// A file name of an object as it would be if the object was not packed, and its form.
#[must_use]
pub fn form_of(name: &str) -> (&str, Form) {
    match name.strip_suffix(PACKED_SUFFIX) {
        Some(plain) => (plain, Form::Packed),
        None => (name, Form::Plain),
    }
}

fn form_suffix(form: Form) -> &'static str {
    match form {
        Form::Plain => "",
        Form::Packed => PACKED_SUFFIX,
    }
}

/// The name of an object in the quarantine, whose file has that number.
#[must_use]
pub fn aside(id: &ObjectId, form: Form, inode: u64) -> String {
    format!("{}-{}-{inode}{}", id.algorithm(), id.hex(), form_suffix(form))
}

/// The object that has such a name in the quarantine.
#[must_use]
pub fn put_aside(name: &str) -> Option<ObjectId> {
    let (name, _) = form_of(name);
    let (id, inode) = name.rsplit_once('-')?;
    inode.parse::<u64>().ok()?;
    let (algorithm, hex) = id.split_once('-')?;
    format!("{algorithm}:{hex}").parse().ok()
}

/// The fan-out directories of all algorithms, below the directory of objects.
pub fn places() -> impl Iterator<Item = PathBuf> {
    ALGORITHMS.into_iter().flat_map(fan_out)
}

/// What a file below the directory of images stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Placed {
    /// The record of an image.
    Image(ImageName),
    /// The mark that a name was used.
    Deleted(ImageName),
}

/// The path of an image's record below the directory of images.
#[must_use]
pub fn image_path(name: &ImageName) -> PathBuf {
    with_suffix(name, IMAGE_SUFFIX)
}

/// The path of the mark that a name was used, below the directory of images.
#[must_use]
pub fn deleted_path(name: &ImageName) -> PathBuf {
    with_suffix(name, DELETED_SUFFIX)
}

fn with_suffix(name: &ImageName, suffix: &str) -> PathBuf {
    let mut path = PathBuf::new();
    let mut components = name.components().peekable();
    while let Some(component) = components.next() {
        let suffix = if components.peek().is_some() { DIRECTORY_SUFFIX } else { suffix };
        path.push(format!("{component}{suffix}"));
    }
    path
}

/// What the file at `path`, below the directory of images, stands for; `None` if the server never
/// wrote such a file.
#[must_use]
pub fn placed(path: &Path) -> Option<Placed> {
    let mut name = String::new();
    for component in path.parent()?.components() {
        let component = component.as_os_str().to_str()?;
        name.push_str(component.strip_suffix(DIRECTORY_SUFFIX)?);
        name.push('/');
    }
    let file = path.file_name()?.to_str()?;
    let (last, deleted) = match file.strip_suffix(IMAGE_SUFFIX) {
        Some(last) => (last, false),
        None => (file.strip_suffix(DELETED_SUFFIX)?, true),
    };
    name.push_str(last);
    let image = ImageName::new(&name).ok().filter(|image| image.as_str() == name)?;
    Some(if deleted { Placed::Deleted(image) } else { Placed::Image(image) })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn name(text: &str) -> ImageName {
        ImageName::new(text).unwrap()
    }

    #[test]
    fn an_object_lies_below_the_first_byte_of_its_digest() {
        let id = Algorithm::Blake3.digest(b"");
        let hex = "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262";
        assert_eq!(object_path(&id), PathBuf::from(format!("blake3/af/{hex}")));
        assert_eq!(fan_out(Algorithm::Sha512).count(), 256);
        assert_eq!(fan_out(Algorithm::Sha512).last(), Some(PathBuf::from("sha512/ff")));
    }

    #[test]
    fn objects_come_back_from_their_paths() {
        for algorithm in ALGORITHMS {
            let id = algorithm.digest(b"content");
            assert_eq!(object_at(&object_path(&id)), Some(id));
            for form in FORMS {
                assert_eq!(put_aside(&aside(&id, form, 77)), Some(id));
                assert_eq!(stored_at(&stored_path(&id, form)), Some((id, form)));
            }
            assert_eq!(stored_path(&id, Form::Plain), object_path(&id));
            let wrong = object_path(&id).with_file_name("x");
            let moved = Path::new(algorithm.name()).join("00").join(id.hex());
            for path in [wrong, moved, PathBuf::from(id.hex()), PathBuf::new()] {
                assert_eq!(object_at(&path), None, "{path:?}");
            }
            for name in [id.hex(), format!("{}-{}", algorithm, id.hex()), "-1".to_owned()] {
                assert_eq!(put_aside(&name), None, "{name}");
            }
        }
    }

    #[test]
    fn names_become_paths_and_come_back() {
        #[rustfmt::skip]
        let table = [
            ("a",            "a.image",               "a.deleted"),
            ("a/b",          "a.d/b.image",           "a.d/b.deleted"),
            ("a.d/b",        "a.d.d/b.image",         "a.d.d/b.deleted"),
            ("a.image/b",    "a.image.d/b.image",     "a.image.d/b.deleted"),
            ("a.image",      "a.image.image",         "a.image.deleted"),
            ("a.deleted",    "a.deleted.image",       "a.deleted.deleted"),
            (".hidden/x y",  ".hidden.d/x y.image",   ".hidden.d/x y.deleted"),
            ("gr\u{fc}n/%2f", "gr\u{fc}n.d/%2f.image", "gr\u{fc}n.d/%2f.deleted"),
        ];
        let mut paths = BTreeSet::new();
        for (text, image, deleted) in table {
            assert_eq!(image_path(&name(text)), PathBuf::from(image));
            assert_eq!(deleted_path(&name(text)), PathBuf::from(deleted));
            assert_eq!(placed(Path::new(image)), Some(Placed::Image(name(text))));
            assert_eq!(placed(Path::new(deleted)), Some(Placed::Deleted(name(text))));
            assert!(paths.insert(image) && paths.insert(deleted), "{text}");
        }
    }

    #[test]
    fn the_longest_names_fit_the_file_system() {
        let longest = vec!["x".repeat(200); 5].join("/");
        let path = image_path(&name(&longest));
        assert!(path.components().all(|component| component.as_os_str().len() <= 255));
        let deepest = vec!["x"; 512].join("/");
        assert!(image_path(&name(&deepest)).as_os_str().len() < 2_048 + 16);
    }

    #[test]
    fn other_files_stand_for_nothing() {
        for path in ["", "a", "a.txt", "a/b.image", ".image", "...d/x.image", "a.d/.deleted"] {
            assert_eq!(placed(Path::new(path)), None, "{path}");
        }
    }
}
