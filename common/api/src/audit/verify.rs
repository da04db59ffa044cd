//! Finds where the chain of an audit log is broken.
//!
//! It cannot find records that were cut off at the end, nor a chain that was rewritten from some
//! record on. Both show only in a comparison with a head that was noted elsewhere
//! ([`ExpectedHead`]).

use core::fmt;
use core::str::FromStr;

use super::record::{AuditEvent, ChainHead, CheckedLine, Hash, LineError, check_line};

/// The most findings that are reported; more are counted.
pub const FINDINGS_MAX: usize = 100;

/// The fewest digits of a hash that identify it.
const DIGITS_MIN: usize = 12;

/// A head that was noted before: `SEQUENCE:HASH`; the first digits of the hash are enough.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpectedHead {
    sequence: u64,
    digits: String,
}

impl FromStr for ExpectedHead {
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

impl fmt::Display for ExpectedHead {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}:{}", self.sequence, self.digits)
    }
}

/// One fault of the chain.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChainFault {
    /// A line is not a record.
    #[error("{0}")]
    Line(LineError),
    /// Records are missing.
    #[error("{} before it", missing(*from, *to))]
    Missing { from: u64, to: u64 },
    /// The previous record is not the one that this record was written after.
    #[error("the record before it is not the one that it was written after")]
    Relinked,
    /// The record follows a later one.
    #[error("it stands behind record {after}: it was moved, added or repeated")]
    OutOfOrder {
        /// The record before it.
        after: u64,
    },
    /// A file does not begin with a record `file`.
    #[error(
        "the file does not begin with the line that begins files: what was before it is missing"
    )]
    Headless,
    /// A file is empty.
    #[error("the file is empty")]
    Empty,
    /// A record `file` is in the middle of a file.
    #[error("another file begins here, within this one")]
    Inner,
    /// A record differs from what was noted.
    #[error("it is not the record that was remembered as {expected}: the log was written anew")]
    Other {
        /// What was noted.
        expected: ExpectedHead,
    },
    /// A noted record is missing at the end.
    #[error("the log ends before record {expected} that was remembered: its end was cut off")]
    Cut {
        /// What was noted.
        expected: ExpectedHead,
    },
    /// A noted record is older than all files.
    #[error("record {expected} that was remembered is older than these files")]
    Older {
        /// What was noted.
        expected: ExpectedHead,
    },
}

fn missing(from: u64, to: u64) -> String {
    if from == to {
        format!("record {from} is missing")
    } else {
        format!("records {from} to {to} are missing")
    }
}

/// A finding, and where it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding<T> {
    pub file: String,
    /// The line, from 1; 0 for the whole file.
    pub line: u64,
    /// The number of the record, if it can be read.
    pub sequence: Option<u64>,
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

/// A finding that may be in order, but that people should know of.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Remark {
    /// Earlier files are not among those given.
    #[error("the records before it are in files that are not here, as when they were too old")]
    Begins,
    /// A crash left bytes, and the daemon recorded it.
    #[error(
        "the {bytes} bytes before it are no record, as a crash leaves them: the daemon found them \
         so when it started"
    )]
    Torn { bytes: u64 },
    /// The last line is incomplete.
    #[error("the last line is not whole: it is being written, or a crash cut it off")]
    Unfinished,
    /// Records could not be written.
    #[error("{count} records before it could not be written; the daemon's own log has them")]
    Missed { count: u64 },
}

/// The result of a verification.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChainReport {
    /// How many files were read.
    pub files: u64,
    /// How many records have the right hash.
    pub records: u64,
    /// The number of the first record.
    pub first: Option<u64>,
    /// The last record.
    pub head: Option<ChainHead>,
    /// The first [`FINDINGS_MAX`] faults.
    pub troubles: Vec<Finding<ChainFault>>,
    /// How many more faults there are.
    pub more: u64,
    pub remarks: Vec<Finding<Remark>>,
}

impl ChainReport {
    /// Returns true if nothing is broken.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.troubles.is_empty()
    }
}

/// Lines that are not records, until the next record explains them.
struct Junk {
    hasher: blake3::Hasher,
    bytes: u64,
    lines: Vec<(u64, LineError)>,
    is_unfinished: bool,
}

/// Verifies the files of a log, in their order, line by line.
pub struct Verifier {
    expected: Vec<ExpectedHead>,
    report: ChainReport,
    file: String,
    line: u64,
    head: Option<ChainHead>,
    junk: Option<Junk>,
}

impl fmt::Debug for Verifier {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Verifier").field("report", &self.report).finish_non_exhaustive()
    }
}

impl Verifier {
    /// Starts a verification of a log that must have the `expected` records.
    #[must_use]
    pub fn new(expected: Vec<ExpectedHead>) -> Self {
        let (report, file) = (ChainReport::default(), String::new());
        Self { expected, report, file, line: 0, head: None, junk: None }
    }

    /// Starts the next file.
    pub fn file(&mut self, name: &str) {
        self.end(false);
        self.report.files += 1;
        self.file = name.to_owned();
        self.line = 0;
    }

    /// Checks the next line of the file, with its line feed if it has one.
    pub fn line(&mut self, line: &[u8]) {
        self.line += 1;
        let whole = line.strip_suffix(b"\n");
        let opened = whole.map_or(Err(LineError::Torn), check_line);
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
                    // What follows is compared with what it claims to be.
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

    /// Returns the result.
    #[must_use]
    pub fn finish(mut self) -> ChainReport {
        self.end(true);
        let head = self.head;
        for expected in core::mem::take(&mut self.expected) {
            self.line = 0;
            let is_cut = head.is_none_or(|head| head.sequence < expected.sequence);
            let trouble =
                if is_cut { ChainFault::Cut { expected } } else { ChainFault::Older { expected } };
            self.trouble(None, trouble);
        }
        self.report
    }

    fn record(&mut self, sealed: &CheckedLine) {
        let CheckedLine { head, previous, record } = sealed;
        self.settle(Some(sealed), false);
        let begins =
            matches!(record, Some(record) if matches!(record.event, AuditEvent::File { .. }));
        match (self.line, begins) {
            (1, false) => self.trouble(Some(head.sequence), ChainFault::Headless),
            (1, true) | (_, false) => {}
            (_, true) => self.trouble(Some(head.sequence), ChainFault::Inner),
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
                Some(ChainFault::OutOfOrder { after: before.sequence })
            }
            Some(before) if head.sequence > before.sequence + 1 => {
                Some(ChainFault::Missing { from: before.sequence + 1, to: head.sequence - 1 })
            }
            Some(before) => (before.hash != *previous).then_some(ChainFault::Relinked),
        };
        if let Some(trouble) = trouble {
            self.trouble(Some(head.sequence), trouble);
        }
        if let Some(AuditEvent::Missed { count, .. }) = record.as_ref().map(|record| &record.event)
        {
            self.remark(head.sequence, Remark::Missed { count: *count });
        }
        self.compare(*head);
        self.head = Some(*head);
        self.report.records += 1;
        self.report.first.get_or_insert(head.sequence);
        self.report.head = Some(*head);
    }

    /// Ends the current file. Only the last file is still written to.
    fn end(&mut self, is_last: bool) {
        if self.report.files > 0 && self.line == 0 {
            self.trouble(None, ChainFault::Empty);
        }
        self.settle(None, is_last);
    }

    /// Compares a record with what was noted of it.
    fn compare(&mut self, head: ChainHead) {
        let (of_it, rest): (Vec<_>, Vec<_>) = core::mem::take(&mut self.expected)
            .into_iter()
            .partition(|expected| expected.sequence == head.sequence);
        self.expected = rest;
        for expected in of_it {
            if !head.hash.to_string().starts_with(&expected.digits) {
                self.trouble(Some(head.sequence), ChainFault::Other { expected });
            }
        }
    }

    /// Reports the pending lines that are not records. `next` is the record after them; `is_last`
    /// is true if nothing follows at all.
    fn settle(&mut self, next: Option<&CheckedLine>, is_last: bool) {
        let Some(junk) = self.junk.take() else { return };
        let event = next.and_then(|next| next.record.as_ref()).map(|record| &record.event);
        let is_told = match event {
            Some(AuditEvent::Torn { bytes, digest, .. }) => {
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
                    // No crash leaves a complete record with another content than was hashed.
                    let sequence = head.map(|head| head.sequence);
                    self.trouble(sequence, ChainFault::Line(LineError::Changed { head }));
                }
                error => self.trouble(None, ChainFault::Line(error)),
            }
        }
        self.line = at;
    }

    fn trouble(&mut self, sequence: Option<u64>, what: ChainFault) {
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
