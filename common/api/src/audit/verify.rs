//! Finds where the chain of an audit log is broken.
//!
//! What it cannot find: records cut off at the end, and a chain that was written anew from some
//! record on. Both show only against a head that was remembered elsewhere ([`Expected`]).

use core::fmt;
use core::str::FromStr;

use super::record::{Event, Hash, Head, LineError, Sealed, open};

/// The most findings that are kept; more are counted.
pub const FINDINGS_MAX: usize = 100;

/// The fewest digits of a hash that tell it from others.
const DIGITS_MIN: usize = 12;

/// A head that was seen before: `SEQUENCE:HASH`, of which the first digits are enough.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expected {
    sequence: u64,
    digits: String,
}

impl FromStr for Expected {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bad =
            || format!("expected SEQUENCE:HASH, with at least {DIGITS_MIN} hex digits of the hash");
        let (sequence, digits) = text.split_once(':').ok_or_else(bad)?;
        let is_hash = (DIGITS_MIN..=64).contains(&digits.len())
            && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
        let sequence = sequence.parse().map_err(|_| bad())?;
        let digits = digits.to_ascii_lowercase();
        if is_hash { Ok(Self { sequence, digits }) } else { Err(bad()) }
    }
}

impl fmt::Display for Expected {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}:{}", self.sequence, self.digits)
    }
}

/// What is wrong in one place.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Trouble {
    /// A line is no record.
    #[error("{0}")]
    Line(LineError),
    /// Records are not there.
    #[error("{} before it", missing(*from, *to))]
    Missing {
        /// The first of them.
        from: u64,
        /// The last of them.
        to: u64,
    },
    /// The record before is not the one that this one was written after.
    #[error("the record before it is not the one that it was written after")]
    Relinked,
    /// It stands behind a later one.
    #[error("it stands behind record {after}: it was moved, added or repeated")]
    OutOfOrder {
        /// The record before it.
        after: u64,
    },
    /// A file does not begin as files do.
    #[error(
        "the file does not begin with the line that begins files: what was before it is missing"
    )]
    Headless,
    /// A file without a line.
    #[error("the file is empty")]
    Empty,
    /// The line that begins a file stands within one.
    #[error("another file begins here, within this one")]
    Inner,
    /// Another record than was seen.
    #[error("it is not the record that was remembered as {expected}: the log was written anew")]
    Other {
        /// What was remembered.
        expected: Expected,
    },
    /// A record that was seen is not there.
    #[error("the log ends before record {expected} that was remembered: its end was cut off")]
    Cut {
        /// What was remembered.
        expected: Expected,
    },
    /// A record that was seen is in files that are not.
    #[error("record {expected} that was remembered is older than these files")]
    Older {
        /// What was remembered.
        expected: Expected,
    },
}

fn missing(from: u64, to: u64) -> String {
    if from == to {
        format!("record {from} is missing")
    } else {
        format!("records {from} to {to} are missing")
    }
}

/// Something that was found, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding<T> {
    /// The file.
    pub file: String,
    /// The line, from 1 on; 0 for the whole file.
    pub line: u64,
    /// The number of the record, if it can be read.
    pub sequence: Option<u64>,
    /// What it is.
    pub what: T,
}

impl<T: fmt::Display> fmt::Display for Finding<T> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}", self.file)?;
        if self.line > 0 {
            write!(formatter, ", line {}", self.line)?;
        }
        if let Some(sequence) = self.sequence {
            write!(formatter, ", record {sequence}")?;
        }
        write!(formatter, ": {}", self.what)
    }
}

/// Something that may be as it should, and that people should know.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Remark {
    /// The files before are not among those given.
    #[error("the records before it are in files that are not here, as when they were too old")]
    Begins,
    /// A crash left something, and the daemon said so.
    #[error(
        "the {bytes} bytes before it are no record, as a crash leaves them: the daemon found them \
         so when it started"
    )]
    Torn {
        /// How much.
        bytes: u64,
    },
    /// The last line is not whole.
    #[error("the last line is not whole: it is being written, or a crash cut it off")]
    Unfinished,
    /// Records could not be written.
    #[error("{count} records before it could not be written; the daemon's own log has them")]
    Missed {
        /// How many.
        count: u64,
    },
}

/// What was found in a log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// How many files there were.
    pub files: u64,
    /// How many records whose hash is right.
    pub records: u64,
    /// The number of the first.
    pub first: Option<u64>,
    /// The last.
    pub head: Option<Head>,
    /// What is broken: the first [`FINDINGS_MAX`].
    pub troubles: Vec<Finding<Trouble>>,
    /// How many more there are.
    pub more: u64,
    /// What is worth knowing.
    pub remarks: Vec<Finding<Remark>>,
}

impl Report {
    /// True if nothing is broken.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.troubles.is_empty()
    }
}

/// Lines that are no records, until it is known what they are.
struct Junk {
    hasher: blake3::Hasher,
    bytes: u64,
    lines: Vec<(u64, LineError)>,
    is_unfinished: bool,
}

/// Takes the files of a log, in their order, line by line.
pub struct Verifier {
    expected: Vec<Expected>,
    report: Report,
    file: String,
    line: u64,
    head: Option<Head>,
    junk: Option<Junk>,
}

impl fmt::Debug for Verifier {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Verifier").field("report", &self.report).finish_non_exhaustive()
    }
}

impl Verifier {
    /// Begins; the log is to have the records that are `expected`.
    #[must_use]
    pub fn new(expected: Vec<Expected>) -> Self {
        let (report, file) = (Report::default(), String::new());
        Self { expected, report, file, line: 0, head: None, junk: None }
    }

    /// The next file begins.
    pub fn file(&mut self, name: &str) {
        self.end(false);
        self.report.files += 1;
        self.file = name.to_owned();
        self.line = 0;
    }

    /// The next line of it, with its line feed if it has one.
    pub fn line(&mut self, line: &[u8]) {
        self.line += 1;
        let whole = line.strip_suffix(b"\n");
        let opened = whole.map_or(Err(LineError::Torn), open);
        match opened {
            Ok(sealed) => self.record(&sealed),
            Err(error) => {
                let junk = self.junk.get_or_insert_with(|| Junk {
                    hasher: blake3::Hasher::new(),
                    bytes: 0,
                    lines: Vec::new(),
                    is_unfinished: false,
                });
                junk.hasher.update(line);
                junk.bytes += line.len() as u64;
                junk.is_unfinished = whole.is_none();
                if let LineError::Changed { head: Some(head) } = &error {
                    // What follows is held against what it was.
                    self.head = Some(*head);
                }
                if junk.lines.len() < FINDINGS_MAX {
                    junk.lines.push((self.line, error));
                } else {
                    self.report.more += 1;
                }
            }
        }
    }

    /// What was found.
    #[must_use]
    pub fn finish(mut self) -> Report {
        self.end(true);
        let head = self.head;
        for expected in core::mem::take(&mut self.expected) {
            self.line = 0;
            let is_cut = head.is_none_or(|head| head.sequence < expected.sequence);
            let trouble =
                if is_cut { Trouble::Cut { expected } } else { Trouble::Older { expected } };
            self.trouble(None, trouble);
        }
        self.report
    }

    fn record(&mut self, sealed: &Sealed) {
        let Sealed { head, previous, record } = sealed;
        self.settle(Some(sealed), false);
        let begins = matches!(record, Some(record) if matches!(record.event, Event::File { .. }));
        match (self.line, begins) {
            (1, false) => self.trouble(Some(head.sequence), Trouble::Headless),
            (1, true) | (_, false) => {}
            (_, true) => self.trouble(Some(head.sequence), Trouble::Inner),
        }
        let trouble = match self.head {
            None if head.sequence == 1 && *previous == Hash::NONE => None,
            None => {
                if begins {
                    self.remark(head.sequence, Remark::Begins);
                }
                None
            }
            Some(before) if head.sequence <= before.sequence => {
                Some(Trouble::OutOfOrder { after: before.sequence })
            }
            Some(before) if head.sequence > before.sequence + 1 => {
                Some(Trouble::Missing { from: before.sequence + 1, to: head.sequence - 1 })
            }
            Some(before) => (before.hash != *previous).then_some(Trouble::Relinked),
        };
        if let Some(trouble) = trouble {
            self.trouble(Some(head.sequence), trouble);
        }
        if let Some(Event::Missed { count, .. }) = record.as_ref().map(|record| &record.event) {
            self.remark(head.sequence, Remark::Missed { count: *count });
        }
        self.compare(*head);
        self.head = Some(*head);
        self.report.records += 1;
        self.report.first.get_or_insert(head.sequence);
        self.report.head = Some(*head);
    }

    /// The file that was begun last ends; nothing is written to it any more unless it is the last.
    fn end(&mut self, is_last: bool) {
        if self.report.files > 0 && self.line == 0 {
            self.trouble(None, Trouble::Empty);
        }
        self.settle(None, is_last);
    }

    /// Holds a record against what is remembered of it.
    fn compare(&mut self, head: Head) {
        let (of_it, rest): (Vec<_>, Vec<_>) = core::mem::take(&mut self.expected)
            .into_iter()
            .partition(|expected| expected.sequence == head.sequence);
        self.expected = rest;
        for expected in of_it {
            if !head.hash.to_string().starts_with(&expected.digits) {
                self.trouble(Some(head.sequence), Trouble::Other { expected });
            }
        }
    }

    /// Says what the lines were that are no records. `next` is the record behind them; `is_last`
    /// is true if nothing follows at all.
    fn settle(&mut self, next: Option<&Sealed>, is_last: bool) {
        let Some(junk) = self.junk.take() else { return };
        let event = next.and_then(|next| next.record.as_ref()).map(|record| &record.event);
        let is_told = match event {
            Some(Event::Torn { bytes, digest, .. }) => {
                *bytes == junk.bytes
                    && digest.to_string() == junk.hasher.finalize().to_hex().as_str()
            }
            _ => false,
        };
        if let (true, Some(next)) = (is_told, next) {
            self.remark(next.head.sequence, Remark::Torn { bytes: junk.bytes });
        }
        let is_last = is_last && junk.is_unfinished && junk.lines.len() == 1;
        let at = self.line;
        for (line, error) in junk.lines {
            self.line = line;
            match error {
                LineError::Torn if is_told => {}
                LineError::Torn if is_last => self.remark_at(None, Remark::Unfinished),
                LineError::Changed { head } => {
                    // No crash leaves a whole record that is another one than was hashed.
                    let sequence = head.map(|head| head.sequence);
                    self.trouble(sequence, Trouble::Line(LineError::Changed { head }));
                }
                error => self.trouble(None, Trouble::Line(error)),
            }
        }
        self.line = at;
    }

    fn trouble(&mut self, sequence: Option<u64>, what: Trouble) {
        if self.report.troubles.len() >= FINDINGS_MAX {
            self.report.more += 1;
            return;
        }
        let (file, line) = (self.file.clone(), self.line);
        self.report.troubles.push(Finding { file, line, sequence, what });
    }

    fn remark(&mut self, sequence: u64, what: Remark) {
        self.remark_at(Some(sequence), what);
    }

    fn remark_at(&mut self, sequence: Option<u64>, what: Remark) {
        if self.report.remarks.len() < FINDINGS_MAX {
            let (file, line) = (self.file.clone(), self.line);
            self.report.remarks.push(Finding { file, line, sequence, what });
        }
    }
}
