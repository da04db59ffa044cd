//! Tests of the journal on a real directory.

use model::path::TreePath;
use model::tree::{Metadata, Time};
use model::trigger::services::{ServiceCall, ServiceVerb};

use super::*;
use crate::root::Root;
use crate::tasks::staged::TaskChange;
use crate::update::step::{EntryMetadata, FormerEntry};
use crate::update::step_plan::SlotPath;

fn path(text: &str) -> TreePath {
    text.parse().unwrap()
}

/// One with a step of every kind.
fn journal() -> Journal {
    let mut metadata = Metadata::new(0o4755, 1, 2);
    metadata.xattrs = [(b"user.x".to_vec(), b"\0\xff".to_vec())].into_iter().collect();
    let former = EntryMetadata { metadata, mtime: Some(Time { seconds: -1, nanoseconds: 5 }) };
    let wanted = EntryMetadata { metadata: Metadata::new(0o644, 0, 0), mtime: None };
    let mtime = Time { seconds: 1, nanoseconds: 2 };
    let was = FormerEntry { inode: u64::MAX, directory: false, size_bytes: 3, mtime };
    let steps = vec![
        Step::Link {
            carrier: path("/a"),
            inode: 1,
            place: SlotPath { slot: 0, below: path("/x") },
        },
        Step::Appear { path: path("/d"), slot: 0, inode: 2 },
        Step::Exchange {
            path: path("/e\\n"),
            slot: 1,
            inode: 3,
            former: FormerEntry { directory: true, ..was },
            displaced: vec![path("/e\\n/f\\xff")],
        },
        Step::Vanish { path: path("/v"), slot: 2, former: was },
        Step::Change { path: path("/"), inode: 4, former, wanted },
    ];
    let call = |verb| ServiceCall { may_fail: true, ..ServiceCall::new("web", verb) };
    let calls = ServiceCalls {
        before: vec![call(ServiceVerb::Stop)],
        after: vec![call(ServiceVerb::Start)],
        own: true,
        reboot: true,
        high_impact: true,
    };
    let object = Algorithm::Sha512.digest(b"x");
    let head = JournalHead {
        update_id: u64::MAX,
        image: ImageName::new("web/1").unwrap(),
        image_digest: object,
        operations: 5,
        triggers: Triggers::from_json(r#"[{"MatchLines": ["/x"], "Service": "x"}]"#).unwrap(),
        health_check: Some(HealthCheck {
            command: vec!["true".to_owned()],
            within_seconds: 9,
            undo: true,
        }),
        calls,
        boot_id: "boot".to_owned(),
        managed: Attributes::default(),
        accepted: Some(AcceptedImage {
            image: ImageName::new("web/1").unwrap(),
            digest: object,
            signed: u64::MAX,
            parts: [object].into(),
            lines: <_>::default(),
            contents: Default::default(),
        }),
        resources: <_>::default(),
        tasks: TaskChange { stop: ["logd".to_owned()].into(), ..TaskChange::default() },
    };
    let taken = vec![TakenObject { object, place: SlotPath { slot: 0, below: TreePath::root() } }];
    let script = Script { update_id: head.update_id, managed: head.managed, steps };
    Journal { head, taken, script }
}

fn directory(place: &tempfile::TempDir) -> Directory {
    Root::open(place.path()).unwrap().directory(&TreePath::root()).unwrap()
}

#[test]
fn gives_back_what_was_written_until_it_is_removed() {
    let place = tempfile::tempdir().unwrap();
    let directory = directory(&place);
    assert!(read(&directory).unwrap().is_none());
    write(&directory, &Reserve::none(), &journal()).unwrap();
    assert_eq!(read(&directory).unwrap(), Some(journal()));
    let mut other = journal();
    other.script.steps.truncate(1);
    assert!(matches!(
        write(&directory, &Reserve::none(), &other).unwrap_err(),
        JournalError::Occupied
    ));
    assert_eq!(read(&directory).unwrap(), Some(journal()));
    remove(&directory).unwrap();
    write(&directory, &Reserve::none(), &other).unwrap();
    assert_eq!(read(&directory).unwrap(), Some(other));
    remove(&directory).unwrap();
    remove(&directory).unwrap();
    assert!(read(&directory).unwrap().is_none());
    assert_eq!(directory.names().unwrap(), Vec::<Box<[u8]>>::new());
}

#[test]
fn knows_each_damage() {
    let place = tempfile::tempdir().unwrap();
    let directory = directory(&place);
    write(&directory, &Reserve::none(), &journal()).unwrap();
    let file = place.path().join("update");
    let good = std::fs::read(&file).unwrap();
    let why = |bytes: &[u8]| {
        std::fs::write(&file, bytes).unwrap();
        read(&directory).unwrap_err().to_string()
    };
    for length in (0..good.len()).step_by(7).chain([good.len() - 1]) {
        assert!(why(&good[..length]).starts_with("the journal is damaged: "), "{length}");
    }
    for at in (0..good.len()).step_by(11) {
        let mut bad = good.clone();
        bad[at] ^= 1;
        let why = why(&bad);
        assert!(why.starts_with("the journal "), "{at}: {why}");
    }
    let twice = [&good[..], &good[..]].concat();
    assert_eq!(why(&twice), "the journal is damaged: something follows its end");
    let text = String::from_utf8(good).unwrap();
    let later = text.replacen(r#""format":1"#, r#""format":3"#, 1);
    assert_eq!(why(later.as_bytes()), "the journal has format 3, this release knows 2");
    let without = text.lines().filter(|line| !line.contains("vanish")).collect::<Vec<_>>();
    assert_eq!(
        why(format!("{}\n", without.join("\n")).as_bytes()),
        "the journal is damaged: its digest is another"
    );
    set_aside(&directory).unwrap();
    assert!(read(&directory).unwrap().is_none());
}
