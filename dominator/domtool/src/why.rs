//! Why an order is given, in one way for all commands: `--why TEXT`.
//!
//! What these structures are called is not documented for clap, which would take it for the text
//! of the command that has them.

use clap::Args;

#[derive(Debug, Args)]
pub(super) struct Why {
    /// Why: noted in the audit of orders
    #[arg(long, value_name = "TEXT", alias = "reason", default_value = "")]
    #[arg(hide_default_value = true)]
    pub(super) why: String,
}

#[derive(Debug, Args)]
pub(super) struct NeededWhy {
    /// Why: noted in the audit of orders
    #[arg(long, value_name = "TEXT", alias = "reason")]
    pub(super) why: String,
}

// As the last word, or behind the flag.
#[derive(Debug, Args)]
pub(super) struct WhyAsWord {
    /// Why: the same as --why
    #[arg(value_name = "WHY", conflicts_with = "why")]
    reason: Option<String>,
    /// Why: noted in the audit of orders
    #[arg(long, value_name = "TEXT", alias = "reason")]
    why: Option<String>,
}

impl WhyAsWord {
    pub(super) fn text(&self) -> String {
        self.reason.as_ref().or(self.why.as_ref()).cloned().unwrap_or_default()
    }
}

#[derive(Debug, Args)]
pub(super) struct NeededWhyAsWord {
    /// Why: the same as --why
    #[arg(value_name = "WHY", required_unless_present = "why", conflicts_with = "why")]
    reason: Option<String>,
    /// Why: it is shown to everyone who looks
    #[arg(long, value_name = "TEXT", alias = "reason")]
    why: Option<String>,
}

impl NeededWhyAsWord {
    pub(super) fn text(&self) -> String {
        self.reason.as_ref().or(self.why.as_ref()).cloned().unwrap_or_default()
    }
}
