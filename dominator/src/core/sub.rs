//! One machine: the state machine that brings it to its image and keeps it there.
//!
//! [`Sub::step`] takes note of an [`Event`], then looks at all it knows and decides what is next
//! (`decide`). Decisions depend on what is known, not on the way it became known, so lost,
//! repeated and late answers, restarts of the sub and of the dominator need no cases of their own.
//!
//! # Invariants
//!
//! * At most one poll, one reading of the tree, one plan and one call are under way.
//! * No Commit while the brake is on, and none without a claim that is granted (`claim`).
//! * No Commit but of an update whose Prepare the sub has accepted and staged, made from the scan
//!   and the image that are still the latest.
//! * Each Commit comes with what it orders, to be put on record first; none while that cannot be.
//!   Recording takes time: what is sent then must still be wanted ([`Sub::still_orders`]).
//! * No call to a machine that the roster has not recognised as the one that is meant.
//! * `synced` means: the plan from a complete scan in the scope of the required image is empty,
//!   and what the last update touched has been scanned since.
// tidy: core

mod ahead;
mod bounds;
mod claim;
mod decide;
mod event;
mod explain;
mod missing;
mod orders;
mod prospect;
mod recognition;
mod record;
mod report;
mod view;

use core::time::Duration;
use std::sync::Arc;

use common::api::dominator::Status;
use common::api::subd::{Activity, Outcome, PollReply};
use common::filter::Patterns;
use common::mdb::Machine;
use common::object::ObjectId;
use common::report::report;
use common::scope::Scope;
use common::tree::{Time, Tree};

pub use claim::{REBOOTING_MACHINE_VANISHED_AFTER, UNUSED_LONGEST, UPDATE_LONGEST, VANISHED_AFTER};
pub use event::{Call, Context, Effect, Event, Failure, FailureKind, ImageState, Now, Ticket};
pub use prospect::Prospect;
pub use view::{Unusable, View};

use ahead::Ahead;
use bounds::Bounds;
use claim::Claims;
use missing::Missing;
use orders::Orders;
use recognition::Recognition;
use record::Awaited;

use super::history::History;
use super::identity::Origins;
use super::pace::{
    HELD_PAUSE, HOLD_FIRST, HOLD_LONGEST, PollPace, RETRY_FIRST, RETRY_LONGEST, doubled, jittered,
};
use super::planning::{PlanKey, Planned};
use super::words::size;

/// Whether the sub answers.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Reach {
    /// Nobody knows yet.
    Unknown,
    /// It answered the last poll.
    Good,
    /// It did not.
    Bad(Failure),
}

/// The poll that is under way, or when the next is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Polling {
    Due(Duration),
    UnderWay(Ticket),
}

/// What a call was for; tells whether a poll shows that it was carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    Scan(Scope),
    Limits,
    Fetch(u64),
    Ahead(u64),
    Prepare(u64),
    Commit(u64),
    Cleanup,
}

/// A call that was accepted, and that no poll has shown yet.
#[derive(Clone, Copy, Debug)]
struct Pending {
    purpose: Purpose,
    /// A poll with this ticket or a later one was sent after the call was accepted: if it does
    /// not show the call, then the call was lost.
    shown_from: Ticket,
}

/// The update that is wanted, under the id by which the sub knows it.
#[derive(Clone, Copy, Debug)]
struct Update {
    id: u64,
    key: PlanKey,
    instance: u64,
    plan: ObjectId,
}

/// The fetch that is wanted, under the id by which the sub knows it.
#[derive(Clone, Copy, Debug)]
struct Fetch {
    id: u64,
    plan: ObjectId,
    missing: usize,
}

/// Something failed: do not try the same again before the time has come.
#[derive(Clone, Debug)]
struct Hold {
    status: Status,
    detail: String,
    image: ObjectId,
    /// The plan that failed, if another plan may be tried at once.
    plan: Option<ObjectId>,
    /// The scan that it failed upon: upon another it is tried again soon.
    scan: u64,
    since: Duration,
    until: Duration,
}

impl Hold {
    /// Until when nothing is tried again, if the last scan has this number.
    fn end(&self, scan: u64) -> Duration {
        let is_firm = self.plan.is_some() || self.status == Status::Held;
        if is_firm || self.scan == scan {
            self.until
        } else {
            self.until.min(self.since + HOLD_FIRST)
        }
    }
}

/// The scope that an image has on a machine with these exclusions, and what it brings of what tells
/// machines apart; kept, because a sparse image has as many lines as paths.
#[derive(Clone, Debug)]
struct KnownScope {
    image: ObjectId,
    exclusions: Patterns,
    scope: Scope,
    origins: Origins,
}

/// One machine. See the module's text.
#[derive(Debug)]
pub struct Sub {
    machine: Arc<Machine>,
    image: ImageState,
    ahead: Ahead,
    bounds: Bounds,
    claims: Claims,
    brake: Option<Arc<str>>,
    /// Why nothing can be put on record.
    unrecordable: Option<Arc<str>>,

    last_ticket: u64,
    last_id: u64,

    reach: Reach,
    recognition: Recognition,
    view: Option<View>,
    /// How many scans that differ have been seen.
    scans: u64,
    /// The next poll asks for everything, because something was missed.
    ask_all: bool,
    polling: Polling,
    pace: PollPace,
    polls_failed: u32,

    tree: Option<Tree>,
    reading: Option<(Ticket, ObjectId)>,
    read_again: Option<(Duration, String)>,
    reads_failed: u32,

    planning: Option<(Ticket, PlanKey)>,
    planned: Option<Arc<Planned>>,
    plan_failed: Option<(PlanKey, String)>,
    known_scope: Option<KnownScope>,

    calling: Option<(Ticket, Purpose)>,
    pending: Option<Pending>,
    call_again: Option<(Duration, String)>,
    calls_failed: u32,

    update: Option<Update>,
    /// The update whose last Commit was not sent: what was staged for it may go without harm.
    unsent: Option<u64>,
    fetch: Option<Fetch>,
    done: Option<ObjectId>,
    hold: Option<Hold>,
    holds: u32,
    cleared: Option<ObjectId>,
    /// The update that failed its health check, and whose image an operator wants once more.
    retried: Option<u64>,
    orders: Orders,
    cleaned_generation: Option<u64>,
    awaited: Option<Awaited>,

    status: Status,
    detail: String,
    since: Time,
    history: History,
    /// When it last answered a poll, on the clock of [`Now::elapsed`].
    answered: Duration,
    last_seen: Option<Time>,
    last_synced: Option<Time>,
    wake: Option<Duration>,
}

impl Sub {
    /// Starts to look after a machine. Ids of updates and fetches count upwards from `first_id`,
    /// which no other run of the dominator may use for this machine.
    #[must_use]
    pub fn new(machine: Arc<Machine>, first_id: u64, now: Now) -> Self {
        Self {
            machine,
            image: ImageState::Undefined,
            ahead: Ahead::default(),
            bounds: Bounds::default(),
            claims: Claims::default(),
            brake: None,
            unrecordable: None,
            last_ticket: 0,
            last_id: first_id,
            reach: Reach::Unknown,
            recognition: Recognition::default(),
            view: None,
            scans: 0,
            ask_all: false,
            polling: Polling::Due(now.elapsed),
            pace: PollPace::default(),
            polls_failed: 0,
            tree: None,
            reading: None,
            read_again: None,
            reads_failed: 0,
            planning: None,
            planned: None,
            plan_failed: None,
            known_scope: None,
            calling: None,
            pending: None,
            call_again: None,
            calls_failed: 0,
            update: None,
            unsent: None,
            fetch: None,
            done: None,
            hold: None,
            holds: 0,
            cleared: None,
            retried: None,
            orders: Orders::new(first_id),
            cleaned_generation: None,
            awaited: None,
            status: Status::Connecting,
            detail: "not reached yet".to_owned(),
            since: now.wall,
            history: History::default(),
            answered: now.elapsed,
            last_seen: None,
            last_synced: None,
            wake: Some(now.elapsed),
        }
    }

    /// Takes note of `event` and says what to do.
    pub fn step(&mut self, now: Now, event: Event, context: &Context<'_>) -> Vec<Effect> {
        self.note(now, event, context);
        let mut effects = Vec::new();
        self.decide(now, context, &mut effects);
        effects
    }

    /// When [`Event::Wake`] is wanted, if nothing else happens before; on the clock of
    /// [`Now::elapsed`].
    #[must_use]
    pub fn wake_at(&self) -> Option<Duration> {
        self.wake
    }

    /// Lets the pending unsafe update pass, and no other; the next step acts on it. False if there
    /// is none. For callers that must tell an operator; others use [`Event::SafetyCleared`].
    #[must_use]
    pub fn clear_danger(&mut self) -> bool {
        let Some(digest) = self.pending_danger().map(|planned| planned.digest) else {
            return false;
        };
        self.cleared = Some(digest);
        self.let_go();
        true
    }

    /// Lets what failed be tried again, and an image whose health check failed be offered once
    /// more; the next step acts on it. False if nothing is held back for such a reason. For callers
    /// that must tell an operator; others use [`Event::Retried`].
    #[must_use]
    pub fn retry(&mut self) -> bool {
        let is_held = self.can_retry();
        self.retried = self.undone_update().or(self.retried);
        self.let_go();
        is_held
    }

    /// True if something is held back because it failed: [`Sub::retry`] would be of use.
    #[must_use]
    pub fn can_retry(&self) -> bool {
        self.undone_update().is_some() || self.hold.is_some() || self.call_again.is_some()
    }

    /// The update to the required image that failed its health check, unless it was retried.
    fn undone_update(&self) -> Option<u64> {
        let (ImageState::Ready(image), Some(view)) = (&self.image, &self.view) else { return None };
        let (update, _) = view.undone(image.name())?;
        Some(update.update_id).filter(|&id| self.retried != Some(id))
    }

    fn note(&mut self, now: Now, event: Event, context: &Context<'_>) {
        match event {
            Event::Assigned { machine, image, planned } => {
                if self.ahead.assigned(planned) {
                    // Other objects are worth keeping.
                    self.cleaned_generation = None;
                }
                self.assigned(machine, image);
            }
            Event::Brake(brake) => {
                if brake.is_none() && self.brake.is_some() {
                    self.let_go();
                }
                self.brake = brake;
            }
            Event::Recorder(trouble) => self.unrecordable = trouble,
            Event::SafetyCleared => {
                let _there_was_one = self.clear_danger();
            }
            Event::Retried => {
                let _was_held = self.retry();
            }
            Event::Recognized(verdict) => self.recognition.take(verdict),
            Event::Pause(pause) => self.pause_updates(pause),
            Event::DefaultImage(default) => self.set_default(default),
            Event::Forced => {
                let _was_pending = self.force_disruptive();
            }
            Event::Hurried => self.hurry(),
            Event::Scanned(ticket, result) => self.scanned_at_once(ticket, result),
            Event::Polled(ticket, reply) => {
                if self.polling == Polling::UnderWay(ticket) {
                    self.polled(now, context, ticket, *reply);
                }
            }
            Event::PollFailed(ticket, failure) => {
                if self.polling == Polling::UnderWay(ticket) {
                    self.poll_failed(now, context, failure);
                }
            }
            Event::TreeRead(ticket, tree) => {
                if self.reading.take_if(|(asked, _)| *asked == ticket).is_some() {
                    self.tree = Some(tree);
                    self.read_again = None;
                    self.reads_failed = 0;
                }
            }
            Event::TreeFailed(ticket, failure) => {
                if self.reading.take_if(|(asked, _)| *asked == ticket).is_some() {
                    self.reads_failed += 1;
                    let pause = self.pause(self.reads_failed, context);
                    self.read_again = Some((now.elapsed + pause, failure.text));
                }
            }
            Event::Planned(ticket, result) => {
                if self.ahead.planned(ticket, &result) {
                    return;
                }
                if let Some((_, key)) = self.planning.take_if(|(asked, _)| *asked == ticket) {
                    match result {
                        Ok(planned) => self.planned = Some(planned),
                        Err(text) => self.plan_failed = Some((key, text)),
                    }
                }
            }
            Event::Accepted(ticket) => {
                if let Some((_, purpose)) = self.calling.take_if(|(asked, _)| *asked == ticket) {
                    if let Purpose::Commit(id) = purpose {
                        self.await_end(id);
                    }
                    // A poll may have overtaken the answer to the call.
                    let is_seen = self.view.as_ref().is_some_and(|view| is_shown(purpose, view));
                    if !is_seen {
                        let shown_from = Ticket(self.last_ticket + 1);
                        self.pending = Some(Pending { purpose, shown_from });
                    }
                    self.call_again = None;
                    self.calls_failed = 0;
                }
            }
            Event::CallFailed(ticket, failure) => {
                if let Some((_, purpose)) = self.calling.take_if(|(asked, _)| *asked == ticket) {
                    self.call_failed(now, context, purpose, failure);
                }
            }
            Event::Claimed(purpose, answer) => self.claims.answered(purpose, answer, now),
            Event::Wake => {}
        }
    }

    fn assigned(&mut self, machine: Arc<Machine>, image: ImageState) {
        if self.machine != machine {
            self.machine = machine;
            self.let_go();
        }
        if self.image.digest() != image.digest() {
            self.let_go();
            self.done = None;
            self.cleared = None;
            self.forget_force();
        }
        self.image = image;
    }

    /// Forgets that something failed, so that it is tried again at once.
    fn let_go(&mut self) {
        self.hold = None;
        self.holds = 0;
        self.call_again = None;
        self.calls_failed = 0;
    }

    fn polled(&mut self, now: Now, context: &Context<'_>, ticket: Ticket, reply: PollReply) {
        let was_paused = self.view.as_ref().is_some_and(|view| view.report.paused.is_some());
        let before = if self.ask_all { None } else { self.view.take() };
        let view = match View::after(before, reply, self.scans + 1) {
            Ok(view) => view,
            Err(Unusable::Incomplete) if !self.ask_all => {
                self.ask_all = true;
                self.polling = Polling::Due(self.pace.next(now.elapsed));
                return;
            }
            Err(unusable) => {
                let failure = Failure { kind: FailureKind::Garbage, text: report(&unusable) };
                return self.poll_failed(now, context, failure);
            }
        };
        if view.scan_number > self.scans {
            self.scans = view.scan_number;
            // Whatever was refused was asked for upon another scan.
            self.call_again = None;
        }
        self.ask_all = false;
        self.claims.polled();
        self.reach = Reach::Good;
        self.polls_failed = 0;
        self.answered = now.elapsed;
        self.last_seen = Some(now.wall);
        self.polling = Polling::Due(self.pace.next(now.elapsed));
        if self
            .pending
            .is_some_and(|pending| ticket >= pending.shown_from || is_shown(pending.purpose, &view))
        {
            self.pending = None;
        }
        if was_paused && view.report.paused.is_none() {
            self.hold.take_if(|hold| hold.status == Status::Held);
        }
        self.view = Some(view);
        self.note_outcome(now, context);
        self.note_fetch(now, context);
    }

    fn poll_failed(&mut self, now: Now, context: &Context<'_>, failure: Failure) {
        self.polls_failed += 1;
        let pause = self.pause(self.polls_failed, context);
        self.polling = Polling::Due(now.elapsed + pause);
        self.ask_all = failure.kind == FailureKind::Garbage;
        self.reach = Reach::Bad(failure);
    }

    fn pause(&self, failures: u32, context: &Context<'_>) -> Duration {
        jittered(doubled(RETRY_FIRST, RETRY_LONGEST, failures), context.jitter)
    }

    fn call_failed(&mut self, now: Now, context: &Context<'_>, purpose: Purpose, failure: Failure) {
        if let Purpose::Ahead(_) = purpose {
            return self.hold_ahead(failure.text, now, context);
        }
        if let Purpose::Limits = purpose {
            return self.not_configured(failure.text);
        }
        if let Purpose::Cleanup = purpose {
            // What was to go may still be there.
            self.cleaned_generation = None;
        }
        self.calls_failed += 1;
        let pause = self.pause(self.calls_failed, context);
        if let Purpose::Commit(id) = purpose {
            if matches!(failure.kind, FailureKind::Braked | FailureKind::Unsent) {
                self.claims.refused();
                self.unsent = Some(id);
            }
            // It may have been carried out, unless it is not even on record.
            if failure.kind != FailureKind::Unsent {
                self.await_end(id);
            }
        }
        match failure.kind {
            FailureKind::Braked => self.calls_failed = 0,
            FailureKind::Unsent => {
                self.call_again = Some((now.elapsed + pause, failure.text));
            }
            // The call may have been carried out; the same call with the same id does no harm.
            FailureKind::Unreachable | FailureKind::Busy | FailureKind::Stale => {
                self.call_again = Some((now.elapsed + pause, failure.text));
            }
            FailureKind::NotFound => {
                self.update = None;
                self.call_again = Some((now.elapsed + pause, failure.text));
            }
            FailureKind::NoSpace
            | FailureKind::Refused
            | FailureKind::Held
            | FailureKind::Garbage => {
                let what = match purpose {
                    Purpose::Scan(_) | Purpose::Limits | Purpose::Cleanup => {
                        self.call_again = Some((now.elapsed + pause, failure.text));
                        return;
                    }
                    Purpose::Fetch(_) | Purpose::Ahead(_) => {
                        (Status::FetchFailed, "would not fetch")
                    }
                    Purpose::Prepare(_) => (Status::UpdateFailed, "would not prepare the update"),
                    Purpose::Commit(_) => (Status::UpdateFailed, "would not carry out the update"),
                };
                let status = match failure.kind {
                    FailureKind::NoSpace => Status::InsufficientSpace,
                    FailureKind::Held => Status::Held,
                    _ => what.0,
                };
                if status == Status::Held {
                    // What is staged stays staged for a while.
                    self.calls_failed = 0;
                } else {
                    (self.update, self.fetch) = (None, None);
                }
                self.hold_back(now, context, status, format!("it {}: {}", what.1, failure.text));
            }
        }
    }

    /// Takes note of how the update ended that this state machine asked for.
    fn note_outcome(&mut self, now: Now, context: &Context<'_>) {
        let Some(update) = self.update else { return };
        let Some(view) = &self.view else { return };
        let Some(last) = view.outcome_of(update.id) else { return };
        let outcome = last.outcome.clone();
        self.end_force(update, &outcome);
        let (status, detail) = match &outcome {
            Outcome::Done => {
                self.done = Some(update.plan);
                self.update = None;
                return;
            }
            // What is staged does not stay so for the whole of a pause: that is no failure.
            Outcome::NotPrepared(_)
                if self.brake.is_some()
                    || self.unsent == Some(update.id)
                    || self.pause_in_words().is_some()
                    || !self.claims.is_granted() =>
            {
                self.update = None;
                return;
            }
            Outcome::NotPrepared(why) => (Status::UpdateFailed, format!("not prepared: {why}")),
            Outcome::RolledBack(why) => {
                (Status::UpdateFailed, format!("failed, and was put back: {why}"))
            }
            Outcome::Stuck(why) => {
                (Status::UpdateStuck, format!("failed, and could not be put back: {why}"))
            }
            // The report itself says so, over restarts, until another update.
            Outcome::Undone(_) => {
                self.update = None;
                return;
            }
        };
        self.update = None;
        self.hold_back(now, context, status, format!("the update {detail}"));
    }

    /// Takes note of how the fetch ended that this state machine asked for.
    fn note_fetch(&mut self, now: Now, context: &Context<'_>) {
        use common::api::subd::FetchFailure;
        let Some(fetch) = self.fetch else { return };
        let Some(view) = &self.view else { return };
        let activity = &view.report.activity;
        if matches!(activity, Activity::Fetching { fetch_id, .. } if *fetch_id == fetch.id) {
            return;
        }
        let Some(last) = view.fetch_of(fetch.id) else { return };
        let (status, detail) = match &last.error {
            None => {
                let planned = self.planned.as_ref().filter(|planned| planned.digest == fetch.plan);
                let missing = planned.map_or(0, |planned| Missing::of(planned, view).count);
                self.fetch = None;
                if missing < fetch.missing {
                    return;
                }
                (Status::FetchFailed, "it fetched, and has no more objects than before".to_owned())
            }
            Some(FetchFailure::InsufficientSpace { need_bytes, free_bytes }) => (
                Status::InsufficientSpace,
                format!("the objects need {}, {} are free", size(*need_bytes), size(*free_bytes)),
            ),
            Some(FetchFailure::Sources(why)) => {
                (Status::FetchFailed, format!("no source gave all objects: {why}"))
            }
            // It was not ordered so; but if it says so it is asked again.
            Some(FetchFailure::GaveWay) => {
                self.fetch = None;
                return;
            }
            Some(FetchFailure::Local(why)) => {
                (Status::FetchFailed, format!("the object cache cannot be written: {why}"))
            }
        };
        self.fetch = None;
        self.hold_back(now, context, status, detail);
    }

    /// Tries nothing more for a while, that grows with each time.
    fn hold_back(&mut self, now: Now, context: &Context<'_>, status: Status, detail: String) {
        let ImageState::Ready(image) = &self.image else { return };
        let pause = if status == Status::Held {
            HELD_PAUSE
        } else {
            self.holds += 1;
            doubled(HOLD_FIRST, HOLD_LONGEST, self.holds)
        };
        self.hold = Some(Hold {
            status,
            detail,
            image: image.digest,
            plan: match status {
                Status::NotConverging => self.planned.as_ref().map(|planned| planned.digest),
                _ => None,
            },
            scan: self.scans,
            since: now.elapsed,
            until: now.elapsed + jittered(pause, context.jitter),
        });
    }

    fn next_ticket(&mut self) -> Ticket {
        self.last_ticket += 1;
        Ticket(self.last_ticket)
    }

    fn next_id(&mut self) -> u64 {
        self.last_id = self.last_id.wrapping_add(1);
        self.last_id
    }

    /// The unsafe plan that waits for an operator, if there is one.
    fn pending_danger(&self) -> Option<&Arc<Planned>> {
        self.planned
            .as_ref()
            .filter(|planned| self.status == Status::UnsafeUpdate && !planned.dangers.is_empty())
    }
}

/// True if `view` shows that the call was carried out.
fn is_shown(purpose: Purpose, view: &View) -> bool {
    match purpose {
        Purpose::Scan(scope) => view.report.scope == scope,
        Purpose::Fetch(id) | Purpose::Ahead(id) => {
            matches!(view.report.activity, Activity::Fetching { fetch_id, .. } if fetch_id == id)
                || view.fetch_of(id).is_some()
        }
        Purpose::Prepare(id) => {
            matches!(
                view.report.activity,
                Activity::Preparing { update_id }
                    | Activity::Prepared { update_id }
                    | Activity::Updating { update_id } if update_id == id
            ) || view.outcome_of(id).is_some()
        }
        Purpose::Commit(id) => {
            matches!(view.report.activity, Activity::Updating { update_id } if update_id == id)
                || view.outcome_of(id).is_some()
        }
        // Nothing waits for it.
        Purpose::Limits | Purpose::Cleanup => true,
    }
}

#[cfg(test)]
pub(crate) mod tests;
