//! Polls: when the next one is sent, and what is known of the sub from the replies.
// tidy: core

use core::time::Duration;
use std::sync::Arc;

use api::codec::length;
use api::dominator::{PollSummary, Status};
use api::subd::{
    Activity, Alarm, CacheReport, LastFetch, LastUpdate, PollReply, PollRequest, ScanReport,
    UpdateOutcome,
};
use model::backoff::jittered;
use model::display::{error_chain, size, utc};
use model::filter::{PatternError, Patterns};
use model::image::ImageName;
use model::object::ObjectSet;
use model::tree::Time;

use super::{Effect, Failure, FailureKind, RequestId, Step, Sub};
use crate::core::timing::{
    Attempt, POLL_RETRY_LONGEST, POLL_WAIT, POLL_WAIT_AFTER_WORK, PollPace, RETRY_FIRST, poll_wait,
};

/// The most objects that the cache of a sub may have; images have fewer.
const CACHE_OBJECTS_MAX: usize = 1 << 20;

/// The longest report that is kept, its object cache left out, in bytes as it is sent: a sub must
/// not fill the memory with texts and lists.
const REPORT_BYTES_MAX: usize = 4 << 20;

/// Everything that a sub has reported.
#[derive(Clone, Debug)]
pub struct View {
    /// The last reply, without its scan, exclusions and cache, which are in the other fields.
    pub report: PollReply,
    /// The last complete scan under the current settings; `None` before the first.
    pub scan: Option<Arc<ScanReport>>,
    /// Counts scans that differ, over all instances of the sub.
    pub scan_number: u64,
    /// The local exclusions.
    pub exclusions: Patterns,
    /// The object cache.
    pub cache: Arc<ObjectSet>,
}

/// Why a reply to a poll cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum PollReplyError {
    /// It omits something that is not known: the next poll must request a full report.
    #[error("the answer to a poll for everything lacks the scan or the cache")]
    Incomplete,
    #[error(
        "its report takes {} without its object cache: at most {} are taken",
        size(*bytes as u64), size(REPORT_BYTES_MAX as u64)
    )]
    TooLong { bytes: usize },
    #[error("its object cache has more than {CACHE_OBJECTS_MAX} objects")]
    TooMany,
    #[error("its exclusions are not valid")]
    Exclusions { source: PatternError },
}

impl View {
    /// Returns the view after a reply to a poll. A scan that differs from the last one gets the
    /// number `next_scan`.
    pub(super) fn after(
        before: Option<Self>,
        mut reply: PollReply,
        next_scan: u64,
    ) -> Result<Self, PollReplyError> {
        let cache = reply.cache.take();
        let bytes = length("report", &reply).unwrap_or(usize::MAX);
        if bytes > REPORT_BYTES_MAX {
            return Err(PollReplyError::TooLong { bytes });
        }
        let scan = reply.scan.take();
        let exclusions = std::mem::take(&mut reply.exclusions);
        let before =
            before.filter(|before| before.report.version.instance == reply.version.instance);
        let number = before.as_ref().map_or(next_scan, |before| before.scan_number);
        let known = before.as_ref().filter(|old| old.exclusions.lines() == exclusions);
        let same_exclusions = known.is_some();
        let exclusions = match known {
            Some(old) => old.exclusions.clone(),
            None => Patterns::new(&exclusions)
                .map_err(|source| PollReplyError::Exclusions { source })?,
        };
        let (old_scan, old_cache) = match before {
            Some(before) => (before.scan, Some(before.cache)),
            None => (None, None),
        };
        let cache = cache_after(cache, old_cache)?;
        let (scan, scan_number) = match (scan, old_scan) {
            _ if !reply.scanned => (None, number),
            (Some(scan), Some(old)) if *old == scan && same_exclusions => (Some(old), number),
            (Some(scan), _) => (Some(Arc::new(scan)), next_scan),
            (None, Some(old)) if old.scope == reply.scope && same_exclusions => (Some(old), number),
            (None, _) => return Err(PollReplyError::Incomplete),
        };
        Ok(Self { report: reply, scan, scan_number, exclusions, cache })
    }

    /// Returns how the update with this id ended, if it has.
    pub(super) fn outcome_of(&self, id: u64) -> Option<&LastUpdate> {
        self.report.last_update.as_ref().filter(|update| update.update_id == id)
    }

    /// Returns how the fetch with this id ended, if it has.
    pub(super) fn fetch_of(&self, id: u64) -> Option<&LastFetch> {
        self.report.last_fetch.as_ref().filter(|fetch| fetch.fetch_id == id)
    }

    /// True while paths that an update changed have not been scanned since. A reply is one
    /// snapshot: once they have been scanned, its scan is of that time or later.
    pub(super) fn is_unverified(&self) -> bool {
        self.report.last_update.as_ref().is_some_and(|update| {
            update.outcome == UpdateOutcome::Done && update.verified_generation.is_none()
        })
    }

    /// True while the last update needs a reboot to be complete, and the reboot has not failed.
    #[must_use]
    pub fn is_rebooting(&self) -> bool {
        let awaits = self.report.last_update.as_ref().is_some_and(|update| update.awaits_boot);
        awaits && !self.report.trigger_failures.iter().any(|failure| failure.verb == "reboot")
    }

    /// Returns why updates are paused on the machine itself, if they are.
    pub(super) fn pause_text(&self) -> Option<String> {
        let pause = self.report.paused.as_ref()?;
        let (until, reason) = (utc(pause.until), &pause.reason);
        Some(format!("paused on the machine itself until {until}: {reason}"))
    }

    /// Returns why the journal of an update cannot be closed, if that is so.
    #[must_use]
    pub fn stuck(&self) -> Option<&str> {
        self.report.alarms.iter().find_map(|alarm| match alarm {
            Alarm::JournalStuck(why) => Some(why.as_str()),
            _ => None,
        })
    }

    /// Returns the last update and why its health check failed, if it was an update to `image` that
    /// was undone for that.
    #[must_use]
    pub fn undone(&self, image: &ImageName) -> Option<(&LastUpdate, &str)> {
        let last = self.report.last_update.as_ref().filter(|last| last.image == *image)?;
        match &last.outcome {
            UpdateOutcome::Undone(why) => Some((last, why)),
            _ => None,
        }
    }

    /// Returns the part of the report that operators are shown.
    pub(super) fn summary(&self) -> PollSummary {
        let report = &self.report;
        PollSummary {
            version: report.version,
            identity: report.identity.clone(),
            activity: report.activity.clone(),
            root: self.scan.as_ref().map(|scan| scan.root),
            totals: self.scan.as_ref().map(|scan| scan.totals),
            unreadable: self.scan.as_ref().map_or_else(Vec::new, |scan| scan.unreadable.clone()),
            last_fetch: report.last_fetch.clone(),
            last_update: report.last_update.clone(),
            trigger_failures: report.trigger_failures.clone(),
            space: report.space,
            counters: report.counters.clone(),
            load: report.load,
            alarms: report.alarms.clone(),
            paused: report.paused.clone(),
        }
    }
}

/// Returns the cache after a report, from the known one.
fn cache_after(
    report: Option<CacheReport>,
    known: Option<Arc<ObjectSet>>,
) -> Result<Arc<ObjectSet>, PollReplyError> {
    match (report, known) {
        (Some(CacheReport::Full(objects)), _) if objects.len() > CACHE_OBJECTS_MAX => {
            Err(PollReplyError::TooMany)
        }
        (Some(CacheReport::Full(objects)), _) => Ok(Arc::new(objects.into_iter().collect())),
        (Some(CacheReport::Changes { added, removed }), Some(objects)) => {
            let objects = objects.changed(&added, &removed);
            // Without this limit a sub could fill the memory by sending changes.
            if objects.len() > CACHE_OBJECTS_MAX {
                return Err(PollReplyError::Incomplete);
            }
            Ok(Arc::new(objects))
        }
        (None, Some(objects)) => Ok(objects),
        (_, None) => Err(PollReplyError::Incomplete),
    }
}

/// Whether the sub answers polls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Reachability {
    Unknown,
    /// It answered the last poll.
    Answered,
    /// The last poll failed.
    Failed(Failure),
}

/// The poll that is under way, or when the next one is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Polling {
    Due(Duration),
    UnderWay(RequestId),
}

/// The polls of one sub.
#[derive(Debug)]
pub(super) struct Polls {
    pub(super) reachability: Reachability,
    pub(super) next: Polling,
    pace: PollPace,
    attempt: Attempt,
    /// The next poll requests a full report, because a report was missed.
    needs_full_report: bool,
    /// When the sub last answered, on the clock of `Now::elapsed`.
    pub(super) answered: Duration,
    /// When the sub last said that it fetches, stages or updates.
    busy: Option<Duration>,
    pub(super) last_seen: Option<Time>,
}

impl Polls {
    pub(super) fn new(now: Duration) -> Self {
        Self {
            reachability: Reachability::Unknown,
            next: Polling::Due(now),
            pace: PollPace::default(),
            attempt: Attempt::default(),
            needs_full_report: false,
            answered: now,
            busy: None,
            last_seen: None,
        }
    }

    /// True if the last poll failed.
    pub(super) fn is_away(&self) -> bool {
        matches!(self.reachability, Reachability::Failed(_))
    }

    /// Makes the next poll due, if none is under way.
    pub(super) fn hurry(&mut self) {
        if let Polling::Due(at) = &mut self.next {
            *at = Duration::ZERO;
        }
    }
}

impl Sub {
    /// Replaces the object cache that the sub has reported by an equal one that machines share.
    pub fn share_cache(&mut self, share: impl FnOnce(&Arc<ObjectSet>) -> Arc<ObjectSet>) {
        if let Some(view) = &mut self.view {
            view.cache = share(&view.cache);
        }
    }

    pub(super) fn poll_if_due(&mut self, step: &mut Step<'_>) {
        let Polling::Due(at) = self.polls.next else { return };
        if step.now.elapsed < at {
            self.wake_by(at);
            return;
        }
        let have = match &self.view {
            Some(view) if !self.polls.needs_full_report => Some(view.report.version),
            _ => None,
        };
        let now = step.now.elapsed;
        let is_after_work = self.polls.busy.is_some_and(|busy| now < busy + POLL_WAIT);
        let wait = if is_after_work { POLL_WAIT_AFTER_WORK } else { POLL_WAIT };
        // The answer shows at once that the machine is back.
        let wait = match self.polls.is_away() {
            true => Duration::ZERO,
            false => poll_wait(now, jittered(wait, step.context.jitter)),
        };
        let wait_ms = u32::try_from(wait.as_millis()).expect("a poll waits for about a minute");
        let request_id = self.next_request_id();
        self.polls.next = Polling::UnderWay(request_id);
        step.effects.push(Effect::Poll(request_id, PollRequest { have, wait_ms }));
    }

    pub(super) fn polled(&mut self, request_id: RequestId, reply: PollReply, step: &Step<'_>) {
        let was_paused = self.view.as_ref().is_some_and(|view| view.report.paused.is_some());
        let before = if self.polls.needs_full_report { None } else { self.view.take() };
        let view = match View::after(before, reply, self.scans + 1) {
            Ok(view) => view,
            Err(PollReplyError::Incomplete) if !self.polls.needs_full_report => {
                self.polls.needs_full_report = true;
                self.polls.next = Polling::Due(self.polls.pace.next(step.now.elapsed));
                return;
            }
            Err(error) => {
                let failure =
                    Failure { kind: FailureKind::InvalidReply, text: error_chain(&error) };
                return self.poll_failed(failure, step);
            }
        };
        if view.scan_number > self.scans {
            self.scans = view.scan_number;
            // The call that failed was made from another scan.
            self.calls.attempt.release();
        }
        self.polls.needs_full_report = false;
        self.claims.repeat_next();
        self.polls.reachability = Reachability::Answered;
        self.polls.attempt.failures = 0;
        self.polls.answered = step.now.elapsed;
        self.polls.last_seen = Some(step.now.wall);
        self.polls.next = Polling::Due(self.polls.pace.next(step.now.elapsed));
        self.calls.polled(request_id, &view);
        if was_paused && view.report.paused.is_none() {
            self.updates.hold.take_if(|hold| hold.status == Status::Held);
        }
        if view.report.activity != Activity::Idle {
            self.polls.busy = Some(step.now.elapsed);
        }
        self.view = Some(view);
        self.record_update_end(step);
        self.record_fetch_end(step);
    }

    pub(super) fn poll_failed(&mut self, failure: Failure, step: &Step<'_>) {
        let pause = self.polls.attempt.count(RETRY_FIRST, POLL_RETRY_LONGEST, step.context.jitter);
        self.polls.next = Polling::Due(step.now.elapsed + pause);
        self.polls.needs_full_report = failure.kind == FailureKind::InvalidReply;
        self.polls.reachability = Reachability::Failed(failure);
    }
}
