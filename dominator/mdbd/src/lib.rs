//! `mdbd`: makes the machine database from several sources.
//!
//! [`core`] decides: [`core::settings`] parses the configuration of the sources, [`core::formats`]
//! reads their data, and [`core::merged_sources`] merges them. [`source`] reads the sources,
//! [`mdb_writer`] writes the file and publishes its content, [`storage`] saves the data of sources
//! over restarts. Dominators read the file, or follow `MdbServer.GetMdb`.
//!
//! # Invariants
//!
//! * The file is replaced as a whole, and only when its content changes.
//! * A source that fails or delivers invalid data keeps its last data; data are accepted as a whole
//!   or not at all.
//! * The file is not written before every source has delivered data, in this run or a former one.

pub mod core {
    pub mod formats;
    pub mod merged_sources;
    pub mod settings;
}
pub mod interface;
pub mod mdb_writer;
pub mod source;
pub mod storage;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::Parser;
use daemon::config::{ConfigArgs, ExtraTables};
use daemon::{
    ListenError, LogArgs, MDBD_PORT, SecurityArgs, SecurityError, exit_on_error, ignore_hangup,
    listen_text, start_logging, stop_on_signals,
};
use rpc::audit_log::{AuditArgs, AuditError, AuditLog};
use rpc::page_frame::{Frame, PageArgs};
use rpc::server::{CallerArgs, Router, serve};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::core::merged_sources::{HostFilter, MergedSources, PatternError};
use crate::core::settings::{self, KEY, SettingsError, sources};
use crate::mdb_writer::{MdbWriter, Shared};
use crate::storage::{LastGood, StateError};

pub const NAME: &str = "mdbd";

/// Keys of the configuration file that are not flags.
pub const TABLES: [&str; 1] = [KEY];

/// Makes the machine database of a dominator from files, web servers and programs.
///
/// The configuration file lists the sources in order; if they contradict each other, the later one
/// counts. The file is written when its content changes. A source that fails keeps its last data.
/// Dominators read the file, or follow this daemon with --mdb-server.
#[derive(Clone, Debug, Parser)]
#[command(
    name = "mdbd",
    version,
    after_help = "Example of a configuration file, /etc/mdbd/config.toml:\n  \
        insecure = true\n\n  \
        [[source]]\n  \
        name = \"inventory\"\n  \
        url = \"https://inventory.example.com/machines.json\"\n\n  \
        [[source]]\n  \
        name = \"by-hand\"\n  \
        file = \"/etc/fleet.hosts\"\n  \
        format = \"hosts\"        # lines of HOST [REQUIRED-IMAGE [PLANNED-IMAGE]]"
)]
pub struct Arguments {
    /// Address to listen on; `[::]` stands for all addresses, including IPv4
    #[arg(long, value_name = "ADDR", default_value = "[::]:6973")]
    pub listen: String,

    /// File to write the machine database to
    #[arg(long, value_name = "FILE", default_value = "/var/lib/Dominator/mdb")]
    pub mdb: PathBuf,

    /// Directory for the last data of each source, which must survive a restart
    #[arg(long, value_name = "DIR", default_value = "/var/lib/mdbd")]
    pub state: PathBuf,

    /// Interval of reading sources, 20 % more or less; files are read as soon as they change
    #[arg(long, value_name = "DURATION", default_value = "60s", value_parser = settings::interval)]
    pub interval: Duration,

    /// Only machines whose whole name matches, for all sources
    #[arg(long, value_name = "REGEX")]
    pub hosts: Option<String>,

    /// Leave out machines whose whole name matches, for all sources
    #[arg(long, value_name = "REGEX")]
    pub exclude_hosts: Option<String>,

    /// What is logged, and how.
    #[command(flatten)]
    pub log: LogArgs,

    #[command(flatten)]
    #[allow(missing_docs, reason = "a docstring here would become the help of the group")]
    pub security: SecurityArgs,

    #[command(flatten)]
    #[allow(missing_docs, reason = "a docstring here would become the help of the group")]
    pub audit: AuditArgs,

    #[command(flatten)]
    #[allow(missing_docs, reason = "a docstring here would become the help of the group")]
    pub pages: PageArgs,

    #[command(flatten)]
    #[allow(missing_docs, reason = "a docstring here would become the help of the group")]
    pub callers: CallerArgs,

    #[command(flatten)]
    #[allow(missing_docs, reason = "a docstring here would become the help of the group")]
    pub config: ConfigArgs,
}

/// A failed start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    #[error(transparent)]
    Security(#[from] SecurityError),
    #[error("no configuration file: list the sources in /etc/mdbd/config.toml, or give --config")]
    NoFile,
    #[error("{}", path.display())]
    Settings { path: PathBuf, source: SettingsError },
    #[error("bad --hosts or --exclude-hosts")]
    Pattern { source: PatternError },
    #[error("cannot use the state directory")]
    State { source: StateError },
    #[error(transparent)]
    Audit(#[from] AuditError),
    #[error("cannot listen")]
    Listen { source: ListenError },
}

/// Runs the daemon until `stop` is cancelled; `beside` has the tables of its configuration file.
///
/// # Errors
///
/// [`StartError`] if it cannot start.
pub async fn run(
    arguments: Arguments,
    beside: ExtraTables,
    stop: CancellationToken,
) -> Result<(), StartError> {
    let security = arguments.security.for_daemon(NAME)?;
    let path = beside.path.ok_or(StartError::NoFile)?;
    let sources =
        sources(beside.table.get(KEY)).map_err(|source| StartError::Settings { path, source })?;
    let filter = HostFilter::new(arguments.hosts.as_deref(), arguments.exclude_hosts.as_deref())
        .map_err(|source| StartError::Pattern { source })?;
    let last_good =
        LastGood::open(&arguments.state).map_err(|source| StartError::State { source })?;
    let listener = listen_text(NAME, &security, &arguments.listen, MDBD_PORT)
        .await
        .map_err(|source| StartError::Listen { source })?;

    let audit = AuditLog::open(arguments.audit.settings(&arguments.state), NAME).await?;
    let tracker = TaskTracker::new();
    let rules = sources.iter().map(|source| source.rules.clone()).collect();
    let origins: Vec<_> = sources.iter().map(|source| source.origin.clone()).collect();
    let shared = Shared::new(arguments.mdb, &origins, audit.clone());
    let (sender, receiver) = mpsc::channel(1);
    let (merged, published) = (MergedSources::new(rules, filter), shared.clone());
    tracker.spawn_blocking(move || {
        MdbWriter::new(merged, origins, last_good, published).run(receiver);
    });
    for (index, source) in sources.into_iter().enumerate() {
        let (following, sender) = (stop.clone(), sender.clone());
        tracker.spawn(async move {
            let follow = source::follow(index, source, arguments.interval, sender);
            following.run_until_cancelled(follow).await;
        });
    }
    // The writer ends when the last source ends.
    drop(sender);
    let router = Router::new(NAME, &security)
        .metrics(|registry| interface::register_metrics(registry, &shared))
        .with_state(Arc::clone(&shared));
    let router = interface::pages(interface::methods(router, &stop), Frame::new(NAME, &security));
    let router = router.audit(&audit).private_pages(arguments.pages.private_pages);
    let router = router.limits(arguments.callers.limits());
    serve(listener, router, stop).await;
    tracker.close();
    tracker.wait().await;
    audit.close().await;
    Ok(())
}

/// Runs the program with the arguments of this process.
#[must_use]
pub fn main() -> ExitCode {
    let (arguments, beside) = daemon::config::parse_with_tables(NAME, &TABLES);
    exit_on_error(start_program(arguments, beside))
}

fn start_program(
    arguments: Arguments,
    beside: ExtraTables,
) -> Result<(), Box<dyn std::error::Error>> {
    start_logging(&arguments.log)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let result = runtime.block_on(async {
        ignore_hangup()?;
        let stop = stop_on_signals()?;
        match run(arguments, beside, stop).await {
            Ok(()) => Ok(()),
            Err(StartError::Security(error)) => Err(error.into()),
            Err(error) => Err(Box::<dyn std::error::Error>::from(error)),
        }
    });
    // A file-system that hangs must not prevent the exit.
    runtime.shutdown_background();
    result
}
