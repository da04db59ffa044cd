//! Reads a tar archive into a tree, and its contents again for the upload.
//!
//! There are two passes, so that no content is held in memory: the first hashes everything and
//! builds the tree, the second streams only the objects that the server lacks. An input that cannot
//! be read twice, such as a pipe, is first copied to an unnamed temporary file.
//!
//! # Invariants
//!
//! * An archive with one invalid member is refused as a whole, before anything is sent.
//! * Memory grows with the number of members, not with their contents.
//!
//! An archive is one tar, or the layers of an image, each a tar ([`layer`]).

pub mod acl;
pub mod blob_digest;
pub mod compression;
pub mod input;
pub mod layer;
pub mod member;
pub mod pax;
pub mod reader;
pub mod sparse;
pub mod writer;

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use model::object::{Algorithm, Hasher, ObjectId};
use model::path::{PathError, TreePath};
use model::scope::SUBD_DIRECTORY;
use model::tree::{self, Leaf, Metadata, Node, TreeBuilder, TreeError};

use self::acl::{Account, AclError};
use self::input::Section;
use self::input::{ExpandsTooMuch, ExpansionLimit};
use self::layer::{Layer, LayeredTree, RefusedEntry, Whiteouts};
use self::member::Entry;
use self::pax::PaxError;
use self::reader::{ArchiveEnd, Reader};
use crate::archive::blob_digest::{BlobDigest, DigestReader};
use crate::output::progress::{Meter, Unit};
use crate::transfer::contents::{Contents, SendError, UploadSink};

/// Most members of one archive.
const MEMBERS_MAX: usize = 20_000_000;

/// Most memory for the names and attributes of one archive, in bytes.
const NAMES_BYTES_MAX: usize = 2 << 30;

/// An archive that cannot be read. Offsets are in bytes after decompression; names are escaped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ArchiveError {
    #[error("cannot open the archive `{}`", path.display())]
    Open { path: PathBuf, source: io::Error },
    #[error("cannot copy the archive to a temporary file in `{}`", directory.display())]
    Spool { directory: PathBuf, source: io::Error },
    #[error("cannot read the archive after byte {offset}")]
    Read { offset: u64, source: io::Error },
    #[error("the archive is empty")]
    Empty,
    #[error("this is not a tar archive, nor one compressed with gzip, zstd, xz or bzip2")]
    NotTar,
    #[error("the archive is truncated: it ends at byte {offset}, after {after}")]
    Truncated { offset: u64, after: String },
    #[error("the archive is damaged: no header at byte {offset}, after {after}")]
    BadHeader { offset: u64, after: String },
    #[error("more data follows the end of the archive, at byte {offset}")]
    Trailing { offset: u64 },
    #[error("the entry `{name}` is refused")]
    Entry { name: String, source: EntryError },
    #[error("the archive is refused at byte {offset}, after {after}")]
    Expands { offset: u64, after: String, source: ExpandsTooMuch },
    #[error("its expanded content has the digest {got}, expected {want}")]
    Digest { want: BlobDigest, got: BlobDigest },
    #[error("invalid {layer}")]
    Layer { layer: String, source: Box<ArchiveError> },
    #[error("the archive has too many entries, or their names and attributes are too long")]
    TooLarge,
    #[error("the entries of the archive do not form a valid tree")]
    Tree { source: TreeError },
}

/// A member that cannot be an entry of an image. Names are escaped; sizes are in bytes.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EntryError {
    #[error("it has no name")]
    NoName,
    #[error("its name is absolute")]
    Absolute,
    #[error("its name contains `..`")]
    Outside,
    #[error("invalid name")]
    Path { source: PathError },
    #[error("it is the root of the tree but not a directory")]
    Root,
    #[error("it is in the archive twice")]
    Duplicate,
    #[error("it is below {ancestor}, which is a {kind}")]
    Below { ancestor: TreePath, kind: &'static str },
    #[error("it has the name of a whiteout, but {why}")]
    Whiteout { why: &'static str },
    #[error("it is a hard link to {target}, which is not a regular file")]
    LinkToNowhere { target: TreePath },
    #[error("it is a hard link to `{target}`")]
    LinkTarget { target: String, source: Box<EntryError> },
    #[error("it is a symlink with a target of {length} bytes: 1 to 4,095 are allowed")]
    SymlinkTarget { length: usize },
    #[error("it claims {size} bytes of content, which its kind cannot have")]
    UnexpectedContent { size: u64 },
    #[error("its type `{code}` is unknown")]
    Type { code: char },
    #[error("its {field} is not a number or out of range")]
    Number { field: &'static str },
    #[error("its name has {size} bytes")]
    LongName { size: u64 },
    #[error("its pax header has {size} bytes")]
    LongPax { size: u64 },
    #[error("invalid pax header")]
    Pax { source: PaxError },
    #[error("it has two headers of one kind")]
    RepeatedHeader,
    #[error("it sets `{key}` for all entries that follow")]
    Global { key: &'static str },
    #[error("invalid map of the sparse file: {why}")]
    Sparse { why: &'static str },
    #[error("invalid access control list")]
    Acl { source: AclError },
    #[error("{SUBD_DIRECTORY} belongs to subd alone: leave it out of the archive")]
    Subd,
}

/// An archive that can be read repeatedly.
pub struct Archive {
    parts: Vec<ArchivePart>,
}

/// One tar of an archive.
pub struct ArchivePart {
    section: Section,
    whiteouts: Whiteouts,
    /// The name in messages, if it is one of several.
    layer: Option<String>,
    /// The digest of the expanded content, if it is known.
    digest: Option<BlobDigest>,
    /// Object and size in bytes of each regular file, in the order of the archive.
    files: Vec<(ObjectId, u64)>,
}

/// State that the parts of an archive share.
#[derive(Default)]
struct ArchiveUsage {
    members: usize,
    names_bytes: usize,
    expansion: ExpansionLimit,
}

impl ArchivePart {
    /// Returns a layer of an image. Messages call it `layer`; its expanded content must have
    /// `digest`.
    pub fn of_layer(section: Section, layer: String, digest: BlobDigest) -> Self {
        let (whiteouts, files) = (Whiteouts::Applied, Vec::new());
        Self { section, whiteouts, layer: Some(layer), digest: Some(digest), files }
    }

    fn reader(&self, expansion: &ExpansionLimit) -> Result<Reader<PartInput>, ArchiveError> {
        let packed = expansion.count_packed(self.section.open());
        let expanded = compression::open(packed)
            .map_err(|source| ArchiveError::Read { offset: 0, source })
            .map(|expanded| expansion.count_expanded(expanded))?;
        let expanded: Box<dyn Read + Send> = Box::new(expanded);
        let (algorithm, end) = match &self.digest {
            Some(digest) => (Some(digest.algorithm()), ArchiveEnd::Input),
            None => (None, ArchiveEnd::Marked),
        };
        Ok(Reader::new(DigestReader::new(expanded, algorithm)).ending(end))
    }

    fn read(
        &mut self,
        algorithm: Algorithm,
        usage: &mut ArchiveUsage,
        meter: &Meter,
    ) -> Result<Layer, ArchiveError> {
        self.files.clear();
        let own = TreePath::new(SUBD_DIRECTORY).expect("the constant is a path");
        let mut reader = self.reader(&usage.expansion)?;
        let mut layer = Layer::new(self.whiteouts);
        while let Some(member) = reader.next_member()? {
            let name = || model::escape::escape(&member.name);
            let refuse = |source| ArchiveError::Entry { name: name(), source };
            let (path, entry) = member::entry_of(&member, &account).map_err(refuse)?;
            usage.expansion.expanded(member.hole_bytes).map_err(|source| {
                ArchiveError::Expands { offset: reader.offset(), after: name(), source }
            })?;
            let node = match entry {
                Entry::Node(node) => node,
                Entry::File { metadata, mtime } => {
                    let mut hasher = Hasher::new(algorithm);
                    reader.content(|chunk| {
                        hasher.update(chunk);
                        meter.add(chunk.len() as u64);
                        Ok::<(), ArchiveError>(())
                    })?;
                    let object = hasher.finish();
                    let size_bytes = member.size_bytes;
                    self.files.push((object, size_bytes));
                    Node::Leaf(Leaf::File(tree::File {
                        metadata,
                        mtime,
                        size_bytes,
                        object: object.into(),
                    }))
                }
            };
            if path.starts_with(&own) {
                return Err(refuse(EntryError::Subd));
            }
            usage.members += 1;
            usage.names_bytes +=
                2 * member.name.len() + node.metadata().map_or(0, attributes_bytes);
            if usage.members > MEMBERS_MAX || usage.names_bytes > NAMES_BYTES_MAX {
                return Err(ArchiveError::TooLarge);
            }
            layer.insert(path, node, &member.name).map_err(refuse)?;
        }
        let got = reader.finish()?.finish();
        match (&self.digest, got) {
            (Some(want), Some(got)) if *want != got => {
                Err(ArchiveError::Digest { want: want.clone(), got })
            }
            _ => Ok(layer),
        }
    }

    fn name_in(&self, error: ArchiveError) -> ArchiveError {
        match &self.layer {
            None => error,
            Some(layer) => ArchiveError::Layer { layer: layer.clone(), source: Box::new(error) },
        }
    }
}

type PartInput = DigestReader<Box<dyn Read + Send>>;

impl Archive {
    /// Opens the archive at `path`; `-` is the standard input.
    ///
    /// # Errors
    ///
    /// [`ArchiveError::Open`], or [`ArchiveError::Spool`] if it had to be copied.
    pub fn open(path: &Path) -> Result<Self, ArchiveError> {
        open_file(path).map(Self::of_file)
    }

    /// Uses an open file, which must be seekable.
    pub fn of_file(file: File) -> Self {
        Self::of_section(Section::whole(file))
    }

    /// Uses a part of a file.
    pub fn of_section(section: Section) -> Self {
        let whiteouts = Whiteouts::Ordinary;
        let part = ArchivePart { section, whiteouts, layer: None, digest: None, files: Vec::new() };
        Self::of_layers(vec![part])
    }

    /// Uses the layers of an image, the lowest first.
    pub fn of_layers(parts: Vec<ArchivePart>) -> Self {
        Self { parts }
    }

    /// Applies whiteouts, as in the layers of images.
    pub fn with_whiteouts(mut self) -> Self {
        for part in &mut self.parts {
            part.whiteouts = Whiteouts::Applied;
        }
        self
    }

    /// Reads all entries, and hashes all contents with `algorithm`.
    ///
    /// # Errors
    ///
    /// [`ArchiveError`] if the archive is bad at any place.
    pub fn read(
        &mut self,
        algorithm: Algorithm,
        meter: &Meter,
    ) -> Result<TreeBuilder, ArchiveError> {
        let layered = self.read_onto(LayeredTree::default(), algorithm, meter)?;
        Ok(layered.into_builder(algorithm))
    }

    /// Like [`Archive::read`], and applies the entries to `layered`.
    ///
    /// # Errors
    ///
    /// [`ArchiveError`] if the archive is bad at any place.
    pub fn read_onto(
        &mut self,
        mut layered: LayeredTree,
        algorithm: Algorithm,
        meter: &Meter,
    ) -> Result<LayeredTree, ArchiveError> {
        meter.start("Reading the archive", Unit::Bytes, None);
        let mut usage = ArchiveUsage::default();
        for part in &mut self.parts {
            let layer = part.read(algorithm, &mut usage, meter);
            let layer = layer.map_err(|error| part.name_in(error))?;
            layered.apply(layer).map_err(|RefusedEntry { name, source }| {
                part.name_in(ArchiveError::Entry { name: model::escape::escape(&name), source })
            })?;
        }
        meter.finish();
        Ok(layered)
    }
}

impl ArchivePart {
    fn send(
        &self,
        algorithm: Algorithm,
        mut left: BTreeSet<ObjectId>,
        sink: &mut UploadSink,
    ) -> Result<(), SendError> {
        if left.is_empty() {
            return Ok(());
        }
        let mut reader = self.reader(&ExpansionLimit::default())?;
        let mut files = self.files.iter();
        while !left.is_empty() {
            let changed = |what: &[u8]| SendError::Changed { what: model::escape::escape(what) };
            let member = reader.next_member()?.ok_or_else(|| changed(b"the archive"))?;
            if !matches!(member::entry_of(&member, &account), Ok((_, Entry::File { .. }))) {
                continue;
            }
            let &(id, size_bytes) = files.next().ok_or_else(|| changed(&member.name))?;
            if !left.remove(&id) {
                continue;
            }
            if member.size_bytes != size_bytes {
                return Err(changed(&member.name));
            }
            let mut hasher = Hasher::new(algorithm);
            sink.object(id, size_bytes);
            reader.content(|chunk| {
                hasher.update(chunk);
                sink.content(chunk)
            })?;
            if hasher.finish() != id {
                return Err(changed(&member.name));
            }
            sink.end()?;
        }
        Ok(())
    }
}

/// Opens the file at `path` so that it can be read more than once; `-` is the standard input.
///
/// # Errors
///
/// [`ArchiveError::Open`], or [`ArchiveError::Spool`] if it had to be copied.
pub fn open_file(path: &Path) -> Result<File, ArchiveError> {
    if path.as_os_str() == "-" {
        return spool(&mut io::stdin().lock());
    }
    let open = |source| ArchiveError::Open { path: path.to_owned(), source };
    let mut file = File::open(path).map_err(open)?;
    if file.metadata().map_err(open)?.is_file() { Ok(file) } else { spool(&mut file) }
}

/// Copies a stream to a temporary file that has no name.
pub fn spool(input: &mut dyn Read) -> Result<File, ArchiveError> {
    let failed = |source| ArchiveError::Spool { directory: std::env::temp_dir(), source };
    let mut file = tempfile::tempfile().map_err(failed)?;
    io::copy(input, &mut file).map_err(failed)?;
    Ok(file)
}

fn attributes_bytes(metadata: &Metadata) -> usize {
    metadata.xattrs.iter().map(|(name, value)| name.len() + value.len()).sum()
}

/// Finds an account on this machine, for access lists that name accounts.
fn account(kind: Account, name: &str) -> Option<u32> {
    match kind {
        Account::User => Some(nix::unistd::User::from_name(name).ok()??.uid.as_raw()),
        Account::Group => Some(nix::unistd::Group::from_name(name).ok()??.gid.as_raw()),
    }
}

impl From<ArchiveError> for SendError {
    fn from(error: ArchiveError) -> Self {
        Self::Archive { source: Box::new(error) }
    }
}

impl Contents for Archive {
    fn send(
        &mut self,
        algorithm: Algorithm,
        missing: &BTreeSet<ObjectId>,
        sink: &mut UploadSink,
    ) -> Result<(), SendError> {
        let mut sent: BTreeSet<ObjectId> = BTreeSet::new();
        for part in &self.parts {
            // An id is known by the place of its file in the archive, because the head of an
            // object goes out before its content is read.
            let ids = part.files.iter().map(|(id, _)| *id);
            let left: BTreeSet<ObjectId> =
                ids.filter(|id| missing.contains(id) && !sent.contains(id)).collect();
            sent.extend(&left);
            part.send(algorithm, left, sink)?;
        }
        Ok(())
    }
}
