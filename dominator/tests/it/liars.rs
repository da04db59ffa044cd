//! Machines that lie: their subs answer as subs do, and nothing of it is true.

use common::wire::Security;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::api::Done;
use common::api::dominator::{ListSubs, ListSubsRequest, Status};
use common::api::subd::{
    Activity, CacheReport, EncodedDirectory, Fetch, GetDirectories, GetDirectoriesReply, Poll,
    PollReply, Prepare, ScanReport, SetConfiguration, Space, TriggerFailure, Version,
};
use common::escape::ByteText;
use common::object::{Algorithm, ObjectId};
use common::scope::{ScanSettings, Scope};
use common::tree::{Child, Directory, Entry, Metadata, Name, Totals, Tree};
use common::wire::server::Router;
use common::wire::{Fault, FaultCode};
use tokio::io::AsyncWriteExt as _;

use crate::bad_neighbours::listen;
use crate::fake::{FakeSub, directories, file, start, tree};
use crate::stage::{Stage, record};

/// How long the liars go on in this test.
const SHOW: Duration = Duration::from_secs(2);

/// What a liar makes of the truth; the number counts its answers.
type Lie = fn(&mut PollReply, u64);

fn random_object(number: u64) -> ObjectId {
    Algorithm::Blake3.digest(&number.to_le_bytes())
}

fn truth(instance: u64, scope: Scope, tree: &Tree) -> PollReply {
    let version = Version { instance, generation: 1, status: 1 };
    PollReply {
        scan: Some(ScanReport::of(scope, tree)),
        cache: Some(CacheReport::Full(Vec::new())),
        last_image: Some("base".parse().unwrap()),
        ..PollReply::idle(version, scope)
    }
}

/// A sub that scans as it is told, gives directories of `tree` whatever it is asked for, and
/// accepts every order without doing anything.
fn liar(tree: &Tree, lie: Lie) -> Router {
    let known = Arc::new(directories(tree));
    let settings = Arc::new(Mutex::new(ScanSettings::default()));
    static INSTANCES: AtomicU64 = AtomicU64::new(1 << 32);
    let instance = INSTANCES.fetch_add(1, Ordering::Relaxed);
    let count = AtomicU64::new(0);
    let (read, tree, told) = (known, tree.clone(), Arc::clone(&settings));
    Router::new("subd", &Security::Insecure)
        .method::<Poll, _, _>(move |_, _| {
            let scope = Scope::of(&told.lock().unwrap(), &[]);
            let mut reply = truth(instance, scope, &tree);
            lie(&mut reply, count.fetch_add(1, Ordering::SeqCst));
            async { Ok(reply) }
        })
        .method::<SetConfiguration, _, _>(move |_, request| {
            *settings.lock().unwrap() = request.scan.unwrap();
            async { Ok(Done {}) }
        })
        .method::<GetDirectories, _, _>(move |_, request| {
            let asked = request.digests.iter().filter_map(|digest| read.get(digest));
            let mut bytes: Vec<&Vec<u8>> = asked.collect();
            if bytes.is_empty() {
                bytes.extend(read.values());
            }
            let encoded = bytes.into_iter().map(|bytes| EncodedDirectory(ByteText(bytes.clone())));
            let reply = GetDirectoriesReply { directories: encoded.collect(), absent: Vec::new() };
            async { Ok(reply) }
        })
        .method::<Fetch, _, _>(|_, _| async { Ok(Done {}) })
        .method::<Prepare, _, _>(|_, _| async { Ok(Done {}) })
}

/// Tells of news with every answer.
fn news(reply: &mut PollReply, number: u64) {
    reply.version.generation = number + 2;
    reply.version.status = number + 2;
}

const LIES: [(&str, Lie); 10] = [
    ("impostor", |reply, _| reply.identity.hostname = "good".to_owned()),
    ("reborn", |reply, number| reply.version.instance = number),
    ("backwards", |reply, number| {
        let back = u64::MAX - number;
        reply.version.generation = back;
        reply.version.status = back;
    }),
    ("other-tree", |reply, number| {
        news(reply, number);
        reply.scan.as_mut().unwrap().root = random_object(7);
    }),
    ("endless", |reply, number| {
        news(reply, number);
        reply.scan.as_mut().unwrap().root = random_object(number);
    }),
    ("huge", |reply, number| {
        news(reply, number);
        let totals = Totals { entries: u64::MAX, bytes: u64::MAX, ..Totals::default() };
        reply.scan.as_mut().unwrap().totals = totals;
        reply.space = Space { free_bytes: 0, free_inodes: 0 };
    }),
    ("keeper", |reply, number| {
        news(reply, number);
        let path = |number: u64| format!("/nowhere/{number}").parse().unwrap();
        reply.scan.as_mut().unwrap().kept_directories =
            (number..number + 5_000).map(path).collect();
    }),
    ("hoarder", |reply, number| {
        news(reply, number);
        let objects = (number * 10_000..(number + 1) * 10_000).map(random_object).collect();
        reply.cache = Some(match number {
            0 => CacheReport::Full(objects),
            _ => CacheReport::Changes { added: objects, removed: Vec::new() },
        });
    }),
    ("fickle", |reply, number| {
        news(reply, number);
        reply.scanned = number % 2 == 0;
        reply.cache = (number % 3 == 0).then(|| CacheReport::Full(Vec::new()));
        reply.scan = reply.scan.take().filter(|_| number % 5 == 0);
        reply.activity = match number % 4 {
            0 => Activity::Idle,
            1 => Activity::Prepared { update_id: number },
            2 => Activity::Updating { update_id: number },
            _ => Activity::Fetching { fetch_id: number, objects: u64::MAX, bytes: u64::MAX },
        };
    }),
    ("loud", |reply, number| {
        news(reply, number);
        reply.trigger_failures = vec![TriggerFailure {
            service: "\u{1b}[2J<script>".to_owned(),
            verb: "start".to_owned(),
            output: "x".repeat(1 << 20),
        }];
    }),
];

#[tokio::test(flavor = "multi_thread")]
async fn a_good_machine_converges_beside_liars_and_the_list_stays_short() {
    let mut stage = Stage::new("[]").await;
    let want = tree(&file("/one", "1"));
    stage.images.add("base", &want, Some(&[]));
    let mut guards = Vec::new();
    let mut machines = Vec::new();
    for (name, lie) in LIES {
        // The loud one has what its image has, so that its triggers are looked at.
        let has = if name == "loud" { want.clone() } else { tree(&file("/two", "2")) };
        let (address, guard) = start(liar(&has, lie)).await;
        guards.push(guard);
        machines.push(record(name, address.port()));
    }
    let shouting = Router::new("subd", &Security::Insecure).method::<Poll, _, _>(|_, _| async {
        Err(Fault::new(FaultCode::Internal, format!("\u{1b}[31m{}", "y".repeat(60_000))))
    });
    let (address, guard) = start(shouting).await;
    guards.push(guard);
    machines.push(record("shouting", address.port()));
    let slow = listen(|mut stream| async move {
        loop {
            if stream.write_all(&[0]).await.is_err() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
    machines.push(record("slow", slow));
    let good = FakeSub::new(tree(""));
    machines.push(stage.sub("good", &good).await);
    let machines: Vec<String> = machines
        .iter()
        .map(|record| format!("{{{record}, \"RequiredImage\": \"base\"}}"))
        .collect();
    stage.write_mdb(&format!("[{}]", machines.join(",")));
    stage.wait("good", Status::Synced, "base").await;

    let shown = Instant::now() + SHOW;
    let mut content = 3;
    while Instant::now() < shown {
        good.change(tree(&file("/one", &content.to_string())));
        content += 1;
        let changed = Instant::now();
        while good.model.lock().unwrap().tree != want {
            assert!(changed.elapsed() < Duration::from_secs(5), "the liars delay the good one");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        stage.wait("good", Status::Synced, "base").await;
    }
    let loud = stage.wait("loud", Status::TriggerFailed, "base").await;
    assert!(loud.detail.contains(" [2J<script> failed: xxx"), "{}", &loud.detail[..80]);
    stage.wait("shouting", Status::PollFailed, "base").await;
    stage.wait("impostor", Status::WrongMachine, "base").await;
    let subs = stage.client.call::<ListSubs>(&ListSubsRequest::default()).await.unwrap().subs;
    for sub in &subs {
        assert!(sub.detail.len() < 2_000, "{}: {} bytes", sub.hostname, sub.detail.len());
        assert!(!sub.detail.contains(char::is_control), "{}: {:?}", sub.hostname, sub.detail);
        assert!(sub.hostname == "good" || sub.status != Status::Synced, "{sub:?}");
        let (status, page) =
            stage.client.get(&format!("/sub?host={}", sub.hostname)).await.unwrap();
        assert_eq!(status, 200);
        assert!(!String::from_utf8_lossy(&page).contains("<script>"), "{}", sub.hostname);
    }
    assert!(stage.terminate().success());
}

/// Eight million entries in twenty-two directories: each holds the one below twice.
fn bomb() -> Tree {
    let mut below = Tree::empty(Algorithm::Blake3).root().clone();
    for _ in 0..22 {
        let twice = [b"a", b"b"].map(|name| Entry {
            name: Name::new(name).unwrap(),
            child: Child::Directory(Arc::clone(&below)),
        });
        let metadata = Metadata::new(0o755, 0, 0);
        let directory = Directory::new(Algorithm::Blake3, metadata, twice.to_vec()).unwrap();
        below = Arc::new(directory);
    }
    Tree::new(below)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_directory_bomb_does_not_go_off() {
    let mut stage = Stage::new("[]").await;
    stage.images.add("base", &tree(&file("/one", "1")), Some(&[]));
    let (address, _guard) = start(liar(&bomb(), |_, _| {})).await;
    let record = record("bomb", address.port());
    stage.write_mdb(&format!("[{{{record}, \"RequiredImage\": \"base\"}}]"));
    let bomb = stage.wait("bomb", Status::Blocked, "base").await;
    assert!(bomb.detail.contains("8388606 entries and its image 1"), "{}", bomb.detail);
    assert!(stage.terminate().success());
}
