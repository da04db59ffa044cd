//! `mdbd`: makes the machine database out of what several sources say.
//!
//! [`core`] decides; [`source`] reads, [`mdb_writer`] writes the file and publishes what it holds,
//! [`last_good`] outlasts restarts. Dominators read the file, or follow `MdbServer.GetMdb`.
//!
//! # Invariants
//!
//! * The file is replaced as a whole, and only when it says something else.
//! * A source that fails, or gives something wrong, keeps its last data; what it gives is taken as
//!   a whole or not at all.
//! * The file is not written before every source has given something, in this run or a former one.

pub mod api;
pub mod core;
pub mod disk;
pub mod last_good;
pub mod mdb_writer;
pub mod metrics;
pub mod pages;
pub mod source;

use rpc::page_frame::Frame;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::Parser;
use daemon::config::{Beside, ConfigArgs};
use daemon::{
    ListenError, LogArgs, MDBD_PORT, SecurityArgs, SecurityError, exit_on_error, listen_text,
    start_logging, stop_on_signals,
};
use rpc::audit_log::{AuditArgs, AuditError, AuditLog};
use rpc::page_frame::PageArgs;
use rpc::server::{Router, serve};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use self::core::hosts::{HostFilter, PatternError};
use self::core::settings::{KEY, SettingsError, sources};
use crate::core::merged_sources::MergedSources;
use crate::last_good::{LastGood, StateError};
use crate::mdb_writer::{MdbWriter, Shared};

/// The name of the daemon.
pub const NAME: &str = "mdbd";

/// The keys of its configuration file that are no flags.
pub const TABLES: [&str; 1] = [KEY];

/// Makes the machine database of a dominator out of files, web servers and programs.
///
/// The sources stand in the configuration file, in their order; of what they contradict each other
/// in, the later one is right. The file is written when it changes. A source that fails keeps its
/// last data. Dominators read the file, or follow this daemon with --mdb-server.
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
    /// Address to listen on; `[::]` is all addresses, IPv4 too
    #[arg(long, value_name = "ADDR", default_value = "[::]:6973")]
    pub listen: String,

    /// File to write the machine database to
    #[arg(long, value_name = "FILE", default_value = "/var/lib/Dominator/mdb")]
    pub mdb: PathBuf,

    /// Directory for what must survive a restart: what each source gave last
    #[arg(long, value_name = "DIR", default_value = "/var/lib/mdbd")]
    pub state: PathBuf,

    /// How often sources are read, 20 % more or less; files as soon as they change
    #[arg(long, value_name = "SECONDS", default_value_t = 60,
          value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub interval: u64,

    /// Take only machines whose whole name matches, of all sources
    #[arg(long, value_name = "REGEX")]
    pub hosts: Option<String>,

    /// Leave out machines whose whole name matches, of all sources
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
    pub config: ConfigArgs,
}

/// Why the daemon does not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    #[error(transparent)]
    Security(#[from] SecurityError),
    #[error("no configuration file: /etc/mdbd/config.toml must name the sources, or see --config")]
    NoFile,
    #[error("{}", path.display())]
    Settings {
        /// The configuration file.
        path: PathBuf,
        source: SettingsError,
    },
    #[error("bad --hosts or --exclude-hosts")]
    Pattern { source: PatternError },
    #[error("cannot use the state directory")]
    State { source: StateError },
    #[error(transparent)]
    Audit(#[from] AuditError),
    #[error("cannot listen")]
    Listen { source: ListenError },
}

/// Runs the daemon, with what its configuration file has beside flags, until `stop` is cancelled.
///
/// # Errors
///
/// [`StartError`] if it does not start.
pub async fn run(
    arguments: Arguments,
    beside: Beside,
    stop: CancellationToken,
) -> Result<(), StartError> {
    let security = arguments.security.of_daemon(NAME)?;
    let path = beside.path.ok_or(StartError::NoFile)?;
    let sources =
        sources(beside.table.get(KEY)).map_err(|source| StartError::Settings { path, source })?;
    let filter = HostFilter::new(arguments.hosts.as_deref(), arguments.exclude_hosts.as_deref())
        .map_err(|source| StartError::Pattern { source })?;
    let kept = LastGood::open(&arguments.state).map_err(|source| StartError::State { source })?;
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
    tracker.spawn_blocking(move || MdbWriter::new(merged, origins, kept, published).run(receiver));
    let interval = Duration::from_secs(arguments.interval);
    for (index, source) in sources.into_iter().enumerate() {
        let (following, sender) = (stop.clone(), sender.clone());
        tracker.spawn(async move {
            let follow = source::follow(index, source, interval, sender);
            following.run_until_cancelled(follow).await;
        });
    }
    // The writer ends with the last source.
    drop(sender);
    let router = Router::new(NAME, &security)
        .metrics(|registry| metrics::register(registry, &shared))
        .with_state(Arc::clone(&shared));
    let router = pages::pages(api::methods(router, &stop), Frame::new(NAME, &security));
    let router = router.audit(&audit).private_pages(arguments.pages.private_pages);
    serve(listener, router, stop).await;
    tracker.close();
    tracker.wait().await;
    audit.close().await;
    Ok(())
}

/// Runs the program, with the arguments of this process.
#[must_use]
pub fn main() -> ExitCode {
    let (arguments, beside) = daemon::config::parse_beside(NAME, &TABLES);
    exit_on_error(start_program(arguments, beside))
}

fn start_program(arguments: Arguments, beside: Beside) -> Result<(), Box<dyn std::error::Error>> {
    start_logging(&arguments.log)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let result = runtime.block_on(async {
        let stop = stop_on_signals()?;
        match run(arguments, beside, stop).await {
            Ok(()) => Ok(()),
            Err(StartError::Security(error)) => Err(error.into()),
            Err(error) => Err(Box::<dyn std::error::Error>::from(error)),
        }
    });
    // A file-system that hangs must not keep it from ending.
    runtime.shutdown_background();
    result
}
