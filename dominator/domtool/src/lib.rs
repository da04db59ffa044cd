//! `domtool`: what operators ask of the dominator, on the command line.

mod audit;
pub mod budgets;
mod cert;
mod events;
mod machine_database;
mod orders;
mod plan;
mod safety;
mod settings;
mod trust;
mod why;

use std::process::ExitCode;
use std::time::Duration;

use api::dominator::text::facts;
use api::dominator::{
    DisableUpdates, DisableUpdatesRequest, DominatorStatus, EnableUpdates, EnableUpdatesRequest,
    GetStatus, ListSubs, ListSubsRequest, Retry, RetryRequest, ShowSub, ShowSubRequest, Status,
    SubDetail, SubSummary, TagFilter,
};
use api::fault::FaultCode;
use api::method::Method;
use clap::{Parser, Subcommand};
use comfy_table::{Table, presets};
use daemon::{DOMINATOR_PORT, EXIT_FAILED, EXIT_MISUSE, SecurityArgs, exit};
use model::report::report;
use model::words::counted;
use rpc::client::{CallError, Client, Peer};
use tool::documents::{self, Documents};
use tool::{Format, Output, json};

use daemon::mdb_file::FileError;
use model::when::{ago, moment};
use system::clock::wall;

/// How long the dominator may take to answer.
const LIMIT: Duration = Duration::from_secs(30);

/// The heading of the flags that all commands have, below those of each.
const COMMON: &str = "Options of all commands";

/// Asks the dominator what the machines are doing, and gives it orders.
#[derive(Debug, Parser)]
#[command(
    name = "domtool",
    version,
    after_help = "Examples:\n  \
        domtool list-subs\n  \
        domtool list-subs --status blocked --status unsafe-update\n  \
        domtool show-sub web1\n  \
        domtool disable-updates \"database migration until noon\"\n\n\
        Defaults for --dominator, --tls and others may stand in\n\
        ~/.config/dominator/config.toml.\n\n\
        Exit codes: 0 done (compared: same), 1 failed, 2 misuse,\n\
        3 partly done (compared: different).\n\
        The statuses are explained in docs/OPERATING.md."
)]
pub struct Arguments {
    /// Dominator to ask, as HOST or HOST:PORT
    #[arg(
        long,
        value_name = "ADDR",
        env = "DOMINATOR_ADDR",
        default_value = "localhost:6970",
        global = true,
        help_heading = COMMON
    )]
    dominator: String,

    /// How to print data
    #[arg(long, value_enum, default_value_t = Format::Table, global = true, help_heading = COMMON)]
    format: Format,

    #[command(flatten)]
    security: SecurityArgs,

    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// List the machines and what each is doing
    #[command(after_help = "Examples:\n  \
        domtool list-subs --status synced --format json\n  \
        domtool list-subs 'web*' --location nyc --tag tier=front")]
    ListSubs {
        /// Only machines with such a name: `*` is anything, `?` one character
        #[arg(value_name = "HOST")]
        hosts: Vec<String>,
        /// Only machines with this status; may be given several times
        #[arg(long, value_name = "STATUS", value_parser = status_of)]
        status: Vec<Status>,
        /// Only machines that must have this image, or one below it; may be given several times
        #[arg(long, value_name = "IMAGE")]
        image: Vec<String>,
        /// Only machines at this location, or below it; may be given several times
        #[arg(long, value_name = "LOCATION")]
        location: Vec<String>,
        /// Only machines with this tag; with all of them, if it is given several times
        #[arg(long, value_name = "NAME[=VALUE]")]
        tag: Vec<String>,
    },
    /// Show all that is known of one machine
    ShowSub {
        /// Its name in the machine database
        #[arg(value_name = "HOST")]
        hostname: String,
    },
    /// Stop all updates of all machines, also after a restart of the dominator
    ///
    /// When this has returned, no update is started any more. Updates that machines have begun
    /// are finished by them.
    #[command(
        override_usage = "domtool disable-updates [OPTIONS] <WHY>",
        after_help = "Example: domtool disable-updates 'migration until noon'"
    )]
    DisableUpdates(why::NeededWhyAsWord),
    /// Let updates go on
    #[command(after_help = "Example: domtool enable-updates 'migration is done'")]
    EnableUpdates(why::WhyAsWord),
    /// Let the pending unsafe update of one machine pass
    ///
    /// Look at the plan first: domtool show-sub HOST. What makes it dangerous is shown, and on a
    /// terminal you are asked before it may pass. Another plan than the pending one is held back
    /// again.
    #[command(after_help = "Example: domtool clear-safety-shutoff web1 --why 'meant'")]
    ClearSafetyShutoff(safety::Clear),
    /// Try again now what is held back on one machine because it failed
    ///
    /// An image whose health check failed there, and that was put back, is offered once more;
    /// without this it is offered no more, also after a restart of the dominator.
    #[command(after_help = "Example: domtool retry web1 --why 'made room'")]
    Retry {
        /// Its name in the machine database
        #[arg(value_name = "HOST")]
        hostname: String,
        #[command(flatten)]
        why: why::WhyAsWord,
    },
    /// Say that what answers for a machine is the one that is meant
    ///
    /// For a machine that is wrong-machine because it was installed anew, with another machine id,
    /// or because it shares its name or machine id with others for a reason. Look first, with
    /// domtool show-sub HOST. One that has another machine id later is left alone again.
    #[command(after_help = "Examples:\n  \
        domtool trust web1 --why 'new disk, installed anew'\n  \
        domtool trust 'web*' --why 'all were copied from one template'")]
    Trust(trust::Arguments),
    #[command(flatten)]
    Order(orders::Command),
    /// List the images to which updates have stopped by themselves, because they failed too often
    ListStopped,
    /// Let updates to an image go on that have stopped by themselves, and count failures anew
    #[command(after_help = "Example: domtool resume-image web/7 --why 'bad switch'")]
    ResumeImage(budgets::Resume),
    /// Look at the machine database, and accept one that is held
    Mdb {
        #[command(subcommand)]
        command: machine_database::Command,
    },
    /// Show what happened to machines and what was ordered, the newest last
    ///
    /// Every change of a path that was ordered is on record with its reason: drift (the machine had
    /// left its image), image (it got another one), or computed (content made for it).
    #[command(after_help = "Examples:\n  \
        domtool events --path /etc/passwd --reason drift --since 1d\n  \
        domtool events --host 'web*' --kind update --kind order\n  \
        domtool events --path '/etc/**' --image web --limit 0 --format json\n  \
        domtool events --host web1 --follow")]
    Events(events::EventsArguments),
    /// Show what operators ordered, the newest last; or look at the audit log of any daemon
    ///
    /// Without a command, this asks the dominator for the orders in its history. The audit log of
    /// each daemon has every call that changed something, refused ones too; `show` and `verify`
    /// read its files, and need no daemon.
    #[command(after_help = "Examples:\n  \
        domtool audit --host web1 --since 7d\n  \
        domtool audit --follow\n  \
        domtool audit show /var/lib/imageserver/audit/audit.log --since 2d --user alice\n  \
        domtool audit verify /var/lib/dominator/audit/audit.log")]
    Audit(events::AuditArguments),
    /// Write a copy of the dominator's database to a file, while it runs
    ///
    /// Orders and updates wait while it is copied. To restore it, stop the dominator, and put the
    /// file as dominator.redb into its state directory, for its user: install -o dominator -g
    /// dominator -m 600. It then starts with updates disabled, and all is of the time of the copy.
    #[command(after_help = "Example: domtool backup /var/backups/dominator-2030-01-31")]
    Backup {
        /// Where to write it; nothing may be there
        file: std::path::PathBuf,
    },
    /// Say what would be done to a machine, or under a whole machine database; nothing is done
    ///
    /// Nothing is written anywhere, and no machine is told anything. Exits with 0 if nothing would
    /// change, and with 3 if something would, or, with --mdb, if that is not known of a machine. If
    /// it is not known of HOST, that is an error, and exits with 1.
    #[command(after_help = "Examples:\n  \
        domtool plan web1\n  \
        domtool plan web1 --image web/7\n  \
        domtool plan --mdb fleet.json --verbose")]
    Plan(plan::Command),
    /// Say how much subs may take of their machines: for the fleet, for a tag, or for a machine
    ///
    /// The value for a host counts before those for its tags, and these before the one for the
    /// fleet. Of several tags of a machine, the one whose name comes first in the alphabet counts,
    /// and of one name NAME=VALUE before NAME. The machine's own configuration is a ceiling: a
    /// higher value changes nothing there.
    #[command(after_help = "Examples:\n  \
        domtool set-config --fleet network-percent=5 --why \"slow links\"\n  \
        domtool set-config --tag tier=front cpu-percent=2 --why \"busy by day\"\n  \
        domtool set-config --host web1 --unset cpu-percent --why \"as the others\"")]
    SetConfig(settings::Set),
    /// Show how much subs may take of their machines, and where each value comes from
    GetConfig(settings::Get),
    /// Show how the dominator itself is doing
    Status,
    /// Make, show and revoke certificates; needs neither a dominator nor a certificate
    Cert {
        #[command(subcommand)]
        command: cert::Command,
    },
    #[command(flatten)]
    Documents(Documents),
}

impl Command {
    /// True if it names machines.
    fn is_about_machines(&self) -> bool {
        match self {
            Self::ShowSub { .. }
            | Self::ClearSafetyShutoff(_)
            | Self::Retry { .. }
            | Self::Trust(_)
            | Self::SetConfig(_)
            | Self::GetConfig(_) => true,
            Self::Order(command) => command.is_about_machines(),
            Self::Plan(command) => command.is_about_one(),
            Self::ListSubs { .. }
            | Self::DisableUpdates(_)
            | Self::EnableUpdates(_)
            | Self::ListStopped
            | Self::ResumeImage(_)
            | Self::Mdb { .. }
            | Self::Events(_)
            | Self::Audit(_)
            | Self::Backup { .. }
            | Self::Documents(_)
            | Self::Cert { .. }
            | Self::Status => false,
        }
    }
}

fn status_of(text: &str) -> Result<Status, String> {
    Status::ALL.into_iter().find(|status| status.name() == text).ok_or_else(|| {
        let names: Vec<&str> = Status::ALL.iter().map(|status| status.name()).collect();
        format!("the statuses are {}", names.join(", "))
    })
}

/// Runs the tool.
pub async fn run(arguments: Arguments) -> ExitCode {
    if let Command::Documents(documents) = &arguments.command {
        return documents::run::<Arguments>(documents);
    }
    if let Command::Cert { command } = &arguments.command {
        return match cert::run(arguments.format, command).await {
            Ok(output) => output.print(),
            Err(error) => exit(EXIT_FAILED, &report(&error), error.hints()),
        };
    }
    if let Command::Audit(events::AuditArguments { log: Some(command), .. }) = &arguments.command {
        return audit::run(command, arguments.format);
    }
    let security = match arguments.security.of_tool("domtool") {
        Ok(security) => security,
        Err(error) => return error.exit(),
    };
    let peer = match Peer::parse(&arguments.dominator, DOMINATOR_PORT) {
        Ok(peer) => peer,
        Err(error) => {
            let hint = "say where the dominator is: --dominator HOST:PORT, or DOMINATOR_ADDR";
            return exit(EXIT_MISUSE, &report(&error), &[hint]);
        }
    };
    match ask(&Client::new(peer, &security), &arguments).await {
        Ok(output) => output.print(),
        Err(error) => exit(EXIT_FAILED, &report(&error), error.hints(&arguments.command)),
    }
}

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
enum ToolError {
    #[error(transparent)]
    Call(#[from] CallError),
    #[error(transparent)]
    File(#[from] FileError),
    #[error("the dominator gives a machine database that is held, and does not say which it is")]
    NoNotice,
    #[error("cannot write the backup {}", path.display())]
    Backup {
        path: std::path::PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("the backup did not arrive as it was made: try again")]
    OtherCopy,
    #[error("the dominator plans for none of the machines that it is asked about")]
    NoProgress,
    #[error("no machine of the machine database is called {pattern}")]
    Nobody { pattern: String },
    #[error("none of the machines that are called {pattern} is in doubt")]
    NoDoubt { pattern: String },
    #[error("cannot read the answer")]
    Answer {
        #[source]
        source: std::io::Error,
    },
    #[error("cannot write to stdout")]
    Print {
        #[source]
        source: std::io::Error,
    },
    #[error("nothing was done: the update of {hostname} is still held back")]
    NotConfirmed { hostname: String },
}

impl ToolError {
    fn hints(&self, command: &Command) -> &'static [&'static str] {
        match self {
            Self::Call(CallError::Connect { .. }) => {
                &["is the dominator running? say where: --dominator HOST:PORT"]
            }
            Self::Call(error)
                if error.code() == Some(FaultCode::NotFound) && command.is_about_machines() =>
            {
                &["domtool list-subs shows the machines and what they wait for"]
            }
            Self::Call(error)
                if error.code() == Some(FaultCode::NotFound)
                    && matches!(command, Command::Mdb { .. }) =>
            {
                &["domtool mdb diff FILE compares a file with the machine database in force"]
            }
            Self::Call(_)
            | Self::File(_)
            | Self::NoNotice
            | Self::Backup { .. }
            | Self::OtherCopy
            | Self::NoProgress
            | Self::Answer { .. }
            | Self::NotConfirmed { .. }
            | Self::Print { .. } => &[],
            Self::Nobody { .. } | Self::NoDoubt { .. } => {
                &["domtool list-subs --status wrong-machine shows the machines in doubt"]
            }
        }
    }
}

async fn call<M: Method>(client: &Client, request: &M::Request) -> Result<M::Reply, CallError> {
    client.call_within::<M>(request, LIMIT).await
}

async fn ask(client: &Client, arguments: &Arguments) -> Result<Output, ToolError> {
    let format = arguments.format;
    let text = match &arguments.command {
        Command::ListStopped => return budgets::list_stopped(client, format).await,
        Command::ResumeImage(order) => return budgets::resume(client, format, order).await,
        Command::Mdb { command } => return machine_database::run(client, format, command).await,
        Command::Events(arguments) => return events::list(client, format, arguments).await,
        Command::Audit(arguments) => return events::audit(client, format, arguments).await,
        Command::Backup { file } => {
            events::backup(client, file).await?;
            String::new()
        }
        Command::Documents(_) | Command::Cert { .. } => {
            unreachable!("they are done before the dominator is asked")
        }
        Command::Trust(order) => return trust::run(client, format, order).await,
        Command::Order(command) => return orders::run(client, format, command).await,
        Command::Plan(command) => return plan::run(client, format, command).await,
        Command::SetConfig(set) => return Ok(settings::set(client, format, set).await?),
        Command::GetConfig(get) => return Ok(settings::get(client, format, get).await?),
        Command::ListSubs { hosts, status, image, location, tag } => {
            let request = ListSubsRequest {
                statuses: status.clone(),
                hosts: hosts.clone(),
                images: image.clone(),
                locations: location.clone(),
                tags: tag.iter().map(|tag| TagFilter::parse(tag)).collect(),
            };
            let reply = call::<ListSubs>(client, &request).await?;
            match format {
                Format::Table => table_of_subs(&reply.subs),
                Format::Json => json(&reply.subs),
            }
        }
        Command::ShowSub { hostname } => {
            let request = ShowSubRequest { hostname: hostname.clone() };
            let detail = call::<ShowSub>(client, &request).await?;
            match format {
                Format::Table => text_of_sub(&detail),
                Format::Json => json(&detail),
            }
        }
        Command::Status => {
            let status = call::<GetStatus>(client, &()).await?;
            match format {
                Format::Table => text_of_status(&status),
                Format::Json => json(&status),
            }
        }
        Command::DisableUpdates(why) => {
            let request = DisableUpdatesRequest { reason: why.text(), who: who() };
            let done = call::<DisableUpdates>(client, &request).await?;
            eprintln!("Updates are disabled. Machines that had begun one finish it.");
            done_as(format, &done)
        }
        Command::EnableUpdates(why) => {
            let request = EnableUpdatesRequest { who: who(), why: why.text() };
            let done = call::<EnableUpdates>(client, &request).await?;
            eprintln!("Updates go on.");
            done_as(format, &done)
        }
        Command::ClearSafetyShutoff(order) => return safety::clear(client, format, order).await,
        Command::Retry { hostname, why } => {
            let why = why.text();
            let request = RetryRequest { hostname: hostname.clone(), who: who(), why };
            let done = call::<Retry>(client, &request).await?;
            eprintln!("What failed on {hostname} is tried again.");
            done_as(format, &done)
        }
    };
    Ok(text.into())
}

/// Who says so, as long as no certificate tells.
fn who() -> String {
    let user = ["SUDO_USER", "USER", "LOGNAME"].iter().find_map(|name| std::env::var(name).ok());
    let host = nix::unistd::gethostname().ok().and_then(|name| name.into_string().ok());
    match (user, host) {
        (Some(user), Some(host)) => format!("{user}@{host}"),
        (Some(user), None) => user,
        (None, Some(host)) => format!("uid {}@{host}", nix::unistd::getuid()),
        (None, None) => format!("uid {}", nix::unistd::getuid()),
    }
}

fn done_as(format: Format, done: &api::Done) -> String {
    match format {
        Format::Table => String::new(),
        Format::Json => json(done),
    }
}

fn columns(head: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    if !head.is_empty() {
        table.set_header(head);
    }
    table
}

fn table_of_subs(subs: &[SubSummary]) -> String {
    let now = wall();
    let mut table =
        columns(&["HOST", "STATUS", "SINCE", "REQUIRED", "LAST UPDATE", "ALARMS", "DETAIL"]);
    for sub in subs {
        table.add_row([
            sub.hostname.clone(),
            sub.status.to_string(),
            ago(now, sub.since),
            sub.required_image.clone(),
            sub.last_image.clone(),
            if sub.alarms == 0 { String::new() } else { sub.alarms.to_string() },
            sub.detail.clone(),
        ]);
    }
    format!("{}\n", table.trim_fmt())
}

fn text_of_sub(detail: &SubDetail) -> String {
    let summary = &detail.summary;
    let mut text = format!("{}: {}: {}\n\n", summary.hostname, summary.status, summary.detail);
    let mut table = columns(&[]);
    for (name, value) in facts::of(detail, wall()) {
        table.add_row([name.to_owned(), value]);
    }
    text.push_str(&format!("{}\n", table.trim_fmt()));
    if !detail.plan.is_empty() {
        text.push_str(&format!("\nplan, {} operations:\n", detail.plan_operations));
        for line in &detail.plan {
            text.push_str(&format!("  {line}\n"));
        }
    }
    text.push_str("\nhistory, the newest first:\n");
    for (when, status, detail) in &detail.history {
        text.push_str(&format!("  {} {status}: {detail}\n", moment(*when)));
    }
    text
}

fn text_of_status(status: &DominatorStatus) -> String {
    let mut text = match &status.brake {
        None => "updates: enabled\n".to_owned(),
        Some(brake) => format!(
            "updates: DISABLED since {} by {}: {}\n",
            moment(brake.since),
            brake.who,
            brake.reason
        ),
    };
    match (&status.mdb_error, status.mdb_read) {
        (None, Some(read)) => text.push_str(&format!("machine database: read {}\n", moment(read))),
        (None, None) => text.push_str("machine database: not read yet\n"),
        (Some(error), _) => text.push_str(&format!("machine database: NOT TAKEN: {error}\n")),
    }
    if let Some(error) = &status.mdb_unkept {
        text.push_str(&format!("machine database: NOT KEPT over a restart: {error}\n"));
    }
    if let Some(held) = &status.mdb_held {
        text.push_str(&format!(
            "machine database: mdb-held since {}: {}; look at it: domtool mdb diff\n",
            moment(held.since),
            held.why
        ));
    }
    for remark in &status.image_remarks {
        text.push_str(&format!("image: {remark}\n"));
    }
    match &status.image_server_error {
        None => text.push_str("image server: no trouble\n"),
        Some(error) => text.push_str(&format!("image server: {error}\n")),
    }
    if let Some(error) = &status.alarm_error {
        text.push_str(&format!("alarms: nobody is told: {error}\n"));
    }
    if let Some(error) = &status.history_error {
        text.push_str(&format!(
            "history: NOT WRITTEN, and no update is ordered until it can be: {error}\n"
        ));
    }
    if status.paused > 0 {
        let paused = counted(status.paused.into(), "machine");
        text.push_str(&format!("paused: {paused} by operators\n"));
    }
    if let Some(default) = &status.default_image {
        text.push_str(&format!(
            "default image: {}, set {} by {}\n",
            default.image,
            moment(default.since),
            default.who
        ));
    }
    for line in budgets::lines(&status.budgets) {
        text.push_str(&line);
        text.push('\n');
    }
    text.push_str(&format!("directories in memory: {}\n", status.directories));
    for (status, count) in &status.counts {
        text.push_str(&format!("{count:>7} {status}\n"));
    }
    text
}

/// Runs the program, with the arguments of this process.
#[must_use]
pub fn main() -> ExitCode {
    let arguments: Arguments = daemon::config::parse_tool();
    match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime.block_on(run(arguments)),
        Err(error) => exit(EXIT_FAILED, &format!("cannot start: {error}"), &[]),
    }
}
