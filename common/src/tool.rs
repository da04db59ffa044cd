//! What the tools of operators have in common.

/// How data is printed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// Aligned columns and lines, for people
    #[default]
    Table,
    /// JSON, for scripts
    Json,
}
