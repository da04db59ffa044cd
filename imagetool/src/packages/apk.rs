//! The database of apk: paragraphs of `X:value`, with an empty line after each.
// tidy: core

use super::Found;

/// Gives each package to `note`, until that says no. True if it never did.
pub(super) fn read(content: &[u8], note: &mut impl FnMut(Found) -> bool) -> bool {
    let mut found = Found::default();
    let mut end = |found: &mut Found| {
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
