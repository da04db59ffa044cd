//! Follows a master: asks it what has changed, and makes that so here.
//!
//! One task asks, and puts what is to be done into the queue; a few others do it, so that a large
//! image holds up no other. [`crate::core::replication::decision`] says what is done, [`crate::replication::image_steps`] does it.

use rpc::tls::Security;
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use api::fault::FaultCode;
use api::image_server::replication::{
    ADDRESS_BYTES_MAX, Change, Cursor, GetImageUpdates, GetImageUpdatesReply,
    GetImageUpdatesRequest, Link, MasterState, NAMED_MAX, ReplicaReport, ServerId, Trouble,
    TroubledImage,
};
use api::image_server::{GetImage, GetImageRequest};
use model::image::{Image, ImageName};
use model::lock::locked;
use model::report::report;
use model::tree::Time;
use model::words::plain;
use rpc::client::{Client, Peer};
use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::Settings;
use super::fetch::Fetcher;
use crate::clock::{random, wall};
use crate::core::replication::decision::{Decision, Rules};
use crate::core::replication::queue::{Outcome, Queue, backoff};
use crate::core::replication::sync_cursor::{Course, Taken, expect_no_loop};
use crate::replication::directories::Standing;
use crate::replication::image_steps;
use crate::store::Store;
use crate::store::counters::Counters;

/// How long the master waits for a change before it answers that there is none.
const WAIT: Duration = Duration::from_secs(10);

/// How much longer than that its answer may take.
const SLACK: Duration = Duration::from_secs(20);

/// How long one that finds itself its own master waits until it asks again.
const LOOP_WAIT: Duration = Duration::from_secs(2);

/// How many images are fetched or changed at one time.
const WORKERS: usize = 4;

/// The longest text of an error that is kept, in bytes.
pub(super) const ERROR_BYTES_MAX: usize = 2_000;

/// How often the same error is logged again.
const LOG_AGAIN: Duration = Duration::from_secs(600);

pub(super) struct State {
    pub(super) directories: Standing,
    course: Course,
    queue: Queue,
    link: Link,
    since: Time,
    failures: u32,
    last_error: Option<(Time, String)>,
    logged_at: Option<Duration>,
    server: Option<ServerId>,
    level_at: Option<Time>,
    /// Images that the master does not name; of the list that is being told, the second.
    only_here: [BTreeSet<ImageName>; 2],
    /// Images that end although they are in use: somebody has said so to this server.
    forced: BTreeSet<ImageName>,
}

/// Follows one master.
pub struct Follower {
    pub(super) settings: Settings,
    pub(super) id: ServerId,
    pub(super) store: Arc<Store>,
    pub(super) fetcher: Fetcher,
    pub(super) client: Client,
    rules: Rules,
    started: Instant,
    state: Mutex<State>,
    work: Notify,
    pub(super) directories_told: Notify,
    pub(super) progress: Notify,
    upstream: watch::Sender<Vec<ServerId>>,
}

impl Follower {
    pub(crate) fn new(
        settings: Settings,
        security: &Security,
        id: ServerId,
        store: Arc<Store>,
        counters: Arc<Counters>,
        tasks: TaskTracker,
    ) -> Self {
        let rules = Rules { patterns: settings.patterns.clone(), is_archive: settings.is_archive };
        // What is fetched has a connection of its own, so that it holds up no news.
        let client = Client::new(settings.from.clone(), security);
        let fetcher = Fetcher::new(client, Arc::clone(&store), counters, tasks);
        let state = State {
            directories: Standing::default(),
            course: Course::default(),
            queue: Queue::default(),
            link: Link::Connecting,
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
            directories_told: Notify::new(),
            progress: Notify::new(),
            upstream: watch::Sender::new(Vec::new()),
        }
    }

    /// Follows until `stop` is cancelled. `port` is where this server answers.
    pub(crate) fn start(
        self: &Arc<Self>,
        port: u16,
        tasks: &TaskTracker,
        stop: &CancellationToken,
    ) {
        let (follower, stopped) = (Arc::clone(self), stop.clone());
        tasks.spawn(async move {
            tokio::select! {
                () = follower.follow(port) => {}
                () = stopped.cancelled() => {}
            }
        });
        let (follower, stopped) = (Arc::clone(self), stop.clone());
        tasks.spawn(async move {
            tokio::select! {
                () = follower.follow_directories() => {}
                () = stopped.cancelled() => {}
            }
        });
        for _ in 0..WORKERS {
            let (follower, stopped) = (Arc::clone(self), stop.clone());
            tasks.spawn(async move {
                tokio::select! {
                    () = follower.work() => {}
                    () = stopped.cancelled() => {}
                }
            });
        }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        locked(&self.state)
    }

    fn now(&self) -> Duration {
        self.started.elapsed()
    }

    /// Calls the master; not what waits for news.
    #[must_use]
    pub fn fetch_client(&self) -> &Client {
        &self.fetcher.client
    }

    /// The master.
    #[must_use]
    pub fn master(&self) -> &Peer {
        &self.settings.from
    }

    /// What is followed.
    #[must_use]
    pub fn rules(&self) -> &Rules {
        &self.rules
    }

    /// Whether the master answers.
    #[must_use]
    pub fn link(&self) -> Link {
        self.state().link
    }

    /// The stores above this one; is changed when they do.
    #[must_use]
    pub fn upstream(&self) -> watch::Receiver<Vec<ServerId>> {
        self.upstream.subscribe()
    }

    async fn follow(&self, port: u16) {
        loop {
            let request = {
                let state = self.state();
                let wait = if state.link == Link::Connected { WAIT } else { Duration::ZERO };
                let replica = ReplicaReport {
                    server: self.id.clone(),
                    port,
                    is_level: state.is_level(),
                    images_behind: state.queue.behind().0,
                };
                let position = state.course.position();
                let wait_ms = u32::try_from(wait.as_millis()).unwrap_or(u32::MAX);
                let directories = state.directories.told;
                GetImageUpdatesRequest { position, wait_ms, replica, directories }
            };
            let call = self.client.call_within::<GetImageUpdates>(&request, WAIT + SLACK);
            let reply = tokio::select! {
                biased;
                reply = call => reply,
                // So that the master knows.
                () = self.is_level_again(request.replica.is_level) => continue,
            };
            let wait = match reply {
                Ok(reply) => self.take(reply),
                Err(error) => Some(self.failed(Link::Broken, &report(&error))),
            };
            self.progress.notify_waiters();
            if let Some(wait) = wait {
                tokio::time::sleep(wait).await;
            }
        }
    }

    /// Waits until this server is level, unless it `was` when it last said so.
    async fn is_level_again(&self, was: bool) {
        loop {
            let mut progress = std::pin::pin!(self.progress.notified());
            progress.as_mut().enable();
            if !was && self.state().is_level() {
                return;
            }
            progress.await;
        }
    }

    /// Takes note that the master cannot be followed; gives how long to wait.
    fn failed(&self, link: Link, why: &str) -> Duration {
        let chance = u16::try_from(random() % 1_000).unwrap_or_default();
        let now = self.now();
        let mut state = self.state();
        let wait = match link {
            Link::Loop => LOOP_WAIT,
            _ => backoff(state.failures, chance),
        };
        state.failures += 1;
        let why = plain(why, ERROR_BYTES_MAX);
        let is_new = state.last_error.as_ref().is_none_or(|(_, former)| *former != why)
            || state.link != link
            || state.logged_at.is_none_or(|at| now >= at + LOG_AGAIN);
        if is_new {
            tracing::error!(
                master = %self.master(), seconds = wait.as_secs_f32(),
                "the master is not followed, and is asked again: {why}"
            );
            state.logged_at = Some(now);
        }
        state.last_error = Some((wall(), why));
        state.link_is(link);
        wait
    }

    /// Takes a reply; gives how long to wait if it cannot be used.
    fn take(&self, reply: GetImageUpdatesReply) -> Option<Duration> {
        let upstream = std::iter::once(reply.server.clone()).chain(reply.upstream.iter().cloned());
        let upstream: Vec<ServerId> =
            upstream.take(api::image_server::replication::SERVERS_MAX).collect();
        // Told also if it is a loop, so that all who are in it know.
        self.upstream.send_if_modified(|former| {
            let is_new = *former != upstream;
            *former = upstream;
            is_new
        });
        if let Err(error) = expect_no_loop(&self.id, &reply) {
            return Some(self.failed(Link::Loop, &report(&error)));
        }
        let mut state = self.state();
        let taken = match state.course.take(&reply) {
            Ok(taken) => taken,
            Err(error) => {
                state.course = Course::Begin;
                drop(state);
                return Some(self.failed(Link::Broken, &report(&error)));
            }
        };
        let now = self.now();
        if let Some(former) = state.server.replace(reply.server.clone())
            && former != reply.server
        {
            tracing::warn!(
                master = %self.master(), was = %former, is = %reply.server,
                "the master has another store than before: what it has not got stays here"
            );
        }
        if state.link != Link::Connected {
            tracing::info!(master = %self.master(), store = %reply.server, "follows the master");
            state.link_is(Link::Connected);
            state.failures = 0;
            state.queue.hurry(now, None);
            self.work.notify_waiters();
        }
        self.look_for_others(&mut state, &taken, &reply.changes);
        let mut count = 0;
        for change in reply.changes {
            if self.put(&mut state, now, change) {
                count += 1;
            }
        }
        if count > 0 {
            self.work.notify_waiters();
        }
        if self.hear_of_directories(&mut state.directories, reply.directories) {
            self.directories_told.notify_one();
        }
        state.note_level();
        None
    }

    /// Finds out which images the master does not name.
    fn look_for_others(&self, state: &mut State, taken: &Taken, changes: &[Change]) {
        let State { only_here, course, .. } = state;
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
        let named: BTreeSet<&ImageName> = changes.iter().map(Change::name).collect();
        let here = self.store.images.between(span).into_iter();
        next.extend(here.filter(|name| self.rules.follow(name) && !named.contains(name)));
        if !course.follows() {
            return;
        }
        *former = std::mem::take(next);
        if !former.is_empty() {
            tracing::warn!(
                master = %self.master(), images = former.len(), such_as = ?former.first(),
                "the master has never had images that are here, or has lost them: they stay"
            );
        }
    }

    /// Queues a change if there is something to do. True if there is.
    fn put(&self, state: &mut State, now: Duration, change: Change) -> bool {
        let name = change.name();
        let is_forced = state.forced.contains(name);
        let here = self.store.images.here(name, || !is_forced && self.is_held(name));
        let is_idle = self.rules.decide(&change, &here) == Decision::Nothing;
        if is_idle && state.queue.is_empty_of(name) {
            return false;
        }
        state.queue.put(now, change);
        true
    }

    fn is_held(&self, name: &ImageName) -> bool {
        // If it is not known, it may be.
        self.store.holding.holders(name).map_or(true, |holders| !holders.is_empty())
    }

    /// Does what is in the queue, one after the other.
    async fn work(&self) {
        loop {
            let mut woken = std::pin::pin!(self.work.notified());
            // From here on nothing that is put in is missed.
            woken.as_mut().enable();
            let now = self.now();
            let (next, due) = {
                let mut state = self.state();
                (state.queue.next(now), state.queue.due())
            };
            let Some(change) = next else {
                match due {
                    None => woken.await,
                    Some(at) => tokio::select! {
                        () = woken => {}
                        () = tokio::time::sleep_until(self.started + at) => {}
                    },
                }
                continue;
            };
            let outcome = self.carry_out(&change).await;
            self.ended(change.name(), outcome);
        }
    }

    fn ended(&self, name: &ImageName, outcome: Outcome) {
        let chance = u16::try_from(random() % 1_000).unwrap_or_default();
        let now = self.now();
        let mut state = self.state();
        let former = state.queue.trouble(name);
        match &outcome {
            Outcome::Done => {}
            Outcome::Kept(trouble, text) if former != Some(*trouble) => {
                tracing::error!(image = %name, trouble = trouble.name(), "{text}");
            }
            Outcome::Failed(why) => {
                if former != Some(Trouble::Failing) {
                    tracing::error!(image = %name, "an image is tried again: {why}");
                }
                let text = plain(&format!("{name}: {why}"), ERROR_BYTES_MAX);
                state.last_error = Some((wall(), text));
            }
            Outcome::Kept(..) => {}
        }
        if !matches!(outcome, Outcome::Failed(_)) {
            state.forced.remove(name);
        }
        state.queue.end(now, name, outcome, chance);
        state.note_level();
        drop(state);
        // It may be due at once, because it has changed meanwhile.
        self.work.notify_waiters();
        self.progress.notify_waiters();
    }

    async fn carry_out(&self, change: &Change) -> Outcome {
        let name = change.name();
        let is_forced = self.state().forced.contains(name);
        let here = self.store.images.here(name, || !is_forced && self.is_held(name));
        let done = match (self.rules.decide(change, &here), change) {
            (Decision::Nothing, _) => Ok(()),
            (Decision::Keep(trouble), _) => {
                return Outcome::Kept(trouble, self.trouble_text(name, trouble));
            }
            (Decision::Fetch, _) => self.fetch(change).await,
            (Decision::Renote, _) => self.renote(change).await,
            (Decision::End, Change::Ended { how, digest: Some(digest), .. }) => {
                let (of, how, digest) = (name.clone(), *how, *digest);
                let ended = self.blocking(move |store, master| {
                    image_steps::end(store, &of, digest, how, master)
                        .map_err(|error| report(&error))
                });
                // If it was false there is another image now, which is decided on anew.
                ended.await.map(|ended| {
                    if ended {
                        tracing::info!(image = %name, "{} on the master, and here", how.word());
                        self.fetcher.counters.images_replicated_ends.inc();
                    }
                })
            }
            (Decision::Mark, Change::Ended { how, digest, .. }) => {
                let (of, how, digest) = (name.clone(), *how, *digest);
                let marked = self.blocking(move |store, master| {
                    image_steps::mark_ended(store, &of, digest, how, master)
                        .map_err(|error| report(&error))
                });
                marked.await
            }
            (Decision::End | Decision::Mark, _) => Ok(()),
        };
        match done {
            Ok(()) => Outcome::Done,
            Err(why) => Outcome::Failed(why),
        }
    }

    /// Runs a step of the store where it may block.
    pub(super) async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Store, &str) -> Result<T, String> + Send + 'static,
    ) -> Result<T, String> {
        let (store, master) = (Arc::clone(&self.store), self.master().to_string());
        let done = self.fetcher.tasks.spawn_blocking(move || work(&store, &master)).await;
        done.map_err(|lost| lost.to_string())?
    }

    /// The image that `change` speaks of; `None` if the master has it no more, or has another by
    /// now, of which it will tell.
    async fn ask(&self, change: &Change) -> Result<Option<Image>, String> {
        let Change::Image { name, digest, .. } = change else { return Ok(None) };
        let request = GetImageRequest { name: name.clone(), wait_ms: 0 };
        let image = match self.fetcher.client.call::<GetImage>(&request).await {
            Ok(image) => image,
            Err(error) => {
                return match error.code() {
                    Some(FaultCode::NotFound | FaultCode::Gone) => Ok(None),
                    _ => Err(report(&error)),
                };
            }
        };
        if image.content.name != *name || image.content.digest() != *digest {
            return Err(format!("the master gave another image than {name} with {digest}"));
        }
        Ok(Some(image))
    }

    async fn fetch(&self, change: &Change) -> Result<(), String> {
        match self.ask(change).await? {
            None => Ok(()),
            Some(image) => self.receive(image).await,
        }
    }

    /// Makes an image of the master visible here, after all that it needs has come.
    pub(crate) async fn receive(&self, image: Image) -> Result<(), String> {
        let name = image.content.name.clone();
        self.fetcher.bring(&image, |bytes| self.state().queue.left(&name, bytes)).await?;
        let image = self.as_here(image);
        let work = move |store: &Store, _: &str| {
            image_steps::receive(store, image).map_err(|error| report(&error))
        };
        if self.blocking(work).await? {
            let master = self.master();
            tracing::info!(image = %name, %master, "took an image from the master");
            self.fetcher.counters.images_replicated.inc();
        }
        self.progress.notify_waiters();
        Ok(())
    }

    async fn renote(&self, change: &Change) -> Result<(), String> {
        let Some(image) = self.ask(change).await? else { return Ok(()) };
        self.fetcher.bring(&image, |_| ()).await?;
        let image = self.as_here(image);
        let work = move |store: &Store, _: &str| {
            image_steps::renote(store, &image).map_err(|error| report(&error))
        };
        self.blocking(work).await.map(drop)
    }

    /// The image as it is kept here.
    fn as_here(&self, mut image: Image) -> Image {
        image.notes.expires_at = self.rules.expiry(image.notes.expires_at);
        image
    }

    fn trouble_text(&self, name: &ImageName, trouble: Trouble) -> String {
        let master = self.master();
        match trouble {
            Trouble::Conflict => format!(
                "{name} is another image here than on the master {master}: neither is changed. \
                 Add yours on the master under another name if it is needed, then `imagetool \
                 delete --local {name}` here, and that of the master comes"
            ),
            Trouble::EndedHere => format!(
                "the master {master} has an image {name}, but one of that name has ended here \
                 before: it is not taken. Add it on the master under another name if it is needed"
            ),
            Trouble::EndedOther => format!(
                "the master {master} has ended an image {name}, but not this one, or it does not \
                 say which: it stays here. `imagetool delete --local {name}` removes it"
            ),
            Trouble::Held => {
                let holders = self.store.holding.holders(name).unwrap_or_default();
                let names: Vec<String> = holders.into_iter().map(|holder| holder.name).collect();
                format!(
                    "the master {master} has ended {name}, but it is in use here, by {}: it stays \
                     until it is not. Let the machines have another image",
                    names.join(", ")
                )
            }
            Trouble::Damaged => format!(
                "the record of {name} is damaged here: `imagetool delete --local {name}` removes \
                 it, and it comes again from the master {master}"
            ),
            Trouble::Failing => format!("{name} cannot be had from the master {master}"),
        }
    }

    /// True if this server may drop its copy of an image: the master would not send it again, or
    /// not the same.
    #[must_use]
    pub fn may_drop(&self, name: &ImageName) -> bool {
        let state = self.state();
        !self.rules.follow(name)
            || state.queue.trouble(name).is_some_and(|trouble| trouble != Trouble::Failing)
            || state.only_here[0].contains(name)
    }

    /// Lets an image end when the master says so, although it is in use: somebody meant it.
    pub fn force(&self, name: &ImageName) {
        if self.store.images.digest(name).is_some() {
            self.state().forced.insert(name.clone());
        }
        self.look_again(name);
    }

    /// Takes [`Follower::force`] back.
    pub fn unforce(&self, name: &ImageName) {
        self.state().forced.remove(name);
    }

    /// Looks again at what there is of a name.
    pub fn look_again(&self, name: &ImageName) {
        let now = self.now();
        self.state().queue.hurry(now, Some(name));
        self.work.notify_waiters();
    }

    /// Waits until what the master had changed up to `cursor` of `name` has come here, but not for
    /// longer than `limit`.
    pub async fn settled(&self, name: &ImageName, cursor: Cursor, limit: Duration) {
        if !self.rules.follow(name) {
            return;
        }
        let deadline = Instant::now() + limit;
        loop {
            let mut progress = std::pin::pin!(self.progress.notified());
            progress.as_mut().enable();
            {
                let state = self.state();
                if state.course.has_passed(cursor) && state.queue.is_settled(name) {
                    return;
                }
            }
            tokio::select! {
                () = progress => {}
                () = tokio::time::sleep_until(deadline) => return,
            }
        }
    }

    /// How this server stands with its master.
    #[must_use]
    pub fn report(&self) -> MasterState {
        let images = &self.store.images;
        let not_followed = {
            let all = images.between(&(std::ops::Bound::Unbounded, std::ops::Bound::Unbounded));
            all.iter().filter(|name| !self.rules.follow(name)).count() as u64
        };
        let state = self.state();
        let (images_behind, bytes_left) = state.queue.behind();
        let troubled = |(name, trouble, text): (&ImageName, Trouble, &str)| {
            let (name, text) = (name.clone(), text.to_owned());
            TroubledImage { name, trouble, text }
        };
        let only_here = || state.only_here[0].iter().filter(|name| images.digest(name).is_some());
        MasterState {
            address: plain(&self.master().to_string(), ADDRESS_BYTES_MAX),
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
    pub(super) fn link(&self) -> Link {
        self.link
    }

    fn link_is(&mut self, link: Link) {
        if self.link != link {
            (self.link, self.since) = (link, wall());
        }
    }

    fn is_level(&self) -> bool {
        self.link == Link::Connected
            && self.course.follows()
            && self.queue.behind().0 == 0
            && self.directories.is_settled()
    }

    pub(super) fn note_level(&mut self) {
        if self.is_level() {
            self.level_at = Some(wall());
        }
    }
}
