//! The claims of one machine: for an update, and for a fetch.
//!
//! The claim for an update is asked for when all objects are there, before anything is staged, and
//! is kept until the end of the update is seen: the machine is as it must be, or failed, or has not
//! answered for so long that it must not use up a budget. A machine that turns to something else
//! meanwhile gives its claim back, but not its seniority.
// tidy: core

use core::ops::ControlFlow::{Break, Continue};
use core::time::Duration;

use api::dominator::Status;
use api::subd::{Activity, Health, LastUpdate, Outcome};
use model::image::ImageName;
use model::object::ObjectId;

use super::next_effects::{Check, describe, stop};
use super::{CallPurpose, Effect, ImageState, Now, Reach, Sub, View};
use crate::core::budget::{Class, Demand, Impact};
use crate::core::claims::{Claim, ClaimAnswer, ClaimKind, Release, UpdateClaim, UpdateEnd};
use crate::core::image_breaker::UpdateFailure;
use crate::core::network_budget::{Download, Urgency};
use api::planning::Planned;
use model::image::required::RequiredImage;

/// A machine that has not answered for so long after an update began has vanished.
pub const VANISHED_AFTER: Duration = Duration::from_secs(300);

/// The same if the update disturbs much, so that the machine may be rebooting.
pub const REBOOTING_MACHINE_VANISHED_AFTER: Duration = Duration::from_secs(900);

/// An update that has not ended after so long has failed.
pub const UPDATE_LONGEST: Duration = Duration::from_secs(3_600);

/// A claim that is granted and not used for so long is given back: somebody else is next.
pub const UNUSED_LONGEST: Duration = Duration::from_secs(900);

/// The state of the claim for an update.
#[derive(Debug, Default)]
enum UpdateClaimState {
    #[default]
    None,
    /// Told, since when; `None` until there is an answer.
    Asked(Box<UpdateClaim>, Option<(ClaimAnswer, Duration)>),
    /// The Commit was sent.
    Begun(BegunUpdate),
}

/// An update that was begun, or is believed to have been.
#[derive(Clone, Copy, Debug)]
struct BegunUpdate {
    update: u64,
    impact: Impact,
    since: Duration,
}

/// The claim for a fetch.
#[derive(Debug)]
struct FetchClaim {
    /// The plan that it is for.
    plan: ObjectId,
    download: Download,
    answer: Option<ClaimAnswer>,
}

/// What is known of the claims of a machine.
#[derive(Debug, Default)]
pub(super) struct OwnClaims {
    update: UpdateClaimState,
    fetch: Option<FetchClaim>,
    /// Since when the machine needs an update to this image.
    needed: Option<(ObjectId, Duration)>,
    /// The last update that failed: it may still be under way, but has no claim any more.
    given_up: Option<u64>,
    /// In this step the claim was needed.
    is_needed: bool,
    is_fetch_needed: bool,
    /// What the answer was may have changed: ask once more.
    is_stale: bool,
    is_met: bool,
}

impl OwnClaims {
    /// Takes the answer to a claim.
    pub(super) fn answered(&mut self, purpose: ClaimKind, answer: ClaimAnswer, now: Now) {
        match purpose {
            ClaimKind::Update => {
                if let UpdateClaimState::Asked(_, told) = &mut self.update {
                    let since = match told {
                        Some((known, since)) if *known == answer => *since,
                        _ => now.elapsed,
                    };
                    *told = Some((answer, since));
                }
            }
            ClaimKind::Fetch => {
                if let Some(fetch) = &mut self.fetch {
                    fetch.answer = Some(answer);
                }
            }
        }
    }

    /// The sub has answered a poll: time to look at the queue again.
    pub(super) fn polled(&mut self) {
        self.is_stale = true;
    }

    /// The Commit was not sent after all, because that was forbidden in the last moment.
    pub(super) fn refused(&mut self) {
        if let UpdateClaimState::Begun(_) = self.update {
            self.update = UpdateClaimState::Asked(Box::new(unknown()), None);
        }
    }

    /// True if nothing keeps an update from being carried out.
    pub(super) fn is_granted(&self) -> bool {
        match &self.update {
            UpdateClaimState::None => false,
            UpdateClaimState::Asked(_, told) => matches!(told, Some((ClaimAnswer::Granted, _))),
            UpdateClaimState::Begun(_) => true,
        }
    }

    fn give_back(&mut self, end: UpdateEnd, effects: &mut Vec<Effect>) {
        self.update = UpdateClaimState::None;
        effects.push(Effect::Release(Release::Update(end)));
    }

    fn give_fetch_back(&mut self, effects: &mut Vec<Effect>) {
        self.fetch = None;
        effects.push(Effect::Release(Release::Fetch));
    }
}

/// A claim that equals no real one, so that the real one is asked for again.
fn unknown() -> UpdateClaim {
    let demand = Demand {
        class: Class::Repair,
        impact: Impact::Plain,
        location: String::new(),
        since: Duration::MAX,
    };
    UpdateClaim { demand, image: None, is_new: false }
}

impl Sub {
    /// The machine may be updated, as far as others are concerned.
    pub(super) fn claimed(
        &mut self,
        view: &View,
        image: &RequiredImage,
        planned: &Planned,
        now: Now,
        effects: &mut Vec<Effect>,
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
                last.and_then(|last| end_of(last, view, None)).unwrap_or(UpdateEnd::Withdrawn);
            self.end_claim(end, effects);
        }
        let wanted = self.wanted(view, image, planned, now);
        let is_stale = std::mem::take(&mut self.claims.is_stale);
        let todo = describe(&planned.plan);
        let (ask, verdict) = match &self.claims.update {
            UpdateClaimState::Asked(asked, Some((answer, since))) if **asked == wanted => {
                match answer {
                    ClaimAnswer::Granted if now.elapsed.saturating_sub(*since) < UNUSED_LONGEST => {
                        let until = *since + UNUSED_LONGEST;
                        self.wake_by(until);
                        return Continue(());
                    }
                    ClaimAnswer::Granted => {
                        let why = "the claim was not used in time; asking again";
                        self.claims.give_back(UpdateEnd::Withdrawn, effects);
                        self.claims.needed = None;
                        return stop(Status::WaitingForBudget, format!("{todo}; {why}"));
                    }
                    ClaimAnswer::Waits(why) => {
                        (is_stale, (Status::WaitingForBudget, format!("{todo}; {why}")))
                    }
                    ClaimAnswer::Stopped(why) => {
                        let name = image.name();
                        let detail = format!(
                            "{todo}; updates to {name} have stopped: {why}; another image goes on, \
                         or: domtool resume-image {name} --why TEXT"
                        );
                        (is_stale, (Status::ImageStopped, detail))
                    }
                }
            }
            UpdateClaimState::Asked(asked, None) if **asked == wanted => {
                (false, (self.shown.status, self.shown.detail.clone()))
            }
            _ => (true, (self.shown.status, self.shown.detail.clone())),
        };
        if ask {
            let told = match std::mem::take(&mut self.claims.update) {
                UpdateClaimState::Asked(asked, told) if *asked == wanted => told,
                _ => None,
            };
            effects.push(Effect::Claim(Claim::Update(wanted.clone())));
            self.claims.update = UpdateClaimState::Asked(Box::new(wanted), told);
        }
        Break(verdict)
    }

    /// The name of the image that it must have; empty if that is not at hand.
    pub(super) fn image_name(&self) -> &str {
        match &self.image {
            ImageState::Ready(image) => image.name().as_str(),
            ImageState::Undefined | ImageState::Missing(_) => "",
        }
    }

    /// What the machine needs now.
    fn wanted(
        &mut self,
        view: &View,
        image: &RequiredImage,
        planned: &Planned,
        now: Now,
    ) -> UpdateClaim {
        let is_new = !self.is_recorded(view, image);
        let demand = Demand {
            class: self.class(view, image),
            impact: if planned.is_high_impact { Impact::High } else { Impact::Plain },
            location: self.machine.location.clone(),
            since: self.needed_since(image, now),
        };
        UpdateClaim { demand, image: Some(image.name().clone()), is_new }
    }

    /// What brings a machine back to the image that it has is a repair; so is what failed and is
    /// tried again, so that it is in nobody's way.
    fn class(&self, view: &View, image: &RequiredImage) -> Class {
        if self.is_recorded(view, image) || self.updates.failures > 0 {
            Class::Repair
        } else {
            Class::Rollout
        }
    }

    fn needed_since(&mut self, image: &RequiredImage, now: Now) -> Duration {
        let since = match self.claims.needed {
            // An operator waits for it: it comes before all others, and stays there.
            _ if self.is_urgent() => Duration::ZERO,
            Some((known, since)) if known == image.digest => since,
            _ => now.elapsed,
        };
        self.claims.needed = Some((image.digest, since));
        since
    }

    /// The Commit of this update was sent.
    pub(super) fn begun(&mut self, update: u64, now: Now) {
        match &self.claims.update {
            UpdateClaimState::Asked(asked, _) => {
                let begun = BegunUpdate { update, impact: asked.demand.impact, since: now.elapsed };
                self.claims.update = UpdateClaimState::Begun(begun);
            }
            UpdateClaimState::None | UpdateClaimState::Begun(_) => {}
        }
    }

    /// The machine may fetch what it needs; otherwise why not yet, in words that are empty as long
    /// as nobody knows.
    pub(super) fn fetch_claimed(
        &mut self,
        plan: ObjectId,
        urgency: Urgency,
        bytes: u64,
        now: Now,
        effects: &mut Vec<Effect>,
    ) -> Result<(), String> {
        self.claims.is_fetch_needed = true;
        let is_same = |fetch: &FetchClaim| {
            fetch.plan == plan && (fetch.download.urgency, fetch.download.bytes) == (urgency, bytes)
        };
        if let Some(fetch) = self.claims.fetch.as_ref().filter(|fetch| is_same(fetch)) {
            let why = match &fetch.answer {
                Some(ClaimAnswer::Granted) => {
                    // It is ordered now.
                    self.claims.give_fetch_back(effects);
                    return Ok(());
                }
                Some(ClaimAnswer::Waits(why) | ClaimAnswer::Stopped(why)) => why.to_string(),
                None => String::new(),
            };
            if !why.is_empty() && std::mem::take(&mut self.claims.is_stale) {
                effects.push(Effect::Claim(Claim::Fetch(fetch.download)));
            }
            return Err(why);
        }
        let since = match self.claims.needed {
            Some((_, since)) if urgency != Urgency::Prefetch => since,
            _ => now.elapsed,
        };
        let download = Download { urgency, since, bytes };
        effects.push(Effect::Claim(Claim::Fetch(download)));
        self.claims.fetch = Some(FetchClaim { plan, download, answer: None });
        Err(String::new())
    }

    /// The machine may fetch what its update needs.
    pub(super) fn update_fetch_claimed(
        &mut self,
        view: &View,
        image: &RequiredImage,
        planned: &Planned,
        (bytes, wanted): (u64, &str),
        now: Now,
        effects: &mut Vec<Effect>,
    ) -> Check<()> {
        let urgency = match self.class(view, image) {
            Class::Repair => Urgency::Repair,
            Class::Rollout => Urgency::Rollout,
        };
        self.needed_since(image, now);
        match self.fetch_claimed(planned.digest, urgency, bytes, now, effects) {
            Ok(()) => Continue(()),
            Err(why) if why.is_empty() => Break((self.shown.status, self.shown.detail.clone())),
            Err(why) => stop(Status::WaitingForBudget, format!("must fetch {wanted}; {why}")),
        }
    }

    /// Gives back what is not needed any more, and notes what is under way without a claim. Comes
    /// at the end of each step, when the status is known.
    pub(super) fn settle_claims(&mut self, now: Now, status: Status, effects: &mut Vec<Effect>) {
        let is_needed = std::mem::take(&mut self.claims.is_needed);
        let is_fetch_needed = std::mem::take(&mut self.claims.is_fetch_needed);
        if self.claims.fetch.is_some() && !is_fetch_needed {
            self.claims.give_fetch_back(effects);
        }
        match self.claims.update {
            UpdateClaimState::None => self.claim_for_running_update(now, effects),
            UpdateClaimState::Asked(..) if !is_needed => {
                self.claims.give_back(UpdateEnd::Withdrawn, effects);
            }
            UpdateClaimState::Asked(..) => {}
            UpdateClaimState::Begun(begun) => {
                if let Some(end) = self.end_of(begun, is_needed, status, now) {
                    self.end_claim(end, effects);
                }
            }
        }
        if matches!(status, Status::Synced | Status::TriggerFailed) {
            self.claims.needed = None;
        }
        if !self.claims.is_met && self.polls.reach != Reach::Unknown {
            self.claims.is_met = true;
            effects.push(Effect::ActivityKnown);
        }
    }

    fn end_claim(&mut self, end: UpdateEnd, effects: &mut Vec<Effect>) {
        if let (UpdateClaimState::Begun(begun), UpdateEnd::Failed(_)) = (&self.claims.update, end) {
            self.claims.given_up = Some(begun.update);
        }
        if end != UpdateEnd::Withdrawn {
            self.claims.needed = None;
        }
        self.claims.give_back(end, effects);
    }

    /// Counts an update that was begun before this dominator was, or by hand.
    fn claim_for_running_update(&mut self, now: Now, effects: &mut Vec<Effect>) {
        let Some(view) = self.view.as_ref().filter(|_| self.polls.reach == Reach::Good) else {
            return;
        };
        let last = view.report.last_update.as_ref();
        let (update, impact) = match (&view.report.activity, last) {
            (Activity::Updating { update_id }, _) => (*update_id, Impact::Plain),
            (_, Some(last)) if view.is_rebooting() => (last.update_id, Impact::High),
            (_, Some(last)) if view.is_unverified() => (last.update_id, Impact::Plain),
            _ => return,
        };
        if self.claims.given_up == Some(update) {
            return;
        }
        let demand = Demand {
            class: Class::Rollout,
            impact,
            location: self.machine.location.clone(),
            since: now.elapsed,
        };
        let image: Option<ImageName> = None;
        effects.push(Effect::Claim(Claim::UnderWay(UpdateClaim { demand, image, is_new: false })));
        self.claims.update =
            UpdateClaimState::Begun(BegunUpdate { update, impact, since: now.elapsed });
    }

    /// How an update that was begun has ended, if it has.
    fn end_of(
        &mut self,
        begun: BegunUpdate,
        is_needed: bool,
        status: Status,
        now: Now,
    ) -> Option<UpdateEnd> {
        if let Reach::Bad(_) = self.polls.reach {
            let patience = match begun.impact {
                Impact::Plain => VANISHED_AFTER,
                Impact::High => REBOOTING_MACHINE_VANISHED_AFTER,
            };
            let until = self.polls.answered.max(begun.since) + patience;
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
        let is_commit = |purpose: CallPurpose| matches!(purpose, CallPurpose::Commit(_));
        let is_told = self.calls.under_way.is_some_and(|(_, purpose)| is_commit(purpose))
            || self.calls.accepted.is_some_and(|pending| is_commit(pending.purpose));
        let end = match view.outcome_of(begun.update) {
            // It is begun soon, or told again.
            _ if is_told || is_needed => None,
            _ if matches!(view.report.activity, Activity::Updating { .. }) => None,
            Some(last) => end_of(last, view, Some(status)),
            None if status == Status::Rescanning => None,
            None => Some(UpdateEnd::Withdrawn),
        };
        if end.is_none() {
            self.wake_by(until);
        }
        end
    }
}

/// How the update that ended as `last` says has ended for those who wait; `None` while that is not
/// known, because the machine reboots or what was changed was not looked at again. Without a
/// `status` something else than the same update is to be done now.
fn end_of(last: &LastUpdate, view: &View, status: Option<Status>) -> Option<UpdateEnd> {
    let failed = match &last.outcome {
        // A reboot that an update before it asked for is still to come.
        Outcome::NotPrepared(_) if view.is_rebooting() => return None,
        Outcome::NotPrepared(_) => return Some(UpdateEnd::Withdrawn),
        Outcome::RolledBack(_) => UpdateFailure::Update,
        Outcome::Stuck(_) => UpdateFailure::Stuck,
        Outcome::Undone(_) => UpdateFailure::Health,
        Outcome::Done if view.is_rebooting() || view.is_unverified() => return None,
        Outcome::Done if matches!(last.health, Some(Health::Failed(_))) => UpdateFailure::Health,
        Outcome::Done if !last.trigger_failures.is_empty() => UpdateFailure::Trigger,
        Outcome::Done => match status {
            // The scan after the update is compared with the image.
            Some(Status::Rescanning) => return None,
            Some(Status::NotConverging) => UpdateFailure::NotConverging,
            _ => return Some(UpdateEnd::Good),
        },
    };
    Some(UpdateEnd::Failed(failed))
}
