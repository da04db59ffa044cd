//! Asks programs and web servers for content.
//!
//! Both get the record of the machine as JSON and the path, and answer
//! `{"Data": BASE64, "SecondsValid": SECONDS}`. Errors never have a word of the answer.

use std::path::PathBuf;

use api::file_generator::CONTENT_BYTES_MAX;
use daemon::program::{CommandError, output_as};
use data_encoding::BASE64;
use model::escape::escape;
use model::path::TreePath;
use nix::unistd::User;
use percent_encoding::{NON_ALPHANUMERIC, percent_encode};
use serde::Deserialize;
use web::{WebClient, WebError};

use super::core::settings;
use super::generators::Outside;

/// The largest answer, in bytes: base64 takes four bytes for three.
const ANSWER_BYTES_MAX: usize = CONTENT_BYTES_MAX / 3 * 4 + (64 << 10);

const WEB: WebClient = WebClient {
    agent: concat!("filegen-server/", env!("CARGO_PKG_VERSION")),
    bytes_max: ANSWER_BYTES_MAX,
};

/// A program that was found.
#[derive(Clone, Debug)]
pub struct Program {
    pub file: PathBuf,
    pub user: Option<User>,
    pub settings: settings::Program,
}

/// Content from outside.
#[derive(PartialEq, Eq)]
pub struct Answer {
    pub bytes: Vec<u8>,
    /// How long it is valid; 0 for ever.
    pub seconds_valid: u64,
}

/// Why there is no content.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OutsideError {
    #[error("{}", without_output(.0))]
    Command(CommandError),
    #[error("{}", without_target(.0))]
    Web(WebError),
    #[error("not done within {seconds} s")]
    TimedOut { seconds: u64 },
    #[error("the answer is empty: expected {FORM}")]
    Empty,
    #[error("the answer is not valid in line {line}, column {column}: expected {FORM}")]
    Form { line: usize, column: usize },
    #[error("Data is not base64, from character {position}")]
    Base64 { position: usize },
}

const FORM: &str = r#"{"Data": "BASE64", "SecondsValid": SECONDS}"#;

/// Describes an error without what the program printed, which may be secret.
fn without_output(error: &CommandError) -> String {
    match error {
        CommandError::Failed { program, status, .. } => format!("{program}: {status}"),
        error => model::display::error_chain(error),
    }
}

/// Describes an error with its causes, except the address that an answer leads to, which may be
/// secret.
fn without_target(error: &WebError) -> String {
    match error {
        WebError::Connect { .. }
        | WebError::Authorities { .. }
        | WebError::Tls { .. }
        | WebError::Lost { .. }
        | WebError::Request { .. } => model::display::error_chain(error),
        error => error.to_string(),
    }
}

impl OutsideError {
    /// Returns the last line that a program printed on standard error.
    #[must_use]
    pub fn complaint(&self) -> Option<String> {
        match self {
            Self::Command(CommandError::Failed { stderr_line, .. }) if !stderr_line.is_empty() => {
                Some(escape(stderr_line.as_bytes()))
            }
            _ => None,
        }
    }
}

/// Asks for the content of `path` for the machine whose record is `record`.
///
/// # Errors
///
/// [`OutsideError`], also if it takes too long; a program is killed then.
pub async fn ask(
    outside: &Outside,
    path: &TreePath,
    record: &[u8],
) -> Result<Answer, OutsideError> {
    let timeout = match outside {
        Outside::Program(program) => program.settings.timeout,
        Outside::Url(url) => url.timeout,
    };
    let answer = async {
        match outside {
            Outside::Program(program) => {
                let mut line = vec![program.file.display().to_string()];
                line.extend(program.settings.arguments.iter().cloned());
                line.push(path.to_string());
                let output = output_as(program.user.as_ref(), &line, record, ANSWER_BYTES_MAX);
                output.await.map_err(OutsideError::Command)
            }
            Outside::Url(url) => {
                let mut address = url.address.clone();
                let separator = if address.target.contains('?') { '&' } else { '?' };
                let pathname = percent_encode(path.as_bytes(), NON_ALPHANUMERIC);
                address.target = format!("{}{separator}pathname={pathname}", address.target);
                WEB.post(&address, record.to_vec().into()).await.map_err(OutsideError::Web)
            }
        }
    };
    let answer = tokio::time::timeout(timeout, answer).await;
    let late = || OutsideError::TimedOut { seconds: timeout.as_secs() };
    parse(&answer.map_err(|_| late())??)
}

fn parse(answer: &[u8]) -> Result<Answer, OutsideError> {
    #[derive(Deserialize)]
    #[serde(rename_all = "PascalCase")]
    struct Form {
        data: String,
        #[serde(default)]
        seconds_valid: u64,
    }
    if answer.trim_ascii().is_empty() {
        return Err(OutsideError::Empty);
    }
    let form: Form = serde_json::from_slice(answer).map_err(|error| {
        // Its text may quote the answer.
        OutsideError::Form { line: error.line(), column: error.column() }
    })?;
    let bytes = BASE64
        .decode(form.data.as_bytes())
        .map_err(|error| OutsideError::Base64 { position: error.position })?;
    Ok(Answer { bytes, seconds_valid: form.seconds_valid })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_says_nothing_of_the_answer() {
        let table = [
            (r#"{"Data": "YWI=", "SecondsValid": 7, "More": 1}"#, Ok(("ab", 7))),
            (r#"{"Data": ""}"#, Ok(("", 0))),
            ("\n ", Err("the answer is empty: expected {")),
            ("secret", Err("the answer is not valid in line 1, column 1: expected {\"Data\": ")),
            (r#"{"Data": "YWI=""#, Err("the answer is not valid in line 1, column 15: ")),
            (r#"{"Data": "YWI=", "SecondsValid": "secret"}"#, Err("the answer is not valid in ")),
            (r#"{"Data": "YWI=", "SecondsValid": -1}"#, Err("the answer is not valid in ")),
            (r#"{"SecondsValid": 1}"#, Err("the answer is not valid in line 1, column 19: ")),
            (r#"{"Data": "secret!"}"#, Err("Data is not base64, from character ")),
        ];
        for (answer, expected) in table {
            match (parse(answer.as_bytes()), expected) {
                (Ok(got), Ok((bytes, seconds))) => {
                    assert_eq!((&*got.bytes, got.seconds_valid), (bytes.as_bytes(), seconds));
                }
                (Err(error), Err(expected)) => {
                    let error = error.to_string();
                    assert!(error.starts_with(expected), "{answer}: {error}");
                    assert!(!error.contains("secret"), "{error}");
                }
                (got, _) => panic!("{answer}: {:?}", got.err()),
            }
        }
    }
}
