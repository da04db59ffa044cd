//! The command line of `imageserver`.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use crate::check::command::CheckArgs;
use crate::core::collection::disk_pressure::Bounds;
use crate::core::replication::patterns::Patterns;
use crate::core::scrub_progress::Limits;
use crate::replication::Settings as Replicate;
use crate::scrub::Settings;
use crate::store::bucket::settings::{self as bucket, address};
use crate::{
    check,
    daemon::{Config, DAEMON, ImageServer},
};
use clap::Parser;
use daemon::config::{self, ConfigArgs};
use daemon::{
    IMAGESERVER_PORT, LogArgs, SecurityArgs, exit_on_error, listen_text, start_logging,
    stop_on_signals,
};
use model::when::written;
use rpc::audit_log::AuditArgs;
use rpc::client::Peer;
use rpc::page_frame::PageArgs;

/// Keeps images and serves them to machines.
///
/// Every distinct file of all images is stored once, under its digest, in the data directory. An
/// image is added with `imagetool add` and never changes; its name is never used again, even after
/// it was deleted. The same port answers calls, http://HOST:6971/ for browsers, /metrics for
/// Prometheus, /healthz, and /objects/ID for caches.
#[derive(Debug, Parser)]
#[command(version, after_long_help = EXAMPLES)]
pub struct Flags {
    /// Without one, the server runs.
    #[command(subcommand)]
    verb: Option<Verb>,

    /// Address and port to listen on: ADDR:PORT, ADDR or :PORT.
    #[arg(long, value_name = "ADDR", default_value = "[::]:6971")]
    listen: String,

    /// Directory of objects and images; it is made if it is missing, and must be on one
    /// file-system.
    #[arg(long, global = true, value_name = "DIR", default_value = "/var/lib/imageserver")]
    data: PathBuf,

    /// Keep objects and images in this S3-compatible bucket, which several image servers may
    /// share, and only what is this server's own in the directory. The bucket must honour
    /// conditional writes.
    #[arg(long, value_name = "s3://NAME/PREFIX", value_parser = address,
        conflicts_with = "replicate_from")]
    bucket: Option<(String, String)>,

    /// Where the bucket is, if not at AWS: http://HOST:PORT or https://HOST.
    #[arg(long, value_name = "URL", requires = "bucket")]
    bucket_endpoint: Option<String>,

    /// The region of the bucket; otherwise that of AWS_REGION.
    #[arg(long, value_name = "REGION", requires = "bucket")]
    bucket_region: Option<String>,

    /// A file with credentials for the bucket, as ~/.aws/credentials, which is used otherwise, as
    /// are AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, `bucket` of systemd's LoadCredential, and
    /// the role of an AWS machine.
    #[arg(long, value_name = "FILE", requires = "bucket")]
    bucket_credentials: Option<PathBuf>,

    /// Authorities that may vouch for the bucket's address, beside those of the system.
    #[arg(long, value_name = "FILE", requires = "bucket")]
    bucket_ca: Option<PathBuf>,

    /// For how long no image must have needed an object before it is removed from the bucket.
    #[arg(long, value_name = "DURATION", default_value = "1d", value_parser = written::duration)]
    bucket_unneeded: Duration,

    /// How much of the file-system of the directory objects of the bucket may take, in GB.
    #[arg(long, value_name = "GB", default_value_t = 20,
        value_parser = clap::value_parser!(u64).range(1..))]
    bucket_cache: u64,

    /// Remove objects that no image needs when this much of the file-system is used, as `df`
    /// counts it. 100 for never; `imagetool gc` does it at any time.
    #[arg(long, value_name = "PERCENT", default_value_t = 95,
          value_parser = clap::value_parser!(u8).range(1..=100))]
    collect_above: u8,

    /// How far the use of the file-system is then brought down, the oldest objects first.
    #[arg(long, value_name = "PERCENT", default_value_t = 90,
          value_parser = clap::value_parser!(u8).range(..=100))]
    collect_down_to: u8,

    /// For how long what is uploaded, or is found to be there and need not be, is held until an
    /// image needs it. After a restart nothing is removed for as long as a lease may last.
    #[arg(long, value_name = "DURATION", default_value = "1d", value_parser = written::duration)]
    lease_max: Duration,

    /// For how long the clock must have run evenly before images expire, after a start and after
    /// it jumped.
    #[arg(long, value_name = "DURATION", default_value = "10m", value_parser = written::duration)]
    clock_settle: Duration,

    /// Within this time every object is read again from the disk, and hashed: 30d, 12h. 0s never
    /// does.
    #[arg(long, value_name = "DURATION", default_value = "30d", value_parser = written::duration)]
    scrub_every: Duration,

    /// No more than this is read for that, in MB per second.
    #[arg(long, value_name = "MB", default_value_t = 10,
        value_parser = clap::value_parser!(u32).range(1..))]
    scrub_rate: u32,

    /// Another imageserver that is asked for objects which are lost here. What it gives is hashed.
    /// A replica asks its master if nothing else is said.
    #[arg(long, value_name = "ADDR")]
    repair_from: Option<String>,

    /// How hard objects are packed on their way to those who take them packed: a level of zstd,
    /// 1 to 19. 0 never does: for a network that is faster than the processors.
    #[arg(long, value_name = "LEVEL", default_value_t = 1,
        value_parser = clap::value_parser!(i32).range(0..=19))]
    pack_level: i32,

    /// Keep objects packed that are stored from now on and gain an eighth by it: a level of zstd, 1
    /// to 19. They take less space, and travel as they are to those who take them packed. What is
    /// there already stays as it is. 0 packs nothing.
    #[arg(long, value_name = "LEVEL", default_value_t = 0, conflicts_with = "bucket",
        value_parser = clap::value_parser!(i32).range(0..=19))]
    store_packed: i32,

    /// Refuse images in directories that were never made with `imagetool mkdir`. Without this a
    /// directory is there as soon as an image is in it, and belongs to the owners of the one above.
    #[arg(long)]
    require_directories: bool,

    #[command(flatten)]
    replicate: ReplicateArgs,

    #[command(flatten)]
    log: LogArgs,

    #[command(flatten)]
    security: SecurityArgs,

    #[command(flatten)]
    audit: AuditArgs,

    #[command(flatten)]
    pages: PageArgs,

    #[command(flatten)]
    config: ConfigArgs,
}

/// Whom a replica follows.
#[derive(Debug, clap::Args)]
struct ReplicateArgs {
    /// Follow the imageserver at ADDR: have all images that it has, and send on to it all changes
    /// that are asked for here. It may be a replica itself. `imagetool replication` says how far
    /// that is.
    #[arg(long, value_name = "ADDR")]
    replicate_from: Option<String>,

    /// Follow only images whose names match: `base/**`. `*` matches no slash, `**` does. May be
    /// given several times. What is here and is not followed stays, and does not change.
    #[arg(long, value_name = "PATTERN", requires = "replicate_from")]
    replicate_include: Vec<String>,

    /// Follow no images whose names match. May be given several times.
    #[arg(long, value_name = "PATTERN", requires = "replicate_from")]
    replicate_exclude: Vec<String>,

    /// Keep images that are deleted or expire on the master.
    #[arg(long, requires = "replicate_from")]
    replicate_archive: bool,
}

impl ReplicateArgs {
    fn settings(&self) -> Result<Option<Replicate>, Box<dyn std::error::Error>> {
        let Some(from) = &self.replicate_from else { return Ok(None) };
        let from = Peer::parse(from, IMAGESERVER_PORT)?;
        let (include, exclude) = (self.replicate_include.clone(), self.replicate_exclude.clone());
        let patterns = Patterns::new(&include, &exclude)?;
        let is_archive = self.replicate_archive;
        Ok(Some(Replicate { from, include, exclude, patterns, is_archive }))
    }
}

/// What else the program does.
#[derive(Debug, clap::Subcommand)]
enum Verb {
    Check(CheckArgs),
}

const EXAMPLES: &str = "\
Examples:
  # Keep images in the default directory, on a trusted network
  imageserver

  # Try it out
  imageserver --listen 127.0.0.1:6971 --data /tmp/images
  imagetool --imageserver 127.0.0.1:6971 list

  # Keep images in a bucket; start as many servers so as are needed, each with its own directory
  imageserver --bucket s3://images/prod --bucket-endpoint https://s3.example.com \
      --bucket-credentials /etc/imageserver/bucket --data /var/cache/imageserver

  # A replica of another server, and one of some of its images
  imageserver --replicate-from images1
  imageserver --replicate-from images1:6971 --replicate-include 'base/**'

  # Is all that was kept still there, and whole? The server must be stopped for this
  imageserver check

Exit codes: 0 stopped by a signal, 1 failed, 2 misuse.";

/// Runs the program, with the arguments of this process.
#[must_use]
pub fn main() -> ExitCode {
    let flags: Flags = config::parse(DAEMON);
    match &flags.verb {
        Some(Verb::Check(args)) => check::command::run(flags.data, args),
        None => exit_on_error(run(flags)),
    }
}

fn run(flags: Flags) -> Result<(), Box<dyn std::error::Error>> {
    start_logging(&flags.log)?;
    let security = flags.security.of_daemon(DAEMON)?;
    let collect =
        Bounds { above_percent: flags.collect_above, down_to_percent: flags.collect_down_to };
    if collect.down_to_percent > collect.above_percent {
        return Err("--collect-down-to must not be more than --collect-above".into());
    }
    let repair_from = flags.repair_from.as_deref();
    let repair_from = repair_from.map(|text| Peer::parse(text, IMAGESERVER_PORT)).transpose()?;
    let replicate = flags.replicate.settings()?;
    let master = || replicate.as_ref().map(|settings| settings.from.clone());
    let repair_from = repair_from.or_else(master);
    let limits = Limits {
        every: flags.scrub_every,
        bytes_per_second_max: u64::from(flags.scrub_rate) * 1_000_000,
    };
    let limits = (!flags.scrub_every.is_zero()).then_some(limits);
    let scrub = Settings { limits, repair_from };
    let audit = flags.audit.settings(&flags.data);
    let Flags { listen, data, lease_max, clock_settle, require_directories, .. } = flags;
    let (pack_level, store_packed) = (flags.pack_level, flags.store_packed);
    let bucket = flags.bucket.map(|(bucket, prefix)| bucket::Settings {
        bucket,
        prefix,
        endpoint: flags.bucket_endpoint,
        region: flags.bucket_region,
        credentials: flags.bucket_credentials,
        authorities: flags.bucket_ca,
        unneeded_for: flags.bucket_unneeded,
        cache_bytes_max: flags.bucket_cache.saturating_mul(1_000_000_000),
    });
    let config = Config {
        data,
        bucket,
        collect,
        lease_max,
        clock_settle,
        scrub,
        replicate,
        pack_level,
        store_packed,
        require_directories,
        security: security.clone(),
        audit,
        private_pages: flags.pages.private_pages,
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        let stop = stop_on_signals()?;
        let server = ImageServer::open(config).await?;
        let listener = listen_text(DAEMON, &security, &listen, IMAGESERVER_PORT).await?;
        server.run(listener, stop).await;
        Ok(())
    })
}
