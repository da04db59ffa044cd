//! Samples of what a sub refuses, and of who gives it orders.

use api::Done;
use api::dominator::ListSubsRequest;
use api::dominator::kept_files::{
    CountKeptFilesReply, CountKeptFilesRequest, ImageOfMachine, KeptFiles, KeptNumber,
};
use api::dominator::orders::GoOnRequest;
use api::dominator::permits::{
    Fence, FenceMachineRequest, ListPermitsReply, PermitHolder, TaskPermits,
};
use api::dominator::resources::{GetResourcesReply as GetMachineResourcesReply, MachineResources};
use api::dominator::settings::GetSubLimitsRequest;
use api::subd::{
    CountOwnersReply, CountOwnersRequest, DirectoryBlock, GetDirectoryBlocksReply,
    GetDirectoryBlocksRequest, GetLimitsReply, GetRefusedChangesReply, GetTaskLogReply,
    GetTaskLogRequest, GetTaskStatesReply, GetTaskStatesRequest, GetTasksReply, Health,
    HoldMachineRequest, LimitInForce, LimitReason, OrderTaskRequest, PermitReport, PermitTaskReply,
    PermitTaskRequest, PreviewScanReply, PreviewScanRequest, ProvisioningReport, ProvisioningStage,
    ResourceReport, ResourceState, ResourcesReport, SetNotRestartedRequest, SpeedSource,
    TakeOverReply, TakeOverRequest, TaskOrder, TaskReport, TaskState, TaskStates, TasksVersion,
};
use model::accounts::AccountKind;
use model::boot_time::BootTime;
use model::escape::ByteText;
use model::image::ImageName;
use model::object::Algorithm;
use model::plan::{RefusedChange, RefusedKind};
use model::tree::{Metadata, Node, Time};

pub fn hold_machine() -> (HoldMachineRequest, Done) {
    (HoldMachineRequest { dominator: "dom1-0a1b2c3d".to_owned(), start: 7 }, Done {})
}

pub fn take_over() -> (TakeOverRequest, TakeOverReply) {
    let name = |text: &str| Some(text.to_owned());
    (TakeOverRequest { dominator: name("dom1") }, TakeOverReply { former: name("dom2") })
}

pub fn go_on() -> (GoOnRequest, Done) {
    let (hostname, who) = ("web-1".to_owned(), "ann".to_owned());
    (GoOnRequest { hostname, why: "works".to_owned(), who }, Done {})
}

pub fn fence_machine() -> (FenceMachineRequest, Done) {
    let (hostname, who) = ("web-1".to_owned(), "ann".to_owned());
    (FenceMachineRequest { hostname, is_off: true, why: "burnt".to_owned(), who }, Done {})
}

pub fn list_permits() -> ListPermitsReply {
    let holder =
        PermitHolder { hostname: "web-2".to_owned(), number: 3, ends_in_s: 4, is_live: true };
    ListPermitsReply {
        opens_in_s: 5,
        tasks: vec![TaskPermits { task: "ledger".to_owned(), holders: vec![holder] }],
        fenced: vec![Fence {
            hostname: "web-1".to_owned(),
            who: "ann".to_owned(),
            why: "burnt".to_owned(),
            since: Time { seconds: 6, nanoseconds: 7 },
        }],
    }
}

pub fn get_directory_blocks() -> (GetDirectoryBlocksRequest, GetDirectoryBlocksReply) {
    let digest = |text: &str| Algorithm::Blake3.digest(text.as_bytes());
    let request = GetDirectoryBlocksRequest {
        directory: digest("directory"),
        have: vec![digest("one"), digest("two")],
        position: 3,
    };
    let new = DirectoryBlock::New(ByteText(b"tree-1\0\xff".to_vec()));
    (
        request,
        GetDirectoryBlocksReply { blocks: vec![DirectoryBlock::Known(1), new], next: Some(7) },
    )
}

pub fn preview_scan() -> (PreviewScanRequest, PreviewScanReply) {
    let request = PreviewScanRequest { scan: super::configuration().scan, wait_ms: 900 };
    let reply = PreviewScanReply {
        scan: super::poll().1.scan,
        left_alone: get_refused_changes().1.changes,
        age_seconds: 7,
        hashed_bytes: 8_589_934_592,
    };
    (request, reply)
}

pub fn count_owners() -> (CountOwnersRequest, CountOwnersReply) {
    let request = CountOwnersRequest {
        scan: super::configuration().scan,
        users: vec![105, 65_534],
        groups: vec![110],
        time_ms: 900,
    };
    let unfinished = Some("an update began".to_owned());
    (request, CountOwnersReply { users: vec![1_204, 0], groups: vec![7], looked_at: 9, unfinished })
}

pub fn count_kept_files() -> (CountKeptFilesRequest, CountKeptFilesReply) {
    let hostname = "web-1".to_owned();
    let image = |name| ImageName::new(name).unwrap();
    let number = |kind, number, now: Option<&str>, files| {
        let (former, now) = ("postfix".to_owned(), now.map(str::to_owned));
        KeptNumber { kind, number, former, now, files }
    };
    let kept = KeptFiles {
        hostname: hostname.clone(),
        from: image("base/1"),
        image: image("base/2"),
        numbers: vec![
            number(AccountKind::User, 105, Some("redis"), Some(1_204)),
            number(AccountKind::Group, 110, None, None),
        ],
        unfinished: Some("an update began".to_owned()),
        unknown: Some("refused".to_owned()),
    };
    let machine = ImageOfMachine { hostname, image: image("base/2") };
    (
        CountKeptFilesRequest { machines: vec![machine] },
        CountKeptFilesReply { machines: vec![kept] },
    )
}

pub fn machine_resources() -> (ListSubsRequest, GetMachineResourcesReply) {
    let hosts = vec!["web*".to_owned()];
    let request = ListSubsRequest { hosts, ..ListSubsRequest::default() };
    let resource = ResourceReport {
        drift: None,
        id: "db".to_owned(),
        kind: "postgres".to_owned(),
        provisioner: "postgres".to_owned(),
        state: ResourceState::Failed,
        text: "the quota is used up".to_owned(),
        is_orphan: true,
        needs: vec!["net".to_owned()],
        outputs: r#"{"port":5432}"#.to_owned(),
    };
    let stage = ProvisioningStage::Waits { wave: 2, waves: 3 };
    let report = ResourcesReport {
        not_run: Some("its root is not /".to_owned()),
        provisioning: Some(ProvisioningReport {
            image: ImageName::new("base/2").unwrap(),
            image_digest: super::blake3(2),
            stage,
            step: 4,
        }),
        has_fleet: true,
        outputs: r#"{"foodb":{"port":5432}}"#.to_owned(),
        resources: vec![resource],
    };
    let machine = MachineResources {
        hostname: "web-1".to_owned(),
        report: Some(report),
        unknown: Some("refused".to_owned()),
    };
    (request, GetMachineResourcesReply { machines: vec![machine] })
}

pub fn limits_in_force() -> GetLimitsReply {
    let limit = |percent, reason, speed, speed_source| LimitInForce {
        limit: speed / 100 * u64::from(percent),
        percent,
        reason,
        speed,
        speed_source,
    };
    GetLimitsReply {
        cpu: limit(5, LimitReason::Default, 1_000_000, SpeedSource::Core),
        scan: limit(2, LimitReason::Ceiling, 1_000_000, SpeedSource::Configured),
        write: limit(100, LimitReason::Installation, 1_000_000, SpeedSource::Assumed),
        network: limit(50, LimitReason::Told, 0, SpeedSource::Unknown),
    }
}

pub fn get_sub_limits() -> (GetSubLimitsRequest, GetLimitsReply) {
    (GetSubLimitsRequest { hostname: "web-1".to_owned() }, limits_in_force())
}

pub fn get_refused_changes() -> ((), GetRefusedChangesReply) {
    let node = || Node::Directory(Metadata::new(0o755, 0, 0));
    let kinds = [
        RefusedKind::Any,
        RefusedKind::Become(Box::new(node())),
        RefusedKind::Removal,
        RefusedKind::Below,
        RefusedKind::Boundary,
        RefusedKind::LeftAlone,
    ];
    let refused = kinds.into_iter().enumerate().map(|(number, kind)| RefusedChange {
        path: format!("/srv/{number}").parse().expect("it is a path"),
        kind,
        why: "cannot rename: it is busy".to_owned(),
    });
    ((), GetRefusedChangesReply { changes: refused.collect() })
}

pub(super) fn task_report() -> TaskReport {
    TaskReport {
        name: "logd".to_owned(),
        state: TaskState::Waiting,
        detail: "logd-5-0 is starting; the task is wanted always".to_owned(),
        run: Some("logd-5-0".to_owned()),
        started: Some(Time { seconds: 7, nanoseconds: 8 }),
        starts: 9,
        last_end: Some("exited with 3".to_owned()),
        health: Some(Health::Failed("no".to_owned())),
        next_at: Some(Time { seconds: 10, nanoseconds: 11 }),
        again_at: Some(Time { seconds: 19, nanoseconds: 20 }),
        permit: Some(PermitReport {
            number: 12,
            until: Some(boot_time(13)),
            is_wanted: true,
            is_live: false,
        }),
        order_number: 16,
        not_restarted: Some("the environment web is not active".to_owned()),
    }
}

pub fn get_tasks() -> ((), GetTasksReply) {
    let (supervisor, not_run) = (Some("direct".to_owned()), Some("why".to_owned()));
    let tasks = vec![task_report()];
    ((), GetTasksReply { supervisor, not_run, tasks, said_at: boot_time(14) })
}

pub fn get_task_states() -> (GetTaskStatesRequest, GetTaskStatesReply) {
    let (not_run, image_health) = (Some("why".to_owned()), Some(Health::Failed("no".to_owned())));
    let states = TaskStates { not_run, tasks: vec![task_report()], image_health };
    let (version, said_at) = (TasksVersion(18), boot_time(14));
    let reply = GetTaskStatesReply { version, said_at, states: Some(states) };
    (GetTaskStatesRequest { have: Some(TasksVersion(17)) }, reply)
}

fn boot_time(ms: u64) -> BootTime {
    BootTime { boot_id: "5a".to_owned(), ms }
}

pub fn permit_task() -> (PermitTaskRequest, PermitTaskReply) {
    let request = PermitTaskRequest { task: "logd".to_owned(), number: 12, until: boot_time(300) };
    (request, PermitTaskReply { said_at: boot_time(15) })
}

pub fn set_not_restarted() -> SetNotRestartedRequest {
    let why = "the environment web is not active".to_owned();
    SetNotRestartedRequest { tasks: [("logd".to_owned(), why)].into() }
}

pub fn order_task() -> OrderTaskRequest {
    let (task, why) = ("logd".to_owned(), "disk swap".to_owned());
    OrderTaskRequest { task, order: TaskOrder::Hold, why, number: 6 }
}

pub fn get_task_log() -> (GetTaskLogRequest, GetTaskLogReply) {
    let request = GetTaskLogRequest { task: "logd".to_owned(), bytes: 300 };
    (request, GetTaskLogReply { text: ByteText(b"said\n".to_vec()) })
}
