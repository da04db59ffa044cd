//! Removes from a bucket what no image needs, one server at a time.
//!
//! # Why no object is lost
//!
//! Several servers take uploads and add images while one of them collects. No lock is common to
//! them: what they know of each other they write into the bucket, which gives what was written
//! last to whoever reads after that. The module `interleavings` tries all orders of their steps.
//!
//! 1. Whoever is to find an object there later, because a caller was told of it or an image that
//!    is being added needs it, writes a *lease* first, then reads the *list of the condemned*, and
//!    waits while the object is on it. Only then it looks whether the object is there, or stores
//!    it.
//! 2. Whoever removes objects writes them on that list first. Then it reads the leases, and the
//!    names of all images, of which it walks those that are new. What is neither leased nor needed
//!    it removes. It takes the list back when each removal was answered.
//!
//! So of a lease and a removal that meet, one sees the other: if the lease was not there when the
//! leases were read, the list was there when its writer read that. And an image that became
//! visible too late to be walked had its lease before, which the remover saw.
//!
//! 3. One server has the *turn*, by a conditional write. It acts upon it for
//!    [`crate::store::bucket::removal_rules::TURN_SECONDS_MAX`] after it renewed it, by a clock that nobody can set.
//!    Another takes the turn, or a list that was left, only when nothing was heard for
//!    [`crate::store::bucket::removal_rules::SILENT_SECONDS`] by the bucket's clock. In between each request has ended:
//!    it is not tried for longer than a minute, and a bucket refuses one that was signed a quarter
//!    of an hour ago.
//! 4. Whatever these rules may overlook: an object goes only if the bucket dates it, and a former
//!    collection has seen that no image needs it, a day ago, by the bucket's clock and by that of
//!    the server.
//!
//! What crashes in the middle has removed less, and leaves the list: its objects cannot be stored
//! again until the same server takes it back, a minute after it is there again, or another.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use api::image_server::collection::{CollectReply, CollectRequest};
use model::lock::locked;
use model::object::ObjectId;
use model::report::report;
use serde::{Deserialize, Serialize};

use super::keys;
use super::leases::AllLeases;
use super::objects::BucketObjects;
use super::remote::Remote;
use crate::core::collection::leases::short;
use crate::core::collection::needed_objects::Marks;
use crate::store::bucket::gc_lease::{LOOK_INTERVAL, Sentence, Taken, Turn, withdraw_old};
use crate::store::bucket::removal_rules::{Clocks, Fate, Known, fate};
use crate::store::contract::{Collecting, CollectionProgress, Look};
use crate::store::error::CollectError;
use crate::store::error::StoreError;
use crate::store::image_walk::walk;
use crate::store::images::Images;

/// How many objects are condemned at once.
const BATCH_MAX: usize = 500;

/// Of how many objects that no image needs it is remembered since when.
const REMEMBERED_MAX: usize = 1 << 20;

/// The longest key that says so, in bytes.
const BYTES_MAX: u64 = 64 << 20;

/// How often the turn is renewed.
const RENEW_INTERVAL: Duration = Duration::from_secs(30);

/// How long after the last collection, by any server, one is made without being asked for; and how
/// often it is looked when that was. In seconds.
const DUE_SECONDS: i64 = 12 * 3_600;
const DUE_LOOK_INTERVAL: Duration = Duration::from_secs(1_800);

/// What the key holds that says what no image needs.
#[derive(Default, Serialize, Deserialize)]
struct Unneeded {
    /// Those that were first seen at one time are together.
    seen: Vec<Seen>,
}

#[derive(Serialize, Deserialize)]
struct Seen {
    since: Clocks,
    /// As [`short`] gives them, in hexadecimal.
    ids: Vec<String>,
}

/// Collects the objects of a bucket.
pub struct BucketCollecting {
    remote: Arc<Remote>,
    objects: Arc<BucketObjects>,
    images: Arc<Images>,
    /// For how long no image must have needed what is removed, in seconds.
    unneeded_seconds: i64,
    looked: Mutex<Looked>,
    /// Held while this server removes objects, or takes back a list that it left.
    removing: Mutex<()>,
}

/// When it was last looked for what has to be done by itself.
#[derive(Default)]
struct Looked {
    tended: Option<Instant>,
    due: Option<Instant>,
}

impl BucketCollecting {
    pub(in crate::store) fn new(
        remote: Arc<Remote>,
        objects: Arc<BucketObjects>,
        images: Arc<Images>,
        unneeded_seconds: i64,
    ) -> Self {
        // Not at once: whoever starts a server has other things to ask of it.
        let looked = Looked { tended: None, due: Some(Instant::now()) };
        Self {
            remote,
            objects,
            images,
            unneeded_seconds,
            looked: Mutex::new(looked),
            removing: Mutex::default(),
        }
    }

    fn look_due(&self) -> Result<bool, StoreError> {
        let found = self.remote.head(&self.remote.key(keys::UNNEEDED))?;
        let now = self.remote.now().bucket;
        Ok(found.is_none_or(|meta| now.saturating_sub(meta.modified) > DUE_SECONDS))
    }
}

/// True if the last time was longer ago than `interval`; then it is now.
fn is_time(last: &mut Option<Instant>, interval: Duration) -> bool {
    let is_time = last.is_none_or(|last| last.elapsed() > interval);
    if is_time {
        *last = Some(Instant::now());
    }
    is_time
}

impl Collecting for BucketCollecting {
    fn collect(
        &self,
        request: CollectRequest,
        progress: &dyn CollectionProgress,
        stop: &dyn Fn() -> bool,
    ) -> Result<CollectReply, CollectError> {
        let turn = match Turn::take(&self.remote)? {
            Taken::Ours(turn) => turn,
            Taken::Of(server) => return Err(CollectError::Elsewhere { server }),
        };
        withdraw_old(&self.remote)?;
        let mut run = Run {
            collecting: self,
            request,
            progress,
            turn: RefCell::new(turn),
            renewed: Cell::new(Instant::now()),
            stop,
            marks: Marks::default(),
            leases: AllLeases::default(),
            reply: CollectReply::default(),
        };
        let result = run.all();
        run.turn.into_inner().end();
        result
    }

    fn tend(&self) {
        if !is_time(&mut locked(&self.looked).tended, LOOK_INTERVAL) {
            return;
        }
        let _removing = locked(&self.removing);
        let tended = self.remote.tell_time().and_then(|_| withdraw_old(&self.remote));
        if let Err(error) = tended {
            tracing::warn!("the bucket was not looked after: {}", report(&error));
        }
    }

    fn is_due(&self) -> bool {
        if !is_time(&mut locked(&self.looked).due, DUE_LOOK_INTERVAL) {
            return false;
        }
        self.look_due().unwrap_or_else(|error| {
            tracing::warn!("when objects were last collected is not known: {}", report(&error));
            false
        })
    }
}

/// An object that no image needs.
struct Candidate {
    id: ObjectId,
    modified: i64,
    bytes: u64,
    since: Clocks,
}

/// One collection.
struct Run<'run> {
    collecting: &'run BucketCollecting,
    request: CollectRequest,
    progress: &'run dyn CollectionProgress,
    turn: RefCell<Turn<'run>>,
    renewed: Cell<Instant>,
    stop: &'run dyn Fn() -> bool,
    marks: Marks,
    leases: AllLeases,
    reply: CollectReply,
}

impl Run<'_> {
    fn all(&mut self) -> Result<CollectReply, CollectError> {
        let remote = &self.collecting.remote;
        self.walk()?;
        let now = remote.tell_time()?;
        let candidates = self.list(now)?;
        self.leases.read(remote)?;
        let mut free = Vec::new();
        for candidate in candidates {
            match self.fate(&candidate, now) {
                Fate::Goes => free.push(candidate),
                Fate::Leased => self.reply.leased.count(candidate.bytes),
                Fate::Waits => {}
            }
        }
        free.sort_by_key(|candidate| (candidate.modified, candidate.id));
        if self.request.dry_run {
            for candidate in &free {
                if self.is_enough() {
                    break;
                }
                self.reply.removed.count(candidate.bytes);
            }
            return Ok(self.reply);
        }
        for batch in free.chunks(BATCH_MAX) {
            if self.is_enough() {
                break;
            }
            self.remove(batch)?;
        }
        remote.delete(self.leases.ended())?;
        Ok(self.reply)
    }

    /// True if the run ends now. Renews the turn where that is due.
    fn is_over(&self) -> bool {
        if self.renewed.get().elapsed() > RENEW_INTERVAL {
            self.renewed.set(Instant::now());
            if let Err(error) = self.turn.borrow_mut().renew() {
                // What removes finds the turn to be old.
                tracing::warn!("{}", report(&error));
                return true;
            }
        }
        (self.stop)()
    }

    fn expect_going_on(&self) -> Result<(), CollectError> {
        if self.is_over() { Err(CollectError::Stopped) } else { Ok(()) }
    }

    /// Walks all images that there are and that were not walked.
    fn walk(&mut self) -> Result<(), CollectError> {
        let BucketCollecting { images, objects, .. } = self.collecting;
        images.refresh(Look::Close)?;
        if let Some((image, _)) = images.damaged().into_iter().next() {
            return Err(CollectError::Damaged { image });
        }
        let (_, starts) = images.starts();
        let mut marks = std::mem::take(&mut self.marks);
        let walked = walk(&**objects, &mut marks, &starts, || self.is_over());
        self.marks = marks;
        if !walked.map_err(|source| CollectError::Walk { source })? {
            return Err(CollectError::Stopped);
        }
        self.reply.images = starts.len() as u64;
        Ok(())
    }

    /// Finds what no image needs, and writes down since when.
    fn list(&mut self, now: Clocks) -> Result<Vec<Candidate>, CollectError> {
        let remote = &self.collecting.remote;
        let key = remote.key(keys::UNNEEDED);
        let former: HashMap<u64, Clocks> = match remote.get(&key, BYTES_MAX)? {
            None => HashMap::new(),
            // What is damaged is written anew, and everything waits for another day.
            Some(entry) => since(&serde_json::from_slice(&entry.bytes).unwrap_or_default()),
        };
        let (mut objects, mut bytes, mut is_over) = (0, 0, false);
        let mut candidates = Vec::new();
        self.collecting.objects.visit(&mut |id, meta| {
            objects += 1;
            bytes += meta.size_bytes;
            if !self.marks.needs(&id) {
                self.reply.unneeded.count(meta.size_bytes);
                if candidates.len() < REMEMBERED_MAX {
                    let since = former.get(&short(&id)).copied().unwrap_or(now);
                    let (modified, bytes) = (meta.modified, meta.size_bytes);
                    candidates.push(Candidate { id, modified, bytes, since });
                }
            }
            is_over = objects % 1_000 == 0 && self.is_over();
            !is_over
        })?;
        if is_over {
            return Err(CollectError::Stopped);
        }
        self.collecting.objects.stored.counted(objects, bytes);
        self.progress.unneeded(self.reply.unneeded);
        if !self.request.dry_run {
            let unneeded = unneeded(&candidates);
            let bytes = serde_json::to_vec(&unneeded).expect("numbers and strings can be written");
            remote.put(&key, bytes)?;
        }
        Ok(candidates)
    }

    fn fate(&self, candidate: &Candidate, now: Clocks) -> Fate {
        let known = Known {
            modified: candidate.modified,
            unneeded_since: candidate.since,
            is_leased: self.leases.hold(now, &candidate.id),
        };
        fate(known, self.collecting.unneeded_seconds, now)
    }

    fn is_enough(&self) -> bool {
        self.request.bytes > 0 && self.reply.removed.bytes >= self.request.bytes
    }

    fn remove(&mut self, batch: &[Candidate]) -> Result<(), CollectError> {
        self.expect_going_on()?;
        let _removing = locked(&self.collecting.removing);
        self.turn.borrow_mut().renew()?;
        self.renewed.set(Instant::now());
        let ids = batch.iter().map(|candidate| candidate.id).collect();
        let sentence = self.turn.borrow().condemn(ids)?;
        match self.still_free(batch) {
            Ok(free) => self.execute(sentence, &free),
            Err(error) => {
                // Nothing was asked to be removed yet.
                sentence.withdraw()?;
                Err(error)
            }
        }
    }

    /// Those of `batch`, which is condemned, that nobody has leased or needs even now.
    fn still_free<'batch>(
        &mut self,
        batch: &'batch [Candidate],
    ) -> Result<Vec<&'batch Candidate>, CollectError> {
        let remote = &self.collecting.remote;
        self.leases.read(remote)?;
        self.walk()?;
        let now = remote.now();
        let ids: Vec<ObjectId> = batch.iter().map(|candidate| candidate.id).collect();
        let dates = self.collecting.objects.dates(&ids)?;
        let free = batch.iter().zip(dates).filter(|(candidate, date)| {
            // One that was stored again since it was listed is not the one that was listed.
            *date == Some(candidate.modified)
                && !self.marks.needs(&candidate.id)
                && self.fate(candidate, now) == Fate::Goes
        });
        Ok(free.map(|(candidate, _)| candidate).collect())
    }

    /// Removes them. If that is not answered the list stays, and is taken back later.
    fn execute(&mut self, sentence: Sentence<'_>, free: &[&Candidate]) -> Result<(), CollectError> {
        let remote = &self.collecting.remote;
        if let Err(error) = self.turn.borrow().expect_fresh() {
            sentence.withdraw()?;
            return Err(error.into());
        }
        let keys: Vec<_> =
            free.iter().map(|candidate| remote.key(&keys::object(&candidate.id))).collect();
        remote.delete(&keys)?;
        sentence.withdraw()?;
        for candidate in free {
            self.collecting.objects.leasing.forget(&candidate.id);
            self.reply.removed.count(candidate.bytes);
            self.progress.removed(candidate.bytes);
        }
        Ok(())
    }
}

fn since(unneeded: &Unneeded) -> HashMap<u64, Clocks> {
    let all = unneeded.seen.iter().flat_map(|seen| seen.ids.iter().map(move |id| (id, seen.since)));
    all.filter_map(|(id, since)| Some((u64::from_str_radix(id, 16).ok()?, since))).collect()
}

fn unneeded(candidates: &[Candidate]) -> Unneeded {
    let mut seen: std::collections::BTreeMap<Clocks, Vec<String>> = Default::default();
    for candidate in candidates {
        seen.entry(candidate.since).or_default().push(format!("{:016x}", short(&candidate.id)));
    }
    Unneeded { seen: seen.into_iter().map(|(since, ids)| Seen { since, ids }).collect() }
}
