//! `domtool freeze` and `unfreeze`: no rollout changes machines meanwhile.

use api::dominator::orders::PauseEnd;
use api::dominator::rollouts::EnvironmentOrder;
use clap::Subcommand;
use rollouts::state::ALL;
use rpc::client::Client;
use tool::{Format, Output};

use super::ToolError;
use super::environments::order;
use super::orders::{OptionalWhy, RequiredWhy, pause_end};

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Let no rollout change machines of an environment, or of any
    ///
    /// Rollouts wait, also for the next batch of a step that has begun. What goes back is not held
    /// up, and neither are repairs, or rollouts that were started with --urgent.
    #[command(after_help = "Examples:\n  \
        domtool freeze --until 3d --why 'end of the year'\n  \
        domtool freeze web --why 'the shop has a sale'")]
    Freeze {
        /// The environment; without one: all
        #[arg(value_name = "ENV", default_value = ALL, hide_default_value = true)]
        name: String,
        /// A time, or a duration such as 2h; without it: until domtool unfreeze
        #[arg(long, value_name = "TIME", value_parser = pause_end)]
        until: Option<PauseEnd>,
        #[command(flatten)]
        why: RequiredWhy,
    },
    /// End a freeze
    #[command(after_help = "Example: domtool unfreeze web --why 'the sale is over'")]
    Unfreeze {
        /// The environment; without one: the freeze of all
        #[arg(value_name = "ENV", default_value = ALL, hide_default_value = true)]
        name: String,
        #[command(flatten)]
        why: OptionalWhy,
    },
}

/// Runs a command.
pub(super) async fn run(
    client: &Client,
    format: Format,
    command: &Command,
) -> Result<Output, ToolError> {
    match command {
        Command::Freeze { name, until, why } => {
            let freeze = EnvironmentOrder::Freeze { until: *until };
            order(client, format, name, freeze, &why.why).await
        }
        Command::Unfreeze { name, why } => {
            order(client, format, name, EnvironmentOrder::Unfreeze, &why.why).await
        }
    }
}
