//! Tests that every method that owners may call refuses others.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use api::access::{Identity, Powers};
use api::image_server::directories::{
    ChangeOwnerRequest, MakeDirectoryRequest, RemoveDirectoryRequest,
};
use api::image_server::expiry::ChangeExpiryRequest;
use api::image_server::notes::{ChangeSignaturesRequest, ChangeTagsRequest, CopyImageRequest};
use api::image_server::replication::ServerId;
use api::image_server::{AddImageRequest, DeleteImageRequest};
use api::object_server::CheckObjectsRequest;
use model::image::{Content, FORMAT, Image, Notes};
use model::object::Algorithm;
use model::tree::{Time, Tree};
use model::trigger::Triggers;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::*;
use crate::core::collection::disk_pressure::Bounds;
use crate::interface::BackgroundTasks;
use crate::scrub::Scrub;
use crate::store::record::Record;

fn name(text: &str) -> ImageName {
    ImageName::new(text).unwrap()
}

fn content(text: &str) -> Content {
    Content {
        format: FORMAT,
        name: name(text),
        root: Tree::empty(Algorithm::Blake3).digest(),
        filter: None,
        triggers: Triggers::default(),
        computed: Vec::new(),
        health_check: None,
        signers: Vec::new(),
    }
}

/// A service of the images `web/1` to `web/9`, of user `alice` each, in a directory of group `web`.
fn service(data: &std::path::Path) -> Service {
    let store = Arc::new(Store::open(data).unwrap());
    let tree = Tree::empty(Algorithm::Blake3);
    let directory = tree.root().encode();
    let mut receiving = store.objects.receive(tree.digest(), directory.len() as u64).unwrap();
    receiving.write(&directory).unwrap();
    receiving.finish().unwrap().wait().unwrap();
    for number in 1..10 {
        let notes = Notes {
            owner_users: vec!["alice".to_owned()],
            expires_at: Some(Time { seconds: i64::MAX >> 8, nanoseconds: 0 }),
            ..Notes::default()
        };
        let image = Image { content: content(&format!("web/{number}")), notes };
        store.images.add(&Record { image, totals: tree.root().totals() }).unwrap();
    }
    let made = store.directories.change(|directories| {
        let owners = Owners::new(["web"], []);
        let now = Time { seconds: 1, nanoseconds: 0 };
        Ok(directories.make(&name("web"), vec![name("web")], Some(owners), now)?)
    });
    made.unwrap();
    let never = Bounds { above_percent: 100, down_to_percent: 100 };
    let background = BackgroundTasks {
        collector: Arc::new(Collector::new(Arc::clone(&store), never)),
        expiry: Arc::new(Expiry::new(Arc::clone(&store), Duration::from_secs(600), false)),
        replication: Arc::new(Replication::new(ServerId::from(1), None)),
        scrub: Arc::new(Scrub::default()),
    };
    let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
    Service::new(store, background, Arc::default(), Packers::new(0).unwrap(), tasks, stop)
}

/// One that has a name, and is in `groups`.
fn caller(user: &str, groups: &[&str], powers: &[&str]) -> Caller {
    let address = SocketAddr::from(([127, 0, 0, 1], 1));
    let identity = Identity {
        user: Some(user.to_owned()),
        groups: groups.iter().map(|group| (*group).to_owned()).collect(),
        powers: Powers::new(powers.iter().copied()),
        ..Identity::default()
    };
    Caller { address, local: address, unpacks: false, identity: Arc::new(identity), proof: None }
}

/// Calls each method with what nobody did before, and gives what was refused as denied.
async fn denied(service: &Service, caller: &Caller, number: u32) -> Vec<&'static str> {
    let image = name(&format!("web/{number}"));
    let new = |what: &str| name(&format!("web/{what}-{number}"));
    let own = || service.clone();
    let by = || caller.clone();
    let mut denied = Vec::new();
    let mut note = |what: &'static str, done: Result<(), Fault>| match done {
        Ok(()) => {}
        Err(fault) if fault.code == FaultCode::Denied => denied.push(what),
        Err(fault) => panic!("{what}: {fault:?}"),
    };
    let request =
        AddImageRequest { content: content(new("add").as_str()), notes: Notes::default() };
    note("add", own().add_image(by(), request).await.map(drop));
    let request =
        CopyImageRequest { from: name("web/9"), to: new("copy"), expires_in_seconds: None };
    note("copy", own().copy_image(by(), request).await.map(drop));
    let (set, remove) = ([("a".to_owned(), "b".to_owned())].into(), BTreeSet::new());
    let request = ChangeTagsRequest { name: image.clone(), set, remove };
    note("tag", own().change_tags(by(), request).await.map(drop));
    let (add, remove) = (Vec::new(), Vec::new());
    let request = ChangeSignaturesRequest { name: image.clone(), add, remove };
    note("sign", own().change_signatures(by(), request).await.map(drop));
    let request = ChangeExpiryRequest { name: image.clone(), expires_in_seconds: None };
    note("expiry", own().change_expiry(by(), request).await.map(drop));
    let request = DeleteImageRequest { name: image, force: false };
    note("delete", own().delete_image(by(), request).await.map(drop));
    let request = MakeDirectoryRequest { name: new("d"), parents: false, owners: None };
    let made = own().make_directory(by(), request).await.map(drop);
    let is_made = made.is_ok();
    note("mkdir", made);
    let directory = if is_made { new("d") } else { name("web") };
    let owners = Owners::new(["web"], []);
    let request = ChangeOwnerRequest { name: directory.clone(), owners };
    note("chown", own().change_owner(by(), request).await.map(drop));
    if is_made || !caller.identity.groups.contains("web") {
        let request = RemoveDirectoryRequest { name: directory };
        note("rmdir", own().remove_directory(by(), request).await.map(drop));
    }
    denied
}

#[tokio::test]
async fn each_method_is_judged_by_who_owns_what() {
    let data = tempfile::tempdir().unwrap();
    let service = service(data.path());
    let all = ["add", "copy", "tag", "sign", "expiry", "delete", "mkdir", "chown", "rmdir"];
    let of_directories = ["add", "copy", "mkdir", "chown", "rmdir"];
    let table = [
        (caller("eve", &["dba"], &[]), &all[..]),
        (caller("eve", &[], &["ObjectServer.*"]), &all),
        (caller("alice", &[], &[]), &of_directories),
        (caller("bob", &["web"], &[]), &[]),
        (caller("eve", &[], &["ImageServer.*"]), &[]),
        (caller("eve", &[], &["*.AddImage", "*.Change*", "*.*Directory"]), &["copy", "delete"]),
    ];
    for (number, (caller, want)) in (1..).zip(table) {
        assert_eq!(denied(&service, &caller, number).await, want, "{:?}", caller.identity);
    }
    let request = DeleteImageRequest { name: name("web/8"), force: false };
    let fault = service.delete_image(caller("eve", &["dba"], &[]), request).await.unwrap_err();
    assert_eq!(
        fault.message,
        "eve may not call ImageServer.DeleteImage for image web/8: it needs the power \
         ImageServer.DeleteImage, or an owner: user alice (image web/8), or group web \
         (directory web)"
    );
}

#[tokio::test]
async fn whoever_may_not_make_a_directory_does_not_learn_which_there_are() {
    let data = tempfile::tempdir().unwrap();
    let service = service(data.path());
    for text in ["web", "web/new", "web/not/there", "other"] {
        let request = MakeDirectoryRequest { name: name(text), parents: false, owners: None };
        let eve = caller("eve", &["dba"], &[]);
        let fault = service.clone().make_directory(eve, request).await.unwrap_err();
        assert_eq!(fault.code, FaultCode::Denied, "{text}: {fault:?}");
    }
}

#[tokio::test]
async fn directories_get_only_names_that_new_images_may_have() {
    let data = tempfile::tempdir().unwrap();
    let service = service(data.path());
    let before = service.store.directories.now().version();
    let cases = [
        ("-x", false, "`-x` begins with `-`, as options do: take another name"),
        (
            "new/a*/b",
            true,
            "`new/a*/b` contains '*', which shells or tables take apart: use letters, digits and \
             ._-+:@,%=",
        ),
    ];
    for (text, parents, why) in cases {
        let request = MakeDirectoryRequest { name: name(text), parents, owners: None };
        let admin = caller("ann", &[], &["*.*"]);
        let fault = service.clone().make_directory(admin, request).await.unwrap_err();
        let message = format!("no new image can be in a directory of this name: {why}");
        assert_eq!(fault, Fault::new(FaultCode::BadRequest, message));
    }
    assert_eq!(service.store.directories.now().version(), before);
}

#[tokio::test]
async fn only_who_may_upload_keeps_objects_from_collection() {
    let data = tempfile::tempdir().unwrap();
    let service = service(data.path());
    let ids: Vec<_> = (0..3_u8).map(|byte| Algorithm::Blake3.digest(&[byte])).collect();
    let request = CheckObjectsRequest { ids: ids.clone(), lease_seconds: 3_600 };
    let table = [
        (caller("web1", &[], &["ObjectServer.GetObjects"]), 0),
        (caller("ci", &[], &["ObjectServer.*"]), 3),
    ];
    for (caller, leases) in table {
        let reply = service.clone().check_objects(caller, request.clone()).await.unwrap();
        assert_eq!((reply.missing, service.store.leasing.count()), (ids.clone(), leases));
    }
}
