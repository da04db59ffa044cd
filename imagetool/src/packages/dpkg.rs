//! The database of dpkg: paragraphs of `Field: value`, with an empty line after each.
// tidy: core

use super::Found;

/// Gives each package that is installed to `note`, until that says no. True if it never did.
pub(super) fn read(content: &[u8], note: &mut impl FnMut(Found) -> bool) -> bool {
    let mut found = Found::default();
    // What distroless images have beside each other says nothing of it: they are installed.
    let mut is_installed = true;
    let mut end = |found: &mut Found, is_installed: bool| {
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
