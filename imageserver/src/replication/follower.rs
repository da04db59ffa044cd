//! Follows a master: one task asks for its changes and fills the queue. The tasks of
//! `queued_changes` work on the queue, several at a time, so that a large image does not delay
//! others.

mod queued_changes;

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use api::image_server::replication::directories::DirectoriesVersion;
use api::image_server::replication::{
    ADDRESS_BYTES_MAX, Cursor, GetImageUpdates, GetImageUpdatesReply, GetImageUpdatesRequest,
    ImageChange, LinkState, MasterState, NAMED_MAX, ReplicaReport, ReplicationTrouble, ServerId,
    TroubledImage,
};
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use model::display::{error_chain, safe_text};
use model::image::ImageName;
use model::lock::locked;
use model::tree::Time;
use rpc::client::{Client, Peer};
use rpc::tls::Security;
use system::clock::wall;
use system::random::random;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::fetch::Fetcher;
use crate::core::replication::decision::{ImageDecision, NamePatterns, ReplicationRules};
use crate::core::replication::directories::{DirectoriesDecision, decide};
use crate::core::replication::queue::{ERROR_BYTES_MAX, Queue, WAIT_MIN, backoff};
use crate::core::replication::sync_cursor::{SyncCursor, TakenReply, expect_no_loop};
use crate::replication::directories::{DirectoriesSync, fetch_directories, local_state};
use crate::store::{Counters, Store};

/// How long the master may wait for a change before it replies.
const WAIT: Duration = Duration::from_secs(10);

/// How much longer than [`WAIT`] the reply may take.
const SLACK: Duration = Duration::from_secs(20);

/// How long a server that follows itself waits until it asks again.
const LOOP_WAIT: Duration = Duration::from_secs(2);

/// How many images are fetched or changed at one time.
const WORKERS: usize = 4;

/// How often the same error is logged again.
const LOG_INTERVAL: Duration = Duration::from_secs(600);

/// Which master a replica follows, and which of its images.
#[derive(Clone, Debug)]
pub struct ReplicationSettings {
    pub from: Peer,
    /// The patterns of which one must match, as they were written.
    pub include: Vec<String>,
    /// The patterns of which none may match, as they were written.
    pub exclude: Vec<String>,
    /// Both, compiled.
    pub patterns: NamePatterns,
    /// True if images stay that have ended on the master.
    pub is_archive: bool,
}

struct State {
    directories: DirectoriesSync,
    sync_cursor: SyncCursor,
    queue: Queue,
    link: LinkState,
    since: Time,
    failures: u32,
    last_error: Option<(Time, String)>,
    logged_at: Option<Duration>,
    server: Option<ServerId>,
    level_at: Option<Time>,
    /// Local images that the master does not list: of the last complete list, and of the current
    /// one.
    only_here: [BTreeSet<ImageName>; 2],
    /// Images that end although they are in use, because a caller has forced it.
    forced: BTreeSet<ImageName>,
}

/// Follows one master.
pub struct Follower {
    settings: ReplicationSettings,
    id: ServerId,
    store: Arc<Store>,
    fetcher: Fetcher,
    client: Client,
    rules: ReplicationRules,
    started: Instant,
    state: Mutex<State>,
    work: Notify,
    directories_changed: Notify,
    progress: Notify,
    upstream: watch::Sender<Vec<ServerId>>,
}

impl Follower {
    pub(crate) fn new(
        settings: ReplicationSettings,
        security: &Security,
        id: ServerId,
        store: Arc<Store>,
        counters: Arc<Counters>,
        tasks: TaskTracker,
    ) -> Self {
        let rules = ReplicationRules {
            patterns: settings.patterns.clone(),
            is_archive: settings.is_archive,
        };
        // Fetching has its own connection, so that it does not delay changes.
        let client = Client::new(settings.from.clone(), security);
        let fetcher = Fetcher::new(client, Arc::clone(&store), counters, tasks);
        let state = State {
            directories: DirectoriesSync::default(),
            sync_cursor: SyncCursor::default(),
            queue: Queue::default(),
            link: LinkState::Connecting,
            since: wall(),
            failures: 0,
            last_error: None,
            logged_at: None,
            server: None,
            level_at: None,
            only_here: Default::default(),
            forced: BTreeSet::new(),
        };
        Self {
            client: Client::new(settings.from.clone(), security),
            settings,
            id,
            store,
            fetcher,
            rules,
            started: Instant::now(),
            state: Mutex::new(state),
            work: Notify::new(),
            directories_changed: Notify::new(),
            progress: Notify::new(),
            upstream: watch::Sender::new(Vec::new()),
        }
    }

    /// Follows until `stop` is cancelled. `port` is the port of this server.
    pub(crate) fn start(
        self: &Arc<Self>,
        port: u16,
        tasks: &TaskTracker,
        stop: &CancellationToken,
    ) {
        let spawn = |work: BoxFuture<'static, ()>| {
            tasks.spawn(stop.clone().run_until_cancelled_owned(work));
        };
        let follower = Arc::clone(self);
        spawn(async move { follower.follow(port).await }.boxed());
        let follower = Arc::clone(self);
        spawn(async move { follower.follow_directories().await }.boxed());
        for _ in 0..WORKERS {
            let follower = Arc::clone(self);
            spawn(async move { follower.work().await }.boxed());
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        locked(&self.state)
    }

    fn now(&self) -> Duration {
        self.started.elapsed()
    }

    /// Returns the client for calls that do not wait for changes.
    #[must_use]
    pub fn fetch_client(&self) -> &Client {
        &self.fetcher.client
    }

    #[must_use]
    pub fn master(&self) -> &Peer {
        &self.settings.from
    }

    /// The images that a replica follows.
    #[must_use]
    pub fn rules(&self) -> &ReplicationRules {
        &self.rules
    }

    /// Returns the state of the connection to the master.
    #[must_use]
    pub fn link(&self) -> LinkState {
        self.state().link
    }

    /// Returns a receiver of the stores above this one.
    #[must_use]
    pub fn upstream(&self) -> watch::Receiver<Vec<ServerId>> {
        self.upstream.subscribe()
    }

    async fn follow(&self, port: u16) {
        loop {
            let request = {
                let state = self.state();
                let wait = if state.link == LinkState::Connected { WAIT } else { Duration::ZERO };
                let replica = ReplicaReport {
                    server: self.id.clone(),
                    port,
                    is_level: state.is_level(),
                    images_behind: state.queue.behind().0,
                };
                let position = state.sync_cursor.position();
                let wait_ms = u32::try_from(wait.as_millis()).unwrap_or(u32::MAX);
                let directories = state.directories.master_version;
                GetImageUpdatesRequest { position, wait_ms, replica, directories }
            };
            let has_become_level = || !request.replica.is_level && self.state().is_level();
            let call = self.client.call_within::<GetImageUpdates>(&request, WAIT + SLACK);
            let reply = tokio::select! {
                biased;
                reply = call => reply,
                // Reports to the master that this server is level, unless the request does.
                () = self.progress_until(has_become_level) => {
                    continue;
                }
            };
            let wait = match reply {
                Ok(reply) => self.take(reply),
                Err(error) => Some(self.failed(LinkState::Broken, &error_chain(&error))),
            };
            self.progress.notify_waiters();
            if let Some(wait) = wait {
                tokio::time::sleep(wait).await;
            }
        }
    }

    /// Waits until `holds` after some progress.
    async fn progress_until(&self, holds: impl Fn() -> bool) {
        loop {
            let mut progress = std::pin::pin!(self.progress.notified());
            // From here on no progress is missed.
            progress.as_mut().enable();
            if holds() {
                return;
            }
            progress.await;
        }
    }

    /// Records that the master cannot be followed. Returns how long to wait.
    fn failed(&self, link: LinkState, why: &str) -> Duration {
        let now = self.now();
        let mut state = self.state();
        let wait = match link {
            LinkState::Loop => LOOP_WAIT,
            _ => backoff(state.failures, random()),
        };
        state.failures += 1;
        let why = safe_text(why, ERROR_BYTES_MAX);
        let is_new = state.last_error.as_ref().is_none_or(|(_, former)| *former != why)
            || state.link != link
            || state.logged_at.is_none_or(|at| now >= at + LOG_INTERVAL);
        if is_new {
            tracing::error!(
                master = %self.master(), seconds = wait.as_secs_f32(),
                "cannot follow the master, trying again: {why}"
            );
            state.logged_at = Some(now);
        }
        state.last_error = Some((wall(), why));
        state.link_is(link);
        wait
    }

    /// Applies a reply. Returns how long to wait if it cannot be used.
    fn take(&self, reply: GetImageUpdatesReply) -> Option<Duration> {
        let upstream = std::iter::once(reply.server.clone()).chain(reply.upstream.iter().cloned());
        let upstream: Vec<ServerId> =
            upstream.take(api::image_server::replication::SERVERS_MAX).collect();
        // Published also for a loop, so that all servers in it report it.
        self.upstream.send_if_modified(|former| {
            let is_new = *former != upstream;
            *former = upstream;
            is_new
        });
        if let Err(error) = expect_no_loop(&self.id, &reply) {
            return Some(self.failed(LinkState::Loop, &error_chain(&error)));
        }
        let mut state = self.state();
        let taken = match state.sync_cursor.take(&reply) {
            Ok(taken) => taken,
            Err(error) => {
                state.sync_cursor = SyncCursor::Begin;
                drop(state);
                return Some(self.failed(LinkState::Broken, &error_chain(&error)));
            }
        };
        let now = self.now();
        if let Some(former) = state.server.replace(reply.server.clone())
            && former != reply.server
        {
            tracing::warn!(
                master = %self.master(), was = %former, is = %reply.server,
                "the master has another store than before: images that it lacks stay here"
            );
        }
        if state.link != LinkState::Connected {
            tracing::info!(master = %self.master(), store = %reply.server, "following the master");
            state.link_is(LinkState::Connected);
            state.failures = 0;
            state.queue.hurry(now, None);
            self.work.notify_waiters();
        }
        self.note_missing_on_master(&mut state, &taken, &reply.changes);
        let mut count = 0;
        for change in reply.changes {
            if self.put(&mut state, now, change) {
                count += 1;
            }
        }
        if count > 0 {
            self.work.notify_waiters();
        }
        let master = self.master();
        if state.directories.note_master_version(&self.store, master, reply.directories) {
            self.directories_changed.notify_one();
        }
        state.note_level();
        None
    }

    /// Records which local images the master does not list.
    fn note_missing_on_master(
        &self,
        state: &mut State,
        taken: &TakenReply,
        changes: &[ImageChange],
    ) {
        let State { only_here, sync_cursor, .. } = state;
        let [former, next] = only_here;
        let Some(span) = &taken.span else {
            for change in changes {
                former.remove(change.name());
            }
            return;
        };
        if taken.is_first {
            next.clear();
        }
        let named: BTreeSet<&ImageName> = changes.iter().map(ImageChange::name).collect();
        let here = self.store.images.between(span).into_iter();
        next.extend(here.filter(|name| self.rules.follow(name) && !named.contains(name)));
        if !sync_cursor.follows() {
            return;
        }
        *former = std::mem::take(next);
        if !former.is_empty() {
            tracing::warn!(
                master = %self.master(), images = former.len(),
                first = former.first().map(tracing::field::display),
                "the master lacks images that are here: they stay"
            );
        }
    }

    /// Queues a change if there is something to do. Returns true if there is.
    fn put(&self, state: &mut State, now: Duration, change: ImageChange) -> bool {
        let name = change.name();
        let is_forced = state.forced.contains(name);
        let here = self.store.images.local_image(name, || !is_forced && self.is_held(name));
        let is_idle = self.rules.decide(&change, &here) == ImageDecision::Nothing;
        if is_idle && state.queue.is_empty_of(name) {
            return false;
        }
        state.queue.put(now, change);
        true
    }

    fn is_held(&self, name: &ImageName) -> bool {
        // An unknown state counts as in use.
        self.store.holding.holders(name).map_or(true, |holders| !holders.is_empty())
    }

    /// Fetches the directories of the master whenever they have changed.
    async fn follow_directories(&self) {
        loop {
            self.directories_changed.notified().await;
            while !self.state().directories.is_settled() {
                let wait = match fetch_directories(&self.fetcher, self.master()).await {
                    Ok(version) if self.note_fetched_directories(version) => break,
                    // They have changed again meanwhile.
                    Ok(_) => WAIT_MIN,
                    Err(why) => {
                        let mut state = self.state();
                        let is_connected = state.link == LinkState::Connected;
                        state.directories.note_failure(self.master(), is_connected, &why)
                    }
                };
                tokio::time::sleep(wait).await;
            }
        }
    }

    /// Returns true if nothing is left to fetch.
    fn note_fetched_directories(&self, version: Option<DirectoriesVersion>) -> bool {
        let mut state = self.state();
        state.directories.note_fetched(&self.store, self.master(), version);
        state.note_level();
        let is_settled = state.directories.is_settled();
        drop(state);
        self.progress.notify_waiters();
        is_settled
    }

    /// Returns true if this server may drop its copy of an image: the master would not send the
    /// same image again.
    #[must_use]
    pub fn may_drop(&self, name: &ImageName) -> bool {
        let state = self.state();
        !self.rules.follow(name)
            || state
                .queue
                .trouble(name)
                .is_some_and(|trouble| trouble != ReplicationTrouble::Failing)
            || state.only_here[0].contains(name)
    }

    /// Lets an image end with that of the master although it is in use: a caller has forced it.
    pub fn force(&self, name: &ImageName) {
        if self.store.images.digest(name).is_some() {
            self.state().forced.insert(name.clone());
        }
        self.retry(name);
    }

    /// Undoes [`Follower::force`].
    pub fn unforce(&self, name: &ImageName) {
        self.state().forced.remove(name);
    }

    /// Makes the change of a name due at once.
    pub fn retry(&self, name: &ImageName) {
        let now = self.now();
        self.state().queue.hurry(now, Some(name));
        self.work.notify_waiters();
    }

    /// Waits until the changes of the master up to `cursor` are made here for `name`, but not for
    /// longer than `limit`.
    pub async fn settled(&self, name: &ImageName, cursor: Cursor, limit: Duration) {
        if !self.rules.follow(name) {
            return;
        }
        let is_settled = || {
            let state = self.state();
            state.sync_cursor.has_passed(cursor) && state.queue.is_settled(name)
        };
        let _late = tokio::time::timeout(limit, self.progress_until(is_settled)).await;
    }

    /// Waits until that version of the master's directories is here, or is blocked, but not for
    /// longer than `limit`.
    pub async fn directories_settled(&self, version: Option<DirectoriesVersion>, limit: Duration) {
        let is_settled = || decide(version, local_state(&self.store)) != DirectoriesDecision::Fetch;
        let _late = tokio::time::timeout(limit, self.progress_until(is_settled)).await;
    }

    /// Returns the state of replication from the master.
    #[must_use]
    pub fn report(&self) -> MasterState {
        let images = &self.store.images;
        let not_followed = {
            let all = images.between(&(std::ops::Bound::Unbounded, std::ops::Bound::Unbounded));
            all.iter().filter(|name| !self.rules.follow(name)).count() as u64
        };
        let state = self.state();
        let (images_behind, bytes_left) = state.queue.behind();
        let troubled = |(name, trouble, text): (&ImageName, ReplicationTrouble, &str)| {
            let (name, text) = (name.clone(), text.to_owned());
            TroubledImage { name, trouble, text }
        };
        let only_here = || state.only_here[0].iter().filter(|name| images.digest(name).is_some());
        MasterState {
            address: safe_text(&self.master().to_string(), ADDRESS_BYTES_MAX),
            server: state.server.clone(),
            upstream: self.upstream.borrow().iter().skip(1).cloned().collect(),
            link: state.link,
            since: state.since,
            is_level: state.is_level(),
            level_at: state.level_at,
            images_behind,
            bytes_left,
            last_error: state.last_error.clone(),
            include: self.settings.include.clone(),
            exclude: self.settings.exclude.clone(),
            is_archive: self.settings.is_archive,
            troubles: state.queue.troubles().take(NAMED_MAX).map(troubled).collect(),
            troubles_total: state.queue.troubles().count() as u64,
            only_here: only_here().take(NAMED_MAX).cloned().collect(),
            only_here_total: only_here().count() as u64,
            not_followed,
            directories: state.directories.trouble(),
        }
    }
}

impl State {
    fn link_is(&mut self, link: LinkState) {
        if self.link != link {
            (self.link, self.since) = (link, wall());
        }
    }

    fn is_level(&self) -> bool {
        self.link == LinkState::Connected
            && self.sync_cursor.follows()
            && self.queue.behind().0 == 0
            && self.directories.is_settled()
    }

    fn note_level(&mut self) {
        if self.is_level() {
            self.level_at = Some(wall());
        }
    }
}
