//! The input of an archive: parts of files that can be read repeatedly, and a limit of expansion.
//!
//! An archive is read twice, and the layers of an image may be inside another archive. A few
//! kilobytes can expand to terabytes, by compression or by holes; all of it would be hashed here
//! and stored by the image server. A real file-system does not compress so well.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A file, or the bytes of a file from one place to another.
#[derive(Clone, Debug)]
pub struct Section {
    file: Arc<File>,
    start: u64,
    end: u64,
}

impl Section {
    /// Returns all of `file`, whatever its offset. It must be a regular file.
    pub fn whole(file: File) -> Self {
        Self { file: Arc::new(file), start: 0, end: u64::MAX }
    }

    /// `length` bytes at `offset` of this section. The part ends at the end of the section at the
    /// latest.
    pub fn part(&self, offset: u64, length: u64) -> Self {
        let start = self.start.saturating_add(offset).min(self.end);
        let end = start.saturating_add(length).min(self.end);
        Self { file: Arc::clone(&self.file), start, end }
    }

    /// Reads from the start.
    pub fn open(&self) -> SectionReader {
        SectionReader { file: Arc::clone(&self.file), at: self.start, end: self.end }
    }
}

/// Reads a [`Section`].
#[derive(Debug)]
pub struct SectionReader {
    file: Arc<File>,
    at: u64,
    end: u64,
}

impl Read for SectionReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = usize::try_from(self.end - self.at).unwrap_or(usize::MAX);
        let length = buffer.len().min(left);
        let read = self.file.read_at(&mut buffer[..length], self.at)?;
        self.at += read as u64;
        Ok(read)
    }
}

/// The expanded size that is always accepted, in bytes.
pub const FREE_BYTES: u64 = 1 << 30;

/// The maximum ratio of expanded to stored size above that.
pub const RATIO_MAX: u64 = 200;

/// An archive expands to too much.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("it expands to more than {RATIO_MAX} times its size")]
pub struct ExpandsTooMuch;

/// Counts stored and expanded bytes over all parts of an archive.
#[derive(Clone, Debug, Default)]
pub struct ExpansionLimit(Arc<Counts>);

#[derive(Debug, Default)]
struct Counts {
    packed_bytes: AtomicU64,
    expanded_bytes: AtomicU64,
}

impl ExpansionLimit {
    /// Counts `bytes` of the archive as it is stored.
    pub fn packed(&self, bytes: u64) {
        self.0.packed_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Counts `bytes` that the archive expands to.
    ///
    /// # Errors
    ///
    /// [`ExpandsTooMuch`] if that is too much for what was read so far.
    pub fn expanded(&self, bytes: u64) -> Result<(), ExpandsTooMuch> {
        let before = self.0.expanded_bytes.load(Ordering::Relaxed);
        let expanded = before.saturating_add(bytes);
        self.0.expanded_bytes.store(expanded, Ordering::Relaxed);
        let packed = self.0.packed_bytes.load(Ordering::Relaxed);
        let fits = expanded <= FREE_BYTES || expanded / RATIO_MAX <= packed;
        if fits { Ok(()) } else { Err(ExpandsTooMuch) }
    }

    /// Counts what is read of `input`, which is stored.
    pub fn count_packed<R: Read>(&self, input: R) -> PackedReader<R> {
        PackedReader { input, expansion: self.clone() }
    }

    /// Counts what is read of `input`, which is expanded.
    pub fn count_expanded<R: Read>(&self, input: R) -> ExpandedReader<R> {
        ExpandedReader { input, expansion: self.clone() }
    }
}

/// Made by [`ExpansionLimit::count_packed`].
#[derive(Debug)]
pub struct PackedReader<R> {
    input: R,
    expansion: ExpansionLimit,
}

impl<R: Read> Read for PackedReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.input.read(buffer)?;
        self.expansion.packed(read as u64);
        Ok(read)
    }
}

/// Made by [`ExpansionLimit::count_expanded`]; fails with [`ExpandsTooMuch`] inside of the error.
#[derive(Debug)]
pub struct ExpandedReader<R> {
    input: R,
    expansion: ExpansionLimit,
}

impl<R: Read> Read for ExpandedReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.input.read(buffer)?;
        self.expansion.expanded(read as u64).map_err(io::Error::other)?;
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[test]
    fn a_part_is_read_as_often_as_wanted_and_never_beyond_its_end() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"0123456789").unwrap();
        let whole = Section::whole(file);
        let read = |section: &Section| {
            let mut text = String::new();
            section.open().read_to_string(&mut text).unwrap();
            text
        };
        assert_eq!(read(&whole), "0123456789");
        let part = whole.part(2, 5);
        assert_eq!((read(&part), read(&part)), ("23456".to_owned(), "23456".to_owned()));
        assert_eq!(read(&part.part(1, 100)), "3456");
        assert_eq!(read(&part.part(100, 1)), "");
        assert_eq!(read(&whole.part(8, u64::MAX)), "89");
    }

    #[test]
    fn much_may_come_of_much_and_little_of_anything() {
        let expansion = ExpansionLimit::default();
        expansion.packed(10);
        assert_eq!(expansion.expanded(FREE_BYTES), Ok(()));
        assert_eq!(expansion.expanded(RATIO_MAX), Err(ExpandsTooMuch));
        expansion.packed(FREE_BYTES / RATIO_MAX);
        assert_eq!(expansion.expanded(0), Ok(()));
        assert_eq!(expansion.expanded(u64::MAX), Err(ExpandsTooMuch));
    }
}
