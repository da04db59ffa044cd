//! The image that the machine will get next: its objects are fetched ahead, so that the switch
//! fetches nothing.
//!
//! It happens only while the required image is in place, and is never in the way: subd ends such a
//! fetch when another one is needed, and nothing waits for it. What it cannot do is no failure of
//! the machine; the detail of `synced` says so.
// tidy: core

use core::time::Duration;
use std::collections::BTreeSet;
use std::sync::Arc;

use api::subd::{Activity, FetchFailure, FetchRequest};
use model::object::ObjectId;

use super::{Call, CallPurpose, Context, Effect, ImageState, Now, Sub, Ticket, View};
use crate::core::network_budget::Urgency;
use crate::core::sub::missing_objects::Missing;
use crate::core::timing::{HOLD_FIRST, HOLD_LONGEST};
use api::planning::{PlanKey, Planned};
use model::backoff::{doubled, jittered};
use model::image::required::RequiredImage;
use model::words::size;

/// What is known of the image that comes next.
#[derive(Debug)]
pub(super) struct Prefetch {
    pub(super) image: ImageState,
    planning: Option<(Ticket, PlanKey)>,
    planned: Option<Arc<Planned>>,
    /// No plan can be made of it, and why.
    failed: Option<(PlanKey, String)>,
    /// The fetch that was ordered last, and how many objects were missing then.
    fetch: Option<(u64, usize)>,
    /// A fetch failed: until when none is ordered, and why.
    hold: Option<(Duration, String)>,
    holds: u32,
}

impl Default for Prefetch {
    fn default() -> Self {
        Self {
            image: ImageState::Undefined,
            planning: None,
            planned: None,
            failed: None,
            fetch: None,
            hold: None,
            holds: 0,
        }
    }
}

impl Prefetch {
    /// Takes note of the image that is planned now; true if it is another one.
    pub(super) fn assigned(&mut self, image: ImageState) -> bool {
        let is_other = self.image.digest() != image.digest();
        if is_other {
            *self = Self { fetch: self.fetch, ..Self::default() };
        }
        self.image = image;
        is_other
    }

    /// Takes the answer to the question for a plan; false if it is to another one's question.
    pub(super) fn planned(
        &mut self,
        ticket: Ticket,
        result: &Result<Arc<Planned>, String>,
    ) -> bool {
        let Some((_, key)) = self.planning.take_if(|(asked, _)| *asked == ticket) else {
            return false;
        };
        match result {
            Ok(planned) => self.planned = Some(Arc::clone(planned)),
            Err(text) => self.failed = Some((key, text.clone())),
        }
        true
    }

    /// True if the machine is at the fetch that was ordered last ahead of need.
    pub(super) fn is_fetching(&self, activity: &Activity) -> bool {
        let ordered = self.fetch.map(|(fetch, _)| fetch);
        matches!(activity, Activity::Fetching { fetch_id, .. } if Some(*fetch_id) == ordered)
    }

    /// The objects to keep for a machine that has `required`, by the scan of this number; `None`
    /// while that is not known, but soon will be.
    pub(super) fn kept(&self, required: &RequiredImage, scan: u64) -> Option<BTreeSet<ObjectId>> {
        let image = match &self.image {
            ImageState::Undefined => return Some(BTreeSet::new()),
            // After a restart of the dominator, what was fetched for it must not be thrown away.
            ImageState::Missing(_) => return None,
            ImageState::Ready(image) => image,
        };
        let key = PlanKey { image: image.digest, scan };
        let is_needless = image.digest == required.digest
            || self.failed.as_ref().is_some_and(|(failed, _)| *failed == key);
        if is_needless {
            return Some(BTreeSet::new());
        }
        let planned = self.planned.as_ref().filter(|planned| planned.key == key)?;
        Some(planned.needs.keys().copied().collect())
    }
}

impl Sub {
    /// Fetches what the next image needs, and says how far that is; `None` if there is no next
    /// image. The required image is in place.
    pub(super) fn prefetch_next(
        &mut self,
        view: &View,
        required: &RequiredImage,
        now: Now,
        context: &Context<'_>,
        effects: &mut Vec<Effect>,
    ) -> Option<String> {
        let image = match &self.prefetch.image {
            ImageState::Undefined => return None,
            ImageState::Missing(why) => return Some(format!("the planned image: {why}")),
            ImageState::Ready(image) if image.digest == required.digest => return None,
            ImageState::Ready(image) => Arc::clone(image),
        };
        let name = image.name();
        let key = PlanKey { image: image.digest, scan: view.scan_number };
        if let Some((failed, why)) = &self.prefetch.failed
            && *failed == key
        {
            return Some(format!("nothing is fetched ahead for {name}: {why}"));
        }
        let planned = match &self.prefetch.planned {
            Some(planned) if planned.key == key => Arc::clone(planned),
            _ => {
                if self.prefetch.planning.is_none() {
                    let scan = view.scan.as_ref()?;
                    let tree = self.tree.as_ref().filter(|tree| tree.digest() == scan.root)?;
                    let tree = tree.clone();
                    let ticket = self.ask_for_plan(key, view, scan, tree, &image, effects);
                    self.prefetch.planning = Some((ticket, key));
                }
                return Some(format!("is compared with {name}, which comes next"));
            }
        };
        let missing = Missing::of(&planned, view);
        if missing.count == 0 {
            (self.prefetch.hold, self.prefetch.holds) = (None, 0);
            return Some(format!("has all objects of {name}, which comes next"));
        }
        let wanted = format!("{} of {name}", missing.describe());
        self.record_prefetch_end(view, missing.count, now, context);
        if let Some((until, why)) = &self.prefetch.hold {
            let (until, text) = (*until, format!("{wanted} are not fetched ahead yet: {why}"));
            if now.elapsed < until {
                self.wake_by(until);
                return Some(text);
            }
            self.prefetch.hold = None;
        }
        if let Some(shortage) = missing.shortage(view.report.space) {
            return Some(format!("nothing is fetched ahead for {name}: {shortage}"));
        }
        if matches!(view.report.activity, Activity::Idle) && self.may_call(now) {
            let (plan, bytes) = (planned.digest, missing.bytes);
            if let Err(mut why) = self.fetch_claimed(plan, Urgency::Prefetch, bytes, now, effects) {
                if why.is_empty() {
                    why.push_str("a share of the network is asked for");
                }
                return Some(format!("{wanted} are not fetched ahead yet: {why}"));
            }
            let fetch_id = self.next_id();
            let sources = context.sources.to_vec();
            let objects = missing.objects;
            let request = FetchRequest { fetch_id, sources, objects, ahead: true };
            if self.call(now, CallPurpose::Prefetch(fetch_id), Call::Fetch(request), effects) {
                self.prefetch.fetch = Some((fetch_id, missing.count));
            }
        }
        Some(format!("fetches {wanted}, which comes next"))
    }

    /// Orders nothing ahead of need for a while, that grows with each time.
    pub(super) fn hold_prefetch(&mut self, why: String, now: Now, context: &Context<'_>) {
        self.prefetch.holds += 1;
        let pause = doubled(HOLD_FIRST, HOLD_LONGEST, self.prefetch.holds);
        self.prefetch.hold = Some((now.elapsed + jittered(pause, context.jitter), why));
    }

    /// Takes note of how the last fetch ahead of need ended; so many objects are `missing` now.
    fn record_prefetch_end(
        &mut self,
        view: &View,
        missing: usize,
        now: Now,
        context: &Context<'_>,
    ) {
        let Some((fetch, before)) = self.prefetch.fetch else { return };
        let Some(last) = view.fetch_of(fetch) else { return };
        self.prefetch.fetch = None;
        let why = match &last.error {
            // The rest is asked for next.
            None if missing < before => return,
            None => "a fetch has brought no more objects".to_owned(),
            Some(FetchFailure::GaveWay) => return,
            Some(FetchFailure::InsufficientSpace { need_bytes, free_bytes }) => {
                format!("they need {}, {} are free", size(*need_bytes), size(*free_bytes))
            }
            Some(FetchFailure::Sources(why) | FetchFailure::Local(why)) => why.clone(),
        };
        self.hold_prefetch(why, now, context);
    }
}
