//! Orders that look before or after: `clear-safety-shutoff` asks for confirmation, `trust` and
//! `go-on` resolve patterns, `fast-update` watches the machine.

use std::collections::BTreeSet;
use std::io::{IsTerminal as _, Write as _};
use std::time::Duration;

use api::dominator::explain::{DifferenceSummary, Explain, ExplainRequest};
use api::dominator::orders::{
    FastUpdate, FastUpdateRequest, GoOn, GoOnRequest, Trust, TrustRequest, WatchSub, WatchSubReply,
    WatchSubRequest, is_pattern,
};
use api::dominator::{
    ClearSafetyShutoff, ClearSafetyShutoffRequest, ListSubs, ListSubsRequest, Status, TagFilter,
};
use clap::{Args, Subcommand};
use daemon::{EXIT_DONE, EXIT_FAILED, EXIT_PARTLY};
use model::display::{counted, error_chain, safe_text, utc};
use model::time_parse;
use rpc::client::{CallError, Client};
use system::clock::wall;
use tokio::time::Instant;
use tool::{Format, Output};

use super::orders::{OptionalWhy, OptionalWhyWord, RequiredWhy};
use super::{ToolError, call, silent, who};

/// How long the dominator may hold back its answer to wait for a change, in milliseconds.
const WATCH_WAIT_MS: u32 = 10_000;

/// Longest line about a machine on stderr, in bytes.
const LINE_BYTES_MAX: usize = 300;

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Allow the pending unsafe update of one machine
    ///
    /// Look at the plan first: domtool show-sub HOST. The command shows what makes the update
    /// dangerous and, on a terminal, asks for confirmation. If the plan changes, the new one is
    /// held back again.
    #[command(after_help = "Example: domtool clear-safety-shutoff web1 --why 'meant'")]
    ClearSafetyShutoff(ClearArguments),
    /// Confirm that the machine that answers for a name is the intended one
    ///
    /// For a machine with the status wrong-machine that was reinstalled and has a new machine id,
    /// or that shares its name or machine id with others on purpose. Look first: domtool show-sub
    /// HOST. If its machine id changes again, the machine is left alone again.
    #[command(after_help = "Examples:\n  \
        domtool trust web1 --why 'new disk, installed anew'\n  \
        domtool trust 'web*' --why 'all were copied from one template'")]
    Trust(TrustArguments),
    /// Install an image on machines without the paths that are blocked there
    ///
    /// For machines with the status blocked. Look first: domtool explain HOST. The rest of the
    /// image is installed, and the machine is then partly-synced. The order holds until the machine
    /// requires another image.
    #[command(after_help = "Examples:\n  \
        domtool go-on web1 --why 'works without the device'\n  \
        domtool go-on --tag tier=front --why 'tried on web1'")]
    GoOn(GoOnArguments),
    /// Update one machine at once and show the progress
    ///
    /// The machine is scanned at once, failures are retried, and it goes before other machines.
    /// The order does not override disable-updates, a pause or the safety shutoff. Exit code 0:
    /// the machine is synced. Exit code 1: something prevents that, or the time is over; the
    /// update then continues.
    #[command(after_help = "Example: domtool fast-update web1 --timeout 5m")]
    FastUpdate {
        /// Name of the machine in the machine database
        #[arg(value_name = "HOST")]
        hostname: String,
        #[command(flatten)]
        why: OptionalWhy,
        /// How long to watch: 90s, 15m or 2h
        #[arg(long, value_name = "DURATION", default_value = "15m",
              value_parser = time_parse::duration)]
        timeout: Duration,
    },
}

#[derive(Debug, Args)]
pub(super) struct ClearArguments {
    /// Name of the machine in the machine database
    #[arg(value_name = "HOST")]
    hostname: String,
    #[command(flatten)]
    why: OptionalWhyWord,
    /// Do not ask for confirmation
    #[arg(long)]
    yes: bool,
}

#[derive(Debug, Args)]
pub(super) struct TrustArguments {
    /// Name of the machine in the machine database, or a pattern that matches machines with the
    /// status wrong-machine
    #[arg(value_name = "HOST", required = true)]
    hosts: Vec<String>,
    #[command(flatten)]
    why: RequiredWhy,
}

#[derive(Debug, Args)]
pub(super) struct GoOnArguments {
    /// Name of the machine in the machine database, or a pattern that matches machines with the
    /// status blocked
    #[arg(value_name = "HOST", required_unless_present = "tags")]
    hosts: Vec<String>,
    /// All blocked machines with this tag; may be given several times
    #[arg(long = "tag", value_name = "NAME[=VALUE]")]
    tags: Vec<String>,
    #[command(flatten)]
    why: RequiredWhy,
}

pub(super) async fn run(
    client: &Client,
    format: Format,
    command: &Command,
) -> Result<Output, ToolError> {
    match command {
        Command::ClearSafetyShutoff(arguments) => {
            clear_safety_shutoff(client, format, arguments).await
        }
        Command::Trust(arguments) => trust(client, format, arguments).await,
        Command::GoOn(arguments) => go_on(client, format, arguments).await,
        Command::FastUpdate { hostname, why, timeout } => {
            fast_update(client, format, hostname, &why.why, *timeout).await
        }
    }
}

async fn clear_safety_shutoff(
    client: &Client,
    format: Format,
    arguments: &ClearArguments,
) -> Result<Output, ToolError> {
    let hostname = arguments.hostname.clone();
    let request = ExplainRequest { hostname: hostname.clone() };
    let differs = call::<Explain>(client, &request).await?.differs;
    if let Some(differs) = differs.filter(|differs| !differs.dangers.is_empty()) {
        for line in danger_lines(&hostname, &differs) {
            eprintln!("{}", safe_text(&line, LINE_BYTES_MAX));
        }
        // Without a terminal, nobody can answer.
        let can_ask = std::io::stdin().is_terminal() && std::io::stderr().is_terminal();
        if !arguments.yes
            && can_ask
            && !is_confirmed().map_err(|source| ToolError::Answer { source })?
        {
            return Err(ToolError::NotConfirmed { hostname });
        }
    }
    let why = arguments.why.text();
    let request = ClearSafetyShutoffRequest { hostname: hostname.clone(), who: who(), why };
    let done = call::<ClearSafetyShutoff>(client, &request).await?;
    eprintln!("The pending update of {hostname} is allowed.");
    Ok(silent(format, &done))
}

/// Describes what an update would change and why it is dangerous.
fn danger_lines(hostname: &str, differs: &DifferenceSummary) -> Vec<String> {
    let actions: Vec<String> =
        differs.actions.iter().map(|(name, count)| format!("{name} {count}")).collect();
    let paths = counted(differs.operations.into(), "path");
    let mut lines = vec![format!("{hostname}: {paths} would be changed: {}", actions.join(", "))];
    lines.extend(differs.dangers.iter().map(|danger| format!("DANGER: {danger}")));
    lines
}

fn is_confirmed() -> std::io::Result<bool> {
    eprint!("Allow this update? [y/N] ");
    std::io::stderr().flush()?;
    let mut answer = String::new();
    std::io::stdin().read_line(&mut answer)?;
    Ok(is_yes(&answer))
}

fn is_yes(answer: &str) -> bool {
    ["y", "yes"].contains(&answer.trim().to_ascii_lowercase().as_str())
}

async fn trust(
    client: &Client,
    format: Format,
    arguments: &TrustArguments,
) -> Result<Output, ToolError> {
    let mut hostnames = BTreeSet::new();
    for host in &arguments.hosts {
        hostnames.extend(machines_with(client, host, Status::WrongMachine).await?);
    }
    order_each(format, hostnames, "trusted", async |hostname| {
        let request = TrustRequest { hostname, why: arguments.why.why.clone(), who: who() };
        call::<Trust>(client, &request).await.map(|_| ())
    })
    .await
}

async fn go_on(
    client: &Client,
    format: Format,
    arguments: &GoOnArguments,
) -> Result<Output, ToolError> {
    let mut hostnames = BTreeSet::new();
    for host in &arguments.hosts {
        hostnames.extend(machines_with(client, host, Status::Blocked).await?);
    }
    for tag in &arguments.tags {
        let tags = vec![TagFilter::parse(tag)];
        let request = ListSubsRequest { tags, ..ListSubsRequest::default() };
        hostnames.extend(those_with(client, &request, tag, Status::Blocked).await?);
    }
    let done = "updated without the blocked paths";
    order_each(format, hostnames, done, async |hostname| {
        let request = GoOnRequest { hostname, why: arguments.why.why.clone(), who: who() };
        call::<GoOn>(client, &request).await.map(|_| ())
    })
    .await
}

/// Gives an order to each machine, and prints the names of those for which it succeeded.
async fn order_each(
    format: Format,
    hostnames: BTreeSet<String>,
    done: &str,
    order: impl AsyncFn(String) -> Result<(), CallError>,
) -> Result<Output, ToolError> {
    let is_single = hostnames.len() == 1;
    let (mut ordered, mut has_failed) = (Vec::new(), false);
    for hostname in hostnames {
        match order(hostname.clone()).await {
            Ok(()) => ordered.push(hostname),
            Err(error) if is_single => return Err(error.into()),
            Err(error) => {
                eprintln!("{}", error_chain(&error));
                has_failed = true;
            }
        }
    }
    eprintln!("{} {done}.", counted(ordered.len() as u64, "machine"));
    let code = match has_failed {
        true if ordered.is_empty() => EXIT_FAILED,
        true => EXIT_PARTLY,
        false => EXIT_DONE,
    };
    let lines = |names: &Vec<String>| names.iter().map(|name| format!("{name}\n")).collect();
    Ok(Output { text: format.render(&ordered, lines), code })
}

/// Resolves `host`: a name stands for itself, a pattern for its machines with this status.
async fn machines_with(
    client: &Client,
    host: &str,
    status: Status,
) -> Result<Vec<String>, ToolError> {
    if !is_pattern(host) {
        return Ok(vec![host.to_owned()]);
    }
    let request = ListSubsRequest { hosts: vec![host.to_owned()], ..ListSubsRequest::default() };
    those_with(client, &request, host, status).await
}

/// Returns the machines that match `text` and have this status.
async fn those_with(
    client: &Client,
    request: &ListSubsRequest,
    text: &str,
    status: Status,
) -> Result<Vec<String>, ToolError> {
    let mut subs = call::<ListSubs>(client, request).await?.subs;
    if subs.iter().any(|sub| sub.hostname == text) {
        return Ok(vec![text.to_owned()]);
    }
    let pattern = text.to_owned();
    if subs.is_empty() {
        return Err(ToolError::NoMatch { pattern });
    }
    subs.retain(|sub| sub.status == status);
    if subs.is_empty() {
        return Err(ToolError::NoneHas { pattern, status });
    }
    Ok(subs.into_iter().map(|sub| sub.hostname).collect())
}

async fn fast_update(
    client: &Client,
    format: Format,
    hostname: &str,
    why: &str,
    timeout: Duration,
) -> Result<Output, ToolError> {
    let (host, why) = (hostname.to_owned(), why.to_owned());
    call::<FastUpdate>(client, &FastUpdateRequest { hostname: host, who: who(), why }).await?;
    let reply = watch(client, hostname, timeout).await?;
    let (status, detail) = (reply.status, &reply.detail);
    let code = if status == Status::Synced { EXIT_DONE } else { EXIT_FAILED };
    if status != Status::Synced {
        let late = if status.is_under_way() { " yet, and goes on" } else { "" };
        eprintln!("error: {hostname} is not synced{late}: it is {status}: {detail}");
        eprintln!("hint: domtool explain {hostname} shows the cause and the possible orders");
    }
    let text = format.render(&reply, |_| format!("{hostname}: {status}: {detail}\n"));
    Ok(Output { text, code })
}

/// Returns true if the machine does not answer, or not properly.
fn is_away(status: Status) -> bool {
    matches!(status, Status::Connecting | Status::Unreachable | Status::PollFailed)
}

/// Prints each change of status until the machine is synced, waits for something else, or the time
/// is over; returns the last answer.
async fn watch(
    client: &Client,
    hostname: &str,
    timeout: Duration,
) -> Result<WatchSubReply, ToolError> {
    let deadline = Instant::now() + timeout;
    let mut last: Option<WatchSubReply> = None;
    let mut away_reported = false;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let wait_ms = u32::try_from(left.as_millis()).unwrap_or(u32::MAX).min(WATCH_WAIT_MS);
        let have = last.as_ref().map_or(0, |last| last.version);
        let request = WatchSubRequest { hostname: hostname.to_owned(), have, wait_ms };
        let reply = call::<WatchSub>(client, &request).await?;
        let is_shown = last
            .as_ref()
            .is_some_and(|last| (last.status, &last.detail) == (reply.status, &reply.detail));
        // A status from before the scan is not final.
        let is_end = reply.is_current && !reply.status.is_under_way();
        if !is_shown && (is_end || reply.status.is_under_way()) {
            let line = format!("{} {}: {}", utc(wall()), reply.status, reply.detail);
            eprintln!("{}", safe_text(&line, LINE_BYTES_MAX));
        }
        if !away_reported && is_away(reply.status) {
            away_reported = true;
            eprintln!(
                "{hostname} does not answer yet. Waiting for at most {} s; the order stays in \
                 force after that.",
                left.as_secs()
            );
        }
        if is_end || left.is_zero() {
            return Ok(reply);
        }
        last = Some(reply);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_yes_confirms() {
        for (answer, is) in
            [("y\n", true), ("YES\n", true), ("\n", false), ("", false), ("no\n", false)]
        {
            assert_eq!(is_yes(answer), is, "{answer:?}");
        }
    }
}
