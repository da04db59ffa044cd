//! Where things are in the data directory: names and ids as paths, and back.
//!
//! ```text
//! DATA/lock                                 locked by the running server
//! DATA/leases                               the longest time that leases may last, in seconds
//! DATA/holds                                the images in use and their holders
//! DATA/clock                                the last trusted readings of the clocks
//! DATA/objects/<algorithm>/<2 hex>/<hex>    objects, files and directories alike
//! DATA/objects/<algorithm>/<2 hex>/<hex>.packed  the same, packed
//! DATA/images/<component>.d/.../<last>.image    one record for each image
//! DATA/images/<component>.d/.../<last>.deleted  the tombstone of a used name
//! DATA/directories                          the directories that were made, and their owners
//! DATA/incoming/                            temporary files; emptied at start
//! DATA/unsynced                             exists while objects may not be on the medium; empty
//! DATA/scrub                                the progress of the scrub
//! DATA/quarantine/                          corrupt objects
//! DATA/audit/                               the audit log
//! DATA/server-id                            the id of the store, for replication
//! DATA/archive                              marks an archive, which keeps images that have ended
//! ```
//!
//! A server whose store is a bucket uses the same layout for its cache, without leases, holds and
//! images, and with the file `server`, which has its name in the bucket.
//!
//! A component of an image name is a safe file name as it is: it is neither empty nor `.` nor
//! `..`, holds no slash and no control character, and is short. The suffix says what the file is,
//! so an image `a` and an image `a/b` never meet, and neither do `a` and `a.image/b`.
// tidy: core

use std::path::{Path, PathBuf};

use api::object_stream::ContentForm;
use model::image::ImageName;
use model::object::{Algorithm, ObjectId};

/// The file that the running server has locked.
pub const LOCK: &str = "lock";
/// The file with the longest time that leases may last.
pub const LEASES: &str = "leases";
/// The file with the leases of single objects, while no server runs that was stopped cleanly.
pub const LEASED: &str = "leased";
/// The file of the holds.
pub const HOLDS: &str = "holds";
/// The file with the last trusted readings of the clocks.
pub const CLOCK: &str = "clock";
/// The directory of objects.
pub const OBJECTS: &str = "objects";
/// The directory of image records.
pub const IMAGES: &str = "images";
/// The file of the directories that were made.
pub const DIRECTORIES: &str = "directories";
/// The directory of what is being written.
pub const INCOMING: &str = "incoming";
/// The file that exists while stored objects may not be on the medium.
pub const UNSYNCED: &str = "unsynced";
/// The file with the progress of the scrub.
pub const SCRUB: &str = "scrub";
/// The file with the name of this server in its bucket.
pub const SERVER: &str = "server";
/// The directory of corrupt objects.
pub const QUARANTINE: &str = "quarantine";

/// The file with the id of this store.
pub const SERVER_ID: &str = "server-id";
/// The file that marks a store as an archive.
pub const ARCHIVE: &str = "archive";
/// The directory of the audit log.
pub const AUDIT: &str = "audit";

/// The names at the top of the data directory; the last one is made by mkfs.
pub const TOP: [&str; 16] = [
    LOCK,
    LEASES,
    LEASED,
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

/// The forms in which an object may be stored, in the order in which they are looked for.
pub const FORMS: [ContentForm; 2] = [ContentForm::Plain, ContentForm::Packed];

/// Returns the path of an object below the directory of objects.
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

/// Returns the path of an object in that form below the directory of objects.
#[must_use]
pub fn stored_path(id: &ObjectId, form: ContentForm) -> PathBuf {
    let mut path = object_path(id).into_os_string();
    path.push(form_suffix(form));
    PathBuf::from(path)
}

/// The object that lies at `path` below the directory of objects, and its form, if one may.
#[must_use]
pub fn stored_at(path: &Path) -> Option<(ObjectId, ContentForm)> {
    let (plain, form) = form_of(path.to_str()?);
    object_at(Path::new(plain)).map(|id| (id, form))
}

/// A file name of an object as it would be if the object was not packed, and its form.
#[must_use]
pub fn form_of(name: &str) -> (&str, ContentForm) {
    match name.strip_suffix(PACKED_SUFFIX) {
        Some(plain) => (plain, ContentForm::Packed),
        None => (name, ContentForm::Plain),
    }
}

fn form_suffix(form: ContentForm) -> &'static str {
    match form {
        ContentForm::Plain => "",
        ContentForm::Packed => PACKED_SUFFIX,
    }
}

/// The name of an object in the quarantine, whose file has that number.
#[must_use]
pub fn quarantine_name(id: &ObjectId, form: ContentForm, inode: u64) -> String {
    format!("{}-{}-{inode}{}", id.algorithm(), id.hex(), form_suffix(form))
}

/// The object that has such a name in the quarantine.
#[must_use]
pub fn quarantined_object(name: &str) -> Option<ObjectId> {
    let (name, _) = form_of(name);
    let (id, inode) = name.rsplit_once('-')?;
    inode.parse::<u64>().ok()?;
    let (algorithm, hex) = id.split_once('-')?;
    format!("{algorithm}:{hex}").parse().ok()
}

/// The fan-out directories of all algorithms, below the directory of objects.
pub fn object_directories() -> impl Iterator<Item = PathBuf> {
    ALGORITHMS.into_iter().flat_map(fan_out)
}

/// A file below the directory of images.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ImageFile {
    /// The record of an image.
    Image(ImageName),
    /// The mark that a name was used.
    Deleted(ImageName),
}

/// Returns the path of an image's record below the directory of images.
#[must_use]
pub fn image_path(name: &ImageName) -> PathBuf {
    with_suffix(name, IMAGE_SUFFIX)
}

/// Returns the path of the tombstone of a name below the directory of images.
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

/// Returns the meaning of the file at `path` below the directory of images; `None` if no server
/// writes such a file.
#[must_use]
pub fn image_file(path: &Path) -> Option<ImageFile> {
    let mut name = directory_name(path.parent()?)?;
    let file = path.file_name()?.to_str()?;
    let (last, deleted) = match file.strip_suffix(IMAGE_SUFFIX) {
        Some(last) => (last, false),
        None => (file.strip_suffix(DELETED_SUFFIX)?, true),
    };
    name.push_str(last);
    let image = ImageName::new(&name).ok().filter(|image| image.as_str() == name)?;
    Some(if deleted { ImageFile::Deleted(image) } else { ImageFile::Image(image) })
}

/// Returns the name of the directory of images at `path` below the directory of images; `None` if
/// no server makes it.
#[must_use]
pub fn image_directory(path: &Path) -> Option<ImageName> {
    ImageName::new(directory_name(path)?.strip_suffix('/')?).ok()
}

/// Returns the name of a directory of images with a slash at its end; of the top directory nothing.
fn directory_name(path: &Path) -> Option<String> {
    let mut name = String::new();
    for component in path.components() {
        let component = component.as_os_str().to_str()?;
        name.push_str(component.strip_suffix(DIRECTORY_SUFFIX)?);
        name.push('/');
    }
    Some(name)
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
                assert_eq!(quarantined_object(&quarantine_name(&id, form, 77)), Some(id));
                assert_eq!(stored_at(&stored_path(&id, form)), Some((id, form)));
            }
            assert_eq!(stored_path(&id, ContentForm::Plain), object_path(&id));
            let wrong = object_path(&id).with_file_name("x");
            let moved = Path::new(algorithm.name()).join("00").join(id.hex());
            for path in [wrong, moved, PathBuf::from(id.hex()), PathBuf::new()] {
                assert_eq!(object_at(&path), None, "{path:?}");
            }
            for name in [id.hex(), format!("{}-{}", algorithm, id.hex()), "-1".to_owned()] {
                assert_eq!(quarantined_object(&name), None, "{name}");
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
            assert_eq!(image_file(Path::new(image)), Some(ImageFile::Image(name(text))));
            assert_eq!(image_file(Path::new(deleted)), Some(ImageFile::Deleted(name(text))));
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
            assert_eq!(image_file(Path::new(path)), None, "{path}");
        }
    }
}
