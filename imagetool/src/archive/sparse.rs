//! Sparse files in tar archives: which ranges are stored and which are holes.
//!
//! There are four ways to say it: GNU's old headers, and versions 0.0, 0.1 and 1.0 of its pax
//! records. A hole is content like any other: zeros.
// tidy: core

use super::EntryError;
use super::pax::{Records, number};

/// The most ranges of one file.
pub const RANGES_MAX: usize = 1 << 20;

/// The largest sparse file, in bytes. A small archive can claim any size, and all of it has to be
/// hashed.
pub const SPARSE_BYTES_MAX: u64 = 1 << 40;

/// A run of a file's content, in its order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContentRun {
    /// That many bytes from the archive.
    Stored(u64),
    /// That many zeros.
    Hole(u64),
}

/// A range of stored bytes: where it lies in the file, and its length, in bytes.
pub type StoredRange = (u64, u64);

/// Puts `ranges` into the runs of a file of `size_bytes`, of which `stored_bytes` are in the
/// archive.
///
/// # Errors
///
/// [`EntryError::Sparse`] if they overlap, are out of order, or do not add up.
pub fn runs(
    ranges: &[StoredRange],
    size_bytes: u64,
    stored_bytes: u64,
) -> Result<Vec<ContentRun>, EntryError> {
    if size_bytes > SPARSE_BYTES_MAX {
        return Err(EntryError::Sparse { why: "it is larger than 1 TiB" });
    }
    let mut runs = Vec::with_capacity(2 * ranges.len() + 1);
    let (mut at, mut stored) = (0_u64, 0_u64);
    for &(offset, length) in ranges {
        let hole = offset.checked_sub(at);
        let hole = hole.ok_or(EntryError::Sparse { why: "its ranges overlap" })?;
        let end = offset.checked_add(length).filter(|end| *end <= size_bytes);
        at = end.ok_or(EntryError::Sparse { why: "a range ends behind the file" })?;
        stored += length;
        if hole > 0 {
            runs.push(ContentRun::Hole(hole));
        }
        if length > 0 {
            runs.push(ContentRun::Stored(length));
        }
    }
    if at < size_bytes {
        runs.push(ContentRun::Hole(size_bytes - at));
    }
    if stored != stored_bytes {
        return Err(EntryError::Sparse { why: "its ranges do not add up to what is stored" });
    }
    Ok(runs)
}

/// What the pax records of an entry say of holes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SparseRecords {
    /// The map is in the records, and the file has that size in bytes (versions 0.0 and 0.1).
    Map(Vec<StoredRange>, u64),
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
    if pairs.len() > RANGES_MAX {
        return Err(EntryError::Sparse { why: "it has too many ranges" });
    }
    let ranges = pairs.iter().map(|&[offset, length]| (offset, length)).collect();
    Ok(Some(SparseRecords::Map(ranges, size)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holes_lie_between_and_behind_the_stretches() {
        let got = runs(&[(512, 512), (2_048, 10), (4_096, 0)], 4_096, 522).unwrap();
        assert_eq!(
            got,
            [
                ContentRun::Hole(512),
                ContentRun::Stored(512),
                ContentRun::Hole(1_024),
                ContentRun::Stored(10),
                ContentRun::Hole(2_038),
            ]
        );
        assert_eq!(runs(&[], 7, 0).unwrap(), [ContentRun::Hole(7)]);
    }

    #[test]
    fn refuses_maps_that_do_not_add_up() {
        let table: [(&[StoredRange], u64, u64, &str); 5] = [
            (&[(5, 5), (0, 5)], 10, 10, "its ranges overlap"),
            (&[(0, 11)], 10, 11, "a range ends behind the file"),
            (&[(1, u64::MAX)], 10, 11, "a range ends behind the file"),
            (&[(0, 5)], 10, 6, "its ranges do not add up to what is stored"),
            (&[], u64::MAX, 0, "it is larger than 1 TiB"),
        ];
        for (ranges, size, stored, error) in table {
            let got = runs(ranges, size, stored).unwrap_err().to_string();
            assert_eq!(got, format!("invalid map of the sparse file: {error}"));
        }
    }
}
