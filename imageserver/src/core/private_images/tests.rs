//! The decisions about private images, as tables.

use api::access::{Owners, Powers};
use model::tree::Time;

use super::*;

fn name(text: &str) -> ImageName {
    ImageName::new(text).unwrap()
}

fn caller(user: &str, groups: &[&str], powers: &[&str]) -> Identity {
    Identity {
        user: (!user.is_empty()).then(|| user.to_owned()),
        groups: groups.iter().map(|&group| group.to_owned()).collect(),
        powers: Powers::new(powers.iter().copied()),
        ..Identity::default()
    }
}

/// `db` of group dba with the machines `db*`, and `db/prod` of user alice with `backup1`.
fn directories() -> Directories {
    let mut directories = Directories::default();
    let all = [
        ("db", Owners::new(["dba"], []), "db*"),
        ("db/prod", Owners::new([], ["alice"]), "backup1"),
        ("db/prod/x", Owners::default(), "none-of-them"),
    ];
    for (text, owners, machine) in all {
        let (name, machines) = (name(text), [machine.to_owned()].into());
        directories.make(&name, vec![name.clone()], Some(owners), Time::default()).unwrap();
        let lists = (machines, &BTreeSet::new());
        directories.change_readers(&name, lists, Time::default(), |_| true).unwrap();
    }
    directories
}

#[test]
fn who_may_read_what() {
    const POWER: &str = "ImageServer.GetPrivateDirectories";
    let zone = |method: &str, identity: Identity| Identity {
        zone: Some(Powers::new([method])),
        ..identity
    };
    let kind = |kind, identity: Identity| Identity { kind, ..identity };
    let directories = directories();
    #[rustfmt::skip]
    let table = [
        // the caller                                                     db     db/prod  db/prod/x
        (Identity::unrestricted(),                                            true,  true,    true),
        (caller("root", &[], &["*.*"]),                                   true,  true,    true),
        (caller("dominator", &[], &[POWER]),                              true,  true,    true),
        (caller("images2", &[], &["ImageServer.Get*"]),                   true,  true,    true),
        (caller("images2", &[], &["ImageServer.GetImage", "ObjectServer.*"]), false, false, false),
        (caller("eve", &["dba"], &[]),                                    true,  true,    true),
        (caller("alice", &[], &[]),                                       false, true,    true),
        (caller("eve", &["web"], &["ImageServer.DeleteImage"]),           false, false,   false),
        (caller("db1", &[], &["ObjectServer.GetObjects"]),                true,  true,    true),
        (caller("backup1", &[], &[]),                                     false, true,    true),
        (caller("backup11", &[], &[]),                                    false, false,   false),
        (caller("web1", &[], &["ObjectServer.GetObjects"]),               false, false,   false),
        (caller("", &["dba"], &[]),                                       false, false,   false),
        (kind(IdentityKind::Machine, caller("db1", &[], &[])),            true,  true,    true),
        (kind(IdentityKind::Machine, caller("alice", &["dba"], &[])),     false, false,   false),
        (kind(IdentityKind::User, caller("alice", &[], &[])),             false, true,    true),
        (kind(IdentityKind::User, caller("db1", &[], &[])),               false, false,   false),
        (kind(IdentityKind::Service, caller("db1", &["dba"], &[])),       false, false,   false),
        (kind(IdentityKind::Service, caller("dominator", &[], &[POWER])), true,  true,    true),
        (zone("ObjectServer.*", caller("db1", &[], &[])),                 false, false,   false),
        (zone("ObjectServer.*", caller("eve", &["dba"], &["*.*"])),       false, false,   false),
        (zone("*.*", caller("db1", &[], &[])),                            true,  true,    true),
    ];
    for (identity, db, prod, x) in table {
        let may = |text: &str| may_read(&directories, &identity, &name(text));
        assert_eq!([may("db"), may("db/prod"), may("db/prod/x")], [db, prod, x], "{identity:?}");
    }
}

#[test]
fn images_below_a_private_directory_are_private() {
    let private = PrivateDirectories::new([name("db"), name("web/secret")]);
    #[rustfmt::skip]
    let table = [
        ("db", None), ("db/1", Some("db")), ("db/prod/1", Some("db/prod")), ("db-2/1", None),
        ("web/1", None), ("web/secret", None), ("web/secret/1", Some("web/secret")), ("top", None),
    ];
    for (image, directory) in table {
        assert_eq!(private.directory_of(&name(image)), directory.map(name), "{image}");
    }
    let have = |text| private.have(&name(text));
    assert_eq!(
        ["db", "db/prod", "web", "web/secret", "db-2"].map(have),
        [true, true, false, true, false]
    );
}

#[test]
fn an_object_is_for_those_who_may_read_an_image_that_has_it() {
    let id = |byte: u8| Algorithm::Blake3.digest(&[byte]);
    let set = |bytes: &[u8]| {
        let mut set = ObjectSet::default();
        bytes.iter().for_each(|byte| set.insert_file(&id(*byte)));
        set
    };
    let mut index = ObjectIndex::default();
    index.add(None, set(&[1, 2]));
    index.add(Some(&name("db")), set(&[2, 3]));
    index.add(Some(&name("db/prod")), set(&[3, 4]));
    index.add(Some(&name("db")), set(&[5]));
    let readable = |directories: &[&str]| -> Vec<u8> {
        let objects = index.readable(|one| directories.contains(&one.as_str()));
        (0..=6).filter(|byte| objects.contain(&id(*byte))).collect()
    };
    assert_eq!(readable(&[]), [1, 2]);
    assert_eq!(readable(&["db"]), [1, 2, 3, 5]);
    assert_eq!(readable(&["db/prod"]), [1, 2, 3, 4]);
    assert_eq!(readable(&["db", "db/prod"]), [1, 2, 3, 4, 5]);
    assert_eq!(index.counts(), [2, 5]);
}

#[test]
fn objects_that_begin_alike_are_told_apart_and_sent_ones_are_of_one_caller_for_a_time() {
    let (mut one, mut two) = ([7; 32], [7; 32]);
    (one[15], two[15]) = (1, 2);
    let (one, two) = (ObjectId::Blake3(one), ObjectId::Blake3(two));
    let mut set = ObjectSet::default();
    set.insert_file(&one);
    assert_eq!((set.contains(&one), set.contains(&two)), (true, false));
    assert!(!set.has_directory(&one) && set.insert_directory(&one) && !set.insert_directory(&one));
    assert!(set.insert_directory(&two) && set.contains(&two));
    let mut sent = SentObjects::default();
    sent.note("alice", &one, 0, 10);
    let have = |sent: &SentObjects, user, id, now| sent.have(user, id, now);
    assert!(have(&sent, "alice", &one, 9));
    assert!(!have(&sent, "alice", &one, 10));
    assert!(!have(&sent, "bob", &one, 9) && !have(&sent, "alice", &two, 9));
    for number in 0..20_000_u32 {
        let id = Algorithm::Blake3.digest(&number.to_le_bytes());
        sent.note("alice", &id, u64::from(number), u64::from(number) + 5);
        assert!(sent.ends.len() <= 2 * PRUNE_MIN, "ended ones are not forgotten");
    }
}
