//! The file with the health check of an image: a JSON object.

use model::image::HealthCheck;
use serde::Deserialize;

/// How long a check may take if the file does not say, in seconds.
const WITHIN_SECONDS: u32 = 60;

/// The file. Unknown fields are refused, so that a typing error in `undo` is noticed.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Record {
    command: Vec<String>,
    #[serde(default = "within_seconds")]
    within_seconds: u32,
    #[serde(default)]
    undo: bool,
}

fn within_seconds() -> u32 {
    WITHIN_SECONDS
}

/// Reads a health check; `within_seconds` is 60 and `undo` false where it does not say. Whether the
/// check can be run is for [`model::image::Content::verify`] to say.
///
/// # Errors
///
/// The place in the text and what is wrong there.
pub fn parse(text: &str) -> Result<HealthCheck, serde_json::Error> {
    let Record { command, within_seconds, undo } = serde_json::from_str(text)?;
    Ok(HealthCheck { command, within_seconds, undo })
}

/// The check on one line: `/usr/bin/check --all, within 60 s, else the update is undone`.
pub fn in_words(check: &HealthCheck) -> String {
    let otherwise = if check.undo { "undone" } else { "reported" };
    let words: Vec<String> = check.command.iter().map(|word| quoted(word)).collect();
    format!("{}, within {} s, else {otherwise}", words.join(" "), check.within_seconds)
}

/// A word that holds spaces or the like stands in quotes, so that words can be told apart.
fn quoted(word: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/._-+=:,@%".contains(&byte);
    match !word.is_empty() && word.bytes().all(is_plain) {
        true => word.to_owned(),
        false => format!("{word:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_check_says_what_it_runs_and_has_defaults() {
        let shown = |text: &str| match parse(text) {
            Ok(check) => in_words(&check),
            Err(error) => format!("error: {error}"),
        };
        let table = [
            (r#"{"command": ["/bin/true"]}"#, "/bin/true, within 60 s, else reported"),
            (
                r#"{"command": ["sh", "-c", "curl x"], "within_seconds": 9, "undo": true}"#,
                r#"sh -c "curl x", within 9 s, else undone"#,
            ),
            (
                r#"{"command": [], "Undo": true}"#,
                "error: unknown field `Undo`, expected one of `command`, `within_seconds`, `undo` \
                 at line 1 column 22",
            ),
            ("{}", "error: missing field `command` at line 1 column 2"),
        ];
        for (text, want) in table {
            assert_eq!(shown(text), want);
        }
    }
}
