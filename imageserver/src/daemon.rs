//! The daemon: opens the store, starts the background tasks, and serves calls until it is stopped.

pub mod command;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use api::image_server::replication::ServerId;
use model::display::error_chain;
use model::image::ImageName;
use rpc::audit_log::{self, AuditError, AuditLog};
use rpc::page_frame::Frame;
use rpc::server::{Router, ServerLimits, serve};
use rpc::tls::Security;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::collection::Collector;
use crate::core::collection::disk_pressure::Bounds;
use crate::expiry::Expiry;
use crate::interface::methods::Service;
use crate::interface::methods::download::Packers;
use crate::interface::{BackgroundTasks, metrics};
use crate::replication::follower::Follower;
use crate::replication::{ArchiveError, Replication, check_archive, server_id};
use crate::scrub::Scrub;
use crate::store::bucket::settings::BucketSettings;
use crate::store::contract::Refresh;
use crate::store::error::{StoreError, failed};
use crate::store::private_images::PrivateImages;
use crate::store::{Counters, Store};

/// The name of the daemon.
pub const DAEMON: &str = "imageserver";

/// How often the free space is checked.
const SPACE_CHECK_INTERVAL: Duration = Duration::from_secs(20);

/// How often the clocks are read and expired images deleted.
const EXPIRE_INTERVAL: Duration = Duration::from_secs(2);

/// How often the changes of other servers that share the store are read.
const REFRESH_INTERVAL: Duration = Duration::from_secs(2);

/// How often trees that could not be read are tried again.
const PRIVATE_CHECK_INTERVAL: Duration = Duration::from_secs(600);

/// The configuration of an image server.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    pub data: PathBuf,
    /// The bucket of the store; `None` if the store is in the data directory.
    pub bucket: Option<BucketSettings>,
    /// The bounds of automatic collections.
    pub collect: Bounds,
    /// The longest lease that is given.
    pub lease_max: Duration,
    /// How long the clocks must agree before images expire.
    pub clock_settle: Duration,
    /// The settings of the scrub.
    pub scrub: crate::scrub::ScrubSettings,
    /// The master that is followed.
    pub replicate: Option<crate::replication::follower::ReplicationSettings>,
    /// The zstd level for clients that accept packed objects; 0 for none.
    pub pack_level: i32,
    /// The zstd level for stored objects; 0 for none.
    pub store_packed: i32,
    /// True to refuse images in directories that were never made.
    pub require_directories: bool,
    /// The directories whose images are private.
    pub private_images: Vec<ImageName>,
    /// How connections are protected.
    pub security: Security,
    /// Where changes are recorded.
    pub audit: audit_log::AuditSettings,
    /// True to show pages only to those who have a certificate.
    pub private_pages: bool,
    /// What callers may use of the process.
    pub limits: ServerLimits,
}

/// An image server that has opened its store and does not serve yet.
pub struct ImageServer {
    store: Arc<Store>,
    collector: Arc<Collector>,
    expiry: Arc<Expiry>,
    scrub: crate::scrub::ScrubSettings,
    id: ServerId,
    replicate: Option<crate::replication::follower::ReplicationSettings>,
    packers: Packers,
    security: Security,
    audit: AuditLog,
    private_pages: bool,
    limits: ServerLimits,
}

/// Why a server cannot start.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Archive(#[from] ArchiveError),
    #[error(transparent)]
    Audit(#[from] AuditError),
}

impl ImageServer {
    /// Opens the data directory.
    pub async fn open(config: ServerConfig) -> Result<Self, OpenError> {
        let packers = Packers::new(config.pack_level).map_err(failed("begin to pack objects"))?;
        let runtime = tokio::runtime::Handle::current();
        let (data, bucket) = (config.data, config.bucket);
        let private = config.private_images;
        let open = move || {
            let mut store = match bucket {
                None => Store::open_packing(&data, config.store_packed),
                Some(settings) => Store::open_bucket(&data, &settings, runtime),
            }?;
            if !private.is_empty() {
                store.keep_private(private);
            }
            Ok::<_, StoreError>(store)
        };
        let opened = tokio::task::spawn_blocking(open).await;
        let store = opened.map_err(|lost| StoreError::Io {
            what: "open the data directory".to_owned(),
            source: std::io::Error::other(lost),
        })??;
        store.leasing.set_longest(u32::try_from(config.lease_max.as_secs()).unwrap_or(u32::MAX));
        if config.require_directories {
            store.directories.require_made();
        }
        let id = server_id(store.data());
        if let Some(settings) = &config.replicate {
            check_archive(store.data(), settings.is_archive)??;
        }
        let store = Arc::new(store);
        let audit = AuditLog::open(config.audit, DAEMON).await?;
        let collector = Collector::new(Arc::clone(&store), config.collect).recording(audit.clone());
        let expiry =
            Expiry::new(Arc::clone(&store), config.clock_settle, config.replicate.is_some());
        let (collector, expiry) = (Arc::new(collector), Arc::new(expiry.recording(audit.clone())));
        Ok(Self {
            store,
            collector,
            expiry,
            scrub: config.scrub,
            id,
            replicate: config.replicate,
            packers,
            security: config.security,
            audit,
            private_pages: config.private_pages,
            limits: config.limits,
        })
    }

    /// Serves on `listener` until `stop` is cancelled, then completes the calls that have begun.
    pub async fn run(self, listener: TcpListener, stop: CancellationToken) {
        let tasks = TaskTracker::new();
        let security = self.security;
        let counters = Arc::new(Counters::default());
        let frame = Frame::new(DAEMON, &security);
        let counted = (Arc::clone(&self.store), stop.clone());
        tasks.spawn_blocking(move || counted.0.objects.count(&|| counted.1.is_cancelled()));
        tasks.spawn(collect_when_full(
            Arc::clone(&self.store),
            Arc::clone(&self.collector),
            stop.clone(),
        ));
        tasks.spawn(expire(Arc::clone(&self.expiry), stop.clone()));
        tasks.spawn(refresh(Arc::clone(&self.store), stop.clone()));
        if let Some(private) = self.store.private.clone() {
            tasks.spawn(check_private(private, Arc::clone(&self.store), stop.clone()));
        }
        let scrub = Arc::new(Scrub::default());
        crate::scrub::start(&scrub, self.scrub, &self.store, &counters, (&security, &tasks, &stop));
        let follower = self.replicate.map(|settings| {
            let (store, counters) = (Arc::clone(&self.store), Arc::clone(&counters));
            Arc::new(Follower::new(
                settings,
                &security,
                self.id.clone(),
                store,
                counters,
                tasks.clone(),
            ))
        });
        let port = listener.local_addr().map_or(0, |address| address.port());
        if let Some(follower) = &follower {
            follower.start(port, &tasks, &stop);
        }
        let replication = Arc::new(Replication::new(self.id, follower));
        let background =
            BackgroundTasks { collector: self.collector, expiry: self.expiry, scrub, replication };
        let router = Router::new(DAEMON, &security).frame(frame.clone()).metrics(|registry| {
            metrics::register(registry, &counters, &self.store, &background);
        });
        let router =
            router.audit(&self.audit).private_pages(self.private_pages).limits(self.limits);
        let router = crate::interface::pages::routes(router, &self.store, &background, &frame);
        let (packers, store) = (self.packers, Arc::clone(&self.store));
        let service =
            Service::new(self.store, background, counters, packers, tasks.clone(), stop.clone());
        serve(listener, service.routes(router), stop).await;
        tasks.close();
        tasks.wait().await;
        let close = move || {
            // Otherwise the next start must verify every object.
            if let Err(error) = store.objects.sync() {
                tracing::error!("objects may not be on the medium: {}", error_chain(&error));
            }
            // Otherwise the next start holds all objects as long as the longest lease.
            if let Err(error) = store.leasing.close() {
                tracing::error!("cannot save the leases: {}", error_chain(&error));
            }
        };
        // This fails only if it panicked, which has been logged.
        let _closed = tokio::task::spawn_blocking(close).await;
        self.audit.close().await;
    }
}

/// Reads the changes of other servers, until `stop` is cancelled.
async fn refresh(store: Arc<Store>, stop: CancellationToken) {
    let mut is_known = true;
    loop {
        tokio::select! {
            () = tokio::time::sleep(REFRESH_INTERVAL) => {}
            () = stop.cancelled() => return,
        }
        let looking = Arc::clone(&store);
        let look = move || {
            let heard = looking.images.refresh(Refresh::Periodic);
            heard.and(looking.directories.refresh())
        };
        match tokio::task::spawn_blocking(look).await {
            Ok(Ok(())) if is_known => {}
            Ok(Ok(())) => {
                is_known = true;
                tracing::info!("reads the changes of other servers again");
            }
            Ok(Err(error)) => {
                // Logged once: this runs every few seconds.
                if std::mem::take(&mut is_known) {
                    tracing::error!(
                        "cannot read the changes of other servers: {}",
                        error_chain(&error)
                    );
                }
            }
            Err(error) => tracing::error!("looking for changes of other servers failed: {error}"),
        }
    }
}

/// Finds which objects only private images have whenever images have changed, until `stop` is
/// cancelled.
async fn check_private(private: Arc<PrivateImages>, store: Arc<Store>, stop: CancellationToken) {
    let mut changes = store.images.subscribe();
    loop {
        changes.mark_unchanged();
        let (checked, store, stopped) = (Arc::clone(&private), Arc::clone(&store), stop.clone());
        let check =
            move || checked.check(&*store.objects, &store.images, &|| stopped.is_cancelled());
        if let Err(error) = tokio::task::spawn_blocking(check).await {
            tracing::error!("looking for objects of private images failed: {error}");
        }
        tokio::select! {
            _ = changes.changed() => {}
            () = private.changed() => {}
            () = tokio::time::sleep(PRIVATE_CHECK_INTERVAL) => {}
            () = stop.cancelled() => return,
        }
    }
}

/// Deletes expired images, until `stop` is cancelled.
async fn expire(expiry: Arc<Expiry>, stop: CancellationToken) {
    loop {
        let ticking = Arc::clone(&expiry);
        if let Err(error) = tokio::task::spawn_blocking(move || ticking.tick()).await {
            tracing::error!("expiring images failed: {error}");
        }
        tokio::select! {
            () = tokio::time::sleep(EXPIRE_INTERVAL) => {}
            () = stop.cancelled() => return,
        }
    }
}

/// Removes objects whenever the disk is nearly full, until `stop` is cancelled.
async fn collect_when_full(store: Arc<Store>, collector: Arc<Collector>, stop: CancellationToken) {
    loop {
        let (store, stopped) = (Arc::clone(&store), stop.clone());
        let work = {
            let collector = Arc::clone(&collector);
            tokio::task::spawn_blocking(move || {
                // An error is logged when it begins, and is an alarm meanwhile.
                let _noted = store.leasing.note_time_passed();
                collector.collect_if_full(|| stopped.is_cancelled());
            })
        };
        if let Err(error) = work.await {
            tracing::error!("a collection failed: {error}");
        }
        tokio::select! {
            () = tokio::time::sleep(SPACE_CHECK_INTERVAL) => {}
            () = collector.uploaded() => {}
            () = stop.cancelled() => return,
        }
    }
}
