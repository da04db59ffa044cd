//! The daemon: opens the store, starts the background tasks, and serves calls until it is stopped.

pub mod command;

use rpc::tls::Security;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::collection::Collector;
use crate::core::collection::disk_pressure::Bounds;
use crate::interface::Life;
use api::image_server::replication::ServerId;
use model::report::report;
use rpc::audit_log::{self, AuditError, AuditLog};
use rpc::page_frame::Frame;
use rpc::server::{Router, serve};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::expiry::Expiry;
use crate::interface::methods::{Packers, Service};
use crate::interface::metrics;
use crate::replication::follower::Follower;
use crate::replication::{Replication, identity};
use crate::scrub::Scrub;
use crate::store::bucket::settings::Settings;
use crate::store::contract::Look;
use crate::store::counters::Counters;
use crate::store::{
    Store,
    error::{StoreError, failed},
};

/// The name of the daemon.
pub const DAEMON: &str = "imageserver";

/// How often it is looked whether the disk is nearly full.
const RELIEVE_INTERVAL: Duration = Duration::from_secs(20);

/// How often the clocks are read, and images looked for whose time has come.
const EXPIRE_INTERVAL: Duration = Duration::from_secs(2);

/// How often it is looked what other servers that share the store have changed.
const REFRESH_INTERVAL: Duration = Duration::from_secs(2);

/// What an image server needs to know.
#[derive(Clone, Debug)]
pub struct Config {
    /// The data directory.
    pub data: PathBuf,
    /// The bucket that has the store, if the data directory has not.
    pub bucket: Option<Settings>,
    /// When objects are collected without being asked for.
    pub collect: Bounds,
    /// The longest lease that is given.
    pub lease_max: Duration,
    /// For how long the clocks must have agreed before images expire.
    pub clock_settle: Duration,
    /// How all that is kept is read again.
    pub scrub: crate::scrub::Settings,
    /// Which master is followed.
    pub replicate: Option<crate::replication::Settings>,
    /// How hard objects are packed for those who take them packed: a level of zstd; 0 for never.
    pub pack_level: i32,
    /// How hard objects are packed that are stored in the data directory: a level of zstd; 0 for
    /// never.
    pub store_packed: i32,
    /// True to refuse images in directories that were never made.
    pub require_directories: bool,
    /// How connections are protected.
    pub security: Security,
    /// Where changes are recorded.
    pub audit: audit_log::Settings,
    /// True to show pages only to those who have a certificate.
    pub private_pages: bool,
}

/// An image server that has its data directory, and does not answer yet.
pub struct ImageServer {
    store: Arc<Store>,
    collector: Arc<Collector>,
    expiry: Arc<Expiry>,
    scrub: crate::scrub::Settings,
    id: ServerId,
    replicate: Option<crate::replication::Settings>,
    packers: Packers,
    security: Security,
    audit: AuditLog,
    private_pages: bool,
}

/// A server that cannot start.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The data directory cannot be used.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// It is that of an archive.
    #[error(transparent)]
    Archive(#[from] identity::ArchiveError),
    /// The audit log cannot be written.
    #[error(transparent)]
    Audit(#[from] AuditError),
}

impl ImageServer {
    /// Opens the data directory.
    ///
    /// # Errors
    ///
    /// [`OpenError`], if another server has it, the file-system fails, or it is an archive.
    pub async fn open(config: Config) -> Result<Self, OpenError> {
        let Config {
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
            security,
            audit,
            private_pages,
        } = config;
        let packers = Packers::new(pack_level).map_err(failed("begin to pack objects"))?;
        let runtime = tokio::runtime::Handle::current();
        let open = move || match bucket {
            None => Store::open_packing(&data, store_packed),
            Some(settings) => Store::open_bucket(&data, &settings, runtime),
        };
        let opened = tokio::task::spawn_blocking(open).await;
        let store = opened.map_err(|lost| StoreError::Io {
            what: "open the data directory".to_owned(),
            source: std::io::Error::other(lost),
        })??;
        store.leasing.set_longest(u32::try_from(lease_max.as_secs()).unwrap_or(u32::MAX));
        if require_directories {
            store.directories.demand();
        }
        let id = identity::server_id(store.data())?;
        if let Some(settings) = &replicate {
            identity::keep_archive(store.data(), settings.is_archive)??;
        }
        let store = Arc::new(store);
        let audit = AuditLog::open(audit, DAEMON).await?;
        let collector = Collector::new(Arc::clone(&store), collect).recording(audit.clone());
        let expiry = Expiry::new(Arc::clone(&store), clock_settle, replicate.is_some());
        let (collector, expiry) = (Arc::new(collector), Arc::new(expiry.recording(audit.clone())));
        Ok(Self {
            store,
            collector,
            expiry,
            scrub,
            id,
            replicate,
            packers,
            security,
            audit,
            private_pages,
        })
    }

    /// Answers on `listener` until `stop` is cancelled, and ends what was begun.
    pub async fn run(self, listener: TcpListener, stop: CancellationToken) {
        let tasks = TaskTracker::new();
        let security = self.security;
        let counters = Arc::new(Counters::default());
        let frame = Frame::new(DAEMON, &security);
        let counted = (Arc::clone(&self.store), stop.clone());
        tasks.spawn_blocking(move || counted.0.objects.count(&|| counted.1.is_cancelled()));
        tasks.spawn(relieve(Arc::clone(&self.store), Arc::clone(&self.collector), stop.clone()));
        tasks.spawn(expire(Arc::clone(&self.expiry), stop.clone()));
        tasks.spawn(refresh(Arc::clone(&self.store), stop.clone()));
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
        let life = Life { collector: self.collector, expiry: self.expiry, scrub, replication };
        let router = Router::new(DAEMON, &security).frame(frame.clone()).metrics(|registry| {
            metrics::register(registry, &counters, &self.store, &life);
        });
        let router = router.audit(&self.audit).private_pages(self.private_pages);
        let router = crate::interface::pages::routes(router, &self.store, &life, &frame);
        let (packers, store) = (self.packers, Arc::clone(&self.store));
        let service =
            Service::new(self.store, life, counters, packers, tasks.clone(), stop.clone());
        serve(listener, service.routes(router), stop).await;
        tasks.close();
        tasks.wait().await;
        // So that the next server need not doubt what is there.
        let synced = tokio::task::spawn_blocking(move || store.objects.sync()).await;
        if let Ok(Err(error)) = synced {
            tracing::error!("objects may not be on the medium: {}", report(&error));
        }
        self.audit.close().await;
    }
}

/// Hears of images that other servers have added or changed, until `stop` is cancelled.
async fn refresh(store: Arc<Store>, stop: CancellationToken) {
    let mut is_known = true;
    loop {
        tokio::select! {
            () = tokio::time::sleep(REFRESH_INTERVAL) => {}
            () = stop.cancelled() => return,
        }
        let looking = Arc::clone(&store);
        let look = move || {
            let heard = looking.images.refresh(Look::Often);
            heard.and(looking.directories.refresh())
        };
        match tokio::task::spawn_blocking(look).await {
            Ok(Ok(())) if is_known => {}
            Ok(Ok(())) => {
                is_known = true;
                tracing::info!("what other servers changed is known again");
            }
            Ok(Err(error)) => {
                // Once is enough: it is looked every few seconds.
                if std::mem::take(&mut is_known) {
                    tracing::error!("what other servers change is not known: {}", report(&error));
                }
            }
            Err(error) => tracing::error!("looking for images was broken off: {error}"),
        }
    }
}

/// Lets images expire, until `stop` is cancelled.
async fn expire(expiry: Arc<Expiry>, stop: CancellationToken) {
    loop {
        let ticking = Arc::clone(&expiry);
        if let Err(error) = tokio::task::spawn_blocking(move || ticking.tick()).await {
            tracing::error!("expiring images was broken off: {error}");
        }
        tokio::select! {
            () = tokio::time::sleep(EXPIRE_INTERVAL) => {}
            () = stop.cancelled() => return,
        }
    }
}

/// Removes objects whenever the disk is nearly full, until `stop` is cancelled.
async fn relieve(store: Arc<Store>, collector: Arc<Collector>, stop: CancellationToken) {
    loop {
        let (store, stopped) = (Arc::clone(&store), stop.clone());
        let work = {
            let collector = Arc::clone(&collector);
            tokio::task::spawn_blocking(move || {
                if let Err(error) = store.leasing.count_down() {
                    tracing::error!("{}", report(&error));
                }
                collector.relieve(|| stopped.is_cancelled());
            })
        };
        if let Err(error) = work.await {
            tracing::error!("a collection was lost: {error}");
        }
        tokio::select! {
            () = tokio::time::sleep(RELIEVE_INTERVAL) => {}
            () = collector.uploaded() => {}
            () = stop.cancelled() => return,
        }
    }
}
