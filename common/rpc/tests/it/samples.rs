//! One request and one reply for every method, with a value in every field.

mod computed;
mod departing;
mod fleet_tasks;
mod image_life;
mod machine_database;
mod replication;
mod resources;
mod rollouts;
mod sub_state;

use std::collections::BTreeMap;

use ::tasks::planned::PlannedTask;
use api::Done;
use api::dominator::events::{
    AcceptClockRequest, BackupReply, BackupRequest, ChangeReason, EventDetails, EventKind,
    EventPosition, HistoryEvent, ListEventsReply, ListEventsRequest, PathChange, UpdateSummary,
};
use api::dominator::explain::*;
use api::dominator::orders::{TrustRequest, *};
use api::dominator::plan::*;
use api::dominator::rollback::*;
use api::dominator::settings::*;
use api::dominator::*;
use api::image_server::expiry::AcceptClockReply;
use api::image_server::*;
use api::object_server::*;
use api::planning::preview::{ChangeCounts, PlanSummary, Preview};
use api::subd::*;
use model::escape::ByteText;
use model::filter::{Filter, Patterns};
use model::image::{ComputedRule, Content, HealthCheck, Image, ImageName, Notes, Package};
use model::object::{Algorithm, ObjectId};
use model::path::TreePath;
use model::plan::{Action, Blocked, Difference, Obstacle, Occupant, Operation, Plan};
use model::scope::{Attributes, Coverage, ScanSettings, Scope};
use model::signing::ContentSigner;
use model::tree::{
    Computed, Device, File, Leaf, Metadata, Node, Special, Symlink, Time, TimePrecision, Totals,
    Tree, TreeBuilder, Xattrs,
};
use model::trigger::services::{ServiceCall, ServiceCalls, ServiceVerb};
use model::trigger::{Trigger, Triggers};

pub use computed::*;
pub use departing::*;
pub use fleet_tasks::*;
pub use image_life::*;
pub use machine_database::*;
pub use replication::*;
pub use resources::*;
pub use rollouts::*;
pub use sub_state::*;

/// An id of digits that are easy to find in a dump.
pub fn blake3(byte: u8) -> ObjectId {
    ObjectId::Blake3([byte; 32])
}

fn sha512(byte: u8) -> ObjectId {
    ObjectId::Sha512([byte; 64])
}

pub fn path(text: &str) -> TreePath {
    TreePath::new(text).unwrap()
}

fn name(text: &str) -> ImageName {
    ImageName::new(text).unwrap()
}

fn time() -> Time {
    Time { seconds: 1_700_000_000, nanoseconds: 5 }
}

fn texts(texts: &[&str]) -> Vec<String> {
    texts.iter().map(|&text| text.to_owned()).collect()
}

fn xattrs() -> Xattrs {
    [(b"user.note".to_vec(), b"a\xff".to_vec())].into_iter().collect()
}

fn metadata() -> Metadata {
    Metadata { mode: 0o4755, uid: 1, gid: 2, xattrs: xattrs() }
}

fn plain(mode: u32) -> Metadata {
    Metadata::new(mode, 0, 0)
}

fn file(object: ObjectId) -> Node {
    let (metadata, mtime, object) = (metadata(), time(), object.into());
    Node::Leaf(Leaf::File(File { metadata, mtime, size_bytes: 9, object }))
}

/// A node of every kind.
pub fn nodes(object: ObjectId) -> Vec<(TreePath, Node)> {
    let special = |device| Leaf::Special(Special { metadata: plain(0o600), mtime: time(), device });
    let symlink = Symlink { metadata: plain(0o777), target: ByteText(b"to/\xfe".to_vec()) };
    let computed = Computed { metadata: plain(0o644), source: "files:6972".to_owned() };
    vec![
        (path("/d"), Node::Directory(plain(0o755))),
        (TreePath::new(b"/d/\xff").unwrap(), Node::Directory(metadata())),
        (path("/d/block"), Node::Leaf(special(Device::Block { major: 8, minor: 1 }))),
        (path("/d/char"), Node::Leaf(special(Device::Character { major: 1, minor: 3 }))),
        (path("/d/computed"), Node::Leaf(Leaf::Computed(computed))),
        (path("/d/fifo"), Node::Leaf(special(Device::Fifo))),
        (path("/d/file"), file(object)),
        (path("/d/link"), Node::Leaf(Leaf::HardLink(path("/d/file")))),
        (path("/d/symlink"), Node::Leaf(Leaf::Symlink(symlink))),
    ]
}

/// A tree of all of them.
pub fn tree(algorithm: Algorithm) -> Tree {
    let object = algorithm.digest(b"contents\n");
    let mut builder = TreeBuilder::new(algorithm);
    for (path, node) in nodes(object) {
        builder.insert(path, node).unwrap();
    }
    builder.finish().unwrap()
}

fn patterns() -> Patterns {
    Patterns::new(["/var/log/.*", "/tmp/.*"]).unwrap()
}

fn triggers() -> Triggers {
    Triggers(vec![Trigger {
        match_lines: Patterns::new(["/etc/ssh/.*"]).unwrap(),
        service: "ssh".to_owned(),
        sort_name: "10".to_owned(),
        do_reload: true,
        do_reboot: false,
        high_impact: true,
        kind: Default::default(),
    }])
}

fn totals() -> Totals {
    Totals { entries: 9, directories: 2, bytes: 1 << 60, hard_links: 1, computed: 1, depth: 2 }
}

fn settings() -> ScanSettings {
    let filter = Filter::new(["/var/.*"]).unwrap();
    let coverage = Coverage::Full(filter);
    ScanSettings { algorithm: Algorithm::Sha512, coverage, attributes: Attributes::Labels }
}

fn version() -> SubVersion {
    SubVersion { instance: u64::MAX, generation: 7, status: 8 }
}

fn identity() -> SubIdentity {
    SubIdentity {
        hostname: "web-1".to_owned(),
        machine_id: "0123".to_owned(),
        boot_id: "4567".to_owned(),
        subd_version: "0.1.0".to_owned(),
    }
}

fn last_fetch() -> LastFetch {
    let error = FetchFailure::InsufficientSpace { need_bytes: 2, free_bytes: 1 };
    let complaint =
        Complaint { source: "images:6971".to_owned(), lies: true, text: "wrong".to_owned() };
    LastFetch {
        fetch_id: 3,
        error: Some(error),
        objects: 4,
        bytes: 5,
        took_ms: 6,
        reused: 7,
        complaints: vec![complaint],
    }
}

fn failure() -> TriggerFailure {
    TriggerFailure {
        service: "ssh".to_owned(),
        verb: "start".to_owned(),
        output: "exit status 1".to_owned(),
    }
}

fn last_update() -> LastUpdate {
    LastUpdate {
        update_id: 11,
        image: name("base/1"),
        outcome: UpdateOutcome::RolledBack("no space".to_owned()),
        verified_generation: Some(7),
        operations: 2,
        window_ns: 33_000_000,
        trigger_failures: vec![failure()],
        health: Some(Health::Failed("no answer".to_owned())),
        awaits_boot: true,
        unlocked: vec![path("/etc/resolv.conf")],
        ended: time(),
    }
}

fn counters() -> ScanCounters {
    ScanCounters {
        metadata_passes: 1,
        content_passes: 2,
        metadata_pass_ms: 3,
        content_pass_ms: 4,
        media_passes: 7,
        media_pass_ms: 8,
        hashed_bytes: 5,
        fetched_bytes: 6,
    }
}

fn load() -> Load {
    let share = |used| ResourceUse { limit: 1 << 60, used };
    Load { cpu: share(1), scan: share(2), write: share(3), network: share(4) }
}

fn alarms() -> Vec<Alarm> {
    vec![Alarm::ReadOnly, Alarm::WriteFailed("full".to_owned())]
}

pub fn paused() -> Paused {
    Paused { until: time(), reason: "a demonstration".to_owned() }
}

pub fn scan_now() -> ScanNowRequest {
    ScanNowRequest { content: true, media: false }
}

pub fn get_files() -> (GetFilesRequest, GetFilesReply) {
    let piece = Piece { path: path("/etc/motd"), offset: 1 << 60, length: 3 };
    let content =
        PieceContent { size_bytes: 9, mtime: time(), bytes: ByteText(b"a\xff\n".to_vec()) };
    let pieces = vec![Ok(content), Err("it is no file".to_owned())];
    (GetFilesRequest { pieces: vec![piece] }, GetFilesReply { pieces })
}

pub fn check_health() -> CheckHealthReply {
    CheckHealthReply { health: Some(Health::Passed) }
}

fn limits_report() -> LimitsReport {
    let told = Limits { network_percent: Some(5), ..Limits::default() };
    let ceilings = Limits {
        cpu_percent: Some(5),
        scan_percent: Some(2),
        write_percent: Some(10),
        network_percent: Some(3),
    };
    LimitsReport { told, ceilings }
}

fn space() -> FreeSpace {
    FreeSpace { free_bytes: 1 << 40, free_inodes: u64::MAX }
}

fn unreadable() -> Vec<(TreePath, String)> {
    vec![(path("/proc/x"), "Permission denied".to_owned())]
}

pub fn poll() -> (PollRequest, PollReply) {
    let request = PollRequest { have: Some(version()), wait_ms: 60_000 };
    let scan = ScanReport {
        scope: Scope(blake3(0xaa)),
        root: sha512(0xbb),
        totals: totals(),
        kept_directories: vec![path("/var")],
        externally_linked: vec![path("/usr/bin/x")],
        occupied: vec![(path("/proc"), Occupant::MountPoint)],
        times: TimePrecision { granularity_ns: 1_000_000_000, ..TimePrecision::default() },
        unreadable: unreadable(),
    };
    let cache = CacheReport::Changes { added: vec![blake3(1)], removed: vec![sha512(2)] };
    let reply = PollReply {
        version: version(),
        identity: identity(),
        activity: Activity::Fetching { fetch_id: 3, objects: 4, bytes: 5 },
        scan: Some(scan),
        scanned: true,
        scope: Scope(blake3(0xaa)),
        exclusions: patterns().lines().to_vec(),
        cache: Some(cache),
        last_fetch: Some(last_fetch()),
        last_update: Some(last_update()),
        last_image: Some(name("base/0")),
        trigger_failures: vec![failure()],
        space: space(),
        counters: counters(),
        load: load(),
        limits: limits_report(),
        alarms: alarms(),
        paused: Some(paused()),
        clock: time(),
    };
    (request, reply)
}

pub fn get_directories() -> (GetDirectoriesRequest, GetDirectoriesReply) {
    let request = GetDirectoriesRequest { digests: vec![blake3(1), sha512(2)] };
    let directories = vec![EncodedDirectory(ByteText(b"tree-1\0\xff".to_vec()))];
    (request, GetDirectoriesReply { directories, absent: vec![sha512(2)] })
}

pub fn fetch() -> (FetchRequest, Done) {
    let objects = [FetchObject { id: blake3(1), size_bytes: 1 << 60 }].into();
    let sources = texts(&["images:6971"]);
    (FetchRequest { fetch_id: 3, sources, objects, ahead: true }, Done {})
}

pub fn prepare() -> (PrepareRequest, Done) {
    let object = blake3(1);
    let mut operations: Vec<Operation> = nodes(object)
        .into_iter()
        .map(|(path, node)| Operation {
            path,
            action: Action::Create(node),
            reason: vec![Difference::Missing],
        })
        .collect();
    let mut more = |at: &str, action, reason| {
        operations.push(Operation { path: path(at), action, reason });
    };
    let displaced = vec![path("/e/x")];
    let replace = Action::Replace { node: file(object), displaced };
    more("/e", replace, vec![Difference::Kind, Difference::Content]);
    more("/f", Action::Change(file(object)), vec![Difference::Mode, Difference::Owner]);
    more("/g", Action::Remove, vec![Difference::Extra]);
    let why = |why| Blocked { path: path("/var"), why };
    let blocked = vec![
        why(Obstacle::HoldsKept { directory: path("/var/log") }),
        why(Obstacle::NotComputed { source: "files:6972".to_owned() }),
        why(Obstacle::MountPoint),
        why(Obstacle::SwapFile),
    ];
    let root = sha512(0xbb);
    let request = PrepareRequest {
        update_id: 11,
        expects: ExpectedState { instance: u64::MAX, root, scope: Scope(blake3(0xaa)) },
        image: name("base/1"),
        image_digest: blake3(0xcc),
        plan: Plan { operations, blocked }.into(),
        triggers: triggers(),
        health_check: Some(health_check()),
        force_disruption: true,
        expires_seconds: 600,
    };
    (request, Done {})
}

pub fn commit() -> (CommitRequest, Done) {
    (CommitRequest { update_id: 11 }, Done {})
}

pub fn cleanup() -> (CleanupRequest, Done) {
    (CleanupRequest { objects: vec![blake3(1)] }, Done {})
}

pub fn configuration() -> Configuration {
    Configuration { scan: settings(), limits: limits() }
}

fn limits() -> Limits {
    Limits {
        cpu_percent: Some(5),
        scan_percent: Some(2),
        write_percent: None,
        network_percent: Some(10),
    }
}

pub fn set_configuration() -> SetConfigurationRequest {
    SetConfigurationRequest { scan: None, limits: Some(limits()) }
}

fn health_check() -> HealthCheck {
    let command = texts(&["/bin/check", "-q"]);
    HealthCheck { command, within_seconds: 60, undo: true }
}

fn content() -> Content {
    Content {
        format: 1,
        name: name("base/1"),
        root: sha512(0xbb),
        filter: Some(Filter::new(["/var/.*"]).unwrap()),
        triggers: triggers(),
        computed: vec![ComputedRule { path: path("/d/c"), source: "files:6972".to_owned() }],
        health_check: Some(health_check()),
        signers: Vec::new(),
    }
}

/// An image in format 2, which names signers of computed files.
pub fn signed_content() -> Content {
    let key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIByiw1+aBsmSKnIN6HU2aMNBHg7vUqfdKq0rPsn81BJj";
    let signer = |paths| ContentSigner { key: key.to_owned(), paths };
    let signers = vec![signer(Vec::new()), signer(vec![path("/d/c")])];
    Content { format: 2, signers, ..content() }
}

fn notes() -> Notes {
    let package = Package { name: "ssh".to_owned(), version: "9.2".to_owned(), size_bytes: 5 };
    Notes {
        expires_at: Some(time()),
        owner_groups: texts(&["ops"]),
        owner_users: texts(&["ann"]),
        tags: BTreeMap::from([("os".to_owned(), "debian".to_owned())]),
        release_notes: Some("First.".to_owned()),
        build_log: Some(blake3(9)),
        packages: vec![package],
        created_by: "ann".to_owned(),
        created_for: "bob".to_owned(),
        created_on: time(),
        source_image: Some(name("base/0")),
        signatures: vec![image_life::signature()],
    }
}

pub fn add_image() -> (AddImageRequest, AddImageReply) {
    let request = AddImageRequest { content: content(), notes: notes() };
    (request, AddImageReply { digest: blake3(0xcc) })
}

pub fn get_image() -> (GetImageRequest, Image) {
    let request = GetImageRequest { name: name("base/1"), wait_ms: 60_000 };
    (request, Image { content: content(), notes: notes() })
}

pub fn list_images() -> (ListImagesRequest, ListImagesReply) {
    let summary = ImageSummary {
        name: name("base/1"),
        digest: blake3(0xcc),
        root: sha512(0xbb),
        totals: totals(),
        filter_lines: Some(1),
        triggers: 1,
        created_on: time(),
        expires_at: Some(time()),
        tags: image_life::tags(),
        signatures: 1,
    };
    let request = ListImagesRequest { after: Some(name("base/0")) };
    (request, ListImagesReply { images: vec![summary], more: true })
}

pub fn delete_image() -> (DeleteImageRequest, Done) {
    (DeleteImageRequest { name: name("base/1"), force: true }, Done {})
}

pub fn add_objects() -> ((), AddObjectsReply) {
    ((), AddObjectsReply { added: 1, added_bytes: 2, known: 3 })
}

pub fn check_objects() -> (CheckObjectsRequest, CheckObjectsReply) {
    let request = CheckObjectsRequest { ids: vec![blake3(1), sha512(2)], lease_seconds: 3_600 };
    (request, CheckObjectsReply { missing: vec![sha512(2)] })
}

pub fn get_objects() -> (GetObjectsRequest, ()) {
    (GetObjectsRequest { ids: vec![blake3(1), sha512(2)] }, ())
}

fn summary() -> SubSummary {
    SubSummary {
        hostname: "web-1".to_owned(),
        address: Some("10.0.0.7:6969".parse().unwrap()),
        status: Status::Synced,
        detail: "equals base/1".to_owned(),
        since: time(),
        required_image: "base/1".to_owned(),
        planned_image: "base/2".to_owned(),
        last_image: "base/1".to_owned(),
        last_seen: Some(time()),
        last_synced: Some(time()),
        alarms: 1,
    }
}

pub fn list_subs() -> (ListSubsRequest, ListSubsReply) {
    let tag = TagFilter { name: "tier".to_owned(), value: Some("front".to_owned()) };
    let request = ListSubsRequest {
        statuses: Status::ALL.to_vec(),
        hosts: texts(&["web*"]),
        images: texts(&["base"]),
        locations: texts(&["nyc"]),
        tags: vec![tag],
    };
    (request, ListSubsReply { subs: vec![summary()] })
}

pub fn show_sub() -> (ShowSubRequest, SubDetail) {
    let text = r#"[{"Hostname": "web-1", "RequiredImage": "base/1"}]"#;
    let machine = model::mdb::parse(text).unwrap().remove("web-1").unwrap();
    let poll = PollSummary {
        version: version(),
        identity: identity(),
        activity: Activity::Updating { update_id: 11 },
        root: Some(sha512(0xbb)),
        totals: Some(totals()),
        unreadable: unreadable(),
        last_fetch: Some(last_fetch()),
        last_update: Some(last_update()),
        trigger_failures: vec![failure()],
        space: space(),
        counters: counters(),
        load: load(),
        alarms: alarms(),
        paused: Some(paused()),
    };
    let detail = SubDetail {
        summary: summary(),
        machine,
        poll: Some(poll),
        plan: texts(&["remove /g (extra)"]),
        plan_operations: 1,
        missing_objects: 2,
        missing_bytes: 3,
        history: vec![(time(), Status::Updating, "changes 1 path".to_owned())],
        pause: Some(update_pause()),
    };
    (ShowSubRequest { hostname: "web-1".to_owned() }, detail)
}

pub fn get_status() -> ((), DominatorStatus) {
    let (reason, who) = ("outage".to_owned(), "ann".to_owned());
    let reply = DominatorStatus {
        brake: Some(Brake { reason, who, since: time() }),
        counts: vec![(Status::Synced, 2)],
        mdb_error: Some("line 1: no".to_owned()),
        mdb_held: Some(held_mdb()),
        mdb_read: Some(time()),
        mdb_unkept: Some("full".to_owned()),
        image_remarks: texts(&["web/7, for 2 machines: is deprecated"]),
        image_server_error: Some("refused".to_owned()),
        alarm_error: Some("exit status: 1".to_owned()),
        history_error: Some("full".to_owned()),
        budgets: budget_report(),
        directories: 4_000,
        paused: 3,
        default_image: Some(default_image()),
    };
    ((), reply)
}

pub fn disable_updates() -> (DisableUpdatesRequest, Done) {
    let (reason, who) = ("outage".to_owned(), "ann".to_owned());
    (DisableUpdatesRequest { reason, who }, Done {})
}

pub fn enable_updates() -> (EnableUpdatesRequest, Done) {
    (EnableUpdatesRequest { who: "ann".to_owned(), why: "over".to_owned() }, Done {})
}

pub fn retry() -> (RetryRequest, Done) {
    let (hostname, who, why) = ("web-1".to_owned(), "ann".to_owned(), "repaired".to_owned());
    (RetryRequest { hostname, who, why }, Done {})
}

pub fn trust() -> (TrustRequest, Done) {
    let (hostname, why) = ("web-1".to_owned(), "installed anew".to_owned());
    (TrustRequest { hostname, why, who: "ann".to_owned() }, Done {})
}

fn budget_report() -> BudgetReport {
    let image = ImageName::new("web/7").unwrap();
    BudgetReport {
        under_way: 7,
        waiting: 8,
        fetches_waiting: 9,
        bytes_waiting: 1 << 60,
        limits: vec![LimitUse {
            limit: "--max-updating nyc=8".to_owned(),
            places: 8,
            for_repairs: 2,
            repairs: 1,
            rollouts: 6,
            waiting: 8,
        }],
        stopped: vec![StoppedImage { image, why: "3 of 4 failed".to_owned(), since: time() }],
    }
}

pub fn accept_image() -> (AcceptImageRequest, Done) {
    let (why, who) = ("restored by hand".to_owned(), "ann".to_owned());
    (AcceptImageRequest { image: ImageName::new("web/7").unwrap(), why, who }, Done {})
}

pub fn resume_image() -> (ResumeImageRequest, Done) {
    let (why, who) = ("the switch was down".to_owned(), "ann".to_owned());
    (ResumeImageRequest { image: ImageName::new("web/7").unwrap(), why, who }, Done {})
}

pub fn list_events() -> (ListEventsRequest, ListEventsReply) {
    let at = |number, part| EventPosition { number, part };
    let request = ListEventsRequest {
        hosts: texts(&["web*"]),
        paths: texts(&["/etc/passwd"]),
        reasons: ChangeReason::ALL.to_vec(),
        kinds: EventKind::ALL.to_vec(),
        images: texts(&["web"]),
        who: texts(&["ann"]),
        since: Some(time()),
        until: Some(time()),
        before: Some(at(7, 2)),
        limit: 100,
        after: Some(at(3, 0)),
    };
    let update = UpdateSummary {
        update_id: u64::MAX,
        image: "web/8".to_owned(),
        former: "web/7".to_owned(),
        drift: 1,
        of_image: 2,
        computed: 3,
        outcome: Some(UpdateOutcome::Done),
        ended: Some(time()),
    };
    let directory = Node::Directory(Metadata::new(0o755, 0, 0));
    let change = Box::new(PathChange {
        path: path("/etc/passwd"),
        operation: api::dominator::events::PathOperation::Replace,
        reason: ChangeReason::Drift,
        differs: vec![Difference::Content],
        old: Some(directory),
        new: None,
    });
    let (verb, who, why) = ("retry".to_owned(), "ann".to_owned(), "repaired".to_owned());
    let (status, detail) = ("synced".to_owned(), "equals web/8".to_owned());
    let whats = [
        EventDetails::Status { status, detail },
        EventDetails::Update(update.clone()),
        EventDetails::Change { update: update.clone(), change },
        EventDetails::Order { verb, who, why },
        EventDetails::Gap { lost: 9 },
        EventDetails::TriggersFailed { update, triggers: failure().to_string() },
    ];
    let event = |what| HistoryEvent { at: at(6, 1), time: time(), about: "web-1".to_owned(), what };
    let events = whats.into_iter().map(event).collect();
    (request, ListEventsReply { events, next: Some(at(5, 0)) })
}

pub fn accept_dominator_clock() -> (AcceptClockRequest, AcceptClockReply) {
    let request = AcceptClockRequest { who: "ann".to_owned(), why: why() };
    (request, AcceptClockReply { now: time(), jumped_seconds: 86_400 })
}

pub fn backup() -> (BackupRequest, BackupReply) {
    let request = BackupRequest { id: 7, offset: 1 << 20, who: "ann".to_owned() };
    let bytes = ByteText(b"piece".to_vec());
    (request, BackupReply { id: 7, size_bytes: 2 << 20, digest: blake3(0x71), bytes })
}

fn why() -> String {
    "works".to_owned()
}

fn update_pause() -> UpdatePause {
    let (reason, who) = ("works".to_owned(), "ann".to_owned());
    UpdatePause { until: time(), reason, who, since: time() }
}

fn default_image() -> DefaultImage {
    DefaultImage { image: name("rescue/1"), who: "ann".to_owned(), since: time() }
}

pub fn pause_updates() -> (PauseUpdatesRequest, PauseUpdatesReply) {
    let (reason, who) = ("works".to_owned(), "ann".to_owned());
    let request =
        PauseUpdatesRequest { hosts: texts(&["web*"]), end: PauseEnd::After(3_600), reason, who };
    (request, PauseUpdatesReply { hostnames: texts(&["web-1"]), until: time() })
}

pub fn resume_updates() -> (ResumeUpdatesRequest, ResumeUpdatesReply) {
    let request =
        ResumeUpdatesRequest { hosts: texts(&["web*"]), who: "ann".to_owned(), why: why() };
    (request, ResumeUpdatesReply { hostnames: texts(&["web-1"]) })
}

fn rolled_back() -> Vec<RolledBackMachine> {
    let (from, image, who) = (name("web/2"), name("web/1"), "ann".to_owned());
    let rollback = Rollback { from, image, who, why: why(), since: time() };
    vec![RolledBackMachine { hostname: "web-1".to_owned(), rollback }]
}

pub fn roll_back() -> (RollBackRequest, RollBackReply) {
    let (hosts, from, who) = (texts(&["web*"]), name("web/2"), "ann".to_owned());
    let reply = RollBackReply { machines: rolled_back(), left_out: texts(&["web-2"]) };
    (RollBackRequest { hosts, from, why: why(), who }, reply)
}

pub fn end_rollback() -> (EndRollbackRequest, EndRollbackReply) {
    let request = EndRollbackRequest { hosts: texts(&["web*"]), why: why(), who: "ann".to_owned() };
    (request, EndRollbackReply { machines: rolled_back() })
}

pub fn list_lasting_orders() -> ((), ListLastingOrdersReply) {
    let (hostname, pause, status) = ("db-1".to_owned(), update_pause(), Status::Synced);
    let paused = vec![PausedMachine { hostname, pause, status }];
    ((), ListLastingOrdersReply { paused, rolled_back: rolled_back() })
}

pub fn force_disruptive_update() -> (ForceDisruptiveUpdateRequest, Done) {
    let (reason, who) = ("hole in ssh".to_owned(), "ann".to_owned());
    (ForceDisruptiveUpdateRequest { hostname: "web-1".to_owned(), reason, who }, Done {})
}

pub fn fast_update() -> (FastUpdateRequest, Done) {
    let (hostname, who) = ("web-1".to_owned(), "ann".to_owned());
    (FastUpdateRequest { hostname, who, why: why() }, Done {})
}

pub fn watch_sub() -> (WatchSubRequest, WatchSubReply) {
    let hostname = "web-1".to_owned();
    let request = WatchSubRequest { hostname: hostname.clone(), have: 7, wait_ms: 10_000 };
    let reply = WatchSubReply {
        hostname,
        version: 8,
        status: Status::Fetching,
        detail: "fetches; 1 object (1 byte) still to come".to_owned(),
        since: time(),
        is_current: true,
    };
    (request, reply)
}

pub fn set_default_image() -> (SetDefaultImageRequest, SetDefaultImageReply) {
    let image = Some(name("rescue/1"));
    let request =
        SetDefaultImageRequest { image, machines_max: 12, who: "ann".to_owned(), why: why() };
    (request, SetDefaultImageReply { machines: 12 })
}

pub fn explain() -> (ExplainRequest, Explanation) {
    let has = ActualState {
        image: "base/1".to_owned(),
        root: Some(sha512(0xbb)),
        last_update: Some(last_update()),
        last_seen: Some(time()),
        last_synced: Some(time()),
    };
    let must_have = RequiredState {
        image: "rescue/1".to_owned(),
        source: ImageSource::Default(default_image()),
        digest: Some(blake3(0x11)),
        root: Some(blake3(0x12)),
        missing: Some("it is being loaded".to_owned()),
        planned: "base/2".to_owned(),
        disable_updates: true,
    };
    let differs = DifferenceSummary {
        operations: 1,
        actions: vec![("remove".to_owned(), 1)],
        reasons: vec![("extra".to_owned(), 1)],
        paths: texts(&["/g (extra)"]),
        blocked: texts(&["/mnt: it is or holds a mount point"]),
        dangers: texts(&["it would remove 9 of 10 entries"]),
        is_cleared: true,
        missing_objects: 2,
        missing_bytes: 3,
    };
    let command = "domtool retry web-1".to_owned();
    let reply = Explanation {
        hostname: "web-1".to_owned(),
        status: Status::UpdateFailed,
        detail: "the update failed".to_owned(),
        since: time(),
        means: "the last update failed".to_owned(),
        has,
        must_have,
        differs: Some(differs),
        paused: Some(update_pause()),
        decided: vec![(time(), Status::Updating, "changes 1 path".to_owned())],
        waits_for: "the next try".to_owned(),
        next: "it is tried again".to_owned(),
        next_at: Some(time()),
        may: vec![Suggestion { command, what: "tries again now".to_owned() }],
    };
    (ExplainRequest { hostname: "web-1".to_owned() }, reply)
}

fn summary_of_update() -> PlanSummary {
    let call = |service, verb| ServiceCall::new(service, verb);
    PlanSummary {
        image: name("base/1"),
        from: Some(name("base/0")),
        same: false,
        changes: changes(),
        blocked: vec![Blocked { path: path("/var"), why: Obstacle::MountPoint }],
        dangers: texts(&["it would take away the only kernel"]),
        services: ServiceCalls {
            before: vec![call("db", ServiceVerb::Stop)],
            after: vec![call("db", ServiceVerb::Start), call("web", ServiceVerb::Reload)],
            own: true,
            reboot: false,
            high_impact: true,
        },
        tasks: [("web".to_owned(), PlannedTask::Restart)].into(),
        former_unknown: Some("it was deleted".to_owned()),
    }
}

fn changes() -> ChangeCounts {
    let reasons = [(Difference::Missing, 1), (Difference::Content, 2)].into();
    ChangeCounts { create: 1, replace: 2, change: 3, remove: 4, reasons }
}

fn waits() -> Vec<(Status, String)> {
    vec![(Status::UpdatesDisabled, "outage".to_owned())]
}

pub fn plan_machine() -> (PlanMachineRequest, PlanMachineReply) {
    let PlanSummary {
        image, from, same, changes, dangers, services, tasks, former_unknown, ..
    } = summary_of_update();
    let remove =
        Operation { path: path("/g"), action: Action::Remove, reason: vec![Difference::Extra] };
    let preview = Preview {
        image,
        from,
        same,
        changes,
        plan: Plan { operations: vec![remove], blocked: Vec::new() },
        dangers,
        services,
        tasks,
        former_unknown,
        fetch_objects: 2,
        fetch_bytes: 1 << 60,
    };
    let hostname = "web-1".to_owned();
    let request = PlanMachineRequest { hostname, image: Some(name("base/1")) };
    (request, PlanMachineReply { preview, waits: waits() })
}

pub fn plan_machines() -> (PlanMachinesRequest, PlanMachinesReply) {
    let hostname = "web-1".to_owned();
    let machine = model::mdb::Machine { hostname: hostname.clone(), ..Default::default() };
    let update = PlanOutcome::Update { update: 0, fetch_objects: 2, fetch_bytes: 1 << 60 };
    let unknown = PlanOutcome::Unknown { gap: NoPlanReason::NotReached, why: "refused".to_owned() };
    let plan = |outlook| MachinePlan { hostname: hostname.clone(), outlook, waits: waits() };
    let machines = vec![plan(update), plan(unknown)];
    let reply = PlanMachinesReply { updates: vec![summary_of_update()], machines };
    (PlanMachinesRequest { machines: vec![machine] }, reply)
}

pub fn set_sub_configuration() -> (SetSubConfigurationRequest, SetSubConfigurationReply) {
    let request = SetSubConfigurationRequest {
        level: Level::Tag(TagFilter::parse("tier=front")),
        values: [(Limit::NetworkPercent, Some(5)), (Limit::CpuPercent, None)].into(),
        why: "slow links".to_owned(),
        who: "ann".to_owned(),
    };
    (request, SetSubConfigurationReply { machines: 3 })
}

pub fn get_sub_configuration() -> (GetSubConfigurationRequest, GetSubConfigurationReply) {
    let (who, why) = ("ann".to_owned(), "slow links".to_owned());
    let setting = Setting { percent: 5, who, why, since: time() };
    let hostname = "web-1".to_owned();
    let level = Level::Host(hostname.clone());
    let machine = MachineConfiguration {
        hostname: hostname.clone(),
        wanted: Limits { network_percent: Some(5), ..Limits::default() },
        from: [(Limit::NetworkPercent, level.clone())].into(),
        reported: Some(limits_report()),
        trouble: Some("refused".to_owned()),
    };
    let values = [(Limit::NetworkPercent, setting)].into();
    let levels = vec![LevelSettings { level, values }];
    let reply = GetSubConfigurationReply { levels, machine: Some(machine) };
    (GetSubConfigurationRequest { hostname: Some(hostname) }, reply)
}

pub fn clear_safety_shutoff() -> (ClearSafetyShutoffRequest, Done) {
    let (hostname, who, why) = ("web-1".to_owned(), "ann".to_owned(), "meant".to_owned());
    (ClearSafetyShutoffRequest { hostname, who, why }, Done {})
}
