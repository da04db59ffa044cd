//! Samples of what a sub refuses, and of who gives it orders.

use api::Done;
use api::dominator::orders::GoOnRequest;
use api::dominator::settings::GetSubLimitsRequest;
use api::subd::{
    DirectoryBlock, GetDirectoryBlocksReply, GetDirectoryBlocksRequest, GetLimitsReply,
    GetRefusedChangesReply, HoldMachineRequest, LimitInForce, LimitReason, PreviewScanReply,
    PreviewScanRequest, SpeedSource, TakeOverReply, TakeOverRequest,
};
use model::escape::ByteText;
use model::object::Algorithm;
use model::plan::{RefusedChange, RefusedKind};
use model::tree::{Metadata, Node};

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
