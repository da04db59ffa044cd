//! `domtool`: the command line of the dominator.

mod audit;
mod backup;
mod cert;
mod content;
mod cron;
mod database;
mod departing;
mod environments;
mod events;
mod fleet_tasks;
mod freezes;
mod input_file;
mod lasting_orders;
mod machine_database;
mod machine_orders;
mod methods;
mod orders;
mod permits;
mod plan;
mod resource;
mod rollout;
mod rollout_orders;
mod settings;
mod status;
mod task;
mod wall_clock;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use api::dominator::Status;
use api::dominator::content::ContentChangeId;
use api::fault::FaultCode;
use api::method::Method;
use clap::{Parser, Subcommand};
use comfy_table::{Table, presets};
use daemon::mdb_file::MdbFileError;
use daemon::{DOMINATOR_PORT, EXIT_FAILED, EXIT_MISUSE, SecurityArgs, exit};
use model::display::error_chain;
use rollouts::document::Choice;
use rpc::client::{CallError, Client, Peer};
use tool::documents::{self, Documents};
use tool::{Format, Output, PlacedError};

/// Time limit for an answer of the dominator.
const LIMIT: Duration = Duration::from_secs(30);

/// Heading of the flags that all commands share.
const COMMON: &str = "Options of all commands";

/// Queries the dominator and gives it orders.
#[derive(Debug, Parser)]
#[command(
    name = "domtool",
    version,
    after_help = "Examples:\n  \
        domtool list-subs\n  \
        domtool list-subs --status blocked --status unsafe-update\n  \
        domtool show-sub web1\n  \
        domtool disable-updates \"database migration until noon\"\n\n\
        Defaults for --dominator, --tls and other flags can be set in\n\
        ~/.config/dominator/config.toml.\n\n\
        Exit codes: 0 done (compared: same), 1 failed, 2 misuse,\n\
        3 partly done (compared: different).\n\
        docs/OPERATING.md explains the statuses."
)]
pub struct Arguments {
    /// Address of the dominator, HOST or HOST:PORT
    #[arg(
        long,
        value_name = "ADDR",
        env = "DOMINATOR_ADDR",
        default_value = "localhost:6970",
        global = true,
        help_heading = COMMON
    )]
    dominator: String,

    /// Output format
    #[arg(long, value_enum, default_value_t = Format::Table, global = true, help_heading = COMMON)]
    format: Format,

    #[command(flatten)]
    security: SecurityArgs,

    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// List machines with their statuses
    #[command(after_help = "Examples:\n  \
        domtool list-subs --status synced --format json\n  \
        domtool list-subs 'web*' --location nyc --tag tier=front")]
    ListSubs(status::ListArguments),
    /// Show everything that is known about one machine
    ShowSub {
        /// Name of the machine in the machine database
        #[arg(value_name = "HOST")]
        hostname: String,
    },
    #[command(flatten)]
    Order(orders::Command),
    #[command(flatten)]
    MachineOrder(machine_orders::Command),
    #[command(flatten)]
    Permit(permits::Command),
    /// List the images whose rollout was stopped automatically after too many failures
    ListStopped,
    /// Show the changes of the content of computed files, and stop, undo or hasten them
    ///
    /// Other content than machines have goes to a few first machines: 3, or 0.1 % of all. When it
    /// is verified there and the health check of the image has passed, it goes to the others. At
    /// the third failure it is stopped and undone. A change is what a new revision of a
    /// filegen-server makes different, HOST:PORT/NUMBER, or what else changed the content of one
    /// path, HOST:PORT/PATH.
    Computed {
        #[command(subcommand)]
        command: content::Command,
    },
    /// Show the machine database, and accept one that is held
    Mdb {
        #[command(subcommand)]
        command: machine_database::Command,
    },
    /// Show the history of machines and orders, newest last
    ///
    /// The history has each change of a path that an update made, with its reason: drift (the
    /// machine had left its image), image (the machine got another image), or computed (a computed
    /// file was filled in).
    #[command(after_help = "Examples:\n  \
        domtool events --path /etc/passwd --reason drift --since 1d\n  \
        domtool events --host 'web*' --kind update --kind order\n  \
        domtool events --path '/etc/**' --image web --limit 0 --format json\n  \
        domtool events --host web1 --follow")]
    Events(events::EventsArguments),
    /// Show the orders of operators, newest last; or read the audit log of any daemon
    ///
    /// Without a subcommand this lists the orders in the dominator's history. The audit log of
    /// each daemon has every call that changed something, and every refused call; `show` and
    /// `verify` read its files and need no daemon.
    #[command(after_help = "Examples:\n  \
        domtool audit --host web1 --since 7d\n  \
        domtool audit --follow\n  \
        domtool audit show /var/lib/imageserver/audit/audit.log --since 2d --user alice\n  \
        domtool audit verify /var/lib/dominator/audit/audit.log")]
    Audit(events::AuditArguments),
    /// Copy the database of the running dominator to a file
    ///
    /// Orders and updates wait during the copy. `domtool database restore` restores it: the
    /// dominator then starts with updates disabled and with the state of the time of the copy.
    #[command(after_help = "Example: domtool backup /var/backups/dominator-2030-01-31")]
    Backup {
        /// File to write; it must not exist
        file: PathBuf,
    },
    /// Check, restore or salvage the database of a stopped dominator, on its machine
    Database {
        #[command(subcommand)]
        command: database::Command,
    },
    /// Show what would be done to a machine, or under another machine database
    ///
    /// This changes nothing and sends nothing to any machine. Exit code 0: nothing would change.
    /// Exit code 3: something would change, or, with --mdb, the plan of a machine is unknown. If
    /// the plan of HOST is unknown, the command fails with exit code 1.
    #[command(after_help = "Examples:\n  \
        domtool plan web1\n  \
        domtool plan web1 --image web/7\n  \
        domtool plan --mdb fleet.json --verbose")]
    Plan(plan::Command),
    /// Show the resources that plugins have made for machines, and forget or destroy orphans
    Resource {
        #[command(subcommand)]
        command: resource::Command,
    },
    /// Decide about the tasks of machines that have left the machine database
    ///
    /// They are stopped some time after that (--departing-after of the dominator), unless many
    /// machines have left at once. docs/TASKS.md explains the states.
    Departing {
        #[command(subcommand)]
        command: departing::Command,
    },
    /// Limit the resources that subs use: for the fleet, a tag or one machine
    ///
    /// A value for a host overrides values for its tags, and these override the value for the
    /// fleet. If several tags of a machine have values, the first tag in alphabetical order
    /// counts, and NAME=VALUE before NAME. What the machine's own configuration sets is a
    /// ceiling: a higher value has no effect there. Where it sets nothing, a value replaces the
    /// default.
    #[command(after_help = "Examples:\n  \
        domtool set-config --fleet network-percent=5 --why \"slow links\"\n  \
        domtool set-config --tag tier=front cpu-percent=2 --why \"busy by day\"\n  \
        domtool set-config --host web1 --unset cpu-percent --why \"as the others\"")]
    SetConfig(settings::SetArguments),
    /// Show the resource limits of subs and where each value comes from
    GetConfig(settings::GetArguments),
    /// Show the state of the dominator
    Status,
    /// Make, show and revoke certificates; needs neither a dominator nor a certificate
    Cert {
        #[command(subcommand)]
        command: cert::Command,
    },
    /// List the methods of all daemons, who may call each, and which sets of powers have it
    ///
    /// A method is Service.Method: a thing that one program can ask of another. A certificate names
    /// the methods that its holder may call, as patterns: its powers.
    ///
    /// WHO MAY CALL IT: any certificate; a certificate with the power, which has a pattern that
    /// matches the method; or an owner, a user that owns the machine, image or directory that the
    /// call is about. SETS: the sets whose holders may call it without being owners (domtool cert
    /// issue --set); all others need --method.
    ///
    /// Needs neither a dominator nor a certificate. docs/PROTOCOL.md says what each method does.
    #[command(after_help = "Examples:\n  \
        domtool methods\n  \
        domtool methods 'Subd.*' ImageServer.DeleteImage\n  \
        domtool methods --format json\n\n\
        domtool cert show DIR lists the methods that the holder of a certificate may call.")]
    Methods(methods::Arguments),
    /// Say when a cron expression fires: before a moment, after it, and whether at it
    ///
    /// The expression has five fields: minute, hour, day of the month, month, day of the week; or
    /// six, with the second first. It fires at each instant at which the wall clock of the zone
    /// shows what it names: never at a time that a change of the clock skips, and twice at one that
    /// the clock shows twice. If day of the month and day of the week are both restricted, one of
    /// them is enough; `*`, `?` and `*/1` do not restrict. PREVIOUS may be the moment itself, NEXT
    /// is after it; both look no farther than five years.
    ///
    /// Needs neither a dominator nor a certificate.
    #[command(after_help = "Examples:\n  \
        domtool cron '0 9 * * MON-FRI' --zone America/Toronto\n  \
        domtool cron '30 2 * * *' --zone America/Toronto --at 2027-03-14T12:00:00Z --prev\n  \
        domtool cron '*/10 0 9 1 * ?' --next --format json\n  \
        domtool cron @weekly --fires --at 2026-11-29T00:00:00Z\n\n\
        docs/TASKS.md has the fields and the short forms.")]
    Cron(cron::Arguments),
    /// Show the daemon tasks of machines, give orders about them, and explain task files
    ///
    /// HOST and NAME are patterns, except where one task is asked about. docs/TASKS.md explains
    /// the states.
    Task {
        #[command(subcommand)]
        command: task::Command,
    },
    /// Say which machines have what: environments, of which each edit is a revision
    ///
    /// docs/ROLLOUTS.md explains environments, rollouts and votes.
    Env {
        #[command(subcommand)]
        command: environments::Command,
    },
    /// Order environments in groups that come one after the other
    Group {
        #[command(subcommand)]
        command: environments::GroupCommand,
    },
    /// Bring revisions of environments to their machines, step by step
    Rollout {
        #[command(subcommand)]
        command: rollout::Command,
    },
    /// Approve the plan of a step of a rollout
    #[command(after_help = "Example: domtool approve r12/web --digest 8d1f --why 'tested'")]
    Approve(rollout_orders::VoteArguments),
    /// Reject the plan of a step of a rollout
    #[command(after_help = "Example: domtool reject r12/web --digest 8d1f --why 'not today'")]
    Reject(rollout_orders::VoteArguments),
    #[command(flatten)]
    Freeze(freezes::Command),
    /// Ask about the locks of rollouts
    Lock {
        #[command(subcommand)]
        command: rollout_orders::LockCommand,
    },
    #[command(flatten)]
    Documents(Documents),
}

impl Command {
    /// Returns true if the command names machines.
    fn is_about_machines(&self) -> bool {
        match self {
            Self::ShowSub { .. }
            | Self::MachineOrder(_)
            | Self::Permit(_)
            | Self::SetConfig(_)
            | Self::GetConfig(_) => true,
            Self::Order(command) => command.is_about_machines(),
            Self::Plan(command) => command.is_about_machine(),
            _ => false,
        }
    }
}

/// Runs the tool.
pub async fn run(arguments: Arguments) -> ExitCode {
    match &arguments.command {
        Command::Documents(documents) => return documents::run::<Arguments>(documents),
        Command::Cert { command } => {
            return match cert::run(arguments.format, command).await {
                Ok(output) => output.print(),
                Err(error) => exit(EXIT_FAILED, &error_chain(&error), error.hints()),
            };
        }
        Command::Methods(shown) => return methods::run(arguments.format, shown),
        Command::Cron(asked) => return cron::run(arguments.format, asked),
        Command::Task { command: task::Command::File(command) } => {
            return task::run(arguments.format, command);
        }
        Command::Rollout { command: rollout::Command::File(command) } => {
            return rollout::run(arguments.format, command);
        }
        Command::Mdb { command: machine_database::Command::Check { file } } => {
            return match machine_database::check(arguments.format, file) {
                Ok(output) => output.print(),
                Err(error) => exit(EXIT_FAILED, &error_chain(&error), &[]),
            };
        }
        Command::Database { command } => return database::run(command, arguments.format),
        Command::Audit(events::AuditArguments { log: Some(command), .. }) => {
            return audit::run(command, arguments.format);
        }
        _ => {}
    }
    let security = match arguments.security.for_tool("domtool") {
        Ok(security) => security,
        Err(error) => return error.exit(),
    };
    let peer = match Peer::parse(&arguments.dominator, DOMINATOR_PORT) {
        Ok(peer) => peer,
        Err(error) => {
            let hint = "give the dominator's address with --dominator HOST:PORT or DOMINATOR_ADDR";
            return exit(EXIT_MISUSE, &error_chain(&error), &[hint]);
        }
    };
    let client = Client::new(peer, &security);
    match run_command(&client, arguments.format, &arguments.command).await {
        Ok(output) => output.print(),
        Err(error) => {
            let hint = error.hint(&arguments.command);
            exit(EXIT_FAILED, &error_chain(&error), hint.as_slice())
        }
    }
}

/// A command that failed.
#[derive(Debug, thiserror::Error)]
enum ToolError {
    #[error(transparent)]
    Call(#[from] CallError),
    #[error(transparent)]
    File(#[from] MdbFileError),
    #[error(transparent)]
    Placed(#[from] PlacedError),
    #[error("no change of content {id} is known: domtool computed list")]
    NoChange { id: ContentChangeId },
    #[error("protocol error: the dominator returned a held machine database without its digest")]
    NoNotice,
    #[error("cannot write the backup {}", path.display())]
    Backup {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("the backup was damaged on the way: its size or digest differs; try again")]
    DamagedBackup,
    #[error("protocol error: the dominator returned no plan for the requested machines")]
    NoProgress,
    #[error("no machine of the machine database is called {pattern}")]
    NoMatch { pattern: String },
    #[error("no machine that matches {pattern} has the status {status}")]
    NoneHas { pattern: String, status: Status },
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
    #[error("not confirmed: the update of {hostname} is still held back")]
    NotConfirmed { hostname: String },
}

impl ToolError {
    fn hint(&self, command: &Command) -> Option<&'static str> {
        match self {
            Self::Call(error) if error.code() == Some(FaultCode::NotFound) => {
                if command.is_about_machines() {
                    Some("domtool list-subs shows the machines and what they wait for")
                } else if matches!(command, Command::Mdb { .. }) {
                    Some("domtool mdb diff FILE compares a file with the machine database in force")
                } else {
                    None
                }
            }
            Self::Call(error) => error
                .connect_hint("is the dominator running? give its address: --dominator HOST:PORT"),
            Self::NoMatch { .. } | Self::NoneHas { .. } => {
                Some("domtool list-subs --status STATUS shows the machines to decide on")
            }
            _ => None,
        }
    }
}

async fn call<M: Method>(client: &Client, request: &M::Request) -> Result<M::Reply, CallError> {
    client.call_within::<M>(request, LIMIT).await
}

async fn run_command(
    client: &Client,
    format: Format,
    command: &Command,
) -> Result<Output, ToolError> {
    match command {
        Command::ListSubs(arguments) => status::list_subs(client, format, arguments).await,
        Command::ShowSub { hostname } => status::show_sub(client, format, hostname).await,
        Command::Order(command) => orders::run(client, format, command).await,
        Command::MachineOrder(command) => machine_orders::run(client, format, command).await,
        Command::Permit(command) => permits::run(client, format, command).await,
        Command::ListStopped => status::list_stopped(client, format).await,
        Command::Computed { command } => content::run(client, format, command).await,
        Command::Departing { command } => departing::run(client, format, command).await,
        Command::Resource { command } => resource::run(client, format, command).await,
        Command::Mdb { command } => machine_database::run(client, format, command).await,
        Command::Events(arguments) => events::list(client, format, arguments).await,
        Command::Audit(arguments) => events::audit(client, format, arguments).await,
        Command::Backup { file } => backup::run(client, file).await,
        Command::Plan(command) => plan::run(client, format, command).await,
        Command::SetConfig(arguments) => settings::set(client, format, arguments).await,
        Command::GetConfig(arguments) => settings::get(client, format, arguments).await,
        Command::Status => status::show_status(client, format).await,
        Command::Env { command } => environments::run(client, format, command).await,
        Command::Group { command } => environments::run_group(client, format, command).await,
        Command::Rollout { command: rollout::Command::Order(command) } => {
            rollout_orders::run(client, format, command).await
        }
        Command::Freeze(command) => freezes::run(client, format, command).await,
        Command::Approve(arguments) => {
            rollout_orders::vote(client, format, arguments, Choice::Approve).await
        }
        Command::Reject(arguments) => {
            rollout_orders::vote(client, format, arguments, Choice::Reject).await
        }
        Command::Lock { command } => rollout_orders::check_lock(client, format, command).await,
        Command::Task { command: task::Command::Fleet(command) } => {
            fleet_tasks::run(client, format, command).await
        }
        Command::Documents(_)
        | Command::Cert { .. }
        | Command::Methods(_)
        | Command::Cron(_)
        | Command::Rollout { command: rollout::Command::File(_) }
        | Command::Task { command: task::Command::File(_) }
        | Command::Database { .. } => {
            unreachable!("these commands run without a client")
        }
    }
}

/// Returns the caller's name, for orders without a client certificate: `user@host`.
fn who() -> String {
    let user = ["SUDO_USER", "USER", "LOGNAME"].iter().find_map(|name| std::env::var(name).ok());
    let user = user.unwrap_or_else(|| format!("uid {}", nix::unistd::getuid()));
    match nix::unistd::gethostname().ok().and_then(|name| name.into_string().ok()) {
        Some(host) => format!("{user}@{host}"),
        None => user,
    }
}

/// Returns the output of an order whose table is empty.
fn silent(format: Format, reply: &impl serde::Serialize) -> Output {
    format.render(reply, |_| String::new()).into()
}

/// Returns an empty table with these column headings.
fn columns(headings: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    if !headings.is_empty() {
        table.set_header(headings);
    }
    table
}

/// Returns the text of a table.
fn text_of(table: &Table) -> String {
    format!("{}\n", table.trim_fmt())
}

/// Runs the program with the arguments of this process.
#[must_use]
pub fn main() -> ExitCode {
    let arguments: Arguments = daemon::config::parse_tool();
    match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime.block_on(run(arguments)),
        Err(error) => exit(EXIT_FAILED, &format!("cannot start: {error}"), &[]),
    }
}
