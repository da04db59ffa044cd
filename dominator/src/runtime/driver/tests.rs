//! Commits on their way through the disk to the sub, with a disk that waits for the test.

use api::subd::HoldMachineRequest;
use rpc::tls::Security;
use std::collections::BTreeSet;

use api::Done;
use rpc::audit_log::AuditLog;
use rpc::client::CallMemory;
use rpc::server::{Router, serve};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::calls::{try_commit, withheld};
use super::*;
use crate::core::budget::limits::MachineLimits;
use crate::core::budget::{Demand, Impact, UpdateClass};
use crate::core::changes::OrderedUpdate;
use crate::core::changes::tests::ordered;
use crate::core::claims::{ClaimSettings, Release, UpdateClaim, UpdateEnd};
use crate::core::image_breaker::FailureLimits;
use crate::core::sources::Sources;
use crate::core::sub::Failure;
use crate::core::sub::tests::recorder::staged_sub;
use crate::core::vote_links::VoteLinks;
use crate::runtime::commit_gate::CommitGate;
use crate::runtime::computed::ComputedService;
use crate::runtime::dial_limiter::DialLimiter;
use crate::runtime::history::History;
use crate::runtime::identities::Identities;
use crate::runtime::interned::Interned;
use crate::runtime::permits::PermitService;
use crate::runtime::shared::DriverCounters;
use crate::runtime::task_orders::TaskOrderService;
use crate::runtime::webhooks::Webhooks;
use crate::storage::tests::HeldDisk;
use crate::storage::{HistoryLimits, Storage};
use api::subd::{CacheReport, Commit, PollReply, ScanReport, SubVersion};
use model::object::{Algorithm, ObjectId, ObjectSet};
use model::scope::{ScanSettings, Scope};
use model::tree::Tree;
use model::tree::text::from_text;
use rpc::trees::TreeReader;

/// What drivers share that have no machines yet.
pub(crate) fn shared(state: &Arc<Storage>, stop: &CancellationToken) -> Shared {
    let clock = Clock::start();
    let reader = Arc::new(TreeReader::new(2));
    let nobody = Client::new(
        Peer { host: "nobody".to_owned(), port: 1, address: None },
        &Security::Insecure,
    );
    let settings = ClaimSettings {
        updating: MachineLimits::default(),
        high_impact: MachineLimits::default(),
        network: None,
        failures: FailureLimits { percent: 100, blocked_percent: 100, failures_min: 1 },
    };
    let (store, tasks) = (state.open_computed().unwrap(), TaskTracker::new());
    let computed = ComputedService::new(store, clock, Security::Insecure, tasks, stop.clone());
    let limits = HistoryLimits { bytes: 1 << 30, seconds: 1 << 40 };
    Shared {
        vote_links: VoteLinks::new(None, [0; 32]),
        webhooks: Webhooks::read(None).unwrap(),
        holder: HoldMachineRequest { dominator: "test".to_owned(), start: 1 },
        security: Security::Insecure,
        audit: AuditLog::none(),
        clock,
        images: Images::new(
            nobody,
            clock,
            Arc::clone(&reader),
            Arc::clone(state),
            TaskTracker::new(),
            stop.clone(),
        ),
        reader,
        gate: CommitGate::new(Arc::clone(state)),
        history: History::start(Arc::clone(state), limits, clock).unwrap(),
        identities: Arc::new(Identities::open(Arc::clone(state), clock).unwrap()),
        state: Arc::clone(state),
        default_image_changed: watch::Sender::default(),
        metrics: DriverCounters::default(),
        claim_service: Arc::new(ClaimService::new(clock, settings, Arc::clone(state))),
        computed: Arc::new(computed.unwrap()),
        task_orders: Arc::new(TaskOrderService::new(Arc::clone(state))),
        permits: Arc::new(PermitService::open(Duration::from_secs(300), Arc::clone(state), clock)),
        sources: Sources::new(&[]),
        dial_limiter: DialLimiter::default(),
        caches: Interned::default(),
        machine_memory: CallMemory::new(1 << 20),
        subd_port: 1,
        renew_expired: Duration::ZERO,
        departing_after: Duration::ZERO,
    }
}

/// Sends the Commit that the sub of [`staged_sub`] waits for, while `meanwhile` happens between the
/// order and the moment when it is on the disk; gives what came of it, and which Commits arrived.
async fn commit_while(meanwhile: impl FnOnce(&Shared, &Handle)) -> (Result<(), Failure>, Vec<u64>) {
    let (directory, stop) = (tempfile::tempdir().unwrap(), CancellationToken::new());
    let state = Arc::new(Storage::open(directory.path()).unwrap());
    let shared = shared(&state, &stop);
    let commits: Arc<Mutex<Vec<u64>>> = Arc::default();
    let arrived = Arc::clone(&commits);
    let router =
        Router::new("subd", &Security::Insecure).method::<Commit, _>(move |(), _, request| {
            arrived.lock().unwrap().push(request.update_id);
            async { Ok(Done {}) }
        });
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(serve(listener, router, stop.clone()));
    let (host, port) = ("web".to_owned(), address.port());
    let client = Client::new(Peer { host, port, address: Some(address.ip()) }, &Security::Insecure);

    let sub = staged_sub();
    let handle = Handle::new(Arc::new(Machine::default()), &shared);
    *handle.locked() = sub;
    shared.claim_service.set_machines(std::iter::empty(), &BTreeSet::new());
    shared.claim_service.activity_known(handle.claimant);
    let demand = Demand {
        class: UpdateClass::Repair,
        impact: Impact::Plain,
        location: String::new(),
        since: Duration::ZERO,
    };
    let update = UpdateClaim { demand, new_parts: Vec::new() };
    shared.claim_service.claim(handle.claimant, Claim::Update(update));

    let disk = HeldDisk::of(state);
    let tree = |name: &str| from_text(Algorithm::Blake3, &format!("d 755 0:0 /{name}\n")).unwrap();
    let ordered = OrderedUpdate { update_id: 1, ..ordered(&tree("before"), &tree("after"), &[]) };
    let commit = try_commit(&client, &shared, "web", &handle, Box::new(ordered));
    tokio::pin!(commit);
    assert!(futures_util::poll!(commit.as_mut()).is_pending(), "it is to be recorded first");
    meanwhile(&shared, &handle);
    disk.let_go();
    let result = commit.await;
    assert_eq!(shared.history.last_update("web"), Some(1));
    stop.cancel();
    (result, commits.lock().unwrap().clone())
}

/// The machine has this record from now on.
fn assign(shared: &Shared, handle: &Handle, machine: Machine, image: ImageState) {
    let (machine, planned) = (Arc::new(machine), ImageState::Undefined);
    let event = Event::Assigned { machine, image, planned, rollback: None };
    let context = Context { jitter: 500, sources: &[], stopped: &[] };
    handle.locked().step(shared.clock.now(), event, &context);
}

/// A machine whose sub has reported that its cache has these objects; gives what is held of it.
fn reported_cache(shared: &Shared, hostname: &str, objects: &[ObjectId]) -> Arc<ObjectSet> {
    let machine = Machine { hostname: hostname.to_owned(), ..Machine::default() };
    let handle = Handle::new(Arc::new(machine), shared);
    handle.step(Event::Wake, shared);
    let polled = handle.take_effects().into_iter().find_map(|effect| match effect {
        Effect::Poll(request_id, _) => Some(request_id),
        _ => None,
    });
    let tree = Tree::empty(Algorithm::Blake3);
    let version = SubVersion { instance: 1, generation: 1, status: 1 };
    let scope = Scope::of(&ScanSettings::default(), &[]);
    let reply = PollReply {
        scan: Some(ScanReport::of(scope, &tree)),
        cache: Some(CacheReport::Full(objects.to_vec())),
        ..PollReply::idle(version, scope)
    };
    handle.step(Event::Polled(polled.unwrap(), Box::new(reply)), shared);
    handle.with_sub(|sub| Arc::clone(&sub.view().unwrap().cache))
}

#[tokio::test]
async fn equal_object_caches_are_held_once() {
    let (directory, stop) = (tempfile::tempdir().unwrap(), CancellationToken::new());
    let state = Arc::new(Storage::open(directory.path()).unwrap());
    let shared = shared(&state, &stop);
    let [one, two] = [b"1", b"2"].map(|content| Algorithm::Blake3.digest(content));
    let caches = [("a", vec![one, two]), ("b", vec![two, one]), ("c", vec![one])]
        .map(|(hostname, objects)| reported_cache(&shared, hostname, &objects));
    assert!(Arc::ptr_eq(&caches[0], &caches[1]));
    assert_eq!((caches[0].len(), caches[2].len()), (2, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_commit_is_sent_when_it_is_on_the_disk_unless_something_else_is_wanted_by_then() {
    let sent = commit_while(|_, _| {}).await;
    assert_eq!(sent, (Ok(()), vec![1]));
    let not_sent = |why: &str| (Err(withheld(why)), Vec::new());
    let otherwise = commit_while(|shared, handle| {
        assign(shared, handle, Machine::default(), ImageState::Undefined);
    });
    assert_eq!(otherwise.await, not_sent("something else is wanted now"));
    let withdrawn = commit_while(|shared, handle| {
        shared.claim_service.release(handle.claimant, Release::Update(UpdateEnd::Withdrawn));
    });
    assert_eq!(withdrawn.await, not_sent("the claim was withdrawn"));
}
