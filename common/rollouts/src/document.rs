//! What is known about environments, a rollout and machines, and what has just happened.

use std::collections::{BTreeMap, BTreeSet};

use model::JsonSchema;
use model::json::{self, KeyError};
use provisioning::version::{Range, Version};
use serde::{Deserialize, Serialize};

use crate::dependencies::{Dependencies, cycle_of};
use crate::strategy::{Approval, Strategy, check_approval, check_strategy};

/// The number of a revision of an environment.
pub type Revision = u64;

/// Everything that a decision depends on.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Document {
    #[serde(default)]
    pub groups: Vec<Group>,
    pub environments: Vec<Environment>,
    #[serde(default)]
    pub scan: Scan,
    #[serde(default)]
    pub lock: LockMode,
    /// The one that is decided about.
    #[serde(default)]
    pub rollout: Option<Rollout>,
    /// The one that was started later, and waits.
    #[serde(default)]
    pub pending: Option<Rollout>,
    /// All other unfinished rollouts.
    #[serde(default)]
    pub others: Vec<Other>,
    #[serde(default)]
    pub machines: Vec<Machine>,
    #[serde(default)]
    pub event: Option<Event>,
}

/// A tier of environments.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Group {
    pub name: String,
    /// Groups whose environments come before those of this one.
    #[serde(default)]
    pub depends_on: Vec<String>,
    /// Of the environments that have none of their own.
    #[serde(default)]
    pub approval: Option<Approval>,
}

/// What some machines shall have.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Environment {
    pub name: String,
    #[serde(default)]
    pub group: Option<String>,
    #[serde(default)]
    pub depends_on: Vec<String>,
    /// The newest revision.
    pub desired: Revision,
    /// The one that a rollout has brought to the machines last.
    #[serde(default)]
    pub committed: Option<Revision>,
    /// Who wrote the desired revision.
    #[serde(default)]
    pub author: Option<String>,
    /// Without, dead tasks are not restarted and new machines get nothing.
    #[serde(default = "yes")]
    pub active: bool,
    /// Whether a plan of the desired revision changes anything; if it is not known: whether the
    /// revisions differ.
    #[serde(default)]
    pub plan_differs: Option<bool>,
    /// What the desired revision provides, by name.
    #[serde(default)]
    pub provides: BTreeMap<String, Version>,
    /// What the desired revision requires of those that it depends on, by name.
    #[serde(default)]
    pub requires: BTreeMap<String, Range>,
    /// What the committed revision provides; if it is left out: the same.
    #[serde(default)]
    pub committed_provides: Option<BTreeMap<String, Version>>,
    /// What the committed revision requires; if it is left out: the same.
    #[serde(default)]
    pub committed_requires: Option<BTreeMap<String, Range>>,
    /// True if two revisions can be on a machine at once: they share no paths, tasks or resources.
    #[serde(default)]
    pub disjoint: bool,
    /// Old revisions that stayed beside the committed one.
    #[serde(default)]
    pub kept: Vec<Kept>,
    #[serde(default)]
    pub strategy: Strategy,
    #[serde(default)]
    pub approval: Option<Approval>,
    /// Why no machine may be changed now, if none may: it is frozen, or outside of its windows.
    #[serde(default)]
    pub closed: Option<String>,
}

/// An old revision beside the committed one.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Kept {
    pub revision: Revision,
    #[serde(default)]
    pub provides: BTreeMap<String, Version>,
}

/// Which environments a start takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Scan {
    /// Those that changed, and all that depend on them.
    #[default]
    Graph,
    /// Those whose plan changes something.
    Plan,
}

/// What a rollout locks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LockMode {
    /// Its environments, those that they depend on, and those that depend on them.
    #[default]
    Neighbours,
    /// Everything: one rollout at a time.
    Global,
}

/// A set of steps.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Rollout {
    pub id: String,
    #[serde(default)]
    pub kind: Kind,
    #[serde(default)]
    pub state: RolloutState,
    /// Why it is in that state.
    #[serde(default)]
    pub cause: String,
    #[serde(default)]
    pub by: String,
    /// True if it does not wait for windows, freezes, soaking, a least duration and the age of an
    /// image. Its votes are not of `by` alone.
    #[serde(default)]
    pub urgent: bool,
    /// True if it may bring deprecated images.
    #[serde(default)]
    pub allow_deprecated: bool,
    #[serde(default)]
    pub steps: Vec<Step>,
}

impl Rollout {
    /// Returns the environments of its steps.
    #[must_use]
    pub fn environments(&self) -> BTreeSet<String> {
        self.steps.iter().map(|step| step.environment.clone()).collect()
    }

    /// Returns the environments that get another revision by it, and not those that only depend on
    /// them.
    #[must_use]
    pub fn changing(&self) -> BTreeSet<String> {
        let steps = self.steps.iter().filter(|step| step.revision != step.from);
        steps.map(|step| step.environment.clone()).collect()
    }

    /// True if the step brings machines back to what was good before.
    #[must_use]
    pub fn goes_back(&self, step: &Step) -> bool {
        step.direction == Direction::Back || self.kind == Kind::Rollback
    }
}

/// What made a rollout.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    #[default]
    User,
    Mdb,
    Rollback,
    NewHost,
    HealthRepair,
    Cleanup,
}

impl Kind {
    /// True if somebody has started it.
    #[must_use]
    pub fn is_of_people(self) -> bool {
        matches!(self, Self::User | Self::Rollback)
    }

    /// True if it locks environments, asks for votes and changes machines. Others say what happens
    /// by itself.
    #[must_use]
    pub fn is_gated(self) -> bool {
        !matches!(self, Self::NewHost | Self::HealthRepair)
    }
}

/// How far a rollout has come.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum RolloutState {
    #[default]
    Pending,
    Running,
    Succeeded,
    Canceled,
    Stopped,
    RollingBack,
    RolledBack,
    RollbackFailed,
}

impl RolloutState {
    /// Those of rollouts that have not ended.
    pub const UNFINISHED: [Self; 4] =
        [Self::Pending, Self::Running, Self::RollingBack, Self::RollbackFailed];

    /// True if it holds its lock. One whose rollback has failed does, until somebody resolves it.
    #[must_use]
    pub fn holds_lock(self) -> bool {
        matches!(self, Self::Running | Self::RollingBack | Self::RollbackFailed)
    }
}

/// The change of one environment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Step {
    pub id: String,
    pub environment: String,
    /// What its machines get; `None` for nothing.
    pub revision: Option<Revision>,
    /// What they had before.
    #[serde(default)]
    pub from: Option<Revision>,
    #[serde(default)]
    pub direction: Direction,
    #[serde(default)]
    pub state: StepState,
    /// Why it is in that state.
    #[serde(default)]
    pub cause: String,
    /// The digest of its plan, when there is one.
    #[serde(default)]
    pub digest: Option<String>,
    /// True if the plan changes nothing.
    #[serde(default)]
    pub plan_is_empty: bool,
    #[serde(default)]
    pub votes: Vec<Vote>,
    /// True once machines may have been changed.
    #[serde(default)]
    pub applied: bool,
    /// True once its machines have been healthy for long enough.
    #[serde(default)]
    pub soaked: bool,
    /// How long all machines that were changed have been healthy, in seconds; if it is left out:
    /// long enough.
    #[serde(default)]
    pub healthy_for_s: Option<u64>,
    /// How long it has been changing machines, in seconds; if it is left out: long enough.
    #[serde(default)]
    pub applying_for_s: Option<u64>,
    /// What the analysis says of the machines that were changed; `None` if it has not answered.
    #[serde(default)]
    pub analysis: Option<Analysis>,
    #[serde(default)]
    pub created_resources: Vec<CreatedResource>,
    /// Steps back only: what is destroyed.
    #[serde(default)]
    pub destroy: Vec<String>,
}

impl Step {
    /// Returns the vote of somebody about the plan with this digest.
    #[must_use]
    pub fn vote_of(&self, voter: &str, digest: &str) -> Option<&Vote> {
        self.votes.iter().find(|vote| vote.voter == voter && vote.digest == digest)
    }
}

/// Which way a step goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Direction {
    #[default]
    Forward,
    Back,
}

/// How far a step has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum StepState {
    #[default]
    Waiting,
    Planning,
    Noop,
    AwaitingApproval,
    Applying,
    Soaking,
    Succeeded,
    Failed,
    Aborted,
}

impl StepState {
    /// True if nothing more happens to the step.
    #[must_use]
    pub fn is_finished(self) -> bool {
        matches!(self, Self::Noop | Self::Succeeded | Self::Failed | Self::Aborted)
    }

    /// True if those that depend on the step may begin.
    #[must_use]
    pub fn is_done(self) -> bool {
        matches!(self, Self::Noop | Self::Succeeded)
    }

    /// True if the step may change machines now.
    #[must_use]
    pub fn is_on_machines(self) -> bool {
        matches!(self, Self::Applying | Self::Soaking)
    }
}

/// What a voter said about a plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Vote {
    pub voter: String,
    pub vote: Choice,
    /// The digest of the plan that the voter saw.
    pub digest: String,
}

/// Yes or no.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Choice {
    Approve,
    Reject,
}

/// What a program of the operators says about the machines that a step has changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Analysis {
    pub advice: Advice,
    #[serde(default)]
    pub why: String,
}

/// How a step goes on, by its analysis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Advice {
    Go,
    /// It is asked again a while later.
    Wait,
    /// The step has failed.
    RollBack,
}

/// A resource that a step has made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CreatedResource {
    pub id: String,
    #[serde(default)]
    pub on_removal: OnRemoval,
}

/// What happens to a resource that is not wanted any more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OnRemoval {
    #[default]
    Keep,
    Destroy,
}

/// Another unfinished rollout.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Other {
    pub id: String,
    #[serde(default)]
    pub kind: Kind,
    pub state: RolloutState,
    pub environments: BTreeSet<String>,
}

/// A machine.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    pub host: String,
    #[serde(default = "yes")]
    pub reachable: bool,
    /// The environments that select it.
    #[serde(default)]
    pub environments: BTreeSet<String>,
    #[serde(default)]
    pub tasks: Vec<MachineTask>,
}

/// What a machine has of an environment: its task, or its tree if it has no task.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineTask {
    pub environment: String,
    pub revision: Revision,
    pub state: MachineTaskState,
}

/// How that is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MachineTaskState {
    Starting,
    /// It runs and is healthy.
    Running,
    /// Without a task: the machine has the tree, and its health check has passed.
    Synced,
    Unhealthy,
    Stopping,
    Stopped,
    Failed,
}

impl MachineTaskState {
    /// True if it serves.
    #[must_use]
    pub fn is_healthy(self) -> bool {
        matches!(self, Self::Running | Self::Synced)
    }

    /// True if it is there, and does not serve.
    #[must_use]
    pub fn has_failed(self) -> bool {
        matches!(self, Self::Unhealthy | Self::Failed)
    }

    /// True if a process of it may live.
    #[must_use]
    pub fn is_present(self) -> bool {
        !matches!(self, Self::Stopped | Self::Failed)
    }
}

/// What has just happened.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Event {
    Vote(VoteEvent),
    /// A plan, a request for votes, or an update has failed.
    Failure(FailureEvent),
    Start(StartEvent),
    /// An environment was found to be invalid when a rollout of it was started.
    Invalid(InvalidEvent),
}

/// Somebody votes.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VoteEvent {
    pub step: String,
    pub voter: String,
    pub vote: Choice,
    /// The digest of the plan that the voter saw.
    pub digest: String,
    /// Whether the signature or the link of the vote is valid.
    #[serde(default = "yes")]
    pub link_valid: bool,
}

/// A step has failed.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FailureEvent {
    pub step: String,
    pub reason: String,
}

/// Somebody starts a rollout.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StartEvent {
    /// Of the new rollout.
    pub id: String,
    /// Each as `NAME@REVISION`.
    pub environments: Vec<String>,
    #[serde(default)]
    pub by: String,
}

/// A start that cannot be.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InvalidEvent {
    pub environment: String,
    pub reason: String,
}

/// Returns the name that JSON has for a state.
#[must_use]
pub fn name_of(state: &impl Serialize) -> String {
    let value = serde_json::to_value(state).unwrap_or_default();
    value.as_str().unwrap_or_default().to_owned()
}

fn yes() -> bool {
    true
}

impl Document {
    /// Reads a JSON object, and checks that it fits together.
    ///
    /// # Errors
    ///
    /// [`KeyError`] names the key.
    pub fn parse(text: &str) -> Result<Self, KeyError> {
        let document: Self = json::read_object(text)?;
        document.check()?;
        Ok(document)
    }

    /// Returns an environment.
    #[must_use]
    pub fn environment(&self, name: &str) -> Option<&Environment> {
        self.environments.iter().find(|environment| environment.name == name)
    }

    /// Returns who must approve a change of `environment`: what it says, or its group.
    #[must_use]
    pub fn approval(&self, environment: &Environment) -> Approval {
        let group =
            self.groups.iter().find(|group| Some(&group.name) == environment.group.as_ref());
        let of_group = || group.and_then(|group| group.approval.clone());
        environment.approval.clone().or_else(of_group).unwrap_or_default()
    }

    /// Checks that it fits together.
    ///
    /// # Errors
    ///
    /// [`KeyError`] names the key.
    pub fn check(&self) -> Result<(), KeyError> {
        let groups = named("groups", self.groups.iter().map(|group| &group.name))?;
        let names = named("environments", self.environments.iter().map(|one| &one.name))?;
        named("machines", self.machines.iter().map(|machine| &machine.host))?;
        for (index, group) in self.groups.iter().enumerate() {
            let at = format!("groups[{index}]");
            known(&format!("{at}.depends_on"), "group", &group.depends_on, &groups)?;
            check_approval(&at, group.approval.as_ref())?;
        }
        for (index, environment) in self.environments.iter().enumerate() {
            let at = format!("environments[{index}]");
            known(&format!("{at}.group"), "group", &environment.group, &groups)?;
            known(&format!("{at}.depends_on"), "environment", &environment.depends_on, &names)?;
            check_strategy(&at, &environment.strategy)?;
            check_approval(&at, environment.approval.as_ref())?;
        }
        for (index, machine) in self.machines.iter().enumerate() {
            let at = format!("machines[{index}].environments");
            known(&at, "environment", &machine.environments, &names)?;
        }
        for (key, rollout) in [("rollout", &self.rollout), ("pending", &self.pending)] {
            let Some(rollout) = rollout else { continue };
            named(&format!("{key}.steps"), rollout.steps.iter().map(|step| &step.id))?;
            let wanted = rollout.steps.iter().map(|step| &step.environment);
            known(&format!("{key}.steps"), "environment", wanted, &names)?;
        }
        let of_groups = self.groups.iter().map(|one| (one.name.clone(), one.depends_on.clone()));
        cycle_of("groups", &of_groups.collect())?;
        cycle_of("environments", &Dependencies::of(self).needs())
    }
}

/// Returns the names, which must be there and differ.
fn named<'a>(
    at: &str,
    names: impl Iterator<Item = &'a String>,
) -> Result<BTreeSet<&'a str>, KeyError> {
    let mut all = BTreeSet::new();
    for (index, name) in names.enumerate() {
        let at = format!("{at}[{index}]");
        if name.is_empty() {
            return Err(KeyError::new(&at, "has no name"));
        }
        if !all.insert(name.as_str()) {
            return Err(KeyError::new(&at, format!("`{name}` is there twice")));
        }
    }
    Ok(all)
}

fn known<'a>(
    at: &str,
    what: &str,
    wanted: impl IntoIterator<Item = &'a String>,
    all: &BTreeSet<&str>,
) -> Result<(), KeyError> {
    match wanted.into_iter().find(|name| !all.contains(name.as_str())) {
        Some(name) => Err(KeyError::new(at, format!("there is no {what} `{name}`"))),
        None => Ok(()),
    }
}
