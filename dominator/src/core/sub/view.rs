//! What a sub has reported, put together from polls that tell only what is new.
// tidy: core

use std::collections::BTreeSet;
use std::sync::Arc;

use common::api::dominator::PollSummary;
use common::api::subd::{
    Activity, CacheReport, Identity, LastFetch, LastUpdate, Outcome, PollReply, ScanCounters,
    ScanReport, Space, TriggerFailure, Version,
};
use common::filter::Patterns;
use common::image::ImageName;
use common::object::ObjectId;
use common::scope::Scope;

/// The most objects that a cache is believed to hold; images have fewer.
const CACHE_OBJECTS_MAX: usize = 1 << 20;

/// All that is known of a sub.
#[derive(Clone, Debug)]
pub struct View {
    /// Where it is in its history.
    pub version: Version,
    /// Who it is.
    pub identity: Identity,
    /// What it does.
    pub activity: Activity,
    /// The last complete scan, if there is one under the current settings.
    pub scan: Option<Arc<ScanReport>>,
    /// Counts scans that differ, over all instances of the sub.
    pub scan_number: u64,
    /// The scope of the current settings.
    pub scope: Scope,
    /// The local exclusions.
    pub exclusions: Patterns,
    /// The object cache.
    pub cache: BTreeSet<ObjectId>,
    /// How the last fetch ended.
    pub last_fetch: Option<LastFetch>,
    /// How the last update ended.
    pub last_update: Option<LastUpdate>,
    /// The image of the last update that was done.
    pub last_image: Option<ImageName>,
    /// Trigger failures since the last good update.
    pub trigger_failures: Vec<TriggerFailure>,
    /// Free space.
    pub space: Space,
    /// Scan counters.
    pub counters: ScanCounters,
}

/// A reply that does not fit what was known, so that everything has to be asked for again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Incomplete;

impl View {
    /// Takes a reply to a poll, upon what was known before it. A scan that differs from the last
    /// gets the number `next_scan`.
    ///
    /// # Errors
    ///
    /// [`Incomplete`] if the reply leaves out what was not known: ask again without a version.
    pub fn after(
        before: Option<Self>,
        reply: PollReply,
        next_scan: u64,
    ) -> Result<Self, Incomplete> {
        let PollReply {
            version,
            identity,
            activity,
            scan,
            scanned,
            scope,
            exclusions,
            cache,
            last_fetch,
            last_update,
            last_image,
            trigger_failures,
            space,
            counters,
            clock: _,
        } = reply;
        let before = before.filter(|before| before.version.instance == version.instance);
        let number = before.as_ref().map_or(next_scan, |before| before.scan_number);
        let same_exclusions = before.as_ref().is_some_and(|old| old.exclusions == exclusions);
        let (old_scan, old_cache) = match before {
            Some(before) => (before.scan, Some(before.cache)),
            None => (None, None),
        };
        let cache = match (cache, old_cache) {
            (Some(CacheReport::Full(objects)), _) => objects.into_iter().collect(),
            (Some(CacheReport::Changes { added, removed }), Some(mut objects)) => {
                for object in &removed {
                    objects.remove(object);
                }
                objects.extend(added);
                // Changes without end would fill the memory; a full report has a length that the
                // wire limits.
                if objects.len() > CACHE_OBJECTS_MAX {
                    return Err(Incomplete);
                }
                objects
            }
            (None, Some(objects)) => objects,
            (_, None) => return Err(Incomplete),
        };
        let (scan, scan_number) = match (scan, old_scan) {
            _ if !scanned => (None, number),
            (Some(scan), Some(old)) if *old == scan && same_exclusions => (Some(old), number),
            (Some(scan), _) => (Some(Arc::new(scan)), next_scan),
            (None, Some(old)) if old.scope == scope && same_exclusions => (Some(old), number),
            (None, _) => return Err(Incomplete),
        };
        Ok(Self {
            version,
            identity,
            activity,
            scan,
            scan_number,
            scope,
            exclusions,
            cache,
            last_fetch,
            last_update,
            last_image,
            trigger_failures,
            space,
            counters,
        })
    }

    /// How the update called `id` ended, if it has.
    #[must_use]
    pub fn outcome_of(&self, id: u64) -> Option<&LastUpdate> {
        self.last_update.as_ref().filter(|update| update.update_id == id)
    }

    /// How the fetch called `id` ended, if it has.
    #[must_use]
    pub fn fetch_of(&self, id: u64) -> Option<&LastFetch> {
        self.last_fetch.as_ref().filter(|fetch| fetch.fetch_id == id)
    }

    /// True while paths that an update touched have not been scanned since. A reply is one
    /// snapshot, so once they have been the scan in it is of that time or later.
    #[must_use]
    pub fn is_unverified(&self) -> bool {
        self.last_update.as_ref().is_some_and(|update| {
            update.outcome == Outcome::Done && update.verified_generation.is_none()
        })
    }

    /// What is worth showing.
    #[must_use]
    pub fn summary(&self) -> PollSummary {
        PollSummary {
            version: self.version,
            identity: self.identity.clone(),
            activity: self.activity.clone(),
            root: self.scan.as_ref().map(|scan| scan.root),
            totals: self.scan.as_ref().map(|scan| scan.totals),
            unreadable: self.scan.as_ref().map_or_else(Vec::new, |scan| scan.unreadable.clone()),
            last_fetch: self.last_fetch.clone(),
            last_update: self.last_update.clone(),
            trigger_failures: self.trigger_failures.clone(),
            space: self.space,
            counters: self.counters.clone(),
        }
    }
}
