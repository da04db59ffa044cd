//! Environments, and rollouts that bring their revisions to machines.

use model::JsonSchema;
use model::mdb::Machine;
use model::tree::Time;
use rollouts::batch::Batch;
use rollouts::definition::{Definition, EnvironmentEdit};
use rollouts::document::{Choice, Group, Revision, Rollout, Scan, Step, StepState, name_of};
use rollouts::plan::StepPlan;
use rollouts::state::EditOutcome;
use serde::{Deserialize, Serialize};

use super::orders::PauseEnd;
use crate::access::Access;
use crate::audit::call_details::CallDetails;
use crate::method::{Effect, Method};

/// Edits groups and environments, all or none. No machine changes by it.
pub enum EditEnvironments {}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct EditEnvironmentsRequest {
    #[serde(default)]
    pub groups: Vec<Group>,
    #[serde(default)]
    pub environments: Vec<EnvironmentEdit>,
    /// True if what an edit leaves out gets its default, rather than staying as it is.
    #[serde(default)]
    pub whole: bool,
    /// True to be told what would happen.
    #[serde(default)]
    pub dry_run: bool,
    /// The reason.
    #[serde(default)]
    pub why: String,
    /// Who asks, if the call has no certificate.
    #[serde(default)]
    pub who: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct EditEnvironmentsReply {
    pub outcomes: Vec<EditOutcome>,
}

impl Method for EditEnvironments {
    const NAME: &'static str = "Dominator.EditEnvironments";
    const ACCESS: Access = Access::PowerOrOwner;
    const EFFECT: Effect = Effect::Changes;
    type Request = EditEnvironmentsRequest;
    type Reply = EditEnvironmentsReply;

    fn audit_details(request: &Self::Request) -> CallDetails {
        let environments = request.environments.iter().map(|one| one.name.as_str());
        let names: Vec<&str> =
            request.groups.iter().map(|one| one.name.as_str()).chain(environments).collect();
        CallDetails::default()
            .with("names", names.join(" "))
            .with("dry run", request.dry_run)
            .why(&request.why)
            .who(&request.who)
    }
}

/// Deletes an environment, freezes it, or says whether it is active.
pub enum OrderEnvironment {}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum EnvironmentOrder {
    Activate,
    /// New machines get nothing.
    Deactivate,
    Delete {
        /// True to delete it although machines get other images by it.
        force: bool,
    },
    /// Rollouts change no more of its machines. What goes back, and what is urgent, is not held up.
    Freeze {
        /// `None`: until somebody ends it.
        until: Option<PauseEnd>,
    },
    Unfreeze,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct OrderEnvironmentRequest {
    /// To freeze all, and to end that, [`rollouts::state::ALL`].
    pub name: String,
    pub order: EnvironmentOrder,
    #[serde(default)]
    pub why: String,
    /// Who asks, if the call has no certificate.
    #[serde(default)]
    pub who: String,
}

/// What an order about an environment or a rollout, or a vote, has led to.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct OrderedReply {
    pub message: String,
}

impl Method for OrderEnvironment {
    const NAME: &'static str = "Dominator.OrderEnvironment";
    const ACCESS: Access = Access::PowerOrOwner;
    const EFFECT: Effect = Effect::Changes;
    type Request = OrderEnvironmentRequest;
    type Reply = OrderedReply;

    fn audit_details(request: &Self::Request) -> CallDetails {
        let named = CallDetails::default().with("name", &request.name);
        let ordered = match request.order {
            EnvironmentOrder::Activate => named.with("order", "activate"),
            EnvironmentOrder::Deactivate => named.with("order", "deactivate"),
            EnvironmentOrder::Delete { force } => {
                named.with("order", "delete").with("force", force)
            }
            EnvironmentOrder::Freeze { until } => {
                named.with("order", "freeze").with_some("end", until.map(PauseEnd::text))
            }
            EnvironmentOrder::Unfreeze => named.with("order", "unfreeze"),
        };
        ordered.why(&request.why).who(&request.who)
    }
}

/// Lists environments and groups.
pub enum ListEnvironments {}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ListEnvironmentsRequest {
    /// Names; empty for all.
    #[serde(default)]
    pub names: Vec<String>,
    /// Of this group only, unless it is empty.
    #[serde(default)]
    pub group: String,
    /// True for all revisions, rather than the newest and the committed one.
    #[serde(default)]
    pub all_revisions: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ListEnvironmentsReply {
    pub groups: Vec<Group>,
    /// By name.
    pub environments: Vec<EnvironmentInfo>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct EnvironmentInfo {
    pub name: String,
    pub newest: Revision,
    /// The one that a rollout has brought last; 0 before the first.
    pub committed: Revision,
    pub active: bool,
    /// How many machines it selects, by the newest revision.
    pub selected: u32,
    /// How many machines have a revision of it.
    pub machines: u32,
    /// How many of those are healthy.
    pub healthy: u32,
    /// How many machines have another revision than the committed one.
    pub moved: u32,
    /// Machines to which an environment applies that came to machines earlier.
    pub conflicts: Vec<String>,
    /// The id of the unfinished rollout that changes it, or an empty text.
    pub rollout: String,
    /// Why rollouts may not change its machines now, if so.
    pub closed: Option<String>,
    /// By number.
    pub revisions: Vec<RevisionInfo>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RevisionInfo {
    pub number: Revision,
    pub definition: Definition,
    pub author: String,
    pub why: String,
    pub at: Time,
    /// Of a revision of the machine database: how many machines have each image.
    pub images: Vec<(String, u32)>,
    /// Former bundles that stay beside its own.
    pub kept: Vec<String>,
    /// Of a revision with content: the content revision of the filegen-server; 0 for others.
    pub content: u64,
}

impl Method for ListEnvironments {
    const NAME: &'static str = "Dominator.ListEnvironments";
    const ACCESS: Access = Access::Authenticated;
    const EFFECT: Effect = Effect::Tells;
    const REPLY_BYTES_MAX: usize = 16 << 20;
    type Request = ListEnvironmentsRequest;
    type Reply = ListEnvironmentsReply;
}

/// Returns what rollouts would do. Nothing is stored.
pub enum PlanRollout {}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PlanRolloutRequest {
    /// Names of environments, or `NAME@REVISION`; empty for all that have a revision that is not
    /// committed.
    #[serde(default)]
    pub environments: Vec<String>,
    /// A machine database to be used instead of the one in force.
    #[serde(default)]
    pub machines: Option<Vec<Machine>>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PlanRolloutReply {
    /// In the order of the steps, as far as there is one.
    pub plans: Vec<StepPlan>,
}

impl Method for PlanRollout {
    const NAME: &'static str = "Dominator.PlanRollout";
    const ACCESS: Access = Access::Authenticated;
    const EFFECT: Effect = Effect::Tells;
    const REQUEST_BYTES_MAX: usize = 16 << 20;
    const REPLY_BYTES_MAX: usize = 16 << 20;
    type Request = PlanRolloutRequest;
    type Reply = PlanRolloutReply;
}

/// Starts a rollout.
pub enum StartRollout {}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct StartRolloutRequest {
    /// Each as `NAME@REVISION`. The revision must be the newest; for a rollback, an old one, or
    /// none for the former one.
    pub environments: Vec<String>,
    #[serde(default)]
    pub scan: Scan,
    /// True to go back.
    #[serde(default)]
    pub rollback: bool,
    /// True not to wait for windows, freezes, soaking, a least duration and the age of an image.
    #[serde(default)]
    pub urgent: bool,
    /// True to bring images although they are deprecated.
    #[serde(default)]
    pub allow_deprecated: bool,
    #[serde(default)]
    pub why: String,
    /// Who asks, if the call has no certificate.
    #[serde(default)]
    pub who: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct StartRolloutReply {
    pub id: String,
}

impl Method for StartRollout {
    const NAME: &'static str = "Dominator.StartRollout";
    const ACCESS: Access = Access::PowerOrOwner;
    const EFFECT: Effect = Effect::Changes;
    type Request = StartRolloutRequest;
    type Reply = StartRolloutReply;

    fn audit_details(request: &Self::Request) -> CallDetails {
        CallDetails::default()
            .with("environments", request.environments.join(" "))
            .with("rollback", request.rollback)
            .with("urgent", request.urgent)
            .why(&request.why)
            .who(&request.who)
    }
}

/// Stops, cancels, rolls back or resolves a rollout.
pub enum OrderRollout {}

/// What is ordered of a rollout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum RolloutVerb {
    /// Machines stay as they are, and its environments are not active any more.
    Stop,
    /// It waits, and is not to begin.
    Cancel,
    /// It runs: what it has changed goes back.
    RollBack,
    /// Its rollback has failed: its machines get the committed revisions.
    Resolve,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct OrderRolloutRequest {
    pub id: String,
    pub order: RolloutVerb,
    /// The reason; must not be empty.
    #[serde(default)]
    pub why: String,
    /// Who asks, if the call has no certificate.
    #[serde(default)]
    pub who: String,
}

impl Method for OrderRollout {
    const NAME: &'static str = "Dominator.OrderRollout";
    const ACCESS: Access = Access::PowerOrOwner;
    const EFFECT: Effect = Effect::Changes;
    type Request = OrderRolloutRequest;
    type Reply = OrderedReply;

    fn audit_details(request: &Self::Request) -> CallDetails {
        CallDetails::default()
            .with("rollout", &request.id)
            .with("order", name_of(&request.order))
            .why(&request.why)
            .who(&request.who)
    }
}

/// Approves or rejects the plan of a step. Only voters may.
pub enum VoteOnStep {}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct VoteOnStepRequest {
    /// The id of the rollout.
    pub rollout: String,
    pub step: String,
    pub vote: Choice,
    /// The digest of the plan that the voter saw.
    pub digest: String,
    /// True to refuse the vote if there is one of this voter about this plan.
    #[serde(default)]
    pub once: bool,
    #[serde(default)]
    pub why: String,
    /// Who votes, if the call has no certificate.
    #[serde(default)]
    pub who: String,
}

impl Method for VoteOnStep {
    const NAME: &'static str = "Dominator.VoteOnStep";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Changes;
    type Request = VoteOnStepRequest;
    type Reply = OrderedReply;

    fn audit_details(request: &Self::Request) -> CallDetails {
        CallDetails::default()
            .with("step", format!("{}/{}", request.rollout, request.step))
            .with("vote", name_of(&request.vote))
            .with("digest", &request.digest)
            .why(&request.why)
            .who(&request.who)
    }
}

/// Lists rollouts, the newest first.
pub enum ListRollouts {}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ListRolloutsRequest {
    /// Ids; empty for all.
    #[serde(default)]
    pub ids: Vec<String>,
    /// Of this environment only, unless it is empty.
    #[serde(default)]
    pub environment: String,
    /// True for those only that are not ended.
    #[serde(default)]
    pub unfinished: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ListRolloutsReply {
    pub rollouts: Vec<RolloutInfo>,
    /// Why no rollout goes on now, if none does.
    pub paused: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RolloutInfo {
    pub rollout: Rollout,
    pub why: String,
    pub created: Time,
    pub ended: Option<Time>,
    /// When each step entered its state, by step.
    pub since: Vec<(String, Time)>,
    /// What the steps on machines do now.
    pub batches: Vec<Batch>,
    /// The plans of the steps that wait for votes, in the order of the steps.
    pub plans: Vec<StepPlan>,
    /// The environments that it locks.
    pub locks: Vec<String>,
}

impl RolloutInfo {
    /// Returns the steps that wait for votes, with their plans.
    pub fn steps_with_plans(&self) -> impl Iterator<Item = (&Step, &StepPlan)> {
        let waiting = self.rollout.steps.iter();
        let waiting = waiting.filter(|step| step.state == StepState::AwaitingApproval);
        waiting.zip(&self.plans)
    }
}

impl Method for ListRollouts {
    const NAME: &'static str = "Dominator.ListRollouts";
    const ACCESS: Access = Access::Authenticated;
    const EFFECT: Effect = Effect::Tells;
    const REPLY_BYTES_MAX: usize = 16 << 20;
    type Request = ListRolloutsRequest;
    type Reply = ListRolloutsReply;
}
