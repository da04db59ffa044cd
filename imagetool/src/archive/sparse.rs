//! Sparse files in tar archives: which stretches are stored and which are holes.
//!
//! There are four ways to say it: GNU's old headers, and versions 0.0, 0.1 and 1.0 of its pax
//! records. A hole is content like any other: zeros.
// tidy: core

use super::EntryError;
use super::pax::{Records, number};

/// The most stretches of one file.
pub const STRETCHES_MAX: usize = 1 << 20;

/// The largest sparse file, in bytes. A few bytes of an archive can claim any size, and each byte
/// of it has to be hashed.
pub const SPARSE_BYTES_MAX: u64 = 1 << 40;

/// A piece of a file's content, in its order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Piece {
    /// That many bytes from the archive.
    Stored(u64),
    /// That many zeros.
    Hole(u64),
}

/// A stretch of stored bytes: where it lies in the file, and its length, in bytes.
pub type Stretch = (u64, u64);

/// Puts `stretches` into the pieces of a file of `size_bytes`, of which `stored_bytes` are in the
/// archive.
///
/// # Errors
///
/// [`EntryError::Sparse`] if they overlap, are out of order, or do not add up.
pub fn pieces(
    stretches: &[Stretch],
    size_bytes: u64,
    stored_bytes: u64,
) -> Result<Vec<Piece>, EntryError> {
    if size_bytes > SPARSE_BYTES_MAX {
        return Err(EntryError::Sparse { why: "it is larger than 1 TiB" });
    }
    let mut pieces = Vec::with_capacity(2 * stretches.len() + 1);
    let (mut at, mut stored) = (0_u64, 0_u64);
    for &(offset, length) in stretches {
        let hole = offset.checked_sub(at);
        let hole = hole.ok_or(EntryError::Sparse { why: "its stretches overlap" })?;
        let end = offset.checked_add(length).filter(|end| *end <= size_bytes);
        at = end.ok_or(EntryError::Sparse { why: "a stretch ends behind the file" })?;
        stored += length;
        if hole > 0 {
            pieces.push(Piece::Hole(hole));
        }
        if length > 0 {
            pieces.push(Piece::Stored(length));
        }
    }
    if at < size_bytes {
        pieces.push(Piece::Hole(size_bytes - at));
    }
    if stored != stored_bytes {
        return Err(EntryError::Sparse { why: "its stretches do not add up to what is stored" });
    }
    Ok(pieces)
}

/// What the pax records of an entry say of holes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SparseRecords {
    /// The map is in the records, and the file has that size in bytes (versions 0.0 and 0.1).
    Map(Vec<Stretch>, u64),
    /// The map stands before the content, and the file has that size in bytes (version 1.0).
    InContent(u64),
}

/// Reads the `GNU.sparse.*` records; `None` if the file is not sparse.
///
/// # Errors
///
/// [`EntryError`] if a record is missing, unknown or no number.
pub fn of_records(records: &Records) -> Result<Option<SparseRecords>, EntryError> {
    let bad = |source| EntryError::Pax { source };
    if let Some(major) = records.number("GNU.sparse.major").map_err(bad)? {
        let minor = records.number("GNU.sparse.minor").map_err(bad)?;
        if (major, minor) != (1, Some(0)) {
            return Err(EntryError::Sparse { why: "the version of its map is unknown" });
        }
        let size = records.number("GNU.sparse.realsize").map_err(bad)?;
        let size = size.ok_or(EntryError::Sparse { why: "its size is missing" })?;
        return Ok(Some(SparseRecords::InContent(size)));
    }
    let Some(size) = records.number("GNU.sparse.size").map_err(bad)? else { return Ok(None) };
    let mut numbers = Vec::new();
    if let Some(map) = records.get("GNU.sparse.map") {
        for word in map.split(|&byte| byte == b',') {
            numbers.push(number("GNU.sparse.map", word).map_err(bad)?);
        }
    } else {
        for (key, value) in records.iter() {
            match key {
                b"GNU.sparse.offset" => {
                    numbers.push(number("GNU.sparse.offset", value).map_err(bad)?);
                }
                b"GNU.sparse.numbytes" => {
                    numbers.push(number("GNU.sparse.numbytes", value).map_err(bad)?);
                }
                _ => {}
            }
        }
    }
    let (pairs, []) = numbers.as_chunks::<2>() else {
        return Err(EntryError::Sparse { why: "its map has an odd number of numbers" });
    };
    if pairs.len() > STRETCHES_MAX {
        return Err(EntryError::Sparse { why: "it has too many stretches" });
    }
    let stretches = pairs.iter().map(|&[offset, length]| (offset, length)).collect();
    Ok(Some(SparseRecords::Map(stretches, size)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holes_lie_between_and_behind_the_stretches() {
        let got = pieces(&[(512, 512), (2_048, 10), (4_096, 0)], 4_096, 522).unwrap();
        assert_eq!(
            got,
            [
                Piece::Hole(512),
                Piece::Stored(512),
                Piece::Hole(1_024),
                Piece::Stored(10),
                Piece::Hole(2_038),
            ]
        );
        assert_eq!(pieces(&[], 7, 0).unwrap(), [Piece::Hole(7)]);
    }

    #[test]
    fn refuses_maps_that_do_not_add_up() {
        let table: [(&[Stretch], u64, u64, &str); 5] = [
            (&[(5, 5), (0, 5)], 10, 10, "its stretches overlap"),
            (&[(0, 11)], 10, 11, "a stretch ends behind the file"),
            (&[(1, u64::MAX)], 10, 11, "a stretch ends behind the file"),
            (&[(0, 5)], 10, 6, "its stretches do not add up to what is stored"),
            (&[], u64::MAX, 0, "it is larger than 1 TiB"),
        ];
        for (stretches, size, stored, error) in table {
            let got = pieces(stretches, size, stored).unwrap_err().to_string();
            assert_eq!(got, format!("the map of the sparse file is bad: {error}"));
        }
    }
}
