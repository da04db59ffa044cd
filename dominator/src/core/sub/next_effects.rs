//! Looks at all that is known of a sub and says what is next.
//!
//! The stages come in the order of the loop: reach it, know its image, have it scan the right
//! paths, know its tree, know the plan; then fetch, prepare, commit, clean up. The first stage
//! that is not there yet gives the status and, if nothing is under way, the effect that brings it
//! nearer.
// tidy: core

use core::ops::ControlFlow::{self, Break, Continue};
use core::time::Duration;
use std::fmt::Write as _;
use std::sync::Arc;

use api::dominator::Status;
use api::object_server::IDS_MAX;
use api::subd::{
    Activity, CleanupRequest, Expects, FetchRequest, PollRequest, PrepareRequest, ScanReport,
    SetConfigurationRequest,
};
use model::plan::{Operation, Plan};
use model::scope::Scope;
use model::tree::Tree;
use model::when::moment;

use super::{
    Call, CallPurpose, Context, Effect, ImageState, KnownScope, Now, Polling, Reach, Sub, Ticket,
    View, WantedFetch, WantedUpdate,
};
use crate::core::sub::identity_check::origins;
use crate::core::sub::missing_objects::Missing;
use crate::core::timing::POLL_WAIT;
use api::planning::{PlanJob, PlanKey, Planned};
use model::backoff::jittered;
use model::image::required::RequiredImage;
use model::words::{counted, plain};

/// How long a staged update waits for its Commit.
const EXPIRES_SECONDS: u32 = 300;

/// How long a machine that reboots may give no answer, before it counts as unreachable.
const REBOOT_LONGEST: Duration = Duration::from_secs(900);

/// How many paths a status names.
const PATHS_NAMED: usize = 3;

/// How long the paths are together that `not-converging` names, in bytes: the rest of the sentence
/// has room beside them.
const NOT_CONVERGING_BYTES: usize = 800;

/// The longest detail of a status, in bytes. Parts of it come from machines and image servers.
const DETAIL_BYTES_MAX: usize = 1_000;

/// A status and what it waits for, in words.
pub(super) type StatusAndDetail = (Status, String);

/// Goes on with `T`, or ends with a verdict.
pub(super) type Check<T> = ControlFlow<StatusAndDetail, T>;

pub(super) fn stop<T>(status: Status, detail: impl Into<String>) -> Check<T> {
    Break((status, detail.into()))
}

impl Sub {
    pub(super) fn next_effects(
        &mut self,
        now: Now,
        context: &Context<'_>,
        effects: &mut Vec<Effect>,
    ) {
        self.wake = None;
        self.tell_end(effects);
        self.look_at_pause(now);
        self.keep_polling(now, context, effects);
        let verdict = match (&self.reach, self.view.take()) {
            (Reach::Bad(failure), view) => {
                let failure = failure.clone();
                self.lost(effects);
                let is_away = failure.kind == super::FailureKind::Unreachable;
                let since = now.elapsed.saturating_sub(self.answered);
                let comes_up = view.as_ref().is_some_and(View::is_rebooting);
                self.view = view;
                match is_away {
                    true if comes_up && since < REBOOT_LONGEST => {
                        let detail = format!("comes up again, it is hoped: {}", failure.text);
                        (Status::Rebooting, detail)
                    }
                    true => (Status::Unreachable, failure.text),
                    false => (Status::PollFailed, failure.text),
                }
            }
            // Nothing was said yet, or everything has to be said again: the status stays.
            (Reach::Unknown | Reach::Good, None) => (self.status, self.detail.clone()),
            (Reach::Unknown | Reach::Good, Some(view)) => {
                let (Break(verdict) | Continue(verdict)) =
                    self.check_all(&view, now, context, effects);
                self.view = Some(view);
                verdict
            }
        };
        self.set_status(now, verdict, effects);
        self.settle_claims(now, self.status, effects);
    }

    fn set_status(&mut self, now: Now, verdict: StatusAndDetail, effects: &mut Vec<Effect>) {
        let (status, detail) = verdict;
        let detail = plain(&detail, DETAIL_BYTES_MAX);
        if status != self.status {
            self.since = now.wall;
            self.history.record(now.wall, status, &detail);
            effects.push(Effect::StatusChanged(status, detail.clone()));
        }
        if status == Status::Synced {
            self.last_synced = Some(now.wall);
        }
        let is_news = status != self.status || detail != self.detail;
        self.status = status;
        self.detail = detail;
        self.count_version(is_news);
    }

    fn keep_polling(&mut self, now: Now, context: &Context<'_>, effects: &mut Vec<Effect>) {
        let Polling::Due(at) = self.polling else { return };
        if now.elapsed < at {
            self.wake_by(at);
            return;
        }
        let have = match &self.view {
            Some(view) if !self.ask_all => Some(view.report.version),
            _ => None,
        };
        let wait = jittered(POLL_WAIT, context.jitter).as_millis();
        let wait_ms = u32::try_from(wait).expect("a poll waits for about a minute");
        let ticket = self.next_ticket();
        self.polling = Polling::UnderWay(ticket);
        effects.push(Effect::Poll(ticket, PollRequest { have, wait_ms }));
    }

    pub(super) fn wake_by(&mut self, at: Duration) {
        self.wake = Some(self.wake.map_or(at, |wake| wake.min(at)));
    }

    fn check_all(
        &mut self,
        view: &View,
        now: Now,
        context: &Context<'_>,
        effects: &mut Vec<Effect>,
    ) -> Check<StatusAndDetail> {
        self.identity_checked(view, effects)?;
        self.not_busy_by_itself(view)?;
        self.not_updating(view)?;
        self.hurried(view, effects)?;
        self.sync_limits(view, now, context, effects);
        let image = match &self.image {
            ImageState::Undefined => {
                return stop(Status::ImageUndefined, "the machine database names no image for it");
            }
            ImageState::Missing(why) => return stop(Status::ImageNotReady, &**why),
            ImageState::Ready(image) => Arc::clone(image),
        };
        let scan = self.scanned(view, &image, now, effects)?;
        let planned = self.plan_at_hand(view, &image, &scan, now, effects)?;
        if planned.plan.is_empty() && (self.is_recorded(view, &image) || self.is_held(view)) {
            return self.in_place(view, &image, now, context, effects);
        }
        self.healthy(view, &image)?;
        self.allowed(&planned)?;
        self.not_held(&image, &planned, now, context)?;
        self.fetched(view, &image, &planned, now, context, effects)?;
        self.signatures_offered(view, &image, now, context, effects)?;
        self.carried_out(view, &image, &scan, &planned, now, effects)
    }

    /// True if the sub knows that it has this image. One that has the tree already, from another
    /// image or by chance, is told by an update without changes, so that it learns the triggers.
    pub(super) fn is_recorded(&self, view: &View, image: &RequiredImage) -> bool {
        view.report.last_image.as_ref() == Some(image.name())
    }

    /// True if nothing must be carried out on the machine.
    fn is_held(&self, view: &View) -> bool {
        self.brake.is_some()
            || self.unrecordable.is_some()
            || self.machine.disable_updates
            || self.pause_in_words().is_some()
            || view.report.paused.is_some()
    }

    /// The machine does not have to finish what it began: it does so by itself, and refuses
    /// everything else meanwhile.
    pub(super) fn not_busy_by_itself(&self, view: &View) -> Check<()> {
        if let Some(why) = view.stuck() {
            let detail = format!(
                "the update can neither be finished nor put back: {why}; the machine itself tries \
                 again, and goes on when that is repaired"
            );
            return stop(Status::UpdateStuck, detail);
        }
        if view.is_rebooting() {
            return stop(Status::Rebooting, "is to come up again, as the update asks for it");
        }
        Continue(())
    }

    pub(super) fn not_updating(&self, view: &View) -> Check<()> {
        let told = |purpose: CallPurpose| matches!(purpose, CallPurpose::Commit(_));
        if matches!(view.report.activity, Activity::Updating { .. }) {
            return stop(Status::Updating, "carries out the update; then its triggers run");
        }
        if self.calling.is_some_and(|(_, purpose)| told(purpose))
            || self.pending.is_some_and(|pending| told(pending.purpose))
        {
            return stop(Status::Updating, "was told to carry out the update");
        }
        Continue(())
    }

    /// A complete scan in the scope of the image, that has seen what the last update touched.
    fn scanned(
        &mut self,
        view: &View,
        image: &RequiredImage,
        now: Now,
        effects: &mut Vec<Effect>,
    ) -> Check<Arc<ScanReport>> {
        let scope = self.scope_known(image, view).scope;
        if view.report.scope != scope {
            let scan = Some(image.scan.clone());
            let call = Call::SetConfiguration(SetConfigurationRequest { scan, limits: None });
            self.call(now, CallPurpose::Scan(scope), call, effects);
            let name = image.name();
            return self.waiting(Status::Rescanning, format!("is told to scan as {name} asks"));
        }
        let Some(scan) = &view.scan else {
            return stop(Status::Rescanning, "scans; the first complete scan is awaited");
        };
        if view.is_unverified() {
            return stop(Status::Rescanning, "scans again what the update has touched");
        }
        Continue(Arc::clone(scan))
    }

    /// What is known of the image on this machine.
    pub(super) fn scope_known(&mut self, image: &RequiredImage, view: &View) -> &KnownScope {
        let is_same =
            |known: &KnownScope| known.image == image.digest && known.exclusions == view.exclusions;
        match self.known_scope.take().filter(is_same) {
            Some(known) => self.known_scope.insert(known),
            None => {
                let exclusions = view.exclusions.clone();
                self.known_scope.insert(KnownScope {
                    image: image.digest,
                    scope: Scope::of(&image.scan, exclusions.lines()),
                    origins: origins(image, |path| exclusions.covers(path)),
                    exclusions,
                })
            }
        }
    }

    /// The plan from the last scan to the image.
    fn plan_at_hand(
        &mut self,
        view: &View,
        image: &Arc<RequiredImage>,
        scan: &Arc<ScanReport>,
        now: Now,
        effects: &mut Vec<Effect>,
    ) -> Check<Arc<Planned>> {
        let key = PlanKey { image: image.digest, scan: view.scan_number };
        if let Some(planned) = &self.planned
            && planned.key == key
        {
            return Continue(Arc::clone(planned));
        }
        if let Some((failed, text)) = &self.plan_failed
            && *failed == key
        {
            return stop(Status::Blocked, format!("no plan can be made: {text}"));
        }
        let tree = self.tree_at_hand(scan, now, effects)?;
        if self.planning.is_none() {
            self.planning = Some((self.ask_for_plan(key, view, scan, tree, image, effects), key));
        }
        stop(Status::Rescanning, format!("has a new scan, which is compared with {}", image.name()))
    }

    /// Asks for the plan from a scan to an image.
    pub(super) fn ask_for_plan(
        &mut self,
        key: PlanKey,
        view: &View,
        scan: &Arc<ScanReport>,
        tree: Tree,
        image: &Arc<RequiredImage>,
        effects: &mut Vec<Effect>,
    ) -> Ticket {
        let (scan, image) = (Arc::clone(scan), Arc::clone(image));
        let job = PlanJob { key, tree, scan, exclusions: view.exclusions.clone(), image };
        let ticket = self.next_ticket();
        effects.push(Effect::Plan(ticket, Box::new(job)));
        ticket
    }

    fn tree_at_hand(
        &mut self,
        scan: &ScanReport,
        now: Now,
        effects: &mut Vec<Effect>,
    ) -> Check<Tree> {
        if let Some(tree) = self.tree.as_ref().filter(|tree| tree.digest() == scan.root) {
            return Continue(tree.clone());
        }
        if self.reading.is_none() {
            if let Some((at, why)) = &self.read_again
                && now.elapsed < *at
            {
                let (at, why) = (*at, why.clone());
                self.wake_by(at);
                return stop(Status::PollFailed, format!("its tree could not be read: {why}"));
            }
            let ticket = self.next_ticket();
            self.reading = Some((ticket, scan.root));
            effects.push(Effect::ReadTree(ticket, scan.root));
        }
        stop(Status::Rescanning, "has a new scan, which is being read")
    }

    /// Nothing is left to change.
    fn in_place(
        &mut self,
        view: &View,
        image: &RequiredImage,
        now: Now,
        context: &Context<'_>,
        effects: &mut Vec<Effect>,
    ) -> Check<StatusAndDetail> {
        (self.hold, self.holds) = (None, 0);
        (self.update, self.fetch, self.done, self.cleared) = (None, None, None, None);
        self.settled(effects);
        self.forget_force();
        let generation = view.report.version.generation;
        let is_idle = matches!(view.report.activity, Activity::Idle);
        let next = self.prefetch_next(view, image, now, context, effects);
        if is_idle
            && self.cleaned_generation != Some(generation)
            && let Some(kept) = self.prefetch.kept(image, view.scan_number)
        {
            let idle = view.cache.iter().filter(|object| !kept.contains(object));
            let objects: Vec<_> = idle.take(IDS_MAX).collect();
            if !objects.is_empty() {
                let call = Call::Cleanup(CleanupRequest { objects });
                if self.call(now, CallPurpose::Cleanup, call, effects) {
                    self.cleaned_generation = Some(generation);
                }
            }
        }
        let mut detail = format!("equals {}", image.name());
        if view.report.trigger_failures.is_empty() {
            for more in next.into_iter().chain(self.pause_in_words()) {
                write!(detail, "; {more}").expect("writing to a String cannot fail");
            }
            return Continue((Status::Synced, detail));
        }
        detail.push_str(", but");
        for failure in view.report.trigger_failures.iter().take(PATHS_NAMED) {
            let end = failure.output.trim_end().lines().last().unwrap_or_default();
            write!(detail, " {} {} failed: {end};", failure.verb, failure.service)
                .expect("writing to a String cannot fail");
        }
        detail.push_str(" the next good update clears this");
        Continue((Status::TriggerFailed, detail))
    }

    /// The image has not failed its health check on the machine, or an operator wants it again.
    fn healthy(&self, view: &View, image: &RequiredImage) -> Check<()> {
        match view.undone(image.name()) {
            Some((update, why)) if self.retried != Some(update.update_id) => {
                let detail = format!(
                    "the update to {} was put back, as its health check failed: {}; another image \
                     goes on, or: domtool retry {}",
                    image.name(),
                    why.trim_end(),
                    self.machine.hostname
                );
                stop(Status::HealthFailed, detail)
            }
            _ => Continue(()),
        }
    }

    /// Nobody has said that this plan, or any, must not be carried out.
    fn allowed(&self, planned: &Planned) -> Check<()> {
        if let Some(first) = planned.plan.blocked.first() {
            let mut detail = format!("{}: {}", first.path, first.why);
            if planned.plan.blocked.len() > 1 {
                write!(detail, "; and {} more", planned.plan.blocked.len() - 1)
                    .expect("writing to a String cannot fail");
            }
            return stop(Status::Blocked, detail);
        }
        if self.machine.disable_updates {
            let detail =
                format!("{}; the machine database says DisableUpdates", describe(&planned.plan));
            return stop(Status::UpdatesDisabled, detail);
        }
        if !planned.dangers.is_empty() && self.cleared != Some(planned.digest) {
            let detail = format!(
                "{}; if that is meant: domtool clear-safety-shutoff {}",
                planned.dangers.join(", "),
                self.machine.hostname
            );
            return stop(Status::UnsafeUpdate, detail);
        }
        Continue(())
    }

    /// Nothing failed so shortly ago that it is too early to try again.
    fn not_held(
        &mut self,
        image: &RequiredImage,
        planned: &Planned,
        now: Now,
        context: &Context<'_>,
    ) -> Check<()> {
        if self.hold.is_none() && self.done == Some(planned.digest) {
            self.done = None;
            let detail = format!(
                "the update was carried out, and the same is to be done again: {}; does something \
                 on the machine undo it?",
                paths_within(&planned.plan, NOT_CONVERGING_BYTES)
            );
            self.hold_back(now, context, Status::NotConverging, detail);
        }
        let Some(hold) = &self.hold else { return Continue(()) };
        let is_same =
            hold.image == image.digest && hold.plan.is_none_or(|failed| failed == planned.digest);
        let until = hold.end(planned.key.scan);
        if is_same && now.elapsed < until {
            let verdict = (hold.status, format!("{}; is tried again later", hold.detail));
            self.wake_by(until);
            return Break(verdict);
        }
        (self.hold, self.done) = (None, None);
        Continue(())
    }

    /// All objects that the plan needs are in the sub's cache.
    fn fetched(
        &mut self,
        view: &View,
        image: &RequiredImage,
        planned: &Planned,
        now: Now,
        context: &Context<'_>,
        effects: &mut Vec<Effect>,
    ) -> Check<()> {
        let missing = Missing::of(planned, view);
        if missing.count == 0 {
            return Continue(());
        }
        let wanted = missing.describe();
        match view.report.activity {
            // One that is ahead of need gives way.
            Activity::Fetching { .. } if self.prefetch.is_fetching(&view.report.activity) => {}
            Activity::Fetching { .. } => {
                let detail = format!("fetches; {wanted} still to come");
                return self.unless_braked(Status::Fetching, detail);
            }
            Activity::Preparing { .. } | Activity::Updating { .. } => {
                return stop(Status::Preparing, "is still staging another update");
            }
            Activity::Idle | Activity::Prepared { .. } => {}
        }
        if let Some(shortage) = missing.shortage(view.report.space) {
            return stop(Status::InsufficientSpace, shortage);
        }
        let fetch = match self.fetch {
            Some(fetch) if fetch.plan == planned.digest => fetch,
            _ => {
                let needed = (missing.bytes, &*wanted);
                self.update_fetch_claimed(view, image, planned, needed, now, effects)?;
                WantedFetch { id: self.next_id(), plan: planned.digest, missing: missing.count }
            }
        };
        self.fetch = Some(fetch);
        let sources = context.sources.to_vec();
        let (fetch_id, objects) = (fetch.id, missing.objects);
        let call = Call::Fetch(FetchRequest { fetch_id, sources, objects, ahead: false });
        self.call(now, CallPurpose::Fetch(fetch_id), call, effects);
        let detail = format!("is told to fetch {wanted}");
        self.unless_braked(Status::Fetching, detail)
    }

    /// Stages the update, and has it carried out once it is staged.
    fn carried_out(
        &mut self,
        view: &View,
        image: &Arc<RequiredImage>,
        scan: &ScanReport,
        planned: &Arc<Planned>,
        now: Now,
        effects: &mut Vec<Effect>,
    ) -> Check<StatusAndDetail> {
        let (key, instance) = (planned.key, view.report.version.instance);
        let update = match self.update {
            Some(update) if update.key == key && update.instance == instance => update,
            _ => WantedUpdate { id: self.next_id(), key, instance, plan: planned.digest },
        };
        self.update = Some(update);
        let todo = describe(&planned.plan);
        if self.brake.is_some() {
            // Fetching does no harm, but a staged update would expire again and again.
            let detail = format!("{todo}, all objects are there");
            return self.unless_braked(Status::UpdatesDisabled, detail);
        }
        if let Some(why) = self.pause_in_words() {
            return stop(Status::Paused, format!("{todo}, all objects are there; {why}"));
        }
        if let Some(paused) = &view.report.paused {
            let (until, reason) = (moment(paused.until), &paused.reason);
            let detail = format!("{todo}; paused on the machine itself until {until}: {reason}");
            return stop(Status::Held, detail);
        }
        if let Some(why) = &self.unrecordable {
            let unordered = "the update cannot be recorded, and is not ordered before it is";
            let detail = format!("{todo}, all objects are there; {unordered}: {why}");
            return stop(Status::UpdatesDisabled, detail);
        }
        let is_ahead = self.prefetch.is_fetching(&view.report.activity);
        let is_free = match view.report.activity {
            Activity::Fetching { .. } => is_ahead,
            Activity::Preparing { update_id } => update_id == update.id,
            Activity::Updating { .. } => false,
            Activity::Idle | Activity::Prepared { .. } => true,
        };
        if is_free {
            self.claimed(view, image, planned, now, effects)?;
        }
        match view.report.activity {
            Activity::Fetching { .. } if !is_ahead => {
                stop(Status::Fetching, "is finishing a fetch")
            }
            Activity::Preparing { update_id } if update_id == update.id => {
                stop(Status::Preparing, format!("stages {todo}"))
            }
            Activity::Preparing { .. } | Activity::Updating { .. } => {
                stop(Status::Preparing, "is still staging another update")
            }
            Activity::Prepared { update_id } if update_id == update.id => {
                if let Some(ticket) = self.ask(now, CallPurpose::Commit(update_id)) {
                    self.unsent = None;
                    let ordered = self.ordered(update_id, view, image, planned);
                    effects.push(Effect::Commit(ticket, Box::new(ordered)));
                    self.changing(effects);
                    self.begun(update_id, now);
                    return stop(Status::Updating, format!("is told to carry out {todo}"));
                }
                self.waiting(Status::Preparing, format!("has staged {todo}"))
            }
            Activity::Idle | Activity::Prepared { .. } | Activity::Fetching { .. } => {
                let request = PrepareRequest {
                    update_id: update.id,
                    expects: Expects { instance, root: scan.root, scope: scan.scope },
                    image: image.name().clone(),
                    image_digest: image.digest,
                    plan: Plan::clone(&planned.plan),
                    triggers: image.content.triggers.clone(),
                    health_check: image.content.health_check.clone(),
                    force_disruption: self.is_forced(planned),
                    expires_seconds: EXPIRES_SECONDS,
                };
                let call = Call::Prepare(Box::new(request));
                self.call(now, CallPurpose::Prepare(update.id), call, effects);
                self.waiting(Status::Preparing, format!("is told to stage {todo}"))
            }
        }
    }
}

impl Sub {
    /// True if the Commit of this update, which was put on record meanwhile, is still to be sent:
    /// it is staged on the machine that is meant, and made from the scan, the image and the record
    /// of the machine that are the latest.
    #[must_use]
    pub fn still_orders(&self, update_id: u64) -> bool {
        let (Some(update), Some(view)) = (self.update, &self.view) else { return false };
        let is_latest = self.image.digest() == Some(update.key.image)
            && update.key.scan == view.scan_number
            && update.instance == view.report.version.instance;
        let is_staged = matches!(
            view.report.activity,
            Activity::Prepared { update_id: staged } if staged == update_id
        );
        update.id == update_id
            && is_latest
            && is_staged
            && self.identity.is_good()
            && !self.machine.disable_updates
            && view.report.paused.is_none()
    }

    /// Sends a call, if that may be now. Says whether it did.
    pub(super) fn call(
        &mut self,
        now: Now,
        purpose: CallPurpose,
        call: Call,
        effects: &mut Vec<Effect>,
    ) -> bool {
        let ticket = self.ask(now, purpose);
        effects.extend(ticket.map(|ticket| Effect::Call(ticket, call)));
        ticket.is_some()
    }

    /// The ticket for a call that is sent now, if that may be.
    fn ask(&mut self, now: Now, purpose: CallPurpose) -> Option<Ticket> {
        if !self.may_call(now) {
            return None;
        }
        self.call_again = None;
        let ticket = self.next_ticket();
        self.calling = Some((ticket, purpose));
        Some(ticket)
    }

    /// No call is under way or waits to be seen, and none failed just now.
    pub(super) fn may_call(&mut self, now: Now) -> bool {
        if self.calling.is_some() || self.pending.is_some() {
            return false;
        }
        if let Some((at, _)) = self.call_again
            && now.elapsed < at
        {
            self.wake_by(at);
            return false;
        }
        true
    }

    /// The verdict, with why the last call failed if one did.
    fn waiting<T>(&self, status: Status, detail: String) -> Check<T> {
        match &self.call_again {
            None => stop(status, detail),
            Some((_, why)) => stop(status, format!("{detail}; is told again, because: {why}")),
        }
    }

    /// The verdict; while the brake is on, that it is on.
    pub(super) fn unless_braked<T>(&self, status: Status, detail: String) -> Check<T> {
        match (&self.brake, self.pause_in_words()) {
            (None, None) => self.waiting(status, detail),
            (Some(reason), _) => stop(
                Status::UpdatesDisabled,
                format!("{detail}; updates of all machines are disabled: {reason}"),
            ),
            (None, Some(why)) => stop(Status::Paused, format!("{detail}; {why}")),
        }
    }
}

/// A plan in a few words: how many changes, and which if it is one. `show-sub` has them all.
pub(super) fn describe(plan: &Plan) -> String {
    match plan.operations.len() {
        0 => "no change but the name of the image and its triggers".to_owned(),
        1 => format!("1 change: {}", paths(plan)),
        count => counted(count as u64, "change"),
    }
}

/// The first paths of a plan, with what is wrong with each.
fn paths(plan: &Plan) -> String {
    let named: Vec<String> = plan.operations.iter().take(PATHS_NAMED).map(path_of).collect();
    let more = if plan.operations.len() > PATHS_NAMED { " ..." } else { "" };
    named.join(", ") + more
}

/// As many paths of a plan as fit into so many bytes, but at least one, with what is wrong with
/// each.
fn paths_within(plan: &Plan, bytes: usize) -> String {
    let mut text = String::new();
    for (index, operation) in plan.operations.iter().enumerate() {
        let path = path_of(operation);
        if index > 0 && text.len() + path.len() > bytes {
            write!(text, ", and {} more", plan.operations.len() - index)
                .expect("writing to a String cannot fail");
            break;
        }
        let separator = if text.is_empty() { "" } else { ", " };
        write!(text, "{separator}{path}").expect("writing to a String cannot fail");
    }
    text
}

/// The path of an operation, with what is wrong with it.
pub(super) fn path_of(operation: &Operation) -> String {
    let reason: Vec<&str> = operation.reason.iter().map(|reason| reason.name()).collect();
    format!("{} ({})", operation.path, reason.join(" "))
}
