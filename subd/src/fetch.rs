//! Gets objects into the cache: from files of the machine, from object servers, and from callers.
//!
//! One fetch at a time. Objects that a file of the tree holds are copied from it. For the others
//! the sources are tried in order: each is asked for the missing objects, with several requests at
//! a time, and asked again, from where it stopped, when the connection was lost. The thread that
//! writes an object also hashes it: a small one before it is written, a larger one before it gets
//! its name. What was received is kept when the rest fails.
//!
//! Nobody waits for a sync here: Prepare does that, and an object that a crash damaged is found
//! when the cache is hashed at the next start.
//!
//! # Invariants
//!
//! * A source that sent wrong content is not asked again in the same fetch, and is reported.
//! * No byte that was kept is requested again, unless the whole object is wrong.
//! * All writes of one attempt have ended when the next attempt begins.

mod added;
pub mod network;
pub mod policy;
mod record;
mod reuse;
mod transfer;
mod writer;

use rpc::tls::Security;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use api::fault::{Fault, FaultCode};
use api::object_server::IDS_MAX;
use api::subd::{FetchFailure, FetchObject, FetchProgress, FetchRequest, LastFetch, UpdatePhase};
use daemon::memory::FreedMemory;
use model::display::error_chain;
use model::lock::locked;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::cache::Cache;
use crate::fetch::policy::{Retry, RetryCounter, SourceError};
use crate::limits::Budgets;
use crate::root::Root;
use crate::state::{ReportState, State};
use network::Network;
use record::FetchRecord;
use reuse::Reuse;
use transfer::{Transfer, client_of};

/// The port of a source that names none: that of the imageserver.
pub const SOURCE_PORT: u16 = 6971;

/// The most sources of one fetch.
pub const SOURCES_MAX: usize = 16;

/// How often progress is reported.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(200);

/// After a fetch of so many bytes for an update, they are written to the medium while that is
/// staged.
const EARLY_BYTES_MIN: u64 = 32 << 20;

/// How long a prefetch may take to stop.
const PREFETCH_STOP_TIME_MAX: Duration = Duration::from_secs(5);

/// Less than this counts as no progress, in bytes.
const PROGRESS_BYTES_MIN: u64 = 64 << 10;

/// Starts fetches and reports them.
#[derive(Clone)]
pub struct Fetcher {
    /// How connections to sources are protected.
    pub security: Security,
    pub cache: Arc<Cache>,
    pub report_state: Arc<ReportState>,
    /// The root whose free space and files are used.
    pub root: Arc<Root>,
    /// How much of the machine subd may use.
    pub budgets: Arc<Budgets>,
    /// Limits the use of the network.
    pub network: Arc<Network>,
    /// How long a source may send nothing.
    pub stall_max: Duration,
    pub tasks: TaskTracker,
    /// Cancelled when subd stops.
    pub subd_stop: CancellationToken,
    /// Cancelled when this fetch must stop; differs from `subd_stop` in the copy that runs a
    /// prefetch.
    pub stop: CancellationToken,
    /// Stops a prefetch that is running.
    pub prefetch_stop: Arc<Mutex<CancellationToken>>,
    /// Bytes that arrived since subd started.
    pub fetched_bytes: Arc<AtomicU64>,
}

impl Fetcher {
    /// Starts a fetch, unless it is the current or the last one. A fetch that is needed now stops a
    /// prefetch.
    ///
    /// # Errors
    ///
    /// `BadRequest` for an invalid request, `Busy` during another fetch or an update.
    pub async fn start(&self, request: FetchRequest) -> Result<(), Fault> {
        check(&request)?;
        if !request.ahead {
            self.stop_prefetch(request.fetch_id).await;
        }
        let (fetch_id, ahead) = (request.fetch_id, request.ahead);
        let stop = self.stop.child_token();
        let started = self.report_state.try_change(|state| {
            let current = state.fetch.map(|fetch| fetch.fetch_id);
            let last = state.last_fetch.as_ref().map(|last| last.fetch_id);
            if current == Some(fetch_id) || (current.is_none() && last == Some(fetch_id)) {
                return Ok(None);
            }
            if let Some(current) = current {
                let text = format!("fetch {current} is under way");
                return Err(Fault::new(FaultCode::Busy, text));
            }
            refuse_during_update(state)?;
            state.fetch = Some(FetchProgress { fetch_id, ahead, ..FetchProgress::default() });
            if ahead {
                // Set before the fetch is reported, so that it can be stopped from then on.
                *locked(&self.prefetch_stop) = stop.clone();
            }
            Ok(Some(()))
        })?;
        if started.is_some() {
            let fetcher = Self { stop, ..self.clone() };
            self.tasks.spawn(async move { fetcher.run(request).await });
        }
        Ok(())
    }

    /// Stops a prefetch that is not the one with this id, and waits until it has stopped.
    async fn stop_prefetch(&self, fetch_id: u64) {
        let is_other_prefetch = |state: &State| {
            state.fetch.is_some_and(|fetch| fetch.ahead && fetch.fetch_id != fetch_id)
        };
        if self.report_state.read(is_other_prefetch) {
            locked(&self.prefetch_stop).cancel();
            let mut news = self.report_state.watch();
            let gone = async {
                while self.report_state.read(is_other_prefetch) && news.changed().await.is_ok() {}
            };
            // If it does not stop in time, the caller is told that a fetch is under way.
            let _stopped = tokio::time::timeout(PREFETCH_STOP_TIME_MAX, gone).await;
        }
    }

    async fn run(&self, request: FetchRequest) {
        let started = Instant::now();
        let fetch_id = request.fetch_id;
        let record = Arc::new(FetchRecord::default());
        if !request.ahead {
            self.budgets.begin_fetch();
        }
        let memory = FreedMemory::keep();
        let fetching = self.fetch_all(&request, &record);
        let result = self.reporting(&record, fetching).await;
        drop(memory);
        self.budgets.end_fetch();
        self.report(&record);
        let (objects, bytes) = record.amount();
        let reused = record.reused.load(Ordering::Relaxed);
        if let Err(error) = &result {
            tracing::warn!(fetch_id, %error, "the fetch failed");
        }
        let took_ms = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
        tracing::info!(fetch_id, objects, bytes, reused, took_ms, "the fetch has ended");
        let (error, complaints) = (result.err(), record.complaints());
        let last = LastFetch { fetch_id, error, objects, bytes, took_ms, reused, complaints };
        self.report_state.change(|state| {
            state.fetch = None;
            state.last_fetch = Some(last);
        });
        if let Some(speed) = self.network.take_measured() {
            // Write-behind: a speed that is lost in a crash is measured again.
            self.report_state
                .persist_behind(move |_, persisted| persisted.network_speed = Some(speed))
                .await;
        }
    }

    async fn fetch_all(
        &self,
        request: &FetchRequest,
        record: &Arc<FetchRecord>,
    ) -> Result<(), FetchFailure> {
        let mut missing = self.missing(&request.objects);
        self.discard_partials(&missing).await?;
        if missing.is_empty() {
            return Ok(());
        }
        let fits = self.check_space(&missing)?;
        self.reuse(&missing, fits.is_ok(), record).await?;
        missing = self.missing(&missing);
        self.check_space(&missing)??;
        self.network.begin();
        let mut refusals: Vec<String> = Vec::new();
        for (index, source) in request.sources.iter().enumerate() {
            if missing.is_empty() || self.stop.is_cancelled() {
                break;
            }
            if record.is_liar(source) {
                continue;
            }
            let others = index + 1 < request.sources.len();
            let refusal = self.ask(source, others, &mut missing, record).await?;
            refusals.extend(refusal.map(|text| format!("{source}: {text}")));
        }
        if missing.is_empty() {
            if record.amount().1 >= EARLY_BYTES_MIN && !request.ahead {
                let root = Arc::clone(&self.root);
                tokio::task::spawn_blocking(move || root.write_early());
            }
            return Ok(());
        }
        let (count, first) = (missing.len(), missing[0].id);
        let refusals = refusals.join("; ");
        Err(FetchFailure::Sources(format!("{count} objects missing ({first}...): {refusals}")))
    }

    /// Waits for `work`, and reports progress in the meantime; stops waiting when subd stops. A
    /// prefetch that must stop is waited for, because it must not write when the next fetch begins.
    async fn reporting<T>(
        &self,
        record: &FetchRecord,
        work: impl Future<Output = Result<T, FetchFailure>>,
    ) -> Result<T, FetchFailure> {
        let mut interval = tokio::time::interval(PROGRESS_INTERVAL);
        let mut work = std::pin::pin!(work);
        loop {
            tokio::select! {
                result = &mut work => {
                    let is_ended = self.stop.is_cancelled() && !self.subd_stop.is_cancelled();
                    let gave_way = is_ended && result.is_err();
                    return if gave_way { Err(FetchFailure::GaveWay) } else { result };
                }
                () = self.subd_stop.cancelled() => {
                    return Err(FetchFailure::Local("subd is stopping".to_owned()));
                }
                _ = interval.tick() => self.report(record),
            }
        }
    }

    fn report(&self, record: &FetchRecord) {
        let arrived = record.take_arrived();
        if arrived.is_empty() {
            return;
        }
        self.report_state.add_to_cache(&arrived, |id| self.cache.size_of(id).is_some());
        let (objects, bytes) = record.amount();
        self.report_state.change(|state| {
            if let Some(fetch) = &mut state.fetch {
                (fetch.objects, fetch.bytes) = (objects, bytes);
            }
        });
    }

    /// Returns those of `objects` that are not cached, each once.
    fn missing(&self, objects: &[FetchObject]) -> Vec<FetchObject> {
        let mut seen = BTreeSet::new();
        objects
            .iter()
            .filter(|object| seen.insert(object.id) && self.cache.size_of(&object.id).is_none())
            .copied()
            .collect()
    }

    /// Removes partial objects that are no longer wanted, because they take space.
    async fn discard_partials(&self, missing: &[FetchObject]) -> Result<(), FetchFailure> {
        let wanted: BTreeSet<_> = missing.iter().map(|object| object.id).collect();
        let cache = Arc::clone(&self.cache);
        let discarding =
            tokio::task::spawn_blocking(move || cache.discard_partials(|id| wanted.contains(id)));
        match discarding.await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(FetchFailure::Local(error_chain(&error))),
            Err(error) => Err(FetchFailure::Local(error.to_string())),
        }
    }

    /// Checks that the missing bytes fit on the file-system.
    fn check_space(
        &self,
        missing: &[FetchObject],
    ) -> Result<Result<(), FetchFailure>, FetchFailure> {
        let space = self.root.space().map_err(|error| FetchFailure::Local(error_chain(&error)))?;
        let rest = |object: &FetchObject| {
            object.size_bytes.saturating_sub(self.cache.partial_bytes(&object.id))
        };
        Ok(policy::check_space(missing.iter().map(rest), space))
    }

    /// Takes objects from files of the machine.
    async fn reuse(
        &self,
        missing: &[FetchObject],
        may_copy: bool,
        record: &Arc<FetchRecord>,
    ) -> Result<(), FetchFailure> {
        let snapshot = self.report_state.read(|state| state.snapshot.clone());
        let Some(tree) = snapshot.and_then(|snapshot| snapshot.tree.clone()) else {
            return Ok(());
        };
        let reuse = Reuse {
            cache: Arc::clone(&self.cache),
            root: Arc::clone(&self.root),
            budgets: Arc::clone(&self.budgets),
            record: Arc::clone(record),
            stop: self.stop.clone(),
            may_copy,
        };
        let missing = missing.to_vec();
        let reusing = tokio::task::spawn_blocking(move || reuse.run(&tree, &missing));
        reusing.await.map_err(|error| FetchFailure::Local(error.to_string()))
    }

    /// Asks one source for the `missing` objects, and retries as long as that makes sense. Returns
    /// the error of the source if objects are still missing.
    async fn ask(
        &self,
        source: &str,
        others: bool,
        missing: &mut Vec<FetchObject>,
        record: &Arc<FetchRecord>,
    ) -> Result<Option<String>, FetchFailure> {
        let mut retries = RetryCounter::default();
        loop {
            let before = record.amount();
            let answer = self.attempt(source, missing, record).await;
            *missing = self.missing(missing);
            let error = match answer {
                Ok(()) if missing.is_empty() => return Ok(None),
                Ok(()) => return Ok(Some("it lacks objects".to_owned())),
                Err(SourceError::Local(failure)) => return Err(failure),
                Err(error) => error,
            };
            let (objects, bytes) = record.amount();
            let progress = objects > before.0 || bytes >= before.1 + PROGRESS_BYTES_MIN;
            let text = error.text();
            match retries.after(&error, progress, others) {
                Retry::SwitchSource => {
                    record.complain(source, matches!(error, SourceError::Lie(_)), &text);
                    return Ok(Some(text));
                }
                Retry::After(_) if missing.is_empty() => return Ok(None),
                Retry::After(pause) => {
                    let pause_ms = u64::try_from(pause.as_millis()).unwrap_or(u64::MAX);
                    tracing::info!(source, text, pause_ms, "asking a source again");
                    self.stop.clone().run_until_cancelled(tokio::time::sleep(pause)).await;
                    if self.stop.is_cancelled() {
                        return Ok(Some(text));
                    }
                }
            }
        }
    }

    /// Asks one source once for the `missing` objects.
    async fn attempt(
        &self,
        source: &str,
        missing: &[FetchObject],
        record: &Arc<FetchRecord>,
    ) -> Result<(), SourceError> {
        let (client, local) = client_of(source, &self.security)?;
        let transfer = Transfer {
            cache: Arc::clone(&self.cache),
            root: Arc::clone(&self.root),
            budgets: Arc::clone(&self.budgets),
            network: Arc::clone(&self.network),
            record: Arc::clone(record),
            fetched_bytes: Arc::clone(&self.fetched_bytes),
            client,
            source: Arc::from(source),
            local,
            stall_max: self.stall_max,
            stop: self.stop.child_token(),
        };
        transfer.run(missing).await
    }
}

/// Refuses while an update is staged or carried out.
fn refuse_during_update(state: &State) -> Result<(), Fault> {
    match state.update {
        UpdatePhase::Preparing(id) | UpdatePhase::Updating(id) => {
            Err(Fault::new(FaultCode::Busy, format!("update {id} is under way")))
        }
        UpdatePhase::Idle | UpdatePhase::Prepared(_) => Ok(()),
    }
}

fn check(request: &FetchRequest) -> Result<(), Fault> {
    let (objects, sources) = (request.objects.len(), request.sources.len());
    if objects > IDS_MAX {
        let text = format!("{objects} objects in one fetch: at most {IDS_MAX} are accepted");
        return Err(Fault::new(FaultCode::TooLarge, text));
    }
    if sources > SOURCES_MAX || (sources == 0 && objects > 0) {
        let text = format!("{sources} sources: 1 to {SOURCES_MAX} are accepted");
        return Err(Fault::new(FaultCode::BadRequest, text));
    }
    Ok(())
}
