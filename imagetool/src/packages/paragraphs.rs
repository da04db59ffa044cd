//! The databases of dpkg and apk: paragraphs of fields, with an empty line after each.
//!
//! A field is `Field: value` in the database of dpkg, and `X:value`, with one letter, in that of
//! apk.
// tidy: core

use super::RawPackage;

/// Passes each installed package of dpkg to `note` until that returns false. Returns false then.
pub(super) fn read_dpkg(content: &[u8], note: &mut impl FnMut(RawPackage) -> bool) -> bool {
    let mut found = RawPackage::default();
    // What distroless images have beside each other says nothing of it: they are installed.
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
        // What a field has on further lines begins with a space.
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
