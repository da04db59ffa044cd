//! `tree-1`: the canonical bytes of a directory, over which it is digested.
//!
//! Frozen. `docs/IMAGE-FORMAT.md` specifies each byte; a change of this file that changes a byte
//! is a new format, `tree-2`, beside this one. All numbers are little-endian.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::node::{
    Computed, Device, File, Leaf, MODE_BITS, Metadata, SYMLINK_MODE, Special, Symlink, Time,
};
use super::{Child, Directory, Entry, Name, TreeError, Xattrs};
use crate::escape::{ByteText, escape};
use crate::object::{Algorithm, Hasher, ObjectId};
use crate::path::TreePath;

const MAGIC: &[u8; 8] = b"tree-1\0\0";

const DIRECTORY: u8 = 1;
const FILE: u8 = 2;
const COMPUTED: u8 = 3;
const SYMLINK: u8 = 4;
const HARD_LINK: u8 = 5;
const BLOCK: u8 = 6;
const CHARACTER: u8 = 7;
const FIFO: u8 = 8;

/// The longest encoding of a directory that is stored and sent, in bytes: some 500,000 entries.
pub const DIRECTORY_BYTES_MAX: usize = 64 << 20;

/// The longest target of a symlink (Linux `PATH_MAX` less its final zero), in bytes.
pub const TARGET_BYTES_MAX: usize = 4_095;

/// The longest value of an extended attribute (Linux `XATTR_SIZE_MAX`), in bytes.
pub const XATTR_BYTES_MAX: usize = 65_536;

/// Encodes a directory; `entries` are sorted by name.
///
/// # Errors
///
/// [`TreeError`] names the entry that breaks a rule of the format.
pub fn encode(
    algorithm: Algorithm,
    metadata: &Metadata,
    entries: &[Entry],
) -> Result<Vec<u8>, TreeError> {
    let bytes = Vec::with_capacity(64 + entries.len() * 96);
    let mut writer = Writer { bytes, algorithm, hasher: None };
    writer.directory(metadata, entries)?;
    Ok(writer.bytes)
}

/// Appends a part of the encoding of `directory`: what comes before the entries, or one entry.
pub(super) fn append(directory: &Directory, entry: Option<&Entry>, bytes: &mut Vec<u8>) {
    let algorithm = directory.digest().algorithm();
    let mut writer = Writer { bytes: std::mem::take(bytes), algorithm, hasher: None };
    let written = match entry {
        None => writer.head(directory.metadata(), directory.entries().len()),
        Some(entry) => writer.entry(entry),
    };
    written.expect("a directory was encoded once when it was made");
    *bytes = writer.bytes;
}

/// Returns the digest of what [`encode`] returns, without having it in memory as a whole.
pub(super) fn digest(
    algorithm: Algorithm,
    metadata: &Metadata,
    entries: &[Entry],
) -> Result<ObjectId, TreeError> {
    let hasher = Some(Hasher::new(algorithm));
    let mut writer = Writer { bytes: Vec::new(), algorithm, hasher };
    writer.directory(metadata, entries)?;
    let mut hasher = writer.hasher.expect("the writer was made with it");
    hasher.update(&writer.bytes);
    Ok(hasher.finish())
}

fn count_of(length: usize, name: &[u8], field: &'static str) -> Result<u32, TreeError> {
    u32::try_from(length).map_err(|_| TreeError::BadField { name: escape(name), field })
}

/// So many bytes are digested at a time, and not kept.
const CHUNK_BYTES: usize = 64 << 10;

struct Writer {
    bytes: Vec<u8>,
    algorithm: Algorithm,
    /// Takes the bytes, if nobody else wants them.
    hasher: Option<Hasher>,
}

impl Writer {
    fn directory(&mut self, metadata: &Metadata, entries: &[Entry]) -> Result<(), TreeError> {
        self.head(metadata, entries.len())?;
        let mut last: Option<&[u8]> = None;
        for entry in entries {
            let name = entry.name.as_bytes();
            if last.is_some_and(|last| last >= name) {
                return Err(TreeError::Order { name: escape(name) });
            }
            last = Some(name);
            self.entry(entry)?;
            if self.bytes.len() >= CHUNK_BYTES
                && let Some(hasher) = &mut self.hasher
            {
                hasher.update(&self.bytes);
                self.bytes.clear();
            }
        }
        Ok(())
    }

    /// Writes what comes before the entries.
    fn head(&mut self, metadata: &Metadata, entries: usize) -> Result<(), TreeError> {
        self.bytes.extend_from_slice(MAGIC);
        self.metadata(b"", metadata)?;
        self.u32(count_of(entries, b"", "number of entries")?);
        Ok(())
    }

    fn entry(&mut self, entry: &Entry) -> Result<(), TreeError> {
        let name = entry.name.as_bytes();
        self.bytes.push(u8::try_from(name.len()).expect("a name has at most 255 bytes"));
        self.bytes.extend_from_slice(name);
        match &entry.child {
            Child::Directory(directory) => {
                self.bytes.push(DIRECTORY);
                self.object(name, &directory.digest())
            }
            Child::Leaf(leaf) => self.leaf(name, leaf),
        }
    }

    fn u16(&mut self, number: u16) {
        self.bytes.extend_from_slice(&number.to_le_bytes());
    }

    fn u32(&mut self, number: u32) {
        self.bytes.extend_from_slice(&number.to_le_bytes());
    }

    fn u64(&mut self, number: u64) {
        self.bytes.extend_from_slice(&number.to_le_bytes());
    }

    fn long(&mut self, bytes: &[u8], name: &[u8], field: &'static str) -> Result<(), TreeError> {
        self.u32(count_of(bytes.len(), name, field)?);
        self.bytes.extend_from_slice(bytes);
        Ok(())
    }

    fn metadata(&mut self, name: &[u8], metadata: &Metadata) -> Result<(), TreeError> {
        let bad = |field| TreeError::BadField { name: escape(name), field };
        if metadata.mode & !MODE_BITS != 0 {
            return Err(bad("mode"));
        }
        self.u32(metadata.mode);
        self.u32(metadata.uid);
        self.u32(metadata.gid);
        let count = metadata.xattrs.len();
        self.u16(u16::try_from(count).map_err(|_| bad("number of extended attributes"))?);
        for (key, value) in metadata.xattrs.iter() {
            let length = u8::try_from(key.len()).map_err(|_| bad("extended attribute name"))?;
            if length == 0 || key.contains(&0) {
                return Err(bad("extended attribute name"));
            }
            if value.len() > XATTR_BYTES_MAX {
                return Err(bad("extended attribute value"));
            }
            self.bytes.push(length);
            self.bytes.extend_from_slice(key);
            self.long(value, name, "extended attribute value")?;
        }
        Ok(())
    }

    fn time(&mut self, name: &[u8], time: Time) -> Result<(), TreeError> {
        if time.nanoseconds >= 1_000_000_000 {
            return Err(TreeError::BadField { name: escape(name), field: "time" });
        }
        self.bytes.extend_from_slice(&time.seconds.to_le_bytes());
        self.u32(time.nanoseconds);
        Ok(())
    }

    fn object(&mut self, name: &[u8], object: &ObjectId) -> Result<(), TreeError> {
        if object.algorithm() != self.algorithm {
            return Err(TreeError::Algorithm { name: escape(name), algorithm: self.algorithm });
        }
        self.bytes.push(object.algorithm().code());
        self.bytes.extend_from_slice(object.digest());
        Ok(())
    }

    fn leaf(&mut self, name: &[u8], leaf: &Leaf) -> Result<(), TreeError> {
        let bad = |field| TreeError::BadField { name: escape(name), field };
        match leaf {
            Leaf::File(file) => {
                self.bytes.push(FILE);
                self.metadata(name, &file.metadata)?;
                self.time(name, file.mtime)?;
                self.u64(file.size_bytes);
                self.object(name, &file.object.id())
            }
            Leaf::Computed(computed) => {
                if computed.source.is_empty() {
                    return Err(bad("source"));
                }
                self.bytes.push(COMPUTED);
                self.metadata(name, &computed.metadata)?;
                self.long(computed.source.as_bytes(), name, "source")
            }
            Leaf::Symlink(symlink) => {
                if symlink.metadata.mode != SYMLINK_MODE {
                    return Err(bad("symlink mode"));
                }
                let target = &symlink.target.0;
                if target.is_empty() || target.len() > TARGET_BYTES_MAX || target.contains(&0) {
                    return Err(bad("symlink target"));
                }
                self.bytes.push(SYMLINK);
                self.metadata(name, &symlink.metadata)?;
                self.long(target, name, "symlink target")
            }
            Leaf::HardLink(target) => {
                self.bytes.push(HARD_LINK);
                self.long(target.as_bytes(), name, "hard link target")
            }
            Leaf::Special(special) => {
                let (kind, numbers) = match special.device {
                    Device::Block { major, minor } => (BLOCK, Some((major, minor))),
                    Device::Character { major, minor } => (CHARACTER, Some((major, minor))),
                    Device::Fifo => (FIFO, None),
                };
                self.bytes.push(kind);
                self.metadata(name, &special.metadata)?;
                self.time(name, special.mtime)?;
                if let Some((major, minor)) = numbers {
                    self.u32(major);
                    self.u32(minor);
                }
                Ok(())
            }
        }
    }
}

/// Decodes a directory; `resolve` gives the sub-directories it names.
///
/// Accepts exactly what [`encode`] writes: two encodings of one directory do not exist.
///
/// # Errors
///
/// [`TreeError::Encoding`] with the offset where the bytes stop making sense,
/// [`TreeError::MissingDirectory`] if `resolve` does not know a digest.
pub fn decode(
    algorithm: Algorithm,
    bytes: &[u8],
    resolve: impl Fn(&ObjectId) -> Option<Arc<Directory>>,
) -> Result<Directory, TreeError> {
    let mut entries = Vec::new();
    let metadata = read(algorithm, bytes, |name, item| {
        let child = match item {
            Item::Directory(digest) => {
                Child::Directory(resolve(&digest).ok_or(TreeError::MissingDirectory { digest })?)
            }
            Item::Leaf(leaf) => Child::Leaf(leaf),
        };
        entries.push(Entry { name, child });
        Ok(())
    })?;
    Directory::with_digest(metadata, entries, algorithm.digest(bytes))
}

/// The digests of the sub-directories and the objects of the files that the encoding names.
///
/// # Errors
///
/// As [`decode`], but needs no sub-directory.
pub fn references(algorithm: Algorithm, bytes: &[u8]) -> Result<References, TreeError> {
    let mut references = References::default();
    read(algorithm, bytes, |_, item| {
        match item {
            Item::Directory(digest) => references.directories.push(digest),
            Item::Leaf(Leaf::File(file)) => {
                references.files.push((file.object.id(), file.size_bytes));
            }
            Item::Leaf(_) => {}
        }
        Ok(())
    })?;
    Ok(references)
}

/// What a directory names, itself not included.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct References {
    /// Digests of the sub-directories, in order of their names.
    pub directories: Vec<ObjectId>,
    /// Objects and sizes in bytes of the regular files, in order of their names.
    pub files: Vec<(ObjectId, u64)>,
}

/// Decodes a directory alone, without what its sub-directories hold.
///
/// # Errors
///
/// As [`decode`], but needs no sub-directory.
pub fn list(algorithm: Algorithm, bytes: &[u8]) -> Result<Listing, TreeError> {
    let mut entries = Vec::new();
    let metadata = read(algorithm, bytes, |name, item| {
        entries.push((name, item));
        Ok(())
    })?;
    Ok(Listing { metadata, entries })
}

/// A directory alone: sub-directories are known by their digests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listing {
    /// Mode, owner and extended attributes of the directory itself.
    pub metadata: Metadata,
    /// The entries, sorted by name.
    pub entries: Vec<(Name, Item)>,
}

impl Listing {
    /// The listing of a directory that is at hand.
    #[must_use]
    pub fn of(directory: &Directory) -> Self {
        let item = |child: &Child| match child {
            Child::Directory(below) => Item::Directory(below.digest()),
            Child::Leaf(leaf) => Item::Leaf(leaf.clone()),
        };
        let entries = directory.entries().iter();
        let entries = entries.map(|entry| (entry.name.clone(), item(&entry.child))).collect();
        Self { metadata: directory.metadata().clone(), entries }
    }

    /// What has the name `name`. Takes a binary search.
    #[must_use]
    pub fn get(&self, name: &[u8]) -> Option<&Item> {
        let index = self.entries.binary_search_by(|(entry, _)| entry.as_bytes().cmp(name)).ok()?;
        Some(&self.entries[index].1)
    }
}

/// What a name in a [`Listing`] stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Item {
    /// The directory with that digest.
    Directory(ObjectId),
    /// Anything else.
    Leaf(Leaf),
}

fn read(
    algorithm: Algorithm,
    bytes: &[u8],
    mut take: impl FnMut(Name, Item) -> Result<(), TreeError>,
) -> Result<Metadata, TreeError> {
    let mut reader = Reader { bytes, offset: 0, algorithm, carriers: BTreeSet::new() };
    if reader.take(MAGIC.len(), "tree-1")? != MAGIC {
        return Err(TreeError::Encoding { offset: 0, what: "tree-1" });
    }
    let metadata = reader.metadata()?;
    let count = reader.u32("number of entries")?;
    let mut last: Option<Name> = None;
    for _ in 0..count {
        let at = reader.offset;
        let length = usize::from(reader.u8("name length")?);
        let name = Name::new(reader.take(length, "name")?)?;
        if last.as_ref().is_some_and(|last| *last >= name) {
            return Err(TreeError::Encoding { offset: at, what: "a name in order" });
        }
        last = Some(name.clone());
        let item = reader.item()?;
        take(name, item)?;
    }
    if reader.offset != bytes.len() {
        return Err(TreeError::Encoding { offset: reader.offset, what: "the end" });
    }
    Ok(metadata)
}

struct Reader<'bytes> {
    bytes: &'bytes [u8],
    offset: usize,
    algorithm: Algorithm,
    /// The targets of the hard links so far, each of which is kept once.
    carriers: BTreeSet<TreePath>,
}

impl<'bytes> Reader<'bytes> {
    fn bad(&self, what: &'static str) -> TreeError {
        TreeError::Encoding { offset: self.offset, what }
    }

    fn take(&mut self, length: usize, what: &'static str) -> Result<&'bytes [u8], TreeError> {
        let rest = &self.bytes[self.offset..];
        let taken = rest.get(..length).ok_or_else(|| self.bad(what))?;
        self.offset += length;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], TreeError> {
        Ok(self.take(N, what)?.try_into().expect("take gives the length asked for"))
    }

    fn u8(&mut self, what: &'static str) -> Result<u8, TreeError> {
        Ok(self.array::<1>(what)?[0])
    }

    fn u32(&mut self, what: &'static str) -> Result<u32, TreeError> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    fn long(&mut self, max: usize, what: &'static str) -> Result<&'bytes [u8], TreeError> {
        let at = self.offset;
        let length = self.u32(what)? as usize;
        if length > max {
            return Err(TreeError::Encoding { offset: at, what });
        }
        self.take(length, what)
    }

    fn metadata(&mut self) -> Result<Metadata, TreeError> {
        let at = self.offset;
        let mode = self.u32("mode")?;
        if mode & !MODE_BITS != 0 {
            return Err(TreeError::Encoding { offset: at, what: "mode" });
        }
        let uid = self.u32("uid")?;
        let gid = self.u32("gid")?;
        let count = u16::from_le_bytes(self.array("number of extended attributes")?);
        let mut attributes: Vec<(Vec<u8>, Vec<u8>)> = Vec::new();
        for _ in 0..count {
            let at = self.offset;
            let length = usize::from(self.u8("extended attribute name")?);
            let key = self.take(length, "extended attribute name")?;
            let in_order = attributes.last().is_none_or(|(last, _)| &last[..] < key);
            if key.is_empty() || key.contains(&0) || !in_order {
                return Err(TreeError::Encoding { offset: at, what: "extended attribute name" });
            }
            let value = self.long(XATTR_BYTES_MAX, "extended attribute value")?;
            attributes.push((key.to_owned(), value.to_owned()));
        }
        let xattrs: Xattrs = attributes.into_iter().collect();
        Ok(Metadata { mode, uid, gid, xattrs })
    }

    fn time(&mut self) -> Result<Time, TreeError> {
        let seconds = i64::from_le_bytes(self.array("time")?);
        let at = self.offset;
        let nanoseconds = self.u32("time")?;
        if nanoseconds >= 1_000_000_000 {
            return Err(TreeError::Encoding { offset: at, what: "nanoseconds" });
        }
        Ok(Time { seconds, nanoseconds })
    }

    fn object(&mut self) -> Result<ObjectId, TreeError> {
        let at = self.offset;
        if self.u8("digest")? != self.algorithm.code() {
            return Err(TreeError::Encoding { offset: at, what: "a digest of the algorithm" });
        }
        let digest = self.take(self.algorithm.digest_bytes(), "digest")?;
        Ok(ObjectId::from_digest(self.algorithm, digest).expect("the length was taken for it"))
    }

    /// Returns `target`, or the equal one that was read before.
    fn carrier(&mut self, target: TreePath) -> TreePath {
        if let Some(known) = self.carriers.get(&target) {
            return known.clone();
        }
        self.carriers.insert(target.clone());
        target
    }

    fn item(&mut self) -> Result<Item, TreeError> {
        let at = self.offset;
        let leaf = match self.u8("kind")? {
            DIRECTORY => return Ok(Item::Directory(self.object()?)),
            FILE => Leaf::File(File {
                metadata: self.metadata()?,
                mtime: self.time()?,
                size_bytes: u64::from_le_bytes(self.array("size")?),
                object: self.object()?.into(),
            }),
            COMPUTED => {
                let metadata = self.metadata()?;
                let source = self.long(TARGET_BYTES_MAX, "source")?;
                let source = std::str::from_utf8(source).ok().filter(|source| !source.is_empty());
                let source = source.ok_or_else(|| self.bad("source"))?.to_owned();
                Leaf::Computed(Computed { metadata, source })
            }
            SYMLINK => {
                let metadata = self.metadata()?;
                let target = self.long(TARGET_BYTES_MAX, "symlink target")?;
                if metadata.mode != SYMLINK_MODE || target.is_empty() || target.contains(&0) {
                    return Err(TreeError::Encoding { offset: at, what: "symlink" });
                }
                Leaf::Symlink(Symlink { metadata, target: ByteText(target.to_owned()) })
            }
            HARD_LINK => {
                let target = self.long(self.bytes.len(), "hard link target")?;
                let target = TreePath::new(target).map_err(|_| self.bad("hard link target"))?;
                Leaf::HardLink(self.carrier(target))
            }
            kind @ (BLOCK | CHARACTER | FIFO) => {
                let metadata = self.metadata()?;
                let mtime = self.time()?;
                let device = if kind == FIFO {
                    Device::Fifo
                } else {
                    let major = self.u32("major")?;
                    let minor = self.u32("minor")?;
                    if kind == BLOCK {
                        Device::Block { major, minor }
                    } else {
                        Device::Character { major, minor }
                    }
                };
                Leaf::Special(Special { metadata, mtime, device })
            }
            _ => return Err(TreeError::Encoding { offset: at, what: "kind" }),
        };
        Ok(Item::Leaf(leaf))
    }
}
