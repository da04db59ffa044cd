//! The command line of `imageserver`.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use daemon::config::{self, ConfigArgs};
use daemon::{
    IMAGESERVER_PORT, LogArgs, SecurityArgs, exit_on_error, ignore_hangup, listen_text,
    start_logging, stop_on_signals,
};
use model::image::{ImageName, ImageNameError};
use model::time_parse;
use rpc::audit_log::AuditArgs;
use rpc::client::Peer;
use rpc::page_frame::PageArgs;
use rpc::server::CallerArgs;
use rpc::tls::Security;

use crate::check;
use crate::check::command::CheckArgs;
use crate::core::collection::disk_pressure::Bounds;
use crate::core::replication::decision::NamePatterns;
use crate::core::scrub::ScrubLimits;
use crate::daemon::{DAEMON, ImageServer, ServerConfig};
use crate::replication::follower::ReplicationSettings;
use crate::scrub::ScrubSettings;
use crate::store::bucket::settings::{self as bucket, address};

/// Stores images and serves them to machines.
///
/// Every distinct file of all images is stored once, under its digest, in the data directory. An
/// image is added with `imagetool add` and never changes. Its name is never used again, even after
/// the image was deleted. The same port answers calls, http://HOST:6971/ for browsers, /metrics for
/// Prometheus, /healthz, and /objects/ID for caches.
#[derive(Debug, Parser)]
#[command(version, after_long_help = EXAMPLES)]
pub struct Flags {
    /// Without a subcommand, the server runs.
    #[command(subcommand)]
    verb: Option<Subcommand>,

    /// Address and port to listen on: ADDR:PORT, ADDR or :PORT.
    #[arg(long, value_name = "ADDR", default_value = "[::]:6971")]
    listen: String,

    /// Directory of objects and images. It is created if it is missing, and must be on one
    /// file-system.
    #[arg(long, global = true, value_name = "DIR", default_value = "/var/lib/imageserver")]
    data: PathBuf,

    /// Store objects and images in this S3-compatible bucket. Several image servers may share it.
    /// The data directory then holds only the files of this server. The bucket must support
    /// conditional writes.
    #[arg(long, value_name = "s3://NAME/PREFIX", value_parser = address,
        conflicts_with = "replicate_from")]
    bucket: Option<(String, String)>,

    /// The address of the bucket, if it is not at AWS: http://HOST:PORT or https://HOST.
    #[arg(long, value_name = "URL", requires = "bucket")]
    bucket_endpoint: Option<String>,

    /// The region of the bucket. Default: the environment variable AWS_REGION.
    #[arg(long, value_name = "REGION", requires = "bucket")]
    bucket_region: Option<String>,

    /// A file with credentials for the bucket, in the format of ~/.aws/credentials. Without this
    /// flag these are used: `bucket` of systemd's LoadCredential, AWS_ACCESS_KEY_ID and
    /// AWS_SECRET_ACCESS_KEY, ~/.aws/credentials, the role of an AWS machine.
    #[arg(long, value_name = "FILE", requires = "bucket")]
    bucket_credentials: Option<PathBuf>,

    /// Certificate authorities that are trusted for the bucket's address, in addition to those of
    /// the system.
    #[arg(long, value_name = "FILE", requires = "bucket")]
    bucket_ca: Option<PathBuf>,

    /// How long an object must have been unused by all images before it is removed from the bucket.
    #[arg(long, value_name = "DURATION", default_value = "1d", value_parser = time_parse::duration)]
    bucket_unneeded: Duration,

    /// The size of the cache of the bucket's objects in the data directory, in GB.
    #[arg(long, value_name = "GB", default_value_t = 20,
        value_parser = clap::value_parser!(u64).range(1..))]
    bucket_cache: u64,

    /// Remove objects that no image needs when more of the file-system than this is used, as `df`
    /// counts it. 100 means never. `imagetool gc` removes them at any time.
    #[arg(long, value_name = "PERCENT", default_value_t = 95,
          value_parser = clap::value_parser!(u8).range(1..=100))]
    collect_above: u8,

    /// Objects are then removed, the oldest first, until no more than this is used.
    #[arg(long, value_name = "PERCENT", default_value_t = 90,
          value_parser = clap::value_parser!(u8).range(..=100))]
    collect_down_to: u8,

    /// How long objects that were uploaded, or found to be present, for a new image are protected
    /// from removal until the image is added. After a restart nothing is removed for this time.
    #[arg(long, value_name = "DURATION", default_value = "1d", value_parser = time_parse::duration)]
    lease_max: Duration,

    /// After a start, and after the clock jumped, images expire only when the clock has run evenly
    /// for this time.
    #[arg(long, value_name = "DURATION", default_value = "10m",
          value_parser = time_parse::duration)]
    clock_settle: Duration,

    /// Read and hash every object on the disk again within this time, such as 30d or 12h. 0s
    /// means never.
    #[arg(long, value_name = "DURATION", default_value = "30d",
          value_parser = time_parse::duration)]
    scrub_every: Duration,

    /// The most that is read for --scrub-every, in MB per second.
    #[arg(long, value_name = "MB", default_value_t = 10,
        value_parser = clap::value_parser!(u32).range(1..))]
    scrub_rate: u32,

    /// Another imageserver that has copies of objects which are lost here. Their digests are
    /// checked. Default for a replica: its master.
    #[arg(long, value_name = "ADDR")]
    repair_from: Option<String>,

    /// Compression of objects while they are sent to a peer that accepts it: a level of zstd, 1 to
    /// 19. 0 means none, for a network that is faster than the processors.
    #[arg(long, value_name = "LEVEL", default_value_t = 1,
        value_parser = clap::value_parser!(i32).range(0..=19))]
    pack_level: i32,

    /// Compression of objects in the store: a level of zstd, 1 to 19. An object is stored
    /// compressed if that makes it smaller by an eighth at least. Objects that are stored already
    /// stay as they are. 0 means none.
    #[arg(long, value_name = "LEVEL", default_value_t = 0, conflicts_with = "bucket",
        value_parser = clap::value_parser!(i32).range(0..=19))]
    store_packed: i32,

    /// Refuse images in directories that were not created with `imagetool mkdir`. Without this
    /// flag a directory is created with its first image, with the owners of its parent.
    #[arg(long)]
    require_directories: bool,

    /// Show and give images below this directory of images, and objects that no other images have,
    /// only to its owners, to the machines that `imagetool readers` names, and to callers with the
    /// power ImageServer.GetPrivateDirectories. May be given several times.
    #[arg(long, value_name = "DIRECTORY", conflicts_with = "bucket", value_parser = directory)]
    private_images: Vec<ImageName>,

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
    callers: CallerArgs,

    #[command(flatten)]
    config: ConfigArgs,
}

/// The flags of a replica.
#[derive(Debug, clap::Args)]
struct ReplicateArgs {
    /// Be a replica of the imageserver at ADDR: copy all its images, and forward to it all changes
    /// that are requested here. It may be a replica itself. `imagetool replication` shows the
    /// progress.
    #[arg(long, value_name = "ADDR")]
    replicate_from: Option<String>,

    /// Copy only images whose names match, such as `base/**`. `*` matches no slash, `**` does. May
    /// be given several times. Images that are here and do not match stay, and do not change.
    #[arg(long, value_name = "PATTERN", requires = "replicate_from")]
    replicate_include: Vec<String>,

    /// Copy no images whose names match. May be given several times.
    #[arg(long, value_name = "PATTERN", requires = "replicate_from")]
    replicate_exclude: Vec<String>,

    /// Keep images that are deleted or expire on the master.
    #[arg(long, requires = "replicate_from")]
    replicate_archive: bool,
}

impl ReplicateArgs {
    fn settings(&self) -> Result<Option<ReplicationSettings>, Box<dyn std::error::Error>> {
        let Some(from) = &self.replicate_from else { return Ok(None) };
        let from = Peer::parse(from, IMAGESERVER_PORT)?;
        let (include, exclude) = (self.replicate_include.clone(), self.replicate_exclude.clone());
        let patterns = NamePatterns::new(&include, &exclude)?;
        let is_archive = self.replicate_archive;
        Ok(Some(ReplicationSettings { from, include, exclude, patterns, is_archive }))
    }
}

/// Reads the name of a directory of images, which may end with a slash.
fn directory(text: &str) -> Result<ImageName, ImageNameError> {
    ImageName::new(text.strip_suffix('/').unwrap_or(text))
}

/// The subcommands of the program.
#[derive(Debug, clap::Subcommand)]
enum Subcommand {
    Check(CheckArgs),
}

const EXAMPLES: &str = "\
Examples:
  # Store images in the default directory, on a trusted network
  imageserver

  # Try it out
  imageserver --listen 127.0.0.1:6971 --data /tmp/images
  imagetool --imageserver 127.0.0.1:6971 list

  # Store images in a bucket. Several servers may do so, each with a directory of its own
  imageserver --bucket s3://images/prod --bucket-endpoint https://s3.example.com \
      --bucket-credentials /etc/imageserver/bucket --data /var/cache/imageserver

  # A replica of another server, and one of some of its images
  imageserver --replicate-from images1
  imageserver --replicate-from images1:6971 --replicate-include 'base/**'

  # Check that every stored object is present and intact. Stop the server first
  imageserver check

Exit codes: 0 stopped by a signal, 1 failed, 2 misuse.";

/// Runs the program, with the arguments of this process.
#[must_use]
pub fn main() -> ExitCode {
    let flags: Flags = config::parse(DAEMON);
    match &flags.verb {
        Some(Subcommand::Check(args)) => check::command::run(flags.data, args),
        None => exit_on_error(run(flags)),
    }
}

fn run(flags: Flags) -> Result<(), Box<dyn std::error::Error>> {
    start_logging(&flags.log)?;
    let security = flags.security.for_daemon(DAEMON)?;
    let collect =
        Bounds { above_percent: flags.collect_above, down_to_percent: flags.collect_down_to };
    if collect.down_to_percent > collect.above_percent {
        return Err("--collect-down-to must not be more than --collect-above".into());
    }
    if !flags.private_images.is_empty() && matches!(security, Security::Insecure) {
        return Err("--private-images needs certificates, which --insecure does not use".into());
    }
    let repair_from = flags.repair_from.as_deref();
    let repair_from = repair_from.map(|text| Peer::parse(text, IMAGESERVER_PORT)).transpose()?;
    let replicate = flags.replicate.settings()?;
    let master = || replicate.as_ref().map(|settings| settings.from.clone());
    let repair_from = repair_from.or_else(master);
    let limits = ScrubLimits {
        every: flags.scrub_every,
        bytes_per_second_max: u64::from(flags.scrub_rate) * 1_000_000,
    };
    let limits = (!flags.scrub_every.is_zero()).then_some(limits);
    let scrub = ScrubSettings { limits, repair_from };
    let audit = flags.audit.settings(&flags.data);
    let Flags { listen, data, lease_max, clock_settle, require_directories, .. } = flags;
    let (pack_level, store_packed) = (flags.pack_level, flags.store_packed);
    let bucket = flags.bucket.map(|(bucket, prefix)| bucket::BucketSettings {
        bucket,
        prefix,
        endpoint: flags.bucket_endpoint,
        region: flags.bucket_region,
        credentials: flags.bucket_credentials,
        authorities: flags.bucket_ca,
        unneeded_for: flags.bucket_unneeded,
        cache_bytes_max: flags.bucket_cache.saturating_mul(1_000_000_000),
    });
    let config = ServerConfig {
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
        private_images: flags.private_images,
        security: security.clone(),
        audit,
        private_pages: flags.pages.private_pages,
        limits: flags.callers.limits(),
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        ignore_hangup()?;
        let stop = stop_on_signals()?;
        let server = ImageServer::open(config).await?;
        let listener = listen_text(DAEMON, &security, &listen, IMAGESERVER_PORT).await?;
        server.run(listener, stop).await;
        Ok(())
    })
}
