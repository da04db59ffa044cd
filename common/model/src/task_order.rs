//! Orders of operators about daemon tasks.

use serde::{Deserialize, Serialize};

/// What an operator orders about a task of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TaskOrder {
    /// Stops the run, and keeps it from being started.
    Hold,
    Release,
    /// Stops all runs, and has none made.
    Suspend,
    Resume,
    /// Stops the run if it is live, and starts it again.
    Restart,
    /// Makes a run, also outside of the hours. It lasts until the next stop event.
    Start,
}

impl TaskOrder {
    /// The name of the verb.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Hold => "hold",
            Self::Release => "release",
            Self::Suspend => "suspend",
            Self::Resume => "resume",
            Self::Restart => "restart",
            Self::Start => "start",
        }
    }

    /// True if it keeps the task from running, so that others must learn why.
    #[must_use]
    pub fn needs_reason(self) -> bool {
        matches!(self, Self::Hold | Self::Suspend)
    }
}
