//! Reads package databases.
//!
//! The databases of dpkg and apk are paragraphs of fields, with an empty line after each. A field
//! is `Field: value` for dpkg, and `X:value`, with one letter, for apk.
//!
//! The database of rpm is a table of headers in an SQLite database. A header is a list of tags,
//! each with its kind and the offset of its value. Two numbers precede it: the number of tags, and
//! the length of all values.
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

/// Passes each installed package of dpkg to `note` until that returns false. Returns false then.
pub(super) fn read_dpkg(content: &[u8], note: &mut impl FnMut(RawPackage) -> bool) -> bool {
    let mut found = RawPackage::default();
    // Distroless images have a file for each package, without a status: they are installed.
    let mut is_installed = true;
    let mut end = |found: &mut RawPackage, is_installed: bool| {
        let package = std::mem::take(found);
        let is_one = is_installed && !package.name.is_empty();
        !is_one || note(package)
    };
    for line in content.split(|&byte| byte == b'\n') {
        if line.iter().all(u8::is_ascii_whitespace) {
            if !end(&mut found, is_installed) {
                return false;
            }
            is_installed = true;
            continue;
        }
        // Further lines of a field start with a space.
        let Some(colon) = line.iter().position(|&byte| byte == b':') else { continue };
        let (field, value) = line.split_at(colon);
        let value = || String::from_utf8_lossy(&value[1..]).trim().to_owned();
        match field {
            b"Package" => found.name = value(),
            b"Version" => found.version = value(),
            b"Architecture" => found.architecture = value(),
            b"Status" => is_installed = value().split_whitespace().nth(2) == Some("installed"),
            b"Installed-Size" => {
                found.size_bytes = value().parse::<u64>().unwrap_or(0).saturating_mul(1_024);
            }
            _ => {}
        }
    }
    end(&mut found, is_installed)
}

/// Passes each package of apk to `note` until that returns false. Returns false then.
pub(super) fn read_apk(content: &[u8], note: &mut impl FnMut(RawPackage) -> bool) -> bool {
    let mut found = RawPackage::default();
    let mut end = |found: &mut RawPackage| {
        let package = std::mem::take(found);
        package.name.is_empty() || note(package)
    };
    for line in content.split(|&byte| byte == b'\n') {
        let [key, b':', value @ ..] = line else {
            if line.is_empty() && !end(&mut found) {
                return false;
            }
            continue;
        };
        let value = || String::from_utf8_lossy(value).trim().to_owned();
        match key {
            b'P' => found.name = value(),
            b'V' => found.version = value(),
            b'A' => found.architecture = value(),
            b'I' => found.size_bytes = value().parse().unwrap_or(0),
            _ => {}
        }
    }
    end(&mut found)
}

/// Passes each package of rpm to `note` until that returns false. Returns false then.
pub(super) fn read_rpm(
    content: &[u8],
    note: &mut impl FnMut(RawPackage) -> bool,
) -> Result<bool, SqliteError> {
    last_column(content, b"Packages", &mut |header| match package(header) {
        Some(found) if found.name != KEYS => note(found),
        _ => true,
    })
}

/// Decodes a header; `None` if it is invalid.
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
