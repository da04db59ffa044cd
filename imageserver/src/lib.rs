//! The content-addressed store of images.
//!
//! Every distinct file and every distinct directory is an object, stored once under its digest; an
//! image is a small record that names the digest of a tree. [`store`] keeps them, [`admission`]
//! decides which images may be added, [`service`] answers calls, `pages` shows what there is;
//! [`scrub`] reads all of it in the background, [`check`] all of a store that no server uses.
//!
//! # Invariants
//!
//! * Durable before visible: an image is seen when it and all it needs are on the medium.
//! * What is served was checked against its digest since it was last changed.
//! * Memory grows neither with the size of objects nor with the trees of images.
//!
//! # Not yet
//!
//! Objects are never removed, not even when the last image that needs them is deleted: collection
//! comes with a later release. A lease asked for by `CheckObjects` is therefore always held.

pub mod admission;
pub mod check;
pub mod command;
pub mod metrics;
pub mod scrub;
pub mod service;
pub mod store;

mod pages;

use std::path::PathBuf;
use std::sync::Arc;

use common::daemon::page::Frame;
use common::report::report;
use common::wire::server::{Router, serve};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use metrics::Metrics;
use scrub::Scrub;
use service::Service;
use store::{Store, StoreError};

/// The name of the daemon.
pub const DAEMON: &str = "imageserver";

/// What an image server needs to know.
#[derive(Clone, Debug)]
pub struct Config {
    /// The data directory.
    pub data: PathBuf,
    /// How all that is kept is read again.
    pub scrub: scrub::Settings,
}

/// An image server that has its data directory, and does not answer yet.
pub struct ImageServer {
    store: Arc<Store>,
    scrub: scrub::Settings,
}

impl ImageServer {
    /// Opens the data directory.
    ///
    /// # Errors
    ///
    /// [`StoreError`], if another server has it or the file-system fails.
    pub async fn open(config: Config) -> Result<Self, StoreError> {
        let Config { data, scrub } = config;
        let opened = tokio::task::spawn_blocking(move || Store::open(&data)).await;
        let store = opened.map_err(|lost| StoreError::Io {
            what: "open the data directory".to_owned(),
            source: std::io::Error::other(lost),
        })??;
        Ok(Self { store: Arc::new(store), scrub })
    }

    /// Answers on `listener` until `stop` is cancelled, and ends what was begun.
    pub async fn run(self, listener: TcpListener, stop: CancellationToken) {
        let tasks = TaskTracker::new();
        let metrics = Arc::new(Metrics::default());
        let frame = Frame::new(DAEMON);
        let counted = (Arc::clone(&self.store), stop.clone());
        tasks.spawn_blocking(move || counted.0.objects.count(|| counted.1.is_cancelled()));
        let scrub = Arc::new(Scrub::default());
        scrub::start(&scrub, self.scrub, &self.store, &metrics, &tasks, &stop);
        let router = Router::new(DAEMON).frame(frame.clone()).metrics(|registry| {
            metrics.register(registry, Arc::clone(&self.store), Arc::clone(&scrub));
        });
        let router = pages::routes(router, &self.store, &scrub, &frame);
        let store = Arc::clone(&self.store);
        let service = Service::new(self.store, metrics, tasks.clone(), stop.clone());
        serve(listener, service.routes(router), stop).await;
        tasks.close();
        tasks.wait().await;
        // So that the next server need not doubt what is there.
        let synced = tokio::task::spawn_blocking(move || store.objects.sync()).await;
        if let Ok(Err(error)) = synced {
            tracing::error!("objects may not be on the medium: {}", report(&error));
        }
    }
}
