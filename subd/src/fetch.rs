//! Gets objects into the cache: from files of the machine, and from object servers.
//!
//! One fetch at a time. What a file of the tree has is taken from there. For the rest the sources
//! are tried in their order: each is asked for what is still missing, several requests at a time,
//! and asked again, from where it ended, when its connection was lost. What arrives is hashed by
//! the thread that writes it and has its name only then. What has arrived stays when the rest
//! fails.
//!
//! Nothing is synced here: Prepare does that, and an object that a crash spoilt is found when the
//! cache is hashed at the next start.
//!
//! # Invariants
//!
//! * A source that was caught at sending wrong content is not asked again in the same fetch, and it
//!   is named.
//! * No byte that was kept is asked for again, unless the whole turned out to be wrong.
//! * Nothing of a source is being written any more when the next attempt begins.

mod ledger;
pub mod network;
pub mod request;
mod reuse;
pub mod source_error;
pub mod space;
mod transfer;
mod writer;

use rpc::tls::Security;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use api::fault::{Fault, FaultCode};
use api::object_server::IDS_MAX;
use api::subd::{FetchFailure, FetchObject, FetchRequest, LastFetch};
use model::lock::locked;
use model::report::report;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::cache::Cache;
use crate::limits::Budgets;
use crate::root::Root;
use crate::state::persisted_state::StateDirectory;
use crate::state::report_state::{FetchProgress, ReportState, State, UpdatePhase};
use ledger::Ledger;
use network::Network;
use reuse::Reuse;
use source_error::{Next, Patience, SourceError};
pub use space::shortage;
use transfer::{Transfer, client_of};

/// The port of a source that names none: that of the imageserver.
pub const SOURCE_PORT: u16 = 6971;

/// The most sources of one fetch.
pub const SOURCES_MAX: usize = 16;

/// How long a source may send nothing, unless `--source-timeout` says otherwise.
pub const STALL_MAX: Duration = Duration::from_secs(60);

/// How often progress is reported.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(200);

/// How long a fetch that is ahead of need may take to end.
const WAY_MAX: Duration = Duration::from_secs(5);

/// Less than this is no progress, in bytes: patience with the source comes to an end.
const PROGRESS_BYTES_MIN: u64 = 64 << 10;

/// Starts fetches and reports them to the board.
#[derive(Clone)]
pub struct Fetcher {
    /// How connections to sources are protected.
    pub security: Security,
    /// Where objects go.
    pub cache: Arc<Cache>,
    /// Who is told.
    pub report_state: Arc<ReportState>,
    /// Whose space and whose files are used.
    pub root: Arc<Root>,
    /// What may be taken of the machine.
    pub budgets: Arc<Budgets>,
    /// What may be taken of the network.
    pub network: Arc<Network>,
    /// Where the speed of the network is remembered.
    pub state: Arc<StateDirectory>,
    /// How long a source may send nothing.
    pub stall_max: Duration,
    /// What runs.
    pub tasks: TaskTracker,
    /// When to leave everything as it is: subd stops.
    pub leave: CancellationToken,
    /// When to come to an end; of the fetch that is ahead of need, in copies that run it.
    pub stop: CancellationToken,
    /// Ends the fetch that is ahead of need, if there is one.
    pub way: Arc<Mutex<CancellationToken>>,
    /// Bytes that arrived since subd started.
    pub fetched_bytes: Arc<AtomicU64>,
}

impl Fetcher {
    /// Starts a fetch; one with the id of the current or the last fetch is not started again. One
    /// that is ahead of need is ended by one that is not.
    ///
    /// # Errors
    ///
    /// `BadRequest` for a request that makes no sense, `Busy` during another fetch or an update.
    pub async fn start(&self, request: FetchRequest) -> Result<(), Fault> {
        check(&request)?;
        if !request.ahead {
            self.make_way(request.fetch_id).await;
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
            if let UpdatePhase::Preparing(id) | UpdatePhase::Updating(id) = state.update {
                let text = format!("update {id} is under way");
                return Err(Fault::new(FaultCode::Busy, text));
            }
            state.fetch = Some(FetchProgress { fetch_id, ahead, ..FetchProgress::default() });
            if ahead {
                // Whoever sees the fetch on the board can end it.
                *locked(&self.way) = stop.clone();
            }
            Ok(Some(()))
        })?;
        if started.is_some() {
            let fetcher = Self { stop, ..self.clone() };
            self.tasks.spawn(async move { fetcher.run(request).await });
        }
        Ok(())
    }

    /// Ends a fetch that is ahead of need and is not the one with this id, and waits for its end.
    async fn make_way(&self, fetch_id: u64) {
        let is_in_the_way = |state: &State| {
            state.fetch.is_some_and(|fetch| fetch.ahead && fetch.fetch_id != fetch_id)
        };
        if self.report_state.read(is_in_the_way) {
            locked(&self.way).cancel();
            let mut news = self.report_state.watch();
            let gone = async {
                while self.report_state.read(is_in_the_way) && news.changed().await.is_ok() {}
            };
            // One that does not end in time is still under way then, which is said.
            let _in_time = tokio::time::timeout(WAY_MAX, gone).await;
        }
    }

    async fn run(&self, request: FetchRequest) {
        let started = Instant::now();
        let fetch_id = request.fetch_id;
        let ledger = Arc::new(Ledger::default());
        let fetching = self.fetch_all(&request, &ledger);
        let result = self.reporting(&ledger, fetching).await;
        self.report(&ledger);
        let (objects, bytes) = ledger.amount();
        let reused = ledger.reused.load(Ordering::Relaxed);
        if let Err(error) = &result {
            tracing::warn!(fetch_id, ?error, "the fetch failed");
        }
        let took_ms = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
        tracing::info!(fetch_id, objects, bytes, reused, took_ms, "the fetch has ended");
        let (error, complaints) = (result.err(), ledger.complaints());
        let last = LastFetch { fetch_id, error, objects, bytes, took_ms, reused, complaints };
        self.report_state.change(|state| {
            state.fetch = None;
            state.last_fetch = Some(last);
        });
        if let Some(speed) = self.network.take_measured() {
            self.remember(speed).await;
        }
    }

    /// Remembers how fast the network is, in bytes per second: it is not measured again.
    async fn remember(&self, speed: u64) {
        self.report_state.change(|state| state.persisted.network_speed = Some(speed));
        if let Err(error) = self.report_state.save(&self.state).await {
            tracing::warn!("{}", report(&error));
        }
    }

    async fn fetch_all(
        &self,
        request: &FetchRequest,
        ledger: &Arc<Ledger>,
    ) -> Result<(), FetchFailure> {
        let mut missing = self.missing(&request.objects);
        self.discard_partials(&missing).await?;
        if missing.is_empty() {
            return Ok(());
        }
        let fits = self.check_space(&missing)?;
        self.reuse(&missing, fits.is_ok(), ledger).await?;
        missing = self.missing(&missing);
        self.check_space(&missing)??;
        self.network.begin();
        let mut refusals: Vec<String> = Vec::new();
        for (index, source) in request.sources.iter().enumerate() {
            if missing.is_empty() || self.stop.is_cancelled() {
                break;
            }
            if ledger.is_liar(source) {
                continue;
            }
            let others = index + 1 < request.sources.len();
            let refusal = self.ask(source, others, &mut missing, ledger).await?;
            refusals.extend(refusal.map(|text| format!("{source}: {text}")));
        }
        if missing.is_empty() {
            return Ok(());
        }
        let (count, first) = (missing.len(), missing[0].id);
        let refusals = refusals.join("; ");
        Err(FetchFailure::Sources(format!("{count} objects missing ({first}...): {refusals}")))
    }

    /// Waits for `work`, and reports progress meanwhile; gives up when subd stops. A fetch that
    /// gives way is waited for: nothing of it may write any more when another one begins.
    async fn reporting<T>(
        &self,
        ledger: &Ledger,
        work: impl Future<Output = Result<T, FetchFailure>>,
    ) -> Result<T, FetchFailure> {
        let mut interval = tokio::time::interval(PROGRESS_INTERVAL);
        let mut work = std::pin::pin!(work);
        loop {
            tokio::select! {
                result = &mut work => {
                    let is_ended = self.stop.is_cancelled() && !self.leave.is_cancelled();
                    let gave_way = is_ended && result.is_err();
                    return if gave_way { Err(FetchFailure::GaveWay) } else { result };
                }
                () = self.leave.cancelled() => {
                    return Err(FetchFailure::Local("subd is stopping".to_owned()));
                }
                _ = interval.tick() => self.report(ledger),
            }
        }
    }

    fn report(&self, ledger: &Ledger) {
        let arrived = ledger.take_arrived();
        if arrived.is_empty() {
            return;
        }
        self.report_state.add_to_cache(&arrived, |id| self.cache.size_of(id).is_some());
        let (objects, bytes) = ledger.amount();
        self.report_state.change(|state| {
            if let Some(fetch) = &mut state.fetch {
                (fetch.objects, fetch.bytes) = (objects, bytes);
            }
        });
    }

    /// Those of `objects` that are not cached, each once.
    fn missing(&self, objects: &[FetchObject]) -> Vec<FetchObject> {
        let mut seen = BTreeSet::new();
        objects
            .iter()
            .filter(|object| seen.insert(object.id) && self.cache.size_of(&object.id).is_none())
            .copied()
            .collect()
    }

    /// Removes what has come of objects that nobody wants any more: they take space.
    async fn discard_partials(&self, missing: &[FetchObject]) -> Result<(), FetchFailure> {
        let wanted: BTreeSet<_> = missing.iter().map(|object| object.id).collect();
        let cache = Arc::clone(&self.cache);
        let discarding =
            tokio::task::spawn_blocking(move || cache.discard_partials(|id| wanted.contains(id)));
        match discarding.await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(FetchFailure::Local(report(&error))),
            Err(error) => Err(FetchFailure::Local(error.to_string())),
        }
    }

    /// Whether what is missing of the objects fits.
    fn check_space(
        &self,
        missing: &[FetchObject],
    ) -> Result<Result<(), FetchFailure>, FetchFailure> {
        let space = self.root.space().map_err(|error| FetchFailure::Local(report(&error)))?;
        let rest = |object: &FetchObject| {
            object.size_bytes.saturating_sub(self.cache.partial_bytes(&object.id))
        };
        Ok(space::check(missing.iter().map(rest), space))
    }

    /// Takes from the machine's own files what they have.
    async fn reuse(
        &self,
        missing: &[FetchObject],
        may_copy: bool,
        ledger: &Arc<Ledger>,
    ) -> Result<(), FetchFailure> {
        let snapshot = self.report_state.read(|state| state.snapshot.clone());
        let Some(tree) = snapshot.and_then(|snapshot| snapshot.tree.clone()) else {
            return Ok(());
        };
        let reuse = Reuse {
            cache: Arc::clone(&self.cache),
            root: Arc::clone(&self.root),
            budgets: Arc::clone(&self.budgets),
            ledger: Arc::clone(ledger),
            stop: self.stop.clone(),
            may_copy,
        };
        let missing = missing.to_vec();
        let reusing = tokio::task::spawn_blocking(move || reuse.run(&tree, &missing));
        reusing.await.map_err(|error| FetchFailure::Local(error.to_string()))
    }

    /// Asks one source for what is `missing`, and again as long as that makes sense; gives what is
    /// to be said against it if something is missing still.
    async fn ask(
        &self,
        source: &str,
        others: bool,
        missing: &mut Vec<FetchObject>,
        ledger: &Arc<Ledger>,
    ) -> Result<Option<String>, FetchFailure> {
        let mut patience = Patience::default();
        loop {
            let before = ledger.amount();
            let answer = self.attempt(source, missing, ledger).await;
            *missing = self.missing(missing);
            let trouble = match answer {
                Ok(()) if missing.is_empty() => return Ok(None),
                Ok(()) => return Ok(Some("it lacks objects".to_owned())),
                Err(SourceError::Local(failure)) => return Err(failure),
                Err(trouble) => trouble,
            };
            let (objects, bytes) = ledger.amount();
            let progress = objects > before.0 || bytes >= before.1 + PROGRESS_BYTES_MIN;
            let text = trouble.text();
            match patience.after(&trouble, progress, others) {
                Next::Switch => {
                    ledger.complain(source, matches!(trouble, SourceError::Lie(_)), &text);
                    return Ok(Some(text));
                }
                Next::Again(_) if missing.is_empty() => return Ok(None),
                Next::Again(pause) => {
                    tracing::info!(source, text, ?pause, "asking a source again");
                    self.stop.clone().run_until_cancelled(tokio::time::sleep(pause)).await;
                    if self.stop.is_cancelled() {
                        return Ok(Some(text));
                    }
                }
            }
        }
    }

    /// Asks one source once for what is `missing`.
    async fn attempt(
        &self,
        source: &str,
        missing: &[FetchObject],
        ledger: &Arc<Ledger>,
    ) -> Result<(), SourceError> {
        let (client, local) = client_of(source, &self.security)?;
        let transfer = Transfer {
            cache: Arc::clone(&self.cache),
            root: Arc::clone(&self.root),
            budgets: Arc::clone(&self.budgets),
            network: Arc::clone(&self.network),
            ledger: Arc::clone(ledger),
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
