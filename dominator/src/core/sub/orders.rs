//! What operators order of one machine: to leave it alone for a while, to disturb it all the same,
//! to bring it up to date now; and the image that it gets if its record names none.
// tidy: core

use core::time::Duration;
use std::sync::Arc;

use api::dominator::Status;
use api::dominator::orders::{DefaultImage, UpdatePause, WatchSubReply};
use api::subd::{Outcome, Version};
use model::image::ImageName;
use model::tree::Time;
use model::when::moment;

use super::{Effect, Failure, ImageState, Now, Polling, Reach, Sub, Ticket, View, WantedUpdate};
use crate::core::default_image;
use crate::core::sub::next_effects::{Check, stop};
use api::planning::Planned;

/// How often the time of day is looked at during a pause, if nothing else happens: it may have been
/// set.
const CLOCK_LOOK: Duration = Duration::from_secs(60);

/// How far an order to bring the machine up to date now has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rush {
    /// The machine is to scan.
    Wanted,
    /// It scans since this was ordered, and the answer to the question will tell the end of that.
    Scanning,
    /// It has scanned: a report of this version, or a later one, has what it found.
    Scanned(Version),
    /// What it has is known. Others wait for it, until it is in place.
    Known,
}

/// What operators have ordered.
#[derive(Clone, Debug, Default)]
pub(super) struct Orders {
    pause: Option<Arc<UpdatePause>>,
    /// True if the pause was in force when the last decision was made.
    is_paused: bool,
    default: Option<Arc<DefaultImage>>,
    /// The plan that is to be carried out even if the machine does not want to be disturbed.
    forced: Option<model::object::ObjectId>,
    rush: Option<Rush>,
    /// The question for a scan that has no answer yet; there is at most one.
    scan: Option<Ticket>,
    /// Counts what [`Sub::watched`] tells.
    version: u64,
    /// What it told when it was last counted.
    was_current: bool,
}

impl Orders {
    pub(super) fn new(version: u64) -> Self {
        Self { version, ..Self::default() }
    }
}

impl Sub {
    /// Pauses updates, or lets them go on; the next step acts on it. For callers that cannot wait;
    /// others use [`super::Event::Pause`].
    pub fn pause_updates(&mut self, pause: Option<Arc<UpdatePause>>) {
        self.orders.pause = pause;
    }

    /// The pause that an operator ordered, if it is in force at this time of day.
    #[must_use]
    pub fn paused(&self, now: Time) -> Option<&Arc<UpdatePause>> {
        self.orders.pause.as_ref().filter(|pause| pause.holds(now))
    }

    /// Looks whether the pause is in force now, and sees to it that its end is noticed.
    pub(super) fn look_at_pause(&mut self, now: Now) {
        let until = self.paused(now.wall).map(|pause| pause.until);
        self.orders.is_paused = until.is_some();
        if let Some(until) = until {
            self.wake_by(now.elapsed + between(now.wall, until).min(CLOCK_LOOK));
        }
    }

    /// Why updates are paused, if they are.
    pub(super) fn pause_in_words(&self) -> Option<String> {
        let pause = self.orders.pause.as_ref().filter(|_| self.orders.is_paused)?;
        let (until, who, reason) = (moment(pause.until), &pause.who, &pause.reason);
        Some(format!("updates are paused until {until} by {who}: {reason}"))
    }

    /// Takes note of the image of machines whose record names none.
    pub(super) fn set_default(&mut self, default: Option<Arc<DefaultImage>>) {
        self.orders.default = default;
    }

    /// The image of machines whose record names none.
    #[must_use]
    pub fn default_image(&self) -> Option<&DefaultImage> {
        self.orders.default.as_deref()
    }

    /// The image that it must have.
    #[must_use]
    pub fn required(&self) -> Option<ImageName> {
        default_image::required(&self.machine, self.default_image())
    }

    /// The plan that is pending: it is known, up to date, not empty, and was not begun.
    pub(super) fn pending_plan(&self) -> Option<&Arc<Planned>> {
        let (view, planned) = (self.view.as_ref()?, self.planned.as_ref()?);
        let ImageState::Ready(image) = &self.image else { return None };
        let is_latest = planned.key.image == image.digest && planned.key.scan == view.scan_number;
        let is_needed = !planned.plan.is_empty() || !self.is_recorded(view, image);
        let is_begun =
            self.not_busy_by_itself(view).is_break() || self.not_updating(view).is_break();
        Some(planned).filter(|_| is_latest && is_needed && !is_begun)
    }

    /// True if a plan is pending: [`Sub::force_disruptive`] would be of use.
    #[must_use]
    pub fn has_pending_plan(&self) -> bool {
        self.pending_plan().is_some()
    }

    /// Has the pending plan carried out, once, even if the machine does not want to be disturbed;
    /// the next step acts on it. False if no plan is pending. For callers that must tell an
    /// operator; others use [`super::Event::Forced`].
    #[must_use]
    pub fn force_disruptive(&mut self) -> bool {
        let Some(digest) = self.pending_plan().map(|planned| planned.digest) else { return false };
        self.orders.forced = Some(digest);
        // What is staged was staged without.
        self.update = None;
        self.clear_failures();
        true
    }

    /// True if this plan is to be carried out even if the machine does not want to be disturbed.
    pub(super) fn is_forced(&self, planned: &Planned) -> bool {
        self.orders.forced == Some(planned.digest)
    }

    /// Takes note of how an update ended: one that was forced is not forced again.
    pub(super) fn end_force(&mut self, update: WantedUpdate, outcome: &Outcome) {
        // One that was not even staged, because it waited too long, may still be.
        if !matches!(outcome, Outcome::NotPrepared(_)) {
            self.orders.forced.take_if(|forced| *forced == update.plan);
        }
    }

    /// Forgets what was ordered about a plan: another image is required, or all is in place.
    pub(super) fn forget_force(&mut self) {
        self.orders.forced = None;
    }

    /// Brings the machine up to date now: it is polled and scans at once, and what failed is tried
    /// again. The next step acts on it. For callers that must tell an operator; others use
    /// [`super::Event::Hurried`].
    pub fn hurry(&mut self) {
        let _was_held = self.retry();
        self.read_again = None;
        if let Polling::Due(at) = &mut self.polling {
            *at = Duration::ZERO;
        }
        self.orders.rush = Some(Rush::Wanted);
    }

    /// True while an operator waits for the machine to be brought up to date: whoever lets machines
    /// wait for their turn lets this one go first.
    #[must_use]
    pub fn is_urgent(&self) -> bool {
        self.orders.rush.is_some()
    }

    /// True if the status is what is known of the machine now, and not before a scan that an
    /// operator waits for.
    fn is_current(&self) -> bool {
        matches!(self.orders.rush, None | Some(Rush::Known))
    }

    /// A scan that an operator waits for has come to its end.
    pub(super) fn hurried(&mut self, view: &View, effects: &mut Vec<Effect>) -> Check<()> {
        match self.orders.rush {
            None | Some(Rush::Known) => return Check::Continue(()),
            Some(Rush::Wanted) if self.orders.scan.is_none() => {
                let ticket = self.next_ticket();
                self.orders.scan = Some(ticket);
                self.orders.rush = Some(Rush::Scanning);
                effects.push(Effect::Scan(ticket, view.report.version));
            }
            Some(Rush::Wanted | Rush::Scanning) => {}
            Some(Rush::Scanned(version)) => {
                let seen = view.report.version;
                // Another instance scans anew by itself, before it reports anything.
                if seen.instance != version.instance || seen.generation >= version.generation {
                    self.orders.rush = Some(Rush::Known);
                    return Check::Continue(());
                }
            }
        }
        stop(Status::Rescanning, "scans at once, as an operator asks for it")
    }

    /// Takes the answer to the question for a scan.
    pub(super) fn scanned_at_once(&mut self, ticket: Ticket, result: Result<Version, Failure>) {
        let is_awaited = self.orders.scan.take_if(|asked| *asked == ticket).is_some();
        if is_awaited && self.orders.rush == Some(Rush::Scanning) {
            // One that cannot scan at once scans in its own time: better that than nothing.
            self.orders.rush = Some(result.map_or(Rush::Known, Rush::Scanned));
        }
    }

    /// Counts what is told to those who watch, `is_news` if the status or its words have changed;
    /// an order that came to its end is over.
    pub(super) fn count_version(&mut self, is_news: bool) {
        let is_known = self.reach == Reach::Good && self.view.is_some();
        if is_known && !self.status.is_under_way() {
            self.orders.rush = None;
        }
        let is_current = self.is_current();
        if is_news || is_current != self.orders.was_current {
            self.orders.version = self.orders.version.wrapping_add(1);
        }
        self.orders.was_current = is_current;
    }

    /// What is told to those who watch how an update goes.
    #[must_use]
    pub fn watched(&self) -> WatchSubReply {
        WatchSubReply {
            hostname: self.machine.hostname.clone(),
            version: self.orders.version,
            status: self.status,
            detail: self.detail.clone(),
            since: self.since,
            is_current: self.is_current(),
        }
    }

    /// Tells whether [`Sub::watched`] tells something else than with this version.
    #[must_use]
    pub fn watched_version(&self) -> u64 {
        self.orders.version
    }
}

/// The time from `now` until `then`; none if that is over.
fn between(now: Time, then: Time) -> Duration {
    let nanoseconds =
        |time: Time| i128::from(time.seconds) * 1_000_000_000 + i128::from(time.nanoseconds);
    let left = (nanoseconds(then) - nanoseconds(now)).max(0);
    // A pause ends with the first nanosecond that is not before its end.
    u64::try_from(left).map_or(Duration::MAX, Duration::from_nanos)
}
