//! A part of a file that several readers can read from its start.
//!
//! An archive is read twice, and the layers of an image may be inside another archive.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

/// A file, or the bytes of a file from one place to another.
#[derive(Clone, Debug)]
pub struct Section {
    file: Arc<File>,
    start: u64,
    end: u64,
}

impl Section {
    /// All of `file`, whatever its offset. It must be a regular file.
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
}
