//! What the tools of operators have in common. Data goes to stdout, talk to stderr.

pub mod documents;

use std::io::{ErrorKind, Write as _};
use std::process::ExitCode;

use serde::Serialize;

use daemon::{EXIT_DONE, EXIT_FAILED, exit};

/// How data is printed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// Aligned columns and lines, for people
    #[default]
    Table,
    /// JSON, for scripts
    Json,
}

/// Of a command that compares: the two differ.
pub const EXIT_DIFFERENT: u8 = 3;

/// What a command gives back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Output {
    /// The data.
    pub text: String,
    /// What the program exits with.
    pub code: u8,
}

impl From<String> for Output {
    fn from(text: String) -> Self {
        Self { text, code: EXIT_DONE }
    }
}

impl Output {
    /// Prints the data, and gives the exit code.
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

/// A reply as JSON, with a line feed at its end.
///
/// # Panics
///
/// If it has keys that are no texts, which no reply has.
#[must_use]
pub fn json(value: &impl Serialize) -> String {
    let mut text = serde_json::to_string_pretty(value)
        .expect("replies are plain structures, with texts as keys");
    text.push('\n');
    text
}
