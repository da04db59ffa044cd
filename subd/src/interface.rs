//! The interfaces of subd: RPC methods, a page and metrics.
//!
//! | module | what |
//! |---|---|
//! | [`operator`] | the methods that operators call |
//! | [`pages`] | the status page |
//! | [`resources`] | the methods about resources |
//! | [`tasks`](mod@tasks) | the methods about daemon tasks |

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use api::Done;
use api::fault::{Fault, FaultCode};
use api::object_server::IDS_MAX;
use api::subd::{
    AddObjects, Cleanup, Commit, Configuration, CountOwners, DIRECTORIES_MAX, EncodedDirectory,
    Fetch, GetConfiguration, GetDirectories, GetDirectoriesReply, GetDirectoryBlocks,
    GetDirectoryBlocksReply, GetDirectoryBlocksRequest, GetLimits, GetRefusedChanges,
    GetRefusedChangesReply, HAVE_MAX, OfferContents, OfferImage, POLL_WAIT_MS_MAX, Poll, PollReply,
    PollRequest, Prepare, PreviewScan, PreviewScanReply, PreviewScanRequest, ReplaceCertificate,
    ScanCounters, SetConfiguration, SetConfigurationRequest,
};
use model::display::error_chain;
use model::escape::ByteText;
use model::lock::locked;
use model::object::ObjectId;
use model::tree::Directory;
use model::tree::blocks::Blocks;
use model::tree::encode::DIRECTORY_BYTES_MAX;
use rpc::page_frame::Frame;
use rpc::server::{Caller, Router, ServerLimits};
use rpc::tls::Security;
use system::clock::wall;
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;

use crate::blocking;
use crate::cache::Cache;
use crate::fetch::Fetcher;
use crate::interface::metrics::SubMetrics;
use crate::interface::operator::refuse_if_paused;
use crate::limits::Budgets;
use crate::root::Root;
use crate::scan::{Pause, PreviewState, Scanner};
use crate::state::{Measured, ReportState, Snapshot, State};
use crate::update::Updater;

mod metrics;
pub mod operator;
pub mod pages;
pub mod resources;
pub mod tasks;

/// How much of directories one reply carries, in bytes.
const DIRECTORIES_BYTES_MAX: usize = 4 << 20;

/// What a reply of GetDirectories has besides one directory: three lengths, and digests that are
/// absent.
const REPLY_FRAME_BYTES: usize = 1 << 20;

/// What the methods of subd use.
pub struct Service {
    pub root: Arc<Root>,
    pub report_state: Arc<ReportState>,
    pub cache: Arc<Cache>,
    pub scanner: Arc<Scanner>,
    pub fetcher: Fetcher,
    pub updater: Arc<Updater>,
    /// How much of the machine subd may use.
    pub budgets: Arc<Budgets>,
    /// Bytes that were fetched since the start.
    pub fetched_bytes: Arc<AtomicU64>,
    pub stop: CancellationToken,
    /// The only dominator that may give orders, by the machine's configuration.
    pub only_dominator: Option<String>,
    /// Why daemon tasks are not run here, if they are not.
    pub tasks_not_run: Option<String>,
    /// Held while the configuration or the holder changes. Has the pause of the scanner as long as
    /// the saved settings cannot be used.
    pub configuring: Mutex<Option<Pause>>,
    /// Lets one call of GetFiles at a time read files.
    pub giving_files: Arc<tokio::sync::Semaphore>,
}

fn too_many(count: usize, max: usize, what: &str) -> Fault {
    Fault::new(FaultCode::TooLarge, format!("{count} {what}: at most {max} are accepted"))
}

impl Service {
    /// Waits until anything differs from what the caller knows, and returns the report. Does not
    /// hold a connection that was made with former TLS files.
    pub async fn poll(&self, request: PollRequest, caller: &Caller) -> PollReply {
        let wait = Duration::from_millis(request.wait_ms.min(POLL_WAIT_MS_MAX).into());
        let deadline = Instant::now() + wait;
        let mut versions = self.report_state.watch();
        while request.have == Some(*versions.borrow_and_update()) {
            let news = timeout_at(deadline, versions.changed());
            tokio::select! {
                news = news => if news.is_err() { break },
                () = self.fetcher.security.replaced(caller.proof.as_deref()) => break,
                () = self.stop.cancelled() => break,
            }
        }
        self.report_state.reply(request.have, self.measured())
    }

    /// Measures what a poll reports.
    pub fn measured(&self) -> Measured {
        let space = self.root.space().unwrap_or_else(|error| {
            tracing::warn!("{}", error_chain(&error));
            api::subd::FreeSpace::default()
        });
        let fetched_bytes = self.fetched_bytes.load(Ordering::Relaxed);
        let counters = ScanCounters { fetched_bytes, ..self.scanner.counters() };
        let (load, ceilings) = (self.budgets.load(), self.budgets.ceilings());
        Measured { space, counters, load, ceilings, clock: wall() }
    }

    /// Scans for a preview, or returns what was found.
    async fn preview(&self, request: PreviewScanRequest) -> Result<PreviewScanReply, Fault> {
        if let Some(why) = self.report_state.read(State::unusable_settings) {
            return Err(Fault::new(FaultCode::Unavailable, why));
        }
        let wait = Duration::from_millis(request.wait_ms.min(POLL_WAIT_MS_MAX).into());
        let state = tokio::select! {
            state = self.scanner.preview(&request.scan, wait) => state?,
            () = self.stop.cancelled() => {
                return Err(Fault::new(FaultCode::Unavailable, "subd is stopping"));
            }
        };
        Ok(match state {
            PreviewState::Scanning(hashed_bytes) => {
                PreviewScanReply { hashed_bytes, ..PreviewScanReply::default() }
            }
            PreviewState::Done(snapshot, age) => PreviewScanReply {
                scan: snapshot.report.clone(),
                left_alone: snapshot.left_alone.clone(),
                age_seconds: u32::try_from(age.as_secs()).unwrap_or(u32::MAX),
                hashed_bytes: 0,
            },
        })
    }

    /// The scans whose directories are returned: the one in force, and the last preview.
    fn snapshots(&self) -> Vec<Arc<Snapshot>> {
        let in_force = self.report_state.read(|state| state.snapshot.clone());
        in_force.into_iter().chain(self.scanner.previewed()).collect()
    }

    fn directories(&self, digests: &[ObjectId]) -> Result<GetDirectoriesReply, Fault> {
        if digests.len() > DIRECTORIES_MAX {
            return Err(too_many(digests.len(), DIRECTORIES_MAX, "digests"));
        }
        let snapshots = self.snapshots();
        let mut reply = GetDirectoriesReply { directories: Vec::new(), absent: Vec::new() };
        let mut bytes = 0;
        for digest in digests {
            let found = snapshots.iter().find_map(|snapshot| snapshot.directory(digest));
            let Some(directory) = found else {
                reply.absent.push(*digest);
                continue;
            };
            let encoded = match encoded(directory) {
                // The caller asks again for the rest.
                Err(_) if !reply.directories.is_empty() => break,
                encoded => encoded?,
            };
            bytes += encoded.len();
            if bytes > DIRECTORIES_BYTES_MAX && !reply.directories.is_empty() {
                break;
            }
            reply.directories.push(EncodedDirectory(ByteText(encoded)));
        }
        Ok(reply)
    }

    /// Returns the next blocks of a directory. Blocks.
    fn directory_blocks(
        &self,
        request: &GetDirectoryBlocksRequest,
    ) -> Result<GetDirectoryBlocksReply, Fault> {
        let digest = &request.directory;
        if request.have.len() > HAVE_MAX {
            return Err(too_many(request.have.len(), HAVE_MAX, "digests"));
        }
        let snapshots = self.snapshots();
        let found = snapshots.iter().find_map(|snapshot| snapshot.directory(digest));
        let Some(directory) = found else {
            let text = format!("the scanned tree has no directory {digest}");
            return Err(Fault::new(FaultCode::NotFound, text));
        };
        Ok(GetDirectoryBlocksReply::of(directory, request))
    }

    fn cleanup(&self, objects: &[ObjectId]) -> Result<Done, Fault> {
        if objects.len() > IDS_MAX {
            return Err(too_many(objects.len(), IDS_MAX, "objects"));
        }
        let removed = self.cache.remove(objects);
        self.report_state.set_cache(|| self.cache.ids());
        match removed {
            Ok(_) => Ok(Done {}),
            Err(error) => Err(Fault::new(FaultCode::Internal, error_chain(&error))),
        }
    }

    /// Writes the configuration, and then puts it in force. Blocks.
    fn configure(&self, request: SetConfigurationRequest) -> Result<Done, Fault> {
        let mut pause = locked(&self.configuring);
        let old = self.report_state.read(|state| state.persisted.configuration.clone());
        let sets_scan = request.scan.is_some();
        let scan = request.scan.unwrap_or_else(|| old.scan.clone());
        let limits = request.limits.unwrap_or(old.limits);
        let configuration = Configuration { scan, limits };
        let persisted = self.report_state.persist(|persisted| {
            persisted.configuration.clone_from(&configuration);
            persisted.unusable_settings.take_if(|_| sets_scan);
        });
        persisted.map_err(|error| Fault::new(FaultCode::Internal, error_chain(&error)))?;
        if configuration != old {
            self.budgets.set_limits(configuration.limits);
            self.scanner.set_settings(configuration.scan);
        }
        drop(pause.take_if(|_| sets_scan));
        Ok(Done {})
    }

    fn configuration(&self) -> Result<Configuration, Fault> {
        self.report_state.read(|state| match state.unusable_settings() {
            None => Ok(state.persisted.configuration.clone()),
            Some(why) => Err(Fault::new(FaultCode::Unavailable, why)),
        })
    }
}

/// Returns the encoding of a directory if one reply of GetDirectories can carry it.
fn encoded(directory: &Directory) -> Result<Vec<u8>, Fault> {
    let mut encoded = Vec::new();
    for block in Blocks::from(directory, 0) {
        encoded.extend_from_slice(&block.bytes);
        if encoded.len() > DIRECTORY_BYTES_MAX - REPLY_FRAME_BYTES {
            let text = format!(
                "the directory {} is too large for one reply: it is sent in blocks",
                directory.digest()
            );
            return Err(Fault::new(FaultCode::TooLarge, text));
        }
    }
    Ok(encoded)
}

/// Returns the router with all methods, the page and the metrics of `service`.
pub fn router(service: &Arc<Service>, security: &Security) -> Router<Arc<Service>> {
    let router = Router::new("subd", security).limits(ServerLimits::AGENT);
    let router = router.with_state(Arc::clone(service));
    let metrics = SubMetrics(Arc::clone(service));
    let router = router.metrics(|registry| registry.register_collector(Box::new(metrics)));
    let router = pages::add_pages(router, Frame::new("subd", security));
    resources::add_methods(tasks::add_methods(operator::add_methods(router)))
        .method::<Poll, _>(async |service, caller, request| {
            if let Some(own) = &service.updater.own_certificates {
                own.note_caller(&caller);
            }
            Ok(service.poll(request, &caller).await)
        })
        .method::<GetDirectories, _>(async |service, _, request| {
            blocking(move || service.directories(&request.digests)).await
        })
        .method::<GetDirectoryBlocks, _>(async |service, _, request| {
            blocking(move || service.directory_blocks(&request)).await
        })
        .method::<Fetch, _>(async |service, _, request| {
            service.fetcher.start(request).await.map(|()| Done {})
        })
        .method::<AddObjects, _>(async |service, _, request| {
            blocking(move || service.fetcher.add(&request).map(|()| Done {})).await
        })
        .method::<ReplaceCertificate, _>(async |service, caller, request| {
            let replaced = service.updater.replace_certificate(request.chain.0, &caller).await;
            replaced.map(|()| Done {})
        })
        .method::<Prepare, _>(async |service, caller, request| {
            refuse_if_paused(&service.report_state)?;
            service.updater.prepare(request, &caller).await.map(|()| Done {})
        })
        .method::<Commit, _>(async |service, _, request| {
            refuse_if_paused(&service.report_state)?;
            service.updater.permit(request.update_id).await?;
            service.updater.commit(request.update_id).map(|()| Done {})
        })
        .method::<OfferImage, _>(async |service, _, request| {
            let Some(trust) = &service.updater.trust else { return Ok(Done {}) };
            let snapshot = service.report_state.read(|state| state.snapshot.clone());
            let scanned = snapshot.and_then(|snapshot| snapshot.tree.clone());
            trust.offer(request, scanned).await.map(|()| Done {})
        })
        .method::<OfferContents, _>(async |service, _, request| {
            let Some(trust) = &service.updater.trust else { return Ok(Done {}) };
            trust.offer_contents(request.signatures).map(|()| Done {})
        })
        .method::<Cleanup, _>(async |service, _, request| {
            blocking(move || service.cleanup(&request.objects)).await
        })
        .method::<GetRefusedChanges, _>(async |service, _, ()| {
            let changes = |state: &State| state.refused_changes().into_values().cloned().collect();
            Ok(GetRefusedChangesReply { changes: service.report_state.read(changes) })
        })
        .method::<GetLimits, _>(async |service, _, ()| Ok(service.budgets.in_force()))
        .method::<PreviewScan, _>(async |service, _, request| service.preview(request).await)
        .method::<CountOwners, _>(async |service, _, request| {
            service.scanner.count_owners(Arc::clone(&service.root), request).await
        })
        .method::<GetConfiguration, _>(async |service, _, ()| service.configuration())
        .method::<SetConfiguration, _>(async |service, _, request| {
            blocking(move || service.configure(request)).await
        })
}
