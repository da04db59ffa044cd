//! The files of an audit log.
//!
//! `audit.log` is the one that is written; when it is full it becomes `audit.log.0000001` and so
//! on, with the number that its first line has. A file appears under its name only with its first
//! line in it. What a crash left of a line stays where it is: a record behind it says what it is.
//!
//! Between two writes the file is open for reading alone: a file-system under which a daemon runs
//! can be remounted read-only.

use std::fs::File;
use std::io::{self, BufRead as _, BufReader, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use super::AuditError;
use api::audit::brief::short;
use api::audit::record::{Chain, Event, Hash, Head, LINE_BYTES_MAX, open as open_line};
use model::tree::Time;

/// How much is shown of what is no record, in bytes.
const TORN_TEXT_BYTES_MAX: usize = 200;

/// How many files are removed for their age when another one is begun.
const DROPPED_MAX: u64 = 2;

/// The fewest digits of the number in the name of a file that is full.
const NUMBER_DIGITS: usize = 7;

/// Which files that are full are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// The last so many.
    Files(u64),
    /// Those to which something was written within this time.
    For(Duration),
}

/// Where a log is, and how large it may become.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The file that is written.
    pub path: PathBuf,
    /// When another file is begun, in bytes.
    pub bytes_max: u64,
    /// How long files are kept that are full.
    pub keep: Keep,
}

/// The files, of which no other process writes one.
#[derive(Debug)]
pub(super) struct Files {
    settings: Settings,
    /// The one that is written, locked.
    held: File,
    /// The length of what is whole, in bytes.
    length: u64,
    /// The number of the file.
    number: u64,
    chain: Chain,
    /// Something may stand behind what is whole.
    is_torn: bool,
    /// Another file cannot be begun: that was said.
    is_stuck: bool,
    /// What the next records say first: which files were removed.
    owed: Vec<Event>,
}

/// What a file holds.
#[derive(Debug, Default)]
struct Scan {
    /// Its last record.
    head: Option<Head>,
    /// Its number.
    number: Option<u64>,
    /// Where the last record ends, in bytes.
    whole_bytes: u64,
    /// Its length, in bytes.
    length: u64,
    /// The last record lacks its line feed, and nothing else.
    lacks_end: bool,
}

impl Files {
    /// Opens the log of `daemon`, makes it if it is not there, and says in it what a crash left.
    pub(super) fn open(settings: Settings, daemon: &str) -> Result<Self, AuditError> {
        let path = settings.path.clone();
        let failed = |source| AuditError::Open { path: path.clone(), source };
        std::fs::create_dir_all(parent(&path)).map_err(failed)?;
        // It has nothing but its first line, and is no part of the chain yet.
        match std::fs::remove_file(fresh(&path)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
            _ => {}
        }
        let full = full(&path).map_err(failed)?;
        let (held, scan) = match hold(&path) {
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
            std::fs::rename(fresh(&path), &path).map_err(failed)?;
            sync_directory(&path).map_err(failed)?;
            return Ok(Self::new(settings, held, length, number, chain));
        };
        let mut files = Self::new(settings, held, scan.length, number, chain);
        if scan.lacks_end {
            let end = |mut file: File| file.write_all(b"\n").and_then(|()| file.sync_data());
            files.writable().and_then(end).map_err(failed)?;
            files.length += 1;
        } else if scan.length == 0 {
            files.append(vec![Event::File { file: number }]).map_err(failed)?;
        } else if scan.whole_bytes < scan.length {
            files.tell_torn(scan.whole_bytes).map_err(failed)?;
        }
        Ok(files)
    }

    fn new(settings: Settings, held: File, length: u64, number: u64, chain: Chain) -> Self {
        let (is_torn, is_stuck, owed) = (false, false, Vec::new());
        Self { settings, held, length, number, chain, is_torn, is_stuck, owed }
    }

    /// Says what stands behind the last record.
    fn tell_torn(&mut self, whole_bytes: u64) -> io::Result<()> {
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
            "the end of the audit log is no record, as a crash leaves it; it is kept, and recorded"
        );
        let start = &junk[..junk.len().min(TORN_TEXT_BYTES_MAX)];
        let text = short(&String::from_utf8_lossy(start), TORN_TEXT_BYTES_MAX);
        self.append(vec![Event::Torn { bytes, digest: Hash::of(&junk), text }]).map(drop)
    }

    /// Adds records; they are on the medium when this returns. Gives the number of the first.
    ///
    /// # Errors
    ///
    /// What the kernel says; none of them is in the log then.
    pub(super) fn append(&mut self, events: Vec<Event>) -> io::Result<u64> {
        if self.is_torn {
            self.writable()?.set_len(self.length)?;
            self.is_torn = false;
        }
        if self.length >= self.settings.bytes_max {
            match self.rotate() {
                Ok(()) => {
                    self.is_stuck = false;
                    self.owed.extend(self.drop_old());
                }
                Err(error) if !self.is_stuck => {
                    self.is_stuck = true;
                    tracing::error!(%error, "cannot begin another file of the audit log");
                }
                Err(_) => {}
            }
        }
        let mut chain = self.chain.clone();
        let now = now();
        let mut text = String::new();
        for event in self.owed.clone() {
            text.push_str(&chain.append(now, event));
        }
        let first = chain.head().map_or(1, |head| head.sequence + 1);
        for event in events {
            text.push_str(&chain.append(now, event));
        }
        let mut file = self.writable()?;
        let written = file.write_all(text.as_bytes()).and_then(|()| file.sync_data());
        if let Err(error) = written {
            // What is not whole must not stand before what comes later.
            self.is_torn = file.set_len(self.length).is_err();
            return Err(error);
        }
        self.length += text.len() as u64;
        self.chain = chain;
        self.owed.clear();
        Ok(first)
    }

    /// The file that is written, for one write.
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

    /// Begins another file.
    fn rotate(&mut self) -> io::Result<()> {
        let path = &self.settings.path;
        let mut chain = self.chain.clone();
        let number = self.number + 1;
        let (held, length) = begin(path, &mut chain, number)?;
        let aside = numbered(path, self.number);
        if aside.symlink_metadata().is_ok() {
            let text = format!("`{}` is there already", aside.display());
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, text));
        }
        std::fs::rename(path, &aside)?;
        if let Err(error) = std::fs::rename(fresh(path), path) {
            std::fs::rename(&aside, path)?;
            return Err(error);
        }
        let synced = sync_directory(path);
        (self.held, self.length, self.number, self.chain) = (held, length, number, chain);
        if let Err(error) = synced {
            // After a power cut the file before may be the newest that is found. What is missing
            // then is missed.
            tracing::error!(%error, "another file of the audit log may not be on the medium");
        }
        Ok(())
    }

    /// Removes files that are not kept any longer. Gives what is to be said of them.
    fn drop_old(&self) -> Vec<Event> {
        let path = &self.settings.path;
        let files = match full(path) {
            Ok(files) => files,
            Err(error) => {
                tracing::error!(%error, "old files of the audit log are not looked for");
                return Vec::new();
            }
        };
        let count = files.len() as u64;
        let is_old = |index: u64, path: &Path| match self.settings.keep {
            Keep::Files(kept) => index + kept < count,
            // A clock that jumps must not empty the log.
            Keep::For(_) if index >= DROPPED_MAX => false,
            Keep::For(time) => {
                let written = path.metadata().and_then(|metadata| metadata.modified());
                let age = written.map(|at| SystemTime::now().duration_since(at));
                matches!(age, Ok(Ok(age)) if age > time)
            }
        };
        let mut events = Vec::new();
        for (index, (_, path)) in files.iter().enumerate() {
            if !is_old(index as u64, path) {
                continue;
            }
            match std::fs::remove_file(path) {
                Ok(()) => events.push(Event::Decided {
                    decision: "remove-audit-file".to_owned(),
                    arguments: format!("file={}", short(&path.display().to_string(), 400)),
                    why: "older than what is kept".to_owned(),
                }),
                Err(error) => tracing::error!(
                    %error, file = %path.display(), "cannot remove an old file of the audit log"
                ),
            }
        }
        events
    }

    pub(super) fn head(&self) -> Option<Head> {
        self.chain.head()
    }

    pub(super) fn number(&self) -> u64 {
        self.number
    }
}

/// The files of the log at `path` that are there, the oldest first.
///
/// # Errors
///
/// What the kernel says; that there is none is no error.
pub fn files_of(path: &Path) -> io::Result<Vec<PathBuf>> {
    let mut files: Vec<PathBuf> = full(path)?.into_iter().map(|(_, path)| path).collect();
    if path.try_exists()? {
        files.push(path.to_owned());
    }
    Ok(files)
}

/// Reads the next line of a log into `line`, with its line feed; of what is longer than a record
/// can be, the next part. Gives how long it is; 0 at the end.
///
/// # Errors
///
/// What the kernel says.
pub fn read_line(reader: &mut impl io::BufRead, line: &mut Vec<u8>) -> io::Result<usize> {
    line.clear();
    reader.by_ref().take(LINE_BYTES_MAX as u64).read_until(b'\n', line)
}

/// The files that are full, by their numbers.
fn full(path: &Path) -> io::Result<Vec<(u64, PathBuf)>> {
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

/// Where a file is made before it gets its name.
fn fresh(path: &Path) -> PathBuf {
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

/// Opens what a lock is taken of.
fn hold(path: &Path) -> io::Result<File> {
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

/// Makes a file with its first line, under a name that is not its own yet.
fn begin(path: &Path, chain: &mut Chain, number: u64) -> io::Result<(File, u64)> {
    let fresh = fresh(path);
    match std::fs::remove_file(&fresh) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = append_to(&fresh, true)?;
    let held = hold(&fresh)?;
    held.try_lock()?;
    let line = chain.append(now(), Event::File { file: number });
    file.write_all(line.as_bytes())?;
    file.sync_all()?;
    Ok((held, line.len() as u64))
}

fn sync_directory(path: &Path) -> io::Result<()> {
    File::open(parent(path))?.sync_all()
}

/// Looks for the last record of a file.
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
        let Ok(sealed) = open_line(whole) else { continue };
        scan.whole_bytes = scan.length;
        scan.head = Some(sealed.head);
        if let Some(Event::File { file }) = sealed.record.map(|record| record.event) {
            scan.number.get_or_insert(file);
        }
    }
}

/// What the clock shows.
pub(super) fn now() -> Time {
    match SystemTime::now().duration_since(SystemTime::UNIX_EPOCH) {
        Ok(since) => Time {
            seconds: i64::try_from(since.as_secs()).unwrap_or(i64::MAX),
            nanoseconds: since.subsec_nanos(),
        },
        Err(_) => Time { seconds: 0, nanoseconds: 0 },
    }
}
