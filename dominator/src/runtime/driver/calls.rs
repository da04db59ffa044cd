//! Carries out the effects of the state machine that take time: calls of the sub, plans, Commits.

use std::sync::Arc;
use std::time::Duration;

use api::Done;
use api::codec::length;
use api::fault::FaultCode;
use api::planning::PlanJob;
use api::subd::{
    Cleanup, Commit, CommitRequest, ContinueProvisioning, Fetch, GetRefusedChanges, GetResources,
    GetResourcesRequest, GetTaskStates, GetTaskStatesReply, GetTaskStatesRequest, GetTasks,
    GiveUpProvisioning, HoldMachine, Hurry, OfferContents, OfferContentsRequest, OfferImage,
    OrderTask, Poll, PollReply, PollRequest, Prepare, PrepareRequest, Provision, RetryTriggers,
    ScanNow, ScanNowRequest, SetConfiguration, SetNotRestarted, SubVersion,
};
use model::display::error_chain;
use model::image::ImageName;
use model::image::required::RequiredImage;
use model::mdb::Machine;
use model::object::ObjectId;
use model::plan::RefusedChanges;
use model::tree::Tree;
use rpc::client::{CallError, Client};
use rpc::trees::TreeReadError;

use super::Handle;
use crate::core::changes::OrderedUpdate;
use crate::core::claims::{ClaimAnswer, ClaimKind};
use crate::core::sub::{Call, ContentsToSign, Event, Failure, FailureKind, RequestId};
use crate::runtime::computed::PushError;
use crate::runtime::shared::Shared;

/// How much longer than it asked for the answer to a poll may take.
const POLL_SLACK: Duration = Duration::from_secs(30);

/// How long a sub may take to accept a call.
const ACCEPT_LIMIT: Duration = Duration::from_secs(30);

/// How long a sub may take to accept a plan, which may be large.
const PREPARE_LIMIT: Duration = Duration::from_secs(120);

/// The longest list of refused changes that is kept, in bytes as it is sent.
const REFUSED_BYTES_MAX: usize = 4 << 20;

/// How often counters are read: a poll does not return when only they change.
const COUNTER_INTERVAL: Duration = Duration::from_millis(100);

/// How long a scan that was ordered may take.
const SCAN_LIMIT: Duration = Duration::from_secs(300);

pub(super) async fn poll(
    client: Client,
    shared: Arc<Shared>,
    machine: Arc<Machine>,
    request_id: RequestId,
    request: PollRequest,
) -> Event {
    if request.wait_ms == 0 {
        shared.dial_limiter.permit().await;
    }
    let limit = Duration::from_millis(request.wait_ms.into()) + POLL_SLACK;
    // What is only needed after the answer is boxed: this future exists while the poll waits.
    match client.call_within::<Poll>(&request, limit).await.map(Box::new) {
        Ok(reply) => {
            shared.metrics.polled(true);
            if let Some(key) = client.take_new_server_key().await {
                shared.computed.take_key(&machine.hostname, &key);
            }
            Event::Polled(request_id, reply)
        }
        Err(error) => {
            shared.metrics.polled(false);
            let mut failure = failure_of(&error);
            if error.is_of_ended_certificate() && !shared.renew_expired.is_zero() {
                let became = Box::pin(replace_certificate(&client, &shared)).await;
                failure.text = format!("{}: {became}", failure.text);
            }
            Event::PollFailed(request_id, failure)
        }
    }
}

/// Gives a machine another certificate whose own has ended, unless it must not be changed now.
/// Returns what became of it.
async fn replace_certificate(client: &Client, shared: &Arc<Shared>) -> String {
    let (peer, host) = (client.peer(), &client.peer().host);
    let replacing = shared.computed.replace_certificate(peer.clone(), shared.renew_expired);
    let passed = shared.gate.pass(host, shared.clock.now().wall, Box::pin(replacing)).await;
    match passed {
        Ok(Ok(())) => {
            tracing::warn!(%host, "its certificate had ended, and was replaced");
            let (audit, arguments) = (shared.audit.clone(), format!("host={host}"));
            let record = move || {
                let why = "the certificate of the machine had ended";
                audit.record_decision("replace-certificate", &arguments, why);
            };
            // This fails only if the thread panicked, which has been logged.
            let _recorded = tokio::task::spawn_blocking(record).await;
            "it was given another one".to_owned()
        }
        Ok(Err(error)) => format!("it gets no other one: {}", error_chain(&error)),
        Err(closed) => format!("it gets no other one: {}", closed.text()),
    }
}

pub(super) async fn read_leaving(
    shared: Arc<Shared>,
    request_id: RequestId,
    required: Arc<RequiredImage>,
    former: ImageName,
) -> Event {
    Event::LeavingRead(request_id, shared.images.with_leaving(&required, &former).await)
}

pub(super) async fn read_tree(
    client: Client,
    shared: Arc<Shared>,
    request_id: RequestId,
    root: ObjectId,
    former: Option<Tree>,
) -> Event {
    let tree = match shared.reader.from_sub(&client, root, former.as_ref()).await {
        Ok(tree) => tree,
        Err(error) => {
            let kind = match &error {
                TreeReadError::Call { source } => failure_of(source).kind,
                TreeReadError::Changed => FailureKind::Stale,
                _ => FailureKind::InvalidReply,
            };
            return Event::TreeFailed(request_id, Failure { kind, text: error.text() });
        }
    };
    match client.call_within::<GetRefusedChanges>(&(), ACCEPT_LIMIT).await {
        Ok(reply) if length("reply", &reply).is_ok_and(|bytes| bytes > REFUSED_BYTES_MAX) => {
            let text = format!("it refuses changes of more than {REFUSED_BYTES_MAX} bytes");
            Event::TreeFailed(request_id, Failure { kind: FailureKind::InvalidReply, text })
        }
        Ok(reply) => {
            let refused: RefusedChanges = reply.changes.into_iter().collect();
            Event::TreeRead(request_id, tree, Some(Arc::new(refused)))
        }
        Err(error) => match failure_of(&error) {
            // An earlier release, or a certificate of an earlier release.
            Failure { kind: FailureKind::NoMethod | FailureKind::Refused, .. } => {
                Event::TreeRead(request_id, tree, None)
            }
            failure => Event::TreeFailed(request_id, failure),
        },
    }
}

pub(super) async fn plan(shared: Arc<Shared>, request_id: RequestId, job: Box<PlanJob>) -> Event {
    Event::Planned(request_id, shared.planned(*job).await.map(Arc::new))
}

pub(super) async fn call_sub(
    client: Client,
    shared: Arc<Shared>,
    request_id: RequestId,
    call: Call,
) -> Event {
    let result = match &call {
        Call::AddObjects(ids) => {
            let pushed = shared.computed.push(&client, Arc::clone(ids)).await;
            return match pushed {
                Ok(()) => Event::Accepted(request_id),
                Err(PushError::Call(error)) => Event::CallFailed(request_id, failure_of(&error)),
                Err(error @ (PushError::Store(_) | PushError::Lost)) => {
                    let (kind, text) = (FailureKind::Unavailable, error_chain(&error));
                    Event::CallFailed(request_id, Failure { kind, text })
                }
            };
        }
        Call::SetConfiguration(configuration) => {
            client.call_within::<SetConfiguration>(configuration, ACCEPT_LIMIT).await
        }
        Call::Hold => client.call_within::<HoldMachine>(&shared.holder, ACCEPT_LIMIT).await,
        Call::Fetch(request) => client.call_within::<Fetch>(request, ACCEPT_LIMIT).await,
        Call::Prepare(request, contents) => {
            let contents = contents.as_deref();
            return match prepare(&client, &shared, request, contents).await {
                Ok(()) => Event::Accepted(request_id),
                Err(failure) => Event::CallFailed(request_id, failure),
            };
        }
        Call::Offer(request) => client.call_within::<OfferImage>(request, ACCEPT_LIMIT).await,
        Call::RetryTriggers => client.call_within::<RetryTriggers>(&(), ACCEPT_LIMIT).await,
        Call::Cleanup(request) => client.call_within::<Cleanup>(request, ACCEPT_LIMIT).await,
        Call::Provision(request) => {
            let call = Box::pin(client.call_within::<Provision>(request, ACCEPT_LIMIT));
            return gated(&client, &shared, request_id, call).await;
        }
        Call::ContinueProvisioning(request) => {
            let call = Box::pin(client.call_within::<ContinueProvisioning>(request, ACCEPT_LIMIT));
            return gated(&client, &shared, request_id, call).await;
        }
        Call::GiveUpProvisioning(request) => {
            let call = Box::pin(client.call_within::<GiveUpProvisioning>(request, ACCEPT_LIMIT));
            return gated(&client, &shared, request_id, call).await;
        }
        Call::OrderTask(request) => client.call_within::<OrderTask>(request, ACCEPT_LIMIT).await,
        Call::SetNotRestarted(request) => {
            client.call_within::<SetNotRestarted>(request, ACCEPT_LIMIT).await
        }
    };
    match result {
        Ok(_done) => Event::Accepted(request_id),
        Err(error) => Event::CallFailed(request_id, failure_of(&error)),
    }
}

/// Has plugins called, unless updates are disabled or paused.
async fn gated(
    client: &Client,
    shared: &Shared,
    request_id: RequestId,
    call: impl Future<Output = Result<Done, CallError>>,
) -> Event {
    let host = &client.peer().host;
    let failure = if shared.identities.has_identity_mismatch(host) {
        withheld("it may be another machine than the one that is meant")
    } else {
        match shared.gate.pass(host, shared.clock.now().wall, call).await {
            Ok(Ok(_done)) => return Event::Accepted(request_id),
            Ok(Err(error)) => failure_of(&error),
            Err(closed) => {
                // The task that closed the gate waits for this call and runs next.
                tokio::task::yield_now().await;
                withheld(closed.text())
            }
        }
    };
    Event::CallFailed(request_id, failure)
}

/// Asks a machine how its resources are.
pub(super) async fn read_resources(
    client: Client,
    request_id: RequestId,
    request: GetResourcesRequest,
) -> Event {
    let reply = client.call_within::<GetResources>(&request, ACCEPT_LIMIT).await;
    Event::ResourcesRead(request_id, Box::new(reply.map_err(|error| failure_of(&error))))
}

/// Asks the machine how its tasks are.
pub(super) async fn task_states(
    client: &Client,
    request: &GetTaskStatesRequest,
) -> Result<GetTaskStatesReply, Failure> {
    let told = client.call_within::<GetTaskStates>(request, ACCEPT_LIMIT).await;
    told.map_err(|error| failure_of(&error))
}

/// Has an update staged. Only the machine knows whether it needs the signatures of contents.
async fn prepare(
    client: &Client,
    shared: &Shared,
    request: &PrepareRequest,
    contents: Option<&ContentsToSign>,
) -> Result<(), Failure> {
    if request.triggers.have_tasks() {
        // Asked only for whether the machine knows the method.
        let asked = client.call_within::<GetTasks>(&(), ACCEPT_LIMIT).await;
        let failure = asked.err().map(|error| failure_of(&error));
        if let Some(failure) = failure.filter(|failure| failure.kind == FailureKind::NoMethod) {
            return Err(failure);
        }
    }
    let unsigned = match contents {
        Some(contents) => {
            offer_contents(client, shared, contents).await.map_err(|error| failure_of(&error))?
        }
        None => Vec::new(),
    };
    let prepared = client.call_within::<Prepare>(request, PREPARE_LIMIT).await;
    prepared.map(drop).map_err(|error| {
        let mut failure = failure_of(&error);
        if failure.kind == FailureKind::Untrusted && !unsigned.is_empty() {
            failure.text += &format!("; not all of its content is signed: {}", unsigned.join("; "));
        }
        failure
    })
}

/// Has the content of computed files signed, and gives the signatures to the machine. Returns why
/// it may lack some.
async fn offer_contents(
    client: &Client,
    shared: &Shared,
    contents: &ContentsToSign,
) -> Result<Vec<String>, CallError> {
    let (signatures, mut troubles) = shared.computed.sign(contents).await;
    let request = OfferContentsRequest { signatures };
    match client.call_within::<OfferContents>(&request, ACCEPT_LIMIT).await {
        Ok(_) => {}
        // An earlier release, or a certificate of one.
        Err(CallError::Fault { source, .. }) => {
            troubles.push(format!("the machine does not take signatures: {}", source.message));
        }
        Err(error) => return Err(error),
    }
    Ok(troubles)
}

/// Records what a Commit orders, and sends it.
pub(super) async fn commit(
    client: Client,
    shared: Arc<Shared>,
    request_id: RequestId,
    host: String,
    handle: Arc<Handle>,
    ordered: Box<OrderedUpdate>,
) -> Event {
    match try_commit(&client, &shared, &host, &handle, ordered).await {
        Ok(()) => Event::Accepted(request_id),
        Err(failure) => Event::CallFailed(request_id, failure),
    }
}

pub(super) async fn try_commit(
    client: &Client,
    shared: &Shared,
    host: &str,
    handle: &Handle,
    ordered: Box<OrderedUpdate>,
) -> Result<(), Failure> {
    if shared.gate.brake().is_some() {
        return Err(withheld("the brake was pulled"));
    }
    if shared.claim_service.answer(handle.claimant, ClaimKind::Update) != Some(ClaimAnswer::Granted)
    {
        return Err(withheld("the claim was withdrawn"));
    }
    let update_id = ordered.update_id;
    let recorded = shared.history.order(host, ordered, &shared.images, &shared.reader).await;
    recorded
        .map_err(|error| Failure { kind: FailureKind::NotRecorded, text: error.to_string() })?;
    // Boxed, because the future of the gate contains it.
    let commit = Box::pin(async {
        // The write takes time: what was checked before may have changed.
        if shared.identities.has_identity_mismatch(host) {
            return Err(withheld("it may be another machine than the one that is meant"));
        }
        if !handle.with_sub(|sub| sub.is_commit_wanted(update_id)) {
            return Err(withheld("something else is wanted now"));
        }
        if !shared.claim_service.begin(handle.claimant) {
            return Err(withheld("the claim was withdrawn"));
        }
        let sent = client.call_within::<Commit>(&CommitRequest { update_id }, ACCEPT_LIMIT).await;
        sent.map(|_done| ()).map_err(|error| failure_of(&error))
    });
    let closed = match shared.gate.pass(&client.peer().host, shared.clock.now().wall, commit).await
    {
        Ok(result) => return result,
        Err(closed) => closed,
    };
    // The task that closed the gate waits for this Commit and runs next, even on this thread.
    tokio::task::yield_now().await;
    Err(withheld(closed.text()))
}

pub(super) fn withheld(why: &str) -> Failure {
    Failure { kind: FailureKind::Cancelled, text: why.to_owned() }
}

/// Classifies a failed call for the state machine.
fn failure_of(error: &CallError) -> Failure {
    let kind = match error {
        CallError::Connect { .. } | CallError::TimedOut { .. } | CallError::Lost { .. } => {
            FailureKind::Unreachable
        }
        CallError::Fault { source, .. } => match source.code {
            FaultCode::Busy => FailureKind::Busy,
            FaultCode::Unavailable => FailureKind::Unavailable,
            FaultCode::Held => FailureKind::Held,
            FaultCode::Untrusted => FailureKind::Untrusted,
            FaultCode::NoMethod => FailureKind::NoMethod,
            FaultCode::Stale => FailureKind::Stale,
            FaultCode::NotFound => FailureKind::NotFound,
            FaultCode::NoSpace => FailureKind::NoSpace,
            _ => FailureKind::Refused,
        },
        _ => FailureKind::InvalidReply,
    };
    Failure { kind, text: error_chain(error) }
}

/// Orders a scan of the whole tree and waits for its end: an operator called the next update
/// urgent.
pub(super) async fn scan(client: Client, request_id: RequestId, have: SubVersion) -> Event {
    if let Err(error) = client.call_within::<Hurry>(&(), ACCEPT_LIMIT).await {
        // A sub of an earlier release, for example: the update is made all the same.
        tracing::info!("the fetch may be held back: {}", error_chain(&error));
    }
    let result = match tokio::time::timeout(SCAN_LIMIT, scan_twice(&client, have)).await {
        Ok(result) => result.map_err(|error| failure_of(&error)),
        Err(_) => {
            let text = format!("no pass over the tree has ended within {SCAN_LIMIT:?}");
            Err(Failure { kind: FailureKind::Busy, text })
        }
    };
    Event::Scanned(request_id, result)
}

/// Waits for two passes: the first may have started before the order.
async fn scan_twice(client: &Client, have: SubVersion) -> Result<SubVersion, CallError> {
    let mut last = poll_now(client, have).await?;
    for _pass in 0..2 {
        let before = last.counters.metadata_passes;
        let instance = last.version.instance;
        let request = ScanNowRequest { content: false, media: false };
        client.call_within::<ScanNow>(&request, ACCEPT_LIMIT).await?;
        loop {
            last = poll_now(client, last.version).await?;
            // A sub that was restarted reports nothing before its first scan.
            if last.counters.metadata_passes > before || last.version.instance != instance {
                break;
            }
            tokio::time::sleep(COUNTER_INTERVAL).await;
        }
    }
    Ok(last.version)
}

/// Polls without waiting. The reply leaves out what has the version `have`.
async fn poll_now(client: &Client, have: SubVersion) -> Result<PollReply, CallError> {
    let request = PollRequest { have: Some(have), wait_ms: 0 };
    client.call_within::<Poll>(&request, ACCEPT_LIMIT).await
}
