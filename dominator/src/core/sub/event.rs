//! What can happen to a sub, and what can be done about it.
// tidy: core

use core::time::Duration;
use std::sync::Arc;

use api::dominator::Status;
use api::dominator::orders::{DefaultImage, UpdatePause};
use api::subd::{
    CleanupRequest, FetchRequest, OfferImageRequest, Outcome, PollReply, PollRequest,
    PrepareRequest, SetConfigurationRequest, Version,
};
use model::mdb::Machine;
use model::object::ObjectId;
use model::tree::{Time, Tree};

use crate::core::changes::Ordered;
use crate::core::claims::{Claim, ClaimAnswer, ClaimKind, Release};
use crate::core::identity::{IdentityReport, IdentityVerdict};
use api::planning::{PlanJob, Planned};
use model::image::required::RequiredImage;

/// The time, as the shell read it or the simulation made it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Now {
    /// Time since some fixed moment; never goes back.
    pub elapsed: Duration,
    /// The time of day, for people.
    pub wall: Time,
}

/// What a decision needs beside the state of the sub.
#[derive(Clone, Copy, Debug)]
pub struct Context<'a> {
    /// A number from 0 to 999, drawn for each event.
    pub jitter: u16,
    /// `host:port` of the object servers that this sub fetches from.
    pub sources: &'a [String],
}

/// Ties an answer to its question: an answer to another question than the last is late, and is
/// ignored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(pub u64);

/// The image that a machine must have, as far as it is known.
#[derive(Clone, Debug)]
pub enum ImageState {
    /// None is required.
    Undefined,
    /// It is not at hand, and why.
    Missing(Arc<str>),
    /// It is at hand.
    Ready(Arc<RequiredImage>),
}

impl ImageState {
    /// The digest of the image, if it is at hand.
    #[must_use]
    pub fn digest(&self) -> Option<ObjectId> {
        match self {
            Self::Ready(image) => Some(image.digest),
            Self::Undefined | Self::Missing(_) => None,
        }
    }
}

/// Why a question was not answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// What to do about it.
    pub kind: FailureKind,
    /// In words.
    pub text: String,
}

/// The kinds of failure that differ in what is done about them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureKind {
    /// There was no connection, or no answer in time. The call may have been carried out.
    Unreachable,
    /// The answer made no sense.
    Garbage,
    /// The sub is busy, or cannot do it now.
    Busy,
    /// The sub has changed since it was looked at.
    Stale,
    /// What the call was about does not exist.
    NotFound,
    /// There is no space left.
    NoSpace,
    /// The sub refused.
    Refused,
    /// The sub is of a release that does not know the call.
    NoMethod,
    /// The machine takes only signed images, and this is not one, or the plan does something else.
    Untrusted,
    /// The machine does not allow it for now: it is paused, or guarded from disruption.
    Held,
    /// The brake was pulled, the machine paused, leave taken back, or something else wanted, before
    /// the Commit was sent or while it was on its way.
    Braked,
    /// The Commit was not sent, because what it orders cannot be put on record.
    Unsent,
}

/// A call that changes something on the sub, beside the Commit ([`Effect::Commit`]). At most one is
/// under way, the Commit included.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Call {
    /// Tells the sub how to scan.
    SetConfiguration(SetConfigurationRequest),
    /// Starts to get objects.
    Fetch(FetchRequest),
    /// Stages an update.
    Prepare(Box<PrepareRequest>),
    /// Takes objects out of the cache.
    Cleanup(CleanupRequest),
    /// Shows the sub who has signed an image.
    Offer(Box<OfferImageRequest>),
}

impl Call {
    /// The word for logs.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::SetConfiguration(_) => "set-configuration",
            Self::Fetch(_) => "fetch",
            Self::Prepare(_) => "prepare",
            Self::Cleanup(_) => "cleanup",
            Self::Offer(_) => "offer-image",
        }
    }
}

/// What happened.
#[derive(Clone, Debug)]
pub enum Event {
    /// The record of the machine, or the state of its image, is this now.
    Assigned {
        /// The record.
        machine: Arc<Machine>,
        /// The image that it must have.
        image: ImageState,
        /// The image that it will get next.
        planned: ImageState,
    },
    /// The brake is on, for this reason, or off.
    Brake(Option<Arc<str>>),
    /// Nothing can be put on record, for this reason, or it can again: what cannot is not ordered.
    HistoryTrouble(Option<Arc<str>>),
    /// The operator lets the pending unsafe update pass.
    SafetyCleared,
    /// The operator wants what failed to be tried again now.
    Retried,
    /// The roster has judged whether the machine is the one that is meant.
    IdentityJudged(IdentityVerdict),
    /// An operator has paused the updates of the machine, or lets them go on. A pause ends by
    /// itself, by [`Now::wall`].
    Pause(Option<Arc<UpdatePause>>),
    /// This is the image of machines whose record names none; [`Event::Assigned`] follows.
    DefaultImage(Option<Arc<DefaultImage>>),
    /// The operator wants the pending plan carried out even if the machine does not want to be
    /// disturbed.
    Forced,
    /// The operator wants the machine brought up to date now.
    Hurried,
    /// The machine has scanned, and its report of this version or a later one has what it found; or
    /// it cannot scan at once.
    Scanned(Ticket, Result<Version, Failure>),
    /// The sub answered a poll.
    Polled(Ticket, Box<PollReply>),
    /// The sub did not answer a poll.
    PollFailed(Ticket, Failure),
    /// The tree was read.
    TreeRead(Ticket, Tree),
    /// The tree was not read.
    TreeFailed(Ticket, Failure),
    /// The plan was made, or could not be made and why.
    Planned(Ticket, Result<Arc<Planned>, String>),
    /// The sub accepted the call.
    Accepted(Ticket),
    /// The call failed, or nobody knows.
    CallFailed(Ticket, Failure),
    /// The answer to the last claim for this, or another answer than before.
    Claimed(ClaimKind, ClaimAnswer),
    /// The time that [`super::Sub::wake_at`] asked for has come, or nothing happened at all.
    Wake,
}

/// What to do. Each that has a ticket is answered by exactly one event with it.
#[derive(Clone, Debug)]
pub enum Effect {
    /// Poll the sub.
    Poll(Ticket, PollRequest),
    /// Read the tree with this digest.
    ReadTree(Ticket, ObjectId),
    /// Make a plan.
    Plan(Ticket, Box<PlanJob>),
    /// Call the sub.
    Call(Ticket, Call),
    /// Have the sub carry out the update that it has staged; never while the brake is on. What is
    /// ordered must be on record before the Commit is sent, and [`super::Sub::still_orders`] is
    /// asked between the two.
    Commit(Ticket, Box<Ordered>),
    /// Tell the roster. [`IdentityReport::Seen`] is answered by [`Event::IdentityJudged`], which also comes by
    /// itself.
    ReportIdentity(IdentityReport),
    /// Have the sub look at its whole tree at once, and wait until it has; this was its version.
    Scan(Ticket, Version),
    /// Ask for leave; [`Event::Claimed`] comes with the answer, unless it is for what is under way,
    /// and again when the answer changes.
    Claim(Claim),
    /// This is not needed any more.
    Release(Release),
    /// It is known now what the machine is doing, or that it does not answer.
    ActivityKnown,
    /// The status has changed to this.
    StatusChanged(Status, String),
    /// The update with this id, of which a Commit was sent, ended so. May be told again, and
    /// otherwise: an update that was done may be undone.
    UpdateEnded(u64, Outcome),
}
