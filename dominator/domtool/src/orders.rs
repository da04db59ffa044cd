//! Orders that are only sent: the brake, pauses, retries, forced updates, the default image.

use std::time::Duration;

use api::dominator::events::{AcceptClock, AcceptClockRequest};
use api::dominator::explain::{Explain, ExplainRequest};
use api::dominator::orders::{
    AcceptImage, AcceptImageRequest, ForceDisruptiveUpdate, ForceDisruptiveUpdateRequest, PauseEnd,
    PauseUpdates, PauseUpdatesRequest, ResumeImage, ResumeImageRequest, ResumeUpdates,
    ResumeUpdatesRequest, SetDefaultImage, SetDefaultImageRequest,
};
use api::dominator::{
    DisableUpdates, DisableUpdatesRequest, EnableUpdates, EnableUpdatesRequest, GetStatus, Retry,
    RetryRequest, text,
};
use clap::{Args, Subcommand};
use model::display::counted;
use model::display::utc;
use model::image::ImageName;
use model::time_parse;
use rpc::client::Client;
use system::clock::wall;
use tokio::time::Instant;
use tool::{Format, Output};

use super::{ToolError, call, lasting_orders, silent, who};

/// How long to wait until the dominator knows what the image server has.
const REMARK_TIME_MAX: Duration = Duration::from_secs(10);
const REMARK_PAUSE: Duration = Duration::from_millis(100);

/// Names at most this many machines of an order on stderr.
const NAMED: usize = 10;

// The structures with the reason of an order have no docstrings: clap would take them for the text
// of the command that has them.

#[derive(Debug, Args)]
pub(super) struct OptionalWhy {
    /// Reason for the order, recorded in the history
    #[arg(long, value_name = "TEXT", alias = "reason", default_value = "")]
    #[arg(hide_default_value = true)]
    pub(super) why: String,
}

#[derive(Debug, Args)]
pub(super) struct RequiredWhy {
    /// Reason for the order, recorded in the history
    #[arg(long, value_name = "TEXT", alias = "reason")]
    pub(super) why: String,
}

// Accepts the reason as the last word too.
#[derive(Debug, Args)]
pub(super) struct OptionalWhyWord {
    /// Reason: the same as --why
    #[arg(value_name = "WHY", conflicts_with = "why")]
    reason: Option<String>,
    /// Reason for the order, recorded in the history
    #[arg(long, value_name = "TEXT", alias = "reason")]
    why: Option<String>,
}

impl OptionalWhyWord {
    pub(super) fn text(&self) -> String {
        self.reason.as_ref().or(self.why.as_ref()).cloned().unwrap_or_default()
    }
}

#[derive(Debug, Args)]
pub(super) struct RequiredWhyWord {
    /// Reason: the same as --why
    #[arg(value_name = "WHY", required_unless_present = "why", conflicts_with = "why")]
    reason: Option<String>,
    /// Reason, shown to everyone who looks at the status
    #[arg(long, value_name = "TEXT", alias = "reason")]
    why: Option<String>,
}

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Stop all updates of all machines, also over a restart of the dominator
    ///
    /// When the command has returned, no update is started any more. Machines finish the updates
    /// that they have begun.
    #[command(
        override_usage = "domtool disable-updates [OPTIONS] <WHY>",
        after_help = "Example: domtool disable-updates 'migration until noon'"
    )]
    DisableUpdates(RequiredWhyWord),
    /// Allow updates again
    #[command(after_help = "Example: domtool enable-updates 'migration is done'")]
    EnableUpdates(OptionalWhyWord),
    /// Confirm that the clock of the dominator's machine is right although it jumped
    ///
    /// After a jump of the clock nothing of the history is removed for its age, because a wrong
    /// clock would make all of it too old.
    #[command(after_help = "Example: domtool accept-clock --why 'the battery was empty'")]
    AcceptClock(OptionalWhy),
    /// Retry at once what failed on one machine
    ///
    /// If an image failed its health check on the machine and was rolled back, it is offered again
    /// only after this command, also over a restart of the dominator. Triggers that failed are run
    /// again, and the signatures of the image are read anew.
    #[command(after_help = "Example: domtool retry web1 --why 'made room'")]
    Retry {
        /// Name of the machine in the machine database
        #[arg(value_name = "HOST")]
        hostname: String,
        #[command(flatten)]
        why: OptionalWhyWord,
    },
    /// Explain the state of one machine: its images, what it waits for, and possible orders
    #[command(after_help = "Example: domtool explain web1")]
    Explain {
        /// Name of the machine in the machine database
        #[arg(value_name = "HOST")]
        hostname: String,
    },
    /// Pause the updates of machines until a time, also over a restart of the dominator
    ///
    /// When the command has returned, the dominator sends no Commit to these machines until the
    /// time has come. Updates that have begun are finished, and objects are still fetched. The
    /// command prints the names of the machines.
    #[command(after_help = "Examples:\n  \
        domtool pause web1 --until 2h --why 'database migration'\n  \
        domtool pause 'web*' db1 --until 18:30 --why 'release in progress'")]
    Pause {
        /// Names of machines, or patterns: `*` matches any text, `?` one character
        #[arg(value_name = "HOST", required = true)]
        hosts: Vec<String>,
        /// End of the pause: 90s, 15m, 2h or 3d from now, or 18:30, 2030-01-31T18:30 or
        /// 2030-01-31T18:30:00Z
        #[arg(long, value_name = "TIME|DURATION", value_parser = pause_end)]
        until: PauseEnd,
        /// Reason, shown to everyone who looks at the status
        #[arg(long, value_name = "TEXT", alias = "reason")]
        why: String,
    },
    /// End the pause of machines
    #[command(after_help = "Example: domtool resume 'web*'")]
    Resume {
        /// Names of machines, or patterns that match paused machines
        #[arg(value_name = "HOST", required = true)]
        hosts: Vec<String>,
        #[command(flatten)]
        why: OptionalWhy,
    },
    /// Bring machines back to their former images, until their records require other ones
    ///
    /// The former image of a machine is the last one that it had beside the required one. The order
    /// changes nothing in the machine database. It holds over a restart of the dominator, and ends
    /// when another image is required of the machine: to make it permanent, set RequiredImage to
    /// the former image. It does not override disable-updates, a pause or the safety shutoff.
    /// Machines that require another image than that of --from are left out and named, and the
    /// command exits with 3. If the former image of one of the others is not known or was deleted,
    /// nothing is ordered.
    #[command(after_help = "Examples:\n  \
        domtool rollback --from web/8 web1 --why 'web/8 crashes'\n  \
        domtool rollback --from web/8 'web*' --why 'web/8 crashes'\n  \
        domtool rollback --end web1 --why 'web/8 was not the cause'")]
    Rollback {
        /// Names of machines, or patterns: `*` matches any text, `?` one character
        #[arg(value_name = "HOST", required = true)]
        hosts: Vec<String>,
        /// The image to go back from, which the machines require now
        #[arg(long, value_name = "IMAGE", required_unless_present = "end", conflicts_with = "end")]
        from: Option<ImageName>,
        /// End the rollback: the machines get the images that are required of them again
        #[arg(long)]
        end: bool,
        #[command(flatten)]
        why: OptionalWhy,
    },
    /// List the machines that operators have rolled back, and to which images
    ListRollbacks,
    /// List the machines that operators have paused, and until when
    ///
    /// The status is `paused` only of machines that differ from their images.
    ListPauses,
    /// Make the pending update of one machine even if the machine refuses to be disturbed
    ///
    /// The order holds once, for the plan that is pending now. It does not override
    /// disable-updates, a pause or the safety shutoff.
    ForceDisruptive {
        /// Name of the machine in the machine database
        #[arg(value_name = "HOST")]
        hostname: String,
        #[command(flatten)]
        why: RequiredWhy,
    },
    /// Set the image for machines without a RequiredImage, also over a restart of the dominator
    ///
    /// Without --yes the order is refused if it would change the required image of machines.
    /// Machines with DisableUpdates in their record are compared with the image but not updated.
    #[command(after_help = "Examples:\n  \
        domtool set-default-image base/rescue-3 --yes\n  \
        domtool set-default-image --none")]
    SetDefaultImage(DefaultImageArguments),
    /// Use an image although its content is not what it was: it is `image-changed`
    ///
    /// The image server was restored from an older backup, or is another one: it has another
    /// content under the name of an image that machines got before.
    #[command(after_help = "Example: domtool accept-image web/7 --why 'added again'")]
    AcceptImage {
        /// The changed image
        image: ImageName,
        #[command(flatten)]
        why: RequiredWhy,
    },
    /// Resume updates to an image that were stopped automatically, and reset its failure count
    #[command(after_help = "Example: domtool resume-image web/7 --why 'bad switch'")]
    ResumeImage {
        /// The stopped image
        image: ImageName,
        #[command(flatten)]
        why: RequiredWhy,
    },
}

#[derive(Debug, Args)]
#[group(skip)]
pub(super) struct DefaultImageArguments {
    /// Name of the image
    #[arg(value_name = "NAME", required_unless_present = "none", conflicts_with = "none")]
    image: Option<ImageName>,
    /// Remove the default: machines without a RequiredImage are left as they are
    #[arg(long)]
    none: bool,
    #[command(flatten)]
    why: OptionalWhy,
    /// Set it even if that changes the required image of machines
    #[arg(long)]
    yes: bool,
}

impl Command {
    /// Returns true if the command names machines.
    pub(super) fn is_about_machines(&self) -> bool {
        matches!(
            self,
            Self::Retry { .. }
                | Self::Explain { .. }
                | Self::Pause { .. }
                | Self::Resume { .. }
                | Self::Rollback { .. }
                | Self::ForceDisruptive { .. }
        )
    }
}

pub(super) fn pause_end(text: &str) -> Result<PauseEnd, String> {
    if let Ok(duration) = time_parse::duration(text) {
        let duration: Duration = duration;
        return Ok(PauseEnd::After(duration.as_secs()));
    }
    let with_durations = |error| format!("{error}, or a duration such as 90s, 15m, 2h or 3d");
    time_parse::time(text, &jiff::Zoned::now()).map(PauseEnd::At).map_err(with_durations)
}

pub(super) async fn run(
    client: &Client,
    format: Format,
    command: &Command,
) -> Result<Output, ToolError> {
    match command {
        Command::DisableUpdates(why) => {
            let reason = why.reason.as_ref().or(why.why.as_ref()).cloned().unwrap_or_default();
            let request = DisableUpdatesRequest { reason, who: who() };
            let done = call::<DisableUpdates>(client, &request).await?;
            eprintln!("Updates are disabled. Machines finish the updates that they have begun.");
            Ok(silent(format, &done))
        }
        Command::AcceptClock(OptionalWhy { why }) => accept_clock(client, format, why).await,
        Command::EnableUpdates(why) => {
            let request = EnableUpdatesRequest { who: who(), why: why.text() };
            let done = call::<EnableUpdates>(client, &request).await?;
            eprintln!("Updates are enabled.");
            Ok(silent(format, &done))
        }
        Command::Retry { hostname, why } => {
            let why = why.text();
            let request = RetryRequest { hostname: hostname.clone(), who: who(), why };
            let done = call::<Retry>(client, &request).await?;
            eprintln!("{hostname} retries what failed.");
            Ok(silent(format, &done))
        }
        Command::Explain { hostname } => {
            let request = ExplainRequest { hostname: hostname.clone() };
            let reply = call::<Explain>(client, &request).await?;
            Ok(format.render(&reply, |reply| text::explanation_text(reply, wall())).into())
        }
        Command::Pause { hosts, until, why } => pause(client, format, hosts, *until, why).await,
        Command::Resume { hosts, why } => {
            let (hosts, why) = (hosts.clone(), why.why.clone());
            let request = ResumeUpdatesRequest { hosts, who: who(), why };
            let reply = call::<ResumeUpdates>(client, &request).await?;
            eprintln!("Updates of {} are no longer paused.", count_and_names(&reply.hostnames));
            Ok(format.render(&reply, |reply| lines(&reply.hostnames)).into())
        }
        Command::Rollback { hosts, from, end: _, why } => {
            lasting_orders::rollback(client, format, hosts, from.as_ref(), &why.why).await
        }
        Command::ListRollbacks => lasting_orders::list_rollbacks(client, format).await,
        Command::ListPauses => lasting_orders::list_pauses(client, format).await,
        Command::ForceDisruptive { hostname, why } => {
            let (hostname, reason) = (hostname.clone(), why.why.clone());
            let request = ForceDisruptiveUpdateRequest { hostname, reason, who: who() };
            let done = call::<ForceDisruptiveUpdate>(client, &request).await?;
            eprintln!("The pending update of {} may disturb the machine.", request.hostname);
            Ok(silent(format, &done))
        }
        Command::SetDefaultImage(arguments) => set_default_image(client, format, arguments).await,
        Command::AcceptImage { image, why } => accept_image(client, format, image, &why.why).await,
        Command::ResumeImage { image, why } => {
            let (image, why) = (image.clone(), why.why.clone());
            let request = ResumeImageRequest { image, why, who: who() };
            let done = call::<ResumeImage>(client, &request).await?;
            eprintln!(
                "Updates to {} are resumed and its failures are counted from 0. A machine whose \
                 health check failed keeps its former image until: domtool retry HOST",
                request.image
            );
            Ok(silent(format, &done))
        }
    }
}

async fn accept_clock(client: &Client, format: Format, why: &str) -> Result<Output, ToolError> {
    let request = AcceptClockRequest { who: who(), why: why.to_owned() };
    let reply = call::<AcceptClock>(client, &request).await?;
    let (now, seconds) = (utc(reply.now), reply.jumped_seconds);
    eprintln!("The dominator's clock shows {now}; it had jumped by {seconds} s.");
    Ok(silent(format, &reply))
}

async fn accept_image(
    client: &Client,
    format: Format,
    image: &ImageName,
    why: &str,
) -> Result<Output, ToolError> {
    let request = AcceptImageRequest { image: image.clone(), why: why.to_owned(), who: who() };
    let done = call::<AcceptImage>(client, &request).await?;
    eprintln!("Machines get the present content of {image}.");
    Ok(silent(format, &done))
}

async fn pause(
    client: &Client,
    format: Format,
    hosts: &[String],
    until: PauseEnd,
    why: &str,
) -> Result<Output, ToolError> {
    let (hosts, reason) = (hosts.to_owned(), why.to_owned());
    let request = PauseUpdatesRequest { hosts, end: until, reason, who: who() };
    let reply = call::<PauseUpdates>(client, &request).await?;
    eprintln!(
        "Updates of {} are paused until {}. Updates that have begun are finished.",
        count_and_names(&reply.hostnames),
        utc(reply.until)
    );
    Ok(format.render(&reply, |reply| lines(&reply.hostnames)).into())
}

async fn set_default_image(
    client: &Client,
    format: Format,
    arguments: &DefaultImageArguments,
) -> Result<Output, ToolError> {
    let machines_max = if arguments.yes { u32::MAX } else { 0 };
    let (image, why) = (arguments.image.clone(), arguments.why.why.clone());
    let request = SetDefaultImageRequest { image, machines_max, who: who(), why };
    let reply = call::<SetDefaultImage>(client, &request).await?;
    let machines = counted(reply.machines.into(), "machine");
    match &request.image {
        Some(image) => {
            eprintln!("{image} is the image of machines without a RequiredImage: {machines} now.");
            // The order has taken effect, whatever becomes of the question.
            if let Ok(Some(remark)) = remark_on(client, image).await {
                eprintln!("warning: {remark}");
            }
        }
        None => eprintln!("Machines without a RequiredImage are left as they are: {machines} now."),
    }
    Ok(silent(format, &reply))
}

/// Returns what is wrong with a required image, once the dominator knows it.
async fn remark_on(client: &Client, image: &ImageName) -> Result<Option<String>, ToolError> {
    let begin = format!("{image}, for ");
    let deadline = Instant::now() + REMARK_TIME_MAX;
    loop {
        let remarks = call::<GetStatus>(client, &()).await?.image_remarks;
        let remark = remarks.into_iter().find(|remark| remark.starts_with(&begin));
        // At first the image server is still asked.
        let is_final = remark.as_ref().is_none_or(|remark| !remark.contains(": asking the "));
        if is_final || Instant::now() >= deadline {
            return Ok(remark);
        }
        tokio::time::sleep(REMARK_PAUSE).await;
    }
}

fn lines(hostnames: &[String]) -> String {
    hostnames.iter().map(|hostname| format!("{hostname}\n")).collect()
}

/// Returns the number of machines, with their names if they are few.
pub(super) fn count_and_names(hostnames: &[String]) -> String {
    let count = counted(hostnames.len() as u64, "machine");
    if hostnames.len() > NAMED { count } else { format!("{count} ({})", hostnames.join(", ")) }
}
