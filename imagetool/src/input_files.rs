//! The files that describe an image: filter, triggers, computed files, health check.

pub mod computed;
pub mod filters;
pub mod triggers;

use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use model::filter::Filter;
use model::image::HealthCheck;
use model::signing::ContentSigner;
use model::tree::Tree;
use model::trigger::Triggers;
use serde::Deserialize;

use self::computed::{ComputedError, ComputedRules};
use crate::output::failure::Failure;

/// Largest file that describes an image, in bytes.
const TEXT_BYTES_MAX: u64 = 8 << 20;

pub fn is_dash(path: &Path) -> bool {
    path.as_os_str() == "-"
}

/// Reads a text file of at most `TEXT_BYTES_MAX`; errors call it `what`.
pub fn read_text(path: &Path, what: &str) -> Result<String, Failure> {
    read_text_up_to(path, what, TEXT_BYTES_MAX)
}

/// Reads a text file of at most `bytes_max`; errors call it `what`.
pub fn read_text_up_to(path: &Path, what: &str, bytes_max: u64) -> Result<String, Failure> {
    let bytes = read_bytes(path, what, bytes_max)?;
    String::from_utf8(bytes).map_err(|_| {
        let path = path.display();
        Failure::from_text(format!(
            "cannot read the {what}: {path}: stream did not contain valid UTF-8"
        ))
    })
}

/// Reads a file of at most `bytes_max`; errors call it `what`.
pub fn read_bytes(path: &Path, what: &str, bytes_max: u64) -> Result<Vec<u8>, Failure> {
    let read = || -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        fs_err::File::open(path)?.take(bytes_max + 1).read_to_end(&mut bytes)?;
        if bytes.len() as u64 > bytes_max {
            let why = format!("it is larger than {bytes_max} bytes");
            return Err(io::Error::other(format!("{}: {why}", path.display())));
        }
        Ok(bytes)
    };
    read().map_err(|error| Failure::from_text(format!("cannot read the {what}: {error}")))
}

fn hint_dash(failure: Failure) -> Failure {
    failure.hint("`-` stands for none")
}

pub fn read_filter(path: &Path) -> Result<Option<Filter>, Failure> {
    if is_dash(path) {
        return Ok(None);
    }
    let text = read_text(path, "filter").map_err(hint_dash)?;
    parse_filter(path, &text).map(Some)
}

pub fn parse_filter(path: &Path, text: &str) -> Result<Filter, Failure> {
    Filter::from_text(text).map_err(|error| {
        Failure::from_text(format!("{}: {}", path.display(), model::display::error_chain(&error)))
    })
}

pub fn read_triggers(path: &Path) -> Result<Triggers, Failure> {
    if is_dash(path) {
        return Ok(Triggers::default());
    }
    let text = read_text(path, "triggers").map_err(hint_dash)?;
    parse_triggers(path, &text)
}

pub fn parse_triggers(path: &Path, text: &str) -> Result<Triggers, Failure> {
    let triggers = Triggers::from_json(text);
    let checked = triggers.and_then(|triggers| Triggers::check_keys(text).map(|()| triggers));
    checked.map_err(|error| {
        Failure::from_text(format!("{}: {}", path.display(), model::display::error_chain(&error)))
    })
}

/// Reads the keys that sign the content of computed files; no keys without a file.
pub fn read_signers(path: Option<&Path>) -> Result<Vec<ContentSigner>, Failure> {
    let Some(path) = path else { return Ok(Vec::new()) };
    let text = read_text(path, "keys that sign the content of computed files")?;
    ContentSigner::read_list(&text)
        .map_err(|error| Failure::from_text(format!("{}: {error}", path.display())))
}

/// Describes a key that signs the content of computed files.
pub fn signer_text(signer: &ContentSigner) -> String {
    let key = match signer.public_key() {
        Ok(key) => key.fingerprint(),
        Err(why) => format!("bad key: {why}"),
    };
    if signer.paths.is_empty() {
        return key;
    }
    let paths: Vec<String> = signer.paths.iter().map(ToString::to_string).collect();
    format!("{key} ({})", paths.join(", "))
}

pub fn read_health_check(path: &Path) -> Result<HealthCheck, Failure> {
    let text = read_text(path, "health check")?;
    parse_health_check(&text).map_err(|error| {
        Failure::from_text(format!("{}: {error}", path.display()))
            .hint("imagetool add --help shows one")
    })
}

/// A file with the computed files of a new image.
#[derive(Clone, Debug, Default)]
pub struct ComputedList {
    file: PathBuf,
    rules: ComputedRules,
}

impl ComputedList {
    /// Reads the list in `file`; without a file it is empty.
    pub fn read(file: Option<&Path>) -> Result<Self, Failure> {
        let Some(file) = file else { return Ok(Self::default()) };
        let text = read_text(file, "list of computed files")?;
        let rules = ComputedRules::from_text(&text).map_err(|error| computed(file, &error))?;
        Ok(Self { file: file.to_owned(), rules })
    }

    /// Returns `tree`, which no longer has what `filter` keeps, with the computed files.
    pub fn apply(&self, tree: &Tree, filter: Option<&Filter>) -> Result<Tree, Failure> {
        self.rules.apply(tree, filter).map_err(|error| computed(&self.file, &error))
    }
}

fn computed(file: &Path, error: &ComputedError) -> Failure {
    let text = format!("{}: {}", file.display(), model::display::error_chain(error));
    let failure = Failure::from_text(text);
    match error {
        ComputedError::Kept { .. } => failure.hint(
            "what the filter keeps is not in the image: change that line, so that it keeps only \
             what is each machine's own",
        ),
        ComputedError::Missing { .. } => {
            failure.hint("put a placeholder there, a file that has the mode, owner and attributes")
        }
        ComputedError::NoDirectory { kind: "symlink", .. } => {
            failure.hint("symlinks are not followed: name the path that it leads to")
        }
        _ => failure,
    }
}

/// Default time limit of a health check, in seconds.
const WITHIN_SECONDS: u32 = 60;

/// The file with a health check. Unknown fields are refused, so that a typing error in `undo` is
/// noticed.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct HealthCheckFile {
    command: Vec<String>,
    #[serde(default = "within_seconds")]
    within_seconds: u32,
    #[serde(default)]
    undo: bool,
}

fn within_seconds() -> u32 {
    WITHIN_SECONDS
}

/// Parses a health check; defaults are 60 seconds and no undo. [`model::image::Content::verify`]
/// checks whether it can be run.
///
/// # Errors
///
/// The error with its position in the text.
fn parse_health_check(text: &str) -> Result<HealthCheck, serde_json::Error> {
    let HealthCheckFile { command, within_seconds, undo } = serde_json::from_str(text)?;
    Ok(HealthCheck { command, within_seconds, undo })
}

/// Describes a health check on one line: `/usr/bin/check --all, within 60 s, else the update is
/// undone`.
pub fn health_check_text(check: &HealthCheck) -> String {
    let otherwise = if check.undo { "undone" } else { "reported" };
    let words: Vec<String> = check.command.iter().map(|word| quoted(word)).collect();
    format!("{}, within {} s, else {otherwise}", words.join(" "), check.within_seconds)
}

/// Quotes a word with spaces or special characters.
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
        let shown = |text: &str| match parse_health_check(text) {
            Ok(check) => health_check_text(&check),
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
