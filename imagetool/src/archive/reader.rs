//! Reads a tar archive member by member, in one pass, strictly.
//!
//! The tar library decodes headers. The iteration over members is implemented here, because that of
//! the library accepts an archive that is truncated between two members, splits pax records at
//! newlines, and does not support sparse files in pax format. Here an archive must end with a block
//! of zeros, followed only by zeros.

use std::io::{self, Read};

use model::escape::escape;
use tar::{EntryType, GnuExtSparseHeader, GnuSparseHeader, Header};

use super::input::ExpandsTooMuch;
use super::pax::Records;
use super::sparse::{self, ContentRun, RANGES_MAX, SparseRecords, StoredRange};
use super::{ArchiveError, EntryError};

/// Headers and contents are padded to this, in bytes.
pub const BLOCK_BYTES: u64 = 512;

/// The longest long name, in bytes. Linux has no paths above 4,096 bytes; this leaves room for
/// `./`.
const LONG_NAME_BYTES_MAX: u64 = 1 << 16;

/// The largest pax header, in bytes: sixty of the longest extended attributes. All global headers
/// together have the same limit, because each member gets a copy of them.
pub const PAX_BYTES_MAX: u64 = 4 << 20;

/// One member of an archive, as its headers describe it.
#[derive(Debug)]
pub struct Member {
    /// The name, as the archive has it.
    pub name: Vec<u8>,
    /// The target of a symlink or hard link, as the archive has it.
    pub link: Vec<u8>,
    pub kind: EntryType,
    /// The last header.
    pub header: Box<Header>,
    /// The pax records that apply to it.
    pub records: Records,
    /// Length of the content, holes included, in bytes.
    pub size_bytes: u64,
    /// Length of the holes together, in bytes.
    pub hole_bytes: u64,
}

/// Reads the members of an archive in their order.
pub struct Reader<R> {
    input: R,
    /// Bytes read so far.
    offset: u64,
    globals: Records,
    globals_bytes: u64,
    /// The content of the current member that was not read yet.
    runs: std::vec::IntoIter<ContentRun>,
    padding_bytes: u64,
    last_name: Option<String>,
    end: ArchiveEnd,
}

/// How the end of an archive is recognized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArchiveEnd {
    /// By a block of zeros: without it the archive is truncated.
    Marked,
    /// By the end of the input. The caller verifies that it is complete, for instance by the digest
    /// of a layer; some tools omit the final zeros.
    Input,
}

impl<R: Read> Reader<R> {
    /// Starts at the first byte of an archive.
    pub fn new(input: R) -> Self {
        Self {
            input,
            offset: 0,
            globals: Records::default(),
            globals_bytes: 0,
            runs: Vec::new().into_iter(),
            padding_bytes: 0,
            last_name: None,
            end: ArchiveEnd::Marked,
        }
    }

    /// Sets how the end is recognized.
    pub fn ending(mut self, end: ArchiveEnd) -> Self {
        self.end = end;
        self
    }

    /// Returns how many bytes were read. After [`Reader::next_member`] this is the offset of the
    /// content of the member.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Returns the next member, or `None` after the last. Skips the rest of the content of the
    /// previous one.
    pub fn next_member(&mut self) -> Result<Option<Member>, ArchiveError> {
        self.content(|_| Ok::<(), ArchiveError>(()))?;
        let mut long_name = None;
        let mut long_link = None;
        let mut records: Option<Records> = None;
        loop {
            let Some(header) = self.read_header()? else {
                let dangling = long_name.is_some() || long_link.is_some() || records.is_some();
                return if dangling { Err(self.truncated()) } else { Ok(None) };
            };
            let size = self.number(&header, "size", &header.as_old().size)?;
            match header.entry_type() {
                EntryType::GNULongName if long_name.is_none() => {
                    long_name = Some(self.read_long_name(&header, size)?);
                }
                EntryType::GNULongLink if long_link.is_none() => {
                    long_link = Some(self.read_long_name(&header, size)?);
                }
                EntryType::XHeader if records.is_none() => {
                    records = Some(self.read_records(&header, size)?);
                }
                EntryType::XGlobalHeader => {
                    let globals = self.read_records(&header, size)?;
                    self.globals_bytes += size;
                    if self.globals_bytes > PAX_BYTES_MAX {
                        let size = self.globals_bytes;
                        return Err(refuse(&header.path_bytes(), EntryError::LongPax { size }));
                    }
                    for key in ["path", "linkpath", "size"] {
                        if globals.get(key).is_some() {
                            return Err(refuse(&header.path_bytes(), EntryError::Global { key }));
                        }
                    }
                    self.globals.extend(globals);
                }
                EntryType::GNULongName | EntryType::GNULongLink | EntryType::XHeader => {
                    return Err(refuse(&header.path_bytes(), EntryError::RepeatedHeader));
                }
                // The label of a volume describes no file.
                other if other.as_byte() == b'V' => {
                    self.skip(size.next_multiple_of(BLOCK_BYTES))?;
                }
                kind => {
                    let mut all = self.globals.clone();
                    all.extend(records.unwrap_or_default());
                    return self.member(kind, header, all, long_name, long_link).map(Some);
                }
            }
        }
    }

    fn member(
        &mut self,
        kind: EntryType,
        header: Box<Header>,
        records: Records,
        long_name: Option<Vec<u8>>,
        long_link: Option<Vec<u8>>,
    ) -> Result<Member, ArchiveError> {
        let name = records
            .get("GNU.sparse.name")
            .or(records.get("path"))
            .map(<[u8]>::to_vec)
            .or(long_name)
            .unwrap_or_else(|| header.path_bytes().into_owned());
        self.last_name = Some(escape(&name));
        let in_entry = |source| ArchiveError::Entry { name: escape(&name), source };
        let link = records
            .get("linkpath")
            .map(<[u8]>::to_vec)
            .or(long_link)
            .unwrap_or_else(|| header.link_name_bytes().unwrap_or_default().into_owned());
        let size = records.number("size").map_err(|source| in_entry(EntryError::Pax { source }))?;
        let stored = match size {
            Some(size) => size,
            None => self.number(&header, "size", &header.as_old().size)?,
        };
        let (runs, size_bytes, stored) = match sparse::of_records(&records).map_err(in_entry)? {
            _ if kind == EntryType::GNUSparse => {
                let (ranges, size) = self.read_old_map(&name, &header)?;
                (sparse::runs(&ranges, size, stored).map_err(in_entry)?, size, stored)
            }
            Some(SparseRecords::Map(ranges, size)) => {
                (sparse::runs(&ranges, size, stored).map_err(in_entry)?, size, stored)
            }
            Some(SparseRecords::InContent(size)) => {
                let (ranges, map_bytes) = self.read_map_in_content(&name, stored)?;
                let stored = stored - map_bytes;
                (sparse::runs(&ranges, size, stored).map_err(in_entry)?, size, stored)
            }
            None if stored == 0 => (Vec::new(), 0, 0),
            None => (vec![ContentRun::Stored(stored)], stored, stored),
        };
        let padded = stored.checked_next_multiple_of(BLOCK_BYTES);
        let padded = padded.ok_or_else(|| in_entry(EntryError::Number { field: "size" }))?;
        self.padding_bytes = padded - stored;
        self.runs = runs.into_iter();
        // The runs add up, so there are no more stored bytes than bytes.
        let hole_bytes = size_bytes.saturating_sub(stored);
        Ok(Member { name, link, kind, header, records, size_bytes, hole_bytes })
    }

    /// Passes the rest of the content of the current member to `take`, in chunks.
    ///
    /// # Errors
    ///
    /// What `take` says, or [`ArchiveError`] if the archive ends within the content.
    pub fn content<E: From<ArchiveError>>(
        &mut self,
        mut take: impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut buffer = vec![0; if self.runs.len() == 0 { 0 } else { 128 << 10 }];
        while let Some(run) = self.runs.next() {
            let (mut left, stored) = match run {
                ContentRun::Stored(length) => (length, true),
                ContentRun::Hole(length) => (length, false),
            };
            if !stored {
                buffer.fill(0);
            }
            while left > 0 {
                let length = usize::try_from(left).unwrap_or(usize::MAX).min(buffer.len());
                if stored {
                    self.read_exact(&mut buffer[..length])?;
                }
                take(&buffer[..length])?;
                left -= length as u64;
            }
        }
        let padding = std::mem::take(&mut self.padding_bytes);
        match (self.skip(padding), self.end) {
            (Err(ArchiveError::Truncated { .. }), ArchiveEnd::Input) => Ok(()),
            (skipped, _) => Ok(skipped?),
        }
    }

    /// Reads to the end of the input, after the last member, and returns the input.
    ///
    /// # Errors
    ///
    /// [`ArchiveError::Trailing`] if anything but zeros follows; a checksum of the compression
    /// that does not hold.
    pub fn finish(mut self) -> Result<R, ArchiveError> {
        let mut buffer = [0; 16 << 10];
        loop {
            match self.read_some(&mut buffer)? {
                0 => return Ok(self.input),
                read if buffer[..read].iter().all(|&byte| byte == 0) => {}
                _ => return Err(ArchiveError::Trailing { offset: self.offset }),
            }
        }
    }

    /// Returns the next header, or `None` at the block of zeros that ends the archive.
    fn read_header(&mut self) -> Result<Option<Box<Header>>, ArchiveError> {
        let mut header = Box::new(Header::new_old());
        let at = self.offset;
        match self.read_exact(header.as_mut_bytes()) {
            Err(ArchiveError::Empty | ArchiveError::Truncated { .. })
                if self.end == ArchiveEnd::Input && self.offset == at =>
            {
                return Ok(None);
            }
            read => read?,
        }
        if header.as_bytes().iter().all(|&byte| byte == 0) {
            return Ok(None);
        }
        let bytes = header.as_bytes();
        let (before, after) = (&bytes[..148], &bytes[156..]);
        let sum = |signed: fn(u8) -> i64| -> i64 {
            before.iter().chain(after).map(|&byte| signed(byte)).sum::<i64>() + 8 * 32
        };
        // Some old archivers summed the bytes as signed numbers.
        let sums = [sum(i64::from), sum(|byte| i64::from(byte.cast_signed()))];
        let want = field_number(&header.as_old().cksum).and_then(|sum| i64::try_from(sum).ok());
        match want {
            Some(want) if sums.contains(&want) => Ok(Some(header)),
            _ if at == 0 => Err(ArchiveError::NotTar),
            _ => Err(ArchiveError::BadHeader { offset: at, after: self.after() }),
        }
    }

    fn read_long_name(&mut self, header: &Header, size: u64) -> Result<Vec<u8>, ArchiveError> {
        if size > LONG_NAME_BYTES_MAX {
            return Err(refuse(&header.path_bytes(), EntryError::LongName { size }));
        }
        let mut name = self.read_block(size)?;
        let end = name.iter().position(|&byte| byte == 0).unwrap_or(name.len());
        name.truncate(end);
        Ok(name)
    }

    fn read_records(&mut self, header: &Header, size: u64) -> Result<Records, ArchiveError> {
        let name = header.path_bytes();
        if size > PAX_BYTES_MAX {
            return Err(refuse(&name, EntryError::LongPax { size }));
        }
        let bytes = self.read_block(size)?;
        Records::parse(&bytes).map_err(|source| refuse(&name, EntryError::Pax { source }))
    }

    /// Reads the map of a sparse file from the header and the extension headers after it.
    fn read_old_map(
        &mut self,
        name: &[u8],
        header: &Header,
    ) -> Result<(Vec<StoredRange>, u64), ArchiveError> {
        let bad = |why| refuse(name, EntryError::Sparse { why });
        let gnu = header.as_gnu().ok_or_else(|| bad("its header is not GNU's"))?;
        let size = field_number(&gnu.realsize).ok_or_else(|| bad("its size is not a number"))?;
        let mut ranges = Vec::new();
        let add = |ranges: &mut Vec<StoredRange>, block: &GnuSparseHeader| {
            if block.offset[0] == 0 || block.numbytes[0] == 0 {
                return Ok(());
            }
            let offset =
                field_number(&block.offset).ok_or_else(|| bad("an offset is not a number"));
            let length =
                field_number(&block.numbytes).ok_or_else(|| bad("a length is not a number"));
            ranges.push((offset?, length?));
            if ranges.len() > RANGES_MAX {
                return Err(bad("it has too many ranges"));
            }
            Ok(())
        };
        for block in &gnu.sparse {
            add(&mut ranges, block)?;
        }
        let mut more = gnu.is_extended();
        while more {
            let mut further = GnuExtSparseHeader::new();
            self.read_exact(further.as_mut_bytes())?;
            for block in further.sparse() {
                add(&mut ranges, block)?;
            }
            more = further.is_extended();
        }
        Ok((ranges, size))
    }

    /// Reads the map of a sparse file before its content: lines of decimal numbers, padded to a
    /// block. Returns the map and its length in the archive, in bytes.
    fn read_map_in_content(
        &mut self,
        name: &[u8],
        stored: u64,
    ) -> Result<(Vec<StoredRange>, u64), ArchiveError> {
        let bad = |why| refuse(name, EntryError::Sparse { why });
        let mut numbers: Vec<u64> = Vec::new();
        let mut digits: Vec<u8> = Vec::new();
        let mut count = None;
        let mut used = 0;
        loop {
            if used + BLOCK_BYTES > stored {
                return Err(bad("its map is truncated"));
            }
            let block = self.read_block(BLOCK_BYTES)?;
            used += BLOCK_BYTES;
            for byte in block {
                if byte != b'\n' {
                    digits.push(byte);
                    if digits.len() > 20 {
                        return Err(bad("its map is not a list of numbers"));
                    }
                    continue;
                }
                let number = super::pax::number("GNU.sparse.map", &digits);
                let number = number.map_err(|_| bad("its map is not a list of numbers"))?;
                digits.clear();
                match count {
                    None if number > RANGES_MAX as u64 => {
                        return Err(bad("it has too many ranges"));
                    }
                    None => count = Some(2 * number),
                    Some(_) => numbers.push(number),
                }
                if count == Some(numbers.len() as u64) {
                    let pairs = numbers.as_chunks::<2>().0;
                    let ranges = pairs.iter().map(|&[offset, length]| (offset, length));
                    return Ok((ranges.collect(), used));
                }
            }
        }
    }

    fn number(
        &self,
        header: &Header,
        field: &'static str,
        bytes: &[u8],
    ) -> Result<u64, ArchiveError> {
        field_number(bytes)
            .ok_or_else(|| refuse(&header.path_bytes(), EntryError::Number { field }))
    }

    /// Reads `size` bytes and the padding after them. The caller must limit `size`.
    fn read_block(&mut self, size: u64) -> Result<Vec<u8>, ArchiveError> {
        let length = usize::try_from(size).expect("the size was limited");
        let mut bytes = vec![0; length.next_multiple_of(BLOCK_BYTES as usize)];
        self.read_exact(&mut bytes)?;
        bytes.truncate(length);
        Ok(bytes)
    }

    fn skip(&mut self, mut length: u64) -> Result<(), ArchiveError> {
        let mut buffer = [0; 4 << 10];
        while length > 0 {
            let next = usize::try_from(length).unwrap_or(usize::MAX).min(buffer.len());
            self.read_exact(&mut buffer[..next])?;
            length -= next as u64;
        }
        Ok(())
    }

    fn read_exact(&mut self, buffer: &mut [u8]) -> Result<(), ArchiveError> {
        let mut filled = 0;
        while filled < buffer.len() {
            match self.read_some(&mut buffer[filled..])? {
                0 if self.offset == 0 => return Err(ArchiveError::Empty),
                0 if self.offset < BLOCK_BYTES => return Err(ArchiveError::NotTar),
                0 => return Err(self.truncated()),
                read => filled += read,
            }
        }
        Ok(())
    }

    fn read_some(&mut self, buffer: &mut [u8]) -> Result<usize, ArchiveError> {
        loop {
            match self.input.read(buffer) {
                Ok(read) => {
                    self.offset += read as u64;
                    return Ok(read);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                    return Err(self.truncated());
                }
                Err(source) => {
                    let offset = self.offset;
                    let expands =
                        source.get_ref().and_then(|inner| inner.downcast_ref::<ExpandsTooMuch>());
                    return Err(match expands {
                        Some(&expands) => {
                            ArchiveError::Expands { offset, after: self.after(), source: expands }
                        }
                        None => ArchiveError::Read { offset, source },
                    });
                }
            }
        }
    }

    fn truncated(&self) -> ArchiveError {
        ArchiveError::Truncated { offset: self.offset, after: self.after() }
    }

    fn after(&self) -> String {
        self.last_name.clone().unwrap_or_else(|| "its start".to_owned())
    }
}

fn refuse(name: &[u8], source: EntryError) -> ArchiveError {
    ArchiveError::Entry { name: escape(name), source }
}

/// Reads a numeric field of a header: octal digits, or GNU's binary form for what does not fit;
/// a blank field is zero. Negative numbers are not accepted.
pub fn field_number(field: &[u8]) -> Option<u64> {
    u64::try_from(signed_field_number(field)?).ok()
}

/// Like [`field_number`], but accepts negative numbers, which times may be.
pub fn signed_field_number(field: &[u8]) -> Option<i64> {
    if field.first()? & 0x80 != 0 {
        // Two's complement, most significant byte first; the top bit is the mark of the form.
        let negative = field[0] & 0x40 != 0;
        let mut number = if negative { -1_i64 } else { 0 };
        for (index, &byte) in field.iter().enumerate() {
            let byte = match (index, negative) {
                (0, true) => byte | 0x80,
                (0, false) => byte & 0x7f,
                _ => byte,
            };
            number = number.checked_mul(256)?.checked_add(i64::from(byte))?;
        }
        return Some(number);
    }
    let end = field.iter().position(|&byte| byte == 0).unwrap_or(field.len());
    let text = field[..end].trim_ascii();
    if text.is_empty() {
        return Some(0);
    }
    if !text.iter().all(|byte| (b'0'..=b'7').contains(byte)) {
        return None;
    }
    i64::from_str_radix(std::str::from_utf8(text).ok()?, 8).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_octal_or_binary() {
        let table: [(&[u8], Option<i64>); 9] = [
            (b"0000644\0", Some(0o644)),
            (b"   644 \0", Some(0o644)),
            (b"\0\0\0\0\0\0\0\0", Some(0)),
            (b"77777777777\0", Some(0o77_777_777_777)),
            (&[0x80, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0], Some(0x2_0000_0000)),
            (&[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xfe], Some(-2)),
            (&[0x80, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0], None),
            (b"0000648\0", None),
            (b"-1\0", None),
        ];
        for (field, want) in table {
            assert_eq!(signed_field_number(field), want, "{field:?}");
        }
        assert_eq!(field_number(&[0xff; 12]), None);
    }
}
