//! What a sub has reported, put together from polls that tell only what is new.
// tidy: core

use std::sync::Arc;

use api::dominator::PollSummary;
use api::subd::{Alarm, CacheReport, LastFetch, LastUpdate, Outcome, PollReply, ScanReport};
use model::filter::{PatternError, Patterns};
use model::image::ImageName;
use model::object::set::ObjectSet;

/// The most objects that a cache is believed to hold; images have fewer.
const CACHE_OBJECTS_MAX: usize = 1 << 20;

/// All that is known of a sub.
#[derive(Clone, Debug)]
pub struct View {
    /// The last reply, less its scan, its exclusions and its cache: they follow, put together.
    pub report: PollReply,
    /// The last complete scan, if there is one under the current settings.
    pub scan: Option<Arc<ScanReport>>,
    /// Counts scans that differ, over all instances of the sub.
    pub scan_number: u64,
    /// The local exclusions.
    pub exclusions: Patterns,
    /// The object cache.
    pub cache: ObjectSet,
}

/// A reply that nothing can be made of.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unusable {
    /// It leaves out what was not known: everything has to be asked for again.
    #[error("the answer to a poll for everything lacks the scan or the cache")]
    Incomplete,
    /// Its exclusions are no patterns.
    #[error("its exclusions are not valid")]
    Exclusions { source: PatternError },
}

impl View {
    /// Takes a reply to a poll, upon what was known before it. A scan that differs from the last
    /// gets the number `next_scan`.
    ///
    /// # Errors
    ///
    /// [`Unusable`] says whether to ask again without a version.
    pub fn after(
        before: Option<Self>,
        mut reply: PollReply,
        next_scan: u64,
    ) -> Result<Self, Unusable> {
        let (scan, cache) = (reply.scan.take(), reply.cache.take());
        let exclusions = std::mem::take(&mut reply.exclusions);
        let before =
            before.filter(|before| before.report.version.instance == reply.version.instance);
        let number = before.as_ref().map_or(next_scan, |before| before.scan_number);
        let known = before.as_ref().filter(|old| old.exclusions.lines() == exclusions);
        let same_exclusions = known.is_some();
        let exclusions = match known {
            Some(old) => old.exclusions.clone(),
            None => Patterns::new(&exclusions).map_err(|source| Unusable::Exclusions { source })?,
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
            (None, _) => return Err(Unusable::Incomplete),
        };
        Ok(Self { report: reply, scan, scan_number, exclusions, cache })
    }

    /// How the update called `id` ended, if it has.
    #[must_use]
    pub fn outcome_of(&self, id: u64) -> Option<&LastUpdate> {
        self.report.last_update.as_ref().filter(|update| update.update_id == id)
    }

    /// How the fetch called `id` ended, if it has.
    #[must_use]
    pub fn fetch_of(&self, id: u64) -> Option<&LastFetch> {
        self.report.last_fetch.as_ref().filter(|fetch| fetch.fetch_id == id)
    }

    /// True while paths that an update touched have not been scanned since. A reply is one
    /// snapshot, so once they have been the scan in it is of that time or later.
    #[must_use]
    pub fn is_unverified(&self) -> bool {
        self.report.last_update.as_ref().is_some_and(|update| {
            update.outcome == Outcome::Done && update.verified_generation.is_none()
        })
    }

    /// True while the machine has to come up again before its last update is complete, and nothing
    /// is known to keep it from that.
    #[must_use]
    pub fn is_rebooting(&self) -> bool {
        let awaits = self.report.last_update.as_ref().is_some_and(|update| update.awaits_boot);
        awaits && !self.report.trigger_failures.iter().any(|failure| failure.verb == "reboot")
    }

    /// Why the journal of an update cannot be closed, if there is such a one.
    #[must_use]
    pub fn stuck(&self) -> Option<&str> {
        self.report.alarms.iter().find_map(|alarm| match alarm {
            Alarm::JournalStuck(why) => Some(why.as_str()),
            _ => None,
        })
    }

    /// The update to `image` that failed its health check and was put back, if it was the last.
    #[must_use]
    pub fn undone(&self, image: &ImageName) -> Option<(&LastUpdate, &str)> {
        let last = self.report.last_update.as_ref().filter(|last| last.image == *image)?;
        match &last.outcome {
            Outcome::Undone(why) => Some((last, why)),
            _ => None,
        }
    }

    /// What is worth showing.
    #[must_use]
    pub fn summary(&self) -> PollSummary {
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

/// The cache after a report, upon what was known of it.
fn cache_after(
    report: Option<CacheReport>,
    known: Option<ObjectSet>,
) -> Result<ObjectSet, Unusable> {
    match (report, known) {
        (Some(CacheReport::Full(objects)), _) => Ok(objects.into_iter().collect()),
        (Some(CacheReport::Changes { added, removed }), Some(objects)) => {
            let objects = objects.changed(&added, &removed);
            // Changes without end would fill the memory; a full report has a length that the
            // wire limits.
            if objects.len() > CACHE_OBJECTS_MAX {
                return Err(Unusable::Incomplete);
            }
            Ok(objects)
        }
        (None, Some(objects)) => Ok(objects),
        (_, None) => Err(Unusable::Incomplete),
    }
}
