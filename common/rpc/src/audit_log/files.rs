//! The files of an audit log.
//!
//! `audit.log` is written. When it is full it is renamed to `audit.log.0000001` and so on, with the
//! number in its first line. A file appears under its name only after its first line was written.
//! The rest of an incomplete line after a crash is kept, and the next record describes it.
//!
//! Between writes the file is open only for reading, so that its file-system can be remounted
//! read-only while the daemon runs.

use std::fs::File;
use std::io::{self, BufRead as _, BufReader, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

use nix::fcntl::{FallocateFlags, fallocate};

use super::AuditError;
use api::audit::call_details::escape_and_cut;
use api::audit::record::{AuditEvent, Chain, ChainHead, Hash, LINE_BYTES_MAX, check_line};
use system::clock::{since_epoch, wall};

/// How many bytes of an incomplete record are quoted.
const TORN_TEXT_BYTES_MAX: usize = 200;

/// How many bytes are reserved behind the end of the current file: some hundred records.
const RESERVE_BYTES: u64 = 64 << 10;

/// How many files are removed for their age at each rotation.
const DROPPED_MAX: u64 = 2;

/// The fewest digits of the number in the name of a file that is full.
const NUMBER_DIGITS: usize = 7;

/// Which full files are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retention {
    /// This many of the last files.
    Files(u64),
    /// Files that were written to within this time.
    For(Duration),
}

/// The location and size of a log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuditSettings {
    /// The file that is written.
    pub path: PathBuf,
    /// The size at which a new file is started, in bytes.
    pub bytes_max: u64,
    /// Which full files are kept.
    pub keep: Retention,
}

/// The files of a log, locked against other processes.
#[derive(Debug)]
pub(super) struct Files {
    settings: AuditSettings,
    /// The current file, locked.
    held: File,
    /// The length of the complete records, in bytes.
    length: u64,
    /// The number of the file.
    number: u64,
    chain: Chain,
    /// True if bytes may follow the complete records.
    is_torn: bool,
    /// True if the error of a failed rotation was logged.
    is_stuck: bool,
    /// Events to write before the next records: removed files.
    pending: Vec<AuditEvent>,
}

/// The content of a file.
#[derive(Debug, Default)]
struct Scan {
    /// Its last record.
    head: Option<ChainHead>,
    number: Option<u64>,
    /// The end of the last record, in bytes.
    whole_bytes: u64,
    /// Its length, in bytes.
    length: u64,
    /// True if only the line feed of the last record is missing.
    lacks_end: bool,
}

impl Files {
    /// Opens the log of `daemon`, creates it if necessary, and records what a crash left.
    pub(super) fn open(settings: AuditSettings, daemon: &str) -> Result<Self, AuditError> {
        let path = settings.path.clone();
        let failed = |source| AuditError::Open { path: path.clone(), source };
        std::fs::create_dir_all(parent(&path)).map_err(failed)?;
        // It has only its first line, and is not part of the chain yet.
        match std::fs::remove_file(temporary(&path)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
            _ => {}
        }
        let full = full_files(&path).map_err(failed)?;
        let (held, scan) = match open_to_lock(&path) {
            Ok(held) => {
                lock(&held, &path)?;
                let scan = scan(&path).map_err(failed)?;
                (Some(held), scan)
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => (None, Scan::default()),
            Err(error) => return Err(failed(error)),
        };
        let mut head = scan.head;
        for (_, path) in full.iter().rev() {
            if head.is_none() {
                head = self::scan(path).map_err(failed)?.head;
            }
        }
        let newest = full.last().map_or(0, |(number, _)| *number);
        let number = scan.number.unwrap_or(newest + 1).max(newest + 1);
        let mut chain = Chain::new(daemon, head);
        let Some(held) = held else {
            let (held, length) = begin(&path, &mut chain, number).map_err(failed)?;
            std::fs::rename(temporary(&path), &path).map_err(failed)?;
            sync_directory(&path).map_err(failed)?;
            return Ok(Self::new(settings, held, length, number, chain));
        };
        let mut files = Self::new(settings, held, scan.length, number, chain);
        if scan.lacks_end {
            let end = |mut file: File| file.write_all(b"\n").and_then(|()| file.sync_data());
            files.writable().and_then(end).map_err(failed)?;
            files.length += 1;
        } else if scan.length == 0 {
            files.append(vec![AuditEvent::File { file: number }]).map_err(failed)?;
        } else if scan.whole_bytes < scan.length {
            files.record_torn(scan.whole_bytes).map_err(failed)?;
        }
        Ok(files)
    }

    fn new(settings: AuditSettings, held: File, length: u64, number: u64, chain: Chain) -> Self {
        let (is_torn, is_stuck, pending) = (false, false, Vec::new());
        Self { settings, held, length, number, chain, is_torn, is_stuck, pending }
    }

    /// Records the bytes after the last record.
    fn record_torn(&mut self, whole_bytes: u64) -> io::Result<()> {
        let path = &self.settings.path;
        let mut reader = File::open(path)?;
        reader.seek(SeekFrom::Start(whole_bytes))?;
        let mut junk = Vec::new();
        reader.read_to_end(&mut junk)?;
        if !junk.ends_with(b"\n") {
            self.writable()?.write_all(b"\n")?;
            self.length += 1;
            junk.push(b'\n');
        }
        let bytes = junk.len() as u64;
        tracing::warn!(
            file = %path.display(), bytes,
            "the audit log ends with an incomplete record, as after a crash: it is kept"
        );
        let start = &junk[..junk.len().min(TORN_TEXT_BYTES_MAX)];
        let text = escape_and_cut(&String::from_utf8_lossy(start), TORN_TEXT_BYTES_MAX);
        self.append(vec![AuditEvent::Torn { bytes, digest: Hash::of(&junk), text }]).map(drop)
    }

    /// Appends records, and syncs them to the medium. Returns the number of the first. After an
    /// error none of them is in the log.
    pub(super) fn append(&mut self, events: Vec<AuditEvent>) -> io::Result<u64> {
        if self.is_torn {
            self.writable()?.set_len(self.length)?;
            self.is_torn = false;
        }
        if self.length >= self.settings.bytes_max {
            match self.rotate() {
                Ok(()) => {
                    self.is_stuck = false;
                    self.pending.extend(self.drop_old());
                }
                Err(error) if !self.is_stuck => {
                    self.is_stuck = true;
                    tracing::error!(%error, "cannot begin another file of the audit log");
                }
                Err(_) => {}
            }
        }
        let mut chain = self.chain.clone();
        let now = wall();
        let mut text = String::new();
        for event in self.pending.clone() {
            text.push_str(&chain.append(now, event));
        }
        let first = chain.head().map_or(1, |head| head.sequence + 1);
        for event in events {
            text.push_str(&chain.append(now, event));
        }
        let mut file = self.writable()?;
        let written = file.write_all(text.as_bytes()).and_then(|()| file.sync_data());
        if let Err(error) = written {
            // An incomplete record must not precede later ones.
            self.is_torn = file.set_len(self.length).is_err();
            return Err(error);
        }
        self.length += text.len() as u64;
        reserve(&file, self.length);
        self.chain = chain;
        self.pending.clear();
        Ok(first)
    }

    /// Opens the current file for one write.
    fn writable(&self) -> io::Result<File> {
        let path = &self.settings.path;
        let file = append_to(path, false)?;
        let place = |metadata: std::fs::Metadata| (metadata.dev(), metadata.ino());
        if place(file.metadata()?) != place(self.held.metadata()?) {
            let text = "another file has taken its place since the start: put it back, or restart";
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, text));
        }
        Ok(file)
    }

    /// Starts a new file.
    fn rotate(&mut self) -> io::Result<()> {
        let path = &self.settings.path;
        let mut chain = self.chain.clone();
        let number = self.number + 1;
        let (held, length) = begin(path, &mut chain, number)?;
        let aside = numbered(path, self.number);
        if aside.symlink_metadata().is_ok() {
            let text = format!("`{}` already exists", aside.display());
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, text));
        }
        std::fs::rename(path, &aside)?;
        if let Err(error) = std::fs::rename(temporary(path), path) {
            std::fs::rename(&aside, path)?;
            return Err(error);
        }
        let synced = sync_directory(path);
        (self.held, self.length, self.number, self.chain) = (held, length, number, chain);
        if let Err(error) = synced {
            // After a power cut the previous file may be the newest, and later records are missing.
            tracing::error!(%error, "another file of the audit log may not be on the medium");
        }
        Ok(())
    }

    /// Removes files that are no longer kept. Returns the events to record.
    fn drop_old(&self) -> Vec<AuditEvent> {
        let path = &self.settings.path;
        let files = match full_files(path) {
            Ok(files) => files,
            Err(error) => {
                tracing::error!(%error, "old files of the audit log are not looked for");
                return Vec::new();
            }
        };
        let count = files.len() as u64;
        let is_old = |index: u64, path: &Path| match self.settings.keep {
            Retention::Files(kept) => index + kept < count,
            // A clock that jumps must not empty the log.
            Retention::For(_) if index >= DROPPED_MAX => false,
            Retention::For(time) => {
                let modified = path.metadata().and_then(|metadata| metadata.modified());
                let written = modified.ok().and_then(|at| at.duration_since(UNIX_EPOCH).ok());
                let age = written.and_then(|written| since_epoch().checked_sub(written));
                age.is_some_and(|age| age > time)
            }
        };
        let mut events = Vec::new();
        for (index, (_, path)) in files.iter().enumerate() {
            if !is_old(index as u64, path) {
                continue;
            }
            match std::fs::remove_file(path) {
                Ok(()) => events.push(AuditEvent::Decided {
                    decision: "remove-audit-file".to_owned(),
                    arguments: format!("file={}", escape_and_cut(&path.display().to_string(), 400)),
                    why: "older than what is kept".to_owned(),
                }),
                Err(error) => tracing::error!(
                    %error, file = %path.display(), "cannot remove an old file of the audit log"
                ),
            }
        }
        events
    }

    pub(super) fn head(&self) -> Option<ChainHead> {
        self.chain.head()
    }

    pub(super) fn number(&self) -> u64 {
        self.number
    }
}

/// Returns the existing files of the log at `path`, oldest first.
///
/// # Errors
///
/// A missing log is not an error.
pub fn files_of(path: &Path) -> io::Result<Vec<PathBuf>> {
    let mut files: Vec<PathBuf> = full_files(path)?.into_iter().map(|(_, path)| path).collect();
    if path.try_exists()? {
        files.push(path.to_owned());
    }
    Ok(files)
}

/// Reads the next line of a log into `line`, with its line feed; of a line longer than a record,
/// the next part. Returns its length; 0 at the end.
pub fn read_line(reader: &mut impl io::BufRead, line: &mut Vec<u8>) -> io::Result<usize> {
    line.clear();
    reader.by_ref().take(LINE_BYTES_MAX as u64).read_until(b'\n', line)
}

/// Returns the full files with their numbers.
fn full_files(path: &Path) -> io::Result<Vec<(u64, PathBuf)>> {
    let Some(name) = path.file_name() else { return Ok(Vec::new()) };
    let name = format!("{}.", name.to_string_lossy());
    let mut files = Vec::new();
    let entries = match std::fs::read_dir(parent(path)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(files),
        entries => entries?,
    };
    for entry in entries {
        let entry = entry?;
        let number = entry.file_name().to_string_lossy().strip_prefix(&name).and_then(number_of);
        files.extend(number.map(|number| (number, entry.path())));
    }
    files.sort();
    Ok(files)
}

fn number_of(digits: &str) -> Option<u64> {
    let is_number = digits.len() >= NUMBER_DIGITS && digits.bytes().all(|b| b.is_ascii_digit());
    is_number.then(|| digits.parse().ok()).flatten()
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

fn numbered(path: &Path, number: u64) -> PathBuf {
    with_suffix(path, &format!(".{number:0NUMBER_DIGITS$}"))
}

/// The name of a new file before it is complete.
fn temporary(path: &Path) -> PathBuf {
    with_suffix(path, ".new")
}

fn parent(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn append_to(path: &Path, is_new: bool) -> io::Result<File> {
    let mut options = File::options();
    options.append(true).mode(0o600).custom_flags(nix::libc::O_NOFOLLOW);
    if is_new {
        options.create_new(true);
    }
    options.open(path)
}

/// Reserves blocks behind the end of the file, so that records can be written when the disk is
/// full. Where that is not possible, nothing is reserved.
fn reserve(file: &File, length: u64) {
    let has = file.metadata().map_or(0, |metadata| metadata.blocks().saturating_mul(512));
    if has < length + RESERVE_BYTES / 2 {
        let end = i64::try_from(length + RESERVE_BYTES).unwrap_or(i64::MAX);
        let _reserved = fallocate(file, FallocateFlags::FALLOC_FL_KEEP_SIZE, 0, end);
    }
}

/// Opens a file to lock it.
fn open_to_lock(path: &Path) -> io::Result<File> {
    File::options().read(true).custom_flags(nix::libc::O_NOFOLLOW).open(path)
}

fn lock(file: &File, path: &Path) -> Result<(), AuditError> {
    match file.try_lock() {
        Ok(()) => Ok(()),
        Err(std::fs::TryLockError::WouldBlock) => Err(AuditError::Locked { path: path.to_owned() }),
        Err(std::fs::TryLockError::Error(source)) => {
            Err(AuditError::Open { path: path.to_owned(), source })
        }
    }
}

/// Makes a file with its first line, under a temporary name.
fn begin(path: &Path, chain: &mut Chain, number: u64) -> io::Result<(File, u64)> {
    let temporary = temporary(path);
    match std::fs::remove_file(&temporary) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = append_to(&temporary, true)?;
    let held = open_to_lock(&temporary)?;
    held.try_lock()?;
    let line = chain.append(wall(), AuditEvent::File { file: number });
    file.write_all(line.as_bytes())?;
    file.sync_all()?;
    Ok((held, line.len() as u64))
}

fn sync_directory(path: &Path) -> io::Result<()> {
    File::open(parent(path))?.sync_all()
}

/// Finds the last record of a file.
fn scan(path: &Path) -> io::Result<Scan> {
    let mut reader = BufReader::new(File::open(path)?);
    let mut scan = Scan::default();
    let mut line = Vec::new();
    loop {
        let length = read_line(&mut reader, &mut line)?;
        if length == 0 {
            scan.lacks_end &= scan.whole_bytes == scan.length;
            return Ok(scan);
        }
        scan.length += length as u64;
        let whole = line.strip_suffix(b"\n");
        scan.lacks_end = whole.is_none();
        let whole = whole.unwrap_or(&line);
        let Ok(sealed) = check_line(whole) else { continue };
        scan.whole_bytes = scan.length;
        scan.head = Some(sealed.head);
        if let Some(AuditEvent::File { file }) = sealed.record.map(|record| record.event) {
            scan.number.get_or_insert(file);
        }
    }
}
