//! The command line of `subd`.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::builder::{PathBufValueParser, TypedValueParser as _};
use daemon::config::{self, ConfigArgs};
use daemon::{
    EXIT_FAILED, EXIT_MISUSE, LogArgs, SecurityArgs, SecurityError, exit, ignore_hangup,
    start_logging, stop_on_signals,
};
use model::display::error_chain;
use model::scope::SUBD_DIRECTORY;
use model::time_parse;
use model::trigger::services::SUBD_SERVICE;
use rpc::audit_log::AuditArgs;
use rpc::page_frame::PageArgs;
use rpc::tls::Security;

use crate::daemon::{Daemon, StartError, mend_own_certificates, recover};
use crate::limits::LimitArgs;
use crate::state::persisted_state::PersistError;
use crate::tasks;
use crate::tasks::supervisor::SupervisorChoice;
use crate::trust::TrustArgs;

/// How many threads answer calls; scans and updates have their own.
const THREADS: usize = 2;

/// How long a thread may block after subd has stopped.
const BLOCKING_MAX: Duration = Duration::from_secs(1);

/// The hint when an update can be neither finished nor undone.
const RECOVER_HINT: &str = "repair what is named, then run this again or start subd";

/// Keeps this machine equal to its image.
///
/// subd scans and checksums the root file-system all the time, and reports to a dominator, which
/// tells it which objects to fetch and what to change. It keeps its cache and its state in
/// `/.subd` below the root.
///
/// Examples:
///
///   subd
///
///   subd --listen 127.0.0.2:6969 --root /srv/test --service-command 'echo would run'
#[derive(Clone, Debug, clap::Parser)]
#[command(name = "subd", version, verbatim_doc_comment)]
pub struct Options {
    /// Where to listen: ADDRESS:PORT, or :PORT for all addresses.
    #[arg(long, value_name = "ADDR", default_value = ":6969")]
    pub listen: String,

    /// The directory to manage.
    #[arg(long, value_name = "DIR", default_value = "/",
          value_parser = PathBufValueParser::new().try_map(std::path::absolute::<PathBuf>))]
    pub root: PathBuf,

    /// Never scan or change paths that match this regular expression, which is anchored at the
    /// start of the path, nor what lies below them. May be repeated.
    #[arg(long, value_name = "REGEX")]
    pub exclude: Vec<String>,

    /// The command that controls services. It is split at white space, and run with the service and
    /// the verb as its last two arguments: stop, start or reload; restart for subd's own service,
    /// whose end it should not wait for; or reboot for the service `reboot`. Without it, systemctl
    /// is used where systemd runs and `service` elsewhere. With another root than / no service is
    /// controlled, because the services of this machine are not those of that root.
    #[arg(long, value_name = "CMD")]
    pub service_command: Option<String>,

    /// A command that runs the health checks of images, such as `systemd-nspawn -D /mnt`. It is
    /// split at white space, and the words of the check are its last arguments. Without it, checks
    /// are run on this machine if the root is /. With another root they are not run: the check of
    /// the last image is made when subd starts with that root as /.
    #[arg(long, value_name = "CMD")]
    pub health_command: Option<String>,

    /// How long the service command may take before it is killed.
    #[arg(long, value_name = "DURATION", default_value = "60s",
          value_parser = time_parse::positive_duration)]
    pub service_timeout: Duration,

    /// How long the machine may take to shut down for a reboot. After that systemd forces the
    /// reboot; elsewhere it is reported, and the reboot is requested again.
    #[arg(long, value_name = "DURATION", default_value = "10m",
          value_parser = time_parse::positive_duration)]
    pub reboot_timeout: Duration,

    /// The name of subd's own service: it is never stopped for an update, and restarted last.
    #[arg(long, value_name = "NAME", default_value = SUBD_SERVICE)]
    pub own_service: String,

    /// What runs the daemon tasks of the image. auto is systemd where it runs, and direct
    /// elsewhere; with another root than / it runs none. systemd has a transient unit for each
    /// task. direct has a process of subd for each, and a cgroup where it can make one; with
    /// another root than / tasks run in that root, with mounts and process numbers of their own.
    #[arg(
        long,
        value_name = "HOW",
        value_enum,
        default_value = "auto",
        hide_possible_values = true
    )]
    pub supervisor: SupervisorChoice,

    /// How often plugins are asked whether the resources of the image are as they were made; 0 for
    /// never. Each machine has its own time for it, so that not all of a fleet ask at once.
    #[arg(long, value_name = "DURATION", default_value = "1d",
          value_parser = time_parse::duration)]
    pub resource_check_every: Duration,

    /// The command that decides whether the machine may be disturbed now. It is split at white
    /// space, and run with check, request or cancel as its last argument, before an update that
    /// reboots or fires a trigger with HighImpact, and from time to time. Exit code 0 means
    /// permitted, 1 that permission is requested, 2 that it is denied. Without it the machine may
    /// always be disturbed.
    #[arg(long, value_name = "CMD")]
    pub disruption_command: Option<String>,

    /// Finish or undo an update that was interrupted, and exit: for early boot, before any other
    /// service starts. Needs no network, and starts no service itself.
    #[arg(long)]
    pub recover: bool,

    /// How long to wait before an update is retried that could be neither finished nor undone. It
    /// is longer each time, at most twenty times as long.
    #[arg(long, value_name = "DURATION", default_value = "30s",
          value_parser = time_parse::positive_duration)]
    pub retry_after: Duration,

    /// How long a dominator may take to reach subd after an update of subd's own TLS files. If none
    /// does, the former files are put back, and those of the update are refused.
    #[arg(long, value_name = "DURATION", default_value = "10m",
          value_parser = time_parse::positive_duration)]
    pub put_back_after: Duration,

    /// How long a source of objects may send nothing before the connection counts as lost.
    #[arg(long, value_name = "DURATION", default_value = "60s",
          value_parser = time_parse::positive_duration)]
    pub source_timeout: Duration,

    /// Keep the saved state in `state` below this directory instead of `/.subd` below the root.
    /// Objects and staged updates are always in `/.subd`.
    #[arg(long, value_name = "DIR")]
    pub state: Option<PathBuf>,

    /// The only dominator that may give orders, by the name that is on its page and in its log.
    /// Without it, the first that asks gives orders until it has given none for an hour.
    #[arg(long, value_name = "NAME")]
    pub dominator: Option<String>,

    /// The host name to report, instead of the system's.
    #[arg(long, value_name = "NAME")]
    pub hostname: Option<String>,

    /// What subd may use of the machine.
    #[command(flatten)]
    pub limits: LimitArgs,

    /// Which images are accepted.
    #[command(flatten)]
    pub trust: TrustArgs,

    /// What is logged, and how.
    #[command(flatten)]
    pub log: LogArgs,

    /// How connections are protected.
    #[command(flatten)]
    pub security: SecurityArgs,

    /// The audit log.
    #[command(flatten)]
    pub audit: AuditArgs,

    /// Who may see pages.
    #[command(flatten)]
    pub pages: PageArgs,

    /// The configuration file.
    #[command(flatten)]
    pub config: ConfigArgs,
}

/// Runs the program, with the arguments of this process.
pub fn main() -> ExitCode {
    if let Some(code) = tasks::dispatch().or_else(crate::provisioning::dispatch) {
        return code;
    }
    let options: Options = config::parse("subd");
    if let Err(error) = start_logging(&options.log) {
        return exit(EXIT_MISUSE, &error, &[]);
    }
    if options.recover {
        return match recover(&options) {
            Ok(Ok(done)) => {
                println!("{done}");
                ExitCode::SUCCESS
            }
            Ok(Err(stuck)) => exit(EXIT_FAILED, &stuck, &[RECOVER_HINT]),
            Err(error) => exit(EXIT_FAILED, &error_chain(&error), &hints(&error)),
        };
    }
    let security = match security(&options) {
        Ok(security) => security,
        Err(error) => return error.exit(),
    };
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(THREADS).enable_all().build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => return exit(EXIT_FAILED, &format!("cannot start: {error}"), &[]),
    };
    let code = runtime.block_on(async {
        let stop = match ignore_hangup().and_then(|()| stop_on_signals()) {
            Ok(stop) => stop,
            Err(error) => return exit(EXIT_FAILED, &format!("cannot catch signals: {error}"), &[]),
        };
        // `run` also returns when everything must be opened again.
        while !stop.is_cancelled() {
            match Daemon::start(options.clone(), &security, stop.clone()).await {
                Ok(daemon) => daemon.run().await,
                Err(error @ StartError::Exclude { .. }) => {
                    return exit(EXIT_MISUSE, &error_chain(&error), &[]);
                }
                Err(error) => return exit(EXIT_FAILED, &error_chain(&error), &hints(&error)),
            }
        }
        ExitCode::SUCCESS
    });
    // What still runs then has nothing to finish, such as a measurement of the device.
    runtime.shutdown_timeout(BLOCKING_MAX);
    code
}

/// Opens subd's own TLS files. If they cannot be used, an update of them may have been interrupted.
fn security(options: &Options) -> Result<Security, SecurityError> {
    let opened = options.security.for_daemon("subd");
    let manages = options.root.join(&SUBD_DIRECTORY[1..]).exists();
    if !(manages && matches!(opened, Err(SecurityError::Unusable(_)))) {
        return opened;
    }
    match mend_own_certificates(options) {
        Ok(Ok(done)) => tracing::info!("{done}"),
        Ok(Err(why)) => tracing::error!("{why}"),
        Err(error) => tracing::error!("{}", error_chain(&error)),
    }
    options.security.for_daemon("subd")
}

/// Returns hints for the operator about `error`.
fn hints(error: &StartError) -> Vec<&'static str> {
    match error {
        StartError::State { source: PersistError::Locked, .. } => {
            vec!["stop the other subd first, or use another --root"]
        }
        StartError::Root { .. } => vec!["--root must be a directory that root may write to"],
        StartError::Listen { .. } => vec!["choose another address with --listen"],
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    /// Guards of tasks have other working directories.
    #[test]
    fn a_relative_root_is_one_below_the_working_directory() {
        let options = Options::try_parse_from(["subd", "--root", "roots/m1"]).unwrap();
        assert_eq!(options.root, std::env::current_dir().unwrap().join("roots/m1"));
    }
}
