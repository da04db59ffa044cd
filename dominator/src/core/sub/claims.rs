//! The claims of one machine: for an update, and for a fetch.
//!
//! The claim for an update is made when all objects are in the cache, before anything is staged. It
//! is held until the end of the update is known: the machine equals its image, or the update
//! failed, or the machine has not answered for so long that it must not use up a budget. A machine
//! that needs something else meanwhile releases its claim, but keeps its place in the queue.
// tidy: core

use core::ops::ControlFlow::{Break, Continue};
use core::time::Duration;

use api::dominator::Status;
use api::planning::Planned;
use api::subd::{Activity, Health, LastUpdate, UpdateOutcome};
use model::image::ImageName;
use model::image::required::RequiredImage;
use model::object::ObjectId;

use super::plans::{Missing, describe};
use super::polls::Reachability;
use super::{Check, Effect, Now, Step, Sub, View, stop};
use crate::core::budget::{Demand, Impact, UpdateClass};
use crate::core::claims::{Claim, ClaimAnswer, ClaimKind, Release, UpdateClaim, UpdateEnd};
use crate::core::computed::rollout::ContentUpdate;
use crate::core::image_breaker::UpdateFailure;
use crate::core::network_budget::{Download, Urgency};

/// An update has failed if the machine has not answered for so long after it began.
pub const VANISHED_AFTER: Duration = Duration::from_secs(300);

/// The same for an update of high impact, in which the machine may reboot.
pub const REBOOTING_MACHINE_VANISHED_AFTER: Duration = Duration::from_secs(900);

/// An update that has not ended after so long has failed.
pub const UPDATE_LONGEST: Duration = Duration::from_secs(3_600);

/// A granted claim that is not used for so long is released, so that another machine gets it.
pub const UNUSED_LONGEST: Duration = Duration::from_secs(900);

/// The state of the claim for an update.
#[derive(Debug, Default)]
enum UpdateClaimState {
    #[default]
    None,
    /// The claim was made. The answer, once there is one, and since when it is that.
    Asked(Box<UpdateClaim>, Option<(ClaimAnswer, Duration)>),
    /// The Commit was not sent, because it was forbidden at the last moment: a claim that is still
    /// needed is made again in the same step.
    Unsent,
    /// The Commit was sent.
    Begun(BegunUpdate),
}

/// An update whose Commit was sent, or was seen to be under way.
#[derive(Clone, Copy, Debug)]
struct BegunUpdate {
    update: u64,
    impact: Impact,
    since: Duration,
    /// The number of the computed files that it brings, if these are all that it changes.
    content: Option<u64>,
}

/// The claim for a fetch.
#[derive(Debug)]
struct FetchClaim {
    plan: ObjectId,
    download: Download,
    answer: Option<ClaimAnswer>,
}

/// The claims of one machine.
#[derive(Debug, Default)]
pub(super) struct SubClaims {
    update: UpdateClaimState,
    fetch: Option<FetchClaim>,
    /// The image to which the machine needs an update, and since when.
    needed: Option<(ObjectId, Duration)>,
    /// The last update that failed: it may still be under way, but has no claim any more.
    failed_update: Option<u64>,
    /// The update to computed files with this number that failed in this step.
    failed_content: Option<(u64, UpdateFailure)>,
    /// True if the claim for an update was needed in this step.
    is_needed: bool,
    is_fetch_needed: bool,
    /// The answer may have changed: repeat the claim.
    must_repeat: bool,
    is_activity_reported: bool,
}

impl SubClaims {
    /// Takes the answer to a claim.
    pub(super) fn answered(&mut self, purpose: ClaimKind, answer: ClaimAnswer, now: Now) {
        match purpose {
            ClaimKind::Update => {
                if let UpdateClaimState::Asked(_, known) = &mut self.update {
                    let since = match known {
                        Some((known, since)) if *known == answer => *since,
                        _ => now.elapsed,
                    };
                    *known = Some((answer, since));
                }
            }
            ClaimKind::Fetch => {
                if let Some(fetch) = &mut self.fetch {
                    fetch.answer = Some(answer);
                }
            }
        }
    }

    /// Repeats the claim in the next step that needs it, to get the current place in the queue.
    pub(super) fn repeat_next(&mut self) {
        self.must_repeat = true;
    }

    /// Handles that the Commit of this update is sent.
    pub(super) fn commit_sent(&mut self, update: u64, content: Option<u64>, now: Now) {
        if let UpdateClaimState::Asked(claim, _) = &self.update {
            let (impact, since) = (claim.demand.impact, now.elapsed);
            let begun = BegunUpdate { update, impact, since, content };
            self.update = UpdateClaimState::Begun(begun);
        }
    }

    pub(super) fn commit_not_sent(&mut self) {
        if let UpdateClaimState::Begun(_) = self.update {
            self.update = UpdateClaimState::Unsent;
        }
    }

    /// Returns the number of the computed files whose update failed in this step.
    pub(super) fn take_failed_content(&mut self) -> Option<(u64, UpdateFailure)> {
        self.failed_content.take()
    }

    /// True if the claim for an update is granted.
    pub(super) fn is_granted(&self) -> bool {
        match &self.update {
            UpdateClaimState::None | UpdateClaimState::Unsent => false,
            UpdateClaimState::Asked(_, answer) => matches!(answer, Some((ClaimAnswer::Granted, _))),
            UpdateClaimState::Begun(_) => true,
        }
    }

    /// Makes the claim for an update, or repeats it. The answer to the same claim stays known.
    fn claim_update(&mut self, claim: UpdateClaim, effects: &mut Vec<Effect>) {
        let answer = match std::mem::take(&mut self.update) {
            UpdateClaimState::Asked(asked, answer) if *asked == claim => answer,
            _ => None,
        };
        effects.push(Effect::Claim(Claim::Update(claim.clone())));
        self.update = UpdateClaimState::Asked(Box::new(claim), answer);
    }

    fn release_update(&mut self, end: UpdateEnd, effects: &mut Vec<Effect>) {
        self.update = UpdateClaimState::None;
        effects.push(Effect::Release(Release::Update(end)));
    }

    fn end_update(&mut self, end: UpdateEnd, effects: &mut Vec<Effect>) {
        if let (UpdateClaimState::Begun(begun), UpdateEnd::Failed(failure)) = (&self.update, end) {
            self.failed_update = Some(begun.update);
            self.failed_content = begun.content.map(|round| (round, failure));
        }
        if end != UpdateEnd::Withdrawn {
            self.needed = None;
        }
        self.release_update(end, effects);
    }

    fn release_fetch(&mut self, effects: &mut Vec<Effect>) {
        self.fetch = None;
        effects.push(Effect::Release(Release::Fetch));
    }
}

impl Sub {
    /// Continues if the claim for the update is granted.
    pub(super) fn check_claim(
        &mut self,
        view: &View,
        image: &RequiredImage,
        planned: &Planned,
        step: &mut Step<'_>,
    ) -> Check<()> {
        self.claims.is_needed = true;
        if let UpdateClaimState::Begun(begun) = self.claims.update {
            let last = view.outcome_of(begun.update);
            let is_same = self.updates.wanted.is_some_and(|update| update.id == begun.update);
            if last.is_none() && is_same {
                // The Commit was lost, and is sent again.
                return Continue(());
            }
            let end =
                last.and_then(|last| update_end(last, view, None)).unwrap_or(UpdateEnd::Withdrawn);
            self.claims.end_update(end, &mut step.effects);
        }
        let claim = self.update_claim(view, image, planned, step.now);
        let must_repeat = std::mem::take(&mut self.claims.must_repeat);
        let todo = describe(&planned.plan);
        let known = match &self.claims.update {
            UpdateClaimState::Asked(asked, answer) if **asked == claim => Some(answer),
            _ => None,
        };
        let status = match known {
            Some(Some((ClaimAnswer::Granted, since))) => {
                let until = *since + UNUSED_LONGEST;
                if step.now.elapsed < until {
                    self.wake_by(until);
                    return Continue(());
                }
                self.claims.release_update(UpdateEnd::Withdrawn, &mut step.effects);
                self.claims.needed = None;
                let why = "the claim was not used in time; claiming again";
                return stop(Status::WaitingForBudget, format!("{todo}; {why}"));
            }
            Some(Some((ClaimAnswer::Waits(why), _))) => {
                (Status::WaitingForBudget, format!("{todo}; {why}"))
            }
            Some(Some((ClaimAnswer::Stopped(why), _))) => {
                (Status::ImageStopped, stopped_text(&todo, image.name(), why))
            }
            Some(None) => return self.stop_unchanged(),
            None => {
                self.claims.claim_update(claim, &mut step.effects);
                return self.stop_unchanged();
            }
        };
        if must_repeat {
            self.claims.claim_update(claim, &mut step.effects);
        }
        Break(status)
    }

    /// Returns the name of the image that the machine is brought to; empty if it is not available.
    pub(super) fn image_name(&self) -> &str {
        self.target().map_or("", |image| image.name().as_str())
    }

    fn update_claim(
        &mut self,
        view: &View,
        image: &RequiredImage,
        planned: &Planned,
        now: Now,
    ) -> UpdateClaim {
        let impact = if planned.is_high_impact { Impact::High } else { Impact::Plain };
        let class = match (self.update_class(view, image), impact) {
            // Nobody waits for a renewal: it uses no budget unless it disturbs.
            (UpdateClass::Renewal, Impact::High) => UpdateClass::Rollout,
            (class, _) => class,
        };
        let demand = Demand {
            class,
            impact,
            location: self.machine.location.clone(),
            since: self.needed_since(image, now),
        };
        UpdateClaim { demand, new_parts: self.new_parts(view, image) }
    }

    /// Returns the parts of an image that the machine does not have: none if it has the image.
    pub(super) fn new_parts(&self, view: &View, image: &RequiredImage) -> Vec<ImageName> {
        if self.is_recorded(view, image) {
            return Vec::new();
        }
        let former: Vec<ImageName> =
            view.report.last_image.iter().flat_map(ImageName::parts).collect();
        let parts = || image.name().parts().filter(|part| !part.is_nothing());
        let new: Vec<ImageName> = parts().filter(|part| !former.contains(part)).collect();
        // Another content of a name, or fewer parts than before.
        if new.is_empty() { parts().collect() } else { new }
    }

    /// An update to the image that the machine already has is a repair, unless it brings other
    /// content. So is a retry of a failed update, so that it delays no rollout.
    fn update_class(&self, view: &View, image: &RequiredImage) -> UpdateClass {
        if self.updates.failures > 0 {
            return UpdateClass::Repair;
        }
        match (self.is_recorded(view, image), self.computed.update) {
            (false, _) | (true, ContentUpdate::Change) => UpdateClass::Rollout,
            (true, ContentUpdate::Renewal) => UpdateClass::Renewal,
            (true, ContentUpdate::None) => UpdateClass::Repair,
        }
    }

    fn needed_since(&mut self, image: &RequiredImage, now: Now) -> Duration {
        let since = match self.claims.needed {
            // An operator waits for the update: it comes before all others.
            _ if self.is_urgent() => Duration::ZERO,
            Some((known, since)) if known == image.digest => since,
            _ => now.elapsed,
        };
        self.claims.needed = Some((image.digest, since));
        since
    }

    /// Claims a share of the network. If it is not granted yet, returns why; the text is empty as
    /// long as there is no answer.
    pub(super) fn claim_fetch(
        &mut self,
        plan: ObjectId,
        urgency: Urgency,
        bytes: u64,
        step: &mut Step<'_>,
    ) -> Result<(), String> {
        self.claims.is_fetch_needed = true;
        let is_same = |fetch: &FetchClaim| {
            fetch.plan == plan && (fetch.download.urgency, fetch.download.bytes) == (urgency, bytes)
        };
        if let Some(fetch) = self.claims.fetch.as_ref().filter(|fetch| is_same(fetch)) {
            let why = match &fetch.answer {
                Some(ClaimAnswer::Granted) => {
                    // The fetch is ordered now.
                    self.claims.release_fetch(&mut step.effects);
                    return Ok(());
                }
                Some(ClaimAnswer::Waits(why) | ClaimAnswer::Stopped(why)) => why.to_string(),
                None => String::new(),
            };
            if !why.is_empty() && std::mem::take(&mut self.claims.must_repeat) {
                step.effects.push(Effect::Claim(Claim::Fetch(fetch.download)));
            }
            return Err(why);
        }
        let since = match self.claims.needed {
            Some((_, since)) if urgency != Urgency::Prefetch => since,
            _ => step.now.elapsed,
        };
        let download = Download { urgency, since, bytes };
        step.effects.push(Effect::Claim(Claim::Fetch(download)));
        self.claims.fetch = Some(FetchClaim { plan, download, answer: None });
        Err(String::new())
    }

    /// Continues if the share of the network for the objects of an update is granted.
    pub(super) fn check_fetch_claim(
        &mut self,
        view: &View,
        image: &RequiredImage,
        planned: &Planned,
        missing: &Missing,
        step: &mut Step<'_>,
    ) -> Check<()> {
        let urgency = match self.update_class(view, image) {
            UpdateClass::Repair | UpdateClass::Renewal => Urgency::Repair,
            UpdateClass::Rollout => Urgency::Rollout,
        };
        self.needed_since(image, step.now);
        match self.claim_fetch(planned.digest, urgency, missing.bytes, step) {
            Ok(()) => Continue(()),
            Err(why) if why.is_empty() => self.stop_unchanged(),
            Err(why) => {
                let detail = format!("must fetch {}; {why}", missing.describe());
                stop(Status::WaitingForBudget, detail)
            }
        }
    }

    /// Releases claims that are not needed any more, and claims for an update that is under way
    /// without a claim. Called at the end of each step, when the status is known.
    pub(super) fn settle_claims(&mut self, status: Status, step: &mut Step<'_>) {
        let is_needed = std::mem::take(&mut self.claims.is_needed);
        let is_fetch_needed = std::mem::take(&mut self.claims.is_fetch_needed);
        if self.claims.fetch.is_some() && !is_fetch_needed {
            self.claims.release_fetch(&mut step.effects);
        }
        match self.claims.update {
            UpdateClaimState::None => self.claim_for_running_update(step),
            UpdateClaimState::Asked(..) | UpdateClaimState::Unsent if is_needed => {}
            UpdateClaimState::Asked(..) | UpdateClaimState::Unsent => {
                self.claims.release_update(UpdateEnd::Withdrawn, &mut step.effects);
            }
            UpdateClaimState::Begun(begun) => {
                if let Some(end) = self.end_of_begun(begun, is_needed, status, step.now) {
                    self.claims.end_update(end, &mut step.effects);
                }
            }
        }
        if matches!(status, Status::Synced | Status::PartlySynced | Status::TriggerFailed) {
            self.claims.needed = None;
        }
        let is_known = self.polls.reachability != Reachability::Unknown;
        if is_known && !std::mem::replace(&mut self.claims.is_activity_reported, true) {
            step.effects.push(Effect::ActivityKnown);
        }
    }

    /// Counts an update that an earlier run of the dominator began, or an operator by hand.
    fn claim_for_running_update(&mut self, step: &mut Step<'_>) {
        let is_answered = self.polls.reachability == Reachability::Answered;
        let Some(view) = self.view.as_ref().filter(|_| is_answered) else { return };
        let last = view.report.last_update.as_ref();
        let (update, impact) = match (&view.report.activity, last) {
            (Activity::Updating { update_id }, _) => (*update_id, Impact::Plain),
            (_, Some(last)) if view.is_rebooting() => (last.update_id, Impact::High),
            (_, Some(last)) if view.is_unverified() => (last.update_id, Impact::Plain),
            _ => return,
        };
        if self.claims.failed_update == Some(update) {
            return;
        }
        let demand = Demand {
            class: UpdateClass::Rollout,
            impact,
            location: self.machine.location.clone(),
            since: step.now.elapsed,
        };
        let claim = UpdateClaim { demand, new_parts: Vec::new() };
        step.effects.push(Effect::Claim(Claim::UnderWay(claim)));
        self.claims.update = UpdateClaimState::Begun(BegunUpdate {
            update,
            impact,
            since: step.now.elapsed,
            content: None,
        });
    }

    /// Returns how a begun update has ended, if it has.
    fn end_of_begun(
        &mut self,
        begun: BegunUpdate,
        is_needed: bool,
        status: Status,
        now: Now,
    ) -> Option<UpdateEnd> {
        if let Reachability::Failed(_) = self.polls.reachability {
            let longest = match begun.impact {
                Impact::Plain => VANISHED_AFTER,
                Impact::High => REBOOTING_MACHINE_VANISHED_AFTER,
            };
            let until = self.polls.answered.max(begun.since) + longest;
            if now.elapsed >= until {
                return Some(UpdateEnd::Failed(UpdateFailure::Vanished));
            }
            self.wake_by(until);
            return None;
        }
        let until = begun.since + UPDATE_LONGEST;
        if now.elapsed >= until {
            return Some(UpdateEnd::Failed(UpdateFailure::Overdue));
        }
        let view = self.view.as_ref()?;
        let end = match view.outcome_of(begun.update) {
            // The update begins soon, or its Commit is sent again.
            _ if self.calls.has_commit() || is_needed => None,
            _ if matches!(view.report.activity, Activity::Updating { .. }) => None,
            Some(last) => match update_end(last, view, Some(status)) {
                // It says nothing of the image as a whole.
                Some(UpdateEnd::Good) if self.lacks_blocked_paths(status) => {
                    Some(UpdateEnd::Withdrawn)
                }
                end => end,
            },
            None if status == Status::Rescanning => None,
            None => Some(UpdateEnd::Withdrawn),
        };
        if end.is_none() {
            self.wake_by(until);
        }
        end
    }
}

/// Says that updates to an image have stopped.
pub(super) fn stopped_text(todo: &str, image: &ImageName, why: &str) -> String {
    format!(
        "{todo}; updates to {image} have stopped: {why}; another image goes on, or: domtool \
         resume-image {image} --why TEXT"
    )
}

/// Returns how the update with the outcome `last` has ended for the budgets. `None` while that is
/// not known, because the machine reboots or the changed paths were not scanned. Without a `status`
/// another update is needed now.
fn update_end(last: &LastUpdate, view: &View, status: Option<Status>) -> Option<UpdateEnd> {
    let failed = match &last.outcome {
        // The reboot of an earlier update has not happened yet.
        UpdateOutcome::NotPrepared(_) if view.is_rebooting() => return None,
        UpdateOutcome::NotPrepared(_) => return Some(UpdateEnd::Withdrawn),
        UpdateOutcome::RolledBack(_) => UpdateFailure::Update,
        UpdateOutcome::Stuck(_) => UpdateFailure::Stuck,
        UpdateOutcome::Undone(_) => UpdateFailure::Health,
        UpdateOutcome::Done if view.is_rebooting() || view.is_unverified() => return None,
        UpdateOutcome::Done if matches!(last.health, Some(Health::Failed(_))) => {
            UpdateFailure::Health
        }
        UpdateOutcome::Done if !last.trigger_failures.is_empty() => UpdateFailure::Trigger,
        UpdateOutcome::Done => match status {
            // The scan after the update is being compared with the image.
            Some(Status::Rescanning) => return None,
            Some(Status::NotConverging) => UpdateFailure::NotConverging,
            _ => return Some(UpdateEnd::Good),
        },
    };
    Some(UpdateEnd::Failed(failed))
}
