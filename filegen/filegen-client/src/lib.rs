//! `filegen-client`: shows what a filegen-server makes, and checks it before it is used.
//!
//! Data goes to stdout, messages to stderr.

mod bench;
mod check;
mod diff;
mod files;
mod renew;
mod show;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use api::fault::FaultCode;
use clap::{Parser, Subcommand};
use daemon::mdb_file::MdbFileError;
use daemon::{EXIT_FAILED, EXIT_MISUSE, FILEGEN_PORT, SecurityArgs, exit};
use filegen::loading::LoadError;
use model::display::error_chain;
use model::image::ImageName;
use model::path::TreePath;
use model::time_parse::positive_duration;
use rpc::client::{CallError, Client, Peer, PeerError};
use rpc::tls::Security;
use tool::documents::{self, Documents};
use tool::{Format, Output};

/// Heading of the flags that all commands share.
const COMMON: &str = "Options of all commands";

/// The server without `--filegen-server`.
const SERVER: &str = "localhost:6972";

/// Shows what a filegen-server makes, and checks it before it is used.
#[derive(Debug, Parser)]
#[command(
    name = "filegen-client",
    version,
    after_help = "Examples:\n  \
        filegen-client list\n  \
        filegen-client get web1 /etc/resolv.conf\n  \
        filegen-client check web/7 --mdb fleet.json\n  \
        filegen-client diff /etc/filegen-server/new.toml\n\n\
        The records of machines are those of the dominator, or of --mdb FILE.\n\
        Defaults for --filegen-server, --dominator, --tls and others can be set in\n\
        ~/.config/dominator/config.toml.\n\n\
        Exit codes: 0 done (compared: same), 1 failed, 2 misuse,\n\
        3 partly done (checked: a file cannot be made; compared: different)."
)]
pub struct Arguments {
    /// The filegen-server, HOST or HOST:PORT [default: localhost:6972; check: those of the image]
    #[arg(
        long,
        value_name = "ADDR",
        env = "DOMINATOR_FILEGEN_SERVER",
        global = true,
        help_heading = COMMON
    )]
    filegen_server: Option<String>,

    /// The dominator, for the records of machines
    #[arg(
        long,
        value_name = "ADDR",
        env = "DOMINATOR_ADDR",
        default_value = "localhost:6970",
        global = true,
        help_heading = COMMON
    )]
    dominator: String,

    /// The imageserver, for check
    #[arg(
        long,
        value_name = "ADDR",
        env = "DOMINATOR_IMAGESERVER",
        default_value = "localhost:6971",
        global = true,
        help_heading = COMMON
    )]
    imageserver: String,

    /// Machine database to take the records of machines from, instead of the dominator's
    #[arg(long, value_name = "FILE", global = true, help_heading = COMMON)]
    mdb: Option<PathBuf>,

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
    /// List the generators in force, and say whether the newest configuration is
    List,
    /// Print a file as it is made for a machine now
    ///
    /// A secret needs the power FileGenerator.GetSecrets; the call is recorded in the audit log of
    /// the server.
    #[command(after_help = "Example: filegen-client get web1 /etc/resolv.conf --mdb fleet.json")]
    Get {
        /// Name of the machine in the machine database
        #[arg(value_name = "HOST")]
        hostname: String,
        /// Path of the file on the machine
        path: TreePath,
    },
    /// Make all computed files of an image for all of its machines, without using them
    ///
    /// The machines are those whose record requires or plans the image. Each file is made by the
    /// server that the image names, or by --filegen-server. Exit code 0: all can be made. Exit code
    /// 3: some cannot.
    #[command(after_help = "Example: filegen-client check web/7 --mdb fleet.json")]
    Check {
        /// Name of the image
        image: ImageName,
        /// Check for every machine of the database
        #[arg(long)]
        all: bool,
    },
    /// Show on which machines another configuration would change files
    ///
    /// It is read here, with its files, and its files are compared with what the server makes now.
    /// What programs and web servers make is not compared. Exit code 0: no file changes. Exit code
    /// 3: some change, or cannot be made.
    #[command(after_help = "Example: filegen-client diff new/config.toml --mdb fleet.json")]
    Diff {
        /// The configuration file
        config: PathBuf,
    },
    /// Have the server take its configuration and files as they are now
    ///
    /// It takes them by itself when none has changed for 2 s. Exit code 3: they have an error, and
    /// the former ones stay in force.
    #[command(after_help = "Example: filegen-client load --why 'new name servers'")]
    Load {
        /// Why, for the audit log of the server
        #[arg(long, value_name = "TEXT", default_value = "")]
        why: String,
    },
    /// Have certificates of machines made anew before their time
    ///
    /// Dominators are told at once. Exit code 3: some of the machines have no certificates of this
    /// server.
    #[command(after_help = "Example: filegen-client renew web1 --why 'the key was in a backup'")]
    Renew {
        /// Names of the machines
        #[arg(value_name = "HOST", required_unless_present = "all", conflicts_with = "all")]
        hostnames: Vec<String>,
        /// The certificates of all machines
        #[arg(long)]
        all: bool,
        /// Why, for the audit log of the server
        #[arg(long, value_name = "TEXT", default_value = "")]
        why: String,
    },
    /// Measure how many files the server makes in a second
    Bench {
        /// Paths of the files
        #[arg(required = true)]
        paths: Vec<TreePath>,
        /// For how long
        #[arg(
            long, value_name = "DURATION", default_value = "5s", value_parser = positive_duration
        )]
        time: Duration,
        /// How many requests are under way at once
        #[arg(long, value_name = "COUNT", default_value_t = 2)]
        #[arg(value_parser = clap::value_parser!(u16).range(1..=64))]
        connections: u16,
    },
    #[command(flatten)]
    Documents(Documents),
}

/// A command that failed.
#[derive(Debug, thiserror::Error)]
enum ToolError {
    #[error(transparent)]
    Call(#[from] CallError),
    #[error(transparent)]
    Mdb(#[from] MdbFileError),
    #[error("bad address")]
    Address { source: PeerError },
    #[error("the machine database has no {hostname}")]
    NoMachine { hostname: String },
    #[error("no machine of the machine database requires or plans {image}")]
    NoMachines { image: ImageName },
    #[error("the machine database is empty")]
    Empty,
    #[error("{path} cannot be made for {hostname}: {why}")]
    NotMade { hostname: String, path: TreePath, why: String },
    #[error("{path} of {hostname} is gone from the server's memory already; try again")]
    Gone { hostname: String, path: TreePath },
    #[error("protocol error: {peer} answered for other files than those that were asked for")]
    Answer { peer: String },
    #[error("protocol error: {peer} returned content with another digest")]
    Digest { peer: String },
    #[error("cannot write to stdout")]
    Print { source: std::io::Error },
    #[error("the configuration is not valid")]
    Load { source: LoadError },
}

impl ToolError {
    fn code(&self) -> u8 {
        if matches!(self, Self::Address { .. }) { EXIT_MISUSE } else { EXIT_FAILED }
    }

    fn hint(&self) -> Option<&'static str> {
        match self {
            Self::Address { .. } => Some("an address is HOST or HOST:PORT"),
            Self::Call(error) if error.code() == Some(FaultCode::NotFound) => {
                Some("imagetool list shows the images that there are")
            }
            Self::Call(error) => error.connect_hint(
                "is it running? give its address: --filegen-server, --dominator or --imageserver; \
                 --mdb FILE needs no dominator",
            ),
            Self::NoMachine { .. } => Some("domtool mdb show lists the machines"),
            Self::NoMachines { .. } => Some("--all checks the image for every machine"),
            Self::NotMade { .. } => Some("filegen-client list shows the paths that can be made"),
            _ => None,
        }
    }
}

/// The servers of a command.
struct Servers {
    security: Security,
    arguments: Arguments,
}

impl Servers {
    fn client(&self, address: &str, port: u16) -> Result<Client, ToolError> {
        let peer = Peer::parse(address, port).map_err(|source| ToolError::Address { source })?;
        Ok(Client::new(peer, &self.security))
    }

    /// Returns a client of the filegen-server that was named, or else of `other`.
    fn generator(&self, other: &str) -> Result<Client, ToolError> {
        let address = self.arguments.filegen_server.as_deref().unwrap_or(other);
        self.client(address, FILEGEN_PORT)
    }
}

async fn run(servers: &Servers) -> Result<Output, ToolError> {
    let format = servers.arguments.format;
    match &servers.arguments.command {
        Command::List => show::list(&servers.generator(SERVER)?, format).await,
        Command::Get { hostname, path } => show::get(servers, hostname, path).await,
        Command::Check { image, all } => check::run(servers, image, *all).await,
        Command::Diff { config } => diff::run(servers, config).await,
        Command::Renew { hostnames, all, why } => {
            let hostnames = (!all).then(|| hostnames.clone());
            renew::run(&servers.generator(SERVER)?, format, hostnames, why.clone()).await
        }
        Command::Load { why } => show::load(&servers.generator(SERVER)?, format, why.clone()).await,
        Command::Bench { paths, time, connections } => {
            bench::run(servers, paths, *time, *connections).await
        }
        Command::Documents(_) => unreachable!("they need no server"),
    }
}

/// Runs the program with the arguments of this process.
#[must_use]
pub fn main() -> ExitCode {
    let arguments: Arguments = daemon::config::parse_tool();
    if let Command::Documents(documents) = &arguments.command {
        return documents::run::<Arguments>(documents);
    }
    let security = match arguments.security.for_tool("filegen-client") {
        Ok(security) => security,
        Err(error) => return error.exit(),
    };
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return exit(EXIT_FAILED, &format!("cannot start: {error}"), &[]),
    };
    match runtime.block_on(run(&Servers { security, arguments })) {
        Ok(output) => output.print(),
        Err(error) => exit(error.code(), &error_chain(&error), error.hint().as_slice()),
    }
}
