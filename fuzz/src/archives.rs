//! Archives from which images are made, and their parts.

use std::fs::File;
use std::io::Write as _;

use imagetool::archive::Archive;
use imagetool::archive::acl::Acl;
use imagetool::archive::input::Section;
use imagetool::archive::pax::Records;
use imagetool::image_source::oci;
use imagetool::image_source::oci::platform::{ImageSelection, Platform};
use imagetool::output::progress::Meter;
use imagetool::packages::{self, DatabaseFile};
use model::image::Package;
use model::object::Algorithm;
use model::path::TreePath;
use model::tree::{self, Leaf, Metadata, Node, Time, Tree, TreeBuilder};
use nix::sys::memfd::{MFdFlags, memfd_create};

/// Returns a file in memory with these bytes.
fn file(bytes: &[u8]) -> File {
    let file = memfd_create("archive", MFdFlags::MFD_CLOEXEC).expect("the kernel has such files");
    let mut file = File::from(file);
    file.write_all(bytes).expect("there is memory for it");
    file
}

/// Reads a tar archive, compressed or not. The first byte chooses whether it has whiteouts.
pub fn tar(bytes: &[u8]) {
    let Some((first, bytes)) = bytes.split_first() else { return };
    let mut archive = Archive::of_file(file(bytes));
    if first & 1 == 1 {
        archive = archive.with_whiteouts();
    }
    read_twice(&mut archive);
}

/// Reads an archive twice, which must give the same tree.
fn read_twice(archive: &mut Archive) {
    let mut read = || -> Option<Tree> {
        let builder = archive.read(Algorithm::Blake3, &Meter::hidden()).ok()?;
        builder.finish().ok()
    };
    let Some(tree) = read() else { return };
    tree.verify().expect("a tree that was built is one");
    assert_eq!(read().map(|again| again.digest()), Some(tree.digest()));
}

/// Reads an archive that may be an OCI image.
pub fn oci(bytes: &[u8]) {
    let section = Section::whole(file(bytes));
    let wanted =
        ImageSelection { platform: None, own: Platform::of_architecture("x86_64"), name: None };
    let opened = oci::open_archive(&section, &wanted, &Meter::hidden());
    if let Ok(Some(mut archive)) = opened {
        read_twice(&mut archive);
    }
}

/// Reads a pax header.
pub fn pax(bytes: &[u8]) {
    let Ok(records) = Records::parse(bytes) else { return };
    for (key, _) in records.iter() {
        assert!(!key.contains(&b'='));
    }
    for key in ["size", "uid", "GNU.sparse.major"] {
        let _number = records.number(key);
    }
    if let Ok(Some(time)) = records.time("mtime") {
        assert!(time.nanoseconds < 1_000_000_000);
    }
}

/// Reads an access list, as text and as an attribute.
pub fn acl(bytes: &[u8]) {
    let of_text = Acl::from_text(bytes, |_, name| (name == "root").then_some(0));
    let of_attribute = Acl::from_attribute(bytes);
    for acl in [of_text, of_attribute].into_iter().flatten() {
        let attribute = acl.to_attribute();
        let again = Acl::from_attribute(&attribute).expect("what was written can be read");
        assert_eq!(again.to_attribute(), attribute);
        let text = acl.to_text();
        let again = Acl::from_text(text.as_bytes(), |_, _| None);
        assert_eq!(
            again.expect("what was written can be read").to_attribute(),
            attribute,
            "{text}"
        );
        assert!(acl.mode_bits() <= 0o777);
    }
}

/// The list of packages of Debian or Alpine, which the first byte says.
pub fn packages(bytes: &[u8]) {
    let Some((first, bytes)) = bytes.split_first() else { return };
    let path = if first & 1 == 0 { "/var/lib/dpkg/status" } else { "/lib/apk/db/installed" };
    let path = TreePath::new(path).expect("the constants are paths");
    let metadata = Metadata::new(0o644, 0, 0);
    let mut builder = TreeBuilder::new(Algorithm::Blake3);
    for above in path.ancestors().filter(|above| *above != path) {
        builder.replace(above, Node::Directory(Metadata::new(0o755, 0, 0)));
    }
    let object = Algorithm::Blake3.digest(bytes).into();
    let (mtime, size_bytes) = (Time::default(), bytes.len() as u64);
    builder
        .replace(path, Node::Leaf(Leaf::File(tree::File { metadata, mtime, size_bytes, object })));
    let tree = builder.finish().expect("a file in directories is a tree");
    let files = packages::database_files(&tree).expect("one database is not too much");
    found(files.iter().map(|file| (file, bytes)));
}

/// The database of packages of an rpm.
pub fn rpm(bytes: &[u8]) {
    found([(&DatabaseFile::of_rpm(bytes), bytes)]);
}

fn found<'a>(files: impl IntoIterator<Item = (&'a DatabaseFile, &'a [u8])>) {
    let Ok(found) = packages::packages(files) else { return };
    let key = |package: &Package| (package.name.clone(), package.version.clone());
    assert!(found.is_sorted_by_key(key));
    for package in &found {
        assert!(!package.name.contains(char::is_control), "{:?}", package.name);
    }
}
