//! Requests and replies of image servers that follow each other.

use api::Done;
use api::access::Owners;
use api::image_server::notes::ChangeTagsReply;
use api::image_server::private::*;
use api::image_server::replication::directories::*;
use api::image_server::replication::*;

use super::{blake3, change_tags, name, time};

fn server(number: u128) -> ServerId {
    ServerId::from(number)
}

fn cursor() -> Cursor {
    Cursor { instance: 1 << 60, sequence: 9 }
}

fn version() -> DirectoriesVersion {
    DirectoriesVersion { line: 1 << 61, changes: 7, id: 1 << 62 }
}

pub fn get_made_directories() -> (GetMadeDirectoriesRequest, GetMadeDirectoriesReply) {
    let request = GetMadeDirectoriesRequest { after: Some(name("base")) };
    let owners = Owners::new(["web"], ["alice"]);
    let directory = MadeDirectory { name: name("web"), owners, made_on: time() };
    let (version, directories) = (Some(version()), vec![directory]);
    (request, GetMadeDirectoriesReply { version, directories, more: true })
}

pub fn get_private_directories() -> (GetPrivateDirectoriesRequest, GetPrivateDirectoriesReply) {
    let request =
        GetPrivateDirectoriesRequest { below: Some(name("db")), after: Some(name("db/1")) };
    let machines = ["db*.example.org".to_owned()].into();
    let directory = PrivateDirectory { name: name("db/2"), is_private: true, machines };
    let (version, directories) = (Some(version()), vec![directory]);
    (request, GetPrivateDirectoriesReply { version, directories, more: true })
}

pub fn change_readers() -> (ChangeReadersRequest, ChangeReadersReply) {
    let (add, remove) = (["db1".to_owned()].into(), ["db9".to_owned()].into());
    let request = ChangeReadersRequest { name: name("db"), add, remove };
    let machines = ["db1".to_owned(), "db2".to_owned()].into();
    (request, ChangeReadersReply { machines, is_private: true })
}

pub fn get_image_updates() -> (GetImageUpdatesRequest, GetImageUpdatesReply) {
    let replica = ReplicaReport { server: server(1), port: 6971, is_level: true, images_behind: 2 };
    let position = ReplicationPosition::After { instance: 1 << 60, name: name("base/1") };
    let directories = Some(version());
    let request = GetImageUpdatesRequest { position, wait_ms: 10_000, replica, directories };
    let changes = vec![
        ImageChange::Image {
            name: name("base/2"),
            digest: blake3(0xcc),
            notes: blake3(0xdd),
            expires_at: Some(time()),
            bytes: 1 << 40,
        },
        ImageChange::Ended {
            name: name("base/3"),
            how: ImageEnd::Expired,
            digest: Some(blake3(0xee)),
        },
    ];
    let reply = GetImageUpdatesReply {
        server: server(2),
        upstream: vec![server(3)],
        cursor: cursor(),
        is_list: true,
        changes,
        more: false,
        directories,
    };
    (request, reply)
}

pub fn forward() -> (ForwardRequest, ForwardReply) {
    let (tags, ChangeTagsReply { tags: after }) = change_tags();
    let request = ForwardRequest {
        path: vec![server(1)],
        origin: ForwardOrigin {
            address: "192.0.2.7:40000".to_owned(),
            user: Some("alice".to_owned()),
            groups: ["web".to_owned()].into(),
            has_power: false,
        },
        write: ForwardedWrite::Tags(tags),
    };
    let written = WriteReply::Tags(ChangeTagsReply { tags: after });
    (request, ForwardReply { written, cursor: cursor(), directories: Some(version()) })
}

pub fn get_replication() -> (Done, GetReplicationReply) {
    let trouble = TroubledImage {
        name: name("base/1"),
        trouble: ReplicationTrouble::Conflict,
        text: "another image".to_owned(),
    };
    let master = MasterState {
        address: "images1:6971".to_owned(),
        server: Some(server(2)),
        upstream: vec![server(3)],
        link: LinkState::Connected,
        since: time(),
        is_level: false,
        level_at: Some(time()),
        images_behind: 3,
        bytes_left: 1 << 40,
        last_error: Some((time(), "no route to host".to_owned())),
        include: vec!["base/*".to_owned()],
        exclude: vec!["*debug*".to_owned()],
        is_archive: true,
        troubles: vec![trouble],
        troubles_total: 1,
        only_here: vec![name("base/9")],
        only_here_total: 1,
        not_followed: 2,
        directories: Some(TroubledDirectories {
            trouble: DirectoriesTrouble::NewerHere,
            text: "older ones".to_owned(),
        }),
    };
    let replica = ReplicaState {
        server: server(4),
        address: "192.0.2.8:6971".to_owned(),
        seen: time(),
        is_connected: true,
        is_level: false,
        images_behind: 5,
    };
    let reply =
        GetReplicationReply { server: server(1), master: Some(master), replicas: vec![replica] };
    (Done {}, reply)
}

pub fn drop_copy() -> (DropCopyRequest, Done) {
    (DropCopyRequest { name: name("base/1"), force: true }, Done {})
}
