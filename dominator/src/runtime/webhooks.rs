//! Takes webhooks of forges, and does what they ask for, one after the other.
//!
//! What an open change has is read as data. Only the commands of the operators run: one fetches
//! files as a user of its own, one is told what came of it.

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use api::access::Identity;
use api::dominator::rollouts::{EditEnvironmentsRequest, PlanRolloutRequest, StartRolloutRequest};
use daemon::program::output_as;
use model::display::{counted, error_chain};
use model::lock::locked;
use nix::unistd::{User, getegid, geteuid};
use rollouts::definition::EnvironmentEdit;
use rollouts::document::{Group, Scan};
use rollouts::plan::StepPlan;
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;

use super::operator_program;
use crate::core::webhooks::{Change, Queue, SECRET_BYTES_MIN, Webhook, WebhookFile};
use crate::runtime::fleet::Fleet;

/// How long a fetch may take.
const FETCH_LIMIT: Duration = Duration::from_secs(300);

/// The most that a fetch may print, in bytes.
const FETCHED_BYTES_MAX: usize = 8 << 20;

/// Why webhooks cannot be taken.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WebhookError {
    #[error("cannot read a file of webhooks")]
    Read {
        #[from]
        source: std::io::Error,
    },
    #[error("{file}: {problem}")]
    File { file: String, problem: String },
    #[error("webhook {webhook}: {problem}")]
    Webhook { webhook: String, problem: String },
}

/// A webhook that is taken, with what it names.
#[derive(Debug)]
pub struct KnownWebhook {
    pub webhook: Webhook,
    pub secret: Vec<u8>,
    user: User,
}

/// The webhooks, and what they ask for.
#[derive(Debug)]
pub struct Webhooks {
    known: Vec<KnownWebhook>,
    waiting: Mutex<Queue>,
    added: Notify,
}

impl Webhooks {
    /// Reads the file of webhooks, if there is one, and their secrets.
    pub fn read(file: Option<&Path>) -> Result<Self, WebhookError> {
        let mut known = Vec::new();
        if let Some(file) = file {
            let text = fs_err::read_to_string(file)?;
            let invalid =
                |problem| WebhookError::File { file: file.display().to_string(), problem };
            for webhook in WebhookFile::parse(&text).map_err(invalid)?.webhook {
                known.push(KnownWebhook::read(webhook)?);
            }
        }
        Ok(Self { known, waiting: Mutex::default(), added: Notify::new() })
    }

    pub fn is_empty(&self) -> bool {
        self.known.is_empty()
    }

    pub fn find(&self, name: &str) -> Option<&KnownWebhook> {
        self.known.iter().find(|known| known.webhook.name == name)
    }

    /// Has a change planned or carried out, after those that wait. Returns false if too many do.
    pub fn add(&self, webhook: &str, change: Change) -> bool {
        let is_added = locked(&self.waiting).add(webhook, change);
        self.added.notify_one();
        is_added
    }

    async fn next(&self) -> (&KnownWebhook, Change) {
        loop {
            let next = locked(&self.waiting).take();
            if let Some((name, change)) = next
                && let Some(known) = self.find(&name)
            {
                return (known, change);
            }
            self.added.notified().await;
        }
    }
}

impl KnownWebhook {
    fn read(webhook: Webhook) -> Result<Self, WebhookError> {
        let secret = fs_err::read(&webhook.secret_file)?.trim_ascii().to_vec();
        let problem =
            |problem: String| WebhookError::Webhook { webhook: webhook.name.clone(), problem };
        if secret.len() < SECRET_BYTES_MIN {
            let length = secret.len();
            let text =
                format!("its secret has {length} bytes, at least {SECRET_BYTES_MIN} are safe");
            return Err(problem(text));
        }
        let found = User::from_name(&webhook.user).map_err(|error| problem(error.to_string()))?;
        let user = found.ok_or_else(|| problem(format!("there is no user {}", webhook.user)))?;
        if !geteuid().is_root() {
            let text = "the dominator must run as root to run its fetch as another user";
            return Err(problem(text.to_owned()));
        }
        if user.uid.is_root() || user.gid.as_raw() == 0 || user.gid == getegid() {
            let text = "its user must be neither root nor in the group of the dominator, whose \
                        keys the command could read";
            return Err(problem(text.to_owned()));
        }
        Ok(Self { webhook, secret, user })
    }
}

/// What the fetch command is told.
#[derive(Serialize)]
struct FetchInput<'a> {
    webhook: &'a str,
    #[serde(flatten)]
    change: &'a Change,
}

/// What the fetch command prints.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Fetched {
    #[serde(default)]
    groups: Vec<Group>,
    #[serde(default)]
    environments: Vec<EnvironmentEdit>,
}

/// What the status command is told.
#[derive(Serialize)]
struct StatusInput<'a> {
    webhook: &'a str,
    #[serde(flatten)]
    change: &'a Change,
    /// `success` or `failure`.
    state: &'static str,
    summary: String,
    /// What each environment would do, or does.
    plans: Vec<StepPlan>,
}

/// Carries out what webhooks ask for. Never returns.
pub async fn run(fleet: Arc<Fleet>) {
    loop {
        let (known, change) = fleet.shared().webhooks.next().await;
        let name = &known.webhook.name;
        let done = match change.number {
            Some(_) => plan(&fleet, known, &change).await,
            None => carry_out(&fleet, known, &change).await,
        };
        let (state, summary, plans) = match done {
            Ok((summary, plans)) => ("success", summary, plans),
            Err(error) => ("failure", error, Vec::new()),
        };
        tracing::info!(webhook = name, commit = change.commit, state, "{summary}");
        let status = StatusInput { webhook: name, change: &change, state, summary, plans };
        if !known.webhook.status.is_empty() {
            let input = operator_program::line(&status);
            if let Err(error) = operator_program::call(&known.webhook.status, &input).await {
                tracing::error!(webhook = name, "the status command failed: {error}");
            }
        }
    }
}

/// Runs the fetch command.
async fn fetch(known: &KnownWebhook, change: &Change) -> Result<EditEnvironmentsRequest, String> {
    let Webhook { name, fetch, .. } = &known.webhook;
    let input = operator_program::line(&FetchInput { webhook: name, change });
    let run = output_as(Some(&known.user), fetch, &input, FETCHED_BYTES_MAX);
    let late = |_| format!("the fetch takes longer than {FETCH_LIMIT:?}");
    let printed = tokio::time::timeout(FETCH_LIMIT, run).await.map_err(late)?;
    let printed = printed.map_err(|error| format!("the fetch failed: {}", error_chain(&error)))?;
    let Fetched { groups, environments } = serde_json::from_slice(&printed)
        .map_err(|error| format!("what was fetched is not as expected: {error}"))?;
    let why = format!("commit {}: {}", change.commit, change.title);
    let who = format!("webhook {name}");
    let (whole, dry_run) = (true, false);
    Ok(EditEnvironmentsRequest { groups, environments, whole, dry_run, why, who })
}

/// What came of it: a sentence, and plans.
type Done = Result<(String, Vec<StepPlan>), String>;

/// Says what an open change would do.
async fn plan(fleet: &Arc<Fleet>, known: &KnownWebhook, change: &Change) -> Done {
    let request = fetch(known, change).await?;
    let plans = fleet.plan_edits(request).await.map_err(|error| error_chain(&error))?;
    let machines: u64 =
        plans.iter().flat_map(|plan| &plan.classes).map(|class| u64::from(class.machines)).sum();
    let (environments, machines) =
        (counted(plans.len() as u64, "environment"), counted(machines, "machine"));
    Ok((format!("{environments} would change, and {machines} by them"), plans))
}

/// Makes the revisions that the branch asks for, and starts them.
async fn carry_out(fleet: &Arc<Fleet>, known: &KnownWebhook, change: &Change) -> Done {
    let request = fetch(known, change).await?;
    let (who, why) = (request.who.clone(), request.why.clone());
    let identity = Arc::new(Identity::unrestricted());
    let edited = fleet
        .edit_environments(request, Arc::clone(&identity))
        .await
        .map_err(|error| error_chain(&error))?;
    // Also what was not started because the dominator was killed in between.
    let state = fleet.rollout_state();
    let new = edited.outcomes.iter().filter_map(|outcome| {
        let revision = state.not_started(&outcome.name)?;
        Some(format!("{}@{revision}", outcome.name))
    });
    let environments: Vec<String> = new.collect();
    if environments.is_empty() {
        return Ok(("there is nothing to start".to_owned(), Vec::new()));
    }
    let request = PlanRolloutRequest { environments: environments.clone(), machines: None };
    let plans = fleet.plan_rollout(request).map_err(|error| error_chain(&error))?.plans;
    let named = environments.join(" ");
    let scan = Scan::default();
    let start = StartRolloutRequest { environments, scan, why, who, ..Default::default() };
    let started =
        fleet.start_rollout(start, identity).await.map_err(|error| error_chain(&error))?;
    Ok((format!("{} was started: {named}", started.id), plans))
}
