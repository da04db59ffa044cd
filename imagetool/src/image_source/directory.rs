//! Reads a local directory into a tree, and its files again for the upload.
//!
//! The directory is walked once, sorted; then the files are hashed on all processors. Contents are
//! not kept in memory: the upload reads and hashes them again. A file that changes meanwhile is an
//! error, because a mixture of two states is not an image.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use model::escape::ByteText;
use model::filter::Filter;
use model::object::{Algorithm, Hasher, ObjectId};
use model::path::{PathError, TreePath};
use model::scope::{Attributes, SUBD_DIRECTORY};
use model::tree::node::{MODE_BITS, SYMLINK_MODE};
use model::tree::{
    self, Device, Leaf, Metadata, Node, Special, Symlink, Time, TreeBuilder, TreeError, Xattrs,
};
use nix::errno::Errno;
use walkdir::{DirEntry, WalkDir};

use crate::output::progress::{Meter, Unit};
use crate::service_needs::DroppedDirectory;
use crate::transfer::contents::{Contents, SendError, UploadSink};

/// The maximum number of threads that hash.
const THREADS_MAX: usize = 16;

/// How much of a file is read at once, in bytes.
const BUFFER_BYTES: usize = 256 << 10;

/// The smallest size of all holes of a file that is worth a warning, in bytes.
const HOLE_BYTES_MIN: u64 = 16 << 20;

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DirectoryError {
    #[error("cannot read `{}`", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("`{}` cannot be in an image", path.display())]
    Path { path: PathBuf, source: PathError },
    #[error("`{}` was changed while it was read", path.display())]
    Changed { path: PathBuf },
    #[error("the directory does not form a valid tree")]
    Tree { source: TreeError },
}

/// Where the contents of the files of a directory are.
pub struct DirectoryContents {
    files: BTreeMap<ObjectId, (PathBuf, u64)>,
}

/// A directory that was read.
pub struct DirectoryTree {
    /// All entries.
    pub builder: TreeBuilder,
    /// Where the files are.
    pub contents: DirectoryContents,
    /// Texts about entries that were left out, or will not be as they are here.
    pub warnings: Vec<String>,
    /// Directories that the filter keeps, without what is below them.
    pub dropped: Vec<DroppedDirectory>,
}

/// A regular file that has to be hashed.
struct UnhashedFile {
    tree_path: TreePath,
    path: PathBuf,
    status: std::fs::Metadata,
    metadata: Metadata,
}

impl UnhashedFile {
    /// True if most of the file is holes, and they are large.
    fn is_sparse(&self) -> bool {
        let (length, stored) = (self.status.len(), self.status.blocks().saturating_mul(512));
        let holes = length.saturating_sub(stored);
        holes >= HOLE_BYTES_MIN && holes > length / 2
    }
}

/// Reads the directory `root`, without the paths that `filter` keeps, sockets, and other
/// file-systems.
pub fn read(
    root: &Path,
    algorithm: Algorithm,
    filter: Option<&Filter>,
    meter: &Meter,
) -> Result<DirectoryTree, DirectoryError> {
    // The walk does not follow symlinks, except here.
    let root = &std::fs::canonicalize(root).map_err(|source| read_error(root, source))?;
    let mut walk = Walk {
        root,
        device: None,
        builder: TreeBuilder::new(algorithm),
        links: BTreeMap::new(),
        files_to_hash: Vec::new(),
        sockets: Vec::new(),
        mounts: Vec::new(),
    };
    meter.start("Looking for files", Unit::Items, None);
    let own = TreePath::new(SUBD_DIRECTORY).expect("the constant is a path");
    let (mut dropped, mut has_own) = (Vec::new(), false);
    let mut left_out = |entry: &DirEntry| {
        // An invalid path is not skipped: it is refused below with its name.
        let Ok(path) = tree_path(root, entry.path()) else { return false };
        let is_kept =
            !path.is_root() && filter.is_some_and(|filter| filter.keeps_below_unkept(&path));
        if is_kept
            && entry.file_type().is_dir()
            && let Ok(status) = entry.metadata()
        {
            let (uid, gid) = (status.uid(), status.gid());
            dropped.push(DroppedDirectory { path: path.clone(), uid, gid });
        }
        has_own |= !is_kept && path == own;
        is_kept || path == own
    };
    let entries = WalkDir::new(root).sort_by_file_name().same_file_system(true);
    for entry in entries.into_iter().filter_entry(|entry| !left_out(entry)) {
        walk.visit(&entry.map_err(walk_error)?)?;
        meter.add(1);
    }
    let own = format!("{SUBD_DIRECTORY} is left out: it belongs to the subd of each machine");
    let warnings = has_own.then_some(own).into_iter().chain(walk.warnings()).collect();
    meter.start("Hashing files", Unit::Items, Some(walk.files_to_hash.len() as u64));
    let mut files = BTreeMap::new();
    let ids = hash_all(algorithm, &walk.files_to_hash, meter)?;
    for (unhashed, object) in walk.files_to_hash.into_iter().zip(ids) {
        let size_bytes = unhashed.status.len();
        let file = tree::File {
            metadata: unhashed.metadata,
            mtime: time_of(&unhashed.status),
            size_bytes,
            object: object.into(),
        };
        walk.builder
            .insert(unhashed.tree_path, Node::Leaf(Leaf::File(file)))
            .map_err(|source| DirectoryError::Tree { source })?;
        files.insert(object, (unhashed.path, size_bytes));
    }
    meter.finish();
    let contents = DirectoryContents { files };
    Ok(DirectoryTree { builder: walk.builder, contents, warnings, dropped })
}

struct Walk<'call> {
    root: &'call Path,
    device: Option<u64>,
    builder: TreeBuilder,
    /// The first path of each file with more than one link, by device and inode.
    links: BTreeMap<(u64, u64), TreePath>,
    files_to_hash: Vec<UnhashedFile>,
    sockets: Vec<TreePath>,
    mounts: Vec<TreePath>,
}

impl Walk<'_> {
    /// Names what is left out, and what will not be as it is here.
    fn warnings(&self) -> Vec<String> {
        let files = self.files_to_hash.iter().filter(|file| file.is_sparse());
        let sparse = files.map(|file| file.tree_path.clone()).collect();
        let found = [
            ("sockets are left out", &self.sockets),
            ("mount points are taken as empty directories", &self.mounts),
            (
                "files have large holes, which are zeros in the image and take space on machines",
                &sparse,
            ),
        ];
        let named = |(what, paths): (&str, &Vec<TreePath>)| {
            let shown: Vec<String> = paths.iter().take(3).map(TreePath::to_string).collect();
            let more = if paths.len() > shown.len() { ", ..." } else { "" };
            format!("{} {what}: {}{more}", paths.len(), shown.join(", "))
        };
        found.into_iter().filter(|(_, paths)| !paths.is_empty()).map(named).collect()
    }

    fn visit(&mut self, entry: &DirEntry) -> Result<(), DirectoryError> {
        let path = entry.path();
        let tree_path = tree_path(self.root, path)?;
        let status = entry.metadata().map_err(walk_error)?;
        let kind = status.file_type();
        if kind.is_socket() {
            self.sockets.push(tree_path);
            return Ok(());
        }
        let device = *self.device.get_or_insert(status.dev());
        if kind.is_dir() && status.dev() != device {
            self.mounts.push(tree_path.clone());
        }
        if status.nlink() > 1 && kind.is_file() {
            let key = (status.dev(), status.ino());
            if let Some(first) = self.links.get(&key) {
                let link = Node::Leaf(Leaf::HardLink(first.clone()));
                return self.insert(tree_path, link);
            }
            self.links.insert(key, tree_path.clone());
        }
        let mode = if kind.is_symlink() { SYMLINK_MODE } else { status.mode() & MODE_BITS };
        let xattrs = xattrs_of(path).map_err(|source| read_error(path, source))?;
        let metadata = Metadata { mode, uid: status.uid(), gid: status.gid(), xattrs };
        if kind.is_file() {
            self.files_to_hash.push(UnhashedFile {
                tree_path,
                path: path.to_owned(),
                status,
                metadata,
            });
            return Ok(());
        }
        let node = if kind.is_dir() {
            Node::Directory(metadata)
        } else if kind.is_symlink() {
            let target = path.read_link().map_err(|source| read_error(path, source))?;
            let target = ByteText(target.as_os_str().as_bytes().to_owned());
            Node::Leaf(Leaf::Symlink(Symlink { metadata, target }))
        } else {
            let device = device_of(&status);
            Node::Leaf(Leaf::Special(Special { metadata, mtime: time_of(&status), device }))
        };
        self.insert(tree_path, node)
    }

    fn insert(&mut self, path: TreePath, node: Node) -> Result<(), DirectoryError> {
        self.builder.insert(path, node).map_err(|source| DirectoryError::Tree { source })
    }
}

fn tree_path(root: &Path, path: &Path) -> Result<TreePath, DirectoryError> {
    let relative = path.strip_prefix(root).unwrap_or(path).as_os_str().as_bytes();
    TreePath::new([b"/", relative].concat())
        .map_err(|source| DirectoryError::Path { path: path.to_owned(), source })
}

fn time_of(status: &std::fs::Metadata) -> Time {
    let nanoseconds = u32::try_from(status.mtime_nsec()).unwrap_or(0);
    Time { seconds: status.mtime(), nanoseconds }
}

fn device_of(status: &std::fs::Metadata) -> Device {
    // Linux device numbers have 12 and 20 bits.
    let number = |part: u64| u32::try_from(part).unwrap_or(u32::MAX);
    let major = number(nix::sys::stat::major(status.rdev()));
    let minor = number(nix::sys::stat::minor(status.rdev()));
    match status.file_type() {
        kind if kind.is_block_device() => Device::Block { major, minor },
        kind if kind.is_char_device() => Device::Character { major, minor },
        _ => Device::Fifo,
    }
}

/// Returns the managed extended attributes of `path` itself; symlinks are not followed.
fn xattrs_of(path: &Path) -> io::Result<Xattrs> {
    let unsupported = |error: &io::Error| error.raw_os_error() == Some(Errno::EOPNOTSUPP as i32);
    let names = match xattr::list(path) {
        Err(error) if unsupported(&error) => return Ok(Xattrs::none()),
        names => names?,
    };
    let mut xattrs = Vec::new();
    for name in names.filter(|name| Attributes::Labels.manage(name.as_bytes())) {
        if let Some(value) = xattr::get(path, &name)? {
            xattrs.push((name.as_bytes().to_owned(), value));
        }
    }
    Ok(xattrs.into_iter().collect())
}

fn walk_error(error: walkdir::Error) -> DirectoryError {
    let path = error.path().unwrap_or(Path::new("")).to_owned();
    let looped = || io::Error::other("it contains itself");
    DirectoryError::Read { path, source: error.into_io_error().unwrap_or_else(looped) }
}

fn read_error(path: &Path, source: io::Error) -> DirectoryError {
    DirectoryError::Read { path: path.to_owned(), source }
}

/// Hashes `files_to_hash` on all processors. Returns the ids in the same order.
fn hash_all(
    algorithm: Algorithm,
    files_to_hash: &[UnhashedFile],
    meter: &Meter,
) -> Result<Vec<ObjectId>, DirectoryError> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(THREADS_MAX);
    let next = AtomicUsize::new(0);
    let results: Mutex<Vec<(usize, ObjectId)>> =
        Mutex::new(Vec::with_capacity(files_to_hash.len()));
    let failure: Mutex<Option<DirectoryError>> = Mutex::new(None);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                let mut buffer = vec![0; BUFFER_BYTES];
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(unhashed) = files_to_hash.get(index) else { return };
                    match hash(algorithm, unhashed, &mut buffer) {
                        Ok(id) => results.lock().expect("no holder panics").push((index, id)),
                        Err(error) => {
                            // The others stop at their next file.
                            next.store(files_to_hash.len(), Ordering::Relaxed);
                            failure.lock().expect("no holder panics").get_or_insert(error);
                            return;
                        }
                    }
                    meter.add(1);
                }
            });
        }
    });
    if let Some(error) = failure.into_inner().expect("no holder panics") {
        return Err(error);
    }
    let mut results = results.into_inner().expect("no holder panics");
    results.sort_unstable_by_key(|(index, _)| *index);
    Ok(results.into_iter().map(|(_, id)| id).collect())
}

fn hash(
    algorithm: Algorithm,
    unhashed: &UnhashedFile,
    buffer: &mut [u8],
) -> Result<ObjectId, DirectoryError> {
    let failed = |source| read_error(&unhashed.path, source);
    let changed = || DirectoryError::Changed { path: unhashed.path.clone() };
    let mut file = open(&unhashed.path).map_err(failed)?;
    let same = |status: &std::fs::Metadata| {
        let key = |status: &std::fs::Metadata| {
            let times = (status.mtime(), status.mtime_nsec(), status.ctime(), status.ctime_nsec());
            (status.dev(), status.ino(), status.len(), times)
        };
        key(status) == key(&unhashed.status)
    };
    if !same(&file.metadata().map_err(failed)?) {
        return Err(changed());
    }
    let mut hasher = Hasher::new(algorithm);
    let mut size_bytes = 0;
    loop {
        let read = read_some(&mut file, buffer).map_err(failed)?;
        if read == 0 {
            break;
        }
        hasher.update(&buffer[..read]);
        size_bytes += read as u64;
    }
    if size_bytes != unhashed.status.len() || !same(&file.metadata().map_err(failed)?) {
        return Err(changed());
    }
    Ok(hasher.finish())
}

fn open(path: &Path) -> io::Result<File> {
    // A fifo that replaced the file must not block, and a symlink must not be followed.
    let flags = nix::libc::O_NOFOLLOW | nix::libc::O_NONBLOCK | nix::libc::O_NOCTTY;
    OpenOptions::new().read(true).custom_flags(flags).open(path)
}

fn read_some(file: &mut File, buffer: &mut [u8]) -> io::Result<usize> {
    loop {
        match file.read(buffer) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

impl Contents for DirectoryContents {
    fn send(
        &mut self,
        algorithm: Algorithm,
        missing: &BTreeSet<ObjectId>,
        sink: &mut UploadSink,
    ) -> Result<(), SendError> {
        // By path, which is closer to the order on the disk than the order of ids.
        let mut files: Vec<(&PathBuf, ObjectId, u64)> = self
            .files
            .iter()
            .filter(|(id, _)| missing.contains(id))
            .map(|(id, (path, size_bytes))| (path, *id, *size_bytes))
            .collect();
        files.sort_unstable();
        let mut buffer = vec![0; BUFFER_BYTES];
        for (path, id, size_bytes) in files {
            let what = || format!("`{}`", path.display());
            let failed = |source| SendError::Read { what: what(), source };
            let changed = || SendError::Changed { what: what() };
            let mut file = open(path).map_err(failed)?;
            let mut hasher = Hasher::new(algorithm);
            let mut left = size_bytes;
            sink.object(id, size_bytes);
            loop {
                let read = read_some(&mut file, &mut buffer).map_err(failed)?;
                if read == 0 {
                    break;
                }
                left = left.checked_sub(read as u64).ok_or_else(changed)?;
                hasher.update(&buffer[..read]);
                sink.content(&buffer[..read])?;
            }
            if left > 0 || hasher.finish() != id {
                return Err(changed());
            }
            sink.end()?;
        }
        Ok(())
    }
}
