//! The state machine of one machine: brings it to its image and keeps it there.
//!
//! [`Sub::step`] applies an [`Event`] to what is known (`apply_event`), and then decides what to do
//! (`next_effects`). Decisions depend only on what is known, not on the order in which it became
//! known. So lost, repeated and late answers, and restarts of the sub and of the dominator, need no
//! code of their own.
//!
//! # Invariants
//!
//! * At most one poll, one reading of the tree, one plan and one call are under way.
//! * No Commit while the brake is on, and none without a granted claim (`claims`).
//! * A Commit is sent only for an update whose Prepare the sub has accepted and staged, and which
//!   was made from the latest scan and image.
//! * Each Commit comes with the update that it orders, which is recorded first. Without a record no
//!   Commit is sent. Recording takes time, so before sending it is checked that the update is still
//!   wanted ([`Sub::is_commit_wanted`]).
//! * No Commit before plugins have made the resources of the image (`provisioning`).
//! * A machine gets no call before its identity was checked: another machine may answer.
//! * A machine gets no orders while another dominator holds it (`holding`).
//! * `synced` means: the plan from a complete scan in the scope of the required image is empty, no
//!   path is blocked, and all paths that the last update changed have been scanned since.
// tidy: core

mod blocked;
mod calls;
mod claims;
mod computed;
mod event;
mod explain;
mod holding;
mod identity_check;
mod known_tree;
mod next_effects;
mod orders;
mod plans;
mod polls;
mod prefetch;
mod provisioning;
mod report;
mod room;
mod status_texts;
mod target;
mod tasks;
mod undone;
mod updates;

use core::ops::ControlFlow::{self, Break};
use core::time::Duration;
use std::sync::Arc;

use api::dominator::Status;
use api::planning::Planned;
use model::image::required::RequiredImage;
use model::mdb::Machine;

pub use claims::{
    REBOOTING_MACHINE_VANISHED_AFTER, UNUSED_LONGEST, UPDATE_LONGEST, VANISHED_AFTER,
};
pub use event::{
    Call, ContentsToSign, Context, Effect, Event, Failure, FailureKind, ImageState, RequestId,
    SubOrder, TaskEffect,
};
pub use polls::View;
pub use report::PreviewInput;
pub use undone::UndoneUpdate;

use blocked::BlockedPaths;
use calls::{Calls, LimitsSync, SignatureOffer};
use claims::SubClaims;
use computed::ComputedContent;
use holding::Holding;
use identity_check::IdentityCheck;
use orders::Orders;
use plans::{KnownScope, Planning, Trees};
use polls::{Polling, Polls};
use prefetch::Prefetch;
use provisioning::Provisioning;
use report::{ShownStatus, StatusHistory};
use room::Room;
use target::Leaving;
use tasks::Tasks;
use undone::UndoneUpdates;
use updates::{Fetching, Updates};

use crate::core::timing::{Attempt, Now};

/// A status with its detail.
type StatusAndDetail = (Status, String);

/// Continues with `T`, or stops with a status.
type Check<T> = ControlFlow<StatusAndDetail, T>;

fn stop<T>(status: Status, detail: impl Into<String>) -> Check<T> {
    Break((status, detail.into()))
}

/// The inputs and the effects of one step.
struct Step<'a> {
    now: Now,
    context: &'a Context<'a>,
    effects: Vec<Effect>,
}

/// The state machine of one machine. What few machines have at one time is boxed, because each of
/// them reserves the memory of all fields.
#[derive(Debug)]
pub struct Sub {
    machine: Arc<Machine>,
    image: ImageState,
    brake: Option<Arc<str>>,
    /// Why nothing can be recorded in the history.
    history_error: Option<Arc<str>>,
    last_request_id: u64,
    /// The last id given to an update or a fetch.
    last_id: u64,

    polls: Polls,
    identity: IdentityCheck,
    view: Option<View>,
    /// The number of different scans that were reported.
    scans: u64,
    trees: Trees,
    plan: Planning,
    known_scope: Option<KnownScope>,

    calls: Calls,
    holding: Holding,
    limits: LimitsSync,
    claims: SubClaims,
    orders: Orders,
    offer: SignatureOffer,
    fetch: Option<Fetching>,
    updates: Updates,
    undone: UndoneUpdates,
    /// The image at which the machine is kept instead of the required one.
    kept: Option<Arc<RequiredImage>>,
    leaving: Leaving,
    computed: ComputedContent,
    blocked: BlockedPaths,
    room: Option<Box<Room>>,
    tasks: Tasks,
    prefetch: Prefetch,
    provisioning: Provisioning,
    /// The generation in which the object cache was last cleaned up.
    cleaned_generation: Option<u64>,

    shown: ShownStatus,
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
            history_error: None,
            last_request_id: 0,
            last_id: first_id,
            polls: Polls::new(now.elapsed),
            identity: IdentityCheck::default(),
            view: None,
            scans: 0,
            trees: Trees::default(),
            plan: Planning::default(),
            known_scope: None,
            calls: Calls::default(),
            holding: Holding::default(),
            limits: LimitsSync::default(),
            claims: SubClaims::default(),
            orders: Orders::new(first_id),
            offer: SignatureOffer::default(),
            fetch: None,
            updates: Updates::default(),
            undone: UndoneUpdates::default(),
            kept: None,
            leaving: Leaving::default(),
            computed: ComputedContent::default(),
            blocked: BlockedPaths::default(),
            room: None,
            tasks: Tasks::default(),
            prefetch: Prefetch::default(),
            provisioning: Provisioning::default(),
            cleaned_generation: None,
            shown: ShownStatus {
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
        let mut step = Step { now, context, effects: Vec::new() };
        self.apply_event(event, &mut step);
        self.next_effects(&mut step);
        step.effects
    }

    /// When [`Event::Wake`] is needed if no other event comes before, on the clock of
    /// [`Now::elapsed`].
    #[must_use]
    pub fn wake_at(&self) -> Option<Duration> {
        self.wake
    }

    /// Applies `event` to what is known. What follows from it is decided afterwards.
    fn apply_event(&mut self, event: Event, step: &mut Step<'_>) {
        match event {
            Event::Assigned { machine, image, planned, rollback } => {
                self.orders.rollback = rollback;
                if self.prefetch.set_image(planned) {
                    // The cache must now keep other objects.
                    self.cleaned_generation = None;
                }
                self.assign(machine, image, &mut step.effects);
            }
            Event::Brake(brake) => {
                if brake.is_none() && self.brake.is_some() {
                    self.clear_failures();
                }
                self.brake = brake;
            }
            Event::HistoryFailing(error) => self.history_error = error,
            Event::Ordered(order) => {
                step.effects.push(Effect::OrderAnswered(self.take_order(order)));
            }
            Event::IdentityJudged(verdict) => self.identity.take(verdict),
            Event::DefaultImage(default) => self.orders.default = default,
            Event::Scanned(request_id, result) => self.take_scan_answer(request_id, result),
            Event::Polled(request_id, reply) => {
                if self.polls.next == Polling::UnderWay(request_id) {
                    self.polled(request_id, *reply, step);
                }
            }
            Event::PollFailed(request_id, failure) => {
                if self.polls.next == Polling::UnderWay(request_id) {
                    self.poll_failed(failure, step);
                }
            }
            Event::TreeRead(request_id, tree, refused) => {
                self.take_tree(request_id, tree, refused);
            }
            Event::FormerRead(request_id, image) => self.blocked.take_former(request_id, image),
            Event::LeavingRead(request_id, image) => self.take_leaving(request_id, image, step),
            Event::TreeFailed(request_id, failure) => {
                self.trees.failed(request_id, failure, step);
            }
            Event::ResourcesRead(request_id, result) => {
                self.take_resources(request_id, *result, step);
            }
            Event::ComputedKnown(known) => self.take_computed(*known),
            Event::Planned(request_id, result) => {
                if !self.prefetch.plan.take(request_id, &result) {
                    self.take_plan(request_id, &result);
                }
            }
            Event::Accepted(request_id) => {
                if let Some(purpose) = self.calls.answered(request_id) {
                    self.call_accepted(purpose, step);
                }
            }
            Event::CallFailed(request_id, failure) => {
                if let Some(purpose) = self.calls.answered(request_id) {
                    self.call_failed(purpose, failure, step);
                }
            }
            Event::TasksTold(request_id, answer) => self.take_tasks(request_id, *answer, step),
            Event::Claimed(purpose, answer) => self.claims.answered(purpose, answer, step.now),
            Event::Wake => {}
        }
    }

    fn assign(&mut self, machine: Arc<Machine>, image: ImageState, effects: &mut Vec<Effect>) {
        let is_other_image = self.image.digest() != image.digest();
        let is_other_record = self.machine != machine;
        if is_other_record {
            self.machine = machine;
            self.clear_failures();
        }
        if !self.image.is_signed_as(&image) {
            self.clear_failures();
        }
        if is_other_image {
            self.clear_failures();
            self.updates.done = None;
            self.updates.approved_plan = None;
            self.orders.forced_plan = None;
            self.blocked.image_changed();
            self.provisioning.image_changed();
            self.kept = None;
            self.leaving = Leaving::default();
        }
        self.image = image;
        if is_other_image || is_other_record {
            self.want_computed(effects);
        }
    }

    /// Forgets that something failed, so that it is tried again at once.
    fn clear_failures(&mut self) {
        self.updates.hold = None;
        self.updates.failures = 0;
        self.calls.attempt = Attempt::default();
        self.holding.ask_again();
        self.provisioning.clear_failures();
    }

    fn wake_by(&mut self, at: Duration) {
        self.wake = Some(self.wake.map_or(at, |wake| wake.min(at)));
    }

    fn next_request_id(&mut self) -> RequestId {
        self.last_request_id += 1;
        RequestId(self.last_request_id)
    }

    fn next_id(&mut self) -> u64 {
        self.last_id = self.last_id.wrapping_add(1);
        self.last_id
    }

    /// The unsafe plan that waits for the approval of an operator.
    fn unsafe_plan(&self) -> Option<&Arc<Planned>> {
        self.plan.made.as_ref().filter(|planned| {
            self.shown.status == Status::UnsafeUpdate && !planned.dangers.is_empty()
        })
    }
}

#[cfg(test)]
pub(crate) mod tests;
