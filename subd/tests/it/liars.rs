//! A dominator that lies: its plans are no plans, and nothing comes of them.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use api::subd::{Commit, CommitRequest, Prepare, UpdateOutcome};
use model::escape::ByteText;
use model::object::Algorithm;
use model::plan::{Action, Difference, Operation, Plan};
use model::tree::node::SYMLINK_MODE;
use model::tree::{Device, File, Leaf, Metadata, Node, Special, Symlink, Time, Xattrs};
use model::trigger::Triggers;

use crate::fixture::{Edit, Source, Sub, path, request};

fn directory() -> Node {
    Node::Directory(Metadata::new(0o755, 0, 0))
}

fn symlink(target: &Path) -> Node {
    let target = ByteText(target.to_str().unwrap().as_bytes().to_vec());
    let metadata = Metadata::new(SYMLINK_MODE, 0, 0);
    Node::Leaf(Leaf::Symlink(Symlink { metadata, target }))
}

fn link(target: &str) -> Node {
    Node::Leaf(Leaf::HardLink(path(target)))
}

/// A directory with this attribute.
fn with(name: &str, value: &[u8]) -> Node {
    let xattrs: Xattrs = [(name.as_bytes().to_vec(), value.to_vec())].into_iter().collect();
    Node::Directory(Metadata { xattrs, ..Metadata::new(0o755, 0, 0) })
}

fn fifo(nanoseconds: u32) -> Node {
    let mtime = Time { seconds: 0, nanoseconds };
    let metadata = Metadata::new(0o600, 0, 0);
    Node::Leaf(Leaf::Special(Special { metadata, mtime, device: Device::Fifo }))
}

fn plan(operations: Vec<(&str, Action)>) -> Plan {
    let operation = |(text, action)| {
        let reason = vec![Difference::Missing];
        Operation { path: path(text), action, reason }
    };
    Plan { operations: operations.into_iter().map(operation).collect(), blocked: Vec::new() }
}

/// Of a file: its inode, its mode, and its content if it is a regular one.
type Seen = (u64, u32, Option<Vec<u8>>);

/// What lies in each of `places`: inode, mode and content of files, by name.
fn seen(places: &[&Path]) -> Vec<BTreeMap<String, Seen>> {
    let of = |place: &&Path| {
        let entries = std::fs::read_dir(place).unwrap().map(|entry| entry.unwrap());
        let seen = entries.map(|entry| {
            let name = entry.file_name().into_string().unwrap();
            let metadata = entry.metadata().unwrap();
            let content = metadata.is_file().then(|| std::fs::read(entry.path()).unwrap());
            (name, (metadata.ino(), metadata.mode(), content))
        });
        seen.collect()
    };
    places.iter().map(of).collect()
}

/// How a staged update ends.
async fn committed(sub: &Sub, update_id: u64) -> String {
    match sub.client.call::<Commit>(&CommitRequest { update_id }).await {
        Err(error) => format!("{:?}", error.fault().unwrap().message),
        // A call that is repeated does nothing more.
        Ok(_) => format!("{:?}", sub.commit(update_id).await.outcome),
    }
}

// tidy: table
#[tokio::test(flavor = "multi_thread")]
async fn plans_that_are_none_change_nothing_here_or_elsewhere() {
    let (sub, source) = (Sub::start().await, Source::start().await);
    let outside = tempfile::tempdir().unwrap();
    std::fs::write(outside.path().join("victim"), "").unwrap();
    let (_, empty) = sub.tree().await;
    let first = Edit::of(&empty, &source)
        .directory("/d", 0o755)
        .file("/d/f", "1")
        .directory("/full", 0o755)
        .file("/full/f", "2")
        .done();
    assert_eq!(sub.converge(1, &source, &first).await.outcome, UpdateOutcome::Done);
    let (root, d, full) = (sub.at("/"), sub.at("/d"), sub.at("/full"));
    let places = [root.as_path(), &d, &full, outside.path()];
    let before = seen(&places);
    let out = || Action::Create(symlink(outside.path()));
    let create = Action::Create;
    let victim = outside.path().join("victim");
    let metadata = Metadata::new(0o644, 0, 0);
    let unfetched = Node::Leaf(Leaf::File(File {
        metadata,
        mtime: Time::default(),
        size_bytes: 1 << 60,
        object: Algorithm::Blake3.digest(b"never seen").into(),
    }));
    let replace = |node| Action::Replace { node, displaced: Vec::new() };
    let aside = |node| Action::Replace { node, displaced: vec![path("/full/f")] };
    let plans = [
        ("through a symlink", plan(vec![("/way", out()), ("/way/victim", create(directory()))])),
        (
            "through a swapped directory",
            plan(vec![
                ("/d", Action::Replace { node: symlink(outside.path()), displaced: vec![] }),
                ("/d/victim", Action::Remove),
            ]),
        ),
        ("the root", plan(vec![("/", replace(symlink(outside.path())))])),
        ("the root goes", plan(vec![("/", Action::Remove)])),
        ("twice", plan(vec![("/x", create(directory())), ("/x", out())])),
        ("child first", plan(vec![("/x/y", create(directory())), ("/x", create(directory()))])),
        ("no parent", plan(vec![("/x/y", create(directory()))])),
        ("below a file", plan(vec![("/d/f/x", create(directory()))])),
        ("over what is there", plan(vec![("/d", create(directory()))])),
        ("in place of nothing", plan(vec![("/x", replace(directory()))])),
        ("nothing goes", plan(vec![("/x", Action::Remove)])),
        ("not empty", plan(vec![("/full", Action::Remove)])),
        ("more than it says", plan(vec![("/full", replace(fifo(0)))])),
        ("another's", plan(vec![("/d", aside(fifo(0)))])),
        ("a link outside", plan(vec![("/x", create(link(victim.to_str().unwrap())))])),
        ("a link to a directory", plan(vec![("/x", create(link("/d")))])),
        ("a link to itself", plan(vec![("/x", create(link("/x")))])),
        ("never fetched", plan(vec![("/x", create(unfetched.clone()))])),
        ("time", plan(vec![("/x", create(fifo(2_000_000_000)))])),
        ("overlay", plan(vec![("/x", create(with("no.such.namespace", b"y")))])),
        ("a bad list", plan(vec![("/x", create(with("system.posix_acl_access", b"x")))])),
        ("subd's own", plan(vec![("/.subd/journal", create(fifo(0)))])),
        ("subd itself", plan(vec![("/.subd", Action::Remove)])),
        ("another kind", plan(vec![("/d/f", Action::Change(directory()))])),
    ];
    for (number, (name, plan)) in plans.into_iter().enumerate() {
        let id = number as u64 + 10;
        let (reply, _) = sub.tree().await;
        let result = sub.prepare(&request(id, &reply, &first, plan)).await;
        let outcome = match result {
            Err(error) => format!("{:?}", error.fault().unwrap().message),
            Ok(reply) => {
                let last = reply.last_update.filter(|last| last.update_id == id);
                match last.map(|last| last.outcome) {
                    Some(outcome) => format!("{outcome:?}"),
                    None => committed(&sub, id).await,
                }
            }
        };
        assert_eq!(seen(&places), before, "{name}: {outcome}");
    }
    // Its triggers become commands that root runs.
    let (reply, _) = sub.tree().await;
    let mut lie = request(9, &reply, &first, plan(vec![("/x", create(directory()))]));
    let json = r#"[{"MatchLines": ["/"], "Service": "ssh"}]"#;
    lie.triggers = Triggers::from_json(json).unwrap();
    for service in ["", "-h", "a b", "../a", "a;b", "$(a)"] {
        lie.triggers.0[0].service = service.to_owned();
        let error = sub.client.call::<Prepare>(&lie).await.unwrap_err();
        let message = &error.fault().unwrap().message;
        assert_eq!(*message, format!("trigger 1: `{service}` is no name of a service"));
    }
    source.stop().await;
    sub.stop().await;
}
