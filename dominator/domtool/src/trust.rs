//! `domtool trust`: says that machines are the ones that are meant.

use std::collections::BTreeSet;

use api::dominator::identity::{Trust, TrustRequest};
use api::dominator::{ListSubs, ListSubsRequest, Status};
use daemon::{EXIT_DONE, EXIT_FAILED, EXIT_PARTLY};
use model::report::report;
use model::words::counted;
use rpc::client::Client;
use tool::{Format, Output, json};

use super::why::NeededWhy;
use super::{ToolError, call, who};
use api::dominator::orders::is_pattern;

#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    /// Its name in the machine database, or a pattern: of those, all that are `wrong-machine`
    #[arg(value_name = "HOST", required = true)]
    hosts: Vec<String>,
    #[command(flatten)]
    why: NeededWhy,
}

/// Trusts each machine; prints the names of those that are trusted now. Some may not be.
pub(super) async fn run(
    client: &Client,
    format: Format,
    arguments: &Arguments,
) -> Result<Output, ToolError> {
    let mut hostnames = BTreeSet::new();
    for host in &arguments.hosts {
        hostnames.extend(meant(client, host).await?);
    }
    let is_alone = hostnames.len() == 1;
    let (mut trusted, mut has_failed) = (Vec::new(), false);
    for hostname in hostnames {
        let (why, who) = (arguments.why.why.clone(), who());
        let request = TrustRequest { hostname: hostname.clone(), why, who };
        match call::<Trust>(client, &request).await {
            Ok(_done) => trusted.push(hostname),
            Err(error) if is_alone => return Err(error.into()),
            Err(error) => {
                eprintln!("{}", report(&error));
                has_failed = true;
            }
        }
    }
    eprintln!("{} trusted.", counted(trusted.len() as u64, "machine"));
    let code = match has_failed {
        true if trusted.is_empty() => EXIT_FAILED,
        true => EXIT_PARTLY,
        false => EXIT_DONE,
    };
    let text = match format {
        Format::Table => trusted.iter().map(|hostname| format!("{hostname}\n")).collect(),
        Format::Json => json(&trusted),
    };
    Ok(Output { text, code })
}

/// The machines that are meant: the one of this name, or those that are in doubt of a pattern.
async fn meant(client: &Client, host: &str) -> Result<Vec<String>, ToolError> {
    if !is_pattern(host) {
        return Ok(vec![host.to_owned()]);
    }
    let request = ListSubsRequest { hosts: vec![host.to_owned()], ..ListSubsRequest::default() };
    let mut subs = call::<ListSubs>(client, &request).await?.subs;
    if subs.iter().any(|sub| sub.hostname == host) {
        return Ok(vec![host.to_owned()]);
    }
    let pattern = || host.to_owned();
    if subs.is_empty() {
        return Err(ToolError::Nobody { pattern: pattern() });
    }
    subs.retain(|sub| sub.status == Status::WrongMachine);
    if subs.is_empty() {
        return Err(ToolError::NoDoubt { pattern: pattern() });
    }
    Ok(subs.into_iter().map(|sub| sub.hostname).collect())
}
