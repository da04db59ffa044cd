//! One machine: the state machine that brings it to its image and keeps it there.
//!
//! [`Sub::step`] takes note of an [`Event`] (`apply_event`), looks at all it knows and decides what is
//! next (`next_effects`). Decisions depend on what is known, not on the way it became known, so lost,
//! repeated and late answers, restarts of the sub and of the dominator need no cases of their own.
//!
//! # Invariants
//!
//! * At most one poll, one reading of the tree, one plan and one call are under way.
//! * No Commit while the brake is on, and none without a claim that is granted (`own_claims`).
//! * No Commit but of an update whose Prepare the sub has accepted and staged, made from the scan
//!   and the image that are still the latest.
//! * Each Commit comes with what it orders, to be put on record first; none while that cannot be.
//!   Recording takes time: what is sent then must still be wanted ([`Sub::still_orders`]).
//! * No call to a machine that the roster has not recognised as the one that is meant.
//! * `synced` means: the plan from a complete scan in the scope of the required image is empty,
//!   and what the last update touched has been scanned since.
// tidy: core

pub mod apply_event;
mod event;
mod explain;
pub mod identity_check;
pub mod limits_sync;
pub mod missing_objects;
pub mod next_effects;
mod orders;
pub mod own_claims;
pub mod prefetch;
mod record;
mod report;
pub mod signature_offer;
mod view;
pub mod what_if;

use core::time::Duration;
use std::sync::Arc;

use api::dominator::Status;
use model::filter::Patterns;
use model::mdb::Machine;
use model::object::ObjectId;
use model::scope::Scope;
use model::tree::{Time, Tree};

pub use crate::core::sub::own_claims::{
    REBOOTING_MACHINE_VANISHED_AFTER, UNUSED_LONGEST, UPDATE_LONGEST, VANISHED_AFTER,
};
pub use crate::core::sub::what_if::WhatIfInput;
pub use event::{Call, Context, Effect, Event, Failure, FailureKind, ImageState, Now, Ticket};
pub use view::{Unusable, View};

use crate::core::sub::identity_check::IdentityCheck;
use crate::core::sub::limits_sync::LimitsSync;
use crate::core::sub::own_claims::OwnClaims;
use crate::core::sub::prefetch::Prefetch;
use crate::core::sub::signature_offer::SignatureOffer;
use orders::Orders;
use record::Awaited;

use super::identity::Origins;
use crate::core::status_history::StatusHistory;
use crate::core::timing::{HOLD_FIRST, PollPace};
use api::planning::{PlanKey, Planned};

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
enum CallPurpose {
    Scan(Scope),
    Limits,
    Fetch(u64),
    Prefetch(u64),
    Prepare(u64),
    Commit(u64),
    Cleanup,
    OfferSignatures,
}

/// A call that was accepted, and that no poll has shown yet.
#[derive(Clone, Copy, Debug)]
struct Pending {
    purpose: CallPurpose,
    /// A poll with this ticket or a later one was sent after the call was accepted: if it does
    /// not show the call, then the call was lost.
    shown_from: Ticket,
}

/// The update that is wanted, under the id by which the sub knows it.
#[derive(Clone, Copy, Debug)]
struct WantedUpdate {
    id: u64,
    key: PlanKey,
    instance: u64,
    plan: ObjectId,
}

/// The fetch that is wanted, under the id by which the sub knows it.
#[derive(Clone, Copy, Debug)]
struct WantedFetch {
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
    prefetch: Prefetch,
    limits_sync: LimitsSync,
    claims: OwnClaims,
    brake: Option<Arc<str>>,
    /// Why nothing can be put on record.
    unrecordable: Option<Arc<str>>,

    last_ticket: u64,
    last_id: u64,

    reach: Reach,
    identity: IdentityCheck,
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

    calling: Option<(Ticket, CallPurpose)>,
    pending: Option<Pending>,
    call_again: Option<(Duration, String)>,
    calls_failed: u32,

    update: Option<WantedUpdate>,
    /// The update whose last Commit was not sent: what was staged for it may go without harm.
    unsent: Option<u64>,
    fetch: Option<WantedFetch>,
    done: Option<ObjectId>,
    hold: Option<Hold>,
    holds: u32,
    cleared: Option<ObjectId>,
    /// The update that failed its health check, and whose image an operator wants once more.
    retried: Option<u64>,
    orders: Orders,
    cleaned_generation: Option<u64>,
    /// What the machine is being shown, and what it has seen, of the signatures of its image.
    offering: Option<SignatureOffer>,
    offered: Option<SignatureOffer>,
    awaited: Option<Awaited>,

    status: Status,
    detail: String,
    since: Time,
    history: StatusHistory,
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
            prefetch: Prefetch::default(),
            limits_sync: LimitsSync::default(),
            claims: OwnClaims::default(),
            brake: None,
            unrecordable: None,
            last_ticket: 0,
            last_id: first_id,
            reach: Reach::Unknown,
            identity: IdentityCheck::default(),
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
            offering: None,
            offered: None,
            awaited: None,
            status: Status::Connecting,
            detail: "not reached yet".to_owned(),
            since: now.wall,
            history: StatusHistory::default(),
            answered: now.elapsed,
            last_seen: None,
            last_synced: None,
            wake: Some(now.elapsed),
        }
    }

    /// Takes note of `event` and says what to do.
    pub fn step(&mut self, now: Now, event: Event, context: &Context<'_>) -> Vec<Effect> {
        self.apply_event(now, event, context);
        let mut effects = Vec::new();
        self.next_effects(now, context, &mut effects);
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
        self.clear_failures();
        true
    }

    /// Lets what failed be tried again, and an image whose health check failed be offered once
    /// more; the next step acts on it. False if nothing is held back for such a reason. For callers
    /// that must tell an operator; others use [`Event::Retried`].
    #[must_use]
    pub fn retry(&mut self) -> bool {
        let is_held = self.can_retry();
        self.retried = self.undone_update().or(self.retried);
        self.clear_failures();
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

#[cfg(test)]
pub(crate) mod tests;
