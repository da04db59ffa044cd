//! Orders about machines: `explain`, `pause`, `resume`, `force-disruptive`, `fast-update` and
//! `set-default-image`.

use std::time::Duration;

use api::dominator::Status;
use api::dominator::explain::{Explain, ExplainRequest};
use api::dominator::orders::{
    FastUpdate, FastUpdateRequest, ForceDisruptiveUpdate, ForceDisruptiveUpdateRequest, PauseEnd,
    PauseUpdates, PauseUpdatesRequest, ResumeUpdates, ResumeUpdatesRequest, SetDefaultImage,
    SetDefaultImageRequest, WatchSub, WatchSubReply, WatchSubRequest,
};
use clap::{Args, Subcommand};
use daemon::{EXIT_DONE, EXIT_FAILED};
use model::image::ImageName;
use model::when::written;
use model::words::{counted, plain};
use rpc::client::Client;
use tokio::time::Instant;
use tool::{Format, Output, json};

use super::why::{NeededWhy, Why};
use super::{ToolError, call, done_as, who};
use api::dominator::text::explain;
use model::when::moment;
use system::clock::wall;

/// How long the dominator is asked to wait for news, in milliseconds.
const WATCH_WAIT_MS: u32 = 10_000;

/// How many machines an order names on standard error.
const NAMED: usize = 10;

/// The longest line of progress, in bytes.
const LINE_BYTES_MAX: usize = 300;

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Explain one machine: what it has, must have, waits for, and what you may do
    #[command(after_help = "Example: domtool explain web1")]
    Explain {
        /// Its name in the machine database
        #[arg(value_name = "HOST")]
        hostname: String,
    },
    /// Pause the updates of machines until a time, also over a restart of the dominator
    ///
    /// When this has returned, these machines are told to carry out no update any more until the
    /// time has come; an update that one had begun is finished. Objects are still fetched. The
    /// names of the machines are printed.
    #[command(after_help = "Examples:\n  \
        domtool pause web1 --until 2h --why 'database migration'\n  \
        domtool pause 'web*' db1 --until 18:30 --why 'release in progress'")]
    Pause {
        /// Names of machines, or patterns: `*` is anything, `?` one character
        #[arg(value_name = "HOST", required = true)]
        hosts: Vec<String>,
        /// Until when: 90s, 15m, 2h or 3d from now, or 18:30, 2030-01-31T18:30 or
        /// 2030-01-31T18:30:00Z
        #[arg(long, value_name = "TIME|DURATION", value_parser = end)]
        until: PauseEnd,
        /// Why: it is shown to everyone who looks
        #[arg(long, value_name = "TEXT", alias = "reason")]
        why: String,
    },
    /// Let updates of paused machines go on
    #[command(after_help = "Example: domtool resume 'web*'")]
    Resume {
        /// Names of machines, or patterns; those of them that are paused go on
        #[arg(value_name = "HOST", required = true)]
        hosts: Vec<String>,
        #[command(flatten)]
        why: Why,
    },
    /// Have the pending update of one machine made even if it does not want to be disturbed
    ///
    /// It holds for the plan that is pending now, and once. It passes no brake, no pause and no
    /// safety shutoff.
    ForceDisruptive {
        /// Its name in the machine database
        #[arg(value_name = "HOST")]
        hostname: String,
        #[command(flatten)]
        why: NeededWhy,
    },
    /// Bring one machine up to date now, and show how it goes
    ///
    /// The machine is scanned at once, what failed is tried again, and it goes before others. It
    /// passes no brake, no pause and no safety shutoff. Exits with 0 if the machine is synced, and
    /// with 1 if something keeps it from that or the time is over; nothing is undone then.
    #[command(after_help = "Example: domtool fast-update web1 --timeout 5m")]
    FastUpdate {
        /// Its name in the machine database
        #[arg(value_name = "HOST")]
        hostname: String,
        #[command(flatten)]
        why: Why,
        /// How long to watch: 90s, 15m or 2h
        #[arg(long, value_name = "DURATION", default_value = "15m",
              value_parser = written::duration)]
        timeout: Duration,
    },
    /// Give machines without a RequiredImage an image, also over a restart of the dominator
    ///
    /// Without --yes it is refused if it would give machines another image to become. Machines
    /// whose record says DisableUpdates are compared with it, and left as they are.
    #[command(after_help = "Examples:\n  \
        domtool set-default-image base/rescue-3 --yes\n  \
        domtool set-default-image --none")]
    SetDefaultImage(DefaultArgs),
}

#[derive(Debug, Args)]
#[group(skip)]
pub(super) struct DefaultArgs {
    /// The image
    #[arg(value_name = "NAME", required_unless_present = "none", conflicts_with = "none")]
    image: Option<ImageName>,
    /// Have no default: machines without a RequiredImage are left as they are
    #[arg(long)]
    none: bool,
    #[command(flatten)]
    why: Why,
    /// Do it, however many machines it gives another image
    #[arg(long)]
    yes: bool,
}

impl Command {
    /// True if it names machines.
    pub(super) fn is_about_machines(&self) -> bool {
        !matches!(self, Self::SetDefaultImage(_))
    }
}

fn end(text: &str) -> Result<PauseEnd, String> {
    if let Ok(lasting) = written::duration(text) {
        return Ok(PauseEnd::After(lasting.as_secs()));
    }
    let forms = |error| format!("{error}, or a duration such as 90s, 15m, 2h or 3d");
    written::time(text, &jiff::Zoned::now()).map(PauseEnd::At).map_err(forms)
}

pub(super) async fn run(
    client: &Client,
    format: Format,
    command: &Command,
) -> Result<Output, ToolError> {
    Ok(match command {
        Command::Explain { hostname } => {
            let request = ExplainRequest { hostname: hostname.clone() };
            let why = call::<Explain>(client, &request).await?;
            match format {
                Format::Table => explain::text(&why, wall()),
                Format::Json => json(&why),
            }
        }
        Command::Pause { hosts, until, why } => {
            let (hosts, reason) = (hosts.clone(), why.clone());
            let request = PauseUpdatesRequest { hosts, end: *until, reason, who: who() };
            let reply = call::<PauseUpdates>(client, &request).await?;
            let until = moment(reply.until);
            eprintln!(
                "Updates of {} are paused until {until}. One that had begun is finished.",
                machines(&reply.hostnames)
            );
            match format {
                Format::Table => lines(&reply.hostnames),
                Format::Json => json(&reply),
            }
        }
        Command::Resume { hosts, why } => {
            let (hosts, why) = (hosts.clone(), why.why.clone());
            let request = ResumeUpdatesRequest { hosts, who: who(), why };
            let reply = call::<ResumeUpdates>(client, &request).await?;
            eprintln!("Updates of {} go on.", machines(&reply.hostnames));
            match format {
                Format::Table => lines(&reply.hostnames),
                Format::Json => json(&reply),
            }
        }
        Command::ForceDisruptive { hostname, why } => {
            let (hostname, reason) = (hostname.clone(), why.why.clone());
            let request = ForceDisruptiveUpdateRequest { hostname, reason, who: who() };
            let done = call::<ForceDisruptiveUpdate>(client, &request).await?;
            eprintln!("The pending update of {} disturbs it if it has to.", request.hostname);
            done_as(format, &done)
        }
        Command::FastUpdate { hostname, why, timeout } => {
            let why = why.why.clone();
            let request = FastUpdateRequest { hostname: hostname.clone(), who: who(), why };
            call::<FastUpdate>(client, &request).await?;
            let reply = watch(client, hostname, *timeout).await?;
            let (status, detail) = (reply.status, &reply.detail);
            if status != Status::Synced {
                let late = if status.is_under_way() { " yet, and goes on" } else { "" };
                eprintln!("error: {hostname} is not synced{late}: it is {status}: {detail}");
                eprintln!("hint: domtool explain {hostname} says why, and what you may do");
            }
            let text = match format {
                Format::Table => format!("{hostname}: {status}: {detail}\n"),
                Format::Json => json(&reply),
            };
            let code = if status == Status::Synced { EXIT_DONE } else { EXIT_FAILED };
            return Ok(Output { text, code });
        }
        Command::SetDefaultImage(DefaultArgs { image, why, yes, none: _ }) => {
            let machines_max = if *yes { u32::MAX } else { 0 };
            let (image, why) = (image.clone(), why.why.clone());
            let request = SetDefaultImageRequest { image, machines_max, who: who(), why };
            let reply = call::<SetDefaultImage>(client, &request).await?;
            let machines = counted(reply.machines.into(), "machine");
            match &request.image {
                Some(image) => eprintln!(
                    "{image} is the image of machines without a RequiredImage: {machines} now."
                ),
                None => {
                    eprintln!("Machines without a RequiredImage are left alone: {machines} now.");
                }
            }
            match format {
                Format::Table => String::new(),
                Format::Json => json(&reply),
            }
        }
    }
    .into())
}

fn lines(hostnames: &[String]) -> String {
    hostnames.iter().map(|hostname| format!("{hostname}\n")).collect()
}

/// How many machines they are, and which if they are few.
fn machines(hostnames: &[String]) -> String {
    let count = counted(hostnames.len() as u64, "machine");
    if hostnames.len() > NAMED { count } else { format!("{count} ({})", hostnames.join(", ")) }
}

/// True if the machine does not answer, or not as it should.
fn is_away(status: Status) -> bool {
    matches!(status, Status::Connecting | Status::Unreachable | Status::PollFailed)
}

/// Tells each change until the machine is synced, waits for something else, or the time is over;
/// gives what it was told last.
async fn watch(
    client: &Client,
    hostname: &str,
    timeout: Duration,
) -> Result<WatchSubReply, ToolError> {
    let deadline = Instant::now() + timeout;
    let mut last: Option<WatchSubReply> = None;
    let mut was_away_told = false;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let wait_ms = u32::try_from(left.as_millis()).unwrap_or(u32::MAX).min(WATCH_WAIT_MS);
        let have = last.as_ref().map_or(0, |last| last.version);
        let request = WatchSubRequest { hostname: hostname.to_owned(), have, wait_ms };
        let reply = call::<WatchSub>(client, &request).await?;
        let is_shown = last
            .as_ref()
            .is_some_and(|last| (last.status, &last.detail) == (reply.status, &reply.detail));
        // What is told of the time before the scan is no end.
        let is_end = reply.is_current && !reply.status.is_under_way();
        if !is_shown && (is_end || reply.status.is_under_way()) {
            let line = format!("{} {}: {}", moment(wall()), reply.status, reply.detail);
            eprintln!("{}", plain(&line, LINE_BYTES_MAX));
        }
        if !was_away_told && is_away(reply.status) {
            was_away_told = true;
            eprintln!(
                "Nothing can be done before {hostname} answers. Waits for that, at most {} s; the \
                 order stays in force after that.",
                left.as_secs()
            );
        }
        if is_end || left.is_zero() {
            return Ok(reply);
        }
        last = Some(reply);
    }
}
