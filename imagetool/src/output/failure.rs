//! The result of a verb: an exit code, or a failure with its causes and hints.

use std::error::Error;

use api::fault::FaultCode;
use daemon::{EXIT_DONE, EXIT_FAILED, EXIT_MISUSE, EXIT_PARTLY};
use model::image::ImageName;
use rpc::client::CallError;
use tool::EXIT_DIFFERENT;

/// The result of a verb that did not fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All was done.
    Done,
    /// A part could not be done; warnings say which.
    Partly,
    /// The compared things differ, or something is missing.
    Different,
}

impl Outcome {
    /// Returns the exit code of the process.
    pub fn exit_code(self) -> u8 {
        match self {
            Self::Done => EXIT_DONE,
            Self::Partly => EXIT_PARTLY,
            Self::Different => EXIT_DIFFERENT,
        }
    }
}

/// The failure of a verb, with a message for the user.
#[derive(Debug)]
pub struct Failure {
    message: String,
    hints: Vec<String>,
    exit_code: u8,
}

impl Failure {
    /// Describes `error` and its causes.
    pub fn new(error: &dyn Error) -> Self {
        Self {
            message: model::display::error_chain(error),
            hints: Vec::new(),
            exit_code: EXIT_FAILED,
        }
    }

    /// Returns a failure with this message.
    pub fn from_text(message: impl Into<String>) -> Self {
        Self { message: message.into(), hints: Vec::new(), exit_code: EXIT_FAILED }
    }

    /// Describes a failed call to the image server.
    pub fn from_call(error: &CallError) -> Self {
        let failure = Self::new(error);
        let unreached = "is the image server running, and is this its address? Set it with \
                         --imageserver HOST:PORT or DOMINATOR_IMAGESERVER";
        if let Some(hint) = error.connect_hint(unreached) {
            return failure.hint(hint);
        }
        match error.code() {
            Some(FaultCode::NoSpace) => {
                failure.hint("make space on the file-system of the image server's data directory")
            }
            Some(FaultCode::Version) => {
                failure.hint("use the imagetool of the image server's release")
            }
            _ => failure,
        }
    }

    /// Describes a failed call about the image `name`.
    pub fn from_image_call(error: &CallError, name: &ImageName) -> Self {
        let hint = match error.code() {
            Some(FaultCode::NotFound) => "`imagetool list` lists all images",
            Some(FaultCode::Gone) => {
                "the name was deleted or has expired, and names are never used again"
            }
            Some(FaultCode::Exists) => {
                "an image never changes: take a new name, such as one with a version or a date"
            }
            _ => return Self::from_call(error),
        };
        Self::from_text(format!("{name}: {}", model::display::error_chain(error))).hint(hint)
    }

    /// Adds a hint for the user.
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hints.push(hint.into());
        self
    }

    /// Sets the exit code for wrong use of the command line.
    pub fn misuse(mut self) -> Self {
        self.exit_code = EXIT_MISUSE;
        self
    }

    /// Returns the exit code of the process.
    pub fn exit_code(&self) -> u8 {
        self.exit_code
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "error: {}", self.message)?;
        for hint in &self.hints {
            write!(formatter, "\nhint: {hint}")?;
        }
        Ok(())
    }
}
