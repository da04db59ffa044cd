//! `domtool clear-safety-shutoff`: lets an update pass that would destroy much, and asks before.

use std::io::{IsTerminal as _, Write as _};

use api::dominator::explain::{Differs, Explain, ExplainRequest};
use api::dominator::{ClearSafetyShutoff, ClearSafetyShutoffRequest};
use clap::Args;
use model::words::{counted, plain};
use rpc::client::Client;
use tool::{Format, Output};

use super::why::WhyAsWord;
use super::{ToolError, call, done_as, who};

/// The longest line about the update, in bytes.
const LINE_BYTES_MAX: usize = 300;

#[derive(Debug, Args)]
pub(super) struct Clear {
    /// Its name in the machine database
    #[arg(value_name = "HOST")]
    pub(super) hostname: String,
    #[command(flatten)]
    why: WhyAsWord,
    /// Do not ask, on a terminal either
    #[arg(long)]
    yes: bool,
}

/// Shows what makes the update dangerous, and lets it pass; asks before if somebody can answer.
pub(super) async fn clear(
    client: &Client,
    format: Format,
    order: &Clear,
) -> Result<Output, ToolError> {
    let hostname = order.hostname.clone();
    let request = ExplainRequest { hostname: hostname.clone() };
    let dangers = call::<Explain>(client, &request).await?.differs.filter(is_dangerous);
    if let Some(differs) = &dangers {
        for line in lines(&hostname, differs) {
            eprintln!("{}", plain(&line, LINE_BYTES_MAX));
        }
        // A script has nobody to ask.
        let can_ask = std::io::stdin().is_terminal() && std::io::stderr().is_terminal();
        if !order.yes
            && can_ask
            && !is_confirmed().map_err(|source| ToolError::Answer { source })?
        {
            return Err(ToolError::NotConfirmed { hostname });
        }
    }
    let request =
        ClearSafetyShutoffRequest { hostname: hostname.clone(), who: who(), why: order.why.text() };
    let done = call::<ClearSafetyShutoff>(client, &request).await?;
    eprintln!("The pending update of {hostname} may pass.");
    Ok(done_as(format, &done).into())
}

fn is_dangerous(differs: &Differs) -> bool {
    !differs.dangers.is_empty()
}

/// What would be done, and what is dangerous about it.
fn lines(hostname: &str, differs: &Differs) -> Vec<String> {
    let actions: Vec<String> =
        differs.actions.iter().map(|(name, count)| format!("{name} {count}")).collect();
    let paths = counted(differs.operations.into(), "path");
    let mut lines = vec![format!("{hostname}: {paths} would be changed: {}", actions.join(", "))];
    lines.extend(differs.dangers.iter().map(|danger| format!("DANGER: {danger}")));
    lines
}

fn is_confirmed() -> std::io::Result<bool> {
    eprint!("Let this update pass? [y/N] ");
    std::io::stderr().flush()?;
    let mut answer = String::new();
    std::io::stdin().read_line(&mut answer)?;
    Ok(is_yes(&answer))
}

fn is_yes(answer: &str) -> bool {
    ["y", "yes"].contains(&answer.trim().to_ascii_lowercase().as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_clear_yes_is_one() {
        for (answer, is) in
            [("y\n", true), ("YES\n", true), ("\n", false), ("", false), ("no\n", false)]
        {
            assert_eq!(is_yes(answer), is, "{answer:?}");
        }
    }
}
