//! The events that the state machine of one machine takes, and the effects that it returns.
// tidy: core

use std::sync::Arc;

use api::dominator::Status;
use api::dominator::orders::{DefaultImage, StoppedImage, UpdatePause};
use api::dominator::rollback::Rollback;
use api::dominator::tasks::WantedTaskOrder;
use api::subd::{
    CleanupRequest, ContinueProvisioningRequest, FetchRequest, GetResourcesReply,
    GetResourcesRequest, GetTaskStatesReply, GetTaskStatesRequest, GiveUpProvisioningRequest,
    Limits, OfferImageRequest, OrderTaskRequest, PollReply, PollRequest, PrepareRequest,
    ProvisionRequest, SetConfigurationRequest, SetNotRestartedRequest, SubVersion, UpdateOutcome,
};
use model::image::{ComputedRule, ImageName};
use model::mdb::Machine;
use model::object::ObjectId;
use model::plan::RefusedChanges;
use model::tree::Tree;
use rollouts::gate::InactiveParts;

use crate::core::changes::OrderedUpdate;
use crate::core::claims::{Claim, ClaimAnswer, ClaimKind, Release};
use crate::core::computed::KnownFiles;
use crate::core::computed::rollout::ContentReport;
use crate::core::identity::{IdentityReport, IdentityVerdict};
use crate::core::tasks::TaskEvent;
use api::planning::{PlanJob, Planned};
use model::image::required::RequiredImage;

/// The inputs of a decision that are not part of the state.
#[derive(Clone, Copy, Debug)]
pub struct Context<'a> {
    /// A random number from 0 to 999, new for each event.
    pub jitter: u16,
    /// The object servers from which this sub fetches, as `host:port`.
    pub sources: &'a [String],
    /// The images to which updates have stopped.
    pub stopped: &'a [StoppedImage],
}

/// Identifies a request of the state machine. The answer carries the same id; an answer to an
/// earlier request than the last is ignored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct RequestId(pub u64);

/// What is known of the image that a machine must have.
#[derive(Clone, Debug, Default)]
pub enum ImageState {
    /// No image is required.
    #[default]
    Undefined,
    /// The image is not available, for this reason.
    Missing(Arc<str>),
    /// The image is available.
    Ready(Arc<RequiredImage>),
}

impl ImageState {
    /// The image, if it is available.
    #[must_use]
    pub fn ready(&self) -> Option<&Arc<RequiredImage>> {
        match self {
            Self::Ready(image) => Some(image),
            Self::Undefined | Self::Missing(_) => None,
        }
    }

    /// True if `other` has the same signatures; an image that is not available has none.
    #[must_use]
    pub fn is_signed_as(&self, other: &Self) -> bool {
        match (self.ready(), other.ready()) {
            (Some(own), Some(other)) => own.is_signed_as(other),
            (own, other) => {
                let mut parts = own.or(other).into_iter().flat_map(|image| image.signed_parts());
                parts.all(|part| part.signatures.is_empty())
            }
        }
    }

    /// The digest of the image, if it is available.
    #[must_use]
    pub fn digest(&self) -> Option<ObjectId> {
        self.ready().map(|image| image.digest)
    }
}

/// Why a request failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    pub kind: FailureKind,
    pub text: String,
}

/// The kinds of failure to which the state machine reacts differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureKind {
    /// There was no connection, or no answer in time. The sub may have carried out the call.
    Unreachable,
    /// The answer is invalid.
    InvalidReply,
    /// The sub is busy with something else.
    Busy,
    /// The sub cannot carry out the call now, such as because its disk fails.
    Unavailable,
    /// The tree or the cache of the sub has changed since it was polled.
    Stale,
    /// The object of the call does not exist.
    NotFound,
    /// The disk of the sub is full.
    NoSpace,
    /// The sub refused the call.
    Refused,
    /// The release of the sub does not have this method.
    NoMethod,
    /// The machine accepts only signed images, and the image is not signed or the plan differs from
    /// it.
    Untrusted,
    /// The machine does not allow the update now: it is paused, or protected from disruption.
    Held,
    /// The Commit was cancelled before or while it was sent: updates were disabled or paused, the
    /// claim was withdrawn, or another update is wanted.
    Cancelled,
    /// The Commit was not sent, because the update cannot be recorded in the history.
    NotRecorded,
}

/// A call that changes something on the sub, except the Commit ([`Effect::Commit`]). At most one
/// call is under way, including the Commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Call {
    /// Sets the scan filter, or the limits, of the sub.
    SetConfiguration(SetConfigurationRequest),
    /// Starts to fetch objects.
    Fetch(FetchRequest),
    /// Stages an update, after this content was signed.
    Prepare(Box<PrepareRequest>, Option<Box<ContentsToSign>>),
    /// Removes objects from the cache.
    Cleanup(CleanupRequest),
    /// Holds the machine for this dominator.
    Hold,
    /// Sends the signatures of an image.
    Offer(Box<OfferImageRequest>),
    /// Runs the triggers again that failed.
    RetryTriggers,
    /// Puts this content of computed files into the cache.
    AddObjects(Arc<[ObjectId]>),
    /// Has plugins make the resources of the staged update.
    Provision(ProvisionRequest),
    /// Has plugins go on with them.
    ContinueProvisioning(ContinueProvisioningRequest),
    /// Has the machine give up the resources of an image that is not to come any more.
    GiveUpProvisioning(GiveUpProvisioningRequest),
    /// Gives an order about a daemon task.
    OrderTask(OrderTaskRequest),
    SetNotRestarted(SetNotRestartedRequest),
}

impl Call {
    /// The name of the call in logs.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::SetConfiguration(_) => "set-configuration",
            Self::Fetch(_) => "fetch",
            Self::Prepare(..) => "prepare",
            Self::Cleanup(_) => "cleanup",
            Self::Hold => "hold-machine",
            Self::Offer(_) => "offer-image",
            Self::RetryTriggers => "retry-triggers",
            Self::AddObjects(_) => "add-objects",
            Self::Provision(_) => "provision",
            Self::ContinueProvisioning(_) => "continue-provisioning",
            Self::GiveUpProvisioning(_) => "give-up-provisioning",
            Self::OrderTask(_) => "order-task",
            Self::SetNotRestarted(_) => "set-not-restarted",
        }
    }
}

/// The content of the computed files of a machine, for an image that names signers of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContentsToSign {
    pub hostname: String,
    pub files: Vec<(Arc<ComputedRule>, ObjectId)>,
}

/// An order of an operator about one machine. [`Effect::OrderAnswered`] says whether it had an
/// effect.
#[derive(Clone, Debug)]
pub enum SubOrder {
    /// Approves the pending unsafe update and no other.
    ClearSafety,
    /// Tries again at once what failed, including an image whose health check failed.
    Retry,
    /// Carries out the pending plan once, even if the machine does not allow disruptive updates.
    ForceDisruptive,
    /// Installs the required image without what is blocked.
    GoOn,
    /// Updates the machine now: polls it, has it scan, and tries again what failed.
    FastUpdate,
    /// Pauses the updates of the machine, or ends the pause. A pause ends by itself, by the time of
    /// [`Now::wall`](crate::core::timing::Now::wall).
    Pause(Option<Arc<UpdatePause>>),
    /// Sets the limits of the sub.
    SetLimits(Limits),
    /// Sets the orders about tasks that the machine is to take.
    WantTaskOrders(Vec<WantedTaskOrder>),
    /// Sets the parts of the image that come from environments which are not active.
    SetInactive(InactiveParts),
}

/// What happened.
#[derive(Clone, Debug)]
pub enum Event {
    /// The record of the machine, or the state of its image, has changed to this.
    Assigned {
        machine: Arc<Machine>,
        image: ImageState,
        /// The image that the machine will get next.
        planned: ImageState,
        /// The rollback of the machine, if an operator has ordered one.
        rollback: Option<Arc<Rollback>>,
    },
    /// The brake is on for this reason, or off.
    Brake(Option<Arc<str>>),
    /// The history cannot be written for this reason, or can be written again. What cannot be
    /// recorded is not ordered.
    HistoryFailing(Option<Arc<str>>),
    /// An operator gave an order. The first effect is [`Effect::OrderAnswered`].
    Ordered(SubOrder),
    /// The identity table has decided whether the right machine answers.
    IdentityJudged(IdentityVerdict),
    /// The default image has changed to this. [`Event::Assigned`] follows.
    DefaultImage(Option<Arc<DefaultImage>>),
    /// The machine has scanned: its report of this version, or a later one, contains the result. Or
    /// it cannot scan at once.
    Scanned(RequestId, Result<SubVersion, Failure>),
    /// The sub answered a poll.
    Polled(RequestId, Box<PollReply>),
    /// The sub did not answer a poll.
    PollFailed(RequestId, Failure),
    /// The tree was read, and the changes that the machine refuses; `None` if its release does not
    /// tell.
    TreeRead(RequestId, Tree, Option<Arc<RefusedChanges>>),
    /// The tree was not read.
    TreeFailed(RequestId, Failure),
    /// The former image was loaded; `None` if it cannot be.
    FormerRead(RequestId, Option<Arc<RequiredImage>>),
    /// The image with the bundles that leave was made; the error says why it cannot be now.
    LeavingRead(RequestId, Result<Arc<RequiredImage>, String>),
    /// What the machine says of its resources.
    ResourcesRead(RequestId, Box<Result<GetResourcesReply, Failure>>),
    /// What is known of the computed files of the machine.
    ComputedKnown(Box<KnownFiles>),
    /// The plan was made, or could not be made for this reason.
    Planned(RequestId, Result<Arc<Planned>, String>),
    /// The sub accepted the call.
    Accepted(RequestId),
    /// The call failed, or it is not known whether it did.
    CallFailed(RequestId, Failure),
    /// The machine has answered how its tasks are.
    TasksTold(RequestId, Box<Result<GetTaskStatesReply, Failure>>),
    /// The answer to the last claim of this kind, or a change of that answer.
    Claimed(ClaimKind, ClaimAnswer),
    /// The time of [`super::Sub::wake_at`] has come.
    Wake,
}

/// What the shell must do. An effect with a request id is answered by exactly one event with the
/// same id.
#[derive(Clone, Debug)]
pub enum Effect {
    /// Answers [`Event::Ordered`]: true if the order had an effect.
    OrderAnswered(bool),
    /// Polls the sub. A request without a wait is for a sub that did not answer the last one; the
    /// shell limits how many of these it sends.
    Poll(RequestId, PollRequest),
    /// Reads the tree with this digest, and the changes that the machine refuses. The tree that it
    /// had before may be known, or this tree itself.
    ReadTree(RequestId, ObjectId, Option<Tree>),
    /// Loads an image that the machine had before.
    ReadFormer(RequestId, ImageName),
    /// Have the image made together with the bundles of a former one that leave.
    ReadLeaving(RequestId, Arc<RequiredImage>, ImageName),
    /// Asks the machine how its resources are.
    ReadResources(RequestId, GetResourcesRequest),
    /// Takes the outputs of the resources of the image that the machine has, as JSON.
    ResourceOutputs(String),
    /// Wants the content of the computed files of this image for the machine with this record, and
    /// no other any more. [`Event::ComputedKnown`] brings what is known, and each change of it.
    WantComputed(Arc<Machine>, Arc<RequiredImage>),
    /// Reports how the machine is with the computed files that it was told with this number.
    ReportContent(u64, ContentReport),
    /// Makes a plan.
    Plan(RequestId, Box<PlanJob>),
    /// Does something about daemon tasks.
    Task(TaskEffect),
    /// Calls the sub.
    Call(RequestId, Call),
    /// Records the update in the history, checks [`super::Sub::is_commit_wanted`], and then has the
    /// sub carry out the update that it has staged. Never sent while the brake is on.
    Commit(RequestId, Box<OrderedUpdate>),
    /// Reports to the identity table. It answers [`IdentityReport::Seen`] with
    /// [`Event::IdentityJudged`], and sends that event also when its verdict changes.
    ReportIdentity(IdentityReport),
    /// Has the sub, whose last report had this version, scan its whole tree at once, and waits for
    /// the end of the scan.
    Scan(RequestId, SubVersion),
    /// Makes a claim. [`Event::Claimed`] brings the answer and each change of it, except for
    /// [`Claim::UnderWay`], [`Claim::Blocked`] and [`Claim::Health`].
    Claim(Claim),
    /// Releases a claim.
    Release(Release),
    /// The activity of the machine is known now, or that it does not answer.
    ActivityKnown,
    /// The status has changed to this, with this detail.
    StatusChanged(Status, String),
    /// The update with this id, for which a Commit was sent, has ended. May be sent again with
    /// another outcome: an update that was done may be undone. The text describes the triggers that
    /// failed, if some did.
    UpdateEnded(u64, UpdateOutcome, String),
}

/// What the shell must do about daemon tasks.
#[derive(Clone, Debug)]
pub enum TaskEffect {
    /// Asks the machine how its tasks are. [`Event::TasksTold`] brings the answer.
    Ask(RequestId, GetTaskStatesRequest),
    /// Tells operators something about a task.
    Tell(TaskEvent),
    /// The machine has taken the order about this task with this number, or refuses it, or obeys a
    /// later one.
    OrderEnded(String, u64),
    /// Tasks, each with the number of the last order about it, are suspended because the machine
    /// had left a machine database. They are to be resumed.
    Resume(Vec<(String, u64)>),
}
