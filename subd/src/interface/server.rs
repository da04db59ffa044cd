//! The methods of subd: checks what is asked, and asks the parts that do it.

use rpc::page_frame::Frame;
use rpc::tls::Security;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use api::Done;
use api::fault::{Fault, FaultCode};
use api::object_server::IDS_MAX;
use api::subd::{
    Cleanup, Commit, Configuration, DIRECTORIES_MAX, EncodedDirectory, Fetch, GetConfiguration,
    GetDirectories, GetDirectoriesReply, OfferImage, POLL_WAIT_MS_MAX, Poll, PollReply,
    PollRequest, Prepare, ScanCounters, SetConfiguration, SetConfigurationRequest,
};
use model::escape::ByteText;
use model::object::ObjectId;
use model::report::report;
use model::tree::{Child, Directory, Tree};
use rpc::server::Router;
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;

use crate::blocking;
use crate::cache::Cache;
use crate::fetch::Fetcher;
use crate::interface::operator::{self, refuse_if_paused};
use crate::interface::pages;
use crate::limits::Budgets;
use crate::root::Root;
use crate::scan::Scanner;
use crate::state::persisted_state::{PersistedState, StateDirectory};
use crate::state::report_state::{Measured, ReportState};
use crate::update::Updater;
use system::clock::wall;

/// How much of directories one reply carries before it stops, in bytes.
const DIRECTORIES_BYTES_MAX: usize = 16 << 20;

type DirectoryIndex = BTreeMap<ObjectId, Arc<Directory>>;

/// Answers the methods.
pub struct Service {
    /// The tree.
    pub root: Arc<Root>,
    /// What polls report.
    pub report_state: Arc<ReportState>,
    /// The objects.
    pub cache: Arc<Cache>,
    /// What scans.
    pub scanner: Arc<Scanner>,
    /// What fetches.
    pub fetcher: Fetcher,
    /// What updates.
    pub updater: Arc<Updater>,
    /// What may be taken of the machine.
    pub budgets: Arc<Budgets>,
    /// What is remembered.
    pub state: Arc<StateDirectory>,
    /// Bytes that were fetched since the start.
    pub fetched_bytes: Arc<AtomicU64>,
    /// When polls stop waiting.
    pub stop: CancellationToken,
    /// The directories of the latest tree that was asked for, by digest.
    pub index: Mutex<Option<(ObjectId, Arc<DirectoryIndex>)>>,
    /// Lets one change of the configuration be done at a time.
    pub configuring: Mutex<()>,
    /// Lets files be given to one caller at a time.
    pub giving_files: Arc<tokio::sync::Semaphore>,
}

/// The router with all methods and pages of `service`.
#[must_use]
pub fn router(service: &Arc<Service>, security: &Security) -> Router {
    let (router, frame) = (Router::new("subd", security), Frame::new("subd", security));
    let router = pages::add_pages(router, service, frame);
    let router = operator::add_methods(router, service);
    let given = || Arc::clone(service);
    let (poll, directories, fetch, prepare) = (given(), given(), given(), given());
    let (commit, cleanup, get, set) = (given(), given(), given(), given());
    let offer = given();
    router
        .method::<Poll, _, _>(move |_, request| {
            let service = Arc::clone(&poll);
            async move { Ok(service.poll(request).await) }
        })
        .method::<GetDirectories, _, _>(move |_, request| {
            let service = Arc::clone(&directories);
            async move { blocking(move || service.directories(&request.digests)).await }
        })
        .method::<Fetch, _, _>(move |_, request| {
            let service = Arc::clone(&fetch);
            async move { service.fetcher.start(request).await.map(|()| Done {}) }
        })
        .method::<Prepare, _, _>(move |_, request| {
            let service = Arc::clone(&prepare);
            async move {
                refuse_if_paused(&service.report_state)?;
                service.updater.prepare(request).await.map(|()| Done {})
            }
        })
        .method::<Commit, _, _>(move |_, request| {
            let service = Arc::clone(&commit);
            async move {
                refuse_if_paused(&service.report_state)?;
                service.updater.permit(request.update_id).await?;
                service.updater.commit(request.update_id).map(|()| Done {})
            }
        })
        .method::<OfferImage, _, _>(move |_, request| {
            let service = Arc::clone(&offer);
            async move {
                let Some(trust) = &service.updater.trust else { return Ok(Done {}) };
                let snapshot = service.report_state.read(|state| state.snapshot.clone());
                let scanned = snapshot.and_then(|snapshot| snapshot.tree.clone());
                trust.offer(request, scanned).await.map(|()| Done {})
            }
        })
        .method::<Cleanup, _, _>(move |_, request| {
            let service = Arc::clone(&cleanup);
            async move { blocking(move || service.cleanup(&request.objects)).await }
        })
        .method::<GetConfiguration, _, _>(move |_, ()| {
            let configuration =
                get.report_state.read(|state| state.persisted.configuration.clone());
            async move { Ok(configuration) }
        })
        .method::<SetConfiguration, _, _>(move |_, configuration| {
            let service = Arc::clone(&set);
            async move { blocking(move || service.configure(configuration)).await }
        })
}

pub(crate) fn too_many(count: usize, max: usize, what: &str) -> Fault {
    Fault::new(FaultCode::TooLarge, format!("{count} {what}: at most {max} are accepted"))
}

impl Service {
    /// Waits for news and reports.
    pub async fn poll(&self, request: PollRequest) -> PollReply {
        let wait = Duration::from_millis(request.wait_ms.min(POLL_WAIT_MS_MAX).into());
        let deadline = Instant::now() + wait;
        let mut versions = self.report_state.watch();
        while request.have == Some(*versions.borrow_and_update()) {
            let news = timeout_at(deadline, versions.changed());
            tokio::select! {
                news = news => if news.is_err() { break },
                () = self.stop.cancelled() => break,
            }
        }
        self.report_state.reply(request.have, self.measured())
    }

    /// What is measured now.
    #[must_use]
    pub fn measured(&self) -> Measured {
        let space = self.root.space().unwrap_or_else(|error| {
            tracing::warn!("{}", report(&error));
            api::subd::Space::default()
        });
        let fetched_bytes = self.fetched_bytes.load(Ordering::Relaxed);
        let counters = ScanCounters { fetched_bytes, ..self.scanner.counters() };
        let (load, ceilings) = (self.budgets.load(), self.budgets.ceilings());
        Measured { space, counters, load, ceilings, clock: wall() }
    }

    fn directories(&self, digests: &[ObjectId]) -> Result<GetDirectoriesReply, Fault> {
        if digests.len() > DIRECTORIES_MAX {
            return Err(too_many(digests.len(), DIRECTORIES_MAX, "digests"));
        }
        let snapshot = self.report_state.read(|state| state.snapshot.clone());
        let tree = snapshot.and_then(|snapshot| snapshot.tree.clone());
        let index = tree.map_or_else(Arc::default, |tree| self.index_of(&tree));
        let mut reply = GetDirectoriesReply { directories: Vec::new(), absent: Vec::new() };
        let mut bytes = 0;
        for digest in digests {
            let Some(directory) = index.get(digest) else {
                reply.absent.push(*digest);
                continue;
            };
            let encoded = directory.encode();
            bytes += encoded.len();
            if bytes > DIRECTORIES_BYTES_MAX && !reply.directories.is_empty() {
                break;
            }
            reply.directories.push(EncodedDirectory(ByteText(encoded)));
        }
        Ok(reply)
    }

    fn index_of(&self, tree: &Tree) -> Arc<DirectoryIndex> {
        let mut slot = self.index.lock().unwrap_or_else(PoisonError::into_inner);
        match &*slot {
            Some((root, index)) if *root == tree.digest() => Arc::clone(index),
            _ => {
                let index = Arc::new(directories_of(tree));
                *slot = Some((tree.digest(), Arc::clone(&index)));
                index
            }
        }
    }

    fn cleanup(&self, objects: &[ObjectId]) -> Result<Done, Fault> {
        if objects.len() > IDS_MAX {
            return Err(too_many(objects.len(), IDS_MAX, "objects"));
        }
        let removed = self.cache.remove(objects);
        self.report_state.set_cache(|| self.cache.ids());
        match removed {
            Ok(_) => Ok(Done {}),
            Err(error) => Err(Fault::new(FaultCode::Internal, report(&error))),
        }
    }

    /// Writes the configuration, and then puts it in force. Blocks.
    fn configure(&self, request: SetConfigurationRequest) -> Result<Done, Fault> {
        let _turn = self.configuring.lock().unwrap_or_else(PoisonError::into_inner);
        let old = self.report_state.read(|state| state.persisted.configuration.clone());
        let scan = request.scan.unwrap_or_else(|| old.scan.clone());
        let limits = request.limits.unwrap_or(old.limits);
        let configuration = Configuration { scan, limits };
        let change =
            |persisted: &mut PersistedState| persisted.configuration.clone_from(&configuration);
        let persisted = self.report_state.persist(&self.state, change);
        persisted.map_err(|error| Fault::new(FaultCode::Internal, report(&error)))?;
        if configuration != old {
            self.budgets.set_limits(configuration.limits);
            self.scanner.set_settings(configuration.scan);
        }
        Ok(Done {})
    }
}

/// All directories of `tree` by digest.
fn directories_of(tree: &Tree) -> DirectoryIndex {
    let mut index = BTreeMap::new();
    let mut stack = vec![Arc::clone(tree.root())];
    while let Some(directory) = stack.pop() {
        if index.contains_key(&directory.digest()) {
            continue;
        }
        for entry in directory.entries() {
            if let Child::Directory(below) = &entry.child {
                stack.push(Arc::clone(below));
            }
        }
        index.insert(directory.digest(), directory);
    }
    index
}
