//! Orders of operators about daemon tasks.

use serde::{Deserialize, Serialize};

use crate::JsonSchema;

/// What an operator orders about a task of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
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

/// Returns the number of the next order that the operator of a machine gives, of which the highest
/// number so far is `highest`. It is odd, and never that of a dominator's order.
#[must_use]
pub fn next_of_machine(highest: u64) -> u64 {
    highest.saturating_add(1) | 1
}

/// As [`next_of_machine`], of the next order that a dominator gives. It is even.
#[must_use]
pub fn next_of_dominator(highest: u64) -> u64 {
    highest.saturating_add(2) & !1
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
