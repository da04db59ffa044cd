//! Rules of names in files that operators write.

use crate::display::safe_text;

/// The longest name, in bytes: with `.json` it is still the name of a file.
pub const NAME_BYTES_MAX: usize = 64;

/// The longest name of a user or group, in bytes.
const ACCOUNT_BYTES_MAX: usize = 32;

fn is_plain(name: &str) -> bool {
    name.bytes().all(|letter| letter.is_ascii_alphanumeric() || b"._-".contains(&letter))
}

/// Checks the name of something, such as a task or a resource, that can also be the name of a file.
///
/// # Errors
///
/// Says what is expected.
pub fn check_name(name: &str) -> Result<(), String> {
    let starts_plain = name.starts_with(|first: char| first.is_ascii_alphanumeric());
    if starts_plain && is_plain(name) && name.len() <= NAME_BYTES_MAX {
        return Ok(());
    }
    Err(format!(
        "`{}` is no name: expected up to {NAME_BYTES_MAX} letters, digits, `.`, `_` or `-`, of \
         which the first is a letter or digit",
        safe_text(name, 80)
    ))
}

/// Checks the name of a user or group.
///
/// # Errors
///
/// Says what `name` cannot be.
pub fn check_account(name: &str) -> Result<(), String> {
    let starts_plain =
        name.starts_with(|first: char| first.is_ascii_alphanumeric() || first == '_');
    if starts_plain && is_plain(name) && name.len() <= ACCOUNT_BYTES_MAX {
        return Ok(());
    }
    Err(format!("`{}` is no name of a user or group", safe_text(name, 80)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_plain_and_short() {
        let (long, longer) = ("a".repeat(64), "a".repeat(65));
        for (name, is_name, is_account) in [
            ("a", true, true),
            ("0.a_b-C", true, true),
            ("_a", false, true),
            (&long, true, false),
            (&longer, false, false),
            ("", false, false),
            (".a", false, false),
            ("-a", false, false),
            ("a b", false, false),
            ("a/b", false, false),
            ("\u{e4}", false, false),
        ] {
            assert_eq!(
                (check_name(name).is_ok(), check_account(name).is_ok()),
                (is_name, is_account),
                "{name}"
            );
        }
    }
}
