//! Asks filegen-servers for the content of computed files. `core::computed` decides what is asked
//! for, and when.

mod delivery;
mod ended_certificates;
mod preview;

use std::collections::{BTreeMap, BTreeSet};
use std::future::pending;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use api::dominator::content::{ContentChange, ContentChangeId, ContentOrder};
use api::file_generator::{
    CONTENT_BYTES_MAX, ComputedContent, GENERATORS_WAIT_MS_MAX, Generate, GeneratedContent,
    GeneratedFile, GetContents, GetContentsRequest, GetGenerators, GetGeneratorsRequest,
    GetSecrets, GetSecretsRequest, IDS_MAX, OrderRevision, OrderRevisionReply,
    OrderRevisionRequest,
};
use model::backoff::{doubled, jittered};
use model::display::{error_chain, safe_text};
use model::image::required::RequiredImage;
use model::lock::locked;
use model::mdb::Machine;
use model::object::{Algorithm, ObjectId};
use rollouts::content::{ContentRevision, NewestContent};
use rollouts::document::MachineTaskState;
use rpc::client::{CallError, Client, Peer, PeerError};
use rpc::tls::Security;
use tokio::sync::{Mutex as AsyncMutex, Notify, RwLock, RwLockReadGuard};
use tokio::time::{sleep, sleep_until};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::core::computed::gates::ContentGates;
use crate::core::computed::rollout::{ContentOrderError, ContentReport};
use crate::core::computed::{
    Batch, BatchAnswer, ComputedTable, KnownContent, KnownFiles, MadeFrom, WantedImage,
};
use crate::core::image_breaker::FailureLimits;
use crate::core::timing::{HOLD_LONGEST, RETRY_FIRST};
use crate::runtime::clock::{Clock, jitter};
use crate::storage::StorageError;
use crate::storage::computed::{ComputedStore, StoredContent};

pub use delivery::PushError;

/// The port of a filegen-server, if its address has none.
const FILEGEN_PORT: u16 = 6972;

/// How long questions are gathered.
const GATHER_TIME: Duration = Duration::from_millis(50);

/// How long a filegen-server may take to make a batch of files.
const GENERATE_LIMIT: Duration = Duration::from_secs(300);

/// How long it may take to return content, or a machine to take it.
const CONTENT_LIMIT: Duration = Duration::from_secs(60);

/// Why content is not known that a server has lost.
const NOT_KEPT: &str = "the filegen-server does not have the content that it has just made";

/// The longest text of a server that is kept for a file, in bytes.
const WHY_BYTES_MAX: usize = 1_000;

/// The longest outputs of all resources of a machine, in bytes as JSON.
const ALL_OUTPUTS_BYTES_MAX: usize = 1 << 20;

/// How often first machines are looked at on which nothing can be learnt.
const ADVANCE_INTERVAL: Duration = Duration::from_secs(5);

/// How often stored content that no machine needs is removed.
const CLEAN_INTERVAL: Duration = Duration::from_secs(600);

/// Why a batch was not answered.
#[derive(Debug, thiserror::Error)]
enum AskError {
    #[error("invalid address of a filegen-server")]
    Address(#[from] PeerError),
    #[error(transparent)]
    Call(#[from] CallError),
    #[error("the filegen-server has answered for other machines or files than were asked for")]
    Count,
    #[error("the filegen-server has sent content that was not asked for, or is too long: {id}")]
    Content { id: ObjectId },
    #[error("the filegen-server does not have the content {id} that it has just made")]
    Absent { id: ObjectId },
    #[error("the content cannot be stored")]
    Store(#[from] StorageError),
}

#[derive(Debug, Default)]
struct ServiceState {
    table: ComputedTable,
    /// Notified when something else is known of a machine, by host name.
    machines: BTreeMap<String, Arc<Notify>>,
    /// Notified when questions to a server are due earlier than before.
    servers: BTreeMap<Arc<str>, Arc<Notify>>,
}

#[derive(Debug)]
pub struct ComputedService {
    inner: Mutex<ServiceState>,
    store: ComputedStore,
    /// Notified when machines are to be told something, or it is to be saved.
    news: Notify,
    /// Locked while what is known is saved.
    saving: AsyncMutex<()>,
    /// Notified when servers may have to be told of orders.
    orders: Notify,
    /// Locked for writing while stored content is removed: what is being stored is not known yet.
    cleaning: RwLock<()>,
    /// By source.
    clients: Mutex<BTreeMap<String, Client>>,
    clock: Clock,
    security: Security,
    tracker: TaskTracker,
    stop: CancellationToken,
}

impl ComputedService {
    /// Starts with what is in `store`. Its tasks are in `tracker` and end when `stop` is cancelled.
    pub fn new(
        store: ComputedStore,
        clock: Clock,
        security: Security,
        tracker: TaskTracker,
        stop: CancellationToken,
    ) -> Result<Self, StorageError> {
        let table = ComputedTable::new(store.machines()?, store.changes()?);
        let inner = Mutex::new(ServiceState { table, ..ServiceState::default() });
        Ok(Self {
            inner,
            store,
            news: Notify::new(),
            orders: Notify::new(),
            saving: AsyncMutex::default(),
            cleaning: RwLock::default(),
            clients: Mutex::default(),
            clock,
            security,
            tracker,
            stop,
        })
    }

    fn locked(&self) -> MutexGuard<'_, ServiceState> {
        locked(&self.inner)
    }

    /// Sets the computed files that a machine needs. `nudge` is notified whenever something else
    /// is known of them.
    pub fn want(
        self: &Arc<Self>,
        machine: &Arc<Machine>,
        image: &RequiredImage,
        nudge: &Arc<Notify>,
    ) {
        let rules = &image.content.computed;
        let wanted = WantedImage { digest: image.digest, algorithm: image.tree.algorithm(), rules };
        let mut inner = self.locked();
        inner.table.want(machine, wanted, self.clock.now());
        if rules.is_empty() {
            inner.machines.remove(&machine.hostname);
            return;
        }
        inner.machines.insert(machine.hostname.clone(), Arc::clone(nudge));
        nudge.notify_one();
        let sources: BTreeSet<&str> = rules.iter().map(|rule| rule.source.as_str()).collect();
        for source in sources {
            if let Some(server) = inner.servers.get(source) {
                server.notify_one();
                continue;
            }
            let (source, asked) = (Arc::<str>::from(source), Arc::new(Notify::new()));
            inner.servers.insert(Arc::clone(&source), Arc::clone(&asked));
            let service = Arc::clone(self);
            let stop = self.stop.clone();
            self.tracker.spawn(async move {
                let following = Box::pin(service.follow(&source, &asked));
                stop.run_until_cancelled(following).await;
            });
        }
    }

    /// Takes the public key that a machine has shown.
    pub fn take_key(&self, hostname: &str, key: &[u8]) {
        let mut inner = self.locked();
        if inner.table.take_key(hostname, key, self.clock.now()) {
            inner.servers.values().for_each(|server| server.notify_one());
            self.news.notify_one();
        }
    }

    /// Takes the outputs of the resources of a machine, as JSON.
    pub fn take_outputs(&self, hostname: &str, outputs: &str) {
        if outputs.len() > ALL_OUTPUTS_BYTES_MAX {
            return tracing::warn!(
                host = hostname,
                bytes = outputs.len(),
                "the outputs of its resources are too long for computed files"
            );
        }
        let mut inner = self.locked();
        if inner.table.take_outputs(hostname, outputs, self.clock.now()) {
            inner.servers.values().for_each(|server| server.notify_one());
            self.news.notify_one();
        }
    }

    /// Forgets a machine that is not managed any more.
    pub fn forget(&self, hostname: &str) {
        let mut inner = self.locked();
        inner.machines.remove(hostname);
        inner.table.forget(hostname);
    }

    /// Forgets what was stored of machines that are not managed any more.
    pub fn forget_others(&self, is_managed: impl Fn(&str) -> bool) {
        self.locked().table.forget_others(is_managed);
    }

    /// Returns what a machine is told of its computed files.
    pub fn known(&self, hostname: &str) -> KnownFiles {
        self.locked().table.known(hostname)
    }

    /// Takes what a machine says of its computed files; see [`ComputedTable::report`].
    pub fn report(&self, hostname: &str, round: u64, report: ContentReport) {
        self.locked().table.report(hostname, round, report, self.clock.now());
        self.news.notify_one();
    }

    /// Sets which content revisions may go to which machines.
    pub fn set_gates(&self, gates: ContentGates) {
        self.locked().table.set_gates(gates, self.clock.now());
        self.news.notify_one();
    }

    /// Returns the newest content revision of each server that has told it.
    pub fn newest_content(&self) -> NewestContent {
        self.locked().table.newest_content().clone()
    }

    /// Returns how a machine is with gated content; see [`ComputedTable::content_state`].
    pub fn content_state(
        &self,
        hostname: &str,
        server: &str,
        content: ContentRevision,
    ) -> Option<MachineTaskState> {
        self.locked().table.content_state(hostname, server, content)
    }

    /// Sets when updates to changed content stop.
    pub fn set_limits(&self, limits: FailureLimits) {
        self.locked().table.set_limits(limits);
    }

    /// Describes the changes of content of a server, or all.
    pub fn changes(&self, source: &str) -> Vec<ContentChange> {
        self.locked().table.described_changes(source)
    }

    /// Carries out an order about a change of content, and saves that.
    pub async fn order(
        self: &Arc<Self>,
        id: &ContentChangeId,
        order: ContentOrder,
        why: &str,
    ) -> Result<(), ContentOrderError> {
        self.locked().table.order(id, order, why, self.clock.now())?;
        self.tell().await;
        Ok(())
    }

    /// Puts content into use when it may be used, tells machines, and saves what is known. Never
    /// returns.
    pub async fn advance_regularly(self: Arc<Self>) {
        loop {
            tokio::select! {
                () = self.news.notified() => {}
                () = sleep(ADVANCE_INTERVAL) => self.locked().table.advance(self.clock.now()),
            }
            self.tell().await;
        }
    }

    /// Returns the client of a server.
    fn client(&self, source: &str) -> Result<Client, PeerError> {
        let mut clients = locked(&self.clients);
        if let Some(client) = clients.get(source) {
            return Ok(client.clone());
        }
        let client = Client::new(Peer::parse(source, FILEGEN_PORT)?, &self.security);
        clients.insert(source.to_owned(), client.clone());
        Ok(client)
    }

    /// Describes for each server what is wrong with it or its files; see
    /// [`ComputedTable::troubles`].
    pub fn troubles(&self) -> BTreeMap<String, String> {
        let inner = self.locked();
        let troubles = inner.table.troubles(self.clock.now().wall).into_iter();
        troubles.map(|(source, trouble)| (source.to_owned(), trouble)).collect()
    }

    /// Nudges the machines of which something else is known, and saves what it is.
    async fn tell(self: &Arc<Self>) {
        // What was taken first is saved first.
        let _saving = self.saving.lock().await;
        let (stored, changes) = {
            let mut inner = self.locked();
            let changed = inner.table.take_changed();
            for nudge in changed.iter().filter_map(|hostname| inner.machines.get(hostname)) {
                nudge.notify_one();
            }
            let stored = changed.into_iter().map(|hostname| {
                let files = inner.table.stored(&hostname);
                (hostname, files)
            });
            let stored = stored.collect::<Vec<_>>();
            (stored, inner.table.take_changes())
        };
        if changes.is_some() {
            self.orders.notify_waiters();
        }
        if stored.is_empty() && changes.is_none() {
            return;
        }
        let save = move |service: &Self| service.store.save(&stored, changes.as_deref());
        if let Err(error) = self.on_thread(save).await {
            // After a restart it is asked for again.
            tracing::error!("cannot save which computed files are known: {}", error_chain(&error));
        }
    }

    async fn on_thread<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&Self) -> T + Send + 'static,
    ) -> T {
        let service = Arc::clone(self);
        match tokio::task::spawn_blocking(move || work(&service)).await {
            Ok(result) => result,
            Err(error) => std::panic::resume_unwind(error.into_panic()),
        }
    }

    /// Asks one server whenever that is due. Never returns.
    async fn follow(self: Arc<Self>, source: &Arc<str>, asked: &Notify) {
        let client = self.client(source);
        let generators = async {
            match &client {
                Ok(client) => self.follow_generators(client, source, asked).await,
                Err(_) => pending().await,
            }
        };
        let orders = async {
            match &client {
                Ok(client) => self.tell_orders(client, source).await,
                Err(_) => pending().await,
            }
        };
        tokio::join!(self.ask(client.as_ref(), source, asked), generators, orders);
    }

    /// Tells a server which of its revisions are stopped or resumed here, so that it holds for
    /// other dominators too. Never returns.
    async fn tell_orders(&self, client: &Client, source: &Arc<str>) {
        let mut failures = 0;
        loop {
            let changed = self.orders.notified();
            let to_tell = self.locked().table.orders_to_tell(source);
            if to_tell.is_empty() {
                changed.await;
                continue;
            }
            for (revision, stopped) in to_tell {
                let is_stopped = stopped.is_some();
                let why = stopped.clone().unwrap_or_else(|| "it was resumed here".to_owned());
                let request = OrderRevisionRequest { revision, stopped, why };
                match client.call_within::<OrderRevision>(&request, CONTENT_LIMIT).await {
                    Ok(OrderRevisionReply { number }) => {
                        failures = 0;
                        let table = &mut self.locked().table;
                        table.told_order(source, revision, is_stopped, number);
                        self.news.notify_one();
                    }
                    Err(error) => {
                        failures += 1;
                        let error = safe_text(&error_chain(&error), WHY_BYTES_MAX);
                        tracing::warn!(
                            "{source} does not know that revision {revision} is stopped or \
                             resumed, and other dominators neither: {error}"
                        );
                        sleep(jittered(doubled(RETRY_FIRST, HOLD_LONGEST, failures), jitter()))
                            .await;
                    }
                }
            }
        }
    }

    async fn ask(
        self: &Arc<Self>,
        client: Result<&Client, &PeerError>,
        source: &Arc<str>,
        asked: &Notify,
    ) {
        loop {
            let at = self.locked().table.ask_at(source);
            let due = async {
                match at {
                    Some(at) => sleep_until(self.clock.moment(at).into()).await,
                    None => pending().await,
                }
            };
            tokio::select! {
                () = due => {}
                () = asked.notified() => {}
            }
            sleep(GATHER_TIME).await;
            loop {
                let batch = self.locked().table.next_batch(source, self.clock.now());
                let Some(batch) = batch else { break };
                let made = match client {
                    Ok(client) => self.make(client, &batch).await,
                    Err(error) => Err(error.clone().into()),
                };
                let now = self.clock.now();
                match made {
                    Ok((answers, _storing)) => {
                        self.locked().table.take(&batch, answers, now, jitter());
                    }
                    Err(error) => {
                        let why = safe_text(&error_chain(&error), WHY_BYTES_MAX);
                        tracing::warn!("no computed files from {source}: {why}");
                        self.locked().table.failed(&batch, &why, now, jitter());
                    }
                }
                self.tell().await;
            }
        }
    }

    /// Has a server make the files of a batch, and stores their content. Nothing is removed from
    /// the store while the guard is held.
    async fn make(
        self: &Arc<Self>,
        client: &Client,
        batch: &Batch,
    ) -> Result<(Vec<BatchAnswer>, RwLockReadGuard<'_, ()>), AskError> {
        let asked = &batch.request.machines;
        let reply = client.call_within::<Generate>(&batch.request, GENERATE_LIMIT).await?;
        let is_complete = asked.len() == reply.machines.len()
            && asked.iter().zip(&reply.machines).all(|(asked, got)| asked.paths.len() == got.len());
        if !is_complete {
            return Err(AskError::Count);
        }
        let made = reply.machines.iter().flatten().filter_map(|file| match file {
            GeneratedFile::Made(content) => Some(content),
            GeneratedFile::Failed(_) => None,
        });
        let is_secret: BTreeMap<ObjectId, bool> =
            made.map(|content| (content.id, content.is_secret)).collect();
        // What is found stays until the table knows that it is needed.
        let storing = self.cleaning.read().await;
        let stored = self.find(is_secret.keys().copied().collect()).await?;
        let (mut plain, mut secret) = (Vec::new(), Vec::new());
        for (&id, &is_secret) in is_secret.iter().filter(|(id, _)| !stored.contains_key(id)) {
            if is_secret { &mut secret } else { &mut plain }.push(id);
        }
        let hostnames: Vec<String> =
            asked.iter().map(|wanted| wanted.machine.hostname.clone()).collect();
        self.fetch(client, plain, None).await?;
        self.fetch(client, secret, Some(&hostnames)).await?;
        let stored = self.find(is_secret.into_keys().collect()).await?;
        let mut answers = Vec::new();
        for (files, (wanted, record)) in
            reply.machines.into_iter().zip(asked.iter().zip(&batch.records))
        {
            // A certificate must not go to a machine without its key.
            let is_stored = |file: &GeneratedFile| match file {
                GeneratedFile::Made(content) => stored.contains_key(&content.id),
                GeneratedFile::Failed(_) => true,
            };
            if !files.iter().all(is_stored) {
                answers.push(vec![Err(NOT_KEPT.into()); files.len()]);
                continue;
            }
            let answer = |file| match file {
                GeneratedFile::Made(content) => known(&content, wanted.algorithm, *record, &stored),
                GeneratedFile::Failed(why) => Err(safe_text(&why, WHY_BYTES_MAX).into()),
            };
            answers.push(files.into_iter().map(answer).collect());
        }
        Ok((answers, storing))
    }

    async fn find(
        self: &Arc<Self>,
        ids: BTreeSet<ObjectId>,
    ) -> Result<BTreeMap<ObjectId, StoredContent>, StorageError> {
        self.on_thread(move |service| service.store.find(&ids)).await
    }

    /// Reads content from a server and stores it. `secret_of` has the host names that secret
    /// content is for. A server may answer only a part of a request.
    async fn fetch(
        self: &Arc<Self>,
        client: &Client,
        mut wanted: Vec<ObjectId>,
        secret_of: Option<&[String]>,
    ) -> Result<(), AskError> {
        while !wanted.is_empty() {
            let ids: Vec<ObjectId> = wanted.iter().take(IDS_MAX).copied().collect();
            let asked = ids.len();
            let reply = match secret_of {
                None => {
                    let request = GetContentsRequest { ids };
                    client.call_within::<GetContents>(&request, CONTENT_LIMIT).await?
                }
                Some(hostnames) => {
                    let request = GetSecretsRequest { ids, hostnames: hostnames.to_vec() };
                    client.call_within::<GetSecrets>(&request, CONTENT_LIMIT).await?
                }
            };
            // The files with this content are asked for again.
            let absent: BTreeSet<ObjectId> = reply.absent.into_iter().collect();
            let before = wanted.len();
            wanted.retain(|id| !absent.contains(id));
            let contents = reply.contents;
            if contents.is_empty() && wanted.len() == before {
                return Err(AskError::Absent { id: wanted[0] });
            }
            let surplus = contents.get(wanted.len().min(asked));
            if let Some(surplus) = surplus {
                return Err(AskError::Content { id: surplus.id });
            }
            for (content, id) in contents.iter().zip(&wanted) {
                verify(content, id)?;
            }
            wanted.drain(..contents.len());
            let since = self.clock.now().wall;
            self.on_thread(move |service| service.store.add(&contents, since)).await?;
        }
        Ok(())
    }

    /// Takes the versions of the generators of a server whenever they change. Never returns.
    async fn follow_generators(&self, client: &Client, source: &Arc<str>, asked: &Notify) {
        let (mut have, mut failures) = (None, 0);
        loop {
            // The first call does not wait, nor one to a server that was away.
            let wait_ms = if have.is_none() || failures > 0 { 0 } else { GENERATORS_WAIT_MS_MAX };
            let request = GetGeneratorsRequest { have, wait_ms };
            let limit = Duration::from_millis(wait_ms.into()) + CONTENT_LIMIT;
            match client.call_within::<GetGenerators>(&request, limit).await {
                Ok(reply) => {
                    (have, failures) = (Some(reply.version), 0);
                    let generators = reply.generators.as_ref();
                    self.locked().table.take_generators(source, generators, self.clock.now());
                    self.news.notify_one();
                    asked.notify_one();
                    // A faulty server may answer at once each time.
                    sleep(RETRY_FIRST).await;
                }
                Err(error) => {
                    let why = safe_text(&error_chain(&error), WHY_BYTES_MAX);
                    failures = self.locked().table.could_not_ask(source, why.clone());
                    if failures == 1 {
                        tracing::warn!("changes of {source} are not seen: {why}");
                    }
                    let pause = doubled(RETRY_FIRST, HOLD_LONGEST, failures);
                    sleep(jittered(pause, jitter())).await;
                }
            }
        }
    }

    /// Removes stored content that no machine needs, now and then. Never returns.
    pub async fn clean_regularly(self: Arc<Self>) {
        loop {
            sleep(CLEAN_INTERVAL).await;
            let _cleaning = self.cleaning.write().await;
            let cleaned = self.on_thread(|service| {
                let (machines, contents) = service.locked().table.needed();
                service.store.retain(&machines, &contents)
            });
            if let Err(error) = cleaned.await {
                tracing::warn!("cannot remove content of computed files: {}", error_chain(&error));
            }
        }
    }
}

/// Returns what is known now of content that a server has made from `record`. The error says why it
/// cannot be used.
fn known(
    content: &GeneratedContent,
    algorithm: Algorithm,
    record: MadeFrom,
    stored: &BTreeMap<ObjectId, StoredContent>,
) -> Result<KnownContent, Arc<str>> {
    if content.id.algorithm() != algorithm {
        return Err("the filegen-server has answered with another digest algorithm".into());
    }
    match stored.get(&content.id) {
        Some(StoredContent { since, size_bytes }) => {
            Ok(KnownContent::new(content, record, *size_bytes, *since))
        }
        None => Err(NOT_KEPT.into()),
    }
}

/// Checks that `content` is what was asked for.
fn verify(content: &ComputedContent, id: &ObjectId) -> Result<(), AskError> {
    let is_right = content.id == *id
        && content.bytes.0.len() <= CONTENT_BYTES_MAX
        && id.algorithm().digest(&content.bytes.0) == *id;
    is_right.then_some(()).ok_or(AskError::Content { id: *id })
}
