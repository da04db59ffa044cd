//! What operators' tools have in common. Data goes to stdout, messages to stderr.

pub mod documents;

use std::io::{ErrorKind, Write as _};
use std::process::ExitCode;

use serde::Serialize;

use daemon::{EXIT_DONE, EXIT_FAILED, exit};
use model::display::safe_lines;

/// Output format of data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// Aligned columns and lines, for people
    #[default]
    Table,
    /// JSON, for scripts
    Json,
}

impl Format {
    /// Returns `value` as JSON, or the text that `table` makes of it, safe for a terminal.
    pub fn render<T: Serialize>(self, value: &T, table: impl FnOnce(&T) -> String) -> String {
        match self {
            Self::Table => safe_lines(&table(value)),
            Self::Json => json(value),
        }
    }
}

/// Exit code of a command that compared and found a difference.
pub const EXIT_DIFFERENT: u8 = 3;

/// The result of a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Output {
    /// Data for stdout.
    pub text: String,
    /// Exit code.
    pub code: u8,
}

impl From<String> for Output {
    fn from(text: String) -> Self {
        Self { text, code: EXIT_DONE }
    }
}

impl Output {
    /// Prints the data and returns the exit code.
    #[must_use]
    pub fn print(&self) -> ExitCode {
        match std::io::stdout().write_all(self.text.as_bytes()) {
            Ok(()) => ExitCode::from(self.code),
            // `domtool list-subs | head` is not a failure.
            Err(error) if error.kind() == ErrorKind::BrokenPipe => ExitCode::from(self.code),
            Err(error) => exit(EXIT_FAILED, &format!("cannot write to stdout: {error}"), &[]),
        }
    }
}

/// An error and what it is about, for commands that read what operators wrote.
#[derive(Debug, Serialize, thiserror::Error)]
#[error("{at}: {error}")]
pub struct PlacedError {
    error: String,
    /// The file, with its key if one is wrong; or the argument, or a field of it.
    at: String,
}

impl PlacedError {
    /// Returns the error `error` about `at`.
    pub fn new(at: impl Into<String>, error: impl ToString) -> Self {
        Self { error: error.to_string(), at: at.into() }
    }

    /// Prints it, as JSON to stdout or as text to stderr, and returns the exit code of a failure.
    #[must_use]
    pub fn exit(&self, format: Format) -> ExitCode {
        match format {
            Format::Json => Output { text: json(self), code: EXIT_FAILED }.print(),
            Format::Table => exit(EXIT_FAILED, &self.to_string(), &[]),
        }
    }
}

/// Returns `value` as indented JSON that ends with a line feed.
///
/// # Panics
///
/// If a map in `value` has keys that are not strings.
#[must_use]
pub fn json(value: &impl Serialize) -> String {
    let mut text =
        serde_json::to_string_pretty(value).expect("replies are structures with string keys");
    text.push('\n');
    text
}
