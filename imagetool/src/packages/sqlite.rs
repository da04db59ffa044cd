//! Reads the rows of one table of an SQLite database, and nothing more.
//!
//! rpm stores its database in such a file. SQLite itself is written in C and would process
//! untrusted input; there is no maintained reader in Rust. The format is described at
//! <https://www.sqlite.org/fileformat2.html> and stable since 2004. The file is not trusted: the
//! number of pages that are read is limited, so that a cycle of pages ends, and a length is
//! accepted only if the file has that many bytes.
// tidy: core

const MAGIC: &[u8] = b"SQLite format 3\0";

/// Offset of the tree in the first page, after the header of the file.
const FILE_HEADER_BYTES: usize = 100;

/// Most levels of a tree; a tree of four billion rows has fewer.
const DEPTH_MAX: usize = 40;

/// An invalid database.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid SQLite database: {0}")]
pub(super) struct SqliteError(&'static str);

type Read<T> = Result<T, SqliteError>;

const CUT: SqliteError = SqliteError("it is truncated");

/// Passes the last column of each row of `table`, if it is a blob or a text, to `note` until that
/// returns false. Returns false then.
pub(super) fn last_column(
    bytes: &[u8],
    table: &[u8],
    note: &mut impl FnMut(&[u8]) -> bool,
) -> Read<bool> {
    let mut pages = Pages::of(bytes)?;
    let mut root = None;
    pages.rows(1, DEPTH_MAX, &mut |payload| {
        let columns = columns(payload)?;
        // Of the schema: type, name, table, page, text.
        if let [Value::Bytes(b"table"), Value::Bytes(name), _, Value::Number(page), ..] =
            columns[..]
            && name == table
        {
            root = u32::try_from(page).ok();
        }
        Ok(true)
    })?;
    let root = root.ok_or(SqliteError("it has no table of packages"))?;
    pages.rows(root, DEPTH_MAX, &mut |payload| match columns(payload)?.last() {
        Some(Value::Bytes(bytes)) => Ok(note(bytes)),
        _ => Ok(true),
    })
}

struct Pages<'bytes> {
    bytes: &'bytes [u8],
    page_bytes: usize,
    usable: usize,
    left: usize,
    left_bytes: usize,
}

impl<'bytes> Pages<'bytes> {
    fn of(bytes: &'bytes [u8]) -> Read<Self> {
        let header = bytes.get(..FILE_HEADER_BYTES).ok_or(CUT)?;
        if !header.starts_with(MAGIC) {
            return Err(SqliteError("it does not start with the magic string"));
        }
        let page_bytes = match u16_at(header, 16)? {
            1 => 65_536,
            size if size >= 512 && size.is_power_of_two() => usize::from(size),
            _ => return Err(SqliteError("invalid page size")),
        };
        let usable = page_bytes - usize::from(header[20]);
        if usable < 480 {
            return Err(SqliteError("invalid page size"));
        }
        let left = 2 * (bytes.len() / page_bytes) + 2;
        Ok(Self { bytes, page_bytes, usable, left, left_bytes: bytes.len() })
    }

    fn page(&mut self, number: u32) -> Read<&'bytes [u8]> {
        self.left = self.left.checked_sub(1).ok_or(SqliteError("its pages form a cycle"))?;
        let index = (number as usize).checked_sub(1).ok_or(SqliteError("it refers to page 0"))?;
        let start = index.checked_mul(self.page_bytes).ok_or(CUT)?;
        self.bytes.get(start..).and_then(|rest| rest.get(..self.usable)).ok_or(CUT)
    }

    /// Passes each row of the tree to `note` until that returns false.
    fn rows(
        &mut self,
        number: u32,
        depth: usize,
        note: &mut dyn FnMut(&[u8]) -> Read<bool>,
    ) -> Read<bool> {
        let page = self.page(number)?;
        let at = if number == 1 { FILE_HEADER_BYTES } else { 0 };
        let count = usize::from(u16_at(page, at + 3)?);
        let (pointers, is_leaf) = match page.get(at).ok_or(CUT)? {
            0x0d => (at + 8, true),
            0x05 => (at + 12, false),
            _ => return Err(SqliteError("invalid page of a table")),
        };
        let depth = depth.checked_sub(1).ok_or(SqliteError("its pages form a cycle"))?;
        for index in 0..count {
            let cell = usize::from(u16_at(page, pointers + 2 * index)?);
            let cell = page.get(cell..).ok_or(CUT)?;
            let go_on = if is_leaf {
                note(&self.payload(cell)?)?
            } else {
                self.rows(u32_at(cell, 0)?, depth, note)?
            };
            if !go_on {
                return Ok(false);
            }
        }
        if is_leaf { Ok(true) } else { self.rows(u32_at(page, at + 8)?, depth, note) }
    }

    /// Returns the payload of a row: its start is in the cell, the rest in overflow pages.
    fn payload(&mut self, cell: &[u8]) -> Read<Vec<u8>> {
        let (length, rest) = varint(cell)?;
        let (_row, rest) = varint(rest)?;
        let length = usize::try_from(length).map_err(|_| CUT)?;
        let left_bytes = self.left_bytes.checked_sub(length);
        self.left_bytes = left_bytes.ok_or(SqliteError("its rows are longer than the file"))?;
        let most = self.usable - 35;
        if length <= most {
            return rest.get(..length).map(<[u8]>::to_vec).ok_or(CUT);
        }
        let least = (self.usable - 12) * 32 / 255 - 23;
        let some = least + (length - least) % (self.usable - 4);
        let here = if some <= most { some } else { least };
        let mut payload = rest.get(..here).ok_or(CUT)?.to_vec();
        let mut next = u32_at(rest, here)?;
        while payload.len() < length {
            let page = self.page(next)?;
            next = u32_at(page, 0)?;
            let file = (length - payload.len()).min(self.usable - 4);
            payload.extend_from_slice(page.get(4..4 + file).ok_or(CUT)?);
        }
        Ok(payload)
    }
}

/// A column of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Value<'bytes> {
    Number(i64),
    Bytes(&'bytes [u8]),
    Other,
}

/// Decodes the columns of a row.
fn columns(payload: &[u8]) -> Read<Vec<Value<'_>>> {
    let (header_bytes, rest) = varint(payload)?;
    let header_bytes = usize::try_from(header_bytes).map_err(|_| CUT)?;
    let before = payload.len() - rest.len();
    let length = header_bytes.checked_sub(before).ok_or(CUT)?;
    let mut kinds = rest.get(..length).ok_or(CUT)?;
    let mut values = payload.get(header_bytes..).ok_or(CUT)?;
    let mut columns = Vec::new();
    while !kinds.is_empty() {
        let (kind, rest) = varint(kinds)?;
        kinds = rest;
        let length = match kind {
            0 | 8 | 9 => 0,
            1..=4 => usize::try_from(kind).map_err(|_| CUT)?,
            5 => 6,
            6 | 7 => 8,
            10 | 11 => return Err(SqliteError("unknown type of a column")),
            _ => usize::try_from((kind - 12) / 2).map_err(|_| CUT)?,
        };
        let value = values.get(..length).ok_or(CUT)?;
        values = &values[length..];
        columns.push(match kind {
            8 => Value::Number(0),
            9 => Value::Number(1),
            1..=6 => {
                let sign = if value[0] & 0x80 == 0 { 0 } else { -1 };
                Value::Number(value.iter().fold(sign, |sum, byte| (sum << 8) | i64::from(*byte)))
            }
            12.. => Value::Bytes(value),
            _ => Value::Other,
        });
    }
    Ok(columns)
}

/// Returns a number of one to nine bytes, and what follows it.
fn varint(bytes: &[u8]) -> Read<(u64, &[u8])> {
    let mut number = 0_u64;
    for (index, byte) in bytes.iter().take(9).enumerate() {
        if index == 8 {
            return Ok((number << 8 | u64::from(*byte), &bytes[9..]));
        }
        number = number << 7 | u64::from(byte & 0x7f);
        if byte & 0x80 == 0 {
            return Ok((number, &bytes[index + 1..]));
        }
    }
    Err(CUT)
}

fn u16_at(bytes: &[u8], at: usize) -> Read<u16> {
    let bytes = bytes.get(at..).and_then(|rest| rest.first_chunk()).ok_or(CUT)?;
    Ok(u16::from_be_bytes(*bytes))
}

fn u32_at(bytes: &[u8], at: usize) -> Read<u32> {
    let bytes = bytes.get(at..).and_then(|rest| rest.first_chunk()).ok_or(CUT)?;
    Ok(u32::from_be_bytes(*bytes))
}
