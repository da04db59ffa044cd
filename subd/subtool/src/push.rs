//! `push-image`: the whole cycle of an update, without a dominator.

use std::collections::BTreeSet;
use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::sync::Arc;

use api::fault::FaultCode;
use api::object_server::IDS_MAX;
use api::subd::{
    Activity, Cleanup, CleanupRequest, Commit, CommitRequest, ExpectedState, Fetch, FetchObject,
    FetchRequest, Health, LastUpdate, OfferImage, OfferImageRequest, PollReply, Prepare,
    PrepareRequest, TriggerFailure, UpdateOutcome,
};
use model::display::{counted, size};
use model::image::ImageName;
use model::image::required::RequiredImage;
use model::object::ObjectId;
use model::plan::{Blocked, Plan};
use rpc::client::CallError;
use serde::Serialize;

use super::error::ToolError;
use super::machine::{Comparison, Machine};
use super::progress::Progress;
use super::rows::cached_objects;

/// How long a staged update waits for its Commit, in seconds.
const EXPIRES_SECONDS: u32 = 300;

/// How many updates are made before the machine is said not to converge.
const ROUNDS_MAX: u32 = 5;

/// How many paths an error names.
const PATHS_NAMED: usize = 3;

/// The order of the operator.
#[derive(Debug)]
pub struct Order {
    pub image: Arc<RequiredImage>,
    /// `host:port` of object servers, as the machine reaches them.
    pub sources: Vec<String>,
    /// Update even if that is unsafe.
    pub force_unsafe: bool,
    /// Do not ask the machine's disruption command.
    pub force_disruption: bool,
    /// Leave out what is blocked.
    pub go_on: bool,
}

/// The result of a push.
#[derive(Debug, Default, Serialize)]
pub struct Report {
    /// The image that the machine has now.
    pub image: Option<ImageName>,
    /// How many updates were made; none if there was nothing to do.
    pub updates: u32,
    pub operations: u64,
    pub fetched_objects: u64,
    /// Bytes that were fetched.
    pub fetched_bytes: u64,
    /// Objects that were on the machine in another file.
    pub reused_objects: u64,
    /// How long the tree was mixed, in nanoseconds.
    pub window_ns: u64,
    pub trigger_failures: Vec<TriggerFailure>,
    /// How the health check ended, if there was one.
    pub health: Option<Health>,
    /// True if the image has a health check that was not run.
    #[serde(skip)]
    pub health_unchecked: bool,
    /// Paths that were left out, with the reasons.
    pub blocked: Vec<String>,
}

impl Report {
    /// True if triggers or the health check failed.
    pub fn is_partial(&self) -> bool {
        !self.trigger_failures.is_empty()
            || !self.blocked.is_empty()
            || matches!(self.health, Some(Health::Failed(_)))
    }
}

/// Makes the machine equal to the image of `order`.
///
/// # Errors
///
/// [`ToolError`]; an update that was committed is finished by the machine all the same.
pub async fn push(
    machine: &Machine,
    order: &Order,
    progress: &mut Progress,
) -> Result<Report, ToolError> {
    let mut report = Report::default();
    loop {
        if machine.is_late() {
            return Err(machine.too_long("the machine keeps changing"));
        }
        wait_for_others(machine, progress).await?;
        let Some(comparison) = machine.compare(&order.image).await? else {
            progress.stage("Setting the scan settings of the image.");
            machine.scan_for(&order.image).await?;
            continue;
        };
        let plan = Arc::clone(&comparison.planned.plan);
        let is_known = comparison.reply.last_image.as_ref() == Some(order.image.name());
        let is_done = plan.is_empty() || (order.go_on && plan.operations.is_empty());
        if is_done && is_known {
            report.blocked = paths_of(&plan.blocked);
            report.image = Some(order.image.name().clone());
            clean(machine, &comparison.reply).await?;
            return Ok(report);
        }
        refuse(order, &comparison)?;
        if report.updates == ROUNDS_MAX {
            let paths = named(&plan);
            return Err(ToolError::NotConverging { rounds: ROUNDS_MAX, paths });
        }
        if !fetch(machine, order, &comparison, &mut report, progress).await? {
            continue;
        }
        let Some(last) = update(machine, order, &comparison, progress).await? else { continue };
        report.updates += 1;
        report.operations += u64::from(last.operations);
        report.window_ns += last.window_ns;
        report.trigger_failures = last.trigger_failures;
        report.health_unchecked = last.outcome == UpdateOutcome::Done
            && last.health.is_none()
            && order.image.content.health_check.is_some();
        report.health = last.health;
    }
}

/// Refuses blocked and unsafe plans.
fn refuse(order: &Order, comparison: &Comparison) -> Result<(), ToolError> {
    let planned = &comparison.planned;
    if !planned.plan.blocked.is_empty() && !order.go_on {
        return Err(ToolError::Blocked(paths_of(&planned.plan.blocked)));
    }
    if !planned.dangers.is_empty() && !order.force_unsafe {
        return Err(ToolError::Unsafe(planned.dangers.clone()));
    }
    Ok(())
}

/// Lists the first of these paths, with the reasons.
fn paths_of(blocked: &[Blocked]) -> Vec<String> {
    let named = blocked.iter().take(PATHS_NAMED);
    let mut texts: Vec<String> = named.map(|one| format!("{}: {}", one.path, one.why)).collect();
    let more = blocked.len() - texts.len();
    if more > 0 {
        texts.push(format!("and {more} more"));
    }
    texts
}

/// Waits until the machine is not busy with another update or fetch.
async fn wait_for_others(machine: &Machine, progress: &mut Progress) -> Result<(), ToolError> {
    let is_free =
        |reply: &PollReply| matches!(reply.activity, Activity::Idle | Activity::Prepared { .. });
    let look = |reply: &PollReply| {
        if !is_free(reply) {
            progress.stage("The machine is busy with another update; waiting for its end.");
        }
    };
    machine.wait_until("another update or fetch is under way", look, is_free).await?;
    Ok(())
}

/// Has the machine fetch the objects that it lacks. False if it has changed in the meantime.
async fn fetch(
    machine: &Machine,
    order: &Order,
    comparison: &Comparison,
    report: &mut Report,
    progress: &mut Progress,
) -> Result<bool, ToolError> {
    let have: BTreeSet<ObjectId> = cached_objects(&comparison.reply).iter().copied().collect();
    let missing: Vec<FetchObject> = comparison
        .planned
        .needs
        .iter()
        .filter(|(id, _)| !have.contains(id))
        .map(|(id, need)| FetchObject { id: *id, size_bytes: need.size_bytes })
        .collect();
    let total: u64 = missing.iter().map(|object| object.size_bytes).sum();
    if !missing.is_empty() {
        let objects = counted(missing.len() as u64, "object");
        progress.stage(&format!("Fetching {objects} ({}).", size(total)));
    }
    for batch in missing.chunks(IDS_MAX) {
        let fetch_id = new_id();
        let sources = order.sources.clone();
        let request = FetchRequest { fetch_id, sources, objects: batch.into(), ahead: false };
        if !accepted(machine.call::<Fetch>(&request).await)? {
            return Ok(false);
        }
        let look = |reply: &PollReply| {
            if let Activity::Fetching { objects, bytes, .. } = reply.activity {
                progress.show(&format!("{objects} of {} ({})", batch.len(), size(bytes)));
            }
        };
        let instance = comparison.reply.version.instance;
        let is_over = |reply: &PollReply| {
            // A machine that was restarted has forgotten the fetch.
            reply.version.instance != instance
                || reply.last_fetch.as_ref().is_some_and(|last| last.fetch_id == fetch_id)
        };
        let reply = machine.wait_until("the objects have not all arrived", look, is_over).await?;
        let Some(last) = reply.last_fetch.filter(|last| last.fetch_id == fetch_id) else {
            return Ok(false);
        };
        for complaint in &last.complaints {
            progress.stage(&format!("warning: source {}: {}", complaint.source, complaint.text));
        }
        report.fetched_objects += last.objects;
        report.fetched_bytes += last.bytes;
        report.reused_objects += last.reused;
        if let Some(error) = last.error {
            return Err(ToolError::Fetch(error));
        }
    }
    Ok(true)
}

/// Prepares and commits an update. Returns its result, or `None` if the machine has changed before.
async fn update(
    machine: &Machine,
    order: &Order,
    comparison: &Comparison,
    progress: &mut Progress,
) -> Result<Option<LastUpdate>, ToolError> {
    let update_id = new_id();
    let is_prepared = offer(machine, order).await?
        && prepare(machine, order, comparison, update_id, progress).await?;
    if !is_prepared {
        return Ok(None);
    }
    if order.image.content.triggers.have_resources() {
        super::resource::provision(machine, order.image.digest, update_id, progress).await?;
    }
    progress.stage("Updating.");
    match machine.call::<Commit>(&CommitRequest { update_id }).await {
        // The state of the machine shows whether it was accepted.
        Err(CallError::Lost { .. } | CallError::TimedOut { .. }) => {}
        other => {
            if !accepted(other)? {
                return Ok(None);
            }
        }
    }
    let look = |reply: &PollReply| match result_of(update_id, reply) {
        Some(last) if last.awaits_boot => progress.stage("Waiting for the machine to boot."),
        Some(_) => progress.stage("Verifying."),
        None => {}
    };
    let is_over = |reply: &PollReply| {
        let is_complete = |last: LastUpdate| {
            last.outcome != UpdateOutcome::Done
                || (last.verified_generation.is_some() && !last.awaits_boot)
        };
        reply.activity == Activity::Idle && result_of(update_id, reply).is_some_and(is_complete)
    };
    let reply = machine.wait_until("the update has not ended", look, is_over).await?;
    let last = result_of(update_id, &reply).expect("it was waited for");
    match last.outcome {
        UpdateOutcome::Done => Ok(Some(last)),
        outcome => Err(ToolError::Update(outcome)),
    }
}

/// Offers a signed image to the machine. False if the machine cannot take it now.
async fn offer(machine: &Machine, order: &Order) -> Result<bool, ToolError> {
    for part in order.image.signed_parts().filter(|part| !part.signatures.is_empty()) {
        let request = OfferImageRequest {
            content: part.content.clone(),
            signatures: part.signatures.clone(),
            sources: order.sources.clone(),
        };
        match machine.call::<OfferImage>(&request).await {
            // A machine without this method accepts unsigned images.
            Err(error) if error.code() == Some(FaultCode::NoMethod) => return Ok(true),
            other => {
                if !accepted(other)? {
                    return Ok(false);
                }
            }
        }
    }
    Ok(true)
}

/// Stages the update. False if the machine has changed since it was compared.
async fn prepare(
    machine: &Machine,
    order: &Order,
    comparison: &Comparison,
    update_id: u64,
    progress: &mut Progress,
) -> Result<bool, ToolError> {
    let content = &order.image.content;
    let plan = comparison.planned.unblocked();
    let changes = match plan.operations.len() as u64 {
        0 => "no change but the name of the image and its triggers".to_owned(),
        count => counted(count, "change"),
    };
    progress.stage(&format!("Staging {changes}."));
    let instance = comparison.reply.version.instance;
    let request = PrepareRequest {
        update_id,
        expects: ExpectedState {
            instance,
            root: comparison.scan.root,
            scope: comparison.scan.scope,
        },
        image: order.image.name().clone(),
        image_digest: order.image.digest,
        plan,
        triggers: content.triggers.clone(),
        health_check: content.health_check.clone(),
        force_disruption: order.force_disruption,
        expires_seconds: EXPIRES_SECONDS,
    };
    if !accepted(machine.call::<Prepare>(&request).await)? {
        return Ok(false);
    }
    let is_staged = |reply: &PollReply| {
        reply.version.instance != instance
            || reply.activity == Activity::Prepared { update_id }
            || result_of(update_id, reply).is_some()
    };
    let reply = machine.wait_until("the update is not staged", |_| (), is_staged).await?;
    if reply.version.instance != instance {
        return Ok(false);
    }
    match result_of(update_id, &reply) {
        Some(last) => Err(ToolError::Update(last.outcome)),
        None => Ok(true),
    }
}

/// Returns the result of the update, if the machine reports it.
fn result_of(update_id: u64, reply: &PollReply) -> Option<LastUpdate> {
    reply.last_update.clone().filter(|last| last.update_id == update_id)
}

/// Empties the cache: the machine has its image, so it needs no objects.
async fn clean(machine: &Machine, reply: &PollReply) -> Result<(), ToolError> {
    for batch in cached_objects(reply).chunks(IDS_MAX) {
        machine.call::<Cleanup>(&CleanupRequest { objects: batch.to_vec() }).await?;
    }
    Ok(())
}

/// True if a call was accepted, false if the machine has changed in the meantime and must be
/// compared again.
fn accepted<T>(result: Result<T, CallError>) -> Result<bool, ToolError> {
    match result {
        Ok(_) => Ok(true),
        Err(error) => match error.code() {
            Some(FaultCode::Stale | FaultCode::Busy) => Ok(false),
            _ => Err(error.into()),
        },
    }
}

/// Returns the first paths of a plan, for an error.
fn named(plan: &Plan) -> String {
    let paths: Vec<String> =
        plan.operations.iter().take(PATHS_NAMED).map(|one| one.path.to_string()).collect();
    let dots = if plan.operations.len() > PATHS_NAMED { " ..." } else { "" };
    format!("{}{dots}", paths.join(", "))
}

/// Returns a random number. The standard library seeds its hash maps from the kernel.
fn new_id() -> u64 {
    RandomState::new().build_hasher().finish()
}
