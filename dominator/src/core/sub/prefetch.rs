//! Fetches the objects of the image that the machine will get next, so that they are in the cache
//! when it is required.
//!
//! A prefetch is ordered only while the machine is synced, and delays nothing: subd ends it when
//! another fetch is needed, and nothing waits for it. A failed prefetch changes only the detail of
//! `synced`.
// tidy: core

use std::collections::BTreeSet;
use std::sync::Arc;

use api::planning::{PlanKey, Planned};
use api::subd::{Activity, FetchFailure, FetchRequest};
use model::display::size;
use model::image::required::RequiredImage;
use model::object::ObjectId;

use super::calls::CallPurpose;
use super::plans::{Missing, Planning};
use super::updates::Fetching;
use super::{Call, Effect, ImageState, Step, Sub, View};
use crate::core::network_budget::Urgency;
use crate::core::timing::{Attempt, HOLD_FIRST, HOLD_LONGEST};

/// The next image, the plan to it, and its prefetch.
#[derive(Debug, Default)]
pub(super) struct Prefetch {
    image: ImageState,
    pub(super) plan: Planning,
    /// The last prefetch that was ordered.
    fetch: Option<Fetching>,
    attempt: Attempt,
}

impl Prefetch {
    /// Sets the next image. Returns true if it is another one than before.
    pub(super) fn set_image(&mut self, image: ImageState) -> bool {
        let is_other = self.image.digest() != image.digest();
        if is_other {
            *self = Self { fetch: self.fetch, ..Self::default() };
        }
        self.image = image;
        is_other
    }

    /// True if the activity of the machine is the last prefetch.
    pub(super) fn is_fetching(&self, activity: &Activity) -> bool {
        let ordered = self.fetch.map(|fetch| fetch.id);
        matches!(activity, Activity::Fetching { fetch_id, .. } if Some(*fetch_id) == ordered)
    }

    /// Returns the objects that the next image needs on a machine that has `required`; `key_of`
    /// returns the key of the plan. `None` while that is not known yet.
    pub(super) fn needed_objects(
        &self,
        required: &RequiredImage,
        key_of: impl FnOnce(&RequiredImage) -> PlanKey,
    ) -> Option<BTreeSet<ObjectId>> {
        let image = match &self.image {
            ImageState::Undefined => return Some(BTreeSet::new()),
            // After a restart of the dominator, its prefetched objects must not be removed.
            ImageState::Missing(_) => return None,
            ImageState::Ready(image) => image,
        };
        let key = key_of(image);
        let is_needless = image.digest == required.digest
            || self.plan.failed.as_ref().is_some_and(|failed| failed.0 == key);
        if is_needless {
            return Some(BTreeSet::new());
        }
        let planned = self.plan.made.as_ref().filter(|planned| planned.key == key)?;
        Some(planned.needs.keys().copied().collect())
    }
}

impl Sub {
    /// Fetches what the next image needs, and describes the progress. `None` if there is no next
    /// image. Called while the machine equals the required image.
    pub(super) fn prefetch_next(
        &mut self,
        view: &View,
        required: &RequiredImage,
        step: &mut Step<'_>,
    ) -> Option<String> {
        let image = match &self.prefetch.image {
            ImageState::Undefined => return None,
            ImageState::Missing(why) => return Some(format!("the planned image: {why}")),
            ImageState::Ready(image) if image.digest == required.digest => return None,
            ImageState::Ready(image) => Arc::clone(image),
        };
        let name = image.name();
        let key = self.plan_key(&image, view);
        if let Some((failed, why)) = self.prefetch.plan.failed.as_deref()
            && *failed == key
        {
            return Some(format!("nothing is fetched ahead for {name}: {why}"));
        }
        let planned = match &self.prefetch.plan.made {
            Some(planned) if planned.key == key => Arc::clone(planned),
            _ => return self.plan_prefetch(key, view, &image, &mut step.effects),
        };
        let missing = Missing::of(&planned, view);
        if missing.count == 0 {
            self.prefetch.attempt = Attempt::default();
            return Some(format!("has all objects of {name}, which comes next"));
        }
        let wanted = format!("{} of {name}", missing.describe());
        self.record_prefetch_end(view, missing.count, step);
        if let Some(until) = self.prefetch.attempt.held_until(step.now.elapsed) {
            let why = self.prefetch.attempt.why().unwrap_or_default();
            let text = format!("{wanted} are not fetched ahead yet: {why}");
            self.wake_by(until);
            return Some(text);
        }
        self.prefetch.attempt.release();
        if let Some(shortage) = missing.shortage(view.report.space) {
            return Some(format!("nothing is fetched ahead for {name}: {shortage}"));
        }
        if matches!(view.report.activity, Activity::Idle)
            && self.may_call(step.now)
            && let Err(why) = self.order_prefetch(&planned, &missing, view, step)
        {
            return Some(format!("{wanted} are not fetched ahead yet: {why}"));
        }
        Some(format!("fetches {wanted}, which comes next"))
    }

    /// Requests the plan to the next image. `None` if the tree of the machine is not known.
    fn plan_prefetch(
        &mut self,
        key: PlanKey,
        view: &View,
        image: &Arc<RequiredImage>,
        effects: &mut Vec<Effect>,
    ) -> Option<String> {
        if self.prefetch.plan.asked.is_none() {
            let scan = view.scan.as_ref()?;
            let tree = self.trees.tree_of(scan.root)?;
            let request_id = self.request_plan(key, view, scan, tree, image, effects);
            self.prefetch.plan.asked = Some(Box::new((request_id, key)));
        }
        Some(format!("is compared with {}, which comes next", image.name()))
    }

    /// Orders the prefetch, if a share of the network is granted; else returns why not.
    fn order_prefetch(
        &mut self,
        planned: &Planned,
        missing: &Missing,
        view: &View,
        step: &mut Step<'_>,
    ) -> Result<(), String> {
        let plan = planned.digest;
        self.claim_fetch(plan, Urgency::Prefetch, missing.bytes, step).map_err(|why| {
            if why.is_empty() { "waiting for a share of the network".to_owned() } else { why }
        })?;
        let fetch_id = self.next_id();
        let sources = step.context.sources.to_vec();
        let objects = missing.objects(planned, view);
        let request = FetchRequest { fetch_id, sources, objects, ahead: true };
        if self.call(CallPurpose::Prefetch(fetch_id), Call::Fetch(request), step) {
            self.prefetch.fetch = Some(Fetching { id: fetch_id, plan, missing: missing.count });
        }
        Ok(())
    }

    /// Holds prefetches for a while, which grows with each failure.
    pub(super) fn hold_prefetch(&mut self, why: String, step: &Step<'_>) {
        let attempt = &mut self.prefetch.attempt;
        let pause = attempt.count(HOLD_FIRST, HOLD_LONGEST, step.context.jitter);
        attempt.hold(step.now.elapsed + pause, why);
    }

    /// Records how the last prefetch ended; `missing` objects are still missing.
    fn record_prefetch_end(&mut self, view: &View, missing: usize, step: &Step<'_>) {
        let Some(fetch) = self.prefetch.fetch else { return };
        let Some(last) = view.fetch_of(fetch.id) else { return };
        self.prefetch.fetch = None;
        let why = match &last.error {
            // The rest is ordered next.
            None if missing < fetch.missing => return,
            None => "the fetch brought no missing objects".to_owned(),
            Some(FetchFailure::GaveWay) => return,
            Some(FetchFailure::InsufficientSpace { need_bytes, free_bytes }) => {
                format!("they need {}, {} are free", size(*need_bytes), size(*free_bytes))
            }
            Some(FetchFailure::Sources(why) | FetchFailure::Local(why)) => why.clone(),
        };
        self.hold_prefetch(why, step);
    }
}
