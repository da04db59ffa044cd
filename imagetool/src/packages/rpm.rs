//! The database of rpm: a table of headers in an SQLite database.
//!
//! A header is a list of tags, each with its kind and the place of its value. Two numbers stand
//! before it: how many tags there are, and how long all values are together.
// tidy: core

use super::RawPackage;
use super::sqlite::{SqliteError, last_column};

const NAME: u32 = 1_000;
const VERSION: u32 = 1_001;
const RELEASE: u32 = 1_002;
const EPOCH: u32 = 1_003;
const SIZE: u32 = 1_009;
const ARCHITECTURE: u32 = 1_022;
const LONG_SIZE: u32 = 5_009;

const KIND_INT32: u32 = 4;
const KIND_INT64: u32 = 5;
const KIND_STRING: u32 = 6;

/// The name under which rpm stores signing keys, which look like packages.
const KEYS: &str = "gpg-pubkey";

/// Passes each package to `note` until that returns false. Returns false then.
pub(super) fn read(
    content: &[u8],
    note: &mut impl FnMut(RawPackage) -> bool,
) -> Result<bool, SqliteError> {
    last_column(content, b"Packages", &mut |header| match package(header) {
        Some(found) if found.name != KEYS => note(found),
        _ => true,
    })
}

/// The package of a header; `None` if it is none.
fn package(header: &[u8]) -> Option<RawPackage> {
    let count = number(header, 0)? as usize;
    let (tags, values) = header.get(8..)?.split_at_checked(count.checked_mul(16)?)?;
    let mut found = RawPackage::default();
    let (mut version, mut release, mut epoch) = (String::new(), String::new(), None);
    for tag in tags.chunks_exact(16) {
        let (name, kind) = (number(tag, 0)?, number(tag, 4)?);
        let place = number(tag, 8)? as usize;
        let text = || -> Option<String> {
            let value = values.get(place..)?;
            let end = value.iter().position(|&byte| byte == 0)?;
            Some(String::from_utf8_lossy(&value[..end]).into_owned())
        };
        match (name, kind) {
            (NAME, KIND_STRING) => found.name = text()?,
            (VERSION, KIND_STRING) => version = text()?,
            (RELEASE, KIND_STRING) => release = text()?,
            (ARCHITECTURE, KIND_STRING) => found.architecture = text()?,
            (EPOCH, KIND_INT32) => epoch = number(values, place),
            (SIZE, KIND_INT32) => found.size_bytes = number(values, place)?.into(),
            (LONG_SIZE, KIND_INT64) => {
                found.size_bytes = u64::from_be_bytes(*values.get(place..)?.first_chunk()?);
            }
            _ => {}
        }
    }
    let epoch = epoch.map_or_else(String::new, |epoch| format!("{epoch}:"));
    found.version = format!("{epoch}{version}-{release}");
    (!found.name.is_empty()).then_some(found)
}

fn number(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(*bytes.get(at..)?.first_chunk()?))
}
