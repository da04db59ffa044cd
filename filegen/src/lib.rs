//! `filegen-server`: makes the content of computed files, for each machine.
//!
//! [`core`] decides: [`core::settings`] parses the configuration, [`core::templates`] and
//! [`core::selection`] make content, [`core::certificates`] says what certificates say,
//! [`core::contents`] keeps it, [`core::results`] knows what programs and web servers gave.
//! [`loading`] reads the configuration with all of its files as one set of [`generators`],
//! [`watching`] takes changes, [`outside`] asks programs and web servers,
//! [`revisions`] numbers what is in force, [`signing`] signs contents, [`service`] answers the
//! methods of [`interface`].
//!
//! # Invariants
//!
//! * Nothing is kept about machines, except the certificates that were made for them and, if
//!   contents are signed, their digests: each request brings their records.
//! * A set of generators is taken as a whole or not at all.
//! * Equal records, paths and versions of generators give equal files, except what programs and web
//!   servers give, and certificates that are renewed.
//! * A secret is in no log, page, metric or error, and is given out only for the machines that it
//!   was made for.

pub mod core {
    pub mod certificates;
    pub mod contents;
    pub mod results;
    pub mod selection;
    pub mod settings;
    pub mod templates;
}
pub mod generators;
pub mod interface;
pub mod loading;
pub mod outside;
pub mod revisions;
pub mod service;
pub mod signing;
pub mod watching;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use certs::pairs::{PairError, PairStore};
use clap::Parser;
use daemon::config::{ConfigArgs, ExtraTables};
use daemon::{
    FILEGEN_PORT, ListenError, LogArgs, SecurityArgs, SecurityError, exit_on_error, ignore_hangup,
    listen_text, start_logging, stop_on_signals,
};
use rpc::audit_log::{AuditArgs, AuditError, AuditLog};
use rpc::page_frame::{Frame, PageArgs};
use rpc::server::{CallerArgs, Router, serve};
use system::durable::DurableError;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::core::settings::KEY;
use crate::loading::{LoadError, load};
use crate::revisions::Revisions;
use crate::service::{Service, Stores};
use crate::signing::{Signer, SignerError};
use crate::watching::Watcher;

pub const NAME: &str = "filegen-server";

/// Keys of the configuration file that are not flags.
pub const TABLES: [&str; 1] = [KEY];

/// Makes the content of computed files, for each machine.
///
/// The configuration file says how each path is made: from a file, a file of a directory, a
/// template, the record of the machine, a program, a web server or an authority. Changes of it and
/// of its files are taken together, 2 s after the last one; while something in them is wrong, the
/// former ones stay in force. Dominators ask for the files of their machines.
#[derive(Clone, Debug, Parser)]
#[command(
    name = "filegen-server",
    version,
    after_help = "Example of a configuration file, /etc/filegen-server/config.toml:\n  \
        insecure = true\n\n  \
        [[generator]]\n  \
        path = \"/etc/resolv.conf\"\n  \
        kind = \"template\"\n  \
        file = \"resolv.conf.j2\"    # below /etc/filegen-server\n\n  \
        [[generator]]\n  \
        path = \"/etc/ssl/site-ca.pem\"\n  \
        kind = \"directory\"\n  \
        directory = \"ca\"\n  \
        by = \"Location\"            # or \"Hostname\", \"Tags.NAME\""
)]
pub struct Arguments {
    /// Address to listen on; `[::]` stands for all addresses, including IPv4
    #[arg(long, value_name = "ADDR", default_value = "[::]:6972")]
    pub listen: String,

    /// Directory for the audit log, the numbers of content revisions, the certificates of machines
    /// with their keys, and what was made for which machine
    #[arg(long, value_name = "DIR", default_value = "/var/lib/filegen-server")]
    pub state: PathBuf,

    /// How much content to keep for callers that ask for it by digest, in MiB
    #[arg(
        long,
        value_name = "MIB",
        default_value_t = 256,
        value_parser = clap::value_parser!(u32).range(16..=65_536)
    )]
    pub content_cache: u32,

    /// Private key of OpenSSH, without a passphrase, that signs which content machines get, for
    /// images that name its public key; `domtool cert signing-key FILE` makes one
    #[arg(long, value_name = "FILE")]
    pub signing_key: Option<PathBuf>,

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
    #[error(
        "no configuration file: list the generators in /etc/filegen-server/config.toml, or give \
         --config"
    )]
    NoFile,
    #[error(transparent)]
    Load(#[from] LoadError),
    #[error(transparent)]
    Audit(#[from] AuditError),
    #[error(transparent)]
    Pairs(#[from] PairError),
    #[error(transparent)]
    Signer(#[from] SignerError),
    #[error("cannot keep the number of the content revision")]
    Revisions(#[from] DurableError),
    #[error("cannot listen")]
    Listen { source: ListenError },
}

/// Runs the daemon until `stop` is cancelled; `beside` names its configuration file.
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
    let file = beside.path.ok_or(StartError::NoFile)?;
    let (taken, set) = load(&file);
    let set = set?;
    let listener = listen_text(NAME, &security, &arguments.listen, FILEGEN_PORT)
        .await
        .map_err(|source| StartError::Listen { source })?;

    let audit = AuditLog::open(arguments.audit.settings(&arguments.state), NAME).await?;
    let tasks = TaskTracker::new();
    let bytes_max = (arguments.content_cache as usize) << 20;
    let pairs = PairStore::open(&arguments.state)?;
    let key_file = arguments.signing_key.as_deref();
    let signer = key_file.map(|file| Signer::open(&arguments.state, file)).transpose()?;
    let (audits, tracker) = (audit.clone(), tasks.clone());
    let kept = Stores { pairs, revisions: Revisions::open(&arguments.state), signer };
    let service = Service::new(set, bytes_max, kept, audits, tracker, stop.clone())?;
    let (orders, ordered) = mpsc::channel(1);
    tasks.spawn(Watcher::new(file, taken, Arc::clone(&service)).run(ordered, stop.clone()));
    let router = Router::new(NAME, &security)
        .metrics(|registry| interface::register_metrics(registry, &service))
        .with_state(service);
    let router = interface::methods(router, orders, &stop);
    let router = interface::pages(router, Frame::new(NAME, &security));
    let router = router.audit(&audit).private_pages(arguments.pages.private_pages);
    let router = router.limits(arguments.callers.limits());
    serve(listener, router, stop).await;
    tasks.close();
    tasks.wait().await;
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
