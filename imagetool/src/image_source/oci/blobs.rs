//! The blobs of an image: files of a directory, or members of an archive.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use model::path::TreePath;
use tar::EntryType;

use super::OciError;
use crate::archive::input::Section;
use crate::archive::member;
use crate::archive::reader::{Member, Reader};

/// The most members of an archive with images.
const MEMBERS_MAX: usize = 100_000;

/// How many symlinks of an archive are followed: versions of `docker save` made one for a layer
/// that two images share.
const LINKS_MAX: u32 = 4;

/// The blobs of images, by name.
pub enum Blobs {
    /// Files below a directory.
    Directory(PathBuf),
    /// Members of an archive that is not compressed.
    Archive(BTreeMap<TreePath, Blob>),
}

/// A member of an archive.
#[derive(Clone, Debug)]
pub enum Blob {
    /// The content of a regular file.
    File(Section),
    /// A symlink to another member.
    Link(TreePath),
    /// Neither.
    Other,
}

impl Blobs {
    /// Returns the files below `path`.
    pub fn of_directory(path: &Path) -> Self {
        Self::Directory(path.to_owned())
    }

    /// Lists the members of the archive `input`, which is in `section`. Returns `None` if the
    /// archive does not contain images or is invalid. It stops at the first member that cannot
    /// belong to an image, so that an archive of a machine is not read to its end.
    pub fn of_archive(input: impl Read, section: &Section) -> Option<Self> {
        let mut reader = Reader::new(input);
        let mut members = BTreeMap::new();
        while let Some(member) = reader.next_member().ok()? {
            let path = member::path_of(&member.name).ok()?;
            if path.is_root() {
                continue;
            }
            let stored = stored(&member, &path, section, reader.offset());
            let known = members.insert(path.clone(), stored).is_some();
            if known || !may_belong_to_images(&path) || members.len() > MEMBERS_MAX {
                return None;
            }
        }
        let store = Self::Archive(members);
        (store.is_layout() || store.has("/manifest.json")).then_some(store)
    }

    /// True for an OCI layout; otherwise it is an archive by `docker save`.
    pub fn is_layout(&self) -> bool {
        self.has("/oci-layout") && self.has("/index.json")
    }

    fn has(&self, path: &str) -> bool {
        match self {
            Self::Directory(_) => true,
            Self::Archive(members) => {
                TreePath::new(path).is_ok_and(|path| members.contains_key(&path))
            }
        }
    }

    /// Returns the content of the file at `path`.
    pub fn section(&self, path: &TreePath) -> Result<Section, OciError> {
        let name = || model::escape::escape(path.relative());
        match self {
            Self::Directory(directory) => {
                let path = directory.join(OsStr::from_bytes(path.relative()));
                // Opening a fifo must not block.
                let flags = nix::libc::O_NONBLOCK | nix::libc::O_NOCTTY;
                let mut options = std::fs::OpenOptions::new();
                let opened = options.read(true).custom_flags(flags).open(path);
                let opened = opened.and_then(|file| Ok((file.metadata()?.is_file(), file)));
                match opened {
                    Ok((true, file)) => Ok(Section::whole(file)),
                    Ok((false, _)) => Err(OciError::NoFile { name: name() }),
                    Err(error) if error.kind() == io::ErrorKind::NotFound => {
                        Err(OciError::Absent { name: name() })
                    }
                    Err(source) => Err(OciError::Read { name: name(), source }),
                }
            }
            Self::Archive(members) => {
                let mut at = path;
                for _ in 0..=LINKS_MAX {
                    match members.get(at) {
                        Some(Blob::File(section)) => return Ok(section.clone()),
                        Some(Blob::Link(target)) => at = target,
                        Some(Blob::Other) => break,
                        None => return Err(OciError::Absent { name: name() }),
                    }
                }
                Err(OciError::NoFile { name: name() })
            }
        }
    }
}

fn stored(member: &Member, path: &TreePath, section: &Section, offset: u64) -> Blob {
    match member.kind {
        EntryType::Regular | EntryType::Continuous if member.hole_bytes == 0 => {
            Blob::File(section.part(offset, member.size_bytes))
        }
        EntryType::Symlink => link_target(path, &member.link).map_or(Blob::Other, Blob::Link),
        _ => Blob::Other,
    }
}

/// Returns the target of a relative symlink at `path`, if it is in the archive.
fn link_target(path: &TreePath, link: &[u8]) -> Option<TreePath> {
    let mut at = path.parent()?;
    for component in link.split(|&byte| byte == b'/') {
        at = match component {
            b"." => at,
            b".." => at.parent()?,
            name => at.join(name).ok()?,
        };
    }
    Some(at)
}

/// True for names that tools use in archives of images.
fn may_belong_to_images(path: &TreePath) -> bool {
    let Some(top) = path.components().next() else { return false };
    let known: [&[u8]; 5] =
        [b"oci-layout", b"index.json", b"blobs", b"manifest.json", b"repositories"];
    let digits = top.strip_prefix(b"sha256:").unwrap_or(top);
    let is_digit = |byte: &u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(byte);
    known.contains(&top) || digits.len() >= 64 && digits[..64].iter().all(is_digit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_images_are_told_from_those_of_machines() {
        let hex = "0123456789abcdef".repeat(4);
        let table = [
            ("/oci-layout".to_owned(), true),
            ("/blobs/sha256/x".to_owned(), true),
            ("/manifest.json".to_owned(), true),
            (format!("/{hex}.json"), true),
            (format!("/{hex}/layer.tar"), true),
            (format!("/sha256:{hex}"), true),
            (format!("/{hex}.tar.gz"), true),
            ("/bin".to_owned(), false),
            ("/etc/manifest.json".to_owned(), false),
            ("/blob".to_owned(), false),
        ];
        for (path, want) in table {
            assert_eq!(may_belong_to_images(&TreePath::new(&path).unwrap()), want, "{path}");
        }
    }

    #[test]
    fn symlinks_lead_to_members_alone() {
        let path = TreePath::new("/a/layer.tar").unwrap();
        let table: [(&[u8], Option<&str>); 5] = [
            (b"../b/layer.tar", Some("/b/layer.tar")),
            (b"./other", Some("/a/other")),
            (b"../../etc/passwd", None),
            (b"/etc/passwd", None),
            (b"", None),
        ];
        for (link, want) in table {
            let want = want.map(|want| TreePath::new(want).unwrap());
            assert_eq!(link_target(&path, link), want, "{link:?}");
        }
    }
}
