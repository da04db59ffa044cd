//! One machine: the state machine that brings it to its image and keeps it there.
//!
//! [`Sub::step`] applies an [`Event`] to what it knows (`apply_event`), and decides what is next
//! (`next_effects`). Decisions depend on what is known, not on the way it became known, so lost,
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
//! * No call to a machine whose identity was not checked: it may be another one than is meant.
//! * `synced` means: the plan from a complete scan in the scope of the required image is empty,
//!   and what the last update touched has been scanned since.
// tidy: core

mod apply_event;
mod calls;
mod event;
mod explain;
mod identity_check;
mod limits_sync;
mod missing_objects;
mod next_effects;
mod orders;
mod own_claims;
mod plans;
mod polls;
mod prefetch;
mod report;
mod signature_offer;
mod updates;
mod view;
mod what_if;

use core::time::Duration;
use std::sync::Arc;

use api::dominator::Status;
use api::planning::Planned;
use model::mdb::Machine;

pub use event::{Call, Context, Effect, Event, Failure, FailureKind, ImageState, SubOrder, Ticket};
pub use own_claims::{
    REBOOTING_MACHINE_VANISHED_AFTER, UNUSED_LONGEST, UPDATE_LONGEST, VANISHED_AFTER,
};
pub use view::{Unusable, View};
pub use what_if::WhatIfInput;

use calls::{CallPurpose, Calls};
use identity_check::IdentityCheck;
use limits_sync::LimitsSync;
use orders::Orders;
use own_claims::OwnClaims;
use plans::{KnownScope, Planning, Trees};
use polls::{Polling, Polls, Reach};
use prefetch::Prefetch;
use report::Shown;
use signature_offer::SignatureOffer;
use updates::{Fetching, Updates, WantedUpdate};

use crate::core::status_history::StatusHistory;
use crate::core::timing::Now;

/// The numbers that were given out last.
#[derive(Debug)]
struct Numbers {
    ticket: u64,
    /// Of an update or a fetch.
    id: u64,
}

/// The state machine of one machine.
#[derive(Debug)]
pub struct Sub {
    machine: Arc<Machine>,
    image: ImageState,
    brake: Option<Arc<str>>,
    /// Why nothing can be put on record.
    history_trouble: Option<Arc<str>>,
    numbers: Numbers,

    polls: Polls,
    identity: IdentityCheck,
    view: Option<View>,
    /// How many scans that differ have been seen.
    scans: u64,
    trees: Trees,
    plan: Planning,
    known_scope: Option<KnownScope>,

    calls: Calls,
    limits: LimitsSync,
    claims: OwnClaims,
    orders: Orders,
    offer: SignatureOffer,
    fetch: Option<Fetching>,
    updates: Updates,
    prefetch: Prefetch,
    /// The generation in which the object cache was last cleaned up.
    cleaned_generation: Option<u64>,

    shown: Shown,
    wake: Option<Duration>,
}

impl Sub {
    /// Starts with a machine of which nothing is known. Ids of updates and fetches count upwards
    /// from `first_id`, which no other run of the dominator may use for this machine.
    #[must_use]
    pub fn new(machine: Arc<Machine>, first_id: u64, now: Now) -> Self {
        Self {
            machine,
            image: ImageState::Undefined,
            brake: None,
            history_trouble: None,
            numbers: Numbers { ticket: 0, id: first_id },
            polls: Polls::new(now.elapsed),
            identity: IdentityCheck::default(),
            view: None,
            scans: 0,
            trees: Trees::default(),
            plan: Planning::default(),
            known_scope: None,
            calls: Calls::default(),
            limits: LimitsSync::default(),
            claims: OwnClaims::default(),
            orders: Orders::new(first_id),
            offer: SignatureOffer::default(),
            fetch: None,
            updates: Updates::default(),
            prefetch: Prefetch::default(),
            cleaned_generation: None,
            shown: Shown {
                status: Status::Connecting,
                detail: "not reached yet".to_owned(),
                since: now.wall,
                history: StatusHistory::default(),
                last_synced: None,
            },
            wake: Some(now.elapsed),
        }
    }

    /// Applies `event`, and returns what to do.
    pub fn step(&mut self, now: Now, event: Event, context: &Context<'_>) -> Vec<Effect> {
        let mut effects = Vec::new();
        self.apply_event(now, event, context, &mut effects);
        self.next_effects(now, context, &mut effects);
        effects
    }

    /// When [`Event::Wake`] is wanted, if nothing else happens before; on the clock of
    /// [`Now::elapsed`].
    #[must_use]
    pub fn wake_at(&self) -> Option<Duration> {
        self.wake
    }

    /// The update to the required image that failed its health check, unless it was retried.
    fn undone_update(&self) -> Option<u64> {
        let (ImageState::Ready(image), Some(view)) = (&self.image, &self.view) else { return None };
        let (update, _) = view.undone(image.name())?;
        Some(update.update_id).filter(|&id| self.updates.retried != Some(id))
    }

    fn next_ticket(&mut self) -> Ticket {
        self.numbers.ticket += 1;
        Ticket(self.numbers.ticket)
    }

    fn next_id(&mut self) -> u64 {
        self.numbers.id = self.numbers.id.wrapping_add(1);
        self.numbers.id
    }

    /// The unsafe plan that waits for an operator, if there is one.
    fn pending_danger(&self) -> Option<&Arc<Planned>> {
        self.plan.made.as_ref().filter(|planned| {
            self.shown.status == Status::UnsafeUpdate && !planned.dangers.is_empty()
        })
    }
}

#[cfg(test)]
pub(crate) mod tests;
